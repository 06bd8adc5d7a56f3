"""A reduction in, elements for which its function depends on the order out, if any are found.

Backends join the elements of a reduction in groups of their own and a GPU in another order, so
`f(f(a, b), c)` must be `f(a, f(b, c))`, and `f(a, b)` must be `f(b, a)`. All are computed for
elements that the program could meet: what the gradient and other inputs hold is drawn, always the
same numbers, and the rest follows from the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hipress.compll.ir import Expr, Fold, walk

_DRAWS = 400
_TABLE = 64
"""Elements of an array that is read; it repeats itself behind them."""
_NUMEL = 2**22
"""Elements of the gradient."""
_TOLERANCE = 1e-6
"""What rounding may do to a float, of the largest number involved; all is in double precision."""


def counter_example(fold: Fold) -> tuple[str, str] | None:
    """Returns what the function lacks and an example of it in words, or None."""
    combine, carry, item = fold.combine, fold.carry, fold.item
    assert combine is not None and carry is not None and item is not None
    trial = _Trial()

    def f(x: Any, y: Any) -> Any:
        return trial.value(combine, {carry: x, item: y})

    with np.errstate(all="ignore"):
        drawn = [trial.value(fold.body) for _ in range(3)]
        start = trial.value(fold.init)
        found = _tried(f, drawn, start, fold.type)
        if found is not None and trial.has_guessed:
            # What other passes and steps have left may be non-negative; then this must fail too.
            if _tried(f, [np.abs(x) for x in drawn], start, fold.type) is None:
                return None
    return found


def _tried(
    f: Callable[[Any, Any], Any], elements: list[Any], start: Any, kind: str
) -> tuple[str, str] | None:
    """Joins elements in several ways; every fourth time the start is the first of them."""
    a, b, c = elements
    first = np.where(np.arange(_DRAWS) % 4, a, start)
    ab, bc = f(first, b), f(b, c)
    if row := _shortest([first, b, c, f(ab, c), f(first, bc)], [ab, bc], kind):
        x, y, z, left, right = row
        return "associative", f"f(f({x}, {y}), {z}) is {left}, but f({x}, f({y}, {z})) is {right}"
    if row := _shortest([a, b, f(a, b), f(b, a)], [], kind):
        x, y, left, right = row
        return "commutative", f"f({x}, {y}) is {left}, but f({y}, {x}) is {right}"
    return None


def _shortest(rows: list[Any], between: list[Any], kind: str) -> list[str] | None:
    """Returns the column whose last two numbers differ and that is the shortest to read."""
    left, right = rows[-2:]
    differs = left != right
    if kind == "float":
        involved = np.abs(np.array([*rows, *between]))
        differs = np.abs(left - right) > _TOLERANCE * involved.max(axis=0)
        differs &= np.isfinite(involved).all(axis=0)
    found = [tuple(row.tolist()) for row in np.array(rows).T[differs]]
    if not found:
        return None
    chosen = min(found, key=lambda row: (len(str(row)), row))
    return [str(x) if isinstance(x, int) else f"{x:.6g}" for x in chosen]


class _Trial:
    """Computes values many times over, with ints of 64 bits and floats in double precision."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(17)
        self.fixed: dict[Any, Any] = {}
        """What is the same for all elements, and the arrays that are read."""
        self.has_guessed = False
        """Whether anything was drawn whose values follow from more than this expression."""

    def value(self, root: Expr, known: dict[Expr, Any] | None = None) -> Any:
        """Returns a value `_DRAWS` times; elements of the gradient are drawn anew in each call."""
        known = dict(known or {})
        for e in walk([root], set(known)):
            known[e] = self._made(e, [known[a] for a in e.args])
        return np.broadcast_to(known[root], (_DRAWS,))

    def _made(self, e: Expr, args: list[Any]) -> Any:
        if e.op == "const":
            return np.asarray(e.attr)
        if e.op == "n":
            return np.int64(_NUMEL)
        if e.is_load:
            self.has_guessed |= e.attr.name != "x"
            if e.attr not in self.fixed:
                self.fixed[e.attr] = self._drawn(e, _TABLE)
            return self.fixed[e.attr][np.maximum(args[0], 0) % _TABLE]
        if e.op in ("idx", "lidx"):
            near, far = (min(limit, e.hi + 1) for limit in (_TABLE, _NUMEL))
            coin = self.rng.random(_DRAWS) < 0.5
            return np.where(
                coin, self.rng.integers(0, near, _DRAWS), self.rng.integers(0, far, _DRAWS)
            )
        if e.op in _OPS:
            return _OPS[e.op](*args)
        if e.op == "uint":
            return np.clip(np.nan_to_num(args[0]), 0, 2**e.attr - 1).astype(np.int64)
        self.has_guessed |= e.op not in ("uniform", "bits32", "param")
        if e.variance == 2:
            return self._drawn(e, _DRAWS)
        if e not in self.fixed:  # a parameter, or the result of another pass
            drawn = self._drawn(e, _DRAWS)
            self.fixed[e] = np.abs(drawn) if e.op == "param" else drawn
        return self.fixed[e]

    def _drawn(self, e: Expr, count: int) -> Any:
        """Returns numbers of the type and range of `e`, half of them small and round."""
        rng, coin = self.rng, self.rng.random(count) < 0.5
        if e.op == "uniform":
            return rng.random(count)
        if e.type == "float":
            wide = rng.standard_normal(count) * 10.0 ** rng.integers(-2, 4, count)
            return np.where(coin, rng.integers(-6, 7, count) / 2, wide)
        lo, hi = (-(2**20), 2**20) if e.wraps else (e.lo, e.hi)
        small = np.clip(rng.integers(-4, 5, count), lo, hi)
        drawn = np.where(coin, small, rng.integers(lo, hi, count, endpoint=True))
        return drawn.astype(bool) if e.type == "bool" else drawn


def _same(x: Any) -> Any:
    return x


def _to_int(x: Any) -> Any:
    return np.clip(np.nan_to_num(x), -9.0e18, 9.0e18).astype(np.int64)


def _idiv(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b


_OPS: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "div": np.divide},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "inv": np.invert},
    "shl": lambda a, b: np.where((b < 0) | (b > 62), 0, a << np.clip(b, 0, 62)),
    "shr": lambda a, b: a >> np.where((b < 0) | (b > 62), 63, b),
    **{"idiv": _idiv, "imod": np.fmod, "min": np.minimum, "max": np.maximum, "abs": np.abs},
    **{"lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal},
    **{"not": np.logical_not, "land": np.logical_and, "lor": np.logical_or, "select": np.where},
    **{"floor": np.floor, "sqrt": np.sqrt, "exp2": np.exp2, "log2": np.log2, "sign": np.sign},
    "exponent": lambda x: np.where(x == 0, -150, np.frexp(x)[1].astype(np.int64) - 1),
    **{"power": lambda e: np.exp2(e * 1.0), "float": lambda a: a * 1.0, "int": _to_int},
    **{"finite": np.isfinite, "sent": _same, "round_f16": _same, "round_bf16": _same},
}
"""The operations of `ir` on arrays; floats are not rounded, so that rounding looks associative."""
