"""Each codec against its own formula: how far off, how biased, which elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import hipress
from tests.codecs.cases import BACKENDS, PLAIN, Case, gaussian

MEAN_RTOL = 2e-6
"""A mean of up to 4096 float32, added in any order over lanes: 16 ulp."""
LARGE = 300_000
CASES = {c.expr: c for c in PLAIN}


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HIPRESS_BACKEND", request.param)
    monkeypatch.setenv("HIPRESS_THREADS", "1")
    return str(request.param)


def sent(expr: str, x: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload and decoded values."""
    c = hipress.codec(expr)
    payload = c.encode(x, c.init(x, seed=seed))
    return payload, c.decode(payload)


# --- none, fp16, bf16 ----------------------------------------------------------------------------


def test_none_is_exact() -> None:
    x = gaussian(10007)
    x[:4] = torch.tensor([0.0, -0.0, 1e-45, 3.4e38])
    assert sent("none", x)[1].numpy().tobytes() == x.numpy().tobytes()


def halfway(values: np.ndarray) -> torch.Tensor:
    """Finite float32 values, the points halfway between neighbours, and those beside these."""
    values = np.unique(values[np.isfinite(values)])
    middle = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    around = [np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)]
    return torch.from_numpy(np.concatenate([values, -values[values == 0], middle, *around]))


def test_fp16_rounds_to_nearest_even() -> None:
    patterns = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = halfway(patterns)
    x = torch.cat([x, torch.tensor([65519.99, -65519.99, 2e-8, 2.98e-8, 2.99e-8, 1e-45])])
    decoded = sent("fp16", x)[1]
    assert torch.equal(decoded, x.half().float())
    # Half an ulp: 11 bits of a normal number, 2**-24 the smallest step.
    assert ((x - decoded).abs() <= torch.maximum(x.abs() * 2.0**-11, torch.tensor(2.0**-25))).all()


def test_fp16_overflow_stays_visible() -> None:
    x = torch.tensor([65519.0, 65520.0, -1e6, 3e38])
    assert sent("fp16", x)[1].tolist() == [65504.0, math.inf, -math.inf, math.inf]


def test_bf16_rounds_to_nearest_even() -> None:
    patterns = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    x = halfway(patterns)
    decoded = sent("bf16", x)[1]
    assert torch.equal(decoded, x.bfloat16().float())
    normal = (x.abs() >= 2.0**-126) & decoded.isfinite()
    assert ((x - decoded).abs() <= x.abs() * 2.0**-8)[normal].all()


# --- onebit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("expr", ["onebit(ef=false)", "onebit(block=64, ef=false)"])
@pytest.mark.parametrize("n", [1, 7, 4096, 4097, 10007])
def test_onebit_is_sign_times_mean(expr: str, n: int) -> None:
    case, x = CASES[expr], gaussian(n)
    x[::7] = 0.0
    x[1::7] = -0.0  # zero of either sign counts as positive
    payload, decoded = sent(expr, x)
    for i, scale in enumerate(case.parts(payload, n)["scale"]):
        block = slice(i * case.block, (i + 1) * case.block)
        assert scale == pytest.approx(x[block].double().abs().mean().item(), rel=MEAN_RTOL)
        assert torch.equal(decoded[block], torch.where(x[block] < 0, -scale.item(), scale.item()))


def test_onebit_keeps_the_projection() -> None:
    # The mean magnitude is the scale that makes the error smallest: orthogonal to what is sent.
    x = gaussian(4096)
    decoded = sent("onebit(ef=false)", x)[1].double()
    assert abs((x.double() - decoded) @ decoded) <= MEAN_RTOL * (decoded @ decoded)


# --- minmax --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 7, 4097, 10007])
def test_minmax_is_within_one_gap(bits: int, n: int) -> None:
    case, x = CASES[f"minmax(bits={bits})"], gaussian(n)
    payload, decoded = sent(case.expr, x)
    parts = case.parts(payload, n)
    assert (parts["min"][0], parts["max"][0]) == (x.min(), x.max())
    assert (parts["bitwidth"][0], parts["tail"][0]) == (bits, n % 2**bits)
    gap = (x.max() - x.min()).item() / (2**bits - 1)
    # One level up or down; the levels themselves are rounded to float32.
    slack = 2.0**-22 * x.abs().max().item() * 2**bits
    assert (x - decoded).abs().max() <= gap + slack
    assert decoded.min() >= x.min() and decoded.max() <= x.max() + slack
    exact = (x.double() - x.min()) / gap if gap else torch.zeros(n, dtype=torch.float64)
    code = torch.from_numpy(parts["code"]).double()
    assert ((code - exact).abs() < 1 + 1e-4).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("value", [0.0, -0.0, 0.3, -7.0, 1e-45, 3e38])
