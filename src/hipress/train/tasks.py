"""Tasks: what a model and a data set have in common, so that any pair of the same task trains.

    task       unit    batch                                     the model maps
    classify   images  images, labels                            images -> logits
    language   tokens  tokens, next tokens                       tokens -> logits
    masked     tokens  tokens, segments, labels, is_next         tokens, segments -> two logits
    translate  tokens  source, target_in, target_out             source, target_in -> logits
    style      images  images of one domain, of the other        both -> the loss itself

A label of -100 (masked) and a target of 0 (translate) say that there is nothing to guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, ...]
"""What one step of one rank learns from; the first dimension of each part counts examples."""

UNLABELLED = -100
"""The label of a token that is not to be guessed."""
PADDING = 0
"""The token that fills a sequence up in translations."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one batch of a test set adds to its totals."""

    loss_sum: float
    """The mean loss times `num_scored`; for style, times its units."""
    num_right: int
    """Guesses that were right."""
    num_scored: int
    """Guesses; 0 for style, which has no accuracy."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One line of the table."""

    name: str
    unit: str
    """What its speed is counted in."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """What is trained: the mean over the guesses of a batch."""
    evaluate: Callable[[nn.Module, Batch], Score]
    """Loss and accuracy without gradients; the caller puts the model in eval mode."""
    num_units: Callable[[Batch], int]
    """Images, or tokens, of a batch."""


def _cross_entropy(logits: Tensor, targets: Tensor, ignored: int = UNLABELLED) -> Tensor:
    """The mean over targets that are not ignored; 0 without any, where torch says NaN."""
    total = functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=ignored, reduction="sum"
    )
    return total / (targets != ignored).sum().clamp(min=1)


def _guessing(
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]], targets: int, ignored: int
) -> Callable[[nn.Module, Batch], Score]:
    """An `evaluate` that holds the largest logit against the part `targets` of a batch."""

    def evaluate(model: nn.Module, batch: Batch) -> Score:
        with torch.no_grad():
            mean, logits = loss(model, batch)
            is_scored = batch[targets] != ignored
            is_right = (logits.argmax(-1) == batch[targets]) & is_scored
            num_scored = int(is_scored.sum())
            return Score(
                loss_sum=float(mean) * num_scored,
                num_right=int(is_right.sum()),
                num_scored=num_scored,
            )

    return evaluate


def _next(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of classify and language: the loss, and the logits it is made from."""
    inputs, targets = batch
    logits = model(inputs)
    return _cross_entropy(logits, targets), logits


def _masked(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Masked tokens, and whether the second segment follows the first: two means, added."""
    tokens, segments, labels, is_next = batch
    logits, order = model(tokens, segments)
    return _cross_entropy(logits, labels) + functional.cross_entropy(order, is_next), logits


def _translate(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    source, target_in, target_out = batch
    logits = model(source, target_in)
    return _cross_entropy(logits, target_out, PADDING), logits


def _style(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(*batch)
    assert isinstance(loss, Tensor)
    return loss


def _evaluate_style(model: nn.Module, batch: Batch) -> Score:
    with torch.no_grad():
        return Score(
            loss_sum=float(_style(model, batch)) * _num_examples(batch), num_right=0, num_scored=0
        )


def _num_examples(batch: Batch) -> int:
    """Images; for style, pairs of them."""
    return len(batch[0])


def _num_tokens(batch: Batch) -> int:
    return batch[0].numel()


def _num_translated(batch: Batch) -> int:
    """Target tokens that are not padding."""
    return int((batch[2] != PADDING).sum())


TASKS: dict[str, Task] = {
    "classify": Task(
        name="classify",
        unit="images",
        loss=lambda model, batch: _next(model, batch)[0],
        evaluate=_guessing(_next, targets=1, ignored=UNLABELLED),
        num_units=_num_examples,
    ),
    "language": Task(
        name="language",
        unit="tokens",
        loss=lambda model, batch: _next(model, batch)[0],
        evaluate=_guessing(_next, targets=1, ignored=UNLABELLED),
        num_units=_num_tokens,
    ),
    "masked": Task(
        name="masked",
        unit="tokens",
        loss=lambda model, batch: _masked(model, batch)[0],
        evaluate=_guessing(_masked, targets=2, ignored=UNLABELLED),
        num_units=_num_tokens,
    ),
    "translate": Task(
        name="translate",
        unit="tokens",
        loss=lambda model, batch: _translate(model, batch)[0],
        evaluate=_guessing(_translate, targets=2, ignored=PADDING),
        num_units=_num_translated,
    ),
    "style": Task(
        name="style",
        unit="images",
        loss=_style,
        evaluate=_evaluate_style,
        num_units=_num_examples,
    ),
}
"""Name: task."""
