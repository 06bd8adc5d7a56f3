"""A rank comes to harm while DDP trains, for a rank of a lab (see `tests/scenarios.py`)."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # once here: the first optimizer of every scenario would, for seconds
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main, tell

READY, HARM = 3, 6
"""Steps."""


class Layers(nn.Sequential):
    """Calls `inside` in every forward, after DDP has sent the buffers that `norm` brings."""

    def __init__(self, norm, inside):
        torch.manual_seed(7)
        middle = nn.BatchNorm1d(160) if norm else nn.ReLU()
        super().__init__(nn.Linear(64, 160), middle, nn.Linear(160, 40))
        self.inside = inside

    def forward(self, x):
        self.inside()
        return super().forward(x)


def train(
    rank, num_ranks, id, folder, how=None, where=None, norm=False, torch_s=None, strategy="ps"
):
    """Trains until something fails.

    Args:
        how: Rank 2 is `kill`ed, `stop`ped where it is, heartbeats and all, or `stall`s.
        where: `between` two steps, in `forward` or in `backward`.
        norm: With a model that has buffers, which DDP sends in a group of its own.
        torch_s: The timeout of that group.
    """
    # What a user would see of this rank, apart from what others print.
    os.dup2(os.open(f"{folder}/{id}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
    step = 0

    def harm(place, *_):
        if (rank, place, step) != (2, where, HARM):
            return
        tell(id=id, rank=rank, harmed=time.monotonic())
        if how == "stall":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    module = Layers(norm, lambda: harm("forward"))
    group = None if torch_s is None else dist.new_group(timeout=timedelta(seconds=torch_s))
    model = DDP(module, bucket_cap_mb=0.02, process_group=group)
    module[2].weight.register_hook(lambda _: harm("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hipress.attach(model, "onebit", strategy)
    while True:
        generator = torch.Generator().manual_seed(1009 * step + rank)
        harm("between")
        optimizer.zero_grad()
        loss = (model(torch.randn(16, 64, generator=generator)) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        if step == READY:
            tell(id=id, rank=rank, ready=True)
        step += 1
        time.sleep(0.02)


if __name__ == "__main__":
    main(globals())
