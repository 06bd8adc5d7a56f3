"""Heartbeats in the store, which tell the rank that has failed.

gloo says "connection reset by 10.0.0.7:41523"; this module says "rank 2 is gone". Each rank counts
up a key and watches that of the next rank: one write and two reads per beat, whatever N is. The
first rank that finds a failure records it in the store; the others find it at their next beat.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hipress.casync.engine.transport import LinkError
from hipress.errors import PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LONGEST_BEAT_S = 1.0
MISSED_BEATS = 5
"""After an error, a rank that has missed this many beats is reported as gone."""

_log = logging.getLogger("hipress")


class Heartbeats:
    """Sends the heartbeats of one rank and watches the others.

    Args:
        store: Shared by the ranks; a connection of its own, since a wait blocks the others on it.
        timeout_s: How long a rank may be silent before its neighbour reports it as gone.
        on_failure: Called once, from the thread of the heartbeat, with the error for callers.
        progress: Returns how many exchanges this rank has started; a rank with fewer is late.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        on_failure: Callable[[BaseException], None],
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        self._progress = progress
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._beat_s = min(LONGEST_BEAT_S, timeout_s / 10)
        self._on_failure = on_failure
        self._count = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()  # the store's connection serves one at a time
        self._thread = threading.Thread(target=self._run, name="hipress-heartbeat", daemon=True)
        if num_ranks > 1:
            self._beat()
            self._thread.start()

    def close(self) -> None:
        """Stops the heartbeat and tells the others that this was intended."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._num_ranks > 1:
            if self._thread is threading.current_thread():  # it dropped the last reference
                return
            self._thread.join(MISSED_BEATS * self._beat_s)
            if self._thread.is_alive():
                return  # it is stuck in the store, and so would this call be
            try:
                with self._connection():
                    self._store.set(f"beat/{self._rank}", "bye")
            except RuntimeError as error:
                _log.debug("the store does not answer: %s", error)

    def explain(self, error: BaseException) -> BaseException:
        """Returns the error that callers get for one of a thread; tells the other ranks.

        An error of this rank's own stays as it is. One of the transport becomes a PeerError that
        names the ranks that are gone, as far as heartbeats show.
        """
        if not isinstance(error, LinkError | PeerError):
            self._report(f"rank {self._rank} failed: {_first_line(error)}", [self._rank])
            return error
        try:
            found = self._recorded_failure() or self._find_silent(error)
        except RuntimeError:
            found = {"ranks": [0], "text": _lost(self._rank, error)}
        return PeerError(found["text"], ranks=tuple(found["ranks"]))

    def _run(self) -> None:
        watched = (self._rank + 1) % self._num_ranks
        last, since = "", time.monotonic()
        lost_since: float | None = None
        while not self._closed.wait(self._beat_s):
            try:
                self._beat()
                found = self._recorded_failure()
                if found is None:
                    seen = self._read([watched])[watched]
                    if seen != last or seen == "bye":
                        last, since = seen, time.monotonic()
                    elif time.monotonic() - since > self._timeout_s:
                        text = f"rank {watched} has given no sign of life for {self._timeout_s:g} s"
                        found = self._report(f"{text}: it is gone or frozen.", [watched])
                lost_since = None
            except RuntimeError as error:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since < self._timeout_s:
                    continue
                found = {"ranks": [0], "text": _lost(self._rank, error)}
            if found is not None and not self._closed.is_set():
                self._on_failure(PeerError(found["text"], ranks=tuple(found["ranks"])))
                return

    def _beat(self) -> None:
        self._count += 1
        with self._connection():
            self._store.set(f"beat/{self._rank}", f"{self._count}/{self._progress()}")

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the last beat of some ranks; empty for one that never sent any."""
        found = {}
        with self._connection():
            for rank in ranks:
                key = f"beat/{rank}"
                found[rank] = self._store.get(key).decode() if self._store.check([key]) else ""
        return found

    def _recorded_failure(self) -> dict[str, Any] | None:
        """Returns the first failure that a rank has recorded."""
        with self._connection():
            if not self._store.check(["failed"]):
                return None
            found: dict[str, Any] = json.loads(self._store.get("failed"))
            return found

    def _report(self, text: str, ranks: Sequence[int]) -> dict[str, Any]:
        """Records a failure, unless another was first; returns what all ranks report."""
        record = {"text": text, "ranks": list(ranks)}
        try:
            with self._connection():
                if self._store.add("failures", 1) == 1:
                    self._store.set("failed", json.dumps(record))
                    return record
            deadline = time.monotonic() + self._beat_s
            while time.monotonic() < deadline:
                if (found := self._recorded_failure()) is not None:
                    return found
                time.sleep(0.02)
        except RuntimeError as error:
            _log.debug("the store does not answer: %s", error)
        return record

    def _find_silent(self, error: BaseException) -> dict[str, Any]:
        """Compares heartbeats over a few beats; ranks whose beat stands still have failed."""
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        before = self._read(others)
        silent = others
        deadline = time.monotonic() + MISSED_BEATS * self._beat_s
        while silent and time.monotonic() < deadline:
            time.sleep(self._beat_s / 2)
            if (found := self._recorded_failure()) is not None:
                return found
            now = self._read(silent)
            silent = [rank for rank in silent if now[rank] in (before[rank], "bye")]
        if silent:
            text = f"{_subject(silent)} gone or frozen ({_first_line(error)})"
            return self._report(f"{text}: look at the output there.", silent)
        if late := self._late():
            return self._report(
                f"{_subject(late)} late: the others wait in an exchange that has not begun there "
                f"for {self._timeout_s:g} s, though all ranks are alive; look at the output there, "
                "or raise HIPRESS_TIMEOUT if it only takes long.",
                late,
            )
        return self._report(
            "messages did not come in time, though all ranks are alive: a rank is late or calls in "
            f"another order, or a link is down ({_first_line(error)}); raise HIPRESS_TIMEOUT if it "
            "is only late.",
            [],
        )

    def _late(self) -> list[int]:
        """Returns the ranks that have started fewer exchanges than others."""
        started = {self._rank: self._progress()}
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        for rank, beat in self._read(others).items():
            _, _, count = beat.partition("/")
            if count.isdigit():
                started[rank] = int(count)
        return sorted(rank for rank, count in started.items() if count < max(started.values()))

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """Locks the store for one thread; a link that is down would hold its thread for ever."""
        if not self._lock.acquire(timeout=MISSED_BEATS * self._beat_s):
            raise RuntimeError("the store does not answer")
        try:
            yield
        finally:
            self._lock.release()


def _lost(rank: int, error: BaseException) -> str:
    return (
        f"rank {rank} does not reach the store: its own link is down, or rank 0, or the process "
        f"that holds the store, is gone ({_first_line(error)})."
    )


def _subject(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"ranks {names} are" if len(ranks) > 1 else f"rank {names} is"


def _first_line(error: BaseException) -> str:
    """Returns the first sentence of an error, without the location in torch's sources."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line).split(". ")[0][:200]
