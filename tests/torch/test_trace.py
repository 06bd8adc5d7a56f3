"""Recording steps of training: what is noted when, who writes, and what is refused."""

import gc
import json
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress.casync.ranks.agreement import Agreement
from hipress.errors import UsageError
from hipress.session import trace as tracing
from hipress.session.adapter import Adapter
from hipress.session.trace import Tracer, check_path
from hipress.torch.ddp import observe
from tests.casync.harness import run
from tests.traces import check_trace, summary


class Meeting:
    """Where ranks that are threads bring their bytes."""

    def __init__(self, num_ranks):
        self.barrier = threading.Barrier(num_ranks)
        self.given = [b""] * num_ranks
        self.store = HashStore()

    def gather(self, rank):
        def bring(data):
            assert isinstance(data, bytes)
            self.given[rank] = data
            self.barrier.wait(20)
            # As a gather to rank 0 may: others learn nothing.
            return list(self.given) if rank == 0 else []

        return bring

    def offset(self, rank):
        return lambda: Agreement(self.store, rank, len(self.given), 20).clock_offset()


def alone(module, work, **options):
    """What `work(tracer, engine)` gives with one rank."""
    meeting = Meeting(1)

    def go(engine, rank):
        made = {"gather": meeting.gather(0), "clock_offset": meeting.offset(0)} | options
        return work(Tracer(Model(module), engine, host="here", **made), engine)

    return run(1, go)[0]


class Model(Adapter):
    """Observes a model without DDP."""

    def __init__(self, module):
        super().__init__()
        self._module = weakref.ref(module)

    def observe(self, observer):
        return observe(self._module(), observer, {})


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def step(module, tracer, engine, *, buckets=2):
    """One step as DDP would do it: buckets as their gradients are there, then the end."""
    module(torch.ones(3, 8)).sum().backward()
    handles = []
    for index, layer in enumerate([module[2], module[0]][:buckets]):
        tracer.on_bucket(index, [f"{index}.weight", f"{index}.bias"])
        gradients = [parameter.grad for parameter in layer.parameters()]
        handles.append(engine.allreduce(gradients, codec="onebit", name=f"bucket{index}"))
    for handle in handles:
        handle.wait()
    tracer.on_step_end()


def load(path):
    trace = json.loads(path.read_text("utf-8"))
    assert check_trace(trace) == []
    return trace


def drawn(trace, *names, rank=0):
    """The spans and moments of a rank of these names, in order of time."""
    found = [
        one
        for one in trace["traceEvents"]
        if one["ph"] != "M" and one["pid"] == rank + 1 and (not names or one["name"] in names)
    ]
    return sorted(found, key=lambda one: one["ts"])


def order(trace, *names, rank=0):
    return [(one["name"], one["args"].get("step")) for one in drawn(trace, *names, rank=rank)]


# --- what is drawn --------------------------------------------------------------------------------


