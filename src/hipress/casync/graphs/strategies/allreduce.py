"""`allreduce`: every rank sends its frame to every other, and each merges all of them.

One quantisation and one round, but each rank receives N - 1 frames: for few ranks, or many bits
that stay on one host. Without a codec lowering makes the transport's own all-reduce of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipress.casync.graphs.graph import Draft, Graph, Kind, Slot
from hipress.casync.graphs.strategies.base import Cluster, Strategy


def build(cluster: Cluster, rank: int, routes: Sequence[int]) -> Graph:
    """Builds the graph of one rank."""
    num_ranks = cluster.num_ranks
    draft = Draft(num_ranks, rank, routes)
    for chunk in range(len(routes)):
        gradient = Slot(Kind.GRADIENT, chunk)
        frame = Slot(Kind.FRAME, chunk, rank)
        draft.encode(gradient, frame, 0)
        others = [(rank + step) % num_ranks for step in range(1, num_ranks)]
        for other in others:
            draft.send(frame, other, 1)
        for other in reversed(others):
            draft.recv(Slot(Kind.FRAME, chunk, other), other, 2)
        parts = [Slot(Kind.PLAIN, chunk, other) for other in range(num_ranks)]
        for other, part in enumerate(parts):
            draft.decode(Slot(Kind.FRAME, chunk, other), part, 3)
        draft.merge(parts, gradient, 4, [1.0 / num_ranks] * num_ranks)
    return draft.graph()


STRATEGY = Strategy(name="allreduce", build=build, is_candidate=False, is_plain_sum=True)
