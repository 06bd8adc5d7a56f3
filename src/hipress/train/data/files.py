"""Paths that a user gave: refused in one sentence where they are not what is needed."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hipress.errors import UsageError

Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and first byte of a view."""


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


def checked_file(path: Path, name: str) -> Path:
    """The path, if it is a file that can be read and has something in it.

    Args:
        path: From the user.
        name: Of the data set, for the message.
    """
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise UsageError(f"{str(path)!r} {found}; {name} needs a text file.")
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if is_empty:
        raise UsageError(f"{str(path)!r} is empty; {name} needs a file with text in it.")
    return path


class Mapped:
    """The bytes of a file as a uint8 tensor, read from the disk where they are used.

    The ranks of a host share its memory, and a file larger than memory will do. Pickled it is the
    path alone, and whoever gets it maps the file again: of a tensor torch would put all of the file
    into shared memory when it goes to the processes of a loader.

    Args:
        path: Of the file.
        name: Of the data set, for the message.
        layout: Sizes, strides and first byte of the part that is wanted; None for all of it.

    Raises:
        UsageError: There is no such file, or nothing in it; when `tensor` is first asked for.
    """

    def __init__(self, path: Path, name: str, layout: Layout | None = None) -> None:
        self._path = path
        self._name = name
        self._layout = layout

    @cached_property
    def tensor(self) -> Tensor:
        """The bytes; must not be pickled."""
        try:
            content = np.memmap(checked_file(self._path, self._name), np.uint8, mode="c")
        except OSError as error:
            raise _unreadable(self._path, error) from error
        everything = torch.from_numpy(content)
        return everything if self._layout is None else everything.as_strided(*self._layout)

    def part(self, view: Tensor) -> Mapped:
        """The same for a view of `tensor`."""
        layout = tuple(view.shape), view.stride(), int(view.storage_offset())
        return Mapped(self._path, self._name, layout)

    def __reduce__(self) -> tuple[type[Mapped], tuple[Path, str, Layout | None]]:
        # A process that is started may have another working folder.
        return Mapped, (self._path.absolute(), self._name, self._layout)


Held = Tensor | Mapped
"""Elements in memory, or bytes of a file."""


def tensor_of(held: Held) -> Tensor:
    """The elements."""
    return held.tensor if isinstance(held, Mapped) else held


def part_of(held: Held, view: Tensor) -> Held:
    """A view of the elements, held in the same way."""
    return held.part(view) if isinstance(held, Mapped) else view


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {str(path)!r}: {error}; check the file.")
