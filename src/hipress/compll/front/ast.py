"""The nodes of a program's tree, as written: types are not checked yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Pos:
    """Where a piece of text starts, 1-based."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Node:
    """Something with a place in the source."""

    pos: Pos = field(compare=False)


@dataclass(frozen=True, slots=True)
class TypeName(Node):
    """A type as written: `float`, `uint<bitwidth>*`, or the name of a param block."""

    base: str
    width: Expr | None
    array: bool


@dataclass(frozen=True, slots=True)
class Number(Node):
    """A literal; `value` is an int or a float."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Name(Node):
    """A use of a name."""

    id: str


@dataclass(frozen=True, slots=True)
class Unary(Node):
    """`-x`, `!x`, `~x`."""

    op: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Binary(Node):
    """`a op b`, also `&&` and `||`."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class Ternary(Node):
    """`cond ? yes : no`."""

    cond: Expr
    yes: Expr
    no: Expr


@dataclass(frozen=True, slots=True)
class Member(Node):
    """`value.field`: `.size` of an array, or a field of a param block."""

    value: Expr
    field: str


@dataclass(frozen=True, slots=True)
class Index(Node):
    """`array[index]`."""

    value: Expr
    index: Expr


@dataclass(frozen=True, slots=True)
class Call(Node):
    """`name(args)`; `of` is the type in `random<float>(0, 1)`."""

    name: str
    args: tuple[Expr, ...]
    of: TypeName | None = None


@dataclass(frozen=True, slots=True)
class Lambda(Node):
    """`[&](float a) -> float { ... }`."""

    args: tuple[Arg, ...]
    returns: TypeName
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Declare(Node):
    """`float x = e;`, `float x;` or, with `size`, `float x[size];`."""

    type: TypeName
    name: str
    value: Expr | None
    size: Expr | None


@dataclass(frozen=True, slots=True)
class Assign(Node):
    """`name = e;`."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class If(Node):
    """`if (cond) { ... } else { ... }`."""

    cond: Expr
    yes: tuple[Statement, ...]
    no: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Return(Node):
    """`return e;`."""

    value: Expr | None


@dataclass(frozen=True, slots=True)
class Per(Node):
    """`per (size) { ... }`, `per (array, size) { ... }`: the statements once for each block."""

    over: Expr | None
    """The array that is cut into blocks, if not the gradient."""
    size: Expr
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Repeat(Node):
    """`repeat (i, count) { ... }`: the statements for each i from 0 to count - 1."""

    name: str
    count: Expr
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Do(Node):
    """An expression on its own line; only `extract(...)` means something there."""

    value: Expr


@dataclass(frozen=True, slots=True)
class Arg(Node):
    """An argument of a function or of a lambda."""

    type: TypeName
    name: str
    inout: bool = False
    size: Expr | None = None
    """The length of a state that is not as long as the gradient."""


@dataclass(frozen=True, slots=True)
class Function(Node):
    """`void XEncode(...) { ... }`."""

    returns: TypeName
    name: str
    args: tuple[Arg, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class ParamBlock(Node):
    """`param Name { float tau = 0.5; }`."""

    name: str
    fields: tuple[Declare, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed file: its name and text (for error messages) and what it defines."""

    file: str
    text: str
    functions: tuple[Function, ...]
    params: tuple[ParamBlock, ...]


Expr: TypeAlias = Number | Name | Unary | Binary | Ternary | Member | Index | Call | Lambda
Statement: TypeAlias = Declare | Assign | If | Return | Per | Repeat | Do
