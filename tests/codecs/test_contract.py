"""The contract of every codec, on every backend: sizes, bytes, merging, state, bad numbers.

What depends on the formula of one codec (errors, bias, selection) is in `test_formulas`, damaged
frames are in `test_frames_of_codecs`. Comparisons are bit for bit unless a tolerance is named.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import hipress
from hipress.codecs import Codec, tensors
from hipress.compll.ir import MAX_NUMEL
from hipress.errors import BackendError, FrameError, HipressError, UsageError
from tests.codecs.cases import (
    BACKENDS,
    CASES,
    DGC,
    FEEDBACK,
    FLAGS,
    HEAD,
    MOMENTUM,
    NEEDS_FEEDBACK,
    PLAIN,
    SIZES,
    STATEFUL,
    WARMUP,
    WIRE,
    Case,
    compiled,
    gaussian,
    ulps,
)
from tests.codecs.generic import Feedback, Momentum
from tests.grid import thinned

FEW_ULPS = 16
"""A scale from a float sum: lanes add up in another order on each backend (4 ulp were seen)."""
FEW_CODES = 2
"""Elements of ten thousand that such a scale may round the other way: 1 in 100 payloads has one."""
NUM_STEPS = 5
MANY = 300_000
"""Elements that several threads share: 147 tiles of 2048."""
SIXTEEN = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# A kernel for another dtype costs numba 3 s: on `cpu` each program is tried with one or both.
SIXTEEN_ON_CPU = {
    "float16": ("none", "bf16", "int8", "onebit", "ef(terngrad)", "dithering", "topk", DGC[2].expr),
    "bfloat16": (
        *("fp16", "int4", "onebit", "tbq", "minmax(bits=2)", "graddrop", "topk(exact=true)"),
        *("blocktopk", "randomk"),
        MOMENTUM[0].expr,
    ),
}
SIXTEEN_CASES = [
    pytest.param(backend, case, dtype, id=f"{backend}-{case.expr}-{dtype}")
    for backend in BACKENDS
    for dtype in SIXTEEN
    for case in CASES
    if backend == "reference" or case.expr in SIXTEEN_ON_CPU[dtype]
]
SIXTEEN_QUICK = (("none", "float16"), ("onebit", "bfloat16"))
SIXTEEN_CASES = thinned(
    SIXTEEN_CASES,
    lambda p: p.values[0] == "reference" or (p.values[1].expr, p.values[2]) in SIXTEEN_QUICK,
)
# Several threads call each pass from outside, which numba compiles once more (2 s).
THREADED_QUICK = ("onebit", "topk")
THREADED = [
    c
    for c in CASES
    if c.expr
    in ("fp16", "int8", "onebit", "minmax(bits=2)", "ef(terngrad)", "topk", "topk(exact=true)",
        "dithering(levels=100, norm=l2)", "randomk", DGC[2].expr, MOMENTUM[0].expr)
]  # fmt: skip
THREADED = thinned(THREADED, lambda c: c.expr in THREADED_QUICK)
# Each variant of a program brings a copy of its decode kernels, the same text compiled again.
DECODING = [*WIRE, *(c for c in CASES if c.expr in ("onebit", "topk", MOMENTUM[0].expr))]


def ids(case: Case) -> str:
    return case.expr


every_case = pytest.mark.parametrize("case", CASES, ids=ids)
every_size = pytest.mark.parametrize("n", SIZES)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(monkeypatch, request.param)
    return str(request.param)


def use(monkeypatch: pytest.MonkeyPatch, name: str, threads: int = 1) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", name)
    monkeypatch.setenv("HIPRESS_THREADS", str(threads))


def encoded(c: Codec, x: torch.Tensor, **init: int) -> torch.Tensor:
    """A payload from fresh state."""
    return c.encode(x, c.init(x, **init))


def receiver(case: Case) -> Codec:
    """Who decodes the frames of a case: the plain codec, as an aggregator may."""
    return hipress.codec(case.plain)


def generic(case: Case) -> Codec:
    """The wrappers of a case around its plain codec, by the generic path."""
    c = hipress.codec(case.plain)
    if case.feedback:
        c = Feedback(c, decay=case.decay)
    return c if case.mu is None else Momentum(c, mu=case.mu, nesterov=case.nesterov)


def started(c: Codec, n: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """A state whose residual and momentum are not zero, as after some steps."""
    state = c.init(torch.empty(n), seed=seed, stream=5)
    for i, name in enumerate(("residual", "momentum", "velocity", "weight")):
        if name in state:
            state[name].copy_(gaussian(n, seed=90 + i))
    return state


def to_send(case: Case, x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the program sees: the gradient after momentum, with the residual, in float32."""
    g = x.float()
    if case.mu is not None:
        m = case.mu * state["momentum"] + g
        g = g + case.mu * m if case.nesterov else m
    return g + case.decay * state["residual"] if case.feedback else g


# --- every codec is here -------------------------------------------------------------------------


def uncovered(names: list[str]) -> list[str]:
    """The codecs that no case is about."""
    return [name for name in names if name not in {c.name for c in WIRE}]


