"""What the ranks of one job have told, and rules that every fault shares.

A rule returns the sentences that say how it was broken; none if it holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

ERROR_S = 10.0
"""How much longer than the timeout it may take until a rank has its error."""
EXIT_S, THOROUGH_S = 20.0, 60.0
"""How long a process may take to end after its error; and to take Python down besides, which is
work of a second or two that waits for a core."""


@dataclass(frozen=True)
class Failure:
    """The error with which training ended on a rank."""

    kind: str
    text: str
    names: tuple[int, ...]
    """The ranks that the error names."""
    at: float


class Seen:
    """The lines of one job.

    Args:
        num_ranks: The number of ranks of the job.
        timeout_s: HIPRESS_TIMEOUT of the job.
        lines: What the ranks have told so far.
        exit_s: How long a process may take to end after its error.
    """

    def __init__(
        self,
        num_ranks: int,
        timeout_s: float,
        lines: Iterable[dict[str, Any]] = (),
        exit_s: float = EXIT_S,
    ) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.exit_s = exit_s
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._by_key: dict[str, list[dict[str, Any]]] = {}
        self._steps = [-1] * num_ranks
        for line in lines:
            self.add(line)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.num_ranks)

    def add(self, line: dict[str, Any]) -> None:
        """Takes one line."""
        with self._changed:
            self.lines.append(line)
            for key in line:
                self._by_key.setdefault(key, []).append(line)
            step = line.get("step", line.get("began", -1))
            self._steps[line["rank"]] = max(self._steps[line["rank"]], step)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Waits until the lines fulfil a condition; returns whether they do."""
        with self._changed:
            return self._changed.wait_for(condition, limit_s)

    def find(self, key: str, rank: int | None = None) -> list[dict[str, Any]]:
        """Returns the lines that have a key, of one rank or of all."""
        found = list(self._by_key.get(key, ()))
        return found if rank is None else [line for line in found if line["rank"] == rank]

    def error(self, rank: int) -> Failure | None:
        """Returns the error of a rank, if it has one."""
        for line in self.find("error", rank):
            return Failure(line["error"], line["text"], tuple(line["names"]), line["at"])
        return None

    def exit(self, rank: int) -> tuple[int, float] | None:
        """Returns the exit code of a rank and when it ended; None while it runs."""
        for line in self.find("exit", rank):
            return line["exit"], line["at"]
        return None

    def step(self, rank: int) -> int:
        """Returns the last step that a rank has told; -1 before it began."""
        return self._steps[rank]

    @property
    def latest(self) -> int:
        """The last step that any rank has told."""
        return max(map(self.step, self.ranks))

    @property
    def failed(self) -> bool:
        """Whether any rank has failed or ended."""
        return bool(self.find("error") or self.find("exit"))

    @property
    def is_finite(self) -> bool:
        """Whether all parameters that ranks have told of are finite."""
        return all(line["finite"] for line in self.find("finite"))

    def first_difference(self) -> int | None:
        """Returns the first step after which ranks hold different parameters."""
        by_step: dict[int, set[str]] = {}
        for line in self.find("digest"):
            for key in ("step", "began", "stopped"):
                if key in line:
                    by_step.setdefault(line[key], set()).add(line["digest"])
        return min((step for step, digests in by_step.items() if len(digests) > 1), default=None)


# --- rules ----------------------------------------------------------------------------------------


def replicas_agree(seen: Seen) -> list[str]:
    """All ranks hold the same parameters, bit for bit, after every step that several have told."""
    step = seen.first_difference()
    return [] if step is None else [f"replicas differ after step {step}"]


def went_on(seen: Seen, target: int) -> list[str]:
    """No rank has failed, and every rank has trained at least up to the target step."""
    problems = []
    for rank in seen.ranks:
        error, ended = seen.error(rank), seen.exit(rank)
        if error is not None:
            problems.append(f"rank {rank} failed with {error.kind}: {error.text}")
        elif ended is not None:
            problems.append(f"rank {rank} ended with exit code {ended[0]}")
        elif seen.step(rank) < target:
            problems.append(f"rank {rank} stands at step {seen.step(rank)} and not {target}")
    return problems


def ended(seen: Seen, ranks: Iterable[int], since: float) -> list[str]:
    """These ranks have an error within the timeout and `ERROR_S`, and have ended soon after."""
    problems = []
    limit_s = seen.timeout_s + ERROR_S
    for rank in ranks:
        error, exit_ = seen.error(rank), seen.exit(rank)
        if error is None:
            how = "runs on" if exit_ is None else f"ended with exit code {exit_[0]}"
            problems.append(f"rank {rank} has no error and {how}")
            continue
        if error.at - since > limit_s:
            problems.append(f"rank {rank} failed after {error.at - since:.1f} s, not {limit_s:g}")
        if exit_ is None:
            problems.append(f"rank {rank} has an error and has not ended ({error.text})")
        elif exit_[0] != 1:
            problems.append(f"rank {rank} ended with exit code {exit_[0]} after {error.text}")
        elif exit_[1] - error.at > seen.exit_s:
            problems.append(f"rank {rank} ended {exit_[1] - error.at:.1f} s after its error")
    return problems


def named(seen: Seen, ranks: Iterable[int], allowed: Iterable[Collection[int]]) -> list[str]:
    """Each of these ranks failed with a `PeerError` that names one of the allowed sets of ranks."""
    problems = []
    wanted = [set(one) for one in allowed]
    for rank in ranks:
        error = seen.error(rank)
        if error is None:
            continue  # `ended` says so
        if error.kind != "PeerError":
            problems.append(f"rank {rank} failed with {error.kind}: {error.text}")
        elif set(error.names) not in wanted:
            problems.append(f"rank {rank} names {list(error.names)}: {error.text}")
    return problems


def stopped(seen: Seen) -> list[str]:
    """Every rank has stopped when it was told to, and ended with exit code 0."""
    problems = []
    for rank in seen.ranks:
        error, exit_ = seen.error(rank), seen.exit(rank)
        if error is not None:
            problems.append(f"rank {rank} failed at the end with {error.kind}: {error.text}")
        elif exit_ is None:
            problems.append(f"rank {rank} was told to stop and runs on")
        elif exit_[0] != 0:
            problems.append(f"rank {rank} ended with exit code {exit_[0]} after its last step")
    return problems


def resumed(seen: Seen, saved: tuple[int, str] | None) -> list[str]:
    """Every rank began at the last checkpoint, with the parameters that were saved in it."""
    problems = []
    for line in seen.find("began"):
        if saved is None and line["began"] != 0:
            problems.append(f"rank {line['rank']} began at step {line['began']} and not 0")
        elif saved is not None and (line["began"], line["digest"]) != saved:
            problems.append(
                f"rank {line['rank']} began at step {line['began']} with parameters "
                f"{line['digest']}; the checkpoint holds step {saved[0]} and {saved[1]}"
            )
    return problems
