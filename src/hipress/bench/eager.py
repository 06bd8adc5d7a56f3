"""The yardstick: each algorithm in eager torch, as one writes it down.

One expression per step of the formula, whole tensors at a time, results in new tensors. The work
is that of the codec: the same scales, the same random rounding, bits really packed, residuals
really kept. `eager_tuned` holds the same forms with every buffer made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hipress.codecs.expression import Call, Value, parse

Parts = tuple[Tensor, ...]
"""What would travel: a few tensors, scales first."""


@dataclass(frozen=True)
class EagerCodec:
    """One algorithm: a gradient to parts, and parts (of n elements) to a gradient."""

    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts, int], Tensor]


def build(expression: str) -> EagerCodec | None:
    """The eager form of a codec expression, or None where this file has none.

    Example:
        >>> build("ef(topk(ratio=0.01,exact=true))").encode(torch.randn(1000))[0].numel()
        10
    """
    return _build(parse(expression))


def _build(call: Call) -> EagerCodec | None:
    options = dict(call.options)
    if call.name == "ef":
        inner = _build(
            Call(
                call.args[0].name,
                call.args[0].args,
                (("ef", False),) + tuple(o for o in call.args[0].options if o[0] != "ef"),
            )
        )
        return None if inner is None else _with_feedback(inner)
    feeds_back = options.pop("ef", call.name in ("onebit", "topk"))
    made = _FORMS.get(call.name)
    if made is None:
        return None
    form = made(options)
    return _with_feedback(form) if feeds_back else form


def _with_feedback(inner: EagerCodec) -> EagerCodec:
    residual: list[Tensor] = []

    def encode(x: Tensor) -> Parts:
        corrected = x + residual[0] if residual else x
        parts = inner.encode(corrected)
        residual[:] = [corrected - inner.decode(parts, x.numel())]
        return parts

    return EagerCodec(encode, inner.decode)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of a few bits side by side in bytes, low bits first."""
    per_byte = 8 // bits
    rows = pad(codes.to(torch.uint8), (0, -codes.numel() % per_byte)).view(-1, per_byte)
    weights = 2 ** torch.arange(0, 8, bits, dtype=torch.uint8)
    return (rows * weights).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, num_elements: int) -> Tensor:
    """The codes again."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    codes: Tensor = (packed.unsqueeze(1) >> shifts) & (2**bits - 1)
    return codes.view(-1)[:num_elements]


def _cast(dtype: torch.dtype) -> EagerCodec:
    return EagerCodec(lambda x: (x.to(dtype, copy=True),), lambda parts, _: parts[0].float())


def _onebit(options: dict[str, Value]) -> EagerCodec:
    block = int(options.get("block", 1024))

    def encode(x: Tensor) -> Parts:
        rows = pad(x.abs(), (0, -x.numel() % block)).view(-1, block)
        sizes = torch.full((len(rows),), float(block))
        sizes[-1:].fill_(x.numel() - block * (len(rows) - 1))
        return rows.sum(1) / sizes, pack(x < 0, 1)

    def decode(parts: Parts, n: int) -> Tensor:
        scales, packed = parts
        return (
            torch.where(unpack(packed, 1, n) == 1, -1.0, 1.0) * scales.repeat_interleave(block)[:n]
        )

    return EagerCodec(encode, decode)


def _minmax(options: dict[str, Value]) -> EagerCodec:
    bits = int(options.get("bits", 2))

    def encode(x: Tensor) -> Parts:
        low, high = x.min(), x.max()
        gap = (high - low) / (2**bits - 1)
        codes = torch.floor((x - low) / gap + torch.rand_like(x)).clamp(0, 2**bits - 1)
        return torch.stack([low, high]), pack(codes, bits)

    def decode(parts: Parts, n: int) -> Tensor:
        (low, high), packed = parts
        gap = (high - low) / (2**bits - 1)
        return torch.add(low, unpack(packed, bits, n) * gap)

    return EagerCodec(encode, decode)


def _terngrad(options: dict[str, Value]) -> EagerCodec:
    clip = float(options.get("clip", 2.5))

    def encode(x: Tensor) -> Parts:
        scale = x.abs().max()
        if clip > 0:
            scale = torch.minimum(scale, clip * x.std(correction=0))
        taken = torch.rand_like(x) * scale < x.abs()
        return scale, pack(torch.where(taken, torch.where(x < 0, 2, 1), 0), 2)

    def decode(parts: Parts, n: int) -> Tensor:
        scale, packed = parts
        codes = unpack(packed, 2, n)
        return scale * ((codes == 1).float() - (codes == 2).float())

    return EagerCodec(encode, decode)


def _topk(options: dict[str, Value]) -> EagerCodec:
    ratio = float(options.get("ratio", 0.01))
    share = float(options.get("sample", 0.01))

    def encode(x: Tensor) -> Parts:
        k = max(1, int(ratio * x.numel()))
        if options.get("exact", False):
            index = x.abs().topk(k, sorted=False).indices
        else:
            m = min(x.numel(), max(4096, int(share * x.numel())))
            sample = x[torch.randint(x.numel(), (m,))].abs()
            threshold = sample.topk(max(1, int(ratio * m))).values[-1]
            index = (x.abs() >= threshold).nonzero().view(-1)[:k]
        return index.int(), x[index]

    def decode(parts: Parts, n: int) -> Tensor:
        index, values = parts
        return torch.zeros(n).scatter_(0, index.long(), values)

    return EagerCodec(encode, decode)


_FORMS: dict[str, Callable[[dict[str, Value]], EagerCodec]] = {
    "none": lambda _: _cast(torch.float32),
    "fp16": lambda _: _cast(torch.float16),
    "bf16": lambda _: _cast(torch.bfloat16),
    "onebit": _onebit,
    "minmax": _minmax,
    "terngrad": _terngrad,
    "topk": _topk,
}
