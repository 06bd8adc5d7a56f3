"""`hierarchical`: plain inside a host, compressed between hosts.

Each chunk has one owner on every host. The others of the host send it their elements as they are;
the owner merges them, takes part in a `ps` among the owners, and hands the result out, again as
it is. Hosts may have different numbers of ranks; each host is weighted by its number.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipress.casync.graphs.graph import Draft, Graph, Kind, Slot
from hipress.casync.graphs.strategies import ps
from hipress.casync.graphs.strategies.base import Cluster, Strategy


def build(cluster: Cluster, rank: int, routes: Sequence[int]) -> Graph:
    """Builds the graph of one rank.

    A route spreads the owners of chunks inside a host, then the aggregators over hosts.
    """
    hosts = cluster.hosts
    draft = Draft(len(hosts), rank, routes)
    members = [[r for r, h in enumerate(hosts) if h == host] for host in sorted(set(hosts))]
    mine = next(group for group in members if rank in group)
    widest = max(len(group) for group in members)
    for chunk, route in enumerate(routes):
        owners = [group[route % len(group)] for group in members]
        owner = mine[route % len(mine)]
        gradient = Slot(Kind.GRADIENT, chunk)
        if rank != owner:
            draft.send(gradient, owner, 0)
            draft.recv(gradient, owner, 5 + ps.DEPTH)
            continue
        own = gradient
        if len(mine) > 1:
            own = _merge_host(draft, chunk, mine)
        aggregator = owners[route // widest % len(owners)]
        sizes = [float(len(group)) for group in members]
        ps.between(draft, chunk, own, owners, aggregator, sizes, depth=3)
        for other in mine:
            if other != rank:
                draft.send(gradient, other, 4 + ps.DEPTH)
    return draft.graph()


def _merge_host(draft: Draft, chunk: int, mine: Sequence[int]) -> Slot:
    """Adds the merge of the host's gradients in rank order; returns the slot of their mean."""
    parts = []
    for member in mine:
        if member == draft.rank:
            parts.append(Slot(Kind.GRADIENT, chunk))
        else:
            parts.append(Slot(Kind.RAW, chunk, member))
            draft.recv(parts[-1], member, 1)
    mean = Slot(Kind.PLAIN, chunk, draft.rank, 0)
    draft.merge(parts, mean, 2, [1.0 / len(mine)] * len(mine))
    return mean


STRATEGY = Strategy(name="hierarchical", build=build, has_host_stages=True)
