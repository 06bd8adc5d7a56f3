"""Runs jobs in the order of their graphs, for transports without tags (NCCL).

One thread walks the lowered graph, the same order on all ranks. On a GPU it only enqueues: codecs
on one stream, exchanges on another, events between them; nothing waits for the device. Without
streams each task is done before the next.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from hipress.casync.engine.handle import CLOSE_S
from hipress.casync.engine.job import Job
from hipress.casync.engine.memory import new_stream
from hipress.casync.engine.running import Running
from hipress.casync.engine.transport import Transport, finish
from hipress.casync.graphs.graph import COMPUTING, Verb
from hipress.errors import UsageError


class OrderedExecutor(Running):
    """One thread, one order; the same face as `Executor`."""

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        explain: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> None:
        super().__init__(transport, device, explain)
        self._side = new_stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hipress-ordered", daemon=True)
        self._thread.start()

    def submit(self, job: Job, ready: torch.cuda.Event | None = None) -> None:
        """Starts a job that has begun; on a GPU its stream waits for what `ready` tells."""
        self.take(job)
        if ready is not None and self.stream is not None:
            self.stream.wait_event(ready)
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread; jobs that are under way fail."""
        self.fail(UsageError("this engine is closed; make another."))
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._play(job)
                with _on(self.stream):
                    self.finish(job)
        except BaseException as error:  # every failure must reach whoever waits
            self.fail(self.explain(error))

    def _play(self, job: Job) -> None:
        done: list[torch.cuda.Event | None] = []
        for place, task in enumerate(job.recipe.graph.tasks):
            start_ns = time.perf_counter_ns()
            computes = task.verb in COMPUTING
            stream = self.stream if computes else self._side
            with _on(stream):
                if stream is not None:
                    for need in task.needs:
                        event = done[need]
                        assert event is not None
                        stream.wait_event(event)
                self._do(job, place, computes)
                done.append(stream.record_event() if stream is not None else None)
            self.record(job, place, "compute" if computes else "communicate", start_ns)
        if self.stream is not None:
            for event in done:
                assert event is not None
                self.stream.wait_event(event)

    def _do(self, job: Job, place: int, computes: bool) -> None:
        work, message = job.bound.work[place], job.bound.messages[place]
        if computes:
            assert work is not None
            work()
            return
        assert message is not None
        task = job.recipe.graph.tasks[place]
        if task.verb is Verb.ALL_REDUCE:
            finish(self.transport.all_reduce(job.addend(task.chunk)))
            assert work is not None
            work()
            return
        for cell, *_ in message.sends:
            cell.settle()
        pending = self.transport.exchange(
            [(cell.wire, to) for cell, to, _ in message.sends],
            [(cell.wire, of) for cell, of, _ in message.recvs],
        )
        for one in pending:
            finish(one)
        for cell, *_ in message.recvs:
            cell.arrive()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
