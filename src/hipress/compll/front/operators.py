"""The operators of the language: one function and one line in `OPERATORS` each.

An operator gets the checker (see `expressions`), the call and the names in scope; it returns a
number or an array. Arrays stay unwritten where they can: see `arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hipress.compll.front import ast, draws, functions, inblock
from hipress.compll.front.arrays import (
    ArrayValue,
    Computed,
    Kept,
    Ordered,
    Padded,
    Sliced,
    SlicedRow,
    Spread,
    Stored,
)
from hipress.compll.front.associative import counter_example
from hipress.compll.front.graph import FLOAT, INT, ElemType, convert
from hipress.compll.front.scope import Binding, Env, Scalar
from hipress.compll.ir import RANDOM, Expr, Filter, Fold, Require, Sort, blocks_of, walk

if TYPE_CHECKING:
    from hipress.compll.front.expressions import Expressions

Operator = Callable[["Expressions", ast.Call, "Env"], "Binding"]


def element(checker: Expressions, array: ArrayValue, ix: Expr) -> Expr:
    """Returns the element at an index that a program computed: clamped into the array."""
    if ix is _domain(checker, array.length) or not isinstance(
        array, Computed | Sliced | SlicedRow | Kept | Padded
    ):
        return array.at(ix)  # what lies in memory clamps for itself
    g = checker.graph
    array = inblock.elsewhere(checker, array)
    last = g.binary("sub", array.length, g.const(1))
    if not (ix.lo >= 0 and last.op == "const" and ix.hi <= last.attr):
        ix = g.binary("max", g.binary("min", ix, last), g.const(0))
    if array.length.op in ("n", "blen") or array.length.lo > 0 or isinstance(array, Kept):
        return array.at(ix)
    some = g.binary("lt", g.const(0), array.length)  # an element of an empty array is 0
    return g.select(some, array.at(ix), convert(g, g.const(0), array.elem))


def retyped(checker: Expressions, value: ArrayValue, elem: ElemType) -> ArrayValue:
    if value.elem == elem:
        return value
    g = checker.graph
    if isinstance(value, Padded):
        taken = retyped(checker, value.taken, elem)
        return Padded(taken, value.length, lambda i: convert(g, value.at(i), elem), value.is_zero)
    if isinstance(value, Kept):
        return Kept(checker.draft, value.filter, elem, lambda i: convert(g, value.source(i), elem))
    return Computed(value.length, elem, lambda i: convert(g, value.at(i), elem))


def _domain(checker: Expressions, length: Expr) -> Expr:
    """Returns the index that runs over an array of this length."""
    if length.op == "blen":
        return checker.graph.block("lidx", length.attr)
    return checker.graph.idx(length)


def _position(checker: Expressions, env: Env, length: Expr, ix: Expr) -> Expr:
    """Returns the index that `random` draws for: in the whole array, also in a per scope."""
    g = checker.graph
    if length.op == "blen":
        return g.binary("add", g.block("bstart", length.attr), ix)
    most, scope = checker.draft.limits.get(length, length), env.per()
    if scope is not None and scope.block is not None and most.op == "const":
        return g.binary("add", g.binary("mul", g.block("bnum", scope.block), most), ix)
    return ix


def _indices(checker: Expressions, node: ast.Call, env: Env, k: int) -> ArrayValue:
    index = checker.array(node.args[k], env)
    if index.elem.kind not in ("int", "uint"):
        checker.fail(node.args[k], f"indices are ints; this is {index.elem}*")
    return index


def map_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`map(a, ..., f)`: f of the elements at each index."""
    arrays = [checker.array(a, env) for a in node.args[:-1]]
    f, func = functions.function(checker, node.args[-1], env, len(arrays))
    first = arrays[0]
    named = node.args[-1].id if isinstance(node.args[-1], ast.Name) else ""
    given = {"bits": ElemType("uint", 32), "from_bits": FLOAT}.get(named, first.elem)
    elem = checker.elem(func.code.returns, func.env) if func is not None else given
    for other, place in zip(arrays[1:], node.args[1:], strict=False):
        if other.length is not first.length:
            checker.fail(
                place,
                f"this array has {checker.show(other.length)}, the first has"
                f" {checker.show(first.length)}; map goes over arrays of one length",
            )
    padded = [a for a in arrays if isinstance(a, Padded)]
    mapped = _mapped(checker, env, arrays, f, elem)
    if len(padded) < len(arrays) or len({a.taken.length for a in padded}) > 1:
        return mapped
    taken = _mapped(checker, env, [a.taken for a in padded], f, elem)
    return Padded(taken, mapped.length, mapped.at, False)


