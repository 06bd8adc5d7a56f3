"""The eager baseline does what it claims: the same mathematics, really packed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import hipress
from hipress.bench import eager

SIZES = [1, 7, 8, 4095, 4096, 4097, 10_007]


def gradient(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 0.01


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of any backend give these numbers, and these need not be compiled."""
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")


def form(expression: str, n: int) -> eager.EagerCodec:
    built = eager.build(expression, n)
    assert built is not None
    return built


def wire_bytes(parts: eager.Parts) -> int:
    return sum(part.nbytes for part in parts)


def decoded(codec: eager.EagerCodec, parts: eager.Parts) -> Tensor:
    return codec.decode(parts, torch.full((codec.num_elements,), math.nan))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("expression", "relative_error"), [("none", 0.0), ("fp16", 2**-11), ("bf16", 2**-8)]
)
def test_casts_round_to_their_precision(expression: str, relative_error: float, n: int) -> None:
    x = gradient(n)
    codec = form(expression, n)
    error = (decoded(codec, codec.encode(x)) - x).abs()
    # fp16 has subnormal values below 2^-14, where the step is 2^-24.
    floor = 2**-25 if expression == "fp16" else 0.0
    assert bool((error <= x.abs() * relative_error + floor).all())


@pytest.mark.parametrize("n", SIZES)
def test_onebit_is_sign_times_block_mean(n: int) -> None:
    x = gradient(n)
    codec = form("onebit(ef=false)", n)
    parts = codec.encode(x)
    expected = torch.cat(
        [block.abs().mean() * torch.where(block >= 0, 1.0, -1.0) for block in x.split(1024)]
    )
    torch.testing.assert_close(decoded(codec, parts), expected, rtol=1e-5, atol=0)
    assert wire_bytes(parts) == math.ceil(n / 8) + 4 * math.ceil(n / 1024)


def test_signs_are_packed_low_bit_first() -> None:
    x = torch.tensor([1.0, -1, -1, 1, -1, -1, -1, -1, -1, 1])
    _, packed = form("onebit(ef=false)", 10).encode(x)
    assert packed.tolist() == [0b11110110, 0b01]


