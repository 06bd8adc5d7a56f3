"""Fair timing of several candidates in one process, and the facts a timing must carry.

A number from a shared machine means little alone. So candidates are timed side by side: each round
runs every candidate once, in a fresh order, and slow moments of the machine hit all of them alike.
Compare medians inside one call of `measure`, never across calls.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from hipress.version import __version__

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
        """The percentiles of a non-empty list of seconds, interpolated linearly."""
        ordered = sorted(samples_s)
        return Timing(
            p20_s=_percentile(ordered, 0.2),
            p50_s=_percentile(ordered, 0.5),
            p80_s=_percentile(ordered, 0.8),
            num_samples=len(ordered),
        )


def measure(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 9,
    min_seconds: float = 0.0,
    on_round: Callable[[float], None] | None = None,
) -> dict[str, Timing]:
    """Time the candidates round-robin in this process.

    Every candidate is called twice before the first round (once to compile and to touch its
    memory, once to see how many calls make a sample long enough for the clock).

    Args:
        candidates: functions without arguments, by name.
        repeats: the least number of rounds.
        min_seconds: go on with further rounds until this much time has been spent.
        on_round: called after each round with the fraction done, from 0 to 1.

    Returns:
        One `Timing` per name, in the order given.

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
    start = time.perf_counter()
    num_rounds = 0
    while num_rounds < repeats or time.perf_counter() - start < min_seconds:
        shuffle(order)
        for name in order:
            samples[name].append(_seconds_per_call(candidates[name], calls[name]))
        num_rounds += 1
        if on_round is not None:
            on_round(_fraction_done(num_rounds, repeats, time.perf_counter() - start, min_seconds))
    return {name: Timing.of(samples[name]) for name in candidates}


def machine_facts() -> dict[str, str | int]:
    """What a reader needs to judge a timing: processor, GPU, versions, and the date in UTC."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": _num_cores(),
        "python": platform.python_version(),
    }
    for package in ("torch", "numba"):
        facts[package] = _version(package)
    facts["hipress"] = __version__
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    facts["date_utc"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return facts


def _calls_per_sample(fn: Callable[[], object]) -> int:
    fn()
    seconds = _seconds_per_call(fn, 1)
    return max(1, round(_MIN_SAMPLE_S / max(seconds, 1e-7)))


def _seconds_per_call(fn: Callable[[], object], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        fn()
    return (time.perf_counter() - start) / num_calls


def _fraction_done(num_rounds: int, repeats: int, spent_s: float, min_seconds: float) -> float:
    by_time = spent_s / min_seconds if min_seconds > 0 else 1.0
    return min(1.0, num_rounds / repeats, by_time)


def _percentile(ordered: list[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _cpu_model() -> str:
    # Only Linux says the model by name; elsewhere the architecture must do.
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _num_cores() -> int:
    # The affinity mask, not the machine: a container may own fewer cores than it sees.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str:
    # From the metadata, so that asking does not import numba.
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
