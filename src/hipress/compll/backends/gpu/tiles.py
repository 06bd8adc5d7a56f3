"""What happens inside one tile of a pass: rows of blocks, columns of elements.

The tile stays in registers, so its elements are loaded once however many phases a pass has. All
tiles but the last are full and need no mask; the function is made twice, with and without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hipress.compll import ir
from hipress.compll.backends.gpu import locals as locals_
from hipress.compll.backends.gpu.kernel import (
    KernelPrinter,
    Launch,
    cast,
    identity,
    loaded,
    random_value,
    spread,
    stored,
)
from hipress.compll.backends.render import Known, machine_type, wide_type
from hipress.compll.ir import Array, Expr, Fold, Store, loads, walk
from hipress.errors import BackendError


@dataclass(frozen=True)
class Columns:
    """What a value of an element has a column for: each element of a block, or of a row."""

    count: int
    width: int
    """The power of two from `count` on."""
    suffix: str = ""
    """At the end of the names `cols`, `offs` and `live`."""

    def name(self, what: str) -> str:
        return what + self.suffix


ELEMENTS = 4096
"""Elements of a tile, unless a block is larger."""


SHAPES = {
    "random": (ELEMENTS, 32),
    "decode": (ELEMENTS, 16),
    "blocks": (ELEMENTS // 2, 8),
    "encode": (ELEMENTS, 8),
}
"""Elements of a tile and of a thread, by what was fastest on an H200 (256M elements).

