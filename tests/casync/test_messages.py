"""Messages that could be taken for each other: tags, stamps of frames, and calls under way."""

import contextlib
import gc
import random
import threading
import time
import weakref

import pytest
import torch

from hipress.casync.engine import engine as engine_module
from hipress.casync.engine import executors
from hipress.casync.engine.exchange import Exchange
from hipress.casync.engine.executors import Executor
from hipress.casync.engine.handle import Handle
from hipress.casync.engine.loopback import Loopback
from hipress.casync.engine.memory import Buffer
from hipress.errors import FrameError, PeerError
from tests.casync.harness import end_quickly, outcomes, run

COUNT = 64
SPREAD = [21 * k % COUNT for k in range(COUNT)]
"""An order of calls, the same on all ranks, far from that of the first calls: a recipe that is 8
younger than another comes 24 calls before it."""


class Jittery(Loopback):
    """A transport on which messages of different exchanges overtake each other."""

    def send(self, data, to, tag):
        if random.random() < 0.05:
            time.sleep(0.01)
        return super().send(data, to, tag)


def value_of(rank, k, step):
    return torch.full((16,), float(rank + 10 * k + 10_000 * step))


def mean_of(num_ranks, k, step):
    return (num_ranks - 1) / 2 + 10 * k + 10_000 * step


def async_calls(order_of, names):
    """Work that makes some calls one by one, and then all at once in another order."""

    def work(engine, rank):
        wrong = []
        values = [value_of(rank, k, 0) for k in range(len(names))]
        for name, value in zip(names, values, strict=True):
            engine.allreduce([value], name=name).wait()
        for step in range(1, 3):
            values = [value_of(rank, k, step) for k in range(len(names))]
            handles = [engine.allreduce([values[k]], name=names[k]) for k in order_of(rank)]
            for handle in handles:
                handle.wait()
            mean = [mean_of(3, k, step) for k in range(len(names))]
            wrong += [k for k, value in enumerate(values) if (value - mean[k]).abs().max() > 0.1]
        return wrong

    return work


def test_many_names_under_way_do_not_mix(monkeypatch):
    """Catches: exchanges of different names whose messages have the same tags."""
    monkeypatch.setenv("HIPRESS_THREADS", "3")
    monkeypatch.setattr("tests.casync.harness.Loopback", Jittery)
    names = [f"w{k}" for k in range(COUNT)]
    assert run(3, async_calls(lambda rank: SPREAD, names)) == [[]] * 3


def test_names_may_come_in_another_order_on_each_rank(monkeypatch):
    """Catches: callbacks of futures whose exchanges match in the order of calls alone."""
    monkeypatch.setattr("tests.casync.harness.Loopback", Jittery)
    names = [f"w{k}" for k in range(9)]
    orders = [random.Random(rank).sample(range(9), 9) for rank in range(3)]
    assert run(3, async_calls(orders.__getitem__, names)) == [[]] * 3


@pytest.mark.parametrize("names", [[f"w{k}" for k in range(12)], [None] * 12])
def test_no_two_exchanges_that_run_have_the_same_tags(names, monkeypatch):
    """Catches: numbers of recipes and uses that repeat while the first is still under way."""
    monkeypatch.setattr(executors, "NUM_RECIPES", 2)
    monkeypatch.setattr(executors, "NUM_USES", 2)
    monkeypatch.setattr("tests.casync.harness.Loopback", Jittery)
    running = []
    add = Executor._add

    def noted(self, exchange):
        add(self, exchange)
        running.append(len(self._running))

    monkeypatch.setattr(Executor, "_add", noted)
    assert run(3, async_calls(lambda rank: range(12), names)) == [[]] * 3
    assert 1 < max(running) <= 4


def test_a_call_that_waits_for_its_tags_ends_with_the_error(monkeypatch):
    """Catches: a caller that waits for ever when the exchange before it never ends."""
    monkeypatch.setattr(executors, "NUM_USES", 1)
    end_quickly(monkeypatch)
    ended = threading.Event()

    def work(engine, rank):
        engine.allreduce([torch.ones(3)]).wait()
        if rank == 1:
            assert ended.wait(40)
            return None
        engine.allreduce([torch.ones(3)])
        threading.Timer(0.3, engine.executor.fail, [PeerError("rank 1 is gone")]).start()
        try:
            with pytest.raises(PeerError, match="rank 1 is gone"):
                engine.allreduce([torch.ones(3)])
        finally:
            ended.set()
        return True

    assert run(2, work)[0] is True


# --- stamps ---------------------------------------------------------------------------------------


class Swapping(Loopback):
    """Rank 1 sends the contents of its first two messages under each other's tag."""

    held = None
    num_sent = 0

    def send(self, data, to, tag):
        if self.rank != 1:
            return super().send(data, to, tag)
        self.num_sent += 1
        if self.num_sent == 1:
            self.held = (data.clone(), tag)
            return super().send(data[:0], to, -1)
        if self.num_sent == 2:
            first, first_tag = self.held
            super().send(data, to, first_tag)
            return super().send(first, to, tag)
        return super().send(data, to, tag)


