"""In which order messages leave, where a training loop waits for single parameters.

    fifo        as backward computes the gradients, on the way out and on the way back
    priority    what the next forward pass needs first goes first, both ways (P3, SysML'19)
    overlap     the way out as backward computes, the way back as the next forward pass needs it

*Units* are what is started at once: one large gradient, which is cut into slices, or neighbouring
small ones. All ranks use the same orders, so nothing is negotiated during a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from hipress.errors import UsageError, did_you_mean
from hipress.plan import Plan, ScheduleName

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
FIFO, PRIORITY, OVERLAP = SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule with its sizes.

    Example:
        >>> Schedule(name="overlap", slice_bytes=2**20, credit_bytes=2**22).name
        'overlap'
    """

    name: ScheduleName
    slice_bytes: int
    """Approximate bytes of a message."""
    credit_bytes: int
    """Most bytes that a rank has under way at once; one message always may be."""

    @classmethod
    def of(cls, plan: Plan) -> Schedule | None:
        """Returns the schedule of a plan; None if it has none."""
        if plan.schedule is None or plan.slice_bytes is None or plan.credit_bytes is None:
            return None
        return cls(name=plan.schedule, slice_bytes=plan.slice_bytes, credit_bytes=plan.credit_bytes)

    def __post_init__(self) -> None:
        check(self.name)
        for what, size in (("slice", self.slice_bytes), ("credit", self.credit_bytes)):
            if size < 1:
                raise UsageError(f"{what}_bytes is {size}; give at least 1.")


class Order(NamedTuple):
    """The places of a unit's messages among those of a step; lower numbers leave first."""

    out: int
    """The place on the way to the aggregator."""
    back: int
    """The place of the mean on its way to all ranks."""


def check(schedule: str) -> None:
    """Refuses an unknown schedule.

    Example:
        >>> check("overlap")
    """
    if schedule not in SCHEDULES:
        hint = did_you_mean(str(schedule), SCHEDULES)
        raise UsageError(
            f"schedule {schedule!r}{hint} is none of {', '.join(SCHEDULES)}; choose one."
        )


def orders(schedule: str, needed: Sequence[int]) -> tuple[Order, ...]:
    """Returns the order of each unit.

    Args:
        schedule: One of `SCHEDULES`.
        needed: For each unit, in the order in which backward completes them, its place in the order
            in which the forward pass needs them.

    Example:
        >>> orders("overlap", [1, 0])
        (Order(out=0, back=3), Order(out=1, back=2))
    """
    if schedule == FIFO:
        return tuple(Order(place, place) for place in range(len(needed)))
    if schedule == PRIORITY:
        return tuple(Order(first, first) for first in needed)
    return tuple(Order(place, len(needed) + first) for place, first in enumerate(needed))


def turn(chunk: int, peer: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Returns the place of a message among those of one unit.

    Each rank starts with another peer, or all would send to one rank at the same time.

    Example:
        >>> [turn(0, peer, rank=2, num_ranks=4) for peer in (3, 0, 1)]
        [(0, 1), (0, 2), (0, 3)]
    """
    return chunk // num_ranks, (peer - rank) % num_ranks


def units(
    numels: Sequence[int], least_numels: Sequence[int], keys: Sequence[Hashable]
) -> list[list[int]]:
    """Groups gradients into units; returns the indices of each, units in the order of completion.

    Args:
        numels: Elements of each gradient, in the order in which backward computes them.
        least_numels: For each gradient how many elements a unit should have, which is what a slice
            of its codec has. A gradient with as many is a unit of its own.
        keys: Only gradients with equal keys travel together, such as those with one codec.

    Example:
        >>> units([100, 9, 2, 3, 100], [8] * 5, "aabba")
        [[0], [1], [2, 3], [4]]
    """
    found: list[list[int]] = []
    open_units: dict[Hashable, list[int]] = {}
    for index, (numel, least, key) in enumerate(zip(numels, least_numels, keys, strict=True)):
        if numel >= least:
            found.append([index])
            continue
        unit = open_units.setdefault(key, [])
        unit.append(index)
        # A unit must not wait for gradients that backward computes much later.
        seen = sum(numels[unit[0] : index + 1])
        if sum(numels[k] for k in unit) >= least or seen >= SPAN * least:
            found.append(open_units.pop(key))
    found += open_units.values()
    return sorted(found, key=lambda unit: unit[-1])


SPAN = 8
"""A unit of small gradients ends when backward has computed so many times its size."""