def test_every_codec_has_a_case() -> None:
    assert uncovered(hipress.codecs.names()) == []
    assert uncovered(["onebit", "another"]) == ["another"]


@pytest.mark.parametrize("name", hipress.codecs.names())
def test_every_option_that_makes_a_kernel_has_a_case(name: str) -> None:
    # Numbers are arguments of a kernel; words, switches and means are other kernels.
    tried: dict[str, set[str]] = {}
    for case in (c for c in WIRE if c.name == name):
        for option, value in case.options.items():
            tried.setdefault(option, set()).add(value)
    described = hipress.codecs.describe(name).options
    numbers = {"ratio", "sample", "workers", "clip", "momentum", "weight_decay", "warmup", "tau"}
    assert set(described) - numbers <= set(tried)


@every_case
def test_expression(case: Case) -> None:
    c, plain = hipress.codec(case.expr), hipress.codec(case.plain)
    assert c.codec_hash == plain.codec_hash
    assert c.shares_stream == (case.name == "randomk")
    assert hipress.codec(c.name).name == c.name
    assert hipress.codecs.describe(case.name).feedback == (case.name in NEEDS_FEEDBACK)


@every_case
@pytest.mark.parametrize("generic", [False, True])
def test_state_names_are_the_memory_of_init(case: Case, generic: bool) -> None:
    """The names are those of the arrays that `init` makes, without seed, stream and step."""
    codec: Codec = hipress.codec(case.expr)
    if generic:
        codec = Feedback(codec)
    for one in (codec, codec.aggregator(3)):
        state = one.init(torch.zeros(5))
        assert one.state_names == tuple(name for name in state if state[name].numel() == 5)
        assert set(state) - set(one.state_names) <= {"seed", "stream", "step"}


# --- bytes ---------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("n", [*SIZES, 15, 16, 17, 99, 100, 101, 1_000_003, 2**31 + 1])
def test_wire_bytes(case: Case, n: int) -> None:
    assert hipress.codec(case.expr).wire_bytes(n) == case.wire_bytes(n)


@pytest.mark.parametrize(
    "expr, n, num_bytes",
    [
        ("none", 7, 64 + 16 + 32),
        ("fp16", 7, 64 + 16 + 16),
        ("bf16", 9, 64 + 16 + 32),
        ("onebit", 4097, 64 + 16 + 32 + 528),
        ("onebit(block=64)", 4097, 64 + 16 + 272 + 528),
        ("minmax(bits=1)", 4097, 64 + 16 + 16 + 528),
        ("minmax(bits=2)", 4097, 64 + 16 + 16 + 1040),
        ("minmax(bits=8)", 0, 64 + 16 + 16),
        ("terngrad", 4097, 64 + 16 + 16 + 1040),
        ("int8", 10007, 64 + 16 + 160 + 10016),
        ("int4", 10007, 64 + 16 + 320 + 5008),
        ("onebit(means=2)", 4097, 64 + 16 + 32 + 32 + 528),
        ("tbq", 4097, 64 + 16 + 1040),
        ("dithering", 4097, 64 + 16 + 16 + 2064),
        ("dithering(levels=8)", 4097, 64 + 16 + 16 + 4112),
        ("graddrop", 10007, 64 + 16 + 16 + 400 + 400),
        ("dgc", 10007, 64 + 16 + 16 + 48 + 48),
        ("blocktopk", 10007, 64 + 16 + 16 + 16 + 288 + 48),
        ("blocktopk(bits=1)", 10007, 64 + 16 + 16 + 288 + 32),
        ("blocktopk(k=9, block=64)", 10007, 64 + 16 + 320 + 320 + 1072 + 368),
        ("blocktopk", 0, 64 + 16),
        ("randomk", 10007, 64 + 16 + 16 + 400),
        ("topk", 10007, 64 + 16 + 16 + 400 + 400),
        ("topk(ratio=0.1)", 10007, 64 + 16 + 16 + 4000 + 4000),
        ("topk", 0, 64 + 16 + 16),
        ("topk", 1, 64 + 16 + 16 + 16 + 16),
    ],
)
def test_wire_bytes_in_numbers(expr: str, n: int, num_bytes: int) -> None:
    assert hipress.codec(expr).wire_bytes(n) == num_bytes


@every_case
@every_size
def test_payload(case: Case, n: int, backend: str) -> None:
    c, x = hipress.codec(case.expr), gaussian(n)
    before, state = x.clone(), started(c, n)
    other = {name: value.clone() for name, value in state.items()}
    payload = c.encode(x, state)
    assert payload.dtype == torch.uint8 and payload.shape == (case.wire_bytes(n),)
    assert torch.equal(x, before)

    out = torch.full((case.wire_bytes(n),), 0xA5, dtype=torch.uint8)
    given = c.encode(x, other, out=out)
    assert given.data_ptr() == out.data_ptr() and given.shape == out.shape
    assert torch.equal(given, payload)
    assert all(torch.equal(state[name], other[name]) for name in state)


