"""`ring`: each chunk goes once around to be merged and once more to be handed out.

    position 0      encode, send
    position k      recv, decode, merge with the own gradient, encode, send
    position N - 1  the same, and what it encodes is final: it goes around as it is

A hop encodes the *mean* of the ranks before it, so that no sum overflows a 16-bit codec. Each hop
quantises the running mean once more, so the error grows with N, where `ps` quantises twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipress.casync.graphs.graph import Draft, Graph, Kind, Slot
from hipress.casync.graphs.strategies.base import Cluster, Strategy

MERGE_DEPTHS = 5
"""Depths of one hop while ranks merge: encode, send, recv, decode, merge."""

PASS_DEPTHS = 2
"""Depths of one hop while the result is handed on: send, recv."""


def last_merge_depth(num_ranks: int) -> int:
    """Returns the depth from which on the result is only handed on."""
    return MERGE_DEPTHS * (num_ranks - 1)


def build(cluster: Cluster, rank: int, routes: Sequence[int]) -> Graph:
    """Builds the graph of one rank; a chunk starts at its route modulo N.

    With `codes_local` the own gradient passes its worker's codec, and what comes out is merged. A
    codec with momentum, or one whose way back keeps no residual, needs that; for others the encode
    of the hop takes care of the own gradient too.
    """
    num_ranks = cluster.num_ranks
    draft = Draft(num_ranks, rank, routes)
    for chunk, route in enumerate(routes):
        _chunk(draft, chunk, (rank - route) % num_ranks, cluster.codes_local)
    return draft.graph()


def _chunk(draft: Draft, chunk: int, position: int, codes_local: bool) -> None:
    num_ranks, rank = draft.num_ranks, draft.rank
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    gradient = Slot(Kind.GRADIENT, chunk)
    last = num_ranks - 1
    back = Slot(Kind.BACK, chunk, (rank - position + last) % num_ranks, num_ranks)
    start = MERGE_DEPTHS * position
    own = gradient
    if position == 0 or codes_local:
        frame = Slot(Kind.FRAME, chunk, rank)
        draft.encode(gradient, frame, 0 if position == 0 < last else start - 3)
    if position == 0 < last:
        draft.send(frame, after, 1)
    else:
        if codes_local or position == 0:
            own = Slot(Kind.PLAIN, chunk, rank)
            draft.decode(frame, own, start - 2)
        parts, weights = [own], [1.0 / (position + 1)]
        if position > 0:
            kind = Kind.FRAME if position == 1 else Kind.PARTIAL
            partial = Slot(kind, chunk, before, position)
            draft.recv(partial, before, start - 3)
            parts.insert(0, Slot(Kind.PLAIN, chunk, before, position))
            weights.insert(0, position / (position + 1))
            draft.decode(partial, parts[0], start - 2)
        mean = Slot(Kind.PLAIN, chunk, rank, num_ranks + 1)
        draft.merge(parts, mean, start - 1, weights)
        made = back if position == last else Slot(Kind.PARTIAL, chunk, rank, position + 1)
        draft.encode(mean, made, start)
        if position < last:
            draft.send(made, after, start + 1)
    _hand_out(draft, chunk, position, back)


def _hand_out(draft: Draft, chunk: int, position: int, back: Slot) -> None:
    """Adds the tasks that pass the final frame on unchanged and decode it."""
    num_ranks, rank = draft.num_ranks, draft.rank
    last = num_ranks - 1
    # The number of ranks that had it before this one.
    hop = 0 if position == last else position + 1
    depth = last_merge_depth(num_ranks) + PASS_DEPTHS * hop
    if hop > 0:
        draft.recv(back, (rank - 1) % num_ranks, depth)
    if hop < last:
        draft.send(back, (rank + 1) % num_ranks, depth + 1)
    draft.decode(back, Slot(Kind.GRADIENT, chunk), depth + 2)


STRATEGY = Strategy(name="ring", build=build)
