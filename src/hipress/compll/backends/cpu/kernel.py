"""The state of printing one CPU kernel: its numbers, its memory and how its values are written.

numba widens `int32 + int32` to 64 bits and `float32 * int64` to a double, so every narrow result
is cast back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hipress.compll.backends.render import (
    Known,
    Lines,
    MachinePrinter,
    host_values,
    machine_type,
    wide_type,
)
from hipress.compll.ir import (
    PACKED,
    RANDOM,
    STORAGE_BITS,
    Array,
    Expr,
    Fold,
    Kernel,
    Local,
    walk,
)

DTYPES = {"f32": "f32", "f16": "u16", "bf16": "u16", "i64": "i64", "u16": "u16", "u32": "u32"}
"""NumPy type of a storage; the others are bytes."""

MAX_RANGES = 64
"""Most ranges of tiles that a pass is cut into: one for each thread."""


@dataclass
class Slots:
    """The meaning of each entry of I (ints) and F (floats)."""

    ints: dict[object, int] = field(default_factory=dict)
    floats: dict[object, int] = field(default_factory=dict)

    def int(self, key: object) -> str:
        return f"I[{self.ints.setdefault(key, len(self.ints))}]"

    def of(self, type_: str, key: object) -> str:
        if type_ != "float":
            return self.int(key)
        return f"F[{self.floats.setdefault(key, len(self.floats))}]"


@dataclass(frozen=True)
class Record:
    """Scratch memory with room for `capacity` elements for each range of a pass."""

    name: str
    storage: str
    capacity: Expr


@dataclass(frozen=True)
class Step:
    name: str
    tile: int
    length_slot: int = -1
    """Entry of I with the length of its domain; -1: one thread runs it whole."""


class KernelPrinter(MachinePrinter):
    """The names, numbers and memory that the passes of one kernel share."""

    NOT = "(not {})"
    SELECT = "({1} if {0} else {2})"
    FLOAT = {
        **MachinePrinter.FLOAT,
        "div": "({} / {})",
        "abs": "abs({})",
        "floor": "np.floor({})",
        "sqrt": "np.sqrt({})",
        # In double precision, so that all backends round to the same bits.
        "exp2": "f32(np.exp2(f64({})))",
        "log2": "f32(np.log2(f64({})))",
        "round_f16": "_from_f16(_to_f16({}))",
    }
    INT = {**MachinePrinter.INT, "abs": "abs({})"}

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.out = Lines()
        self.slots = Slots()
        for key in ("n", "seed0", "seed1", "stream", "step", "status"):
            self.slots.int(key)
        self.hosts: dict[Expr, str] = {}
        """Host values and their slots; the entry point fills them."""
        self.partials: list[tuple[Fold, int]] = []
        """Reductions of the whole gradient, and the tile of the pass they are in."""
        self.records: list[Record] = []
        self.steps: list[Step] = []
        self.block_arrays: dict[Local, str] = {}
        """Names of the arrays that blocks of the pass being printed have for themselves."""
        caller = kernel.input or kernel.output
        assert caller is not None
        self.memory = [caller.name, *(s.name for s in kernel.states)]
        self.args = ", ".join(["I", "F", "W", "body", *self.memory])

    # Values.

    def named(self, text: str, out: Lines) -> str:
        return text if text.isidentifier() else self.assign(text, out)

    def host(self, e: Expr) -> str:
        """Returns the slot (or literal) of a host value."""
        if e.op == "const":
            return str(e.attr)
        if e.op == "n":
            return self.slots.int("n")
        return self.hosts.setdefault(e, self.slots.of(e.type, e))

    def known(self, roots: Iterable[Expr]) -> Known:
        """Returns the texts of values from outside a pass: host values and earlier results."""
        roots = list(roots)
        texts = {e: self.as_read(e, self.host(e)) for e in host_values(roots)}
        for e in walk(roots):
            if e.op == "fold" and e.attr.block is None:
                texts[e] = self.as_read(e, self.slots.of(e.type, e.attr))
            elif e.op in ("count", "pick"):
                texts[e] = self.slots.of(e.type, e.attr if e.op == "count" else e)
        return texts

    def spell(self, e: Expr, args: list[str]) -> str:
        if e.is_load:
            array: Array = e.attr
            if array.storage in PACKED and e.args[0].op != "const":
                bits = STORAGE_BITS[array.storage]
                length = self.host(array.length)
                return f"_at_packed({array.name}, {args[0]}, {length}, {bits})"
            safe = e.op == "load"
            text = f"{array.name}[{args[0]}]" if safe else f"_at({array.name}, {args[0]})"
            return loaded(array, text)
        if e.op == "local":
            return f"{self.block_arrays[e.attr]}[{args[0]}]"
        if e.op in RANDOM:
            rng = "rng" if len(args) == 1 else f"_keyed({args[1]})"
            return f"_{e.op}({args[0]}, {e.attr}, {rng})"
        return super().spell(e, args)

    def cast(self, text: str, machine: str) -> str:
        return f"{machine}({text})"

    def constant(self, e: Expr) -> str:
        return str(e.attr) if e.type == "bool" else f"{machine_type(e)}({e.attr!r})"

    def to_float(self, e: Expr, arg: str) -> str:
        return f"f32({arg})"

    def to_uint(self, e: Expr, arg: str) -> str:
        top = 2**e.attr - 1
        if e.args[0].type == "float":
            return f"_sat_f32({arg})" if e.attr == 32 else f"_sat_f({arg}, {top})"
        return f"{machine_type(e)}(_sat_i({arg}, {top}))"

    def int_result(self, e: Expr, form: str, args: list[str], common: str) -> str:
        if e.op in ("add", "sub", "mul") and e.wraps:
            return f"_{e.op}({', '.join(args)})"
        text = form.format(*args)
        return machine_type(e) + (text if form.startswith("(") else f"({text})")

    def combined(self, f: Fold, a: str, b: str, out: Lines) -> str:
        if f.kind == "sum" and f.type == "int":
            return f"_add({a}, {b})"
        return super().combined(f, a, b, out)

    def combined_by_program(self, f: Fold, a: str, b: str, out: Lines) -> str:
        assert f.combine is not None and f.carry is not None and f.item is not None
        known = {**self.known([f.combine]), f.carry: a, f.item: b}
        return f"{wide_type(f.type)}({self.print([f.combine], out, known)[0]})"

    # Memory.

    def view(self, array: Array, out: Lines) -> None:
        """Prints a name for an array inside the payload or the scratch memory."""
        if array.name not in self.memory:
            pool = "W" if array.name.startswith("temp") else "body"
            self.carve(array.name, pool, array.storage, out)

    def partial(self, f: Fold, tile: int) -> str:
        """Returns the name of new memory for a reduction's results, one per tile."""
        self.partials.append((f, tile))
        return f"part{len(self.partials) - 1}"

    def record(self, storage: str, capacity: Expr) -> Record:
        """Returns new scratch memory for what each range of a filter pass takes."""
        self.records.append(Record(f"record{len(self.records)}", storage, capacity))
        return self.records[-1]

    def ranges(self) -> str:
        """Returns entries of I: the first tile of each range, then how many each range took."""
        first = self.slots.ints.setdefault(("range", 0), len(self.slots.ints))
        for k in range(1, 2 * MAX_RANGES):
            self.slots.int(("range", k))
        return f"I[{first} : {first + 2 * MAX_RANGES}]"

    def carve(self, name: str, pool: str, storage: str, out: Lines) -> None:
        """Prints a view of a piece of the payload or the scratch memory."""
        start, size = self.slots.int(("at", name)), self.slots.int(("bytes", name))
        piece = f"{pool}[{start} : {start} + {size}]"
        out(
            f"{name} = _view({piece}, {DTYPES[storage]})"
            if storage in DTYPES
            else f"{name} = {piece}"
        )

    # Functions.

    def head(self, name: str, out: Lines, arrays: Iterable[Array]) -> None:
        """Opens a function of the kernel; `hi` below zero means to the end."""
        out("@njit(**_JIT)")
        out.open(f"def {name}(lo, hi, {self.args}):")
        for array in dict.fromkeys(arrays):
            self.view(array, out)

    def length(self, length: Expr, tile: int, out: Lines) -> None:
        """Prints the length of a domain and, for `hi` below zero, its last tile."""
        out(f"length = {self.print([length], out, self.known([length]))[0]}")
        out("if hi < 0:")
        out(f"    hi = (length + {tile - 1}) // {tile}")


def maximal(candidates: Iterable[Expr], roots: list[Expr], variance: int) -> list[Expr]:
    """Returns the candidates that something more varying uses: worth a name before the loop."""
    wanted = {r for r in roots if r.variance <= variance}
    for e in walk(roots):
        if e.variance > variance:
            wanted.update(a for a in e.args if a.variance <= variance)
    return [e for e in candidates if e in wanted and e.op != "const"]


def stored(array: Array, text: str) -> str:
    """Returns a value as it lies in an array."""
    casts = {"f16": "_to_f16", "bf16": "_to_bf16", **dict.fromkeys(PACKED, "u8")}
    return f"{casts.get(array.storage, array.storage)}({text})"


def loaded(array: Array, text: str) -> str:
    """Returns an array's element as a value."""
    if array.storage in ("f16", "bf16"):
        return f"_from_{array.storage}({text})"
    if array.storage in (*PACKED, "u8", "u16"):
        return f"i32({text})"
    return f"i64({text})" if array.storage == "u32" else text
