"""What travels with a codec: one rule for the benchmark, by optimizer and form."""

from __future__ import annotations

import doctest

import pytest

from hipress.codecs import names
from hipress.errors import UsageError
from hipress.session.buckets import has_momentum
from hipress.train import forms
from hipress.train.config import PLAIN
from hipress.train.forms import GRADIENT, RECOMMENDED, sent


@pytest.mark.parametrize("name", names())
def test_gradients_travel_through_the_codec_as_it_was_named(name: str) -> None:
    for optimizer in ("sgd", "adamw"):
        found = sent(name, optimizer, GRADIENT)
        assert found.codec is not None and found.codec.name == name and not found.is_momentum


@pytest.mark.parametrize("name", names())
def test_with_adamw_momentum_travels_unless_sizes_are_kept(name: str) -> None:
    found = sent(name, "adamw", RECOMMENDED)
    keeps_sizes = name in ("none", "fp16", "bf16", "int8", "int4")
    has_no_feedback = name in ("terngrad", "minmax", "dithering")
    assert found.refreshes != keeps_sizes
    assert found.is_momentum == (not keeps_sizes and not has_no_feedback)
    assert found.codec is not None and not has_momentum(found.codec)


@pytest.mark.parametrize("name", ["onebit(block=256)", "ef(onebit(ef=false))", "topk", "blocktopk"])
def test_with_sgd_signs_and_largest_are_those_of_momentum(name: str) -> None:
    found = sent(name, "sgd", RECOMMENDED)
    assert found.codec is not None and has_momentum(found.codec) and not found.is_momentum
    assert "residual" in found.codec.state_names


@pytest.mark.parametrize("name", ["int8", "terngrad", "dgc", "momentum(onebit)", "momentum(topk)"])
def test_with_sgd_other_codecs_stay_as_they_are(name: str) -> None:
    assert sent(name, "sgd", RECOMMENDED).text == sent(name, "sgd", GRADIENT).text


def test_plain_averaging_has_no_codec() -> None:
    assert sent(PLAIN, "adamw", RECOMMENDED) == sent(PLAIN, "sgd", GRADIENT)
    assert sent(PLAIN, "sgd", GRADIENT).text == PLAIN


def test_a_form_that_is_none() -> None:
    with pytest.raises(UsageError, match="form 'best' is none of recommended, gradient; choose"):
        sent("onebit", "sgd", "best")


def test_examples() -> None:
    assert doctest.testmod(forms).failed == 0
