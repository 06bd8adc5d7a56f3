"""`ef(..., residual=int8)` and `bf16`: residuals that are kept in fewer bits, rounded at random."""

from __future__ import annotations

import pickle

import pytest
import torch

import hipress
from hipress.codecs import residual
from hipress.codecs.program import ProgramCodec
from hipress.errors import UsageError
from tests.codecs.cases import gaussian

KINDS = ("int8", "bf16")
STEPS = {"int8": 1 / 64, "bf16": 1 / 128}
"""The largest error of one rounding: beside the largest of 256 elements, or beside the element."""
NAMES = {
    "ef(onebit, residual=int8)": ("ef(onebit, residual=int8)", "ef(onebit, residual=int8)"),
    'ef(topk(ratio=0.5), residual="bf16")': (
        "ef(topk(ratio=0.5), residual=bf16)",
        "ef(topk(ratio=0.5, exact=false, sample=0.01, workers=4), residual=bf16)",
    ),
    "ef(ef(terngrad), residual=int8, decay=0.5)": (
        "ef(terngrad, decay=0.5, residual=int8)",
        "ef(dithering(levels=4, ef=true), decay=0.5, residual=int8)",
    ),
    "momentum(ef(int8, residual=int8))": (
        "momentum(ef(int8, residual=int8), mu=0.9, nesterov=true)",
        "ef(int8, residual=int8)",
    ),
    "ef(randomk, residual=int8)": ("ef(randomk, residual=int8)", "randomk(ratio=0.01, ef=false)"),
    "ef(onebit, residual=float32)": ("onebit", "onebit"),
}
"""An expression, the name of its codec, and that of its way back for four workers."""


def made(expr: str) -> ProgramCodec:
    codec = hipress.codec(expr)
    assert isinstance(codec, ProgramCodec)
    return codec


def left(codec: ProgramCodec, state: dict[str, torch.Tensor], numel: int) -> torch.Tensor:
    """What a state holds, as float32."""
    [held] = codec.state_views("residual", state["residual"], numel)
    return residual.values(held, numel).float()


def bound(kind: str, exact: torch.Tensor) -> torch.Tensor:
    """The largest error of each element that is rounded once."""
    if kind == "bf16":
        return exact.abs() * STEPS[kind]
    blocks = exact.abs().split(256)
    return torch.cat([b.max().expand(len(b)) for b in blocks]) * STEPS[kind]


@pytest.mark.parametrize("expr", NAMES)
def test_names_say_it(expr: str) -> None:
    c, (name, back) = made(expr), NAMES[expr]
    assert c.name == name and hipress.codec(name).name == name
    assert c.aggregator(4).name == back and hipress.codec(back).name == back
    assert pickle.loads(pickle.dumps(c)).stored == c.stored
    assert made("ef(tbq(tau=0.5), residual=int8)").scaled(2.0).name == (
        "ef(tbq(tau=1.0, levels=1), residual=int8)"
    )


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (
            "ef(onebit, residual=fp8)",
            "ef: residual=fp8 must be float32 or bf16 or int8, e.g. int8.",
        ),
        (
            "ef(ef(onebit, residual=int8), decay=0.5)",
            "ef(onebit, residual=int8) has residual=int8 already; give the options of ef once.",
        ),
    ],
)
def test_refusals(expr: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        hipress.codec(expr)
    assert str(caught.value) == message


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.3), ("bf16", 0.51)])
def test_memory(kind: str, most: float) -> None:
    x = torch.empty(100_000)
    held = made(f"ef(onebit, residual={kind})").init(x)["residual"]
    assert held.nbytes <= most * x.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("ratio", [None, 2.0])
