"""`ps`: each chunk has one aggregator among the ranks.

    worker      encode, send to the aggregator ... recv, decode
    aggregator  recv from each, decode, merge in rank order, encode, send to each, decode

Two quantisations, whatever N is. The aggregator decodes what it sent, so all hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipress.casync.graphs.graph import Draft, Graph, Kind, Slot
from hipress.casync.graphs.strategies.base import Cluster, Strategy

DEPTH = 8
"""The depth of the last task of a chunk."""


def build(cluster: Cluster, rank: int, routes: Sequence[int]) -> Graph:
    """Builds the graph of one rank; the aggregator of a chunk is its route modulo N."""
    num_ranks = cluster.num_ranks
    draft = Draft(num_ranks, rank, routes)
    members = range(num_ranks)
    for chunk, route in enumerate(routes):
        if cluster.sends_elements:
            _elements(draft, chunk, route % num_ranks)
            continue
        gradient = Slot(Kind.GRADIENT, chunk)
        between(draft, chunk, gradient, list(members), route % num_ranks, [1.0] * num_ranks)
    return draft.graph()


def _elements(draft: Draft, chunk: int, aggregator: int) -> None:
    """Adds the tasks of one chunk whose elements are sent, and received, where they are."""
    gradient = Slot(Kind.GRADIENT, chunk)
    if draft.rank != aggregator:
        draft.send(gradient, aggregator, 1)
        draft.recv(gradient, aggregator, 7)
        return
    parts = []
    others = [member for member in range(draft.num_ranks) if member != aggregator]
    for member in range(draft.num_ranks):
        parts.append(gradient if member == aggregator else Slot(Kind.RAW, chunk, member))
        if member != aggregator:
            draft.recv(parts[-1], member, 2)
    draft.merge(parts, gradient, 4, [1.0 / draft.num_ranks] * draft.num_ranks)
    for member in others:
        draft.send(gradient, member, 6)


def between(
    draft: Draft,
    chunk: int,
    own: Slot,
    members: Sequence[int],
    aggregator: int,
    sizes: Sequence[float],
    depth: int = 0,
) -> None:
    """Adds the tasks of one chunk among some ranks to a draft.

    Args:
        own: The slot that the rank of the draft contributes.
        members: The ranks that take part, in the order of merging.
        aggregator: The member that merges.
        sizes: The weight of each contribution.
        depth: The depth of the first task.
    """
    rank = draft.rank
    gradient = Slot(Kind.GRADIENT, chunk)
    back = Slot(Kind.BACK, chunk, aggregator, len(members))
    frame = Slot(Kind.FRAME, chunk, rank)
    draft.encode(own, frame, depth)
    if rank != aggregator:
        draft.send(frame, aggregator, depth + 1)
        draft.recv(back, aggregator, depth + 7)
    else:
        others = [member for member in members if member != rank]
        for member in others:
            draft.recv(Slot(Kind.FRAME, chunk, member), member, depth + 2)
        parts = [Slot(Kind.PLAIN, chunk, member) for member in members]
        for member, part in zip(members, parts, strict=True):
            draft.decode(Slot(Kind.FRAME, chunk, member), part, depth + 3)
        # One more than there are contributions: a slot of its own also if there is one member.
        mean = Slot(Kind.PLAIN, chunk, rank, len(members) + 1)
        draft.merge(parts, mean, depth + 4, [size / sum(sizes) for size in sizes])
        draft.encode(mean, back, depth + 5)
        for member in others:
            draft.send(back, member, depth + 6)
    draft.decode(back, gradient, depth + DEPTH)


STRATEGY = Strategy(name="ps", build=build, can_send_elements=True)
