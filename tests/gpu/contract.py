"""What the gpu backend promises, for every codec: the tests that `test_on_gpu` runs on a GPU and
`test_interpreted` on a CPU, by Triton's interpreter.

Frames, states and decoded gradients are compared with those of a backend on the CPU, section by
section of the documented layout. They are equal bit for bit, but where a scale is a sum of floats.
One test for each kind of frame compares with `cpu`, the others with `reference`, which other tests
hold against `cpu` and which need not be compiled.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings

import hipress
from hipress.codecs import gpu
from hipress.codecs.program import ProgramCodec
from hipress.compll.backends.gpu import runtime
from hipress.compll.build import read_program
from hipress.compll.passes.derive import PLAIN, Variant
from hipress.compll.passes.schedule import NotFusable
from hipress.compll.tools.emit import Package
from hipress.errors import BackendError, FrameError, UsageError
from tests.codecs.cases import (
    CASES,
    DGC,
    FLAGS,
    HEAD,
    MOMENTUM,
    WIRE,
    Case,
    compiled,
    gaussian,
    ulps,
)
from tests.codecs.damage import damaged
from tests.compll.block_programs import BODIES
from tests.compll.block_programs import program as block_program
from tests.compll.generate import Program, programs
from tests.compll.harness import MU_VALUE, bound
from tests.compll.length_programs import FILTERED, LENGTHS, OTHERS, RANDOM_K, other
from tests.compll.state_programs import DECODE as STATE_DECODE
from tests.compll.state_programs import STATES
from tests.grid import thinned

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SIZES = (1, 7, 4096, 4097, 5003) if INTERPRETED else (1, 7, 4096, 4097, 5003, 1_000_003)
"""A tile has 4096 elements: less than one, one, one and a little."""
NUM_STEPS = 2 if INTERPRETED else 4
FEW_ULPS = 16
"""A scale from a float sum: lanes add up in another order (4 ulp were seen)."""
FEW_CODES = 2
"""Elements that such a scale may round the other way: 1 in 100 payloads has one."""
GUARD = 8192
"""Elements on both sides of an output that a kernel must leave alone: two tiles."""
SIXTEEN = {"float16": torch.float16, "bfloat16": torch.bfloat16}
NARROW = {
    "float16": ("none", "bf16", "int8", "ef(terngrad)", "dithering", "topk", DGC[2].expr),
    "bfloat16": (
        *("fp16", "int4", "onebit", "tbq", "minmax(bits=2)", "graddrop", "topk(exact=true)"),
        *("blocktopk", "randomk"),
        MOMENTUM[0].expr,
    ),
}
"""Each program is tried with one of the two, interpreted; on a GPU with both."""


@dataclass(frozen=True)
class Pair:
    """One codec, on both backends."""

    cpu: ProgramCodec
    gpu: ProgramCodec


def pair(expr: str, beside: str = "reference") -> Pair:
    made = hipress.codec(expr)
    assert isinstance(made, ProgramCodec)
    return Pair(*(on(made, backend) for backend in (beside, "gpu")))


def on(codec: ProgramCodec, backend: str) -> ProgramCodec:
    """The same codec on a given backend, whatever the settings say."""
    return ProgramCodec(
        codec.bound, name=codec.name, variant=codec.variant, mu=codec.mu, backend=backend
    )


def started(c: ProgramCodec, n: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """A state whose residual and momentum are not zero, as after some steps; on the CPU."""
    state = c.init(torch.empty(n), seed=seed, stream=5)
    for i, name in enumerate(("residual", "momentum", "velocity", "weight")):
        if name in state:
            state[name].copy_(gaussian(n, seed=90 + i))
    return state


def moved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state on the device, apart from its original."""
    return {name: value.to(DEVICE, copy=True) for name, value in state.items()}


def agree(case: Case, found: torch.Tensor, right: torch.Tensor, n: int) -> tuple[Any, float]:
    """Two frames hold the same, but for sums and what hangs on their last bits.

    Returns:
        Which elements have the same code, and the largest scale.
    """
    assert torch.equal(found[:HEAD], right[:HEAD])
    alike, scale = np.ones(n, bool), 0.0
    if not case.summed:
        assert torch.equal(found, right)
        return alike, scale
    have, want = case.parts(found, n), case.parts(right, n)
    for name in want:
        if want[name].dtype == np.float32:
            assert ulps(torch.tensor(have[name]), torch.tensor(want[name])) <= FEW_ULPS, name
            scale = max(scale, float(np.abs(want[name]).max(initial=0)))
        elif name == "code" and case.rounds:
            alike = have[name] == want[name]
            assert (~alike).sum() <= FEW_CODES
        else:
            assert (have[name] == want[name]).all(), name
    assert not found.numpy()[case.padding(n)].any()
    return alike, scale


def same_states(
    case: Case,
    found: dict[str, torch.Tensor],
    right: dict[str, torch.Tensor],
    alike: Any = slice(None),
    scale: float = 0.0,
) -> None:
    """States are equal; where they follow a summed scale, to some ulps of it."""
    assert found.keys() == right.keys()
    for name, want in right.items():
        have = found[name].cpu()
        if case.summed and name in ("residual", "velocity"):
            atol = FEW_ULPS * 2.0**-23 * max(scale, 4.0 if case.name == "dgc" else 0.0)
            assert torch.allclose(have[alike], want[alike], rtol=0, atol=atol), name
        else:
            assert torch.equal(have, want), name


def both_decode(c: Pair, payload: torch.Tensor, n: int) -> None:
    """One frame means the same to both, to the bit: decoded, scaled, added."""
    there = payload.to(DEVICE)
    assert torch.equal(c.gpu.decode(there).cpu(), c.cpu.decode(payload))
    total = gaussian(n, seed=1)
    sums = total.to(DEVICE, copy=True)
    for alpha in (1 / 3, -1.0):
        c.cpu.decode(payload, out=total, add=True, alpha=alpha)
        assert c.gpu.decode(there, out=sums, add=True, alpha=alpha) is sums
        assert torch.equal(sums.cpu(), total)
    c.cpu.decode(payload, out=total, alpha=1 / 3)
    c.gpu.decode(there, out=sums, alpha=1 / 3)
    assert torch.equal(sums.cpu(), total)
    assert torch.equal(there.cpu(), payload)