def test_swapped_messages_are_refused_with_both_names(monkeypatch):
    """Catches: a frame of one tensor that is merged into another of the same size."""
    monkeypatch.setattr("tests.casync.harness.Loopback", Swapping)
    end_quickly(monkeypatch)

    def work(engine, rank):
        values = [torch.full((8,), float(rank)) for _ in range(2)]
        first = engine.allreduce(values[:1], codec="onebit", name="first")
        with contextlib.suppress(PeerError):  # rank 0 may have refused the first message by now
            engine.allreduce(values[1:], codec="onebit", name="second")
        first.wait()

    refused, peer = outcomes(2, work)
    assert isinstance(refused, FrameError) and isinstance(peer, PeerError)
    assert "rank 0 received '" in str(refused) and "where it expects '" in str(refused)
    for text in ("'first'", "'second'", "step 0", "recipe 1", "recipe 2", "made by rank 1"):
        assert text in str(refused)


class Stale(Loopback):
    """Rank 1 sends its first frame once more in place of the second."""

    first = None

    def send(self, data, to, tag):
        if self.rank == 1:
            data = self.first = data.clone() if self.first is None else self.first
        return super().send(data, to, tag)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("strategy", ["ps", "ring", "allreduce"])
def test_a_frame_of_another_step_is_refused(strategy, ordered, monkeypatch):
    """Catches: a message of an earlier step that is taken for one of this step."""
    monkeypatch.setattr("tests.casync.harness.Loopback", Stale)
    end_quickly(monkeypatch)

    def work(engine, rank):
        for _ in range(2):
            value = torch.full((70_000,), float(rank))
            engine.allreduce([value], codec="onebit", strategy=strategy, name="w").wait()

    found = outcomes(2, work, ordered=ordered)
    texts = [str(one) for one in found if isinstance(one, FrameError)]
    assert len(texts) == 1
    assert "step 0, recipe 1" in texts[0] and "step 1, recipe 1" in texts[0]


# --- buffers --------------------------------------------------------------------------------------


def test_unnamed_calls_keep_few_bytes(monkeypatch):
    """Catches: buffers of every size that was ever given, until 32 sizes are there."""
    limit = 2**20
    monkeypatch.setattr(engine_module, "MAX_IDLE_BYTES", limit)
    buffers = []
    make = Buffer.__init__

    def noted(self, *args):
        make(self, *args)
        buffers.append(weakref.ref(self.data))

    monkeypatch.setattr(Buffer, "__init__", noted)

    def work(engine, rank):
        seen = []
        for k in range(12):
            value = torch.full((20_000 + k,), float(rank))
            engine.allreduce([value]).wait()
            assert value.eq(0.5).all()
            seen.append(engine.buffer_bytes)
        engine.allreduce([torch.ones(2**19)]).wait()  # larger than the limit by itself
        alone = engine.buffer_bytes
        engine.allreduce([torch.ones(10)]).wait()
        return seen, alone, engine.buffer_bytes

    gc.collect()
    gc.disable()
    try:
        found = run(2, work)
        held = sum(data.nbytes for one in buffers if (data := one()) is not None)
    finally:
        gc.enable()
    for seen, alone, after in found:
        assert 0 < max(seen) <= limit < alone
        assert 0 < after < 10_000
    assert held < 2 * limit  # of both ranks, and without a collector


def test_many_calls_of_one_size_at_once_keep_few_bytes(monkeypatch):
    """Catches: as many sets of buffers as were ever used at once, for ever."""
    limit = 2**20
    monkeypatch.setattr(engine_module, "MAX_IDLE_BYTES", limit)

    def work(engine, rank):
        values = [torch.full((20_000,), float(rank + k)) for k in range(20)]
        handles = [engine.allreduce([value]) for value in values]
        for handle in handles:
            handle.wait()
        assert all(value.eq(0.5 + k).all() for k, value in enumerate(values))
        return engine.buffer_bytes

    assert all(0 < kept <= limit for kept in run(2, work))


# --- memory of the caller -------------------------------------------------------------------------


class Stream:
    """What the engine asks of a stream of a GPU."""

    device = torch.device("cpu")

    def record_event(self):
        return Event()


class Event:
    def __init__(self, **_):
        pass

    def record(self, stream):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


def test_memory_that_a_stream_works_on_is_kept_for_it(monkeypatch):
    """Catches: copies of tensors with gaps that are freed, and used again, while a GPU reads them.

    A fake stream takes the place of a GPU's; the tensors are on the CPU.
    """
    stream, kept = Stream(), []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, of: kept.append((self.data_ptr(), of))
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(Handle, "_wait_on_stream", lambda self: None)
    held = []
    prepare = Exchange.prepare

    def noted(self, flats, *args, **options):
        held.extend((flat.data_ptr(), weakref.ref(flat)) for flat in flats)
        return prepare(self, flats, *args, **options)

    monkeypatch.setattr(Exchange, "prepare", noted)

    def work(engine, rank):
        submit = engine.executor.submit

        def submit_to_cpu(exchange, ready):
            gc.collect()
            assert all(one() is not None for _, one in held)  # until the exchange has ended
            submit(exchange)

        monkeypatch.setattr(engine.executor, "submit", submit_to_cpu)
        engine.executor.stream = stream
        whole, apart = torch.ones(8), torch.ones(4, 6).t()
        engine.allreduce([whole, apart]).wait()
        return whole.data_ptr(), apart.data_ptr()

    (given,) = run(1, work)
    assert {pointer for pointer, _ in held} - set(given)  # there was a copy
    assert {pointer for pointer, _ in kept} == set(given) | {pointer for pointer, _ in held}
    assert all(of is stream for _, of in kept)
