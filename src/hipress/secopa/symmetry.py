"""Where one rank stands for all: what it receives when, told from what it does itself.

Ranks that are alike do alike things at the same time. So a message comes in when a send of the
same kind of this rank's own goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hipress.casync.graphs.graph import Verb
from hipress.casync.graphs.strategies.ring import MERGE_DEPTHS, PASS_DEPTHS
from hipress.secopa.costs import Step

BEGIN = -1
"""Stands for the begin of a synchronisation, where a step is named."""

Mirrors = dict[int, list[tuple[int, float]]]
"""By send: the receives that come with it, and how much later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """What a hop between two ranks takes that the one who is played does not see."""

    message_s: float
    """Of a message, but for its bytes."""
    byte_s: float
    work_factor: float
    """By how much work takes longer than on a core of its own."""
    last_merge: int
    """The depth from which on the result is only handed on."""

    def delay_s(self, start: int, stop: int, num_bytes: float, work_s: float) -> float:
        """From one depth in the life of a chunk to another.

        Args:
            start: The depth that is known.
            stop: The one of the message.
            num_bytes: Of a message of the chunk.
            work_s: Of one rank on the chunk.
        """
        pass_s = self.message_s + num_bytes * self.byte_s
        merging = max(min(stop, self.last_merge) - start, 0) / MERGE_DEPTHS
        passing = max(stop - max(start, self.last_merge), 0) / PASS_DEPTHS
        return merging * (pass_s + work_s * self.work_factor) + passing * pass_s


def mirrors(steps: Sequence[Step], hops: Hops) -> tuple[Mirrors, Mirrors]:
    """Pairs receives with sends, and with other steps where there is no such send.

    A receive is one below its send in the life of a chunk, so it is paired with a send of the
    same kind one above it; where the rank has none, with one further up and a while later. Depth
    only grows, so nothing waits for itself.

    Args:
        steps: Of the rank.
        hops: For what lies between.

    Returns:
        Receives by send; and by computing step, or `BEGIN`, where the rank sends nothing of the
        kind: others begin with what it has when they have made it.
    """
    sends: dict[int, dict[int, list[int]]] = {}
    receives: dict[tuple[int, int], list[int]] = {}
    encodes: dict[int, int] = {}
    works: dict[int, float] = {}
    for place, step in enumerate(steps):
        if step.verb is Verb.SEND:
            sends.setdefault(step.kind, {}).setdefault(step.depth, []).append(place)
        elif step.verb is Verb.RECV:
            receives.setdefault((step.kind, step.depth - 1), []).append(place)
        elif step.verb is Verb.ENCODE:
            encodes.setdefault(step.chunk, place)
        works[step.chunk] = max(works.get(step.chunk, 0.0), step.work_s)
    with_sends: Mirrors = {}
    with_others: Mirrors = {}
    for (kind, depth), placements in receives.items():
        known = [above for above in sends.get(kind, ()) if above <= depth]
        own = sends[kind][max(known)] if known else []
        for k, place in enumerate(placements):
            step = steps[place]
            if own:
                found, source, start = with_sends, own[k * len(own) // len(placements)], max(known)
            else:
                found, source, start = with_others, encodes.get(step.chunk, BEGIN), 1
            delay_s = hops.delay_s(start, depth, step.num_bytes, works[step.chunk])
            found.setdefault(source, []).append((place, delay_s))
    return with_sends, with_others
