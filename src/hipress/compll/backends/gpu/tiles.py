"""What happens inside one tile of a pass: rows of blocks, columns of elements.

The tile stays in registers, so its elements are loaded once however many phases a pass has. All
tiles but the last are full and need no mask; the function is made twice, with and without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hipress.compll.backends.gpu.shared import Known, Launch, Shared, identity
from hipress.compll.backends.gpu.spell import (
    PACKED,
    RANDOM,
    TYPES,
    cast,
    loaded,
    rep,
    spread,
    stored,
    wide,
)
from hipress.compll.backends.render import Lines, print_values
from hipress.compll.ir import STORAGE_BITS, Array, Expr, Fold, Store, loads, walk, with_blocks
from hipress.errors import BackendError

ELEMENTS = 4096
"""Elements of a tile, unless a block is larger."""


def _shape(encodes: bool, block: int | None, roots: list[Expr]) -> tuple[int, int]:
    """Elements of a tile and of a thread, by what was fastest on an H200 (256M elements).

    Random numbers cost so many instructions that a thread should make many; decoding wants many
    independent loads in a thread; an encoder is faster with fewer registers. What a tile does
    once (reading its row of numbers) is shared by its elements.
    """
    if any(e.op in RANDOM for e in walk(roots)) and block is None and encodes:
        return 2 * ELEMENTS, 32
    if not encodes or (block or 0) >= ELEMENTS:
        return ELEMENTS, 16
    return (ELEMENTS // 2 if block else ELEMENTS), 8


UNITS = {"u1": 32, "u2": 32, "u4": 32}
"""Bits that packed codes are read and written in."""

MAX_BLOCK = 131_072
"""Most elements of a block: they must fit the registers of one program."""


class Tile:
    """Prints the function over one tile of a domain."""

    def __init__(
        self,
        shared: Shared,
        length: Expr,
        block: int | None,
        roots: list[Expr],
        stores: list[Store],
        elements: int | None = None,
    ) -> None:
        self.shared = shared
        self.length = length
        self._encodes = shared.kernel.output is None
        preferred, per_thread = _shape(self._encodes, block, _all(roots))
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
        self.masked = self.block != self.cols
        """Whether even a full tile has columns that are not there."""
        self.roots = roots
        self.stores = stores
        self.units = {
            a: UNITS[a.storage] if self.block * STORAGE_BITS[a.storage] % 32 == 0 else 8
            for a in (*loads(_all(roots)), *(s.array for s in stores))
            if a.storage in PACKED
        }
        uses = Counter(roots)
        for e in walk(_all(roots)):
            uses.update(e.args)
        self.often = {e for e, count in uses.items() if count > 1}
        """Values with several uses: of several phases too, so they are kept, not made again."""
        self.warps = min(32, max(1, self.rows * self.cols // (32 * per_thread)))

    @property
    def shape(self) -> str:
        return f"[{self.rows}, {self.cols}]"

    # Opening.

    def open(self, name: str, out: Lines, arrays: Iterable[Array], more: str = "") -> Known:
        """Prints the head of the function; gives the texts of what comes from outside."""
        shared = self.shared
        everything = with_blocks(self.roots)
        wanted = [*loads([self.length]), *loads(everything), *arrays]
        shared.tile_head(name, out, wanted, self.units, f"{more}, TAIL: tl.constexpr")
        known = shared.known([self.length, *everything])
        out(f"length = {domain(shared, self.length, out, known)}")
        if any(e.op in RANDOM and len(e.args) == 1 for e in walk(everything)):
            out("rng = _rng(seed, stream, step)")
        for e, text in known.items():
            if not text.isidentifier():
                known[e] = self._named(text, out)
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
        self._block_leaves(out, known, everything)
        return known

    def _block_leaves(self, out: Lines, known: Known, roots: list[Expr]) -> None:
        leaves = {e.op: e for e in walk(roots) if e.op in ("bnum", "bstart", "blen")}
        out(f"block = t * {self.rows} + tl.arange(0, {self.rows})")
        texts = {
            "bnum": "block",
            "bstart": f"block * {self.block}",
            # A block that is not there has one element, so that nothing is divided by zero.
            "blen": f"tl.maximum(tl.minimum(length - block * {self.block}, {self.block}), 1)",
        }
        for op, e in leaves.items():
            known[e] = self._named(cast(f"({texts[op]})", rep(e)), out)

    def _named(self, text: str, out: Lines) -> str:
        name = self.shared.fresh()
        out(f"{name} = {text}")
        return name

    # Values.

    def print(self, roots: Iterable[Expr], out: Lines, known: Known) -> list[str]:
        """Prints what some values need; gives their texts."""
        roots = list(roots)
        print_values(roots, out, self.spell, known, self.shared.fresh, self.often)
        return [known[r] for r in roots]

    def spell(self, e: Expr, args: list[str]) -> str:
        if e.op == "idx":
            return "(start + offs)" if rep(e) == "i64" else cast("(start + offs)", "i32")
        if e.op == "lidx":
            return "cols" if rep(e) == "i32" else cast("cols", "i64")
        aligned = bool(e.args) and e.args[0].op == "idx"
        if e.op == "load" and aligned:
            return self._own(e.attr)
        if e.is_load:
            there = f", mask=block * {self.block} < length" if e.variance == 1 else ""
            mask = ", mask=live" if e.variance == 2 else there
            return self.shared.loaded(e, args[0], mask)
        if e.op == "add" and e.type == "float":
            for k in (0, 1):
                if self._fusable(e.args[k]):
                    other = spread(args[1 - k], e.args[1 - k], 2)
                    return f"_plus_uniform({other}, {self._bits(e.args[k], 'rng')})"
        if e.op in RANDOM and aligned and not self.masked:
            bits = self._bits(e, "rng" if len(args) == 1 else f"_keyed({args[1]})")
            return f"_uniform_of({bits})" if e.op == "uniform" else cast(bits, "i64")
        return self.shared.spell(e, args)

    def _fusable(self, e: Expr) -> bool:
        """Whether a random float is only added to something, and is for the tile's elements."""
        own = e.op == "uniform" and e.args[0].op == "idx" and len(e.args) == 1
        return own and not self.masked and e not in self.often

    def _bits(self, e: Expr, rng: str) -> str:
        """Random bits for the tile's own elements: four from each Philox."""
        bits = f"_bits32_row(start, {self.span}, {e.attr}, {rng})"
        return f"tl.reshape({bits}, {self.shape})" if self.rows > 1 else bits

    def _own(self, array: Array) -> str:
        """The elements of the tile itself."""
        if array.storage not in PACKED:
            return loaded(array, f"tl.load({array.name} + start + offs, mask=live)")
        bits, unit = STORAGE_BITS[array.storage], self.units[array]
        return f"_unpack({self._units(array, 'tl.load')}, {bits}, {unit})"

    def _units(self, array: Array, call: str, value: str = "") -> str:
        """A load or store of the units that hold the tile's codes."""
        per = self.units[array] // STORAGE_BITS[array.storage]
        width, stride = self.cols // per, self.block // per
        at = f"tl.arange(0, {width})[None, :]"
        if self.rows > 1:
            at = f"tl.arange(0, {self.rows})[:, None] * {stride} + {at}"
        first = f"start // {per}"
        shape = f"{self.rows}, {width}"
        mask = f"_unit_mask(left, {per}, {shape}, {stride}, {self.masked}, TAIL)"
        given = f", {value}" if value else ""
        return f"{call}({array.name} + {first} + {at}{given}, mask={mask})"

    def whole(self, text: str, e: Expr) -> str:
        """A value in the shape of the tile."""
        if e.variance == 1:
            text = f"{text}[:, None]"
        return f"tl.broadcast_to({text}, {self.shape})"

    # Reductions.

    def bodies(self, folds: list[Fold], out: Lines, known: Known) -> list[str]:
        """What some reductions are over: names of whole tiles, dead elements out of the way."""
        names = []
        for f in folds:
            text = self.whole(self.print([f.body], out, known)[0], f.body)
            if f.kind in ("max", "min") and f.type == "float":
                text = f"_key({text})"
            elif f.kind == "or":
                text = cast(text, "i32")
            elif f.type == "int":
                text = cast(text, "i64")
            name = self._named(text, out)
            if f.kind != "fold":
                self._if_masked(out)
                out(f"    {name} = tl.where(live, {name}, {identity(f)})")
            names.append(name)
        return names

    def _if_masked(self, out: Lines) -> None:
        out("if True:" if self.masked else "if TAIL:")

    def reduced(self, f: Fold, body: str, out: Lines, axis: str = "") -> str:
        """The text of a tile's reduction (`axis=1`: one for each row)."""
        comma = f", {axis}" if axis else ""
        if f.kind == "sum":
            return f"tl.sum({body}{comma})"
        if f.kind in ("max", "or"):
            text = f"tl.max({body}{comma})"
        elif f.kind == "min":
            text = f"tl.min({body}{comma})"
        else:
            there = self._named(f"tl.full({self.shape}, 1, tl.int32)", out)
            self._if_masked(out)
            out(f"    {there} = live.to(tl.int32)")
            pair = f"({there}, {body})"
            if not axis:
                size = f"[{self.rows * self.cols}]"
                pair = f"(tl.reshape({there}, {size}), tl.reshape({body}, {size}))"
            return f"tl.reduce({pair}, {1 if axis else 0}, {combine_name(self.shared, f)})[1]"
        return f"_unkey({text})" if f.type == "float" else text

    def block_folds(self, folds: list[Fold], out: Lines, known: Known) -> None:
        """Prints reductions of each row, joined with their start."""
        for f, body in zip(folds, self.bodies(folds, out, known), strict=True):
            result = self.reduced(f, body, out, "axis=1")
            init = self.print([f.init], out, known)[0]
            if not (f.kind == "sum" and f.init.op == "const" and f.init.attr == 0):
                init = cast(f"({init})", wide(f.type))
                result = combined(self.shared, f, init, f"({result})")
            name = self._named(result, out)
            for e in walk(with_blocks(self.roots)):
                if e.op == "fold" and e.attr is f:
                    known[e] = name if f.type == "float" else self._named(cast(name, rep(e)), out)

    # Stores.

    def store(self, stores: Iterable[Store], out: Lines, known: Known) -> None:
        """Prints the writes of the tile's elements; all is read before anything is written."""
        stores = list(stores)
        texts = self.print([s.value for s in stores], out, known)
        names = [
            self._named(self.whole(text, s.value), out)
            for text, s in zip(texts, stores, strict=True)
        ]
        for name, s in zip(names, stores, strict=True):
            array = s.array
            if array.storage in PACKED:
                bits, unit = STORAGE_BITS[array.storage], self.units[array]
                codes = self._named(cast(name, "i32"), out)
                self._if_masked(out)
                out(f"    {codes} = tl.where(live, {codes}, 0)")
                units = f"_pack({codes}, {bits}, {unit})"
                if unit == 8:
                    units += ".to(tl.uint8)"
                out(self._units(array, "tl.store", units))
            else:
                if array is self.shared.kernel.output:
                    out(f'{name} = tl.where(tl.load(frame + 6) != 0, float("nan"), {name})')
                value = stored(array, name)
                out(f"tl.store({array.name} + start + offs, {value}, mask=live)")

    def block_store(self, stores: Iterable[Store], out: Lines, known: Known) -> None:
        """Prints the writes of one value for each block."""
        for s in stores:
            text = self.print([s.value], out, known)[0]
            text = f"tl.broadcast_to({text}, [{self.rows}])"
            there = f"block * {self.block} < length"
            out(f"tl.store({s.array.name} + block, {stored(s.array, text)}, mask={there})")


