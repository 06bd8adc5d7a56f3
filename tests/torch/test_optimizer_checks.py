"""What is said of an optimizer that does what a codec does already."""

import pytest
import torch

import hipress
import hipress.torch
from hipress import recommendations
from hipress.recommendations import ADAM, SGD, SGD_MOMENTUM, UNKNOWN, recommended, warned
from hipress.session.buckets import applies_decay, has_momentum
from hipress.session.planner import allowed
from hipress.torch.ddp import DDPAdapter
from hipress.torch.optimizer_checks import kind_of, warnings

URL = recommendations.url()
MILD = ("none", "fp16", "bf16", "int8", "int4")
OPTIMIZERS = {
    "not known": None,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
}


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
    assert f"use hipress.torch.{kind.__name__} in place of {kind.__name__} and write" in sentence
    assert recommended(ADAM).lines()[-1] in sentence and 'codec="int8"' in sentence


def test_weight_decay_after_the_codec():
    """Catches: decay that acts on what was accumulated, unsaid."""
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.05)
    (sentence,) = said(optimizer, [weight], "dgc(ratio=0.1)")
    assert "SGD has weight_decay=0.05" in sentence
    assert "dgc(weight_decay=0.05)" in sentence
    assert said(optimizer, [weight], "momentum(ef(onebit))") == []  # it has no such option


def test_weight_decay_twice():
    """Catches: decay by the codec and by the optimizer, unsaid."""
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.05)
    (sentence,) = said(optimizer, [weight], "dgc(ratio=0.1, weight_decay=0.05)")
    assert "decays weights and so does SGD (weight_decay=0.05)" in sentence
    quiet = torch.optim.SGD([weight], lr=0.1)
    assert said(quiet, [weight], "dgc(ratio=0.1, weight_decay=0.05)") == []


@pytest.mark.parametrize("codec", ["onebit", "topk(ratio=0.1)", "terngrad", *MILD])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: hipress.torch.AdamW(p, lr=0.1),
    ],
    ids=["SGD", "AdamW"],
)
def test_nothing_is_said_of_pairs_that_train_well(codec, make):
    """Catches: warnings that cry wolf."""
    weight = parameter()
    assert said(make([weight]), [weight], codec) == []


@pytest.mark.parametrize("codec", MILD)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_is_said_of_codecs_that_keep_sizes(codec, optimizer):
    """Catches: warnings that cry wolf, with or without an optimizer."""
    weight = parameter()
    made = OPTIMIZERS[optimizer]
    assert said(None if made is None else made([weight]), [weight], codec) == []


@pytest.mark.parametrize("codec", ["onebit", "topk(ratio=0.1)", "tbq", "blocktopk"])
def test_momentum_of_sgd_behind_error_feedback(codec):
    """Catches: SGD with momentum beside a codec that sends part of a gradient late, unsaid."""
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.8, nesterov=True)
    (sentence,) = said(optimizer, [weight], codec)
    assert sentence.startswith(f"{codec} sends part of each gradient late")
    figure = f"accuracy {warned(SGD_MOMENTUM).score:.2f} % with onebit on gradients"
    assert (figure in sentence) == ("onebit" in codec)  # of other codecs it says nothing
    instead = "dgc" if "topk" in codec else "momentum(ef(onebit), mu=0.8, nesterov=true)"
    write = f'codec="{instead}", optimizer=optimizer)'
    assert f"set momentum=0 in SGD and write sync = hipress.attach(model, {write}" in sentence
    assert sentence.endswith('or codec="int8" (' + URL + ").")
    assert said(torch.optim.SGD([weight], lr=0.1, momentum=0.9), [weight], "terngrad") == []


def test_an_optimizer_that_was_not_tried():
    """Catches: RMSprop, which divides by sizes without betas, unsaid."""
    weight = parameter()
    (sentence,) = said(torch.optim.RMSprop([weight], lr=0.1), [weight], "onebit")
    assert sentence == (
        "RMSprop has not been tried with onebit, which does not keep the sizes of elements: "
        f'codec="int8" works with every optimizer ({URL}).'
    )


