"""Filters, and what happens to the few elements that they take.

A filter marks elements, one bit each. A program then takes the marks of many elements, 32 to a
word and one word to a lane, and goes through the bits of all words side by side: as many rounds as
the fullest word has marks. Scatters back to the taken elements are replaced where that saves
memory (`correct_scatters`).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from hipress.compll import ir
from hipress.compll.backends.gpu.kernel import KernelPrinter, cast, loaded, stored
from hipress.compll.backends.gpu.tiles import Tile
from hipress.compll.backends.render import Known, machine_type
from hipress.compll.ir import Array, Expr, Store, loads, walk

WORDS = 1024
"""Words of marks of one program."""


def left_in_states(printer: KernelPrinter, p: ir.Compact) -> dict[Expr, Array] | None:
    """Returns values that unmarked elements leave in their states, if a marked one needs no other.

    The marking pass then writes these states at once. Returns None where it cannot.
    """
    states = {s.array for s in p.stores}
    if not p.stores or any(a.storage != "f32" for a in states):
        return {} if not p.stores else None
    left: dict[Expr, Array] = {}
    for s in printer.stores_if(p, False):
        rest, flag = _finite_or_old(s.value), printer.kernel.nonfinite
        if rest is None or flag is None or not _flagged(flag.body, rest):
            return None
        left[rest] = s.array
    needed = [s.value for s in (*p.emits, *printer.stores_if(p, True))]
    for e in _needed_if_finite(needed, left):
        if e.is_load and e.attr in states and e not in left:
            return None
    return left


def _finite_or_old(value: Expr) -> Expr | None:
    """Returns the new value of a state that keeps its old one where the new one is not finite."""
    is_choice = value.op == "select" and value.args[0].op == "finite"
    return value.args[0].args[0] if is_choice else None


def _needed_if_finite(roots: list[Expr], known: Container[Expr]) -> set[Expr]:
    """Returns the values that `roots` need where all new values are finite; `known` end the walk.

    The old value of a state is not among them where it stands for one that is not finite.
    """
    todo, seen = list(roots), set()
    while todo:
        e = todo.pop()
        if e in seen:
            continue
        seen.add(e)
        if e not in known:
            old = _finite_or_old(e) is not None and e.args[2].op == "load"
            todo += e.args[:2] if old else e.args
    return seen


def _flagged(flag: Expr, value: Expr) -> bool:
    """Whether a value that is not finite flags the frame: then it need not be marked."""
    if flag.op == "lor":
        return any(_flagged(part, value) for part in flag.args)
    return flag.op == "not" and flag.args[0].op == "finite" and flag.args[0].args[0] is value


def count_marks(printer: KernelPrinter, name: str, p: ir.Compact, mask: Array) -> None:
    """Prints the kernels that count the marks and find where the elements of a program go."""
    out, grid = printer.out, f"grid{name}_count"
    printer.grids[grid] = printer.tiles_text(p.length, WORDS * 32)
    counts = printer.pointer(f"{name}_counts", f"{grid} * 8", "tl.int64")
    printer.head(f"{name}_count")
    printer.views([mask, *loads([p.length])], {mask: 32})
    _load_words(printer, p, mask)
    out(f"tl.store({counts} + t, tl.sum(_popcount(words)).to(tl.int64))")
    printer.launch(f"{name}_count", grid)
    printer.head(f"{name}_place")
    printer.views(loads([p.filter.capacity]))
    out(f"total = _sums_before({counts}, {printer.size(('parts', f'{name}_count'), grid)})")
    _print_capacity(printer, p, printer.known([p.filter.capacity]))
    out(f"tl.store({printer.result(p.filter, 'int')}, _max(_min(total, capacity), _i64(0)))")
    printer.launch(f"{name}_place", "1")


def _print_capacity(printer: KernelPrinter, p: ir.Compact, known: Known) -> None:
    [capacity] = printer.print([p.filter.capacity], printer.out, known)
    printer.out(f"capacity = {cast(f'({capacity})', 'i64')}")


def _load_words(printer: KernelPrinter, p: ir.Compact, mask: Array) -> None:
    printer.out(f"lanes = t * {WORDS} + tl.arange(0, {WORDS})")
    size = printer.size(("words", mask.name), printer.tiles_text(p.length, 32))
    if not p.length.host:  # no more than were written
        [length] = printer.print([p.length], printer.out, printer.known([p.length]))
        size = f"_min({size}, ({cast(f'({length})', 'i64')} + 31) // 32)"
    words = f"tl.load({mask.name} + lanes, mask=lanes < {size}, other=0)"
    printer.out(f"words = {words}.to(tl.uint32, bitcast=True)")


def print_marked(
    printer: KernelPrinter, name: str, p: ir.Compact, mask: Array, left: dict[Expr, Array] | None
) -> None:
    """Prints the kernel that writes out the marked elements, in order, while there is room.

    With `left`, it writes their states too, from what unmarked elements leave there. Without, it
    takes away the marks of those that found no room, for the pass that writes the states.
    """
    out = printer.out
    stores = printer.stores_if(p, True) if left is not None else []
    roots = [s.value for s in (*p.emits, *stores)]
    arrays = [*(s.array for s in (*p.emits, *stores)), *loads([*roots, p.filter.capacity])]
    printer.head(f"{name}_emit")
    printer.views([mask, *loads([p.length]), *arrays], {mask: 32})
    _load_words(printer, p, mask)
    known = printer.known([*roots, p.filter.capacity])
    printer.draws(roots)
    for e, text in known.items():
        known[e] = printer.assign(text, out)
    _print_capacity(printer, p, known)
    counts = printer.pointer(f"{name}_counts", "0", "tl.int64")
    out("ones = _popcount(words)")
    out(f"rank = tl.load({counts} + t) + tl.cumsum(ones) - ones")
    out("rest = words")
    out("kept = words ^ words")
    out("rounds = tl.max(ones)")
    out.open("for _ in range(rounds):")
    out("low = rest & (0 - rest)")
    out("i = lanes * 32 + _popcount(low - 1)")
    out("taken = (rest != 0) & (rank < capacity)")
    _print_round(printer, p, stores, left or {}, known)
    out("kept |= tl.where(taken, low, 0)")
    out("rank += (rest != 0).to(tl.int32)")
    out("rest &= rest - 1")
    out.depth -= 1
    if left is None and p.stores:
        out(f"tl.store({mask.name} + lanes, kept.to(tl.int32, bitcast=True), mask=words != kept)")
    # One word to a thread: lanes are never handed from one to another.
    printer.launch(f"{name}_emit", f"grid{name}_count", WORDS // 32)


def _print_round(
    printer: KernelPrinter,
    p: ir.Compact,
    stores: list[Store],
    left: dict[Expr, Array],
    known: Known,
) -> None:
    """Prints what is written for one round of elements; all is read before anything is written."""
    out, roots = printer.out, [s.value for s in (*p.emits, *stores)]
    for value, array in left.items():
        known[value] = printer.assign(f"tl.load({array.name} + i, mask=taken)", out)

    def spell(e: Expr, args: list[str]) -> str:
        if e.op == "idx":
            return "i" if machine_type(e) == "i64" else cast("i", "i32")
        if e.op == "load" and e.args[0].op == "idx":
            if e.attr in left.values():  # used where the new value is not finite; it is
                return "0.0"
            return loaded(e.attr, f"tl.load({e.attr.name} + i, mask=taken)")
        if e.is_load:
            return printer.loaded(e, args[0], "taken")
        return printer.spell(e, args)

    texts = printer.print(roots, out, known, spell)
    names = [printer.fresh() for _ in roots]
    for name, text in zip(names, texts, strict=True):
        out(f"{name} = tl.broadcast_to({text}, [{WORDS}])")
    for k, (s, name) in enumerate(zip((*p.emits, *stores), names, strict=True)):
        at = "rank" if k < len(p.emits) else "i"
        out(f"tl.store({s.array.name} + {at}, {stored(s.array, name)}, mask=taken)")


def clear_rest(printer: KernelPrinter, name: str, p: ir.Compact) -> None:
    if not p.emits:
        return
    out, most = printer.out, printer.length_text(p.filter.capacity)
    printer.head(name)
    printer.views([s.array for s in p.emits])
    out("at = t * 1024 + tl.arange(0, 1024)")
    out(f"count = tl.load({printer.result(p.filter, 'int')})")
    out(f"rest = (at >= count) & (at < {printer.size(('most', p.filter), most)})")
    for s in p.emits:
        kind = "tl.float32" if s.array.type == "float" else "tl.int64"
        zero = stored(s.array, f"tl.zeros([1024], {kind})")
        out(f"tl.store({s.array.name} + at, {zero}, mask=rest)")
    printer.launch(name, f"-(-{most} // 1024)")


# A scatter whose result only says what single elements send.


@dataclass(frozen=True)
class Corrected:
    """A loop that runs as if a scatter had set nothing, and the few elements where it did."""

    loop: ir.Loop
    scatter: ir.Scatter
    values: Array
    """Where the scattered values lie: the payload."""
    states: tuple[tuple[Store, Expr], ...]
    """What the loop writes where the scatter sets something, and what it writes elsewhere."""
    read: Expr
    """The element of the scattered array, in those values."""


def correct_scatters(printer: KernelPrinter) -> list[ir.Pass | Corrected]:
    """Returns the kernel's passes without scatters into memory that can be saved.

    The array would be as long as the gradient, written and read to change one element in a
    hundred. Instead the loop leaves in its state what an element that is not sent leaves, and
    a pass over the few others corrects theirs.
    """
    passes = printer.kernel.passes
    out: list[ir.Pass | Corrected] = list(passes)
    for p in passes:
        if not isinstance(p, ir.Scatter) or not (p.clear and p.distinct):
            continue
        users = [q for q in passes if p.array in loads(ir.pass_exprs(q)) and q is not p]
        written = [s.array for q in passes for s in ir.pass_stores(q) if s.value is p.value]
        if len(users) != 1 or not isinstance(users[0], ir.Loop) or not written:
            continue
        corrected = _corrected(printer, p, users[0], written[0])
        if corrected is not None:
            out[out.index(users[0])] = corrected
            out.remove(p)
    return out


def _corrected(
    printer: KernelPrinter, p: ir.Scatter, loop: ir.Loop, values: Array
) -> Corrected | None:
    if loop.block is not None or len(loop.phases) != 1 or loop.block_stores:
        return None
    g, phase = printer.graph, loop.phases[0]
    reads = [e for e in walk(ir.pass_exprs(loop)) if e.is_load and e.attr is p.array]
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
        rest = _finite_or_old(value)
        if rest is None or s.array.storage != "f32":
            return None
        if not _alike(rest, p.value) or not _made_of(s.value, {rest, read}):
            return None
        stores.append(Store(s.array, value))
        states.append((s, rest))
    quiet = replace(loop, phases=(ir.Phase(phase.folds, tuple(stores)),))
    return Corrected(quiet, p, values, tuple(states), read)


def _alike(a: Expr, b: Expr) -> bool:
    """Whether two values are the same but for the place they are taken from."""
    if a.op == "idx" and b.type == "int":
        return True
    same = a.op == b.op or (a.is_load and b.is_load)
    if not same or a.attr != b.attr or len(a.args) != len(b.args):
        return False
    return all(_alike(x, y) for x, y in zip(a.args, b.args, strict=True))


def _made_of(root: Expr, known: set[Expr]) -> bool:
    """Whether a state's new value uses all of `known`, and no memory or draws besides."""
    needed = _needed_if_finite([root], known)
    return known <= needed and not any(e.is_load or e.op in ir.RANDOM for e in needed - known)


