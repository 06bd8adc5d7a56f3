"""Operators inside a `per` scope: arrays that a block has for itself (`ir.Local`).

A block's array is as long as the block, or a *row*: a fixed number of places for each block, of
which a number that may differ from block to block is in use. Filters and orders hold places, and
their elements are read from the array they go over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hipress.compll import ir
from hipress.compll.front import ast
from hipress.compll.front.arrays import (
    ArrayValue,
    Computed,
    Kept,
    Ordered,
    Sliced,
    Spread,
    Stored,
)
from hipress.compll.front.graph import INT, MAX_ROOM, ElemType, convert
from hipress.compll.front.scope import Binding, Env
from hipress.compll.ir import Blocks, Expr, Local, Row

if TYPE_CHECKING:
    from hipress.compll.front.expressions import Expressions


class Domain:
    """What an operator goes over: the elements of the block, or a row."""

    def __init__(self, checker: Expressions, block: Blocks, row: Row | None) -> None:
        g = checker.graph
        self.checker, self.block, self.row = checker, block, row
        self.room = block.size if row is None else row.count
        self.length = g.block("blen", block) if row is None else row.length
        self.ix = g.block("lidx", block) if row is None else g.ridx(block, row.count)

    def local(self, kind: Any, body: Expr, room: int, **more: Any) -> Local:
        kind_of = "int" if kind in ("filter", "sort", "largest") else body.type
        made = Local(kind, kind_of, body, self.block, self.row, room, **more)
        return self.checker.draft.local(made)


def domain(
    checker: Expressions,
    node: ast.Call,
    env: Env,
    array: ArrayValue,
    *more: Callable[[Expr], Expr],
    own: bool = False,
) -> Domain | None:
    """Returns the domain of a block's array; None for an array that is the same for all blocks.

    `more` are other values that the operator computes at each index. With `own`, a fixed number of
    places is a domain of the block even where all blocks have the same.
    """
    length = array.length
    if length.op == "blen":
        return Domain(checker, length.attr, None)
    scope, most = env.per(), checker.draft.capacity(array)
    if scope is None or scope.block is None:
        return None
    fixed = most.op == "const"
    if not (own and fixed and most.attr <= MAX_ROOM):
        probe = checker.graph.idx(most)
        if not ir.blocks_of([length, *(at(probe) for at in (array.at, *more))]):
            return None
    if not fixed:
        checker.fail(
            node,
            f"{node.name} of a block's values goes over the block or over a fixed number of "
            "places, and the length of this array is neither; take k elements of it with "
            "map(range(k), ...)",
        )
    return Domain(checker, scope.block, Row(scope.block, max(most.attr, 0), length))


def need_length(checker: Expressions, node: ast.Call, array: ArrayValue) -> None:
    """Refuses a filtered array, whose length the host does not know."""
    if not array.length.host:
        checker.fail(
            node, f"{node.name} works on arrays whose length is known; this one is filtered"
        )


def room(checker: Expressions, node: ast.Expr, env: Env, what: str) -> int:
    """Returns a number of places, which must be known when kernels are made."""
    value = checker.scalar(node, env)
    if value.op != "const" or value.type != "int" or not 1 <= value.attr <= MAX_ROOM:
        checker.fail(
            node,
            f"{what} in a per scope is made of integer parameters and literals, from 1 to "
            f"{MAX_ROOM}",
        )
    return int(value.attr)


def kept(checker: Expressions, over: Domain, array: ArrayValue) -> ArrayValue:
    """Returns the array in memory of the block."""
    g = checker.graph
    local = over.local("keep", array.at(over.ix), over.room)
    return Computed(array.length, array.elem, lambda ix: g.local(local, ix))


def elsewhere(checker: Expressions, array: ArrayValue) -> ArrayValue:
    """Returns an array for reading at other indices than the element's own.

    What is made of states is kept in the block first: they change while the block is computed.
    """
    if not isinstance(array, Sliced):
        return array
    over = Domain(checker, array.block, None)
    loads = ir.loads(ir.with_blocks([array.at(over.ix)]))
    return kept(checker, over, array) if any(a.is_state for a in loads) else array


def taken(
    checker: Expressions, array: ArrayValue, places: Local, length: Expr, distinct: bool = False
) -> Computed:
    """Returns the elements of an array at the places that a filter or an order holds."""
    g = checker.graph
    checker.draft.limits[length] = g.const(places.room)
    source = elsewhere(checker, array)
    return Computed(length, array.elem, lambda ix: source.at(g.local(places, ix)), distinct)


def filtered(
    checker: Expressions, over: Domain, array: ArrayValue, cond: Expr, room: int
) -> Computed:
    g = checker.graph
    places = over.local("filter", cond, room)
    one = g.to_int(cond)
    number = ir.Fold("sum", "int", g.const(0), one, over.block.length, over.block, row=over.row)
    key = ("sum", "int", number.init, one, over.block.length, over.block, None, over.row)
    count = g.fold(checker.draft.folds.setdefault(key, number))
    return taken(checker, array, places, g.binary("min", count, g.const(room)))


def ordered(checker: Expressions, over: Domain, array: ArrayValue, key: Expr) -> Computed:
    places = over.local("sort", key, over.room)
    g = checker.graph
    source = elsewhere(checker, array)
    return Computed(array.length, array.elem, lambda ix: source.at(g.local(places, ix)))


def largest(checker: Expressions, over: Domain, key: Expr, count: int) -> Computed:
    """Returns the places of the `count` largest keys, in ascending order."""
    g = checker.graph
    places = over.local("largest", key, count)
    length = g.binary("min", over.length, g.const(count))
    checker.draft.limits[length] = g.const(count)
    return Computed(length, INT, lambda ix: g.local(places, ix), True)


def scanned(checker: Expressions, over: Domain, fold: ir.Fold, elem: ElemType) -> Computed:
    g = checker.graph
    local = over.local("scan", fold.body, over.room, fold=fold)
    return Computed(over.length, elem, lambda ix: g.local(local, ix))


def scattered(
    checker: Expressions,
    node: ast.Call,
    over: Domain,
    index: ArrayValue,
    value: ArrayValue,
    size: Expr,
) -> Computed:
    """Returns `size` zeros, with each value added at its index."""
    g = checker.graph
    if size.op not in ("const", "blen"):
        checker.fail(node, "the size of a scatter in a per scope is that of the block, or fixed")
    room = size.hi
    g.ridx(over.block, room)  # refuses a size beyond that of a row
    added = value.at(over.ix)
    local = over.local("scatter", added, room, index=index.at(over.ix), size=size)
    return Computed(size, value.elem, lambda ix: convert(g, g.local(local, ix), value.elem))


def largest_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`largest(a, k)`: the indices of the k largest elements, in ascending order."""
    array = checker.array(node.args[0], env)
    over = domain(checker, node, env, array, own=True)
    if over is None:
        checker.fail(
            node,
            "largest works on a block, or on a fixed number of places in a per scope; of a whole "
            "array, filter the elements that reach sort(a)[a.size - k]",
        )
    count = room(checker, node.args[1], env, "the number of largest elements")
    return largest(checker, over, array.at(over.ix), min(count, over.room))


def store_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`store(a)`: the same elements in memory, so that each is computed once."""
    array = checker.array(node.args[0], env)
    if isinstance(array, Stored | Kept | Ordered | Spread):
        return array  # in memory anyhow
    over = domain(checker, node, env, array)
    if over is not None:
        return kept(checker, over, array)
    with checker.draft.unblocked():
        memory = checker.draft.stored(array)
    return in_memory(checker, memory, array.elem, array.length)


def in_memory(checker: Expressions, memory: ir.Array, elem: ElemType, length: Expr) -> ArrayValue:
    """Returns the first `length` elements of memory."""
    if memory.length is length:
        return Stored(checker.draft, memory, elem)
    return Computed(length, elem, lambda ix: checker.graph.load(memory, ix))
