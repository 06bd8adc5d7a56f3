"""Which codecs a plan may use: by the budget's name, a bound, or the user's own choice."""

import pytest

from hipress.errors import UsageError
from hipress.secopa.budget import Budget
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


def test_none_is_no_choice():
    """Catches: a search without codecs, whose plan says that the budget allows none."""
    with pytest.raises(UsageError, match="none is no codec to plan with"):
        Budget.read(None).allowed(MADE, ["none"])
