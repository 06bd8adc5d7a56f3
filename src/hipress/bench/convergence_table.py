"""Rows of `hipress bench convergence`: on the terminal, in a page of the docs, as curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hipress.bench.table import Column, Row, fixed, print_table
from hipress.errors import MissingDependencyError, UsageError

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
"""What stands between these two lines of a page is made by the command."""

MAX_COLOURS = 8
"""With more codecs, only those outside the bar have a colour and a name in the picture."""


def print_rows(rows: Sequence[Row], *, to_stderr: bool = False) -> None:
    """One table for each data set."""
    ways = [
        Column(header="times smaller\nout", show=fixed("ratio_out", 1)),
        Column(header="\nback", show=fixed("ratio_back", 1)),
    ]
    if "hosts" in rows[0]:  # there bytes are counted on both ways together
        ways = [
            Column(header="times\nsmaller", show=fixed("ratio", 1)),
            Column(header="MB per step\nand rank", show=fixed("wire_bytes_per_rank", 4, 1e-6)),
        ]
    columns = [
        Column(header="codec", show=lambda row: str(row["codec"]), is_text=True),
        *ways,
        Column(header="accuracy\n%", show=fixed("accuracy", 2)),
        Column(header="difference\npoints", show=lambda row: _signed(row["difference"])),
        Column(header="over seeds\nfrom .. to", show=_spread),
        Column(header="within\n1 point", show=_verdict),
    ]
    for group in by_data(rows):
        print_table(_title(group[0]), columns, group, to_stderr=to_stderr)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as one Markdown table: a line per codec, the data sets side by side."""
    groups = by_data(rows)
    header = ["codec"]
    for group in groups:
        header += [f"{group[0]['data']}, times smaller", "accuracy", "difference", "within"]
    lines = [header, ["---"] * len(header)]
    for name in dict.fromkeys(row["codec"] for row in rows):
        cells = [f"`{name}`" if name != rows[0]["codec"] else name]
        for group in groups:
            row = next((row for row in group if row["codec"] == name), None)
            cells += ["-"] * 4 if row is None else _cells(row)
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def write_markdown(path: Path, rows: Sequence[Row]) -> None:
    """Put the table between the two marker lines of a page.

    Raises:
        UsageError: The page cannot be read or written, or does not have both markers once.
    """
    head, tail = _around_table(path)
    try:
        path.write_text(f"{head}{BEGIN}\n\n{markdown(rows)}\n{END}{tail}", "utf-8")
    except OSError as error:
        raise _cannot_write(path, error) from error


def check_outputs(page: Path | None, picture: Path | None) -> None:
    """Refuse a page or a picture that cannot be made, before the runs cost minutes.

    Raises:
        UsageError: The page has not both markers once or cannot be written; the picture's folder
            or format is unknown.
        MissingDependencyError: A picture is asked for and matplotlib is not installed.
    """
    if page is not None:
        _around_table(page)
        try:
            page.open("a").close()
        except OSError as error:
            raise _cannot_write(page, error) from error
    if picture is None:
        return
    formats = _figure(1).canvas.get_supported_filetypes()
    if not picture.parent.is_dir() or picture.suffix.removeprefix(".") not in formats:
        raise UsageError(
            f"cannot draw {str(picture)!r}; give --plot a file such as curves.png in a folder "
            "that exists."
        )


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw accuracy over steps, a panel per data set: the mean of the seeds and their range.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UsageError: The picture cannot be written.
    """
    groups = by_data(rows)
    figure = _figure(len(groups))
    for axes, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        _draw(axes, group)
    try:
        # Without the library's version in it, the same rows make the same bytes for longer.
        figure.savefig(path, dpi=110, metadata=None)
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}; give --plot a file that may be written."
        ) from error


def by_data(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each data set, in order."""
    names = dict.fromkeys(row["data"] for row in rows)
    return [[row for row in rows if row["data"] == name] for name in names]


def _around_table(page: Path) -> tuple[str, str]:
    """What stands on the page before and after the table and its markers."""
    try:
        text = page.read_text("utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {str(page)!r}: {error.strerror}; give --markdown a page that exists."
        ) from error
    head, begin, rest = text.partition(BEGIN + "\n")
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise UsageError(
            f"{str(page)!r} must have the line {BEGIN!r} and after it {END!r}, once each; "
            "add them where the table shall stand."
        )
    return head, tail


def _cannot_write(page: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {str(page)!r}: {error.strerror}; give --markdown a page that may be written."
    )


def _figure(num_panels: int) -> Any:
    try:
        # Not pyplot, which looks for a screen and keeps every figure.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", extra="report") from error
    return Figure(figsize=(5.2 * num_panels, 4.2), layout="constrained")


def _title(row: Row) -> str:
    who, rate = f"{row['num_workers']} worker(s)", row["rate"]
    if "hosts" in row:
        link = "" if row["rate"] == "none" else f" at {row['rate']}"
        who, rate = f"{row['hosts']} hosts{link}", row["learning_rate"]
    return (
        f"{row['data']}: {who}, {row['num_steps']} step(s) from rate {rate:g}, "
        f"{len(row['curves'])} seed(s)"
    )


def _cells(row: Row) -> list[str]:
    difference = f"{_signed(row['difference'])} ({_spread(row)})"
    ratios = (
        f"{row['ratio']:.1f}"
        if "hosts" in row
        else f"{row['ratio_out']:.1f} / {row['ratio_back']:.1f}"
    )
    return [ratios, f"{row['accuracy']:.2f}", difference, _verdict(row)]


def _signed(value: float) -> str:
    return f"{value:+.2f}"


def _spread(row: Row) -> str:
    return f"{_signed(row['difference_min'])} .. {_signed(row['difference_max'])}"


def _verdict(row: Row) -> str:
    return "yes" if row["within"] else "**no**"


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    plain, *others = rows
    stands_out = [row for row in others if len(others) <= MAX_COLOURS or not row["within"]]
    quiet = [row for row in others if row not in stands_out]
    for row in quiet:
        axes.plot(*_mean_curve(row), color="0.8", linewidth=1)
    if quiet:
        axes.plot([], [], color="0.8", label="within 1 point")
    for row in stands_out:
        (line,) = axes.plot(*_mean_curve(row), linewidth=1.4, label=row["codec"])
        _shade(axes, row, line.get_color())
    axes.plot(*_mean_curve(plain), color="black", linewidth=1.6, label=plain["codec"])
    _shade(axes, plain, "black")
    # What matters is near the end; the first steps of all curves are far below.
    top = max(max(curve) for row in rows for curve in row["curves"])
    lowest = min(_mean_curve(row)[1][-1] for row in rows)
    axes.set_ylim(min(lowest - 3, top - 15), top + 1)
    axes.set_title(_title(plain), fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel("test accuracy, %")
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
