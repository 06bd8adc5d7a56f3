"""How long the steps of a job take, as far as the exchange can change it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class StepClock:
    """Times steps from the begin of forward to the end of backward.

    What a program does between steps (data, evaluation, checkpoints) does not count: it is no
    reason to plan again. Of several forwards before one exchange the first counts. On a GPU the
    host runs ahead: moments are events on its stream, and nobody waits for them unless asked.

    Args:
        device: Of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Any = None
        self._last: Any = None
        self._steps: list[tuple[Any, Any]] = []
        self._hook: Any = None

    def stand_at(self, module: nn.Module | None) -> None:
        """Notes when forward begins; without a module a step begins where the last one ended."""
        if module is not None:
            # torch.compile would break the graph at each thing that a hook does.
            hook = torch.compiler.disable(self._on_forward)  # type: ignore[no-untyped-call]
            self._hook = module.register_forward_pre_hook(hook)

    def leave(self) -> None:
        """Takes the hook off."""
        if self._hook is not None:
            self._hook.remove()

    def begin(self) -> None:
        """A step begins, unless one has."""
        if self._begin is None:
            self._begin = self._now()

    def end(self) -> None:
        """A step has ended."""
        begin, self._begin = self._last if self._begin is None else self._begin, None
        self._last = self._now()
        if begin is not None:
            self._steps.append((begin, self._last))

    def restart(self) -> None:
        """Leaves out all that was not read yet."""
        self._steps.clear()

    def read(self, *, wait: bool) -> list[float]:
        """Times of steps that were not read yet; with `wait` of all of them."""
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

    def _on_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():  # an evaluation is no step
            self.begin()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
