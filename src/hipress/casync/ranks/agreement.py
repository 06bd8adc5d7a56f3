"""Ranks compare what they were given, and fail with the difference named.

Everything goes through the store as JSON: each rank writes its own facts, rank 0 compares and
writes a verdict, all read it. That is N writes and N reads, whatever is compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hipress.casync.ranks import clock
from hipress.errors import AgreementError, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PART_BYTES = 2**20
"""Of what is gathered through the store at once."""

GRACE_S = 5.0
"""How much longer the others wait for the verdict than rank 0 does for the facts."""

LOOK_S = 1.0
"""How often who waits asks whether a rank has failed meanwhile."""

KEPT_POSTS = 64


class Agreement:
    """The ranks of one engine.

    Args:
        store: Shared by exactly these ranks.
        rank: This one.
        num_ranks: N.
        timeout_s: How long a rank may be late.
        check: Raises where a rank is known to have failed: nobody waits for it then.
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

    def agree(self, what: str, facts: Mapping[str, Any], *, told: Any = None) -> list[Any]:
        """Returns when all ranks have the same facts: what each was `told` to share besides.

        Args:
            what: Names the occasion in errors; ranks must call in the same order.
            facts: What must be equal, by name.
            told: What need not; comes back as a list, one for each rank.

        Raises:
            AgreementError: Ranks differ.
            PeerError: A rank did not come in time.
        """
        self._count += 1
        base = f"agree/{self._count}"
        # Through JSON, so that a tuple here equals the list that others read.
        own = json.loads(json.dumps({"what": what, "facts": dict(facts), "told": told}))
        self._store.set(f"{base}/{self._rank}", json.dumps(own))
        if self._rank == 0:
            verdict = self._judge(base, what, own)
            self._store.set(f"{base}/verdict", json.dumps(verdict))
        else:
            verdict = self._verdict(base, what)
        if verdict["error"] is None:
            return list(verdict["told"])
        kind = AgreementError if verdict["differ"] else PeerError
        raise kind(verdict["error"], ranks=tuple(verdict["ranks"]))

    def gather(self, payload: bytes) -> list[bytes]:
        """What each rank gives, in rank order, on rank 0; nothing on the others.

        Raises:
            PeerError: A rank did not come in time.
        """
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
            if not self._arrives(key, deadline):
                raise PeerError(
                    f"rank {rank} did not give its part within {self._timeout_s:g} s: gone or "
                    "late; look at its output, or raise HIPRESS_TIMEOUT.",
                    ranks=(rank,),
                )
            keys = [f"{key}/{k}" for k in range(int(self._store.get(key)))]
            found.append(b"".join(self._store.get(part) for part in keys))
            for done in (key, *keys):
                self._store.delete_key(done)
        return found

    def post(self, number: int, text: str) -> None:
        """Leaves a text for all other ranks; rank 0's part, which waits for nobody.

        Args:
            number: Counts up. With each the text of 64 before is dropped, which all ranks must
                have heard by then.
            text: Anything.
        """
        self._store.set(f"post/{number}", text)
        if number >= KEPT_POSTS:
            self._store.delete_key(f"post/{number - KEPT_POSTS}")

    def hear(self, number: int, what: str) -> str:
        """What rank 0 has posted, or posts soon.

        Raises:
            PeerError: It did not in time.
        """
        key = f"post/{number}"
        if not self._arrives(key, time.monotonic() + self._timeout_s + GRACE_S):
            raise PeerError(
                f"rank 0 did not say {what} within {self._timeout_s:g} s: gone or late; look at "
                "its output, or raise HIPRESS_TIMEOUT.",
                ranks=(0,),
            )
        return self._store.get(key).decode()

    def clock_offset(self) -> tuple[int, int]:
        """This rank's clock against rank 0's in nanoseconds, and by how much it may be wrong."""
        return clock.offset(self._store, self._rank, self._num_ranks, timeout_s=self._timeout_s)

    def _judge(self, base: str, what: str, own: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        keys = [f"{base}/{rank}" for rank in range(self._num_ranks)]
        missing = [rank for rank, key in enumerate(keys) if not self._arrives(key, deadline)]
        if missing:
            error = (
                f"{_ranks(missing)} did not come to {what} within {self._timeout_s:g} s: gone, "
                "late, or calling in another order than rank 0; look at their output, or raise "
                "HIPRESS_TIMEOUT."
            )
            return {"error": error, "ranks": missing, "differ": False, "told": []}
        found = [json.loads(self._store.get(key)) for key in keys]
        # All have come, so all have read the last verdict: the store need not keep either.
        for key in (*keys, f"agree/{self._count - 1}/verdict"):
            self._store.delete_key(key)
        if any(one["what"] != what for one in found):
            named = {rank: {"call": one["what"]} for rank, one in enumerate(found)}
        else:
            named = {rank: one["facts"] for rank, one in enumerate(found)}
        text, ranks = difference(named)
        told = [one["told"] for one in found]
        return {"error": text, "ranks": ranks, "differ": True, "told": told}

    def _arrives(self, key: str, deadline: float) -> bool:
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                self._store.wait([key], timedelta(seconds=min(left_s, LOOK_S)))
            except RuntimeError:
                if self._store.check([key]):
                    return True
                if left_s <= LOOK_S:
                    return False
                self._check()
            else:
                return True

    def _verdict(self, base: str, what: str) -> dict[str, Any]:
        key = f"{base}/verdict"
        if self._arrives(key, time.monotonic() + self._timeout_s + GRACE_S):
            verdict: dict[str, Any] = json.loads(self._store.get(key))
            return verdict
        error = (
            f"rank 0 did not come to {what} within {self._timeout_s:g} s: gone, late, or calling "
            "in another order; look at its output, or raise HIPRESS_TIMEOUT."
        )
        return {"error": error, "ranks": [0], "differ": False, "told": []}


def difference(facts: Mapping[int, Mapping[str, Any]]) -> tuple[str | None, list[int]]:
    """What ranks differ in, and which differ from the first; None where they are alike.

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
            texts.append(_tell(name, [(json.loads(v), ranks) for v, ranks in by_value.items()]))
    if not texts:
        return None, []
    return f"ranks differ in {'; and in '.join(texts)}: give all ranks the same.", sorted(others)


def _tell(name: str, found: Sequence[tuple[Any, list[int]]]) -> str:
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
