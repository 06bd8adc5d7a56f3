"""The description of a codec: what its small file holds, here or in another package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Value = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a codec's expression."""

    name: str
    default: Value
    rule: str
    """What is allowed, in words."""
    allowed: Callable[[Any], bool]
    about: str = ""
    is_in_gradient_units: bool = False
    """Whether it is compared with elements or norms of gradients. Under a loss scaler it is
    multiplied by the loss scale (see `Codec.scaled`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Describes one codec of the table."""

    program: str
    """File name of its CompLL program."""
    summary: str
    """What it sends, in one line."""
    paper: str
    options: tuple[Option, ...] = ()
    params: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """The program's parameters, from the options."""
    feedback: bool = False
    """Whether it needs error feedback to converge, and so has it unless `ef=false`."""
    back: Callable[[Mapping[str, Any], int], str] | None = None
    """The expression of the way back for some options and workers; the codec itself if None."""
    phases: Callable[[Mapping[str, Any]], list[tuple[int, dict[str, Any]]]] | None = None
    """First step and changed options of each phase, if the rate changes over time. The options of a
    phase must not change again: `dgc` gives `warmup=0` in each."""
    clip: str | None = None
    """Name of the option that limits the norm of a gradient; 0 turns it off. The engine clips whole
    gradients before it cuts them (see `Codec.clip`)."""
    own_memory: bool = False
    """Whether it keeps momentum and a residual itself, so that wrappers must not add them."""
    shares_stream: bool = False
    """Whether all ranks must draw the same random numbers, e.g. to pick the same places."""
    keeps_sizes: bool = False
    """Whether each decoded element has nearly the size of the gradient's (`Codec.keeps_sizes`)."""
    chooses_largest: bool = False
    """Whether it sends the largest elements only (`Codec.chooses_largest`)."""
    for_momentum: Callable[[Mapping[str, Any]], str] | None = None
    """The expression of the codec for a momentum that the optimizer keeps, for some options; the
    codec itself if None. One with `own_memory` needs it (see `Codec.for_momentum`)."""
    package: str = "hipress.codecs"
    """The package whose folder holds the program."""


# Rules for options.

RATIO_RULE = "above 0, at most 1"
POSITIVE_RULE = "from 1e-30 to 1e30"
FRACTION_RULE = "from 0 to 0.999999"


def share(value: Any) -> bool:
    """Returns whether an option is a share of the gradient: above 0, at most 1."""
    return number(value) and 0 < value <= 1


def number(value: Any) -> bool:
    """Returns whether an option is a number (true and false are not)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def positive(value: Any) -> bool:
    """Returns whether an option is above 0 and far from the limits of binary32."""
    return number(value) and 1e-30 <= value <= 1e30


def truth(value: Any) -> bool:
    """Returns whether an option is true or false."""
    return isinstance(value, bool)


def fraction(value: Any) -> bool:
    """Returns whether an option is at least 0 and below 1, also when rounded to binary32."""
    return number(value) and 0 <= value <= 0.999999


# Options of several codecs.


def ratio(name: str, default: float, about: str) -> Option:
    """Makes an option that is a share of the elements."""
    return Option(name=name, default=default, rule=RATIO_RULE, allowed=share, about=about)


def flag(name: str, default: bool, about: str) -> Option:
    """Makes an option that is true or false."""
    return Option(name=name, default=default, rule="true or false", allowed=truth, about=about)


def count(name: str, default: int, most: int, about: str) -> Option:
    """Makes an option that is a whole number from 1 to `most`."""
    return Option(
        name=name,
        default=default,
        rule=f"a whole number from 1 to {most}",
        allowed=lambda value: number(value) and 1 <= value <= most and value == int(value),
        about=about,
    )


def block(default: int) -> Option:
    """Makes the option for the size of blocks that share a scale."""
    return Option(
        name="block",
        default=default,
        rule="a multiple of 8 from 64 to 65536",
        allowed=lambda value: number(value) and 64 <= value <= 65536 and value % 8 == 0,
        about="elements that share a scale",
    )


def feedback_off(options: Mapping[str, Any]) -> str:
    """Returns what `back` adds to an expression so that `ef=false` holds on the way back too."""
    return "" if options["ef"] else ", ef=false"
