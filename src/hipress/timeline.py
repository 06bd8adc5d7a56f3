"""A timeline: timed events of the engine and the model, and a trace file of all ranks.

The trace is JSON in Chrome's trace event format, which https://ui.perfetto.dev opens: a process for
each rank, a row for each queue. Perfetto's importer has these rules:

    times        are truncated, not rounded, to nanoseconds
    rows         spans of one row must nest or be apart, or the later one is dropped; so messages of
                 one direction are drawn one after the other, and spans of another queue that
                 overlap go to further rows, "compute 2" and so on
    thread ids   identify a row of the whole file, not of a process; 0 is the idle thread
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from hipress.errors import PeerError
from hipress.version import __version__

MODEL = "model"
BUCKETS = "buckets"
QUEUES = (MODEL, BUCKETS, "compute", "send", "recv", "communicate")
"""Rows of a rank from top to bottom; other queues come below."""

DIRECTIONS = ("send", "recv")
"""Queues whose messages are under way together and are drawn in one row."""

MESSAGE_NOTE = (
    "messages of one direction are drawn one after the other: from when one was asked for, or the "
    "one before it was done (waited_us later), until it is done; so recv holds waits for senders"
)
CLOCK_NOTE = "clocks were compared once, before the first step; they may have drifted since"
GPU_NOTE = "on a GPU the model's rows show when work was started"

_VERSION = 1
_FIRST_PID = 1
"""The process id of rank 0; Perfetto takes 0 for the idle process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One task of one synchronisation, with times from `time.perf_counter_ns`.

    The start and end of an instant, such as a bucket becoming ready, are the same.
    """

    verb: str
    name: str
    """Name of the synchronisation; empty if it has none."""
    chunk: int
    """Index of the chunk; for the model the step, for a bucket its index."""
    queue: str
    """Where the task ran: one of `QUEUES`."""
    start_ns: int
    end_ns: int
    label: str = ""
    """Names of the gradients, and the part of them."""
    wire_bytes: int | None = None
    """Size of the message, if it is known."""
    priority: int | None = None
    """Its place in the order of a schedule; lower numbers go first. None without a schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The events that one rank recorded.

    Example:
        >>> event = Event(verb="encode", name="", chunk=0, queue="compute", start_ns=5, end_ns=8)
        >>> one = RankTrace(rank=1, host="b", events=(event,), offset_ns=-3, error_ns=1)
        >>> RankTrace.from_bytes(one.to_bytes()) == one
        True
    """

    rank: int
    host: str
    events: tuple[Event, ...]
    offset_ns: int = 0
    """Added to this rank's times, it gives times on rank 0's clock."""
    error_ns: int = 0
    """Bound on the error of the offset."""
    device: str = "cpu"
    """Type of the model's device."""

    def to_bytes(self) -> bytes:
        """Return the trace as JSON, to be sent to another rank."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        row = attrgetter(*(field.name for field in fields(Event)))
        return json.dumps(
            plain | {"version": _VERSION, "events": [*map(row, self.events)]}
        ).encode()

    @staticmethod
    def from_bytes(data: bytes) -> RankTrace:
        """Read what `to_bytes` wrote, on this rank or another.

        Raises:
            PeerError: The bytes were written by something else.
        """
        names = [field.name for field in fields(Event)]
        try:
            plain = json.loads(data)
            if plain.pop("version") != _VERSION:
                raise ValueError("another version")
            events = [Event(**dict(zip(names, row, strict=True))) for row in plain.pop("events")]
            trace = RankTrace(**plain, events=tuple(events))
            if not (_has_types(trace) and all(map(_has_types, events))):
                raise ValueError("a value of another type")
            return trace
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PeerError(
                f"the timeline of a rank cannot be read ({error}); run the same version of "
                "hipress on all ranks."
            ) from error


_TYPES = {
    "str": (str,),
    "int": (int,),
    "int | None": (int, type(None)),
    "tuple[Event, ...]": (tuple,),
}


def _has_types(value: Event | RankTrace) -> bool:
    """Return whether each field has exactly its annotated type; True is no int here."""
    return all(type(getattr(value, f.name)) in _TYPES[str(f.type)] for f in fields(value))


def overlap_s(events: Iterable[Event]) -> float:
    """Return the seconds in which a codec computed while another task was in progress.

    Events of the model and of buckets do not count.

    Example:
        >>> a = Event(verb="encode", name="", chunk=0, queue="compute", start_ns=0, end_ns=10**9)
        >>> b = Event(verb="recv", name="", chunk=1, queue="recv", start_ns=5 * 10**8, end_ns=10**9)
        >>> overlap_s([a, b])
        0.5
    """
    computes: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for event in events:
        if event.queue not in (MODEL, BUCKETS):
            spans = computes if event.queue == "compute" else others
            spans.append((event.start_ns, event.end_ns))
    return both_s(computes, others)


def both_s(these: Sequence[tuple[int, int]], those: Sequence[tuple[int, int]]) -> float:
    """Return the seconds in which a span of each of the two lists was in progress."""
    edges: list[tuple[int, int, int]] = []
    for kind, spans in enumerate((these, those)):
        for start_ns, end_ns in spans:
            edges += [(start_ns, 1, kind), (end_ns, -1, kind)]
    under_way = [0, 0]
    total_ns = last_ns = 0
    for moment_ns, change, kind in sorted(edges):
        if under_way[0] and under_way[1]:
            total_ns += moment_ns - last_ns
        under_way[kind] += change
        last_ns = moment_ns
    return total_ns / 1e9


# --- the trace file -------------------------------------------------------------------------------


def chrome_trace(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Return a trace of all ranks on rank 0's clock, ready for JSON; time 0 is the first event.

    Example:
        >>> event = Event(verb="encode", name="", chunk=2, queue="compute", start_ns=5, end_ns=1505)
        >>> trace = chrome_trace([RankTrace(rank=0, host="a", events=(event,))])
        >>> trace["traceEvents"][-1]["name"], trace["traceEvents"][-1]["dur"]
        ('encode', 1.5)
    """
    starts = [event.start_ns + one.offset_ns for one in ranks for event in one.events]
    zero_ns = min(starts, default=0)
    found: list[dict[str, Any]] = []
    tid = _FIRST_PID + max((one.rank for one in ranks), default=0)
    for one in sorted(ranks, key=lambda one: one.rank):
        pid = _FIRST_PID + one.rank
        found += _named("process", {"pid": pid}, f"rank {one.rank} ({one.host})", one.rank)
        for place, (row, events) in enumerate(_rows(one.events)):
            tid += 1
            at = {"pid": pid, "tid": tid}
            found += _named("thread", at, row, place)
            found += _drawn_row(events, at, one.offset_ns - zero_ns)
    notes = [MESSAGE_NOTE]
    notes += [CLOCK_NOTE] if len(ranks) > 1 else []
    notes += [GPU_NOTE] if any(one.device != "cpu" for one in ranks) else []
    other = {
        "version": f"hipress {__version__}",
        "clocks": [
            {"rank": one.rank, "offset_us": one.offset_ns / 1000, "error_us": one.error_ns / 1000}
            for one in ranks
        ],
        "notes": notes,
    }
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": other}