def test_steps_of_all_ranks_are_in_one_file(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hipress")
    path = tmp_path / "trace.json"
    meeting = Meeting(3)
    offsets = {}

    def offset(rank):
        def measure():
            offsets[rank] = meeting.offset(rank)()
            return offsets[rank]

        return measure

    def work(engine, rank):
        module = model()
        tracer = Tracer(Model(module), engine, meeting.gather(rank), offset(rank), f"host{rank}")
        step(module, tracer, engine)
        assert not tracer.active
        # Only rank 0 looks at the path: the others have no such folder.
        tracer.begin(path if rank == 0 else "/nowhere/trace.json", 2)
        for _ in range(2):
            assert tracer.active and not path.exists()
            step(module, tracer, engine)
        assert not tracer.active
        step(module, tracer, engine)
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        return hooks

    assert run(3, work) == [0, 0, 0]
    trace = load(path)
    assert trace["otherData"]["clocks"] == [
        {"rank": rank, "offset_us": offsets[rank][0] / 1000, "error_us": offsets[rank][1] / 1000}
        for rank in range(3)
    ]
    assert offsets[2][1] > 0
    names = [one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"]
    assert names == ["rank 0 (host0)", "rank 1 (host1)", "rank 2 (host2)"]
    for rank in range(3):
        phases, buckets = ("forward", "backward", "wait"), ("bucket 0 ready", "bucket 1 ready")
        assert order(trace, *phases, rank=rank) == [(p, k) for k in range(2) for p in phases]
        assert order(trace, *buckets, rank=rank) == [(b, None) for _ in range(2) for b in buckets]
        forward, backward, wait = drawn(trace, *phases, rank=rank)[:3]
        last = drawn(trace, *buckets, rank=rank)[1]
        begins, firsts = (drawn(trace, name, rank=rank) for name in ("backward", buckets[0]))
        for begin, first in zip(begins, firsts, strict=True):
            assert begin["ts"] < first["ts"]
        assert forward["ts"] + forward["dur"] <= backward["ts"]
        assert backward["ts"] + backward["dur"] == pytest.approx(last["ts"], abs=0.002)
        assert wait["ts"] == pytest.approx(last["ts"], abs=0.002)
        assert last["args"] == {"gradient": "1.weight, 1.bias"}
        # Every task of two steps, and none of the steps before and after.
        num_encodes = len(drawn(trace, "encode", rank=rank))
        assert num_encodes > 0 and num_encodes % 2 == 0
        first_ts = drawn(trace, "forward", rank=rank)[0]["ts"]
        end = drawn(trace, "wait", rank=rank)[-1]
        for one in drawn(trace, rank=rank):
            assert first_ts <= one["ts"] <= end["ts"] + end["dur"]
        rows = [
            one["args"]["name"]
            for one in trace["traceEvents"]
            if one["name"] == "thread_name" and one["pid"] == rank + 1
        ]
        assert rows[:2] == ["model", "buckets"] and rows[-2:] == ["send", "recv"]
        assert all(row.startswith("compute") for row in rows[2:-2])
    for one in summary(trace):
        assert {"forward", "backward", "wait", "encode", "recv"} <= one.verb_s.keys()
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hipress"]
    assert line == f"2 steps of 3 ranks are drawn in {path}: open it at https://ui.perfetto.dev."


def test_recording_can_begin_again(tmp_path):
    module = model()

    def work(tracer, engine):
        for k in range(2):
            tracer.begin(tmp_path / f"{k}.json", 1)
            step(module, tracer, engine)

    alone(module, work)
    first, second = load(tmp_path / "0.json"), load(tmp_path / "1.json")
    assert order(first, "forward") == order(second, "forward") == [("forward", 0)]
    assert len(drawn(first, "encode")) == len(drawn(second, "encode")) > 0


def test_a_file_that_is_there_is_replaced(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    module = model()

    def work(tracer, engine):
        tracer.begin(path, 1)
        assert path.read_text() == "old"
        step(module, tracer, engine)

    alone(module, work)
    assert drawn(load(path), "forward")


@dataclass
class Output:
    """As models of some libraries return."""

    loss: torch.Tensor
    extra: object = None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: (None, [y]),
        lambda y: {"y": {"z": y}, "n": 3},
        lambda y: Output(loss=torch.zeros(1), extra=(y,)),
        lambda y: (torch.ones(2, dtype=torch.int64), y.detach(), y),
    ],
)
def test_backward_begins_with_the_outputs_gradient(wrap, tmp_path):
    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            self.made = self.inner(x)
            self.done_ns = time.perf_counter_ns()
            return wrap(self.made)

    module = Wrapping()
    begun = []

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 1)
        module(torch.ones(1, 2))
        time.sleep(0.02)  # between forward and backward
        module.made.register_hook(lambda gradient: begun.append(time.perf_counter_ns()))
        module.made.sum().backward()
        time.sleep(0.01)
        tracer.on_bucket(0, ["w"])
        tracer.on_step_end()

    alone(module, work)
    forward, backward = drawn(load(tmp_path / "t.json"), "forward", "backward")
    assert backward["ts"] - (forward["ts"] + forward["dur"]) >= 20_000
    assert 10_000 <= backward["dur"] < 10_000 + 5_000_000


def test_without_a_tensor_in_the_output_backward_begins_with_the_first_bucket(tmp_path):
    class Hiding(nn.Linear):
        def forward(self, x):
            self.made = super().forward(x)
            return object()

    module = Hiding(2, 2)

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 1)
        module(torch.ones(1, 2))
        module.made.sum().backward()
        tracer.on_bucket(0, ["a"])
        time.sleep(0.005)
        tracer.on_bucket(1, ["b"])
        tracer.on_step_end()

    alone(module, work)
    trace = load(tmp_path / "t.json")
    (backward,), (ready,) = drawn(trace, "backward"), drawn(trace, "bucket 0 ready")
    assert backward["ts"] == ready["ts"] and backward["dur"] >= 5_000


def test_without_a_bucket_backward_lasts_until_the_end(tmp_path):
    module = model()

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 1)
        module(torch.ones(1, 8)).sum().backward()
        time.sleep(0.005)
        tracer.on_step_end()

    alone(module, work)
    trace = load(tmp_path / "t.json")
    assert drawn(trace, "backward")[0]["dur"] >= 5_000 and not drawn(trace, "wait")


def test_evaluation_starts_nothing_but_is_drawn_between_steps(tmp_path):
    module = model()

    def evaluate():
        with torch.no_grad():
            module(torch.ones(3, 8))

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 2)
        evaluate()
        step(module, tracer, engine)
        evaluate()
        step(module, tracer, engine)

    alone(module, work)
    trace = load(tmp_path / "t.json")
    assert order(trace, "forward") == [("forward", 0), ("forward", 1), ("forward", 1)]
    assert order(trace, "backward") == [("backward", 0), ("backward", 1)]


