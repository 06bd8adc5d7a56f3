"""Arrays of a program: what the element at an index is.

No array is stored unless something needs it in memory: `at(i)` gives the value of one element, so
a chain of maps is one expression and one pass. Filters, sorts, scans and scatters are the
barriers; a `Draft` (see `draft`) collects the writes they and the program's outputs need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hipress.compll import ir
from hipress.compll.front.graph import ElemType, Graph, convert
from hipress.compll.ir import Array, Blocks, Expr

if TYPE_CHECKING:
    from hipress.compll.front.draft import Draft


class ArrayValue(Protocol):
    """Anything with a length and an element at each index."""

    @property
    def length(self) -> Expr: ...
    @property
    def elem(self) -> ElemType: ...
    def at(self, ix: Expr) -> Expr:
        """Returns the element at `ix`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An array in memory."""

    draft: Draft
    array: Array
    elem: ElemType
    distinct: bool = False
    """Whether no two elements can be equal."""

    @property
    def length(self) -> Expr:
        return self.array.length

    def at(self, ix: Expr) -> Expr:
        return self.draft.graph.load(self.array, ix)


@dataclass(frozen=True, slots=True)
class InBytes:
    """Codes of 3, 5, 6 or 12 bits in an array of bytes, low bits first."""

    draft: Draft
    array: Array
    elem: ElemType
    length: Expr

    def at(self, ix: Expr) -> Expr:
        g, bits = self.draft.graph, self.elem.bits
        if ix is not g.idx(self.length):
            last = g.binary("sub", self.length, g.const(1))
            ix = g.binary("max", g.binary("min", ix, last), g.const(0))
        bit = g.binary("mul", ix, g.const(bits))
        byte = g.binary("shr", bit, g.const(3))
        low = g.load(self.array, byte)
        high = g.load(self.array, g.binary("add", byte, g.const(1)))
        both = g.binary("or", low, g.binary("shl", high, g.const(8)))
        code = g.binary("shr", both, g.binary("and", bit, g.const(7)))
        return g.binary("and", code, g.const(2**bits - 1))


def byte_of(g: Graph, codes: Array, length: Expr, bits: int, j: Expr) -> Expr:
    """Returns byte j of codes that stand side by side; beyond the last code there are zeros."""
    bit = g.binary("mul", j, g.const(8))
    first = g.binary("idiv", bit, g.const(bits))
    skip = g.binary("sub", bit, g.binary("mul", first, g.const(bits)))
    total = g.const(0)
    for k in range(-(-(7 + bits) // bits)):
        at = g.binary("add", first, g.const(k))
        code = g.select(g.binary("lt", at, length), g.load(codes, at), g.const(0))
        total = g.binary("or", total, g.binary("shl", code, g.const(k * bits)))
    return g.binary("and", g.binary("shr", total, skip), g.const(255))


@dataclass(frozen=True, slots=True)
class Computed:
    """An array given by a function of the index."""

    length: Expr
    elem: ElemType
    at: Callable[[Expr], Expr]
    distinct: bool = False
    """Whether no two elements can be equal."""


class InUse(Computed):
    """An array as long as the filtered one whose blocks a `per` scope went over."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a filter let through of an array; `source(i)` is the element at i before it."""

    draft: Draft
    filter: ir.Filter
    elem: ElemType
    source: Callable[[Expr], Expr]

    @property
    def length(self) -> Expr:
        return self.draft.graph.count(self.filter)

    @property
    def element(self) -> Expr:
        """The element, in terms of the index before the filter."""
        with self.draft.unblocked():
            return self.source(self.draft.graph.idx(self.filter.length))

    def at(self, ix: Expr) -> Expr:
        array = self.draft.emitted(self.filter, self.element, self.elem)
        return self.draft.graph.load(array, ix)


@dataclass(frozen=True, slots=True)
class Padded:
    """A filtered array as a payload holds it, with as many elements as it has room for.

    `taken` is the part that `first` returns: what a pass computes for itself, without memory.
    """

    taken: ArrayValue
    length: Expr
    at: Callable[[Expr], Expr]
    is_zero: bool
    """Whether the rest is zeros."""

    @property
    def elem(self) -> ElemType:
        return self.taken.elem


