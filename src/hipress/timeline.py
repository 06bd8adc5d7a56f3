"""What happened when: events of the engine and the model, and one picture of all ranks.

The picture is JSON that Chrome's tracing and https://ui.perfetto.dev open: a process for each
rank, a row for each queue. What Perfetto needs, by its importer's sources:

    times        are cut, not rounded, to nanoseconds
    rows         spans of one row must nest or be apart, or the later one is dropped; so spans of a
                 queue that overlap go to further rows, "recv 2" and so on
    thread ids   name a row of the whole file, not of a process; 0 is the idle thread
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from hipress.errors import PeerError
from hipress.version import __version__

MODEL = "model"
BUCKETS = "buckets"
QUEUES = (MODEL, BUCKETS, "compute", "send", "recv", "communicate")
"""Rows from top to bottom; other queues come below."""

CLOCK_NOTE = "clocks were compared once, before the first step; they may have drifted since"
GPU_NOTE = "on a GPU the model's rows show when work was started"

_VERSION = 1
_FIRST_PID = 1
"""Of rank 0; Perfetto takes 0 for the idle process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One task of one synchronisation; times are those of `time.perf_counter_ns`.

    A moment, such as a bucket that is ready, starts when it ends.
    """

    verb: str
    name: str
    """Of the synchronisation; empty if it has none."""
    piece: int
    """Of the synchronisation; of the model the step, of a bucket its index."""
    queue: str
    """Where it ran: one of `QUEUES`."""
    start_ns: int
    end_ns: int
    label: str = ""
    """Names of gradients, and which part of them."""
    wire_bytes: int | None = None
    """Of the message, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank has recorded.

    Example:
        >>> event = Event(verb="encode", name="", piece=0, queue="compute", start_ns=5, end_ns=8)
        >>> one = RankTrace(rank=1, host="b", events=(event,), offset_ns=-3, error_ns=1)
        >>> RankTrace.from_bytes(one.to_bytes()) == one
        True
    """

    rank: int
    host: str
    events: tuple[Event, ...]
    offset_ns: int = 0
    """To be added to this rank's times to get rank 0's."""
    error_ns: int = 0
    """The offset is right within this."""
    device: str = "cpu"
    """The kind of device that the model is on."""

    def to_bytes(self) -> bytes:
        """As JSON, to be sent to another rank."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain |= {"version": _VERSION, "events": [*map(attrgetter(*_EVENT), self.events)]}
        return json.dumps(plain).encode()

    @staticmethod
    def from_bytes(data: bytes) -> RankTrace:
        """What `to_bytes` has written, on this rank or another.

        Raises:
            PeerError: It was written by something else.
        """
        try:
            plain = json.loads(data)
            if plain.pop("version") != _VERSION:
                raise ValueError("another version")
            events = [dict(zip(_EVENT, row, strict=True)) for row in plain.pop("events")]
            if not _fits(plain, _RANK_TRACE) or not all(_fits(event, _EVENT) for event in events):
                raise ValueError("a value of another type")
            return RankTrace(**plain, events=tuple(Event(**event) for event in events))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PeerError(
                f"the timeline of a rank can not be read ({error}); run the same version of "
                "hipress on all ranks."
            ) from error


_EVENT: dict[str, tuple[type, ...]] = {
    "verb": (str,),
    "name": (str,),
    "piece": (int,),
    "queue": (str,),
    "start_ns": (int,),
    "end_ns": (int,),
    "label": (str,),
    "wire_bytes": (int, type(None)),
}
_RANK_TRACE: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "host": (str,),
    "offset_ns": (int,),
    "error_ns": (int,),
    "device": (str,),
}


