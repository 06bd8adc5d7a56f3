"""Training with a GradScaler, on one rank: codecs with thresholds learn as they do without it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(codec, init_scale, steps=40):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    enabled = init_scale is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale or 1.0, enabled=enabled)
    hipress.attach(model, codec, min_size=0, scaler=scaler)
    inputs = torch.randn(64, 32)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("codec", ["tbq(tau=0.002)", "dgc(ratio=0.3, clip=0.1, momentum=0.5)"])
def test_a_scaler_changes_no_bit_of_training(codec):
    """Catches: a threshold or a clipped norm that stays where it is under a loss scale of 2^16."""
    plain, scaled = trained(codec, None), trained(codec, 2.0**16)
    assert plain[-1] < 0.9 * plain[0]
    assert scaled == plain
