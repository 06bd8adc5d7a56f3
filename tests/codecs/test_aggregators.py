"""The way back of every codec: what it becomes, how large it is, and that nothing is lost on it.

What each page says of the way back is written out in `back`, by hand, and then played: workers
encode, somebody averages and encodes once more, all decode.
"""

from __future__ import annotations

import pytest
import torch

import hipress
from hipress.codecs import Codec
from tests.codecs.cases import BACKENDS, CASES, SIZES, WARMUP, Case, gaussian, ulps
from tests.grid import thinned

NUM_WORKERS = 2
"""So that `dithering` on the way back of `terngrad` is a kernel that other tests have made."""
NUM_STEPS = 4


def ids(case: Case) -> str:
    return case.expr


every_case = pytest.mark.parametrize("case", CASES, ids=ids)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HIPRESS_BACKEND", request.param)
    monkeypatch.setenv("HIPRESS_THREADS", "1")
    return str(request.param)


def back(case: Case, num_workers: int) -> Case:
    """The codec of the way back, from the pages."""
    if case.name == "terngrad":
        plain, feedback = f"dithering(levels={min(127, num_workers)})", case.feedback
    elif case.name == "randomk":  # the mean lies on the same places: nothing is left to feed back
        plain, feedback = case.plain, False
    elif case.name == "tbq":  # a mean of N multiples of tau / levels is one of tau / (N levels)
        levels = min(127, num_workers * case.levels)
        plain, feedback = f"tbq(levels={levels}, ef=false)", case.feedback
    elif case.sparse:  # room for what all picked; dgc has applied its momentum already
        exact = "true" if case.exact else "false"
        plain = f"topk(ratio={case.ratio!r}, exact={exact}, workers={num_workers}, ef=false)"
        feedback = case.feedback or case.own_memory
    elif case.name == "blocktopk":  # as many bytes as the way there if union=false
        k = case.k if "union" in case.options else min(case.block, case.k * num_workers)
        options = f"k={k}, block={case.block}, bits={case.bits}, ef=false"
        plain, feedback = f"blocktopk({options})", case.feedback
    else:
        plain, feedback = case.plain, case.feedback
    return Case(expr=f"ef({plain})" if feedback else plain, plain=plain, feedback=feedback)


@every_case
@pytest.mark.parametrize("num_workers", [1, 2, 4, 7, 300])
def test_what_it_becomes(case: Case, num_workers: int) -> None:
    a, expected = hipress.codec(case.expr).aggregator(num_workers), back(case, num_workers)
    assert a.codec_hash == hipress.codec(expected.expr).codec_hash
    for n in (*SIZES, 1_000_003, 2**31 + 1):
        assert a.wire_bytes(n) == expected.wire_bytes(n)
    # Its own state: a residual where there is feedback, and never a momentum.
    state = a.init(torch.empty(9), seed=3, stream=4)
    random = {"seed", "stream", "step"} if expected.random else set()
    assert set(state) == expected.states | random
    assert not any(held.any() for held in (state[name] for name in expected.states))
    assert a.shares_stream == (case.name == "randomk")


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_what_the_phases_of_dgc_become(num_workers: int) -> None:
    warm = hipress.codec(WARMUP)
    ratios = [0.25, 0.25, 0.0625, 0.0625, 0.05, 0.05]
    for step, ratio in enumerate(ratios):
        a = warm.phase(step).aggregator(num_workers)
        expected = hipress.codec(f"topk(ratio={ratio!r}, workers={num_workers})")
        assert a.codec_hash == expected.codec_hash
        assert set(a.init(torch.empty(3))) == {"residual", "seed", "stream", "step"}
    assert warm.aggregator(num_workers).codec_hash == expected.codec_hash


