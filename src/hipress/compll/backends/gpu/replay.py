"""Repeats the launches of a call as one CUDA graph when it comes again with the same memory.

The driver takes some microseconds for each kernel that is started, and a codec starts up to
thirteen for a gradient; a graph of them takes about as long as one. Training meets the same
addresses in every step: DDP's buckets, states and buffers for frames stay where they are.
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch

from hipress.compll.backends.gpu import runtime
from hipress.compll.backends.gpu.runtime import Kernels, Sizes

_log = logging.getLogger(__name__)

MAX_CALLS = 2048
"""Most calls that a `Replays` knows."""

MAX_SCRATCH = 64 * 2**20
"""Most bytes of scratch memory that a graph may keep. With more, kernels run so long that the time
of the host does not matter."""

RELAXED = 2
"""`CU_STREAM_CAPTURE_MODE_RELAXED`."""

ALIGN = 16
"""Kernels that read four floats at once take memory on a multiple of this."""


class CudaError(RuntimeError):
    """A function of CUDA's driver failed."""


class _KernelNode(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS`."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
    ]


class Driver:
    """The functions of CUDA's driver that make and start graphs."""

    def __init__(self, library: Any) -> None:
        self.works = True
        """Whether graphs can be made; False when it failed once."""
        names = ("Create", "AddKernelNode", "InstantiateWithFlags", "Destroy", "ExecDestroy")
        self._functions = {name: getattr(library, f"cuGraph{name}") for name in names}
        self._exchange_mode = library.cuThreadExchangeStreamCaptureMode
        self._launch = library.cuGraphLaunch
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def make(self, launches: Sequence[tuple[Any, int, list[int]]]) -> int:
        """Returns what starts some kernels one after the other.

        The graph is put together kernel by kernel. While a stream is captured, whoever waits for
        the device in another thread would get an error.
        """
        with self._beside_captures():
            return self._make(launches)

    def _make(self, launches: Sequence[tuple[Any, int, list[int]]]) -> int:
        graph, made, node = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("Create", ctypes.byref(graph), 0)
        try:
            for number, (compiled, programs, addresses) in enumerate(launches):
                before = (ctypes.c_void_p * 1)(node.value)
                given = _kernel_node(compiled, programs, addresses)
                self._call(
                    "AddKernelNode",
                    *(ctypes.byref(node), graph, before, ctypes.c_size_t(min(number, 1))),
                    ctypes.byref(given),
                )
            flags = ctypes.c_ulonglong(0)
            self._call("InstantiateWithFlags", ctypes.byref(made), graph, flags)
        finally:
            self._call("Destroy", graph)
        assert made.value is not None
        return made.value

    def launch(self, graph: int, stream: int) -> None:
        """Starts a graph."""
        if code := self._launch(graph, stream):
            raise CudaError(f"cuGraphLaunch returned {code}")

    def destroy(self, graph: int) -> None:
        """Frees a graph, when it has run if it is running; at exit the driver may be gone."""
        with self._beside_captures():
            self._functions["ExecDestroy"](ctypes.c_void_p(graph))

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Keeps the calls of this thread from ending a capture that is under way in the process.

        Memory is allocated and freed here, which the driver takes for a mistake in a capture. The
        garbage collector may free a graph at any time, also while the caller captures one.
        """
        mode = ctypes.c_int(RELAXED)
        self._exchange_mode(ctypes.byref(mode))  # from here on `mode` is the one before
        try:
            yield
        finally:
            self._exchange_mode(ctypes.byref(mode))

    def _call(self, name: str, *args: Any) -> None:
        if code := self._functions[name](*args):
            raise CudaError(f"cuGraph{name} returned {code}")


def _kernel_node(compiled: Any, programs: int, addresses: list[int]) -> _KernelNode:
    """Returns the launch of a kernel that Triton has compiled; CUDA copies what it points to.

    Triton adds pointers to memory of its own behind the arguments, which our kernels do not use.
    """
    entry = compiled.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0]
    kinds = re.findall(r"\.param\s+(\S+)", entry)
    if set(kinds) != {".u64"} or len(kinds) < len(addresses):
        raise CudaError(f"a kernel takes {len(kinds)} arguments, {', '.join(sorted(set(kinds)))}")
    values = (ctypes.c_uint64 * len(kinds))(*addresses)
    places = [ctypes.addressof(values) + 8 * k for k in range(len(kinds))]
    node = _KernelNode(
        function=compiled.function,
        grid=(programs, 1, 1),
        block=(32 * compiled.metadata.num_warps, 1, 1),
        shared=compiled.metadata.shared,
        params=(ctypes.c_void_p * len(kinds))(*places),
    )
    node.values = values  # live as long as the node
    return node


@cache
def _driver() -> Driver | None:
    """Returns the driver that torch has loaded; None if it is not there, or too old for graphs."""
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
    triton = sys.modules.get("triton")
    if triton is None or not runtime.no_hooks(triton):  # a profiler wants to see each kernel
        return None
    key: list[Hashable] = [device, runtime.current_stream_id(device)]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        if address % ALIGN:
            return None
        key += (address, tensor.numel(), tensor.dtype)
    return key


def record(kernels: Kernels, sizes: Sizes, frame: torch.Tensor, *more: Any) -> Graph | None:
    """Returns the launches of a call that was made just now; None if there is no graph of it.

    Args:
        kernels: What was called.
        sizes: As of the call.
        frame: As of the call.
        more: As of the call: `memory`, `error`, `rng` and `rho`.
    """
    driver, num_bytes = _driver(), sizes.used + sizes.zeroed
    if driver is None or not driver.works or num_bytes > MAX_SCRATCH:
        return None
    if sizes.zeroed and not kernels.clears:
        return None
    device, stream = frame.device, runtime.current_stream_id(frame.device)
    try:
        scratch = _scratch(device, stream, num_bytes)
        launches = kernels.launches(sizes, scratch, frame, *more)
        if launches is None:
            return None
        with runtime.on(device):
            return Graph(driver, driver.make(launches), stream, kernels.refusals, sizes, scratch)
    except torch.OutOfMemoryError:
        return None  # the call itself is done
    except CudaError as error:
        driver.works = False
        _log.warning("a CUDA graph cannot be made (%s); kernels start one by one", error)
        return None


_kept_scratch: WeakValueDictionary[tuple[torch.device, int], torch.Tensor] = WeakValueDictionary()
"""Scratch memory by device and stream, held by graphs: those of a stream run one by one."""


@torch.inference_mode(False)
def _scratch(device: torch.device, stream: int, num_bytes: int) -> torch.Tensor:
    """Returns the scratch memory that the graphs of the current stream share, large enough.

    Its size is a power of two: graphs with less keep what they have, at most as much again.
    """
    held = _kept_scratch.get((device, stream))
    if held is None or held.numel() < num_bytes:
        size = 1 << (max(num_bytes, 2**16) - 1).bit_length()
        held = torch.empty(size, dtype=torch.uint8, device=device)
        _kept_scratch[device, stream] = held
    return held
