"""Each kind of pass as one or a few kernels."""

from __future__ import annotations

from hipress.compll.backends.gpu.points import WORDS, marked_words, print_points, told
from hipress.compll.backends.gpu.shared import Known, Launch, Shared, identity
from hipress.compll.backends.gpu.spell import RANDOM, TYPES, cast, loaded, stored, wide
from hipress.compll.backends.gpu.tiles import Tile, combined, domain, print_kernel
from hipress.compll.backends.render import Lines
from hipress.compll.ir import (
    Array,
    Compact,
    Expr,
    Fold,
    Loop,
    Pass,
    Phase,
    Scalars,
    Scan,
    Scatter,
    Select,
    Sorting,
    Store,
    loads,
    pass_exprs,
    pass_folds,
    pass_stores,
    walk,
)
from hipress.errors import BackendError

MAX_PARTS = 2048
"""Most programs of a pass that only reduces, each over many tiles: one part of the result each."""

SELECT_PROGRAMS = 1024
"""Most programs that count digits."""


def print_pass(shared: Shared, name: str, p: Pass, out: Lines) -> None:
    """Prints the kernels of one pass and adds them to the launches."""
    if isinstance(p, Loop):
        pure = p.block is None and not pass_stores(p)
        reorder = all(f.kind != "fold" for f in pass_folds(p))
        (_reduction if pure and reorder else _loop)(shared, name, p, out)
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


def _tiles_text(shared: Shared, length: Expr, span: int) -> str:
    return f"-(-{shared.length_text(length)} // {span})"


def _loop(shared: Shared, name: str, p: Loop, out: Lines) -> None:
    roots = pass_exprs(p)
    stores = [s for phase in p.phases for s in phase.stores]
    tile = Tile(shared, p.length, p.block, roots, stores)
    folds = [f for f in pass_folds(p) if f.block is None]
    known = tile.open(f"{name}_tile", out, [s.array for s in pass_stores(p)])
    for phase in p.phases:
        tile.block_folds([f for f in phase.folds if f.block is not None], out, known)
        _whole_folds(shared, name, tile, [f for f in phase.folds if f.block is None], out, known)
        tile.store(phase.stores, out, known)
    tile.block_store(p.block_stores, out, known)
    _end(out)
    grid = _tiles_text(shared, p.length, tile.span)
    print_kernel(shared, name, tile, grid, out)
    _join(shared, name, folds, grid, out, tile)


def _whole_folds(
    shared: Shared, name: str, tile: Tile, folds: list[Fold], out: Lines, known: Known
) -> None:
    """Prints the tile's part of reductions over the whole domain."""
    for f, body in zip(folds, tile.bodies(folds, out, known), strict=True):
        _keep_part(shared, name, tile, f, body, out)


def _keep_part(shared: Shared, name: str, tile: Tile, f: Fold, body: str, out: Lines) -> None:
    if f.kind != "or":
        out(f"tl.store({_part(shared, name, f)} + t, {tile.reduced(f, body, out)})")
        return
    # One element is enough: whoever finds it says so.
    if f is shared.kernel.nonfinite:
        out(f"_flag(frame + 6, {body})")
    exprs = [e for p in shared.kernel.passes for e in pass_exprs(p)]
    if f is not shared.kernel.nonfinite or any(e.op == "fold" and e.attr is f for e in walk(exprs)):
        out(f"_flag({shared.result(f, 'bool')}, {body})")


def _part(shared: Shared, name: str, f: Fold) -> str:
    """The memory for the parts of a reduction, one for each program."""
    key = ("part", f)
    if key not in shared.parts:
        shared.parts[key] = f"{name}_part{len(shared.parts)}"
    size = 4 if f.type == "float" else 8
    piece = shared.parts[key]
    return shared.pointer(piece, f"grid{name} * {size}", TYPES[wide(f.type)])


