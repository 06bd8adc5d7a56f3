"""The learning rate of every step: a rise, then steps or half a cosine, counted in epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hipress.errors import UsageError

MODES = ("constant", "step", "cosine")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """From an epoch, which may be a fraction, to a rate.

    Example:
        >>> plan = Schedule(base=0.1, mode="step", num_epochs=90, decay_epochs=(30, 60))
        >>> [round(plan.rate_at(epoch), 6) for epoch in (0, 29.9, 30, 60)]
        [0.1, 0.1, 0.01, 0.001]
    """

    base: float
    """The rate after the rise."""
    mode: str = "constant"
    num_epochs: float = 1.0
    """Of the whole run: where the cosine ends."""
    warmup_epochs: float = 0.0
    """In which the rate goes in a straight line from `warmup_rate` to `base`."""
    warmup_rate: float = 0.0
    decay: float = 0.1
    """What each of `decay_epochs` multiplies the rate by."""
    decay_epochs: tuple[float, ...] = ()
    """Counted from the start of the run, the rise among them."""
    step_epochs: float = 0.0
    """Of a step; in the rise a step has the rate of its end, so that the first does something."""

    def check(self) -> None:
        """Raise a UsageError where this is no schedule."""
        if self.mode not in MODES:
            raise UsageError(f"--lr-mode {self.mode!r} is none of {', '.join(MODES)}; choose one.")
        for name, value in (("--lr", self.base), ("--lr-decay", self.decay)):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value:g}; it must be above 0.")
        if not (math.isfinite(self.warmup_rate) and self.warmup_rate >= 0):
            raise UsageError(f"--warmup-lr is {self.warmup_rate:g}; it must be 0 or more.")
        if not 0 <= self.warmup_epochs <= self.num_epochs:
            raise UsageError(
                f"--warmup-epochs is {self.warmup_epochs:g} and the run has {self.num_epochs:g}; "
                "it must be from 0 to that."
            )
        if self.mode == "step" and not self.decay_epochs:
            raise UsageError("--lr-mode step needs --lr-decay-epochs, e.g. 50,80.")
        if self.mode != "step" and self.decay_epochs:
            raise UsageError(f"--lr-decay-epochs needs --lr-mode step; it is {self.mode!r}.")
        ordered = tuple(sorted(set(self.decay_epochs)))
        if self.decay_epochs != ordered or any(epoch <= 0 for epoch in ordered):
            told = ",".join(f"{epoch:g}" for epoch in self.decay_epochs)
            raise UsageError(f"--lr-decay-epochs {told} must be above 0 and rising, e.g. 50,80.")

    def rate_at(self, epoch: float) -> float:
        """The rate at this point of the run."""
        if epoch < self.warmup_epochs:
            risen = min((epoch + self.step_epochs) / self.warmup_epochs, 1.0)
            return self.warmup_rate + (self.base - self.warmup_rate) * risen
        if self.mode == "step":
            return self.base * self.decay ** sum(epoch >= each for each in self.decay_epochs)
        if self.mode == "cosine":
            left = self.num_epochs - self.warmup_epochs
            done = min((epoch - self.warmup_epochs) / left, 1.0) if left > 0 else 0.0
            return self.base * 0.5 * (1 + math.cos(math.pi * done))
        return self.base