@pytest.fixture(autouse=True)
def dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may rely on what new memory holds; on a GPU it holds something anyway."""
    if INTERPRETED:
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *args, **more: empty(*args, **more).fill_(99))


def ids(value: Any) -> str:
    return value.expr if isinstance(value, Case) else str(value)


every_case = pytest.mark.parametrize("case", compiled(CASES), ids=ids)
every_kind_of_frame = pytest.mark.parametrize("case", compiled(WIRE), ids=ids)


# --- frames and states ---------------------------------------------------------------------------


@every_case
def test_frames_states_and_gradients_are_those_of_the_cpu(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = pair(case.expr, "cpu" if case in WIRE else "reference")
    # Wrappers add to the passes of a program: its sizes need not be tried again.
    for n in SIZES if case in WIRE or not INTERPRETED else (7, SIZES[-1]):
        if n == 5003:  # full tiles and the rest in two launches, as many tiles are started
            monkeypatch.setattr(runtime, "MIN_SPLIT", 1)
        state = started(c.cpu, n)
        for step in range(NUM_STEPS if n == SIZES[-1] else 1):
            x, there = gaussian(n, seed=step), moved(state)
            before = x.to(DEVICE, copy=True)
            out = torch.full((case.wire_bytes(n),), 0xA5, dtype=torch.uint8, device=DEVICE)
            payload = c.gpu.encode(before, there, out=out)
            assert payload.data_ptr() == out.data_ptr() and torch.equal(before.cpu(), x)
            right = c.cpu.encode(x, state)
            alike, scale = agree(case, payload.cpu(), right, n)
            same_states(case, there, state, alike, scale)
        if case in WIRE:  # decode is the same for every wrapper
            both_decode(c, right, n)
            if not torch.equal(payload.cpu(), right):
                both_decode(c, payload.cpu(), n)


@every_kind_of_frame
def test_an_empty_gradient(case: Case) -> None:
    c, x = pair(case.expr), torch.empty(0)
    state, there = c.cpu.init(x), c.gpu.init(x.to(DEVICE))
    for _ in range(2):  # the step is in the header
        payload = c.gpu.encode(x.to(DEVICE), there)
        assert torch.equal(payload.cpu(), c.cpu.encode(x, state))
    assert c.gpu.decode(payload).shape == (0,)
    assert c.gpu.decode(payload, out=torch.empty(0, device=DEVICE), add=True).shape == (0,)


KINDS = {
    "zeros": torch.zeros_like,
    "minus zeros": lambda x: -torch.zeros_like(x),
    "ties": torch.round,
    "subnormal": lambda x: x * 1e-40,
    "large": lambda x: x * 1e13,
    "one sided": lambda x: x.abs() + 1,
}


@every_kind_of_frame
def test_gradients_that_codecs_stumble_on(case: Case) -> None:
    c, n = pair(case.expr), 300
    kinds = list(KINDS)
    for kind in kinds[WIRE.index(case) % 2 :: 2] if INTERPRETED else kinds:  # half of them each
        x = KINDS[kind](gaussian(n))
        state = c.cpu.init(x, seed=3)
        there = moved(state)
        payload = c.gpu.encode(x.to(DEVICE), there).cpu()
        right = c.cpu.encode(x, state)
        zeros = kind in ("zeros", "minus zeros", "ties")  # which of two zeros is a maximum is free
        if not (zeros and unsigned(payload, case, n) == unsigned(right, case, n)):
            agree(case, payload, right, n)
        assert torch.equal(c.gpu.decode(right.to(DEVICE)).cpu(), c.cpu.decode(right))


DIVISORS = {
    "usual": (1.0, 1e-3),
    "tiny elements": (1.0, 2.0**-118),
    "tiny": (2.0**-70, 2.0**-90),
    "subnormal": (2.0**-130, 2.0**-140),
    "large": (2.0**40, 1.0),
    "largest": (2.0**127, 2.0**100),
}
"""The largest element, by which all are divided, and the size of others."""


@pytest.mark.parametrize("expr", ["minmax(bits=2)", "dithering(levels=2)"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_and_what_divides_them_may_be_of_any_size(expr: str, dtype: str) -> None:
    """Tiles are divided in a quick way or in the usual one; nobody can tell which."""
    c, n = pair(expr), 3 * 4096 + 77
    for most, size in DIVISORS.values():
        x = gaussian(n).clamp(-4, 4) * (most / 5)
        x[:4096:3] = 0.0
        x[4096:8192] *= size / most  # a tile of elements that are all of another size
        x[8192 + 5 : 8192 + 9] = torch.tensor([most, -most, size, -0.0])
        x = x.to(getattr(torch, dtype))
        state = c.cpu.init(x, seed=4)
        payload = c.gpu.encode(x.to(DEVICE), moved(state)).cpu()
        assert torch.equal(payload, c.cpu.encode(x.float(), state)), (most, size)


def unsigned(payload: torch.Tensor, case: Case, n: int) -> dict[str, list[Any]]:
    """The sections of a frame, 0 and -0 as one number."""
    return {name: (part + 0).tolist() for name, part in case.parts(payload, n).items()}


NARROW_CASES = [
    pytest.param(case, dtype, id=f"{case.expr}-{dtype}")
    for dtype in SIXTEEN
    for case in CASES
    if case.expr in NARROW[dtype] or (not INTERPRETED and case.expr in sum(NARROW.values(), ()))
]


@pytest.mark.parametrize(
    "case, dtype", thinned(NARROW_CASES, lambda p: p.values[0].expr in ("topk", "onebit"))
)
def test_16_bits(case: Case, dtype: str) -> None:
    c, n = pair(case.expr), 4097
    narrow = gaussian(n).to(SIXTEEN[dtype])
    narrow[:4] = torch.tensor([0.0, -0.0, 6e-8, -3e-5])  # subnormal in float16
    state = started(c.cpu, n)
    wide, there = moved(state), moved(state)
    payload = c.gpu.encode(narrow.to(DEVICE), there)
    assert torch.equal(payload, c.gpu.encode(narrow.to(DEVICE).float(), wide))
    assert all(torch.equal(there[name], wide[name]) for name in there)
    alike, scale = agree(case, payload.cpu(), c.cpu.encode(narrow.float(), state), n)
    same_states(case, there, state, alike, scale)

    decoded, third = c.gpu.decode(payload), torch.tensor(1 / 3)
    acc = gaussian(n, seed=1).to(DEVICE, SIXTEEN[dtype])
    # Two float32 operations, each rounded, then one rounding to 16 bits.
    expected = (acc.float() + third.to(DEVICE) * decoded).to(SIXTEEN[dtype])
    c.gpu.decode(payload, out=acc, add=True, alpha=1 / 3)
    assert torch.equal(acc, expected)
    c.gpu.decode(payload, out=acc, alpha=1 / 3)
    assert torch.equal(acc, (third.to(DEVICE) * decoded).to(SIXTEEN[dtype]))


@pytest.mark.parametrize(
    "expr",
    [
        "ef(topk(ratio=0.05), residual=int8)",
        "ef(blocktopk(k=4, block=256), decay=0.5, residual=bf16)",
        "momentum(ef(int4, residual=int8), mu=0.5)",
        "ef(terngrad(clip=0), residual=int8)",
    ],
)
def test_residuals_in_fewer_bits(expr: str) -> None:
    made = hipress.codec(expr)
    assert isinstance(made, ProgramCodec)
    found = []
    for backend, device in (("reference", "cpu"), ("cpu", "cpu"), ("gpu", DEVICE)):
        c = made.on_backend(backend)
        bulk = c.bulk([300, 7])
        state = c.init(torch.empty(1500, device=device), seed=7, stream=3)
        many = bulk.init(torch.empty(bulk.numel, device=device))
        frames = []
        for step in range(3):
            x = gaussian(1500, seed=step).mul_(10.0**step).to(device)
            frames += [c.encode(x, state), bulk.encode(x[: bulk.numel], many)]
        frames.append(c.merge([frames[-2]], c, 1500, state))
        held = [*frames, *state.values(), *many.values()]
        found.append([one.cpu().reshape(-1).view(torch.uint8) for one in held])
    for right, *others in zip(*found, strict=True):
        assert all(torch.equal(right, other) for other in others)


def test_any_layout_of_the_gradient() -> None:
    c, x = pair("onebit").gpu, gaussian(4620).to(DEVICE)
    payload = c.encode(x, c.init(x))
    wide = torch.zeros(4620, 3, device=DEVICE)
    wide[:, 1] = x
    for layout in (x.view(20, 231).t().contiguous().t(), wide[:, 1], x.view(11, 20, 21)):
        assert torch.equal(c.encode(layout, c.init(layout)), payload)
    offset = torch.zeros(4621, device=DEVICE)[1:]  # on a multiple of 4 bytes, not of 16
    offset.copy_(x)
    assert torch.equal(c.encode(offset, c.init(offset)), payload)


def test_the_ratio_of_learning_rates_scales_the_residual() -> None:
    c, n = pair("onebit(block=64)"), 300
    state = {**started(c.cpu, n), "lr_ratio": torch.tensor(0.25)}
    there = moved(state)
    payload = c.gpu.encode(gaussian(n).to(DEVICE), there)
    right = c.cpu.encode(gaussian(n), state)
    case = next(case for case in CASES if case.expr == "onebit(block=64)")
    alike, scale = agree(case, payload.cpu(), right, n)
    same_states(case, there, state, alike, scale)


def test_a_ratio_of_learning_rates_is_one_number() -> None:
    c, x = pair("onebit(block=64)").gpu, gaussian(300).to(DEVICE)
    frames = []
    for ratio in (0.25, torch.tensor(0.25)):
        state: dict[str, Any] = {**moved(started(c, 300)), "lr_ratio": ratio}
        frames.append(c.encode(x, state))
    assert torch.equal(*frames)
    state["lr_ratio"] = torch.tensor([0.25, 0.5], device=DEVICE)
    with pytest.raises(UsageError, match="'lr_ratio' is .*; it must be one number"):
        c.encode(x, state)


def test_a_seed_is_a_tensor_of_the_state() -> None:
    c, x = pair("terngrad").gpu, gaussian(300).to(DEVICE)
    state: dict[str, Any] = c.init(x)
    state["seed"] = 7
    with pytest.raises(UsageError, match="state 'seed' is 7; it must be a tensor of 1 int64 on"):
        c.encode(x, state)


# --- many gradients, many workers ----------------------------------------------------------------

SHARED = ("int8", "onebit", "ef(terngrad)", "topk", "randomk")
SHARED += () if INTERPRETED else ("tbq", "minmax(bits=2)", "dgc")
shared_cases = pytest.mark.parametrize(
    "case", [next(c for c in CASES if c.expr == expr) for expr in SHARED], ids=ids
)


@shared_cases
def test_many_gradients_in_one_frame(case: Case) -> None:
    c, numels = pair(case.expr), (100, 7, 4097)
    here, there = c.cpu.bulk(numels), c.gpu.bulk(numels)
    flat = torch.full((here.numel,), 3.0)  # what lies between gradients is nobody's
    for k, view in enumerate(here.views(flat)):
        view.copy_(gaussian(view.numel(), seed=k))
    state = here.init(flat, seed=3, stream=2)
    held = moved(state)
    for _ in range(2):
        right = here.encode(flat, state)
        payload = there.encode(flat.to(DEVICE), held)
        if not case.summed:
            assert torch.equal(payload.cpu(), right)
            for name, value in state.items():
                views = [b.views(s) if s.dim() and len(s) == b.numel else [s]
                         for b, s in ((here, value), (there, held[name].cpu()))]  # fmt: skip
                assert all(torch.equal(a, b) for a, b in zip(*views, strict=True)), name
        held = moved(state)
    for frame in (right, payload.cpu()):
        out, want = torch.full((here.numel,), 7.0, device=DEVICE), torch.full((here.numel,), 7.0)
        for options in ({"alpha": 0.5}, {"add": True, "alpha": -1.0}):
            there.decode(frame.to(DEVICE), out=out, **options)
            here.decode(frame, out=want, **options)
            assert torch.equal(out.cpu(), want)
    here.views(flat)[1][3] = math.nan
    payload = there.encode(flat.to(DEVICE), held)
    assert payload[FLAGS] == 1
    there.decode(payload, out=out)
    assert all(view.isnan().all() for view in there.views(out))
    rest = torch.ones(here.numel, dtype=torch.bool)
    for view in here.views(rest):
        view.fill_(False)
    assert (out.cpu()[rest] == want[rest]).all()
    payload[70] ^= 1  # the number of elements of the first
    there.decode(payload, out=out)
    assert "its header is not that of such a frame" in pending()


@shared_cases
def test_the_mean_of_workers_comes_back(case: Case) -> None:
    c, n, num_workers = pair(case.expr), 5003, 3
    made = hipress.codec(case.expr).aggregator(num_workers)
    assert isinstance(made, ProgramCodec)
    back = Pair(on(made, "reference"), on(made, "gpu"))
    frames = [c.cpu.encode(gaussian(n, seed=k), started(c.cpu, n, k)) for k in range(num_workers)]
    state = started(back.cpu, n)
    there = moved(state)
    right = back.cpu.merge(frames, c.cpu, n, state)
    payload = back.gpu.merge([f.to(DEVICE) for f in frames], c.gpu, n, there)
    if not case.summed or made.name.startswith("topk"):
        assert torch.equal(payload.cpu(), right)
        assert all(torch.equal(there[name].cpu(), value) for name, value in state.items())
    else:
        want = back.cpu.decode(right)
        assert torch.allclose(back.gpu.decode(payload).cpu(), want, rtol=FEW_ULPS * 2.0**-23)


def test_a_bulk_checks_every_entry_of_its_table() -> None:
    c = pair("onebit(ef=false)").gpu
    made, asked = c.bulk([64, 2048, 512]), c.bulk([64, 512, 2048])
    assert made.wire_bytes == asked.wire_bytes
    payload = made.encode(torch.ones(made.numel, device=DEVICE))
    asked.decode(payload, out=torch.zeros(asked.numel, device=DEVICE))
    assert "its header is not that of such a frame" in pending()


def test_a_bulk_takes_states_and_memory_of_its_own() -> None:
    c = pair("terngrad").gpu
    bulk = c.bulk([64, 100])
    flat = gaussian(bulk.numel).to(DEVICE)
    state = bulk.init(flat)
    with pytest.raises(UsageError, match="state 'seed' is not one number for each of the 2"):
        bulk.encode(flat, c.init(flat))
    room = torch.zeros(2 * bulk.wire_bytes, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(UsageError, match="encode needs .* contiguous bytes"):
        bulk.encode(flat, state, out=room[::2])
    with pytest.raises(UsageError, match="does not start on a multiple of 16 bytes"):
        bulk.encode(flat, state, out=room[1 : 1 + bulk.wire_bytes])


LEVELS = """
param P {{ {type} s = {value}; }}
void XEncode(float* g, uint8* c, P p) {{
    uint8* q = map(g, [&](float x) -> uint8 {{ return x / p.s + 100.0; }});
    c = concat(q);
}}
void XDecode(uint8* c, float* g, P p) {{
    uint8 q[g.size];
    extract(c, q);
    g = map(q, [&](uint8 a) -> float {{ return (a - 100) * p.s; }});
}}
"""


@pytest.mark.parametrize("kinds", [("float", "uint8"), ("float", "float")], ids=str)
def test_parameters_of_one_name_in_worker_and_aggregator(kinds: tuple[str, str]) -> None:
    x, frames, means = 10 * gaussian(100), [], []
    for backend in ("reference", "gpu"):
        worker, back = (
            ProgramCodec(
                bound(LEVELS.format(type=kind, value=value), {}), name="x", backend=backend
            )
            for kind, value in zip(kinds, (2, 5), strict=True)
        )
        device = DEVICE if backend == "gpu" else torch.device("cpu")
        frames = [worker.encode(x.to(device))] * 2
        means.append(back.decode(back.merge(frames, worker, 100)).cpu())
    assert torch.equal(*means)


# --- bad numbers ---------------------------------------------------------------------------------


BAD = ((math.nan, 4099), (-math.nan, 4098), (math.inf, 0), (-math.inf, 5002))


def stays(case: Case, n: int, place: int) -> slice:
    """The elements that share a scale with the bad one: their residual must stay as it was."""
    if case.name in ("int8", "int4", "onebit"):
        start = place // case.block * case.block
        return slice(start, start + case.block)
    return slice(0, n) if case.rounds else slice(place, place + 1)


@every_case
def test_bad_numbers_stay_visible_and_out_of_states(case: Case) -> None:
    c, n = pair(case.expr), 5003
    for bad, place in (BAD if case.states else BAD[:1])[: 2 if INTERPRETED else 3]:
        x = gaussian(n)
        x[place] = bad
        state = started(c.cpu, n)
        before, there = {k: v.clone() for k, v in state.items()}, moved(state)
        payload = c.gpu.encode(x.to(DEVICE), there)
        c.cpu.encode(x, state)
        assert payload[FLAGS] == 1
        if case in WIRE or not INTERPRETED:
            assert c.gpu.decode(payload).isnan().all()
            acc = gaussian(n).to(DEVICE)
            assert c.gpu.decode(payload, out=acc, add=True, alpha=0.5).isnan().all()
        assert all(value.isfinite().all() for value in there.values())
        if case.feedback:
            unit = stays(case, n, place)
            assert torch.equal(there["residual"].cpu()[unit], before["residual"][unit])
        if case.own_memory and math.isinf(bad):
            # It may count as sent, take the place of another, and have its velocity masked.
            assert there["residual"][place] == before["residual"][place]
            assert there["velocity"][place] in (before["velocity"][place], 0)
        else:
            same_states(case, there, state, scale=4.0)
        if bad != bad:
            clean = c.gpu.encode(gaussian(n, seed=1).to(DEVICE), there)
            assert clean[FLAGS] == 0 and c.gpu.decode(clean).isfinite().all()


def test_a_state_that_overflows_flags_the_frame() -> None:
    x = gaussian(100)
    x[3] = x[7] = 3e38  # one is sent, the other's accumulation overflows in the second step
    made = hipress.codec("dgc(ratio=0.01)")
    assert isinstance(made, ProgramCodec)
    for backend in ("reference", "cpu", "gpu"):
        c, there = on(made, backend), x.to(DEVICE if backend == "gpu" else "cpu")
        state = c.init(there)
        flags = [int(c.encode(there, state)[FLAGS]) for _ in range(2)]
        assert flags == [0, 1], backend
        assert all(value.isfinite().all() for value in state.values()), backend


# --- damaged frames ------------------------------------------------------------------------------


class Guarded:
    """An output with memory on both sides that nobody may touch."""

    def __init__(self, n: int) -> None:
        self.whole = torch.full((n + 2 * GUARD,), 7.0, device=DEVICE)
        self.out = self.whole[GUARD : GUARD + n]

    def intact(self) -> bool:
        sides = torch.cat([self.whole[:GUARD], self.whole[-GUARD:]])
        return bool((sides == 7.0).all())


def pending() -> str:
    """What the next call on the device would say, if anything."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    try:
        gpu.raise_pending(gpu_device())
    except FrameError as error:
        return str(error)
    return ""


