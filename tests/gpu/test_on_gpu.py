"""The contract of the gpu backend on a GPU, and what only a GPU can show: graphs and no waiting.

Skipped without one; `pytest -rs` prints why. On a machine with a GPU:

    pytest tests/gpu
"""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hipress
from hipress.compll.backends.gpu import replay
from hipress.errors import BackendError, UsageError
from tests.codecs.cases import CASES, MOMENTUM, WIRE, Case, compiled, gaussian
from tests.gpu.contract import *  # noqa: F403
from tests.gpu.contract import INTERPRETED, NUM_STEPS, agree, ids, pair, started


def missing() -> str:
    """Why nothing runs on a GPU here; empty if it does."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return "TRITON_INTERPRET is set: kernels would run on the CPU" if INTERPRETED else ""


if missing():
    pytest.skip(missing(), allow_module_level=True)
SOME = [*WIRE, MOMENTUM[0], *(c for c in CASES if c.expr in ("onebit", "topk", "ef(terngrad)"))]
some_cases = pytest.mark.parametrize("case", compiled(SOME), ids=ids)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait of the host for the device is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(job: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A job as a graph, after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        job()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job()
    return graph


def test_auto_takes_the_backend_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIPRESS_BACKEND", raising=False)
    c, x = hipress.codec("onebit(block=64)"), gaussian(5003)
    on_cpu, on_gpu = c.encode(x, c.init(x)), c.encode(x.cuda(), c.init(x.cuda()))
    assert (on_cpu.device.type, on_gpu.device.type) == ("cpu", "cuda")
    # Each reads the other's frame.
    assert torch.equal(c.decode(on_cpu.cuda()).cpu(), c.decode(on_cpu))
    assert torch.equal(c.decode(on_gpu).cpu(), c.decode(on_gpu.cpu()))
    with pytest.raises(UsageError, match="they must be on one device"):
        c.decode(on_cpu, out=torch.empty(5003, device="cuda"))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_backend_for_the_cpu_refuses(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", backend)
    with pytest.raises(BackendError, match="set HIPRESS_BACKEND=auto"):
        hipress.codec("none").encode(torch.ones(3, device="cuda"))


@some_cases
def test_the_host_never_waits(case: Case) -> None:
    c, n = pair(case.expr).gpu, 100_003
    x = gaussian(n).cuda()
    state = c.init(x, seed=3)
    frame = c.encode(x, state)
    out = c.decode(frame)
    c.decode(frame, out=out, add=True)  # compiled
    fewer, held = gaussian(n // 2).cuda(), c.init(torch.empty(n // 2, device="cuda"))
    with no_waiting():
        for _ in range(3):
            c.encode(x, state, out=frame)
            c.decode(frame, out=out)
            c.decode(frame, out=out, add=True, alpha=0.25)  # a factor that is new
            c.decode(c.encode(fewer, held), out=torch.empty_like(fewer))  # so is this size


def test_numbers_on_their_way_are_waited_for() -> None:
    """Catches: a stream that reads what another one is still copying."""
    c, n = pair("int8").gpu, 70_001
    x = gaussian(n).cuda()
    c.encode(x[:4096], c.init(x[:4096]))  # compiled
    states, frames, side = [c.init(x) for _ in range(2)], [], torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        frames.append(c.encode(x, states[0]))
    frames.append(c.encode(x, states[1]))
    torch.cuda.synchronize()
    assert torch.equal(*frames)


def test_waiting_would_be_found() -> None:
    x = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError), no_waiting():
        x.item()


@some_cases
def test_a_graph_of_encode_and_decode_gives_the_same_bytes(case: Case) -> None:
    c, n = pair(case.expr).gpu, 100_003
    x = gaussian(n).cuda()
    held = {name: value.cuda() for name, value in started(c, n).items()}
    start = {name: value.clone() for name, value in held.items()}
    frame = torch.empty(c.wire_bytes(n), dtype=torch.uint8, device="cuda")
    out, total = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")

    def sync() -> None:
        c.encode(x, held, out=frame)
        c.decode(frame, out=out)
        c.decode(frame, out=total, add=True, alpha=0.5)

    graph = captured(sync)
    plain = {name: value.clone() for name, value in start.items()}
    for name, value in start.items():
        held[name].copy_(value)
    total.zero_()
    expected = torch.zeros(n, device="cuda")
    for step in range(NUM_STEPS):
        x.copy_(gaussian(n, seed=step))
        want = c.encode(x, plain)
        c.decode(want, out=expected, add=True, alpha=0.5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(frame, want)
        assert torch.equal(out, c.decode(want)) and torch.equal(total, expected)
        assert all(torch.equal(held[name], plain[name]) for name in plain)


def test_a_graph_of_an_empty_gradient() -> None:
    """Catches: a header that is read, in a replay, from memory of the host that is gone."""
    c, x = pair("terngrad").gpu, torch.empty(0, device="cuda")
    state = c.init(x)
    frame = torch.empty(c.wire_bytes(0), dtype=torch.uint8, device="cuda")
    graph = captured(lambda: c.encode(x, state, out=frame))
    right = c.encode(x, c.init(x))
    state["step"].zero_()
    frame.fill_(0xA5)
    torch.empty(1 << 20, pin_memory=True).fill_(0xA5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(frame, right)


def test_a_capture_outlives_graphs_that_are_freed_in_it() -> None:
    """Catches: the garbage collector frees a dropped codec, and ends a capture under way."""
    before = {id(one) for one in gc.get_objects() if isinstance(one, replay.Graph)}
    codec, x = hipress.codec("onebit").on_backend("gpu"), gaussian(70_001).cuda()
    state, frame = codec.init(x), torch.empty(codec.wire_bytes(70_001)).to("cuda", torch.uint8)
    for _ in range(4):
        codec.encode(x, state, out=frame)
    new = [one for one in gc.get_objects() if isinstance(one, replay.Graph)]
    new = [one for one in new if id(one) not in before]
    assert new
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        for one in new:
            one.__del__()
            one._handle = 0  # freed once
        z = y + 1
    graph.replay()
    assert torch.equal(z, x + 1 + 1)


@some_cases
def test_calls_that_come_again_mean_what_they_did(case: Case) -> None:
    """Catches: a graph of other memory or another step, one without a launch, or on no stream."""
    c, n = pair(case.expr).gpu, 70_001
    x = torch.empty(n, device="cuda")
    state = c.init(x, seed=3)
    frame = torch.empty(c.wire_bytes(n), dtype=torch.uint8, device="cuda")
    out, total, kept = torch.empty_like(x), torch.zeros_like(x), []
    side = torch.cuda.Stream()
    for step in range(8):
        x.copy_(gaussian(n, seed=step))
        anew = {key: value.clone() for key, value in state.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(side if step > 4 else None):
            c.encode(x, state, out=frame)
            c.decode(frame, out=out)
            before = total.clone()
            c.decode(frame, out=total, add=True, alpha=0.5)
        torch.cuda.synchronize()
        there = x.clone()  # memory that no call has had: each is kept
        plain = c.encode(there, anew)
        kept += [there, plain, anew, c.decode(plain, out=torch.empty_like(x))]
        assert torch.equal(plain, frame) and torch.equal(kept[-1], out)
        assert all(torch.equal(anew[key], value) for key, value in state.items())
        kept.append(c.decode(plain, out=before, add=True, alpha=0.5))
        assert torch.equal(before, total)
    made = [key for key, graph in c.replays._graphs.items() if graph is not None]
    # Memory that torch has to clear is not in a graph.
    encodes = 2 * c.gpu("f32")._encode.clears
    assert sum("encode" in key for key in made) == encodes
    assert sum("decode" in key for key in made) == 4


@some_cases
def test_a_run_again_gives_the_same_bytes(case: Case) -> None:
    c, n = pair(case.expr).gpu, 1_000_003
    x = gaussian(n).cuda()
    frames = [c.encode(x, c.init(x, seed=7)) for _ in range(3)]
    assert all(torch.equal(frames[0], frame) for frame in frames[1:])


def test_many_elements() -> None:
    # More than 2^31 bits of code and 2^31 bytes of gradient: offsets need 64 bits.
    c, n = pair("onebit").gpu, 2**29 + 5
    x = torch.full((n,), 2.0, device="cuda")
    x[-3:] = -2.0
    state = c.init(x)
    decoded = c.decode(c.encode(x, state))
    assert torch.equal(decoded, x) and not state["residual"].any()


def test_a_stream_of_the_user() -> None:
    c, n = pair("topk"), 300_007
    case = next(k for k in CASES if k.expr == "topk")
    x, state = gaussian(n), started(c.cpu, n)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = {name: value.cuda() for name, value in state.items()}
        frame = c.gpu.encode(x.cuda(), there)
    stream.synchronize()
    agree(case, frame.cpu(), c.cpu.encode(x, state), n)
