"""What belongs to a codec: the codec of the way back, and the phases of one that changes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hipress.codecs import Codec, codec, table
from hipress.codecs.spec import Option, Spec, share
from hipress.codecs.table import TABLE, feedback, momentum
from hipress.errors import UsageError
from tests.codecs.cases import gaussian
from tests.codecs.generic import Feedback, Momentum
from tests.grid import thinned


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")
    monkeypatch.setenv("HIPRESS_THREADS", "1")


# --- the way back --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 4, 7])
@pytest.mark.parametrize("share_of_tau", [0.02, 0.3, 0.8, 0.99])
def test_tbq_keeps_up_with_workers_that_agree(share_of_tau: float, num_workers: int) -> None:
    tau, steps, n = 0.5, 300, 8
    c = codec(f"tbq(tau={tau})")
    a, g = c.aggregator(num_workers), torch.full((n,), share_of_tau * tau)
    states = [c.init(g) for _ in range(num_workers)]
    back, arrived = a.init(g), torch.zeros(n)
    for _ in range(steps):
        mean = torch.zeros(n)
        for state in states:
            c.decode(c.encode(g, state), out=mean, add=True, alpha=1 / num_workers)
            assert state["residual"].abs().max() < tau * 1.0001
        arrived += a.decode(a.encode(mean, back))
        assert back["residual"].abs().max() < 1e-6  # a mean of N messages comes back whole
    # Less than tau waits at the workers, and nothing at the aggregator.
    assert (arrived - steps * g).abs().max() < 1.001 * tau


@pytest.mark.parametrize("num_workers", [130, 500])
def test_tbq_of_many_workers_waits_for_less_than_a_level(num_workers: int) -> None:
    tau, n = 0.5, 200
    c = codec(f"tbq(tau={tau})")
    a = c.aggregator(num_workers)
    assert a.codec_hash == codec(f"tbq(tau={tau}, levels=127)").codec_hash
    states, back = [c.init(torch.empty(n)) for _ in range(num_workers)], a.init(torch.empty(n))
    sent, arrived = torch.zeros(n), torch.zeros(n)
    for step in range(5):
        mean = torch.zeros(n)
        for rank, state in enumerate(states):
            g = gaussian(n, seed=1000 * step + rank)
            c.decode(c.encode(g, state), out=mean, add=True, alpha=1 / num_workers)
        sent += mean
        arrived += a.decode(a.encode(mean, back))
        assert (arrived - sent).abs().max() <= tau / 127 / 2 * 1.001


@pytest.mark.parametrize("name", TABLE)
def test_a_codec_without_feedback_has_none_on_the_way_back(name: str) -> None:
    plain = codec(f"{name}(ef=false)")
    if name == "dgc":  # its residual is its own
        assert plain.aggregator(4).name == "topk(ratio=0.001, workers=4)"
        return
    for c in (plain, codec(f"momentum({name}(ef=false))")):
        assert "residual" not in c.aggregator(4).init(torch.empty(8))


@pytest.mark.parametrize("name", [n for n in TABLE if n not in ("dgc", "randomk")])
def test_a_codec_with_feedback_has_it_on_the_way_back(name: str) -> None:
    for expr in (f"{name}(ef=true)", f"ef({name}(ef=false))", f"momentum(ef({name}))"):
        assert "residual" in codec(expr).aggregator(4).init(torch.empty(8))


@pytest.mark.parametrize("wrap", [lambda c: c, feedback, Feedback, momentum, Momentum])
@pytest.mark.parametrize("num_workers", [0, -1, 2.5, 4.0, True, "4", None])
def test_a_number_of_workers_that_is_none(num_workers: Any, wrap: Any) -> None:
    with pytest.raises(UsageError) as error:
        wrap(codec("bf16")).aggregator(num_workers)
    assert str(error.value) == (
        f"aggregator(num_workers={num_workers!r}): the number of workers must be a whole number, "
        "at least 1, e.g. c.aggregator(4)."
    )


# --- phases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [1, 2, 3, 4, 5, 400])
def test_phases_of_dgc(warmup: int) -> None:
    c = codec(f"dgc(warmup={warmup})")
    starts = [start for start, _ in c.phases]
    assert starts[0] == 0 and starts[-1] == warmup and starts == sorted(set(starts))
    sizes = [phase.wire_bytes(10**6) for _, phase in c.phases]
    assert sizes[0] == 2_000_096 and sizes[-1] == 8_096 and sizes == sorted(set(sizes))[::-1]
    assert all(c.phase(s).phases == ((0, c.phase(s)),) for s in range(warmup + 1))


LATER = Spec(
    program="topk.pse",
    summary="half of the elements, then few",
    paper="none",
    options=(
        Option(name="ratio", default=0.1, rule="a share", allowed=share),
        Option(name="until", default=10, rule="a step", allowed=lambda v: isinstance(v, int)),
    ),
    params=lambda o: {"ratio": o["ratio"], "exact": True},
    phases=lambda o: (
        [(0, {"ratio": 0.5, "until": 0}), (o["until"], {"until": 0})] if o["until"] else []
    ),
)
"""A codec of another package whose rate changes by an option of its own."""


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Codec:
    known = table._spec
    monkeypatch.setattr(table, "_spec", lambda name: LATER if name == "later" else known(name))
    table._cached.cache_clear()
    table._program.cache_clear()
    return codec("later")


WRAPS = {
    "plain": (lambda c: c, lambda c: c),
    "ef": (feedback, Feedback),
    "momentum": (momentum, Momentum),
    "both": (lambda c: momentum(feedback(c)), lambda c: Momentum(Feedback(c))),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_wrappers_hand_on_phases(wrap: str, later: Codec) -> None:
    fused, generic = (around(later) for around in WRAPS[wrap])
    states = fused.init(torch.empty(100)), generic.init(torch.empty(100))
    assert [start for start, _ in fused.phases] == [start for start, _ in generic.phases] == [0, 10]
    for step in (0, 9, 10, 11):
        a, b = fused.phase(step), generic.phase(step)
        assert a.wire_bytes(100) == b.wire_bytes(100)
        assert a.wire_bytes(100) == later.phase(step).wire_bytes(100)
        assert set(a.init(torch.empty(3))) == set(b.init(torch.empty(3))) == set(states[0])
        x = gaussian(100, seed=step)
        assert torch.equal(a.encode(x, states[0]), b.encode(x, states[1]))
    assert fused.max_wire_bytes(100) == 80 + 16 + 208 + 208


# --- sums that overflow --------------------------------------------------------------------------

OVERFLOW = {
    "onebit": 3e36,
    "onebit(means=2)": 3e36,
    "minmax": 3e38,
    "ef(minmax)": 3e38,
    "dithering(norm=l2)": 1e18,
    "dithering(norm=l2, partition=natural)": 1e18,
    "ef(dithering(norm=l2))": 1e18,
}
"""Codecs whose scale overflows on finite elements of about this size."""


@pytest.mark.parametrize(
    ("expr", "backend"),
    thinned(
        itertools.product(OVERFLOW, ["reference", "cpu"]),
        lambda cell: cell[1] == "reference" or cell[0] in ("onebit", "ef(minmax)"),
    ),
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid:RuntimeWarning")
def test_a_scale_that_overflows_is_seen(
    expr: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", backend)
    c, usual = codec(expr), gaussian(4096).clamp(-1, 1)
    state = c.init(usual, seed=1)
    c.encode(usual, state)
    before = {name: held.clone() for name, held in state.items() if held.dim()}
    decoded = c.decode(c.encode(usual * OVERFLOW[expr], state))
    assert not decoded.isfinite().any()
    assert all(torch.equal(state[name], held) for name, held in before.items())
    y = c.decode(c.encode(usual, state))
    assert y.isfinite().all() and y.any()


@pytest.mark.parametrize("backend", thinned(["reference", "cpu"], keep=("reference",)))
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e17, 3e18, 1e25, 3e38])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_dgc_clips_large_gradients_to_the_norm(
    size: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", backend)
    x = gaussian(4096).sign() * size
    for clip in (1e-5, 0.01, 1e30):
        c = codec(f"dgc(ratio=1.0, sample=1.0, momentum=0.0, clip={clip})")
        y = c.decode(c.encode(x, c.init(x)))
        norm = min(clip, x.double().norm().item())
        assert y.double().norm().item() == pytest.approx(norm, rel=1e-4)
        assert torch.equal(y.sign(), x.sign())