def print_corrections(printer: KernelPrinter, name: str, p: Corrected) -> None:
    """Prints the kernel that corrects the states of the elements that a scatter sets."""
    out, index = printer.out, p.scatter.index
    tile = Tile(printer, p.scatter.length, None, [index], elements=1024)
    tile.open(f"{name}_tile", [p.values, *(s.array for s, _ in p.states)])
    out(f"at = {cast(tile.whole(tile.print([index])[0], index), 'i64')}")
    out(f"value = tl.load({p.values.name} + start + offs, mask=live)")
    # A value that is not finite was not taken out of the state either.
    size = printer.size(("size", name), printer.length_text(p.loop.length))
    out(f"there = (at >= 0) & (at < {size})")
    out("there = there & _finite(value)")
    out("if TAIL:")
    out("    there = there & live")

    def spell(e: Expr, args: list[str]) -> str:
        if e.op == "idx":
            return "at" if machine_type(e) == "i64" else cast("at", "i32")
        if e.op == "load" and e.args[0].op == "idx":  # used where the new value is not finite
            return "0.0"
        return printer.spell(e, args)

    texts = []
    for s, rest in p.states:
        # The state's old value is not read again: `rest` stands for all that was made of it.
        inside: Known = printer.known([s.value]) | {p.read: "value"}
        inside[rest] = printer.assign(f"tl.load({s.array.name} + at, mask=there)", out)
        texts += printer.print([s.value], out, inside, spell)
    for (s, _), text in zip(p.states, texts, strict=True):
        out(f"tl.store({s.array.name} + at, {stored(s.array, f'({text})')}, mask=there)")
    tile.close(name)