def _mapped(
    checker: Expressions,
    env: Env,
    arrays: Sequence[ArrayValue],
    f: functions.Function,
    elem: ElemType,
) -> ArrayValue:
    g, length = checker.graph, arrays[0].length
    kept = [a for a in arrays if isinstance(a, Kept)]
    if len(kept) == len(arrays):
        source = Kept(
            checker.draft,
            kept[0].filter,
            elem,
            checker.draft.remembered(lambda i: convert(g, f([a.source(i) for a in kept], i), elem)),
        )
        # Decode draws for places in the payload.
        draws = checker.decoding and any(e.op in RANDOM for e in walk([source.element]))
        if not draws and _fits_filter(checker, source):
            return source

    @checker.draft.remembered
    def at(ix: Expr) -> Expr:
        return convert(g, f([a.at(ix) for a in arrays], _position(checker, env, length, ix)), elem)

    at(_domain(checker, length))  # a wrong lambda is found here, not where it is used
    return Computed(length, elem, at)


def _fits_filter(checker: Expressions, kept: Kept) -> bool:
    """Whether the pass of a filter can compute these elements.

    What needs the filter's own result, or a block's values, is computed after that pass.
    """
    value = kept.element
    return not (blocks_of([value]) or checker.draft.depends(value, kept.filter))


def range_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`range(n)`: 0, 1, ... n - 1."""
    return Computed(checker.size(node.args[0], env), INT, lambda ix: ix)


def _folding(
    checker: Expressions, node: ast.Call, env: Env, *, whole: bool
) -> tuple[Fold, ElemType, inblock.Domain | None]:
    """Returns a reduction and what it goes over; with `whole`, a pass over the array is its own."""
    g, array = checker.graph, checker.array(node.args[0], env)
    f, func = functions.function(checker, node.args[2], env, 2)
    elem = array.elem
    if func is not None:
        elem = checker.elem(func.code.returns, func.env)
        for arg in func.code.args:
            if checker.elem(arg.type, func.env) != elem:
                checker.fail(
                    arg,
                    f"{arg.name!r} must be {elem}, as the result: a reduction takes its "
                    "own results as arguments",
                )
    init = convert(g, checker.scalar(node.args[1], env), elem)
    if init.variance == 2:
        checker.fail(node.args[1], "the start of a reduction is the same for all elements")
    # Two leaves that stand for f's arguments; their sites are out of any program's reach.
    carry = g.make("param", type=init.type, attr="<carry>", variance=2, host=False)
    item = g.make("param", type=init.type, attr="<item>", variance=2, host=False)
    checker.reducing = True
    combine = convert(g, f([carry, item], None), elem)
    checker.reducing = False
    over = inblock.domain(checker, node, env, array, lambda _: init, lambda _: combine)
    ix = _domain(checker, array.length) if over is None else over.ix
    with checker.draft.unblocked(over is None and whole):
        body = convert(g, checker.draft.element(array, ix), elem)
    kinds = {
        g.binary(op, *pair): kind
        for op, kind in (("add", "sum"), ("max", "max"), ("min", "min"))
        for pair in ((carry, item), (item, carry))
    }
    kind = kinds.get(combine, "fold")
    block, row = (None, None) if over is None else (over.block, over.row)
    length = array.length if block is None else block.length
    own = {"combine": combine, "carry": carry, "item": item} if kind == "fold" else {}
    fold = Fold(kind, body.type, init, body, length, block, row=row, **own)  # type: ignore[arg-type]
    return fold, elem, over


def reduce_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`reduce(a, init, f)`: f must be associative and commutative; the order is the backend's."""
    fold, elem, _ = _folding(checker, node, env, whole=False)
    found = counter_example(fold) if fold.kind == "fold" else None
    if found is not None:
        lacks, example = found
        checker.fail(
            node.args[2],
            f"the function of a reduction must be {lacks}, because backends join elements in an "
            f"order of their own; {example}; change the elements with map before, decide ties by "
            "more than the order, or use scan, which goes from left to right",
        )
    return Scalar(checker.draft.graph.fold(_shared(checker, fold)), elem)


