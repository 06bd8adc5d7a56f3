"""What data sets are made of: numbered examples, random numbers by example, and mapped files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hipress.errors import UsageError
from hipress.train.tasks import Batch, LearningTask


class Data(ABC):
    """A data set: training and test examples by index.

    `task` is a key in `hipress.train.tasks.TASKS`; `sizes` are arguments of the model's `build`:
    `num_classes` or `vocabulary`.
    """

    reads_files = False
    """Whether each batch opens files, so that loader processes save time."""
    learning_task: LearningTask | None = None
    """The task of data that is the user's own; None if it is that of the table."""

    def __init__(
        self, name: str, task: str, sizes: dict[str, int], num_train: int, num_test: int
    ) -> None:
        self.name, self.task, self.sizes = name, task, sizes
        self.num_train, self.num_test = num_train, num_test

    @abstractmethod
    def train(self, indices: Tensor, seed: int) -> Batch:
        """Return a batch of training examples.

        The seed selects the augmentation. The result for an example depends on its index and the
        seed only, not on the rest of the batch, the rank or a resume.
        """

    @abstractmethod
    def test(self, indices: Tensor) -> Batch:
        """Return a batch of test examples, always the same for the same indices."""


# --- random numbers -------------------------------------------------------------------------------

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, made odd
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def numbers(seed: int, indices: Tensor, num_each: int) -> NDArray[np.float64]:
    """Return a row of `num_each` random numbers in [0, 1) for every index.

    With a generator an example's numbers would depend on its neighbours in the batch. Here every
    example has its own sequence: SplitMix64 (Steele et al., 2014), started from seed and index.

    Example:
        >>> both, one = torch.tensor([4, 7]), torch.tensor([7])
        >>> bool((numbers(1, both, 3)[1] == numbers(1, one, 3)[0]).all())
        True
    """
    # Arrays throughout: they wrap around silently, where a single number would warn.
    start = _scramble(np.array([seed % 2**64], np.uint64))
    rows = _scramble(start ^ _scramble(indices.numpy().astype(np.uint64)))
    steps = np.arange(1, num_each + 1, dtype=np.uint64) * _STEP
    bits = _scramble(rows[:, None] + steps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53  # a double has 53 bits


def _scramble(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = bits + _STEP
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = bits ^ (bits >> np.uint64(31))
    return mixed


# --- files ----------------------------------------------------------------------------------------


def checked_folder(path: Path, name: str) -> Path:
    """Return the path if it is a folder; `name` is that of the data set, for the message."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise UsageError(f"{str(path)!r} {found}; give the folder that holds {name}.")
    return path


def checked_file(path: Path, name: str) -> Path:
    """Return the path if it is a readable file that is not empty; `name` is for the message."""
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


def wrong_size(path: Path, expected: str, found_bytes: int) -> UsageError:
    """Return the error for a file of another size, most often a download that was cut short."""
    return UsageError(
        f"{str(path)!r} has the wrong size: expected {expected}, found {found_bytes}; get the file "
        "again."
    )


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {str(path)!r}: {error}; check the file.")


Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and first byte of a view."""


class Mapped:
    """The bytes of a file, or a part of it, as a memory-mapped uint8 tensor.

    The ranks of a host share its memory, and the file may be larger than memory. A pickle holds
    only the path, and the receiver maps the file again: torch would copy a whole tensor into shared
    memory to send it to loader processes. `name` is that of the data set, for messages.
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
        """Return the part of the file that is a view of `tensor`."""
        layout = tuple(view.shape), view.stride(), int(view.storage_offset())
        return Mapped(self._path, self._name, layout)

    def __reduce__(self) -> tuple[type[Mapped], tuple[Path, str, Layout | None]]:
        # A process that is started may have another working folder.
        return Mapped, (self._path.absolute(), self._name, self._layout)


Stored = Tensor | Mapped
"""Elements in memory, or bytes of a file."""


def tensor_of(stored: Stored) -> Tensor:
    return stored.tensor if isinstance(stored, Mapped) else stored


def part_of(stored: Stored, view: Tensor) -> Stored:
    """Return a view of the elements, stored in the same way."""
    return stored.part(view) if isinstance(stored, Mapped) else view
