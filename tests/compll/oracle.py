"""The meaning of a CompLL program, run straight from its tree: slow, eager and obvious.

Nothing of the compiler but the parser is used: each statement is carried out when it is reached,
each array is made in full, each lambda is called once per element. The backends are held against
it.

Numbers. What is made of literals, parameters and sizes alone is computed on the host: Python ints
and floats (double precision). All else is `np.int64`, `np.float32` or `np.bool_`; a host number
that meets one of them is rounded to binary32 first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hipress.compll.front import ast

Elem = tuple[str, int]
FLOAT: Elem = ("float", 32)
INT: Elem = ("int", 64)
STORAGE_BITS = {"float": 32, "int": 64, "float16": 16, "bfloat16": 16}


class Refused(Exception):
    """The payload cannot be decoded."""


class Size(int):
    """A length that is known by name.

    `tag` is "n", ("blocks", size of a block, tag of what is cut into blocks) or ("rows", the same
    two, elements of a row).
    """

    tag: Any = None


def sized(value: int, tag: Any) -> Size:
    size = Size(value)
    size.tag = tag
    return size


def tag_of(size: Any) -> Any:
    """What a length is known by: its tag or, of one without a name, the number."""
    tag = getattr(size, "tag", None)
    return int(size) if tag is None and is_host(size) else tag


@dataclass
class Arr:
    """An array: what `elem` says of each value, its length, and where elements came from."""

    values: np.ndarray
    elem: Elem
    size: Any
    """A `Size`, an int, or `np.int64` where the length depends on the gradient."""
    origin: np.ndarray | None = None
    """Of a filtered array: the indices before the filter."""
    capacity: Any = None
    block_start: int = 0
    """Of a block's part of an array: where the block starts."""
    is_cut: bool = False
    """Whether it is a block's part of the filtered array that a `per` scope cuts."""

    def positions(self) -> Sequence[int]:
        """The index that `random` draws for, of each element."""
        if self.origin is not None:
            return self.origin  # type: ignore[return-value]
        return range(self.block_start, self.block_start + len(self.values))


@dataclass
class Num:
    """A number by name, and the type it was declared with."""

    value: Any
    elem: Elem


@dataclass
class Func:
    """A lambda, and the names it sees."""

    code: ast.Lambda
    env: Env


@dataclass
class Unset:
    """Declared, without a value."""

    elem: Elem
    array: bool
    size: Any


@dataclass
class Block:
    """The block that a `per` scope is at."""

    size: int
    of: Any
    """The tag of what is cut into blocks; of a filtered array, of its capacity."""
    number: int
    start: int
    length: int
    cut: Arr | None = None
    """The filtered array that is cut into blocks."""


@dataclass
class Env:
    """Names in scope."""

    names: dict[str, Any] = field(default_factory=dict)
    outer: Env | None = None
    block: Block | None = None
    assigned: dict[str, Any] = field(default_factory=dict)
    """In a `per` scope: what it gave to names from outside."""

    def home(self, name: str) -> Env:
        env: Env | None = self
        while env is not None and name not in env.names:
            env = env.outer
        assert env is not None, f"{name} is not defined"
        return env

    def defines(self, name: str) -> bool:
        return name in self.names or (self.outer is not None and self.outer.defines(name))

    def scope(self) -> Env | None:
        env: Env | None = self
        while env is not None and env.block is None:
            env = env.outer
        return env

    def within(self, scope: Env) -> bool:
        env: Env | None = self
        while env is not None and env is not scope:
            env = env.outer
        return env is scope


# Numbers.


def is_host(*values: Any) -> bool:
    return not any(isinstance(v, np.generic) for v in values)


def is_float(value: Any) -> bool:
    return isinstance(value, float | np.float32)


def is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def to_float(value: Any) -> Any:
    if is_host(value):
        return float(value)
    return value if isinstance(value, np.float32) else np.float32(value)


def to_int(value: Any) -> Any:
    """Towards zero; NaN is 0, what does not fit saturates."""
    if is_float(value):
        number, limit = float(value), 9.0e18 if is_host(value) else float(np.float32(9.0e18))
        number = 0.0 if math.isnan(number) else min(max(number, -limit), limit)
        return int(number) if is_host(value) else np.int64(number)
    return value if isinstance(value, Size) else int(value) if is_host(value) else np.int64(value)


def truth(value: Any) -> Any:
    return value if is_bool(value) else value != 0


