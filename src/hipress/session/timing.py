"""Measures training steps: how long a step takes, and when each gradient is ready.

`StepClock` times whole steps. `GradientTimer` times the work of forward up to each parameter, of
backward up to each gradient, and of the rest. Both are observers: the framework adapter calls them
in every step.

Clocks of `GradientTimer`. On a CPU, work is CPU time. The clock `process` counts all threads of the
process, which is right for a step without any exchange. An exchange in the same process would be
counted too; the clock `thread` then counts only the thread that runs forward and backward. Because
it misses the other threads that torch uses for an operation, its times are multiplied by the ratio
of both clocks during forward, when nothing is exchanged. On a GPU, events are recorded, and work
is the time between them.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hipress.errors import UsageError
from hipress.probe.cache import last_phase
from hipress.probe.codec_costs import error_of
from hipress.profile import GradientProfile, ModelProfile
from hipress.session.adapter import GradientSpec, StepObserver

MAX_STEPS = 32
"""Number of steps that a `GradientTimer` keeps; the oldest are dropped."""
CLOCKS = ("process", "thread")
MOST_ERROR = 1e9
"""The error of a message that overflowed, as one of fp16 may: a profile holds finite numbers."""
MODEL_TIMES = ("forward_s", "backward_s", "rest_s", "threads", "error")
"""Measured fields of a model's profile beside its gradients."""


