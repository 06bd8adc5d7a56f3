"""Tasks: what a model and a data set have in common, so that any pair with the same task trains.

    task       unit    batch                                     the model maps
    classify   images  images, labels                            images -> logits
    language   tokens  tokens, next tokens                       tokens -> logits
    masked     tokens  tokens, segments, labels, is_next         tokens, segments -> two logits
    translate  tokens  source, target_in, target_out             source, target_in -> logits
    style      images  images of one domain, of the other        both -> the loss itself

A label of -100 (masked) and a target of 0 (translate) are not scored. Data of the user's own
has a task of its own (`data/own.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, ...]
"""The examples of one rank in one step; the first dimension of each part counts examples."""

Draw = Callable[[int, torch.Generator], Batch]
"""Draws a batch of so many synthetic examples with a generator."""

UNLABELLED = -100
"""The label of a token that is not predicted."""
PADDING = 0


@dataclass(frozen=True, kw_only=True)
class Score:
    """The contribution of one batch to the totals of a test."""

    loss_sum: float
    """The mean loss times `num_scored`; without accuracy, times the number of examples."""
    num_right: int
    num_scored: int
    """Number of predictions; 0 where there is no accuracy, as for style."""


@dataclass(frozen=True, kw_only=True)
class LearningTask:
    """How batches of one kind are trained and scored."""

    name: str
    unit: str
    forward: Callable[[nn.Module, Batch], tuple[Tensor, Tensor | None]]
    """Returns the mean loss over the predictions of a batch, and the logits if there are any."""
    num_units: Callable[[Batch], int]
    targets: int = 1
    """Index of the part of a batch that the logits predict."""
    ignored: int = UNLABELLED
    """The target that is not scored."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.forward(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Batch) -> Score:
        """Score a batch without gradients; the caller puts the model in eval mode."""
        with torch.no_grad():
            mean, logits = self.forward(model, batch)
            if logits is None:
                return Score(loss_sum=float(mean) * len(batch[0]), num_right=0, num_scored=0)
            is_scored = batch[self.targets] != self.ignored
            is_right = (logits.argmax(-1) == batch[self.targets]) & is_scored
            num_scored = int(is_scored.sum())
            return Score(
                loss_sum=float(mean) * num_scored,
                num_right=int(is_right.sum()),
                num_scored=num_scored,
            )


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int = UNLABELLED) -> Tensor:
    """Return the mean over targets that are not ignored; 0 without any, where torch returns NaN."""
    total = functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=ignored, reduction="sum"
    )
    return total / (targets != ignored).sum().clamp(min=1)


def _predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    logits = model(inputs)
    return cross_entropy(logits, targets), logits


def _masked(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Add the mean losses of masked tokens and of whether the second segment is the next one."""
    tokens, segments, labels, is_next = batch
    logits, order = model(tokens, segments)
    return cross_entropy(logits, labels) + functional.cross_entropy(order, is_next), logits


def _translate(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    source, target_in, target_out = batch
    logits = model(source, target_in)
    return cross_entropy(logits, target_out, PADDING), logits


def _style(model: nn.Module, batch: Batch) -> tuple[Tensor, None]:
    return model(*batch), None


def _num_examples(batch: Batch) -> int:
    """Return the number of images; for style, of pairs of them."""
    return len(batch[0])


def _num_tokens(batch: Batch) -> int:
    return batch[0].numel()


def _num_translated(batch: Batch) -> int:
    return int((batch[2] != PADDING).sum())


TASKS = {
    task.name: task
    for task in (
        LearningTask(name="classify", unit="images", forward=_predict, num_units=_num_examples),
        LearningTask(name="language", unit="tokens", forward=_predict, num_units=_num_tokens),
        LearningTask(
            name="masked", unit="tokens", forward=_masked, num_units=_num_tokens, targets=2
        ),
        LearningTask(
            name="translate",
            unit="tokens",
            forward=_translate,
            num_units=_num_translated,
            targets=2,
            ignored=PADDING,
        ),
        LearningTask(name="style", unit="images", forward=_style, num_units=_num_examples),
    )
}