@pytest.mark.parametrize("n", [1, 5000])
def test_minmax_of_a_constant(bits: int, value: float, n: int) -> None:
    x = torch.full((n,), value)
    # HiPress's program folds from +-99999, so a larger constant is a level, not both ends.
    atol = abs(value) * 2.0**-20 if abs(value) > 99999 else 0
    assert torch.allclose(sent(f"minmax(bits={bits})", x)[1], x, rtol=0, atol=atol)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_minmax_ends_are_exact(bits: int) -> None:
    x = gaussian(5000)
    decoded = sent(f"minmax(bits={bits})", x)[1]
    assert decoded[x.argmin()] == x.min()
    assert decoded[x.argmax()].item() == pytest.approx(x.max().item(), rel=2.0**-21)


# --- terngrad ------------------------------------------------------------------------------------


@pytest.mark.parametrize("expr", ["terngrad", "terngrad(clip=0)", "terngrad(clip=1.0)"])
@pytest.mark.parametrize("n", [2, 7, 4097, 10007])
def test_terngrad_is_one_of_three(expr: str, n: int) -> None:
    case, x = Case(expr=expr, plain=expr), gaussian(n)
    payload, decoded = sent(expr, x)
    (scale,) = case.parts(payload, n)["scale"]
    largest = x.abs().max().item()
    if case.clip:
        limit = case.clip * x.double().std(correction=0).item()
        assert scale == pytest.approx(min(largest, limit), rel=1e-5)
    else:
        assert scale == largest
    nonzero = decoded != 0
    assert torch.equal(decoded[nonzero], (x.sign() * scale.item())[nonzero])
    assert nonzero[x.abs() >= scale.item()].all()  # what is clipped is always sent


@pytest.mark.parametrize("expr", ["terngrad", "terngrad(clip=0)"])
@pytest.mark.parametrize("value", [0.0, 0.3, -7.0, 1e-30, 1e5])
@pytest.mark.parametrize("n", [1, 7, 5000, 100_003])
def test_terngrad_of_a_constant(expr: str, value: float, n: int) -> None:
    # No deviation to clip to: every element is the largest, and is sent as it is.
    x = torch.full((n,), value)
    assert torch.equal(sent(expr, x)[1], x)


# --- bias ----------------------------------------------------------------------------------------

NUM_DRAWS = 400


@pytest.mark.parametrize("expr", [*(f"minmax(bits={b})" for b in (1, 2, 4, 8)), "terngrad(clip=0)"])
def test_the_mean_is_kept(expr: str) -> None:
    c, x = hipress.codec(expr), gaussian(257)
    state = c.init(x, seed=17)
    total = torch.zeros(257, dtype=torch.float64)
    for _ in range(NUM_DRAWS):
        total += c.decode(c.encode(x, state))
    error = total / NUM_DRAWS - x.double()

    # Rounding up with probability p has variance p (1 - p) gap^2; terngrad s |x| - x^2.
    exact = x.double()
    if expr.startswith("minmax"):
        gap = (exact.max() - exact.min()) / (2 ** CASES[expr].bits - 1)
        p = (exact - exact.min()) / gap % 1.0
        variance, jump = p * (1 - p) * gap**2, gap
    else:
        jump = exact.abs().max()
        variance = jump * exact.abs() - exact**2
    sigma = (variance / NUM_DRAWS).sqrt()
    # 5 sigma, and Bernstein's term for elements so rarely rounded that they are not normal.
    rounding = 1e-6 * jump
    assert (error.abs() <= 5 * sigma + 5 * jump / NUM_DRAWS + rounding).all()
    # All elements together: sum and spread are as derived, so no bias hides below the noise.
    assert error.sum().abs() <= 5 * sigma.square().sum().sqrt() + 257 * rounding
    wide = sigma > 0.2 * jump / math.sqrt(NUM_DRAWS)
    z = (error / sigma)[wide]
    assert (z.square().mean() - 1).abs() <= 5 * math.sqrt(2 / len(z))


def test_clipped_terngrad_is_unbiased_below_the_clip() -> None:
    c, x = hipress.codec("terngrad"), gaussian(257)
    state = c.init(x, seed=17)
    total = torch.zeros(257, dtype=torch.float64)
    for _ in range(NUM_DRAWS):
        total += c.decode(c.encode(x, state))
    limit = 2.5 * x.double().std(correction=0)
    expected = x.double().clamp(-limit, limit)
    sigma = ((limit * expected.abs() - expected**2).clamp(min=0) / NUM_DRAWS).sqrt()
    slack = 5 * limit / NUM_DRAWS
    assert ((total / NUM_DRAWS - expected).abs() <= 5 * sigma + slack).all()