def _shared(checker: Expressions, fold: Fold) -> Fold:
    """Returns the equal reduction that was made before, if any, so that it runs once."""
    what = (fold.kind, fold.type, fold.init, fold.body, fold.length, fold.block)
    key = (*what, fold.combine, fold.row)
    return checker.draft.folds.setdefault(key, fold)


def scan_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`scan(a, init, f)`: all the partial results of `reduce`, the first including a[0]."""
    fold, elem, over = _folding(checker, node, env, whole=True)
    if over is not None:
        return inblock.scanned(checker, over, fold, elem)
    return inblock.in_memory(checker, checker.draft.scanned(fold, elem), elem, fold.length)


def filter_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`filter(a, keep[, capacity])`: elements that pass, in order; surplus is left out."""
    array = checker.array(node.args[0], env)
    if isinstance(array, Kept):
        checker.fail(node, "a filtered array cannot be filtered again; join the two conditions")
    keep, _ = functions.function(checker, node.args[1], env, 1)

    def taken(ix: Expr) -> Expr:
        position = _position(checker, env, array.length, ix)
        return checker.graph.to_bool(keep([array.at(ix)], position))

    over = inblock.domain(checker, node, env, array, taken, own=True)
    if over is not None:
        room = over.room
        if len(node.args) == 3:
            room = min(room, inblock.room(checker, node.args[2], env, "the capacity of a filter"))
        return inblock.filtered(checker, over, array, taken(over.ix), room)
    ix = _domain(checker, array.length)
    with checker.draft.unblocked():
        cond = checker.graph.to_bool(keep([array.at(ix)], ix))
    capacity = array.length if len(node.args) == 2 else checker.size(node.args[2], env)
    if not capacity.host:
        checker.fail(node, "the capacity of a filter is made of sizes and parameters")
    found = checker.draft.filter(Filter(cond, array.length, capacity))
    checker.draft.limits[checker.graph.count(found)] = capacity
    return Kept(checker.draft, found, array.elem, array.at)


def sort_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`sort(a[, key])`: ascending by element or by key; equal ones keep their order."""
    array = checker.array(node.args[0], env)
    f = functions.function(checker, node.args[1], env, 1)[0] if len(node.args) == 2 else None

    def key_at(ix: Expr) -> Expr:
        position = _position(checker, env, array.length, ix)
        return array.at(ix) if f is None else f([array.at(ix)], position)

    over = inblock.domain(checker, node, env, array, key_at)
    if over is not None:
        return inblock.ordered(checker, over, array, key_at(over.ix))
    inblock.need_length(checker, node, array)
    draft, ix = checker.draft, _domain(checker, array.length)
    body = array.at(ix)
    values = draft.temp(array.elem, array.length)
    key, keys = body, None
    if f is not None:
        key = f([body], ix)
        if key is not body:
            keys = draft.temp(FLOAT if key.type == "float" else INT, array.length)
    sort = Sort(body, key, array.length, values, keys)
    draft.sorts.append(sort)
    return Ordered(draft, sort, array.elem)


def gather_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`gather(a, index)`: a[index[0]], a[index[1]], ..."""
    array, index = checker.array(node.args[0], env), _indices(checker, node, env, 1)
    draft = checker.draft
    if isinstance(index, Kept):
        source = draft.remembered(lambda i: element(checker, array, index.source(i)))
        kept = Kept(draft, index.filter, array.elem, source)
        if _fits_filter(checker, kept):
            return kept
    at = draft.remembered(lambda ix: element(checker, array, index.at(ix)))
    return Computed(index.length, array.elem, at)


