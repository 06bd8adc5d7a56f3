"""Paths that a user gave: refused in one sentence where they are not what is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hipress.errors import UsageError


def checked_folder(path: Path, name: str) -> Path:
    """The path, if it is a folder.

    Args:
        path: From the user.
        name: Of the data set, for the message.
    """
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise UsageError(f"{str(path)!r} {found}; give the folder that holds {name}.")
    return path


def checked_size(path: Path, expected_bytes: int) -> None:
    """Refuse a file that is not as large as it must be: most often half of a download."""
    found_bytes = path.stat().st_size
    if found_bytes != expected_bytes:
        raise UsageError(
            f"{str(path)!r} has the wrong size: expected {expected_bytes} bytes, found "
            f"{found_bytes}; get the file again."
        )


def mapped_file(path: Path, name: str) -> Tensor:
    """The bytes of a file as a uint8 tensor, read from the disk where they are used.

    The ranks of a host share its memory, and a file larger than memory will do.
    """
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise UsageError(f"{str(path)!r} {found}; {name} needs a text file.")
    try:
        if path.stat().st_size == 0:
            raise UsageError(f"{str(path)!r} is empty; {name} needs a file with text in it.")
        # Not torch.from_file, whose tensors cannot be sent to the processes of a loader.
        return torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}; check the file.") from error
