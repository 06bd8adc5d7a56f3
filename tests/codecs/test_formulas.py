"""Each codec against its own formula: how far off, how biased, which elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import hipress
from tests.codecs.cases import BACKENDS, DGC, WIRE, Case, gaussian, places_of
from tests.grid import thinned

MEAN_RTOL = 2e-6
"""A mean of up to 4096 float32, added in any order over lanes: 16 ulp."""
LARGE = 300_000
CASES = {c.expr: c for c in WIRE}


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


# --- int8 and int4 -------------------------------------------------------------------------------

INTEGERS = {"int8": 127, "int4": 7}
"""The largest level of each."""


@pytest.mark.parametrize(
    "expr",
    ["int8(ef=false)", "int8(block=64, ef=false)", "int4(ef=false)", "int4(block=72, ef=false)"],
)
@pytest.mark.parametrize("n", [1, 7, 127, 128, 129, 255, 256, 257, 10007])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_integers_are_within_half_a_step(expr: str, n: int, size: float) -> None:
    case, x = CASES[expr], gaussian(n) * size
    top = INTEGERS[case.name]
    x[: n // 3] *= 100  # blocks differ
    payload, decoded = sent(expr, x)
    parts = case.parts(payload, n)
    for i, scale in enumerate(parts["scale"]):
        block = slice(i * case.block, (i + 1) * case.block)
        assert scale == np.float32(x[block].abs().max().item()) / np.float32(top)
        # A code of int8 is rounded at 128.5 and more, where float32 has steps of 2**-16.
        assert (decoded[block] - x[block]).abs().max() <= scale.item() * (0.5 + 2.0**-15)
    assert parts["code"].min() >= 1 and parts["code"].max() <= 2 * top + 1
    assert torch.equal(decoded.sign()[decoded != 0], x.sign()[decoded != 0])


@pytest.mark.parametrize("n", [1, 300, 10007])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_zeros(name: str, n: int) -> None:
    payload, decoded = sent(f"{name}(ef=false)", -torch.zeros(n))
    assert (CASES[f"{name}(ef=false)"].parts(payload, n)["code"] == INTEGERS[name] + 1).all()
    assert not decoded.any()


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


@pytest.mark.parametrize("expr", ["onebit(ef=false)", "onebit(block=64, ef=false)"])
@pytest.mark.parametrize("n", [1, 7, 4097, 10007])
def test_onebit_error(expr: str, n: int) -> None:
    case, x = CASES[expr], gaussian(n)
    error = (sent(expr, x)[1] - x).double().square()
    for start in range(0, n, case.block):
        block = slice(start, start + case.block)
        square, total = x[block].double().square().sum(), x[block].double().abs().sum()
        left = square - total.square() / len(x[block])  # ||x||^2 - m s^2
        assert (error[block].sum() - left).abs() <= 2 * MEAN_RTOL * square


@pytest.mark.parametrize("n", [1, 7, 4096, 4097, 10007])
@pytest.mark.parametrize("kind", ["both", "negative", "positive", "zeros"])
def test_onebit_with_two_means(n: int, kind: str) -> None:
    case, x = CASES["onebit(block=64, means=2, ef=false)"], gaussian(n)
    x[::7] = 0.0
    x[1::7] = -0.0
    x = {"both": x, "negative": -x.abs() - 1, "positive": x.abs(), "zeros": 0 * x}[kind]
    payload, decoded = sent(case.expr, x)
    parts = case.parts(payload, n)
    worse = (sent("onebit(block=64, ef=false)", x)[1] - x).double().square()
    for i, (low, high) in enumerate(zip(parts["low"], parts["high"], strict=True)):
        block = x[i * 64 : (i + 1) * 64]
        below = block < 0
        for side, mean in ((block[below], low), (block[~below], high)):
            expected = side.double().mean().item() if len(side) else 0.0
            assert mean == pytest.approx(expected, rel=MEAN_RTOL)
        y = decoded[i * 64 : (i + 1) * 64]
        assert torch.equal(y, torch.where(below, low.item(), high.item()))
        error = (y - block).double().square().sum()
        assert error <= worse[i * 64 : (i + 1) * 64].sum() + MEAN_RTOL * block.square().sum()


# --- tbq -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.5, 0.3, 1e-30, 1e30])
@pytest.mark.parametrize("n", [1, 7, 10007])
def test_tbq_is_a_threshold(tau: float, n: int) -> None:
    limit = np.float32(tau)
    x = gaussian(n) * 2 * tau
    edge = [limit, -limit, *(np.nextafter(limit, np.float32(s)) for s in (0, np.inf)), 0.0]
    x = torch.cat([x, torch.tensor(edge)])
    _, decoded = sent(f"tbq(tau={tau}, ef=false)", x)
    expected = torch.where(x.abs() >= limit.item(), x.sign() * limit.item(), torch.zeros(len(x)))
    assert torch.equal(decoded, expected)
    bound = torch.maximum(torch.tensor(limit), x.abs() - limit.item())
    assert ((decoded - x).abs() <= bound).all()


@pytest.mark.parametrize("tau", [0.5, 0.3, 1e-30, 1e30])
@pytest.mark.parametrize("levels", thinned([2, 4, 7, 8, 100, 127], keep=(4, 100)))
def test_tbq_with_levels_is_the_nearest_multiple(levels: int, tau: float) -> None:
    expr = f"tbq(tau={tau}, levels={levels}, ef=false)"
    case, step = Case(expr=expr, plain=expr), np.float32(tau / levels)
    multiples = torch.arange(-levels - 2, levels + 3)
    payload, decoded = sent(expr, multiples * step.item())
    assert torch.equal(decoded, multiples.clamp(-levels, levels) * step.item())
    x = torch.cat([gaussian(10007) * tau, torch.tensor([3e38, -3e38, tau, -tau, 0.0, -0.0])])
    payload, decoded = sent(expr, x)
    assert case.parts(payload, len(x))["code"].max() == 2 * levels
    # A code is rounded at up to 2 levels + 0.5 <= 254.5, where float32 has steps of 2**-16.
    bound = torch.maximum(torch.tensor(step.item() * (0.5 + 2.0**-14)), x.abs() - tau * (1 - 1e-6))
    assert ((decoded - x).abs() <= bound).all()


@pytest.mark.parametrize("levels", [1, 4])
def test_tbq_stays_less_than_a_step_behind(levels: int) -> None:
    c, tau, n = hipress.codec(f"tbq(levels={levels})"), 0.5, 1000
    state = c.init(torch.empty(n))
    total, arrived = (torch.zeros(n, dtype=torch.float64) for _ in range(2))
    for step in range(50):
        x = gaussian(n, seed=step).clamp(-tau, tau)
        total += x
        arrived += c.decode(c.encode(x, state))
        # The nearest multiple is half a step away at most, the threshold a whole one.
        bound = tau if levels == 1 else tau / levels / 2 * (1 + 1e-5)
        assert state["residual"].abs().max() <= bound
        assert (arrived - total).abs().max() <= bound * (1 + 1e-5)


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


@pytest.mark.parametrize("expr", ["terngrad", "terngrad(clip=0)"])
def test_terngrad_error(expr: str) -> None:
    case, x = CASES[expr], gaussian(10007)
    payload, decoded = sent(expr, x)
    scale = case.parts(payload, 10007)["scale"][0].item()
    inside = x.abs() <= scale
    error = (decoded - x).abs()
    assert (error[inside] <= scale).all()
    assert torch.equal(error[~inside], (x.abs() - scale)[~inside])
    assert inside.all() == (case.clip == 0)


# --- dithering -----------------------------------------------------------------------------------

DITHERING = tuple(c for c in WIRE if c.name == "dithering")
every_dithering = pytest.mark.parametrize("case", DITHERING, ids=lambda c: c.expr)


def norm_of(case: Case, x: torch.Tensor) -> float:
    """What the top level stands for."""
    exact = x.double()
    return (exact.norm() if case.options.get("norm") == "l2" else exact.abs().max()).item()


def levels_around(case: Case, x: torch.Tensor, norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The levels below and above each magnitude, in units of the gradient; the page's formula."""
    share = x.double().abs() / norm
    if not case.natural:
        below = (share * case.levels).floor()
        return below * norm / case.levels, (below + 1) * norm / case.levels
    least = 2.0 ** (1 - case.levels)
    below = torch.where(share < least, 0.0, 2.0 ** share.log2().floor())
    return below * norm, torch.where(share < least, least, 2 * below) * norm


