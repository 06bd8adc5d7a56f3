"""Runs a codec's kernels on a GPU without waiting for the device.

The host checks lengths and shapes. What only the device can see (a frame's header, counts and
indices in it) is clamped there, and a damaged frame sets a word in pinned memory: the next call
on that device finds it and raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hipress import settings
from hipress.codecs import frame
from hipress.codecs.base import lr_ratio
from hipress.compll.backends.gpu.replay import Replays, key_of, record
from hipress.compll.backends.gpu.runtime import Gradient, Kernels, Sizes
from hipress.compll.passes.derive import ALPHA, DECAY, MU, RHO
from hipress.errors import FrameError, UsageError

if TYPE_CHECKING:
    from hipress.codecs.base import State
    from hipress.codecs.bulk import Bulk
    from hipress.codecs.program import ProgramCodec
    from hipress.compll.build import Merge
    from hipress.compll.ir import Kernel


class GpuKernels:
    """The kernels of a codec for gradients of one dtype."""

    def __init__(self, codec: ProgramCodec, dtype: str) -> None:
        self._codec = codec
        self._dtype = dtype
        loaded = codec.bound.load("gpu", dtype=dtype, variant=codec.variant)
        self._loaded = loaded
        self._encode = Kernels(loaded.module, "encode")
        self._decode = Kernels(loaded.module, "decode")
        self._decode_add = Kernels(loaded.module, "decode_add")

    def encode(
        self,
        x: torch.Tensor,
        states: list[torch.Tensor],
        state: State | None,
        out: torch.Tensor,
        key: Hashable = None,
    ) -> None:
        """Writes the frame of `x` to `out`; updates the states and the step.

        `key` is what `call_key` returned for this call, here and below.
        """
        device, numel, kernels = x.device, x.numel(), self._encode
        raise_pending(device)
        sizes = kernels.sizes(numel, device, lambda: self._described(numel, None))
        if numel == 0:
            out.zero_()
            out[: sizes.headers[0].numel()] = sizes.headers[0]
            if self._loaded.encode.random:
                assert state is not None
                out[8:16].view(torch.int64).copy_(state["step"])
                state["step"] += 1
            return
        _refusals[device] = kernels.refusals
        rng = _rng(self._loaded.encode, state, device)
        memory = [_elements(x.contiguous()), *map(_elements, states)]
        _start(kernels, self._codec.replays, key, sizes, out, memory, rng, state)

    def decode(
        self,
        payload: torch.Tensor,
        out: torch.Tensor,
        *,
        add: bool,
        alpha: float,
        waits: bool,
        key: Hashable = None,
    ) -> None:
        """Writes `alpha * decoded` to `out`, or adds it; `waits` makes it find damage at once."""
        device, numel = out.device, out.numel()
        raise_pending(device)
        kernels = self._decode_add if add else self._decode
        sizes = kernels.sizes((numel, alpha), device, lambda: self._described(numel, alpha))
        _refusals[device] = kernels.refusals
        _start(kernels, self._codec.replays, key, sizes, payload, [_elements(out)])
        if waits:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            raise_pending(device)

    def encode_bulk(
        self,
        bulk: Bulk,
        flat: torch.Tensor,
        states: list[torch.Tensor],
        state: State | None,
        out: torch.Tensor,
        key: Hashable = None,
    ) -> None:
        """Writes the frame of many gradients in the launches of one."""
        device = flat.device
        raise_pending(device)
        sizes = self._bulk_sizes(bulk, self._encode, None, device)
        _refusals[device] = self._encode.refusals
        rng = _rng(self._loaded.encode, state, device, len(bulk.numels))
        memory = [_elements(flat), *map(_elements, states)]
        _start(self._encode, bulk.replays, key, sizes, out, memory, rng, state)

    def decode_bulk(
        self,
        bulk: Bulk,
        payload: torch.Tensor,
        out: torch.Tensor,
        *,
        add: bool,
        alpha: float,
        key: Hashable = None,
    ) -> None:
        """Reads a frame of many gradients in the launches of one."""
        device = out.device
        raise_pending(device)
        kernels = self._decode_add if add else self._decode
        sizes = self._bulk_sizes(bulk, kernels, alpha, device)
        _refusals[device] = kernels.refusals
        _start(kernels, bulk.replays, key, sizes, payload, [_elements(out)])

    def _params(self, alpha: float | None) -> tuple[float, ...]:
        """Returns the parameters of encode, or those of decode with a factor."""
        bound, loaded = self._codec.bound, self._loaded
        if alpha is None:
            return bound.floats(loaded.encode, {MU: self._codec.mu, DECAY: self._codec.decay})
        return bound.floats(loaded.decode, {ALPHA: alpha})

    def _described(self, numel: int, alpha: float | None) -> tuple[list[Gradient], list[bytes]]:
        header = header_of(self._codec, numel)
        return [Gradient(numel, self._params(alpha), len(header))], [header]

    def _bulk_sizes(
        self, bulk: Bulk, kernels: Kernels, alpha: float | None, device: torch.device
    ) -> Sizes:
        def make() -> Sizes:
            params = self._params(alpha)
            rows = zip(bulk.numels, bulk.places, bulk.offsets, strict=True)
            gradients = [Gradient(n, params, place, at) for n, place, at in rows]
            return kernels.make(gradients, [bulk.header.numpy().tobytes()], device=device)

        sizes: Sizes = bulk.kept.get((kernels.name, self._dtype, alpha, device), device, make)
        return sizes


def header_of(codec: ProgramCodec, numel: int) -> bytes:
    """Returns header and table of a codec's frame of `numel` elements."""
    size, head = codec.wire_bytes(numel), frame.frame_bytes([0])
    whole = np.zeros(size, np.uint8)  # pages that nobody touches take no memory
    header = frame.Header(codec_hash=codec.codec_hash)
    frame.write_header(whole, header, [frame.Body(numel, size - head)])
    return whole[:head].tobytes()


