"""Heartbeats in the store, which tell the rank that has failed.

gloo says "connection reset by 10.0.0.7:41523"; this module says "rank 2 is gone". Each rank counts
up a key and watches that of the next rank: one write and two reads per beat, whatever N is. The
first rank that finds a failure records it in the store; the others find it at their next beat.

A rank that is silent may be frozen or busy, and is waited for until the timeout. If a connection is
lost as well, a rank has died: the silent one is reported after a few beats.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hipress.casync.engine.transport import LinkError
from hipress.casync.ranks.lost_store import first_line, is_connection_lost, lost_store
from hipress.errors import PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LONGEST_BEAT_S = 1.0
MISSED_BEATS = 5
"""After an error, a rank that has missed this many beats is reported as gone."""
SILENCE_S = 300.0
"""Where connections are not known (NCCL), a rank that is silent for so long is reported as gone,
even if the timeout is longer."""

_BYE = "bye"
"""The last beat of a rank that has closed its engine."""

_log = logging.getLogger("hipress")


class Heartbeats:
    """Sends the heartbeats of one rank and watches the others.

    Args:
        store: Shared by the ranks; a connection of its own, since a wait blocks the others on it.
        timeout_s: How long a rank may be silent before its neighbour reports it as gone.
        on_failure: Called once, from the thread of the heartbeat, with the error for callers.
        progress: Returns how many exchanges this rank has started; a rank with fewer is late.
        num_lost_peers: Returns to how many other ranks the connection is lost; None if unknown.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        on_failure: Callable[[BaseException], None],
        progress: Callable[[], int] = lambda: 0,
        num_lost_peers: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._progress = progress
        self._num_lost_peers = num_lost_peers
        self._num_explained = 0
        """Number of lost connections whose reason is known."""
        self._suspects: dict[int, str] | None = None
        """While the reason of a lost connection is looked for: ranks that have sent no heartbeat
        since it was noticed, with their last one."""
        self._suspected_since = 0.0
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._beat_s = min(LONGEST_BEAT_S, timeout_s / 10)
        self._on_failure = on_failure
        self._count = 0
        self._has_failed = False
        self._failure: dict[str, Any] | None = None
        """The failure that this rank has read or recorded."""
        self._says_bye = False
        """Whether the thread of the heartbeat says goodbye itself when it ends."""
        self._closed = threading.Event()
        self._lock = threading.Lock()  # the store's connection serves one at a time
        self._is_lost = False
        """Whether the connection to the store must not be used any more."""
        self._thread = threading.Thread(target=self._run, name="hipress-heartbeat", daemon=True)
        if num_ranks > 1:
            self._beat()
            self._thread.start()

    def close(self) -> None:
        """Stops the heartbeat and tells the others that this was intended.

        After a failure it does not: the others would take this rank for the one that has gone.
        Rank 0 waits a few beats instead, until they have read what has failed.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        if self._num_ranks > 1:
            if self._thread is threading.current_thread():  # it dropped the last reference
                self._says_bye = True
                return
            self._thread.join(MISSED_BEATS * self._beat_s)
            if self._thread.is_alive():
                return  # it is stuck in the store, and so would this call be
            if self._has_failed:
                self._wait_until_known()
            else:
                self._say_bye()

    def _wait_until_known(self) -> None:
        """Keeps the store, which ends with rank 0, until the other ranks have read the failure."""
        if self._rank != 0 or self._failure is None:
            return
        waits = {*range(self._num_ranks)} - {0, *self._failure["ranks"]}
        deadline = time.monotonic() + MISSED_BEATS * self._beat_s
        try:
            while time.monotonic() < deadline:
                with self._connection():
                    if all(self._store.check([f"informed/{rank}"]) for rank in waits):
                        return
                time.sleep(0.02)
        except RuntimeError as error:
            _log.debug("the store does not answer: %s", error)

    def _say_bye(self) -> None:
        try:
            with self._connection():
                self._store.set(_key(self._rank), _BYE)
        except RuntimeError as error:
            _log.debug("the store does not answer: %s", error)

    def check(self) -> None:
        """Raises if this rank knows of a failure."""
        if self._failure is not None:
            raise self._error_of(self._failure)

    def explain(self, error: BaseException) -> BaseException:
        """Returns the error that callers get for one of a thread; tells the other ranks.

        An error of this rank's own stays as it is. One of the transport becomes a PeerError that
        names the ranks that are gone, as far as heartbeats show.
        """
        self._has_failed = True
        if not isinstance(error, LinkError | PeerError):
            text = f"rank {self._rank} failed: {first_line(error)}"
            self._error_of(self._report(text, [self._rank]))
            return error
        try:
            found = self._failure or self._recorded_failure() or self._find_silent(error)
        except RuntimeError:
            if self._failure is None:
                return lost_store(self._rank, error)
            found = self._failure  # rank 0 left as soon as another thread knew
        return self._error_of(found)

    def _error_of(self, failure: dict[str, Any]) -> PeerError:
        """Returns the error for a recorded failure; tells rank 0 that this rank knows of it."""
        if self._failure is None:
            self._failure = failure
            with suppress(RuntimeError), self._connection():
                self._store.set(f"informed/{self._rank}", "")
        return PeerError(failure["text"], ranks=tuple(failure["ranks"]))

    def _run(self) -> None:
        watched = (self._rank + 1) % self._num_ranks
        last, since = "", time.monotonic()
        lost_since: float | None = None
        silence_s = longest_silence_s(self._timeout_s, self._num_lost_peers())
        while not self._closed.wait(self._beat_s):
            error: PeerError | None = None
            asked = time.monotonic()
            try:
                self._beat()
                found = self._recorded_failure() or self._find_dead()
                if found is None:
                    seen = self._read([watched])[watched]
                    if seen != last or seen == _BYE:
                        last, since = seen, time.monotonic()
                    elif time.monotonic() - since > silence_s:
                        text = f"rank {watched} has given no sign of life for {silence_s:g} s"
                        text = f"{text}: it is gone or frozen; look at the output there."
                        found = self._report(text, [watched])
                lost_since = None
                if found is not None:
                    error = self._error_of(found)
            except RuntimeError as problem:  # a store that is frozen raises after the timeout
                lost_since = lost_since or (asked if self._is_lost else time.monotonic())
                if time.monotonic() - lost_since >= MISSED_BEATS * self._beat_s:
                    error = lost_store(self._rank, problem)
            if error is not None and not self._closed.is_set():
                self._has_failed = True
                self._on_failure(error)
                return
        if self._says_bye and not self._has_failed:
            self._say_bye()

    def _find_dead(self) -> dict[str, Any] | None:
        """Reports ranks that have died: silent for a few beats, and their connections are lost.

        A rank that closes its engine says so before its connections end. As many others as
        connections are left unexplained have died; if more ranks are silent, some are only busy.
        """
        num_lost = self._num_lost_peers()
        if num_lost is None or num_lost <= self._num_explained:
            return None
        beats = self._read(self._others())
        num_dead = num_lost - sum(beat == _BYE for beat in beats.values())
        if self._suspects is None:
            self._suspects, self._suspected_since = beats, time.monotonic()
        self._suspects = {
            rank: beat
            for rank, beat in self._suspects.items()
            if beats[rank] == beat and beat != _BYE
        }
        if num_dead <= 0 or not self._suspects:
            self._num_explained, self._suspects = num_lost, None
            return None
        waited_s = time.monotonic() - self._suspected_since
        if waited_s < MISSED_BEATS * self._beat_s or len(self._suspects) > num_dead:
            return None
        text = f"{_subject(list(self._suspects))} gone: connections are closed and heartbeats have"
        return self._report(f"{text} stopped; look at the output there.", list(self._suspects))

    def _beat(self) -> None:
        self._count += 1
        with self._connection():
            self._store.set(_key(self._rank), f"{self._count}/{self._progress()}")

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the last beat of some ranks; empty for one that never sent any."""
        keys = [_key(rank) for rank in ranks]
        has_multi_get = getattr(self._store, "has_extended_api", lambda: False)
        with self._connection():
            if len(keys) > 1 and has_multi_get() and self._store.check(keys):
                beats = [beat.decode() for beat in self._store.multi_get(keys)]
            else:
                beats = [_last_beat(self._store, rank) for rank in ranks]
        return dict(zip(ranks, beats, strict=True))

    def _others(self) -> list[int]:
        return [rank for rank in range(self._num_ranks) if rank != self._rank]

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
        silent = self._others()
        before = self._read(silent)
        deadline = time.monotonic() + MISSED_BEATS * self._beat_s
        while silent and time.monotonic() < deadline:
            time.sleep(self._beat_s / 2)
            if (found := self._recorded_failure()) is not None:
                return found
            now = self._read(silent)
            silent = [rank for rank in silent if now[rank] in (before[rank], _BYE)]
        if silent:
            text = f"{_subject(silent)} gone or frozen ({first_line(error)})"
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
            f"another order, or a link is down ({first_line(error)}); raise HIPRESS_TIMEOUT if it "
            "is only late.",
            [],
        )

    def ahead(self) -> list[int]:
        """Returns the ranks that have started more exchanges than this one."""
        return [rank for rank, count in self._started().items() if count > self._progress()]

    def _late(self) -> list[int]:
        """Returns the ranks that have started fewer exchanges than others."""
        started = self._started()
        return sorted(rank for rank, count in started.items() if count < max(started.values()))

    def _started(self) -> dict[int, int]:
        """Returns how many exchanges each rank has started, as far as it is known."""
        started = {self._rank: self._progress()}
        for rank, beat in self._read(self._others()).items():
            _, _, count = beat.partition("/")
            if count.isdigit():
                started[rank] = int(count)
        return started

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """Locks the store for one thread; a link that is down would hold its thread for ever."""
        if not self._lock.acquire(timeout=MISSED_BEATS * self._beat_s):
            raise RuntimeError("the store does not answer")
        try:
            if self._is_lost:
                raise RuntimeError("the store does not answer")
            yield
        except RuntimeError as error:
            self._is_lost = self._is_lost or is_connection_lost(error)
            raise
        finally:
            self._lock.release()


def longest_silence_s(timeout_s: float, num_lost_peers: int | None) -> float:
    """Returns how long a rank may be silent; not as long where connections are not known."""
    return timeout_s if num_lost_peers is not None else min(timeout_s, SILENCE_S)


def has_left(store: Store, rank: int) -> bool:
    """Returns whether a rank has closed its engine, so that nothing more comes from it."""
    return _last_beat(store, rank) == _BYE


def _last_beat(store: Store, rank: int) -> str:
    """Returns the last beat of a rank; empty if it never sent any."""
    key = _key(rank)
    return store.get(key).decode() if store.check([key]) else ""


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _subject(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"ranks {names} are" if len(ranks) > 1 else f"rank {names} is"
