"""Calls that come again with the same memory are started as one CUDA graph."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import hipress
from hipress.codecs import program, tensors
from hipress.compll.backends.gpu import replay, runtime
from hipress.errors import UsageError
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
        self.made = 0
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == self.fails:
                return 900
            if name == "cuGraphInstantiateWithFlags":
                self.made += 1
                ctypes.cast(args[0], ctypes.POINTER(ctypes.c_void_p))[0] = self.made
            if name == "cuGraphLaunch":
                self.started.append(args[0])
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
    monkeypatch.setattr(replay, "_side_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(runtime, "current_stream_id", lambda device: 7)
    return made


def call_key(device: torch.device, given: Any, state: Any, *more: Any) -> Any:
    """Takes memory of the CPU for that of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return real_key(torch.device("cuda", 0), given, state, *more)


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
    assert call() == (2 * kernels, 0)  # started, then recorded
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


def test_a_graph_counts_the_step(cuda: FakeCuda, triton: FakeDriver) -> None:
    """Catches: a step that is counted twice, or not, by a call that starts kernels."""
    call = Call(RANDOM, 5003, triton, cuda)
    call()
    assert int(call.state["step"]) == 1


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


@pytest.mark.parametrize("function", ["cuStreamBeginCapture_v2", "cuStreamEndCapture"])
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
