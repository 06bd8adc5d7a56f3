"""Starts the kernels of a generated GPU module.

What depends on the number of elements (a row of numbers, the programs of each launch, scratch
memory) is made once and kept, so that a step only launches: nothing is copied to the device and
nothing waits for it, and a CUDA graph can capture the whole.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

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


@dataclass(frozen=True, eq=False)
class Sizes:
    """What a kernel needs to know about some gradients, on their device."""

    ints: torch.Tensor
    floats: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    """For each launch, the gradient and the tile of each program (not for a single gradient)."""
    grids: tuple[int, ...]
    lengths: tuple[int, ...]
    """Elements that each launch goes over."""
    rows: tuple[tuple[int, ...], ...]
    """The ints again, for what the host does."""
    used: int
    zeroed: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What lies on the device."""
        return (self.ints, self.floats, *self.tables)


@dataclass
class _Entry:
    value: Any
    streams: set[Any] = field(default_factory=set)
    """Streams whose kernels may still read the tensors."""
    is_captured: bool = False
    """Whether a CUDA graph reads the tensors again in each replay."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.value.tensors if isinstance(self.value, Sizes) else (self.value,)


class DeviceCache:
    """Tensors and `Sizes` on a device that kernels read; the least recently used are dropped.

    What was looked up while a stream was being captured is kept for good, because the graph reads
    the same memory in each replay.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any, device: torch.device, make: Callable[[], Any]) -> Any:
        """Returns the value of a key, made if it is not there.

        Args:
            key: Identifies the value.
            device: The device whose current stream is going to read it.
            make: Makes the value.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(make())
                self._drop_old()
            else:
                self._entries.move_to_end(key)
            if device.type == "cuda":
                entry.streams.add(torch.cuda.current_stream(device))
                entry.is_captured = entry.is_captured or torch.cuda.is_current_stream_capturing()
        return entry.value

    def _drop_old(self) -> None:
        """Drops one entry that no graph has captured, if there are too many."""
        oldest = (key for key, entry in self._entries.items() if not entry.is_captured)
        if len(self._entries) <= MAX_KEPT or (key := next(oldest, None)) is None:
            return
        dropped = self._entries.pop(key)
        for tensor in dropped.tensors:
            for stream in dropped.streams:
                tensor.record_stream(stream)  # its memory is not used again before that has ended


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, one program after the other."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class Kernels:
    """One kernel of a module (`encode`, `decode` or `decode_add`) with the sizes it has met."""

    def __init__(self, module: ModuleType, name: str) -> None:
        if interpreted():
            _patch_interpreter()
        self.name = name
        self.refusals: tuple[str, ...] = getattr(module, f"{name}_refusals")
        self._sizes_of = getattr(module, f"{name}_sizes")
        self._launches = getattr(module, f"{name}_launches")
        self._kept = DeviceCache()

    def sizes(self, gradients: Sequence[Gradient], device: torch.device) -> Sizes:
        """Returns what the kernels need to know about some gradients; kept for later calls."""
        key = (device, tuple(gradients))
        found: Sizes = self._kept.get(key, device, partial(self.make, gradients, device))
        return found

    def make(self, gradients: Sequence[Gradient], device: torch.device) -> Sizes:
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
        tables = []
        if len(gradients) > 1:
            for launch in zip(*grids, strict=True):
                pairs = [
                    np.stack([np.full(count, g, np.int32), np.arange(count, dtype=np.int32)], 1)
                    for g, count in enumerate(launch)
                ]
                table = torch.from_numpy(np.concatenate(pairs).reshape(-1))
                tables.append(table.to(device))
        return Sizes(
            ints=torch.tensor(rows, dtype=torch.int64).to(device),
            floats=torch.tensor(floats, dtype=torch.float32).to(device),
            tables=tuple(tables),
            grids=tuple(sum(launch) for launch in zip(*grids, strict=True)),
            lengths=tuple(int(length) for length in lengths),
            rows=tuple(rows),
            used=used,
            zeroed=zeroed,
        )

    def __call__(
        self,
        sizes: Sizes,
        header: torch.Tensor,
        frame: torch.Tensor,
        memory: Sequence[torch.Tensor],
        rng: Sequence[torch.Tensor],
        rho: torch.Tensor,
        error: torch.Tensor,
    ) -> None:
        """Launches the kernels.

        Args:
            sizes: From `sizes`.
            header: The frame's header and table: written by encode, expected by decode.
            frame: All of the frame.
            memory: The gradient (or output) and the states, flat; of a merge, the header that
                frames must have, the frames and the states.
            rng: seed, stream and step; any tensor where no random number is drawn.
            rho: The factor on the residual.
            error: The word that is set where a frame is damaged.
        """
        device = frame.device
        work = torch.empty(max(sizes.used, 16), dtype=torch.uint8, device=device)
        zeroed = work
        if sizes.zeroed:
            zeroed = torch.zeros(sizes.zeroed, dtype=torch.uint8, device=device)
        bulk = len(sizes.rows) > 1
        args = (sizes.ints, sizes.floats, zeroed, work, error, header, frame, *memory, rho, *rng)
        with _quiet(), _on(device):
            for k, (kernel, warps, span) in enumerate(self._launches):
                if warps == 0:
                    _sort(kernel, sizes, work)
                    continue
                table = sizes.tables[k] if bulk else sizes.ints
                options = {"BULK": bulk, "num_warps": warps, "enable_fp_fusion": False}
                for grid, part in _parts(sizes, k, span, bulk):
                    chosen = options if part is None else options | {"PART": part}
                    kernel[(grid,)](*args, table, **chosen)


def _parts(sizes: Sizes, k: int, span: int, bulk: bool) -> Iterator[tuple[int, int | None]]:
    """Yields the programs and the part of each start of a launch; None is the only part."""
    if not sizes.grids[k]:
        return
    if not span:
        yield sizes.grids[k], None
    elif bulk or span < 0 or sizes.grids[k] < MIN_SPLIT:
        yield sizes.grids[k], 0
    else:
        full = sizes.lengths[k] // span
        yield full, 1
        if full * span < sizes.lengths[k]:
            yield 1, 2


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


def _quiet() -> AbstractContextManager[Any]:
    """Silences NumPy's warnings about NaN and infinities where kernels are interpreted."""
    return np.errstate(all="ignore") if interpreted() else nullcontext()


def _patch_interpreter() -> None:
    """Corrects two defects of the interpreter in Triton 3.6.

    Loops: under NumPy 2.4 an array of one element is no longer an int. Scalars that are spread
    over a tile: all became floats, also what is true or false.
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

    patched.patched = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_splat = splat


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
