"""Starts the kernels of a generated GPU module.

What depends on the number of elements (a row of numbers, the frame's header, the programs of each
launch) is made once and kept, so that a step only launches: nothing is copied to the device and
nothing waits for it, and a CUDA graph can capture the whole. A kernel that Triton has compiled and
started once is started by its address from then on.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from operator import or_
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MIN_SPLIT = 2048
"""From this many tiles on it pays to start the last one, which needs a mask, on its own."""

MAX_KEPT = 1024
"""Most entries of a `DeviceCache`; each holds some kilobytes on the device. A model has far fewer
sizes of gradients, but a caller may give another size or factor in every call."""

_DTYPES = {
    "f32": torch.float32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "u16": torch.int16,
    "u32": torch.int32,
}


@dataclass(frozen=True)
class Gradient:
    """One gradient of a launch."""

    numel: int
    params: tuple[float, ...]
    place: int
    """Where its body starts in the frame."""
    at: int = 0
    """Where it starts in the flat buffer."""


class Start(NamedTuple):
    """One start of a kernel."""

    place: int
    """The place of the kernel among the launches."""
    programs: int
    part: int | None
    """Which tiles it does, as `Tile.close` says; None: there is only one part."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """What a kernel needs to know about some gradients, on their device."""

    memory: torch.Tensor
    """All of the following, as bytes."""
    ints: torch.Tensor
    floats: torch.Tensor
    zeros: torch.Tensor
    """Seed, stream or step where no random number is drawn: one for each gradient."""
    one: torch.Tensor
    """The factor on the residual, unless the caller has another."""
    headers: tuple[torch.Tensor, ...]
    """The frame's header and table; of a merge, then those of the frames that are read."""
    tables: tuple[torch.Tensor, ...]
    """For each launch, the gradient and the tile of each program (not for a single gradient)."""
    starts: tuple[Start, ...]
    rows: tuple[tuple[int, ...], ...]
    """The ints again, for what the host does."""
    used: int
    zeroed: int


@dataclass
class _Entry:
    value: Any
    written: Any = None
    """The event after which the tensors can be read."""
    streams: dict[int, Any] = field(default_factory=dict)
    """Streams whose kernels may still read the tensors."""
    is_captured: bool = False
    """Whether a CUDA graph reads the tensors again in each replay."""


