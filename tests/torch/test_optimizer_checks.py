"""What is said of an optimizer that does what a codec does already."""

import pytest
import torch

import hipress
import hipress.torch
from hipress.session.buckets import applies_decay, has_momentum
from hipress.torch.optimizer_checks import warnings


def parameter():
    return torch.nn.Parameter(torch.zeros(8, 8))


def said(optimizer, parameters, codec):
    made = hipress.codec(codec)
    return warnings(optimizer, [(p, made) for p in parameters])


@pytest.mark.parametrize(
    "codec, momentum, decay",
    [
        ("none", False, False),
        ("onebit", False, False),
        ("topk(ratio=0.1)", False, False),
        ("terngrad", False, False),
        ("dgc(ratio=0.1)", True, False),
        ("dgc(ratio=0.1, warmup=10)", True, False),
        ("dgc(ratio=0.1, weight_decay=0.1)", True, True),
        ("momentum(ef(onebit))", True, False),
    ],
)
def test_what_codecs_do_themselves(codec, momentum, decay):
    """Catches: a codec whose momentum goes by a name that is not looked for."""
    made = hipress.codec(codec)
    assert (has_momentum(made), applies_decay(made)) == (momentum, decay)


def test_momentum_that_counts_twice():
    """Catches: SGD with momentum beside dgc, unsaid."""
    weight = parameter()
    (sentence,) = said(torch.optim.SGD([weight], lr=0.1, momentum=0.9), [weight], "dgc(ratio=0.1)")
    assert sentence == (
        "dgc(ratio=0.1) sends momentum and SGD has momentum=0.9 on the same parameters, so it "
        "counts twice: set momentum=0 for them (exempt gradients keep theirs in a group of their "
        "own)."
    )


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_an_adaptive_optimizer_beside_momentum(kind):
    """Catches: Adam beside dgc, unsaid; or its decoupled decay taken for the other kind."""
    weight = parameter()
    (sentence,) = said(kind([weight], lr=0.1, weight_decay=0.1), [weight], "dgc(ratio=0.1)")
    assert f"{kind.__name__} averages gradients again (betas=(0.9, 0.999))" in sentence
    assert f"int8, or hipress.torch.{kind.__name__} with onebit or topk, or SGD" in sentence


def test_weight_decay_after_the_codec():
    """Catches: decay that acts on what was accumulated, unsaid."""
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.05)
    (sentence,) = said(optimizer, [weight], "dgc(ratio=0.1)")
    assert "SGD has weight_decay=0.05" in sentence
    assert "dgc(weight_decay=0.05)" in sentence


def test_weight_decay_twice():
    """Catches: decay by the codec and by the optimizer, unsaid."""
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.05)
    (sentence,) = said(optimizer, [weight], "dgc(ratio=0.1, weight_decay=0.05)")
    assert "decays weights and so does SGD (weight_decay=0.05)" in sentence
    quiet = torch.optim.SGD([weight], lr=0.1)
    assert said(quiet, [weight], "dgc(ratio=0.1, weight_decay=0.05)") == []


@pytest.mark.parametrize("codec", ["onebit", "int8", "topk(ratio=0.1)", "none"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: hipress.torch.AdamW(p, lr=0.1),
    ],
    ids=["SGD", "AdamW"],
)
def test_nothing_is_said_of_codecs_without_momentum(codec, make):
    """Catches: warnings that cry wolf."""
    weight = parameter()
    assert said(make([weight]), [weight], codec) == []


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_torchs_adam_beside_codecs_that_lose_sizes(kind):
    """Catches: a codec with which Adam learns little, unsaid; a warning of one that is safe."""
    weight = parameter()
    own = "Adam" if kind is torch.optim.Adam else "AdamW"
    for codec in ("onebit", "topk(ratio=0.1)", "terngrad"):
        (sentence,) = said(kind([weight], lr=0.1), [weight], codec)
        assert f"Use hipress.torch.{own} in place of {kind.__name__}" in sentence
        assert codec in sentence and "int8" in sentence
    for codec in ("int8", "bf16", "none"):
        assert said(kind([weight], lr=0.1), [weight], codec) == []


def test_only_groups_with_compressed_parameters_count():
    """Catches: a warning for the momentum of what is not compressed, which is right there."""
    weight, bias = parameter(), parameter()
    groups = [{"params": [weight], "momentum": 0.0}, {"params": [bias], "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert said(optimizer, [weight], "dgc(ratio=0.1)") == []
    assert len(said(optimizer, [bias], "dgc(ratio=0.1)")) == 1


def test_a_sentence_comes_once():
    """Catches: a line for every parameter and group."""
    weights = [parameter() for _ in range(4)]
    groups = [{"params": weights[:2]}, {"params": weights[2:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    assert len(said(optimizer, weights, "dgc(ratio=0.1)")) == 1