class Exchange:
    """Workers and an aggregator, with all their state."""

    def __init__(self, case: Case, n: int, num_workers: int = NUM_WORKERS) -> None:
        self.worker: Codec = hipress.codec(case.expr)
        self.aggregator = self.worker.aggregator(num_workers)
        shared = self.worker.shares_stream
        like = torch.empty(n)
        streams = [0 if shared else rank for rank in range(num_workers + 1)]
        self.states = [self.worker.init(like, seed=9, stream=s) for s in streams[:-1]]
        self.back = self.aggregator.init(like, seed=9, stream=streams[-1])
        self.mean = torch.zeros(n)

    def step(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """One step; the mean that all ranks decode."""
        self.mean.zero_()
        for x, state in zip(gradients, self.states, strict=True):
            payload = self.worker.encode(x, state)
            self.worker.decode(payload, out=self.mean, add=True, alpha=1 / len(gradients))
        payload = self.aggregator.encode(self.mean, self.back)
        assert payload.shape == (self.aggregator.wire_bytes(self.mean.numel()),)
        return self.aggregator.decode(payload)


def gradients(n: int, step: int, num_workers: int = NUM_WORKERS) -> list[torch.Tensor]:
    return [gaussian(n, seed=10 * step + rank) for rank in range(num_workers)]


@every_case
@pytest.mark.parametrize("n", [0, 1, 7, 4097])
def test_nothing_is_lost_on_the_way_back(case: Case, n: int, backend: str) -> None:
    form, play = back(case, NUM_WORKERS), Exchange(case, n)
    went_in, came_out = (torch.zeros(n, dtype=torch.float64) for _ in range(2))
    for step in range(NUM_STEPS):
        before = play.back["residual"].clone() if form.feedback else torch.zeros(n)
        given = gradients(n, step)
        arrived = play.step(given)
        assert arrived.dtype == torch.float32 and arrived.shape == (n,)
        if form.feedback:  # promise 3, as an identity
            corrected = play.mean + case.decay * before
            assert torch.equal(play.back["residual"], corrected - arrived)
        elif case.name in ("none", "randomk"):
            assert torch.equal(arrived, play.mean)
        went_in += sum(x.double() for x in given) / NUM_WORKERS
        came_out += arrived
    # Seen from afar, over both ways: what has not arrived waits in somebody's residual.
    kept = case.feedback or (case.own_memory and case.options.get("momentum") == "0")
    lossless = form.feedback or case.name in ("none", "randomk")
    if case.mu is None and case.decay == 1 and kept and lossless:
        waiting = sum(state["residual"].double() for state in play.states) / NUM_WORKERS
        if form.feedback:
            waiting = waiting + play.back["residual"]
        # Ten float32 operations on numbers below 16 a step.
        assert torch.allclose(came_out + waiting, went_in, rtol=0, atol=10 * NUM_STEPS * 2.0**-20)


@every_case
def test_a_run_can_be_repeated(case: Case, backend: str) -> None:
    # The state of both sides is all there is: the same seed and stream give the same bits.
    runs = []
    for _ in range(2):
        play = Exchange(case, 1000)
        runs.append([play.step(gradients(1000, step)) for step in range(3)])
    for a, b in zip(*runs, strict=True):
        assert ulps(a, b) == 0


@pytest.mark.parametrize("case", [c for c in CASES if c.sparse], ids=ids)
@pytest.mark.parametrize("num_workers", [2, 4, 29])
def test_there_is_room_for_the_union(case: Case, num_workers: int, backend: str) -> None:
    # Up to 4096 nothing is left to chance. N ratio n is a whole number or not, and less than N.
    for n in (4000, 4095, 50, 7):
        _all_arrive(case, num_workers, n)


def _all_arrive(case: Case, num_workers: int, n: int) -> None:
    play = Exchange(case, n, num_workers)
    for step in range(3):
        given = gradients(n, step, num_workers)
        for rank, x in enumerate(given):  # each has its own places, as far apart as can be
            x[rank::num_workers] *= 100
        arrived = play.step(given)
        picked = int(play.mean.count_nonzero())
        assert picked > case.room(n) or picked == n
        assert picked <= back(case, num_workers).room(n)
        # All of them fit, so all of them travel and none has to wait.
        assert torch.equal(arrived, play.mean)


@pytest.mark.parametrize("expr", ["tbq", "tbq(ef=false)", "tbq(levels=4)"])
@pytest.mark.parametrize("num_workers", thinned([1, 2, 3, 4, 31], keep=(2, 31)))
def test_the_mean_of_tbq_comes_back_whole(expr: str, num_workers: int, backend: str) -> None:
    play = Exchange(next(c for c in CASES if c.expr == expr), 1000, num_workers)
    for step in range(3):
        arrived = play.step(gradients(1000, step, num_workers))
        # The mean is a sum of N shares in float32, each rounded once.
        assert torch.allclose(arrived, play.mean, rtol=0, atol=num_workers * 2.0**-24)
        assert (play.mean != 0).any()


def test_terngrad_of_one_scale_comes_back_whole(backend: str) -> None:
    # The mean of N messages of one s has 2 N + 1 levels, just those of the way back.
    case = next(c for c in CASES if c.expr == "terngrad(clip=0)")
    x, play = gaussian(1000), Exchange(case, 1000)
    for _ in range(3):
        arrived = play.step([x, x])
        assert torch.equal(arrived, play.mean)
        assert play.mean.unique().numel() == 5


@pytest.mark.parametrize("case", [c for c in CASES if c.mu is not None], ids=ids)
def test_momentum_is_not_applied_twice(case: Case, backend: str) -> None:
    inside = next(
        c
        for c in CASES
        if (c.plain, c.feedback, c.mu, c.decay) == (case.plain, case.feedback, None, case.decay)
    )
    a, b = (hipress.codec(c.expr).aggregator(NUM_WORKERS) for c in (case, inside))
    states = [codec.init(torch.empty(500), seed=1) for codec in (a, b)]
    for step in range(3):
        x = gaussian(500, seed=step)
        assert torch.equal(a.encode(x, states[0]), b.encode(x, states[1]))
