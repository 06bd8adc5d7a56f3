"""What happens to the few elements that a filter marked, and to no other.

A program takes the marks of many elements, 32 to a word and one word to a lane, and goes through
the bits of all words side by side: as many rounds as the fullest word has marks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hipress.compll.backends.gpu.shared import Known, Launch, Shared
from hipress.compll.backends.gpu.spell import RANDOM, cast, loaded, rep, stored
from hipress.compll.backends.gpu.tiles import Tile, print_kernel
from hipress.compll.backends.render import Lines, print_values
from hipress.compll.ir import (
    Array,
    Compact,
    Expr,
    Loop,
    Pass,
    Phase,
    Scatter,
    Store,
    loads,
    pass_exprs,
    pass_stores,
    walk,
)

WORDS = 1024
"""Words of marks of one program."""


def told(shared: Shared, p: Compact, taken: bool) -> list[Store]:
    """The stores of a filter pass for elements that are known to be taken, or not."""
    graph = shared.graph
    asked = [e for e in walk([s.value for s in p.stores]) if e.op == "taken"]
    known = {e: graph.const(taken) for e in asked}
    return [Store(s.array, graph.substitute(s.value, known)) for s in p.stores]


def marked_words(shared: Shared, p: Compact, mask: Array, out: Lines) -> None:
    """Prints the load of a program's words."""
    out(f"lanes = t * {WORDS} + tl.arange(0, {WORDS})")
    size = shared.size(("words", mask.name), f"-(-{shared.length_text(p.length)} // 32)")
    if not p.length.host:  # no more than were written
        known = shared.known([p.length])
        length = cast(f"({shared.print([p.length], out, known)[0]})", "i64")
        size = f"_min({size}, ({length} + 31) // 32)"
    words = f"tl.load({mask.name} + lanes, mask=lanes < {size}, other=0)"
    out(f"words = {words}.to(tl.uint32, bitcast=True)")


