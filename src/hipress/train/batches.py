"""The batches of a rank: which examples it trains on in a step, and who prepares them.

The examples depend on the seed and the step only, so that a run that is resumed, on any number of
ranks, needs no saved state of a loader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hipress.errors import UsageError
from hipress.train.data import Data
from hipress.train.tasks import Batch


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Distributes the examples of each step to the ranks; every epoch has a new order.

    Example:
        >>> two = [Sampler(num_examples=10, batch=2, rank=r, num_ranks=2, seed=0) for r in (0, 1)]
        >>> two[0].steps_per_epoch
        2
        >>> dealt = [sampler.indices(step).tolist() for step in (0, 1) for sampler in two]
        >>> len(set(sum(dealt, [])))
        8
    """

    num_examples: int
    batch: int
    rank: int
    num_ranks: int
    seed: int

    @property
    def together(self) -> int:
        """Examples of all ranks in a step."""
        return self.batch * self.num_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps; the examples left over differ from epoch to epoch."""
        return self.num_examples // self.together

    def check(self, accumulate: int = 1) -> None:
        """Raise a UsageError if there are too few examples for one step of `accumulate`
        micro-batches.
        """
        if self.steps_per_epoch == 0:
            fitting = self.num_examples // (self.num_ranks * accumulate)
            what = f"give --batch {fitting} or less, or" if fitting else "give"
            times = f" and --accumulate {accumulate}" if accumulate > 1 else ""
            raise UsageError(
                f"{self.num_ranks} rank(s) with --batch {self.batch // accumulate}{times} take "
                f"{self.together} examples in a step and the data has {self.num_examples}; {what} "
                "fewer ranks."
            )

    def indices(self, step: int) -> Tensor:
        """Return the rank's examples in a step, counted from the start of the run."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.together + self.rank * self.batch
        return _order(self.num_examples, self.seed, epoch)[start : start + self.batch]

    def seed_of(self, step: int) -> int:
        """Return the seed of augmentation and dropout in a step, different on every rank."""
        return mix(self.seed, step, self.rank)


def mix(*numbers: int) -> int:
    """Return a seed made of several numbers, the same in every process and release of Python."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=2)
def _order(num_examples: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_examples, generator=generator)


# --- loading --------------------------------------------------------------------------------------


def train_batches(
    data: Data, sampler: Sampler, first: int, end: int, num_loaders: int, pin: bool = False
) -> Iterator[Batch]:
    """Return the rank's batches of the steps from `first` to before `end`.

    `num_loaders` processes prepare batches ahead; with 0 each is made when it is needed. `pin`
    selects pinned memory, from which a GPU copies while it computes. A file that cannot be read
    raises a UsageError.
    """
    steps = range(first, max(end, first))
    return _prepared(_Batches(partial(_train_batch, data, sampler), steps), num_loaders, pin)


def test_batches(
    data: Data, indices: Tensor, batch: int, num_loaders: int, pin: bool = False
) -> Iterator[Batch]:
    """Return the test examples of these indices, in their order; the last batch may be smaller.

    The other arguments, and errors, are those of `train_batches`.
    """
    starts = range(0, len(indices), batch)
    return _prepared(_Batches(partial(_test_batch, data, indices, batch), starts), num_loaders, pin)


def _train_batch(data: Data, sampler: Sampler, step: int) -> Batch:
    return data.train(sampler.indices(step), sampler.seed_of(step))


def _test_batch(data: Data, indices: Tensor, batch: int, start: int) -> Batch:
    return data.test(indices[start : start + batch])


@dataclass(frozen=True, eq=False)
class _Batches(Dataset[Batch]):
    """A batch for each number of a range, in a form that goes to loader processes."""

    make: Callable[[int], Batch]
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Batch:
        return self.make(self.numbers[index])


def _prepared(made: _Batches, num_loaders: int, pin: bool) -> Iterator[Batch]:
    pin = pin and torch.cuda.is_available()
    if num_loaders and len(made):
        return _loaded(made, min(num_loaders, len(made)), pin)
    found = (made[index] for index in range(len(made)))
    return (tuple(part.pin_memory() for part in batch) for batch in found) if pin else found


def _loaded(made: _Batches, num_loaders: int, pin: bool) -> Iterator[Batch]:
    """Yield batches from loader processes; their UsageErrors keep their message."""
    loader = DataLoader(
        made,
        batch_size=None,
        num_workers=num_loaders,
        pin_memory=pin,
        # A fork would copy the locks of the exchange, but not its threads.
        multiprocessing_context="spawn",
        # Its own generator, or a test would change the random numbers of the training.
        generator=torch.Generator(),
    )
    try:
        for batch in loader:
            yield tuple(batch)  # torch makes lists of tuples
        return
    except UsageError as error:
        # torch passes on a traceback as text, whose last line is the error.
        sentence = str(error).strip().splitlines()[-1].partition(": ")[2]
        # Frames hold the loader; if the garbage collector finds it, processes take 5 s to end.
        error.__traceback__ = None
    raise UsageError(sentence)  # not above, where it would refer to the first error