class Lion(torch.optim.Optimizer):
    """Averages gradients, and takes nothing but signs of the average."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99)})

    def step(self):
        """Not called here."""


def test_an_optimizer_with_betas_that_divides_by_nothing():
    """Catches: a sentence that is true of Adam, said of Lion."""
    weight = parameter()
    (sentence,) = said(Lion([weight]), [weight], "onebit")
    assert sentence.startswith("Lion has not been tried with onebit")


def test_parameters_that_are_not_in_the_optimizer():
    """Catches: 'was checked', of an optimizer that trains another model."""
    weights = [parameter(), parameter()]
    optimizer = hipress.torch.AdamW(weights[:1], lr=0.1)
    (sentence,) = said(optimizer, weights, "onebit")
    assert sentence.startswith(
        "1 of 2 compressed parameters is not in the AdamW that was given, and what onebit "
        "sends depends on it: pass the one that trains them"
    )
    assert said(optimizer, weights, "int8") == []
    adapter = DDPAdapter(optimizer)
    adapter.specs([("a", weights[1])])
    assert adapter.about_optimizer() == (
        "optimizer AdamW has none of the model's parameters and was not checked"
    )


def test_momentum_that_cannot_be_exchanged():
    """Catches: an option of our AdamW that hides the warning."""
    weight = parameter()
    (sentence,) = said(hipress.torch.AdamW([weight], lr=0.1, amsgrad=True), [weight], "onebit")
    assert sentence.startswith("AdamW divides by the size of past gradients")
    assert "AdamW has amsgrad=True, with which momentum cannot be exchanged" in sentence
    assert "in place of AdamW" not in sentence


def test_our_own_adam_beside_momentum_is_not_replaced_by_itself():
    """Catches: the advice to use what is used."""
    weight = parameter()
    (sentence,) = said(hipress.torch.AdamW([weight], lr=0.1), [weight], "dgc(ratio=0.1)")
    assert "averages gradients again" in sentence and "in place of AdamW" not in sentence
    assert f"write {recommended(ADAM).lines()[-1]}" in sentence


def test_an_optimizer_that_is_not_known():
    """Catches: a codec that depends on the optimizer, unsaid; or said once per codec."""
    weight, other = parameter(), parameter()
    pairs = [(weight, hipress.codec("onebit")), (other, hipress.codec("momentum(ef(onebit))"))]
    assert warnings(None, [*pairs, (parameter(), hipress.codec("int8"))]) == [
        f"onebit and {pairs[1][1].name} depend on the optimizer, which could not be checked: pass "
        f'optimizer=optimizer, or codec="int8", which works with every optimizer ({URL}).'
    ]
    assert warnings(None, pairs[:1])[0].startswith("onebit depends on the optimizer, which")


@pytest.mark.parametrize(
    "make, kind",
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), SGD),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), SGD_MOMENTUM),
        (lambda p: torch.optim.AdamW(p, lr=0.1), UNKNOWN),
        (lambda p: hipress.torch.AdamW(p, lr=0.1), ADAM),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), UNKNOWN),
        (
            lambda p: torch.optim.SGD(
                [{"params": p}, {"params": [parameter()], "momentum": 0.9}], lr=0.1
            ),
            UNKNOWN,
        ),
    ],
)
def test_what_auto_may_use_follows_the_kind(make, kind):
    """Catches: onebit chosen by auto before an optimizer that it does not suit."""
    assert kind_of(make([parameter()])) == kind
    assert ("onebit" in allowed(None, None, kind)) == (kind in (SGD, ADAM))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_torchs_adam_beside_codecs_that_lose_sizes(kind):
    """Catches: a codec with which Adam learns little, unsaid; a warning of one that is safe."""
    weight = parameter()
    own = "Adam" if kind is torch.optim.Adam else "AdamW"
    for codec in ("onebit", "topk(ratio=0.1)", "terngrad"):
        (sentence,) = said(kind([weight], lr=0.1), [weight], codec)
        assert f"use hipress.torch.{own} in place of {kind.__name__}" in sentence
        assert f"loss {warned(ADAM).score:.3f} with onebit on gradients" in sentence
        assert codec in sentence and "int8" in sentence and URL in sentence
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
