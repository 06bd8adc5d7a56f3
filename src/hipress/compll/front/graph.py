"""Makes the values of `ir`: equal ones once, simplified, with the ranges of ints."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hipress.compll.ir import (
    INT_MAX,
    INT_MIN,
    MAX_NUMEL,
    OPS,
    STORAGE_BITS,
    Array,
    Blocks,
    Expr,
    Filter,
    Fold,
    Local,
    Sort,
    Type,
)


@dataclass(frozen=True, slots=True)
class ElemType:
    """A type of the language without the star."""

    kind: str
    """`float`, `int`, `uint`, `float16` or `bfloat16`."""
    bits: int = 0
    """Width of a `uint`."""

    def __str__(self) -> str:
        return f"uint{self.bits}" if self.kind == "uint" else self.kind

    @property
    def storage(self) -> str:
        names = {"float": "f32", "int": "i64", "float16": "f16", "bfloat16": "bf16"}
        whole = {3: 8, 5: 8, 6: 8, 12: 16}
        return names.get(self.kind) or f"u{whole.get(self.bits, self.bits)}"

    @property
    def in_bytes(self) -> bool:
        """Whether arrays of it are packed into bytes by operations of the language itself."""
        return self.kind == "uint" and self.bits in (3, 5, 6, 12)


FLOAT = ElemType("float")
INT = ElemType("int")
BOOL = ElemType("uint", 1)

MAX_DEPTH = 150
"""Operations one after another in a value: many functions here call themselves at each."""
MAX_HOST_DEPTH = 50
"""The same for a host value, whose text nests three parentheses in some: Python takes 200."""
MAX_HOST_WEIGHT = 1000


MAX_ROOM = 131_072
"""Most places of a row, as many as a block may have on a GPU."""


class TooDeep(Exception):
    """A value is made of too many operations, or a block has an array of too many places."""


_RUN_TIME = frozenset(
    {"load", "load_clamped", "uniform", "bits32", "fold", "count", "pick", "local"}
)


@dataclass(eq=False)
class Graph:
    """Makes values; equal ones are the same object, and simple identities are applied."""

    _interned: dict[tuple[Any, ...], Expr] = field(default_factory=dict)
    _signs: dict[Expr, bool] = field(default_factory=dict)

    def make(
        self,
        op: str,
        *args: Expr,
        type: Type,
        attr: Any = None,
        bounds: tuple[int, int] | None = None,
        variance: int | None = None,
        host: bool | None = None,
    ) -> Expr:
        """Returns the value `op(args)`; `bounds` is the range of an int."""
        assert op in OPS, op
        # 0.0 == -0.0 and 1 == True in Python: the repr keeps them apart.
        key = (op, args, type, repr(attr) if op == "const" else attr)
        found = self._interned.get(key)
        if found is None:
            if op in _RUN_TIME:
                host = False
            if variance is None:
                variance = max((a.variance for a in args), default=0)
            if host is None:
                host = bool(args) and all(a.host for a in args)
            lo, hi = (0, 1) if type == "bool" else bounds or (INT_MIN, INT_MAX)
            depth = 1 + max((a.depth for a in args), default=0)
            weight = 1 + sum(a.weight for a in args) if host else 0
            if depth > MAX_DEPTH:
                raise TooDeep(
                    f"a value is made of more than {MAX_DEPTH} operations one after another; "
                    "shorten the chain"
                )
            if host and (depth > MAX_HOST_DEPTH or weight > MAX_HOST_WEIGHT):
                raise TooDeep(
                    "a value is made of sizes and parameters by more than "
                    f"{MAX_HOST_DEPTH} operations one after another, or {MAX_HOST_WEIGHT} with "
                    "those of names counted at each use; shorten the chain"
                )
            found = Expr(op, args, type, attr, lo, hi, variance, host, depth, weight)
            self._interned[key] = found
        return found

    # Leaves.

    def const(self, value: int | float | bool) -> Expr:
        if isinstance(value, float):
            return self.make("const", type="float", attr=value, host=True)
        kind: Type = "bool" if isinstance(value, bool) else "int"
        return self.make("const", type=kind, attr=value, bounds=(value, value), host=True)

    def param(self, name: str) -> Expr:
        return self.make("param", type="float", attr=name, host=True)

    @property
    def n(self) -> Expr:
        return self.make("n", type="int", bounds=(0, MAX_NUMEL), host=True)

    def idx(self, length: Expr) -> Expr:
        bounds = (0, max(0, min(length.hi, MAX_NUMEL)))
        return self.make("idx", type="int", attr=length, bounds=bounds, variance=2)

    def block(self, op: str, block: Blocks) -> Expr:
        """`lidx`, `bnum`, `bstart` or `blen` of some blocks."""
        hi = {"lidx": block.size - 1, "blen": block.size}.get(op, MAX_NUMEL)
        variance = 2 if op == "lidx" else 1
        return self.make(op, type="int", attr=block, bounds=(0, hi), variance=variance)

    def blocks(self, block: Blocks) -> Expr:
        """Returns how many blocks there are."""
        up = self.binary("add", block.length, self.const(block.size - 1))
        return self.binary("idiv", up, self.const(block.size))

    def ridx(self, block: Blocks, count: int) -> Expr:
        """Returns the index in a row of `count` places, of which each block has one."""
        if count > max(block.size, MAX_ROOM):
            raise TooDeep(
                f"an array has {count} places in each block of {block.size} elements; at most "
                f"{MAX_ROOM} are allowed, or as many as the block has elements; make the array "
                "shorter, or outside the per scope"
            )
        bounds = (0, max(count - 1, 0))
        return self.make("ridx", type="int", attr=(block, count), bounds=bounds, variance=2)

    def local(self, local: Local, index: Expr) -> Expr:
        if local.kind in ("filter", "sort", "largest"):
            most = local.block.size if local.row is None else local.row.count
            bounds = (0, max(most - 1, 0))
        else:
            bounds = (local.body.lo, local.body.hi)
        if local.kind in ("scan", "scatter"):
            bounds = (INT_MIN, INT_MAX)
        variance = max(1, index.variance)
        return self.make(
            "local", index, type=local.type, attr=local, bounds=bounds, variance=variance
        )

    def load(self, array: Array, index: Expr) -> Expr:
        aligned = index.op == "idx" and index.attr is array.length
        fixed = index.op == "const" and array.length.op == "const"
        safe = aligned or index.op == "bnum" or (fixed and 0 <= index.attr < array.length.attr)
        bounds = None
        if array.type == "int" and array.storage != "i64":
            bounds = (0, 2 ** STORAGE_BITS[array.storage] - 1)
        op = "load" if safe else "load_clamped"
        return self.make(op, index, type=array.type, attr=array, bounds=bounds)

    def random(self, op: str, index: Expr, site: int, key: Expr | None = None) -> Expr:
        args = (index,) if key is None else (index, key)
        if op == "uniform":
            return self.make(op, *args, type="float", attr=site)
        return self.make(op, *args, type="int", attr=site, bounds=(0, 2**32 - 1))

    def fold(self, fold: Fold) -> Expr:
        variance = 0 if fold.block is None else 1
        return self.make("fold", type=fold.type, attr=fold, variance=variance)

    def count(self, found: Filter) -> Expr:
        return self.make("count", type="int", attr=found, bounds=(0, MAX_NUMEL))

    def taken(self, found: Filter) -> Expr:
        return self.make("taken", type="bool", attr=found, variance=2)

    def pick(self, sort: Sort, rank: Expr) -> Expr:
        return self.make("pick", rank, type=sort.values.type, attr=sort)

    # Arithmetic.

    def unary(self, op: str, a: Expr) -> Expr:
        """`neg`, `abs`, `floor`, ... and the casts; the type follows from `a`."""
        if a.op == "const" and op in _FOLD1 and a.attr != INT_MIN:
            return self.const(_FOLD1[op](a.attr))
        if op in ("floor", "round_f16", "round_bf16") and a.op == op:
            return a
        if op in ("not", "finite"):
            return self.make(op, a, type="bool")
        if op == "bits":
            return self.make("bits", a, type="int", bounds=(0, 2**32 - 1))
        if op == "from_bits":
            return self.make("from_bits", a, type="float")
        if op == "exponent":
            return self.make("exponent", a, type="int", bounds=(-150, 128))
        if op == "exp2" and a.op == "float" and a.args[0].type == "int":
            whole = a.args[0]
            if -126 <= whole.lo and whole.hi <= 127 and not whole.host:
                return self.make("power", whole, type="float")
        ranges = {"neg": (-a.hi, -a.lo), "abs": (0, max(abs(a.lo), abs(a.hi))), "sign": (-1, 1)}
        bounds = ranges.get(op) if a.type == "int" else None
        if bounds is not None and bounds[1] > INT_MAX:  # the smallest int stays what it is
            bounds = None
        return self.make(op, a, type=a.type, bounds=bounds)

    def binary(self, op: str, a: Expr, b: Expr) -> Expr:
        """Arithmetic on two values of one type."""
        assert a.type == b.type, (op, a, b)
        if a.op == "const" and b.op == "const":
            folded = _fold2(op, a.attr, b.attr)
            if folded is not None:
                return self.const(folded)
        if op == "sub" and b.op == "const" and repr(b.attr) == "0.0":
            return a  # exact for every float, -0.0 among them
        if op == "div" and b.op == "const" and _is_power(b.attr):
            return self.binary("mul", a, self.const(1.0 / b.attr))  # the same bits, and cheaper
        if op == "mul" and "select" in (a.op, b.op):
            factor, choice = (a, b) if b.op == "select" else (b, a)
            if max(factor.variance, *(x.variance for x in choice.args[1:])) < choice.variance:
                # Once for each block, not for each element; the same bits.
                yes, no = (self.binary("mul", factor, x) for x in choice.args[1:])
                return self.select(choice.args[0], yes, no)
        if op == "min" and (a.op == "const") != (b.op == "const"):
            value, limit = (b, a) if a.op == "const" else (a, b)
            if value.op == "int" and value.args[0].type == "float" and 0 <= limit.attr <= 2**24:
                # Limited before it is an int, it needs fewer bits (a NaN stays one, and is 0).
                small = self.binary("min", self.const(float(limit.attr)), value.args[0])
                return self.make("int", small, type="int", bounds=(value.lo, limit.attr))
        if op == "add" and {a.op, b.op} == {"bstart", "lidx"}:
            return self.idx(a.attr.length)
        if op == "add" and b.op == "ridx" and a.op == "mul" and a.args[0].op == "bnum":
            if b.attr == (a.args[0].attr, a.args[1].attr):
                return self.idx(self.binary("mul", self.blocks(b.attr[0]), a.args[1]))
        if op in ("lt", "le", "eq", "ne"):
            return self.make(op, a, b, type="bool")
        return self.make(op, a, b, type=a.type, bounds=_bounds(op, a, b))

    def select(self, cond: Expr, yes: Expr, no: Expr) -> Expr:
        assert yes.type == no.type
        if cond.op == "const":
            return yes if cond.attr else no
        if yes is no:
            return yes
        if yes.op == "const" and no.op == "const" and yes.type == "bool":
            return cond if yes.attr else self.unary("not", cond)
        # a > b ? a : b is a maximum (of a NaN, whichever comes out: the frame is flagged).
        if cond.op in ("lt", "le") and {yes, no} == set(cond.args) and yes.type == "float":
            return self.binary("max" if yes is cond.args[1] else "min", *cond.args)
        bounds = (min(yes.lo, no.lo), max(yes.hi, no.hi))
        return self.make("select", cond, yes, no, type=yes.type, bounds=bounds)

    def sent(self, a: Expr) -> Expr:
        """Returns a host value as it is on the wire: from here on the kernel computes with it."""
        if a.type != "float" or not a.host or a.op == "const":
            return a
        return self.make("sent", a, type="float", host=False)

    def to_float(self, a: Expr) -> Expr:
        if a.type == "float":
            return a
        if a.op == "const":
            return self.const(float(a.attr))
        return self.make("float", a, type="float")

    def to_int(self, a: Expr) -> Expr:
        if a.type == "int":
            return a
        if a.op == "const":
            return self.const(int(max(min(a.attr, 9.0e18), -9.0e18)))
        bounds = (0, 1) if a.type == "bool" else None
        if a.type == "float" and self._never_negative(a):
            bounds = (0, 2**63 - 1)
        return self.make("int", a, type="int", bounds=bounds)

    def to_bool(self, a: Expr) -> Expr:
        if a.type == "bool":
            return a
        if a.op == "int" and a.args[0].type == "bool":
            return a.args[0]
        zero = self.const(0.0) if a.type == "float" else self.const(0)
        return self.binary("ne", a, zero)

    def to_uint(self, a: Expr, bits: int) -> Expr:
        top = 2**bits - 1
        if a.type == "bool":
            return self.to_int(a)
        if a.op == "const" and abs(a.attr) < 2.0**62:
            return self.const(min(max(int(a.attr), 0), top))
        if a.type == "int" and a.lo >= 0 and a.hi <= top:
            return a
        if a.op == "float" and a.args[0].type == "int":
            inner = a.args[0]
            if -(2**24) <= inner.lo and inner.hi <= 2**24:  # a float holds it exactly
                return self.to_uint(inner, bits)
        if a.op == "floor" and a.type == "float":
            return self.to_uint(a.args[0], bits)  # saturation at 0 makes truncation a floor
        return self.make("uint", a, type="int", attr=bits, bounds=(0, top))

    def substitute(self, root: Expr, known: dict[Expr, Expr]) -> Expr:
        """Returns `root` with some values replaced, simplified again."""
        done = dict(known)

        def visit(e: Expr) -> Expr:
            if e not in done:
                args = tuple(visit(a) for a in e.args)
                done[e] = e if args == e.args else self._remake(e, args)
            return done[e]

        return visit(root)

    def _remake(self, e: Expr, args: tuple[Expr, ...]) -> Expr:
        if e.op == "select":
            return self.select(*args)
        if e.op == "uint":
            return self.to_uint(args[0], e.attr)
        if e.op in ("float", "int"):
            return (self.to_float if e.op == "float" else self.to_int)(args[0])
        if e.is_load:
            return self.load(e.attr, args[0])
        if e.op in ("land", "lor"):
            return self.logic(e.op, *args)
        if e.op in ("uniform", "bits32", "pick", "local", "sent"):
            return self.make(e.op, *args, type=e.type, attr=e.attr, bounds=(e.lo, e.hi))
        if len(args) == 2:
            return self.binary(e.op, *args)
        if len(args) == 1:
            return self.unary(e.op, args[0])
        return self.make(e.op, *args, type=e.type, attr=e.attr, bounds=(e.lo, e.hi))

    def _never_negative(self, e: Expr) -> bool:
        """Whether a float is at least zero, or NaN, by the way it is made."""
        if e not in self._signs:
            self._signs[e] = self._find_never_negative(e)
        return self._signs[e]

    def _find_never_negative(self, e: Expr) -> bool:
        if e.op == "const":
            return math.copysign(1.0, e.attr) > 0
        if e.op in ("abs", "sqrt", "uniform", "exp2", "power"):
            return True
        if e.op in ("add", "mul", "div", "min", "max", "floor"):
            return all(map(self._never_negative, e.args))
        if e.op == "select":
            return all(map(self._never_negative, e.args[1:]))
        if e.op == "fold":
            f = e.attr
            starts = f.kind in ("sum", "max") and f.init.op == "const" and f.init.attr >= 0
            return starts and (f.kind == "max" or self._never_negative(f.body))
        return e.op == "float" and e.args[0].lo >= 0

    def logic(self, op: str, a: Expr, b: Expr) -> Expr:
        for x, y in ((a, b), (b, a)):
            if x.op == "const":
                return y if x.attr == (op == "land") else x
        return self.make(op, a, b, type="bool")


_FOLD1: dict[str, Callable[[Any], Any]] = {
    op: getattr(operator, f"__{op}__") for op in ("neg", "abs", "not", "inv")
}
_FOLD2: dict[str, Callable[[Any, Any], Any]] = {
    **{op: getattr(operator, op) for op in ("add", "sub", "mul", "lt", "le", "eq", "ne", "xor")},
    **{"and": operator.and_, "or": operator.or_, "min": min, "max": max},
    **{"shl": operator.lshift, "shr": operator.rshift},
}


def _fold2(op: str, a: Any, b: Any) -> int | float | bool | None:
    if isinstance(a, float) and op not in ("lt", "le", "eq", "ne", "min", "max"):
        return None  # a backend rounds to binary32; Python would not
    if op not in _FOLD2:
        return None
    if op in ("shl", "shr") and not 0 <= b < 63:
        return None
    value = _FOLD2[op](a, b)
    return value if isinstance(value, bool | float) or INT_MIN <= value <= INT_MAX else None


def _bounds(op: str, a: Expr, b: Expr) -> tuple[int, int] | None:
    if a.type != "int":
        return None
    if op in ("add", "sub", "mul", "min", "max"):
        ends = [_FOLD2[op](x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
        if min(ends) < INT_MIN or max(ends) > INT_MAX:
            return None  # may wrap: any value
        return min(ends), max(ends)
    if op == "and" and a.lo >= 0 and b.lo >= 0:
        return 0, min(a.hi, b.hi)
    if op in ("or", "xor") and a.lo >= 0 and b.lo >= 0:
        return 0, 2 ** max(a.hi.bit_length(), b.hi.bit_length()) - 1
    if op == "imod" and b.lo > 0:
        return (0 if a.lo >= 0 else -b.hi + 1), b.hi - 1
    if op == "idiv" and a.lo >= 0 and b.lo > 0:
        return 0, a.hi // b.lo
    if op == "shr" and a.lo >= 0:
        return 0, a.hi
    if op == "shl" and a.lo >= 0 and 0 <= b.lo and b.hi < 31 and a.hi < 2**31:
        return 0, a.hi << b.hi
    return None


def _is_power(x: float) -> bool:
    """Whether x is a power of two whose reciprocal is as exact."""
    return abs(math.frexp(x)[0]) == 0.5 and 2.0**-100 <= abs(x) <= 2.0**100


def convert(graph: Graph, value: Expr, elem: ElemType) -> Expr:
    """Returns `value` as an element of this type (a `uint` saturates)."""
    if elem.kind == "float":
        return graph.to_float(value)
    if elem.kind == "int":
        return graph.to_int(value)
    if elem.kind == "uint":
        return graph.to_uint(value, elem.bits)
    rounded = {"float16": "round_f16", "bfloat16": "round_bf16"}[elem.kind]
    return graph.unary(rounded, graph.to_float(value))
