"""Arrays that a block has for itself: tiles of registers, one row for each block.

Reading one at other indices is a `tl.gather`. Orders and filters sort ints that hold a key above
the place in the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hipress.compll import ir
from hipress.compll.backends.gpu.kernel import cast
from hipress.compll.backends.render import machine_type, wide_type
from hipress.compll.ir import Expr
from hipress.errors import BackendError

FEW = 8
"""Values of a row that are scattered one by one in any case."""
WIDE = 256
"""Elements of a block from which on a few of them are not gathered by shuffling all."""

if TYPE_CHECKING:
    from hipress.compll.backends.gpu.tiles import Columns, Tile


def element(tile: Tile, e: Expr, index: str) -> str:
    """Returns elements of a block's array at some index."""
    x, at = e.attr, e.args[0]
    name, own = tile.locals[x], room_columns(tile, x)
    if at.variance < 2:  # one for each block
        here = f"({own.name('cols')} == ({index}){'[:, None]' if at.variance == 1 else ''})"
        return f"tl.sum(tl.where({here}, {name}, 0), axis=1).to({name}.dtype)"
    columns = tile.columns(at)
    if at.op in ("lidx", "ridx") and columns == own:
        return name
    if at.op == "xor" and at.args[0].op in ("lidx", "ridx") and columns == own:
        step = at.args[1].attr if at.args[1].op == "const" else 0
        if 0 < step < own.width and step & (step - 1) == 0 and wide_type(x.type) == "f32":
            return f"_partner({name}, {step})"  # compiles five times faster than a gather
    spread = f"tl.broadcast_to({cast(f'({index})', 'i32')}, [{tile.rows}, {columns.width}])"
    inside = f"tl.minimum(tl.maximum({spread}, 0), {own.width - 1})"
    if own.width < columns.width:
        # Triton 3.6 aborts when it compiles a gather from fewer columns than it writes, so the
        # source is repeated first.
        times = columns.width // own.width
        repeated = f"tl.broadcast_to({name}[:, None, :], [{tile.rows}, {times}, {own.width}])"
        name = f"tl.reshape({repeated}, [{tile.rows}, {columns.width}])"
    elif _is_rising(at) and own.width >= WIDE and columns.width >= FEW:
        steps = columns.width.bit_length() - 1
        if machine_type(x.body) in ("f32", "i32"):
            return f"_picked({name}, {inside}, {columns.name('cols')}, 32, {steps})"
    return f"tl.gather({name}, {inside}, 1)"


def _is_rising(at: Expr) -> bool:
    """Whether an index is a place of the largest elements, clamped or not: these rise."""
    while at.op in ("min", "max"):
        places = [e for e in at.args if e.variance == 2]
        if len(places) != 1:
            return False
        at = places[0]
    return at.op == "local" and at.attr.kind == "largest" and at.args[0].op in ("lidx", "ridx")


def room_columns(tile: Tile, x: ir.Local) -> Columns:
    """Returns the columns of a block's array."""
    if x.kind in ("keep", "scan"):
        return tile.over(x.row)
    if x.kind == "scatter" and x.size is not None and x.size.op == "blen":
        return tile.own
    return tile.row_columns[x.room]


def print_local(tile: Tile, x: ir.Local) -> None:
    over, kind = tile.over(x.row), machine_type(x.body)
    [text] = tile.print([x.body])
    body = tile.named(tile.whole(text, x.body, over))
    if x.kind == "keep":
        tile.locals[x] = body
    elif x.kind == "scan":
        tile.locals[x] = _scanned(tile, x, body)
    elif x.kind == "scatter":
        tile.locals[x] = _scattered(tile, x, body)
    else:
        tile.locals[x] = _places(tile, x, body, kind)


