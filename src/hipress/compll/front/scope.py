"""What names stand for while a function is played, and the values its callers see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hipress.compll.front import ast
from hipress.compll.front.arrays import ArrayValue, ElemType
from hipress.compll.ir import Expr

ParamValue = int | float


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number and the type it was declared with."""

    value: Expr
    elem: ElemType


@dataclass(frozen=True, slots=True)
class Func:
    """A lambda and the names it captures."""

    code: ast.Lambda
    env: Env


@dataclass(frozen=True, slots=True)
class Struct:
    """A param block passed as an argument."""

    fields: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Unset:
    """Declared, without a value yet."""

    elem: ElemType
    array: bool
    length: Expr | None


Binding = Scalar | ArrayValue | Func | Struct | Unset


@dataclass
class Env:
    """Names in scope; inner scopes see outer ones."""

    names: dict[str, Binding] = field(default_factory=dict)
    outer: Env | None = None
    block: int | None = None
    """The block size, inside a `per` scope."""

    def home(self, name: str) -> Env | None:
        """The scope that defines `name`."""
        env: Env | None = self
        while env is not None and name not in env.names:
            env = env.outer
        return env

    def frozen(self) -> Env:
        """A copy that later assignments do not reach."""
        outer = None if self.outer is None else self.outer.frozen()
        return Env(dict(self.names), outer, self.block)

    def within(self, scope: Env) -> bool:
        """Whether this scope is `scope` or lies inside it."""
        env: Env | None = self
        while env is not None and env is not scope:
            env = env.outer
        return env is scope

    def per(self) -> Env | None:
        """The per scope around this one, if any."""
        env: Env | None = self
        while env is not None and env.block is None:
            env = env.outer
        return env

    def snapshot(self) -> list[dict[str, Binding]]:
        """All bindings, innermost scope first."""
        return [dict(self.names), *(self.outer.snapshot() if self.outer is not None else [])]

    def restore(self, frames: list[dict[str, Binding]]) -> None:
        """Back to a snapshot."""
        self.names = dict(frames[0])
        if self.outer is not None:
            self.outer.restore(frames[1:])

    def visible(self) -> list[str]:
        """Every name that can be used here."""
        env: Env | None = self
        names: set[str] = set()
        while env is not None:
            names |= env.names.keys()
            env = env.outer
        return sorted(names)


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a program, as its signature or a param block declares it."""

    name: str
    elem: ElemType
    default: ParamValue | None

    @property
    def runtime(self) -> bool:
        """Floats are passed at run time; integers are known when kernels are made."""
        return self.elem.kind == "float"


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a function, by role."""

    gradient: ast.Arg
    payload: ast.Arg
    states: tuple[ast.Arg, ...]
    params: tuple[Param, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a payload, in the order of `concat`."""

    elem: ElemType
    value: Expr | ArrayValue
    pos: ast.Pos