def _fits(values: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> bool:
    return values.keys() == types.keys() and all(type(values[k]) in types[k] for k in types)


def overlap_s(events: Iterable[Event]) -> float:
    """Seconds in which something was computed while something else was under way.

    The model's phases and buckets do not count.

    Example:
        >>> a = Event(verb="encode", name="", piece=0, queue="compute", start_ns=0, end_ns=10**9)
        >>> b = Event(verb="recv", name="", piece=1, queue="recv", start_ns=5 * 10**8, end_ns=10**9)
        >>> overlap_s([a, b])
        0.5
    """
    spans = [(e.queue, e.start_ns, e.end_ns) for e in events if e.queue not in (MODEL, BUCKETS)]
    return _both_s(
        [(start, end) for queue, start, end in spans if queue == "compute"],
        [(start, end) for queue, start, end in spans if queue != "compute"],
    )


# --- the picture ----------------------------------------------------------------------------------


def chrome_trace(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """All ranks on rank 0's clock, as an object to be written as JSON; time 0 is the first event.

    Example:
        >>> event = Event(verb="encode", name="", piece=2, queue="compute", start_ns=5, end_ns=1505)
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
            found += [_drawn(event, at, one.offset_ns - zero_ns) for event in events]
    notes = ["recv is drawn from when it was asked for, so it holds the wait for the sender"]
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
    """Metadata: what a process or thread is called and where it stands."""
    return [
        {"ph": "M", "name": f"{kind}_name", **at, "args": {"name": name}},
        {"ph": "M", "name": f"{kind}_sort_index", **at, "args": {"sort_index": place}},
    ]


def _rows(events: Iterable[Event]) -> Iterator[tuple[str, list[Event]]]:
    """Events by row, those of a row one after another; each goes to the first row that is free."""
    queues: dict[str, list[list[Event]]] = {queue: [] for queue in QUEUES}
    for event in sorted(events, key=lambda event: (event.start_ns, event.end_ns)):
        rows = queues.setdefault(event.queue, [])
        free = next((row for row in rows if row[-1].end_ns <= event.start_ns), None)
        if free is None:
            rows.append(free := [])
        free.append(event)
    for queue, rows in queues.items():
        for number, row in enumerate(rows, 1):
            yield queue if number == 1 else f"{queue} {number}", row


def _drawn(event: Event, at: Mapping[str, int], shift_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {"gradient": event.label} if event.label else {}
    name = event.verb
    if event.queue == MODEL:
        args = {"step": event.piece} | ({"note": event.label} if event.label else {})
    elif event.queue == BUCKETS:
        name = f"{event.name} {event.verb}"
    else:
        args |= {"piece": event.piece, "synchronisation": event.name}
    if event.wire_bytes is not None:
        args["bytes"] = event.wire_bytes
    shape: dict[str, Any] = {"ph": "i", "s": "t"}
    if event.end_ns != event.start_ns:
        shape = {"ph": "X", "dur": _us(event.end_ns - event.start_ns)}
    ts = _us(event.start_ns + shift_ns)
    return {"name": name, "cat": event.verb, **shape, "ts": ts, **at, "args": args}


def _us(ns: int) -> float:
    """Microseconds from which `_ns` gets the same nanoseconds back."""
    us = ns / 1000
    while _ns(us) < ns:
        us = math.nextafter(us, math.inf)
    return us


def _ns(us: float) -> int:
    """As Perfetto reads a time."""
    return int(us * 1000)


# --- what a picture says --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Where the time of one rank went."""

    rank: int
    verb_s: dict[str, float]
    """Seconds by verb, of the model's too; those that ran at the same time are added up."""
    overlap_s: float
    """While something was computed for the exchange, something else of it was under way."""
    hidden_s: float
    """While the model ran backward, something of the exchange was under way."""


def summary(trace: Mapping[str, Any]) -> list[Summary]:
    """What each rank of a picture spent its time on; the picture may come from a file.

    Example:
        >>> a = Event(verb="backward", name="", piece=0, queue=MODEL, start_ns=0, end_ns=10**9)
        >>> b = Event(verb="send", name="", piece=1, queue="send", start_ns=0, end_ns=2 * 10**9)
        >>> summary(chrome_trace([RankTrace(rank=0, host="a", events=(a, b))]))[0].hidden_s
        1.0
    """
    queues = {
        event["tid"]: re.sub(r" \d+$", "", event["args"]["name"])
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    ranks: dict[int, list[Event]] = {}
    for event in trace["traceEvents"]:
        events = ranks.setdefault(event["pid"] - _FIRST_PID, [])
        if event["ph"] == "X":
            start_ns, queue = _ns(event["ts"]), queues[event["tid"]]
            end_ns = start_ns + _ns(event["dur"])
            found = {"verb": event["cat"], "queue": queue, "start_ns": start_ns, "end_ns": end_ns}
            events.append(Event(name="", piece=0, **found))
    return [_summary(rank, events) for rank, events in sorted(ranks.items())]


def _summary(rank: int, events: Sequence[Event]) -> Summary:
    verb_ns: dict[str, int] = {}
    for event in events:
        verb_ns[event.verb] = verb_ns.get(event.verb, 0) + event.end_ns - event.start_ns
    return Summary(
        rank=rank,
        verb_s={verb: ns / 1e9 for verb, ns in verb_ns.items()},
        overlap_s=overlap_s(events),
        hidden_s=_both_s(
            [(e.start_ns, e.end_ns) for e in events if e.verb == "backward"],
            [(e.start_ns, e.end_ns) for e in events if e.queue not in (MODEL, BUCKETS)],
        ),
    )


def _both_s(these: Sequence[tuple[int, int]], those: Sequence[tuple[int, int]]) -> float:
    """Seconds in which one of these spans and one of those was under way."""
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


def check_trace(trace: Mapping[str, Any]) -> list[str]:
    """What Perfetto would refuse, drop or draw in a wrong place; empty if all is well.

    Example:
        >>> check_trace({"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 0.5}]})
        ["event 0 ('a'): no dur"]
    """
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        return ["traceEvents is missing or no list"]
    found: list[str] = []
    named: dict[tuple[str, int], int] = {}
    used: set[tuple[str, int, int]] = set()
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for place, event in enumerate(events):
        problem = _problem(event)
        if problem:
            name = event.get("name") if isinstance(event, dict) else event
            found.append(f"event {place} ({name!r}): {problem}")
            continue
        pid, tid = event["pid"], event.get("tid", 0)
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                kind = event["name"].removesuffix("_name")
                named[kind, pid if kind == "process" else tid] = pid
            continue
        used |= {("process", pid, pid), ("thread", tid, pid)}
        if event["ph"] == "X":
            start_ns = _ns(event["ts"])
            spans.setdefault(tid, []).append(
                (start_ns, start_ns + _ns(event["dur"]), event["name"])
            )
    for kind, number, pid in sorted(used):
        if (kind, number) not in named:
            found.append(f"{kind} {number} has no name")
        elif named[kind, number] != pid:
            found.append(f"{kind} {number} is in processes {named[kind, number]} and {pid}")
    for tid, row in spans.items():
        found += [f"thread {tid}: {text}" for text in _crossings(row)]
    try:
        json.dumps(trace, allow_nan=False)
    except (TypeError, ValueError) as error:
        found.append(f"it is no JSON: {error}")
    return found


def _problem(event: Any) -> str | None:
    """What is wrong with one event by itself."""
    if not isinstance(event, dict):
        return "no object"
    phase = event.get("ph")
    needed = {"M": ("name", "pid", "args"), "X": _SPAN, "i": _SPAN[:-1]}.get(str(phase))
    if needed is None:
        return f"ph is {phase!r}, where M, X and i are drawn"
    missing = [key for key in needed if key not in event]
    if missing:
        return f"no {' and no '.join(missing)}"
    if not isinstance(event["name"], str) or not event["name"]:
        return "its name is no text"
    if not isinstance(event.get("args", {}), dict):
        return "args is no object"
    for key in ("pid", "tid"):
        if key in event and not (type(event[key]) is int and 0 < event[key] < 2**32):
            return f"{key} is {event[key]!r}, and must be from 1 to 2**32 - 1"
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if type(value) not in (int, float) or not math.isfinite(value):
            return f"{key} is {value!r}, no finite number"
        if value < 0:
            return f"{key} is negative"
    return None


_SPAN = ("name", "pid", "tid", "ts", "dur")


def _crossings(row: list[tuple[int, int, str]]) -> Iterator[str]:
    """Spans of one row that neither nest nor are apart."""
    around: list[tuple[int, int, str]] = []
    for span in sorted(row, key=lambda span: (span[0], -span[1])):
        start_ns, end_ns, name = span
        while around and around[-1][1] <= start_ns:
            around.pop()
        if around and around[-1][1] < end_ns:
            yield f"{name!r} at {start_ns} ns begins within {around[-1][2]!r} and ends after it"
        else:
            around.append(span)
