"""Step times of two kinds compared, where machines are noisy: medians, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median


def are_far(a: Iterable[float], b: Iterable[float], far: float) -> bool:
    """Whether medians differ by more than a factor."""
    first, second = median(a), median(b)
    return max(first, second) > far * min(first, second)


def is_clear(own: Sequence[float], plain: Sequence[float], gain: float) -> bool:
    """Whether more steps would hardly change on which side of the gain a plan is."""
    beside = abs(median(own) - (1 - gain) * median(plain))
    return beside > 2 * math.hypot(_doubt(own), _doubt(plain))


def is_faster(own: Sequence[float], plain: Sequence[float], gain: float) -> bool:
    """Whether a plan is faster by so much, and by more than chance."""
    before = median(plain)
    return before - median(own) >= max(gain * before, math.hypot(_doubt(own), _doubt(plain)))


def _doubt(times: Sequence[float]) -> float:
    """The standard error of a median, from the median of distances to it."""
    middle = median(times)
    spread = 1.4826 * median(abs(t - middle) for t in times)
    return 1.2533 * spread / math.sqrt(len(times))
