"""Records some training steps on all ranks and writes them as one timeline.

    idle -- begin --> armed -- forward pass of a steady step --> recording -- last step --> idle

Times are host times: on a GPU the rows of the model show when work was launched.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hipress.casync.engine.engine import Engine
from hipress.errors import UsageError
from hipress.session.adapter import Adapter, StepObserver
from hipress.timeline import BUCKETS, MODEL, Event, RankTrace, chrome_trace
from hipress.units import counted

_log = logging.getLogger("hipress")


class Tracer(StepObserver):
    """Records the steps of one session.

    Args:
        adapter: Reports forward and backward.
        engine: Records its tasks.
        gather: Brings the bytes of every rank to rank 0, in rank order; collective.
        clock_offset: Returns what to add to this rank's clock to get rank 0's, and the bound of
            its error, in nanoseconds; collective.
        host: Name of this rank's host; the machine's if None.
    """

    def __init__(
        self,
        adapter: Adapter,
        engine: Engine,
        gather: Callable[[bytes], Sequence[bytes]],
        clock_offset: Callable[[], tuple[int, int]],
        host: str | None = None,
    ) -> None:
        self._adapter = adapter
        self._engine = engine
        self._gather = gather
        self._clock_offset = clock_offset
        self._host = host or socket.gethostname()
        self._stop_observing: Callable[[], None] | None = None
        self._is_ready: Callable[[], bool] = lambda: True
        self._recording = False
        self._path = Path()

    @property
    def active(self) -> bool:
        """Whether steps are recorded, or will be."""
        return self._stop_observing is not None

    @property
    def is_last(self) -> bool:
        """Whether the timeline is written at the end of this step."""
        return self._recording and self._step == self._steps - 1

    def begin(
        self,
        path: str | os.PathLike[str],
        steps: int,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Records steps from one of the next forwards on, then writes them; collective.

        Args:
            path: Path of the file, on rank 0's machine.
            steps: Number of steps.
            is_ready: Returns whether to begin with the forward that begins; on all ranks alike.

        Raises:
            UsageError: The file cannot be written (known to rank 0 only), there are no steps, or
                others are being recorded.
        """
        if self.active:
            raise UsageError(
                f"steps are being recorded for {self._path} already; wait until they are written."
            )
        if type(steps) is not int or steps < 1:
            raise UsageError(f"steps is {steps!r}; give a whole number from 1 on.")
        self._path = Path(path).absolute()
        if self._engine.transport.rank == 0:
            check_path(self._path)
        self._is_ready = is_ready
        self._offset_ns, self._error_ns = self._clock_offset()
        self._steps, self._step = steps, 0
        self._seen: list[Event] = []
        self._forward_ns: int | None = None
        self._backward_ns: int | None = None
        self._last_bucket_ns: int | None = None
        self._has_waits = False
        self._stop_observing = self._adapter.observe(self)

    def on_bucket(self, index: int, names: Sequence[str]) -> None:
        """Notes that the gradients of a bucket are ready."""
        if not self._recording:
            return
        now_ns = time.perf_counter_ns()
        self._seen.append(
            Event(
                verb="ready",
                name=f"bucket {index}",
                chunk=index,
                queue=BUCKETS,
                start_ns=now_ns,
                end_ns=now_ns,
                label=", ".join(names),
            )
        )
        if self._backward_ns is None:  # the model's output held no tensor that we found
            self._backward_ns = now_ns
        self._last_bucket_ns = now_ns

    def on_wait(self, names: Sequence[str], start_ns: int) -> None:
        """Draws a wait for the means of some gradients, which ends now."""
        if self._recording:
            self._note("wait", start_ns, time.perf_counter_ns(), ", ".join(names))
            self._has_waits = True

    def on_step_end(self) -> None:
        """Notes that gradients are synchronised; after the last step writes, then collective."""
        if not self._recording:
            return
        now_ns = time.perf_counter_ns()
        # With the last bucket the gradients are computed; what follows is a wait for the others,
        # unless the next forward pass has begun, or single waits were drawn.
        ready_ns = self._last_bucket_ns or now_ns
        self._end_backward(ready_ns)
        if max(ready_ns, self._forward_ns or 0) == ready_ns < now_ns and not self._has_waits:
            self._note("wait", ready_ns, now_ns)
        self._last_bucket_ns, self._has_waits = None, False
        self._step += 1
        if self._step == self._steps:
            self.finish()

    def finish(self) -> None:
        """Writes what has been recorded so far and stops; collective."""
        if not self.active:
            return
        events = (*self._seen, *self._tasks())
        self.cancel()
        own = RankTrace(
            rank=self._engine.transport.rank,
            host=self._host,
            events=events,
            offset_ns=self._offset_ns,
            error_ns=self._error_ns,
            device=self._engine.device.type,
        )
        gathered = self._gather(own.to_bytes())
        if own.rank == 0:
            self._write(gathered)

    def cancel(self) -> None:
        """Stops and drops what was recorded; not collective."""
        if self._stop_observing is not None:
            self._stop_observing()
            self._stop_observing = None
        if self._recording:
            self._recording = False
            self._engine.stop_recording()
            self._events: list[Event] = []

    def _tasks(self) -> list[Event]:
        return self._events[self._first :] if self._recording else []

    def forward_begin(self, trains: bool = True) -> None:
        """Starts recording with the first forward pass of a step."""
        if not self._recording:
            if not (trains and self._is_ready()):
                return
            self._recording = True
            self._events = self._engine.record()
            self._first = len(self._events)
        now_ns = time.perf_counter_ns()
        if self._last_bucket_ns is not None:  # its means are taken in this forward pass
            self._end_backward(self._last_bucket_ns)
        # A backward pass that was not synchronised (accumulated gradients) has reported no end.
        self._end_backward(now_ns, "drawn until the next forward: its end was not seen")
        self._forward_ns = now_ns

    def forward_end(self) -> None:
        """Draws the forward pass."""
        if self._forward_ns is not None:
            self._note("forward", self._forward_ns, time.perf_counter_ns())

    def backward_begin(self) -> None:
        """Notes the begin of the backward pass."""
        if self._recording and self._backward_ns is None and self._last_bucket_ns is None:
            self._backward_ns = time.perf_counter_ns()

    def _end_backward(self, end_ns: int, label: str = "") -> None:
        if self._backward_ns is not None:
            self._note("backward", self._backward_ns, end_ns, label)
            self._backward_ns = None

    def _note(self, verb: str, start_ns: int, end_ns: int, label: str = "") -> None:
        self._seen.append(
            Event(
                verb=verb,
                name="",
                chunk=self._step,
                queue=MODEL,
                start_ns=start_ns,
                end_ns=end_ns,
                label=label,
            )
        )

    def _write(self, gathered: Sequence[bytes]) -> None:
        try:
            write(self._path, chrome_trace([RankTrace.from_bytes(data) for data in gathered]))
        except Exception as error:  # no reason to end a training run
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            _log.warning("the timeline could not be written to %s: %s.", self._path, reason)
            return
        _log.info(
            "%s of %s are drawn in %s: open it at https://ui.perfetto.dev.",
            counted(self._step, "step"),
            counted(len(gathered), "rank"),
            self._path,
        )


def check_path(path: str | os.PathLike[str]) -> None:
    """Refuses a path where no file can be written, by trying.

    Raises:
        UsageError: With the reason.
    """
    path = Path(path).absolute()
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the path of a file in it.")
    if not path.parent.is_dir():
        raise UsageError(f"folder {path.parent} does not exist; make it, or give another path.")
    beside = _beside(path)
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise UsageError(
            f"no file can be written in folder {path.parent} ({error.strerror}); give another path."
        ) from error


def write(path: Path, trace: Mapping[str, Any]) -> None:
    """Writes a trace as JSON."""
    replace_file(path, json.dumps(trace, allow_nan=False, separators=(",", ":")))


def replace_file(path: Path, text: str) -> None:
    """Writes a file; a reader of the path finds the old one or all of the new one."""
    beside = _beside(path)
    try:
        beside.write_text(text, "utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