def gpu_device() -> torch.device:
    return torch.empty(0, device=DEVICE).device


def put(payload: torch.Tensor, at: int, dtype: torch.dtype, value: float) -> torch.Tensor:
    """A frame with one number of it replaced."""
    changed = payload.clone()
    changed[at : at + dtype.itemsize].view(dtype)[0] = value
    return changed


SPARSE = ("topk(ef=false)", "graddrop(ef=false)", "dgc")


@pytest.mark.parametrize("expr", SPARSE)
@pytest.mark.parametrize("add", [False, True])
def test_counts_and_indices_are_clamped(expr: str, add: bool) -> None:
    n, case = 5003, next(c for c in WIRE if c.expr == expr)
    c, x = pair(expr).gpu, gaussian(n).to(DEVICE)
    payload = c.encode(x, c.init(x))
    count, index, _, _ = case.places(n)
    words = torch.int32
    damages = [
        *(put(payload, count.start, words, v) for v in (case.room(n) + 1, 2**31 - 1, -1)),
        *(put(payload, index.start, words, v) for v in (n, 2**31 - 1, -1, n + 4096)),
    ]
    for frame in damages:
        guarded = Guarded(n)
        c.decode(frame, out=guarded.out, add=add)
        assert guarded.intact()
        message = pending()
        assert message.startswith(
            f"a frame that was worked on before this call on {gpu_device()} is damaged: "
        )
        assert message.endswith("; what was made of it since then must not be used.")
        assert pending() == ""  # told once
        with pytest.raises(FrameError, match="is damaged"):
            c.decode(frame)


