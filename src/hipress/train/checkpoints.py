"""Checkpoints of a training job: the file, its contents, and how a job resumes from it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hipress.errors import UsageError
from hipress.train.ranks import JointError

if TYPE_CHECKING:
    from hipress.train.job import Job

_log = logging.getLogger("hipress")

NAME = "checkpoint.pt"
VERSION = 1
IDENTITY = ("model", "data", "optimizer", "seed", "side", "length", "tokens")
"""Options that a resumed job must share, or its position in the data would mean something else."""


# --- the file -------------------------------------------------------------------------------------


def check_folder(folder: Path, *, resumes: bool) -> None:
    """Create the folder; raise a UsageError if it is not writable or a checkpoint would be lost."""
    if not resumes and (folder / NAME).exists():
        raise UsageError(
            f"--checkpoint {str(folder)!r} holds a checkpoint, which this run would overwrite; "
            "give --resume to continue from it, or another folder."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"--checkpoint {str(folder)!r} cannot be written: {error.strerror}; give a folder that "
            "may be."
        ) from error


def write(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: the previous one stays until this one is complete."""
    file = folder / NAME
    partial = file.with_suffix(".partial")
    try:
        with partial.open("wb") as out:
            torch.save({"version": VERSION, **state}, out)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    except (OSError, RuntimeError) as error:  # a full disk is torch's RuntimeError
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UsageError(
            f"the checkpoint cannot be written to {str(folder)!r}: {str(error).splitlines()[0]}; "
            "make room and continue with --resume: the previous checkpoint is intact."
        ) from error


def read(folder: Path) -> dict[str, Any] | None:
    """Return the checkpoint of a folder; None if there is none yet."""
    file = folder / NAME
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).partition(".")[0].splitlines()[:1] or [type(error).__name__]
        raise UsageError(
            f"{str(file)!r} is no checkpoint that can be read ({reason[0]}); move it away to start "
            "from the beginning."
        ) from error
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise UsageError(
            f"{str(file)!r} is a checkpoint of version {version!r} and this HiPress reads "
            f"{VERSION}; use the release that wrote it."
        )
    assert isinstance(state, dict)
    return state


def compare(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise a UsageError that names the first option in which a checkpoint differs from the job."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise UsageError(
                f"the checkpoint in {str(folder)!r} has {name} {found.get(name)!r} and this job "
                f"{value!r}; give the same, or another --checkpoint folder."
            )


# --- the job --------------------------------------------------------------------------------------


def save(job: Job) -> None:
    """Write a checkpoint of the job; all ranks call it together. Parameters that are not finite
    raise a TrainingError, since training could not continue.
    """
    folder = job.config.checkpoint
    assert folder is not None
    if not all(bool(parameter.isfinite().all()) for parameter in job.model.parameters()):
        job.check_finite("norm of the parameters", math.nan)
    epoch, step = divmod(job.step, job.sampler.steps_per_epoch)
    state = {
        "job": _identity(job),
        "num_ranks": job.num_ranks,
        "epoch": epoch,
        "examples": step * job.sampler.together,
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scaler": None if job.scaler is None else job.scaler.state_dict(),
        "sync": job.sync.state_dict() if job.sync.enabled else None,
    }
    job.ranks.by_first(lambda: write(folder, state))


def resume(job: Job) -> int:
    """Load the last checkpoint into the job; all ranks call it together.

    Return the next step: the same example of the same epoch, whatever the number of ranks.
    """
    folder = job.config.checkpoint
    assert folder is not None
    state = job.ranks.jointly("--resume", lambda: read(folder))
    _check_same_position(job, state)
    if state is None:
        if job.rank == 0:
            _log.warning("no checkpoint in %s yet: starting from the beginning", folder)
        return 0
    job.ranks.jointly("--resume", lambda: _load(job, folder, state))
    if job.sync.enabled and state["sync"] is not None:
        job.sync.load_state_dict(state["sync"])
    if job.config.steps is not None and state["num_ranks"] != job.num_ranks:
        _log.warning(
            "%d ranks continue a run of %d: steps have another size, so --steps ends the learning "
            "rate schedule elsewhere; --epochs does not depend on the number of ranks",
            job.num_ranks,
            state["num_ranks"],
        )
    within = int(state["examples"]) // job.sampler.together
    step = int(state["epoch"]) * job.sampler.steps_per_epoch + within
    if job.rank == 0:
        left = "" if step < job.num_steps else ": nothing is left; raise --epochs or --steps"
        _log.warning("resuming from step %d of %d%s", step, job.num_steps, left)
    return step


def _identity(job: Job) -> dict[str, Any]:
    found = {name: getattr(job.config, name) for name in IDENTITY}
    return found | {"sizes": dict(job.data.sizes)}


def _load(job: Job, folder: Path, state: dict[str, Any]) -> None:
    compare(folder, state["job"], _identity(job))
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
    # The optimizer's state is the checkpoint's; its options are this job's.
    for group, options in zip(job.optimizer.param_groups, wanted, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
    if job.scaler is not None and state["scaler"] is not None:
        job.scaler.load_state_dict(state["scaler"])


def _check_same_position(job: Job, state: dict[str, Any] | None) -> None:
    mine = (-1, 0) if state is None else (state["epoch"], state["examples"])
    found = job.ranks.gather(torch.tensor(mine))
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            found_text = [
                "no checkpoint" if epoch < 0 else f"one of epoch {epoch}, example {examples}"
                for epoch, examples in (found[0], theirs)
            ]
            raise JointError(
                f"rank 0 finds {found_text[0]} in {str(job.config.checkpoint)!r} and rank {rank} "
                f"{found_text[1]}; give a --checkpoint folder that all hosts see."
            )
