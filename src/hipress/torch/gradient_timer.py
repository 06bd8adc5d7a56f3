"""When each gradient is there: work of forward, of backward up to each gradient, and of the rest.

Clocks. On a CPU work is CPU time. `process` counts all threads of the process: right for a step
without any exchange. While one runs in the same process, that counts its threads too; `thread`
then counts the thread that runs forward and backward alone (on a CPU that is the caller's). Where
torch uses several threads for an operation it misses their part, so what it says is multiplied by
what both clocks said of forward, during which nothing is exchanged. On a GPU events are recorded,
and work is the time between them.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from hipress.errors import UsageError
from hipress.probe.cache import last_phase
from hipress.probe.codec_costs import error_of
from hipress.profile import GradientProfile, ModelProfile

MAX_STEPS = 32
"""That are kept; the oldest go."""
CLOCKS = ("process", "thread")


class Moment(NamedTuple):
    """Now, by every clock there is."""

    wall_s: float
    process_s: float
    thread_s: float
    thread: int
    event: torch.cuda.Event | None


@dataclass(slots=True)
class Step:
    """One step: forward begins, forward ends, gradients are ready one by one, the step ends."""

    begin: Moment
    forward_end: Moment | None = None
    ready: dict[str, Moment] = field(default_factory=dict)
    end: Moment | None = None


class GradientTimer:
    """Notes the steps of a model until it is closed.

    A step begins with a forward and ends with the next one's, or with `end_step`. Gradients that
    are ready several times (accumulated over several backwards) count the last time.

    Args:
        module: A model, or its DDP.
        names: Of its parameters; by default those of the module, without DDP's `module.`.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> with GradientTimer(model) as seen:
        ...     for _ in range(3):
        ...         model(torch.ones(1, 4)).sum().backward()
        ...         seen.end_step()
        >>> sorted(gradient.name for gradient in seen.profile().gradients)
        ['bias', 'weight']
    """

    def __init__(self, module: nn.Module, names: Mapping[str, nn.Parameter] | None = None) -> None:
        found = dict(names) if names is not None else named_gradients(module)
        self._parameters = {name: p for name, p in found.items() if p.requires_grad}
        if not self._parameters:
            raise UsageError("the model has no parameter that is trained; there is no gradient.")
        self._device = one_device(self._parameters.values())
        self._on_gpu = self._device.type == "cuda"
        self.steps: deque[Step] = deque(maxlen=MAX_STEPS)
        """Those that have ended."""
        self._step: Step | None = None
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(_untraced(self._before_forward)),
            module.register_forward_hook(_untraced(self._after_forward)),
        ]
        for name, parameter in self._parameters.items():
            register: Any = parameter.register_post_accumulate_grad_hook
            self._hooks.append(register(_untraced(self._on_gradient(name))))

    def close(self) -> None:
        """Takes the hooks off; what was noted stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._step = None

    def __enter__(self) -> GradientTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def end_step(self) -> None:
        """Ends the step now, behind the optimizer; what comes before the next forward is no work
        of the model."""
        step, self._step = self._step, None
        if step is not None and step.ready and step.forward_end is not None:
            step.end = self._now()
            self.steps.append(step)

    def profile(
        self,
        *,
        name: str = "",
        batch: int | None = None,
        skip: int = 1,
        clock: str = "process",
        errors: Mapping[str, Mapping[str, float]] | None = None,
    ) -> ModelProfile:
        """What the steps so far have shown: medians.

        Args:
            name: Of the model.
            batch: Examples per rank and step.
            skip: Steps at the beginning that do not count, as far as others are left.
            clock: `process`, or `thread` where something is exchanged meanwhile.
            errors: By gradient and codec, from `measure_errors`.

        Raises:
            UsageError: No step has ended yet.
        """
        if clock not in CLOCKS:
            raise UsageError(f"clock {clock!r} is none of {', '.join(CLOCKS)}; choose one.")
        steps = list(self.steps)[min(skip, max(len(self.steps) - 1, 0)) :]
        if not steps:
            raise UsageError(
                "no training step has ended since readiness is noted; run forward and backward "
                "of the model at least once, then end_step()."
            )
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        scale = _scale(steps) if clock == "thread" and not self._on_gpu else 1.0

        def work(a: Moment, b: Moment) -> float:
            return max(_work_s(a, b, clock) * scale, 0.0)

        # Only gradients that every step had: others are not there to be waited for.
        shared = set.intersection(*(set(step.ready) for step in steps))
        ready = {
            one: statistics.median(work(_forward_end(step), step.ready[one]) for step in steps)
            for one in shared
        }
        totals = [work(step.begin, _end(step)) for step in steps]
        middle = statistics.median(totals)
        known = errors or {}
        gradients = tuple(
            GradientProfile(
                name=one,
                numel=self._parameters[one].numel(),
                dims=self._parameters[one].dim(),
                ready_s=ready[one],
                errors=dict(known.get(one, {})),
            )
            for one in sorted(ready, key=ready.__getitem__)
        )
        return ModelProfile(
            name=name,
            batch=batch,
            element_bytes=next(iter(self._parameters.values())).element_size(),
            forward_s=statistics.median(work(step.begin, _forward_end(step)) for step in steps),
            backward_s=statistics.median(work(_forward_end(step), _last(step)) for step in steps),
            rest_s=statistics.median(work(_last(step), _end(step)) for step in steps),
            threads=1.0 if self._on_gpu else _threads(steps),
            error=statistics.median(abs(one - middle) / max(middle, 1e-12) for one in totals),
            gradients=gradients,
        )

    def _now(self) -> Moment:
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return Moment(
            time.perf_counter(),
            time.process_time(),
            time.thread_time(),
            threading.get_ident(),
            event,
        )

    def _before_forward(self, *_: object) -> None:
        if self._step is not None:
            if not self._step.ready:
                return  # a model that is called several times before backward
            self.end_step()
        if torch.is_grad_enabled():
            self._step = Step(self._now())

    def _after_forward(self, *_: object) -> None:
        if self._step is not None and not self._step.ready:
            self._step.forward_end = self._now()

    def _on_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self._step is not None:
                self._step.ready[name] = self._now()

        return hook


