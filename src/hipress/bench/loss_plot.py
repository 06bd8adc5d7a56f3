"""A picture of training: the loss over wall time, one curve for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipress.errors import MissingDependencyError, UsageError

SMOOTHED = 0.7
"""Weight of the past in the curves: a batch's loss jumps about."""
COLOURS = ("#7f7f7f", "#1f77b4", "#d62728", "#2ca02c")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run."""

    label: str
    rows: Sequence[Mapping[str, Any]]
    """With `time_s` and `loss`."""


def draw(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Write the picture as PNG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UsageError: The file cannot be written.
    """
    try:
        # Not pyplot, which looks for a screen and keeps every figure.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", extra="report") from error
    figure: Any = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for curve, colour in zip(curves, COLOURS, strict=False):
        times = [row["time_s"] for row in curve.rows]
        losses = [row["loss"] for row in curve.rows]
        axes.plot(times, losses, color=colour, alpha=0.25, linewidth=1)
        axes.plot(times, smooth(losses), color=colour, linewidth=2, label=curve.label)
        if times:
            axes.plot(times[-1], smooth(losses)[-1], "o", color=colour, markersize=5)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("training loss")
    axes.set_title(title, fontsize=10)
    axes.grid(color="0.92", which="both")
    axes.legend(fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}; give a file that may be written."
        ) from error


def smooth(values: Sequence[float]) -> list[float]:
    """A running mean that forgets, right from the first value on.

    Example:
        >>> [round(value, 2) for value in smooth([1.0, 1.0, 4.0])]
        [1.0, 1.0, 2.37]
    """
    found, total, weight = [], 0.0, 0.0
    for value in values:
        total = SMOOTHED * total + (1 - SMOOTHED) * value
        weight = SMOOTHED * weight + (1 - SMOOTHED)
        found.append(total / weight)
    return found
