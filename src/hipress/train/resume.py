"""What of a job is in its checkpoint, and how another start of it goes on from there."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hipress.errors import UsageError
from hipress.train import checkpoints
from hipress.train.ranks import JointError

if TYPE_CHECKING:
    from hipress.train.job import Job

_log = logging.getLogger("hipress")

IDENTITY = ("model", "data", "optimizer", "seed", "side", "length", "tokens")
"""Options that must be the same: with others, a place in the data would mean something else."""


def save(job: Job) -> None:
    """Write a checkpoint; on all ranks.

    Raises:
        TrainingError: Parameters are not finite: nobody could go on from there.
        JointError: It cannot be written.
    """
    folder = job.config.checkpoint
    assert folder is not None
    if not all(bool(parameter.isfinite().all()) for parameter in job.model.parameters()):
        job.check_finite("norm of the parameters", math.nan)
    epoch, place = divmod(job.step, job.sampler.steps_per_epoch)
    state = {
        "job": _identity(job),
        "num_ranks": job.num_ranks,
        "epoch": epoch,
        "examples": place * job.sampler.together,
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scaler": None if job.scaler is None else job.scaler.state_dict(),
        "sync": job.sync.state_dict() if job.sync.enabled else None,
    }
    job.ranks.by_first(lambda: checkpoints.save(folder, state))


def resume(job: Job) -> int:
    """Load what the last start saved; on all ranks.

    Returns:
        The step to go on with: the same example of the same epoch, whatever the number of ranks.
    """
    folder = job.config.checkpoint
    assert folder is not None
    state = job.ranks.jointly("--resume", lambda: checkpoints.load(folder))
    _check_same_place(job, state)
    if state is None:
        if job.rank == 0:
            _log.warning("no checkpoint in %s yet: starting from the beginning", folder)
        return 0
    job.ranks.jointly("--resume", lambda: _load(job, folder, state))
    if job.sync.enabled and state["sync"] is not None:
        job.sync.load_state_dict(state["sync"])
    if job.config.steps is not None and state["num_ranks"] != job.num_ranks:
        _log.warning(
            "%d ranks go on where %d stopped: steps are of another size, and the learning rates of "
            "--steps end elsewhere; --epochs does not depend on the number of ranks",
            job.num_ranks,
            state["num_ranks"],
        )
    within = int(state["examples"]) // job.sampler.together
    step = int(state["epoch"]) * job.sampler.steps_per_epoch + within
    if job.rank == 0:
        left = "" if step < job.num_steps else ": nothing is left; raise --epochs or --steps"
        _log.warning("going on from step %d of %d%s", step, job.num_steps, left)
    return step


def _identity(job: Job) -> dict[str, Any]:
    """What must be the same for a checkpoint to be this job's."""
    found = {name: getattr(job.config, name) for name in IDENTITY}
    return found | {"sizes": dict(job.data.sizes)}


def _load(job: Job, folder: Path, state: dict[str, Any]) -> None:
    """Into model, optimizer and scaler."""
    checkpoints.compare(folder, state["job"], _identity(job))
    wanted = [dict(group) for group in job.optimizer.param_groups]
    try:
        job.model.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"the checkpoint in {str(folder)!r} does not fit: {reason[:200]}; give the model that "
            "it was made with, and, where a codec brings its own momentum, that codec."
        ) from error
    # The optimizer's memory is the checkpoint's; its options are this job's.
    for group, options in zip(job.optimizer.param_groups, wanted, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
    if job.scaler is not None and state["scaler"] is not None:
        job.scaler.load_state_dict(state["scaler"])


def _check_same_place(job: Job, state: dict[str, Any] | None) -> None:
    """Raise a JointError where ranks would go on from different places."""
    mine = (-1, 0) if state is None else (state["epoch"], state["examples"])
    found = job.ranks.gather(torch.tensor(mine))
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            told = [
                "no checkpoint" if epoch < 0 else f"one of epoch {epoch}, example {examples}"
                for epoch, examples in (found[0], theirs)
            ]
            raise JointError(
                f"rank 0 finds {told[0]} in {str(job.config.checkpoint)!r} and rank {rank} "
                f"{told[1]}; give a --checkpoint folder that all hosts see."
            )