def named_gradients(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by name; those of a DDP without its `module.`.

    Example:
        >>> list(named_gradients(nn.Linear(2, 2)))
        ['weight', 'bias']
    """
    inner = module
    if isinstance(module, nn.parallel.DistributedDataParallel):
        inner = module.module
    return dict(inner.named_parameters())


def one_device(parameters: Iterable[torch.Tensor]) -> torch.device:
    """Where all parameters are.

    Raises:
        UsageError: They are on several devices, whose clocks nobody compares.

    Example:
        >>> one_device(nn.Linear(2, 2).parameters())
        device(type='cpu')
    """
    found = list(dict.fromkeys(parameter.device for parameter in parameters))
    if len(found) > 1:
        names = " and ".join(map(str, found[:2]))
        raise UsageError(
            f"parameters are on {names}; ready times are taken on one device: move the model there."
        )
    return found[0]


def _untraced(hook: Callable[..., None]) -> Any:
    """A hook that torch.compile calls as it is: it would break the graph at every clock."""
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]


def measure_errors(
    gradients: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    codecs: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Of one message of each gradient with each codec, as a share of its norm; error feedback
    apart.

    Args:
        gradients: By name; none is changed.
        codecs: Expressions.

    Example:
        >>> measure_errors({"w": torch.ones(8)}, ["none"])
        {'w': {'none': 0.0}}
    """
    made = {name: last_phase(name) for name in codecs}
    pairs = gradients.items() if isinstance(gradients, Mapping) else gradients
    return {
        name: {text: error_of(codec, gradient) for text, codec in made.items()}
        for name, gradient in pairs
    }


def merged(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """One out of those of all ranks: medians; the first's names, sizes and errors."""
    first = profiles[0]
    of_rank = [{one.name: one.ready_s for one in profile.gradients} for profile in profiles]

    def median(field_name: str) -> float:
        return float(statistics.median(getattr(profile, field_name) for profile in profiles))

    gradients = [
        one.model_copy(
            update={
                "ready_s": statistics.median(
                    ready[one.name] for ready in of_rank if one.name in ready
                )
            }
        )
        for one in first.gradients
    ]
    return first.model_copy(
        update={
            "forward_s": median("forward_s"),
            "backward_s": median("backward_s"),
            "rest_s": median("rest_s"),
            "threads": median("threads"),
            "error": median("error"),
            "gradients": tuple(sorted(gradients, key=lambda one: one.ready_s)),
        }
    )


def _work_s(a: Moment, b: Moment, clock: str) -> float:
    if a.event is not None and b.event is not None:
        return float(a.event.elapsed_time(b.event)) * 1e-3
    if clock == "thread" and a.thread == b.thread:
        return b.thread_s - a.thread_s
    return b.process_s - a.process_s


def _forward_end(step: Step) -> Moment:
    assert step.forward_end is not None
    return step.forward_end


def _last(step: Step) -> Moment:
    return max(step.ready.values(), key=lambda moment: moment.wall_s)


def _end(step: Step) -> Moment:
    assert step.end is not None
    return step.end


def _scale(steps: Sequence[Step]) -> float:
    """All threads' work over that of the thread that computes, during forward."""
    process = sum(_work_s(step.begin, _forward_end(step), "process") for step in steps)
    thread = sum(_work_s(step.begin, _forward_end(step), "thread") for step in steps)
    return max(process / thread, 1.0) if thread > 0 else 1.0


def _threads(steps: Sequence[Step]) -> float:
    """Cores that forward keeps busy; between 1 and what torch may use.

    During forward nothing is exchanged. Where ranks share cores this is less than they would use
    alone, and more would not help them.
    """
    work_s = sum(_work_s(step.begin, _forward_end(step), "process") for step in steps)
    wall_s = sum(_forward_end(step).wall_s - step.begin.wall_s for step in steps)
    return max(1.0, min(work_s / max(wall_s, 1e-9), float(torch.get_num_threads())))