@every_case
@pytest.mark.parametrize("n", [0, 7, 4097])
def test_padding_is_zero(case: Case, n: int, backend: str) -> None:
    # What is left in it would be another tensor's memory on the wire, and break determinism.
    c, x = hipress.codec(case.expr), gaussian(n)
    out = torch.full((case.wire_bytes(n),), 0xA5, dtype=torch.uint8)
    payload = c.encode(x, c.init(x), out=out).numpy()
    assert not payload[case.padding(n)].any()


@pytest.mark.parametrize("case", DECODING, ids=ids)
@every_size
def test_decode_is_the_formula(case: Case, n: int, backend: str) -> None:
    c = hipress.codec(case.expr)
    payload = encoded(c, gaussian(n))
    decoded = c.decode(payload)
    assert decoded.dtype == torch.float32 and decoded.shape == (n,)
    assert torch.equal(decoded, case.decoded(payload, n))


@every_case
def test_any_layout(case: Case, backend: str) -> None:
    c, x = hipress.codec(case.expr), gaussian(4620)
    payload = encoded(c, x)
    wide = torch.zeros(4620, 3)
    wide[:, 1] = x
    layouts = [
        x.view(11, 20, 21),
        x.view(4620, 1, 1).expand(4620, 1, 1),
        x.view(20, 231).t().contiguous().t(),
        wide[:, 1],
        x.clone().requires_grad_(),
    ]
    assert not layouts[2].is_contiguous() and not layouts[3].is_contiguous()
    for layout in layouts:
        assert torch.equal(encoded(c, layout), payload)
    assert torch.equal(encoded(c, x[0].expand(9)), encoded(c, x[:1].repeat(9)))
    assert torch.equal(encoded(c, x[0]), encoded(c, x[:1]))  # a scalar


@pytest.mark.parametrize("backend, case, dtype", SIXTEEN_CASES)
def test_16_bit_input(
    backend: str, case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, backend)
    c, n = hipress.codec(case.expr), 4097
    narrow = gaussian(n).to(SIXTEEN[dtype])
    narrow[:4] = torch.tensor([0.0, -0.0, 6e-8, -3e-5])  # subnormal in float16
    states = started(c, n), started(c, n)
    assert torch.equal(c.encode(narrow, states[0]), c.encode(narrow.float(), states[1]))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert narrow.dtype == SIXTEEN[dtype]
    assert all(s.dtype == torch.float32 for name, s in states[0].items() if s.numel() > 1)


@pytest.mark.parametrize("backend, case, dtype", [p for p in SIXTEEN_CASES if p.values[0] == "cpu"])
def test_16_bit_input_is_not_widened_in_memory(
    backend: str, case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, backend)
    seen: list[Any] = []
    asked: list[int] = []
    flat, scratch = tensors.flat, tensors.scratch
    monkeypatch.setattr(tensors, "flat", lambda x: seen.append(flat(x)) or seen[-1])
    monkeypatch.setattr(tensors, "scratch", lambda size: asked.append(size) or scratch(size))
    c, n = hipress.codec(case.expr), MANY
    x = gaussian(n).to(SIXTEEN[dtype])
    state = c.init(x)
    payload = c.encode(x, state)
    # The kernel is given the very memory of the gradient, as words of 16 bits.
    given = [array for array in seen if array.dtype == np.uint16]
    assert [(array.ctypes.data, array.size) for array in given] == [(x.data_ptr(), n)]
    acc = x.clone()
    seen.clear()
    c.decode(payload, out=acc, add=True)
    assert [(array.ctypes.data, array.dtype) for array in seen] == [(acc.data_ptr(), np.uint16)]
    # And asks for no memory to widen it into; only sorts, scans and filters have arrays there.
    if not case.sparse and case.name != "randomk":
        assert max(asked, default=0) < 2 * n


# --- merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DECODING, ids=ids)
@every_size
def test_decode_into_and_add(case: Case, n: int, backend: str) -> None:
    c = hipress.codec(case.expr)
    payload = encoded(c, gaussian(n))
    decoded = c.decode(payload)
    for alpha in (1.0, -1.0, 0.25, 1 / 3):
        # Two float32 operations, each rounded: no fused multiply-add anywhere.
        scaled = decoded * torch.tensor(alpha, dtype=torch.float32)
        acc = gaussian(n, seed=1)
        expected = acc + scaled
        assert c.decode(payload, out=acc, add=True, alpha=alpha) is acc
        assert torch.equal(acc, expected)
        assert c.decode(payload, out=acc, alpha=alpha) is acc
        assert torch.equal(acc, scaled)
    if n == 10007:
        shaped = torch.empty(10007, 1)
        assert torch.equal(c.decode(payload, out=shaped).view(-1), decoded)


