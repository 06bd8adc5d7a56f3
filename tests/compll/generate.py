"""Random CompLL programs, typed as they are written so that nearly all of them are valid.

A generator keeps, for every value, a bound on its size (no infinities, so no NaN: what `max` gives
of a NaN is not promised) and whether all backends must give the same bits: everything does but a
sum of floats, which each backend takes in its own order. An inexact number is only ever sent or
multiplied with, never compared or rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

GRADIENT_MAG = 44
"""The gradient and the residual added to it stay below 2**44."""
MOST_FLOAT, MOST_INT = 100, 50
BLOCKS = (8, 16, 24, 64)
UINTS = ("uint1", "uint2", "uint4", "uint8", "uint16", "uint32", "uint<bits>")
ADD = "[&](float a, float b) -> float { return a + b; }"


@dataclass(frozen=True)
class Val:
    """A number as text."""

    text: str
    type: str
    """`float`, `int` or `bool`."""
    mag: int = 0
    """Its magnitude is at most 2**mag."""
    exact: bool = True
    host: bool = False


@dataclass(frozen=True)
class Arr:
    """An array by name."""

    name: str
    elem: str
    mag: int
    length: Any
    """`n`, a text (fixed), ("kept", filter), ("blocks", size) or ("parts", size, length)."""
    exact: bool = True
    indices: bool = False
    """Whether its elements are all different and below n."""

    @property
    def type(self) -> str:
        return "float" if "float" in self.elem else "int"

    def item(self, text: str) -> Val:
        return Val(text, self.type, self.mag, self.exact)


@dataclass
class Scope:
    """What an expression may use."""

    leaves: list[Val] = field(default_factory=list)
    indexed: list[Arr] = field(default_factory=list)
    """Arrays that can be read at `index`."""
    index: str = "i"
    size: str = "g.size"
    random: bool = True
    functions: list[str] = field(default_factory=list)
    """Lambdas by name, from a float of at most 2**40 to one of at most 2**60."""

    def plus(self, *leaves: Val) -> Scope:
        return replace(self, leaves=[*self.leaves, *leaves])


@dataclass(frozen=True)
class Program:
    """A program's text, its parameters, and how to compare what it makes."""

    text: str
    params: dict[str, Any]
    num_states: int
    exact: bool


def mag_of(elem: str, bits: int) -> int:
    if elem == "uint<bits>":
        return bits
    return int(elem[4:]) if elem.startswith("uint") else {"float16": 15}.get(elem, MOST_FLOAT)


