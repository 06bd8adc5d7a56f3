"""Printing: values and kernels in, source text out. All backends share this module.

A generated `reference` or `cpu` module has three functions (`gpu` documents its own):

    encode(n, params, rng, body, x, states, scratch, pool)  -> whether NaN or infinity was seen
    decode(n, params, rng, body, out, scratch, pool)        -> None, or why the body is refused
    decode_add(...)                                            (the same, added)

`params` are the float parameters in the kernel's order, `rng` is (seed, stream, step), `body` a
uint8 array of `body_bytes(n, params)` bytes. `scratch` returns memory of a number of bytes, `pool`
runs steps on several threads (None: on one).
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar

from hipress.compll import ir
from hipress.compll.front.graph import Graph
from hipress.compll.ir import Expr, Fold, Kernel, Store, walk

MAX_NESTED = 60
"""Brackets in the text of a value without a name: Python takes 200, one in another."""

Known = dict[Expr, str]
"""Texts of values that are ready where code is being printed."""

Spell = Callable[[Expr, list[str]], str]
"""Writes an operation, given the texts of its arguments."""

INFIX = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "and": "({} & {})",
    "or": "({} | {})",
    "xor": "({} ^ {})",
    "inv": "(~{})",
    "neg": "(-{})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "eq": "({} == {})",
    "ne": "({} != {})",
}
"""Operations that read the same in every backend."""


@dataclass
class Lines:
    """Source text under construction."""

    text: list[str] = field(default_factory=list)
    depth: int = 0

    def __call__(self, line: str = "") -> None:
        self.text.append("    " * self.depth + line if line else "")

    def __str__(self) -> str:
        return "\n".join(self.text) + "\n"

    def open(self, line: str) -> None:
        """Begins a block: what follows stands under `line`."""
        self(line)
        self.depth += 1

    def end(self) -> None:
        self.depth = 0
        self.text += ["", ""]


_METHODS = {
    ir.Loop: "loop",
    ir.Compact: "compact",
    ir.Scatter: "scatter",
    ir.Scan: "scan",
    ir.Select: "order",
    ir.Sorting: "order",
    ir.Scalars: "scalars",
}


def pass_method(printer: object, p: ir.Pass) -> Callable[..., None]:
    """Returns the method of `printer` for passes like `p`: `loop`, `compact`, `order`, ..."""
    return getattr(printer, _METHODS[type(p)])  # type: ignore[no-any-return]


class Printer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.graph = Graph()
        self._num_names = 0

    def fresh(self) -> str:
        self._num_names += 1
        return f"v{self._num_names}"

    def assign(self, text: str, out: Lines) -> str:
        """Prints an assignment of `text` to a new name, and returns the name."""
        name = self.fresh()
        out(f"{name} = {text}")
        return name

    def spell(self, e: Expr, args: list[str]) -> str:
        raise NotImplementedError

    def print(
        self,
        roots: Iterable[Expr],
        out: Lines,
        known: Known,
        spell: Spell | None = None,
        often: Container[Expr] = (),
    ) -> list[str]:
        """Prints what `roots` need and returns their texts; `known` grows on the way.

        A value used twice, or one of `often`, gets a name; one used once is written where it is
        used.
        """
        roots, spell = list(roots), spell or self.spell
        order = list(walk(roots, set(known)))
        uses = Counter([*roots, *(a for e in order for a in e.args)])
        for e in order:
            text = spell(e, [known[a] for a in e.args])
            name = uses[e] > 1 or e in often or text.count("(") > MAX_NESTED
            if name and e.op not in ("const", "param"):
                text = self.assign(text, out)
            known[e] = text
        return [known[r] for r in roots]

    def stores_if(self, p: ir.Compact, taken: bool) -> list[Store]:
        """Returns the stores of a filter pass for elements that the filter takes, or does not."""
        asked = [e for e in walk([s.value for s in p.stores]) if e.op == "taken"]
        answer = {e: self.graph.const(taken) for e in asked}
        return [Store(s.array, self.graph.substitute(s.value, answer)) for s in p.stores]

    def picks(self, sort: ir.Sort) -> list[Expr]:
        """Returns the single elements of a sorted array that the kernel uses."""
        found = [e for p in self.kernel.passes for e in walk(ir.pass_exprs(p)) if e.op == "pick"]
        return [e for e in dict.fromkeys(found) if e.attr is sort]


def machine_type(e: Expr) -> str:
    if e.type == "int":
        return "i32" if e.narrow else "i64"
    return "f32" if e.type == "float" else "bool"


def wide_type(type_: str) -> str:
    """Returns the machine type in which reductions of a type are kept."""
    return "f32" if type_ == "float" else "i64"


_CALLS = {op: f"_{op}({{}}, {{}})" for op in ("idiv", "imod", "shl", "shr", "min", "max")}


class MachinePrinter(Printer):
    """Prints values for a compiler of machine types.

    Compilers widen mixed operands by rules of their own, so every operand has the machine type of
    its operation.
    """

    # A backend defines these. `int_result` writes an operation on ints of a common type as a value
    # of its own type, `combined_by_program` a reduction's function that the program gives.
    cast: Callable[[str, str], str]
    constant: Callable[[Expr], str]
    to_float: Callable[[Expr, str], str]
    to_uint: Callable[[Expr, str], str]
    int_result: Callable[[Expr, str, list[str], str], str]
    combined_by_program: Callable[[Fold, str, str, Lines], str]

    NOT: ClassVar[str]
    SELECT: ClassVar[str]
    FLOAT: ClassVar[dict[str, str]] = {
        **INFIX,
        **_CALLS,
        "sign": "_sign_f({})",
        "power": "_power({})",
        "round_bf16": "_from_bf16(_to_bf16({}))",
    }
    INT: ClassVar[dict[str, str]] = {**INFIX, **_CALLS, "sign": "_sign_i({})"}

    def spell(self, e: Expr, args: list[str]) -> str:
        mine, theirs = machine_type(e), [machine_type(a) for a in e.args]
        if e.op == "const":
            return self.constant(e)
        if e.op in ("lt", "le", "eq", "ne"):
            if theirs[0] != theirs[1]:
                args = [self.cast(a, "i64") for a in args]
            return INFIX[e.op].format(*args)
        if e.op == "not":
            return self.NOT.format(*args)
        if e.op in ("land", "lor"):
            return INFIX["and" if e.op == "land" else "or"].format(*args)
        if e.op == "select":
            typed = zip(args[1:], theirs[1:], strict=True)
            yes, no = (a if t == mine else self.cast(a, mine) for a, t in typed)
            return self.SELECT.format(args[0], yes, no)
        if e.op in ("float", "sent"):
            return self.to_float(e, args[0])
        if e.op == "int":
            if theirs[0] == "bool":
                return self.cast(args[0], "i32")
            return f"_to_small_int({args[0]})" if e.narrow else f"_to_int({args[0]})"
        if e.op == "uint":
            return self.to_uint(e, args[0])
        if e.op == "from_bits":
            return f"_from_bits({self.cast(args[0], 'i64')})"
        if e.op in ("finite", "exponent", "bits"):
            return f"_{e.op}({args[0]})"
        return self.FLOAT[e.op].format(*args) if e.type == "float" else self._spell_int(e, args)

    def _spell_int(self, e: Expr, args: list[str]) -> str:
        theirs = [machine_type(a) for a in e.args]
        common = "i64" if "i64" in (machine_type(e), *theirs) else "i32"
        typed = zip(args, theirs, strict=True)
        args = [a if t == common else self.cast(a, common) for a, t in typed]
        form = self.INT[e.op]
        a, b = e.args[0], e.args[-1]
        if e.op in ("idiv", "imod") and a.lo >= 0 and b.lo > 0:
            form = "({} // {})" if e.op == "idiv" else "({} % {})"
        elif e.op in ("shl", "shr") and 0 <= b.lo and b.hi < int(common[1:]) - 1:
            form = "({} << {})" if e.op == "shl" else "({} >> {})"
        return self.int_result(e, form, args, common)

    def as_read(self, e: Expr, text: str) -> str:
        """Returns a number that was read from memory in the machine type of its value."""
        if e.type == "bool":
            return f"({text} != 0)"
        return self.cast(text, "i32") if machine_type(e) == "i32" else text

    def combined(self, f: Fold, a: str, b: str, out: Lines) -> str:
        """Returns the text of a reduction's f(a, b)."""
        if f.kind == "sum":
            return f"{a} + {b}"
        if f.kind in ("max", "min"):
            # A NaN among the results of tiles must not get lost when they are joined.
            return f"_{f.kind}{'_nan' if f.type == 'float' else ''}({a}, {b})"
        return self.combined_by_program(f, a, b, out)


def host_values(roots: Iterable[Expr]) -> list[Expr]:
    """Returns the largest host values below `roots` that are not plain constants."""
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()

    def visit(e: Expr) -> None:
        if e not in seen:
            seen.add(e)
            if not e.host:
                for a in e.args:
                    visit(a)
            elif e.op != "const":
                found[e] = None

    for root in roots:
        visit(root)
    return list(found)


def copied(text: str, *helpers: ModuleType, decorator: str = "") -> str:
    """Copies the functions of `helpers` that `text` calls, each before its callers."""
    functions = {
        name: inspect.getsource(f)
        for module in helpers
        for name, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__
    }
    needed: dict[str, None] = {}

    def need(source: str, myself: str = "") -> None:
        for name in re.findall(r"\b_[a-z0-9_]+(?=\()", source):
            if name in functions and name != myself and name not in needed:
                need(functions[name], name)
                needed[name] = None

    need(text)
    bare = (re.sub(r": Any\b| -> (Any|None)\b", "", functions[name]) for name in needed)
    return "".join(f"{decorator}{source}\n\n" for source in bare)
