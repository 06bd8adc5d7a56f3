"""How fast a job is: stretches of steps, without what lies between them."""

from __future__ import annotations

import time
from typing import Any


class Throughput:
    """Counts the time of steps.

    Args:
        step: Where the job begins.
        counts_from: Stretches that begin earlier do not count for the whole, if others do.
    """

    def __init__(self, step: int, counts_from: int) -> None:
        self.counts_from = counts_from
        self.num_units = 0
        """Of this stretch, on this rank."""
        self._stretches: list[tuple[int, int, float, float]] = []
        """First step, steps, units and seconds of each."""
        self._started_s = time.perf_counter()
        self.begin(step)

    @property
    def elapsed_s(self) -> float:
        """Since the job began."""
        return time.perf_counter() - self._started_s

    def begin(self, step: int) -> None:
        """Begin a stretch; one that was not ended is forgotten."""
        self._since_step, self._since_s, self.num_units = step, time.perf_counter(), 0

    def end(self, step: int, num_units: float) -> dict[str, Any]:
        """End a stretch, and say how fast it was.

        Args:
            step: Where it ends.
            num_units: Images or tokens of a rank in it, the mean over ranks.
        """
        num_steps, seconds = step - self._since_step, time.perf_counter() - self._since_s
        self._stretches.append((self._since_step, num_steps, num_units, seconds))
        return {
            "step": step,
            "time_s": self.elapsed_s,
            "steps_per_s": num_steps / seconds,
            "units_per_s_per_rank": num_units / seconds,
        }

    def speed(self) -> tuple[float, float]:
        """Steps and units per second of all stretches that count; 0 without any."""
        counted = [one for one in self._stretches if one[0] >= self.counts_from]
        counted = counted or self._stretches
        steps, units, seconds = (sum(one[place] for one in counted) for place in (1, 2, 3))
        return (steps / seconds, units / seconds) if seconds else (0.0, 0.0)