def _reduction(shared: Shared, name: str, p: Loop, out: Lines) -> None:
    """A pass that only reduces: each program goes over many tiles and keeps its sums apart."""
    folds = pass_folds(p)
    tile = Tile(shared, p.length, None, pass_exprs(p), [])
    known = tile.open(f"{name}_tile", out, [])
    out(f"return ({', '.join(tile.bodies(folds, out, known))},)")
    _end(out)
    num_tiles = _tiles_text(shared, p.length, tile.span)
    shared.head(name, out)
    known = shared.known([p.length])
    shared.views(out, loads([p.length]), {})
    out(f"length = {domain(shared, p.length, out, known)}")
    each = shared.size(("each", name), f"max(-(-({num_tiles}) // {MAX_PARTS}), 1)")
    out(f"each = {each}")
    kinds = [
        "tl.int32"
        if f.kind == "or" or (f.type == "float" and f.kind != "sum")
        else TYPES[wide(f.type)]
        for f in folds
    ]
    for j, (f, kind) in enumerate(zip(folds, kinds, strict=True)):
        out(f"acc{j} = tl.full({tile.shape}, {identity(f)}, {kind})")
    out(f"full = tl.minimum((t + 1) * each, length // {tile.span})")
    out("for k in range(t * each, full):")
    out.depth += 1
    _accumulate(shared, name, folds, "k", "False", out)
    out.depth -= 1
    out(f"if (full * {tile.span} < length) & (full < (t + 1) * each) & (full >= t * each):")
    out.depth += 1
    _accumulate(shared, name, folds, "full", "True", out)
    out.depth -= 1
    for j, f in enumerate(folds):
        _keep_part(shared, name, tile, f, f"acc{j}", out)
    _end(out)
    grid = f"-(-({num_tiles}) // max(-(-({num_tiles}) // {MAX_PARTS}), 1))"
    shared.launches.append(Launch(name, grid, tile.warps))
    _join(shared, name, folds, grid, out)


def _accumulate(
    shared: Shared, name: str, folds: list[Fold], t: str, tail: str, out: Lines
) -> None:
    bodies = [shared.fresh() for _ in folds]
    out(f"{', '.join(bodies)}, = {name}_tile({t}, {shared.args}, {tail})")
    for j, (f, body) in enumerate(zip(folds, bodies, strict=True)):
        forms = {"sum": "{} + {}", "max": "tl.maximum({}, {})", "min": "tl.minimum({}, {})"}
        out(f"acc{j} = {forms.get(f.kind, 'tl.maximum({}, {})').format(f'acc{j}', body)}")


def _join(
    shared: Shared, name: str, folds: list[Fold], grid: str, out: Lines, tile: Tile | None = None
) -> None:
    """Prints the kernel that joins the parts of reductions, in order; `tile`: one part each."""
    folds = [f for f in folds if f.kind != "or"]
    if not folds:
        return
    shared.grids[f"grid{name}"] = grid
    count = shared.size(("parts", name), f"grid{name}")
    shared.head(f"{name}_join", out)
    shared.views(out, loads([f.init for f in folds]), {})
    if tile is not None and not tile.length.host:
        shared.views(out, loads([tile.length]), {})
        length = domain(shared, tile.length, out, shared.known([tile.length]))
        count = f"({length} + {tile.span - 1}) // {tile.span}"
    out(f"count = {count}")
    out("lanes = tl.arange(0, 1024)")
    for f in folds:
        init = shared.print([f.init], out, shared.known([f.init]))[0]
        out(f"parts = {_part(shared, name, f)}")
        out(f"total = {cast(f'({init})', wide(f.type))}")
        if f.kind == "fold":
            _join_in_order(shared, f, out)
        else:
            _join_lanes(shared, f, out)
        out(f"tl.store({shared.result(f, f.type)}, total)")
    _end(out)
    shared.launches.append(Launch(f"{name}_join", "1"))


def _join_lanes(shared: Shared, f: Fold, out: Lines) -> None:
    # Thousands of partial sums: in double precision they add no error of their own.
    double = f.kind == "sum" and f.type == "float"
    keys = f.kind != "sum" and f.type == "float"
    kind = "tl.float64" if double else ("tl.int32" if keys else TYPES[wide(f.type)])
    out(f"acc = tl.full([1024], {identity(f)}, {kind})")
    out("for at in range(0, count, 1024):")
    out.depth += 1
    out("live = at + lanes < count")
    out("part = tl.load(parts + at + lanes, mask=live)")
    part = "_key(part)" if keys else ("part.to(tl.float64)" if double else "part")
    out(f"part = tl.where(live, {part}, {identity(f)})")
    out(f"acc = {'acc + part' if f.kind == 'sum' else f'tl.{f.kind}imum(acc, part)'}")
    out.depth -= 1
    if f.kind == "sum":
        kind = TYPES[wide(f.type)]
        whole = "total.to(tl.float64)" if double else "total"
        out(f"total = ({whole} + tl.sum(acc)).to({kind})")
    else:
        text = f"tl.{f.kind}(acc)"
        out(f"total = {combined(shared, f, 'total', f'_unkey({text})' if keys else text)}")


