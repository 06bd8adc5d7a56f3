"""One command on all ranks of a lab: its output, its exit codes, its end."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hipress.errors import LabError
from hipress.lab.cluster import Cluster, start_thread
from hipress.processes.pipes import LineSplitter

OnLine = Callable[[int, str, str], None]
"""Called with rank, "stdout" or "stderr", and a line without its end."""

GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL when a run is ended because one rank failed."""
KILLED = 128 + signal.SIGKILL
"""Exit code of a rank whose host is gone."""
_END_S = 10.0
"""Seconds that the end of a run may take beyond the grace."""
_STREAMS = ("stdout", "stderr")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a run ended."""

    exit_code: int
    """0 if that of every rank is 0, else that of the rank that failed first."""
    failed_rank: int | None
    """The rank that failed first."""
    exit_codes: tuple[int, ...]
    """One for each rank; 128 + n where signal n ended it."""
    stdout: tuple[str, ...]
    """One for each rank; empty if the output was not to be kept."""
    stderr: tuple[str, ...]
    """One for each rank; empty if the output was not to be kept."""
    seconds: float
    """Seconds from the start to the end of the last rank."""

    def failure(self) -> str:
        """Say in one sentence which rank failed first, and its last line on stderr."""
        assert self.failed_rank is not None
        lines = self.stderr[self.failed_rank].strip().splitlines()
        last = f": {lines[-1]}" if lines else ", without a word on stderr"
        return f"rank {self.failed_rank} ended with exit code {self.exit_code}{last}"


class CommandRun:
    """A command that runs on all ranks; `Lab.start` makes it.

    `readers` are, for each rank, the ends of the pipes of stdout and stderr to read from.
    """

    def __init__(
        self,
        cluster: Cluster,
        number: int,
        readers: Sequence[tuple[int, int]],
        *,
        on_line: OnLine | None,
        keep_output: bool,
        keep_going: bool,
    ) -> None:
        self._cluster = cluster
        self._keep_going = keep_going
        self.number = number
        self._num_ranks = len(readers)
        self._on_line = on_line
        self._keep_output = keep_output
        self._changed = threading.Condition()
        self._codes: dict[int, int] = {}
        self._failures: list[tuple[float, int, int]] = []  # when, rank, exit code
        self._is_ending = False
        self._began_s = time.monotonic()
        self._ended_s = self._began_s
        self._text: dict[tuple[int, str], list[str]] = {
            (rank, stream): [] for rank in range(len(readers)) for stream in _STREAMS
        }
        self._output_is_over = False
        self._problem: BaseException | None = None
        pipes = {
            fd: (rank, stream)
            for rank, fds in enumerate(readers)
            for fd, stream in zip(fds, _STREAMS, strict=True)
        }
        self._reader = start_thread(lambda: self._read_output(pipes))

    def poll(self) -> Finished | None:
        """Return how the run ended, or None while it runs."""
        with self._changed:
            return self._finished() if self.is_over() else None

    def wait(self, timeout: float | None = None) -> Finished:
        """Wait for the end of the run.

        Args:
            timeout: Seconds after which the run is ended and a `LabError` raised.

        Returns:
            How the run ended.
        """
        if not self._wait_until_over(timeout):
            late = [rank for rank in range(self._num_ranks) if rank not in self._codes]
            self.end()
            raise LabError(
                f"the job was not done after {timeout:g} s and was ended; still running: "
                f"{_ranks(late) or 'a process that holds the output open'} of "
                f"{self._num_ranks} (give it a longer timeout, or look at its output)"
            )
        if self._problem is not None:
            raise self._problem
        with self._changed:
            return self._finished()

    def kill(self) -> None:
        """End all ranks at once, by SIGKILL, and wait until they are gone."""
        self.end(0)

    def end(self, grace_s: float = GRACE_S) -> None:
        """End all ranks, by SIGTERM and after the grace by SIGKILL; wait until they are gone."""
        self._ask_to_end(grace_s)
        if threading.current_thread() is self._reader:
            return  # called by on_line: the end of the output cannot be awaited by its reader
        if not self._wait_until_over(grace_s + _END_S):
            raise LabError(
                f"the job did not end within {grace_s + _END_S:g} s of being told to; close the "
                f"lab, which ends every process in it"
            )

    def rank_exited(self, rank: int, code: int, at_s: float) -> None:
        """Take note of the end of a rank; the lab calls this."""
        with self._changed:
            if rank in self._codes:
                return
            self._codes[rank] = code
            self._ended_s = max(self._ended_s, at_s)
            if code != 0:
                self._failures.append((at_s, rank, code))
            all_ended = len(self._codes) == self._num_ranks
            self._changed.notify_all()
        if all_ended:
            self._cluster.tell_all({"do": "sweep"})
        elif code != 0 and not self._keep_going:
            self._ask_to_end(GRACE_S)

    def _read_output(self, pipes: dict[int, tuple[int, str]]) -> None:
        """Read the pipes, by rank and stream, until the last writer is gone."""
        selector = selectors.DefaultSelector()
        for fd in pipes:
            selector.register(fd, selectors.EVENT_READ, LineSplitter())
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                for line in key.data.feed(data) if data else key.data.rest():
                    self._take_line(*pipes[key.fd], line.decode(errors="replace"))
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
        selector.close()
        with self._changed:
            self._output_is_over = True
            self._changed.notify_all()

    def _take_line(self, rank: int, stream: str, line: str) -> None:
        if self._keep_output:
            self._text[rank, stream].append(line + "\n")
        if self._on_line is None or self._problem is not None:
            return
        try:
            self._on_line(rank, stream, line)
        except BaseException as error:  # raised again by `wait`, in the caller's thread
            self._problem = error
            self._ask_to_end(GRACE_S)

    def _ask_to_end(self, grace_s: float) -> None:
        with self._changed:
            if self._is_ending and grace_s > 0:
                return
            self._is_ending = True
        self._cluster.tell_all({"do": "end", "run": self.number, "grace_s": grace_s})

    def _wait_until_over(self, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(self.is_over, timeout)

    def is_over(self) -> bool:
        """Say whether all ranks have ended and all their output is read."""
        return len(self._codes) == self._num_ranks and self._output_is_over

    def _finished(self) -> Finished:
        _, failed_rank, exit_code = min(self._failures, default=(0.0, None, 0))
        ranks = range(self._num_ranks)
        return Finished(
            exit_code=exit_code,
            failed_rank=failed_rank,
            exit_codes=tuple(self._codes[rank] for rank in ranks),
            stdout=tuple("".join(self._text[rank, "stdout"]) for rank in ranks),
            stderr=tuple("".join(self._text[rank, "stderr"]) for rank in ranks),
            seconds=self._ended_s - self._began_s,
        )


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
