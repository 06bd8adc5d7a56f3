"""What the probes say of links whose speed is known, and that they leave no trace."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.loopback import Hub, Loopback
from hipress.errors import PeerError
from hipress.probe import cache, codec_costs, links
from hipress.profile import Network
from tests.casync import harness
from tests.casync.harness import outcomes, run
from tests.grid import full

RATE, DELAY_S = 40e6, 0.01


class SlowHub(Hub):
    """Messages arrive one behind the other at each rank, at RATE, DELAY_S after they were sent."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.free_s = [0.0] * num_ranks

    def arrival(self, to: int, num_bytes: int) -> float:
        with self.lock:
            now = time.perf_counter()
            self.free_s[to] = max(self.free_s[to], now) + num_bytes / RATE
            return self.free_s[to] + DELAY_S


class SlowLoopback(Loopback):
    """The ranks of such a hub."""

    def send(self, data: torch.Tensor, to: int, tag: int) -> Any:
        assert isinstance(self.hub, SlowHub)
        if tag >= 2**30:  # of the probe alone: others only need to work
            self.hub.wire(self.rank, to, -tag).put(
                torch.tensor(self.hub.arrival(to, data.numel()), dtype=torch.float64)
            )
        return super().send(data, to, tag)

    def recv(self, data: torch.Tensor, of: int, tag: int) -> Any:
        pending = super().recv(data, of, tag)
        if tag < 2**30:
            return pending
        return _Late(pending, self.hub, of, self.rank, tag)


class _Late:
    def __init__(self, pending: Any, hub: Hub, of: int, rank: int, tag: int) -> None:
        self.pending, self.hub, self.key = pending, hub, (of, rank, -tag)

    def wait(self) -> None:
        self.pending.wait()
        left_s = float(self.hub.wire(*self.key).get()) - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


@pytest.mark.alone
def test_finds_the_rate_and_the_delay_of_links_and_tells_all_ranks_alike(monkeypatch):
    """Catches: bytes counted twice or once too few, a round trip taken for one way."""
    monkeypatch.setattr(harness, "Loopback", SlowLoopback)
    # A machine that stands still for a moment spoils one measurement, a wrong count all of them.
    for _ in range(5):
        found = run(3, lambda engine, rank: links.measure(engine, budget_s=0.5), hub=SlowHub(3))
        assert found[0] == found[1] == found[2]
        network = found[0]
        assert isinstance(network, Network) and network.hosts == (0, 0, 0)
        assert {(pair.sender, pair.receiver) for pair in network.pairs} == {
            (a, b) for a in range(3) for b in range(3) if a != b
        }
        rates = [pair.bytes_per_s for pair in network.pairs]
        if rates == pytest.approx([RATE] * 6, rel=0.4):
            break
    assert rates == pytest.approx([RATE] * 6, rel=0.4)
    assert network.bytes_per_s == pytest.approx(RATE, rel=0.3)
    assert network.latency_s == pytest.approx(DELAY_S, rel=0.5)
    assert network.all_reduce.at(2**20) > 0 and network.byte_work_s > 0
    assert network.local_bytes_per_s == network.bytes_per_s  # one host


def test_leaves_no_trace_in_the_engine():
    """Catches: statistics, recipes and states of the probe that a user's job would see."""

    def work(engine: Engine, rank: int) -> tuple[Any, ...]:
        before = (engine.stats.num_syncs, engine.stats.num_messages, engine.stats.sent_bytes)
        network = links.measure(engine, budget_s=0.3)
        after = (engine.stats.num_syncs, engine.stats.num_messages, engine.stats.sent_bytes)
        x = torch.full((5,), float(rank))
        engine.allreduce([x], codec="none", name="mine").wait()
        return before, after, list(engine._recipes), x.tolist(), network

    for before, after, recipes, x, network in run(2, work, hosts=["a", "b"]):
        assert before == after == (0, 0, 0)
        assert [key[0] for key in recipes] == [("mine",)]
        assert x == [0.5] * 5
        assert network.local_bytes_per_s is None and network.message_work_s > 0


@full
def test_ranks_of_several_hosts_have_a_rate_inside_them_too():
    found = run(4, lambda e, rank: links.measure(e, budget_s=0.3), hosts=["a", "a", "b", "b"])
    assert found[0].local_bytes_per_s is not None and found[0].hosts == (0, 0, 1, 1)


def test_a_rank_that_does_not_come_is_named():
    """Catches: a probe that hangs."""
    ended = threading.Event()

    def work(engine: Engine, rank: int) -> None:
        if rank == 0:
            try:
                links.measure(engine)
            finally:
                ended.set()
        else:
            ended.wait(40)

    found = outcomes(2, work, timeout_s=2.5)
    assert isinstance(found[0], PeerError) and 1 in found[0].ranks


def test_one_rank_alone_needs_no_network():
    network = run(1, lambda engine, rank: links.measure(engine))[0]
    assert network.num_ranks == 1 and network.all_reduce.at(10**9) == 0


