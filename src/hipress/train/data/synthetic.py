"""Made-up data, drawn by the model itself: for speed, and where there are no files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hipress.train.data.base import Data
from hipress.train.tasks import Batch

Draw = Callable[[int, torch.Generator], "tuple[Tensor, ...]"]
"""So many examples of made-up data, by a generator."""

NUM_TRAIN = 2**20
NUM_TEST = 256

_KEPT_BYTES = 2**26
_LEAST_KEPT, _MOST_KEPT = 8, 4096


class Synthetic(Data):
    """Examples that follow from their numbers: the same index is the same example everywhere.

    Each example is drawn on its own, by a generator seeded with its number, when it is first
    wanted; it is kept, so that a step costs a copy and no drawing. At most 64 MiB are kept (though
    at least 8 examples, and never more than 4,096): where that is K examples, number i is the same
    as number i % K. Test examples are others than those to train on.

    Args:
        draw: Of the model.
        task: Of the model.
        seed: Other examples for another one.
    """

    def __init__(self, draw: Draw, *, task: str, seed: int = 0) -> None:
        super().__init__(
            name="synthetic", task=task, sizes={}, num_train=NUM_TRAIN, num_test=NUM_TEST
        )
        self._train = _Kept(draw, 2 * seed, NUM_TRAIN)
        self._test = _Kept(draw, 2 * seed + 1, NUM_TEST)
        shape, is_image = self._train.shape, self._train.is_float
        self.side = shape[2] if is_image and len(shape) == 3 else None
        """Of the images that the model draws, in pixels."""
        self.length = shape[0] if not is_image and len(shape) == 1 else None
        """Tokens of the sequences that the model draws."""

    def train(self, indices: Tensor, seed: int) -> Batch:
        """The examples of these numbers; nothing about them is random, so the seed says nothing."""
        return self._train.batch(indices)

    def test(self, indices: Tensor) -> Batch:
        """The examples of these numbers."""
        return self._test.batch(indices)


class _Kept:
    """Examples drawn so far."""

    def __init__(self, draw: Draw, stream: int, num_examples: int) -> None:
        self._draw = draw
        self._stream = stream
        first = self._example(0)
        self.shape, self.is_float = first[0].shape[1:], first[0].is_floating_point()
        example_bytes = sum(part.nbytes for part in first)
        fitting = max(_LEAST_KEPT, min(_MOST_KEPT, _KEPT_BYTES // example_bytes))
        self._num_kept = min(fitting, num_examples)
        # Memory that is not written yet costs nothing.
        self._parts = tuple(part.new_empty(self._num_kept, *part.shape[1:]) for part in first)
        self._is_drawn = torch.zeros(self._num_kept, dtype=torch.bool)

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        places = indices % self._num_kept
        for place in sorted(set(places[~self._is_drawn[places]].tolist())):
            for kept, part in zip(self._parts, self._example(place), strict=True):
                kept[place] = part[0]
            self._is_drawn[place] = True
        return tuple(part.index_select(0, places) for part in self._parts)

    def _example(self, place: int) -> tuple[Tensor, ...]:
        seed = self._stream * _MOST_KEPT + place
        return self._draw(1, torch.Generator().manual_seed(seed % 2**63))