def scatter_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`scatter(index, value, size)`: zeros, with each value added at its index."""
    index, value = _indices(checker, node, env, 0), checker.array(node.args[1], env)
    if index.length is not value.length:
        checker.fail(
            node,
            f"the indices have {checker.show(index.length)}, the values "
            f"{checker.show(value.length)}; scatter takes one value per index",
        )
    size = checker.size(node.args[2], env)
    over = inblock.domain(checker, node, env, index, value.at, lambda _: size)
    if over is not None:
        return inblock.scattered(checker, node, over, index, value, size)
    if isinstance(index, Padded) and isinstance(value, Padded) and value.is_zero:
        if index.taken.length is value.taken.length:  # zeros change nothing
            index, value = index.taken, value.taken
    return Spread(checker.draft, index, value, size, value.elem)


def first_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`first(a, count)`: the first `count` elements; more than there are is an error."""
    array, count = checker.array(node.args[0], env), checker.scalar(node.args[1], env)
    if isinstance(array, Padded) and count is array.taken.length:
        return array.taken
    if count.type != "int":
        checker.fail(node.args[1], "a count is an int; this is a float")
    if count is array.length:
        return array
    g = checker.graph
    over = inblock.domain(checker, node, env, array, lambda _: count)
    most = checker.draft.capacity(array) if over is None else g.const(over.room)
    if count.op == "const" or (over is None and count.host):
        least = g.const(0 if over is None else 1)
        most = g.binary("min", g.binary("max", count, least), most)
    if env.per() is None:
        low = g.binary("le", g.const(0), count)
        high = g.binary("le", count, array.length)
        checker.draft.requires.append(
            Require(g.logic("land", low, high), "a count is larger than the room it was given")
        )
    if count.op == "count" and checker.draft.limits[count] is array.length:
        pass  # a filter with this capacity let through no more
    elif env.per() is not None or not checker.draft.enforces:  # it must not run past the array
        count = g.binary("min", g.binary("max", count, g.const(0)), array.length)
    if not count.host:
        checker.draft.limits[count] = most
    # The element's own domain ends at `count`; the load is clamped to the array all the same.
    distinct = isinstance(array, Computed | Stored) and array.distinct
    if isinstance(array, Stored) and array.array in checker.draft.ascending and not count.host:
        distinct = True  # as many places as a filter took, which the payload tells
    return Computed(count, array.elem, array.at, distinct=distinct)


def blocks_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`blocks(n, size)`: how many blocks of `size` hold n elements."""
    g = checker.graph
    n, size = (checker.size(a, env) for a in node.args)
    return Scalar(
        g.binary("idiv", g.binary("add", n, g.binary("sub", size, g.const(1))), size), INT
    )


def _misplaced(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    how = {
        "concat": "write: compressed = concat(...);",
        "extract": "write it as a statement: extract(compressed, ...);",
    }
    checker.fail(node, f"{node.name} cannot stand inside an expression; {how[node.name]}")


WHOLE = frozenset(
    {
        "map",
        "range",
        "reduce",
        "scan",
        "filter",
        "sort",
        "sample",
        "gather",
        "scatter",
        "first",
        "largest",
        "store",
    }
)
"""Operators that make or use whole arrays: not for inside a lambda, once per element."""

ANY = 1_000_000

OPERATORS: dict[str, tuple[Operator, int, int]] = {
    "map": (map_, 2, ANY),
    "range": (range_, 1, 1),
    "reduce": (reduce_, 3, 3),
    "scan": (scan_, 3, 3),
    "filter": (filter_, 2, 3),
    "sort": (sort_, 1, 2),
    "sample": (draws.sample_, 2, 3),
    "gather": (gather_, 2, 2),
    "scatter": (scatter_, 3, 3),
    "first": (first_, 2, 2),
    "largest": (inblock.largest_, 2, 2),
    "store": (inblock.store_, 1, 1),
    "blocks": (blocks_, 2, 2),
    "random": (draws.random_, 2, 3),
    "concat": (_misplaced, 0, ANY),
    "extract": (_misplaced, 0, ANY),
    **{
        name: (functions.elementwise, 1, 1)
        for name, num_args in functions.BUILTIN.items()
        if num_args == 1
    },
    **{name: (functions.extreme, 2, ANY) for name in ("min", "max")},
}
"""Each operator: its function, and the fewest and the most arguments it takes."""


def call(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    if node.name not in OPERATORS:
        known = ", ".join(sorted(OPERATORS))
        checker.fail(node, f"{node.name!r} is not a function; operators: {known}")
    if checker.lambdas and node.name in WHOLE:
        checker.fail(node, f"{node.name} works on whole arrays; call it before the lambda")
    operator, least, most = OPERATORS[node.name]
    if not least <= len(node.args) <= most:
        takes = str(least) if least == most else f"{least} to {most}"
        takes = f"at least {least}" if most == ANY else takes
        checker.fail(node, f"{node.name} takes {takes} arguments; {len(node.args)} were given")
    return operator(checker, node, env)
