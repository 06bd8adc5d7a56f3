"""The table of models: their sizes, their batches, and that they train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hipress.errors import UsageError
from hipress.train.models import MODELS, Gpt, loss, model, names

SMALL = [name for name in MODELS if name != "gpt-124m"]  # the rest is for a GPU


@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_large_as_they_say(name: str) -> None:
    with torch.device("meta"):
        parameters = list(model(name).build().parameters())
    assert sum(p.numel() for p in parameters) == model(name).num_parameters


@pytest.mark.parametrize(
    ("name", "millions"), [("vgg", 25), ("gpt", 25), ("gpt-124m", 124), ("mlp", 0.1)]
)
def test_sizes_that_others_count_on(name: str, millions: float) -> None:
    assert model(name).num_parameters == pytest.approx(millions * 1e6, rel=0.07)


def test_most_bytes_of_vgg_are_in_one_tensor_and_few_of_gpt() -> None:
    with torch.device("meta"):
        shares = {
            name: max(p.numel() for p in model(name).build().parameters())
            / model(name).num_parameters
            for name in ("vgg", "gpt")
        }
    assert shares["vgg"] > 0.7 and shares["gpt"] < 0.25


@pytest.mark.parametrize("name", SMALL)
def test_loss_falls_and_every_parameter_has_a_gradient(name: str) -> None:
    net, batch = model(name).make(), model(name).data(rank=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        found = loss(net, batch)
        found.backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all() and parameter.grad.any()
        optimizer.step()
        losses.append(found.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("name", SMALL)
def test_weights_follow_the_seed_and_batches_the_rank(name: str) -> None:
    line = model(name)
    if name == "mlp":
        first, again, other = (line.make(seed) for seed in (0, 0, 1))
        for one, two, three in zip(
            *(net.parameters() for net in (first, again, other)), strict=True
        ):
            assert torch.equal(one, two) and not torch.equal(one, three)
    (x, target), (x_again, target_again), (x_other, _) = (line.data(rank) for rank in (0, 0, 1))
    assert torch.equal(x, x_again) and torch.equal(target, target_again)
    assert not torch.equal(x, x_other)
    assert len(x) == line.batch and len(line.data(0, batch=3)[0]) == 3


def test_making_a_model_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model("mlp").make()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_lets_ranks_or_runs_differ(name: str) -> None:
    with torch.device("meta"):
        net = model(name).build()
    barred = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    assert not any(isinstance(layer, barred) for layer in net.modules())
    assert not list(net.buffers())


def test_targets_of_gpt_are_the_next_tokens() -> None:
    tokens, targets = model("gpt").data(rank=0)
    assert tokens.shape == targets.shape == (1, 64)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_gpt_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    net = Gpt(vocabulary=11, context=6, width=8, num_layers=2, num_heads=2)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    changed = tokens.clone()
    changed[0, 3] = 9
    with torch.no_grad():
        before, after = net(tokens), net(changed)
    assert before.shape == (1, 5, 11)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        model("vggg")
    assert str(caught.value) == (
        "model 'vggg' (did you mean 'vgg'?) is none of vgg, gpt, gpt-124m; choose one."
    )
    assert "mlp" not in names()