class Writer:
    """Draws pieces of program text."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self._draw = draw
        self._names = 0
        self.lines: list[str] = []
        self.bits = 2
        self.exact = True

    # Choices.

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self._draw(st.integers(0, len(choices) - 1))]

    def chance(self, of_ten: int) -> bool:
        return self._draw(st.integers(0, 9)) >= 10 - of_ten

    def fresh(self, stem: str) -> str:
        self._names += 1
        return f"{stem}{self._names}"

    # Expressions.

    def expr(self, type_: str, scope: Scope, depth: int = 2) -> Val:
        """A number of this type, not too large."""
        value = {"float": self._float, "int": self._int, "bool": self._bool}[type_](scope, depth)
        most = {"float": MOST_FLOAT, "int": MOST_INT, "bool": 1}[type_]
        return value if value.mag <= most else self.clamped(value, 20)

    def clamped(self, value: Val, mag: int) -> Val:
        if value.mag <= mag:
            return value
        end = f"{2**mag}.0" if value.type == "float" else f"{2**mag}"
        return replace(value, text=f"min(max({value.text}, -{end}), {end})", mag=mag)

    def leaf(self, type_: str, scope: Scope) -> Val:
        if scope.indexed and self.chance(4):
            arrays = [a for a in scope.indexed if a.type == type_ and a.exact]
            if arrays:
                a = self.pick(arrays)
                i, n = scope.index, scope.size
                at = self.pick([i, i, f"{n} - 1 - {i}", "0", f"{i} + 1", f"{i} - 9", f"3 * {i}"])
                return a.item(f"{a.name}[{at}]")
        known = [v for v in scope.leaves if v.type == type_ and v.exact]
        if known and self.chance(8):
            return self.pick(known if self.chance(5) else known[-3:])
        if type_ == "float":
            text = self.pick(["0.0", "1.0", "0.5", "1.5", "0.1", "3.25", ".5", "1e-3", "2.0f"])
            return Val(text, "float", 2, host=True)
        return Val(self.pick(["0", "1", "2", "3", "7", "100"]), "int", 7, host=True)

    def _float(self, scope: Scope, depth: int) -> Val:
        kind = self.pick(_FLOAT_KINDS) if depth else "leaf"
        if kind == "leaf" or (kind == "random" and not scope.random):
            return self.leaf("float", scope)
        if kind == "random":
            a, b = self.pick([("0", "1"), ("0.0", "1.0"), ("-2.0", "3.5"), ("1", "4")])
            return Val(f"random<float>({a}, {b})", "float", 2)
        if kind == "ternary":
            return self._ternary("float", scope, depth)
        a = self.expr("float", scope, depth - 1)
        if kind == "call" and scope.functions:
            a = self.clamped(a, 40)
            return Val(f"{self.pick(scope.functions)}({a.text})", "float", 60, host=False)
        if kind == "call":
            return a
        if kind in _FLOAT_UNARY:
            return self._float_unary(kind, a)
        other = "int" if self.chance(2) else "float"
        return self._float_binary(kind, a, self.expr(other, scope, depth - 1))

    def _float_unary(self, kind: str, a: Val) -> Val:
        if kind == "exp2":
            a = self.clamped(a, 4)
            return replace(a, text=f"exp2({a.text})", mag=16)
        if kind == "log2":
            return replace(a, text=f"log2(abs({a.text}) + 1.0)", mag=7)
        if kind == "sqrt":
            return replace(a, text=f"sqrt(abs({a.text}))")
        if kind == "sign":
            return replace(a, text=f"sign({a.text})", mag=0)
        text = {"neg": f"(-{a.text})", "abs": f"abs({a.text})", "floor": f"floor({a.text})"}[kind]
        return replace(a, text=text)

    def _float_binary(self, kind: str, a: Val, b: Val) -> Val:
        host, exact = a.host and b.host, a.exact and b.exact
        if kind == "mul":
            if a.mag + b.mag > MOST_FLOAT:
                a, b = self.clamped(a, 30), self.clamped(b, 30)
            return Val(f"({a.text} * {b.text})", "float", a.mag + b.mag, exact, host)
        if kind == "div":
            return Val(f"({a.text} / (abs({b.text}) + 1.0))", "float", a.mag, exact, host)
        mag = max(a.mag, b.mag) + (kind in ("+", "-"))
        text = f"{kind}({a.text}, {b.text})" if kind in ("min", "max") else None
        text = text or f"({a.text} {kind} {b.text})"
        return Val(text, "float", mag, exact, host)

    def _ternary(self, type_: str, scope: Scope, depth: int) -> Val:
        cond = self.expr("bool", scope, depth - 1)
        a, b = self.expr(type_, scope, depth - 1), self.expr(type_, scope, depth - 1)
        host = cond.host and a.host and b.host
        text = f"({cond.text} ? {a.text} : {b.text})"
        return Val(text, type_, max(a.mag, b.mag), a.exact and b.exact, host)

    def _int(self, scope: Scope, depth: int) -> Val:
        kind = self.pick(_INT_KINDS) if depth else "leaf"
        if kind == "leaf" or (kind == "random" and not scope.random):
            return self.leaf("int", scope)
        if kind == "random":
            return Val(f"random<int>({self.pick(['0', '-5', '3'])}, 100)", "int", 7)
        if kind == "ternary":
            return self._ternary("int", scope, depth)
        if kind == "count":
            a, b = self.expr("bool", scope, depth - 1), self.expr("bool", scope, depth - 1)
            return Val(f"(({a.text}) + ({b.text}))", "int", 1, host=a.host and b.host)
        a, b = self.expr("int", scope, depth - 1), self.expr("int", scope, depth - 1)
        host = a.host and b.host
        if kind in ("neg", "inv", "abs", "sign"):
            text = {"neg": f"(-{a.text})", "inv": f"(~{a.text})"}.get(kind, f"{kind}({a.text})")
            return replace(a, text=text, mag=a.mag + 1)
        if kind in ("<<", ">>"):
            return replace(a, text=f"({a.text} {kind} {self.pick([0, 1, 3, 6])})", mag=a.mag + 6)
        if kind == "*" and a.mag + b.mag > MOST_INT:
            a, b = self.clamped(a, 20), self.clamped(b, 20)
        if kind in ("/", "%") and host:
            b = Val(self.pick(["1", "3", "7"]), "int", 3, host=True)
        mag = a.mag + b.mag if kind == "*" else max(a.mag, b.mag) + 1
        text = f"{kind}({a.text}, {b.text})" if kind in ("min", "max") else None
        return Val(text or f"({a.text} {kind} {b.text})", "int", mag, host=host)

    def _bool(self, scope: Scope, depth: int) -> Val:
        kind = self.pick(["<", "<=", ">", ">=", "==", "!=", "<", ">", "&&", "||", "!", "number"])
        if kind in ("&&", "||") and depth:
            a, b = self.expr("bool", scope, depth - 1), self.expr("bool", scope, depth - 1)
            return Val(f"({a.text} {kind} {b.text})", "bool", 1, host=a.host and b.host)
        if kind == "!" and depth:
            a = self.expr(self.pick(["bool", "int"]), scope, depth - 1)
            return Val(f"(!{a.text})", "bool", 1, host=a.host)
        below = max(depth - 1, 0)
        types = self.pick([("float", "float"), ("int", "int"), ("float", "int")])
        a, b = (self.expr(t, scope, below) for t in types)
        op = kind if kind in ("<", "<=", ">", ">=", "==", "!=") else "<"
        return Val(f"({a.text} {op} {b.text})", "bool", 1, host=a.host and b.host)

    # Lambdas.

    def function(self, args: Sequence[Val], returns: str, scope: Scope, depth: int = 2) -> str:
        """A lambda of these arguments; sometimes with declarations and an early return."""
        inner, body = scope.plus(*args), []
        if self.chance(3):
            type_ = self.pick(["float", "int"])
            e = self.expr(type_, inner, depth)
            body.append(f"{type_} t = {e.text};")
            inner = inner.plus(replace(e, text="t"))
            if self.chance(4):
                cond = self.expr("bool", inner, 1)
                new = self.clamped(self.expr(type_, inner, 1), e.mag)
                body.append(f"if ({cond.text}) {{ t = {new.text}; }}")
        if self.chance(3):
            cond, e = self.expr("bool", inner, 1), self.result(returns, inner, depth - 1)
            other = self.result(returns, inner, depth - 1)
            if self.chance(5):
                body.append(
                    f"if ({cond.text}) {{ return {e.text}; }} else {{ return {other.text}; }}"
                )
                return self._lambda(args, returns, body)
            body.append(f"if ({cond.text}) {{ return {e.text}; }}")
        body.append(f"return {self.result(returns, inner, depth).text};")
        return self._lambda(args, returns, body)

    @staticmethod
    def _lambda(args: Sequence[Val], returns: str, body: Sequence[str]) -> str:
        shown = ", ".join(f"{a.type} {a.text}" for a in args)
        return f"[&]({shown}) -> {returns} {{ {' '.join(body)} }}"

    def result(self, returns: str, scope: Scope, depth: int) -> Val:
        """What a lambda of this type returns; a float becomes an int or a code on its way out."""
        if returns in ("float", "float16", "bfloat16"):
            e = self.expr("float", scope, depth)
            return self.clamped(e, 10) if returns == "float16" else self.clamped(e, 60)
        type_ = self.pick(["float", "int", "bool"])
        return self.clamped(self.expr(type_, scope, depth), 40)

    def mapped(self, arrays: Sequence[Arr], returns: str, scope: Scope) -> str:
        """`map(...)` over some arrays of one length, or over the range of the first's indices."""
        names = [f"{c}" for c in "xyz"[: len(arrays)]]
        args = [a.item(name) for a, name in zip(arrays, names, strict=True)]
        f = self.function(args, returns, scope)
        for a, arg in zip(arrays, args, strict=True):
            if self.chance(3):  # the element's own type in place of float or int
                f = f.replace(f"{arg.type} {arg.text}", f"{a.elem} {arg.text}", 1)
        return f"map({', '.join(a.name for a in arrays)}, {f})"

    def ranged(self, arrays: Sequence[Arr], returns: str, scope: Scope) -> str:
        """`map(range(size), ...)` that reads arrays by index."""
        inner = replace(scope, indexed=list(arrays))
        f = self.function([Val("i", "int", 13)], returns, inner)
        return f"map(range({scope.size}), {f})"


