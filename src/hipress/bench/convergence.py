"""`hipress bench convergence --hosts`: what each codec does to accuracy, over a network.

Each rank runs `python -m hipress.bench.convergence BENCHMARK` and is one worker of every run: each
codec with each seed, one after the other. `rows` makes rows of what rank 0 writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hipress.bench.cluster import (
    ClusterBenchmark,
    Interface,
    largest,
    print_progress,
    ranks_agree,
    run_rank,
)
from hipress.train import convergence
from hipress.train import data as data_sets
from hipress.train.config import PLAIN
from hipress.train.data import DataSet
from hipress.train.forms import GRADIENT
from hipress.train.workers import NUM_POINTS, RealWorker, Run
from hipress.train.workloads import ConvergenceTask, task


@dataclass(frozen=True, kw_only=True)
class ConvergenceBenchmark(ClusterBenchmark):
    """What all ranks train; `repeats` is the number of seeds."""

    data: str
    folder: str | None
    num_steps: int
    learning_rate: float
    names: tuple[str, ...]
    """Codecs, and plain averaging."""
    strategy: str

    @property
    def task(self) -> ConvergenceTask:
        return replace(task(self.data), num_steps=self.num_steps, rate=self.learning_rate)


def rows(benchmark: ConvergenceBenchmark, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row per codec, with what was measured of the network in each."""
    by_name = {
        name: [one for one in found if one["run"]["codec"] == name] for name in benchmark.names
    }
    plain_bytes = by_name[PLAIN][0]["wire_bytes"]
    runs = [Run(**one["run"]) for one in found]
    cells = [(name, GRADIENT) for name in benchmark.names]
    compared = []
    for row in convergence.rows(benchmark.task, cells, runs, num_workers=benchmark.num_hosts):
        group = by_name[row["codec"]]
        first = group[0]
        network = {
            "hosts": benchmark.num_hosts,
            "rate": benchmark.rate,
            "learning_rate": benchmark.learning_rate,
            "strategy": None if row["codec"] == PLAIN else benchmark.strategy,
            "ratio": round(plain_bytes / first["wire_bytes"], 2),
            "wire_bytes_per_rank": first["wire_bytes"],
            "wire_bytes_busiest_rank": first["busiest_bytes"],
            "interface_bytes_per_rank": first["interface_bytes"],
            "problem": _problem(benchmark, group),
        }
        compared.append(row | network)
    return compared


def _problem(benchmark: ConvergenceBenchmark, runs: Sequence[dict[str, Any]]) -> str | None:
    seeds = [str(one["run"]["seed"]) for one in runs if not one["ranks_agree"]]
    if not seeds:
        return None
    return (
        f"{benchmark.data} with {runs[0]['run']['codec']}: ranks ended with different parameters, "
        f"seed {', '.join(seeds)}."
    )


def _main(text: str) -> dict[str, Any]:
    benchmark = ConvergenceBenchmark.load(text)
    folder = None if benchmark.folder is None else Path(benchmark.folder)
    data = data_sets.load(benchmark.data, folder)
    todo = list(itertools.product(range(benchmark.repeats), benchmark.names))
    runs = []
    for number, (seed, name) in enumerate(todo):
        total = len(todo) * benchmark.num_steps
        first_step = number * benchmark.num_steps
        on_point = partial(_on_point, first_step, total, f"{name}, seed {seed}")
        runs.append(_run(benchmark, data, name, seed, on_point))
    return {"runs": runs}


def _run(
    benchmark: ConvergenceBenchmark,
    data: DataSet,
    name: str,
    seed: int,
    on_point: Callable[[int], None],
) -> dict[str, Any]:
    worker = RealWorker(name, benchmark.task, data, seed=seed, strategy=benchmark.strategy)
    interface = Interface(is_shaped=benchmark.is_shaped)
    dist.barrier()  # what made the worker must not count
    before = interface.sent_bytes()
    run = worker.train(
        # One rank is enough: all have the same weights.
        num_points=NUM_POINTS if dist.get_rank() == 0 else 0,
        on_point=on_point,
    )
    agree = ranks_agree(list(worker.model.parameters()))
    sent = worker.sync.stats().sent_bytes / benchmark.num_steps
    if name == PLAIN:  # no exchange of ours counts it
        sent = benchmark.all_reduce_bytes
    counted = (interface.sent_bytes() - before) / benchmark.num_steps
    means = torch.tensor([sent, counted], dtype=torch.float64) / benchmark.num_hosts
    dist.all_reduce(means)
    (busiest,) = largest([sent])
    worker.close()
    return {
        "run": asdict(run),
        "wire_bytes": float(means[0]),
        "busiest_bytes": busiest,
        "interface_bytes": float(means[1]) if benchmark.is_shaped else None,
        "ranks_agree": agree,
    }


def _on_point(first_step: int, total: int, label: str, num_steps: int) -> None:
    print_progress(first_step + num_steps, total, label)


if __name__ == "__main__":
    run_rank(_main)
