"""The live view of `hipress demo`: a bar for each training, with its loss and speed as they are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

QUIET_S = 10.0
"""Between lines, where stderr is no terminal."""


class DemoView:
    """Shows how far each training is.

    Args:
        progress: The bars; None where stderr is no terminal, which gets a line now and then.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._said_s = time.monotonic()

    def begin(self, name: str, num_steps: int) -> None:
        """A training starts; its processes are yet to."""
        if self._progress is not None:
            self._bars[name] = self._progress.add_task(name, total=num_steps, told="starting")
        else:
            self._say(f"{name}: starting")

    def on_row(self, name: str, row: dict[str, Any], num_steps: int) -> None:
        """A row of a training's log."""
        told = _told(row)
        if told is None:
            return
        if self._progress is not None:
            self._progress.update(self._bars[name], completed=row["step"], told=told)
        elif row["step"] == num_steps or time.monotonic() - self._said_s > QUIET_S:
            self._say(f"{name}: step {row['step']}/{num_steps} {told}")

    def _say(self, text: str) -> None:
        import sys

        print(text, file=sys.stderr, flush=True)
        self._said_s = time.monotonic()


def _told(row: dict[str, Any]) -> str | None:
    if row["kind"] == "step":
        return f"loss {row['loss']:.3f}  {row['steps_per_s']:.1f} steps/s  {row['time_s']:.0f} s"
    if row["kind"] == "test":
        return f"{row['accuracy']:.1f} % right after {row['time_s']:.0f} s"
    return None


@contextlib.contextmanager
def demo_view() -> Iterator[DemoView]:
    """A view that is on the screen until the end; the bars stay."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield DemoView(None)
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}", markup=False),
        console=console,
    ) as progress:
        yield DemoView(progress)
