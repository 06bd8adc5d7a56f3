"""Records some steps of training on all ranks and writes them as one picture.

    idle -- begin --> armed -- the next forward --> recording -- so many steps later --> idle

Times are the host's: on a GPU the model's rows show when work was started.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hipress.casync.engine.engine import Engine
from hipress.errors import UsageError
from hipress.timeline import BUCKETS, MODEL, Event, RankTrace, chrome_trace

_log = logging.getLogger("hipress")


class Tracer:
    """Records the steps of one model.

    Args:
        module: Whose forward and backward are drawn.
        engine: Whose tasks are.
        gather: Brings every rank's bytes to rank 0, in the order of ranks; collective.
        clock_offset: Gives what to add to this rank's clock to get rank 0's, and the bound of
            its error, in nanoseconds; collective.
        host: The name of this rank's host; the machine's if None.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Engine,
        gather: Callable[[bytes], Sequence[bytes]],
        clock_offset: Callable[[], tuple[int, int]],
        host: str | None = None,
    ) -> None:
        # The model's hook may hold us, through C++, where no collector sees the circle.
        self._module = weakref.ref(module)
        self._engine = engine
        self._gather = gather
        self._clock_offset = clock_offset
        self._host = host or socket.gethostname()
        self._hooks: list[Any] = []
        self._recording = False
        self._path = Path()

    @property
    def active(self) -> bool:
        """Whether steps are recorded, or will be from the next forward on."""
        return bool(self._hooks)

    def begin(self, path: str | os.PathLike[str], steps: int) -> None:
        """Records steps from the next forward on, then writes them; collective.

        Args:
            path: Of the file, on rank 0's machine.
            steps: How many.

        Raises:
            UsageError: The file can not be written (known to rank 0 only), there are no steps, or
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
        module = self._module()
        assert module is not None
        self._offset_ns, self._error_ns = self._clock_offset()
        self._steps, self._step = steps, 0
        self._seen: list[Event] = []
        self._forward_ns: int | None = None
        self._backward_ns: int | None = None
        self._last_bucket_ns: int | None = None
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]

    def on_bucket(self, index: int, names: Sequence[str], is_last: bool) -> None:
        """Notes that the gradients of a bucket are ready."""
        if not self._recording:
            return
        now_ns = time.perf_counter_ns()
        self._seen.append(
            Event(
                verb="ready",
                name=f"bucket {index}",
                piece=index,
                queue=BUCKETS,
                start_ns=now_ns,
                end_ns=now_ns,
                label=", ".join(names),
            )
        )
        if self._backward_ns is None:  # the model's output held no tensor that we found
            self._backward_ns = now_ns
        if is_last:
            self._last_bucket_ns = now_ns

    def on_step_end(self) -> None:
        """Notes that gradients are synchronised; after the last step writes, then collective."""
        if not self._recording:
            return
        now_ns = time.perf_counter_ns()
        # With the last bucket the gradients are computed; what follows is a wait for the others.
        ready_ns = self._last_bucket_ns or now_ns
        self._end_backward(ready_ns)
        if ready_ns < now_ns:
            self._note("wait", ready_ns, now_ns)
        self._last_bucket_ns = None
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
            self._write(chrome_trace([RankTrace.from_bytes(data) for data in gathered]))

    def cancel(self) -> None:
        """Stops and forgets; by itself on each rank."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._recording:
            self._recording = False
            self._engine.stop_recording()
            self._events: list[Event] = []

    def _tasks(self) -> list[Event]:
        return self._events[self._first :] if self._recording else []

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        now_ns = time.perf_counter_ns()
        if not self._recording:
            if not torch.is_grad_enabled():
                return  # no step begins with it
            self._recording = True
            self._events = self._engine.record()
            self._first = len(self._events)
        # One that was not synchronised, since gradients are accumulated, has told us no end.
        self._end_backward(now_ns, "drawn until the next forward: its end was not seen")
        self._forward_ns = now_ns

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._forward_ns is None:
            return
        self._note("forward", self._forward_ns, time.perf_counter_ns())
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, gradient: torch.Tensor) -> None:
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
                piece=self._step,
                queue=MODEL,
                start_ns=start_ns,
                end_ns=end_ns,
                label=label,
            )
        )

    def _write(self, trace: dict[str, Any]) -> None:
        try:
            write(self._path, trace)
        except OSError as error:  # no reason to end a training run
            _log.warning("the timeline could not be written to %s: %s.", self._path, error.strerror)
            return
        num_ranks = len(trace["otherData"]["clocks"])
        _log.info(
            "%d steps of %d ranks are drawn in %s: open it at https://ui.perfetto.dev.",
            self._step,
            num_ranks,
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
    """Writes a trace; whoever looks at the path finds the old file or all of the new one."""
    beside = _beside(path)
    try:
        beside.write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")), "utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a model returns: alone, in lists, dictionaries, dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    inside: Any = ()
    if isinstance(output, Mapping):
        inside = output.values()
    elif isinstance(output, list | tuple | set):
        inside = output
    elif is_dataclass(output) and not isinstance(output, type):
        inside = [getattr(output, field.name) for field in fields(output)]
    for value in inside:
        yield from _tensors(value)
