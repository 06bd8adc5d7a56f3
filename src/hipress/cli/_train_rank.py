"""A rank of `hipress bench train`: `python -m hipress.cli._train_rank CONFIG`.

Here the models of `train` meet the worker of `report`, two rooms that do not know each other.
"""

from __future__ import annotations

import torch

from hipress.bench import train_worker
from hipress.bench._ranks import run_rank
from hipress.bench.train_rows import Config
from hipress.train.models import model
from hipress.train.tasks import TASKS


def task(config: Config, rank: int, device: torch.device) -> train_worker.Task:
    """The config's model and the rank's batch, on the device."""
    line = model(config.model)
    batch = tuple(part.to(device) for part in line.data(rank, config.batch))
    loss = TASKS[line.task or ""].loss
    return train_worker.Task(model=line.make().to(device), loss=lambda net: loss(net, batch))


if __name__ == "__main__":
    run_rank(lambda text: train_worker.main(text, task))