def test_damage_is_told_by_the_next_call() -> None:
    c, x = pair("topk(ef=false)").gpu, gaussian(300).to(DEVICE)
    payload = c.encode(x, c.init(x))
    bad = put(payload, HEAD, torch.int32, -1)
    out = torch.zeros(300, device=DEVICE)
    for call in (
        lambda: c.encode(x, c.init(x)),
        lambda: c.decode(payload, out=out),
        lambda: c.decode(payload, out=out, add=True),
    ):
        c.decode(bad, out=out)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        with pytest.raises(FrameError, match="was worked on before this call"):
            call()
        call()
    assert torch.equal(c.decode(payload, out=out), c.decode(payload))


@pytest.mark.parametrize(
    "at, dtype, value",
    [(0, torch.uint8, 0), (4, torch.int16, 9), (6, torch.uint8, 2), (7, torch.uint8, 1),
     (20, torch.int32, 2), (24, torch.int64, 5), (32, torch.int64, 80),
     (64, torch.int64, 301), (72, torch.int64, 16)],
    ids=["magic", "version", "flag 1", "flag 8", "bodies", "codec", "bytes", "elements", "body"],
)  # fmt: skip
def test_a_header_that_is_not_ours(at: int, dtype: torch.dtype, value: int) -> None:
    c, n = pair("onebit(ef=false)").gpu, 300
    frame = put(c.encode(gaussian(n).to(DEVICE), {}), at, dtype, value)
    guarded = Guarded(n)
    c.decode(frame, out=guarded.out)
    assert guarded.intact()
    assert "its header is not that of such a frame" in pending()
    with pytest.raises(FrameError):
        c.decode(frame)
    assert pending() == ""