def common(a: Any, b: Any) -> tuple[Any, Any]:
    if is_float(a) or is_float(b):
        return to_float(a), to_float(b)
    return to_int(a), to_int(b)


def round_bf16(value: np.float32) -> np.float32:
    bits = int(np.float32(value).view(np.uint32))
    if math.isnan(value):
        return np.float32(value)
    low, bits = bits & 0xFFFF, bits & ~0xFFFF
    if low > 0x8000 or (low == 0x8000 and bits & 0x10000):
        bits += 0x10000
    return np.uint32(bits & 0xFFFFFFFF).view(np.float32)


def convert(value: Any, elem: Elem) -> Any:
    """A number as an element of this type; `uint` saturates, and NaN is 0 there."""
    kind, bits = elem
    if kind == "float":
        return to_float(value)
    if kind == "int":
        return to_int(value)
    if kind == "uint":
        if is_float(value) and math.isnan(value):
            return 0 if is_host(value) else np.int64(0)
        top = 2**bits - 1
        number = value if not is_float(value) else min(max(float(value), 0.0), float(top))
        number = min(max(int(number), 0), top)
        return number if is_host(value) else np.int64(number)
    if kind == "float16":
        rounded = np.float32(np.float16(value))
    else:
        rounded = round_bf16(np.float32(value))
    return float(rounded) if is_host(value) else rounded


def divide(a: Any, b: Any) -> Any:
    """Of ints: towards zero, by zero 0."""
    if b == 0:
        return a * 0
    q = abs(int(a)) // abs(int(b))
    q = q if (a < 0) == (b < 0) else -q
    return q if is_host(a, b) else np.int64((q + 2**63) % 2**64 - 2**63)


def shift(a: Any, b: Any) -> Any:
    """`a << b` of 64 bits (`a >> -b` for negative b, which only we use)."""
    bits = (int(a) << int(b) if b >= 0 else int(a) >> -int(b)) & (2**64 - 1)
    signed = bits - 2**64 if bits >> 63 else bits
    return signed if is_host(a, b) else np.int64(signed)


def divide_floats(a: Any, b: Any) -> Any:
    if not is_host(a, b):
        return np.float32(a) / np.float32(b)
    if b == 0.0:
        return math.nan if a == 0.0 or math.isnan(a) else math.copysign(math.inf, a)
    return a / b


def extreme(a: Any, b: Any, pick: Callable[..., Any]) -> Any:
    a, b = common(a, b)
    if is_host(a, b):
        return pick(a, b)
    kind = np.float32 if is_float(a) else np.int64
    return kind(pick(kind(a), kind(b)))


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: divide_floats(a, b) if is_float(a) else divide(a, b),
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
WHOLE: dict[str, Callable[[Any, Any], Any]] = {
    "%": lambda a, b: a * 0 if b == 0 else a - divide(a, b) * b,
    "<<": lambda a, b: shift(a, b) if 0 <= b < 63 else a * 0,
    ">>": lambda a, b: shift(a, -min(b, 63)) if b >= 0 else shift(a, -63),
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
}


def elementary(name: str, x: Any) -> Any:
    """abs, floor, sqrt, exp2, log2, sign of a number."""
    x = to_int(x) if is_bool(x) else x
    if name == "abs":
        return abs(x)
    if name == "sign":
        return type(x)((x > 0) * 1 - (x < 0) * 1)
    if name == "floor":
        return x if not is_float(x) else float(math.floor(x)) if is_host(x) else np.floor(x)
    if name == "from_bits":
        low = int(to_int(x)) & 0xFFFFFFFF
        found = np.uint32(low).view(np.float32)
        return float(found) if is_host(x) else found
    x = to_float(x)
    if name == "bits":
        number = int(np.float32(x).view(np.uint32))
        return number if is_host(x) else np.int64(number)
    if name == "sqrt":
        return math.sqrt(x) if is_host(x) else np.sqrt(x)
    double = {"exp2": lambda v: 2.0**v, "log2": math.log2}[name](float(x))
    return double if is_host(x) else np.float32(double)