class DeviceCache:
    """`Sizes` on a device that kernels read; the least recently used are dropped.

    What was looked up while a stream was being captured is kept for good, because the graph reads
    the same memory in each replay.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any, device: torch.device, make: Callable[[], Any]) -> Any:
        """Returns the value of a key, made if it is not there. The host waits for nothing.

        Args:
            key: Identifies the value.
            device: The device whose current stream is going to read it.
            make: Makes the value, in the order of that stream.
        """
        on_gpu = device.type == "cuda"
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                if on_gpu and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        "a CUDA graph is being captured and this is the first call with this "
                        "number of elements and these factors; make the same call once before the "
                        "capture."
                    )
                entry = self._entries[key] = _Entry(make())
                if on_gpu:
                    entry.written = torch.cuda.current_stream(device).record_event()
                self._drop_old()
            else:
                self._entries.move_to_end(key)
            if on_gpu:
                self._note_stream(entry, device)
        return entry.value

    @staticmethod
    def _note_stream(entry: _Entry, device: torch.device) -> None:
        is_capturing = torch.cuda.is_current_stream_capturing()
        entry.is_captured = entry.is_captured or is_capturing
        stream_id = current_stream_id(device)
        if stream_id not in entry.streams:
            stream = entry.streams[stream_id] = torch.cuda.current_stream(device)
            # A graph cannot wait for what was not captured; its caller has waited before.
            if not is_capturing:
                stream.wait_event(entry.written)

    def _drop_old(self) -> None:
        """Drops one entry that no graph has captured, if there are too many."""
        oldest = (key for key, entry in self._entries.items() if not entry.is_captured)
        if len(self._entries) <= MAX_KEPT or (key := next(oldest, None)) is None:
            return
        dropped = self._entries.pop(key)
        for stream in dropped.streams.values():
            # Its memory is not used again before that has ended.
            dropped.value.memory.record_stream(stream)


def current_stream_id(device: torch.device) -> int:
    """Returns a number for the current stream, in less time than torch makes an object for it."""
    found: int = torch._C._cuda_getCurrentRawStream(device.index)
    return found


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, one program after the other."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class Kernels:
    """One kernel of a module (`encode`, `decode` or `decode_add`) with the sizes it has met."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._interpreted = interpreted()
        self._by_address = False
        """Whether compiled kernels can be started without Triton: in the version that was read."""
        if self._interpreted:
            _patch_interpreter()
        else:
            import triton

            self._triton = triton
            self._by_address = triton.__version__.startswith("3.6.")
        self.name = name
        self.refusals: tuple[str, ...] = getattr(module, f"{name}_refusals")
        self._sizes_of = getattr(module, f"{name}_sizes")
        self._launches = getattr(module, f"{name}_launches")
        # Kernels that clear memory themselves save a launch.
        self.clears: bool = getattr(module, f"{name}_clears")
        self._kept = DeviceCache()
        self._ready: dict[Any, dict[Any, _Ready]] = {}
        """Compiled kernels for memory on multiples of 16 bytes, by device and kind."""

    def sizes(
        self,
        key: Any,
        device: torch.device,
        describe: Callable[[], tuple[Sequence[Gradient], Sequence[bytes]]],
    ) -> Sizes:
        """Returns what the kernels need to know about some gradients; kept for later calls.

        Args:
            key: Identifies gradients and headers.
            device: Where they are.
            describe: Returns the gradients and the headers.
        """
        made: Sizes = self._kept.get(
            (key, device), device, lambda: self.make(*describe(), device=device)
        )
        return made

    def make(
        self, gradients: Sequence[Gradient], headers: Sequence[bytes], *, device: torch.device
    ) -> Sizes:
        """Returns the same as `sizes`, for a caller that keeps it."""
        header_words = 16 + 4 * len(gradients)
        used, zeroed = 0, 0
        rows, floats, grids = [], [], []
        lengths: tuple[Any, ...] = ()
        for g in gradients:
            ints, reals, used, zeroed, grid, lengths = self._sizes_of(
                g.numel, g.params, g.place, g.at, header_words, used, zeroed
            )
            rows.append(tuple(int(v) for v in ints))
            floats.append(reals)
            grids.append(tuple(int(v) for v in grid))
        programs = list(zip(*grids, strict=True))
        tables = [_table(counts) for counts in programs] if len(gradients) > 1 else []
        arrays: list[NDArray[Any]] = [
            np.array(rows, np.int64),
            np.array(floats, np.float32),
            np.zeros(len(gradients), np.int64),
            np.ones(1, np.float32),
            *(np.frombuffer(header, np.uint8) for header in headers),
            *tables,
        ]
        memory, (ints_there, floats_there, zeros, one, *rest) = copied(arrays, device)
        return Sizes(
            memory=memory,
            ints=ints_there,
            floats=floats_there,
            zeros=zeros,
            one=one,
            headers=tuple(rest[: len(headers)]),
            tables=tuple(rest[len(headers) :]),
            starts=tuple(self._starts([sum(p) for p in programs], lengths, len(gradients) > 1)),
            rows=tuple(rows),
            used=used,
            zeroed=zeroed,
        )

    def _starts(
        self, grids: Sequence[int], lengths: Sequence[float], bulk: bool
    ) -> Iterator[Start]:
        """Yields the starts of all launches."""
        for place, ((_, warps, span), grid) in enumerate(zip(self._launches, grids, strict=True)):
            full = int(lengths[place]) // span if span > 0 else 0
            if not warps:
                yield Start(place, 1, None)
            elif not grid:
                continue
            elif not span:
                yield Start(place, grid, None)
            elif bulk or span < 0 or grid < MIN_SPLIT:
                yield Start(place, grid, 0)
            else:
                yield Start(place, full, 1)
                if full * span < lengths[place]:
                    yield Start(place, 1, 2)

    def __call__(
        self,
        sizes: Sizes,
        frame: torch.Tensor,
        memory: Sequence[torch.Tensor],
        error: torch.Tensor,
        rng: Sequence[torch.Tensor] | None = None,
        rho: torch.Tensor | None = None,
    ) -> None:
        """Launches the kernels; an encoder that draws random numbers raises the step by one.

        Args:
            sizes: From `sizes`.
            frame: All of the frame.
            memory: The gradient (or output) and the states, flat; of a merge, the header that
                frames must have, the frames and the states.
            error: The word that is set where a frame is damaged.
            rng: seed, stream and step; None where no random number is drawn.
            rho: The factor on the residual; None is 1.
        """
        device = frame.device
        work = zeroed = sizes.memory
        if sizes.used:
            work = torch.empty(sizes.used, dtype=torch.uint8, device=device)
        if sizes.zeroed:
            make = torch.empty if self.clears else torch.zeros
            zeroed = make(sizes.zeroed, dtype=torch.uint8, device=device)
        args = _arguments(sizes, zeroed, work, frame, memory, error, rng, rho)
        # NumPy, which runs interpreted kernels, would warn of NaN and infinities.
        with np.errstate(all="ignore") if self._interpreted else on(device):
            self._start(sizes, device, work, args)

    def _start(
        self, sizes: Sizes, device: torch.device, work: torch.Tensor, args: tuple[Any, ...]
    ) -> None:
        bulk, index = len(sizes.rows) > 1, device.index or 0
        addresses = [tensor.data_ptr() for tensor in args]
        ready, stream = None, 0
        # With another alignment Triton makes another kernel, and has to choose.
        if not self._interpreted and not reduce(or_, addresses) % 16 and no_hooks(self._triton):
            ready = self._ready.setdefault((index, bulk), {})
            stream = self._triton.runtime.driver.active.get_current_stream(index)
        for place, programs, part in sizes.starts:
            kernel, warps, _ = self._launches[place]
            if not warps:
                _sort(kernel, sizes, work)
                continue
            table = sizes.tables[place] if bulk else sizes.ints
            known = None if ready is None else ready.get((place, part))
            if known is not None and self._by_address:
                known.start(programs, stream, *addresses, table.data_ptr(), bulk, part)
                continue
            chosen = {} if part is None else {"PART": part}
            options = {"BULK": bulk, "num_warps": warps, "enable_fp_fusion": False}
            made = kernel[(programs,)](*args, table, **chosen, **options)
            if ready is not None:
                ready[place, part] = _Ready(made, _starter(made, part))

    def launches(
        self, sizes: Sizes, scratch: torch.Tensor, frame: torch.Tensor, *more: Any
    ) -> list[tuple[Any, int, list[int]]] | None:
        """Returns the compiled kernels of a call that was made before, for other scratch memory.

        Args:
            sizes: As of the call.
            scratch: Memory of at least `sizes.used + sizes.zeroed` bytes.
            frame: As of the call.
            more: As of the call: `memory`, `error`, `rng` and `rho`.

        Returns:
            Kernel, number of programs and addresses of each launch; None if some are not known.
        """
        work = scratch[: sizes.used] if sizes.used else sizes.memory
        zeroed = scratch[sizes.used :] if sizes.zeroed else sizes.memory
        addresses = [t.data_ptr() for t in _arguments(sizes, zeroed, work, frame, *more)]
        bulk = len(sizes.rows) > 1
        ready = self._ready.get((frame.device.index or 0, bulk), {})
        known = [ready.get((place, part)) for place, _, part in sizes.starts]
        if reduce(or_, addresses) % 16 or not all(known):
            return None
        return [
            (kernel.compiled, start.programs, [*addresses, table.data_ptr()])
            for kernel, start in zip(known, sizes.starts, strict=True)
            for table in [sizes.tables[start.place] if bulk else sizes.ints]
            if kernel is not None
        ]