@pytest.mark.parametrize(
    "backend, case, dtype",
    [p for p in SIXTEEN_CASES if p.values[0] == "reference" or p.values[1] in DECODING],
)
def test_decode_into_16_bits(
    backend: str, case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, backend)
    c, n = hipress.codec(case.expr), 4097
    payload = encoded(c, gaussian(n))
    decoded = c.decode(payload)
    out = torch.full((n,), torch.nan, dtype=SIXTEEN[dtype])
    third = torch.tensor(1 / 3, dtype=torch.float32)
    c.decode(payload, out=out, alpha=1 / 3)
    assert torch.equal(out, (third * decoded).to(SIXTEEN[dtype]))
    acc = gaussian(n, seed=1).to(SIXTEEN[dtype])
    expected = (acc.float() + third * decoded).to(SIXTEEN[dtype])
    c.decode(payload, out=acc, add=True, alpha=1 / 3)
    assert torch.equal(acc, expected)


@pytest.mark.parametrize("case", PLAIN, ids=ids)
def test_wrappers_share_the_wire(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "reference")
    plain, x = hipress.codec(case.plain), gaussian(4097)
    payload = encoded(plain, x)
    for wrapped in (f"ef({case.plain})", f"momentum(ef({case.plain}), nesterov=false)"):
        c = hipress.codec(wrapped)
        assert c.codec_hash == plain.codec_hash
        # From fresh state the first frame is the same too.
        assert torch.equal(encoded(c, x), payload)
        assert torch.equal(c.decode(payload), plain.decode(encoded(c, x)))


# --- promise 3: nothing is lost ------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.feedback], ids=ids)
@every_size
def test_nothing_is_lost(case: Case, n: int, backend: str) -> None:
    c = hipress.codec(case.expr)
    state = c.init(torch.empty(n), seed=1)
    went_in, came_out, rounding = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
    for step in range(NUM_STEPS):
        x = gaussian(n, seed=step)
        before = state["residual"].clone()
        corrected = to_send(case, x, state)
        decoded = receiver(case).decode(c.encode(x, state))
        left = corrected - decoded
        assert torch.equal(state["residual"], torch.where(left.isfinite(), left, before))
        went_in += x
        came_out += decoded
        rounding += 2.0**-24 * (corrected.abs() + left.abs())
    if (
        case.mu is None and case.decay == 1
    ):  # seen from afar: what has not come out waits in the residual
        assert ((came_out + state["residual"] - went_in).abs() <= rounding).all()


