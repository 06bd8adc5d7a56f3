"""Tasks: losses, scores and units against numbers written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hipress.train.tasks import TASKS, UNLABELLED, Batch, Score

ROW, OTHER, EVEN = [2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]


class Fixed(nn.Module):
    """Says the same whatever it is asked, and remembers what that was."""

    def __init__(self, *said: list[object]) -> None:
        super().__init__()
        self.said = nn.ParameterList(torch.tensor(one, dtype=torch.float32) for one in said)
        self.asked: tuple[Tensor, ...] = ()

    def forward(self, *asked: Tensor) -> Tensor | tuple[Tensor, ...]:
        self.asked = asked
        return self.said[0] if len(self.said) == 1 else tuple(self.said)


def surprise(row: list[float], target: int) -> float:
    """The cross entropy of one guess."""
    return math.log(sum(math.exp(value) for value in row)) - row[target]


def cases() -> dict[str, tuple[Fixed, Batch, list[float], float, Score, int]]:
    """Task: model, batch, surprises that are averaged, what is added to that, score, units."""
    images = torch.zeros(3, 3, 4, 4)
    tokens = torch.tensor([[5, 6], [7, 8]])
    segments = torch.tensor([[0, 1], [0, 1]])
    hidden = torch.tensor([[UNLABELLED, 1], [2, UNLABELLED]])
    order = surprise(ROW, 0) / 2 + surprise(OTHER, 0) / 2
    target_out = torch.tensor([[1, 2, 0], [1, 0, 0]])  # 0 is padding
    found: dict[str, tuple[Fixed, Batch, list[float], float, int, int]] = {
        "classify": (
            Fixed([ROW, OTHER, EVEN]),
            (images, torch.tensor([0, 2, 1])),
            [surprise(ROW, 0), surprise(OTHER, 2), surprise(EVEN, 1)],
            0.0,
            1,
            3,
        ),
        "language": (
            Fixed([[ROW, OTHER], [EVEN, ROW]]),
            (tokens, torch.tensor([[2, 1], [0, 0]])),
            [surprise(ROW, 2), surprise(OTHER, 1), surprise(EVEN, 0), surprise(ROW, 0)],
            0.0,
            3,
            4,
        ),
        "masked": (
            Fixed([[ROW, OTHER], [ROW, EVEN]], [ROW, OTHER]),
            (tokens, segments, hidden, torch.tensor([0, 0])),
            [surprise(OTHER, 1), surprise(ROW, 2)],
            order,
            1,
            4,
        ),
        "translate": (
            Fixed([[OTHER, ROW, ROW], [ROW, EVEN, OTHER]]),
            (torch.ones(2, 4).long(), torch.ones(2, 3).long(), target_out),
            [surprise(OTHER, 1), surprise(ROW, 2), surprise(ROW, 1)],
            0.0,
            1,
            3,
        ),
    }
    return {
        name: (
            net,
            batch,
            terms,
            rest,
            Score(
                loss_sum=sum(terms) + rest * len(terms), num_right=num_right, num_scored=len(terms)
            ),
            num_units,
        )
        for name, (net, batch, terms, rest, num_right, num_units) in found.items()
    }


GUESSING = ("classify", "language", "masked", "translate")


def test_the_table_names_its_tasks() -> None:
    assert [task.name for task in TASKS.values()] == list(TASKS) == [*GUESSING, "style"]
    assert {task.unit for task in TASKS.values()} == {"images", "tokens"}
    assert sorted(cases()) == sorted(GUESSING)


@pytest.mark.parametrize("name", GUESSING)
def test_loss_is_the_mean_over_what_is_guessed(name: str) -> None:
    net, batch, terms, rest, _, _ = cases()[name]
    loss = TASKS[name].loss(net, batch)
    assert loss.item() == pytest.approx(sum(terms) / len(terms) + rest, rel=1e-6)
    loss.backward()
    assert all(part.grad is not None and part.grad.any() for part in net.said)
    num_inputs = 2 if name in ("masked", "translate") else 1
    assert len(net.asked) == num_inputs
    assert all(one is two for one, two in zip(net.asked, batch[:num_inputs], strict=True))


@pytest.mark.parametrize("name", GUESSING)
def test_score(name: str) -> None:
    net, batch, _, _, expected, _ = cases()[name]
    found = TASKS[name].evaluate(net, batch)
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    assert (found.num_right, found.num_scored) == (expected.num_right, expected.num_scored)


@pytest.mark.parametrize("name", GUESSING)
def test_units(name: str) -> None:
    _, batch, _, _, _, num_units = cases()[name]
    assert TASKS[name].num_units(batch) == num_units


@pytest.mark.parametrize("name", TASKS)
def test_no_gradient_is_kept_by_a_score(name: str) -> None:
    seen = []

    class Asking(nn.Module):
        def forward(self, *asked: Tensor) -> object:
            seen.append(torch.is_grad_enabled())
            return cases()[name][0](*asked) if name != "style" else torch.tensor(1.0)

    TASKS[name].evaluate(Asking(), cases()[name][1] if name != "style" else (torch.zeros(1),))
    assert seen == [False] and torch.is_grad_enabled()


def test_style_takes_the_loss_from_the_model() -> None:
    net, batch = Fixed([1.5]), (torch.zeros(2, 3, 4, 4), torch.ones(2, 3, 4, 4))
    net.said[0].data = torch.tensor(1.5)
    task = TASKS["style"]
    assert task.loss(net, batch).item() == 1.5 and net.asked == batch
    assert task.evaluate(net, batch) == Score(loss_sum=3.0, num_right=0, num_scored=0)
    assert task.num_units(batch) == 2


@pytest.mark.parametrize(("name", "nothing"), [("masked", UNLABELLED), ("translate", 0)])
def test_a_batch_with_nothing_to_guess_has_a_finite_loss(name: str, nothing: int) -> None:
    net, batch, *_ = cases()[name]
    empty = (*batch[:2], torch.full_like(batch[2], nothing), *batch[3:])
    loss = TASKS[name].loss(net, empty)
    expected = cases()[name][3]  # only the order of segments is left
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert net.said[0].grad is not None and not net.said[0].grad.any()
    assert TASKS[name].evaluate(net, empty).num_scored == 0


def test_a_loss_of_narrow_logits_is_summed_in_float32() -> None:
    logits = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(1000) % 10
    expected = nn.functional.cross_entropy(logits.double(), targets)
    found = TASKS["classify"].loss(nn.Identity(), (logits, targets))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
