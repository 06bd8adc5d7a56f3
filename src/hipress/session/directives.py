"""What rank 0 tells all ranks to do under `auto`, what comes back, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things take and how much they must differ."""

    first_steps: int = 5
    """Plain, before anything is measured: the first two make buckets and memory."""
    gain: float = 0.03
    """A plan must be faster than plain by so much to be chosen."""
    drift_up: float = 1.3
    drift_down: float = 0.7
    """Step times beyond these, against those of the choice, are a change."""
    window: int = 6
    """Steps whose median is looked at."""
    in_a_row: int = 3
    """So many of these medians must be beyond."""
    look_every: tuple[int, int] = (4, 16)
    """Steps between two looks, at least and at most."""
    look_s: float = 0.12
    """A look costs the others a read of the store: 0.3 ms. More often than this it would show."""
    control_every: tuple[int, int] = (200, 2000)
    """Steps between two plain controls of a plan: at first, and in the end."""
    close: float = 1.15
    close_every: tuple[int, int] = (50, 400)
    """The same for a plan that is faster by less than this: looking costs next to nothing then."""
    control_share: float = 0.01
    """Of all time, that plain controls may cost."""
    block: tuple[int, int] = (3, 8)
    """Steps of a block that count, at least and at most."""
    block_s: float = 0.4
    """And about so long."""
    far: float = 1.5
    """Times that differ by so much need no second look."""
    rounds: int = 4
    """Blocks of each at most, where they do not."""
    replan_share: float = 0.02
    """Of all time, that planning in vain may cost."""
    tolerance: float = 1.15
    """How far a prediction may be from the truth and still spare a trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What all ranks do next."""

    number: int
    steps: int
    epoch: int | None
    """Of the plan; None: plain."""
    keeps: bool = False
    """Whether what codecs remember waits for a later order; else the first plain step sends it."""
    probes: bool = False
    """Whether all measure first; there are no steps then, but another order."""
    waits: bool = True
    """Whether the times of all its steps are needed to go on."""
    mode: str = "measure"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A plan that may pay."""

    epoch: int
    label: str
    step_s: float
    """As predicted."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of an order."""

    times: Sequence[float] = ()
    offers: Sequence[Offer] = ()


def first_order(steps: int) -> Order:
    """The order that all ranks begin with, untold."""
    return Order(number=0, steps=steps, epoch=None, mode="measure", reason="it measures first")
