"""Scenarios of training jobs, for a rank of a lab (see `tests/scenarios.py`)."""

import hashlib
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

from hipress.train import checkpoints
from hipress.train.config import TrainConfig
from hipress.train.job import Job

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main
from tests.torch.scripts.models import warm_up

CPU = torch.device("cpu")


class Rows:
    """A watcher that keeps what it is told."""

    def __init__(self, dies_at=None):
        self.rows, self.steps, self.dies_at = [], [], dies_at

    def on_start(self, facts):
        self.facts = facts

    def on_step(self, step):
        self.steps.append(step)

    def on_row(self, row):
        self.rows.append(row)
        if self.dies_at is not None and row["step"] >= self.dies_at:
            raise InterruptedError("as asked")


def bits(job):
    digest = hashlib.sha256()
    for value in job.model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def play(config, dies_at=None):
    """Trains; what came of it."""
    torch.set_num_threads(1)
    job = Job(config, CPU)
    watcher = Rows(dies_at)
    told = {"first": job.step}
    try:
        told["result"] = asdict(job.run(watcher))
    except InterruptedError:
        pass
    told |= {
        "bits": bits(job),
        "facts": asdict(job.facts()),
        "steps": watcher.steps,
        "losses": {row["step"]: row["loss"] for row in watcher.rows if row["kind"] == "step"},
        "rates": {row["step"]: row["rate"] for row in watcher.rows if row["kind"] == "step"},
        "tests": {row["step"]: row["accuracy"] for row in watcher.rows if row["kind"] == "test"},
    }
    dist.barrier()
    job.close()
    return told


def config(**options):
    for name in ("checkpoint", "timeline"):
        if name in options:
            options[name] = Path(options[name])
    options["paths"] = [Path(path) for path in options.get("paths", [])]
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    base = {"model": "cnn", "batch": 16, "steps": 12, "log_every": 1, "device": "cpu"}
    return TrainConfig(**base | options)


def trains(rank, num_ranks, **options):
    if options.get("resume") is None and "checkpoint" in options:
        options["checkpoint_every"] = 40
    return play(config(**{"steps": None, **options} if "epochs" in options else options))


def slow_disk(rank, num_ranks, **options):
    """A write that takes longer than a rank may be late."""
    real = checkpoints.write

    def slowly(folder, state):
        time.sleep(24)
        real(folder, state)

    checkpoints.write = slowly
    return play(config(**options))


def full_disk(rank, num_ranks, **options):
    def full(state, out):
        raise RuntimeError("unexpected pos 64 vs 0: no space left")

    torch.save = full
    return refuses(rank, num_ranks, **options)


def changed_options(rank, num_ranks, **options):
    """What the optimizer has after a resume with other options."""
    play(config(**options, steps=2))
    job = Job(
        config(**options, steps=4, resume=True, momentum=0.5, weight_decay=0.01, nesterov=True), CPU
    )
    (group,) = job.optimizer.param_groups
    dist.barrier()
    job.close()
    return [group["momentum"], group["weight_decay"], group["nesterov"]]


def resumes(rank, num_ranks, dies_at, **options):
    """A run in one go, one that dies, and one that goes on from there."""
    folder = options.pop("checkpoint")
    whole = play(config(**options))
    options |= {"checkpoint": folder, "checkpoint_every": 4, "resume": True}
    died = play(config(**options), dies_at)
    went_on = play(config(**options))
    return {"whole": whole, "died": died, "went_on": went_on}


def refuses(rank, num_ranks, only=None, **options):
    """An error on one rank, or on all, as told."""
    if rank == only:
        options["paths"] = ["not-there"]
    options["paths"] = [path.format(rank=rank) for path in options.get("paths", [])]
    try:
        play(config(**options))
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    load_digits()  # scikit-learn, once and not for each scenario
    warm_up("none", "onebit", "momentum(ef(onebit))", "dgc(ratio=0.01)", "int8", "ef(terngrad)")
    main(globals(), thorough=False, limit_s=500)