def test_a_number_of_elements_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    c = pair("onebit(ef=false)").gpu
    payload = c.encode(gaussian(64).to(DEVICE), {})
    head = payload.cpu().numpy().copy()
    head[64:72].view(np.uint64)[0] = 2**33
    head[16:20].view(np.uint32)[0] = zlib.crc32(head[20:80].tobytes())
    hostile = torch.from_numpy(head).to(DEVICE)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was asked for"))
    with pytest.raises(FrameError, match="for 8589934592 elements"):
        c.decode(hostile)


def test_decode_copies_the_header_to_the_host_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    c, n = pair("fp16").gpu, 5003
    payload = c.encode(gaussian(n).to(DEVICE), {})
    whole, copied = torch.Tensor.cpu, []

    def noting(self: torch.Tensor) -> torch.Tensor:
        copied.append(self.numel())
        return whole(self)

    monkeypatch.setattr(torch.Tensor, "cpu", noting)
    decoded = c.decode(payload)
    assert copied == [HEAD] and decoded.numel() == n
    many = c.bulk([300, 70]).encode(torch.ones(c.bulk([300, 70]).numel, device=DEVICE), {})
    for frame, reason in (
        (payload[:70], "cut short"),
        (payload[:-16], "cut short"),
        (many, "2 bod"),
    ):
        with pytest.raises(FrameError, match=reason):
            c.decode(frame)


def test_fields_that_are_the_senders_own() -> None:
    c, n = pair("onebit(ef=false)").gpu, 300
    payload = c.encode(gaussian(n).to(DEVICE), {})
    right = c.decode(payload)
    for at in (8, 40, 48):  # step, plan and sender
        out = torch.empty(n, device=DEVICE)
        c.decode(put(payload, at, torch.int64, 3), out=out)
        assert torch.equal(out, right) and pending() == ""


def test_what_a_program_asks_of_its_payload() -> None:
    c, x = pair("minmax(bits=2)").gpu, gaussian(300).to(DEVICE)
    frame = put(c.encode(x, c.init(x)), HEAD, torch.uint8, 4)
    with pytest.raises(FrameError, match="the payload was made with another 'bitwidth'"):
        c.decode(frame)


