"""What names stand for while a function is evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hipress.compll.front import ast
from hipress.compll.front.arrays import ArrayValue
from hipress.compll.front.graph import ElemType
from hipress.compll.ir import Blocks, Expr


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
    """A name that is declared and has no value yet."""

    elem: ElemType
    array: bool
    length: Expr | None


Binding = Scalar | ArrayValue | Func | Struct | Unset


@dataclass
class Env:
    """Names in scope; inner scopes see outer ones."""

    names: dict[str, Binding] = field(default_factory=dict)
    outer: Env | None = None
    block: Blocks | None = None
    """The blocks of a `per` scope."""
    ended: set[str] = field(default_factory=set)
    """Names that were known inside a `per` scope alone."""
    count: Expr | None = None
    """In a `per` scope over a filtered array: its length, of which the blocks hold the capacity."""

    def scopes(self) -> Iterator[Env]:
        """Yields this scope and those around it, from the inside out."""
        env: Env | None = self
        while env is not None:
            yield env
            env = env.outer

    def home(self, name: str) -> Env | None:
        return next((env for env in self.scopes() if name in env.names), None)

    def frozen(self) -> Env:
        """Returns a copy that later assignments do not reach."""
        outer = None if self.outer is None else self.outer.frozen()
        return Env(dict(self.names), outer, self.block, self.ended, self.count)

    def within(self, scope: Env) -> bool:
        return any(env is scope for env in self.scopes())

    def per(self) -> Env | None:
        return next((env for env in self.scopes() if env.block is not None), None)

    def snapshot(self) -> list[dict[str, Binding]]:
        """Returns all bindings, innermost scope first."""
        return [dict(env.names) for env in self.scopes()]

    def restore(self, frames: list[dict[str, Binding]]) -> None:
        for env, names in zip(self.scopes(), frames, strict=True):
            env.names = dict(names)

    def visible(self) -> list[str]:
        return sorted({name for env in self.scopes() for name in env.names})
