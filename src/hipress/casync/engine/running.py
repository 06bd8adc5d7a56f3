"""What both executors share: the jobs under way, the end of one, and the end of all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from hipress.casync.engine.job import Job, Message
from hipress.casync.engine.memory import new_stream
from hipress.casync.engine.transport import Transport, raise_again
from hipress.timeline import Event


class Running:
    """Jobs under way.

    Args:
        transport: What they communicate through.
        device: Where gradients are; on a GPU work goes to a stream of its own.
        explain: Called with what a thread ran into; returns the error that callers get.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        explain: Callable[[BaseException], BaseException],
    ) -> None:
        self.transport = transport
        self.stream = new_stream(device) if device.type == "cuda" else None
        self.num_threads = 1
        """That compute."""
        self.events: list[Event] | None = None
        """Where tasks are recorded, if anywhere."""
        self.verb_ns: dict[str, int] = {}
        """Time spent in each verb so far; of a receive from its start to its end."""
        self._counting = threading.Lock()
        self.failure: BaseException | None = None
        self.explain = explain
        self._under_way: set[Job] = set()
        self._guards = threading.Lock()

    def check(self) -> None:
        """Raises where an earlier error, or `close`, has put an end to it."""
        raise_again(self.failure)

    def take(self, job: Job) -> None:
        """Counts a job among those under way."""
        with self._guards:
            self.check()
            self._under_way.add(job)

    def finish(self, job: Job) -> None:
        """Hands a job back, unless it has failed meanwhile."""
        with self._guards:
            if job not in self._under_way:
                return
            self._under_way.discard(job)
        job.on_done(None)

    def fail(self, error: BaseException) -> None:
        """Ends all jobs with an error, now and from now on."""
        with self._guards:
            if self.failure is not None:
                return
            self.failure = error
            jobs, self._under_way = self._under_way, set()
        for job in jobs:
            job.on_done(error)
        # Threads that wait for the network come back, so that the process can end.
        with suppress(RuntimeError):  # it may be gone already
            self.transport.abort()

    def record(self, job: Job, place: int, queue: str, start_ns: int) -> None:
        """Notes that a task ends now."""
        end_ns = time.perf_counter_ns()
        task = job.recipe.graph.tasks[place]
        verb = task.verb.value
        with self._counting:
            self.verb_ns[verb] = self.verb_ns.get(verb, 0) + end_ns - start_ns
        # Once: recording may be stopped meanwhile.
        if (events := self.events) is not None:
            events.append(
                Event(
                    verb=verb,
                    name=job.recipe.name,
                    label=job.recipe.labels[task.chunk],
                    piece=task.chunk,
                    queue=queue,
                    wire_bytes=_wire_bytes(job.bound.messages[place]),
                    start_ns=start_ns,
                    end_ns=end_ns,
                )
            )


def _wire_bytes(message: Message | None) -> int | None:
    """What a task sends or receives."""
    if message is None:
        return None
    return sum(cell.wire.nbytes for cell, *_ in (*message.sends, *message.recvs))