def test_hosts_with_names_of_their_own_share_a_machine():
    """Catches: hosts of a lab taken for machines with all cores each."""
    machines = run(3, lambda engine, rank: links.machine(engine), hosts=["a", "b", "c"])
    assert machines[0] == machines[2]
    assert machines[0].num_ranks == 3 and machines[0].num_device_ranks == 1
    assert machines[0].device == "cpu" and machines[0].name


@pytest.mark.parametrize(
    ("text", "expected"), [("50000 100000\n", 0.5), ("max 100000\n", None), ("", None)]
)
def test_a_quota_of_the_container_counts(tmp_path, text, expected):
    path = tmp_path / "cpu.max"
    path.write_text(text)
    whole = links.cores(tmp_path / "none")
    assert links.cores(path) == (expected or whole) and whole >= 1


# --- codecs ---------------------------------------------------------------------------------------


def test_costs_hold_what_the_codec_says_of_itself(monkeypatch):
    """Catches: curves of the wrong verb's sizes, the way back of another number of workers."""
    monkeypatch.setattr(codec_costs, "SIZES", (2**12, 2**14))
    monkeypatch.setattr(codec_costs, "VERB_S", 0.01)
    met = []
    none, topk = codec_costs.measure(
        ["none", "topk(ratio=0.01)"], num_ranks=3, barrier=lambda: met.append(1)
    )
    import hipress

    codec = hipress.codec("topk(ratio=0.01)")
    assert none.wire.at(2**13) == pytest.approx(4 * 2**13, rel=0.02) and none.error == 0.0
    assert topk.wire.at(2**14) == pytest.approx(codec.wire_bytes(2**14), rel=0.05)
    assert topk.back_bytes(2**14, 3) == pytest.approx(
        codec.aggregator(3).wire_bytes(2**14), rel=0.05
    )
    assert 0.9 < topk.error < 1 and topk.bulk and not none.codes_local
    for costs in (none, topk):
        for curve in (costs.encode, costs.decode, costs.add, costs.back):
            assert 0 < curve.at(2**14) < 5
    assert len(met) == 2 * 2 * 5  # codecs, sizes, calls that are timed


def test_a_codec_with_a_warm_up_is_measured_as_it_is_behind_it():
    assert cache.last_phase("dgc(ratio=0.001, warmup=400)").wire_bytes(10**6) == 8096


def test_the_median_of_ranks_is_taken_point_by_point():
    def one(seconds: float) -> dict[str, Any]:
        return {verb: [[8, seconds], [16, 2 * seconds]] for verb in (*cache.VERBS, "error")}

    found = codec_costs._median([one(1.0), one(5.0), one(2.0)])
    assert found["add"] == [(8, 2.0), (16, 4.0)]


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """Costs without measuring: a list of what would have been, and the cache's file."""
    calls: list[str] = []
    lock = threading.Lock()

    def fake(name: str, *_: Any) -> dict[str, Any]:
        with lock:
            calls.append(name)
        points = {verb: [(8, 1e-6), (1024, 2e-6)] for verb in cache.VERBS}
        return points | {"error": [(8, 0.5)]}

    monkeypatch.setattr(codec_costs, "_measure_one", fake)
    monkeypatch.setenv("HIPRESS_CACHE_DIR", str(tmp_path))
    return calls, tmp_path / "codecs.json"


def costs(num_ranks: int = 2, names: tuple[str, ...] = ("onebit",), **more: Any) -> list[Any]:
    return run(
        num_ranks,
        lambda engine, rank: codec_costs.costs(engine, names, num_machine_ranks=2, **more),
    )


def test_what_is_known_is_not_measured_again(counted):
    calls, path = counted
    first = costs()
    assert calls == ["onebit"] * 2 and first[0] == first[1] and path.exists()
    assert costs() == first and len(calls) == 2
    assert costs(names=("onebit", "int8"))[0][0] == first[0][0]
    assert calls[2:] == ["int8"] * 2
    costs(fresh=True)
    assert calls[4:] == ["onebit"] * 2


def test_another_number_of_ranks_is_measured_again(counted):
    calls, _ = counted
    costs(2)
    costs(3)
    assert len(calls) == 2 + 3


@pytest.mark.parametrize("damage", ["{", "[]", "sizes", "numbers"])
def test_a_damaged_file_is_measured_again(counted, damage: str):
    calls, path = counted
    before = costs()
    held = json.loads(path.read_text())
    for points in held.values():
        if damage == "sizes":
            points["add"] = points["add"][:1]
        elif damage == "numbers":
            points["encode"][0][1] = "soon"
    Path(path).write_text(damage if len(damage) < 3 else json.dumps(held))
    assert costs() == before and len(calls) == 4
    assert costs() == before and len(calls) == 4  # and written anew


def test_an_error_while_measuring_reaches_the_caller(monkeypatch):
    def broken(*_: Any) -> dict[str, Any]:
        raise ValueError("no such kernel")

    monkeypatch.setattr(codec_costs, "_measure_one", broken)
    with pytest.raises(ValueError, match="no such kernel"):
        codec_costs.measure(["none"])
