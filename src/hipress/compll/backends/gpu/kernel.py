"""The state of printing one GPU kernel: its numbers, its memory, its launches, its values.

Numbers of one gradient lie in a row of two tables in device memory, I (ints) and F (floats), so
that kernels take no sizes as arguments: the same launch serves any length, and, with a row per
gradient, many gradients at once. Values of a block have one dimension (its rows), values of an
element two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hipress.compll.backends.host import host_text, slot_text
from hipress.compll.backends.render import (
    Known,
    Lines,
    MachinePrinter,
    host_values,
    machine_type,
    wide_type,
)
from hipress.compll.ir import PACKED, RANDOM, STORAGE_BITS, Array, Expr, Fold, Kernel, Scan, walk
from hipress.compll.passes.derive import RHO
from hipress.errors import BackendError

POINTEES = {
    **{"f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.uint16", "i64": "tl.int64"},
    **{f"u{bits}": f"tl.uint{bits}" for bits in (8, 16, 32)},
}
"""What a pointer to a storage points at."""

TYPES = {"i32": "tl.int32", "i64": "tl.int64", "f32": "tl.float32", "bool": "tl.int1"}

N, BODY, AT, RESULTS = 0, 1, 2, 3
"""First entries of a row: elements, the body's place in the frame, the gradient's place among
others, the place of its results."""


@dataclass(frozen=True)
class Launch:
    """A kernel to be started, in order."""

    name: str
    grid: str
    """Number of programs, as the host computes it."""
    warps: int = 4
    span: int = 0
    """Elements of a tile where full tiles may be started apart from the last one; -1: they may
    not, for the host does not know how many there are; 0: there is no last one."""
    length: str = "0"
    """Elements of all tiles, as the host computes it."""


@dataclass(frozen=True)
class Running:
    """Sums up to each element, of which only those before each tile are in memory."""

    fold: Fold
    before: str
    """A pointer to them."""
    span: int
    """Elements of such a tile."""


class KernelPrinter(MachinePrinter):
    """The names, numbers and memory that the passes of one kernel share."""

    NOT = "({} == 0)"
    SELECT = "tl.where({}, {}, {})"
    FLOAT = {
        **MachinePrinter.FLOAT,
        "div": "tl.div_rn({}, {})",
        "abs": "tl.abs({})",
        "floor": "tl.floor({})",
        "sqrt": "tl.sqrt_rn({})",
        # In double precision, so that all backends round to the same bits.
        "exp2": "tl.exp2({}.to(tl.float64)).to(tl.float32)",
        "log2": "tl.log2({}.to(tl.float64)).to(tl.float32)",
        "round_f16": "_round_f16({})",
    }
    INT = {**MachinePrinter.INT, "abs": "tl.abs({})"}

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.out = Lines()
        self.ints: dict[object, int] = {"n": N, "body": BODY, "at": AT, "results": RESULTS}
        """The meaning of each entry of I."""
        self.floats: dict[Expr, int] = {}
        self.results: dict[object, int] = {}
        """The meaning of each result (8 bytes of Z): reductions, counts, picks."""
        self.values: dict[object, str] = {}
        """Texts of the entries of I, for the host."""
        self.sizes: list[tuple[object, str]] = []
        """Entries of I that the host computes, as text."""
        self.zeroed: list[tuple[str, str]] = []
        """Pieces of scratch memory that start from zero: name and bytes, as text."""
        self.scratch: list[tuple[str, str]] = []
        self.launches: list[Launch] = []
        self.functions: dict[Fold, tuple[str, str]] = {}
        """Functions of the program's own reductions: name and source."""
        self.parts: dict[Fold, str] = {}
        """Names of the memory for the parts of reductions."""
        self.running: dict[Array, Running] = {}
        """Sums that are made again where they are read, and have no memory."""
        self.grids: dict[str, str] = {}
        """Numbers of programs that sizes of memory depend on."""
        caller = kernel.input or kernel.output
        # Room that a shorter scan leaves is zero.
        scans = [p for p in kernel.passes if isinstance(p, Scan) and not p.fold.length.host]
        self._partly_written = {p.array for p in scans}
        self.memory = [*([caller.name] if caller else []), *(s.name for s in kernel.states)]
        fixed = ["I", "F", "Z", "W", "E", "H", "frame"]
        if kernel.frames:
            fixed += ["G", *(f"frame{k}" for k in range(len(kernel.frames)))]
        self.args = ", ".join([*fixed, *self.memory, "rho", "seed", "stream", "step"])

    # Numbers.

    def length_text(self, e: Expr) -> str:
        """Returns the most elements of a domain, as the host computes it."""
        text = host_text(self.kernel.limits.get(e, e), self.kernel.params)
        return text if e.op == "n" else f"max({text}, 0)"

    def tiles_text(self, length: Expr, span: int) -> str:
        """Returns the number of tiles of a domain, as the host computes it."""
        return f"-(-{self.length_text(length)} // {span})"

    def size(self, key: object, text: str) -> str:
        """Returns an entry of I that the host fills with `text`."""
        if key not in self.ints:
            self.ints[key] = len(self.ints)
            self.sizes.append((key, text))
        return f"tl.load(I + {self.ints[key]})"

    def host(self, e: Expr) -> str:
        """Returns the text of a host value in a kernel."""
        if e.op == "const":
            return self.constant(e)
        if e.op == "n":
            return "tl.load(I)"
        if e.op == "param" and e.attr == RHO:
            return "tl.load(rho)"
        if e.type == "float":
            slot = self.floats.setdefault(e, len(self.floats))
            return f"tl.load(F + {slot})"
        return self.as_read(e, self.size(e, f"int({slot_text(e, self.kernel.params)})"))

    def result(self, key: object, type_: str) -> str:
        slot = self.results.setdefault(key, len(self.results))
        kind = TYPES[wide_type(type_)]
        return f"(Z + tl.load(I + {RESULTS}) + {8 * slot}).to(tl.pointer_type({kind}))"

    def known(self, roots: Iterable[Expr]) -> Known:
        """Returns the texts of values from outside a pass: host values and earlier results."""
        roots = list(roots)
        texts = {e: self.host(e) for e in host_values(roots)}
        for e in walk(roots):
            if e.op == "flagged":
                wrong = self.result(("wrong", e.attr), "bool")
                texts[e] = f"((tl.load(frame{e.attr} + 6) != 0) | (tl.load({wrong}) != 0))"
            key = {"fold": e.attr, "count": e.attr, "pick": e}.get(e.op)
            if key is not None and not (e.op == "fold" and e.attr.block is not None):
                texts[e] = self.as_read(e, f"tl.load({self.result(key, e.type)})")
        return texts

    def domain(self, length: Expr, known: Known) -> str:
        """Returns the length of a domain; one from a payload is clamped to the room there is."""
        [text] = self.print([length], self.out, known)
        if machine_type(length) == "i32":
            text = cast(text, "i64")
        if length.host:
            return text
        most = self.size(("most", length), self.length_text(length))
        return f"_max(_min({text}, {most}), _i64(0))"

    # Values.

    def spell(self, e: Expr, args: list[str]) -> str:
        if e.is_load:
            return self.loaded(e, args[0])
        if e.op in RANDOM:
            rng = "rng" if len(args) == 1 else f"_keyed({args[1]})"
            return random_value(e, f"_bits32_at({cast(args[0], 'i64')}, {e.attr}, {rng})")
        args = [spread(text, a, e.variance) for text, a in zip(args, e.args, strict=True)]
        return super().spell(e, args)

    def loaded(self, e: Expr, index: str, mask: str = "") -> str:
        """Returns an element at any index, clamped into the array where it may be outside.

        Args:
            e: The load.
            index: The text of the index.
            mask: The text of the elements that are there, if not all are; it may be None at run
                time.
        """
        array: Array = e.attr
        if machine_type(e.args[0]) != "i64":
            index = cast(index, "i64")
        if e.op == "load_clamped":
            last = self.last(array)
            index = f"_max(_min({index}, {last}), _i64(0))"
            if array.length.op != "n":  # a gradient with no element runs no kernel
                mask = f"_unless_empty({last}, {mask or None})"
        given = f", mask={mask}" if mask else ""
        if array.storage in PACKED:
            bits = STORAGE_BITS[array.storage]
            return f"_packed_at({array.name}, {index}, {bits}{given})"
        other = ", other=0" if e.op == "load_clamped" and array.length.op != "n" else ""
        return loaded(array, f"tl.load({array.name} + {index}{given}{other})")

    def last(self, array: Array) -> str:
        """Returns the last index of an array; -1 if it is empty."""
        return self.size(("last", array.name), f"{self.length_text(array.length)} - 1")

    def cast(self, text: str, machine: str) -> str:
        return cast(text, machine)

    def constant(self, e: Expr) -> str:
        text = repr(e.attr)
        text = f'float("{text}")' if text in ("inf", "-inf", "nan") else text
        return f"_{machine_type(e)}({text})"

    def to_float(self, e: Expr, arg: str) -> str:
        return arg if e.args[0].type == "float" else cast(arg, "f32")

    def to_uint(self, e: Expr, arg: str) -> str:
        top, mine, theirs = 2**e.attr - 1, machine_type(e), machine_type(e.args[0])
        if theirs == "f32":
            return f"_sat_f32({arg})" if e.attr == 32 else cast(f"_sat_f({arg}, {top})", mine)
        if theirs == "bool":
            return cast(arg, mine)
        source = arg if theirs == "i64" or top < 2**31 else cast(arg, "i64")
        return cast(f"_sat_i({source}, {top})", mine)

    def int_result(self, e: Expr, form: str, args: list[str], common: str) -> str:
        text, mine = form.format(*args), machine_type(e)
        return text if mine == ("i32" if e.op == "sign" else common) else cast(text, mine)

    # Reductions.

    def combined_by_program(self, f: Fold, a: str, b: str, out: Lines) -> str:
        if f.kind == "or":
            return f"{a} | {b}"
        there = "tl.full((), 1, tl.int32)"
        return f"{self.combine_name(f)}({there}, {a}, {there}, {b})[1]"

    def combine_name(self, f: Fold) -> str:
        """Returns the name of the function that joins two parts, each there or not."""
        if f not in self.functions:
            name = f"_{self.kernel.name}_c{len(self.functions)}"
            self.functions[f] = (name, self._combine_source(name, f))
        return self.functions[f][0]

    def _combine_source(self, name: str, f: Fold) -> str:
        assert f.combine is not None and f.carry is not None and f.item is not None
        leaves = [e for e in walk([f.combine]) if not e.args and e.op != "const"]
        if set(leaves) - {f.carry, f.item}:
            raise BackendError(
                "a reduction whose function uses other values than its two arguments does not run "
                "on a GPU; use the cpu backend for this program."
            )
        out = Lines()
        out("@triton.jit")
        out.open(f"def {name}(has_a, a, has_b, b):")
        [text] = self.print([f.combine], out, {f.carry: "a", f.item: "b"})
        out(f"both = ({text}).to({TYPES[wide_type(f.type)]})")
        out("one = tl.where(has_a != 0, a, b)")
        out("return has_a | has_b, tl.where((has_a & has_b) != 0, both, one)")
        return str(out)

    # Memory.

    def view(self, array: Array, unit: int = 8) -> str:
        """Returns a pointer to an array inside the payload or the scratch memory."""
        pool = "body"
        if array.name.startswith("frame"):
            first = f"tl.multiple_of(tl.load(I + {BODY}), 16)"
            pool = f"{array.name.split('_')[0]} + {first}"
        elif array.name.startswith("temp"):
            bits = STORAGE_BITS[array.storage]
            text = f"-(-{self.length_text(array.length)} * {bits} // 32) * 4"
            pool = self._piece(array.name, text, array in self._partly_written)
        at = self.ints.setdefault(("at", array.name), len(self.ints))
        pointee = POINTEES.get(array.storage) or ("tl.int32" if unit == 32 else "tl.uint8")
        place = f"tl.load(I + {at})"
        if array.length.op != "const":
            place = f"tl.multiple_of({place}, 16)"
        return f"({pool} + {place}).to(tl.pointer_type({pointee}))"

    def _piece(self, name: str, num_bytes: str, zeroed: bool) -> str:
        """Reserves a piece of scratch memory; returns the name of the pool it is in."""
        pieces = self.zeroed if zeroed else self.scratch
        if name not in dict(pieces):
            pieces.append((name, num_bytes))
            self.ints.setdefault(("at", name), len(self.ints))
        return "Z" if zeroed else "W"

    def pointer(self, name: str, num_bytes: str, kind: str, *, zeroed: bool = False) -> str:
        pool = self._piece(name, num_bytes, zeroed)
        at = self.ints[("at", name)]
        return f"({pool} + tl.multiple_of(tl.load(I + {at}), 16)).to(tl.pointer_type({kind}))"

    # Functions.

    def head(self, name: str, more: str = "") -> None:
        """Opens a kernel: which gradient, which tile of it."""
        out = self.out
        out("@triton.jit")
        out.open(f"def {name}({self.args}, T, BULK: tl.constexpr{more}):")
        out("pid = tl.program_id(0)")
        out("t = pid.to(tl.int64)")
        out.open("if BULK:")
        out("g = tl.load(T + 2 * pid).to(tl.int64)")
        out("t = tl.load(T + 2 * pid + 1).to(tl.int64)")
        out("I += g * @NI@")
        out("F += g * @NF@")
        out(f"at = tl.multiple_of(tl.load(I + {AT}), 16)")
        for array in self.memory:
            out(f"{array} += at")
        out("seed += g")
        out("stream += g")
        out.depth -= 1
        if self.kernel.output is not None and not self.launches:
            out("if t == 0:")
            out(f"    _{self.kernel.name}_check(t, {self.args})")
            out("    if BULK:")
            out("        if _same_entry(frame, H, g) == 0:")
            out("            tl.store(E, 2)")

    def views(self, arrays: Iterable[Array], units: Mapping[Array, int] | None = None) -> None:
        """Prints pointers to some arrays; `units` are the bits that packed codes are read in."""
        self.out(f"body = frame + tl.multiple_of(tl.load(I + {BODY}), 16)")
        for array in dict.fromkeys(arrays):
            if array.name not in self.memory and array not in self.running:
                self.out(f"{array.name} = {self.view(array, (units or {}).get(array, 8))}")

    def draws(self, roots: Iterable[Expr]) -> None:
        """Prints what random numbers are made from, where some are drawn without a key."""
        if any(e.op in RANDOM and len(e.args) == 1 for e in walk(roots)):
            self.out("rng = _rng(seed, stream, step)")

    def launch(self, name: str, grid: str, warps: int = 4) -> None:
        self.out.end()
        self.launches.append(Launch(name, grid, warps))


