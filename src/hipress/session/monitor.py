"""Where the time of steps goes: totals, a bounded history, events, and snapshots for `hipress top`.

A step lasts from the end of one exchange to the end of the next, and is compute + wait. The
exchange overlaps with it, and is encode + wire + decode. `Split` (`snapshots.py`) defines each.
Times are host times: on a GPU, codecs count when they are launched.

Steps in which exchanges are set up (kernels are compiled, buffers allocated, ranks agree) or `auto`
measures are counted apart: they would hide what all others do.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from hipress import snapshots
from hipress.casync.engine.engine import Engine
from hipress.session import monitor_server
from hipress.snapshots import MAX_EVENTS, MAX_TEXT, Event, Split

if TYPE_CHECKING:
    from hipress.session.session import Session

_log = logging.getLogger("hipress")

EVERY_S = 1.0
"""Least seconds between two snapshots."""
MAX_POINTS = 2000
"""Points of a history."""
KEPT_EVENTS = 200
"""Events that a session remembers."""


class Totals(NamedTuple):
    """What adds up over steps."""

    num_steps: int = 0
    step_ns: int = 0
    wait_ns: int = 0
    exchange_ns: int = 0
    encode_ns: int = 0
    decode_ns: int = 0
    sent_bytes: int = 0
    plain_bytes: int = 0
    """What a plain all-reduce of float32 would have sent."""

    def since(self, before: Totals) -> Totals:
        """Returns what has been added since then."""
        return Totals(*(now - then for now, then in zip(self, before, strict=True)))

    def split(self) -> Split | None:
        """Returns the mean of a step; None if there is no step."""
        if not self.num_steps:
            return None
        each = 1e-9 / self.num_steps
        coding_ns = self.encode_ns + self.decode_ns
        return Split.model_construct(  # the numbers are our own: checking them takes longer
            num_steps=self.num_steps,
            step_s=each * self.step_ns,
            compute_s=each * (self.step_ns - self.wait_ns),
            encode_s=each * self.encode_ns,
            wire_s=each * max(self.exchange_ns - coding_ns, 0),
            decode_s=each * self.decode_ns,
            wait_s=each * self.wait_ns,
            sent_bytes=self.sent_bytes / self.num_steps,
            ratio=self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0,
        )


class _Read(NamedTuple):
    """The counters of an engine at one moment."""

    exchange_ns: int = 0
    coding_ns: int = 0
    encode_ns: int = 0
    decode_ns: int = 0
    sent_bytes: int = 0
    plain_bytes: int = 0
    num_recipes: int = 0


class History:
    """Totals over a run at a bounded number of steps.

    When it is full, every second point is dropped, and from then on half as many are taken.

    Example:
        >>> history = History(max_points=4)
        >>> for step in range(1, 10):
        ...     history.add(step, Totals(num_steps=step))
        >>> [step for step, _ in history.points()]
        [2, 4, 6, 8]
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._width = 1 + len(Totals._fields)
        self._values = array("q", bytes(8 * self._width * max_points))
        self._max_points = max_points
        self._num_points = 0
        self._stride = 1
        self._left = 1
        """Steps until the next point."""

    def add(self, step: int, totals: Totals) -> None:
        """Takes a step in."""
        self._left -= 1
        if self._left:
            return
        width = self._width
        if self._num_points == self._max_points:
            for kept, old in enumerate(range(1, self._num_points, 2)):
                self._values[kept * width : (kept + 1) * width] = self._values[
                    old * width : (old + 1) * width
                ]
            self._num_points //= 2
            self._stride *= 2
            self._left = self._stride // 2  # the last point was taken half a stride ago
            if self._left:
                return
        self._left = self._stride
        begin = self._num_points * width
        self._values[begin] = step
        for place, value in enumerate(totals, begin + 1):
            self._values[place] = value
        self._num_points += 1

    def points(self) -> list[tuple[int, Totals]]:
        """Returns the steps and the totals at their ends, the oldest first."""
        width = self._width
        rows = (self._values[k * width : (k + 1) * width] for k in range(self._num_points))
        return [(row[0], Totals(*row[1:])) for row in rows]


