"""What the table says of a model: how to build it, what it learns from, how large it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hipress.errors import UsageError
from hipress.train.tasks import Batch

Draw = Callable[[int, torch.Generator], Batch]
"""So many examples of made-up data."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One line of the table."""

    about: str
    """One line for the manual."""
    num_parameters: int
    """What `build()` makes, to know the memory beforehand; 0 where only building it tells."""
    published: str = ""
    """Where that number is from."""
    batch: int
    """Examples per rank and step, unless the user says otherwise."""
    task: str | None
    """Its key in `hipress.train.tasks.TASKS`; None where the data decides."""
    build: Callable[..., nn.Module]
    """The model, with first weights from torch's random numbers; takes the sizes of its task:
    num_classes, or vocabulary."""
    draw: Draw | None
    """Made-up data; None where there is none."""
    least_side: int | None = None
    """The smallest image side it takes."""
    side: int | None = None
    """Image side of the made-up data, and of folders of images."""
    length: int | None = None
    """Tokens in a sequence, unless the user says otherwise."""
    is_hidden: bool = False
    """For tests, or another name: works, and is not listed."""

    def make(self, seed: int = 0, **sizes: int) -> nn.Module:
        """The model, its first weights decided by the seed."""
        with _seeded(seed):
            return self.build(**sizes)

    def data(self, rank: int, batch: int | None = None) -> Batch:
        """One batch of made-up data, the rank's own.

        Raises:
            UsageError: There is none for this model.
        """
        if self.draw is None:
            raise UsageError(
                f"there is no made-up data for {self.about}; name a model of the table, or train "
                "this one with data of its own."
            )
        return self.draw(batch or self.batch, torch.Generator().manual_seed(rank))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
