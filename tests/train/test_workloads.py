"""The trainings of the convergence benchmark: rates, models, data, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hipress.errors import UsageError
from hipress.train.data import Characters, DataSet
from hipress.train.workers import VirtualWorkers
from hipress.train.workloads import LARGER, load, make_model, optimizers_of, task

GPT = LARGER["gpt", "adamw"]
TEXT = "To be, or not to be: that is the question.\n" * 100


def images(num: int = 64) -> DataSet:
    """Made-up images of side 28 in place of Fashion-MNIST."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (num, 784), generator=generator, dtype=torch.uint8)
    labels = torch.arange(num) % 10
    return DataSet(
        name="fashion-mnist",
        train_images=rows,
        train_labels=labels,
        test_images=rows,
        test_labels=labels,
        has_channels=True,
    )


def test_the_rate_grows_and_then_falls_to_a_share() -> None:
    rates = [GPT.rate_at(step) for step in range(GPT.num_steps)]
    assert rates[0] == GPT.rate / 100 and rates[99] == rates[100] == GPT.rate
    assert rates[:100] == sorted(rates[:100]) and rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[550] == pytest.approx(GPT.rate * (0.1 + 0.9 / 2), rel=1e-12)
    assert rates[-1] == pytest.approx(0.1 * GPT.rate, rel=1e-3) and rates[-1] > 0.1 * GPT.rate


@pytest.mark.parametrize(
    ("model", "optimizer", "num_parameters"),
    [("gpt", "adamw", 10_721_664), ("resnet", "sgd", 700_458), ("cnn", "adamw", 1_147_466)],
)
def test_sizes_of_models(model: str, optimizer: str, num_parameters: int) -> None:
    data = Characters.of(TEXT * 4, 128) if model == "gpt" else images()
    first, again, other = (make_model(LARGER[model, optimizer], data, seed) for seed in (0, 0, 1))
    vocabulary = data.vocabulary if isinstance(data, Characters) else 65
    found = sum(p.numel() for p in first.parameters())
    assert found + (65 - vocabulary) * 384 == num_parameters  # tiny-shakespeare has 65 characters
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("digits", "cnm"), "--model 'cnm' is none of mlp, cnn, resnet, gpt; choose one."),
        (("digits", "resnet"), "no data set 'digits'; there are: fashion-mnist."),
        (("tiny-shakespeare", "gpt", "sgd"), "'sgd' is not one that gpt .* choose adamw."),
        (("fashion-mnist", "resnet", "adam"), "'adam' is not one .* choose sgd or adamw."),
        (("digits", "mlp", "adamw"), "'adamw' is not one that mlp .* choose sgd or plain-sgd."),
    ],
)
def test_tasks_that_there_are_not(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        task(*arguments)


def test_every_task_can_be_asked_for() -> None:
    for model, optimizer in LARGER:
        assert optimizer in optimizers_of(model)
        found = LARGER[model, optimizer]
        assert task(found.data, model, optimizer) == found
        assert (found.model, found.optimizer) == (model, optimizer)


def test_plain_sgd_has_no_momentum() -> None:
    """Catches: figures of SGD without momentum that are those of SGD with it."""
    data = replace(images(), has_channels=False)
    for optimizer, expected in (("sgd", {0.9}), ("plain-sgd", {0.0})):
        found = task("fashion-mnist", "mlp", optimizer)
        workers = VirtualWorkers("onebit", found, data, seed=0, num_workers=1)
        assert {group["momentum"] for group in workers.optimizer.param_groups} == expected
    small = task("digits", "cnn", "sgd")
    assert (small.data, small.num_steps, small.batch, small.rate) == ("digits", 300, 8, 0.05)


# --- text -----------------------------------------------------------------------------------------


def test_characters() -> None:
    data = Characters.of(TEXT, 16)
    assert data.vocabulary == len(set(TEXT)) and len(data.train_tokens) == len(TEXT) * 9 // 10
    kinds = sorted(set(TEXT))
    inputs, targets = data.train(torch.tensor([3, 0]))
    assert "".join(kinds[k] for k in inputs[0].tolist()) == TEXT[3:19]
    assert "".join(kinds[k] for k in targets[1].tolist()) == TEXT[1:17]
    data.train(torch.tensor([data.num_train - 1]))  # the last window
    tested = torch.cat([targets.flatten() for _, targets in data.test()])
    assert torch.equal(tested, data.test_tokens[1 : 1 + len(tested)])
    assert len(data.test_tokens) - len(tested) <= 16


def test_a_folder_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input.txt").write_text(TEXT)
    small = replace(GPT, gpt=replace(GPT.gpt, context=16))
    monkeypatch.setenv("HIPRESS_TINY_SHAKESPEARE", str(tmp_path))
    for folder in (tmp_path, tmp_path / "input.txt", None):
        found = load(small, folder)
        assert isinstance(found, Characters) and found.vocabulary == len(set(TEXT))
    with pytest.raises(UsageError, match=f"has 4300 characters.* at least {10 * 1002}"):
        load(replace(GPT, gpt=replace(GPT.gpt, context=1000)), tmp_path)


def test_text_that_is_missing_or_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIPRESS_TINY_SHAKESPEARE", raising=False)
    with pytest.raises(
        UsageError, match="set HIPRESS_TINY_SHAKESPEARE or --data-dir to the folder"
    ):
        load(GPT, None)
    with pytest.raises(UsageError, match="input.txt' does not exist"):
        load(GPT, tmp_path)
    (tmp_path / "input.txt").write_bytes(b"\xff" * 9000)
    with pytest.raises(UsageError, match="is not UTF-8; convert the file"):
        load(GPT, tmp_path)


def test_more_workers_than_windows() -> None:
    with pytest.raises(UsageError, match="400 workers take 6400 windows in a step"):
        GPT.check(Characters.of(TEXT, 128), 400)


# --- images ---------------------------------------------------------------------------------------


def test_images_have_three_equal_channels() -> None:
    data = images()
    pixels, labels = data.train(torch.tensor([5, 1]))
    rows = replace(data, has_channels=False).train(torch.tensor([5, 1]))[0]
    assert pixels.shape == (2, 3, 28, 28) and labels.tolist() == [5, 1]
    assert all(torch.equal(pixels[:, k].flatten(1), rows) for k in range(3))


def test_buffers_are_those_of_the_first_worker() -> None:
    """As in DDP: each worker normalises by its own batch, and rank 0's statistics are tested."""
    task = replace(LARGER["resnet", "sgd"], batch=8, num_steps=1)
    batches = [torch.arange(0, 8), torch.arange(8, 16)]
    both, alone = (
        VirtualWorkers("none", task, images(), seed=0, num_workers=num) for num in (2, 1)
    )
    both.backward(batches, 0)
    alone.backward(batches[:1], 0)
    pairs = list(zip(both.model.buffers(), alone.model.buffers(), strict=True))
    assert pairs and all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(both.parameters[0].grad, alone.parameters[0].grad)
    assert math.isfinite(both.score())