class StepClock(StepObserver):
    """Times steps from the begin of forward to the end of the exchange.

    Time that a program spends between steps (data, evaluation, checkpoints) is not counted. If
    there are several forward passes before one exchange, a step begins with the first. If a
    framework reports no forward pass, a step begins where the last one ended. On a GPU the host
    runs ahead, so moments are events on its stream, and reading them waits only if asked to.

    Args:
        device: Device of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Any = None
        self._last: Any = None
        self._steps: list[tuple[Any, Any]] = []

    def forward_begin(self, trains: bool = True) -> None:
        """Starts a step, unless one has been started."""
        if trains and self._begin is None:
            self._begin = self._now()

    def end(self) -> None:
        """Ends a step."""
        begin, self._begin = self._last if self._begin is None else self._begin, None
        self._last = self._now()
        if begin is not None:
            self._steps.append((begin, self._last))

    def resume(self) -> None:
        """Starts a begun step anew: what came before belongs to the step of another model."""
        if self._begin is not None:
            self._begin = self._now()
        elif self._last is not None:
            self._last = self._now()

    def restart(self) -> None:
        """Drops all times that were not read yet."""
        self._steps.clear()

    def read(self, *, wait: bool) -> list[float]:
        """Returns the times of unread steps; `wait` includes unfinished GPU work."""
        steps = self._steps
        if self._device.type != "cuda":
            found = [end - begin for begin, end in steps]
            steps.clear()
            return found
        if wait and steps:
            steps[-1][1].synchronize()
        found = []
        while steps and steps[0][1].query():
            begin, end = steps.pop(0)
            found.append(begin.elapsed_time(end) / 1e3)
        return found

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        return _event(self._device)


class Moment(NamedTuple):
    """One moment on every clock."""

    wall_s: float
    process_s: float
    thread_s: float
    thread: int
    event: torch.cuda.Event | None


@dataclass(slots=True)
class Step:
    """The moments of one step."""

    begin: Moment
    needed: dict[str, Moment] = field(default_factory=dict)
    """When the forward pass first used each parameter, as far as the framework reports that."""
    forward_end: Moment | None = None
    resumed: Moment | None = None
    """When the step of another model ended between forward and backward."""
    ready: dict[str, Moment] = field(default_factory=dict)
    end: Moment | None = None


class GradientTimer(StepObserver):
    """Records the moments of training steps until `close`.

    A step begins with a forward pass and ends with the next one's, or with `end_step`. Where a
    gradient is ready several times (accumulated over several backwards), the last time counts.

    Args:
        specs: The gradients, all on one device; moments of others only tell when backward ends.

    Raises:
        UsageError: There is no gradient, or they are on several devices.
    """

    def __init__(self, specs: Iterable[GradientSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        if not self._specs:
            raise UsageError(
                "the model has no parameter that is trained; set requires_grad on some."
            )
        self._device = one_device(spec.device for spec in self._specs.values())
        self._on_gpu = self._device.type == "cuda"
        self.steps: deque[Step] = deque(maxlen=MAX_STEPS)
        """Steps that have ended."""
        self._step: Step | None = None
        self._closers: list[Callable[[], None]] = []

    def forward_begin(self, trains: bool = True) -> None:
        """Starts a step, and ends the one before."""
        if self._step is not None:
            if not self._step.ready and self._step.resumed is None:
                return  # the model is called several times before backward
            self.end_step()
        if trains:
            self._step = Step(self._now())

    def parameter_needed(self, name: str) -> None:
        """Notes that the forward pass is about to use a parameter; the first time counts."""
        step = self._step
        if step is not None and not step.ready and name not in step.needed:
            step.needed[name] = self._now()

    def forward_end(self) -> None:
        """Notes the end of the forward pass."""
        if self._step is not None and not self._step.ready:
            self._step.forward_end = self._now()

    def resume(self) -> None:
        """Leaves out of backward what came before: it belongs to the step of another model."""
        if self._step is not None and not self._step.ready:
            self._step.resumed = self._now()

    def gradient_ready(self, name: str) -> None:
        """Notes that a gradient has been computed."""
        if self._step is not None:
            self._step.ready[name] = self._now()

    def end_step(self) -> None:
        """Ends the step after the optimizer; time until the next forward pass is not counted."""
        step, self._step = self._step, None
        if step is not None and step.ready and step.forward_end is not None:
            step.end = self._now()
            self.steps.append(step)

    def on_close(self, call: Callable[[], None]) -> None:
        """Registers what `close` calls, such as the removal of hooks."""
        self._closers.append(call)

    def close(self) -> None:
        """Stops; steps that have ended stay."""
        for call in self._closers:
            call()
        self._closers.clear()
        self._step = None

    def __enter__(self) -> GradientTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def profile(
        self,
        *,
        name: str = "",
        batch: int | None = None,
        skip: int = 1,
        clock: str = "process",
        errors: Mapping[str, Mapping[str, float]] | None = None,
    ) -> ModelProfile:
        """Returns medians over the recorded steps.

        Args:
            name: Name of the model.
            batch: Examples per rank and step.
            skip: Number of first steps to ignore, as long as others are left.
            clock: `process`, or `thread` if gradients are exchanged during the steps.
            errors: Errors by gradient and codec, from `measure_errors`.

        Raises:
            UsageError: No step has ended yet.
        """
        if clock not in CLOCKS:
            raise UsageError(f"clock is {clock!r}; choose one of {', '.join(CLOCKS)}.")
        steps = list(self.steps)[min(skip, max(len(self.steps) - 1, 0)) :]
        if not steps:
            raise UsageError(
                "no training step has ended since the timer was started; run forward and backward "
                "at least once, then call end_step()."
            )
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        scale = _scale(steps) if clock == "thread" and not self._on_gpu else 1.0

        def work(a: Moment, b: Moment) -> float:
            return max(_work_s(a, b, clock) * scale, 0.0)

        # Only gradients that every step had; a step does not wait for others.
        shared = set(self._specs).intersection(*(step.ready for step in steps))
        ready = {
            one: statistics.median(work(_backward_begin(step), step.ready[one]) for step in steps)
            for one in shared
        }
        in_forward = shared.intersection(*(step.needed for step in steps))
        needed = {
            one: statistics.median(work(step.begin, step.needed[one]) for step in steps)
            for one in in_forward
        }
        totals = [work(step.begin, _end(step)) for step in steps]
        middle = statistics.median(totals)
        known = errors or {}
        gradients = tuple(
            GradientProfile(
                name=one,
                numel=self._specs[one].numel,
                dims=self._specs[one].dims,
                ready_s=ready[one],
                needed_s=needed.get(one),
                errors=dict(known.get(one, {})),
            )
            for one in sorted(ready, key=ready.__getitem__)
        )
        return ModelProfile(
            name=name,
            batch=batch,
            element_bytes=next(iter(self._specs.values())).dtype.itemsize,
            forward_s=statistics.median(work(step.begin, _forward_end(step)) for step in steps),
            backward_s=statistics.median(
                work(_backward_begin(step), _last(step)) for step in steps
            ),
            rest_s=statistics.median(work(_last(step), _end(step)) for step in steps),
            threads=1.0 if self._on_gpu else _threads(steps),
            error=statistics.median(abs(one - middle) / max(middle, 1e-12) for one in totals),
            gradients=gradients,
        )

    def _now(self) -> Moment:
        return Moment(
            time.perf_counter(),
            time.process_time(),
            time.thread_time(),
            threading.get_ident(),
            _event(self._device) if self._on_gpu else None,
        )


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def one_device(devices: Iterable[torch.device]) -> torch.device:
    """Returns the only device.

    Raises:
        UsageError: There are several, whose clocks cannot be compared.
    """
    found = list(dict.fromkeys(devices))
    if len(found) > 1:
        names = " and ".join(map(str, found[:2]))
        raise UsageError(
            f"parameters are on {names}; ready times are taken on one device: move the model there."
        )
    return found[0]


def measure_errors(
    gradients: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    codecs: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Returns the error of one message, as a share of the gradient's norm, without error feedback.

    Gradients that are zero everywhere, or not finite, have no such share and are left out.

    Args:
        gradients: Gradients by name; they are not changed.
        codecs: Codec expressions.

    Example:
        >>> measure_errors({"w": torch.ones(8)}, ["none"])
        {'w': {'none': 0.0}}
    """
    made = {name: last_phase(name) for name in codecs}
    pairs = gradients.items() if isinstance(gradients, Mapping) else gradients
    return {
        name: {text: _finite(error_of(codec, gradient)) for text, codec in made.items()}
        for name, gradient in pairs
        if 0.0 < float(torch.linalg.vector_norm(gradient.detach().float())) < math.inf
    }


