"""Pictures: losses of trainings, accuracies of codecs, simulated sweeps, published scaling curves.

Every function writes one file and raises `MissingDependencyError` where matplotlib is not installed
and `UsageError` where the file cannot be written.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipress.errors import MissingDependencyError, UsageError

Row = Mapping[str, Any]

COLOURS = ("#7f7f7f", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
DASHES = {"ring": "--", "hierarchical": ":"}
"""Lines of other strategies are solid."""
MARKERS = {None: "o", "fifo": "s", "priority": "^", "overlap": "v"}
"""The marker of each schedule; points without a schedule are round."""
SMOOTHED = 0.7
"""Weight of the past in the curves of losses: the loss of a batch jumps about."""
MAX_TITLE = 66
"""Characters in a line above a panel."""
MAX_COLOURS = 8
"""With more codecs, only those outside the limit have a colour and a name in the picture."""


def figure(width: float, height: float) -> Any:
    """Returns an empty figure; raises `MissingDependencyError` without matplotlib."""
    try:
        # Not pyplot, which looks for a screen and keeps every figure.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", extra="report") from error
    return Figure(figsize=(width, height), layout="constrained")


def _save(made: Any, path: Path, **options: Any) -> None:
    try:
        made.savefig(path, **{"dpi": 150, "format": "png", **options})
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}; give a file that may be written."
        ) from error


# --- losses of trainings --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    label: str
    rows: Sequence[Row]


def draw_losses(path: Path, title: str, curves: Sequence[LossCurve]) -> None:
    """Draws the loss over wall time, one curve for each training."""
    made = figure(7.2, 4.2)
    axes = made.add_subplot()
    for curve, colour in zip(curves, COLOURS, strict=False):
        times = [row["time_s"] for row in curve.rows]
        losses = [row["loss"] for row in curve.rows]
        axes.plot(times, losses, color=colour, alpha=0.25, linewidth=1)
        axes.plot(times, smooth(losses), color=colour, linewidth=2, label=curve.label)
        if times:
            axes.plot(times[-1], smooth(losses)[-1], "o", color=colour, markersize=5)
    axes.set(yscale="log", xlabel="seconds of training", ylabel="training loss")
    axes.set_xlim(left=0)
    axes.set_title(title, fontsize=10)
    axes.grid(color="0.92", which="both")
    axes.legend(fontsize=9)
    _save(made, path)


def smooth(values: Sequence[float]) -> list[float]:
    """Returns a running mean that forgets, without a bias towards the first value.

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


# --- accuracies and losses of codecs --------------------------------------------------------------


def draw_scores(path: Path, panels: Mapping[str, Sequence[Row]]) -> None:
    """Draws accuracy or loss over steps, a panel for each title: mean of the seeds and range."""
    made = figure(5.2 * len(panels), 4.2)
    all_axes = made.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, title, rows)
    # Without the library's version in it, the same rows make the same bytes for longer.
    _save(made, path, dpi=110, format=None, metadata=None)


def _draw_panel(axes: Any, title: str, rows: Sequence[Row]) -> None:
    plain, *others = rows
    stands_out = [row for row in others if len(others) <= MAX_COLOURS or not row["within"]]
    quiet = [row for row in others if row not in stands_out]
    for row in quiet:
        axes.plot(*_mean_curve(row), color="0.8", linewidth=1)
    if quiet:
        unit = "%" if plain["metric"] == "loss" else "point"
        axes.plot([], [], color="0.8", label=f"within 1 {unit}")
    for row in stands_out:
        dashes = "--" if row["codec"].endswith(", gradients") else "-"
        (line,) = axes.plot(*_mean_curve(row), dashes, linewidth=1.4, label=row["codec"])
        _shade(axes, row, line.get_color())
    axes.plot(*_mean_curve(plain), color="black", linewidth=1.6, label=plain["codec"])
    _shade(axes, plain, "black")
    # What matters is near the end; the first steps of all curves are far from it.
    ends = [_mean_curve(row)[1][-1] for row in rows]
    if plain["metric"] == "loss":
        least = min(min(curve) for row in rows for curve in row["curves"])
        axes.set_ylim(0.95 * least, max(1.1 * max(ends), 1.5 * least))
        axes.set(xlabel="step", ylabel="validation loss")
    else:
        top = max(max(curve) for row in rows for curve in row["curves"])
        axes.set_ylim(min(min(ends) - 3, top - 15), top + 1)
        axes.set(xlabel="step", ylabel="test accuracy, %")
    if len(title) > MAX_TITLE:
        title = title.replace(": ", ":\n", 1)
    axes.set_title(title, fontsize=10)
    axes.grid(color="0.92")
    axes.legend(fontsize=8, loc="best")


