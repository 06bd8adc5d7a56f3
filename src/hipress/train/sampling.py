"""Which examples a rank trains on in a step: every epoch in a fresh order, no example twice.

It follows from the seed and the step alone, so that a run that is resumed, on however many ranks,
needs no state of a loader.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hipress.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Deals the examples of each step to the ranks.

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
    """Examples of a rank in a step."""
    rank: int
    num_ranks: int
    seed: int

    @property
    def together(self) -> int:
        """Examples of all ranks in a step."""
        return self.batch * self.num_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps; what is left over has its turn in another epoch's order."""
        return self.num_examples // self.together

    def check(self, accumulate: int = 1) -> None:
        """Raise a UsageError where not even one step can be dealt.

        Args:
            accumulate: Batches, as the user counts them, of a rank in a step.
        """
        if self.steps_per_epoch == 0:
            most = self.num_examples // (self.num_ranks * accumulate)
            what = f"give --batch {most} or less, or" if most else "give"
            times = f" and --accumulate {accumulate}" if accumulate > 1 else ""
            raise UsageError(
                f"{self.num_ranks} rank(s) with --batch {self.batch // accumulate}{times} take "
                f"{self.together} examples in a step and the data has {self.num_examples}; {what} "
                "fewer ranks."
            )

    def indices(self, step: int) -> Tensor:
        """The rank's examples in a step, counted from the start of the run."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.together + self.rank * self.batch
        return _order(self.num_examples, self.seed, epoch)[start : start + self.batch]

    def seed_of(self, step: int) -> int:
        """For what is random in a step, different on every rank: augmentation, dropout."""
        return mix(self.seed, step, self.rank)


def mix(*numbers: int) -> int:
    """A seed that follows from some numbers, the same in every process and release of Python."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=2)
def _order(num_examples: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_examples, generator=generator)