@every_dithering
@pytest.mark.parametrize("n", [1, 7, 4097, 10007])
def test_dithering_takes_a_level_beside(case: Case, n: int) -> None:
    x = gaussian(n)
    payload, decoded = sent(case.expr, x)
    stored = case.parts(payload, n)["norm"][0].item()
    norm = norm_of(case, x)
    assert stored == pytest.approx(norm, rel=1e-5 if case.summed else 0)
    below, above = levels_around(case, x, stored)
    size, slack = decoded.double().abs(), 1e-6 * stored
    assert (torch.minimum((size - below).abs(), (size - above).abs()) <= slack).all()
    assert torch.equal(decoded.sign()[decoded != 0], x.sign()[decoded != 0])
    error = (decoded - x).double().abs()
    step = torch.full((n,), stored / case.levels, dtype=torch.float64)
    if case.natural:
        step = x.double().abs().clamp(min=stored * 2.0 ** (1 - case.levels))
    assert (error <= step + slack).all()


@pytest.mark.parametrize("case", [c for c in DITHERING if not c.summed], ids=lambda c: c.expr)
@pytest.mark.parametrize("scale", [1.0, 3.0, 1e-30, 1e30])
def test_dithering_of_levels_is_exact(case: Case, scale: float) -> None:
    # What lies on a level is not left to chance.
    if case.natural:
        levels = 2.0 ** torch.arange(1 - case.levels, 1)
    else:
        levels = torch.arange(case.levels + 1) / case.levels
    x = torch.cat([levels, -levels, torch.zeros(3)]) * scale
    for seed in range(5):
        assert torch.equal(sent(case.expr, x, seed)[1], x)


