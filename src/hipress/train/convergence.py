"""Every codec beside plain averaging: the same training, seeds and steps; one row for each."""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hipress.codecs.table import TABLE
from hipress.errors import UsageError
from hipress.train.config import PLAIN
from hipress.train.forms import FORMS, GRADIENT, sent
from hipress.train.workers import Run, train
from hipress.train.workloads import ConvergenceTask, load

MOST_WORSE = 1.0
"""Points of accuracy, or percent of the loss, that the mean may be worse to be within the bound."""
EXPLANATORY = (
    "onebit(block=256)",
    "onebit(block=4096)",
    "momentum(onebit)",
    "tbq(tau=0.1)",
    "minmax(bits=4)",
    "dithering(levels=8)",
)
"""Codecs shown after those of the table, to explain their rows."""


def default_codecs() -> list[str]:
    """Return every built-in codec with its defaults, then those that explain a row."""
    return [*TABLE, *EXPLANATORY]


def names_of(expressions: Sequence[str]) -> list[str]:
    """Return the names of the rows: plain averaging, then each codec once."""
    return [PLAIN, *(name for name in dict.fromkeys(expressions) if name != PLAIN)]


def cells_of(task: ConvergenceTask, expressions: Sequence[str], form: str) -> list[tuple[str, str]]:
    """Return the name and form of each row: plain averaging, then each codec once.

    A codec may name a form of its own, as in `gradient:onebit`. One that sends the same as a row
    before is left out.

    Example:
        >>> from hipress.train.workloads import LARGER
        >>> names = ["int8", "onebit", "gradient:int8", "gradient:onebit"]
        >>> cells_of(LARGER["gpt", "adamw"], names, "recommended")[1:]
        [('int8', 'recommended'), ('onebit', 'recommended'), ('onebit', 'gradient')]
    """
    found: dict[tuple[str, str], str] = {}
    for name in names_of(expressions):
        prefix, colon, rest = name.partition(":")
        codec, own = (rest, prefix) if colon and prefix in FORMS else (name, form)
        found.setdefault((codec, sent(codec, task.optimizer, own).text), own)
    return [(codec, own) for (codec, _), own in found.items()]


@dataclass(frozen=True, kw_only=True)
class Todo:
    """One run that is to be made, and all that its result depends on."""

    task: ConvergenceTask
    codec: str
    form: str
    seed: int
    num_workers: int
    device: str

    @property
    def key(self) -> str:
        """The same text for the same run, on any device.

        What travels is in it, whatever its form is called.
        """
        what = sent(self.codec, self.task.optimizer, self.form).text
        return json.dumps({**asdict(self), "form": what, "device": None}, sort_keys=True)

    def run(self, folder: Path | None) -> Run:
        data = load(self.task, folder, self.device)
        return train(
            self.codec,
            self.task,
            data,
            seed=self.seed,
            num_workers=self.num_workers,
            form=self.form,
            device=self.device,
        )


class RunFile:
    """Finished runs, one line of JSON each, so that what was interrupted goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[str, dict[str, Any]] = {}
        try:
            lines = path.read_text("utf-8").splitlines() if path.exists() else []
            for line in lines:
                one = json.loads(line)
                self._found[one["key"]] = one["run"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"cannot read runs from {str(path)!r} ({error}); give --runs a file that this "
                "command has written, or a new one."
            ) from error

    def get(self, todo: Todo) -> Run | None:
        found = self._found.get(todo.key)
        if found is None:
            return None
        lists = {name: tuple(found[name]) for name in ("steps", "scores")}
        return Run(**{**found, **lists, "form": todo.form})

    def add(self, todo: Todo, run: Run) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": todo.key, "run": asdict(run)}) + "\n")


def compare(
    task: ConvergenceTask,
    expressions: Sequence[str],
    *,
    num_seeds: int = 3,
    num_workers: int = 4,
    folder: Path | None = None,
    jobs: int = 1,
    form: str = GRADIENT,
    device: str = "cpu",
    runs_file: Path | None = None,
    on_run: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Train with plain averaging and with each codec; return one row of plain numbers for each.

    Args:
        task: The training.
        expressions: Codecs, as `cells_of` takes them.
        num_seeds: Seeds are 0, 1, ...
        num_workers: Virtual workers of a run.
        folder: Where the data is, if no setting says so.
        jobs: Runs at a time, each in its own process unless it is 1.
        form: What travels, unless a codec says so; see `hipress.train.forms`.
        device: cpu or cuda, for model, data and codecs.
        runs_file: Each run is added here when it ends, and one that is there is not made again.
        on_run: Called with a label after each run.
    """
    check(task, expressions, num_workers=num_workers, folder=folder, form=form)
    cells = cells_of(task, expressions, form)
    todo = [
        Todo(task=task, codec=name, form=form, seed=seed, num_workers=num_workers, device=device)
        for seed in range(num_seeds)
        for name, form in cells
    ]
    file = None if runs_file is None else RunFile(runs_file)
    runs, missing = [], []
    for one in todo:
        done = None if file is None else file.get(one)
        if done is None:
            missing.append(one)
        else:
            runs.append(done)
            on_run(_label(one))
    for one, run in _run_all(missing, folder, jobs):
        if file is not None:
            file.add(one, run)
        runs.append(run)
        on_run(_label(one))
    return rows(task, cells, runs, num_workers=num_workers)


