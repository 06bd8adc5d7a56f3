"""Filters and scatters: marking elements, taking the few that are marked, adding at indices."""

from __future__ import annotations

from hipress.compll import ir
from hipress.compll.backends.cpu.kernel import DTYPES, loaded, stored
from hipress.compll.backends.cpu.loops import Body, Loops
from hipress.compll.ir import Array, Fold, loads, walk


def saves(loops: Loops, p: ir.Compact) -> dict[Array, str]:
    """Prints buffers for old values of arrays that a filter pass overwrites too early."""
    read = set(loads(loops.roots))
    saved = {s.array: f"old_{s.array.name}" for s in p.stores if s.array in read}
    for array, name in saved.items():
        loops.out(f"{name} = np.empty({loops.tile}, {DTYPES.get(array.storage, 'u8')})")
    return saved


def can_share(loops: Loops, p: ir.Compact) -> bool:
    """Whether threads may share a filter pass: what one took without room can be put back."""
    random = any(e.op in ir.RANDOM for e in walk([s.value for s in p.stores]))
    return not (random or loops.codes_out)


def mark(
    loops: Loops, name: str, p: ir.Compact, folds: list[Fold], saved: dict[Array, str]
) -> list[str]:
    """Prints a vector loop that marks elements and, for now, takes none."""
    body = loops.start(folds, "mask")
    for array, old in saved.items():
        body.needs(old, loops.slices[array])
        body(f"{old}[i] = {loops.slices[array]}[i]")
    stores = loops.printer.stores_if(p, False)
    loops.element(body, folds, stores, mask=p.filter.keep)
    return loops.call(name, body, folds)


def take(loops: Loops, name: str, p: ir.Compact, saved: dict[Array, str]) -> None:
    """Prints a loop over the few marked elements, in order, while there is room."""
    body = Body()
    body.needs("mask", "count", "capacity", *(f"to_{s.array.name}" for s in p.emits))
    body.needs("to_index", *(f"to_{old}" for old in saved.values()))
    body("num_words = (m + 7) >> 3")
    body("for i in range(m, num_words * 8):")
    body("    mask[i] = u8(0)")
    body("words = _view(mask[: num_words * 8], u64)")
    body.open("for w in range(num_words):")
    body("word = words[w]")
    body.open("while word != u64(0) and count < capacity:")
    body("i = w * 8 + _first_byte(word)")
    body("word &= word - u64(1)")
    olds = {array: f"{old}[i]" for array, old in saved.items()}
    texts = loops.print(body, [s.value for s in p.emits], olds)
    for s, text in zip(p.emits, texts, strict=True):
        body(f"to_{s.array.name}[count] = {stored(s.array, text)}")
    body("to_index[count] = a + i")
    for old in saved.values():
        body(f"to_{old}[count] = {old}[i]")
        body.needs(old)
    if p.stores:
        loops.element(body, [], loops.printer.stores_if(p, True), olds)
    body("count += 1")
    body.depth -= 2
    body("return count")
    loops.define(name, body)
    loops.out(f"count = {name}({body.signature})")
    loops.pack(p.stores)


def put_back(loops: Loops, name: str, p: ir.Compact, saved: dict[Array, str]) -> None:
    """Prints a loop over elements that a later range took without room: as if never taken."""
    body = Body()
    body.needs("first", "to_index", *(f"to_{old}" for old in saved.values()))
    body.open("for j in range(first, m):")
    body("i = to_index[j]")
    records = {array: f"to_{old}[j]" for array, old in saved.items()}
    loops.element(body, [], loops.printer.stores_if(p, False), records)
    loops.define(name, body)
    bound = {loops.slices[array]: array.name for array in loops.slices}
    loops.out(f"{name}({', '.join(['taken', '0', *(bound.get(a, a) for a in body.args)])})")


def check(loops: Loops, name: str, p: ir.Scatter) -> None:
    body = loops.start([], "I", p.array.name)
    body.text.insert(0, f"    size = len({p.array.name})")
    index, *bad = loops.print(body, [p.index, *p.exprs[2:]])
    body(f"k = i64({index})")
    body(f"if {' or '.join(['k < 0', 'k >= size', *bad])}:")
    body(f"    {loops.printer.slots.int('status')} = 1")
    loops.call(name, body, [])


def scatter(loops: Loops, name: str, p: ir.Scatter) -> None:
    target = p.array.name
    body = loops.start([], target)
    index, value = loops.print(body, [p.index, p.value])
    body(f"k = i64({index})")
    old = loaded(p.array, f"{target}[k]")
    total = f"_add({old}, {value})" if p.array.type == "int" else f"{old} + {value}"
    body(f"{target}[k] = {stored(p.array, total)}")
    loops.call(name, body, [])