def test_what_is_lost(
    kind: str, backend: str, ratio: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # decoded + residual after = gradient + decay * lr_ratio * residual before, but for a rounding.
    monkeypatch.setenv("HIPRESS_BACKEND", backend)
    c, x = made(f"ef(topk(exact=true), decay=0.75, residual={kind})"), gaussian(5003)
    state = c.init(x)
    for _ in range(4):
        before = left(c, state, 5003)
        if ratio is not None:
            state["lr_ratio"] = torch.tensor(ratio)
        sent = c.decode(c.encode(x, state))
        exact = x + 0.75 * (ratio or 1.0) * before - sent
        assert (left(c, state, 5003) - exact).abs().le(bound(kind, exact)).all()
        assert before.equal(x) or not left(c, state, 5003).equal(exact)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_smaller_than_a_step_is_kept_in_the_mean(kind: str) -> None:
    """Catches: rounding to nearest, which would lose each of these gradients."""
    c = made(f"ef(tbq(tau=1000000.0), residual={kind})")
    x = torch.zeros(256 * 64)
    state = c.init(x, seed=4)
    x[::256] = 900.0  # elements of int8 have steps of 8 then, bf16 of 4 at 900
    c.encode(x, state)
    x[:] = 0.5
    for _ in range(400):
        c.encode(x, state)
    small = torch.ones(len(x), dtype=torch.bool)
    small[::256] = False
    found = left(c, state, len(x))
    assert found[small].mean() == pytest.approx(200, rel=0.01)
    assert found[~small].mean() == pytest.approx(1100, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_is_stored_again(kind: str) -> None:
    """Catches: residuals that drift where no gradient comes, or in a checkpoint."""
    keeper, x = residual.keeper(kind), gaussian(5003) * torch.logspace(-40, 37, 5003)
    state = keeper.init(x)
    once = keeper.decode(keeper.encode(x, state))
    for _ in range(3):
        assert torch.equal(keeper.decode(keeper.encode(once, state)), once)
    held = keeper.encode(once, state)[80:]
    held = residual.body(kind, held, 5003).clone()
    residual.scale(held, 0.5, 5003)
    normal = once.abs() > 1e-36
    assert torch.equal(residual.values(held, 5003).float()[normal], once[normal] / 2)
    held.zero_()
    assert not residual.values(held, 5003).any()
    assert torch.equal(residual.put(held, once, 5003) or residual.values(held, 5003).float(), once)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_is_not_finite_enters(kind: str) -> None:
    c = made(f"ef(topk(ratio=0.01), residual={kind})")
    x = gaussian(1000)
    state = c.init(x)
    c.encode(x, state)
    before = left(c, state, 1000)
    bad = x.clone()
    bad[7], bad[500] = torch.nan, torch.inf
    assert c.decode(c.encode(bad, state)).isnan().any()
    after = left(c, state, 1000)
    assert after.isfinite().all()
    kept = (after - before).abs() <= bound(kind, after)  # others of the block may need larger steps
    assert kept[7] and kept[500] and not kept.all()
    c, x = made(f"ef(tbq(tau=1.0), residual={kind})"), torch.full((300,), 3.4028234e38)
    state = c.init(x)
    c.encode(x, state)
    assert left(c, state, 300).isfinite().all() and left(c, state, 300).min() > 3.3e38


@pytest.mark.parametrize("expr", ["ef(onebit, residual=int8)", "ef(terngrad, residual=bf16)"])
def test_bulks_keep_what_gradients_keep_alone(expr: str) -> None:
    c = made(expr)
    bulk = c.bulk([100, 300, 1])
    flat = gaussian(bulk.numel)
    state = bulk.init(flat, seed=5)
    alone = [c.init(view, seed=5 + k) for k, view in enumerate(bulk.views(flat))]
    for _ in range(3):
        payload = bulk.encode(flat, state)
        for view, own in zip(bulk.views(flat), alone, strict=True):
            c.encode(view, own)
    assert payload.numel() == bulk.wire_bytes
    views = bulk.state_views("residual", state["residual"], 0)
    for view, own, numel in zip(views, alone, bulk.numels, strict=True):
        assert torch.equal(view, c.state_views("residual", own["residual"], numel)[0])
    assert state["step"] == 3 == alone[0]["step"]


def test_rounding_has_draws_of_its_own() -> None:
    """Catches: random numbers that decide both what is sent and how the rest is rounded."""
    c = made("ef(terngrad(clip=0), residual=bf16)")
    x = torch.full((100_000,), 1 / 3)
    x[0] = 1.0
    state = c.init(x)
    sent = c.decode(c.encode(x, state)) > 0
    up = left(c, state, len(x)) > torch.where(sent, x - 1.0, x)
    rates = [up[sent].float().mean(), up[~sent].float().mean()]
    exact = torch.stack([x[1] - 1.0, x[1]])
    below = (exact.view(torch.int32) & -65536).view(torch.float32)
    share = ((exact - below) / (below * (1 + 2**-7) - below)).abs()
    expected = [1 - share[0], share[1]]  # towards zero is up for the negative one
    assert rates == pytest.approx([float(e) for e in expected], abs=0.2)


def test_a_state_of_another_kind_is_refused() -> None:
    x = gaussian(100)
    with pytest.raises(UsageError, match="state 'residual' has 100 elements of torch.float32; the"):
        made("ef(onebit, residual=int8)").encode(
            x, made("ef(terngrad)").init(x) | {"residual": torch.zeros(100)}
        )
