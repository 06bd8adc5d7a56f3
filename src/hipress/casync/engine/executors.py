"""Runs exchanges: over a transport with tags on several threads, or without tags in one order.

`Executor` is for transports with tags (gloo). It has these queues:

    compute       encode, decode, merge: the first ready task of the oldest exchange, on one thread
                  or a few
    gate          on a GPU, holds the first tasks of an exchange back until its gradients are there
    communicate   starts sends and receives and never waits for the network; small sends are started
                  by the thread that made them; so are those of a schedule, the most urgent first,
                  as far as the credit goes
    waiters       wait for what was started: one for the messages of each peer, one for all sends;
                  in a schedule, where messages overtake each other, one for each exchange and peer

A task is released when the last one it needs is done; there is no other order. Tagged messages may
overtake each other, so no queue ever waits for another rank's order. gloo reports a message only to
a thread that waits for it, hence the waiters. It moves no byte before the receiver has asked, hence
receives are started as soon as their memory is free.

The upper part of a tag holds the number of the recipe and of its use, so exchanges match whatever
order their messages, or the calls on different ranks, come in. Numbers repeat; an exchange whose
tags are those of one that is running waits for its end, so no two messages under way share a tag.

`OrderedExecutor` is for transports without tags (NCCL). One thread walks the lowered graph, in the
same order on all ranks. On a GPU it only enqueues: codecs on one stream, exchanges on another,
events between them; nothing waits for the device. Without streams each task is done before the
next.
"""

from __future__ import annotations

import heapq
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from hipress.casync.engine.exchange import Exchange
from hipress.casync.engine.handle import CLOSE_S
from hipress.casync.engine.memory import new_stream
from hipress.casync.engine.transport import Pending, Transport, finish
from hipress.casync.graphs import schedules
from hipress.casync.graphs.graph import COMPUTING, Verb
from hipress.casync.graphs.shape import TAG_BITS
from hipress.compll.backends.threads import stay_on_this_thread
from hipress.errors import PeerError, UsageError
from hipress.timeline import Event

MAX_WAITERS = 16
"""Peers beyond this number share waiters."""
MAX_WAITING = 128
"""Receives under way, each way, that have a waiter of their own with a schedule; more share one."""
ALL_SENDS = (-1, -1)
"""The waiter for the ends of exchanges, and for sends without a schedule."""

NUM_RECIPES, NUM_USES = 2**9, 2**6
"""Recipes, and uses of one recipe, that have tags of their own. With TAG_BITS they fill 30 bits;
gloo takes 31, and tags from 2**30 on belong to probes of the network."""
_STOP = (-1, -1, -1, -1)


Explain = Callable[[BaseException], BaseException]


