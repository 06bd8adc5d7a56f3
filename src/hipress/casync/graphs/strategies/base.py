"""A strategy: a builder of graphs, with what the rest of the package must know about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hipress.casync.graphs.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The ranks that a graph is built for."""

    hosts: tuple[int, ...]
    """The host of each rank."""
    codes_local: bool = False
    """Whether a rank's own gradient must pass its codec before it is merged (see `ring`)."""
    sends_elements: bool = False
    """Whether messages are the elements themselves, without frames; only where a strategy can."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks, N."""
        return len(self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to exchange gradients."""

    name: str
    build: Callable[[Cluster, int, Sequence[int]], Graph]
    """Builds the graph of a rank from (cluster, rank, route of each chunk)."""
    is_candidate: bool = True
    """Whether planners consider it for compressed gradients."""
    has_host_stages: bool = False
    """Whether the ranks of one host merge their gradients before anything is compressed."""
    can_send_elements: bool = False
    """Whether it can do without frames where there is no codec."""
    is_plain_sum: bool = False
    """Whether the transport's own all-reduce takes its place when there is no codec."""

    def sums_in_transport(self, codec: str) -> bool:
        """Returns whether the transport's all-reduce serves gradients under a codec."""
        return self.is_plain_sum and codec == "none"

    def num_gradients(self, hosts: Sequence[int], rank: int) -> int:
        """Returns the number of gradients in what a rank encodes as its own contribution."""
        return hosts.count(hosts[rank]) if self.has_host_stages else 1