def _label(todo: Todo) -> str:
    return f"{todo.task.name}, {todo.codec}, seed {todo.seed}"


def check(
    task: ConvergenceTask,
    expressions: Sequence[str],
    *,
    num_workers: int,
    folder: Path | None = None,
    form: str = GRADIENT,
) -> None:
    """Raise a UsageError, before a comparison takes minutes, if a codec is misspelt, the data is
    missing, or there are too many workers for it.
    """
    cells_of(task, expressions, form)
    task.check(load(task, folder), num_workers)


def _run_all(todo: list[Todo], folder: Path | None, jobs: int) -> Iterator[tuple[Todo, Run]]:
    if jobs == 1:
        yield from ((one, one.run(folder)) for one in todo)
        return
    # Not fork: torch and numba have started threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    try:
        started = {pool.submit(one.run, folder): one for one in todo}
        for done in as_completed(started):
            yield started[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or ctrl-C


def rows(
    task: ConvergenceTask,
    cells: Sequence[tuple[str, str]],
    runs: Sequence[Run],
    *,
    num_workers: int,
) -> list[dict[str, Any]]:
    """Return one row for each name and form, of which plain averaging must be one."""
    ordered = sorted(runs, key=lambda run: run.seed)  # parallel runs end in any order
    by_cell = {
        (name, form): [run for run in ordered if (run.codec, run.form) == (name, form)]
        for name, form in cells
    }
    plain = next(group for (name, _), group in by_cell.items() if name == PLAIN)
    return [_row(task, num_workers, by_cell[cell], plain) for cell in cells]


def _row(
    task: ConvergenceTask, num_workers: int, runs: list[Run], plain: list[Run]
) -> dict[str, Any]:
    """Return one flat row; accuracies in percent have two digits (one image of 10,000 is 0.01)."""
    is_loss = task.metric == "loss"
    digits = 4 if is_loss else 2
    ends = [run.scores[-1] for run in runs]
    differences = [
        100 * (run.scores[-1] / base.scores[-1] - 1)
        if is_loss
        else run.scores[-1] - base.scores[-1]
        for run, base in zip(runs, plain, strict=True)
    ]
    difference = round(statistics.fmean(differences), 2)
    bytes_out = runs[0].bytes_out
    metrics = "losses" if is_loss else "accuracies"
    return {
        "data": task.data,
        "model": task.model,
        "optimizer": task.optimizer,
        "codec": runs[0].codec,
        "form": runs[0].form,
        "sent": sent(runs[0].codec, task.optimizer, runs[0].form).text,
        "device": runs[0].device,
        "num_workers": num_workers,
        "num_steps": task.num_steps,
        "rate": task.rate,
        "mb_per_step": None if bytes_out is None else round(bytes_out / 1e6, 4),
        "ratio_out": _ratio(plain[0].bytes_out, bytes_out),
        "ratio_out_later": _ratio(plain[0].bytes_out, runs[0].bytes_out_later),
        "ratio_back": _ratio(plain[0].bytes_out, runs[0].bytes_back),
        "metric": task.metric,
        task.metric: round(statistics.fmean(ends), digits),
        metrics: [round(end, digits) for end in ends],
        "difference": difference,
        "difference_min": round(min(differences), 2),
        "difference_max": round(max(differences), 2),
        "within": difference <= MOST_WORSE if is_loss else difference >= -MOST_WORSE,
        "curve_steps": list(runs[0].steps),
        "curves": [[round(point, digits) for point in run.scores] for run in runs],
    }


def _ratio(plain_bytes: float | None, num_bytes: float | None) -> float | None:
    """Return how many times smaller the messages are; None if bytes were not counted."""
    return None if plain_bytes is None or num_bytes is None else round(plain_bytes / num_bytes, 2)