@dataclass(frozen=True)
class _Ready:
    """A kernel that Triton has compiled, and what starts it."""

    compiled: Any
    start: Callable[..., None]


def _arguments(
    sizes: Sizes,
    zeroed: torch.Tensor,
    work: torch.Tensor,
    frame: torch.Tensor,
    memory: Sequence[torch.Tensor],
    error: torch.Tensor,
    rng: Sequence[torch.Tensor] | None,
    rho: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Returns the arguments of all kernels, but for the table."""
    return (
        *(sizes.ints, sizes.floats, zeroed, work, error, sizes.headers[0], frame, *memory),
        sizes.one if rho is None else rho,
        *(rng or (sizes.zeros, sizes.zeros, sizes.zeros)),
    )


def no_hooks(triton: Any) -> bool:
    """Whether no profiler wants to be told of launches."""
    knobs = triton.knobs.runtime
    hooks = (knobs.launch_enter_hook, knobs.launch_exit_hook)
    return not any(getattr(hook, "calls", hook) for hook in hooks)


def _starter(compiled: Any, part: int | None) -> Callable[..., None]:
    """Returns what starts a compiled kernel with addresses of memory.

    Triton looks at each argument of each call to find the kernel for it; here that is known. An
    address is taken as it is, where a tensor would be asked for it, and the driver too.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(programs: int, stream: int, *args: Any) -> None:
        args = args if part is not None else args[:-1]
        run(programs, 1, 1, stream, function, metadata, None, None, None, *args)

    return start


def _table(counts: Sequence[int]) -> NDArray[np.int32]:
    """Returns gradient and tile of each program, from the number of tiles of each gradient."""
    pairs = [
        np.stack([np.full(count, g, np.int32), np.arange(count, dtype=np.int32)], 1)
        for g, count in enumerate(counts)
    ]
    return np.concatenate(pairs).reshape(-1)


def copied(
    arrays: Sequence[NDArray[Any]], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies arrays to a device, side by side on multiples of 16 bytes; the host does not wait.

    Returns:
        All bytes, and a tensor for each array.
    """
    ends = list(accumulate(-(-a.nbytes // 16) * 16 for a in arrays))
    places = [0, *ends[:-1]]
    memory = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for at, array in zip(places, arrays, strict=True):
        memory.numpy()[at : at + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
    memory = memory.to(device, non_blocking=True)
    views = [
        memory[at : at + a.nbytes].view(torch.from_numpy(np.empty(0, a.dtype)).dtype)
        for at, a in zip(places, arrays, strict=True)
    ]
    return memory, views


def _sort(places: tuple[Any, ...], sizes: Sizes, work: torch.Tensor) -> None:
    """Sorts a piece of scratch memory for each gradient, by keys that lie in another if given."""
    for row in sizes.rows:
        length = row[places[0]]
        views = [
            work[row[at] : row[at] + length * _DTYPES[storage].itemsize].view(_DTYPES[storage])
            for at, storage in zip(places[1::2], places[2::2], strict=True)
        ]
        keys = views[-1]
        if places[-1] in ("u16", "u32"):  # torch sorts them with a sign
            keys = keys.to(torch.int64) & (2 ** int(places[-1][1:]) - 1)
        order = torch.argsort(keys, stable=True)
        for view in views:
            view.copy_(view[order])


def fused(x: NDArray[Any], y: NDArray[Any], z: NDArray[Any]) -> NDArray[np.float32]:
    """Returns x * y + z of float32, rounded once.

    In double precision the product is exact. The sum is rounded to odd, which leaves enough to
    round it again.
    """
    product, z = x.astype(np.float64) * y, z.astype(np.float64)
    total = np.asarray(product + z)
    with np.errstate(invalid="ignore"):
        back = total - product
        error = (product - (total - back)) + (z - back)
    wrong = np.isfinite(total) & (error != 0) & (total.view(np.int64) & 1 == 0)
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where(wrong, np.nextafter(total, towards), total).astype(np.float32)


def _patch_interpreter() -> None:
    """Corrects four defects of the interpreter in Triton 3.6.

    Loops: under NumPy 2.4 an array of one element is no longer an int. Scalars that are spread
    over a tile: all became floats, also what is true or false. A fused multiply-add rounded twice.
    The larger and the smaller of a number and NaN were NaN, where a GPU takes the number.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "patched", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def splat(self: Any, kind: Any, scalar: Any) -> Any:
        value = scalar.data.reshape(-1)
        spread = np.full(kind.shape, value[0], dtype=value.dtype)
        return interpreter.TensorHandle(spread, kind.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    patched.patched = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
    builder = interpreter.InterpreterBuilder
    builder.create_splat, builder.create_fma = splat, fma
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the current one."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
