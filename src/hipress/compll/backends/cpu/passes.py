"""Each kind of pass as a function over a range of tiles."""

from __future__ import annotations

from collections.abc import Iterable

from hipress.compll.backends.cpu.loops import Loops, exact
from hipress.compll.backends.cpu.shared import MAX_RANGES, Known, Record, Shared, Step, maximal
from hipress.compll.backends.cpu.spell import RANDOM, rep, stored, wide
from hipress.compll.backends.render import Lines
from hipress.compll.ir import (
    Array,
    Compact,
    Expr,
    Fold,
    Loop,
    Pass,
    Scalars,
    Scan,
    Scatter,
    Select,
    Sorting,
    loads,
    pass_exprs,
    pass_folds,
    pass_stores,
    walk,
)

TILE = 2048
"""Elements of a tile: three float tiles and one of codes fit a first-level cache of 32 KiB
(measured on minmax(bits=2): 15.4 ms for 25M elements, against 18.5 ms with tiles of 4096)."""


def print_pass(shared: Shared, name: str, p: Pass, out: Lines) -> None:
    """Prints the functions of one pass and adds them to the kernel's steps."""
    if isinstance(p, Loop):
        _loop(shared, name, p, out)
    elif isinstance(p, Compact):
        _compact(shared, name, p, out)
    elif isinstance(p, Scatter):
        _scatter(shared, name, p, out)
    elif isinstance(p, Scan):
        _scan(shared, name, p, out)
    elif isinstance(p, Select | Sorting):
        _order(shared, name, p, out)
    else:
        _scalars(shared, name, p, out)


def _end(out: Lines) -> None:
    out.depth = 0
    out()
    out()


def _open(
    shared: Shared,
    name: str,
    out: Lines,
    roots: list[Expr],
    arrays: Iterable[Array],
    length: Expr,
    tile: int,
) -> Known:
    """Prints a pass up to its loop; gives the texts of what is the same for all elements."""
    shared.head(name, out, [*loads([length]), *loads(roots), *arrays])
    shared.length(length, tile, out)
    if any(e.op in RANDOM for e in walk(roots)):
        out("rng = I[1:5]")
    known = shared.known(roots)
    fixed = [e for e in walk(roots) if e.variance == 0 and e.op not in ("const", "param")]
    for e in maximal(fixed, roots, 0):
        shared.print([e], out, known)
        known[e] = shared.named(known[e], out)
    return known


def _loop(shared: Shared, name: str, p: Loop, out: Lines) -> None:
    roots = pass_exprs(p)
    stores = [s for phase in p.phases for s in phase.stores]
    loops = Loops(shared, p.block or TILE, roots, stores)
    folds = [f for f in pass_folds(p) if f.block is None]
    head = Lines()
    arrays = [s.array for s in pass_stores(p)]
    known = _open(shared, name, head, roots, arrays, p.length, loops.tile)
    parts = _partials(shared, folds, loops.tile, head)
    loops.buffers(head)
    loops.tiles(head, known)
    for j, phase in enumerate(p.phases):
        # A sum of floats has a loop of its own; other reductions ride with the stores.
        alone = [f for f in phase.folds if not (phase.stores and exact(f))]
        riding = [f for f in phase.folds if f not in alone]
        if alone:
            results = loops.fold(f"{name}_f{j}", alone, head, known)
            for f, result in zip(alone, results, strict=True):
                if f.block is None:
                    head(f"{parts[f]}[t] = {result}")
                else:
                    loops.finish(f, result, head, known)
        if phase.stores:
            results = loops.store(f"{name}_s{j}", list(phase.stores), riding, head, known)
            _keep(parts, riding, results, head)
    for s in p.block_stores:
        text = shared.print([s.value], head, known)[0]
        head(f"{s.array.name}[t] = {stored(s.array, text)}")
    out.text += loops.functions.text + head.text
    _end(out)
    slot = -1
    if p.length.host and p.length.op != "const":
        slot = int(shared.host(p.length)[2:-1])
    shared.steps.append(Step(name, loops.tile, slot))
    _join(shared, name, folds, parts, p.length, loops.tile, out)


def _partials(shared: Shared, folds: list[Fold], tile: int, out: Lines) -> dict[Fold, str]:
    parts = {f: shared.partial(f, tile) for f in folds}
    for f, part in parts.items():
        shared.view_partial(part, f, out)
    return parts


def _keep(parts: dict[Fold, str], folds: list[Fold], results: list[str], out: Lines) -> None:
    for f, result in zip(folds, results, strict=True):
        out(f"{parts[f]}[t] = {result}")


