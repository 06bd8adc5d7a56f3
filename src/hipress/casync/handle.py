"""A synchronisation under way, for whoever started it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

CLOSE_S = 5.0
"""A thread that is stuck keeps nobody longer from leaving."""


class Settler:
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
        settler: Settler,
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
        """The same as torch's future, which gives `value`.

        Args:
            value: What it gives.
            on_error: Told of an error, and then the future gives `value` all the same; without
                it the future raises the error.
        """
        stream = self._stream
        future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[stream.device] if stream is not None else None
        )

        def settle() -> None:
            if self._error is not None and on_error is not None:
                on_error(self._error)
                future.set_result(value)
            elif self._error is not None:
                future.set_exception(self._error)
            elif stream is None:
                future.set_result(value)
            else:
                with torch.cuda.stream(stream):
                    future.set_result(value)

        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(settle)
                return future
        settle()
        return future

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
