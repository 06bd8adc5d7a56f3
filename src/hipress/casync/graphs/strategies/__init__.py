"""The table of strategies: from (cluster, rank, routes) to the graph of one rank.

To add a strategy, write a file with a `STRATEGY` and add a line to `STRATEGIES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hipress.casync.graphs.graph import Graph
from hipress.casync.graphs.strategies import allreduce, hierarchical, ps, ring
from hipress.casync.graphs.strategies.base import Cluster, Strategy
from hipress.errors import UsageError

__all__ = ["STRATEGIES", "Cluster", "Strategy", "build", "candidates", "check", "get"]

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
    near = difflib.get_close_matches(str(name).lower(), STRATEGIES, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
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


def build(strategy: str, cluster: Cluster, rank: int, routes: Sequence[int]) -> Graph:
    """Builds the graph of one rank.

    Args:
        strategy: A name of the table.
        cluster: All ranks.
        rank: The one to build for.
        routes: A number for each chunk, which decides its aggregator or its start in the ring.

    Example:
        >>> graph = build("ps", Cluster(hosts=(0, 1)), 0, [0, 1])
        >>> [task.verb.value for task in graph.tasks if task.chunk == 1]
        ['encode', 'send', 'recv', 'decode']
    """
    return get(strategy).build(cluster, rank, routes)