def test_accumulated_backwards_say_that_their_end_was_not_seen(tmp_path):
    module = model()

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 1)
        module(torch.ones(3, 8)).sum().backward()
        step(module, tracer, engine)

    alone(module, work)
    trace = load(tmp_path / "t.json")
    phases = ["forward", "backward", "forward", "backward"]
    assert [name for name, _ in order(trace, "forward", "backward")] == phases
    notes = [one["args"].get("note") for one in drawn(trace, "backward")]
    assert notes == ["drawn until the next forward: its end was not seen", None]


def test_a_forward_that_fails_leaves_no_span(tmp_path):
    module = model()

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 1)
        with pytest.raises(RuntimeError):
            module(torch.ones(3, 9))
        step(module, tracer, engine)

    alone(module, work)
    assert order(load(tmp_path / "t.json"), "forward") == [("forward", 0)]


def test_under_ddp(tmp_path):
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module = DistributedDataParallel(model(), bucket_cap_mb=0.0002)

        def work(tracer, engine):
            def hook(state, bucket):
                tracer.on_bucket(bucket.index(), ["x"])
                gradient = bucket.buffer()
                handle = engine.allreduce([gradient], name=f"b{bucket.index()}{len(gradient)}")
                return handle.future(gradient)

            module.register_comm_hook(None, hook)
            tracer.begin(tmp_path / "t.json", 3)
            for _ in range(3):
                module(torch.ones(2, 8)).sum().backward()
                tracer.on_step_end()

        alone(module, work)
    finally:
        dist.destroy_process_group()
    trace = load(tmp_path / "t.json")
    for name in ("forward", "backward", "wait"):
        assert order(trace, name) == [(name, 0), (name, 1), (name, 2)]
    for forward, backward in zip(drawn(trace, "forward"), drawn(trace, "backward"), strict=True):
        assert forward["ts"] + forward["dur"] <= backward["ts"]
    # DDP makes its buckets anew after the first step.
    assert len(drawn(trace, "bucket 0 ready")) == 3
    first, last = drawn(trace, "backward")[0], drawn(trace, "wait")[0]
    for one in drawn(trace, "bucket 0 ready")[:1]:
        assert first["ts"] <= one["ts"] <= last["ts"] + last["dur"]


