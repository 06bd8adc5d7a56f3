"""The baseline of `hipress bench codecs`: each algorithm in eager torch, tuned as far as it goes.

The forms do the work of the codecs: the same scales, the same random rounding, bits really packed,
residuals really kept. They use whole-tensor operations, in place or into buffers made once (a fresh
100 MB tensor costs more in page faults than most operations on it), and of two ways to say a thing
the faster one. What they leave out makes them faster, not slower: no header, no checks, no handling
of non-finite values. Bit tricks that reinterpret eight booleans as one integer are left out too;
that is no longer torch as people write it.

An instance is made for one gradient size and owns its buffers, and the parts that `encode`
returns are views of them: valid until the next `encode`. A new instance for every call is the
same algorithm with every buffer made anew, as eager torch is mostly written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from hipress.codecs.expression import Call, Value, parse

Parts = tuple[Tensor, ...]
"""What would travel: a few tensors, scales first."""


class EagerCodec(ABC):
    """One algorithm for gradients of `num_elements` float32 values."""

    def __init__(self, num_elements: int, wide: Tensor | None = None) -> None:
        self.num_elements = num_elements
        self._wide = torch.empty(num_elements) if wide is None else wide
        """A buffer for one float32 value of each element."""

    @abstractmethod
    def encode(self, x: Tensor) -> Parts:
        """Compresses the 1-D gradient `x`, which stays as it is."""

    @abstractmethod
    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        """Writes the decoded gradient into `out`."""

    def decode_add(self, parts: Parts, out: Tensor, alpha: float) -> Tensor:
        """Adds `alpha` times the decoded gradient to `out`."""
        return out.add_(self.decode(parts, self._wide), alpha=alpha)

    def subtract(self, parts: Parts, encoded: Tensor) -> None:
        """Takes what `parts` carry out of `encoded`, the tensor they were made from."""
        self.decode_add(parts, encoded, -1.0)


def build(expression: str, num_elements: int) -> EagerCodec | None:
    """Returns the eager form of a codec expression, or None where this file has none.

    Example:
        >>> build("ef(topk(ratio=0.01,exact=true))", 1000).encode(torch.randn(1000))[0].numel()
        10
    """
    return _build(parse(expression), num_elements)


class EagerFeedback(EagerCodec):
    """Error feedback around any form: encode gradient + residual, keep what was not sent."""

    def __init__(self, inner: EagerCodec) -> None:
        super().__init__(inner.num_elements, inner._wide)
        self.inner = inner
        self.residual = torch.zeros(inner.num_elements)

    def encode(self, x: Tensor) -> Parts:
        parts = self.inner.encode(self.residual.add_(x))
        self.inner.subtract(parts, self.residual)
        return parts

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        return self.inner.decode(parts, out)

    def decode_add(self, parts: Parts, out: Tensor, alpha: float) -> Tensor:
        return self.inner.decode_add(parts, out, alpha)


class EagerCast(EagerCodec):
    """`none`, `fp16`, `bf16`: a copy into another dtype."""

    def __init__(self, num_elements: int, dtype: torch.dtype) -> None:
        super().__init__(num_elements)
        self._wire = torch.empty(num_elements, dtype=dtype)

    def encode(self, x: Tensor) -> Parts:
        return (self._wire.copy_(x),)

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        return out.copy_(parts[0])

    def decode_add(self, parts: Parts, out: Tensor, alpha: float) -> Tensor:
        (values,) = parts
        if values.dtype != out.dtype:
            # Widening first: add_ with mixed dtypes leaves the vector path (49 ms against 11 ms
            # for 25M on one core of an EPYC).
            values = self._wide.copy_(values)
        return out.add_(values, alpha=alpha)


class EagerOnebit(EagerCodec):
    """`onebit(block)`: the sign of each value and, per block, one scale: the mean of |x|."""

    def __init__(self, num_elements: int, block: int) -> None:
        super().__init__(num_elements)
        self._block = block
        self._is_negative = torch.empty(num_elements, dtype=torch.bool)
        self._scales = torch.empty(-(-num_elements // block), 1)
        self._packer = _Packer(num_elements, bits=1)
        self._table = 1.0 - 2.0 * _code_table(1)

    def encode(self, x: Tensor) -> Parts:
        torch.abs(x, out=self._wide)
        for scales, wide in self._block_rows(self._wide, self._scales):
            torch.mean(wide, 1, keepdim=True, out=scales)
        torch.lt(x, 0, out=self._is_negative)
        return self._scales, self._packer.pack(self._is_negative.view(torch.uint8))

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        _unpack(parts[1], self._table, out)
        for scales, rows in self._block_rows(out, parts[0]):
            rows.mul_(scales)
        return out

    def decode_add(self, parts: Parts, out: Tensor, alpha: float) -> Tensor:
        signs = _unpack(parts[1], self._table, self._wide)
        for (scales, rows), (_, sign_rows) in self._paired_rows(out, signs, parts[0]):
            rows.addcmul_(sign_rows, scales, value=alpha)
        return out

    def subtract(self, parts: Parts, encoded: Tensor) -> None:
        for (scales, rows), (_, wide) in self._paired_rows(encoded, self._wide, parts[0]):
            # The sign is at hand, which saves unpacking the bits. Not torch.where on the booleans:
            # with a broadcast scale it is 12 times slower.
            rows.sub_(torch.copysign(scales, rows, out=wide))

    def _block_rows(self, x: Tensor, scales: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(scales, rows) pairs: the whole blocks as a matrix, then the short last block."""
        num_whole = x.numel() // self._block
        whole = num_whole * self._block
        body, tail = x[:whole].view(num_whole, self._block), x[whole:].view(1, -1)
        pairs = [(scales[:num_whole], body), (scales[num_whole:], tail)]
        return [pair for pair in pairs if pair[1].numel()]

    def _paired_rows(
        self, x: Tensor, y: Tensor, scales: Tensor
    ) -> Iterator[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        return zip(self._block_rows(x, scales), self._block_rows(y, scales), strict=True)


class EagerMinMax(EagerCodec):
    """`minmax(bits)`: 2^bits levels from min to max, each value rounded up or down at random."""

    def __init__(self, num_elements: int, bits: int) -> None:
        self._top = 2**bits - 1
        self._rounder = _Rounder(num_elements, bits)
        self._table = _code_table(bits)
        super().__init__(num_elements, self._rounder.values)

    def encode(self, x: Tensor) -> Parts:
        low, high = torch.aminmax(x)
        # All values equal: any gap will do, every level is 0.
        gap = ((high - low) / self._top).clamp_(min=torch.finfo(torch.float32).tiny)
        levels = torch.sub(x, low, out=self._rounder.values).div_(gap)
        levels.add_(self._rounder.noise.uniform_()).clamp_(max=self._top)
        return torch.stack((low, gap)), self._rounder.pack()

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        low, gap = parts[0]
        return _unpack(parts[1], self._table * gap + low, out)


class EagerTernGrad(EagerCodec):
    """`terngrad(clip)`: s * sign(x) with probability |x| / s; s = min(max |x|, clip * sigma)."""

    def __init__(self, num_elements: int, clip: float) -> None:
        self._clip = clip
        self._rounder = _Rounder(num_elements, bits=2)
        self._table = _code_table(2) - 1.0
        super().__init__(num_elements, self._rounder.values)

    def encode(self, x: Tensor) -> Parts:
        low, high = torch.aminmax(x)
        scale = torch.maximum(-low, high)
        if self._clip > 0:
            scale.clamp_(max=self._clip * x.std(correction=0))
        scale.clamp_(min=torch.finfo(torch.float32).tiny)
        # floor(x/s + u) is -1, 0 or 1 with just the probabilities wanted; noise from 1 to 2 makes
        # the codes non-negative, so that the cast to uint8 is the floor.
        codes = torch.div(x, scale, out=self._rounder.values)
        codes.add_(self._rounder.noise.uniform_(1, 2)).clamp_(0, 2)
        return scale.view(1), self._rounder.pack()

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        return _unpack(parts[1], self._table * parts[0], out)


class EagerTopK(EagerCodec):
    """`topk(ratio, exact)`: the k = ratio * n largest magnitudes, as int32 indices and values.

    With `exact=False` the threshold comes from a strided sample of 1 %, at least 4096; what passes
    it is taken in index order and cut to k, so fewer than k may be sent.
    """

    def __init__(self, num_elements: int, ratio: float, exact: bool) -> None:
        super().__init__(num_elements)
        self._exact = exact
        self._ratio = ratio
        self._k = min(num_elements, max(1, int(ratio * num_elements)))
        self._stride = max(1, num_elements // max(4096, num_elements // 100))
        self._passes = torch.empty(num_elements, dtype=torch.bool)

    def encode(self, x: Tensor) -> Parts:
        torch.abs(x, out=self._wide)
        index = self._largest() if self._exact else self._above_threshold()
        return index.int(), torch.index_select(x, 0, index)

    def decode(self, parts: Parts, out: Tensor) -> Tensor:
        return out.zero_().index_copy_(0, parts[0].long(), parts[1])

    def decode_add(self, parts: Parts, out: Tensor, alpha: float) -> Tensor:
        return out.index_add_(0, parts[0], parts[1], alpha=alpha)

    def subtract(self, parts: Parts, encoded: Tensor) -> None:
        encoded.index_fill_(0, parts[0].long(), 0.0)  # what is sent leaves exactly zero behind

    def _largest(self) -> Tensor:
        return torch.topk(self._wide, self._k, sorted=False).indices

    def _above_threshold(self) -> Tensor:
        sample = self._wide[:: self._stride]
        num_above = min(sample.numel(), max(1, int(self._ratio * sample.numel())))
        threshold = torch.topk(sample, num_above, sorted=False).values.min()
        torch.ge(self._wide, threshold, out=self._passes)
        return self._passes.nonzero().view(-1)[: self._k]


class _Packer:
    """Packs codes of `bits` bits, one per byte, into full bytes, low bits first."""

    def __init__(self, num_elements: int, bits: int) -> None:
        self._bits = bits
        self._per_byte = 8 // bits
        self._packed = torch.empty(-(-num_elements // self._per_byte), dtype=torch.uint8)

    def pack(self, codes: Tensor) -> Tensor:
        # One strided pass per position: on a CPU 2.3 times faster than weights and a sum over
        # a dimension of 8.
        self._packed.zero_()
        for position in range(self._per_byte):
            column = codes[position :: self._per_byte]
            self._packed[: column.numel()].add_(column, alpha=1 << (position * self._bits))
        return self._packed


class _Rounder:
    """Buffers of a stochastic quantiser: values, noise, and the packed codes they end as."""

    def __init__(self, num_elements: int, bits: int) -> None:
        self.values = torch.empty(num_elements)
        self.noise = torch.empty(num_elements)
        self._codes = torch.empty(num_elements, dtype=torch.uint8)
        self._packer = _Packer(num_elements, bits)

    def pack(self) -> Tensor:
        # The cast cuts the fraction off; for values that are not negative that is the floor.
        return self._packer.pack(self._codes.copy_(self.values))


def _code_table(bits: int) -> Tensor:
    """Row b: the codes in byte b, low bits first, as float32."""
    shifts = torch.arange(0, 8, bits)
    codes = torch.arange(256).unsqueeze(1).bitwise_right_shift(shifts)
    return codes.bitwise_and(2**bits - 1).float()


def _unpack(packed: Tensor, table: Tensor, out: Tensor) -> Tensor:
    """Looks up the table row of each byte; the last byte may be used in part."""
    per_byte = table.shape[1]
    num_whole = out.numel() // per_byte
    rows = out[: num_whole * per_byte].view(num_whole, per_byte)
    torch.index_select(table, 0, packed[:num_whole].int(), out=rows)
    num_left = out.numel() - num_whole * per_byte
    if num_left:
        out[num_whole * per_byte :] = table[int(packed[num_whole]), :num_left]
    return out


def _build(call: Call, num_elements: int) -> EagerCodec | None:
    if call.name == "ef" and len(call.args) == 1 and not call.options:
        inner = _build(call.args[0], num_elements)
        # As for our codecs, feedback twice is feedback once.
        return EagerFeedback(inner) if inner and not isinstance(inner, EagerFeedback) else inner
    if call.name not in _FORMS or call.args:
        return None
    make, defaults = _FORMS[call.name]
    options = {**defaults, "ef": call.name in _FED_BACK, **dict(call.options)}
    has_feedback = options.pop("ef")
    # An option this file does not know would make the comparison one of unlike things.
    if options.keys() != defaults.keys():
        return None
    codec = make(num_elements, **options)
    return EagerFeedback(codec) if has_feedback else codec


_FED_BACK = ("onebit", "topk")
"""Forms whose error feedback is on unless `ef=false`."""
_FORMS: dict[str, tuple[Callable[..., EagerCodec], dict[str, Value]]] = {
    "none": (partial(EagerCast, dtype=torch.float32), {}),
    "fp16": (partial(EagerCast, dtype=torch.float16), {}),
    "bf16": (partial(EagerCast, dtype=torch.bfloat16), {}),
    "onebit": (EagerOnebit, {"block": 1024}),
    "minmax": (EagerMinMax, {"bits": 2}),
    "terngrad": (EagerTernGrad, {"clip": 2.5}),
    "topk": (EagerTopK, {"ratio": 0.01, "exact": False}),
}
"""Constructors and the options they take, as our codecs name them."""