def _join_in_order(shared: Shared, f: Fold, out: Lines) -> None:
    out("for at in range(0, count):")
    out.depth += 1
    out("part = tl.load(parts + at)")
    out(f"total = {combined(shared, f, 'total', 'part')}")
    out.depth -= 1


def _compact(shared: Shared, name: str, p: Compact, out: Lines) -> None:
    """A filter: mark the elements, count the marks, then go to the few that are marked.

    Where the values of a marked element can be had from what an unmarked one leaves in its state,
    the marking pass writes that, and nothing is read twice. Otherwise the states are written by a
    pass of their own, when it is known which elements were taken.
    """
    mask = Array(f"temp{name}_mask", "u1", p.length)
    late = _late(shared, p)
    marks = p.filter.keep
    if late is not None:
        for value in late:  # an element that a state does not take stays where it is
            marks = shared.graph.logic("land", marks, shared.graph.unary("finite", value))
    stores = [Store(mask, marks)]
    if late is not None:
        stores += told(shared, p, False)
    loop = Loop(p.length, None, (Phase(p.folds, tuple(stores)),))
    _loop(shared, f"{name}_mark", loop, out)
    _count(shared, name, p, mask, out)
    if p.emits or late is not None:
        print_points(shared, f"{name}_emit", p, mask, late, out)
    if late is None and p.stores:
        g = shared.graph
        is_marked = g.binary("ne", g.load(mask, g.idx(p.length)), g.const(0))
        asked = {e: is_marked for e in walk([s.value for s in p.stores]) if e.op == "taken"}
        final = [Store(s.array, g.substitute(s.value, asked)) for s in p.stores]
        _loop(shared, f"{name}_store", Loop(p.length, None, (Phase((), tuple(final)),)), out)
    _clear_rest(shared, f"{name}_rest", p, out)


def _late(shared: Shared, p: Compact) -> dict[Expr, Array] | None:
    """Values that unmarked elements leave in their states, if a marked one needs no other."""
    states = {s.array for s in p.stores}
    if not p.stores or any(a.storage != "f32" for a in states):
        return {} if not p.stores else None
    left: dict[Expr, Array] = {}
    for s in told(shared, p, False):
        value = s.value
        if value.op != "select" or value.args[0].op != "finite":
            return None
        rest = value.args[0].args[0]
        if shared.kernel.nonfinite is None or not _flagged(shared.kernel.nonfinite.body, rest):
            return None
        left[rest] = s.array
    needed = [s.value for s in (*p.emits, *told(shared, p, True))]
    todo, seen = needed, set(left)
    while todo:
        e = todo.pop()
        if e in seen:
            continue
        seen.add(e)
        # The old value of an element that is not finite: such an element is never marked.
        if e.op == "select" and e.args[0].op == "finite" and e.args[2].op == "load":
            todo += e.args[:2]
            continue
        if e.is_load and e.attr in states:
            return None
        todo += e.args
    return left


def _flagged(flag: Expr, value: Expr) -> bool:
    """Whether a value that is not finite flags the frame: then it need not be marked."""
    if flag.op == "lor":
        return any(_flagged(part, value) for part in flag.args)
    return flag.op == "not" and flag.args[0].op == "finite" and flag.args[0].args[0] is value


def _count(shared: Shared, name: str, p: Compact, mask: Array, out: Lines) -> None:
    """Prints the kernels that count the marks and tell each program where its elements go."""
    shared.grids[f"grid{name}_count"] = _tiles_text(shared, p.length, WORDS * 32)
    counts = shared.pointer(f"{name}_counts", f"grid{name}_count * 8", "tl.int64")
    shared.head(f"{name}_count", out)
    shared.views(out, [mask, *loads([p.length])], {mask: 32})
    marked_words(shared, p, mask, out)
    out(f"tl.store({counts} + t, tl.sum(_popcount(words)).to(tl.int64))")
    _end(out)
    shared.launches.append(Launch(f"{name}_count", f"grid{name}_count", 4))
    shared.head(f"{name}_place", out)
    shared.views(out, loads([p.filter.capacity]), {})
    num = shared.size(("parts", f"{name}_count"), f"grid{name}_count")
    out(f"total = _sums_before({counts}, {num})")
    known = shared.known([p.filter.capacity])
    capacity = shared.print([p.filter.capacity], out, known)[0]
    out(f"capacity = {cast(f'({capacity})', 'i64')}")
    out(f"tl.store({shared.result(p.filter, 'int')}, _max(_min(total, capacity), _i64(0)))")
    _end(out)
    shared.launches.append(Launch(f"{name}_place", "1"))


