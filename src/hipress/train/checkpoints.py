"""The file a training job goes on from: complete or not there, refused where it does not fit."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from hipress.errors import UsageError

NAME = "checkpoint.pt"
VERSION = 1


def check_folder(folder: Path, *, resumes: bool) -> None:
    """Raise a UsageError where no checkpoint could be written, or one would be lost.

    Args:
        folder: Where checkpoints go; it is made.
        resumes: Whether one that is there is gone on from.
    """
    if not resumes and (folder / NAME).exists():
        raise UsageError(
            f"--checkpoint {str(folder)!r} holds a checkpoint, which this run would overwrite; "
            "give --resume to go on from it, or another folder."
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


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all: the one before stays until this one is complete.

    Raises:
        UsageError: It cannot be written.
    """
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
            "make room and go on with --resume: the one before it is as it was."
        ) from error


def load(folder: Path) -> dict[str, Any] | None:
    """The checkpoint of a folder; None if there is none yet.

    Raises:
        UsageError: The file is no checkpoint of ours, or of a later version.
    """
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
    """Raise a UsageError that names the first thing in which a checkpoint is of another job."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise UsageError(
                f"the checkpoint in {str(folder)!r} has {name} {found.get(name)!r} and this job "
                f"{value!r}; give the same, or another --checkpoint folder."
            )
