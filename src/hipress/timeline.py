"""What happened when: the events that the engine records and reports draw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One task of one synchronisation; times are those of `time.perf_counter_ns`."""

    verb: str
    name: str
    """Of the synchronisation; empty if it has none."""
    piece: int
    queue: str
    """Where it ran: compute, send, recv, communicate."""
    start_ns: int
    end_ns: int


def overlap_s(events: Iterable[Event]) -> float:
    """Seconds in which something was computed while something else was under way.

    Example:
        >>> a = Event(verb="encode", name="", piece=0, queue="compute", start_ns=0, end_ns=10**9)
        >>> b = Event(verb="recv", name="", piece=1, queue="recv", start_ns=5 * 10**8, end_ns=10**9)
        >>> overlap_s([a, b])
        0.5
    """
    edges: list[tuple[int, int, int]] = []
    for event in events:
        kind = 0 if event.queue == "compute" else 1
        edges.append((event.start_ns, 1, kind))
        edges.append((event.end_ns, -1, kind))
    under_way = [0, 0]
    total_ns = last_ns = 0
    for moment_ns, change, kind in sorted(edges):
        if under_way[0] and under_way[1]:
            total_ns += moment_ns - last_ns
        under_way[kind] += change
        last_ns = moment_ns
    return total_ns / 1e9
