"""Scenarios of `hipress top` and `sync.report`, for ranks (see `tests/scenarios.py`)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

import hipress
import hipress.torch
from hipress.session import monitor

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main
from tests.torch.scripts.models import loss_of, mlp, warm_up, wrap

SLOW_S = 0.03


def top(*words):
    """What the command prints as JSON."""
    command = [sys.executable, "-m", "hipress", "top", "--once", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def watched(rank, num_ranks, *, steps, report):
    """Trains, the last rank more slowly than the others, and looks at it from outside."""
    monitor.EVERY_S = 0.3  # some snapshots in a short run
    model = wrap(mlp())
    sync = hipress.attach(model, codec="onebit", min_size=0)
    for step in range(steps):
        loss_of(model, rank, step).backward()
        model.zero_grad()
        if rank == num_ranks - 1:
            time.sleep(SLOW_S)
    dist.barrier()
    told = {}
    if rank == 0:
        told = {
            "here": top(),
            "by port": top(f"127.0.0.1:{os.environ['HIPRESS_MONITOR']}"),
        }
    dist.barrier()
    try:
        sync.report("/nowhere/run.html" if rank == 0 else report)
    except hipress.errors.UsageError as error:
        told["refused"] = str(error)
    sync.report(report)
    split = sync.monitor.totals.split()
    return {**told, "split": split.model_dump(), "pid": os.getpid()}


if __name__ == "__main__":
    warm_up("none", "onebit")
    main(globals())