@pytest.mark.parametrize(("start", "first"), [(0, 3), (5, 5)])
def test_nothing_is_recorded_before_kernels_are_compiled_and_auto_has_decided(
    tmp_path, start, first
):
    """Catches: a timeline of compilation, or of a plan that is only tried."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        module = DistributedDataParallel(model())
        sync = hipress.attach(module, "onebit", min_size=0)
        path = tmp_path / "t.json"
        sync.timeline(str(path), steps=2, start=start)
        for step in range(8):
            assert path.exists() == (step >= first + 2)
            module(torch.ones(3, 8)).sum().backward()
            assert (sync.engine.executor.events is not None) == (step == first)
        assert order(load(path), "forward") == [("forward", 0), ("forward", 1)]
        for bad in (-1, 1.5, True):
            with pytest.raises(UsageError, match=f"start is {bad}; give a number of steps"):
                sync.timeline(str(path), start=bad)
        module = DistributedDataParallel(model())
        sync = hipress.attach(module)
        sync.timeline(str(tmp_path / "auto.json"), steps=1)
        for phase in ("measure", "trial", "plain"):
            sync.auto.phase = phase
            for _ in range(3):
                module(torch.ones(3, 8)).sum().backward()
            assert (tmp_path / "auto.json").exists() == (phase == "plain")
    finally:
        dist.destroy_process_group()


# --- the end --------------------------------------------------------------------------------------


def test_finish_writes_what_there_is(tmp_path):
    module = model()

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 10)
        step(module, tracer, engine)
        tracer.finish()
        assert not tracer.active
        tracer.finish()  # nothing to do
        step(module, tracer, engine)

    alone(module, work)
    assert order(load(tmp_path / "t.json"), "forward") == [("forward", 0)]


def test_finish_before_any_step(tmp_path):
    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 10)
        tracer.finish()

    alone(model(), work)
    assert drawn(load(tmp_path / "t.json")) == []


def test_the_model_is_not_kept_alive(tmp_path):
    module = model()
    gone = weakref.ref(module)

    def work(tracer, engine):
        nonlocal module
        tracer.begin(tmp_path / "t.json", 1)
        step(module, tracer, engine)
        module = None
        gc.collect()
        assert gone() is None and not tracer.active

    meeting = Meeting(1)
    run(1, lambda e, r: work(Tracer(Model(module), e, meeting.gather(0), meeting.offset(0)), e))


def test_cancel_forgets(tmp_path):
    module = model()

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 1)
        module(torch.ones(1, 8)).sum().backward()
        tracer.cancel()
        tracer.cancel()
        assert not tracer.active and not module._forward_hooks and not module._forward_pre_hooks
        step(module, tracer, engine)

    alone(module, work)
    assert list(tmp_path.iterdir()) == []


def test_the_engine_is_told_to_stop(tmp_path, monkeypatch):
    module = model()
    told = []

    def work(tracer, engine):
        monkeypatch.setattr(engine, "stop_recording", lambda: told.append(len(engine.record())))
        step(module, tracer, engine)
        tracer.begin(tmp_path / "t.json", 1)
        assert engine.executor.events is None  # not before the first forward
        step(module, tracer, engine)

    alone(module, work)
    assert len(told) == 1 and told[0] > 0


def test_what_was_recorded_before_is_left_out(tmp_path):
    module = model()

    def work(tracer, engine):
        engine.record()
        step(module, tracer, engine)
        for k in range(2):
            tracer.begin(tmp_path / f"{k}.json", 1)
            step(module, tracer, engine)

    alone(module, work)
    first, second = (drawn(load(tmp_path / f"{k}.json"), "encode") for k in range(2))
    assert len(first) == len(second) > 0


def test_a_disk_that_fails_in_the_end_does_not_end_training(tmp_path, caplog, monkeypatch):
    module = model()

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 1)

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        step(module, tracer, engine)
        assert not tracer.active

    alone(module, work)
    assert list(tmp_path.iterdir()) == []
    (record,) = [record for record in caplog.records if record.name == "hipress"]
    assert record.levelname == "WARNING"
    path = tmp_path / "t.json"
    expected = f"the timeline could not be written to {path}: No space left on device."
    assert record.getMessage() == expected


def test_a_trace_that_cannot_be_drawn_does_not_end_training(tmp_path, caplog, monkeypatch):
    """Catches: an error on rank 0 alone, for which all other ranks would wait."""
    module = model()

    def broken(traces):
        raise ValueError("a clock ran backwards")

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 1)
        monkeypatch.setattr(tracing, "chrome_trace", broken)
        step(module, tracer, engine)
        assert not tracer.active

    alone(module, work)
    (record,) = [record for record in caplog.records if record.name == "hipress"]
    assert record.levelname == "WARNING"
    assert record.getMessage().endswith("t.json: ValueError: a clock ran backwards.")


# --- what is refused ------------------------------------------------------------------------------


def test_a_path_that_can_not_be_written_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=f"folder {tmp_path}/no does not exist; make it"):
        check_path(tmp_path / "no" / "t.json")
    with pytest.raises(UsageError, match=f"{tmp_path} is a folder; give the path of a file"):
        check_path(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="folder .*/file does not exist"):
        check_path(tmp_path / "file" / "t.json")
    with pytest.raises(UsageError, match=r"no file can be written in folder /proc \(.+\); give"):
        check_path("/proc/t.json")
    check_path(str(tmp_path / "t.json"))
    monkeypatch.chdir(tmp_path)
    check_path("t.json")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_bad_beginning_changes_nothing(tmp_path):
    module = model()

    def refuse():
        raise AssertionError("no collective before the path is known to be good")

    def work(tracer, engine):
        for path, steps, text in [
            (tmp_path / "no" / "t.json", 1, "does not exist"),
            (tmp_path / "t.json", 0, "steps is 0; give a whole number from 1 on"),
            (tmp_path / "t.json", 1.5, "steps is 1.5"),
            (tmp_path / "t.json", True, "steps is True"),
        ]:
            with pytest.raises(UsageError, match=text):
                tracer.begin(path, steps)
            assert not tracer.active and not module._forward_hooks

    alone(module, work, clock_offset=refuse)


def test_one_recording_at_a_time(tmp_path):
    module = model()

    def work(tracer, engine):
        tracer.begin(tmp_path / "t.json", 1)
        with pytest.raises(UsageError, match=f"recorded for {tmp_path}/t.json already; wait"):
            tracer.begin(tmp_path / "u.json", 1)
        step(module, tracer, engine)

    alone(module, work)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_path_is_that_of_the_beginning(tmp_path, monkeypatch):
    module = model()
    (tmp_path / "a").mkdir()

    def work(tracer, engine):
        monkeypatch.chdir(tmp_path / "a")
        tracer.begin("t.json", 1)
        monkeypatch.chdir(tmp_path)
        step(module, tracer, engine)

    alone(module, work)
    assert (tmp_path / "a" / "t.json").exists() and not (tmp_path / "t.json").exists()


def test_a_trace_that_is_no_json_leaves_nothing(tmp_path):
    with pytest.raises(ValueError):
        tracing.write(tmp_path / "t.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []
