"""Measures how far a rank's clock is from rank 0's, through the store.

A rank notes its time, asks, gets rank 0's time and notes its own again. Rank 0 read its clock
somewhere between the two, so the middle is off by at most half the round trip, whatever the network
does. The quickest of several rounds counts. Ranks take turns, so that they do not slow each other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from hipress.errors import PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ROUNDS = 16
GRACE_S = 5.0
"""How much longer the other ranks wait than rank 0, which can name the missing ones."""


def offset(
    store: Store,
    rank: int,
    num_ranks: int,
    *,
    rounds: int = ROUNDS,
    timeout_s: float = 60.0,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> tuple[int, int]:
    """Returns what to add to this rank's clock to get rank 0's, and its error bound; collective.

    Args:
        store: Shared by exactly these ranks; nothing else uses this connection meanwhile.
        rank: This rank.
        num_ranks: The number of ranks.
        rounds: How often each rank asks; the same on all ranks.
        timeout_s: How long ranks may be late, all together.
        clock: This rank's clock, in nanoseconds.

    Returns:
        The offset and the bound of its error, in nanoseconds; zeros on rank 0.

    Raises:
        PeerError: A rank did not come in time; raised on all that did.

    Example:
        >>> from torch.distributed import HashStore
        >>> offset(HashStore(), 0, 1)
        (0, 0)
    """
    assert rounds > 0
    if num_ranks == 1:
        return 0, 0
    try:
        # Each rank counts its own calls, so that none reads what a failed call has left behind.
        base = f"clock/{store.add(f'clock/calls/{rank}', 1)}"
        if rank == 0:
            _answer(store, base, num_ranks, rounds, timeout_s, clock)
            return 0, 0
        return _ask(store, base, rank, num_ranks, rounds, timeout_s, clock)
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank} lost the store while clocks were compared: rank 0, or whoever holds the "
            f"store, is gone ({str(error).splitlines()[0]}).",
            ranks=(0,) if rank else (),
        ) from error


def _answer(
    store: Store,
    base: str,
    num_ranks: int,
    rounds: int,
    timeout_s: float,
    clock: Callable[[], int],
) -> None:
    """Answers the other ranks; rank 0 calls it."""
    deadline = time.monotonic() + timeout_s
    for peer in range(1, num_ranks):
        # One round more, since a rank waits for its turn in its first one.
        for k in range(rounds + 1):
            if not _arrives(store, f"{base}/{peer}/{k}/ask", deadline):
                _give_up(store, base, num_ranks, peer, k, timeout_s)
            store.set(f"{base}/{peer}/{k}/answer", str(clock()))
        for k in range(rounds + 1):
            store.delete_key(f"{base}/{peer}/{k}/ask")
    store.set(f"{base}/end", "0")


def _ask(
    store: Store,
    base: str,
    rank: int,
    num_ranks: int,
    rounds: int,
    timeout_s: float,
    clock: Callable[[], int],
) -> tuple[int, int]:
    deadline = time.monotonic() + timeout_s + GRACE_S
    tries = []
    for k in range(rounds + 1):
        key = f"{base}/{rank}/{k}/answer"
        start_ns = clock()
        store.set(f"{base}/{rank}/{k}/ask", "")
        there = _arrives(store, key, deadline)
        end_ns = clock()  # before the answer is fetched, which takes another round trip
        answer_ns = _answer_of(store, key, there, timeout_s)
        tries.append((end_ns - start_ns, answer_ns - (start_ns + end_ns) // 2))
        store.delete_key(key)
    # A rank that has its offset still learns of one that never came.
    _answer_of(store, f"{base}/end", _arrives(store, f"{base}/end", deadline), timeout_s)
    if store.add(f"{base}/left", 1) == num_ranks - 1:
        store.delete_key(f"{base}/end")
        store.delete_key(f"{base}/left")
    round_trip_ns, found_ns = min(tries)
    return found_ns, (round_trip_ns + 1) // 2


def _answer_of(store: Store, key: str, there: bool, timeout_s: float) -> int:
    """Returns what rank 0 has written; raises if it has given up."""
    if not there:
        raise _late([0], timeout_s)
    found: Any = json.loads(store.get(key))
    if isinstance(found, list):
        raise _late(found, timeout_s)
    return int(found)


def _give_up(
    store: Store, base: str, num_ranks: int, peer: int, k: int, timeout_s: float
) -> NoReturn:
    """Tells every rank, wherever it waits, which ranks did not ask."""
    waits = {peer: f"{peer}/{k}"} | {later: f"{later}/0" for later in range(peer + 1, num_ranks)}
    late = [one for one, at in waits.items() if not store.check([f"{base}/{at}/ask"])] or [peer]
    for key in (*(f"{at}/answer" for at in waits.values()), "end"):
        store.set(f"{base}/{key}", json.dumps(late))
    raise _late(late, timeout_s)


def _late(ranks: list[int], timeout_s: float) -> PeerError:
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return PeerError(
        f"{who} did not come to compare clocks within {timeout_s:g} s: gone, late, or calling in "
        "another order; look at the output there, or raise HIPRESS_TIMEOUT.",
        ranks=tuple(ranks),
    )


def _arrives(store: Store, key: str, deadline: float) -> bool:
    left_s = max(deadline - time.monotonic(), 0.001)
    try:
        store.wait([key], timedelta(seconds=left_s))
    except RuntimeError:
        return store.check([key])
    return True