def print_kernel(shared: Shared, name: str, tile: Tile, grid: str, out: Lines) -> None:
    """Prints the kernel that runs a tile's function, with a mask for the last tile only.

    PART 0 does all. Of a long array the host starts the full tiles (1) and the last one (2) apart:
    what the mask needs would cost the full tiles registers.
    """
    shared.head(name, out, ", PART: tl.constexpr")
    known = shared.known([tile.length])
    shared.views(out, loads([tile.length]), {})
    out(f"length = {domain(shared, tile.length, out, known)}")
    out("if PART == 1:")
    out(f"    {name}_tile(t, {shared.args}, False)")
    out("elif PART == 2:")
    out(f"    {name}_tile(length // {tile.span}, {shared.args}, True)")
    out(f"elif (t + 1) * {tile.span} <= length:")
    out(f"    {name}_tile(t, {shared.args}, False)")
    out(f"elif t * {tile.span} < length:")
    out(f"    {name}_tile(t, {shared.args}, True)")
    out.depth = 0
    out()
    out()
    span = tile.span if tile.length.host else -1
    shared.launches.append(Launch(name, grid, tile.warps, span, shared.length_text(tile.length)))


def domain(shared: Shared, length: Expr, out: Lines, known: Known) -> str:
    """The length of a domain; one from a payload is clamped to what was made room for."""
    text = shared.print([length], out, known)[0]
    if rep(length) == "i32":
        text = cast(text, "i64")
    if length.host:
        return text
    most = shared.size(("most", length), shared.length_text(length))
    return f"_max(_min({text}, {most}), _i64(0))"