def test_lengths_are_checked_on_the_host() -> None:
    c, n = pair("onebit(ef=false)").gpu, 300
    payload = c.encode(gaussian(n).to(DEVICE), {})
    for size, wrong in ((n + 200, payload), (n, payload[:-16]), (n, torch.cat([payload] * 2))):
        with pytest.raises(FrameError, match="the frame has .* bytes; onebit"):
            c.decode(wrong, out=torch.empty(size, device=DEVICE))
    with pytest.raises(UsageError, match="give out="):
        c.decode(payload, add=True)


@every_kind_of_frame
def test_frames_damaged_at_random(case: Case) -> None:
    # What the CPU takes, the GPU takes and decodes alike; what the GPU refuses, the CPU refuses.
    c, dice, refused = pair(case.expr), random.Random(case.expr), 0
    for n in (7, 300):
        x = gaussian(n)
        whole = c.cpu.encode(x, c.cpu.init(x)).numpy().tobytes()
        for _ in range(6 if INTERPRETED else 40):
            data = damaged(dice, case, n, whole)[1]
            if len(data) != len(whole):
                continue
            frame, guarded = torch.frombuffer(data, dtype=torch.uint8), Guarded(n)
            c.gpu.decode(frame.to(DEVICE), out=guarded.out)
            assert guarded.intact()
            message = pending()
            refused += bool(message)
            try:
                right = c.cpu.decode(frame, out=torch.zeros(n))
            except (FrameError, UsageError):
                continue
            assert message == ""
            assert np.array_equal(guarded.out.cpu().numpy(), right.numpy(), equal_nan=True)
    assert refused or not case.sparse


# --- emitted packages ----------------------------------------------------------------------------

SEED = Path(__file__).parent.parent / "compll" / "programs" / "TernGradEncode.pse"


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The seed's program with error feedback as a package, its CPU tensors on the GPU's way."""
    folder = tmp_path_factory.mktemp("emitted")
    bound = read_program(SEED).bind({"bitwidth": 2})
    Package(bound=bound, variant=Variant(feedback=True)).write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        package = importlib.import_module("terngrad")
        if INTERPRETED:
            patch.setattr(package._wrapper, "_on_gpu", lambda tensor: True)
        yield package


@pytest.mark.parametrize("n", [0, 1, 5003])
def test_an_emitted_package_makes_the_frames_of_the_codec(emitted: Any, n: int) -> None:
    codec = on(hipress.codec(str(SEED), bitwidth=2, ef=True), "reference")
    x = gaussian(n)
    state = codec.init(x, seed=-5, stream=3)
    residual = torch.zeros(n, device=DEVICE)
    for step in range(2):
        right = codec.encode(x, state)
        payload = emitted.encode(x.to(DEVICE), residual, step=step, seed=-5, stream=3)
        assert payload.device == residual.device and torch.equal(payload.cpu(), right)
        assert torch.equal(residual.cpu(), state["residual"])
    half = x.to(DEVICE, torch.float16)
    ratio = {"step": 2, "seed": -5, "stream": 3, "lr_ratio": 0.5}
    state["lr_ratio"] = torch.tensor(0.5)
    assert torch.equal(emitted.encode(half, residual, **ratio).cpu(), codec.encode(x.half(), state))
    there = right.to(DEVICE)
    decoded = emitted.decode(there, n, alpha=0.25)
    assert torch.equal(decoded.cpu(), codec.decode(right, alpha=0.25))
    total = torch.ones(n, device=DEVICE)
    torch.ops.hipress.terngrad_decode_add(there, total, alpha=-1.5)
    want = torch.ones(n)
    assert torch.equal(total.cpu(), codec.decode(right, out=want, add=True, alpha=-1.5))


def test_an_emitted_package_tells_bad_numbers_and_damage(emitted: Any) -> None:
    x, residual = gaussian(300).to(DEVICE), torch.zeros(300, device=DEVICE)
    payload = emitted.encode(x, residual, step=0)
    x[3] = math.inf
    bad = emitted.encode(x, residual, step=1)
    assert emitted.decode(bad, 300).isnan().all() and residual.isfinite().all()
    for at in (0, 24, 64, HEAD):
        damaged = payload.clone()
        damaged[at] ^= 0x80
        emitted.decode(damaged, 300)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        with pytest.raises(ValueError, match="that was decoded on .* before is damaged: "):
            emitted.decode(payload, 300)
        emitted.decode(payload, 300)
    with pytest.raises(ValueError, match="that of 300 elements has"):
        emitted.decode(payload[:-16], 300)


# --- any program ---------------------------------------------------------------------------------

VARIANTS = (
    *(PLAIN, Variant(feedback=True)),
    *(Variant(momentum=True), Variant(feedback=True, momentum=True, nesterov=True)),
)
FACTOR = float(os.environ.get("HIPRESS_TEST_PROGRAMS", "1"))


PARTS = 1 if INTERPRETED else 5
"""Random programs are dealt to so many tests, which processes share: each compiles for seconds."""


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_mean_what_the_reference_means(part: int) -> None:
    met = itertools.count()

    @settings(
        max_examples=max(1, int((14 if INTERPRETED else 10) * FACTOR)),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # an interpreted program takes too long to be made smaller
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(most=3))
    def check(program: Program) -> None:
        if next(met) % PARTS == part:
            means_what_the_reference_means(program)

    check()


def means_what_the_reference_means(program: Program) -> None:
    dice = random.Random(program.text)
    variant, n = dice.choice(VARIANTS), dice.choice((1, 7, 64, 65, 2049, 5000))
    note(f"{variant}, n={n}, {program.params}\n{program.text}")
    try:
        right, codec = (
            ProgramCodec(bound(program.text, program.params), name="x", variant=variant,
                         mu=MU_VALUE, backend=backend)
            for backend in ("reference", "gpu")
        )  # fmt: skip
        state = right.init(torch.empty(n), seed=5, stream=3)
        for k, value in enumerate(v for v in state.values() if v.dim()):
            value.copy_(gaussian(n, seed=k))
        there = moved(state)
        payload = codec.encode(gaussian(n, seed=9).to(DEVICE), there).cpu()
    except (NotFusable, BackendError):
        return
    want = right.encode(gaussian(n, seed=9), state)
    if program.exact:
        assert equal_but_for_zeros(payload, want)
    pairs = [(there[name].cpu(), value) for name, value in state.items()]
    for frame in (want, payload):
        pairs.append((codec.decode(frame.to(DEVICE)).cpu(), right.decode(frame)))
    for have, value in pairs:
        if program.exact:
            assert np.array_equal(have.numpy(), value.numpy(), equal_nan=True)
        else:
            size = float(value.abs().nan_to_num(0, 0, 0).max()) if value.numel() else 0.0
            np.testing.assert_allclose(have, value, rtol=1e-4, atol=1e-5 * size + 1e-30)


def equal_but_for_zeros(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bytes are equal but for the sign of a zero: what max(0.0, -0.0) is depends on the backend."""
    differ = (a != b).nonzero().view(-1).tolist()
    return all(i % 2 == 1 and {int(a[i]), int(b[i])} == {0x00, 0x80} for i in differ)


