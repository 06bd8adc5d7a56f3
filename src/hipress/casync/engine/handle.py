"""A synchronisation under way, for whoever started it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

CLOSE_S = 5.0
"""A thread that is stuck keeps nobody longer from leaving."""


class CallbackThread:
    """A thread that settles futures: what users hang on them may start, and await, the next."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], None]) -> None:
        """Runs a call soon, after those before it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="hipress-futures", daemon=True
                )
                self._thread.start()
        self._calls.put(call)

    def close(self) -> None:
        """Ends the thread, after what it was given."""
        self._calls.put(None)
        # What it holds must not be freed while Python shuts down: torch aborts the process then.
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and with it tensors, now and not with the next call


class Handle:
    """A synchronisation under way."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        stream: torch.cuda.Stream | None,
        settler: CallbackThread,
    ) -> None:
        self._settler = settler
        self._tensors = list(tensors)  # kept alive until it is done
        self._stream = stream
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.event: torch.cuda.Event | None = None
        """On a GPU, the end of it."""
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Returns when the tensors hold the result (on a GPU: for this stream); or raises."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self.event is not None:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_event(self.event)

    def settle(self) -> None:
        """As `wait`, but whoever started it hears of its errors, not who comes after."""
        self._ended.wait()
        if self.event is not None:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_event(self.event)

    def future(
        self, value: Any, on_error: Callable[[BaseException], None] | None = None
    ) -> torch.futures.Future[Any]:
        """The same as torch's future (see `joint`)."""
        return joint([self], value, on_error)

    def on_end(self, call: Callable[[BaseException | None], None]) -> None:
        """Calls back when it has ended, with the error if there is one."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(lambda: call(self._error))
                return
        call(self._error)

    def end(self, error: BaseException | None) -> None:
        """Called once by the engine: with None, or with why it failed."""
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
            self._settler.put(callback)


def joint(
    handles: Sequence[Handle],
    value: Any,
    on_error: Callable[[BaseException], None] | None = None,
) -> torch.futures.Future[Any]:
    """A future of torch's that gives `value` when all of some synchronisations have ended.

    On a GPU it carries the stream they end on: torch's own way to join futures would drop it.

    Args:
        handles: Of one engine.
        value: What it gives.
        on_error: Told of an error, and then the future gives `value` all the same; without it
            the future raises the error.
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
            future.set_result(value)

    for handle in handles:
        handle.on_end(one_ended)
    return future
