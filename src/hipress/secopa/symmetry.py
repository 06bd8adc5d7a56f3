"""When a rank that stands for all receives messages, derived from what it does itself.

Ranks that are alike do the same things at the same time. So a message arrives when this rank's own
send of the same kind goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hipress.casync.graphs.graph import Verb
from hipress.casync.graphs.strategies.ring import MERGE_DEPTHS, PASS_DEPTHS
from hipress.secopa.costs import CostedTask

BEGIN = -1
"""Stands for the beginning of a synchronisation where a task is named."""

PairedReceives = dict[int, list[tuple[int, float]]]
"""For each task: the receives that are paired with it, and how many seconds later each arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """What a hop between two ranks costs, which the rank that is simulated does not see."""

    message_s: float
    """Seconds of a message without its bytes."""
    byte_s: float
    work_factor: float
    """How many times longer work takes than on a core of its own."""
    last_merge: int
    """The depth after which the result is only passed on."""

    def delay_s(self, start: int, stop: int, num_bytes: float, work_s: float) -> float:
        """Returns the time from one depth in the life of a chunk to another.

        Args:
            start: The depth whose time is known.
            stop: The depth of the message.
            num_bytes: Bytes of a message of the chunk.
            work_s: Work of one rank on the chunk.
        """
        pass_s = self.message_s + num_bytes * self.byte_s
        merging = max(min(stop, self.last_merge) - start, 0) / MERGE_DEPTHS
        passing = max(stop - max(start, self.last_merge), 0) / PASS_DEPTHS
        return merging * (pass_s + work_s * self.work_factor) + passing * pass_s


def pair_receives(tasks: Sequence[CostedTask], hops: Hops) -> tuple[PairedReceives, PairedReceives]:
    """Pairs receives with sends, and with other tasks where there is no such send.

    A receive is one deeper than its send in the life of a chunk, so it is paired with a send of the
    same kind at that depth; where the rank has none, with a send at a lower depth and a delay.
    Depth only grows, so no task waits for itself.

    Args:
        tasks: The tasks of the rank.
        hops: The costs of the hops in between.

    Returns:
        Receives by send; and receives by encoding task, or `BEGIN`, where the rank sends nothing of
        their kind: the other ranks send such a message when they have encoded it.
    """
    sends: dict[int, dict[int, list[int]]] = {}
    receives: dict[tuple[int, int], list[int]] = {}
    encodes: dict[int, int] = {}
    works: dict[int, float] = {}
    for place, task in enumerate(tasks):
        if task.verb is Verb.SEND:
            sends.setdefault(task.kind, {}).setdefault(task.depth, []).append(place)
        elif task.verb is Verb.RECV:
            receives.setdefault((task.kind, task.depth - 1), []).append(place)
        elif task.verb is Verb.ENCODE:
            encodes.setdefault(task.chunk, place)
        works[task.chunk] = max(works.get(task.chunk, 0.0), task.work_s)
    with_sends: PairedReceives = {}
    with_others: PairedReceives = {}
    for (kind, depth), places in receives.items():
        known = [above for above in sends.get(kind, ()) if above <= depth]
        own = sends[kind][max(known)] if known else []
        for k, place in enumerate(places):
            task = tasks[place]
            if own:
                found, source, start = with_sends, own[k * len(own) // len(places)], max(known)
            else:
                found, source, start = with_others, encodes.get(task.chunk, BEGIN), 1
            delay_s = hops.delay_s(start, depth, task.num_bytes, works[task.chunk])
            found.setdefault(source, []).append((place, delay_s))
    return with_sends, with_others