DECODE = "void XDecode(uint8* c, float* g) { float a[g.size]; extract(c, a); g = a; }"
OWN = {
    "a reduction with a function of its own": """
        int s = reduce(map(g, [&](float x) -> uint8 { return 99 * abs(x); }), 0,
                       [&](int a, int b) -> int { return a | b; });
        float* a = map(g, [&](float x) -> float { return x + s; });""",
    "a reduction of blocks and of all, each with a function": """
        per (72) {
            float far = reduce(g, 0.0, [&](float a, float b) -> float {
                return abs(b) > abs(a) || (abs(a) == abs(b) && b > a) ? b : a; });
        }
        int s = reduce(map(g, [&](float x) -> int { return x * 1000.0; }), 0,
                       [&](int a, int b) -> int { return a ^ b; });
        float* a = map(g, [&](float x) -> float { return x + s + far[3]; });""",
    "a condition on a scalar and an element": """
        float s = reduce(g, -99999, max);
        float* a = map(g, [&](float x) -> float { return s > 0.0 && x < 0.0 ? s : x; });""",
    "floats that meet at an index": """
        float* a = scatter(map(range(g.size), [&](int i) -> int { return i / 3; }),
                           map(g, [&](float x) -> float { return 1.0; }), g.size);""",
    "ints that meet at an index": """
        int* b = scatter(map(range(g.size), [&](int i) -> int { return i / 3; }),
                         map(g, [&](float x) -> int { return 2; }), g.size);
        float* a = map(b, [&](int v) -> float { return v; });""",
}
REFUSED = {
    "from left to right": """
        float* a = scan(g, 1.0, [&](float a, float b) -> float { return a * 0.5 + b; });""",
}


def own(body: str, backend: str) -> ProgramCodec:
    text = f"void XEncode(float* g, uint8* c) {{{body} c = concat(a); }} {DECODE}"
    return ProgramCodec(bound(text, {}), name="x", backend=backend)


@pytest.mark.parametrize("what", OWN)
def test_a_program_means_the_same(what: str) -> None:
    for n in (7, 5003):
        x = gaussian(n, seed=3)
        want = own(OWN[what], "reference").encode(x, {})
        assert torch.equal(own(OWN[what], "gpu").encode(x.to(DEVICE), {}).cpu(), want)


QUICK_BLOCKS = (
    "the largest, put back",
    "filtered with little room",
    "stored and repeated",
    "rows of an outer array",
)


@pytest.mark.parametrize("what", thinned(BODIES, keep=QUICK_BLOCKS))
def test_a_program_with_arrays_of_blocks_means_the_same(what: str) -> None:
    same_frames(block_program(BODIES[what]), (5, 16, 4099))


def same_frames(text: str, sizes: Iterable[int], variant: Variant = PLAIN) -> None:
    """A program makes the same frames, states and gradients on both sides."""
    for n in sizes:
        x = (gaussian(n, seed=3) * 100).round() / 8  # all sums are exact, and many are equal
        found = []
        for backend in ("reference", "gpu"):
            codec = ProgramCodec(bound(text, {}), name="x", variant=variant, backend=backend)
            state = codec.init(torch.empty(n), seed=5, stream=3)
            if backend == "gpu":
                x, state = x.to(DEVICE), moved(state)
            frame = codec.encode(x, state)
            out = codec.decode(frame, out=torch.ones_like(x), add=True)
            found.append([t.cpu() for t in (frame, out, *state.values())])
        assert all(map(torch.equal, *found)), n


@pytest.mark.parametrize("what", thinned(OTHERS, keep=("blocks of numbers and of rows",)))
def test_a_program_with_blocks_of_other_lengths_means_the_same(what: str) -> None:
    same_frames(other(what), LENGTHS)


SENDERS = {"samples": RANDOM_K, "what a filter took": FILTERED}
SENDER_CELLS = [(what, feedback) for what in SENDERS for feedback in (False, True)]


@pytest.mark.parametrize(
    ("what", "feedback"), thinned(SENDER_CELLS, keep=[(what, True) for what in SENDERS])
)
def test_a_program_that_sends_codes_of_blocks_means_the_same(what: str, feedback: bool) -> None:
    same_frames(SENDERS[what], (1, 8, 504, 523, 40_000), Variant(feedback=feedback))


@pytest.mark.parametrize("what", STATES)
def test_states_of_other_types_and_lengths_mean_the_same(what: str) -> None:
    for n in (5, 16, 4099):
        found = []
        for backend in ("reference", "gpu"):
            codec = ProgramCodec(bound(STATES[what] + STATE_DECODE), name="x", backend=backend)
            state = codec.init(torch.empty(n))
            state = moved(state) if backend == "gpu" else state
            frames = []
            for step in range(3):
                x = (gaussian(n, seed=step) * 100).round() / 8
                frames.append(codec.encode(x.to(state_device(state)), state).cpu())
            found.append([*frames, *(value.cpu() for value in state.values())])
        assert all(map(torch.equal, *found)), n


SUM = "[&](int a, int b) -> int { return a + b; }"
SUMS = {
    "of a state that is written before the last filter": """
        int* s = scan(map(m, [&](float x) -> int { return x > 0.0; }), 0, SUM);
        uint32* i = filter(range(g.size), [&](int k) -> uint1 { return s[k] <= 1900; }, g.size);
        uint32* j = filter(range(g.size), [&](int k) -> uint1 { return s[k] > 100; }, g.size);""",
    "from a number that only they use": """
        int z = reduce(map(g, [&](float x) -> int { return x > 2.5; }), 0, SUM);
        int* s = scan(map(g, [&](float x) -> int { return x > 0.0; }), z, SUM);
        uint32* i = filter(range(g.size), [&](int k) -> uint1 { return s[k] <= 240; }, g.size);
        uint32* j = i;""",
}
"""Sums up to each element that only filters read, so that they are not kept in memory."""


