"""Made-up batches, one kind for each task: right in shape and range, with nothing to learn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hipress.train.models.base import Draw
from hipress.train.tasks import UNLABELLED, Batch

MASK = 103
"""The token that hides others, as in BERT's vocabulary."""
MASKED_PART = 0.15
FIRST_WORD = 3
"""Translations keep the tokens below for padding, begin and end."""


def images(shape: tuple[int, ...], num_classes: int) -> Draw:
    """Noise with labels."""

    def draw(batch: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(batch, *shape, generator=generator)
        return inputs, torch.randint(num_classes, (batch,), generator=generator)

    return draw


def tokens(vocabulary: int, length: int) -> Draw:
    """Sequences of random tokens; the target of each is the one after it."""

    def draw(batch: int, generator: torch.Generator) -> Batch:
        drawn = torch.randint(vocabulary, (batch, length + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return draw


def masked(vocabulary: int, length: int) -> Draw:
    """Random tokens in two segments; the same number in every row is hidden, to be guessed."""

    def draw(batch: int, generator: torch.Generator) -> Batch:
        drawn = torch.randint(vocabulary, (batch, length), generator=generator)
        order = torch.rand(batch, length, generator=generator).argsort(1)
        is_hidden = order < math.ceil(MASKED_PART * length)
        segments = (torch.arange(length) >= length // 2).long().repeat(batch, 1)
        return (
            torch.where(is_hidden, MASK, drawn),
            segments,
            torch.where(is_hidden, drawn, UNLABELLED),
            torch.randint(2, (batch,), generator=generator),
        )

    return draw


def translations(vocabulary: int, length: int) -> Draw:
    """Pairs of random sentences without padding; a target begins with token 1."""

    def draw(batch: int, generator: torch.Generator) -> Batch:
        shape = (2, batch, length)
        source, target = torch.randint(FIRST_WORD, vocabulary, shape, generator=generator)
        begin = torch.ones(batch, 1, dtype=torch.long)
        return source, torch.cat([begin, target[:, :-1]], dim=1), target

    return draw


def pairs(side: int) -> Draw:
    """Two images of noise between -1 and 1, one of each domain."""

    def draw(batch: int, generator: torch.Generator) -> Batch:
        def one() -> Tensor:
            return 2 * torch.rand(batch, 3, side, side, generator=generator) - 1

        return one(), one()

    return draw
