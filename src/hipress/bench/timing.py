"""Fair timing of several candidates in one process.

A number from a shared machine means little alone. So candidates are timed side by side: each round
runs every candidate once, in a fresh order, and slow moments of the machine hit all of them alike.
Compare medians inside one call of `measure`, never across calls.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

# One sample lasts at least this long, so that the clock and the call around it cost under 1 %.
_MIN_SAMPLE_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call: the 20th, 50th and 80th percentile over `num_samples` rounds."""

    p20_s: float
    p50_s: float
    p80_s: float
    num_samples: int

    @staticmethod
    def of(samples_s: list[float]) -> Timing:
        """Returns the percentiles of a non-empty list of seconds, interpolated linearly."""
        p20, p50, p80 = np.percentile(samples_s, (20, 50, 80)).tolist()
        return Timing(p20_s=p20, p50_s=p50, p80_s=p80, num_samples=len(samples_s))

    def fields(self, prefix: str = "") -> dict[str, float]:
        names = ("seconds_median", "seconds_p20", "seconds_p80")
        values = (self.p50_s, self.p20_s, self.p80_s)
        return {f"{prefix}{name}": value for name, value in zip(names, values, strict=True)}


def measure(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 9,
    on_round: Callable[[float], None] | None = None,
) -> dict[str, Timing]:
    """Times the candidates round-robin in this process; returns a `Timing` for each, in their
    order.

    Every candidate is called twice before the first round (once to compile and to touch its memory,
    once to see how many calls make a sample long enough for the clock). `on_round` is called after
    each round with the fraction done, from 0 to 1.

    Example:
        >>> sorted(measure({"sum": lambda: sum(range(100))}, repeats=3))
        ['sum']
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    calls = {name: _calls_per_sample(fn) for name, fn in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    # A fixed order would always give a candidate the same predecessor, and so the same warm cache.
    shuffle = random.Random(0).shuffle
    for num_rounds in range(1, repeats + 1):
        shuffle(order)
        for name in order:
            samples[name].append(_seconds_per_call(candidates[name], calls[name]))
        if on_round is not None:
            on_round(num_rounds / repeats)
    return {name: Timing.of(samples[name]) for name in candidates}


def _calls_per_sample(fn: Callable[[], object]) -> int:
    fn()
    seconds = _seconds_per_call(fn, 1)
    return max(1, round(_MIN_SAMPLE_S / max(seconds, 1e-7)))


def _seconds_per_call(fn: Callable[[], object], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        fn()
    return (time.perf_counter() - start) / num_calls