@dataclass(frozen=True, slots=True)
class Ordered:
    """A sorted array; single elements are found without sorting all."""

    draft: Draft
    sort: ir.Sort
    elem: ElemType

    @property
    def length(self) -> Expr:
        return self.sort.length

    def at(self, ix: Expr) -> Expr:
        if ix.variance == 0 and not self.draft.depends(ix, self.sort):
            if ix not in self.sort.ranks:
                self.sort.ranks.append(ix)
            return self.draft.graph.pick(self.sort, ix)
        self.sort.whole = True
        return self.draft.graph.load(self.sort.values, ix)


@dataclass(frozen=True, slots=True)
class Spread:
    """Zeros, with values added at some indices."""

    draft: Draft
    index: ArrayValue
    value: ArrayValue
    length: Expr
    elem: ElemType

    def at(self, ix: Expr) -> Expr:
        graph = self.draft.graph
        index, value = self.index, self.value
        if (
            self.draft.fusing
            and isinstance(index, Kept)
            and isinstance(value, Kept)
            and index.filter is value.filter
        ):
            i = graph.idx(index.filter.length)
            # Sent back to where it came from: the element is itself if taken, else zero.
            if index.element is i and ix is i and self.length is index.filter.length:
                zero = convert(graph, graph.const(0), self.elem)
                return graph.select(graph.taken(index.filter), value.element, zero)
        return convert(graph, graph.load(self.draft.spread(self), ix), self.elem)


@dataclass(frozen=True, slots=True)
class _FromBlocks:
    """An array that a `per` scope made; `value` is the element in the block being computed."""

    draft: Draft
    value: Expr
    block: Blocks
    elem: ElemType

    @property
    def length(self) -> Expr:
        raise NotImplementedError

    def at(self, ix: Expr) -> Expr:
        g = self.draft.graph
        own = g.block("bnum", self.block) if isinstance(self, PerBlock) else g.idx(self.length)
        if ix is own and not self.draft.whole and self.draft.scope in (None, self.block):
            return self.value
        return g.load(self.draft.stored(self), ix)


class PerBlock(_FromBlocks):
    """One value for each block."""

    @property
    def length(self) -> Expr:
        return self.draft.graph.blocks(self.block)


@dataclass(frozen=True, slots=True)
class InRows(_FromBlocks):
    """An array with a row of `count` elements for each block."""

    count: int

    @property
    def length(self) -> Expr:
        g = self.draft.graph
        return g.binary("mul", self.draft.graph.blocks(self.block), g.const(self.count))

    @property
    def row(self) -> ir.Row:
        return ir.Row(self.block, self.count, self.draft.graph.const(self.count))


class InBlocks(_FromBlocks):
    """An array as long as the domain of the blocks, made block by block."""

    @property
    def length(self) -> Expr:
        return self.block.length


@dataclass(frozen=True, slots=True)
class Sliced:
    """A block's part of an array, seen inside a `per` scope."""

    graph: Graph
    array: ArrayValue
    block: Blocks

    @property
    def length(self) -> Expr:
        return self.graph.block("blen", self.block)

    @property
    def elem(self) -> ElemType:
        return self.array.elem

    def at(self, ix: Expr) -> Expr:
        return self.array.at(self.graph.binary("add", self.graph.block("bstart", self.block), ix))


@dataclass(frozen=True, slots=True)
class SlicedRow:
    """A block's row of an array that has `count` elements for each block."""

    graph: Graph
    array: ArrayValue
    block: Blocks
    count: int

    @property
    def length(self) -> Expr:
        return self.graph.const(self.count)

    @property
    def elem(self) -> ElemType:
        return self.array.elem

    def at(self, ix: Expr) -> Expr:
        g = self.graph
        start = g.binary("mul", g.block("bnum", self.block), g.const(self.count))
        return self.array.at(g.binary("add", start, ix))
