"""Runs jobs on two queues, computing and communicating.

    compute       encode, decode, merge: the task that stands first in the graph, of the oldest job,
                  on one thread or a few
    gate          on a GPU, holds a job's first tasks back until its gradients are there
    communicate   starts sends and receives, never waits for the network; small sends are started
                  by whoever made them
    waiters       wait for what was started: one for each peer's messages, one for all sends

A task is released when the last one it needs is done; that is all the order there is. Tagged
messages may overtake each other, so no queue ever waits for another rank's order.

gloo tells that a message is there only to who waits for it, hence the waiters. It moves no byte
before the receiver has asked, hence receives are started as soon as their memory is free.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hipress.casync.engine.handle import CLOSE_S
from hipress.casync.engine.job import Job
from hipress.casync.engine.running import Running
from hipress.casync.engine.transport import Pending, Transport, finish
from hipress.casync.graphs.graph import COMPUTING, Verb
from hipress.casync.graphs.shape import TAG_BITS
from hipress.compll.backends.threads import stay_on_this_thread
from hipress.errors import UsageError

MAX_WAITERS = 16
"""Peers share waiters beyond this."""

_SEQUENCES = 2**TAG_BITS
_SPREAD = 4099
"""Between the tags of two recipes at one moment: more than jobs that are under way at once."""
_STOP = (-1, -1)


class Executor(Running):
    """Threads that run jobs until they are closed.

    Args:
        transport: With tags.
        device: Where gradients are; on a GPU work goes to a stream of its own.
        explain: Called with what a thread ran into; returns the error that callers get.
        num_threads: Of the computing queue; chunks share them, so each task runs on one. Work
            for a GPU is started by one thread.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        explain: Callable[[BaseException], BaseException] = lambda error: error,
        num_threads: int = 1,
    ) -> None:
        super().__init__(transport, device, explain)
        self._lock = threading.Lock()
        self._ready = _Heap()
        self._posts: queue.SimpleQueue[tuple[Job, int] | None] = queue.SimpleQueue()
        self._gated: queue.SimpleQueue[tuple[torch.cuda.Event, Job, list[int]] | None]
        self._gated = queue.SimpleQueue()
        self._waits: dict[int, queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        self.num_threads = num_threads if self.stream is None else 1
        for _ in range(self.num_threads):
            self._start("compute", self._compute)
        self._start("communicate", self._communicate)
        if self.stream is not None:
            self._start("gate", self._open_gates)

    def submit(self, job: Job, ready: torch.cuda.Event | None = None) -> None:
        """Starts a job that has begun; its `on_done` is called when all is done.

        Args:
            job: What to run.
            ready: On a GPU, when its gradients are there. Nothing that waits for them is given to
                the stream before, or the merges of earlier jobs would stand behind it: a host that
                runs ahead of its GPU starts the last encode long before the first merge.
        """
        self.take(job)
        # Receives first: what the others send can then flow while this rank still encodes.
        positions = [place for place, needs in enumerate(job.recipe.num_needs) if needs == 0]
        tasks = job.recipe.graph.tasks
        for place in positions:
            if tasks[place].verb is Verb.RECV:
                self._dispatch(job, place)
        if not tasks:  # empty tensors
            self.finish(job)
        rest = [place for place in positions if tasks[place].verb is not Verb.RECV]
        if ready is None:
            for place in rest:
                self._dispatch(job, place)
        else:
            self._gated.put((ready, job, rest))

    def close(self) -> None:
        """Ends the threads; jobs that are under way fail."""
        self.fail(UsageError("this engine is closed; make another."))
        for _ in range(self.num_threads):
            self._ready.push(_STOP, None)
        self._posts.put(None)
        self._gated.put(None)
        for waits in self._waits.values():
            waits.put(None)
        # A daemon thread that returns to Python while that shuts down aborts the process.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)

    def _start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(
            target=self._guard, args=(target, *args), name=f"hipress-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _guard(self, target: Callable[..., None], *args: Any) -> None:
        try:
            if self.stream is not None:
                torch.cuda.set_stream(self.stream)
            target(*args)
        except BaseException as error:  # every failure must reach whoever waits
            self.fail(self.explain(error))

    def _dispatch(self, job: Job, place: int) -> None:
        task = job.recipe.graph.tasks[place]
        if task.verb in COMPUTING:
            self._ready.push((job.sequence, place), job)
        elif task.verb is Verb.SEND and job.bound.is_light[place]:
            self._post(job, place)
        else:
            self._posts.put((job, place))

    def _release(self, job: Job, place: int) -> None:
        """Marks a task as done and starts what only waited for it."""
        ready = []
        with job.lock:
            waiting = job.waiting
            for follower in job.recipe.followers[place]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
            job.left -= 1
            last = job.left == 0
        for follower in ready:
            self._dispatch(job, follower)
        if last:
            # What was sent must have left before its memory is used again.
            self._wait_for(-1, job, -1, _All(job.sends), 0)

    def _compute(self) -> None:
        stay_on_this_thread()
        while True:
            place, job = self._ready.pop()
            if job is None:
                return
            work = job.bound.work[place]
            assert work is not None
            start_ns = time.perf_counter_ns()
            work()
            self.record(job, place, "compute", start_ns)
            self._release(job, place)

    def _open_gates(self) -> None:
        while (found := self._gated.get()) is not None:
            ready, job, positions = found
            ready.synchronize()
            for place in positions:
                self._dispatch(job, place)

    def _communicate(self) -> None:
        while (found := self._posts.get()) is not None:
            self._post(*found)

    def _post(self, job: Job, place: int) -> None:
        """Starts a send, a receive or an all-reduce."""
        task, message = job.recipe.graph.tasks[place], job.bound.messages[place]
        assert message is not None
        start_ns = time.perf_counter_ns()
        # Ranks that are about different things do not meet, and say so after a while.
        high = (job.sequence + _SPREAD * job.recipe.number) % _SEQUENCES << TAG_BITS
        if task.verb is Verb.RECV:
            cell, of, tag = message.recvs[0]
            pending = self.transport.recv(cell.wire, of, high | tag)
            self._wait_for(of % MAX_WAITERS, job, place, pending, start_ns)
        elif task.verb is Verb.SEND:
            cell, to, tag = message.sends[0]
            cell.settle()
            pending = self.transport.send(cell.wire, to, high | tag)
            if job.recipe.followers[place]:
                self._wait_for(-1, job, place, pending, start_ns)
            else:
                # Nobody needs to know when it has left, so nobody wakes up for it.
                job.sends.append(pending)
                self.record(job, place, "send", start_ns)
                self._release(job, place)
        else:
            pending = self.transport.all_reduce(job.addend(task.chunk))
            self._wait_for(-1, job, place, pending, start_ns)

    def _wait_for(self, waiter: int, job: Job, place: int, pending: Pending, start_ns: int) -> None:
        with self._lock:
            waits = self._waits.get(waiter)
            if waits is None:
                waits = self._waits[waiter] = queue.SimpleQueue()
                self._start("wait" if waiter < 0 else f"wait-{waiter}", self._wait, waits)
        waits.put((job, place, pending, start_ns))

    def _wait(self, waits: queue.SimpleQueue[Any]) -> None:
        while (found := waits.get()) is not None:
            job, place, pending, start_ns = found
            finish(pending)
            if place < 0:
                self.finish(job)
                continue
            task = job.recipe.graph.tasks[place]
            if task.verb is Verb.RECV:
                job.bound.messages[place].recvs[0][0].arrive()
            elif task.verb is Verb.ALL_REDUCE:
                job.bound.work[place]()
            self.record(job, place, "send" if task.to else "recv", start_ns)
            self._release(job, place)


class _Heap:
    """Ready tasks, the oldest job's first, in the order of its graph."""

    def __init__(self) -> None:
        self._items: list[tuple[tuple[int, int], int, Job | None]] = []
        self._lock = threading.Lock()
        # Counts the items: a wait on it costs a fifth of one on a threading.Condition.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def push(self, key: tuple[int, int], job: Job | None) -> None:
        with self._lock:
            heapq.heappush(self._items, (key, id(job), job))
        self._tokens.put(None)

    def pop(self) -> tuple[int, Job | None]:
        self._tokens.get()
        with self._lock:
            (_, place), _, job = heapq.heappop(self._items)
        return place, job


class _All:
    """Several things under way as one."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            finish(one)