@every_dithering
@pytest.mark.parametrize("n", [1, 5000])
def test_dithering_of_zeros(case: Case, n: int) -> None:
    assert not sent(case.expr, torch.zeros(n))[1].any()


@pytest.mark.parametrize("n", [100, 10007])
def test_dithering_by_the_euclidean_norm_is_as_qsgd_says(n: int) -> None:
    case, x = CASES["dithering(levels=100, norm=l2)"], gaussian(n)
    square = 0.0
    for seed in range(20):
        square += (sent(case.expr, x, seed)[1] - x).double().square().sum().item() / 20
    bound = min(n / case.levels**2, math.sqrt(n) / case.levels)
    assert square <= bound * x.double().square().sum().item()


# --- bias ----------------------------------------------------------------------------------------

NUM_DRAWS = 400


@pytest.mark.parametrize(
    "expr",
    [
        *(f"minmax(bits={b})" for b in (1, 2, 4, 8)),
        "terngrad(clip=0)",
        *(c.expr for c in DITHERING),
    ],
)
def test_the_mean_is_kept(expr: str) -> None:
    c, x = hipress.codec(expr), gaussian(257)
    state = c.init(x, seed=17)
    total = torch.zeros(257, dtype=torch.float64)
    for _ in range(NUM_DRAWS):
        total += c.decode(c.encode(x, state))
    error = total / NUM_DRAWS - x.double()

    # Rounding up with probability p has variance p (1 - p) jump^2; terngrad s |x| - x^2.
    exact = x.double()
    if expr.startswith("minmax"):
        jump = ((exact.max() - exact.min()) / (2 ** CASES[expr].bits - 1)).expand(257)
        p = (exact - exact.min()) / jump % 1.0
        variance = p * (1 - p) * jump**2
    elif expr.startswith("dithering"):
        below, above = levels_around(CASES[expr], x, norm_of(CASES[expr], x))
        jump = above - below
        variance = (exact.abs() - below) * (above - exact.abs())
        assert (variance <= jump**2 / 4).all()
        if CASES[expr].natural:  # the page's bound, above the first level
            assert (variance <= exact**2 / 8)[below > 0].all()
    else:
        jump = exact.abs().max().expand(257)
        variance = jump * exact.abs() - exact**2
    sigma = (variance / NUM_DRAWS).sqrt()
    # 5 sigma, and Bernstein's term for elements so rarely rounded that they are not normal.
    rounding = 1e-6 * jump
    assert (error.abs() <= 5 * sigma + 5 * jump / NUM_DRAWS + rounding).all()
    # All elements together: sum and spread are as derived, so no bias hides below the noise.
    assert error.sum().abs() <= 5 * sigma.square().sum().sqrt() + rounding.sum()
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


