"""Which codecs a plan may use: by the budget's name, a bound, or the user's own choice."""

import pytest
import torch

import hipress
from hipress.errors import UsageError
from hipress.secopa.budget import CAREFUL, PASSED, Budget
from hipress.session import planner
from tests.secopa.made_up import codec, profile

NAMES = ("none", "int8", "onebit", "dgc(ratio=0.001)", "momentum(ef(onebit), mu=0.9)")
MADE = profile(codecs=[codec(name, 0.1) for name in NAMES])


@pytest.mark.parametrize("name", ["careful", "table"])
def test_a_named_budget_refuses_codecs_that_it_does_not_have(name):
    """Catches: a budget that the user asked for and that does nothing."""
    with pytest.raises(UsageError, match=rf"'dgc\(ratio=0.001\)' is not in budget '{name}'"):
        Budget.read(name).allowed(MADE, ["int8", "dgc(ratio=0.001)"])
    assert Budget.read(name).allowed(MADE, ["int8", "none"]) == ("int8",)


@pytest.mark.parametrize("given", [None, 0.5])
def test_without_a_named_budget_the_named_codecs_are_the_ones(given):
    """Catches: a codec that the user named and that is left out."""
    assert Budget.read(given).allowed(MADE, NAMES) == NAMES[1:]


def test_a_bound_leaves_out_what_brings_momentum():
    """Catches: momentum twice, by a codec that nobody named."""
    assert Budget.read("0.9").allowed(MADE) == ("int8", "onebit")


def test_none_alone_compresses_nothing():
    """Catches: a codec that nobody named, for users who refuse lossy codecs."""
    assert Budget.read(None).allowed(MADE, ["none"]) == ()


# --- what candidates do to tiny gradients ---------------------------------------------------------

NUMEL, ROUNDS = 2048, 400
LOSES = ("fp16",)


def tiny_gradient() -> torch.Tensor:
    """Elements of both signs whose magnitudes lie between 1e-12 and 1e-9."""
    random = torch.Generator().manual_seed(0)
    magnitude = 10.0 ** (-12 + 3 * torch.rand(NUMEL, generator=random))
    return magnitude * (2.0 * torch.randint(0, 2, (NUMEL,), generator=random) - 1.0)


def sent_mean(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the mean of what one worker's messages bring, over many steps."""
    made = hipress.codec(name)
    state = made.init(gradient)
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for _ in range(ROUNDS):
        total += made.decode(made.encode(gradient, state)).double()
    return total / ROUNDS


@pytest.mark.parametrize("name", [*PASSED, *LOSES])
def test_candidates_send_tiny_gradients(name):
    """Catches: a candidate of `auto` that sends zero for what Adam still learns from."""
    gradient = tiny_gradient()
    mean = sent_mean(name, gradient)
    error = float((mean - gradient.double()).norm() / gradient.double().norm())
    if name in LOSES:
        assert not mean.any() and error == 1.0
        assert name not in PASSED
    else:
        # Random rounding leaves an error that falls with the square root of the rounds, residuals
        # are still to come, and terngrad clips to 2.5 standard deviations (0.16).
        assert error < 0.2


@pytest.mark.parametrize("name", [*CAREFUL, *LOSES])
def test_adam_learns_from_tiny_gradients(name):
    """Catches: a default candidate with which Adam stands still where it should learn."""
    made = hipress.codec(name)
    weight = torch.nn.Parameter(torch.zeros(256))
    target = torch.linspace(0.5, 1.0, 256)
    optimizer = torch.optim.Adam([weight], lr=0.05, eps=1e-15)
    state = made.init(weight.detach())
    for _ in range(100):
        gradient = 1e-10 * (weight.detach() - target)
        weight.grad = made.decode(made.encode(gradient, state))
        optimizer.step()
    distance = float((weight.detach() - target).abs().max())
    assert distance == 1.0 if name in LOSES else distance < 0.05


@pytest.mark.parametrize("budget", [None, "careful", "table", 0.5])
def test_fp16_is_used_only_if_it_is_named(budget):
    """Catches: `fp16` that nobody asked for, and a user who asks for it in vain."""
    assert "fp16" not in planner.allowed(None, budget)
    assert planner.allowed(["fp16"], None) == ("fp16",)
    measured = profile(codecs=[codec(name, 0.1) for name in ("none", "fp16", "tbq", "int8")])
    assert Budget.read(budget).allowed(measured) == ("int8",)
    assert Budget.read(None).allowed(measured, ["fp16"]) == ("fp16",)
