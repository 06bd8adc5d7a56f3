"""Groups the gradients of a bucket that travel together, in the order in which they start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class GroupKey(NamedTuple):
    """What gradients of one bucket must have in common to travel together."""

    codec: str
    """The codec's name; `none` sends the elements as they are."""
    strategy: str
    rate: int | None = None
    """The optimizer's parameter group, for a codec that must know the learning rate."""
    bulk: int | None = None
    """The number that a plan gives to gradients which may share frames."""
    order: int | None = None
    """The position among the groups of the bucket, if the plan gives one."""
    sends_momentum: bool = False
    """Whether the optimizer's momentum is exchanged in place of the gradient."""

    @property
    def start_order(self) -> int:
        """The group with the lowest number starts first.

        Compressed gradients take longest, so they start first unless the plan gives an order.
        """
        return int(self.codec == "none") if self.order is None else self.order


def grouped(items: Iterable[Item], key: Callable[[Item], GroupKey]) -> dict[GroupKey, list[Item]]:
    """Groups the gradients of a bucket; groups are in the order in which they start.

    Args:
        items: The gradients, in the order of the bucket, which each group keeps.
        key: Returns the key of a gradient.

    Example:
        >>> keys = {"a": GroupKey("none", "ps"), "b": GroupKey("onebit", "ps")}
        >>> list(grouped("aba", keys.get).values())
        [['b'], ['a', 'a']]
    """
    found: dict[GroupKey, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return {group: found[group] for group in sorted(found, key=lambda group: group.start_order)}
