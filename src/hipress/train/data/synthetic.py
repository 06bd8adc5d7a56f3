"""Synthetic data, for measurements of speed and for jobs without files.

`images`, `tokens`, `masked`, `translations` and `pairs` draw batches of the right shape and range
with nothing to learn, one kind for each task. `Synthetic` is a data set of such examples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hipress.train.data.base import Data
from hipress.train.tasks import UNLABELLED, Batch, Draw

NUM_TRAIN = 2**20
NUM_TEST = 256
MASK = 103
"""The mask token of BERT's vocabulary."""
MASKED_PART = 0.15
FIRST_WORD = 3
"""Translations use the tokens below it for padding, begin and end."""

_KEPT_BYTES = 2**26
_LEAST_KEPT, _MOST_KEPT = 8, 4096


class Synthetic(Data):
    """Examples that depend on their index and the seed only.

    Each example is drawn when it is first used, by a generator seeded with its index, and kept, so
    that later steps only copy it. At most 64 MiB are kept, but at least 8 and at most 4,096
    examples; if K examples are kept, example i is the same as example i % K. Training and test
    examples are different.
    """

    def __init__(self, draw: Draw, *, task: str, seed: int = 0) -> None:
        super().__init__("synthetic", task, {}, NUM_TRAIN, NUM_TEST)
        self._train = _Examples(draw, 2 * seed, NUM_TRAIN)
        self._test = _Examples(draw, 2 * seed + 1, NUM_TEST)
        shape, is_image = self._train.shape, self._train.is_float
        self.side = shape[2] if is_image and len(shape) == 3 else None
        self.length = shape[0] if not is_image and len(shape) == 1 else None

    def train(self, indices: Tensor, seed: int) -> Batch:
        return self._train.batch(indices)

    def test(self, indices: Tensor) -> Batch:
        return self._test.batch(indices)


class _Examples:
    def __init__(self, draw: Draw, stream: int, num_examples: int) -> None:
        self._draw = draw
        self._stream = stream
        first = self._example(0)
        self.shape, self.is_float = first[0].shape[1:], first[0].is_floating_point()
        example_bytes = sum(part.nbytes for part in first)
        fitting = max(_LEAST_KEPT, min(_MOST_KEPT, _KEPT_BYTES // example_bytes))
        self._num_kept = min(fitting, num_examples)
        # Memory that has not been written yet costs nothing.
        self._parts = tuple(part.new_empty(self._num_kept, *part.shape[1:]) for part in first)
        self._is_drawn = torch.zeros(self._num_kept, dtype=torch.bool)

    def batch(self, indices: Tensor) -> Batch:
        indices = indices % self._num_kept
        for index in sorted(set(indices[~self._is_drawn[indices]].tolist())):
            for kept, part in zip(self._parts, self._example(index), strict=True):
                kept[index] = part[0]
            self._is_drawn[index] = True
        return tuple(part.index_select(0, indices) for part in self._parts)

    def _example(self, index: int) -> Batch:
        seed = self._stream * _MOST_KEPT + index
        return self._draw(1, torch.Generator().manual_seed(seed % 2**63))


def images(
    shape: tuple[int, ...], num_classes: int, batch: int, generator: torch.Generator
) -> Batch:
    """Return noise with labels."""
    inputs = torch.randn(batch, *shape, generator=generator)
    return inputs, torch.randint(num_classes, (batch,), generator=generator)


def tokens(vocabulary: int, length: int, batch: int, generator: torch.Generator) -> Batch:
    """Return random tokens; the target of each token is the next one."""
    drawn = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def masked(vocabulary: int, length: int, batch: int, generator: torch.Generator) -> Batch:
    """Return random tokens in two segments, with as many masked tokens in every row."""
    drawn = torch.randint(vocabulary, (batch, length), generator=generator)
    order = torch.rand(batch, length, generator=generator).argsort(1)
    is_masked = order < math.ceil(MASKED_PART * length)
    segments = (torch.arange(length) >= length // 2).long().repeat(batch, 1)
    return (
        torch.where(is_masked, MASK, drawn),
        segments,
        torch.where(is_masked, drawn, UNLABELLED),
        torch.randint(2, (batch,), generator=generator),
    )


def translations(vocabulary: int, length: int, batch: int, generator: torch.Generator) -> Batch:
    """Return pairs of random sentences without padding; a target begins with token 1."""
    shape = (2, batch, length)
    source, target = torch.randint(FIRST_WORD, vocabulary, shape, generator=generator)
    begin = torch.ones(batch, 1, dtype=torch.long)
    return source, torch.cat([begin, target[:, :-1]], dim=1), target


def pairs(side: int, batch: int, generator: torch.Generator) -> Batch:
    """Return two images of noise between -1 and 1, one of each domain."""
    shape = (batch, 3, side, side)
    first = 2 * torch.rand(shape, generator=generator) - 1
    return first, 2 * torch.rand(shape, generator=generator) - 1
