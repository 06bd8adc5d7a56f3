"""What the passes of one GPU kernel share: numbers they hand on, memory, launches.

Numbers of one gradient lie in a row of two tables in device memory, I (ints) and F (floats), so
that kernels take no sizes as arguments: the same launch serves any length, and, with a row per
gradient, many gradients at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hipress.compll.backends.gpu.spell import (
    PACKED,
    POINTEES,
    RANDOM,
    TYPES,
    cast,
    loaded,
    rep,
    spell,
    wide,
)
from hipress.compll.backends.render import Lines, host_text, host_values, print_values, slot_text
from hipress.compll.front.graph import Graph
from hipress.compll.ir import STORAGE_BITS, Array, Expr, Fold, Kernel, Scan, walk
from hipress.compll.passes.derive import RHO

Known = dict[Expr, str]
"""Texts of values that are ready where code is being printed."""

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


@dataclass
class Shared:
    """The state of printing one kernel."""

    kernel: Kernel
    graph: Graph = field(default_factory=Graph)
    ints: dict[object, int] = field(default_factory=dict)
    """Which entry of I holds what."""
    floats: dict[Expr, int] = field(default_factory=dict)
    results: dict[object, int] = field(default_factory=dict)
    """Which result (8 bytes of Z each) is what: reductions, counts, picks."""
    values: dict[object, str] = field(default_factory=dict)
    """Texts of the entries of I, for the host."""
    sizes: list[tuple[object, str]] = field(default_factory=list)
    """Entries of I that the host computes, as text."""
    zeroed: list[tuple[str, str]] = field(default_factory=list)
    """Pieces of scratch memory that start from zero: name and bytes, as text."""
    scratch: list[tuple[str, str]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    functions: dict[object, tuple[str, str]] = field(default_factory=dict)
    """Functions of the program's own reductions: name and source."""
    parts: dict[object, str] = field(default_factory=dict)
    """Names of the memory for the parts of reductions."""
    grids: dict[str, str] = field(default_factory=dict)
    """Numbers of programs that sizes of memory depend on."""
    _names: int = 0

    def __post_init__(self) -> None:
        for key in ("n", "body", "at", "results"):
            self.ints[key] = len(self.ints)
        caller = self.kernel.input or self.kernel.output
        # Room that a shorter scan leaves is zero.
        scans = [p for p in self.kernel.passes if isinstance(p, Scan) and not p.fold.length.host]
        self._partly_written = {p.array for p in scans}
        self.memory = [*([caller.name] if caller else []), *(s.name for s in self.kernel.states)]
        fixed = ["I", "F", "Z", "W", "E", "H", "frame"]
        if self.kernel.frames:
            fixed += ["G", *(f"frame{k}" for k in range(len(self.kernel.frames)))]
        self.args = ", ".join([*fixed, *self.memory, "rho", "seed", "stream", "step"])

    def fresh(self) -> str:
        """A name that is not in use."""
        self._names += 1
        return f"v{self._names}"

    def host_text(self, e: Expr) -> str:
        """A value as the host computes it, never below zero where it is a length."""
        return host_text(self.kernel.limits.get(e, e), self.kernel.params)

    def length_text(self, e: Expr) -> str:
        """The most elements of a domain, as the host computes it."""
        text = self.host_text(e)
        return text if e.op == "n" else f"max({text}, 0)"

    # Numbers.

    def size(self, key: object, text: str) -> str:
        """An entry of I that the host fills with `text`."""
        if key not in self.ints:
            self.ints[key] = len(self.ints)
            self.sizes.append((key, text))
        return f"tl.load(I + {self.ints[key]})"

    def host(self, e: Expr) -> str:
        """The text of a host value in a kernel."""
        if e.op == "const":
            return spell(e, [])
        if e.op == "n":
            return "tl.load(I)"
        if e.op == "param" and e.attr == RHO:
            return "tl.load(rho)"
        if e.type == "float":
            slot = self.floats.setdefault(e, len(self.floats))
            return f"tl.load(F + {slot})"
        text = self.size(e, f"int({slot_text(e, self.kernel.params)})")
        if e.type == "bool":
            return f"({text} != 0)"
        return cast(text, "i32") if rep(e) == "i32" else text

    def result(self, key: object, type_: str) -> str:
        """The place of a result."""
        slot = self.results.setdefault(key, len(self.results))
        kind = TYPES[wide(type_)]
        return f"(Z + tl.load(I + {RESULTS}) + {8 * slot}).to(tl.pointer_type({kind}))"

    def known(self, roots: Iterable[Expr]) -> Known:
        """Texts of values from outside a pass: host values and earlier results."""
        roots = list(roots)
        texts: Known = {}
        for e in host_values(roots):
            texts[e] = self.host(e)
        for e in walk(roots):
            if e.op == "flagged":
                wrong = self.result(("wrong", e.attr), "bool")
                texts[e] = f"((tl.load(frame{e.attr} + 6) != 0) | (tl.load({wrong}) != 0))"
            key = {"fold": e.attr, "count": e.attr, "pick": e}.get(e.op)
            if key is None or (e.op == "fold" and e.attr.block is not None):
                continue
            text = f"tl.load({self.result(key, e.type)})"
            if e.type == "bool":
                text = f"({text} != 0)"
            elif rep(e) == "i32":
                text = cast(text, "i32")
            texts[e] = text
        return texts

    def print(self, roots: Iterable[Expr], out: Lines, known: Known) -> list[str]:
        """Prints what some values need; gives their texts."""
        roots = list(roots)
        print_values(roots, out, self.spell, known, self.fresh)
        return [known[r] for r in roots]

    def spell(self, e: Expr, args: list[str]) -> str:
        """`spell`, and the ops that need memory or random numbers."""
        if e.is_load:
            return self.loaded(e, args[0])
        if e.op in RANDOM:
            rng = "rng" if len(args) == 1 else f"_keyed({args[1]})"
            bits = f"_bits32_at({cast(args[0], 'i64')}, {e.attr}, {rng})"
            return f"_uniform_of({bits})" if e.op == "uniform" else cast(bits, "i64")
        return spell(e, args)

    def loaded(self, e: Expr, index: str, mask: str = "") -> str:
        """An element at any index, clamped into the array where it may be outside."""
        array: Array = e.attr
        if rep(e.args[0]) != "i64":
            index = cast(index, "i64")
        if e.op == "load_clamped":
            last = self.size(("last", array.name), f"{self.length_text(array.length)} - 1")
            # An empty array still has memory of its frame after it: never a fault.
            index = f"_max(_min({index}, {last}), _i64(0))"
        if array.storage in PACKED:
            return f"_packed_at({array.name}, {index}, {STORAGE_BITS[array.storage]}{mask})"
        return loaded(array, f"tl.load({array.name} + {index}{mask})")

    # Memory.

    def view(self, array: Array, out: Lines, *, unit: int = 8) -> None:
        """Prints a pointer to an array inside the payload or the scratch memory."""
        if array.name in self.memory:
            return
        pool = "body"
        if array.name.startswith("frame"):
            first = f"tl.multiple_of(tl.load(I + {BODY}), 16)"
            pool = f"{array.name.split('_')[0]} + {first}"
        elif array.name.startswith("temp"):
            bits = STORAGE_BITS[array.storage]
            text = f"-(-{self.length_text(array.length)} * {bits} // 32) * 4"
            pool = self.piece(array.name, text, zeroed=array in self._partly_written)
        at = self.ints.setdefault(("at", array.name), len(self.ints))
        pointee = POINTEES.get(array.storage) or ("tl.int32" if unit == 32 else "tl.uint8")
        place = f"tl.load(I + {at})"
        if array.length.op != "const":
            place = f"tl.multiple_of({place}, 16)"
        out(f"{array.name} = ({pool} + {place}).to(tl.pointer_type({pointee}))")

    def piece(self, name: str, num_bytes: str, *, zeroed: bool = False) -> str:
        """A piece of scratch memory; gives the name of the pool it is in."""
        pieces = self.zeroed if zeroed else self.scratch
        if name not in dict(pieces):
            pieces.append((name, num_bytes))
            self.ints.setdefault(("at", name), len(self.ints))
        return "Z" if zeroed else "W"

    def pointer(self, name: str, num_bytes: str, kind: str, *, zeroed: bool = False) -> str:
        """The text of a pointer to a piece of scratch memory."""
        pool = self.piece(name, num_bytes, zeroed=zeroed)
        at = self.ints[("at", name)]
        return f"({pool} + tl.multiple_of(tl.load(I + {at}), 16)).to(tl.pointer_type({kind}))"

    # Functions.

    def head(self, name: str, out: Lines, more: str = "") -> None:
        """Opens a kernel: which gradient, which tile of it."""
        out("@triton.jit")
        out(f"def {name}({self.args}, T, BULK: tl.constexpr{more}):")
        out.depth += 1
        out("pid = tl.program_id(0)")
        out("t = pid.to(tl.int64)")
        out("if BULK:")
        out.depth += 1
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

    def tile_head(
        self,
        name: str,
        out: Lines,
        arrays: Iterable[Array],
        units: dict[Array, int],
        more: str = "",
    ) -> None:
        """Opens a function over one tile."""
        out("@triton.jit")
        out(f"def {name}(t, {self.args}{more}):")
        out.depth += 1
        self.views(out, arrays, units)

    def views(self, out: Lines, arrays: Iterable[Array], units: dict[Array, int]) -> None:
        """Prints pointers to some arrays."""
        out(f"body = frame + tl.multiple_of(tl.load(I + {BODY}), 16)")
        for array in dict.fromkeys(arrays):
            self.view(array, out, unit=units.get(array, 8))


def identity(f: Fold) -> str:
    """What a reduction starts from, as a literal."""
    if f.kind == "or":
        return "0"
    if f.type == "float":
        # Of keys: those of -inf and inf.
        return {"max": "-2139095041", "min": "2139095040"}.get(f.kind, "0.0")
    ends = {"max": "-9223372036854775808", "min": "9223372036854775807"}
    return ends.get(f.kind, "0")
