"""What happens to the few elements that a filter marked, and to no other.

A program takes the marks of many elements, 32 to a word and one word to a lane, and goes through
the bits of all words side by side: as many rounds as the fullest word has marks.
"""

from __future__ import annotations

from hipress.compll.gpu.shared import Known, Launch, Shared
from hipress.compll.gpu.spell import RANDOM, cast, loaded, rep, stored
from hipress.compll.ir import Array, Compact, Expr, Store, walk
from hipress.compll.render import Lines, loads, print_values

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
        if e.op in ("load", "load_clamped"):
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
