"""A pytest plugin that spoils one bit of what GPU kernels encode: the contract must notice."""

from __future__ import annotations

from typing import Any

from hipress.codecs.gpu import GpuKernels

_encode = GpuKernels.encode


def _spoilt(self: GpuKernels, x: Any, states: Any, state: Any, out: Any) -> None:
    _encode(self, x, states, state, out)
    out[80] ^= 1


GpuKernels.encode = _spoilt  # type: ignore[method-assign]