def _mean_curve(row: Row) -> tuple[list[int], list[float]]:
    return row["curve_steps"], [
        statistics.fmean(points) for points in zip(*row["curves"], strict=True)
    ]


def _shade(axes: Any, row: Row, color: str) -> None:
    points = list(zip(*row["curves"], strict=True))
    low, high = [min(p) for p in points], [max(p) for p in points]
    axes.fill_between(row["curve_steps"], low, high, color=color, alpha=0.12, linewidth=0)


# --- step times and speed-ups ---------------------------------------------------------------------


def draw_sweep(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws the step time over the number of nodes, or over the rate where only that varies."""
    made = figure(7.2, 4.4)
    axes = made.add_subplot()
    over_nodes = len({row["nodes"] for row in rows}) > 1 or len({row["rate"] for row in rows}) == 1
    curves: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in rows:
        other = (row["rate"] if over_nodes else row["nodes"],)
        x = row["nodes"] if over_nodes else row["bytes_per_s"] * 8e-9
        key = (row["codec"], row["strategy"], row["schedule"], *other)
        curves.setdefault(key, []).append((x, row["step_s"] * 1e3))
    codecs = list(dict.fromkeys(key[0] for key in curves))
    many = len({key[-1] for key in curves}) > 1
    for (codec, strategy, schedule, other), points in curves.items():
        label = " ".join(filter(None, (codec, strategy, schedule)))
        if codec == "none" and schedule is None:
            label = "plain all-reduce"
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(
            xs,
            ys,
            DASHES.get(strategy or "", "-"),
            marker=MARKERS[schedule],
            markersize=4,
            color=COLOURS[codecs.index(codec) % len(COLOURS)],
            label=f"{label}, {other}" if many else label,
        )
    axes.set_xscale("log", base=2 if over_nodes else 10)
    _plain_ticks(axes, sorted({x for points in curves.values() for x, _ in points}))
    rate = rows[0]["rate"] if over_nodes and not many else None
    nodes = f"nodes, links of {rate}" if rate else "nodes"
    xlabel = nodes if over_nodes else "Gbit/s of a link"
    axes.set(xlabel=xlabel, ylabel="ms per step, simulated")
    if over_nodes:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(color="0.92")
    axes.legend(fontsize=8)
    _save(made, path)


def draw_published(path: Path, rows: Sequence[Row]) -> None:
    """Draws the speed-ups over Ring: published ones as dots, simulated ones as lines."""
    made = figure(8.6, 6.4)
    panels = list(dict.fromkeys((row["cluster"], row["model"]) for row in rows))
    grid = made.subplots(2, -(-len(panels) // 2), squeeze=False)
    for axes, (cluster, model) in zip(grid.flat, panels, strict=False):
        shown = [row for row in rows if (row["cluster"], row["model"]) == (cluster, model)]
        for strategy, colour in (("ps", COLOURS[1]), ("ring", COLOURS[2])):
            points = [row for row in shown if row["strategy"] == strategy]
            if not points:
                continue
            nodes = [row["nodes"] for row in points]
            published = [row["published_speedup"] for row in points]
            simulated = [row["simulated_speedup"] for row in points]
            axes.plot(nodes, published, "o", color=colour, label=f"HiPress {strategy}, published")
            axes.plot(nodes, simulated, "-", color=colour, label=f"HiPress {strategy}, simulated")
        axes.axhline(1.0, color="0.5", linewidth=1)
        axes.set_xscale("log", base=2)
        _plain_ticks(axes, sorted({row["nodes"] for row in shown}))
        axes.set_ylim(0.8, 1.9)
        codec = shown[0]["codec"]
        axes.set_title(f"{model}, {codec}, {cluster} ({shown[0]['figure']})", fontsize=9)
        axes.set_xlabel("nodes", fontsize=9)
        axes.set_ylabel("times Ring", fontsize=9)
        axes.grid(color="0.92")
        axes.legend(fontsize=7, loc="upper left")
    _save(made, path)


def _plain_ticks(axes: Any, values: Sequence[float]) -> None:
    axes.set_xticks(values, [f"{value:.4g}" for value in values])
    axes.minorticks_off()
