"""Runs a codec's kernels on a GPU without waiting for the device.

The host checks lengths and shapes. What only the device can see (a frame's header, counts and
indices in it) is clamped there, and a damaged frame sets a word in pinned memory: the next call
on that device finds it and raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from hipress.codecs import frame
from hipress.codecs.base import lr_ratio
from hipress.compll.backends.gpu.runtime import DeviceCache, Gradient, Kernels, Sizes
from hipress.compll.passes.derive import ALPHA, MU, RHO
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
        self._headers = DeviceCache()

    def encode(
        self, x: torch.Tensor, states: list[torch.Tensor], state: State | None, out: torch.Tensor
    ) -> None:
        """Writes the frame of `x` to `out`; updates the states."""
        codec, device = self._codec, x.device
        raise_pending(device)
        if x.numel() == 0:
            out.zero_()
            out[: frame.frame_bytes([0])] = self.header(0, device)
            if self._loaded.encode.random:
                assert state is not None
                out[8:16].view(torch.int64).copy_(state["step"])
            return
        params = codec.bound.floats(self._loaded.encode, {MU: codec.mu})
        sizes = self._encode.sizes([Gradient(x.numel(), params, frame.frame_bytes([0]))], device)
        _refusals[device] = self._encode.refusals
        rng = _rng(self._loaded.encode, state, device)
        self._encode(
            sizes,
            self.header(x.numel(), device),
            out,
            [_flat(x.contiguous()), *states],
            rng,
            _ratio(state, device),
            error_word(device),
        )

    def decode(
        self, payload: torch.Tensor, out: torch.Tensor, *, add: bool, alpha: float, waits: bool
    ) -> None:
        """Writes `alpha * decoded` to `out`, or adds it; `waits` makes it find damage at once."""
        device = out.device
        raise_pending(device)
        kernels = self._decode_add if add else self._decode
        params = self._codec.bound.floats(self._loaded.decode, {ALPHA: alpha})
        sizes = kernels.sizes([Gradient(out.numel(), params, frame.frame_bytes([0]))], device)
        word = error_word(device)
        header = self.header(out.numel(), device)
        zero = _zeros(device)
        _refusals[device] = kernels.refusals
        kernels(sizes, header, payload, [_flat(out)], [zero] * 3, _one(device), word)
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
    ) -> None:
        """Writes the frame of many gradients in the launches of one."""
        device = flat.device
        raise_pending(device)
        params = self._codec.bound.floats(self._loaded.encode, {MU: self._codec.mu})
        sizes = self._bulk_sizes(bulk, self._encode, params, device)
        self._encode(
            sizes,
            self._bulk_header(bulk, device),
            out,
            [_flat(flat), *states],
            _rng(self._loaded.encode, state, device, len(bulk.numels)),
            _ratio(state, device),
            error_word(device),
        )

    def decode_bulk(
        self, bulk: Bulk, payload: torch.Tensor, out: torch.Tensor, *, add: bool, alpha: float
    ) -> None:
        """Reads a frame of many gradients in the launches of one."""
        device = out.device
        raise_pending(device)
        kernels = self._decode_add if add else self._decode
        params = self._codec.bound.floats(self._loaded.decode, {ALPHA: alpha})
        sizes = self._bulk_sizes(bulk, kernels, params, device)
        _refusals[device] = kernels.refusals
        rng = [_zeros(device, len(bulk.numels))] * 3
        header = self._bulk_header(bulk, device)
        kernels(sizes, header, payload, [_flat(out)], rng, _one(device), error_word(device))

    def _bulk_sizes(
        self, bulk: Bulk, kernels: Kernels, params: tuple[float, ...], device: torch.device
    ) -> Sizes:
        def make() -> Sizes:
            rows = zip(bulk.numels, bulk.places, bulk.offsets, strict=True)
            gradients = [Gradient(n, params, place, at) for n, place, at in rows]
            return kernels.make(gradients, device)

        sizes: Sizes = bulk.kept.get((kernels.name, self._dtype, params, device), device, make)
        return sizes

    @staticmethod
    def _bulk_header(bulk: Bulk, device: torch.device) -> torch.Tensor:
        header: torch.Tensor = bulk.kept.get(
            ("header", device), device, lambda: bulk.header.to(device)
        )
        return header

    def header(self, numel: int, device: torch.device) -> torch.Tensor:
        """Returns header and table of the frame of `numel` elements, on the device."""

        def make() -> torch.Tensor:
            size = self._codec.wire_bytes(numel)
            head = torch.zeros(size, dtype=torch.uint8)
            body = frame.Body(numel, size - frame.frame_bytes([0]))
            frame.write_header(
                head.numpy(), frame.Header(codec_hash=self._codec.codec_hash), [body]
            )
            return head[: frame.frame_bytes([0])].clone().to(device)

        header: torch.Tensor = self._headers.get((numel, device), device, make)
        return header


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
    ) -> None:
        """Writes the frame of the mean to `out`."""
        device = out.device
        raise_pending(device)
        values = dict(self._worker.bound.values) | dict(self._back.bound.values)
        values |= {ALPHA: alpha, MU: self._back.mu, RHO: 1.0}
        params = tuple(float(values[name]) for name in self._kernel.params)
        sizes = self._merge.sizes([Gradient(numel, params, frame.frame_bytes([0]))], device)
        expected = self._worker.gpu("f32").header(numel, device)
        header = self._back.gpu("f32").header(numel, device)
        _refusals[device] = self._merge.refusals
        memory = [expected, *payloads, *states]
        rng = _rng(self._kernel, state, device)
        self._merge(sizes, header, out, memory, rng, _ratio(state, device), error_word(device))


@cache
def error_word(device: torch.device) -> torch.Tensor:
    """Returns the word that kernels set when they find damage, in memory that the host can read."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")


_refusals: dict[torch.device, tuple[str, ...]] = {}
"""What the numbers in a device's error word mean for the last kernel that may have set it."""


def raise_pending(device: torch.device | str) -> None:
    """Raises a FrameError if work that was started on a device before has found damage.

    Each call of a codec does this first. After the replay of a captured graph, or after the last
    call, do it yourself when `torch.cuda.synchronize()` has returned.
    """
    device = torch.device(device)
    word = error_word(device)
    found = int(word[0])
    if found:
        word[0] = 0
        reasons = _refusals.get(device, ())
        reason = reasons[found - 1] if found <= len(reasons) else "its payload is wrong"
        raise FrameError(
            f"a frame that was worked on before this call on {device} is damaged: {reason}; what "
            "was made of it since then must not be used."
        )


# Copied from the host, not filled on the device: the first caller waits until they are there, and
# no other stream can read them before.


@cache
def _zeros(device: torch.device, count: int = 1) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64).to(device)


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32).to(device)


def _rng(
    kernel: Kernel, state: State | None, device: torch.device, count: int = 1
) -> list[torch.Tensor]:
    """Returns seed, stream and step on the device; zeros if no random number is drawn."""
    if not kernel.random:
        return [_zeros(device, count)] * 3
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


def _ratio(state: State | None, device: torch.device) -> torch.Tensor:
    """Returns the factor on the residual, on the device."""
    given = None if state is None else state.get("lr_ratio")
    if given is None:
        return _one(device)
    if isinstance(given, torch.Tensor) and given.device == device and given.numel() == 1:
        return given.to(torch.float32)
    return torch.tensor(lr_ratio(state)).to(device)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Returns the elements as kernels take them: bfloat16 as its bits."""
    x = x.detach().reshape(-1)
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