def accumulated(
    case: Case, x: torch.Tensor, state: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Velocity and accumulation of `dgc` before anything is sent, in float32, by its page."""
    mu, g = float(case.options.get("momentum", 0.9)), x.float()
    if case.clip:
        norm = g.double().norm().item()
        g = g * min(1.0, case.clip / norm if norm else 1.0)
    if case.weight_decay:
        g = g + case.weight_decay * state["weight"]
    if case.options.get("nesterov") == "true":
        u = mu * (state["velocity"] + g)
        return u, state["residual"] + u + g
    u = mu * state["velocity"] + g
    return u, state["residual"] + u


def check_dgc_step(
    case: Case, c: Codec, x: torch.Tensor, state: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What is sent and what waits are the accumulation, element by element; what was decoded."""
    u, v = accumulated(case, x, state)
    weight = state["weight"].clone() if "weight" in state else None
    decoded = c.decode(c.encode(x, state))
    sent = decoded != 0
    velocity = torch.where(sent, 0.0, u)
    if case.clip:  # the norm is a sum, made in another order
        whole = decoded + state["residual"]
        assert torch.allclose(whole, v, rtol=0, atol=FEW_ULPS * 2.0**-23 * 10)
        assert torch.allclose(state["velocity"], velocity, rtol=0, atol=FEW_ULPS * 2.0**-23 * 10)
        v = whole
    else:
        assert torch.equal(state["velocity"], velocity)
    # No rounding here: an element goes as it is, or stays as it is.
    assert torch.equal(decoded, torch.where(sent, v, 0.0))
    assert torch.equal(state["residual"], torch.where(sent, 0.0, v))
    assert weight is None or torch.equal(state["weight"], weight)
    return decoded


@pytest.mark.parametrize("case", DGC, ids=ids)
@every_size
def test_nothing_is_lost_in_dgc(case: Case, n: int, backend: str) -> None:
    c, state = hipress.codec(case.expr), started(hipress.codec(case.expr), n)
    for step in range(NUM_STEPS):
        check_dgc_step(case, c, gaussian(n, seed=step), state)


def test_nothing_is_lost_over_the_phases_of_dgc(backend: str) -> None:
    warm, n = hipress.codec(WARMUP), 4097
    state = warm.init(torch.empty(n))
    counts = []
    for step in range(6):
        c = warm.phase(step)
        case = Case(expr=c.name, plain=c.name)
        counts.append(int(check_dgc_step(case, c, gaussian(n, seed=step), state).count_nonzero()))
        assert c.wire_bytes(n) <= warm.max_wire_bytes(n)
        assert c.wire_bytes(n) == case.wire_bytes(n)
    # Four steps over two ratios above 5 %, then 5 %; the threshold of a sample may send fewer.
    rooms = [math.floor(share * n) for share in (0.25, 0.25, 0.0625, 0.0625, 0.05, 0.05)]
    for count, room in zip(counts, rooms, strict=True):
        assert 0.8 * room <= count <= room


@pytest.mark.parametrize("case", STATEFUL, ids=ids)
@every_size
def test_fused_equals_generic(case: Case, n: int, backend: str) -> None:
    c, oracle = hipress.codec(case.expr), generic(case)
    assert not isinstance(c, Feedback | Momentum)
    compare_with_oracle(case, c, oracle, n, tolerant=case.summed and backend == "cpu")


@pytest.mark.parametrize("case", FEEDBACK, ids=ids)
@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_momentum_equals_generic(
    case: Case, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "reference")  # on `cpu`, each of these would be compiled for this test alone
    c = hipress.codec(f"momentum({case.expr}, mu=0.7, nesterov={str(nesterov).lower()})")
    oracle = Momentum(Feedback(hipress.codec(case.plain)), mu=0.7, nesterov=nesterov)
    compare_with_oracle(case, c, oracle, 4097, tolerant=False)


def agree(
    case: Case, payload: torch.Tensor, expected: torch.Tensor, n: int
) -> tuple[np.ndarray, float]:
    """Two payloads hold the same, but for sums and what hangs on their last bits.

    Returns:
        Which elements have the same code, and the largest scale.
    """
    found, right = case.parts(payload, n), case.parts(expected, n)
    alike, scale = np.ones(n, bool), 0.0
    for name in right:
        if right[name].dtype == np.float32:  # here 0 and -0 count as one number
            tolerance = FEW_ULPS if case.summed else 0
            assert ulps(torch.tensor(found[name]), torch.tensor(right[name])) <= tolerance
            scale = max(scale, float(np.abs(right[name]).max(initial=0)))
        elif name == "code" and case.rounds and case.summed:
            # One element in a million is rounded up or down by the last bit of the scale.
            alike = found[name] == right[name]
            assert (~alike).sum() <= FEW_CODES
        else:
            assert (found[name] == right[name]).all()
    return alike, scale


def compare_with_oracle(case: Case, c: Codec, oracle: Codec, n: int, *, tolerant: bool) -> None:
    """Payload and state step by step, from the same state: a few ulp only where a scale is a sum.

    `tolerant` is for scales that are sums, on `cpu`: there codes must agree (see `agree`), scales
    to FEW_ULPS, and residuals to that many ulps of the scale.
    """
    fused, slow = (codec.init(torch.empty(n), seed=7, stream=2) for codec in (c, oracle))
    assert fused.keys() == slow.keys()
    for step in range(NUM_STEPS):
        x = gaussian(n, seed=step)
        payload, expected = c.encode(x, fused), oracle.encode(x, slow)
        if not tolerant:
            assert torch.equal(payload, expected)
            assert all(torch.equal(fused[name], slow[name]) for name in slow)
            continue
        assert torch.equal(payload[:HEAD], expected[:HEAD])
        alike, scale = agree(case, payload, expected, n)
        if case.feedback:
            atol = FEW_ULPS * 2.0**-23 * scale
            left = [state["residual"][torch.from_numpy(alike)] for state in (fused, slow)]
            assert torch.allclose(*left, rtol=0, atol=atol)
        for name in slow:
            if name != "residual":
                assert torch.equal(fused[name], slow[name])
            slow[name].copy_(fused[name])  # so that each step is compared on its own


# --- determinism ---------------------------------------------------------------------------------


@every_case
def test_same_seed_same_bytes(case: Case, backend: str) -> None:
    c, n = hipress.codec(case.expr), 4097
    runs = []
    for _ in range(2):
        state = c.init(torch.empty(n), seed=11, stream=4)
        runs.append([c.encode(gaussian(n, seed=step), state) for step in range(3)])
        assert ("step" in state) == case.random
        if case.random:
            assert {name: state[name].item() for name in ("seed", "stream", "step")} == {
                "seed": 11, "stream": 4, "step": 3,
            }  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("case", [c for c in CASES if c.random], ids=ids)
def test_seed_stream_and_step_matter(case: Case, backend: str) -> None:
    # A sampled threshold needs many elements before two of them hardly ever choose alike.
    c, x = hipress.codec(case.expr), gaussian(MANY if case.sampled else 1000)
    second = c.init(x)
    second["step"] += 1
    states = [
        c.init(x),
        c.init(x, seed=1),
        c.init(x, seed=2**32),  # the upper half of the seed counts too
        c.init(x, seed=-1),
        c.init(x, stream=1),
        second,
    ]
    bodies = [bytes(c.encode(x, state)[HEAD:].numpy()) for state in states]
    assert len(set(bodies)) == len(bodies)
    assert [int(state["step"]) for state in states] == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("case", THREADED, ids=ids)
def test_number_of_threads_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    c, x = hipress.codec(case.expr), gaussian(MANY)
    runs = []
    for num_threads in (1, 2, 3):
        use(monkeypatch, "cpu", num_threads)
        state = started(c, MANY)
        payload = c.encode(x, state)
        acc = gaussian(MANY, seed=1)
        c.decode(payload, out=acc, add=True, alpha=0.5)
        runs.append([payload, c.decode(payload), acc, *state.values()])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("case", THREADED, ids=ids)
def test_calls_from_several_threads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # DDP's hooks and a user's own threads may be inside the same codec at once.
    use(monkeypatch, "cpu", 2)
    c, num_calls = hipress.codec(case.expr), 8

    def call(i: int) -> list[torch.Tensor]:
        x = gaussian(70_000 + 1000 * i, seed=i)
        state = started(c, len(x), seed=i)
        payload = c.encode(x, state)
        return [payload, c.decode(payload), *state.values()]

    expected = [call(i) for i in range(num_calls)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, range(num_calls)))
    for ours, theirs in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- bad numbers ---------------------------------------------------------------------------------

BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
PLACES = (0, 5003, 10006)


def poisoned(n: int, bad: float, place: int) -> torch.Tensor:
    x = gaussian(n)
    x[place] = bad
    return x


def stays(case: Case, n: int, place: int) -> slice:
    """The elements that share a scale with the bad one: their residual must stay as it was."""
    if case.name in ("int8", "int4", "onebit"):
        start = place // case.block * case.block
        return slice(start, start + case.block)
    return slice(0, n) if case.rounds else slice(place, place + 1)


@every_case
@BAD
def test_bad_number_reaches_every_element(case: Case, bad: float, backend: str) -> None:
    c, n = hipress.codec(case.expr), 10007
    for place in PLACES:
        state = started(c, n)
        payload = c.encode(poisoned(n, bad, place), state)
        assert payload[FLAGS] == 1
        acc = gaussian(n)
        assert c.decode(payload).isnan().all()
        assert c.decode(payload, out=acc, add=True, alpha=0.5).isnan().all()
        assert all(value.isfinite().all() for value in state.values())

        clean = c.encode(gaussian(n, seed=1), state)
        assert clean[FLAGS] == 0
        assert receiver(case).decode(clean).isfinite().all()


@pytest.mark.parametrize("case", [c for c in CASES if c.feedback], ids=ids)
@BAD
def test_bad_number_leaves_its_residual(case: Case, bad: float, backend: str) -> None:
    c, n = hipress.codec(case.expr), 10007
    for place in PLACES:
        for codec in (c, generic(case)):
            state = started(codec, n)
            before = state["residual"].clone()
            codec.encode(poisoned(n, bad, place), state)
            unit = stays(case, n, place)
            assert torch.equal(state["residual"][unit], before[unit])


@pytest.mark.parametrize("case", [c for c in CASES if c.feedback], ids=ids)
@BAD
def test_nothing_is_lost_beside_a_bad_number(case: Case, bad: float, backend: str) -> None:
    # Seen without the flag, which a receiver never does: elements that were sent are accounted for.
    c, n = hipress.codec(case.expr), 10007
    state = started(c, n)
    x, before = poisoned(n, bad, 5003), state["residual"].clone()
    corrected = to_send(case, x, state)
    payload = c.encode(x, state)
    payload[FLAGS] = 0
    left = corrected - receiver(case).decode(payload)
    untouched = torch.equal(state["residual"], before)
    assert untouched or torch.equal(state["residual"], torch.where(left.isfinite(), left, before))


@pytest.mark.parametrize("case", MOMENTUM, ids=ids)
@BAD
def test_bad_number_stays_out_of_momentum(case: Case, bad: float, backend: str) -> None:
    c, n = hipress.codec(case.expr), 10007
    state = started(c, n)
    x, before = poisoned(n, bad, 5003), state["momentum"].clone()
    c.encode(x, state)
    fresh = case.mu * before + x
    assert torch.equal(state["momentum"], torch.where(fresh.isfinite(), fresh, before))
    assert state["momentum"][5003] == before[5003]


@pytest.mark.parametrize("case", DGC, ids=ids)
@BAD
def test_bad_number_stays_out_of_dgc(case: Case, bad: float, backend: str) -> None:
    c, n = hipress.codec(case.expr), 10007
    for place in PLACES:
        state = started(c, n)
        before = {name: state[name].clone() for name in case.states}
        x = poisoned(n, bad, place)
        payload = c.encode(x, state)
        payload[FLAGS] = 0
        sent = c.decode(payload) != 0
        assert all(state[name].isfinite().all() for name in case.states)
        assert state["residual"][place] == before["residual"][place]
        # An infinity may be the largest element: it is sent, and its velocity masked like any.
        assert state["velocity"][place] in (before["velocity"][place], 0)
        if not case.clip:  # a norm is about all elements
            u, v = accumulated(case, x, before)
            others = torch.arange(n) != place
            left = torch.where(sent, 0.0, v)[others]
            assert torch.equal(state["residual"][others], left)
            assert torch.equal(state["velocity"][others], torch.where(sent, 0.0, u)[others])