class GpuMerge:
    """One kernel that decodes the frames of some workers, averages them and encodes the mean."""

    def __init__(self, worker: ProgramCodec, back: ProgramCodec, merge: Merge) -> None:
        self._worker, self._back = worker, back
        self._kernel = merge.kernel
        self._merge = Kernels(merge.module, "merge")

    def __call__(
        self,
        payloads: Sequence[torch.Tensor],
        numel: int,
        states: list[torch.Tensor],
        state: State | None,
        out: torch.Tensor,
        alpha: float,
        key: Hashable = None,
    ) -> None:
        """Writes the frame of the mean to `out`."""
        device = out.device
        raise_pending(device)

        def described() -> tuple[list[Gradient], list[bytes]]:
            values = dict(self._worker.bound.values) | dict(self._back.bound.values)
            values |= {ALPHA: alpha, MU: self._back.mu, RHO: 1.0, DECAY: self._back.decay}
            params = tuple(float(values[name]) for name in self._kernel.params)
            headers = [header_of(codec, numel) for codec in (self._back, self._worker)]
            return [Gradient(numel, params, len(headers[0]))], headers

        sizes = self._merge.sizes((numel, alpha), device, described)
        _refusals[device] = self._merge.refusals
        memory = [sizes.headers[1], *payloads, *map(_elements, states)]
        rng = _rng(self._kernel, state, device)
        _start(self._merge, self._back.replays, key, sizes, out, memory, rng, state)


def call_key(
    device: torch.device, tensors: Sequence[Any], state: State | None, *more: Hashable
) -> Hashable:
    """Returns all that a call of a codec depends on; None if it is not for `Replays`.

    Args:
        device: Where the call runs.
        tensors: What it reads and writes.
        state: The codec's state.
        more: What else tells it from other calls.
    """
    held: State = {} if state is None else state
    if device.type != "cuda" or not isinstance(held, dict):
        return None
    ratio = held.get("lr_ratio")
    if isinstance(ratio, torch.Tensor) and ratio.dtype != torch.float32:
        return None  # it is converted in each call
    key = key_of(device, *tensors, *held.values())
    return None if key is None else (*key, *held, os.environ.get(settings.BACKEND.name), *more)


