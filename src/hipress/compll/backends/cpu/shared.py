"""What the passes of one kernel share: numbers they hand on, memory, names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hipress.compll.backends.cpu.spell import DTYPES, PACKED, RANDOM, loaded, rep, spell, wide
from hipress.compll.backends.render import Lines, host_values, print_values
from hipress.compll.front.graph import Graph
from hipress.compll.ir import STORAGE_BITS, Array, Expr, Fold, Kernel, walk

Known = dict[Expr, str]
"""Texts of values that are ready where code is being printed."""


@dataclass
class Slots:
    """Which entry of I (ints) or F (floats) holds what."""

    ints: dict[object, int] = field(default_factory=dict)
    floats: dict[object, int] = field(default_factory=dict)

    def int(self, key: object) -> str:
        return f"I[{self.ints.setdefault(key, len(self.ints))}]"

    def float(self, key: object) -> str:
        return f"F[{self.floats.setdefault(key, len(self.floats))}]"

    def of(self, type_: str, key: object) -> str:
        return self.float(key) if type_ == "float" else self.int(key)


MAX_RANGES = 64
"""Most ranges of tiles that a pass is cut into: one for each thread."""


@dataclass(frozen=True)
class Record:
    """Scratch memory with room for `capacity` elements for each range of a pass."""

    name: str
    storage: str
    capacity: Expr


@dataclass(frozen=True)
class Step:
    """A function of the kernel, in the order they run."""

    name: str
    tile: int
    length_slot: int = -1
    """Entry of I with the length of its domain; -1: one thread runs it whole."""


class Shared:
    """The state of printing one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.graph = Graph()
        self.slots = Slots()
        for key in ("n", "seed0", "seed1", "stream", "step", "status"):
            self.slots.int(key)
        self.hosts: dict[Expr, str] = {}
        """Host values and their slots; the entry point fills them."""
        self.partials: list[tuple[Fold, int]] = []
        """Reductions of the whole gradient, and the tile of the pass they are in."""
        self.records: list[Record] = []
        self.steps: list[Step] = []
        self._names = 0
        caller = kernel.input or kernel.output
        assert caller is not None
        self.memory = [caller.name, *(s.name for s in kernel.states)]
        self.args = ", ".join(["I", "F", "W", "body", *self.memory])

    def fresh(self) -> str:
        """A name that is not in use."""
        self._names += 1
        return f"v{self._names}"

    def named(self, text: str, out: Lines) -> str:
        """A name for `text`, unless it is one."""
        if text.isidentifier():
            return text
        name = self.fresh()
        out(f"{name} = {text}")
        return name

    # Values.

    def host(self, e: Expr) -> str:
        """The slot (or literal) of a host value."""
        if e.op == "const":
            return str(e.attr)
        if e.op == "n":
            return self.slots.int("n")
        return self.hosts.setdefault(e, self.slots.of(e.type, e))

    def known(self, roots: Iterable[Expr]) -> Known:
        """Texts of values from outside a pass: host values and earlier results."""
        roots = list(roots)
        texts: Known = {}
        for e in host_values(roots):
            texts[e] = _as_read(e, self.host(e))
        for e in walk(roots):
            if e.op == "fold" and e.attr.block is None:
                texts[e] = _as_read(e, self.slots.of(e.type, e.attr))
            elif e.op in ("count", "pick"):
                texts[e] = self.slots.of(e.type, e.attr if e.op == "count" else e)
        return texts

    def print(self, roots: Iterable[Expr], out: Lines, known: Known) -> list[str]:
        """Prints what some values need; gives their texts."""
        roots = list(roots)
        print_values(roots, out, self.spell, known, self.fresh)
        return [known[r] for r in roots]

    def spell(self, e: Expr, args: list[str]) -> str:
        """`spell`, and the ops that need memory or random numbers."""
        if e.is_load:
            array: Array = e.attr
            if array.storage in PACKED and e.args[0].op != "const":
                bits = STORAGE_BITS[array.storage]
                length = self.host(array.length)
                return f"_at_packed({array.name}, {args[0]}, {length}, {bits})"
            safe = e.op == "load"
            text = f"{array.name}[{args[0]}]" if safe else f"_at({array.name}, {args[0]})"
            return loaded(array, text)
        if e.op in RANDOM:
            rng = "rng" if len(args) == 1 else f"_keyed({args[1]})"
            return f"_{e.op}({args[0]}, {e.attr}, {rng})"
        return spell(e, args)

    def combined(self, f: Fold, a: str, b: str, out: Lines) -> str:
        """The text of a reduction's f(a, b)."""
        if f.kind == "sum":
            return f"{a} + {b}"
        if f.kind in ("max", "min"):
            # A NaN among the results of tiles must not get lost when they are joined.
            return f"_{f.kind}{'_nan' if f.type == 'float' else ''}({a}, {b})"
        assert f.combine is not None and f.carry is not None and f.item is not None
        known = {**self.known([f.combine]), f.carry: a, f.item: b}
        return f"{wide(f.type)}({self.print([f.combine], out, known)[0]})"

    # Memory.

    def view(self, array: Array, out: Lines) -> None:
        """Prints a name for an array inside the payload or the scratch memory."""
        if array.name not in self.memory:
            pool = "W" if array.name.startswith("temp") else "body"
            self._carved(array.name, pool, DTYPES.get(array.storage), out)

    def partial(self, f: Fold, tile: int) -> str:
        """The name of the memory for a reduction's results, one per tile."""
        self.partials.append((f, tile))
        return f"part{len(self.partials) - 1}"

    def view_partial(self, name: str, f: Fold, out: Lines) -> None:
        """Prints the name of that memory."""
        self._carved(name, "W", wide(f.type), out)

    def record(self, storage: str, capacity: Expr) -> Record:
        """New scratch memory for what each range of a filter pass takes."""
        self.records.append(Record(f"record{len(self.records)}", storage, capacity))
        return self.records[-1]

    def view_record(self, record: Record, out: Lines) -> None:
        """Prints the name of that memory."""
        self._carved(record.name, "W", DTYPES.get(record.storage), out)

    def ranges(self) -> str:
        """Entries of I: the first tile of each range, then how many each range took."""
        first = self.slots.ints.setdefault(("range", 0), len(self.slots.ints))
        for k in range(1, 2 * MAX_RANGES):
            self.slots.int(("range", k))
        return f"I[{first} : {first + 2 * MAX_RANGES}]"

    def _carved(self, name: str, pool: str, dtype: str | None, out: Lines) -> None:
        start, size = self.slots.int(("at", name)), self.slots.int(("bytes", name))
        view = f".view({dtype})" if dtype else ""
        out(f"{name} = {pool}[{start} : {start} + {size}]{view}")

    # Functions.

    def head(self, name: str, out: Lines, arrays: Iterable[Array]) -> None:
        """Opens a function of the kernel; `hi` below zero means to the end."""
        out("@njit(**_JIT)")
        out(f"def {name}(lo, hi, {self.args}):")
        out.depth += 1
        for array in dict.fromkeys(arrays):
            self.view(array, out)

    def length(self, length: Expr, tile: int, out: Lines) -> None:
        """Prints the length of a domain and, for `hi` below zero, its last tile."""
        out(f"length = {self.print([length], out, self.known([length]))[0]}")
        out("if hi < 0:")
        out(f"    hi = (length + {tile - 1}) // {tile}")


def _as_read(e: Expr, slot: str) -> str:
    """A slot's content in the machine type of the value."""
    if e.type == "bool":
        return f"({slot} != 0)"
    return f"i32({slot})" if rep(e) == "i32" else slot


def maximal(candidates: Iterable[Expr], roots: list[Expr], variance: int) -> list[Expr]:
    """Those candidates that something more varying uses: worth a name before the loop."""
    wanted = {r for r in roots if r.variance <= variance}
    for e in walk(roots):
        if e.variance > variance:
            wanted.update(a for a in e.args if a.variance <= variance)
    return [e for e in candidates if e in wanted and e.op != "const"]