def print_points(
    shared: Shared,
    name: str,
    p: Compact,
    mask: Array,
    late: dict[Expr, Array] | None,
    out: Lines,
) -> None:
    """Prints the kernel that writes out the marked elements, in order, while there is room.

    With `late`, it writes their states too, from what unmarked elements leave there. Without, it
    takes away the marks of those that found no room, for the pass that writes the states.
    """
    stores = told(shared, p, True) if late is not None else []
    roots = [s.value for s in (*p.emits, *stores)]
    arrays = [*(s.array for s in (*p.emits, *stores)), *loads([*roots, p.filter.capacity])]
    shared.head(name, out)
    shared.views(out, [mask, *loads([p.length]), *arrays], {mask: 32})
    marked_words(shared, p, mask, out)
    known = shared.known([*roots, p.filter.capacity])
    if any(e.op in RANDOM and len(e.args) == 1 for e in walk(roots)):
        out("rng = _rng(seed, stream, step)")
    for e, text in known.items():
        known[e] = shared.fresh()
        out(f"{known[e]} = {text}")
    capacity = shared.print([p.filter.capacity], out, known)[0]
    out(f"capacity = {cast(f'({capacity})', 'i64')}")
    counts = shared.pointer(f"{name.removesuffix('_emit')}_counts", "0", "tl.int64")
    out("ones = _popcount(words)")
    out(f"rank = tl.load({counts} + t) + tl.cumsum(ones) - ones")
    out("rest = words")
    out("kept = words ^ words")
    out("rounds = tl.max(ones)")
    out("for _ in range(rounds):")
    out.depth += 1
    out("low = rest & (0 - rest)")
    out("i = lanes * 32 + _popcount(low - 1)")
    out("taken = (rest != 0) & (rank < capacity)")
    _values(shared, p, stores, late or {}, roots, dict(known), out)
    out("kept |= tl.where(taken, low, 0)")
    out("rank += (rest != 0).to(tl.int32)")
    out("rest &= rest - 1")
    out.depth -= 1
    if late is None and p.stores:
        out(f"tl.store({mask.name} + lanes, kept.to(tl.int32, bitcast=True), mask=words != kept)")
    out.depth = 0
    out()
    out()
    # One word to a thread: lanes are never handed from one to another.
    shared.launches.append(Launch(name, f"grid{name.removesuffix('_emit')}_count", WORDS // 32))


def _values(
    shared: Shared,
    p: Compact,
    stores: list[Store],
    late: dict[Expr, Array],
    roots: list[Expr],
    known: Known,
    out: Lines,
) -> None:
    """Prints what is written for one round of elements; all is read before anything is written."""
    for value, array in late.items():
        known[value] = shared.fresh()
        out(f"{known[value]} = tl.load({array.name} + i, mask=taken)")

    def spell(e: Expr, args: list[str]) -> str:
        if e.op == "idx":
            return "i" if rep(e) == "i64" else cast("i", "i32")
        if e.op == "load" and e.args[0].op == "idx":
            if e.attr in late.values():  # where the new value is not finite; it is
                return "0.0"
            return loaded(e.attr, f"tl.load({e.attr.name} + i, mask=taken)")
        if e.is_load:
            return shared.loaded(e, args[0], ", mask=taken")
        return shared.spell(e, args)

    print_values(roots, out, spell, known, shared.fresh)
    names = [shared.fresh() for _ in roots]
    for name, root in zip(names, roots, strict=True):
        out(f"{name} = tl.broadcast_to({known[root]}, [{WORDS}])")
    for s, name in zip(p.emits, names, strict=False):
        out(f"tl.store({s.array.name} + rank, {stored(s.array, name)}, mask=taken)")
    for s, name in zip(stores, names[len(p.emits) :], strict=True):
        out(f"tl.store({s.array.name} + i, {stored(s.array, name)}, mask=taken)")


# A scatter whose result only says what single elements send.


@dataclass(frozen=True)
class Corrected:
    """A loop that runs as if a scatter had set nothing, and the few elements where it did."""

    loop: Loop
    scatter: Scatter
    values: Array
    """Where the scattered values lie: the payload."""
    states: tuple[tuple[Store, Expr], ...]
    """What the loop writes where the scatter sets something, and what it writes elsewhere."""
    read: Expr
    """The element of the scattered array, in those values."""


def correct_scatters(shared: Shared, passes: tuple[Pass, ...]) -> list[Pass | Corrected]:
    """Replaces scatters into memory between passes where that memory can be saved.

    The array would be as long as the gradient, written and read to change one element in a
    hundred. Instead the loop leaves in its state what an element that is not sent leaves, and
    a pass over the few others corrects theirs.
    """
    out: list[Pass | Corrected] = list(passes)
    for p in passes:
        if not isinstance(p, Scatter) or not (p.clear and p.distinct):
            continue
        users = [q for q in passes if p.array in loads(pass_exprs(q)) and q is not p]
        written = [s.array for q in passes for s in pass_stores(q) if s.value is p.value]
        if len(users) != 1 or not isinstance(users[0], Loop) or not written:
            continue
        corrected = _corrected(shared, p, users[0], written[0])
        if corrected is not None:
            out[out.index(users[0])] = corrected
            out.remove(p)
    return out


def _corrected(shared: Shared, p: Scatter, loop: Loop, values: Array) -> Corrected | None:
    if loop.block is not None or len(loop.phases) != 1 or loop.block_stores:
        return None
    g, phase = shared.graph, loop.phases[0]
    reads = [e for e in walk(pass_exprs(loop)) if e.is_load and e.attr is p.array]
    if len(reads) != 1 or reads[0].op != "load" or reads[0].args[0].op != "idx":
        return None
    read = reads[0]
    if any(read in walk(f.exprs) for f in phase.folds):
        return None
    stores, states = [], []
    for s in phase.stores:
        if read not in walk([s.value]):
            stores.append(s)
            continue
        value = g.substitute(s.value, {read: g.const(0.0)})
        if value.op != "select" or value.args[0].op != "finite" or s.array.storage != "f32":
            return None
        rest = value.args[0].args[0]
        if not _alike(rest, p.value) or _asks_more(s.value, {rest, read}):
            return None
        stores.append(Store(s.array, value))
        states.append((s, rest))
    quiet = replace(loop, phases=(Phase(phase.folds, tuple(stores)),))
    return Corrected(quiet, p, values, tuple(states), read)


def _alike(a: Expr, b: Expr) -> bool:
    """Whether two values are the same but for the place they are taken from."""
    if a.op == "idx" and b.type == "int":
        return True
    same = a.op == b.op or {a.op, b.op} == {"load", "load_clamped"}
    if not same or a.attr != b.attr or len(a.args) != len(b.args):
        return False
    return all(_alike(x, y) for x, y in zip(a.args, b.args, strict=True))


def _asks_more(root: Expr, known: set[Expr]) -> bool:
    """Whether a state's new value needs memory beyond some known values.

    Its old value does not count where it stands for one that is not finite.
    """
    todo, seen = [root], set(known)
    met = set()
    while todo:
        e = todo.pop()
        if e in known:
            met.add(e)
        if e in seen:
            continue
        seen.add(e)
        if e.op == "select" and e.args[0].op == "finite" and e.args[2].op == "load":
            todo += e.args[:2]
            continue
        if e.op in ("load", "load_clamped", "uniform", "bits32"):
            return True
        todo += e.args
    return met != known


def print_corrections(shared: Shared, name: str, p: Corrected, out: Lines) -> None:
    """Prints the kernel that corrects the states of the elements that a scatter sets."""
    scatter = p.scatter
    tile = Tile(shared, scatter.length, None, [scatter.index], [], elements=1024)
    known = tile.open(f"{name}_tile", out, [p.values, *(s.array for s, _ in p.states)])
    [index] = tile.print([scatter.index], out, known)
    out(f"at = {cast(tile.whole(index, scatter.index), 'i64')}")
    out(f"value = tl.load({p.values.name} + start + offs, mask=live)")
    # A value that is not finite was not taken out of the state either.
    size = shared.size(("size", name), shared.length_text(p.loop.length))
    out(f"there = (at >= 0) & (at < {size})")
    out("there = there & _finite(value)")
    out("if TAIL:")
    out("    there = there & live")
    names = []
    for s, rest in p.states:
        inside: Known = shared.known([s.value]) | {p.read: "value"}
        old = shared.fresh()
        out(f"{old} = tl.load({s.array.name} + at, mask=there)")
        inside[rest] = old

        def spell(e: Expr, args: list[str]) -> str:
            if e.op == "idx":
                return "at" if rep(e) == "i64" else cast("at", "i32")
            if e.op == "load" and e.args[0].op == "idx":  # where the new value is not finite
                return "0.0"
            return shared.spell(e, args)

        # The state's old value is not read again: `rest` stands for all that was made of it.
        print_values([s.value], out, spell, inside, shared.fresh)
        names.append(inside[s.value])
    for (s, _), text in zip(p.states, names, strict=True):
        out(f"tl.store({s.array.name} + at, {stored(s.array, f'({text})')}, mask=there)")
    out.depth = 0
    out()
    out()
    print_kernel(
        shared, name, tile, f"-(-{shared.length_text(scatter.length)} // {tile.span})", out
    )