Random numbers cost so many instructions that a thread should make many; decoding wants many
independent loads in a thread; an encoder is faster with fewer registers. What a tile does once
(reading its row of numbers) is shared by its elements.
"""


def _shape(encodes: bool, block: int | None, roots: list[Expr]) -> tuple[int, int]:
    """Returns elements of a tile and of a thread."""
    if any(e.op in ir.RANDOM for e in walk(roots)) and block is None and encodes:
        return SHAPES["random"]
    if not encodes or (block or 0) >= ELEMENTS:
        return SHAPES["decode"]
    return SHAPES["blocks" if block else "encode"]


MAX_BLOCK = 131_072
"""Most elements of a block: they must fit the registers of one program."""


class Tile:
    """Prints the function over one tile of a domain, and the kernel that runs it."""

    def __init__(
        self,
        printer: KernelPrinter,
        length: Expr,
        block: int | None,
        roots: list[Expr],
        stores: Sequence[Store] = (),
        elements: int | None = None,
        sums: bool = True,
    ) -> None:
        self.printer = printer
        self.out = printer.out
        self.length = length
        self.known: Known = {}
        self.roots = roots
        everything = ir.with_blocks(roots)
        shape = _shape(printer.kernel.output is None, block, everything)
        preferred, per_thread = shape
        elements = elements or preferred
        self.block = block or elements
        self.cols = _power_above(self.block)
        self.rows = max(1, elements // self.cols)
        if self.cols > MAX_BLOCK:
            raise BackendError(
                f"a block of {self.block} elements does not fit a GPU program; use blocks of at "
                f"most {MAX_BLOCK}, or the cpu backend."
            )
        self.span = self.rows * self.block
        """Elements from one tile to the next."""
        self.own = Columns(self.block, self.cols)
        self.locals: dict[ir.Local, str] = {}
        self.masked = self.block != self.cols
        """Whether even a full tile has columns that are not there."""
        self.row_arrays = {s.array: s.row.count for s in stores if s.row is not None}
        if block is not None:
            owned = [e for e in walk(everything) if e.op == "load" and e.args[0].op == "idx"]
            inner = [e for e in owned if e.args[0].attr is not length]
            self.row_arrays |= {e.attr: ir.row_count(e.args[0].attr) for e in inner}
        counts = {*_rows(everything), *self.row_arrays.values()}
        self.row_columns = {
            count: Columns(count, _power_above(count), f"_r{count}") for count in sorted(counts)
        }
        self.units = {
            a: 32 if self._each(a) * ir.STORAGE_BITS[a.storage] % 32 == 0 else 8
            for a in (*loads(everything), *(s.array for s in stores))
            if a.storage in ir.PACKED
        }
        """Bits that packed codes are read and written in."""
        uses = Counter(roots)
        for e in walk(everything):
            uses.update(e.args)
        self.often = {e for e, count in uses.items() if count > 1}
        """Values with several uses: of several phases too, so they are kept, not made again."""
        self.busy = shape is SHAPES["random"]
        """Whether instructions take the time, not memory."""
        given = printer.kernel.input
        halves = given is not None and given.storage != "f32"
        self.each = 8 if self.busy and halves and not sums else 4
        """Neighbours that one thread has. Of 16 bits it can read eight at once, but where something
        is summed it takes four, as of 32 bits, so that floats add up in the same order."""
        self.warps = min(32, max(1, self.rows * self.cols // (32 * per_thread)))
        if any(e.op == "local" and e.attr.kind in ("largest", "scatter") for e in walk(everything)):
            # Many short steps, and in each of them the warps of a row wait for each other.
            self.warps = min(self.warps, max(self.rows, self.rows * self.cols // (32 * 64)))

    @property
    def shape(self) -> str:
        return f"[{self.rows}, {self.cols}]"

    def _each(self, array: Array) -> int:
        return self.row_arrays.get(array, self.block)

    def columns(self, e: Expr) -> Columns:
        """Returns the columns of a value: those of the indices that it is made of."""
        for x in walk([e]):
            if x.op == "ridx":
                return self.row_columns[x.attr[1]]
            if x.op == "idx" and self._is_row(x):
                return self.row_columns[ir.row_count(x.attr)]
        return self.own

    def _is_row(self, index: Expr) -> bool:
        return index.attr is not self.length

    # Opening.

    def open(self, name: str, arrays: Iterable[Array], more: str = "") -> None:
        out, printer = self.out, self.printer
        everything = ir.with_blocks(self.roots)
        out("@triton.jit")
        out.open(f"def {name}(t, {printer.args}{more}, TAIL: tl.constexpr):")
        printer.views([*loads([self.length]), *loads(everything), *arrays], self.units)
        known = self.known = printer.known([self.length, *everything])
        out(f"length = {printer.domain(self.length, known)}")
        printer.draws(everything)
        for e, text in known.items():
            if not text.isidentifier():
                known[e] = self.named(text)
        out(f"start = t * {self.span}")
        out(f"cols = tl.arange(0, {self.cols})[None, :]")
        if self.rows > 1:
            out(f"offs = tl.arange(0, {self.rows})[:, None] * {self.block} + cols")
        else:
            out("offs = cols")
        out("left = (length - start).to(tl.int32)")
        if self.masked:
            out(f"live = tl.broadcast_to(cols < {self.block}, {self.shape})")
            out("if TAIL:")
            out("    live = live & (offs < left)")
        else:
            out("live = None")
            out("if TAIL:")
            out("    live = offs < left")
        leaves = {e.op: e for e in walk(everything) if e.op in ("bnum", "bstart", "blen")}
        out(f"block = t * {self.rows} + tl.arange(0, {self.rows})")
        texts = {
            "bnum": "block",
            "bstart": f"block * {self.block}",
            # A block that is not there has one element, so that nothing is divided by zero.
            "blen": f"tl.maximum(tl.minimum(length - block * {self.block}, {self.block}), 1)",
        }
        for op, e in leaves.items():
            known[e] = self.named(cast(f"({texts[op]})", machine_type(e)))
        for c in self.row_columns.values():
            if c.width > MAX_BLOCK:
                raise BackendError(
                    f"a row of {c.count} elements does not fit a GPU program; use rows of at most "
                    f"{MAX_BLOCK}, or the cpu backend."
                )
            s = c.suffix
            out(f"cols{s} = tl.arange(0, {c.width})[None, :]")
            out(f"offs{s} = tl.arange(0, {self.rows})[:, None] * {c.count} + cols{s}")
            there = f"((block * {self.block} < length)[:, None])"
            out(f"live{s} = {there} & (cols{s} < {c.count})")

    def named(self, text: str) -> str:
        return self.printer.assign(text, self.out)

    # Values.

    def print(self, roots: Iterable[Expr]) -> list[str]:
        return self.printer.print(roots, self.out, self.known, self.spell, self.often)

    def spell(self, e: Expr, args: list[str]) -> str:
        if e.op == "ridx":
            return cast(self.columns(e).name("cols"), machine_type(e))
        if e.op == "local":
            return locals_.element(self, e, args[0])
        if e.op == "idx" and self._is_row(e):
            c = self.columns(e)
            return cast(f"(t * {self.rows * c.count} + {c.name('offs')})", machine_type(e))
        if e.op == "idx":
            return "(start + offs)" if machine_type(e) == "i64" else cast("(start + offs)", "i32")
        if e.op == "lidx":
            return "cols" if machine_type(e) == "i32" else cast("cols", "i64")
        aligned = bool(e.args) and e.args[0].op == "idx"
        if e.op == "load" and aligned and not ir.splits_bytes(e.attr, self._each(e.attr)):
            return self._own(e.attr)
        if e.is_load:
            masks = {1: f"block * {self.block} < length"}
            if e.variance == 2:
                masks[2] = self.columns(e).name("live")
            return self.printer.loaded(e, args[0], masks.get(e.variance, ""))
        if self.busy and e.op == "div" and [a.variance for a in e.args] == [2, 0]:
            times = SHAPES["random"][1] // self.each
            return f"_div_shared({args[0]}, {args[1]}, {times}, {self.each})"
        if e.op == "select" and [a.variance for a in e.args] == [0, 2, 0]:
            if e.args[1].op == "div" and args[1].startswith("_div_shared("):
                return f"{args[1][:-1]}, {args[0]}, {args[2]})"
        aligned = aligned and not self._is_row(e.args[0])
        if e.op == "add" and e.type == "float":
            for k in (0, 1):
                if self._fusable(e.args[k]):
                    other = spread(args[1 - k], e.args[1 - k], 2)
                    return f"_plus_uniform({other}, {self._bits(e.args[k], 'rng')})"
        if e.op in ir.RANDOM and aligned and not self.masked:
            bits = self._bits(e, "rng" if len(args) == 1 else f"_keyed({args[1]})")
            return random_value(e, bits)
        return self.printer.spell(e, args)

    def _fusable(self, e: Expr) -> bool:
        """Whether a random float is only added to something, and is for the tile's elements."""
        own = e.op == "uniform" and e.args[0].op == "idx" and len(e.args) == 1
        own = own and not self._is_row(e.args[0])
        return own and not self.masked and e not in self.often

    def _bits(self, e: Expr, rng: str) -> str:
        """Returns random bits for the tile's own elements: four from each Philox."""
        bits = f"_bits32_row(start, {self.span}, {self.each}, {e.attr}, {rng})"
        return f"tl.reshape({bits}, {self.shape})" if self.rows > 1 else bits

    def _own(self, array: Array) -> str:
        if (sums := self.printer.running.get(array)) is not None:
            assert self.span == sums.span and self.rows == 1
            [item] = self.bodies([sums.fold])
            start = cast(f"({self.print([sums.fold.init])[0]})", "i64")
            return f"({start} + tl.load({sums.before} + t) + tl.cumsum({item}, axis=1))"
        if array.storage not in ir.PACKED:
            if array is self.printer.kernel.input and array.storage != "f32":
                # Triton would take eight in any case, and hand some of them to other threads.
                place = f"tl.max_contiguous({array.name} + start + offs, [1, {self.each}])"
                return loaded(array, f"tl.load({place}, mask=live)")
            return loaded(array, f"tl.load({self._place(array)})")
        bits, unit = ir.STORAGE_BITS[array.storage], self.units[array]
        return f"_unpack({self._units(array, 'tl.load')}, {bits}, {unit})"

    def _place(self, array: Array, value: str = "") -> str:
        """Returns what a load or store of the tile's elements is called with."""
        count, given = self.row_arrays.get(array), f", {value}" if value else ""
        if count is None:
            return f"{array.name} + start + offs{given}, mask=live"
        c = self.row_columns[count]
        at = f"{array.name} + t * {self.rows * count} + {c.name('offs')}"
        return f"{at}{given}, mask={c.name('live')}"

    def _units(self, array: Array, call: str, value: str = "") -> str:
        """Returns a load or store of the units that hold the tile's codes."""
        per = self.units[array] // ir.STORAGE_BITS[array.storage]
        if array in self.row_arrays:
            c = self.row_columns[self.row_arrays[array]]
            width, stride = c.width // per, c.count // per
            lanes = f"tl.arange(0, {width})[None, :]"
            at = f"(t * {self.rows} + tl.arange(0, {self.rows})[:, None]) * {stride} + {lanes}"
            there = f"(block * {self.block} < length)[:, None] & ({lanes} < {stride})"
            return f"{call}({array.name} + {at}{f', {value}' * bool(value)}, mask={there})"
        width, stride = self.cols // per, self.block // per
        at = f"tl.arange(0, {width})[None, :]"
        if self.rows > 1:
            at = f"tl.arange(0, {self.rows})[:, None] * {stride} + {at}"
        first = f"start // {per}"
        shape = f"{self.rows}, {width}"
        mask = f"_unit_mask(left, {per}, {shape}, {stride}, {self.masked}, TAIL)"
        given = f", {value}" if value else ""
        return f"{call}({array.name} + {first} + {at}{given}, mask={mask})"

    def whole(self, text: str, e: Expr, columns: Columns | None = None) -> str:
        if e.variance == 1:
            text = f"{text}[:, None]"
        return f"tl.broadcast_to({text}, [{self.rows}, {(columns or self.own).width}])"

    # Reductions.

    def bodies(self, folds: Iterable[Fold]) -> list[str]:
        """Prints what reductions are over; returns names of whole tiles without dead elements."""
        names = []
        for f in folds:
            text = self.whole(self.print([f.body])[0], f.body, self.over(f.row))
            if f.kind in ("max", "min") and f.type == "float":
                text = f"_key({text})"
            elif f.kind == "or":
                text = cast(text, "i32")
            elif f.type == "int":
                text = cast(text, "i64")
            name = self.named(text)
            if f.kind != "fold" and f.row is not None:
                self.out(f"{name} = tl.where({self.in_use(f.row)}, {name}, {identity(f)})")
            elif f.kind != "fold":
                self._if_masked(f"{name} = tl.where(live, {name}, {identity(f)})")
            names.append(name)
        return names

    def over(self, row: ir.Row | None) -> Columns:
        return self.own if row is None else self.row_columns[row.count]

    def in_use(self, row: ir.Row | None) -> str:
        """Returns which places of a row (or elements of a block) are there."""
        if row is None:
            live = self.named(f"tl.full({self.shape}, 1, tl.int1)")
            self._if_masked(f"{live} = live")
            return live
        c, [length] = self.over(row), self.print([row.length])
        length = f"({length})[:, None]" if row.length.variance == 1 else length
        return f"({c.name('live')} & ({c.name('cols')} < {length}))"

    def _if_masked(self, line: str) -> None:
        self.out("if True:" if self.masked else "if TAIL:")
        self.out(f"    {line}")

    def reduced(self, f: Fold, body: str, axis: str = "") -> str:
        """Returns the text of a tile's reduction (`axis=1`: one for each row)."""
        comma = f", {axis}" if axis else ""
        if f.kind == "sum":
            return f"tl.sum({body}{comma})"
        if f.kind == "fold":
            there = self.named(f"tl.full({self.shape}, 1, tl.int32)")
            if f.row is not None:
                self.out(f"{there} = {self.in_use(f.row)}.to(tl.int32)")
            else:
                self._if_masked(f"{there} = live.to(tl.int32)")
            join = self.printer.combine_name(f)
            pair = f"tl.reduce(({there}, {body}), 1, {join})"
            # One axis after the other: a reshape of the pair would let Triton put the elements of
            # each half in an order of its own, and what is there would part from its value.
            return f"{pair}[1]" if axis else f"tl.reduce({pair}, 0, {join})[1]"
        text = f"tl.{'min' if f.kind == 'min' else 'max'}({body}{comma})"
        return f"_unkey({text})" if f.type == "float" else text

    def block_folds(self, folds: Sequence[Fold]) -> None:
        """Prints reductions of each row, joined with their start."""
        for f, body in zip(folds, self.bodies(folds), strict=True):
            result = self.reduced(f, body, "axis=1")
            [init] = self.print([f.init])
            if not (f.kind == "sum" and f.init.op == "const" and f.init.attr == 0):
                init = cast(f"({init})", wide_type(f.type))
                result = self.printer.combined(f, init, f"({result})", self.out)
                if f.kind == "fold" and f.row is not None:  # of no element there is no result
                    [length] = self.print([f.row.length])
                    result = f"tl.where({length} > 0, {result}, {init})"
            name = self.named(result)
            for e in walk(ir.with_blocks(self.roots)):
                if e.op == "fold" and e.attr is f:
                    is_float = f.type == "float"
                    self.known[e] = name if is_float else self.named(cast(name, machine_type(e)))

    # Stores.

    def store(self, stores: Sequence[Store]) -> None:
        """Prints the writes of the tile's elements; all is read before anything is written."""
        texts = self.print(s.value for s in stores)
        typed = zip(texts, stores, strict=True)
        names = [self.named(self.whole(text, s.value, self.over(s.row))) for text, s in typed]
        for name, s in zip(names, stores, strict=True):
            array = s.array
            if array.storage in ir.PACKED:
                bits, unit = ir.STORAGE_BITS[array.storage], self.units[array]
                codes = self.named(cast(name, "i32"))
                if s.row is not None:
                    live = self.over(s.row).name("live")
                    self.out(f"{codes} = tl.where({live}, {codes}, 0)")
                else:
                    self._if_masked(f"{codes} = tl.where(live, {codes}, 0)")
                each = min(self.each, unit // bits) if self.busy else 1
                units = f"_pack({codes}, {bits}, {unit}, {each})" + ".to(tl.uint8)" * (unit == 8)
                self.out(self._units(array, "tl.store", units))
            else:
                if array is self.printer.kernel.output:
                    bad = "tl.load(frame + 6) != 0"
                    self.out(f'{name} = tl.where({bad}, float("nan"), {name})')
                self.write(array, name)

    def write(self, array: Array, name: str) -> None:
        self.out(f"tl.store({self._place(array, stored(array, name))})")

    def block_store(self, stores: Iterable[Store]) -> None:
        stores, read = list(stores), set(loads(ir.with_blocks(self.roots)))
        texts = [
            f"tl.broadcast_to({t}, [{self.rows}])" for t in self.print(s.value for s in stores)
        ]
        if any(s.array in read for s in stores):  # by all threads, before one overwrites it
            texts = [self.named(text) for text in texts]
            self.out("tl.debug_barrier()")
        for s, text in zip(stores, texts, strict=True):
            there = f"block * {self.block} < length"
            self.out(f"tl.store({s.array.name} + block, {stored(s.array, text)}, mask={there})")

    # Closing.

    def close(self, name: str) -> None:
        """Ends the function and prints the kernel that runs it, with a mask for the last tile only.

        PART 0 computes all tiles. For a long array the host starts the full tiles (PART 1) and the
        last one (PART 2) separately, because the mask would take registers from the full tiles.
        """
        out, printer, length = self.out, self.printer, self.length
        out.end()
        printer.head(name, ", PART: tl.constexpr")
        known = printer.known([length])
        printer.views(loads([length]))
        out(f"length = {printer.domain(length, known)}")
        out("if PART == 1:")
        out(f"    {name}_tile(t, {printer.args}, False)")
        out("elif PART == 2:")
        out(f"    {name}_tile(length // {self.span}, {printer.args}, True)")
        out(f"elif (t + 1) * {self.span} <= length:")
        out(f"    {name}_tile(t, {printer.args}, False)")
        out(f"elif t * {self.span} < length:")
        out(f"    {name}_tile(t, {printer.args}, True)")
        out.end()
        span, most = self.span if length.host else -1, printer.length_text(length)
        printer.launches.append(Launch(name, self.grid, self.warps, span, most))

    @property
    def grid(self) -> str:
        return self.printer.tiles_text(self.length, self.span)


def _rows(exprs: Iterable[Expr]) -> set[int]:
    """Returns the sizes of the rows that a pass over blocks computes."""
    counts: set[int] = set()
    for e in walk(exprs):
        if e.op == "ridx":
            counts.add(e.attr[1])
        elif e.op in ("fold", "local") and e.attr.row is not None:
            counts.add(e.attr.row.count)
        if e.op == "local" and e.attr.kind in ("filter", "sort", "largest", "scatter"):
            counts.add(e.attr.room)
    return counts


def _power_above(number: int) -> int:
    return 1 << (number - 1).bit_length()
