"""Readers of trace files: where the time of each rank went, and what Perfetto would refuse."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hipress.timeline import (
    _FIRST_PID,
    BUCKETS,
    MODEL,
    Event,
    both_s,
    overlap_s,
)


def _ns(us: float) -> int:
    """The nanoseconds that Perfetto reads."""
    return int(us * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Where the time of one rank went."""

    rank: int
    verb_s: dict[str, float]
    """Seconds by verb, those of the model included; tasks that overlap are added up."""
    overlap_s: float
    """Seconds in which a codec computed while another task of the exchange was in progress."""
    hidden_s: float
    """Seconds in which a task of the exchange was in progress while the model ran backward."""


def summary(trace: Mapping[str, Any]) -> list[Summary]:
    """Return where the time of each rank of a trace went; the trace may come from a file.

    Example:
        >>> a = Event(verb="backward", name="", chunk=0, queue=MODEL, start_ns=0, end_ns=10**9)
        >>> b = Event(verb="send", name="", chunk=1, queue="send", start_ns=0, end_ns=2 * 10**9)
        >>> from hipress.timeline import RankTrace, chrome_trace
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
            start_ns -= _ns(event["args"].get("waited_us", 0))
            found = {"verb": event["cat"], "queue": queue, "start_ns": start_ns, "end_ns": end_ns}
            events.append(Event(name="", chunk=0, **found))
    return [_summary(rank, events) for rank, events in sorted(ranks.items())]


def _summary(rank: int, events: Sequence[Event]) -> Summary:
    verb_ns: dict[str, int] = {}
    for event in events:
        verb_ns[event.verb] = verb_ns.get(event.verb, 0) + event.end_ns - event.start_ns
    return Summary(
        rank=rank,
        verb_s={verb: ns / 1e9 for verb, ns in verb_ns.items()},
        overlap_s=overlap_s(events),
        hidden_s=both_s(
            [(e.start_ns, e.end_ns) for e in events if e.verb == "backward"],
            [(e.start_ns, e.end_ns) for e in events if e.queue not in (MODEL, BUCKETS)],
        ),
    )


def check_trace(trace: Mapping[str, Any]) -> list[str]:
    """Return what Perfetto would refuse, drop or draw in a wrong place; empty for a good trace.

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
