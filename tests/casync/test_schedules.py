"""Schedules of messages: their order, their credit, and what comes out whatever is delayed."""

import random
import threading
import time
from collections import defaultdict

import pytest
import torch

from hipress.casync.engine.engine import Options
from hipress.casync.engine.executors import NUM_USES
from hipress.casync.engine.loopback import Hub, Loopback
from hipress.casync.engine.transport import LinkError
from hipress.casync.graphs import schedules
from hipress.casync.graphs.schedules import SCHEDULES, Order
from hipress.casync.graphs.shape import TAG_BITS
from hipress.errors import PeerError
from tests.casync import harness
from tests.casync.harness import end_quickly, gradient, mean_of, outcomes, run
from tests.grid import full

SLICE_BYTES = 2**14
NUMELS = (40_000, 16_000, 9_000, 13_000)
NUM_RUNS, NUM_FULL_RUNS = 12, 500


class Recorder(Loopback):
    """Notes in which order messages leave and how many bytes are under way at once.

    A send ends when the gate of its rank is open, and after a while.
    """

    gates: dict[int, threading.Event]
    most_s = 0.0
    seed = 0

    def __init__(self, hub: Hub, rank: int, **options: bool) -> None:
        super().__init__(hub, rank, **options)
        self.sent: list[int] = []
        """The number of the recipe of each message."""
        self.most_bytes = self.num_bytes = self.largest = 0
        self.numbers = random.Random(1000 * self.seed + rank)
        self.counting = threading.Lock()

    def send(self, data, to, tag):
        with self.counting:
            self.sent.append((tag >> TAG_BITS) // NUM_USES)
            self.num_bytes += data.nbytes
            self.largest = max(self.largest, data.nbytes)
            self.most_bytes = max(self.most_bytes, self.num_bytes)
        if self.most_s:
            time.sleep(self.most_s * self.numbers.random() ** 2)
        super().send(data, to, tag)
        return Leaving(self, data.nbytes)


class Leaving:
    def __init__(self, transport, num_bytes):
        self.transport, self.num_bytes = transport, num_bytes

    def wait(self):
        assert self.transport.gates[self.transport.rank].wait(30)
        with self.transport.counting:
            self.transport.num_bytes -= self.num_bytes


@pytest.fixture
def recorder(monkeypatch):
    """Ranks send through this class; gates are open unless a test closes them."""
    gates = defaultdict(threading.Event)
    for rank in range(4):
        gates[rank].set()
    made = type("Recorder", (Recorder,), {"gates": gates})
    monkeypatch.setattr(harness, "Loopback", made)
    return made


def start(engine, values, orders, strategy="ps", step=0):
    return [
        engine.allreduce([value], name=f"{k}", strategy=strategy, step=step, order=order)
        for k, (value, order) in enumerate(zip(values, orders, strict=True))
    ]


@pytest.mark.parametrize("num_credits", [1, 3])
def test_the_most_urgent_slices_leave_first(recorder, num_credits):
    """Catches: a large gradient that started first and holds up what is needed sooner; more bytes
    under way than the credit; credit that is not given back."""
    orders = schedules.orders("priority", [3, 2, 1, 0])
    credit = num_credits * SLICE_BYTES
    for gate in (recorder.gates[0], recorder.gates[1]):
        gate.clear()

    def work(engine, rank):
        values = [gradient(numel, rank) for numel in NUMELS]
        handles = start(engine, values, orders)
        transport = engine.transport
        time.sleep(0.3)
        early = len(transport.sent)
        if rank == 0:  # rank 1 has sent what its credit allows, so few means are on their way back
            recorder.gates[0].set()
            time.sleep(0.5)
            recorder.gates[1].set()
        for handle in handles:
            handle.wait()
        numbers = [engine.recipe(f"{k}").number for k in range(len(NUMELS))]
        units = [numbers.index(number) for number in transport.sent]
        most = transport.most_bytes - max(credit, transport.largest)  # one send always may
        return early, units, most, values

    found = run(2, work, options=Options(slice_bytes=SLICE_BYTES, credit_bytes=credit))
    for early, units, above, values in found:
        assert 0 < early <= 2 * num_credits
        assert set(units[:early]) == {0}  # nothing else was there
        assert above <= 0
        for numel, value in zip(NUMELS, values, strict=True):
            exact = mean_of([gradient(numel, rank) for rank in range(2)])
            torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=2e-6)
    early, units, *_ = found[0]
    rest = units[early:]
    first = rest[: rest.index(0)]  # before the large one goes on
    assert first == sorted(first, reverse=True)
    assert set(first) == {1, 2, 3}


def delayed(recorder, num_runs):
    for seed in range(num_runs):
        recorder.seed, recorder.most_s = seed, 0.004
        num_ranks, schedule = 2 + seed % 3, SCHEDULES[seed // 3 % 3]
        strategy = ("ps", "ring")[seed % 2]
        needed = random.Random(seed).sample(range(len(NUMELS)), len(NUMELS))
        orders = schedules.orders(schedule, needed)

        def work(engine, rank, seed=seed, orders=orders, strategy=strategy):
            numbers = random.Random(77 * seed + rank)
            found = []
            for step in range(2):
                values = [gradient(numel, rank, step) for numel in NUMELS]
                handles = start(engine, values, orders, strategy, step)
                waiting = list(handles)
                numbers.shuffle(waiting)
                for handle in waiting:
                    time.sleep(0.002 * numbers.random())
                    handle.wait()
                found += values
            return found

        options = Options(slice_bytes=SLICE_BYTES, credit_bytes=(1 + seed % 4) * SLICE_BYTES)
        found = run(num_ranks, work, options=options)
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), seed
        for k, value in enumerate(found[0]):
            step, numel = k // len(NUMELS), NUMELS[k % len(NUMELS)]
            exact = mean_of([gradient(numel, rank, step) for rank in range(num_ranks)])
            torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("num_runs", [NUM_RUNS, pytest.param(NUM_FULL_RUNS, marks=full)])
def test_no_delay_changes_a_mean(recorder, num_runs):
    """Catches: ranks whose credit is used up by different gradients and wait for each other."""
    delayed(recorder, num_runs)


class Broken(Loopback):
    """The first message of rank 1 finds that its connection is closed."""

    def send(self, data, to, tag):
        if self.rank == 1:
            raise LinkError("Connection closed by peer")
        return super().send(data, to, tag)


@pytest.mark.parametrize("order", [None, Order(0, 0)])
def test_a_link_that_breaks_in_the_thread_of_the_caller_is_a_lost_peer(order, monkeypatch):
    """Catches: an error of torch that names no rank, in the rank that starts a message when
    another one has failed; an exchange that never ends."""
    monkeypatch.setattr(harness, "Loopback", Broken)
    end_quickly(monkeypatch)

    def work(engine, rank):
        handles = start(engine, [gradient(numel, rank) for numel in NUMELS[:1]], [order])
        for handle in handles:
            with pytest.raises(PeerError):
                handle.wait()
        with pytest.raises(PeerError, match="since an earlier error"):
            start(engine, [gradient(NUMELS[0], rank)], [order], step=1)
        return True

    options = Options(slice_bytes=SLICE_BYTES, credit_bytes=SLICE_BYTES)
    assert outcomes(2, work, options=options, timeout_s=5.0) == [True, True]