def merged(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Returns medians over the profiles of all ranks; names, sizes and errors are the first's."""
    found: dict[str, Any] = {
        name: statistics.median(getattr(profile, name) for profile in profiles)
        for name in MODEL_TIMES
    }
    ready: dict[str, list[float]] = {}
    needed: dict[str, list[float]] = {}
    for gradient in (gradient for profile in profiles for gradient in profile.gradients):
        ready.setdefault(gradient.name, []).append(gradient.ready_s)
        if gradient.needed_s is not None:
            needed.setdefault(gradient.name, []).append(gradient.needed_s)
    gradients = [
        one.model_copy(
            update={
                "ready_s": statistics.median(ready[one.name]),
                "needed_s": statistics.median(needed[one.name]) if one.name in needed else None,
            }
        )
        for one in profiles[0].gradients
    ]
    found["gradients"] = tuple(sorted(gradients, key=lambda one: one.ready_s))
    return profiles[0].model_copy(update=found)


def _finite(error: float) -> float:
    return error if error < MOST_ERROR else MOST_ERROR


def _work_s(a: Moment, b: Moment, clock: str) -> float:
    if a.event is not None and b.event is not None:
        return float(a.event.elapsed_time(b.event)) * 1e-3
    if clock == "thread" and a.thread == b.thread:
        return b.thread_s - a.thread_s
    return b.process_s - a.process_s


def _forward_end(step: Step) -> Moment:
    assert step.forward_end is not None
    return step.forward_end


def _backward_begin(step: Step) -> Moment:
    return _forward_end(step) if step.resumed is None else step.resumed


def _last(step: Step) -> Moment:
    return max(step.ready.values(), key=lambda moment: moment.wall_s)


def _end(step: Step) -> Moment:
    assert step.end is not None
    return step.end


def _scale(steps: Sequence[Step]) -> float:
    """Returns the work of all threads over that of the computing thread, during forward."""
    process = sum(_work_s(step.begin, _forward_end(step), "process") for step in steps)
    thread = sum(_work_s(step.begin, _forward_end(step), "thread") for step in steps)
    return max(process / thread, 1.0) if thread > 0 else 1.0


def _threads(steps: Sequence[Step]) -> float:
    """Returns the number of cores that forward keeps busy, from 1 to torch's number of threads.

    Nothing is exchanged during forward. Where ranks share cores, the number is smaller than for one
    rank alone.
    """
    work_s = sum(_work_s(step.begin, _forward_end(step), "process") for step in steps)
    wall_s = sum(_forward_end(step).wall_s - step.begin.wall_s for step in steps)
    return max(1.0, min(work_s / max(wall_s, 1e-9), float(torch.get_num_threads())))
