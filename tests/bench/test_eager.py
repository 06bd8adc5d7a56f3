"""The plain eager forms do what the codecs do: same size on the wire, same decoded values."""

from __future__ import annotations

import pytest
import torch

import hipress
from hipress.bench import eager

DETERMINISTIC = ["none", "fp16", "bf16", "ef(onebit)", "onebit(block=64)", "topk(exact=true)"]
RANDOM = ["minmax(bits=2)", "minmax(bits=4)", "terngrad", "terngrad(clip=0)", "topk(ratio=0.1)"]


def gradient(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.01


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of any backend give these numbers, and these need not be compiled."""
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")


@pytest.mark.parametrize("n", [8, 4096, 10_007])
@pytest.mark.parametrize("expression", DETERMINISTIC)
def test_same_values_as_the_codec_over_three_steps(expression: str, n: int) -> None:
    x, codec, form = gradient(n), hipress.codec(expression), eager.build(expression)
    assert form is not None
    state = codec.init(x)
    for _ in range(3):
        ours = codec.decode(codec.encode(x, state))
        torch.testing.assert_close(form.decode(form.encode(x), n), ours, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("expression", RANDOM)
def test_random_forms_draw_from_the_same_distribution(expression: str) -> None:
    n = 10_007
    x, codec, form = gradient(n), hipress.codec(expression), eager.build(expression)
    assert form is not None
    state = codec.init(x)
    ours = codec.decode(codec.encode(x, state))
    theirs = form.decode(form.encode(x), n)
    # Feedback or not, the first step's error has the same size.
    ratio = float((theirs - x).norm() / (ours - x).norm())
    assert 0.9 < ratio < 1.1


def test_packing_is_low_bits_first() -> None:
    codes = torch.tensor([1, 2, 3, 0, 1])
    assert eager.pack(codes, 2).tolist() == [0b00_11_10_01, 0b01]
    assert eager.unpack(eager.pack(codes, 2), 2, 5).tolist() == codes.tolist()


def test_no_form_for_what_it_does_not_know() -> None:
    assert eager.build("momentum(onebit)") is None
