"""`hipress bench convergence`: what each codec does to the accuracy that training reaches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress.cli._expressions import split_expressions

if TYPE_CHECKING:
    from hipress.train.convergence import Task

EXAMPLE = "Example: hipress bench convergence --data digits --codecs onebit,topk --plot curves.png"


def convergence(
    data: Annotated[
        str | None,
        typer.Option(
            help="digits and fashion-mnist, with a comma between, or all; if not given, both, "
            "the second only where its folder is known."
        ),
    ] = None,
    codecs: Annotated[
        str | None, typer.Option(help="Codec expressions, with commas between; all if not given.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per codec; their mean counts.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Virtual workers of a run.")] = 4,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a run; if not given, the task's own.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Learning rate; if not given, the task's own.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at a time; the results do not depend on it.")
    ] = 1,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of Fashion-MNIST; if not given, HIPRESS_FASHION_MNIST."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the rows to this file; - for stdout.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Put the table between the markers of this page.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to this file.")] = None,
) -> None:
    """Train with every codec and with none, and compare test accuracies.

    Several virtual workers share one process; gradients go through the
    worker's codec and the aggregator's, as in a real sync. "Difference" is
    the accuracy in points above (+) or below (-) the uncompressed run of
    the same seed and number of steps, the mean of all seeds.
    """
    from hipress.report import convergence_table as table
    from hipress.report.table import check_json, is_stdout, write_json
    from hipress.train.compare import line_up

    check_json(json)
    table.check_outputs(markdown, plot)
    tasks = _tasks(data, data_dir, steps, rate)
    expressions = line_up() if codecs is None else split_expressions(codecs)
    rows = _rows(tasks, expressions, seeds, workers, data_dir, jobs)
    table.print_rows(rows, to_stderr=is_stdout(json))
    if json is not None:
        write_json(json, "bench convergence", rows)
    if markdown is not None:
        table.write_markdown(markdown, rows)
    if plot is not None:
        table.plot(plot, rows)


def _tasks(
    data: str | None, folder: Path | None, num_steps: int | None, rate: float | None
) -> list[Task]:
    """What is to be trained; without a wish, all that is there."""
    from hipress import settings
    from hipress.train.convergence import TASKS, task

    names = list(TASKS) if data in (None, "all") else [name.strip() for name in data.split(",")]
    if data is None and (folder or settings.fashion_mnist()) is None:
        names.remove("fashion-mnist")
        typer.echo(
            "fashion-mnist is left out: set HIPRESS_FASHION_MNIST or --data-dir to its folder.",
            err=True,
        )
    tasks = [task(name) for name in dict.fromkeys(names)]
    return [
        dataclasses.replace(t, num_steps=num_steps or t.num_steps, rate=rate or t.rate)
        for t in tasks
    ]


def _rows(
    tasks: list[Task],
    expressions: list[str],
    num_seeds: int,
    num_workers: int,
    folder: Path | None,
    jobs: int,
) -> list[dict[str, Any]]:
    """One row per data set and codec, with a progress bar on stderr."""
    from hipress.report.table import progress_bar
    from hipress.train.compare import check, compare, names_of

    for task in tasks:  # a missing second data set must not cost the minutes of the first
        check(task, expressions, num_workers=num_workers, folder=folder)
    num_runs = len(tasks) * num_seeds * len(names_of(expressions))
    rows = []
    with progress_bar(num_runs) as begin:
        for task in tasks:
            rows += compare(
                task,
                expressions,
                num_seeds=num_seeds,
                num_workers=num_workers,
                folder=folder,
                jobs=jobs,
                on_run=lambda label: begin(label)(1.0),
            )
    return rows
