"""The table of strategies; each builds the graph of a rank from (cluster, rank, routes).

To add a strategy, write a file with a `STRATEGY` and add a line to `STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipress.casync.graphs.strategies import allreduce, hierarchical, ps, ring
from hipress.casync.graphs.strategies.base import Cluster, Strategy
from hipress.errors import UsageError, did_you_mean

__all__ = ["STRATEGIES", "Cluster", "Strategy", "candidates", "check", "get"]

STRATEGIES: dict[str, Strategy] = {
    module.STRATEGY.name: module.STRATEGY
    for module in (
        ps,
        ring,
        hierarchical,
        allreduce,
    )
}
"""Every strategy by its name."""


def get(name: str) -> Strategy:
    """Returns the strategy of this name; raises UsageError if there is none."""
    check(name)
    return STRATEGIES[name]


def check(name: str) -> None:
    """Refuses a name that is not in the table."""
    if name in STRATEGIES:
        return
    hint = did_you_mean(str(name).lower(), STRATEGIES)
    raise UsageError(f"strategy {name!r}{hint} is none of {', '.join(STRATEGIES)}; choose one.")


def candidates(hosts: Sequence[int] = ()) -> tuple[str, ...]:
    """Returns the strategies that a planner should consider for compressed gradients.

    Args:
        hosts: The host of each rank; strategies with stages per host are left out where no two
            ranks share a host.

    Example:
        >>> candidates(), candidates(hosts=(0, 0, 1, 1))
        (('ps', 'ring'), ('ps', 'ring', 'hierarchical'))
    """
    shared = len(set(hosts)) < len(hosts)
    return tuple(
        name
        for name, strategy in STRATEGIES.items()
        if strategy.is_candidate and (shared or not strategy.has_host_stages)
    )