def _clear_rest(shared: Shared, name: str, p: Compact, out: Lines) -> None:
    """Room that a filter left is zero."""
    if not p.emits:
        return
    most = shared.length_text(p.filter.capacity)
    shared.head(name, out)
    shared.views(out, [s.array for s in p.emits], {})
    out("at = t * 1024 + tl.arange(0, 1024)")
    out(f"count = tl.load({shared.result(p.filter, 'int')})")
    out(f"rest = (at >= count) & (at < {shared.size(('most', p.filter), most)})")
    for s in p.emits:
        zero = stored(
            s.array,
            "tl.zeros([1024], tl.float32)"
            if s.array.type == "float"
            else "tl.zeros([1024], tl.int64)",
        )
        out(f"tl.store({s.array.name} + at, {zero}, mask=rest)")
    _end(out)
    shared.launches.append(Launch(name, f"-(-{most} // 1024)"))


def _scatter(shared: Shared, name: str, p: Scatter, out: Lines) -> None:
    size = shared.length_text(p.array.length)
    decodes = p.array is shared.kernel.output
    if p.clear:
        _clear(shared, f"{name}_clear", p.array, size, decodes, out)
    elif decodes:
        _spoil(shared, f"{name}_spoil", p.array, size, out)
    tile = Tile(shared, p.length, None, [p.index, p.value], [], elements=1024)
    known = tile.open(f"{name}_tile", out, [p.array])
    index, value = tile.print([p.index, p.value], out, known)
    out(f"at = {cast(tile.whole(index, p.index), 'i64')}")
    out(f"value = {tile.whole(value, p.value)}")
    out(f"there = (at >= 0) & (at < {shared.size(('size', name), size)})")
    out("if TAIL:")
    out("    there = there | (live == 0)")
    out("if _any(there == 0) != 0:")
    out("    tl.store(E, 1)")
    out("if TAIL:")
    out("    there = there & live")
    if decodes:
        out("there = there & (tl.load(frame + 6) == 0)")
    # An atomic addition of floats takes tiny numbers for zero: only where indices may meet.
    if not p.distinct and p.array.storage in ("f32", "i64"):
        text = stored(p.array, "value")
        out(f'tl.atomic_add({p.array.name} + at, {text}, mask=there, sem="relaxed")')
    else:
        old = loaded(p.array, f"tl.load({p.array.name} + at, mask=there)")
        new = stored(p.array, f"({old} + value)")
        out(f"tl.store({p.array.name} + at, {new}, mask=there)")
    _end(out)
    print_kernel(shared, name, tile, _tiles_text(shared, p.length, tile.span), out)


def _clear(shared: Shared, name: str, array: Array, size: str, decodes: bool, out: Lines) -> None:
    """Zeroes an array; what a frame with a bad number decodes to is NaN."""
    span = 4096
    tile = Tile(shared, array.length, None, [], [], elements=span)
    shared.tile_head(f"{name}_tile", out, [array], {}, ", TAIL: tl.constexpr")
    out(f"length = {shared.size(('size', name), size)}")
    out(f"offs = tl.arange(0, {span})[None, :]")
    out("live = None")
    out("if TAIL:")
    out(f"    live = t * {span} + offs < length")
    kind = "tl.float32" if array.type == "float" else "tl.int64"
    out(f"value = tl.zeros([1, {span}], {kind})")
    if decodes:
        out('value = tl.where(tl.load(frame + 6) != 0, float("nan"), value)')
    out(f"tl.store({array.name} + t * {span} + offs, {stored(array, 'value')}, mask=live)")
    _end(out)
    print_kernel(shared, name, tile, f"-(-{size} // {span})", out)


