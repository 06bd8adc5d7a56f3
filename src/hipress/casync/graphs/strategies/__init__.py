"""One builder per strategy: from (N, r, routes) to the graph of one rank.

To add one, write a file with a `build` and add a line to `STRATEGIES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hipress.casync.graphs.graph import Graph
from hipress.casync.graphs.strategies import allreduce, hierarchical, ps, ring
from hipress.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a builder knows of the ranks."""

    hosts: tuple[int, ...]
    """The host of each rank."""
    codes_local: bool = False
    """Whether a rank's own gradient must pass its codec before it is merged (see `ring`)."""

    @property
    def num_ranks(self) -> int:
        """N."""
        return len(self.hosts)


STRATEGIES: dict[str, Callable[[Cluster, int, Sequence[int]], Graph]] = {
    "ps": lambda cluster, rank, routes: ps.build(cluster.num_ranks, rank, routes),
    "ring": lambda cluster, rank, routes: ring.build(
        cluster.num_ranks, rank, routes, codes_local=cluster.codes_local
    ),
    "hierarchical": lambda cluster, rank, routes: hierarchical.build(cluster.hosts, rank, routes),
    "allreduce": lambda cluster, rank, routes: allreduce.build(cluster.num_ranks, rank, routes),
}
"""Name: builder."""


def build(strategy: str, cluster: Cluster, rank: int, routes: Sequence[int]) -> Graph:
    """The graph of one rank.

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
    check(strategy)
    return STRATEGIES[strategy](cluster, rank, routes)


def check(strategy: str) -> None:
    """Refuses a name that is not in the table."""
    if strategy in STRATEGIES:
        return
    near = difflib.get_close_matches(str(strategy).lower(), STRATEGIES, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UsageError(f"strategy {strategy!r}{hint} is none of {', '.join(STRATEGIES)}; choose one.")