_FLOAT_UNARY = ("neg", "abs", "floor", "sqrt", "exp2", "log2", "sign")
_FLOAT_KINDS = (
    *("leaf", "leaf", "+", "-", "mul", "mul", "div", "min", "max", "ternary", "random"),
    *("call", *_FLOAT_UNARY),
)
_INT_KINDS = (
    *("leaf", "leaf", "+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>", "min", "max", "ternary"),
    *("neg", "inv", "abs", "sign", "count", "random"),
)


class Encoder(Writer):
    """Writes an encode function statement by statement; knows what there is to send."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        super().__init__(draw)
        self.bits = self.pick([1, 2, 4, 8])
        self.scalars: list[Val] = []
        self.elems: dict[str, str] = {}
        """Declared types of scalars."""
        self.arrays: list[Arr] = [Arr("g", "float", GRADIENT_MAG, "n")]
        self.num_states = self.pick([0, 0, 0, 1, 2])
        self.states = [f"u{k}" for k in range(self.num_states)]
        self.arrays += [Arr(u, "float", GRADIENT_MAG, "n") for u in self.states]
        self.counts: dict[int, str] = {}
        self.filters = 0
        self.functions: list[str] = []

    def write(self, most: int) -> None:
        kinds = [getattr(self, f"do_{name}") for name in _STATEMENTS]
        for _ in range(self.pick(range(1, most + 1))):
            self.pick(kinds)()
        for u in self.states:
            if self.chance(7):
                pair = [Val("x", "float", GRADIENT_MAG), Val("y", "float", GRADIENT_MAG)]
                new = f"map({u}, g, {self.function(pair, 'float', self.scope(random=False))})"
                if self.chance(3):  # from any index of any array
                    new = self.ranged(self.dense(), "float", self.scope(random=False))
                small = f"map({new}, [&](float x) -> float {{ {_SMALL} }})"
                self.lines.append(f"{u} = {small};")
                self.arrays = [a for a in self.arrays if a.name != u]
                self.arrays.append(Arr(u, "float", 10, "n"))

    def scope(self, **changes: Any) -> Scope:
        params = [Val("tau", "float", 3, host=True), Val("bits", "int", 4, host=True)]
        sizes = [Val("g.size", "int", 13, host=True)]
        given = replace(Scope([*params, *sizes, *self.scalars]), **changes)
        return replace(given, functions=self.functions if given.random else [])

    def dense(self, length: Any = "n") -> list[Arr]:
        return [a for a in self.arrays if a.length == length and a.exact]

    def declare(
        self, elem: str, value: str, mag: int, *, exact: bool = True, host: bool = False
    ) -> Val:
        name = self.fresh("s")
        self.lines.append(f"{elem} {name} = {value};")
        val = Val(name, "float" if "float" in elem else "int", mag, exact, host)
        self.scalars.append(val)
        self.elems[name] = elem
        return val

    def keep(self, elem: str, value: str, length: Any, mag: int, **more: Any) -> Arr:
        array = Arr(self.fresh("a"), elem, mag, length, **more)
        self.lines.append(f"{elem}* {array.name} = {value};")
        self.arrays.append(array)
        return array

    def elem(self) -> str:
        return self.pick([*UINTS, "float", "float", "int", "float16", "bfloat16"])

    # Statements.

    def do_scalar(self) -> None:
        elem = self.pick(["float", "int", "uint8", "uint4", "float16", "bfloat16"])
        e = self.clamped(self.expr(self.pick(["float", "int"]), self.scope(random=False)), 40)
        e = self.clamped(e, 10) if elem == "float16" else e
        mag = mag_of(elem, 0) if elem.startswith("uint") else max(e.mag, 1)
        self.declare(elem, e.text, mag, host=e.host)

    def do_branch(self) -> None:
        cond = self.expr("bool", self.scope(random=False))
        a, b = (self.clamped(self.expr("float", self.scope(random=False)), 20) for _ in "ab")
        host = cond.host and a.host and b.host
        name = self.declare("float", "0.5", 20, host=host).text
        other = f" else {{ {name} = {b.text}; }}" if self.chance(5) else ""
        self.lines.append(f"if ({cond.text}) {{ {name} = {a.text}; }}{other}")

    def do_lambda(self) -> None:
        name = self.fresh("f")
        f = self.function([Val("x", "float", 40)], "float", self.scope())
        self.lines.append(f"lambda_func {name} = {f}{self.pick(['', ';'])}")
        self.functions = [*self.functions, name]

    def do_again(self) -> None:
        """A name gets a new value; what was made from the old one stays as it is."""
        if self.scalars and self.chance(5):
            v = self.pick(self.scalars)
            if v.exact and "uint" not in self.elems[v.text]:
                e = self.clamped(self.expr(v.type, self.scope(random=False)), v.mag)
                self.lines.append(f"{v.text} = {e.text};")
                host = v.host and e.host
                self.scalars = [replace(w, host=host) if w is v else w for w in self.scalars]
            return
        a = self.pick(self.dense())
        if a.name != "g" and not a.indices and a.name not in self.states:
            f = f"[&]({a.type} x) -> {a.elem} {{ return x; }}"
            text = f"map({a.name}, {f})"
            if a.type == "float" and a.elem == "float":
                e = self.clamped(self.expr("float", self.scope().plus(a.item("x"))), a.mag)
                text = f"map({a.name}, [&](float x) -> float {{ return {e.text}; }})"
            self.lines.append(f"{a.name} = {text};")

    def do_chosen(self) -> None:
        """Arrays by parameter: only the branch that is taken is looked at."""
        a = self.keep("float", "g", "n", 60)
        one, two = (self.mapped([self.pick(self.dense())], "float", self.scope()) for _ in "ab")
        other = "{ " + f"{a.name} = {two};" + " }"
        self.lines.append(f"if (bits > 2) {{ {a.name} = {one}; }} else {other}")

    def do_map(self) -> None:
        self.map_over("n")

    def map_over(self, length: Any) -> Arr:
        elem, arrays, scope = self.elem(), self.dense(length), self.scope()
        chosen = [self.pick(arrays) for _ in range(self.pick([1, 1, 2, 3]))]
        if length == "n" and self.chance(3):
            text = self.ranged(self.dense(), elem, scope)
        elif self.chance(2) and chosen[0].elem == "float":
            name = self.pick(["abs", "floor", "sign"])
            return self.keep("float", f"map({chosen[0].name}, {name})", length, chosen[0].mag)
        else:
            text = self.mapped(chosen, elem, scope)
        mag = 40 if elem in ("int", "float", "bfloat16") else mag_of(elem, self.bits)
        return self.keep(elem, text, length, 60 if "float" in elem else mag)

    def do_reduce(self) -> None:
        self.reduce_over(self.pick([a for a in self.arrays if a.exact]), self.declare)

    def reduce_over(self, a: Arr, declare: Callable[..., Any]) -> Any:
        kind = self.pick(["count", "whole", "max", "min", "if", "or", "xor", "sign", "mean"])
        of = a.item("x")
        if kind == "count":
            f = self.function([of], "uint8", self.scope(random=False), 1)
            add = "[&](int a, int b) -> int { return a + b; }"
            return declare("int", f"reduce(map({a.name}, {f}), 0, {add})", 22)
        if kind == "whole":  # whole numbers whose sum a float holds exactly
            f = f"[&]({a.type} x) -> float {{ return floor(min(max(x, -100.0), 100.0)); }}"
            return declare("float", f"reduce(map({a.name}, {f}), 0.0, {ADD})", 20)
        if kind in ("max", "min"):
            start = {"float": "0.25", "int": "3"}[a.type]
            start = start if self.chance(5) else {"float": "-99999", "int": "0"}[a.type]
            type_ = a.type
            return declare(type_, f"reduce({a.name}, {start}, {kind})", max(a.mag, 17))
        if kind == "if":
            f = "[&](float a, float b) -> float { if (a > b) { return a; } else { return b; } }"
            return declare("float", f"reduce({a.name}, -99999, {f})", max(a.mag, 17))
        if kind in ("or", "xor"):
            f = self.function([of], "uint8", self.scope(random=False), 1)
            op = {"or": self.pick(["a | b", "a || b"]), "xor": "a ^ b"}[kind]
            fold = f"[&](int a, int b) -> int {{ return {op}; }}"
            return declare("int", f"reduce(map({a.name}, {f}), {self.pick([0, 0, 5])}, {fold})", 8)
        if kind == "sign":
            f = f"[&]({a.type} x) -> float {{ return x < 1 ? -1.0 : 1.0; }}"
            fold = "[&](float a, float b) -> float { return a * b; }"
            return declare("float", f"reduce(map({a.name}, {f}), 1.0, {fold})", 1)
        self.exact = False
        f = f"[&]({a.type} x) -> float {{ return abs(x); }}"
        return declare("float", f"reduce(map({a.name}, {f}), 0.0, {ADD})", 80, exact=False)

    def do_scaled(self) -> None:
        """An array that is multiplied by an inexact number, only to be sent."""
        inexact = [v for v in self.scalars if not v.exact]
        if inexact:
            a, s = self.pick(self.dense()), self.pick(inexact).text
            f = f"[&]({a.type} x) -> float {{ return x * ({s} / ({s} + 1.0)); }}"
            self.keep("float", f"map({a.name}, {f})", "n", 80, exact=False)

    def do_filter(self) -> None:
        self.filters += 1
        scope = self.scope(random=False)
        room = self.pick(["5", "64", "g.size / 4 + 1", "g.size", None])
        capacity = f", {room}" if room is not None else ""
        length = ("kept", self.filters)
        if self.chance(7):
            inner = replace(scope, indexed=self.dense())
            f = self.function([Val("i", "int", 13)], "uint1", inner)
            text = f"filter(range(g.size), {f}{capacity})"
            first = self.keep("uint32", text, length, 13, indices=True)
            for _ in range(self.pick([0, 1, 2])):
                a = self.pick(self.dense())
                self.keep(a.elem, f"gather({a.name}, {first.name})", length, a.mag)
        else:
            a = self.pick(self.dense())
            f = self.function([a.item("x")], "uint1", scope)
            first = self.keep(a.elem, f"filter({a.name}, {f}{capacity})", length, a.mag)
        self.counts[self.filters] = self.declare("uint32", f"{first.name}.size", 13).text
        for _ in range(self.pick([0, 0, 1])):
            self.map_over(length)

    def do_order(self) -> None:
        kind = self.pick(["pick", "sample", "table", "whole", "permutation"])
        arrays = [a for a in self.dense() if a.elem in ("float", "int", "uint8", "uint16")]
        a = self.pick(arrays)
        m = self.pick(["1", "7", "16", "min(g.size, 40)"])
        if kind == "pick":
            key = ""
            if self.chance(3):
                key = ", " + self.function([a.item("x")], "float", self.scope(random=False), 1)
            rank = self.pick(["0", "g.size / 2", "g.size - 1"])
            self.declare(a.elem, f"sort({a.name}{key})[{rank}]", a.mag)
        elif kind == "sample":
            rank = self.pick(["0", f"{m} / 2", f"{m} - 1"])
            self.declare(a.elem, f"sort(sample({a.name}, {m}))[{rank}]", a.mag)
        elif kind == "table":
            text = f"sample({a.name}, {m})"
            self.keep(a.elem, f"sort({text})" if self.chance(5) else text, m, a.mag)
        elif kind == "whole":
            self.keep(a.elem, f"sort({a.name})", "n", a.mag)
        else:
            inner = self.scope(random=False, indexed=self.dense())
            f = self.function([Val("i", "int", 13)], "float", inner, 1)
            self.keep("uint32", f"sort(range(g.size), {f})", "n", 13, indices=True)

    def do_scan(self) -> None:
        a = self.pick(self.dense())
        kind = self.pick(["count", "float", "max"])
        if kind == "count":
            f = self.function([a.item("x")], "uint4", self.scope(random=False), 1)
            add = "[&](int a, int b) -> int { return a + b; }"
            self.keep("int", f"scan(map({a.name}, {f}), 0, {add})", "n", 20)
        elif kind == "float":
            f = "[&](float a, float b) -> float { return a * 0.5 + b; }"
            self.keep("float", f"scan({a.name}, 1.0, {f})", "n", a.mag + 2)
        else:
            self.keep(a.elem, f"scan({a.name}, 0, max)", "n", max(a.mag, 1))

    def do_gather(self) -> None:
        a = self.pick(self.dense())
        if self.chance(5):
            index = self.pick([b for b in self.dense() if b.type == "int"] or [None])
            if index is not None:
                self.keep(a.elem, f"gather({a.name}, {index.name})", "n", a.mag)
        elif self.chance(5):
            m = self.pick(["1", "5"])
            self.keep(a.elem, f"first({a.name}, min(g.size, {m}))", f"min(g.size, {m})", a.mag)
        else:
            f = self.function([a.item("x")], "uint2", self.scope(random=False), 1)
            index = "map(range(g.size), [&](int i) -> int { return i / 3; })"
            self.keep("uint2", f"scatter({index}, map({a.name}, {f}), g.size)", "n", 2)

    def do_scatter(self) -> None:
        perm = [a for a in self.arrays if a.indices]
        if perm:
            ix = self.pick(perm)
            a = self.pick(self.dense(ix.length))
            self.keep(a.elem, f"scatter({ix.name}, {a.name}, g.size)", "n", a.mag)

    def do_blocks(self) -> None:
        block, length, over = self.pick(BLOCKS), "n", ""
        others = [a for a in self.arrays if a.exact and a.length[0] not in ("n", "parts")]
        if others and self.chance(6):
            other = self.pick(others)
            length, over = other.length, f"{other.name}, "
        number = ("blocks", block) if length == "n" else ("parts", block, length)
        whole = [a for a in self.arrays if a.length == length]
        inner = Encoder.__new__(Encoder)
        inner.__dict__.update(self.__dict__)
        inner.lines, inner.scalars = [], [v for v in self.scalars]
        inner.arrays = list(whole)
        known = [a for a in self.arrays if a.length == number]
        inner.scalars += [replace(a.item(a.name), exact=a.exact) for a in known]
        start = len(inner.scalars)
        for _ in range(self.pick([1, 2, 3])):
            if self.chance(6):
                inner.reduce_over(self.pick(inner.dense(length)), inner.declare)
            elif self.chance(3):
                inner.do_scalar()
            else:
                inner.map_over(length)
            self._names = inner._names
        self.lines += [f"per ({over}{block}) {{", *(f"    {line}" for line in inner.lines), "}"]
        self._names, self.exact = inner._names, inner.exact
        for v in inner.scalars[start:]:
            elem = self.elems[v.text]
            self.arrays.append(Arr(v.text, elem, v.mag, number, v.exact))
        self.arrays += inner.arrays[len(whole) :]


_SMALL = "return min(max(x, -1000.0), 1000.0);"
_STATEMENTS = (
    *("scalar", "branch", "map", "map", "reduce", "reduce", "scaled", "filter", "filter"),
    *("order", "scan", "scatter", "blocks", "blocks", "lambda", "again", "chosen", "gather"),
)


class Decoder(Writer):
    """Writes a decode function that reads what an encoder sent."""

    def __init__(self, encoder: Encoder, parts: Sequence[Val | Arr]) -> None:
        super().__init__(encoder._draw)
        self.bits, self.parts, self.encoder = encoder.bits, parts, encoder
        self._names = encoder._names

    def write(self) -> None:
        for p in self.parts:
            if isinstance(p, Val):
                self.lines.append(f"{self.encoder.elems[p.text]} {p.text};")
            elif p.length == "n" and self.chance(5):
                self.lines.append(f"{p.elem} {p.name}[g.size];")
            else:
                self.lines.append(f"{p.elem}* {p.name};")
        names = [p.text if isinstance(p, Val) else p.name for p in self.parts]
        self.lines.append(f"extract(c, {', '.join(names)});")
        dense = [p for p in self.parts if isinstance(p, Arr) and p.length == "n"]
        dense += self._sparse()
        blocks = [p for p in self.parts if isinstance(p, Arr) and p.length[0] == "blocks"]
        scalars = [p for p in self.parts if isinstance(p, Val)]
        scope = Scope([Val("tau", "float", 3, host=True), *scalars], random=False)
        if blocks and self.chance(7):
            size = self.pick(blocks).length[1]
            extra = [b.item(b.name) for b in blocks if b.length[1] == size]
            line = self._gradient(dense, replace(scope, leaves=[*scope.leaves, *extra]))
            self.lines += [f"per ({size}) {{", f"    {line}", "}"]
            return
        line = self._gradient(dense, self._summed(scope))
        self.lines.append(line)

    def _sparse(self) -> list[Arr]:
        """What was filtered, back in its place."""
        made: list[Arr] = []
        kept = [p for p in self.parts if isinstance(p, Arr) and p.length[0] == "kept"]
        sent = {p.text for p in self.parts if isinstance(p, Val)}
        for a in kept:
            count = self.encoder.counts[a.length[1]]
            index = [b for b in kept if b.indices and b.length == a.length]
            if count not in sent or not index or a.indices:
                continue
            name = self.fresh("d")
            values = f"map(first({a.name}, {count}), [&]({a.elem} x) -> float {{ return x; }})"
            text = f"scatter(first({index[0].name}, {count}), {values}, g.size)"
            self.lines.append(f"float* {name} = {text};")
            made.append(Arr(name, "float", a.mag, "n", a.exact))
        return made

    def _summed(self, scope: Scope) -> Scope:
        """A number made of a filtered or a fixed array."""
        kept = [p for p in self.parts if isinstance(p, Arr) and p.exact and p.length != "n"]
        kept = [a for a in kept if a.length[0] != "blocks"]
        sent = {p.text for p in self.parts if isinstance(p, Val)}
        for a in kept[:1]:
            array = a.name
            if a.length[0] == "kept":
                count = self.encoder.counts[a.length[1]]
                if count not in sent:
                    continue
                array = f"first({a.name}, {count})"
            name = self.fresh("m")
            self.lines.append(f"{a.type} {name} = reduce({array}, 1, max);")
            return scope.plus(Val(name, a.type, max(a.mag, 1)))
        return scope

    def _gradient(self, dense: Sequence[Arr], scope: Scope) -> str:
        exact = [a for a in dense if a.exact]
        loose = [a.item(a.name) for a in dense if not a.exact]
        loose += [v for v in scope.leaves if not v.exact]
        if exact and self.chance(8):
            chosen = [self.pick(exact) for _ in range(self.pick([1, 2]))]
            text = self.mapped(chosen, "float", scope)
        else:
            text = self.ranged(exact, "float", scope)
        text = f"map({text}, [&](float x) -> float {{ {_SMALL} }})"
        scale = [v for v in loose if v in scope.leaves]
        if scale and self.chance(8):
            s = self.pick(scale).text
            text = f"map({text}, [&](float x) -> float {{ return x * ({s} / ({s} + 1.0)); }})"
        elif len(loose) > len(scale) and self.chance(8):
            a = loose[0].text
            f = "[&](float x, float y) -> float { return x * (y / (abs(y) + 1.0)); }"
            text = f"map({text}, {a}, {f})"
        return f"g = {text};"


@st.composite
def programs(draw: Callable[..., Any], most: int = 6) -> Program:
    """A program whose encode function has at most so many statements, and its parameters."""
    encoder = Encoder(draw)
    encoder.write(most)
    arrays = [a for a in encoder.arrays if a.name not in ("g", *encoder.states)]
    parts: list[Val | Arr] = [a for a in arrays if encoder.chance(8)]
    kept = {a.length[1] for a in parts if isinstance(a, Arr) and a.length[0] == "kept"}
    needed = {encoder.counts[k] for k in kept}
    parts += [v for v in encoder.scalars if v.text in needed or encoder.chance(6)]
    if not parts:
        parts = [encoder.arrays[0]]
        encoder.lines.append("float* v = g;")
        parts = [Arr("v", "float", GRADIENT_MAG, "n")]
    order = draw(st.permutations(parts)) if len(parts) > 1 else parts
    sent = [p.text if isinstance(p, Val) else p.name for p in order]
    encoder.lines.append(f"c = concat({', '.join(sent)});")
    decoder = Decoder(encoder, order)
    decoder.write()
    takes = "".join(f", inout float* {u}" for u in encoder.states)
    params = "float tau, uint8 bits"
    text = "\n".join(
        [
            f"void XEncode(float* g, uint8* c{takes}, {params}) {{",
            *(f"    {line}" for line in encoder.lines),
            "}",
            f"void XDecode(uint8* c, float* g, {params}) {{",
            *(f"    {line}" for line in decoder.lines),
            "}",
            "",
        ]
    )
    values = {"tau": encoder.pick([0.5, 0.1, -3.0, 0.0]), "bits": encoder.bits}
    return Program(text, values, encoder.num_states, encoder.exact and decoder.exact)