def _spoil(shared: Shared, name: str, array: Array, size: str, out: Lines) -> None:
    """Adding a frame with a bad number gives NaN everywhere, not only where it has values."""
    programs = f"min(-(-{size} // 4096), {MAX_PARTS})"
    shared.head(name, out)
    out("if tl.load(frame + 6) != 0:")
    out.depth += 1
    out('value = tl.full((), float("nan"), tl.float32)')
    length = shared.size(("size", name), size)
    count = shared.size(("programs", name), programs)
    out(f"_spoil({array.name}, {length}, t, {count}, {stored(array, 'value')})")
    _end(out)
    shared.launches.append(Launch(name, programs))


def _scan(shared: Shared, name: str, p: Scan, out: Lines) -> None:
    f = p.fold
    if f.kind == "sum" and f.type == "int":
        _scan_ints(shared, name, p, out)
        return
    if f.kind == "fold":
        raise BackendError(
            "a scan with a function of its own goes from left to right and does not run on a GPU; "
            "use the cpu backend for this program."
        )
    # One program, tile after tile: right for floats too, and slow.
    tile = Tile(shared, f.length, None, f.exprs, [], elements=1024)
    known = tile.open(f"{name}_tile", out, [p.array], ", acc")
    item = tile.whole(tile.print([f.body], out, known)[0], f.body)
    out(f"item = {cast(item, wide(f.type))}")
    out(f"found = tl.associative_scan(item, 1, _scan_{f.kind})")
    out(f"found = {combined(shared, f, 'acc', 'found')}")
    out(f"tl.store({p.array.name} + start + offs, {stored(p.array, 'found')}, mask=live)")
    out(f"last = tl.where(offs == {tile.span - 1}, found, 0)")
    out("return tl.sum(last).to(found.dtype)")
    _end(out)
    shared.head(name, out)
    known = shared.known([f.length, f.init])
    shared.views(out, [*loads([f.length, f.init]), p.array], {})
    out(f"length = {domain(shared, f.length, out, known)}")
    init = shared.print([f.init], out, known)[0]
    out(f"acc = {cast(f'({init})', wide(f.type))}")
    out(f"full = length // {tile.span}")
    out("for k in range(t, full):")
    out(f"    acc = {name}_tile(k, {shared.args}, acc, False)")
    out(f"if full * {tile.span} < length:")
    out(f"    {name}_tile(full, {shared.args}, acc, True)")
    _end(out)
    shared.launches.append(Launch(name, "1"))


def _scan_ints(shared: Shared, name: str, p: Scan, out: Lines) -> None:
    """Sums of ints up to each element: sums of tiles, sums of the tiles before, then all."""
    f = p.fold
    tile = Tile(shared, f.length, None, f.exprs, [])
    num_tiles = _tiles_text(shared, f.length, tile.span)
    parts = shared.pointer(f"{name}_parts", f"({num_tiles}) * 8", "tl.int64", zeroed=True)
    known = tile.open(f"{name}_sums_tile", out, [])
    [item] = tile.bodies([f], out, known)
    out(f"tl.store({parts} + t, tl.sum({item}))")
    _end(out)
    print_kernel(shared, f"{name}_sums", tile, num_tiles, out)
    shared.head(f"{name}_before", out)
    out(f"_sums_before({parts}, {shared.size(('parts', name), num_tiles)})")
    _end(out)
    shared.launches.append(Launch(f"{name}_before", "1"))
    known = tile.open(f"{name}_tile", out, [p.array])
    [item] = tile.bodies([f], out, known)
    init = tile.print([f.init], out, known)[0]
    out(f"found = {cast(f'({init})', 'i64')} + tl.load({parts} + t) + tl.cumsum({item}, axis=1)")
    out(f"tl.store({p.array.name} + start + offs, {stored(p.array, 'found')}, mask=live)")
    _end(out)
    print_kernel(shared, name, tile, num_tiles, out)


