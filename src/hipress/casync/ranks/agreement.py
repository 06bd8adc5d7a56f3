"""Ranks compare what they were given, and their clocks; errors name the difference.

Everything goes through the store as JSON: each rank writes its own facts, rank 0 compares them and
writes a verdict, and all ranks read it. That takes N writes and N reads, whatever is compared.

Every public method raises a PeerError that names rank 0 if the store is gone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from hipress.casync.ranks.heartbeats import has_left
from hipress.casync.ranks.lost_store import is_connection_lost, lost_store
from hipress.errors import AgreementError, HipressError, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PART_BYTES = 2**20
"""Size of the parts in which a payload goes through the store."""

GRACE_S = 5.0
"""How much longer the other ranks wait than rank 0, which can name the missing ones."""

READ_S = 2.0
"""How long rank 0 waits, after an error, until the other ranks have read it."""

LOOK_S = 1.0
"""How often a rank that waits asks whether another has failed meanwhile."""

KEPT_POSTS = 64
"""Number of posted texts that the store keeps."""

CLOCK_ROUNDS = 16


class Agreement:
    """Lets the ranks of one engine compare and share values through the store.

    Args:
        store: Shared by exactly these ranks; nothing else uses this connection meanwhile.
        timeout_s: How long a rank may be late.
        check: Raises if a rank is known to have failed, which ends a wait.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._check = check
        self._count = 0
        self._num_gathers = 0
        self._lost: PeerError | None = None
        """Why the connection to the store must not be used any more."""

    def agree(self, what: str, facts: Mapping[str, Any], *, share: Any = None) -> list[Any]:
        """Waits for all ranks, compares their facts, and returns what each rank shares.

        Args:
            what: Names the call in errors; all ranks must call in the same order.
            facts: Values that must be equal, by name.
            share: A value that need not be equal; returned as a list, one for each rank.

        Raises:
            AgreementError: Ranks differ.
            PeerError: A rank did not come in time.
        """
        self._count += 1
        base = f"agree/{self._count}"
        own = {"what": what, "facts": dict(facts), "share": share}
        with self._in_the_store():
            self._store.set(f"{base}/{self._rank}", json.dumps(own))
            if self._rank == 0:
                verdict = self._compare(base, what)
                self._store.set(f"{base}/verdict", json.dumps(verdict))
                if verdict["error"] is not None:
                    absent = () if verdict["differ"] else verdict["ranks"]
                    self._wait_until_read(base, {*range(1, self._num_ranks)} - {*absent})
            else:
                verdict = self._verdict(base, what)
                if verdict["error"] is not None:
                    with suppress(RuntimeError):  # rank 0 may be gone: what it wrote is known here
                        self._store.set(f"{base}/read/{self._rank}", "")
        if verdict["error"] is None:
            return list(verdict["shared"])
        kind = AgreementError if verdict["differ"] else PeerError
        raise kind(verdict["error"], ranks=tuple(verdict["ranks"]))

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns the payload of each rank, in rank order, on rank 0; nothing on the others.

        Raises:
            PeerError: A rank did not come in time.
        """
        with self._in_the_store():
            return self._gather(payload)

    def _gather(self, payload: bytes) -> list[bytes]:
        self._num_gathers += 1
        base = f"gather/{self._num_gathers}"
        # In parts: a store refuses values of many megabytes.
        parts = [payload[at : at + PART_BYTES] for at in range(0, len(payload), PART_BYTES)]
        for k, part in enumerate(parts):
            self._store.set(f"{base}/{self._rank}/{k}", part)  # type: ignore[arg-type]
        self._store.set(f"{base}/{self._rank}", str(len(parts)))
        if self._rank != 0:
            return []
        found = []
        deadline = time.monotonic() + self._timeout_s
        for rank in range(self._num_ranks):
            key = f"{base}/{rank}"
            if not self._arrives(key, deadline, rank):
                raise PeerError(
                    f"rank {rank} did not give its part {self._in_time([rank], 'gone or late')}",
                    ranks=(rank,),
                )
            keys = [f"{key}/{k}" for k in range(int(self._store.get(key)))]
            found.append(b"".join(self._store.get(part) for part in keys))
            for done in (key, *keys):
                self._store.delete_key(done)
        return found

    def post(self, number: int, text: str) -> None:
        """Leaves a text for all other ranks, without waiting; only rank 0 calls it.

        Args:
            number: Counts up. The text of 64 numbers before is dropped, so all ranks must have
                read it by then.
            text: The text.
        """
        with self._in_the_store():
            self._store.set(f"post/{number}", text)
            if number >= KEPT_POSTS:
                self._store.delete_key(f"post/{number - KEPT_POSTS}")

    def read_post(self, number: int, what: str) -> str:
        """Returns what rank 0 has posted, and waits for it if necessary.

        Raises:
            PeerError: Rank 0 did not post it in time.
        """
        key = f"post/{number}"
        with self._in_the_store():
            if not self._arrives(key, time.monotonic() + self._timeout_s + GRACE_S, 0):
                raise PeerError(
                    f"rank 0 did not say {what} {self._in_time([0], 'gone or late')}", ranks=(0,)
                )
            return self._store.get(key).decode()

    def clock_offset(
        self, *, rounds: int = CLOCK_ROUNDS, clock: Callable[[], int] = time.perf_counter_ns
    ) -> tuple[int, int]:
        """Returns what to add to this rank's clock to get rank 0's, and its error bound, in ns.

        A rank notes its time, asks, gets rank 0's time and notes its own again. Rank 0 read its
        clock somewhere between the two, so the middle is off by at most half the round trip,
        whatever the network does. The quickest of `rounds` counts. Ranks take turns, so that they
        do not slow each other. All ranks must call it; rank 0 gets zeros.

        Raises:
            PeerError: A rank did not come in time; raised on all that did.

        Example:
            >>> from torch.distributed import HashStore
            >>> Agreement(HashStore(), 0, 1, timeout_s=60).clock_offset()
            (0, 0)
        """
        assert rounds > 0
        if self._num_ranks == 1:
            return 0, 0
        with self._in_the_store():
            # Each rank counts its own calls, so that none reads what a failed call has left behind.
            base = f"clock/{self._store.add(f'clock/calls/{self._rank}', 1)}"
            if self._rank == 0:
                self._answer_clocks(base, rounds, clock)
                return 0, 0
            return self._ask_clock(base, rounds, clock)

    def _answer_clocks(self, base: str, rounds: int, clock: Callable[[], int]) -> None:
        deadline = time.monotonic() + self._timeout_s
        for peer in range(1, self._num_ranks):
            # One round more, since a rank waits for its turn in its first one.
            for k in range(rounds + 1):
                if not self._arrives(f"{base}/{peer}/{k}/ask", deadline, peer):
                    self._give_up_clocks(base, peer, k)
                self._store.set(f"{base}/{peer}/{k}/answer", str(clock()))
            for k in range(rounds + 1):
                self._store.delete_key(f"{base}/{peer}/{k}/ask")
        self._store.set(f"{base}/end", "0")

    def _ask_clock(self, base: str, rounds: int, clock: Callable[[], int]) -> tuple[int, int]:
        store = self._store
        deadline = time.monotonic() + self._timeout_s + GRACE_S
        tries = []
        for k in range(rounds + 1):
            key = f"{base}/{self._rank}/{k}/answer"
            start_ns = clock()
            store.set(f"{base}/{self._rank}/{k}/ask", "")
            there = self._arrives(key, deadline, 0)
            end_ns = clock()  # before the answer is fetched, which takes another round trip
            answer_ns = self._clock_answer(key, there)
            tries.append((end_ns - start_ns, answer_ns - (start_ns + end_ns) // 2))
            store.delete_key(key)
        # A rank that has its offset still learns of one that never came.
        self._clock_answer(f"{base}/end", self._arrives(f"{base}/end", deadline, 0))
        if store.add(f"{base}/left", 1) == self._num_ranks - 1:
            store.delete_key(f"{base}/end")
            store.delete_key(f"{base}/left")
        round_trip_ns, found_ns = min(tries)
        return found_ns, (round_trip_ns + 1) // 2

    def _clock_answer(self, key: str, there: bool) -> int:
        """Returns what rank 0 has written; raises if it has given up."""
        found: Any = json.loads(self._store.get(key)) if there else [0]
        if isinstance(found, list):
            raise self._late_for_clocks(found)
        return int(found)

    def _give_up_clocks(self, base: str, peer: int, k: int) -> NoReturn:
        """Tells every rank, wherever it waits, which ranks did not ask."""
        waits = {peer: f"{peer}/{k}"}
        waits |= {later: f"{later}/0" for later in range(peer + 1, self._num_ranks)}
        asked = {one: self._store.check([f"{base}/{at}/ask"]) for one, at in waits.items()}
        late = [one for one, there in asked.items() if not there] or [peer]
        for key in (*(f"{at}/answer" for at in waits.values()), "end"):
            self._store.set(f"{base}/{key}", json.dumps(late))
        raise self._late_for_clocks(late)

    def _late_for_clocks(self, ranks: list[int]) -> PeerError:
        why = self._in_time(ranks, "gone, late, or calling in another order")
        return PeerError(
            f"{_ranks(ranks)} did not come to compare clocks {why}", ranks=tuple(ranks)
        )

    def _compare(self, base: str, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        keys = [f"{base}/{rank}" for rank in range(self._num_ranks)]
        missing = self._missing(dict(enumerate(keys)), deadline)
        if missing:
            why = self._in_time(missing, "gone, late, or calling in another order than rank 0")
            error = f"{_ranks(missing)} did not come to {what} {why}"
            return {"error": error, "ranks": missing, "differ": False, "shared": []}
        found = [json.loads(self._store.get(key)) for key in keys]
        # All have come, so all have read the last verdict: the store can drop both.
        for key in (*keys, f"agree/{self._count - 1}/verdict"):
            self._store.delete_key(key)
        if any(one["what"] != what for one in found):
            named = {rank: {"call": one["what"]} for rank, one in enumerate(found)}
        else:
            named = {rank: one["facts"] for rank, one in enumerate(found)}
        text, ranks = difference(named)
        shared = [one["share"] for one in found]
        return {"error": text, "ranks": ranks, "differ": True, "shared": shared}

    def _wait_until_read(self, base: str, ranks: set[int]) -> None:
        """Keeps the store, which may end with rank 0, until others have read the verdict."""
        keys = [f"{base}/read/{rank}" for rank in sorted(ranks)]
        with suppress(RuntimeError):
            self._store.wait(keys, timedelta(seconds=READ_S))

    @contextmanager
    def _in_the_store(self) -> Iterator[None]:
        """Turns an error of the store into one that names rank 0, or who failed before it left."""
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, HipressError):
                raise
            lost = lost_store(self._rank, error)
            if is_connection_lost(error):
                self._lost = lost
            self._check()
            raise lost from error

    def _arrives(self, key: str, deadline: float, rank: int) -> bool:
        """Waits until a rank has written a key; returns whether it has."""
        return not self._missing({rank: key}, deadline)

    def _missing(self, keys: Mapping[int, str], deadline: float) -> list[int]:
        """Waits until each rank has written its key; returns those that do not.

        If some of them have left, only those are returned, without waiting for the others.
        """
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                self._store.wait(list(keys.values()), timedelta(seconds=min(left_s, LOOK_S)))
                return []
            except RuntimeError as error:
                if is_connection_lost(error):
                    raise
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                left = [rank for rank in missing if has_left(self._store, rank)]
                # One that has left may have written its key just before.
                left = [rank for rank in left if not self._store.check([keys[rank]])]
                if left or not missing:
                    return left
                if left_s <= LOOK_S:
                    return missing
                self._check()

    def _in_time(self, ranks: Sequence[int], guess: str) -> str:
        """Ends the sentence about ranks that did not come: why, and what to do."""
        if all(has_left(self._store, rank) for rank in ranks):
            return (
                "and will not: the engine there is closed, or the process has ended; look at the "
                "output there."
            )
        return (
            f"within {self._timeout_s:g} s: {guess}; look at the output there, or raise "
            "HIPRESS_TIMEOUT."
        )

    def _verdict(self, base: str, what: str) -> dict[str, Any]:
        key = f"{base}/verdict"
        if self._arrives(key, time.monotonic() + self._timeout_s + GRACE_S, 0):
            verdict: dict[str, Any] = json.loads(self._store.get(key))
            return verdict
        why = self._in_time([0], "gone, late, or calling in another order")
        error = f"rank 0 did not come to {what} {why}"
        return {"error": error, "ranks": [0], "differ": False, "shared": []}


def difference(facts: Mapping[int, Mapping[str, Any]]) -> tuple[str | None, list[int]]:
    """Returns what ranks differ in and which differ from the first; None if all are equal.

    Example:
        >>> difference({0: {"codec": "onebit"}, 1: {"codec": "int8"}, 2: {"codec": "onebit"}})[1]
        [1]
    """
    first = next(iter(facts))
    others: set[int] = set()
    texts = []
    for name in facts[first]:
        by_value: dict[str, list[int]] = {}
        for rank, values in facts.items():
            by_value.setdefault(json.dumps(values.get(name)), []).append(rank)
        if len(by_value) > 1:
            others.update(r for ranks in list(by_value.values())[1:] for r in ranks)
            texts.append(_describe(name, [(json.loads(v), ranks) for v, ranks in by_value.items()]))
    if not texts:
        return None, []
    return f"ranks differ in {'; and in '.join(texts)}: give all ranks the same.", sorted(others)


def _describe(name: str, found: Sequence[tuple[Any, list[int]]]) -> str:
    values = [value for value, _ in found]
    if all(isinstance(value, list) for value in values):
        length = min(len(value) for value in values)
        spots = (k for k in range(length) if any(v[k] != values[0][k] for v in values))
        spot = next(spots, None)
        if spot is not None:
            name = f"{name}, at place {spot}"
            found = [(value[spot], ranks) for value, ranks in found]
        else:
            name = f"{name}, in number"
            found = [(len(value), ranks) for value, ranks in found]
    return f"{name} ({', '.join(f'{value!r} on {_ranks(ranks)}' for value, ranks in found)})"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {shown}{more}"
