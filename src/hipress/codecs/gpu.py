"""Runs a codec's kernels on a GPU: nothing here waits for the device.

The host checks lengths and shapes. What only the device can see (a frame's header, counts and
indices in it) is clamped there, and a damaged frame sets a word in pinned memory: the next call
on that device finds it and says so.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from hipress.codecs import frame
from hipress.compll.derive import ALPHA, MU
from hipress.compll.gpu.runtime import Gradient, Kernels
from hipress.errors import FrameError

if TYPE_CHECKING:
    from hipress.codecs.base import State
    from hipress.codecs.program import ProgramCodec


class GpuKernels:
    """The kernels of a codec for gradients of one dtype."""

    def __init__(self, codec: ProgramCodec, dtype: str) -> None:
        self._codec = codec
        loaded = codec.bound.load("gpu", dtype=dtype, variant=codec.variant)
        self._loaded = loaded
        self._encode = Kernels(loaded.module, "encode")
        self._decode = Kernels(loaded.module, "decode")
        self._decode_add = Kernels(loaded.module, "decode_add")
        self._headers: dict[tuple[int, torch.device], torch.Tensor] = {}

    def encode(
        self, x: torch.Tensor, states: list[torch.Tensor], state: State | None, out: torch.Tensor
    ) -> None:
        """Writes the frame of `x` to `out`; updates the states."""
        codec, device = self._codec, x.device
        raise_pending(device)
        if x.numel() == 0:
            out.zero_()
            out[: frame.frame_bytes([0])] = self._header(0, device)
            return
        params = codec.bound.floats(self._loaded.encode, {MU: codec.mu})
        sizes = self._encode.sizes([Gradient(x.numel(), params, frame.frame_bytes([0]))], device)
        rng = [_zero(device)] * 3
        if self._loaded.encode.random:
            assert state is not None
            rng = [state[key] for key in ("seed", "stream", "step")]
        self._encode(
            sizes,
            self._header(x.numel(), device),
            out,
            [_flat(x.contiguous()), *states],
            rng,
            _ratio(state, device),
            error_word(device),
        )

    def decode(
        self, payload: torch.Tensor, out: torch.Tensor, *, add: bool, alpha: float, waits: bool
    ) -> None:
        """`out = alpha * decoded`, or `out += alpha * decoded`; `waits` finds damage at once."""
        device = out.device
        raise_pending(device)
        kernels = self._decode_add if add else self._decode
        params = self._codec.bound.floats(self._loaded.decode, {ALPHA: alpha})
        sizes = kernels.sizes([Gradient(out.numel(), params, frame.frame_bytes([0]))], device)
        word = error_word(device)
        header = self._header(out.numel(), device)
        zero = _zero(device)
        _refusals[device] = kernels.refusals
        kernels(sizes, header, payload, [_flat(out)], [zero] * 3, _one(device), word)
        if waits:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            raise_pending(device)

    def _header(self, numel: int, device: torch.device) -> torch.Tensor:
        """Header and table of the frame of some elements, on the device."""
        key = (numel, device)
        if key not in self._headers:
            size = self._codec.wire_bytes(numel)
            head = torch.zeros(size, dtype=torch.uint8)
            body = frame.Body(numel, size - frame.frame_bytes([0]))
            frame.write_header(
                head.numpy(), frame.Header(codec_hash=self._codec.codec_hash), [body]
            )
            self._headers[key] = head[: frame.frame_bytes([0])].clone().to(device)
        return self._headers[key]


@cache
def error_word(device: torch.device) -> torch.Tensor:
    """A word that kernels set where they find damage; in memory that the host can read."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")


_refusals: dict[torch.device, tuple[str, ...]] = {}
"""What the numbers in a device's error word mean: of the last kernel that may have set it."""


def raise_pending(device: torch.device) -> None:
    """Raises where an earlier frame on this device was damaged.

    Raises:
        FrameError: Once for each time the word was found set.
    """
    word = error_word(device)
    found = int(word[0])
    if found:
        word[0] = 0
        reasons = _refusals.get(device, ())
        reason = reasons[found - 1] if found <= len(reasons) else "its payload is wrong"
        raise FrameError(
            f"a frame that was decoded on {device} before is damaged: {reason}; what was decoded "
            "since then must not be used."
        )


@cache
def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)


def _ratio(state: State | None, device: torch.device) -> torch.Tensor:
    """The factor on the residual, on the device."""
    given = None if state is None else state.get("lr_ratio")
    if given is None:
        return _one(device)
    return given.to(device, torch.float32, non_blocking=True)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The elements as kernels take them: bfloat16 as its bits."""
    x = x.detach().reshape(-1)
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
