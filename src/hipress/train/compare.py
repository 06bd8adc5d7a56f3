"""Every codec beside plain averaging: the same task, seeds and steps, one row for each."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import hipress
from hipress.codecs.table import TABLE
from hipress.train import data as data_sets
from hipress.train.convergence import Run, Task, train
from hipress.train.data import DataSet
from hipress.train.virtual_sync import PLAIN

MAX_LOSS_POINTS = 1.0
"""The bar: how far the mean accuracy may fall below uncompressed."""

EXPLAINING = (
    "onebit(block=256)",
    "onebit(block=4096)",
    "momentum(onebit)",
    "tbq(tau=0.1)",
    "minmax(bits=4)",
    "dithering(levels=8)",
)
"""Shown after the codecs of the table, to explain their rows."""


def line_up() -> list[str]:
    """Every built-in codec with its defaults, then those that explain a row."""
    return [*TABLE, *EXPLAINING]


def names_of(expressions: Sequence[str]) -> list[str]:
    """The rows of a comparison: plain averaging, then each codec once."""
    return [PLAIN, *(name for name in dict.fromkeys(expressions) if name != PLAIN)]


def compare(
    task: Task,
    expressions: Sequence[str],
    *,
    num_seeds: int = 3,
    num_workers: int = 4,
    folder: Path | None = None,
    jobs: int = 1,
    on_run: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Train with plain averaging and with each codec, and set them side by side.

    Args:
        task: What is trained.
        expressions: Codecs; plain averaging is always the first row.
        num_seeds: Runs per codec, with seeds 0, 1, ...
        num_workers: Virtual workers of a run.
        folder: Where the data is, for data sets that need it.
        jobs: Runs at a time, each in a process of its own; 1 stays in this one.
        on_run: Told of each finished run.

    Returns:
        One row per codec, in order, of plain numbers.
    """
    names = names_of(expressions)
    check(task, names, num_workers=num_workers, folder=folder)
    todo = [
        _Job(expression=name, task=task, seed=seed, num_workers=num_workers, folder=folder)
        for seed in range(num_seeds)
        for name in names
    ]
    runs = []
    for run in _run_all(todo, jobs):
        runs.append(run)
        on_run(f"{task.data}, {run.codec}, seed {run.seed}")
    return rows(task, names, runs, num_workers=num_workers)


def rows(
    task: Task, names: Sequence[str], runs: Sequence[Run], *, num_workers: int
) -> list[dict[str, Any]]:
    """One row for each of the names, of which plain averaging must be one."""
    # Several jobs end in any order.
    ordered = sorted(runs, key=lambda run: run.seed)
    by_name = {name: [run for run in ordered if run.codec == name] for name in names}
    return [_row(task, num_workers, by_name[name], by_name[PLAIN]) for name in names]


def check(
    task: Task, expressions: Sequence[str], *, num_workers: int, folder: Path | None = None
) -> None:
    """Refuse what a comparison cannot run, before it costs minutes.

    Raises:
        UsageError: A codec is misspelt, the data is missing, or there are too many workers for it.
    """
    for expression in expressions:
        if expression != PLAIN:
            hipress.codec(expression)
    task.check(loaded(task.data, folder), num_workers)


@dataclass(frozen=True, kw_only=True)
class _Job:
    expression: str
    task: Task
    seed: int
    num_workers: int
    folder: Path | None


def _run_all(todo: list[_Job], jobs: int) -> Iterator[Run]:
    """The runs, as they end."""
    if jobs == 1:
        yield from map(_run, todo)
        return
    # Not fork: torch and numba have threads by now.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    try:
        for done in as_completed([pool.submit(_run, job) for job in todo]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or ctrl-C the rest is not wanted


def _run(job: _Job) -> Run:
    data = loaded(job.task.data, job.folder)
    return train(job.expression, job.task, data, seed=job.seed, num_workers=job.num_workers)


@lru_cache(maxsize=1)
def loaded(name: str, folder: Path | None) -> DataSet:
    """A data set by name; the last one is kept."""
    return data_sets.load(name, folder)


def _row(task: Task, num_workers: int, runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    """One flat row; accuracies in percent, two digits (one image of 10,000 is 0.01)."""
    ends = [run.accuracy[-1] for run in runs]
    differences = [
        run.accuracy[-1] - base.accuracy[-1] for run, base in zip(runs, plain, strict=True)
    ]
    difference = statistics.fmean(differences)
    return {
        "data": task.data,
        "codec": runs[0].codec,
        "num_workers": num_workers,
        "num_steps": task.num_steps,
        "rate": task.rate,
        "ratio_out": _times(plain[0].bytes_out, runs[0].bytes_out),
        "ratio_back": _times(plain[0].bytes_out, runs[0].bytes_back),
        "accuracy": round(statistics.fmean(ends), 2),
        "accuracies": [round(end, 2) for end in ends],
        "difference": round(difference, 2),
        "difference_min": round(min(differences), 2),
        "difference_max": round(max(differences), 2),
        "within": round(difference, 2) >= -MAX_LOSS_POINTS,
        "curve_steps": list(runs[0].steps),
        "curves": [[round(point, 2) for point in run.accuracy] for run in runs],
    }


def _times(plain_bytes: float | None, num_bytes: float | None) -> float | None:
    """How many times smaller; None where the two ways were not counted."""
    return None if plain_bytes is None or num_bytes is None else round(plain_bytes / num_bytes, 2)
