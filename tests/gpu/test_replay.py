"""Calls that come again with the same memory are started as one CUDA graph."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import hipress
from hipress.codecs import bulk, gpu, program, tensors
from hipress.compll.backends.gpu import replay, runtime
from hipress.errors import FrameError, UsageError
from tests.codecs.cases import gaussian
from tests.gpu.contract import on
from tests.gpu.fake_driver import FakeDriver, fake_driver
from tests.gpu.test_compiled import needs_compiler

pytestmark = needs_compiler
real_key = program.call_key
RANDOM, PLAIN = "minmax(bits=4)", "onebit(block=128)"
"""Codecs that no other test has loaded: one draws random numbers and keeps scratch memory."""


class FakeCuda:
    """The functions of CUDA's driver, which note their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.started: list[int] = []
        self.nodes: list[tuple[int, ...]] = []
        """Function, programs and arguments of each kernel in a graph."""
        self.made = self.mode = 0
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == self.fails:
                return 900
            if name == "cuGraphAddKernelNode":
                node = args[4]._obj
                values = [ctypes.c_uint64.from_address(node.params[k]).value for k in range(14)]
                self.nodes.append((node.function or 0, node.grid[0], *values))
                assert args[3].value == (len(self.nodes) > 1 and args[2][0] is not None)
                args[0]._obj.value = len(self.nodes)
            if name == "cuGraphInstantiateWithFlags":
                self.made += 1
                args[0]._obj.value = self.made
            if name == "cuGraphLaunch":
                self.started.append(args[0])
            if name == "cuThreadExchangeStreamCaptureMode":
                args[0]._obj.value, self.mode = self.mode, args[0]._obj.value
            if name in ("cuGraphInstantiateWithFlags", "cuGraphExecDestroy"):
                assert self.mode == replay.RELAXED  # else it ends a capture in another thread
            return 0

        setattr(self, name, call)
        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    driver = replay.Driver(made)
    monkeypatch.setattr(tensors, "gpu_takes", lambda x: True)
    monkeypatch.setattr(replay, "_driver", lambda: driver)
    monkeypatch.setattr(program, "call_key", call_key)
    monkeypatch.setattr(bulk, "call_key", call_key)
    monkeypatch.setattr(runtime, "current_stream_id", lambda device: made.stream)
    made.stream = 7
    return made


def call_key(device: torch.device, given: Any, state: Any, *more: Any) -> Any:
    """Takes memory of the CPU for that of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: CAPTURES[0])
        return real_key(torch.device("cuda", 0), given, state, *more)


CAPTURES = [False]


@pytest.fixture(scope="module")
def triton() -> Any:
    """One for all: a kernel stays with the driver that loaded it."""
    with fake_driver() as made:
        yield made


class Call:
    """One codec with its memory; called, it returns how many kernels and graphs were started."""

    def __init__(self, expr: str, n: int, triton: FakeDriver, cuda: FakeCuda) -> None:
        self.codec, self.x = on(hipress.codec(expr), "gpu"), gaussian(n)
        self.state = self.codec.init(self.x)
        self.frame = torch.zeros(self.codec.wire_bytes(n), dtype=torch.uint8)
        self.triton, self.cuda = triton, cuda

    def __call__(self) -> tuple[int, int]:
        self.triton.launches.clear()
        self.cuda.started.clear()
        self.codec.encode(self.x, self.state, out=self.frame)
        return len(self.triton.launches), len(self.cuda.started)


def test_the_third_call_with_the_same_memory_starts_a_graph(
    cuda: FakeCuda, triton: FakeDriver
) -> None:
    """Catches: no graph; a graph for other memory; a graph that is recorded for every call."""
    call = Call(RANDOM, 5003, triton, cuda)
    kernels, graphs = call()
    assert kernels > 3 and graphs == 0
    assert call() == (kernels, 0)
    # What is recorded is what was started, but for scratch memory.
    nodes = [(f, p, *a[:2], *a[4:13]) for f, p, *a in cuda.nodes]
    assert nodes == [
        (f, p, *a[:2], *a[4:13])
        for f, (_, p, *a) in zip(triton.functions[-kernels:], triton.launches, strict=True)
    ]
    assert [call(), call()] == [(0, 1), (0, 1)]
    frame = call.frame
    call.frame = torch.zeros_like(frame)
    assert call() == (kernels, 0)
    call.frame = frame
    assert call() == (0, 1)
    call.state["seed"] = torch.zeros_like(call.state["seed"])
    assert call() == (kernels, 0)
    other = Call(RANDOM, 5004, triton, cuda)
    assert other() == (kernels, 0)


def test_a_kernel_counts_the_step(cuda: FakeCuda, triton: FakeDriver) -> None:
    """Catches: a graph that draws the same numbers in each replay."""
    call = Call(RANDOM, 5003, triton, cuda)
    call()
    assert [name for name, *_ in triton.launches][-1] == "_encode_count"


@pytest.mark.parametrize("changed", ["stream", "backend", "name", "alpha", "add", "capture"])
def test_another_call_is_not_replayed(
    changed: str, cuda: FakeCuda, triton: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a key that leaves out what a call depends on."""
    call = Call(PLAIN, 5003, triton, cuda)
    out = gaussian(5003)

    def started(**options: Any) -> int:
        cuda.started.clear()
        if changed in ("alpha", "add"):
            call.codec.decode(call.frame, out=out, **options)
        else:
            call()
        return len(cuda.started)

    assert [started(), started(), started()] == [0, 0, 1]
    if changed == "stream":
        cuda.stream = 8
    elif changed == "backend":
        monkeypatch.setenv("HIPRESS_BACKEND", "auto")
    elif changed == "name":
        call.state = {"mine": gaussian(8), **call.state}
    elif changed == "capture":
        CAPTURES[0] = True
    try:
        assert started(**{"alpha": {"alpha": 0.5}, "add": {"add": True}}.get(changed, {})) == 0
    finally:
        CAPTURES[0] = False


