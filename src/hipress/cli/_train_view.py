"""What `hipress train` shows and writes while it runs: a bar or lines, and a log of JSON lines."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hipress.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from hipress.train.result import Facts, Result


class Silent:
    """The other ranks: all of them have the same rows."""

    def on_start(self, facts: Facts) -> None:
        """Nothing."""

    def on_step(self, step: int) -> None:
        """Nothing."""

    def on_row(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def on_end(self, result: Result) -> None:
        """Nothing."""


class View:
    """Rank 0: a bar where stderr is a terminal, lines where it is not, and the log.

    Args:
        log: Where JSON lines go, if anywhere.
        progress: The bar, if there is one.
    """

    def __init__(self, log: TextIO | None, progress: Progress | None) -> None:
        self._log = log
        self._progress = progress
        self._bar: TaskID | None = None
        self.facts: Facts | None = None

    def on_start(self, facts: Facts) -> None:
        """Say what is trained, how, and on what."""
        self.facts = facts
        self._write({"kind": "start", **asdict(facts)})
        self._say(introduction(facts))
        if self._progress is not None:
            self._bar = self._progress.add_task(
                "train", total=facts.num_steps, completed=facts.first_step, told=""
            )

    def on_step(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=step)

    def on_row(self, row: dict[str, Any]) -> None:
        """Show it and write it."""
        self._write(row)
        assert self.facts is not None
        if self._progress is None or self._bar is None or row["kind"] == "test":
            self._say(line(row, self.facts))
        else:
            # Beside the bar there is room for little on 80 columns.
            speed = row["units_per_s_per_rank"] * self.facts.num_ranks
            told = f"loss {row['loss']:.4f}  {speed:,.0f} {self.facts.unit}/s"
            self._progress.update(self._bar, told=told)

    def on_end(self, result: Result) -> None:
        """The last line of the log."""
        self._write({"kind": "end", **asdict(result)})

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def _write(self, row: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(json.dumps(row) + "\n")
            self._log.flush()


@contextlib.contextmanager
def view(log: Path | None) -> Iterator[View]:
    """A view, with its log open and its bar on the screen until the end.

    Args:
        log: A file, which is appended to, `-` for stdout, or None.

    Raises:
        UsageError: The log cannot be written.
    """
    with contextlib.ExitStack() as stack:
        stream: TextIO | None = None
        if str(log) == "-":
            stream = sys.stdout
        elif log is not None:
            try:
                stream = stack.enter_context(log.open("a"))
            except OSError as error:
                raise UsageError(
                    f"--log {str(log)!r} cannot be written: {error.strerror}; give another file."
                ) from error
        progress = stack.enter_context(_progress()) if sys.stderr.isatty() else None
        yield View(stream, progress)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )


def introduction(facts: Facts) -> str:
    """What is trained, in two lines."""
    ranks = "1 rank" if facts.num_ranks == 1 else f"{facts.num_ranks} ranks"
    if facts.codec == "auto":
        how = "auto: measures first, then compresses where that is faster"
    elif facts.strategy is None and facts.codec != "plan":
        how = "gradients go as DDP sends them"
    else:
        way = facts.codec if facts.strategy is None else f"{facts.codec} by {facts.strategy}"
        how = (
            f"{way} for {facts.num_compressed} of {facts.num_gradients} gradients "
            f"({100 * facts.compressed_share:.1f} % of the elements)"
        )
    if facts.num_ranks == 1:
        how = "one rank: nobody to exchange gradients with"
        if facts.num_compressed:
            how += f"; {facts.codec} acts on them all the same"
    return (
        f"{facts.model} ({facts.num_parameters:,} parameters) on {facts.data} "
        f"({facts.num_train:,} examples), {ranks} x {facts.batch} a step, {facts.device}\n"
        f"{how}; steps {facts.first_step} to {facts.num_steps} ({facts.num_epochs:.3g} epochs)"
    )


def line(row: dict[str, Any], facts: Facts) -> str:
    """A row of the log for people."""
    if row["kind"] == "test":
        found = [] if row["accuracy"] is None else [f"accuracy {row['accuracy']:.2f} %"]
        if row["test_loss"] is not None:
            found.append(f"loss {row['test_loss']:.4f}")
        return f"step {row['step']}: on the test data {', '.join(found) or 'nothing to score'}"
    each = row["units_per_s_per_rank"]
    return (
        f"step {row['step']}/{facts.num_steps} epoch {row['epoch']:.2f} loss {row['loss']:.4f} "
        f"lr {row['rate']:.3g} {each * facts.num_ranks:,.0f} {facts.unit}/s ({each:,.0f} per rank)"
    )


def summary(facts: Facts, result: Result) -> str:
    """What came out, for people."""
    lines = [
        f"{result.num_steps} steps in {result.seconds:.1f} s with all around them; steps alone: "
        f"{result.steps_per_s:.2f} steps/s, {result.units_per_s:,.0f} {result.unit}/s in all, "
        f"{result.units_per_s_per_rank:,.0f} per rank",
        f"{result.wire_bytes_per_step / 1e6:.3f} MB sent a step by each rank, "
        f"{result.ratio:.1f} x less than plain; "
        f"{result.memory_bytes / 1e6:.1f} MB of memory for it",
    ]
    if facts.num_ranks == 1 or not facts.num_compressed:
        lines.pop()
    scores = []
    if result.loss is not None:
        scores.append(f"training loss {result.loss:.4f}")
    if result.test_loss is not None:
        scores.append(f"test loss {result.test_loss:.4f}")
    if result.accuracy is not None:
        scores.append(f"accuracy {result.accuracy:.2f} %")
    return "\n".join([*lines, ", ".join(scores)])
