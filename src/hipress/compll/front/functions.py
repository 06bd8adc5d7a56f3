"""What operators apply to elements: lambdas, and the functions of numbers that are built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hipress.compll.front import ast
from hipress.compll.front.scope import Binding, Env, Func
from hipress.compll.ir import Expr

if TYPE_CHECKING:
    from hipress.compll.front.expressions import Expressions

BUILTIN = {
    **dict.fromkeys(("abs", "floor", "sqrt", "exp2", "log2", "sign", "exponent"), 1),
    **dict.fromkeys(("bits", "from_bits"), 1),
    **dict.fromkeys(("min", "max"), 2),
}


Function = Callable[[list[Expr], Expr | None], Expr]
"""A function from values, and the position they are taken from, to a value."""


def function(
    checker: Expressions, node: ast.Expr, env: Env, num_args: int
) -> tuple[Function, Func | None]:
    """Returns a lambda or a built-in as a function, and the lambda."""
    if isinstance(node, ast.Name) and env.home(node.id) is None and node.id in BUILTIN:
        if BUILTIN[node.id] != num_args:
            checker.fail(node, f"{node.id} takes {BUILTIN[node.id]} arguments, not {num_args}")
        name = node.id
        return lambda args, position: _applied(checker, name, args), None
    func = checker.value(node, env)
    if not isinstance(func, Func):
        checker.fail(node, "a lambda is needed here")
    if len(func.code.args) != num_args:
        checker.fail(
            node, f"a lambda of {num_args} arguments is needed; this takes {len(func.code.args)}"
        )
    # An array is computed when it is used; the lambda must see its names as they are now.
    given, turns = Func(func.code, func.env.frozen()), checker.turns

    def call(args: list[Expr], position: Expr | None) -> Expr:
        before, checker.turns = checker.turns, turns
        value = checker.apply(node, given, args, position).value
        checker.turns = before
        return value

    return call, given


def _applied(checker: Expressions, name: str, args: list[Expr]) -> Expr:
    g, value = checker.graph, args[0]
    if name in ("min", "max"):
        return g.binary(name, *checker.same(*args))
    if value.type == "bool":
        value = g.to_int(value)
    if name == "floor" and value.type == "int":
        return value
    if name == "from_bits":
        return g.unary(name, g.to_int(value))
    if name in ("sqrt", "exp2", "log2", "exponent", "bits"):
        value = g.to_float(value)
    return g.unary(name, value)


def elementwise(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    return checker.number(_applied(checker, node.name, [checker.scalar(node.args[0], env)]))


def extreme(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    values = [checker.scalar(a, env) for a in node.args]
    result = values[0]
    for value in values[1:]:
        result = checker.graph.binary(node.name, *checker.same(result, value))
    return checker.number(result)