def _join(
    shared: Shared,
    name: str,
    folds: list[Fold],
    parts: dict[Fold, str],
    length: Expr,
    tile: int,
    out: Lines,
) -> None:
    """Prints the step that joins the results of all tiles, in order."""
    if not folds:
        return
    shared.head(f"{name}_join", out, loads([length, *(f.init for f in folds)]))
    shared.length(length, tile, out)
    for f in folds:
        init = shared.print([f.init], out, shared.known([f.init]))[0]
        shared.view_partial(parts[f], f, out)
        total = "acc"
        # Thousands of partial sums: in double precision they add no error of their own.
        double = f.kind == "sum" and f.type == "float"
        out(f"acc = {'f64' if double else wide(f.type)}({init})")
        out("for t in range(hi):")
        out.depth += 1
        if f.kind == "or":
            out(f"acc |= {parts[f]}[t]")
        elif f.kind == "sum":
            out(f"acc += {parts[f]}[t]")
            total = "f32(acc)" if double else "acc"
        else:
            out(f"part = {parts[f]}[t]")
            out(f"acc = {shared.combined(f, 'acc', 'part', out)}")
        out.depth -= 1
        out(f"{shared.slots.of(f.type, f)} = {total}")
    _end(out)
    shared.steps.append(Step(f"{name}_join", tile))


def _compact(shared: Shared, name: str, p: Compact, out: Lines) -> None:
    """A filter pass; a range of tiles after the first collects into scratch memory.

    The step after it moves what the ranges took to its place, in order. What then finds no room
    is put back: the same elements are taken whatever the number of threads.
    """
    roots = pass_exprs(p)
    loops = Loops(shared, TILE, roots, list(p.stores))
    folds = list(p.folds)
    head = Lines()
    arrays = [s.array for s in pass_stores(p)]
    known = _open(shared, name, head, roots, arrays, p.length, TILE)
    parts = _partials(shared, folds, TILE, head)
    saved = loops.saves(p, head)
    records = _records(shared, p, saved)
    loops.buffers(head)
    head(f"mask = np.empty({TILE}, u8)")
    head(f"capacity = i64({shared.print([p.filter.capacity], head, known)[0]})")
    head(f"part = _range_of(lo, {shared.ranges()})")
    for array in (s.array for s in p.emits):
        shared.view_record(records[array.name], head)
        head(f"to_{array.name} = {array.name}")
    for key in ("index", *saved.values()):
        shared.view_record(records[key], head)
        head(f"to_{key} = {records[key].name}[part * capacity : (part + 1) * capacity]")
    if p.emits:
        head("if part > 0:")
    for array in (s.array for s in p.emits):
        record = records[array.name].name
        head(f"    to_{array.name} = {record}[part * capacity : (part + 1) * capacity]")
    head("count = i64(0)")
    loops.tiles(head, known)
    alone = [f for f in folds if not exact(f)]
    riding = [f for f in folds if exact(f)]
    if alone:
        _keep(parts, alone, loops.fold(f"{name}_f0", alone, head, known), head)
    results = loops.scan(f"{name}_scan", p, riding, saved, head, known)
    _keep(parts, riding, results, head)
    loops.take(f"{name}_take", p, saved, head, known)
    head.depth -= 1
    head(f"{shared.ranges()}[part + {MAX_RANGES}] = count")
    out.text += loops.functions.text + head.text
    _end(out)
    slot = -1
    if loops.can_share(p) and p.length.host and p.length.op != "const":
        slot = int(shared.host(p.length)[2:-1])
    shared.steps.append(Step(name, TILE, slot))
    _gather(shared, name, p, saved, records, out)
    _join(shared, name, folds, parts, p.length, TILE, out)


def _records(shared: Shared, p: Compact, saved: dict[Array, str]) -> dict[str, Record]:
    """Scratch memory of a filter pass: what each range took, from where, and old values."""
    capacity = shared.kernel.limits.get(p.filter.capacity, p.filter.capacity)
    records = {s.array.name: shared.record(s.array.storage, capacity) for s in p.emits}
    records["index"] = shared.record("i64", capacity)
    return records | {old: shared.record("f32", capacity) for old in saved.values()}


def _gather(
    shared: Shared,
    name: str,
    p: Compact,
    saved: dict[Array, str],
    records: dict[str, Record],
    out: Lines,
) -> None:
    """Prints the step that moves what the ranges took to its place, in order."""
    roots = pass_exprs(p)
    loops = Loops(shared, TILE, roots, list(p.stores))
    head = Lines()
    arrays = [s.array for s in pass_stores(p)]
    known = _open(shared, f"{name}_gather", head, roots, arrays, p.length, TILE)
    for record in records.values():
        shared.view_record(record, head)
    head(f"capacity = i64({shared.print([p.filter.capacity], head, known)[0]})")
    ranges = shared.ranges()
    head(f"count = {ranges}[{MAX_RANGES}]")
    if loops.can_share(p):
        _gather_ranges(loops, name, p, saved, records, head, known)
    head(f"{shared.slots.int(p.filter)} = count")
    for s in p.emits:
        head(f"{s.array.name}[count:] = 0")
    out.text += loops.functions.text + head.text
    _end(out)
    shared.steps.append(Step(f"{name}_gather", TILE))