@pytest.mark.parametrize("expression", ["ef(onebit)", "ef(minmax(bits=2))", "ef(terngrad)"])
@pytest.mark.parametrize("n", [7, 4097])
def test_feedback_loses_nothing(expression: str, n: int) -> None:
    codec = form(expression, n)
    assert isinstance(codec, eager.EagerFeedback)
    for step in range(4):
        x = gradient(n, seed=step)
        total = codec.residual + x
        after = decoded(codec, codec.encode(x)) + codec.residual
        # One rounding in the residual, relative to the larger of what was added and subtracted.
        torch.testing.assert_close(after, total, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_minmax_stays_within_one_gap(n: int, bits: int) -> None:
    x = gradient(n)
    codec = form(f"minmax(bits={bits})", n)
    parts = codec.encode(x)
    gap = float(x.max() - x.min()) / (2**bits - 1)
    assert float((decoded(codec, parts) - x).abs().max()) <= gap * (1 + 1e-5) + 1e-8
    assert parts[1].numel() == math.ceil(n * bits / 8)


def test_minmax_of_equal_values_is_exact() -> None:
    codec = form("minmax(bits=2)", 9)
    x = torch.full((9,), 0.25)
    assert torch.equal(decoded(codec, codec.encode(x)), x)


@pytest.mark.parametrize("n", SIZES)
def test_terngrad_is_ternary(n: int) -> None:
    x = gradient(n)
    codec = form("terngrad", n)
    parts = codec.encode(x)
    scale = min(float(x.abs().max()), 2.5 * float(x.std(correction=0)))
    levels = decoded(codec, parts) / max(scale, torch.finfo(torch.float32).tiny)
    torch.testing.assert_close(levels, levels.round())
    assert set(levels.round().tolist()) <= {-1.0, 0.0, 1.0}
    assert bool((levels * x >= 0).all())
    assert parts[1].numel() == math.ceil(n / 4)


@pytest.mark.parametrize("expression", ["minmax(bits=2)", "terngrad"])
def test_stochastic_rounding_is_unbiased(expression: str) -> None:
    torch.manual_seed(0)
    # Uniform values: none is clipped at 2.5 sigma (sigma is 0.58 of the maximum).
    x = torch.empty(500).uniform_(-1, 1)
    codec = form(expression, 500)
    num_draws = 400
    mean = sum(decoded(codec, codec.encode(x)) for _ in range(num_draws)) / num_draws
    # Each draw has a standard deviation of at most half the widest gap, 1; five of them.
    assert float((mean - x).abs().max()) < 5 * 0.5 / math.sqrt(num_draws)


@pytest.mark.parametrize("n", [1, 7, 250, 10_007])
def test_exact_topk_takes_the_largest(n: int) -> None:
    x = gradient(n)
    codec = form("topk(ratio=0.01,exact=true,ef=false)", n)
    index, values = codec.encode(x)
    k = max(1, int(0.01 * n))
    assert sorted(values.abs().tolist()) == sorted(x.abs().topk(k).values.tolist())
    assert index.dtype == torch.int32 and torch.equal(x[index.long()], values)
    assert wire_bytes((index, values)) == 8 * k


def test_sampled_topk_takes_about_k_above_one_threshold() -> None:
    n = 200_000
    x = gradient(n)
    codec = form("topk(ratio=0.01,exact=false,ef=false)", n)
    index, values = codec.encode(x)
    # 40 of 4,096 sampled values lie above: the count deviates by about 1/sqrt(40), 16 %.
    assert 0.4 * n / 100 < index.numel() <= n // 100
    assert bool((index.diff() > 0).all())
    threshold = values.abs().min()
    reached = int(index[-1]) + 1
    assert int((x[:reached].abs() >= threshold).sum()) == index.numel()


@pytest.mark.parametrize("exact", ["true", "false"])
def test_topk_feedback_is_exact(exact: str) -> None:
    n = 10_007
    codec = form(f"ef(topk(ratio=0.01,exact={exact}))", n)
    assert isinstance(codec, eager.EagerFeedback)
    for step in range(3):
        x = gradient(n, seed=step)
        total = codec.residual + x
        sent = decoded(codec, codec.encode(x))
        assert torch.equal(sent + codec.residual, total)
        assert bool((codec.residual[sent != 0] == 0).all())


@pytest.mark.parametrize(
    "expression",
    ["none", "fp16", "bf16", "ef(onebit)", "minmax(bits=2)", "terngrad", "ef(topk(exact=true))"],
)
def test_decode_add_is_decode_then_add(expression: str) -> None:
    n = 4099
    x, start = gradient(n), gradient(n, seed=1)
    codec = form(expression, n)
    parts = tuple(part.clone() for part in codec.encode(x))
    before = x.clone()
    expected = start + 0.5 * decoded(codec, parts)
    torch.testing.assert_close(codec.decode_add(parts, start.clone(), 0.5), expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("expression", ["topk(sample=0.5)", "dgc", "ef(dgc)", "my.pse"])
def test_what_has_no_eager_form_gives_none(expression: str) -> None:
    assert eager.build(expression, 10) is None


@pytest.mark.parametrize(
    "expression",
    ["none", "fp16", "bf16", "onebit", "ef(onebit(block=64))", "ef(topk(ratio=0.01,exact=true))"],
)
@pytest.mark.parametrize("n", [7, 10_007])
def test_the_baseline_runs_our_algorithm(expression: str, n: int) -> None:
    ours, theirs = hipress.codec(expression), form(expression, n)
    state = ours.init(gradient(n))
    for step in range(3):
        x = gradient(n, seed=step)
        sent = ours.decode(ours.encode(x, state))
        # Sums in another order: the scales of onebit differ by a few roundings.
        torch.testing.assert_close(decoded(theirs, theirs.encode(x)), sent, rtol=1e-5, atol=1e-9)


def test_stochastic_forms_share_our_scales() -> None:
    n = 10_007
    x = gradient(n)
    for expression in ("minmax(bits=2)", "terngrad"):
        ours, theirs = hipress.codec(expression), form(expression, n)
        levels = [
            decoded(theirs, theirs.encode(x)).unique(),
            ours.decode(ours.encode(x, ours.init(x))).unique(),
        ]
        torch.testing.assert_close(levels[0], levels[1], rtol=1e-4, atol=1e-7)