# --- blocktopk -----------------------------------------------------------------------------------

PICKS = (
    "blocktopk(ef=false)",
    "blocktopk(k=9, block=64, bits=1, ef=false)",
    "blocktopk(k=20, block=512, union=false, ef=false)",
)


@pytest.mark.parametrize("kind", ["gaussian", "ties", "zeros", "one", "tiny", "huge"])
@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 4096, 4097, 10007])
@pytest.mark.parametrize("expr", PICKS)
def test_blocktopk_sends_the_largest_of_each_block(expr: str, n: int, kind: str) -> None:
    case, x = CASES[expr], gaussian(n)
    if kind == "ties":
        x = x.round()
    elif kind == "one":
        x = x * (torch.arange(n) % 64 == 5) * 1000 + x
    else:
        x = x * {"zeros": 0, "tiny": 1e-36, "huge": 1e37}.get(kind, 1.0)
    payload, decoded = sent(expr, x)
    parts = case.parts(payload, n)
    for b in range(-(-n // case.block)):
        part = x[b * case.block : (b + 1) * case.block]
        k = min(case.k, len(part))
        places = parts["place"][b * case.k :][: case.k]
        expected = largest(part, k)
        assert places[:k].tolist() == expected.tolist() and not places[k:].any()
        size = part[expected].abs().double()
        unit = float(size.max()) * 2.0**-24
        high = np.zeros(k, bool)
        if case.bits == 2:
            least = size.min()
            high = (size > least + 1.5936 * (size.mean() - least) + 3 * unit).numpy()
            near = (size > least + 1.5936 * (size.mean() - least) - 3 * unit).numpy()
        code = parts["code"][b * case.k :][: case.k]
        assert (code[:k] % 2).tolist() == (part[expected] < 0).int().tolist()
        if case.bits == 2:  # sizes are cut to multiples of the unit
            assert (high <= (code[:k] > 1)).all() and ((code[:k] > 1) <= near).all()
        # A level is the mean of what it stands for, as a bfloat16.
        for is_high in set((code[:k] > 1).tolist()):
            group = torch.from_numpy((code[:k] > 1) == is_high)
            level = decoded[b * case.block :][: len(part)][expected][group].abs()
            assert (level == level[0]).all()
            mean = float(size[group].mean())
            assert abs(float(level[0]) - mean) <= mean * 2.0**-8 + 2 * unit


@pytest.mark.parametrize("expr", PICKS)
def test_blocktopk_always_takes_something_away(expr: str) -> None:
    # ||e||^2 = ||x||^2 - (sum over levels of count * level^2), as for a mean of magnitudes.
    case, n = CASES[expr], 2**14
    for x in (gaussian(n), gaussian(n) ** 5, gaussian(n) * (torch.arange(n) % 1000 == 0)):
        decoded = sent(expr, x)[1].double()
        whole = x.double().square().view(-1, case.block).sum(dim=1)
        left = (x.double() - decoded).square().view(-1, case.block).sum(dim=1)
        taken = decoded.square().view(-1, case.block).sum(dim=1)
        # A level is rounded to 8 bits, which changes what is taken by less than 2^-7 of it.
        assert ((left - (whole - taken)).abs() <= taken * 2.0**-7 + whole * 1e-6).all()
        assert (left < whole).all() or not x.all()


SAMPLED = {
    "topk": "topk(ratio={}, ef=false)",
    "graddrop": "graddrop(ratio={}, ef=false)",
    "dgc": "dgc(ratio={})",  # from fresh state the accumulation is the gradient
}


@pytest.mark.parametrize("n", [1, 7, 100, 4097, 10007, LARGE])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_threshold(name: str, n: int, ratio: float) -> None:
    expr = SAMPLED[name].format(ratio)
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
    if n <= 4096:  # the sample is the gradient itself
        assert index[:count].tolist() == largest(x, k).tolist()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ratio", [0.01, 0.1])
@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_threshold_is_about_k(name: str, ratio: float, seed: int) -> None:
    # The threshold is the 40th of 4096: off by 16 % (one sigma), and never above k.
    expr = SAMPLED[name].format(ratio)
    case, x = Case(expr=expr, plain=expr), gaussian(LARGE, seed)
    count = int(case.parts(sent(expr, x, seed)[0], LARGE)["count"][0])
    k = case.room(LARGE)
    assert 0.5 * k <= count <= k


@pytest.mark.parametrize("n", [500, 10007, LARGE])
@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_threshold_of_mostly_zeros(name: str, n: int) -> None:
    x = gaussian(n) * (torch.arange(n) % 400 == 7)  # a quarter of what there is room for
    assert torch.equal(sent(SAMPLED[name].format(0.01), x)[1], x)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_threshold_of_zeros_sends_nothing(name: str) -> None:
    expr = SAMPLED[name].format(0.01)
    case = Case(expr=expr, plain=expr)
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


# --- randomk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("expr", ["randomk(ef=false)", "randomk(ratio=0.1, ef=false)"])
@pytest.mark.parametrize("n", [1, 7, 100, 4097, 10007])
def test_randomk_takes_one_of_each_stretch(expr: str, n: int) -> None:
    case, x = CASES[expr], gaussian(n)
    k = case.room(n)
    bounds = [j * (n // k) + min(j, n % k) for j in range(k + 1)]
    for seed in range(5):
        payload, decoded = sent(expr, x, seed)
        parts = case.parts(payload, n)
        places = places_of(int(parts["key"][0]), n, k)
        assert ((places >= bounds[:-1]) & (places < bounds[1:])).all()
        assert parts["value"].tolist() == x[places].tolist()
        assert torch.equal(decoded, torch.zeros(n).index_put((torch.tensor(places),), x[places]))


def test_ranks_of_randomk_share_their_places() -> None:
    # Whatever they send: one seed, stream and step is one key.
    c, n = hipress.codec("randomk(ratio=0.1, ef=false)"), 1000
    case = CASES[c.name]
    states = [c.init(torch.empty(n), seed=5, stream=2) for _ in range(2)]
    keys = []
    for step in range(4):
        given = zip((gaussian(n, step), gaussian(n, 77)), states, strict=True)
        pair = [case.parts(c.encode(x, state), n) for x, state in given]
        assert pair[0]["key"] == pair[1]["key"]
        keys.append(int(pair[0]["key"][0]))
    assert len(set(keys)) == 4


def test_randomk_is_k_of_n_on_average() -> None:
    # 257 elements in 25 stretches of 11 and 10: each is sent with one over the length, not scaled.
    case, n = CASES["randomk(ratio=0.1, ef=false)"], 257
    c, x, k = hipress.codec(case.expr), gaussian(n), case.room(n)
    state, count, square = c.init(x, seed=17), torch.zeros(n, dtype=torch.float64), 0.0
    for _ in range(NUM_DRAWS):
        decoded = c.decode(c.encode(x, state))
        count += decoded != 0
        square += (decoded - x).double().square().sum().item() / NUM_DRAWS
    length = torch.tensor([n // k + (j < n % k) for j in range(k)]).repeat_interleave(
        torch.tensor([n // k + (j < n % k) for j in range(k)])
    )
    p = 1 / length.double()
    sigma = (p * (1 - p) / NUM_DRAWS).sqrt()
    assert ((count / NUM_DRAWS - p).abs() <= 5 * sigma).all()
    # The draws of one stretch exclude each other: nine tenths of 257 are free.
    z = (count / NUM_DRAWS - p) / sigma
    assert (z.square().mean() - 1).abs() <= 5 * math.sqrt(2 / (n - k))
    whole = x.double().square()
    spread = 5 * (whole.square() * p).sum().sqrt().item() / math.sqrt(NUM_DRAWS)
    assert abs(square - ((1 - p) * whole).sum().item()) <= spread


# --- topk and dgc: how much is left --------------------------------------------------------------


@pytest.mark.parametrize("n", [7, 100, 10007])
@pytest.mark.parametrize("expr", ["topk(ratio=0.1, exact=true, ef=false)", "topk(ef=false)"])
def test_topk_error(expr: str, n: int) -> None:
    case, x = CASES[expr], gaussian(n)
    left = (sent(expr, x)[1] - x).double().square().sum()
    whole = x.double().square().sum()
    assert left <= (whole * (1 - case.room(n) / n) if case.exact else whole)


@pytest.mark.parametrize("case", DGC, ids=lambda c: c.expr)
def test_dgc_sends_the_largest_of_what_it_accumulated(case: Case) -> None:
    n = 2000  # below 4096 the sample is all there is, and nothing is left to chance
    c = hipress.codec(case.expr)
    state = c.init(torch.empty(n))
    if case.weight_decay:
        state["weight"].copy_(gaussian(n, seed=50))
    for step in range(6):
        decoded = c.decode(c.encode(gaussian(n, seed=step), state))
        v = decoded + state["residual"]
        expected = largest(v, case.room(n))
        assert decoded.nonzero().flatten().tolist() == expected.tolist()
        assert torch.equal(decoded[expected], v[expected])
        assert not state["velocity"][expected].any()


def test_dgc_of_everything_is_the_gradient() -> None:
    # ratio=1 sends the velocity at once: then it is masked, so nothing is carried on.
    c, n = hipress.codec("dgc(ratio=1.0)"), 500
    state = c.init(torch.empty(n))
    for step in range(3):
        x = gaussian(n, seed=step)
        assert torch.equal(c.decode(c.encode(x, state)), x)
        assert not state["velocity"].any() and not state["residual"].any()


def test_dgc_without_momentum_loses_nothing_in_sum() -> None:
    c, n = hipress.codec("dgc(ratio=0.05, momentum=0)"), 1000
    state = c.init(torch.empty(n))
    total, arrived = (torch.zeros(n, dtype=torch.float64) for _ in range(2))
    for step in range(100):
        x = gaussian(n, seed=step) + 0.2
        total += x
        arrived += c.decode(c.encode(x, state))
    assert torch.allclose(arrived + state["residual"], total, rtol=0, atol=1e-4)
    assert (arrived != 0).double().mean() > 0.95  # a twentieth a step: everyone had a turn