def test_damage_is_told_before_a_replay(cuda: FakeCuda, triton: FakeDriver) -> None:
    """Catches: a replay that leaves out what the call before it has found."""
    call = Call(PLAIN, 5003, triton, cuda)
    call(), call(), call()
    gpu.error_word(torch.device("cpu"))[0] = 2
    with pytest.raises(FrameError, match="its header is not that of such a frame"):
        call()
    assert call() == (0, 1)


def test_bulks_are_replayed(cuda: FakeCuda, triton: FakeDriver) -> None:
    """Catches: launches of many gradients that are started one by one in every step."""
    c = on(hipress.codec(PLAIN), "gpu").bulk([300, 70])
    flat = gaussian(c.numel)
    held, frame = c.init(flat), torch.zeros(c.wire_bytes, dtype=torch.uint8)
    for _ in range(3):
        c.encode(flat, held, out=frame)
        c.decode(frame, out=flat, add=True, alpha=0.5)
    assert len(cuda.started) == 2 and cuda.made == 2


def test_the_result_has_one_dimension(cuda: FakeCuda, triton: FakeDriver) -> None:
    call = Call(PLAIN, 5003, triton, cuda)
    out = call.frame.view(1, -1)
    for _ in range(4):
        assert call.codec.encode(call.x, call.state, out=out).shape == call.frame.shape
    with pytest.raises(FrameError, match="2 dimensions"):
        call.codec.decode(out, out=gaussian(5003))


def test_no_memory_for_a_graph(
    cuda: FakeCuda, triton: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an error of a call whose work is done, which a caller would do again."""

    def none(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(replay, "_scratch", none)
    call = Call(RANDOM, 5003, triton, cuda)
    kernels, _ = call()
    assert [call(), call()] == [(kernels, 0)] * 2


def test_few_graphs_are_kept(
    cuda: FakeCuda, triton: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: graphs of memory that never comes again, kept for good; a graph for each call."""
    monkeypatch.setattr(replay, "MAX_CALLS", 2)
    call = Call(PLAIN, 5003, triton, cuda)
    frames = [torch.zeros_like(call.frame) for _ in range(3)]
    for _ in range(4):  # more calls than there is room for, again and again
        for call.frame in frames:
            call()
    assert cuda.made == 2 and "cuGraphExecDestroy" not in cuda.calls
    for _ in range(20):  # the first no longer comes
        for call.frame in frames[1:]:
            call()
    assert cuda.made == 3 and cuda.calls.count("cuGraphExecDestroy") == 1


@pytest.mark.parametrize("function", ["cuGraphAddKernelNode", "cuGraphInstantiateWithFlags"])
def test_without_graphs_kernels_are_started(
    function: str, cuda: FakeCuda, triton: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a job that ends because its driver makes no graphs."""
    cuda.fails = function
    call = Call(PLAIN, 5003, triton, cuda)
    kernels, _ = call()
    call()
    assert (
        caplog.text.count("\n") == 1
        and function in caplog.text
        and "start one by one" in caplog.text
    )
    assert [call(), call()] == [(kernels, 0)] * 2


def test_memory_is_not_kept_for_large_gradients(
    cuda: FakeCuda, triton: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MAX_SCRATCH", 16)
    call = Call(RANDOM, 5003, triton, cuda)
    kernels, _ = call()
    assert [call(), call()] == [(kernels, 0)] * 2


def test_a_ratio_that_is_made_for_one_call_is_not_recorded(
    cuda: FakeCuda, triton: FakeDriver
) -> None:
    """Catches: a graph that reads memory which its call has given back."""
    call = Call(PLAIN, 5003, triton, cuda)
    call.state["lr_ratio"] = torch.tensor(0.5, dtype=torch.float64)
    kernels, _ = call()
    assert [call(), call()] == [(kernels, 0)] * 2 and cuda.made == 0
    call.state["lr_ratio"] = torch.tensor(0.5)
    assert [call()[1], call()[1], call()[1]] == [0, 0, 1]
    call.state["lr_ratio"] = 0.5
    assert call() == (kernels, 0)


@pytest.mark.parametrize("spoilt", ["gaps", "odd"])
def test_memory_that_has_to_be_copied_first_is_not_replayed(
    spoilt: str, cuda: FakeCuda, triton: FakeDriver
) -> None:
    """Catches: a graph that reads the copy of an earlier call."""
    call = Call(PLAIN, 5003, triton, cuda)
    call.x = gaussian(2 * 5003)[::2] if spoilt == "gaps" else gaussian(5004)[1:]
    for _ in range(3):
        assert call()[1] == 0
    assert cuda.made == 0


def test_a_wrong_call_is_refused_after_a_right_one(cuda: FakeCuda, triton: FakeDriver) -> None:
    """Catches: a check that a known address leaves out though something else has changed."""
    call = Call(PLAIN, 5003, triton, cuda)
    call(), call(), call()
    whole = call.frame
    with pytest.raises(UsageError, match="elements of torch.uint8"):
        call.codec.encode(call.x, call.state, out=whole[:-16])
    with pytest.raises(UsageError, match="elements"):
        call.codec.encode(call.x[:-7], call.state, out=whole)
    with pytest.raises(UsageError, match="does not keep"):
        call.codec.encode(call.x, {**call.state, "momentum": call.x}, out=whole)
    held = {"residual": call.state["residual"].view(torch.int32)}
    with pytest.raises(UsageError, match="int32"):
        call.codec.encode(call.x, held, out=whole)
