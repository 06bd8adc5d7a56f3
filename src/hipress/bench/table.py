"""Rows to a table on the terminal, and rows to a JSON file with the machine's facts beside them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipress.bench.timing import machine_facts
from hipress.errors import UsageError

Row = Mapping[str, Any]
"""One result: plain numbers and text by field name, ready for JSON."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a printed table."""

    header: str
    """Shown on top."""
    show: Callable[[Row], str | None]
    """The cell of a row; None shows as a dash."""
    is_text: bool = False
    """Text goes left, numbers go right."""


def print_table(
    title: str, columns: Sequence[Column], rows: Sequence[Row], *, to_stderr: bool = False
) -> None:
    """Print the rows, one line each."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        # On a narrow terminal names fold; a number cut short would be a lie.
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


@contextmanager
def progress_bar(num_stretches: int) -> Iterator[Callable[[str], Callable[[float], None]]]:
    """A bar on stderr in equal stretches, gone when done.

    Yields a function that begins the next stretch: it takes the label to show and returns the
    callback that moves the bar through the stretch, from 0 to 1.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_stretches)
        starts = itertools.count()

        def begin(label: str) -> Callable[[float], None]:
            start = next(starts)
            progress.update(task, description=escape(label), completed=start)
            return lambda fraction: progress.update(task, completed=start + fraction)

        yield begin


def is_stdout(path: Path | None) -> bool:
    """Whether `--json` names stdout, which is then the document's alone."""
    return str(path) == "-"


def write_json(path: Path, command: str, rows: Sequence[Row]) -> None:
    """Write `{"command", "machine", "rows"}` to a file, or to stdout where the path is `-`.

    Raises:
        UsageError: when the file cannot be written.
    """
    document = {"command": command, "machine": machine_facts(), "rows": [dict(r) for r in rows]}
    text = json.dumps(document, indent=2)
    if is_stdout(path):
        print(text)
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise _cannot_write(path, error) from error


def check_json(path: Path | None) -> None:
    """Refuse a file that cannot be written, before a run costs minutes.

    Raises:
        UsageError: when the file cannot be written.
    """
    if path is None or is_stdout(path):
        return
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise _cannot_write(path, error) from error
    if is_new:
        path.unlink()


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {str(path)!r}: {error.strerror}; give --json a file in a folder that "
        "exists and may be written."
    )


def fixed(field: str, digits: int, scale: float = 1.0) -> Callable[[Row], str | None]:
    """A cell function: the field times `scale` with so many digits; None where it is absent."""

    def show(row: Row) -> str | None:
        value = row.get(field)
        return None if value is None else f"{value * scale:.{digits}f}"

    return show