@pytest.mark.parametrize("case", compiled(FEEDBACK), ids=ids)
def test_backends_leave_the_same_residual_beside_a_bad_number(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, left = 10007, {}
    for name in BACKENDS:
        use(monkeypatch, name)
        c = hipress.codec(case.expr)
        state = started(c, n)
        c.encode(poisoned(n, math.nan, 5003), state)
        left[name] = state["residual"]
    atol = FEW_ULPS * 2.0**-23 * 10 if case.summed else 0
    assert torch.allclose(left["cpu"], left["reference"], rtol=0, atol=atol)


# --- one wire format -----------------------------------------------------------------------------

INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gaussian": lambda x: x,
    "zeros": torch.zeros_like,
    "minus zeros": lambda x: -torch.zeros_like(x),
    "sparse": lambda x: x * (x.abs() > 2.5),
    "ties": lambda x: x.round(),
    "subnormal": lambda x: x * 1e-40,
    "large": lambda x: x * 1e20,
    "one sided": lambda x: x.abs() + 1,
}


@pytest.mark.parametrize("case", compiled(CASES), ids=ids)
@pytest.mark.parametrize("kind", INPUTS)
def test_backends_agree(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = hipress.codec(case.expr)
    for n in (1, 7, 4097, 10007):
        x, payloads, states = INPUTS[kind](gaussian(n)), {}, {}
        if kind == "large" and case.options.get("norm") == "l2":
            x *= 1e-5  # the squares of larger ones overflow, as its page says
        for name in BACKENDS:
            use(monkeypatch, name)
            states[name] = c.init(x, seed=3)
            payloads[name] = c.encode(x, states[name])
        slow, fast = payloads["reference"], payloads["cpu"]
        # Either backend reads the other's frames, to the same bits.
        for payload in (slow, fast):
            decoded = []
            for name in BACKENDS:
                use(monkeypatch, name)
                decoded.append(receiver(case).decode(payload))
            assert torch.equal(*decoded)
        assert torch.equal(slow[:HEAD], fast[:HEAD])
        agree(case, slow, fast, n)
        if not case.summed:
            assert all(torch.equal(states["cpu"][s], states["reference"][s]) for s in states["cpu"])


# --- state ---------------------------------------------------------------------------------------


@every_case
def test_state_is_tensors_and_saves(case: Case, backend: str) -> None:
    c, n = hipress.codec(case.expr), 4097
    state = c.init(gaussian(n), seed=5, stream=6)
    assert set(state) == case.states | ({"seed", "stream", "step"} if case.random else set())
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    c.encode(gaussian(n), state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    x = gaussian(n, seed=1)
    assert torch.equal(c.encode(x, loaded), c.encode(x, state))
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    if not state:
        assert torch.equal(c.encode(x), c.encode(x, state))


@pytest.mark.parametrize("case", compiled(CASES), ids=ids)
def test_step_is_in_the_header(case: Case) -> None:
    c, x = hipress.codec(case.expr), gaussian(7)
    state = c.init(x)
    c.encode(x, state)
    step = int.from_bytes(bytes(c.encode(x, state)[8:16].numpy()), "little")
    assert step == (1 if case.random else 0)


def test_state_follows_its_owner() -> None:
    # State moves by name: a plain dict may hold more than the codec asks for.
    c, x = hipress.codec("onebit"), gaussian(7)
    state = {**c.init(x), "other": torch.zeros(3)}
    c.encode(x, state)
    assert torch.equal(state["other"], torch.zeros(3))


# --- what is refused -----------------------------------------------------------------------------

X = torch.ones(10)


def refused(kind: type[HipressError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    "expr", ["onebit", "terngrad", "topk(exact=true)", "momentum(fp16)", "ef(none)"]
)
def test_state_left_out(expr: str) -> None:
    c = hipress.codec(expr)
    assert refused(UsageError, lambda: c.encode(X)) == (
        f"{c.name} keeps state; make it once with state = c.init(x) and pass it: "
        "c.encode(x, state)."
    )


@pytest.mark.parametrize(
    "expr, key",
    [("onebit", "residual"), ("momentum(fp16)", "momentum"), ("terngrad", "seed"),
     ("terngrad", "stream"), ("ef(minmax)", "step"), ("ef(minmax)", "residual")],
)  # fmt: skip
def test_state_without_a_key(expr: str, key: str) -> None:
    c = hipress.codec(expr)
    state = c.init(X)
    del state[key]
    assert refused(UsageError, lambda: c.encode(X, state)) == (
        f"the state has no {key!r}; make it with {c.name}.init(x)."
    )


@pytest.mark.parametrize(
    "wrong, found",
    [
        (torch.zeros(9), "9 elements of torch.float32"),
        (torch.zeros(11), "11 elements of torch.float32"),
        (torch.zeros(10, dtype=torch.float64), "10 elements of torch.float64"),
        (torch.zeros(10, dtype=torch.bfloat16), "10 elements of torch.bfloat16"),
    ],
)
@pytest.mark.parametrize("key, expr", [("residual", "onebit"), ("momentum", "momentum(fp16)")])
def test_state_of_another_gradient(expr: str, key: str, wrong: torch.Tensor, found: str) -> None:
    assert refused(UsageError, lambda: hipress.codec(expr).encode(X, {key: wrong})) == (
        f"state {key!r} has {found}; the gradient needs 10 of torch.float32: make a new state "
        "with init(x)."
    )


def test_state_with_gaps() -> None:
    state = {"residual": torch.zeros(20)[::2]}
    with pytest.raises(UsageError, match="state 'residual' .*: make a new state with init"):
        hipress.codec("onebit").encode(X, state)


def test_a_refused_call_changes_nothing() -> None:
    c = hipress.codec("ef(terngrad)")
    state = c.init(X)
    refused(UsageError, lambda: c.encode(X, state, out=torch.empty(3, dtype=torch.uint8)))
    refused(UsageError, lambda: c.encode(torch.ones(9), state))
    assert state["step"] == 0 and not state["residual"].any()


@pytest.mark.parametrize(
    "x, problem",
    [
        (X.double(), "has dtype float64; a codec takes float32, float16, bfloat16: convert it "
         "first."),
        (X.int(), "has dtype int32; a codec takes float32, float16, bfloat16: convert it first."),
        (X.bool(), "has dtype bool; a codec takes float32, float16, bfloat16: convert it first."),
        (X.to(torch.complex64),
         "has dtype complex64; a codec takes float32, float16, bfloat16: convert it first."),
        (X.to_sparse(), "is sparse (torch.sparse_coo); a codec takes dense tensors."),
    ],
)  # fmt: skip
def test_gradient_that_no_codec_takes(x: torch.Tensor, problem: str) -> None:
    assert refused(UsageError, lambda: hipress.codec("none").encode(x)) == f"the gradient {problem}"


def test_another_device() -> None:
    message = refused(BackendError, lambda: hipress.codec("none").encode(X.to("meta")))
    assert message == "the gradient is on meta; codecs run on CPU and CUDA tensors: use x.cpu()."


@pytest.mark.parametrize(
    "out, found",
    [
        (torch.empty(127, dtype=torch.uint8), "127 elements of torch.uint8"),
        (torch.empty(129, dtype=torch.uint8), "129 elements of torch.uint8"),
        (torch.empty(128, dtype=torch.int8), "128 elements of torch.int8"),
        (torch.empty(256, dtype=torch.uint8)[::2], "128 elements of torch.uint8"),
    ],
)
def test_encode_out(out: torch.Tensor, found: str) -> None:
    assert refused(UsageError, lambda: hipress.codec("none").encode(X, out=out)) == (
        f"out has {found}; encode needs 128 contiguous bytes: "
        "torch.empty(c.wire_bytes(x.numel()), dtype=torch.uint8)."
    )


def test_encode_out_off_its_boundary() -> None:
    out = torch.empty(256, dtype=torch.uint8)
    start = 1 + -out.data_ptr() % 16
    assert refused(
        UsageError, lambda: hipress.codec("none").encode(X, out=out[start : start + 128])
    ) == ("out does not start on a multiple of 16 bytes; allocate it.")


@pytest.mark.parametrize(
    "out, problem",
    [
        (torch.empty(9), "out has 9 elements; the frame holds 10."),
        (torch.empty(11), "out has 11 elements; the frame holds 10."),
        (torch.empty(20)[::2], "out is not contiguous; decode into a contiguous tensor and copy."),
        (torch.empty(10, dtype=torch.float64), "out has dtype float64; a codec takes float32, "
         "float16, bfloat16: convert it first."),
        (torch.empty(10, dtype=torch.int64), "out has dtype int64; a codec takes float32, "
         "float16, bfloat16: convert it first."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("add", [False, True])
def test_decode_out(out: torch.Tensor, problem: str, add: bool) -> None:
    c = hipress.codec("none")
    payload = c.encode(X)
    assert refused(UsageError, lambda: c.decode(payload, out=out, add=add)) == problem


def test_decode_into_sparse() -> None:
    c = hipress.codec("none")
    refused(UsageError, lambda: c.decode(c.encode(X), out=torch.zeros(10).to_sparse()))


def test_decode_add_without_out() -> None:
    c = hipress.codec("none")
    assert refused(UsageError, lambda: c.decode(c.encode(X), add=True)) == (
        "decode was given add=True and no out; give out=, the tensor to add to."
    )


@pytest.mark.parametrize("n", [-1, MAX_NUMEL + 1])
def test_wire_bytes_out_of_range(n: int) -> None:
    assert refused(UsageError, lambda: hipress.codec("onebit").wire_bytes(n)) == (
        f"the gradient has {n} elements; a codec takes 0 to {MAX_NUMEL}."
    )


@pytest.mark.parametrize(
    "payload, found",
    [(torch.zeros(128), "dtype torch.float32 and 1 dimensions"),
     (torch.zeros(8, 16, dtype=torch.uint8), "dtype torch.uint8 and 2 dimensions")],
)  # fmt: skip
def test_no_payload(payload: torch.Tensor, found: str) -> None:
    assert refused(FrameError, lambda: hipress.codec("none").decode(payload)) == (
        f"a payload is a 1-D uint8 tensor; this has {found}."
    )


def test_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "gpuu")
    with pytest.raises(UsageError, match="HIPRESS_BACKEND is 'gpuu'"):
        hipress.codec("none").encode(X)
