"""What states become: each is written once, behind all that reads its old value.

A state with a value or a row for each block is written by the pass over the blocks, any other by a
pass over its own length. `schedule` puts those over the gradient first.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipress.compll import ir
from hipress.compll.front.arrays import ArrayValue, InRows, PerBlock
from hipress.compll.front.draft import Draft, Write, block_write, row_write
from hipress.compll.front.graph import FLOAT, INT, Graph
from hipress.compll.front.scope import Scalar
from hipress.compll.ir import Array, Expr, Fold, walk


def new_states(
    draft: Draft,
    states: Sequence[tuple[Array, Scalar | ArrayValue]],
    value: Expr,
    fuse: bool,
) -> list[Write]:
    """Returns what states are after a step; `value` is the element that is encoded."""
    g = draft.graph
    made: list[Write] = []

    def beside(length: Expr) -> list[Expr]:
        """Returns what the pass over these elements computes, which has blocks of one scope."""
        return [value] * (length is g.n) + [w.value for w in made if w.length is length]

    for array, final in states:
        if isinstance(final, Scalar):
            made.append(Write(array, final.value, array.length, True))
            continue
        if isinstance(final, PerBlock | InRows):
            if ir.blocks_of([final.value, *beside(final.block.length)]) == {final.block}:
                of_block = row_write if isinstance(final, InRows) else block_write
                made.append(of_block(array, final, final=True))  # type: ignore[arg-type]
                continue
        with draft.fused(fuse and array.length is g.n):
            new = draft.element(final, g.idx(array.length), *beside(array.length))
        made.append(Write(array, new, array.length, True))
    return made


def write_state(draft: Draft, w: Write, finals: Sequence[Write], flag: Fold) -> None:
    """Adds the write of a state; the value is stored first if it reads what is written by then.

    `finals` are the writes of the program's states, `flag` tells whether all is finite.
    """
    g = draft.graph
    own = g.block("bnum", w.block) if w.each == "block" and w.block else g.idx(w.array.length)
    old = g.load(w.array, own)
    if w.value in (old, g.load(w.array, g.const(0)) if w.length is g.const(1) else old):
        return
    value = g.select(_is_written(draft, w.value, flag), w.value, old)
    elsewhere = {x.array for x in finals if x.length is not w.length}
    reads = [e for e in walk(ir.with_blocks([value])) if e.is_load and e.attr.is_state]
    # The pass over the gradient comes first, so that it may read what the others write.
    if any(w.length is not g.n if e.attr in elsewhere else not ir.is_own(e) for e in reads):
        temp = draft.temp(FLOAT if value.type == "float" else INT, w.array.length)
        draft.writes.append(Write(temp, value, w.length, False, w.each, w.block, w.row))
        value = g.load(temp, g.idx(w.array.length))
        w = Write(w.array, value, w.array.length, True)
    draft.writes.append(Write(w.array, value, w.length, True, w.each, w.block, w.row))


def flag_of(g: Graph, value: Expr, states: Sequence[Write]) -> Fold:
    """Returns the reduction that finds a NaN or an infinity in a gradient or a new state.

    A state counts as an element that is not sent would leave it: such an element keeps what it had,
    so receivers must know that the frame is not complete.
    """
    bad = g.unary("not", g.unary("finite", value))
    for w in states:
        if w.array.length is not g.n or w.value.type != "float":
            continue
        asked = {e: g.const(False) for e in walk([w.value]) if e.op == "taken"}
        left = g.substitute(w.value, asked)
        elsewhere = any(e.op == "load" and e.args[0].op != "idx" for e in walk([left]))
        late = ("fold", "load_clamped", "pick", "count", "local")
        waits = any(e.op in late for e in walk([left]))
        if left.op != "load" and not (elsewhere or waits):
            bad = g.logic("lor", bad, g.unary("not", g.unary("finite", left)))
    return Fold("or", "bool", g.const(False), bad, g.n, None)


def kept_if_finite(g: Graph, new: Expr, old: Expr) -> Expr:
    """Returns `new` where it is finite, else `old`: no NaN or infinity ever enters a state."""
    return g.select(_is_finite(g, new), new, old)


def _is_finite(g: Graph, new: Expr) -> Expr:
    """Returns whether a float is finite; of an int, whether the floats converted to it are."""
    made_of = [new]
    if new.type != "float":
        casts = [e for e in walk([new]) if e.op in ("int", "uint") and not e.host]
        made_of = [e.args[0] for e in casts if e.args[0].type == "float"]
    finite = g.const(True)
    for value in made_of:
        finite = g.logic("land", finite, g.unary("finite", value))
    return finite


def _is_written(draft: Draft, new: Expr, flag: Fold) -> Expr:
    """Returns whether a state takes a new value: it is finite, and no int hides a NaN.

    A float that a reduction over the gradient is part of is taken if all of the gradient is finite.
    What a comparison, `bits` or a reduction makes of a NaN is an int like any other, so an int is
    taken if all is finite that it is made of: the element, the block or the gradient.
    """
    g, is_int = draft.graph, new.type != "float"
    values = list(walk(ir.with_blocks([new]) if is_int else [new]))
    late = [e for e in values if e.op == "fold" and e.attr.block is None]
    loads = [e for e in values if is_int and e.is_load and not e.attr.is_state]
    late += [e for e in loads if e.attr.name.startswith("temp") or not ir.is_own(e)]
    late += [e for e in values if is_int and e.op in ("pick", "count", "taken")]
    blocks = {e.attr.block for e in values if is_int and e.op in ("fold", "local")}
    # Blocks of another array read the gradient at other indices, which is late.
    blocks = {block for block in blocks if block is not None and block.length is g.n}
    bad = g.const(False)
    if late:
        bad = g.fold(flag)
    elif blocks:
        [block] = blocks
        some = Fold("max", "int", g.const(0), g.to_int(flag.body), g.n, block)
        key = (some.kind, some.type, some.init, some.body, some.length, block, None, None)
        bad = g.to_bool(g.fold(draft.folds.setdefault(key, some)))
    elif loads:
        bad = flag.body
    return g.logic("land", _is_finite(g, new), g.unary("not", bad))
