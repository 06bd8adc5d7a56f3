"""Values and passes: the only things that backends see.

A *value* (`Expr`) is a scalar computed from other values. There are three types: `float`
(binary32), `int` (64 bits, with a known range, so that a backend may use fewer) and `bool`. Equal
values are the same object: a `Graph` interns them, so sharing needs no extra pass.

A *pass* goes over memory once. A `Kernel` is a flat list of passes in the order they run.

Short letters: n elements of the gradient; i the index of an element in a pass's domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Type = Literal["float", "int", "bool"]

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

MAX_NUMEL = 2**32 - 1
"""Most elements of one gradient: an index fits `uint32` on the wire."""

STORAGE_BITS = {
    **{"f32": 32, "f16": 16, "bf16": 16, "i64": 64},
    **{f"u{bits}": bits for bits in (1, 2, 4, 8, 16, 32)},
}
"""How an element lies in memory; `u1`, `u2` and `u4` are packed, low bits first."""

PACKED = ("u1", "u2", "u4")
RANDOM = ("uniform", "bits32")


@dataclass(frozen=True, slots=True)
class Array:
    """Memory that a kernel reads or writes."""

    name: str
    """The compiler's name, not the program's: `x`, `out`, `state0`, `section1`, `temp0`."""
    storage: str
    """A key of `STORAGE_BITS`; for `x`, `out`: the dtype of the caller's tensor."""
    length: Expr
    """Number of elements; a host value."""
    label: str = field(default="", compare=False)
    """The program's name for it, for readers only."""

    @property
    def is_state(self) -> bool:
        return self.name.startswith(("state", "residual", "momentum"))

    @property
    def type(self) -> Type:
        return "float" if self.storage in ("f32", "f16", "bf16") else "int"


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """One value. `op` says how it is made from `args`; see `OPS` for the legal ones."""

    op: str
    args: tuple[Expr, ...]
    type: Type
    attr: Any
    lo: int
    """Smallest possible value, for ints."""
    hi: int
    variance: int
    """0: the same for the whole kernel; 1: one per block; 2: one per element."""
    host: bool
    """Made of sizes and parameters only: computed on the host, in double precision."""
    depth: int
    """Operations on the longest way down to a leaf."""
    weight: int
    """Operations of a host value, counted at each use: its text repeats them."""

    @property
    def narrow(self) -> bool:
        """Whether 32 signed bits hold every possible value of this int."""
        return -(2**31) <= self.lo and self.hi < 2**31

    @property
    def wraps(self) -> bool:
        """Whether this int may be any of 64 bits: arithmetic that makes it may have wrapped."""
        return self.lo == INT_MIN and self.hi == INT_MAX

    @property
    def is_load(self) -> bool:
        return self.op in ("load", "load_clamped")