def _order(shared: Shared, name: str, p: Select | Sorting, out: Lines) -> None:
    sort = p.sort
    picks = [e for q in shared.kernel.passes for e in walk(pass_exprs(q)) if e.op == "pick"]
    mine = [e for e in dict.fromkeys(picks) if e.attr is sort]
    if isinstance(p, Select) and sort.values.type == "float":
        for j, e in enumerate(mine):
            _select(shared, f"{name}_k{j}", e, out)
        return
    _sort(shared, sort.values, sort.keys)
    if not mine:
        return
    shared.head(f"{name}_pick", out)
    shared.views(out, [sort.values, *loads(sort.ranks)], {})
    known = shared.known([e.args[0] for e in mine])
    for e in mine:
        rank = shared.print([e.args[0]], out, known)[0]
        last = shared.size(("last", sort.values.name), f"{shared.length_text(sort.length)} - 1")
        at = f"_max(_min(({rank}).to(tl.int64), {last}), _i64(0))"
        value = loaded(sort.values, f"tl.load({sort.values.name} + {at})")
        out(f"tl.store({shared.result(e, e.type)}, {cast(f'({value})', wide(e.type))})")
    _end(out)
    shared.launches.append(Launch(f"{name}_pick", "1"))


def _sort(shared: Shared, values: Array, keys: Array | None) -> None:
    """Sorting is torch's: a launch whose name is the arrays' places."""
    for array in (values, keys):
        if array is not None:
            shared.view(array, Lines())
    places = [str(shared.ints[("at", a.name)]) + f", {a.storage!r}" for a in (values, keys) if a]
    shared.size(("sorted", values.name), shared.length_text(values.length))
    length = str(shared.ints[("sorted", values.name)])
    shared.launches.append(Launch(f"({length}, {', '.join(places)})", "1", 0))


def _select(shared: Shared, name: str, e: Expr, out: Lines) -> None:
    """The element of one rank: four kernels that count digits, one that reads the result."""
    values: Array = e.attr.values
    size = shared.length_text(values.length)
    counts = shared.pointer(f"{name}_counts", "4 * 256 * 4", "tl.int32", zeroed=True)
    found = shared.pointer(f"{name}_found", "64", "tl.int64", zeroed=True)
    span = 2048
    for level in range(4):
        shared.head(f"{name}_l{level}", out)
        shared.views(out, [values, *loads(e.args)], {})
        rank = shared.print([e.args[0]], out, shared.known(e.args))[0]
        length = shared.size(("size", name), size)
        programs = shared.size(
            ("programs", name), f"max(min(-(-{size} // {span}), {SELECT_PROGRAMS}), 1)"
        )
        out(f"rank = {cast(f'({rank})', 'i64')}")
        out(
            f"_select_count({values.name}, {length}, rank, {counts}, {found}, t, {programs}, "
            f"{level})"
        )
        _end(out)
        grid = f"max(min(-(-{size} // {span}), {SELECT_PROGRAMS}), 1)"
        shared.launches.append(Launch(f"{name}_l{level}", grid, 8))
    shared.head(f"{name}_value", out)
    out(f"tl.store({shared.result(e, e.type)}, _select_value({counts}, {found}))")
    _end(out)
    shared.launches.append(Launch(f"{name}_value", "1", 8))


def _scalars(shared: Shared, name: str, p: Scalars, out: Lines) -> None:
    roots = [s.value for s in p.stores]
    shared.head(name, out)
    shared.views(out, [*loads(roots), *(s.array for s in p.stores)], {})
    if any(e.op in RANDOM and len(e.args) == 1 for e in walk(roots)):
        out("rng = _rng(seed, stream, step)")
    texts = shared.print(roots, out, shared.known(roots))
    for s, text in zip(p.stores, texts, strict=True):
        value = (
            f"({text}).to(tl.uint8)"
            if s.array.storage in ("u1", "u2", "u4")
            else stored(s.array, f"({text})")
        )
        out(f"tl.store({s.array.name}, {value})")
    _end(out)
    shared.launches.append(Launch(name, "1"))


def print_check(shared: Shared, out: Lines) -> None:
    """Prints the function that looks at a frame's header and at what its payload must fulfil."""
    conds = [r.cond for r in shared.kernel.requires]
    out("@triton.jit")
    out(f"def _{shared.kernel.name}_check(t, {shared.args}):")
    out.depth += 1
    out("if _same_header(frame, H) == 0:")
    out("    tl.store(E, 2)")
    shared.views(out, loads(conds), {})
    known = shared.known(conds)
    for k, cond in enumerate(conds):
        text = shared.print([cond], out, known)[0]
        out(f"if {text} == 0:")
        out(f"    tl.store(E, {k + 3})")
    _end(out)