# --- topk ----------------------------------------------------------------------------------------


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of the k largest magnitudes, ties by lowest index, in ascending order."""
    return x.abs().argsort(descending=True, stable=True)[:k].sort().values


@pytest.mark.parametrize(
    "expr", ["topk(exact=true, ef=false)", "topk(ratio=0.1, exact=true, ef=false)"]
)
@pytest.mark.parametrize("n", [1, 7, 99, 100, 4097, 10007])
@pytest.mark.parametrize("kind", ["gaussian", "ties", "signs", "mostly zero", "zeros", "subnormal"])
def test_exact_topk_is_the_largest(expr: str, n: int, kind: str) -> None:
    x = gaussian(n)
    if kind == "ties":
        x = (x * 2).round()
    elif kind == "signs":
        x = x.sign()
    elif kind == "mostly zero":
        x = x * (torch.arange(n) % 500 == n // 2 % 500)
    elif kind != "gaussian":
        x = x * (0 if kind == "zeros" else 1e-40)
    case = CASES[expr]
    payload, decoded = sent(expr, x)
    parts, k = case.parts(payload, n), case.room(n)
    expected = largest(x, k)
    assert parts["count"][0] == k
    assert parts["index"].tolist() == expected.tolist()
    assert parts["value"].tolist() == x[expected].tolist()
    assert torch.equal(decoded, torch.zeros(n).index_put((expected,), x[expected]))
    if kind == "mostly zero":
        assert x.count_nonzero() <= max(k, 1)
        assert torch.equal(decoded, x)


@pytest.mark.parametrize("n", [1, 7, 100, 4097, 10007, LARGE])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 1.0])
def test_sampled_topk_is_a_threshold(n: int, ratio: float) -> None:
    expr = f"topk(ratio={ratio}, ef=false)"
    case, x = Case(expr=expr, plain=expr), gaussian(n)
    payload, decoded = sent(expr, x)
    parts, k = case.parts(payload, n), case.room(n)
    count = int(parts["count"][0])
    index = torch.from_numpy(parts["index"].astype(np.int64))
    assert 1 <= count <= k
    assert (index[:count].diff() > 0).all()
    assert not parts["index"][count:].any() and not parts["value"][count:].any()
    assert torch.equal(torch.from_numpy(parts["value"][:count]), x[index[:count]])
    # Surplus is dropped in index order; before that, everything above the threshold was taken.
    seen = n if count < k else int(index[count - 1]) + 1
    unsent = torch.ones(n, dtype=torch.bool)
    unsent[index[:count]] = False
    rest = x.abs()[:seen][unsent[:seen]]
    assert rest.numel() == 0 or rest.max() < x[index[:count]].abs().min()
    assert torch.equal(decoded[unsent], torch.zeros(int(unsent.sum())))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ratio", [0.01, 0.1])
def test_sampled_topk_is_about_k(ratio: float, seed: int) -> None:
    # The threshold is the 40th of 4096: off by 16 % (one sigma), and never above k.
    expr = f"topk(ratio={ratio}, ef=false)"
    case, x = Case(expr=expr, plain=expr), gaussian(LARGE, seed)
    count = int(case.parts(sent(expr, x, seed)[0], LARGE)["count"][0])
    k = case.room(LARGE)
    assert 0.5 * k <= count <= k


@pytest.mark.parametrize("n", [500, 10007, LARGE])
def test_sampled_topk_of_mostly_zeros(n: int) -> None:
    x = gaussian(n) * (torch.arange(n) % 400 == 7)  # a quarter of what there is room for
    assert torch.equal(sent("topk(ef=false)", x)[1], x)


def test_sampled_topk_of_zeros_sends_nothing() -> None:
    case = CASES["topk(ef=false)"]
    payload, decoded = sent(case.expr, torch.zeros(10007))
    assert case.parts(payload, 10007)["count"][0] == 0
    assert not decoded.any()


def test_topk_with_feedback_sends_everything_in_time() -> None:
    # What was too small waits in the residual until it is large enough.
    c, x = hipress.codec("topk(ratio=0.1, exact=true)"), gaussian(1000).abs() + 1
    state, arrived = c.init(x), torch.zeros(1000)
    for _ in range(40):
        arrived += c.decode(c.encode(x, state))
    assert (arrived > 0).all()
