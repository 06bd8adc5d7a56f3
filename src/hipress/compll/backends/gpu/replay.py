"""Repeats a call's launches as one CUDA graph when it comes again with the same memory.

The driver takes some microseconds for each kernel that is started, and a codec starts up to
thirteen for a gradient; a graph of them takes about as long as one. Training meets the same
addresses in every step: DDP's buckets, states and buffers for frames stay where they are.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch

from hipress.compll.backends.gpu import runtime
from hipress.compll.backends.gpu.runtime import Kernels, Sizes, no_hooks

_log = logging.getLogger(__name__)

MAX_CALLS = 2048
"""Most calls that a `Replays` knows."""

MAX_SCRATCH = 64 * 2**20
"""Most bytes of scratch memory that a graph may keep. With more, kernels run so long that the time
of the host does not matter."""

ALIGN = 16
"""Kernels that read four floats at once take memory on a multiple of this."""

_THREAD_LOCAL = 1
"""The mode of a capture that leaves what other threads do alone."""


class CudaError(RuntimeError):
    """A function of CUDA's driver failed."""


class Driver:
    """The functions of CUDA's driver that make and start graphs."""

    def __init__(self, library: Any) -> None:
        self.works = True
        """Whether graphs can be made; False when it failed once."""
        self._library = library
        self._launch = library.cuGraphLaunch
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def begin(self, stream: int) -> None:
        """Lets a stream note launches instead of running them."""
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), _THREAD_LOCAL)

    def end(self, stream: int) -> int:
        """Ends that; returns what starts the noted launches."""
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        try:
            flags = ctypes.c_ulonglong(0)
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, flags)
        finally:
            self._call("cuGraphDestroy", graph)
        assert made.value is not None
        return made.value

    def launch(self, graph: int, stream: int) -> None:
        """Starts a graph."""
        if code := self._launch(graph, stream):
            raise CudaError(f"cuGraphLaunch returned {code}")

    def destroy(self, graph: int) -> None:
        """Frees a graph, when it has run if it is running; at exit the driver may be gone."""
        self._library.cuGraphExecDestroy(ctypes.c_void_p(graph))

    def _call(self, name: str, *args: Any) -> None:
        if code := getattr(self._library, name)(*args):
            raise CudaError(f"{name} returned {code}")


@cache
def _driver() -> Driver | None:
    """Returns the driver that torch has loaded; None if it is not there or too old."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


class Graph:
    """The launches of one call, with the memory that they use besides the caller's."""

    def __init__(
        self, driver: Driver, handle: int, stream: int, refusals: tuple[str, ...], *kept: Any
    ) -> None:
        self.refusals = refusals
        self._driver, self._handle, self._stream, self._kept = driver, handle, stream, kept

    def launch(self, device: torch.device) -> None:
        """Starts them on the stream of the call."""
        with runtime.on(device):
            self._driver.launch(self._handle, self._stream)

    def __del__(self) -> None:
        self._driver.destroy(self._handle)


class Replays:
    """The graphs of calls that came before, by all that a call depends on.

    What is checked in a call depends on the same, so that a call that is found needs no checks. Its
    second occurrence is recorded: what comes only once is not worth a graph.
    """

    def __init__(self) -> None:
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self._graphs: dict[Hashable, Graph | None] = {}
        """None for a call that was tried and has no graph."""
        self._last_use: dict[Hashable, int] = {}
        self._num_calls = self._next_look = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Graph | None:
        """Returns the graph of a call, if there is one."""
        self._num_calls += 1
        graph = self._graphs.get(key)
        if graph is not None:
            self._last_use[key] = self._num_calls
        return graph

    def comes_again(self, key: Hashable) -> bool:
        """Notes a call that has no graph; returns whether to record it.

        Where all graphs are in use there is no room: dropping one for another would mean to record
        in every call.
        """
        with self._lock:
            if key in self._graphs:
                return False
            known = key in self._once
            self._once[key] = None
            if len(self._once) > 4 * MAX_CALLS:
                self._once.popitem(last=False)
            if known and len(self._graphs) >= MAX_CALLS and self._num_calls >= self._next_look:
                self._drop_unused()
            return known and len(self._graphs) < MAX_CALLS

    def _drop_unused(self) -> None:
        """Drops what did not come among the last calls, as after other plans or other models."""
        self._next_look = self._num_calls + MAX_CALLS
        oldest = self._num_calls - 4 * MAX_CALLS
        for key in [k for k in self._graphs if self._last_use.get(k, 0) < oldest]:
            del self._graphs[key]
            self._last_use.pop(key, None)

    def keep(self, key: Hashable, graph: Graph | None) -> None:
        """Keeps the graph of a call."""
        with self._lock:
            self._once.pop(key, None)
            self._graphs[key] = graph
            self._last_use[key] = self._num_calls


def key_of(device: torch.device, *tensors: Any) -> list[Hashable] | None:
    """Returns what a call on a GPU with these tensors depends on; None if it cannot be replayed.

    A caller that captures a graph of its own gets the launches themselves, and memory with gaps or
    off a multiple of `ALIGN` bytes may have to be copied first.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    key: list[Hashable] = [runtime.current_stream_id(device)]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        if address % ALIGN:
            return None
        key += (address, tensor.numel(), tensor.dtype)
    return key


class RecordedKernels(Kernels):
    """Kernels whose launches can be recorded; they count the steps of random numbers."""

    def __call__(
        self,
        sizes: Sizes,
        frame: torch.Tensor,
        memory: Sequence[torch.Tensor],
        error: torch.Tensor,
        rng: Sequence[torch.Tensor] | None = None,
        rho: torch.Tensor | None = None,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """Launches the kernels, then raises the step that random numbers depend on by one."""
        super().__call__(sizes, frame, memory, error, rng, rho, scratch)
        if rng is not None:
            rng[2].add_(1)

    def record(
        self, sizes: Sizes, frame: Any, memory: Any, error: Any, rng: Any, rho: Any
    ) -> Graph | None:
        """Returns the launches of a call that was made just now; None if there is no graph of it.

        The arguments are those of the call.
        """
        driver, num_bytes = _driver(), sizes.used + sizes.zeroed
        sorts = not all(warps for _, warps, _ in self._launches)  # torch allocates there
        if driver is None or not driver.works or sorts or not no_hooks(self._triton):
            return None
        if num_bytes > MAX_SCRATCH:
            return None
        device, stream = frame.device, runtime.current_stream_id(frame.device)
        scratch = _scratch(device, stream, num_bytes)
        with _recording, torch.cuda.stream(_side_stream(device)):
            side = runtime.current_stream_id(device)
            try:
                driver.begin(side)
                try:
                    self(sizes, frame, memory, error, rng, rho, scratch)
                finally:
                    handle = driver.end(side)
            except RuntimeError as error:
                driver.works = False
                _log.warning("a CUDA graph cannot be made (%s); kernels start one by one", error)
                return None
        return Graph(driver, handle, stream, self.refusals, sizes, scratch)


_recording = threading.Lock()
"""Threads share the stream on which graphs are recorded."""

_kept_scratch: dict[tuple[torch.device, int], torch.Tensor] = {}
"""Scratch memory by device and stream: the graphs of a stream run one after the other."""


def _scratch(device: torch.device, stream: int, num_bytes: int) -> torch.Tensor:
    """Returns the scratch memory that the graphs of the current stream share, large enough."""
    held = _kept_scratch.get((device, stream))
    if held is None or held.numel() < num_bytes:
        held = torch.empty(max(num_bytes, 2**16), dtype=torch.uint8, device=device)
        _kept_scratch[device, stream] = held
    return held


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made
