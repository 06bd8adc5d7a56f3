"""Residuals in fewer bits: `ef(..., residual="int8")` and `ef(..., residual="bf16")`.

A stored residual is a frame of a program of its own. Each `encode` decodes it into float32 memory
that all gradients share, works on that, and encodes what is left. Whoever keeps states works on the
bodies of these frames: `int8` as bytes, `bf16` as bfloat16. Only residuals are bytes there.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

import torch

from hipress.codecs.gpu import header_of
from hipress.codecs.program import ProgramCodec
from hipress.compll.build import parse_program

FLOAT32 = "float32"
KINDS = (FLOAT32, "bf16", "int8")
"""How `ef` can keep a residual."""


@lru_cache(maxsize=16)
def keeper(kind: str, backend: str | None = None) -> ProgramCodec:
    """Returns the codec whose frames are residuals of a kind."""
    file = f"residual_{kind}.pse"
    text = resources.files("hipress.codecs").joinpath(file).read_text("utf-8")
    return ProgramCodec(parse_program(text, file=file).bind({}), name=file, backend=backend)


def body(kind: str, held: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns the body of a frame as states are kept: zeros in it stand for zeros."""
    return held if kind == "int8" else held[: 2 * numel].view(torch.bfloat16)


def values(held: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns the elements of a state as numbers."""
    if held.dtype != torch.uint8:
        return held.view(-1)
    codec = keeper("int8")
    head = torch.frombuffer(bytearray(header_of(codec, numel)), dtype=torch.uint8)
    frame = torch.cat([head.to(held.device), held])
    return codec.decode(frame, out=torch.empty(numel, device=held.device))


def put(held: torch.Tensor, new: torch.Tensor, numel: int) -> None:
    """Sets the elements of a state from those of another, or from numbers."""
    if held.dtype == new.dtype or torch.uint8 not in (held.dtype, new.dtype):
        held.copy_(new)
    elif held.dtype != torch.uint8:
        held.copy_(values(new, numel))
    else:
        codec, new = keeper("int8"), new.to(held.device)
        frame = codec.encode(new, codec.init(new))
        held.copy_(frame[-held.numel() :])


def scale(held: torch.Tensor, factor: float, numel: int) -> None:
    """Multiplies the elements of a state by a factor; exact for powers of two."""
    if held.dtype == torch.uint8:
        put(held, values(held, numel) * factor, numel)
    else:
        held.mul_(factor)
