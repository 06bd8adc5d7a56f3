"""What commands show: tables, progress bars, and the JSON document of `--json`."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hipress.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Row = Mapping[str, Any]
"""One result: plain numbers and text by field name, ready for JSON."""

QUIET_S = 10.0
"""Seconds between lines about progress where stderr is not a terminal."""


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a printed table."""

    header: str
    show: Callable[[Row], str | None]
    """Returns the cell of a row; None shows as a dash."""
    is_text: bool = False
    """Text is aligned left, numbers are aligned right."""


def text(header: str, field: str | None = None) -> Column:
    """Returns a column that shows a field as text; the header is the field unless one is given."""
    return Column(header=header, show=_as_it_is(field or header), is_text=True)


def number(
    header: str, field: str | None = None, digits: int | None = None, scale: float = 1.0
) -> Column:
    """Returns a column that shows a field times `scale`, with a fixed number of digits if given."""
    name = field or header
    show = _as_it_is(name) if digits is None else fixed(name, digits, scale)
    return Column(header=header, show=show)


def fixed(field: str, digits: int, scale: float = 1.0) -> Callable[[Row], str | None]:
    """Returns a cell function that shows the field times `scale`; None where it is absent."""

    def show(row: Row) -> str | None:
        value = row.get(field)
        return None if value is None else f"{value * scale:.{digits}f}"

    return show


def _as_it_is(field: str) -> Callable[[Row], str | None]:
    return lambda row: None if row[field] is None else str(row[field])


def print_table(
    title: str, columns: Sequence[Column], rows: Sequence[Row], *, to_stderr: bool = False
) -> None:
    """Prints the rows, one line each."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for column in columns:
        # On a narrow terminal names fold; a number cut short would be wrong.
        table.add_column(
            column.header,
            justify="left" if column.is_text else "right",
            no_wrap=not column.is_text,
            overflow="fold",
        )
    for row in rows:
        # Text, because a codec named by a path may hold what rich takes for markup.
        table.add_row(*(Text(column.show(row) or "-") for column in columns))
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        # Into a pipe rich would cut cells to fit 80 columns.
        console.width = 200
    console.print(table)


# --- JSON -----------------------------------------------------------------------------------------


class JsonOutput:
    """The document that `--json` asks for: in a file, on stdout (`-`), or none.

    A file that cannot be written is refused here, before a run costs minutes.
    """

    def __init__(self, path: Path | None, command: str) -> None:
        self.path = path
        self.command = command
        self.is_stdout = str(path) == "-"
        """Whether stdout belongs to the document alone."""
        if not self.is_stdout:
            check_writable(path, "--json")

    def write(self, rows: Sequence[Row]) -> None:
        """Writes `{"command", "machine", "rows"}`, if `--json` was given."""
        from hipress.bench.machine import machine_facts

        if self.path is None:
            return
        rows = [dict(row) for row in rows]
        document = {"command": self.command, "machine": machine_facts(), "rows": rows}
        text = json.dumps(document, indent=2)
        if self.is_stdout:
            print(text)
            return
        with writing(self.path, "--json"):
            self.path.write_text(text + "\n")


def check_writable(path: Path | None, option: str) -> None:
    """Refuses a file that cannot be written, before a run costs minutes."""
    if path is None or path.is_fifo():  # the reader of a pipe would see its end
        return
    is_new = not path.exists()
    with writing(path, option):
        path.open("a").close()
    if is_new:
        path.unlink(missing_ok=True)  # by another rank that checks the same file


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Turns a failure to write the file of an option into a `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}; give {option} a file in a folder that "
            "exists and may be written."
        ) from error


def report_problems(rows: Sequence[Row]) -> None:
    """Prints on stderr what is wrong with rows, and exits with 1 where something is."""
    problems = [row["problem"] for row in rows if row["problem"] is not None]
    for problem in problems:
        print(f"hipress: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)


# --- progress -------------------------------------------------------------------------------------


@contextmanager
def progress_bar(num_parts: int) -> Iterator[Callable[[str], Callable[[float], None]]]:
    """Shows a bar of equal parts on stderr, which disappears at the end.

    Where stderr is not a terminal, the label of a part is a line now and then.

    Yields a function that begins the next part: it takes the label to show and returns the
    callback that moves the bar through the part, from 0 to 1.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines_of_parts(num_parts)
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=num_parts)
        starts = itertools.count()

        def begin(label: str) -> Callable[[float], None]:
            start = next(starts)
            progress.update(task, description=escape(label), completed=start)
            return lambda fraction: progress.update(task, completed=start + fraction)

        yield begin


def _lines_of_parts(num_parts: int) -> Callable[[str], Callable[[float], None]]:
    """Returns what begins a part: it prints the label unless a line was printed just before."""
    starts = itertools.count(1)
    last_line_s = time.monotonic()

    def begin(label: str) -> Callable[[float], None]:
        nonlocal last_line_s
        part = next(starts)
        if time.monotonic() - last_line_s >= QUIET_S:
            print(f"{part} of {num_parts}: {label}", file=sys.stderr, flush=True)
            last_line_s = time.monotonic()
        return lambda fraction: None

    return begin


class DemoView:
    """Shows how far each training of `hipress demo` is: bars, or a line now and then where stderr
    is not a terminal and `progress` is None.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._last_line_s = time.monotonic()

    def begin(self, name: str, num_steps: int) -> None:
        """Adds a training, whose processes are yet to start."""
        if self._progress is not None:
            self._bars[name] = self._progress.add_task(name, total=num_steps, status="starting")
        else:
            self._print(f"{name}: starting")

    def on_row(self, name: str, row: Row, num_steps: int) -> None:
        """Shows a row of a training's log."""
        if row["kind"] == "step":
            speed = f"{row['steps_per_s']:.1f} steps/s"
            status = f"loss {row['loss']:.3f}  {speed}  {row['time_s']:.0f} s"
        elif row["kind"] == "test":
            status = f"{row['accuracy']:.1f} % right after {row['time_s']:.0f} s"
        else:
            return
        if self._progress is not None:
            self._progress.update(self._bars[name], completed=row["step"], status=status)
        elif row["step"] == num_steps or time.monotonic() - self._last_line_s > QUIET_S:
            self._print(f"{name}: step {row['step']}/{num_steps} {status}")

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._last_line_s = time.monotonic()


@contextmanager
def demo_view() -> Iterator[DemoView]:
    """Shows a view until the end; its bars stay on the screen."""
    from rich.console import Console
    from rich.progress import TextColumn

    if not Console(stderr=True).is_terminal:
        yield DemoView(None)
        return
    with bars(TextColumn("{task.description}", markup=False), width=16) as progress:
        yield DemoView(progress)


def bars(*columns: Any, width: int, transient: bool = False) -> Progress:
    """Returns bars on stderr with a count of steps and a `status` beside them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        *columns,
        BarColumn(bar_width=width),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=Console(stderr=True),
        transient=transient,
    )
