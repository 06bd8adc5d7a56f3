"""The operators that draw random numbers: `random` and `sample`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hipress.compll.front import ast, inblock
from hipress.compll.front.arrays import Computed
from hipress.compll.front.graph import FLOAT, INT
from hipress.compll.front.scope import Binding, Env, Scalar
from hipress.compll.ir import Expr

if TYPE_CHECKING:
    from hipress.compll.front.expressions import Expressions


def sample_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`sample(a, m[, key])`: one element drawn at random from each of m equal stretches of a."""
    key = _key(checker, node.args[2], env) if len(node.args) == 3 else None
    array = checker.array(node.args[0], env)
    if inblock.domain(checker, node, env, array) is not None:
        checker.fail(node, "sample works on whole arrays; it cannot stand in a per scope")
    inblock.need_length(checker, node, array)
    m = checker.size(node.args[1], env)
    g, n, site = checker.graph, array.length, _site(checker, node, key)

    width, rest = g.binary("idiv", n, m), g.binary("imod", n, m)

    def at(ix: Expr) -> Expr:
        # The first n % m stretches have one element more; no division per element.
        start = g.binary("add", g.binary("mul", ix, width), g.binary("min", ix, rest))
        size = g.binary("add", width, g.to_int(g.binary("lt", ix, rest)))
        draw = _drawn_below(checker, size, ix, site, key)
        return array.at(g.binary("add", start, draw))

    probe = g.idx(n)
    return Computed(m, array.elem, at, distinct=array.at(probe) is probe)


def random_(checker: Expressions, node: ast.Call, env: Env) -> Binding:
    """`random<T>(a, b[, key])`: uniform in [a, b); its own draw for each element.

    With a key the draws depend on that and the position alone, so that decode can repeat them.
    """
    g = checker.graph
    assert node.of is not None
    key = _key(checker, node.args[2], env) if len(node.args) == 3 else None
    elem = checker.elem(node.of, env)
    if node.of.array or elem.kind not in ("float", "int"):
        checker.fail(node.of, f"random<{elem}> is not known; allowed: random<float>, random<int>")
    a, b = (checker.scalar(x, env) for x in node.args[:2])
    position = checker.position if checker.position is not None else g.const(0)
    site = _site(checker, node, key)
    if elem.kind == "float":
        a, b = g.to_float(a), g.to_float(b)
        u = g.random("uniform", position, site, key)
        if a is g.const(0.0) and b is g.const(1.0):
            return Scalar(u, FLOAT)
        return Scalar(g.binary("add", a, g.binary("mul", u, g.binary("sub", b, a))), FLOAT)
    a, b = g.to_int(a), g.to_int(b)
    # At most 2**31 - 1 wide: the product with 32 random bits then fits 63.
    width = g.binary("max", g.binary("sub", b, a), g.const(0))
    width = g.binary("min", width, g.const(2**31 - 1))
    draw = _drawn_below(checker, width, position, site, key)
    return Scalar(g.binary("add", a, draw), INT)


def _drawn_below(
    checker: Expressions, width: Expr, position: Expr, site: int, key: Expr | None
) -> Expr:
    """Returns a random int below `width`, which has at most 31 bits."""
    g = checker.graph
    product = g.binary("mul", g.random("bits32", position, site, key), width)
    return g.binary("shr", product, g.const(32))


def _site(checker: Expressions, node: ast.Call, key: Expr | None) -> int:
    """Returns the number of a place that draws; places with a key share 0, for decode repeats."""
    if key is None and checker.decoding:
        checker.fail(
            node,
            f"decode cannot repeat what encode drew; give {node.name} a key that is "
            "part of the payload",
        )
    if checker.reducing:
        checker.fail(
            node,
            f"{node.name} in a reduction's lambda would depend on the order; draw in a map before",
        )
    return checker.site(node.pos) if key is None else 0


def _key(checker: Expressions, node: ast.Expr, env: Env) -> Expr:
    """Returns a key for random numbers: one int for the whole gradient."""
    key = checker.scalar(node, env)
    if key.type != "int" or key.variance != 0:
        checker.fail(node, "a key is an int that is the same for all elements")
    return key