def _gather_ranges(
    loops: Loops,
    name: str,
    p: Compact,
    saved: dict[Array, str],
    records: dict[str, Record],
    head: Lines,
    known: Known,
) -> None:
    """Prints the loop over the ranges after the first."""
    ranges = loops.shared.ranges()
    head(f"for part in range(1, {MAX_RANGES}):")
    head.depth += 1
    head(f"taken = {ranges}[part + {MAX_RANGES}]")
    head("if taken == 0:")
    head("    continue")
    head("first = min(taken, capacity - count)")
    head("start = part * capacity")
    for s in p.emits:
        source = records[s.array.name].name
        head(f"{s.array.name}[count : count + first] = {source}[start : start + first]")
    for key in ("index", *saved.values()):
        head(f"to_{key} = {records[key].name}[start : start + taken]")
    if p.stores:
        loops.put_back(f"{name}_back", p, saved, head, known)
    head("count += first")
    head.depth -= 1


def _each(roots: list[Expr], known: Known, out: Lines) -> None:
    """Prints a loop over all elements at once, for what does not vectorise."""
    out("for i in range(length):")
    out.depth += 1
    for e in walk(roots):
        if e.op == "idx":
            known[e] = f"{rep(e)}(i)"


def _scatter(shared: Shared, name: str, p: Scatter, out: Lines) -> None:
    roots = [p.index, p.value]
    loops = Loops(shared, TILE, roots, [])
    head = Lines()
    known = _open(shared, name, head, roots, [p.array], p.length, TILE)
    loops.buffers(head)
    # Every index is checked before anything is written: a refused payload changes nothing.
    loops.tiles(head, dict(known))
    loops.check(f"{name}_check", p, head, known)
    head(f"if {shared.slots.int('status')} != 0:")
    head("    return")
    head.depth -= 1
    if p.clear:
        head(f"{p.array.name}[:] = 0")
    loops.tiles(head, known)
    loops.scatter(f"{name}_add", p, head, known)
    out.text += loops.functions.text + head.text
    _end(out)
    shared.steps.append(Step(name, TILE))


def _scan(shared: Shared, name: str, p: Scan, out: Lines) -> None:
    f = p.fold
    known = _open(shared, name, out, f.exprs, [p.array], f.length, TILE)
    out(f"acc = {wide(f.type)}({shared.print([f.init], out, known)[0]})")
    _each([f.body], known, out)
    out(f"item = {wide(f.type)}({shared.print([f.body], out, known)[0]})")
    out(f"acc = {wide(f.type)}({shared.combined(f, 'acc', 'item', out)})")
    out(f"{p.array.name}[i] = {stored(p.array, 'acc')}")
    out.depth -= 1
    out(f"{p.array.name}[max(length, 0) :] = 0")  # room that a shorter array leaves
    _end(out)
    shared.steps.append(Step(name, TILE))


def _order(shared: Shared, name: str, p: Select | Sorting, out: Lines) -> None:
    sort = p.sort
    values = sort.values.name
    arrays = [sort.values, *([sort.keys] if sort.keys is not None else []), *loads(sort.ranks)]
    shared.head(name, out, arrays)
    out(f"if len({values}) == 0:")
    out("    return")
    find = "_at"
    if isinstance(p, Select):
        find = "_select" if sort.values.type == "float" else "_select_i"
    elif sort.keys is not None:
        out(f'order = np.argsort({sort.keys.name}, kind="mergesort")')
        out(f"{values}[:] = {values}[order]")
    else:
        out(f"{values}.sort()")
    known = shared.known(sort.ranks)
    picks = [e for q in shared.kernel.passes for e in walk(pass_exprs(q)) if e.op == "pick"]
    for e in dict.fromkeys(picks):
        if e.attr is sort:
            rank = shared.print([e.args[0]], out, known)[0]
            out(f"{shared.slots.of(e.type, e)} = {find}({values}, {rank})")
    _end(out)
    shared.steps.append(Step(name, TILE))


def _scalars(shared: Shared, name: str, p: Scalars, out: Lines) -> None:
    roots = [s.value for s in p.stores]
    shared.head(name, out, [*loads(roots), *(s.array for s in p.stores)])
    if any(e.op in RANDOM for e in walk(roots)):
        out("rng = I[1:5]")
    texts = shared.print(roots, out, shared.known(roots))
    for s, text in zip(p.stores, texts, strict=True):
        out(f"{s.array.name}[0] = {stored(s.array, text)}")
    _end(out)
    shared.steps.append(Step(name, TILE))


def print_requires(shared: Shared, name: str, out: Lines) -> None:
    """Prints the check of what a payload must fulfil, as the kernel's first step."""
    conds = [r.cond for r in shared.kernel.requires]
    if not conds:
        return
    shared.head(name, out, loads(conds))
    known = shared.known(conds)
    for k, cond in enumerate(conds):
        out(f"if not {shared.print([cond], out, known)[0]}:")
        out(f"    {shared.slots.int('status')} = {k + 2}")
        out("    return")
    _end(out)
    shared.steps.append(Step(name, TILE))