def cast(text: str, machine: str) -> str:
    return f"{text}.to({TYPES[machine]})"


def spread(text: str, e: Expr, variance: int) -> str:
    """Returns a block's value in the shape of an element's, for an operation on elements."""
    return f"{text}[:, None]" if e.variance == 1 and variance == 2 else text


def random_value(e: Expr, bits: str) -> str:
    return f"_uniform_of({bits})" if e.op == "uniform" else cast(bits, "i64")


def stored(array: Array, text: str) -> str:
    """Returns a value as it lies in an array."""
    if array.storage == "bf16":
        return f"_to_bf16({text})"
    return f"{text}.to({POINTEES[array.storage]})"


def loaded(array: Array, text: str) -> str:
    """Returns an array's element as a value."""
    if array.storage == "bf16":
        return f"_from_bf16({text})"
    kind = {"f16": "f32", "u8": "i32", "u16": "i32", "u32": "i64"}.get(array.storage)
    return cast(text, kind) if kind else text


def identity(f: Fold) -> str:
    """Returns what a reduction starts from, as a literal."""
    if f.kind == "or":
        return "0"
    if f.type == "float":
        # The keys of -inf and inf.
        return {"max": "-2139095041", "min": "2139095040"}.get(f.kind, "0.0")
    ends = {"max": "-9223372036854775808", "min": "9223372036854775807"}
    return ends.get(f.kind, "0")
