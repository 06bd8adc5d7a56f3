"""Tensors as kernels take them: flat NumPy views of the same memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hipress.errors import BackendError, UsageError

STORAGE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
"""Dtypes of gradients, and their names in CompLL."""


def storage(x: torch.Tensor, what: str) -> str:
    """The storage name of a gradient's dtype; refuses what no kernel takes."""
    if not isinstance(x, torch.Tensor):
        raise UsageError(
            f"{what} is a {type(x).__name__}; a codec takes a torch.Tensor: use torch.as_tensor(x)."
        )
    if x.dtype not in STORAGE:
        choices = ", ".join(str(d).removeprefix("torch.") for d in STORAGE)
        raise UsageError(
            f"{what} has dtype {str(x.dtype).removeprefix('torch.')}; a codec takes {choices}: "
            "convert it first."
        )
    if x.device.type != "cpu":
        raise BackendError(
            f"{what} is on {x.device}; this version compresses on the CPU only: use x.cpu()."
        )
    if x.layout is not torch.strided:
        raise UsageError(f"{what} is sparse ({x.layout}); a codec takes dense tensors.")
    return STORAGE[x.dtype]


def flat(x: torch.Tensor) -> NDArray[Any]:
    """The elements of a contiguous CPU tensor, 16-bit floats as uint16."""
    x = x.detach()
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.reshape(-1).view(torch.int16).numpy().view(np.uint16)
    return x.reshape(-1).numpy()


def scratch(num_bytes: int) -> NDArray[np.uint8]:
    """Memory for one kernel call; each thread keeps the largest it was asked for."""
    held: NDArray[np.uint8] | None = getattr(_local, "scratch", None)
    if held is None or held.nbytes < num_bytes:
        held = np.empty(max(num_bytes, 65_536), np.uint8)
        _local.scratch = held
    return held


_local = threading.local()
