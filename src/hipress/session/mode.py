"""The mode of a step, and every way in which it may change.

    WARMUP ----- end_warmup ----> COMPRESSED
    PLAIN, COMPRESSED, TRIAL --- try_plan, use_plan, use_plain ---> TRIAL, COMPRESSED, PLAIN
    any but DETACHED ----- flush ----> FLUSHING ----- end_flush ----> PLAIN or DETACHED

A session with `enabled=False` is DETACHED from the start.
"""

from __future__ import annotations

from enum import Enum


class Mode(Enum):
    """What happens to the gradients of one step."""

    PLAIN = "plain"
    """They are averaged uncompressed; codec state, if there is any, waits."""
    WARMUP = "warm-up"
    """They go through the engine uncompressed: the first `warmup_steps` are not over."""
    COMPRESSED = "compressed"
    """They are exchanged as decided for each of them."""
    TRIAL = "trial"
    """The same, with a plan that `auto` is timing."""
    FLUSHING = "flushing"
    """They are averaged uncompressed together with what the codecs have not sent yet."""
    DETACHED = "detached"
    """They are averaged uncompressed from now on; the session does nothing else."""

    @property
    def compresses(self) -> bool:
        """Whether codecs work in this mode."""
        return self in (Mode.COMPRESSED, Mode.TRIAL)


STEERABLE = frozenset({Mode.PLAIN, Mode.COMPRESSED, Mode.TRIAL})
"""Modes between which `auto` may switch from step to step."""


class StepMode:
    """Holds the present mode; each method is one named transition and checks that it is allowed.

    Example:
        >>> mode = StepMode(Mode.COMPRESSED)
        >>> mode.flush(then=Mode.DETACHED)
        >>> mode.end_flush()
        >>> mode.current
        <Mode.DETACHED: 'detached'>
    """

    def __init__(self, first: Mode) -> None:
        self.current = first
        self._after_flush = Mode.PLAIN

    @property
    def is_leaving(self) -> bool:
        """Whether the session is detached, or will be when the flush has ended."""
        flushing = self.current is Mode.FLUSHING and self._after_flush is Mode.DETACHED
        return flushing or self.current is Mode.DETACHED

    def restart(self, *, warm: bool) -> None:
        """Starts again after a checkpoint was loaded: `warm` says whether the warm-up is over."""
        self._go(
            Mode.COMPRESSED if warm else Mode.WARMUP,
            {Mode.WARMUP, Mode.COMPRESSED},
        )

    def end_warmup(self) -> None:
        """The first `warmup_steps` are over."""
        self._go(Mode.COMPRESSED, {Mode.WARMUP})

    def use_plain(self) -> None:
        """Averages uncompressed from this step on."""
        self._go(Mode.PLAIN, STEERABLE)

    def use_plan(self) -> None:
        """Compresses from this step on."""
        self._go(Mode.COMPRESSED, STEERABLE)

    def try_plan(self) -> None:
        """Compresses from this step on, to time a plan."""
        self._go(Mode.TRIAL, STEERABLE)

    def flush(self, *, then: Mode) -> None:
        """Sends what codecs hold with the gradients of the next steps, until `end_flush`."""
        assert then in (Mode.PLAIN, Mode.DETACHED), then
        self._go(Mode.FLUSHING, {*STEERABLE, Mode.WARMUP})
        self._after_flush = then

    def end_flush(self) -> None:
        """All that codecs held has been sent."""
        self._go(self._after_flush, {Mode.FLUSHING})

    def _go(self, mode: Mode, allowed: frozenset[Mode] | set[Mode]) -> None:
        assert self.current in allowed, f"no transition from {self.current} to {mode}"
        self.current = mode
