"""The description of a built-in codec: what its small file holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a codec's expression."""

    name: str
    default: bool | int | float
    rule: str
    """What is allowed, in words."""
    allowed: Callable[[Any], bool]
    param: str = ""
    """The program's parameter, where its name differs."""
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A codec of the table."""

    program: str
    """File name of its program, beside this module."""
    summary: str
    """One line: what it sends."""
    paper: str
    options: tuple[Option, ...] = ()
    feedback: bool = False
    """Whether it needs error feedback to converge, and so has it unless `ef=false`."""


def share(value: Any) -> bool:
    """Whether an option is a share of the gradient: above 0, at most 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