def _places(tile: Tile, x: ir.Local, body: str, kind: str) -> str:
    """Prints the places of a filter or an order; those that are not used are 0."""
    over, to = tile.over(x.row), room_columns(tile, x)
    live, cols = tile.named(tile.in_use(x.row)), over.name("cols")
    last = over.width
    if x.kind == "filter":
        tile.out(f"{live} = {live} & ({body} != 0)")
        order = f"tl.where({live}, {cols}, {last} + {cols})"
    elif kind == "i64":
        raise BackendError(
            "an order of ints that may need 64 bits does not run in the blocks of a GPU; make the "
            "key a float or a uint32 of at most 2**31 - 1, or use the cpu backend."
        )
    else:
        # Zeros of both signs are equal.
        key = f"_key({body} + 0.0)" if kind == "f32" else body
        if x.kind == "largest":
            return _largest(tile, x, tile.named(key), live)
        packed = f"(({key}).to(tl.int64) << 32) | {cols}"
        order = f"tl.where({live}, {packed}, 9223372036854775807)"
    order = tile.named(f"tl.sort({order}, 1)")
    count = tile.named(f"tl.sum({live}.to(tl.int32), axis=1)[:, None]")
    used = f"({to.name('cols')} < tl.minimum({count}, {x.room}))"
    if x.kind != "filter":
        order = tile.named(f"({order} & 0x7FFFFFFF).to(tl.int32)")
    first = order
    if to.width != over.width:
        lanes = f"tl.broadcast_to({to.name('cols')}, [{tile.rows}, {to.width}])"
        first = tile.named(f"tl.gather({order}, {lanes}, 1)")
    return tile.named(f"tl.where({used}, {first}, 0)")


def _largest(tile: Tile, x: ir.Local, key: str, live: str) -> str:
    """Prints the places of the largest: a limit, the marks of what reaches it, their places."""
    over, to = tile.over(x.row), room_columns(tile, x)
    count = f"tl.sum({live}.to(tl.int32), axis=1)[:, None]"
    wanted = tile.named(f"tl.minimum({count}, {x.room})")
    marks = tile.named(f"_largest_marks({key}, {live}, {wanted})")
    lanes = min(32, over.width)
    ranks = f"tl.broadcast_to({to.name('cols')}, [{tile.rows}, {to.width}])"
    steps, bits = (over.width // lanes).bit_length() - 1, lanes.bit_length() - 1
    places = tile.named(f"_marked_places({marks}, {ranks}, {lanes}, {steps}, {bits})")
    return tile.named(f"tl.where({to.name('cols')} < {wanted}, {places}, 0)")


def _scanned(tile: Tile, x: ir.Local, body: str) -> str:
    f = x.fold
    assert f is not None
    if f.kind == "fold":
        raise BackendError(
            "a scan with a function of its own goes from left to right and does not run on a "
            "GPU; use the cpu backend for this program."
        )
    [init] = tile.print([f.init])
    init = f"({init})[:, None]" if f.init.variance == 1 else f"({init})"
    item = tile.named(f"tl.associative_scan({cast(body, wide_type(f.type))}, 1, _scan_{f.kind})")
    joined = tile.printer.combined(f, cast(init, wide_type(f.type)), item, tile.out)
    return tile.named(joined)


def _scattered(tile: Tile, x: ir.Local, body: str) -> str:
    """One value after another, in order: the same bits in every run.

    Places that rise need no order: then each element finds its value.
    """
    assert x.index is not None and x.size is not None
    out, over, to = tile.out, tile.over(x.row), room_columns(tile, x)
    index, size = tile.print([x.index, x.size])
    size = f"({size})[:, None]" if x.size.variance == 1 else size
    at = tile.named(cast(tile.whole(index, x.index, over), "i64"))
    live = tile.named(tile.in_use(x.row))
    out(f"if _any({live} & (({at} < 0) | ({at} >= {size}))) != 0:")
    out("    tl.store(E, 1)")
    kind = wide_type(x.type)
    value = tile.named(cast(body, kind))
    total = tile.named(f"tl.zeros([{tile.rows}, {to.width}], {value}.dtype)")
    quick = kind == "f32" and over.width >= FEW and to.width >= FEW
    if quick:
        near = tile.named(f"tl.minimum(tl.maximum({at}, -1), {to.width}).to(tl.int32)")
        rising = tile.named(f"_is_rising({near}, {live}, {over.name('cols')})")
        lanes = min(32, to.width)
        steps = over.width.bit_length() - 1
        spread = f"_spread({near}, {value}, {live}, {to.width}, {lanes}, {steps})"
        out.open(f"if {rising}:")
        out(f"{total} = {spread}")
        out.depth -= 1
        out.open("else:")
    out.open(f"for k in range({over.count}):")
    out(f"here = {live} & ({over.name('cols')} == k)")
    out(f"one = tl.sum(tl.where(here, {value}, 0), axis=1).to({value}.dtype)[:, None]")
    out(f"place = tl.sum(tl.where(here, {at} + 1, 0), axis=1)[:, None] - 1")
    out(f"{total} = tl.where({to.name('cols')} == place, {total} + one, {total})")
    out.depth -= 2 if quick else 1
    return total