# Legal ops, and what each means. A backend renders each of them; `spec` checks them.
OPS = {
    "const": "attr is the value",
    "param": "a float parameter; attr is its name",
    "n": "elements of the gradient",
    "idx": "index of this element in the pass's domain; attr is the domain's length",
    "lidx": "index of this element in its block",
    "ridx": "index in a row of this block; attr is (the blocks, elements of a row)",
    "bnum": "number of this block",
    "bstart": "index of the block's first element",
    "blen": "elements in this block",
    "load": "element args[0] of the array attr; in range by construction",
    "load_clamped": "the same, the index clamped into the array (0 if that is empty)",
    "uniform": "random float in [0, 1) for index args[0]; attr is the site; args[1] a key, if any",
    "bits32": "random int in [0, 2**32), with the same attr and args",
    "fold": "result of the reduction attr",
    "count": "elements that the filter attr let through",
    "taken": "whether the filter attr let this element through",
    "pick": "element args[0] of the sorted array attr",
    "local": "element args[0] of the block's own array attr",
    "flagged": "whether frame number attr says that it holds a NaN or an infinity",
    **dict.fromkeys(
        ("add", "sub", "mul", "shl", "shr", "and", "or", "xor", "inv", "neg"), "as in C"
    ),
    "div": "of floats",
    "idiv": "of ints, towards zero, as in C; by zero gives 0",
    "imod": "the sign of the dividend, as in C; by zero gives 0",
    **dict.fromkeys(("lt", "le", "eq", "ne"), "compares"),
    **dict.fromkeys(("not", "land", "lor"), "of bools"),
    "select": "args[1] if args[0] else args[2]",
    **dict.fromkeys(("min", "max", "abs", "floor", "sqrt", "exp2", "log2"), "as in Python's math"),
    "sign": "-1, 0 or 1",
    "exponent": "of a float: floor(log2(abs(x))); -150 for 0, 128 for NaN and infinities",
    "bits": "of a float as an int from 0 to 2**32 - 1",
    "from_bits": "the float of the low 32 bits of an int",
    "power": "2.0 to an int from -126 to 127, exact",
    "float": "int or bool to float",
    "int": "float (towards zero; NaN is 0) or bool to int",
    "uint": "to attr bits, saturating; NaN is 0",
    "round_f16": "to the nearest float16 and back",
    "round_bf16": "to the nearest bfloat16 and back",
    "finite": "neither NaN nor infinite",
    "sent": "a host value rounded to binary32, as a payload carries it",
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A domain cut into blocks; the values of one `per` scope belong to its blocks."""

    size: int
    """Elements of a block; the last one may have fewer."""
    length: Expr
    """Elements of the domain; a host value."""


@dataclass(frozen=True, slots=True)
class Row:
    """A domain of `count` places for each block; the first `length` of them are in use."""

    block: Blocks
    count: int
    length: Expr
    """The same for the block; `count` at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """A reduction of `body` over a domain (or, with `block`, over each block of it)."""

    kind: Literal["sum", "max", "min", "or", "fold"]
    type: Type
    init: Expr
    body: Expr
    length: Expr
    block: Blocks | None
    combine: Expr | None = None
    """For `fold`: the value of f(`carry`, `item`), two const-free leaves below."""
    carry: Expr | None = None
    item: Expr | None = None
    row: Row | None = None
    """With `block`: the row that it goes over, if not the block's elements."""

    @property
    def exprs(self) -> list[Expr]:
        more = [self.combine] if self.combine is not None else []
        return [self.body, self.init, *more, *([self.row.length] if self.row is not None else [])]


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """An array that a block has for itself while it is in cache.

    `filter`, `sort` and `largest` hold places in the block (or row) that they go over; places that
    are not used are 0.
    """

    kind: Literal["keep", "scan", "filter", "sort", "largest", "scatter"]
    type: Type
    body: Expr
    """What is kept, scanned or added; whether a filter takes the place; the key of an order."""
    block: Blocks
    row: Row | None
    """What it goes over, if not the block's elements."""
    room: int
    """Most elements."""
    index: Expr | None = None
    """For a `scatter`: the index at which each element is added."""
    size: Expr | None = None
    """For a `scatter`: its length."""
    fold: Fold | None = None
    """For a `scan`: the function that joins elements, and its start."""

    @property
    def exprs(self) -> list[Expr]:
        more = [self.index, self.size, None if self.row is None else self.row.length]
        scan = [] if self.fold is None else self.fold.exprs
        return [self.body, *scan, *(e for e in more if e is not None)]


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """The indices of a domain where `keep` holds, in order, the first `capacity` of them."""

    keep: Expr
    length: Expr
    capacity: Expr


@dataclass(slots=True, eq=False)
class Sort:
    """The values of a domain in ascending order of `key` (stable)."""

    value: Expr
    key: Expr
    length: Expr
    values: Array
    keys: Array | None
    """Apart from `values` only where the key is not the value."""
    whole: bool = False
    """Some use needs the sorted array; otherwise only single ranks are picked."""
    ranks: list[Expr] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Store:
    """`array[i] = value` for one element, block or scalar."""

    array: Array
    value: Expr
    row: Row | None = None
    """For one element of each block's row."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One loop over the elements of a tile; folds and locals are ready when it ends."""

    folds: tuple[Fold, ...] = ()
    stores: tuple[Store, ...] = ()
    locals: tuple[Local, ...] = ()


@dataclass(frozen=True, slots=True)
class Loop:
    """Phases over each tile of the domain; the tile stays in cache, so memory is read once."""

    length: Expr
    block: int | None
    """Elements of a block, if the domain is cut into blocks."""
    phases: tuple[Phase, ...]
    block_stores: tuple[Store, ...] = ()
    """One value per block, written when the phases are through."""
    row_stores: tuple[Store, ...] = ()
    """One row per block, written then too."""

    @property
    def locals(self) -> list[Local]:
        return [x for phase in self.phases for x in phase.locals]


@dataclass(frozen=True, slots=True)
class Compact:
    """Elements that pass the filter are written out side by side, in index order."""

    filter: Filter
    emits: tuple[Store, ...]
    """Value of each output array for an element that was taken; the rest is zeroed."""
    stores: tuple[Store, ...] = ()
    """For every element; their values may use `taken`."""
    folds: tuple[Fold, ...] = ()

    @property
    def length(self) -> Expr:
        return self.filter.length


@dataclass(frozen=True, slots=True)
class Select:
    """Finds single ranks of `sort.values` without sorting it."""

    sort: Sort


@dataclass(frozen=True, slots=True)
class Sorting:
    """Sorts `sort.values` (and `sort.keys`) in place."""

    sort: Sort


@dataclass(frozen=True, slots=True)
class Scan:
    """`array[i] = f(array[i - 1], body)`, the first from `fold.init`."""

    fold: Fold
    array: Array


@dataclass(frozen=True, slots=True)
class Scatter:
    """`array[index] += value` for each element of the domain; a wrong index is an error."""

    length: Expr
    index: Expr
    value: Expr
    array: Array
    clear: bool
    distinct: bool = False
    """Whether no two indices can be equal."""
    bad: Expr | None = None
    """What makes an index in range wrong: one of a payload must lie above the one before."""

    @property
    def exprs(self) -> list[Expr]:
        return [self.index, self.value, *([] if self.bad is None else [self.bad])]


@dataclass(frozen=True, slots=True)
class Scalars:
    """Single values written to the payload."""

    stores: tuple[Store, ...]


Pass = Loop | Compact | Select | Sorting | Scan | Scatter | Scalars


def pass_folds(p: Pass) -> list[Fold]:
    if isinstance(p, Loop):
        return [f for phase in p.phases for f in phase.folds]
    return list(p.folds) if isinstance(p, Compact) else []


def pass_stores(p: Pass) -> list[Store]:
    """Returns what a pass writes, element by element or block by block."""
    if isinstance(p, Loop):
        return [s for phase in p.phases for s in phase.stores] + [
            *p.block_stores,
            *p.row_stores,
        ]
    if isinstance(p, Compact):
        return [*p.emits, *p.stores]
    return list(p.stores) if isinstance(p, Scalars) else []


def pass_exprs(p: Pass) -> list[Expr]:
    """Returns every value that a pass computes, those inside its reductions among them."""
    exprs = [e for f in pass_folds(p) for e in f.exprs] + [s.value for s in pass_stores(p)]
    if isinstance(p, Loop):
        exprs += [p.length, *(e for x in p.locals for e in x.exprs)]
        exprs += [s.row.length for s in p.row_stores if s.row is not None]
    elif isinstance(p, Compact):
        exprs += [p.filter.keep, p.filter.capacity, p.length]
    elif isinstance(p, Scan):
        exprs += [*p.fold.exprs, p.fold.length]
    elif isinstance(p, Scatter):
        exprs += [p.length, *p.exprs]
    elif isinstance(p, Select | Sorting):
        exprs += p.sort.ranks
    return exprs


@dataclass(frozen=True, slots=True)
class Require:
    cond: Expr
    message: str


@dataclass(frozen=True)
class Kernel:
    """A list of passes and the memory they work on."""

    name: str
    passes: tuple[Pass, ...]
    sections: tuple[Section, ...]
    temps: tuple[Array, ...]
    limits: dict[Expr, Expr]
    """Largest value, known to the host, of each length that is not."""
    params: tuple[str, ...]
    """Float parameters, in the order they are passed."""
    states: tuple[Array, ...] = ()
    input: Array | None = None
    output: Array | None = None
    requires: tuple[Require, ...] = ()
    nonfinite: Fold | None = None
    """Tells whether the encoded values hold a NaN or an infinity."""
    frames: tuple[tuple[Section, ...], ...] = ()
    """Payloads that are read: of each frame that is merged, its sections."""

    @cached_property
    def random(self) -> bool:
        # Asked for in every call of a codec; looking at all passes takes 40 us.
        exprs = [e for p in self.passes for e in pass_exprs(p)]
        return any(e.op in RANDOM for e in walk(exprs))


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the payload: an array on a 16-byte boundary, or one scalar among others."""

    array: Array
    scalar: bool


def walk(roots: Iterable[Expr], seen: set[Expr] | None = None) -> Iterator[Expr]:
    """Yields every value below `roots` once, arguments first; reductions are not entered.

    Values in `seen` are left out together with what is below them; `seen` grows on the way.
    """
    seen = set() if seen is None else seen
    for root in roots:
        stack = [(root, False)]
        while stack:
            e, ready = stack.pop()
            if ready:
                yield e
            elif e not in seen:
                seen.add(e)
                stack.append((e, True))
                stack.extend((a, False) for a in reversed(e.args))


def walk_all(roots: Iterable[Expr]) -> Iterator[Expr]:
    """Yields every value that `roots` depend on: `walk`, and what `behind` returns for each."""
    seen: set[Expr] = set()
    todo = list(roots)
    while todo:
        for e in walk([todo.pop()], seen):
            yield e
            todo += [e.attr] if e.op == "idx" else behind(e)


def behind(e: Expr) -> list[Expr]:
    """Returns the values inside the reduction, filter or sort whose result `e` is."""
    if e.op == "fold":
        return [*e.attr.exprs, e.attr.length]
    if e.op in ("count", "taken"):
        return [e.attr.keep]
    if e.op == "local":
        return e.attr.exprs  # type: ignore[no-any-return]
    return [e.attr.value, e.attr.key] if e.op == "pick" else []


def with_blocks(roots: Iterable[Expr]) -> list[Expr]:
    """Returns `roots` and the values inside the block reductions and locals below them.

    These run in the same pass as the values that use them.
    """
    roots = list(roots)
    found: dict[Expr, None] = {}
    todo = list(roots)
    while todo:
        for e in walk([todo.pop()]):
            if e.op == "local" or (e.op == "fold" and e.attr.block is not None):
                new = [x for x in e.attr.exprs if x not in found]
                found.update(dict.fromkeys(new))
                todo += new
    return [*roots, *found]


def blocks_of(exprs: Iterable[Expr]) -> set[Blocks]:
    """Returns the blocks that some values are tied to."""
    found: set[Blocks | None] = set()
    for e in walk(with_blocks(exprs)):
        if e.op in ("lidx", "bnum", "bstart", "blen"):
            found.add(e.attr)
        elif e.op == "ridx":
            found.add(e.attr[0])
        elif e.op in ("fold", "local"):
            found.add(e.attr.block)
    return {block for block in found if block is not None}


def loads(roots: Iterable[Expr]) -> list[Array]:
    return list(dict.fromkeys(e.attr for e in walk(roots) if e.is_load))


def is_own(e: Expr) -> bool:
    """Whether a load is of the element, the block or the one number that its pass is at."""
    single = e.attr.length.op == "const" and e.attr.length.attr == 1
    return e.op == "load" and (e.args[0].op in ("idx", "bnum") or single)


def row_count(length: Expr) -> int:
    """Returns the elements of a row, given those of all rows: a number of blocks times that."""
    assert length.op == "mul" and length.args[1].op == "const"
    return int(length.args[1].attr)


def splits_bytes(array: Array, count: int) -> bool:
    """Whether rows of packed codes start inside a byte: such codes are read one by one."""
    return count * STORAGE_BITS[array.storage] % 8 != 0
