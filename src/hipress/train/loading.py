"""The batches of a rank, one after the other, prepared here or by other processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hipress.errors import UsageError
from hipress.train.data import Data
from hipress.train.sampling import Sampler
from hipress.train.tasks import Batch


def batches(
    data: Data, sampler: Sampler, first: int, end: int, num_loaders: int, pin: bool = False
) -> Iterator[Batch]:
    """The rank's batches from one step to before another.

    Args:
        data: Where they come from.
        sampler: Which examples they are.
        first: The first step.
        end: The step after the last.
        num_loaders: Processes that prepare batches ahead; 0: none, each is made when it is due.
        pin: Into memory from which a GPU copies while it computes; nothing where there is none.

    Raises:
        UsageError: A file of the data cannot be read.
    """
    return _prepared(_Steps(data, sampler, first, end), num_loaders, pin)


def test_batches(
    data: Data, indices: Tensor, batch: int, num_loaders: int, pin: bool = False
) -> Iterator[Batch]:
    """The rank's test examples, all of them, in their order.

    Args:
        data: Where they come from.
        indices: Their numbers; none, no batch.
        batch: Examples of a batch; the last one may have fewer.
        num_loaders: As of `batches`.
        pin: As of `batches`.

    Raises:
        UsageError: A file of the data cannot be read.
    """
    return _prepared(_Tests(data, indices, batch), num_loaders, pin)


@dataclass(frozen=True)
class _Steps(Dataset[Batch]):
    """The batch of every step, by place."""

    data: Data
    sampler: Sampler
    first: int
    end: int

    def __len__(self) -> int:
        return max(self.end - self.first, 0)

    def __getitem__(self, place: int) -> Batch:
        step = self.first + place
        return self.data.train(self.sampler.indices(step), self.sampler.seed_of(step))


@dataclass(frozen=True, eq=False)
class _Tests(Dataset[Batch]):
    """The batches of the test, by place."""

    data: Data
    indices: Tensor
    batch: int

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch)

    def __getitem__(self, place: int) -> Batch:
        start = place * self.batch
        return self.data.test(self.indices[start : start + self.batch])


def _prepared(made: _Steps | _Tests, num_loaders: int, pin: bool) -> Iterator[Batch]:
    pin = pin and torch.cuda.is_available()
    if num_loaders and len(made):
        return _unwrapped(_loader(made, min(num_loaders, len(made)), pin))
    found = (made[place] for place in range(len(made)))
    return (tuple(part.pin_memory() for part in batch) for batch in found) if pin else found


def _loader(made: _Steps | _Tests, num_loaders: int, pin: bool) -> DataLoader[Batch]:
    return DataLoader(
        made,
        batch_size=None,
        num_workers=num_loaders,
        pin_memory=pin,
        # Not fork: the threads of an exchange would not be there, and their locks would.
        multiprocessing_context="spawn",
        # Of its own, or a test in between would change the random numbers of the training.
        generator=torch.Generator(),
    )


def _unwrapped(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """The loader's batches; an error of ours in one of its processes is the sentence it was."""
    try:
        for batch in loader:
            yield tuple(batch)  # torch makes lists of tuples
        return
    except UsageError as error:
        # torch hands on a traceback as text; its last line is the error's.
        sentence = str(error).strip().splitlines()[-1].partition(": ")[2]
        # Its frames hold the loader: found by the garbage collector, processes take 5 s to end.
        error.__traceback__ = None
    raise UsageError(sentence)  # not above, where it would hold the first error
