"""A rank of `hipress bench convergence --hosts`: `python -m hipress.cli._convergence_rank CONFIG`.

It is one worker of every run: each codec with each seed, one after the other. Here the training of
`train` meets what ranks that measure share in `report`, two rooms that do not know each other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hipress.bench._cluster import ClusterConfig
from hipress.bench._ranks import Interface, largest, ranks_agree, run_rank, tell
from hipress.train import data as data_sets
from hipress.train.convergence import (
    NUM_POINTS,
    ConvergenceTask,
    RealWorker,
    task,
)
from hipress.train.data import DataSet
from hipress.train.virtual_sync import PLAIN


@dataclass(frozen=True, kw_only=True)
class Config(ClusterConfig):
    """What all ranks are told; `repeats` is the number of seeds."""

    data: str
    folder: str | None
    """Of the data."""
    num_steps: int
    learning_rate: float
    num_parameters: int
    names: tuple[str, ...]
    """Codecs, and plain averaging."""
    strategy: str

    @property
    def size_bytes(self) -> int:
        """Of the whole gradient as float32."""
        return 4 * self.num_parameters

    @property
    def task(self) -> ConvergenceTask:
        """What is trained."""
        return replace(task(self.data), num_steps=self.num_steps, rate=self.learning_rate)


def main(text: str) -> None:
    """Train as the config says, and write the runs on rank 0."""
    torch.set_num_threads(1)
    config = Config.load(text)
    data = data_sets.load(config.data, None if config.folder is None else Path(config.folder))
    dist.init_process_group("gloo")
    todo = list(itertools.product(range(config.repeats), config.names))
    runs = []
    for number, (seed, name) in enumerate(todo):
        total = len(todo) * config.num_steps
        on_point = partial(_tell, number * config.num_steps, total, f"{name}, seed {seed}")
        runs.append(_run(config, data, name, seed, on_point))
    if dist.get_rank() == 0:
        Path(config.result).write_text(json.dumps({"runs": runs}))
    dist.barrier()
    dist.destroy_process_group()


def _run(
    config: Config, data: DataSet, name: str, seed: int, on_point: Callable[[int], None]
) -> dict[str, Any]:
    """One run, and what was seen of the network and the ranks."""
    worker = RealWorker(name, config.task, data, seed=seed, strategy=config.strategy)
    interface = Interface(is_shaped=config.is_shaped)
    dist.barrier()  # what made the worker must not count
    before = interface.sent_bytes()
    run = worker.train(
        # One rank is enough: all have the same weights.
        num_points=NUM_POINTS if dist.get_rank() == 0 else 0,
        on_point=on_point,
    )
    agree = ranks_agree(list(worker.model.parameters()))
    sent = worker.sync.stats().sent_bytes / config.num_steps
    if name == PLAIN:  # no exchange of ours counts it
        sent = config.all_reduce_bytes
    counted = (interface.sent_bytes() - before) / config.num_steps
    means = torch.tensor([sent, counted], dtype=torch.float64) / config.num_hosts
    dist.all_reduce(means)
    (busiest,) = largest([sent])
    worker.close()
    return {
        "run": asdict(run),
        "wire_bytes": float(means[0]),
        "busiest_bytes": busiest,
        "interface_bytes": float(means[1]) if config.is_shaped else None,
        "ranks_agree": agree,
    }


def _tell(before: int, total: int, label: str, num_steps: int) -> None:
    tell(before + num_steps, total, label)


if __name__ == "__main__":
    run_rank(main)
