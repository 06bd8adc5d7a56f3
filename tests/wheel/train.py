"""What a user writes: an own model and loop on two ranks, which need hipress and torch alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hipress


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    sync = hipress.attach(model, codec="onebit", min_size=1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    inputs = torch.randn(512, 64)[dist.get_rank() :: 2]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True) / 8)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    other = weights.clone()
    dist.broadcast(other, 0)
    assert torch.equal(weights, other), "the ranks differ"
    assert losses[-1] < losses[0] / 2, losses
    print(f"trained: {sync.stats().ratio:.1f} times fewer bytes; {hipress.__file__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
