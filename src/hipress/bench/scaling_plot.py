"""Pictures of simulated sweeps, and of published scaling curves with the simulated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hipress.errors import MissingDependencyError, UsageError

Row = Mapping[str, Any]

COLOURS = ("#7f7f7f", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
DASHES = {"ring": "--", "hierarchical": ":"}
"""Lines of other strategies are drawn through."""


def draw_sweep(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Write the step time over the number of nodes, or over the rate where only that varies.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UsageError: The file cannot be written.
    """
    figure = _figure((7.2, 4.4))
    axes = figure.add_subplot()
    over_nodes = len({row["nodes"] for row in rows}) > 1 or len({row["rate"] for row in rows}) == 1
    curves: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in rows:
        other = (row["rate"] if over_nodes else row["nodes"],)
        x = row["nodes"] if over_nodes else row["bytes_per_s"] * 8e-9
        key = (row["codec"], row["strategy"], *other)
        curves.setdefault(key, []).append((x, row["step_s"] * 1e3))
    codecs = list(dict.fromkeys(codec for codec, _, _ in curves))
    many = len({other for _, _, other in curves}) > 1
    for (codec, strategy, other), points in curves.items():
        label = "plain all-reduce" if codec == "none" else f"{codec} {strategy or ''}".strip()
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(
            xs,
            ys,
            DASHES.get(strategy or "", "-"),
            marker="o",
            markersize=4,
            color=COLOURS[codecs.index(codec) % len(COLOURS)],
            label=f"{label}, {other}" if many else label,
        )
    axes.set_xscale("log", base=2 if over_nodes else 10)
    _plain_ticks(axes, sorted({x for points in curves.values() for x, _ in points}))
    rate = rows[0]["rate"] if over_nodes and not many else None
    nodes = f"nodes, links of {rate}" if rate else "nodes"
    axes.set_xlabel(nodes if over_nodes else "Gbit/s that a link brings")
    axes.set_ylabel("ms per step, simulated")
    if over_nodes:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(color="0.92")
    axes.legend(fontsize=8)
    _save(figure, path)


def draw_published(path: Path, rows: Sequence[Row]) -> None:
    """Write the speed-ups over Ring: published ones as dots, simulated ones as lines.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UsageError: The file cannot be written.
    """
    figure = _figure((8.6, 6.4))
    panels = list(dict.fromkeys((row["cluster"], row["model"]) for row in rows))
    grid = figure.subplots(2, -(-len(panels) // 2), squeeze=False)
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
    _save(figure, path)


def _plain_ticks(axes: Any, values: Sequence[float]) -> None:
    """The values themselves, in place of powers."""
    axes.set_xticks(values, [f"{value:.4g}" for value in values])
    axes.minorticks_off()


def _figure(size: tuple[float, float]) -> Any:
    try:
        # Not pyplot, which looks for a screen and keeps every figure.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", extra="report") from error
    return Figure(figsize=size, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}; give a file that may be written."
        ) from error