def started_again(replays: Replays, key: Hashable, device: torch.device) -> bool:
    """Starts a call that was recorded; returns whether it was."""
    graph = None if key is None else replays.get(key)
    if graph is None:
        return False
    raise_pending(device)
    _refusals[device] = graph.refusals
    graph.launch(device)
    return True


def _start(
    kernels: Kernels,
    replays: Replays,
    key: Hashable,
    sizes: Sizes,
    frame: torch.Tensor,
    memory: list[torch.Tensor],
    rng: list[torch.Tensor] | None = None,
    state: State | None = None,
) -> None:
    """Starts kernels; records them if the same call came before."""
    ratio, error = _ratio(state, frame.device), error_word(frame.device)
    kernels(sizes, frame, memory, error, rng, ratio)
    if key is None or not replays.comes_again(key):
        return
    replays.keep(key, record(kernels, sizes, frame, memory, error, rng, ratio))


_error_words: dict[torch.device, tuple[torch.Tensor, NDArray[np.int32]]] = {}
"""By device: a word in memory that the host can read, and the same word as the host reads it."""


def error_word(device: torch.device) -> torch.Tensor:
    """Returns the word that kernels set when they find damage."""
    return _error_pair(device)[0]


def _error_pair(device: torch.device) -> tuple[torch.Tensor, NDArray[np.int32]]:
    known = _error_words.get(device)
    if known is None:
        word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        known = _error_words.setdefault(device, (word, word.numpy()))  # another thread may be first
    return known


_refusals: dict[torch.device, tuple[str, ...]] = {}
"""What the numbers in a device's error word mean for the last kernel that may have set it."""


def raise_pending(device: torch.device | str) -> None:
    """Raises a FrameError if work that was started on a device before has found damage.

    Each call of a codec does this first. After the replay of a captured graph, or after the last
    call, do it yourself when `torch.cuda.synchronize()` has returned.
    """
    device = device if isinstance(device, torch.device) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    word = _error_pair(device)[1]
    if found := int(word[0]):
        word[0] = 0
        reasons = _refusals.get(device, ())
        reason = reasons[found - 1] if found <= len(reasons) else "its payload is wrong"
        raise FrameError(
            f"a frame that was worked on before this call on {device} is damaged: {reason}; what "
            "was made of it since then must not be used."
        )


def _rng(
    kernel: Kernel, state: State | None, device: torch.device, count: int = 1
) -> list[torch.Tensor] | None:
    """Returns seed, stream and step on the device; None if no random number is drawn."""
    if not kernel.random:
        return None
    assert state is not None
    found = [state[key] for key in ("seed", "stream", "step")]
    for key, held, numel in zip(("seed", "stream", "step"), found, (count, count, 1), strict=True):
        fits = isinstance(held, torch.Tensor) and held.dtype == torch.int64
        if not fits or held.device != device or held.numel() != numel:
            raise UsageError(
                f"state {key!r} is {held!r}; it must be a tensor of {numel} int64 on {device}, as "
                "init(x) makes it."
            )
    return found


def _ratio(state: State | None, device: torch.device) -> torch.Tensor | None:
    """Returns the factor on the residual, on the device; None if it is 1."""
    given = None if state is None else state.get("lr_ratio")
    if given is None:
        return None
    if isinstance(given, torch.Tensor) and given.device == device and given.numel() == 1:
        return given.to(torch.float32)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "lr_ratio is a number on the host, which a CUDA graph would keep for all replays; give "
            "a tensor with one element on the GPU."
        )
    return torch.full((1,), lr_ratio(state), dtype=torch.float32, device=device)  # nothing waits


def _elements(x: torch.Tensor) -> torch.Tensor:
    """Returns the elements as kernels take them: bfloat16 as its bits."""
    x = x.detach() if x.requires_grad else x
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