class BusyTime:
    """Adds up the time in which at least one of several things is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._since_ns = 0
        self._total_ns = 0

    def begin(self) -> None:
        """Notes that one more is under way."""
        with self._lock:
            if self._num_running == 0:
                self._since_ns = time.perf_counter_ns()
            self._num_running += 1

    def end(self) -> None:
        """Notes that one of them has ended."""
        with self._lock:
            self._num_running -= 1
            if self._num_running == 0:
                self._total_ns += time.perf_counter_ns() - self._since_ns

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def read_ns(self) -> int:
        """Returns the time so far."""
        with self._lock:
            running_ns = time.perf_counter_ns() - self._since_ns if self._num_running else 0
            return self._total_ns + running_ns


class BaseExecutor:
    """The exchanges that are running, and how one or all of them end.

    Args:
        transport: What the exchanges communicate through.
        device: Where gradients are; on a GPU work goes to a stream of its own.
        explain: Called with an error that a thread ran into; returns the error that callers get.
    """

    def __init__(
        self, transport: Transport, device: torch.device, explain: Explain = lambda error: error
    ) -> None:
        self.transport = transport
        self.stream = new_stream(device) if device.type == "cuda" else None
        self.num_threads = 1
        """Number of threads that compute."""
        self.events: list[Event] | None = None
        """The list to which tasks are recorded; None if they are not."""
        self.verb_ns: dict[str, int] = {}
        """Time spent in each verb so far; a receive counts from its start to its end."""
        self.exchanging = BusyTime()
        """Time in which at least one exchange is under way."""
        self.coding = BusyTime()
        """Time in which at least one task encodes, decodes or merges."""
        self._counting = threading.Lock()
        self.failure: BaseException | None = None
        self.explain = explain
        self._running: dict[int, Exchange] = {}
        """The running exchanges by their key (see `_key`)."""
        self._running_lock = threading.Lock()
        self._fewer_running = threading.Condition(self._running_lock)

    def rearrange(self, credit_bytes: int) -> None:
        """Takes the credit of another schedule, and ends what served the messages of the last."""

    def check(self) -> None:
        """Raises if an earlier error, or `close`, has ended this executor."""
        failure = self.failure
        if failure is None:
            return
        if isinstance(failure, UsageError):
            raise failure  # closed
        text = str(failure).removesuffix(".")
        raise PeerError(
            f"the exchange is down since an earlier error ({text}); restart the job.",
            ranks=getattr(failure, "ranks", ()),
        ) from failure

    def fail(self, error: BaseException) -> None:
        """Ends all exchanges with an error, now and from now on."""
        with self._running_lock:
            if self.failure is not None:
                return
            self.failure = error
            running, self._running = self._running, {}
            self._fewer_running.notify_all()
        for exchange in running.values():
            self.exchanging.end()
            exchange.on_done(error)
        # Threads that wait for the network come back, so that the process can end.
        with suppress(RuntimeError):  # it may be gone already
            self.transport.abort()

    def _key(self, exchange: Exchange) -> int:
        """Returns a number that two running exchanges must not share."""
        return exchange.sequence

    def _add(self, exchange: Exchange) -> None:
        """Takes an exchange in, after the end of one that has its key, or raises.

        No rank waits here for ever: all ranks start their exchanges in one order, so the older one
        ends whether or not this one begins.
        """
        key = self._key(exchange)
        with self._fewer_running:
            while self.failure is None and key in self._running:
                self._fewer_running.wait()
            self.check()
            self._running[key] = exchange
            exchange.started_ns = time.perf_counter_ns()
            self.exchanging.begin()  # under the lock: `fail` ends what it finds running

    def _end(self, exchange: Exchange) -> None:
        """Hands an exchange back, unless it has failed meanwhile."""
        key = self._key(exchange)
        with self._fewer_running:
            if self._running.get(key) is not exchange:
                return
            del self._running[key]
            self._fewer_running.notify_all()
        self.exchanging.end()
        exchange.num_done += 1
        exchange.under_way_ns += time.perf_counter_ns() - exchange.started_ns
        exchange.on_done(None)

    def _record(self, exchange: Exchange, index: int, queue: str, start_ns: int) -> None:
        """Records that a task ends now."""
        end_ns = time.perf_counter_ns()
        task = exchange.recipe.graph.tasks[index]
        verb = task.verb.value
        with self._counting:
            self.verb_ns[verb] = self.verb_ns.get(verb, 0) + end_ns - start_ns
            if task.verb in COMPUTING:
                exchange.coding_ns += end_ns - start_ns
        # Read once: another thread may stop the recording meanwhile.
        if (events := self.events) is not None:
            message = exchange.bound.messages[index]
            events.append(
                Event(
                    verb=verb,
                    name=exchange.recipe.name,
                    label=exchange.recipe.labels[task.chunk],
                    chunk=task.chunk,
                    queue=queue,
                    wire_bytes=None if message is None else message.wire_bytes,
                    priority=None if exchange.order is None else exchange.urgency(index)[1],
                    start_ns=start_ns,
                    end_ns=end_ns,
                )
            )


class Executor(BaseExecutor):
    """Threads that run exchanges over a transport with tags until they are closed.

    `num_threads` are those of the computing queue. Chunks share them, so each task runs on one.
    Work for a GPU is started by one thread.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        explain: Explain = lambda error: error,
        num_threads: int = 1,
        credit_bytes: int | None = None,
    ) -> None:
        super().__init__(transport, device, explain)
        self._lock = threading.Lock()
        self._scheduled = _ScheduledSends(math.inf if credit_bytes is None else credit_bytes)
        self._ready = _ReadyTasks()
        self._posts: queue.SimpleQueue[tuple[Exchange, int] | None] = queue.SimpleQueue()
        self._gated: queue.SimpleQueue[tuple[torch.cuda.Event, Exchange, list[int]] | None]
        self._gated = queue.SimpleQueue()
        self._waits: dict[tuple[int, int], queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        self.num_threads = num_threads if self.stream is None else 1
        for _ in range(self.num_threads):
            self._start("compute", self._compute)
        self._start("communicate", self._communicate)
        if self.stream is not None:
            self._start("gate", self._open_gates)

    def submit(self, exchange: Exchange, ready: torch.cuda.Event | None = None) -> None:
        """Starts an exchange that was prepared; its `on_done` is called when all is done.

        Args:
            exchange: What to run.
            ready: On a GPU, when its gradients are there. Nothing that waits for them is given to
                the stream before, or the merges of earlier exchanges would stand behind it: a host
                that runs ahead of its GPU starts the last encode long before the first merge.
        """
        exchange.tag = self._key(exchange)
        self._add(exchange)
        try:
            self._begin(exchange, ready)
        except Exception as error:
            # A message that the caller's own thread starts finds a broken link, as one of any other
            # thread would. It may even be a message of another exchange, for which a schedule had
            # no credit before. So callers get the error where they wait.
            self.fail(self.explain(error))

    def _begin(self, exchange: Exchange, ready: torch.cuda.Event | None) -> None:
        # Receives first: what the others send can then flow while this rank still encodes.
        graph = exchange.recipe.graph
        tasks = graph.tasks
        positions = [index for index, needs in enumerate(graph.num_needs) if needs == 0]
        for index in positions:
            if tasks[index].verb is Verb.RECV:
                self._dispatch(exchange, index)
        if not tasks:  # empty tensors
            self._end(exchange)
        rest = [index for index in positions if tasks[index].verb is not Verb.RECV]
        if ready is None:
            for index in rest:
                self._dispatch(exchange, index)
        else:
            self._gated.put((ready, exchange, rest))

    def rearrange(self, credit_bytes: int) -> None:
        """Takes the credit of another schedule, and ends what served the messages of the last."""
        self._scheduled.credit_bytes = credit_bytes
        with self._lock:
            for key in [key for key in self._waits if key[1] > 0]:
                self._waits.pop(key).put(None)
            self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _key(self, exchange: Exchange) -> int:
        """Returns the upper part of the tags of an exchange."""
        number = exchange.recipe.number % NUM_RECIPES
        return (number * NUM_USES + exchange.use % NUM_USES) << TAG_BITS

    def close(self) -> bool:
        """Ends the threads; running exchanges fail. Returns whether all threads have ended."""
        self.fail(UsageError("this engine is closed; make another."))
        for _ in range(self.num_threads):
            self._ready.push(_STOP, None)
        self._posts.put(None)
        self._gated.put(None)
        with self._lock:  # a thread that still runs may add one
            waiters = list(self._waits.values())
        for waits in waiters:
            waits.put(None)
        # A daemon thread that returns to Python while that shuts down aborts the process.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)
        return not any(thread.is_alive() for thread in self._threads)

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
        except BaseException as error:  # every failure must reach the callers that wait
            self.fail(self.explain(error))

    def _dispatch(self, exchange: Exchange, index: int) -> None:
        task = exchange.recipe.graph.tasks[index]
        if task.verb in COMPUTING:
            self._ready.push(exchange.urgency(index), exchange)
        elif task.verb is Verb.SEND and exchange.order is not None:
            self._scheduled.push(exchange, index)
            self._start_scheduled()
        elif task.verb is Verb.SEND and exchange.bound.is_light[index]:
            self._post(exchange, index)
        else:
            self._posts.put((exchange, index))

    def _release(self, exchange: Exchange, index: int) -> None:
        """Marks a task as done and starts what only waited for it."""
        ready = []
        with exchange.lock:
            waiting = exchange.waiting
            for follower in exchange.recipe.graph.followers[index]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
            exchange.left -= 1
            last = exchange.left == 0
        for follower in ready:
            self._dispatch(exchange, follower)
        if last:
            # What was sent must have left before its memory is used again.
            self._wait_for(ALL_SENDS, exchange, -1, _All(exchange.sends), 0)

    def _compute(self) -> None:
        stay_on_this_thread()
        while True:
            index, exchange = self._ready.pop()
            if exchange is None:
                return
            work = exchange.bound.work[index]
            assert work is not None
            start_ns = time.perf_counter_ns()
            with self.coding:
                work()
            self._record(exchange, index, "compute", start_ns)
            self._release(exchange, index)

    def _open_gates(self) -> None:
        while (found := self._gated.get()) is not None:
            ready, exchange, positions = found
            ready.synchronize()
            for index in positions:
                self._dispatch(exchange, index)

    def _communicate(self) -> None:
        while (found := self._posts.get()) is not None:
            self._post(*found)

    def _post(self, exchange: Exchange, index: int) -> None:
        """Starts a send, a receive or an all-reduce."""
        task, message = exchange.recipe.graph.tasks[index], exchange.bound.messages[index]
        assert message is not None
        start_ns = time.perf_counter_ns()
        if task.verb is Verb.RECV:
            buffer, of, tag = message.recvs[0]
            pending = self.transport.recv(buffer.wire, of, exchange.tag | tag)
            waiter = (of % MAX_WAITERS, 0)
            if exchange.order is not None:
                # They come in the order of the schedule, not in that in which they were asked for.
                is_back = exchange.recipe.graph.is_back[index]
                place = exchange.recipe.number % max(1, MAX_WAITING // len(exchange.recipe.hosts))
                waiter = waiter[0], 1 + 2 * place + is_back
            self._wait_for(waiter, exchange, index, pending, start_ns)
        elif task.verb is Verb.SEND:
            buffer, to, tag = message.sends[0]
            buffer.before_send()
            pending = self.transport.send(buffer.wire, to, exchange.tag | tag)
            if exchange.order is not None:
                self._wait_for((to % MAX_WAITERS, -1), exchange, index, pending, start_ns)
            elif exchange.recipe.graph.followers[index]:
                self._wait_for(ALL_SENDS, exchange, index, pending, start_ns)
            else:
                # No task needs to know when it has left, so no thread wakes up for it.
                exchange.sends.append(pending)
                self._record(exchange, index, "send", start_ns)
                self._release(exchange, index)
        else:
            pending = self.transport.all_reduce(exchange.addend(task.chunk))
            self._wait_for(ALL_SENDS, exchange, index, pending, start_ns)

    def _start_scheduled(self) -> None:
        """Starts the sends that come next, as many as the credit allows."""
        scheduled = self._scheduled
        with scheduled.starting:
            while (found := scheduled.pop()) is not None:
                self._post(*found)

    def _wait_for(
        self,
        waiter: tuple[int, int],
        exchange: Exchange,
        index: int,
        pending: Pending,
        start_ns: int,
    ) -> None:
        with self._lock:
            waits = self._waits.get(waiter)
            if waits is None:
                waits = self._waits[waiter] = queue.SimpleQueue()
                self._start("wait-{}-{}".format(*waiter), self._wait, waits)
            waits.put((exchange, index, pending, start_ns))  # before the thread is told to end

    def _wait(self, waits: queue.SimpleQueue[Any]) -> None:
        while (found := waits.get()) is not None:
            exchange, index, pending, start_ns = found
            finish(pending)
            if index < 0:
                self._end(exchange)
                continue
            task = exchange.recipe.graph.tasks[index]
            if task.verb is Verb.RECV:
                exchange.bound.messages[index].recvs[0][0].after_recv()
            elif task.verb is Verb.ALL_REDUCE:
                exchange.bound.work[index]()
            elif task.verb is Verb.SEND and exchange.order is not None:
                self._scheduled.note_sent(exchange, index)
                self._start_scheduled()
            self._record(exchange, index, "send" if task.to else "recv", start_ns)
            self._release(exchange, index)


class _ScheduledSends:
    """Sends of exchanges with an order, of which only some are under way at once.

    The others wait here, where more urgent ones can pass them, and not in a connection. A send
    counts until its bytes have left; what other ranks do with them does not matter, or two ranks
    whose credit is used by different gradients would wait for each other.

    Args:
        credit_bytes: Bytes that may be under way; one send always is.
    """

    def __init__(self, credit_bytes: float) -> None:
        self.starting = threading.Lock()
        """Held while sends are taken and started, so that they start in order."""
        self.credit_bytes = credit_bytes
        self._waiting: list[tuple[tuple[int, ...], Exchange]] = []
        self._lock = threading.Lock()
        self._sent_bytes = 0

    def push(self, exchange: Exchange, index: int) -> None:
        """Adds a send that can start."""
        recipe = exchange.recipe
        task = recipe.graph.tasks[index]
        *unit, _ = exchange.urgency(index)
        place = schedules.turn(task.chunk, task.to[0], recipe.rank, len(recipe.hosts))
        with self._lock:
            heapq.heappush(self._waiting, ((*unit, *place, index), exchange))

    def pop(self) -> tuple[Exchange, int] | None:
        """Returns the most urgent send and counts it as under way; None if it has to wait."""
        with self._lock:
            if not self._waiting:
                return None
            (*_, index), exchange = self._waiting[0]
            num_bytes = _sent_bytes(exchange, index)
            if self._sent_bytes and self._sent_bytes + num_bytes > self.credit_bytes:
                return None
            heapq.heappop(self._waiting)
            self._sent_bytes += num_bytes
            return exchange, index

    def note_sent(self, exchange: Exchange, index: int) -> None:
        """Takes note that the bytes of a send have left."""
        with self._lock:
            self._sent_bytes -= _sent_bytes(exchange, index)


def _sent_bytes(exchange: Exchange, index: int) -> int:
    message = exchange.bound.messages[index]
    assert message is not None
    return message.wire_bytes


class _ReadyTasks:
    """Tasks that can run, the most urgent first: those of the oldest exchange, in its graph's
    order, unless a schedule decides."""

    def __init__(self) -> None:
        self._items: list[tuple[tuple[int, int, int, int], int, Exchange | None]] = []
        self._lock = threading.Lock()
        # Counts the items: a wait on it costs a fifth of one on a threading.Condition.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def push(self, key: tuple[int, int, int, int], exchange: Exchange | None) -> None:
        with self._lock:
            heapq.heappush(self._items, (key, id(exchange), exchange))
        self._tokens.put(None)

    def pop(self) -> tuple[int, Exchange | None]:
        self._tokens.get()
        with self._lock:
            (*_, index), _, exchange = heapq.heappop(self._items)
        return index, exchange


class _All:
    """Several pending messages as one."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            finish(one)


class OrderedExecutor(BaseExecutor):
    """One thread that runs exchanges in one order; the same interface as `Executor`."""

    def __init__(
        self, transport: Transport, device: torch.device, explain: Explain = lambda error: error
    ) -> None:
        super().__init__(transport, device, explain)
        self._side = new_stream(device) if device.type == "cuda" else None
        self._submitted: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hipress-ordered", daemon=True)
        self._thread.start()

    def submit(self, exchange: Exchange, ready: torch.cuda.Event | None = None) -> None:
        """Starts an exchange that was prepared; on a GPU its streams wait for `ready`."""
        self._add(exchange)
        if ready is not None:
            # Both: an all-reduce, or a send of the gradient itself, needs no task before it.
            for stream in (self.stream, self._side):
                if stream is not None:
                    stream.wait_event(ready)
        self._submitted.put(exchange)

    def close(self) -> bool:
        """Ends the thread; running exchanges fail. Returns whether it has ended."""
        self.fail(UsageError("this engine is closed; make another."))
        self._submitted.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (exchange := self._submitted.get()) is not None:
                self._play(exchange)
                with _on(self.stream):
                    self._end(exchange)
        except BaseException as error:  # every failure must reach the callers that wait
            self.fail(self.explain(error))

    def _play(self, exchange: Exchange) -> None:
        done: list[torch.cuda.Event | None] = []
        for index, task in enumerate(exchange.recipe.graph.tasks):
            start_ns = time.perf_counter_ns()
            computes = task.verb in COMPUTING
            stream = self.stream if computes else self._side
            with _on(stream):
                if stream is not None:
                    for need in task.needs:
                        event = done[need]
                        assert event is not None
                        stream.wait_event(event)
                self._do(exchange, index, computes)
                done.append(stream.record_event() if stream is not None else None)
            self._record(exchange, index, "compute" if computes else "communicate", start_ns)
        if self.stream is not None:
            for event in done:
                assert event is not None
                self.stream.wait_event(event)

    def _do(self, exchange: Exchange, index: int, computes: bool) -> None:
        work, message = exchange.bound.work[index], exchange.bound.messages[index]
        if computes:
            assert work is not None
            with self.coding:
                work()
            return
        assert message is not None
        task = exchange.recipe.graph.tasks[index]
        if task.verb is Verb.ALL_REDUCE:
            finish(self.transport.all_reduce(exchange.addend(task.chunk)))
            assert work is not None
            work()
            return
        for buffer, *_ in message.sends:
            buffer.before_send()
        pending = self.transport.exchange(
            [(buffer.wire, to) for buffer, to, _ in message.sends],
            [(buffer.wire, of) for buffer, of, _ in message.recvs],
        )
        for one in pending:
            finish(one)
        for buffer, *_ in message.recvs:
            buffer.after_recv()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
