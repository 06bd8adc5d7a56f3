"""What a kernel has to write, before it is cut into passes.

Filters, sorts, scans, scatters and the program's outputs need memory; a `Draft` collects what is
written there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hipress.compll import ir
from hipress.compll.front.arrays import (
    ArrayValue,
    Computed,
    InRows,
    Kept,
    Ordered,
    PerBlock,
    Spread,
    Stored,
)
from hipress.compll.front.graph import INT, ElemType, Graph
from hipress.compll.ir import Array, Blocks, Expr, Fold, walk


@dataclass(frozen=True, slots=True)
class Write:
    """`array[i] = value` over a whole domain."""

    array: Array
    value: Expr
    length: Expr
    """The domain; for `block` and `row`, that of the blocks."""
    final: bool
    """An output: nothing in this kernel reads it back, so a later pass will do as well."""
    each: str = "element"
    """`element`, `block`, `row` or `scalar`: how many values there are."""
    block: Blocks | None = None
    """For `block` and `row`: the blocks."""
    row: ir.Row | None = None


@dataclass(eq=False)
class Draft:
    """What a kernel has to write, before it is cut into passes."""

    graph: Graph
    writes: list[Write] = field(default_factory=list)
    emits: list[tuple[ir.Filter, Array, Expr]] = field(default_factory=list)
    sorts: list[ir.Sort] = field(default_factory=list)
    scans: list[ir.Scan] = field(default_factory=list)
    scatters: list[ir.Scatter] = field(default_factory=list)
    requires: list[ir.Require] = field(default_factory=list)
    ascending: set[Array] = field(default_factory=set)
    """Arrays of a payload that hold places in the order in which a filter took them."""
    temps: list[Array] = field(default_factory=list)
    folds: dict[tuple[object, ...], Fold] = field(default_factory=dict)
    """Reductions by what they are, so that equal ones are one."""
    locals: dict[tuple[object, ...], ir.Local] = field(default_factory=dict)
    """Arrays of blocks, in the same way."""
    filters: dict[tuple[Expr, ...], ir.Filter] = field(default_factory=dict)
    """Filters, in the same way."""
    limits: dict[Expr, Expr] = field(default_factory=dict)
    """Largest value, known to the host, of each length that is not."""
    enforces: bool = False
    """Whether the kernel checks `requires` before anything runs."""
    fusing: bool = False
    """Whether values may depend on what a filter took: only those that its own pass writes."""
    whole: bool = False
    """Whether values are being made for a pass that has no blocks."""
    scope: Blocks | None = None
    """The blocks of the `per` scope whose values are being made."""
    _stored: dict[object, Array] = field(default_factory=dict)

    @contextmanager
    def unblocked(self, only_if: bool = True) -> Iterator[None]:
        """For values of a pass without blocks: what per scopes made is read from memory."""
        before, self.whole = self.whole, self.whole or only_if
        try:
            yield
        finally:
            self.whole = before

    @contextmanager
    def fused(self, allowed: bool) -> Iterator[None]:
        """For values that are written by the pass of the filter that they depend on."""
        before, self.fusing = self.fusing, allowed
        try:
            yield
        finally:
            self.fusing = before

    def remembered(self, at: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
        """Returns `at` as a function that computes each element once.

        An array made of two uses of another, and so on, would take twice as long at each step.
        """
        known: dict[object, Expr] = {}

        def once(ix: Expr) -> Expr:
            key = (ix, self.whole, self.scope, self.fusing)
            if key not in known:
                known[key] = at(ix)
            return known[key]

        return once

    def element(self, value: ArrayValue, ix: Expr, *beside: Expr) -> Expr:
        """Returns an element for a pass, from memory where it mixes blocks of two scopes.

        The pass computes the values `beside` too.
        """
        found = value.at(ix)
        blocks = ir.blocks_of([found, *beside])
        # A pass over another length has none of these blocks.
        own = all(ix.op != "idx" or ix.attr is block.length for block in blocks)
        if own and len(blocks) <= 1:
            return found
        with self.unblocked():
            return value.at(ix)

    def depends(self, value: Expr, found: ir.Filter | ir.Sort) -> bool:
        """Whether a value needs the result of a filter or a sort."""
        mine = {array for f, array, _ in self.emits if f is found}
        if isinstance(found, ir.Sort):
            mine.add(found.values)
        seen: set[Expr] = set()
        todo = [value]
        while todo:
            for e in walk([todo.pop()], seen):
                if e.op in ("count", "taken", "pick") and e.attr is found:
                    return True
                if e.is_load and e.attr in mine:
                    return True
                todo += self._made_of(e.attr) if e.is_load else ir.behind(e)
        return False

    def exprs(self) -> list[Expr]:
        out = [w.value for w in self.writes] + [value for _, _, value in self.emits]
        out += [e for s in self.sorts if s.whole or s.ranks for e in (s.value, s.key, *s.ranks)]
        out += [e for scan in self.scans for e in scan.fold.exprs]
        out += [e for s in self.scatters for e in (s.length, s.index, s.value)]
        out += [found.keep for found, _, _ in self.emits]
        return out + [r.cond for r in self.requires]

    def _made_of(self, array: Array) -> list[Expr]:
        made = [w.value for w in self.writes if w.array is array]
        made += [value for _, target, value in self.emits if target is array]
        made += [e for s in self.scans if s.array is array for e in s.fold.exprs]
        made += [e for s in self.scatters if s.array is array for e in (s.length, s.index, s.value)]
        return made + [e for s in self.sorts if s.values is array for e in (s.value, s.key)]

    def local(self, made: ir.Local) -> ir.Local:
        """Returns the equal array of a block that was made before, if any."""
        scan = None if made.fold is None else (made.fold.init, made.fold.combine, made.fold.kind)
        key = (made.kind, made.body, made.block, made.row, made.room, made.index, made.size, scan)
        return self.locals.setdefault(key, made)

    def filter(self, made: ir.Filter) -> ir.Filter:
        """Returns the equal filter that was made before, if any."""
        return self.filters.setdefault((made.keep, made.length, made.capacity), made)

    def capacity(self, value: ArrayValue) -> Expr:
        """Returns the most elements an array can have, known to the host."""
        return self.limits.get(value.length, value.length)

    def temp(self, elem: ElemType, length: Expr) -> Array:
        """Returns new memory for a value between two passes; nothing is packed there."""
        storage = elem.storage
        if elem.kind == "uint" and elem.bits < 8:
            storage = "u8"
        elif elem.kind in ("float16", "bfloat16"):
            storage = "f32"
        array = Array(f"temp{len(self.temps)}", storage, self.limits.get(length, length))
        self.temps.append(array)
        return array

    def stored(self, value: ArrayValue) -> Array:
        """Returns `value` in memory, which is written once only."""
        if isinstance(value, Stored):
            return value.array
        if isinstance(value, Kept):
            return self.emitted(value.filter, value.element, value.elem)
        if isinstance(value, Ordered):
            value.sort.whole = True
            return value.sort.values
        if isinstance(value, Spread) and value.elem.kind != "uint":
            return self.spread(value)
        if isinstance(value, PerBlock):
            key: object = ("block", value.value, value.block)
            if key not in self._stored:
                self._stored[key] = self.temp(value.elem, value.length)
                self.writes.append(block_write(self._stored[key], value, final=False))
            return self._stored[key]
        if isinstance(value, InRows):
            key = ("row", value.value, value.row)
            if key not in self._stored:
                self._stored[key] = self.temp(value.elem, value.length)
                self.writes.append(row_write(self._stored[key], value, final=False))
            return self._stored[key]
        before = self.whole, self.scope
        self.whole, self.scope = False, None  # written by a pass of its own, which has blocks
        body = self.element(value, self.graph.idx(value.length))
        self.whole, self.scope = before
        key = ("element", body, value.elem, value.length)
        if key not in self._stored:
            self._stored[key] = self.temp(value.elem, value.length)
            self.writes.append(Write(self._stored[key], body, value.length, False))
        return self._stored[key]

    def emitted(self, found: ir.Filter, value: Expr, elem: ElemType) -> Array:
        """Returns the array that collects `value` of each element that `found` takes."""
        key = ("emit", found, value, elem)
        if key not in self._stored:
            self._stored[key] = self.temp(elem, found.capacity)
            self.emits.append((found, self._stored[key], value))
        return self._stored[key]

    def spread(self, value: Spread) -> Array:
        key = ("spread", value)
        if key not in self._stored:
            # Wide, so that codes may add up; who reads it saturates them again.
            target = self.temp(INT if value.elem.kind == "uint" else value.elem, value.length)
            self._stored[key] = target
            self.scatter_into(target, value, clear=True)
        return self._stored[key]

    def scatter_into(self, target: Array, value: Spread, *, clear: bool) -> None:
        """Plans the scatter itself, into memory that exists."""
        ix = self.graph.idx(value.index.length)
        with self.unblocked():
            index, added = value.index.at(ix), value.value.at(ix)
        distinct = isinstance(value.index, Computed | Stored) and value.index.distinct
        bad = None
        if distinct and index.is_load and index.attr in self.ascending:
            # Who sent the payload took them in order; it may have been damaged since.
            g = self.graph
            before = value.index.at(g.binary("sub", ix, g.const(1)))
            follows = g.binary("lt", g.const(0), ix)
            bad = g.logic("land", follows, g.binary("le", index, before))
        scatter = ir.Scatter(value.index.length, index, added, target, clear, distinct, bad)
        self.scatters.append(scatter)

    def scanned(self, fold: Fold, elem: ElemType) -> Array:
        array = self.temp(elem, fold.length)
        self.scans.append(ir.Scan(fold, array))
        return array


def block_write(array: Array, value: PerBlock, *, final: bool) -> Write:
    return Write(array, value.value, value.block.length, final, "block", value.block)


def row_write(array: Array, value: InRows, *, final: bool) -> Write:
    return Write(array, value.value, value.block.length, final, "row", value.block, value.row)
