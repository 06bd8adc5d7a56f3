"""Tensors as kernels take them: flat NumPy views of the same memory."""

from __future__ import annotations

import os
import threading
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hipress.codecs.frame import ALIGN
from hipress.errors import BackendError, FrameError, UsageError

STATES = {
    **{"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16},
    **{"u8": torch.uint8, "i64": torch.int64},
}
"""Dtypes of states, by their names in CompLL."""
STORAGE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
"""Dtypes of gradients, and their names in CompLL."""


def storage(x: torch.Tensor, what: str) -> str:
    """Returns the name in CompLL of a gradient's dtype; refuses what no kernel takes."""
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
    on_device(x, what)
    if x.layout is not torch.strided:
        raise UsageError(f"{what} is sparse ({x.layout}); a codec takes dense tensors.")
    return STORAGE[x.dtype]


def on_device(x: torch.Tensor, what: str) -> None:
    """Refuses a tensor on a device without a backend."""
    if x.device.type not in ("cpu", "cuda"):
        raise BackendError(
            f"{what} is on {x.device}; codecs run on CPU and CUDA tensors: use x.cpu()."
        )


def gpu_takes(x: torch.Tensor) -> bool:
    """Returns whether the gpu backend runs on the device of this tensor."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET", "0") == "1"


def check_state(
    name: str, held: torch.Tensor, x: torch.Tensor, numel: int, dtype: torch.dtype
) -> None:
    """Refuses an array that cannot be a state of `numel` elements for the gradient `x`."""
    if (
        isinstance(held, torch.Tensor)
        and held.dtype == dtype
        and held.numel() == numel
        and held.device == x.device
        and held.is_contiguous()
    ):
        return
    if isinstance(held, torch.Tensor):
        found, needed = f"has {held.numel()} elements of {held.dtype}", ""
        if held.device != x.device:
            found, needed = f"{found} on {held.device}", f" on {x.device}"
        if not held.is_contiguous():
            found, needed = f"{found} with gaps", f"{needed} without gaps"
    else:
        found, needed = f"is a {type(held).__name__}, not a tensor", ""
    raise UsageError(
        f"state {name!r} {found}; the gradient needs {numel} of {dtype}{needed}: make a new "
        "state with init(x)."
    )


def integer(value: Any, what: str) -> int:
    """Returns a whole number that a caller gave; `what` names it in the error."""
    if isinstance(value, Integral):  # NumPy's too
        return int(value)
    found = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
    raise UsageError(f"{what} is {found}; it must be a whole number.")


def seed(value: Any, what: str) -> int:
    """Returns a seed or a stream: a whole number of 64 bits, as a state holds it."""
    number = integer(value, what)
    if not -(2**63) <= number < 2**63:
        raise UsageError(f"{what} is {number}; it must lie between -2^63 and 2^63 - 1.")
    return number


def factor(alpha: Any) -> float:
    """Returns the factor of decode from a number or a tensor that holds one."""
    if isinstance(alpha, float | int):
        return alpha
    if isinstance(alpha, Real) or (isinstance(alpha, torch.Tensor) and alpha.numel() == 1):
        return float(alpha)
    found = "a tensor of several" if isinstance(alpha, torch.Tensor) else repr(alpha)
    raise UsageError(f"alpha is {found}; it must be one number, e.g. alpha=1 / num_workers.")


def whole(name: str, held: torch.Tensor) -> int:
    """Returns the integer that a state holds: its seed, its stream or its step."""
    try:
        return int(held)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"state {name!r} is {held!r}; it must be one whole number, as init(x) makes it."
        ) from error


def checked_out(out: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """Returns memory for a frame of some bytes, flat; refuses what kernels cannot write to."""
    if not isinstance(out, torch.Tensor):
        raise UsageError(f"out is a {type(out).__name__}; encode writes into a uint8 tensor.")
    if out.device != device:
        raise UsageError(
            f"out is on {out.device}, the gradient on {device}; they must be on one device."
        )
    if out.dtype != torch.uint8 or out.numel() != size or not out.is_contiguous():
        raise UsageError(
            f"out has {out.numel()} elements of {out.dtype}; encode needs {size} contiguous bytes: "
            "torch.empty(c.wire_bytes(x.numel()), dtype=torch.uint8)."
        )
    if out.data_ptr() % ALIGN:
        raise UsageError(f"out does not start on a multiple of {ALIGN} bytes; allocate it.")
    return out.view(-1)


def checked_payload(payload: torch.Tensor) -> torch.Tensor:
    """Returns a frame as kernels read it; refuses what is not a frame."""
    if not isinstance(payload, torch.Tensor):
        raise FrameError(
            f"a payload is a 1-D uint8 tensor, as encode returns it; this is a "
            f"{type(payload).__name__}."
        )
    on_device(payload, "the payload")
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise FrameError(
            f"a payload is a 1-D uint8 tensor; this has dtype {payload.dtype} and "
            f"{payload.dim()} dimensions."
        )
    payload = payload.detach().contiguous()
    if payload.data_ptr() % ALIGN:  # kernels read floats and words from it
        payload = payload.clone()
    return payload


def flat(x: torch.Tensor) -> NDArray[Any]:
    """Returns the elements of a contiguous CPU tensor, 16-bit floats as uint16."""
    x = x.detach()
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.reshape(-1).view(torch.int16).numpy().view(np.uint16)
    return x.reshape(-1).numpy()


class Scratch(threading.local):
    """Memory that is used again and again; each computing thread has its own."""

    def __init__(self) -> None:
        self._held = torch.empty(0)

    def take(self, numel: int, device: torch.device) -> torch.Tensor:
        """Returns float32 memory with any content."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.empty(numel, device=device)  # of the graph, which needs it for replays
        if self._held.numel() < numel or self._held.device != device:
            self._held = torch.zeros(numel, device=device)
        return self._held[:numel]


def scratch(num_bytes: int) -> NDArray[np.uint8]:
    """Returns memory for one kernel call; each thread keeps the largest it was asked for."""
    held: NDArray[np.uint8] | None = getattr(_local, "scratch", None)
    if held is None or held.nbytes < num_bytes:
        held = np.empty(max(num_bytes, 65_536), np.uint8)
        _local.scratch = held
    return held


_local = threading.local()
