"""Which cells of a grid `make test` runs; the others are marked `full`, for `make test-all`.

A grid says what should hold everywhere. Most of its cells catch nothing of their own, but each
costs time, above all where a kernel is compiled for it. `make test` takes enough of them that each
value of each axis is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import pytest

full = pytest.mark.full


def thinned(cells: Iterable[Any], keep: Container[Any] | Callable[[Any], bool]) -> list[Any]:
    """The cells of a parametrisation, those that are not to be kept marked `full`.

    Args:
        cells: Values, tuples with a value for each name, or `pytest.param`.
        keep: The cells that `make test` runs, or a function that says so of a cell.
    """
    chosen = keep if callable(keep) else keep.__contains__
    return [cell if chosen(cell) else marked(cell) for cell in cells]


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of the axes; `make test` goes once through each axis, side by side.

    With the axes `abc` and `12` it runs a-1, b-2 and c-1.
    """
    longest = max(len(axis) for axis in axes)
    places = {tuple(i % len(axis) for axis in axes) for i in range(longest)}
    return [
        cell if place in places else marked(cell)
        for place, cell in zip(
            itertools.product(*(range(len(axis)) for axis in axes)),
            itertools.product(*axes),
            strict=True,
        )
    ]


def marked(cell: Any) -> Any:
    """A cell that only `make test-all` runs."""
    if hasattr(cell, "marks"):
        return pytest.param(*cell.values, id=cell.id, marks=[*cell.marks, full])
    values = cell if isinstance(cell, tuple) else (cell,)
    return pytest.param(*values, marks=full)


def selected(request: pytest.FixtureRequest, test: str, *names: str) -> list[Any]:
    """The values that a test of this module is run with, for a fixture that prepares them all.

    Args:
        request: Of the fixture.
        test: The name of the test.
        *names: Of its parameters; with several of them, the values are tuples.
    """
    found: list[Any] = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            if item.originalname == test:
                values = tuple(item.callspec.params[name] for name in names)
                found.append(values if len(names) > 1 else values[0])
    return [value for place, value in enumerate(found) if value not in found[:place]]
