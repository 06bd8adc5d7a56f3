"""`ef(..., decay=d)`: the residual is multiplied by d before the gradient is added."""

from __future__ import annotations

import pickle

import pytest
import torch

import hipress
from hipress.codecs.program import ProgramCodec
from tests.codecs.cases import gaussian

NAMES = {
    "ef(onebit, decay=0.95)": ("ef(onebit, decay=0.95)", "ef(onebit, decay=0.95)"),
    "ef(ef(terngrad), decay=0.5)": (
        "ef(terngrad, decay=0.5)",
        "ef(dithering(levels=4, ef=true), decay=0.5)",
    ),
    "ef(ef(int4, decay=0.5))": ("ef(int4, decay=0.5)", "ef(int4, decay=0.5)"),
    "ef(tbq(tau=0.25), decay=0.5)": (
        "ef(tbq(tau=0.25), decay=0.5)",
        "ef(tbq(tau=0.25, levels=4), decay=0.5)",
    ),
    "ef(randomk, decay=0.5)": ("ef(randomk, decay=0.5)", "randomk(ratio=0.01, ef=false)"),
    "momentum(ef(int8, decay=0.5))": (
        "momentum(ef(int8, decay=0.5), mu=0.9, nesterov=true)",
        "ef(int8, decay=0.5)",
    ),
    "ef(onebit, decay=1)": ("onebit", "onebit"),
}
"""An expression, the name of its codec, and that of its way back for four workers."""


@pytest.mark.parametrize("expr", NAMES)
def test_names_say_it(expr: str) -> None:
    c, (name, back) = hipress.codec(expr), NAMES[expr]
    assert c.name == name and hipress.codec(name).name == name
    assert c.aggregator(4).name == back and hipress.codec(back).name == back
    assert pickle.loads(pickle.dumps(c)).decay == c.decay  # type: ignore[attr-defined]


def test_it_follows_a_loss_scale() -> None:
    c = hipress.codec("ef(tbq(tau=0.25), decay=0.5)").scaled(4.0)
    assert isinstance(c, ProgramCodec) and c.decay == 0.5
    assert c.name == "ef(tbq(tau=1.0, levels=1), decay=0.5)"


def test_without_decay_kernels_are_the_same() -> None:
    one, same = hipress.codec("ef(onebit)"), hipress.codec("ef(onebit, decay=1.0)")
    other = hipress.codec("ef(onebit, decay=0.5)")
    assert isinstance(one, ProgramCodec) and isinstance(same, ProgramCodec)
    assert isinstance(other, ProgramCodec)
    texts = [c.bound.source("cpu", variant=c.variant) for c in (one, same, other)]
    assert texts[0] == texts[1] != texts[2]
    assert one.codec_hash == other.codec_hash  # frames do not depend on wrappers


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("ratio", [None, 2.0])
def test_what_is_kept(backend: str, ratio: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # decoded + residual after = gradient + decay * lr_ratio * residual before.
    monkeypatch.setenv("HIPRESS_BACKEND", backend)
    c, x = hipress.codec("ef(topk(exact=true), decay=0.75)"), gaussian(5003)
    state = c.init(x)
    for _ in range(4):
        before = state["residual"].clone()
        if ratio is not None:
            state["lr_ratio"] = torch.tensor(ratio)
        payload = c.encode(x, state)
        expected = x + 0.75 * (ratio or 1.0) * before
        assert torch.equal(c.decode(payload) + state["residual"], expected)


def test_a_residual_that_is_never_sent_fades() -> None:
    c, x = hipress.codec("ef(tbq(tau=100.0), decay=0.5)"), torch.ones(100)
    state = c.init(x)
    for _ in range(30):
        c.encode(x, state)
    assert torch.equal(state["residual"], torch.full((100,), 2.0))  # 1 / (1 - decay)


def test_bulks_decay() -> None:
    c = hipress.codec("ef(onebit, decay=0.5)")
    bulk = c.bulk([100, 300])
    flat = gaussian(bulk.numel)
    state, alone = bulk.init(flat), [c.init(view) for view in bulk.views(flat)]
    for _ in range(3):
        bulk.encode(flat, state)
        for view, own in zip(bulk.views(flat), alone, strict=True):
            c.encode(view, own)
    for view, own in zip(bulk.views(state["residual"]), alone, strict=True):
        assert torch.equal(view, own["residual"])