@pytest.mark.parametrize("what", SUMS)
def test_sums_that_are_made_where_they_are_read(what: str) -> None:
    body = SUMS[what].replace("SUM", SUM)
    text = f"""
    void XEncode(float* g, inout float* m, uint8* c) {{
        float* v = map(g, m, [&](float x, float y) -> float {{ return x + 0.5 * y; }});
        {body}
        m = v;
        uint32 q = i.size + j.size;
        c = concat(q, i, j);
    }}
    void XDecode(uint8* c, float* g) {{
        uint32 q; uint32* i; uint32* j;
        extract(c, q, i, j);
        g = map(range(g.size), [&](int k) -> float {{ return 0.0; }});
    }}"""
    found = []
    for backend in ("reference", "gpu"):
        codec = ProgramCodec(bound(text), name="x", backend=backend)
        state = codec.init(torch.empty(9001, device=DEVICE if backend == "gpu" else "cpu"))
        steps = [gaussian(9001, seed=step).to(state["m"].device) for step in range(3)]
        found.append([codec.encode(x, state).cpu() for x in steps])
    assert all(map(torch.equal, *found))


def state_device(state: dict[str, torch.Tensor]) -> torch.device:
    return next(iter(state.values())).device


FEW = "map(range(g.size / 9999), [&](int i) -> float { return g[i]; })"
"""No element at all, of the sizes that are tried."""
EMPTY = {
    "picked of sorted floats": f"float* few = sort({FEW}); float v = few[0];",
    "picked of sorted ints": f"""
        int* few = sort(map({FEW}, [&](float x) -> int {{ return x; }}));
        float v = few[0];""",
    "anywhere in sorted floats": f"""
        float* few = sort({FEW});
        float* all = map(g, [&](float x) -> float {{ int i = x; return few[i]; }});
        float v = all[3];""",
    "anywhere in partial sums": f"""
        float* few = scan({FEW}, 0.0, [&](float a, float b) -> float {{ return a + b; }});
        float v = few[g.size];""",
}
"""Ways to an element of an empty array."""
EMPTY = {
    what: f"{body} float* a = map(g, [&](float x) -> float {{ return x + v; }});"
    for what, body in EMPTY.items()
}


@pytest.mark.parametrize("what", EMPTY)
def test_an_element_of_an_empty_array_is_zero(what: str) -> None:
    """Catches: what memory happens to hold, or what the digits of no element make."""
    x = gaussian(7, seed=3)
    for backend in ("reference", "gpu"):
        c = own(EMPTY[what], backend)
        payload = c.encode(x.to(DEVICE if backend == "gpu" else "cpu"), {})
        assert torch.equal(c.decode(payload).cpu(), x), backend


UNEVEN = """
void XEncode(float* g, uint8* c) {
    uint2* few = map(range(g.size / 9999), [&](int i) -> uint2 { return g[i]; });
    c = concat(g, few);
}
void XDecode(uint8* c, float* g) {
    float a[g.size];
    uint2 few[g.size / 9999];
    extract(c, a, few);
    g = map(a, [&](float x) -> float { int i = x; return x + few[i]; });
}
"""


def test_an_element_of_an_empty_section_is_zero() -> None:
    c = ProgramCodec(bound(UNEVEN, {}), name="x", backend="gpu")
    x = gaussian(7, seed=3)
    room = torch.full((200,), 0xFF, dtype=torch.uint8, device=DEVICE)
    payload = room[: c.wire_bytes(7)]  # what lies behind the frame is not part of it
    c.encode(x.to(DEVICE), {}, out=payload)
    assert torch.equal(c.decode(payload, out=torch.zeros(7, device=DEVICE)).cpu(), x)


@pytest.mark.parametrize("why", REFUSED)
def test_what_programs_side_by_side_cannot_do_is_refused(why: str) -> None:
    with pytest.raises(BackendError, match=why):
        own(REFUSED[why], "gpu").encode(gaussian(100, seed=1).to(DEVICE), {})


SORT = """
void XEncode(float* g, uint8* c) {{
    {type}* q = sort(map(g, [&](float x) -> {type} {{ return x; }}));
    c = concat(q);
}}
void XDecode(uint8* c, float* g) {{
    {type} q[g.size];
    extract(c, q);
    g = map(q, [&]({type} a) -> float {{ return a; }});
}}
"""


@pytest.mark.parametrize("type_, most", [("uint16", 65535.0), ("uint32", 4294967040.0)])
def test_large_unsigned_numbers_are_sorted_as_such(type_: str, most: float) -> None:
    x = torch.linspace(most, 0, 300)
    text = SORT.format(type=type_)
    right, c = (
        ProgramCodec(bound(text, {}), name="x", backend=backend) for backend in ("reference", "gpu")
    )
    payload = c.encode(x.to(DEVICE))
    assert torch.equal(payload.cpu(), right.encode(x))
    assert c.decode(payload)[-1] == most


SPREAD = """
void XEncode(float* g, uint8* c) {
    int n = g.size;
    uint32 key = random<int>(0, 2147483647);
    float* value = gather(g, sample(range(n), max(1, n / 10), key));
    c = concat(key, value);
}
void XDecode(uint8* c, float* g) {
    int n = g.size;
    uint32 key;
    float* value;
    extract(c, key, value);
    float* spread = scatter(sample(range(n), max(1, n / 10), key), value, n);
    g = map(spread, [&](float s) -> float { return s + 0.5; });
}
"""


def test_feedback_of_what_is_made_of_a_scattered_array() -> None:
    right, c = (
        ProgramCodec(bound(SPREAD, {}), name="x", variant=Variant(feedback=True), backend=backend)
        for backend in ("cpu", "gpu")
    )
    x = gaussian(100)
    state = right.init(x, seed=3)
    there = moved(state)
    for _ in range(2):
        assert torch.equal(c.encode(x.to(DEVICE), there).cpu(), right.encode(x, state))
        assert torch.equal(there["residual"].cpu(), state["residual"])