def _named(kind: str, at: Mapping[str, int], name: str, place: int) -> list[dict[str, Any]]:
    """Return the metadata events for the name and position of a process or thread."""
    return [
        {"ph": "M", "name": f"{kind}_name", **at, "args": {"name": name}},
        {"ph": "M", "name": f"{kind}_sort_index", **at, "args": {"sort_index": place}},
    ]


def _rows(events: Iterable[Event]) -> Iterator[tuple[str, list[Event]]]:
    """Yield rows with their events; an event goes to the first row that is free at its start."""
    queues: dict[str, list[list[Event]]] = {queue: [] for queue in QUEUES}
    for event in sorted(events, key=lambda event: (event.start_ns, event.end_ns)):
        rows = queues.setdefault(event.queue, [])
        shared = event.queue in DIRECTIONS
        free = next((row for row in rows if shared or row[-1].end_ns <= event.start_ns), None)
        if free is None:
            rows.append(free := [])
        free.append(event)
    for queue, rows in queues.items():
        for number, row in enumerate(rows, 1):
            yield queue if number == 1 else f"{queue} {number}", row


def _drawn_row(events: Iterable[Event], at: Mapping[str, int], shift_ns: int) -> list[Any]:
    """Return the drawn events of a row; those of one direction begin when the last has ended."""
    found = []
    done_ns = 0
    for event in sorted(events, key=lambda event: (event.end_ns, event.start_ns)):
        begin_ns = event.start_ns
        if event.queue in DIRECTIONS:
            begin_ns, done_ns = max(begin_ns, done_ns), event.end_ns
        one = _drawn(replace(event, start_ns=begin_ns), at, shift_ns)
        if begin_ns > event.start_ns:
            one["args"]["waited_us"] = _us(begin_ns - event.start_ns)
        found.append(one)
    return found


def _drawn(event: Event, at: Mapping[str, int], shift_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {"gradient": event.label} if event.label else {}
    name = event.verb
    if event.queue == MODEL:
        args = {"step": event.chunk} | ({"note": event.label} if event.label else {})
    elif event.queue == BUCKETS:
        name = f"{event.name} {event.verb}"
    else:
        args |= {"chunk": event.chunk, "synchronisation": event.name}
    if event.wire_bytes is not None:
        args["bytes"] = event.wire_bytes
    if event.priority is not None:
        args["priority"] = event.priority
    shape: dict[str, Any] = {"ph": "i", "s": "t"}
    if event.end_ns != event.start_ns:
        shape = {"ph": "X", "dur": _us(event.end_ns - event.start_ns)}
    ts = _us(event.start_ns + shift_ns)
    return {"name": name, "cat": event.verb, **shape, "ts": ts, **at, "args": args}


def _us(ns: int) -> float:
    """Return microseconds that Perfetto, which truncates, reads as the same nanoseconds."""
    us = ns / 1000
    while int(us * 1000) < ns:
        us = math.nextafter(us, math.inf)
    return us