def combined(shared: Shared, f: Fold, a: str, b: str) -> str:
    """The text of a reduction's f(a, b)."""
    if f.kind == "sum":
        return f"{a} + {b}"
    if f.kind in ("max", "min"):
        # A NaN among the results of tiles must not get lost when they are joined.
        return f"_{f.kind}{'_nan' if f.type == 'float' else ''}({a}, {b})"
    if f.kind == "or":
        return f"{a} | {b}"
    there = "tl.full((), 1, tl.int32)"
    return f"{combine_name(shared, f)}({there}, {a}, {there}, {b})[1]"


def combine_name(shared: Shared, f: Fold) -> str:
    """The name of the function that joins two parts, each there or not."""
    key = ("combine", f)
    if key not in shared.functions:
        name = f"_{shared.kernel.name}_c{len(shared.functions)}"
        shared.functions[key] = (name, _combine_source(shared, name, f))
    return shared.functions[key][0]


def _combine_source(shared: Shared, name: str, f: Fold) -> str:
    assert f.combine is not None and f.carry is not None and f.item is not None
    leaves = [e for e in walk([f.combine]) if not e.args and e.op != "const"]
    if set(leaves) - {f.carry, f.item}:
        raise BackendError(
            "a reduction's function that uses other values than its two arguments does not run on "
            "a GPU; use the cpu backend for this program."
        )
    out = Lines()
    out("@triton.jit")
    out(f"def {name}(has_a, a, has_b, b):")
    out.depth += 1
    known: Known = {f.carry: "a", f.item: "b"}
    text = shared.print([f.combine], out, known)[0]
    kind = TYPES[wide(f.type)]
    out(f"both = ({text}).to({kind})")
    out("one = tl.where(has_a != 0, a, b)")
    out("return has_a | has_b, tl.where((has_a & has_b) != 0, both, one)")
    out.depth -= 1
    out()
    out()
    return str(out)


def _power_above(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _all(roots: list[Expr]) -> list[Expr]:
    return with_blocks(roots)
