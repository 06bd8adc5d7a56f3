"""The batches of a rank, one step after the other, prepared here or by other processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils.data import DataLoader, Dataset

from hipress.errors import UsageError
from hipress.train.data import Data
from hipress.train.sampling import Sampler
from hipress.train.tasks import Batch


def batches(
    data: Data, sampler: Sampler, first: int, end: int, num_loaders: int
) -> Iterator[Batch]:
    """The rank's batches from one step to before another.

    Args:
        data: Where they come from.
        sampler: Which examples they are.
        first: The first step.
        end: The step after the last.
        num_loaders: Processes that prepare batches ahead; 0: none, each is made when it is due.
    """
    steps = _Steps(data, sampler, first, end)
    if num_loaders == 0:
        return (steps[place] for place in range(len(steps)))
    loader: DataLoader[Batch] = DataLoader(
        steps,
        batch_size=None,
        num_workers=num_loaders,
        # Not fork: the threads of an exchange would not be there, and their locks would.
        multiprocessing_context="spawn",
    )
    return _unwrapped(loader)


def _unwrapped(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """The loader's batches; an error of ours in one of its processes is the sentence it was."""
    try:
        yield from loader
    except UsageError as error:
        # torch hands on a traceback as text; its last line is the error's.
        raise UsageError(str(error).strip().splitlines()[-1].partition(": ")[2]) from None


@dataclass(frozen=True)
class _Steps(Dataset[Batch]):
    """The batch of every step, by place."""

    data: Data
    sampler: Sampler
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, place: int) -> Batch:
        step = self.first + place
        return self.data.train(self.sampler.indices(step), self.sampler.seed_of(step))
