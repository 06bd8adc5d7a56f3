"""What a training job reports: facts before it, throughput during it, a result after it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known before the first step."""

    model: str
    num_parameters: int
    data: str
    num_train: int
    num_test: int
    codec: str
    """An expression, `auto`, `uncompressed` for DDP alone, or `plan` if a plan decides."""
    strategy: str | None
    schedule: str | None = None
    """The order of messages; None with DDP."""
    num_compressed: int
    num_gradients: int
    compressed_share: float
    num_ranks: int
    device: str
    backend: str
    batch: int
    first_step: int
    num_steps: int
    num_epochs: float
    steps_per_epoch: int
    unit: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is known after the last step."""

    num_steps: int
    """Steps since the job was started or resumed."""
    seconds: float
    """Time from the first step to the end, evaluations and checkpoints included."""
    steps_per_s: float
    """Excludes evaluations, checkpoints and the first steps."""
    units_per_s: float
    """Units per second, summed over all ranks."""
    units_per_s_per_rank: float
    unit: str
    wire_bytes_per_step: float
    """Bytes that a rank sends, the mean over ranks; for DDP alone those of a ring in float32."""
    ratio: float
    """Bytes of plain all-reduce divided by those."""
    loss: float | None
    """Training loss, the mean over ranks since the last row."""
    test_loss: float | None
    accuracy: float | None
    """Test accuracy in percent; None if the task has none."""
    memory_bytes: int
    """Memory of this rank beyond DDP's: codec states and buffers."""


class Throughput:
    """Measures the time of steps in intervals, without what lies between them.

    Intervals that begin before the step `counts_from` count only if there are no others.
    """

    def __init__(self, step: int, counts_from: int) -> None:
        self.counts_from = counts_from
        self.num_units = 0
        """Images or tokens of this rank in the current interval."""
        self._intervals: list[tuple[int, int, float, float]] = []
        """First step, steps, units and seconds of each interval."""
        self._started_s = time.perf_counter()
        self.begin(step)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s

    def begin(self, step: int) -> None:
        """Begin an interval; one that was not ended is dropped."""
        self._since_step, self._since_s, self.num_units = step, time.perf_counter(), 0

    def end(self, step: int, num_units: float) -> dict[str, Any]:
        """End the interval before a step and return its speed, for a row of the log.

        `num_units` are the images or tokens of a rank in the interval, the mean over ranks.
        """
        num_steps, seconds = step - self._since_step, time.perf_counter() - self._since_s
        self._intervals.append((self._since_step, num_steps, num_units, seconds))
        return {
            "step": step,
            "time_s": self.elapsed_s,
            "steps_per_s": num_steps / seconds,
            "units_per_s_per_rank": num_units / seconds,
        }

    def speed(self) -> tuple[float, float]:
        """Return the steps and units per second of all intervals that count; 0 without any."""
        counted = [one for one in self._intervals if one[0] >= self.counts_from]
        counted = counted or self._intervals
        steps, units, seconds = (sum(one[column] for one in counted) for column in (1, 2, 3))
        return (steps / seconds, units / seconds) if seconds else (0.0, 0.0)
