"""Training that resumes where it stopped, bit for bit, after a rank has died.

On each of four hosts, with a folder that all of them see:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=4 --nproc-per-node=1 --max-restarts=2 --rdzv-backend=c10d \
        --rdzv-endpoint=host0:29400 --rdzv-id=digits examples/resume_training.py --folder shared

or on one machine, with the same variable and without --master-port:

    torchrun --nproc-per-node=2 --max-restarts=2 examples/resume_training.py

A checkpoint holds the model, the optimizer and `sync.state_dict()`: the part of each rank's
gradients that the codec has not sent yet. When a rank dies, torchrun restarts all of them, and they
resume from the last checkpoint. The variable gives every start its own store; without it, ranks
find the addresses of the dead ones (pytorch/pytorch#135712). Here the next data depends on the step
only; a script that draws random numbers must save their state too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hipress

BATCH = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("resume-digits"), help="of checkpoints")
    args = parser.parse_args()
    file = args.folder / "checkpoint.pt"

    # How long DDP and HiPress wait for a rank that is late or frozen; without it half an hour.
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank = dist.get_rank()
    torch.manual_seed(0)
    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(numbers)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)  # its momentum is in the codec
    sync = hipress.attach(model, codec="momentum(ef(onebit))", optimizer=optimizer)

    start = 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sync.load_state_dict(saved["sync"])
        start = saved["step"]
    if rank == 0:
        print(f"from step {start}", flush=True)

    for step in range(start, args.steps):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))
        mine = order[rank * BATCH : (rank + 1) * BATCH]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        if (step + 1) % args.every == 0:
            state = sync.state_dict()  # on all ranks: each gives its part
            if rank == 0:
                save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "sync": state,
                        "step": step + 1,
                    },
                    file,
                )

    if rank == 0:
        bits = hashlib.sha256()
        for parameter in model.parameters():
            bits.update(parameter.detach().numpy().tobytes())
        right = (model.module(images).argmax(1) == labels).float().mean()
        print(f"step {sync.step}: {100 * right:.1f} % right, parameters {bits.hexdigest()[:16]}")
    dist.destroy_process_group()


def save(state: dict[str, object], file: Path) -> None:
    """Writes a checkpoint atomically: a file of that name is always complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


if __name__ == "__main__":
    main()