class Monitor:
    """Watches the steps of one session."""

    def __init__(self) -> None:
        self.totals = Totals()
        """Since the session started, without set-up steps."""
        self.setup_steps = 0
        self.setup_ns = 0
        self.history = History()
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self.host = socket.gethostname()
        self._sets_up = True
        self._last = _Read()
        self._end_ns = time.perf_counter_ns()
        """When the last step ended."""
        self._given_ns = 0
        """When the last bucket was handed over."""
        self._publisher: Publisher | None = None

    def open(self, engine: Engine) -> None:
        """Begins to write snapshots, where that is possible."""
        self._publisher = Publisher(engine, self.host)

    def close(self) -> None:
        """Removes the snapshot of this rank."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def note(self, step: int, kind: str, text: str) -> None:
        """Remembers a decision."""
        self.events.append(Event(time.time(), step, kind, text[:MAX_TEXT]))

    def note_measuring(self, session: Session) -> None:
        """Notes that `auto` measures in this step, which may take seconds."""
        self._sets_up = True
        if self._publisher is not None:
            self._publisher.publish(session, self, "measuring")

    def note_bucket(self) -> None:
        """Notes that a bucket is handed over; after the last one training waits."""
        self._given_ns = time.perf_counter_ns()

    def end_step(self, session: Session) -> None:
        """Takes in a step whose exchange has ended just now."""
        now_ns, began_ns = time.perf_counter_ns(), self._end_ns
        self._end_ns = now_ns
        last, self._last = self._last, _read(session)
        sets_up = self._sets_up or self._last.num_recipes != last.num_recipes
        self._sets_up = False
        if sets_up:
            self.setup_steps += 1
            self.setup_ns += now_ns - began_ns
        else:
            # Several threads may code at once; what they do side by side counts once.
            now = self._last
            encode_ns, decode_ns = now.encode_ns - last.encode_ns, now.decode_ns - last.decode_ns
            coding_ns, sum_ns = now.coding_ns - last.coding_ns, encode_ns + decode_ns
            encode_ns = coding_ns * encode_ns // sum_ns if sum_ns else 0
            self.totals = Totals(*(a + b for a, b in zip(self.totals, (
                1,
                now_ns - began_ns,
                now_ns - max(self._given_ns, began_ns),
                now.exchange_ns - last.exchange_ns,
                encode_ns,
                coding_ns - encode_ns if sum_ns else 0,
                now.sent_bytes - last.sent_bytes,
                now.plain_bytes - last.plain_bytes,
            ), strict=True)))  # fmt: skip
            self.history.add(session.step, self.totals)
        if self._publisher is not None:
            self._publisher.end_step(session, self, now_ns)


class Publisher:
    """Writes the snapshots of one rank, and serves those of its host if HIPRESS_MONITOR is set.

    Args:
        engine: The engine of the session.
        host: Name of this host.
    """

    def __init__(self, engine: Engine, host: str) -> None:
        rank, hosts = engine.transport.rank, engine.hosts
        self._facts = {
            "job": engine.job,
            "program": os.path.basename(sys.argv[0]) or "python",
            "rank": rank,
            "num_ranks": engine.transport.num_ranks,
            "host": host,
            "pid": os.getpid(),
        }
        self._due_ns = 0
        self._before = Totals()
        self._plan: tuple[Any, str] = (None, "")
        self._writer: snapshots.Writer | None = None
        self._stop_serving = monitor_server.serve(
            engine.job, is_first=hosts.index(hosts[rank]) == rank, one_host=len(set(hosts)) == 1
        )
        try:
            self._writer = snapshots.Writer(snapshots.folder(), engine.job, rank)
        except OSError as error:
            self._give_up(error)

    def end_step(self, session: Session, monitor: Monitor, now_ns: int) -> None:
        """Writes a snapshot if the last one is old enough."""
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + int(1e9 * EVERY_S)
            self.publish(session, monitor, session.mode.current.value)

    def publish(self, session: Session, monitor: Monitor, mode: str) -> None:
        """Writes a snapshot."""
        if self._writer is None:
            return
        split = monitor.totals.since(self._before).split()
        self._before = monitor.totals
        snapshot = {
            **self._facts,
            "time": time.time(),
            "step": session.step,
            "mode": mode,
            "plan": self._words(session),
            "setup_steps": monitor.setup_steps,
            "setup_s": monitor.setup_ns / 1e9,
            "split": None if split is None else split.__dict__,
            "events": list(monitor.events)[-MAX_EVENTS:],
        }
        try:
            self._writer.write(snapshot)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Removes the snapshot."""
        self._stop_serving()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _give_up(self, error: OSError) -> None:
        """Training goes on; `hipress top` says what is wrong with the folder."""
        _log.debug("hipress top will not show rank %d: %s.", self._facts["rank"], error.strerror)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _words(self, session: Session) -> str:
        key = (session.layout.version, session.auto and session.auto.reason, len(session.gradients))
        if self._plan[0] != key:
            why = "" if session.auto is None else f"; auto: {session.auto.reason}"
            self._plan = (key, f"{in_words(session)}{why}"[:MAX_TEXT])
        return self._plan[1]


def in_words(session: Session) -> str:
    """Returns what is compressed with what.

    Example:
        >>> import torch, torch.distributed as dist, hipress.session
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> in_words(hipress.session.start({"w": torch.ones(64, 64)}, codec="onebit"))
        'onebit (ps) for 1 of 1 gradients'
        >>> dist.destroy_process_group()
    """
    compressed = session.layout.compressed
    if not compressed:
        return "nothing is compressed"
    ways = dict.fromkeys(f"{g.choice.codec.name} ({g.choice.strategy})" for g in compressed)
    return f"{', '.join(ways)} for {len(compressed)} of {len(session.gradients)} gradients"


def _read(session: Session) -> _Read:
    engine = session.engine
    executor, done, plain = engine.executor, engine.stats, session.plain.sent_bytes
    verb_ns, num_ranks = executor.verb_ns, engine.transport.num_ranks
    return _Read(
        exchange_ns=executor.exchanging.read_ns(),
        coding_ns=executor.coding.read_ns(),
        encode_ns=verb_ns.get("encode", 0),
        decode_ns=verb_ns.get("decode", 0) + verb_ns.get("merge", 0),
        sent_bytes=done.sent_bytes + plain,
        plain_bytes=2 * (num_ranks - 1) * done.gradient_bytes // num_ranks + plain,
        num_recipes=engine.num_recipes,
    )
