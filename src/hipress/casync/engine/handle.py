"""The handle that a caller waits on, and the threads that run its callbacks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

CLOSE_S = 5.0
"""How long `close` waits for a thread that is stuck, so that the caller can return."""


MAX_IDLE = 4
"""Threads for callbacks that are kept while there is nothing to call."""

_log = logging.getLogger("hipress")


class CallbackThreads:
    """Runs the callbacks of futures, which may start, and wait for, other synchronisations.

    A callback that waits holds no other back, because a thread is added when all are busy. So
    callbacks may run at the same time, and in any order.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        """Threads that wait for a call and for which none is in the queue."""
        self._is_closed = False

    def put(self, call: Callable[[], None]) -> None:
        """Runs a call on a thread that is not busy; on this one after `close`, or at exit."""
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                if self._num_idle:
                    self._num_idle -= 1
                else:
                    is_closed = not self._add_thread()
            if not is_closed:
                self._calls.put(call)
        if is_closed:
            call()

    def close(self) -> None:
        """Ends the threads after the calls that were put."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        # What they hold must not be freed while Python shuts down: torch aborts the process then.
        deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _add_thread(self) -> bool:
        """Starts a thread; returns False while Python shuts down, which starts none any more."""
        thread = threading.Thread(target=self._run, name="hipress-futures", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads.add(thread)
        return True

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException:  # the next callbacks, for which others wait, must still run
                _log.exception("a callback of a future raised an error")
            del call  # frees its tensors now and not with the next call
            with self._lock:
                if self._num_idle >= MAX_IDLE and not self._is_closed:
                    self._threads.discard(threading.current_thread())
                    return
                self._num_idle += 1


class Handle:
    """A synchronisation that is running."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        stream: torch.cuda.Stream | None,
        threads: CallbackThreads,
    ) -> None:
        self._threads = threads
        self._tensors = list(tensors)  # keeps them alive until it is done
        self._stream = stream
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.event: torch.cuda.Event | None = None
        """On a GPU, the event that marks its end."""
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Returns whether `wait` would return at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Waits until the tensors hold the result (on a GPU: for this stream), or raises."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        self._wait_on_stream()

    def wait_ended(self) -> None:
        """Waits as `wait` does, but does not raise: errors go to the caller that started it."""
        self._ended.wait()
        self._wait_on_stream()

    def _wait_on_stream(self) -> None:
        if self.event is not None:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_event(self.event)

    def future(
        self, value: Any, on_error: Callable[[BaseException], None] | None = None
    ) -> torch.futures.Future[Any]:
        """Returns the handle as a future of torch (see `joint`)."""
        return joint([self], value, on_error)

    def on_end(self, call: Callable[[BaseException | None], None]) -> None:
        """Calls `call` when it has ended, with the error if there is one."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(lambda: call(self._error))
                return
        call(self._error)

    def end(self, error: BaseException | None) -> None:
        """Marks it as ended, with the error if it failed; the engine calls this once."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            if self._stream is not None and error is None:
                self.event = self._stream.record_event()
            self._tensors = []
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._threads.put(callback)


def joint(
    handles: Sequence[Handle],
    value: Any,
    on_error: Callable[[BaseException], None] | None = None,
    on_result: Callable[[], None] | None = None,
) -> torch.futures.Future[Any]:
    """Returns a future of torch that gives `value` when all of some synchronisations have ended.

    On a GPU it carries the stream they end on: `torch.futures.collect_all` would drop it.

    Args:
        handles: Handles of one engine.
        value: The result of the future.
        on_error: Called with an error, after which the future still gives `value`; without it
            the future raises the error.
        on_result: Called if all went well, just before the future gives `value`; on a GPU on the
            stream that they end on.
    """
    stream = handles[0]._stream
    future: torch.futures.Future[Any] = torch.futures.Future(
        devices=[stream.device] if stream is not None else None
    )
    left = len(handles)
    lock = threading.Lock()
    failure: BaseException | None = None

    def one_ended(error: BaseException | None) -> None:
        nonlocal left, failure
        with lock:
            failure = failure or error
            left -= 1
            if left:
                return
        if failure is not None and on_error is None:
            future.set_exception(failure)
            return
        if failure is not None and on_error is not None:
            on_error(failure)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if failure is None and on_result is not None:
                on_result()
            future.set_result(value)

    for handle in handles:
        handle.on_end(one_ended)
    return future