# Random numbers.


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-7 (Salmon, Moraes, Dror and Shaw, SC'11), one word at a time."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        p, q = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q % 2**32, (p >> 32) ^ c3 ^ k1, p % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def bits32(i: int, site: int, rng: tuple[int, int, int]) -> int:
    """philox(seed, stream, step, i // 4)[i % 4]; each place in the text draws for itself."""
    seed, stream, step = rng
    counter = ((i // 4) % 2**32, site, step % 2**32, stream % 2**32)
    return philox(counter, (seed % 2**32, (seed >> 32) % 2**32))[i % 4]


# Payloads.


@dataclass
class Part:
    """One piece of a payload: a number, or an array padded to the room it has."""

    elem: Elem
    value: Any
    size: Any = None
    """Of an array: its length on the wire."""


def pack(parts: Sequence[Part]) -> bytes:
    """Scalars on multiples of their size, arrays and the end on multiples of 16 bytes."""
    body = bytearray()
    for part in parts:
        bits = part.elem[1] if part.elem[0] == "uint" else STORAGE_BITS[part.elem[0]]
        align = 16 if part.size is not None else -(-bits // 8)
        body += bytes(-len(body) % align)
        values = np.atleast_1d(part.value)
        if part.elem[0] == "float":
            body += values.astype("<f4").tobytes()
        elif part.elem[0] == "float16":
            body += values.astype("<f2").tobytes()
        elif part.elem[0] == "bfloat16":
            body += (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        elif part.elem[0] == "int":
            body += values.astype("<i8").tobytes()
        else:
            number = sum(int(v) << (bits * i) for i, v in enumerate(values))  # low bits first
            body += number.to_bytes((bits * len(values) + 7) // 8, "little")
    return bytes(body + bytes(-len(body) % 16))


# Programs.


class Machine:
    """Runs the two functions of a parsed file.

    Example:
        >>> from hipress.compll.front.parse import parse
        >>> text = "void XEncode(float* g, uint8* c) { c = concat(g); }"
        >>> parts, _ = Machine(parse(text), {}).encode(np.ones(2, np.float32), (), (0, 0, 0))
        >>> parts[0].value.tolist()
        [1.0, 1.0]
    """

    def __init__(self, source: ast.Source, params: Mapping[str, Any]) -> None:
        self.source = source
        self.params = dict(params)
        self.position: Any = None
        """The index that `random` draws for, while a lambda runs over an array."""
        self.turns: tuple[int, ...] = ()

    def encode(
        self, gradient: np.ndarray, states: Sequence[np.ndarray], rng: tuple[int, int, int]
    ) -> tuple[list[Part], list[np.ndarray]]:
        """The parts of the payload, and the states after."""
        function, env = self._open("Encode", len(gradient), rng)
        (name,) = [a.name for a in function.args if is_gradient(a)]
        env.names[name] = Arr(gradient.astype(np.float32), FLOAT, self.n)
        own = [arg for arg in function.args if arg.inout]
        for arg, values in zip(own, states, strict=False):
            elem = self.elem(arg.type, env)
            size = self.n if arg.size is None else self.value(arg.size, env)
            values = vector(values, elem)
            is_array = arg.type.array or arg.size is not None
            env.names[arg.name] = Arr(values, elem, size) if is_array else Num(values[0], elem)
        with np.errstate(all="ignore"):
            self.run(function.body, env)
        finals = [env.names[arg.name] for arg in own]
        return self.parts, [
            f.values if isinstance(f, Arr) else vector([f.value], f.elem) for f in finals
        ]

    def decode(self, parts: Sequence[Part], n: int) -> np.ndarray:
        """The gradient that a payload stands for."""
        function, env = self._open("Decode", n, (0, 0, 0))
        self.payload = list(parts)
        (name,) = [a.name for a in function.args if is_gradient(a)]
        env.names[name] = Unset(FLOAT, True, self.n)
        with np.errstate(all="ignore"):
            self.run(function.body, env)
        return env.names[name].values.astype(np.float32)

    def _open(self, kind: str, n: int, rng: tuple[int, int, int]) -> tuple[ast.Function, Env]:
        (function,) = [f for f in self.source.functions if f.name.endswith(kind)]
        blocks = {b.name: b for b in self.source.params}
        env = Env()
        self.n, self.rng = sized(n, "n"), rng
        self.sites: dict[Any, int] = {}
        self.parts: list[Part] = []
        self._numbered: set[Any] = set()
        for arg in function.args:
            if arg.type.base in blocks:
                fields = blocks[arg.type.base].fields
                env.names[arg.name] = {f.name: self._param(f.name, f.type, f) for f in fields}
            elif arg.type.array or arg.inout:
                env.names[arg.name] = Unset(("uint", 8), True, None)
            else:
                env.names[arg.name] = self._param(arg.name, arg.type, None)
        return function, env

    def _param(self, name: str, type_: ast.TypeName, default: ast.Declare | None) -> Num:
        elem = self.elem(type_, Env())
        if name not in self.params:
            assert default is not None and default.value is not None
            return Num(convert(self.value(default.value, Env()), elem), elem)
        return Num(convert(self.params[name], elem), elem)

    def elem(self, type_: ast.TypeName, env: Env) -> Elem:
        if type_.base == "uint":
            return "uint", 32 if type_.width is None else int(self.value(type_.width, env))
        if type_.base.startswith("uint"):
            return "uint", int(type_.base[4:])
        return type_.base, {"float": 32, "int": 64}.get(type_.base, 16)

    # Statements.

    def run(self, body: Sequence[ast.Statement], env: Env) -> Any:
        """Carries out statements; gives what a lambda returned, if it did.

        What a condition decided over that is not the host's is no host number either.
        """
        varied = False
        for s in body:
            if isinstance(s, ast.Return):
                assert s.value is not None
                value = self.value(s.value, env)
                return device(value) if varied else value
            if isinstance(s, ast.If):
                cond = truth(self.value(s.cond, env))
                result = self.run(s.yes if cond else s.no, Env(outer=env))
                if not is_host(cond):
                    varied = varied or returns(s)
                    for name in assigned(s):
                        if env.defines(name):
                            number = env.home(name).names[name]
                            if isinstance(number, Num):
                                number.value = device(number.value)
                if result is not None:
                    return device(result) if varied else result
            elif isinstance(s, ast.Declare):
                self._declare(s, env)
            elif isinstance(s, ast.Assign):
                self._assign(s, env)
            elif isinstance(s, ast.Per):
                self._per(s, env)
            elif isinstance(s, ast.Repeat):
                around = self.turns
                for turn in range(int(self.value(s.count, env))):
                    self.turns = (*around, turn)
                    self.run(s.body, Env({s.name: Num(turn, INT)}, env))
                self.turns = around
            else:
                assert isinstance(s, ast.Do) and isinstance(s.value, ast.Call)
                self._extract(s.value, env)
        return None

    def _declare(self, s: ast.Declare, env: Env) -> None:
        if isinstance(s.value, ast.Lambda):
            env.names[s.name] = Func(s.value, env)
            return
        elem = self.elem(s.type, env)
        if s.value is None:
            size = None if s.size is None else self.value(s.size, env)
            env.names[s.name] = Unset(elem, s.type.array or s.size is not None, size)
        else:
            env.names[s.name] = self.typed(self.value(s.value, env), elem)

    def _assign(self, s: ast.Assign, env: Env) -> None:
        home, scope = env.home(s.name), env.scope()
        if isinstance(s.value, ast.Call) and s.value.name == "concat":
            self.parts = [self._part(a, env) for a in s.value.args]
            return
        value = self.typed(self.value(s.value, env), home.names[s.name].elem)
        if scope is not None and not home.within(scope):
            scope.assigned[s.name] = value
        else:
            home.names[s.name] = value

    def typed(self, value: Any, elem: Elem) -> Num | Arr:
        """A number or an array, as another type."""
        if not isinstance(value, Arr):
            return Num(convert(value, elem), elem)
        if value.elem == elem:
            return value
        return like(value, [convert(v, elem) for v in value.values], elem)

    def _per(self, s: ast.Per, env: Env) -> None:
        size, n, cut = int(self.value(s.size, env)), self.n, None
        if s.over is not None:
            over = self.value(s.over, env)
            cut = None if is_host(over.size) else over
            n = over.size if cut is None else over.capacity
        of, num_blocks = tag_of(n), max(-(-n // size), 0)
        made: dict[str, list[Num | Arr]] = {}
        for number in range(max(num_blocks, 1)):  # an empty one tells the types, if there is none
            start = number * size
            block = Block(size, of, number, start, max(min(size, n - start), 0), cut)
            scope = Env(outer=env, block=block)
            self.run(s.body, scope)
            for name, value in (*scope.names.items(), *scope.assigned.items()):
                if isinstance(value, Num | Arr):
                    made.setdefault(name, []).append(value)
        for name, values in made.items():
            first, values = values[0], values[:num_blocks]
            if isinstance(first, Num):
                whole = vector([v.value for v in values], first.elem)
                env.names[name] = Arr(whole, first.elem, sized(num_blocks, ("blocks", size, of)))
            else:
                room = first.size if first.capacity is None else first.capacity
                length: Any = n
                if first.is_cut:
                    assert cut is not None
                    whole = np.concatenate([first.values[:0], *(v.values for v in values)])
                    home = env.home(name) if env.defines(name) else env
                    home.names[name] = replace(cut, values=whole, elem=first.elem)
                    continue
                if is_host(room):  # a row: places that are not used are zero
                    values = [replace(v, values=padded(v.values, int(room))) for v in values]
                    length = sized(num_blocks * int(room), ("rows", size, of, int(room)))
                whole = np.concatenate([first.values[:0], *(v.values for v in values)])
                home = env.home(name) if env.defines(name) else env
                home.names[name] = Arr(whole, first.elem, length)

    def _part(self, node: ast.Expr, env: Env) -> Part:
        value = self.value(node, env)
        if isinstance(value, Arr):
            room = value.size if value.capacity is None else value.capacity
            return Part(value.elem, padded(value.values, int(room)), room)
        elem = INT if not is_float(value) else FLOAT
        if is_bool(value):
            elem = ("uint", 1)
        if isinstance(node, ast.Name):
            elem = env.home(node.id).names[node.id].elem
        return Part(elem, to_int(value) if is_bool(value) else value)

    def _extract(self, call: ast.Call, env: Env) -> None:
        for target, part in zip(call.args[1:], self.payload, strict=True):
            assert isinstance(target, ast.Name)
            home = env.home(target.id)
            if part.size is not None:
                home.names[target.id] = Arr(part.value, part.elem, part.size)
                continue
            kind = np.int64 if part.elem[0] in ("int", "uint") else np.float32
            sent = kind(part.value)
            old = home.names[target.id]
            if isinstance(old, Num):  # a parameter: what was sent must equal it
                if old.value != sent:
                    raise Refused(f"the payload was made with another {target.id!r}")
            else:
                home.names[target.id] = Num(sent, part.elem)

    # Expressions.

    def value(self, node: ast.Expr, env: Env) -> Any:
        """A number, or an `Arr`."""
        if isinstance(node, ast.Number):
            return node.value
        if isinstance(node, ast.Name):
            return self._name(node.id, env)
        if isinstance(node, ast.Member):
            return self._member(node, env)
        if isinstance(node, ast.Index):
            array, index = self.value(node.value, env), self.value(node.index, env)
            return at(array, index)
        if isinstance(node, ast.Ternary):
            cond = truth(self.value(node.cond, env))
            yes, no = common(self.value(node.yes, env), self.value(node.no, env))
            return (yes if cond else no) if is_host(cond) else device(yes if cond else no)
        if isinstance(node, ast.Unary):
            return self._unary(node.op, self.value(node.value, env))
        if isinstance(node, ast.Binary):
            return self._binary(node.op, self.value(node.left, env), self.value(node.right, env))
        assert isinstance(node, ast.Call), node
        return self._call(node, env)

    def _name(self, name: str, env: Env) -> Any:
        home, scope = env.home(name), env.scope()
        found = home.names[name]
        if scope is not None and not home.within(scope):
            found = scope.assigned.get(name, found)
            block = scope.block
            assert block is not None
            tag = tag_of(found.size) if isinstance(found, Arr) else None
            if block.cut is not None and getattr(found, "origin", None) is block.cut.origin:
                part = found.values[block.start : block.start + block.length]
                used, start = np.int64(len(part)), block.start
                return Arr(part, found.elem, used, None, block.size, start, is_cut=True)
            if tag is not None and tag == block.of:
                part = found.values[block.start : block.start + block.length]
                return Arr(part, found.elem, np.int64(block.length), block_start=block.start)
            if tag == ("blocks", block.size, block.of):
                return at(found, block.number)
            if isinstance(tag, tuple) and tag[:3] == ("rows", block.size, block.of):
                start = block.number * tag[3]
                part = padded(found.values[start : start + tag[3]], tag[3])
                return Arr(part, found.elem, tag[3], block_start=start)
        return found.value if isinstance(found, Num) else found

    def _member(self, node: ast.Member, env: Env) -> Any:
        value = self.value(node.value, env)
        if isinstance(value, dict):
            return value[node.field].value
        scope = env.scope()
        if isinstance(value, Unset) and scope is not None and scope.block is not None:
            if tag_of(value.size) == scope.block.of:
                return np.int64(scope.block.length)
        return value.size

    @staticmethod
    def _unary(op: str, value: Any) -> Any:
        if op == "!":
            return not value if is_host(value) else np.bool_(not value)
        value = to_int(value) if is_bool(value) else value
        return {"-": lambda v: -v, "+": lambda v: v, "~": lambda v: ~v}[op](value)

    @staticmethod
    def _binary(op: str, a: Any, b: Any) -> Any:
        if op in ("&&", "||"):
            a, b = truth(a), truth(b)
            result = bool(a) and bool(b) if op == "&&" else bool(a) or bool(b)
            return result if is_host(a, b) else np.bool_(result)
        if op in WHOLE:
            return WHOLE[op](to_int(a), to_int(b))
        tag = getattr(a, "tag", None)
        if op == "*" and isinstance(tag, tuple) and tag[0] == "blocks" and is_host(b):
            return sized(a * b, ("rows", *tag[1:], int(b)))
        return BINARY[op](*common(a, b))

    # Calls.

    def _call(self, node: ast.Call, env: Env) -> Any:
        if env.defines(node.name):
            func = env.home(node.name).names[node.name]
            return self.apply(func, [self.value(a, env) for a in node.args], self.position)
        if node.name in ("min", "max"):
            result, *rest = (self.value(a, env) for a in node.args)
            for value in rest:
                result = extreme(result, value, min if node.name == "min" else max)
            return result
        if node.name in ELEMENTARY:
            return elementary(node.name, self.value(node.args[0], env))
        return getattr(self, f"_{node.name}")(node, env)

    def apply(self, func: Func, args: Sequence[Any], position: Any) -> Any:
        """Calls a lambda for the element at `position`."""
        self._number_sites(func)
        env = Env(outer=func.env)
        for arg, value in zip(func.code.args, args, strict=True):
            elem = self.elem(arg.type, func.env)
            env.names[arg.name] = Num(convert(value, elem), elem)
        saved, self.position = self.position, position
        result = self.run(func.code.body, env)
        self.position = saved
        return convert(result, self.elem(func.code.returns, func.env))

    def function(self, node: ast.Expr, env: Env) -> tuple[Callable[..., Any], Elem | None]:
        """What a name or a lambda means as an argument of `map` and its kin."""
        if isinstance(node, ast.Name) and not env.defines(node.id):
            name = node.id
            if name in ("min", "max"):
                pick = min if name == "min" else max
                return lambda args, position: extreme(*args, pick), None
            return lambda args, position: elementary(name, args[0]), None
        func = Func(node, env) if isinstance(node, ast.Lambda) else self.value(node, env)
        self._number_sites(func)  # also where there is no element to call it for
        elem = self.elem(func.code.returns, func.env)
        return lambda args, position: self.apply(func, args, position), elem

    def _number_sites(self, func: Func) -> None:
        """Each `random` of a lambda is numbered in reading order, whatever branches are taken."""
        if (id(func.code), self.turns) not in self._numbered:
            self._numbered.add((id(func.code), self.turns))
            self._visit(func.code.body, func.env)

    def _visit(self, node: Any, env: Env) -> None:
        if isinstance(node, tuple):
            for s in node:
                self._visit(s, env)
        elif isinstance(node, ast.Call):
            self._visit(node.args, env)
            if node.name == "random":
                self.site(node)
            elif env.defines(node.name):
                self._number_sites(env.home(node.name).names[node.name])
        elif isinstance(node, ast.Node):
            for name in node.__dataclass_fields__:
                if name not in ("pos", "type"):
                    self._visit(getattr(node, name), env)

    def site(self, node: ast.Call) -> int:
        return self.sites.setdefault((node.pos, self.turns), len(self.sites))

    def _drawn_by(self, node: ast.Call, env: Env) -> tuple[int, tuple[int, int, int]]:
        """The site and the seed, stream and step of a draw; a key stands for all of them."""
        if len(node.args) < 3:
            return self.site(node), self.rng
        return 0, (int(self.value(node.args[2], env)), 0, 0)

    # Operators: one method each, by name.

    def _random(self, node: ast.Call, env: Env) -> Any:
        a, b = (self.value(x, env) for x in node.args[:2])
        assert node.of is not None
        bits = bits32(int(self.position or 0), *self._drawn_by(node, env))
        if node.of.base == "float":
            a, b = to_float(a), to_float(b)
            unit = np.float32(bits >> 8) * np.float32(2.0**-24)
            return a + unit * (b - a) if (a, b) != (0.0, 1.0) else unit
        a, b = to_int(a), to_int(b)
        width = min(max(int(b) - int(a), 0), 2**31 - 1)
        return np.int64(int(a) + (bits * width >> 32))

    def _range(self, node: ast.Call, env: Env) -> Arr:
        size = self.value(node.args[0], env)
        scope = env.scope()
        start = 0
        if scope and scope.block:
            start = scope.block.number * int(size) if is_host(size) else scope.block.start
        if scope and scope.block and scope.block.cut is not None and not is_host(size):
            room = scope.block.size
            return Arr(np.arange(int(size)), INT, size, None, room, start, is_cut=True)
        return Arr(np.arange(int(size)), INT, size, block_start=start)

    def _blocks(self, node: ast.Call, env: Env) -> Size:
        n, size = (self.value(a, env) for a in node.args)
        return sized(-(-n // size), ("blocks", int(size), tag_of(n)))

    def _map(self, node: ast.Call, env: Env) -> Arr:
        arrays = [self.value(a, env) for a in node.args[:-1]]
        f, elem = self.function(node.args[-1], env)
        first = arrays[0]
        elem = elem or first.elem
        places = first.positions()
        rows = zip(*(a.values for a in arrays), strict=True)
        values = [convert(f(row, i), elem) for row, i in zip(rows, places, strict=True)]
        return like(first, values, elem)

    def _reduce(self, node: ast.Call, env: Env) -> Any:
        array, init, f, elem = self._folded(node, env)
        code = node.args[2]
        if isinstance(code, ast.Name) and env.defines(code.id):
            code = env.home(code.id).names[code.id].code
        if elem == FLOAT and is_sum(code):  # in double precision, rounded once
            return np.float32(float(init) + math.fsum(array.values.tolist()))
        return device(self._running(array, init, f, elem)[-1])

    def _scan(self, node: ast.Call, env: Env) -> Arr:
        array, init, f, elem = self._folded(node, env)
        return like(array, self._running(array, init, f, elem)[1:], elem)

    def _folded(self, node: ast.Call, env: Env) -> tuple[Arr, Any, Callable[..., Any], Elem]:
        array = self.value(node.args[0], env)
        f, elem = self.function(node.args[2], env)
        elem = elem or array.elem
        return array, convert(self.value(node.args[1], env), elem), f, elem

    def _running(self, array: Arr, init: Any, f: Callable[..., Any], elem: Elem) -> list[Any]:
        results = [init]
        for v in array.values:
            results.append(convert(f((results[-1], convert(v, elem)), self.position), elem))
        return results

    def _filter(self, node: ast.Call, env: Env) -> Arr:
        array = self.value(node.args[0], env)
        keep, _ = self.function(node.args[1], env)
        room = array.size if len(node.args) == 2 else self.value(node.args[2], env)
        scope, places = env.scope(), array.positions()
        block = scope.block if scope is not None else None
        if block is not None:
            own = block.size if not is_host(array.size) and array.capacity is None else array.size
            own = array.capacity if array.capacity is not None else own
            room = int(own) if len(node.args) == 2 else min(int(own), int(room))
        passed = [i for i, v in enumerate(array.values) if truth(keep((v,), places[i]))]
        index = np.array(passed[: int(room)], np.int64)
        found = Arr(array.values[index], array.elem, np.int64(len(index)), index, room)
        return found if block is None else self._in_row(found, block)

    @staticmethod
    def _in_row(found: Arr, block: Block) -> Arr:
        start = block.number * int(found.capacity)
        return replace(found, origin=None, block_start=start, is_cut=False)

    def _largest(self, node: ast.Call, env: Env) -> Arr:
        array, count = self.value(node.args[0], env), int(self.value(node.args[1], env))
        scope = env.scope()
        assert scope is not None and scope.block is not None
        order = sorted(range(len(array.values)), key=lambda i: (-array.values[i].item(), i))[:count]
        room = array.capacity if array.capacity is not None else array.size
        room = room if is_host(room) else scope.block.size
        size, room = np.int64(len(order)), min(count, int(room))
        return self._in_row(
            Arr(np.array(sorted(order), np.int64), INT, size, None, room), scope.block
        )

    def _store(self, node: ast.Call, env: Env) -> Any:
        return self.value(node.args[0], env)

    def _sort(self, node: ast.Call, env: Env) -> Arr:
        array = self.value(node.args[0], env)
        keys = list(array.values)
        if len(node.args) == 2:
            key, _ = self.function(node.args[1], env)
            keys = [key((v,), i) for v, i in zip(array.values, array.positions(), strict=True)]
        order = sorted(range(len(keys)), key=lambda i: keys[i])
        return like(array, array.values[order], array.elem)

    def _sample(self, node: ast.Call, env: Env) -> Arr:
        array, m = self.value(node.args[0], env), self.value(node.args[1], env)
        (site, rng), n = self._drawn_by(node, env), int(array.size)
        width, rest = divmod(n, int(m)) if m else (0, 0)
        picked = []
        for j in range(int(m)):  # the first `rest` stretches have one element more
            start, size = j * width + min(j, rest), width + (j < rest)
            picked.append(at(array, start + (bits32(j, site, rng) * size >> 32)))
        return Arr(vector(picked, array.elem), array.elem, m)

    def _gather(self, node: ast.Call, env: Env) -> Arr:
        array, index = (self.value(a, env) for a in node.args)
        return like(index, [at(array, i) for i in index.values], array.elem)

    def _scatter(self, node: ast.Call, env: Env) -> Arr:
        index, values, size = (self.value(a, env) for a in node.args)
        result = np.zeros(int(size), values.values.dtype)
        scope = env.scope()
        if scope is not None and scope.block is not None and scope.block.length == 0:
            return Arr(result, values.elem, size)  # there is no such block, see `_per`
        for i, v in zip(index.values, values.values, strict=True):
            if not 0 <= i < size:
                raise Refused("an index in the payload is out of range")
            result[i] = convert(result[i] + v, values.elem)
        start = scope.block.start if scope and scope.block and not is_host(size) else 0
        return Arr(result, values.elem, size, block_start=start)

    def _first(self, node: ast.Call, env: Env) -> Arr:
        array, count = (self.value(a, env) for a in node.args)
        scope = env.scope()
        if scope is not None and scope.block is not None:
            room = array.size if array.capacity is None else array.capacity
            room = room if is_host(room) else scope.block.size
            room = min(room, max(count, 1)) if is_host(count) else room
            kept = array.values[: max(int(count), 0)]
            return self._in_row(
                Arr(kept, array.elem, np.int64(len(kept)), None, int(room)), scope.block
            )
        if not 0 <= count <= len(array.values):
            raise Refused("a count is larger than the room it was given")
        if is_host(count):
            return Arr(array.values[: int(count)], array.elem, count)
        room = array.size if array.capacity is None else array.capacity
        places = np.arange(int(count))
        return Arr(array.values[: int(count)], array.elem, count, places, room)


def is_gradient(arg: ast.Arg) -> bool:
    return arg.type.array and arg.type.base == "float" and not arg.inout


ELEMENTARY = ("abs", "floor", "sqrt", "exp2", "log2", "sign", "bits", "from_bits")


def assigned(s: ast.If) -> set[str]:
    """Names that some branch gives a value."""
    inner = (*s.yes, *s.no)
    names = {i.name for i in inner if isinstance(i, ast.Assign)}
    return names.union(*(assigned(i) for i in inner if isinstance(i, ast.If)))


def returns(s: ast.If) -> bool:
    """Whether some branch returns."""
    inner = (*s.yes, *s.no)
    return any(isinstance(i, ast.Return) or (isinstance(i, ast.If) and returns(i)) for i in inner)


def device(value: Any) -> Any:
    """A number that depends on the gradient."""
    if is_bool(value):
        return np.bool_(value)
    return np.float32(value) if is_float(value) else np.int64(value)


def padded(values: np.ndarray, room: int) -> np.ndarray:
    whole = np.zeros(room, values.dtype)
    whole[: len(values)] = values
    return whole


def vector(values: Sequence[Any], elem: Elem) -> np.ndarray:
    return np.array(values, np.int64 if elem[0] in ("int", "uint") else np.float32)


def like(other: Arr, values: Sequence[Any], elem: Elem) -> Arr:
    """New elements in the place of another array's."""
    return replace(other, values=vector(values, elem), elem=elem)


def at(array: Arr, index: Any) -> Any:
    """An element, the index clamped into the array; zero where that is empty."""
    if len(array.values) == 0:
        return array.values.dtype.type(0)
    return array.values[min(max(int(index), 0), len(array.values) - 1)]


def is_sum(code: Any) -> bool:
    """Whether a lambda is `[&](float a, float b) -> float { return a + b; }`."""
    if not (isinstance(code, ast.Lambda) and len(code.body) == 1):
        return False
    (last,) = code.body
    e = last.value if isinstance(last, ast.Return) else None
    if not (isinstance(e, ast.Binary) and e.op == "+"):
        return False
    names = [x.id for x in (e.left, e.right) if isinstance(x, ast.Name)]
    return sorted(names) == sorted(a.name for a in code.args)
