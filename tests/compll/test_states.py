"""States of other types and lengths: against the oracle for some steps, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hipress
from hipress.casync.engine.recipe import check_state
from hipress.codecs.program import ProgramCodec
from hipress.compll.tools import emit
from hipress.errors import ProgramError, UsageError
from tests.compll.harness import bound, encode, run_oracle
from tests.compll.state_programs import DECODE, STATES, shapes
from tests.grid import thinned

F32 = np.float32
RAW = {"f32": F32, "f16": np.uint16, "bf16": np.uint16, "u8": np.uint8, "i64": np.int64}


def eighths(n: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).integers(-24, 25, n) / 8).astype(F32)


def numbers(raw: np.ndarray, storage: str) -> np.ndarray:
    """What the elements of a state stand for."""
    if storage == "f16":
        return raw.view(np.float16).astype(F32)
    if storage == "bf16":
        return (raw.astype(np.uint32) << 16).view(F32)
    return raw if storage == "f32" else raw.astype(np.int64)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("what", STATES)
def test_as_the_oracle(what: str, backend: str) -> None:
    text = STATES[what] + DECODE
    made = bound(text)
    for n in (1, 5, 16, 67):
        kinds = shapes(text, n)
        states = [np.zeros(m, RAW[storage]) for storage, m in kinds]
        right = [numbers(s, storage) for s, (storage, _) in zip(states, kinds, strict=True)]
        for step in range(4):
            x = eighths(n, seed=n + step)
            flag, body, states = encode(made, backend, x, states)
            want = run_oracle(text, {}, x, right)
            right = want.states
            assert not flag
            assert body.tobytes() == want.body.tobytes(), (n, step)
            for k, (raw, (storage, _)) in enumerate(zip(states, kinds, strict=True)):
                found = numbers(raw, storage)
                np.testing.assert_array_equal(found, right[k], err_msg=f"{n}, {step}, state {k}")


CODES = """
void XEncode(float* g, inout uint8* code, inout float top[blocks(g.size, 16)], inout int sum,
             uint8* c) {
    per (16) { float most = reduce(g, 0.0, max); }
    code = map(g, [&](float x) -> uint8 { return 100 + 8 * x; });
    top = most;
    sum = sum + reduce(g, 0.0, [&](float a, float b) -> float { return a + b; });
    c = concat(g);
}"""


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_number_is_made_of_a_nan(bad: float, backend: str) -> None:
    """Catches: a code made of a NaN, which is 0 and may stand for anything."""
    made = bound(CODES + DECODE)
    x = np.arange(40, dtype=F32) / 8
    held = [np.zeros(40, np.uint8), np.zeros(3, F32), np.zeros(1, np.int64)]
    _, _, before = encode(made, backend, x, held)
    assert before[0].tolist() == list(range(100, 140))
    assert before[2] == 97
    x[18] = bad
    flag, _, after = encode(made, backend, x, before)
    assert flag
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[2], before[2])
    assert np.isfinite(after[1]).all()


ELEMENT, BLOCK, ALL = slice(18, 19), slice(16, 32), slice(0, 40)
HIDDEN = {
    "bits": ("code = map(g, [&](float x) -> uint8 { return bits(x) >> 19 & 255; });", ELEMENT),
    "a comparison": ("code = map(g, [&](float x) -> uint8 { return x > 5.0 ? 3 : 5; });", ELEMENT),
    "a maximum": ("code = map(g, [&](float x) -> uint8 { return max(x, 3.0); });", ELEMENT),
    "store": ("code = store(map(g, [&](float x) -> uint8 { return 8 * x; }));", ALL),
    "store in blocks": (
        """per (16) {
            int* k = store(map(g, [&](float x) -> int { return 8 * x; }));
            code = map(range(g.size), [&](int i) -> uint8 { return k[i ^ 1]; });
        }""",
        BLOCK,
    ),
    "reductions of blocks": (
        """per (16) {
            int top = reduce(map(g, [&](float x) -> int { return 8 * x; }), 0, max);
            float size = reduce(map(g, abs), 0.0, max);
            code = map(range(g.size), [&](int i) -> uint8 { return top + i + (size > 1.0); });
        }""",
        BLOCK,
    ),
    "a table": (
        """int* bin = map(g, [&](float x) -> int { return max(0, min(7, floor(x))); });
        int* now = scatter(bin, map(g, [&](float x) -> int { return 1; }), 8);
        code = map(range(g.size), [&](int i) -> uint8 { return now[i / 4]; });""",
        ALL,
    ),
    "what a filter took": (
        """int* at = filter(range(g.size), [&](int i) -> uint1 { return g[i] > 4.0; }, 20);
        float* sent = scatter(at, gather(g, at), g.size);
        code = map(sent, [&](float y) -> uint8 { return y == 0.0 ? 5 : 6; });""",
        ALL,
    ),
    "a count": (
        """int taken = filter(g, [&](float x) -> uint1 { return x > 2.0; }).size;
        code = map(code, [&](uint8 c) -> uint8 { return c + taken; });""",
        ALL,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "backend"),
    thinned(
        [(what, backend) for what in HIDDEN for backend in ("reference", "cpu")],
        keep=lambda cell: cell[1] == "reference" or cell[0] in ("bits", "reductions of blocks"),
    ),
)
def test_no_number_hides_a_nan(what: str, backend: str) -> None:
    """Catches: a code that no cast of a NaN made, but something that a NaN went into."""
    body, kept = HIDDEN[what]
    text = f"void XEncode(float* g, inout uint8* code, uint8* c) {{ {body} c = concat(g); }}"
    made = bound(text + DECODE)
    x = np.arange(40, dtype=F32) / 8
    _, _, held = encode(made, backend, x, [np.full(40, 2, np.uint8)])
    later = x + F32(4.5)
    _, _, want = encode(made, backend, later, held)
    for bad in (np.nan, np.inf, -np.inf):
        later[18] = bad
        flag, _, after = encode(made, backend, later, held)
        expected = want[0].copy()
        expected[kept] = held[0][kept]
        assert flag
        np.testing.assert_array_equal(after[0], expected)
    assert not np.array_equal(want[0][kept], held[0][kept])


OTHER_BLOCKS = """
void XEncode(float* g, inout int order[g.size / 2], inout int most[blocks(g.size / 2, 8)],
             inout int turns[g.size / 2], uint8* c) {
    float* v = map(range(g.size / 2), [&](int i) -> float { return g[2 * i]; });
    per (v, 8) {
        int top = reduce(map(v, [&](float x) -> int { return x > 2.0; }), most, max);
        order = map(sort(v), [&](float x) -> int { return 8 * x + top; });
    }
    most = top;
    per (turns, 8) {
        int last = reduce(turns, 0, max);
        turns = map(turns, [&](int t) -> int { return last + 1; });
    }
    c = concat(g);
}"""


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_no_number_of_other_blocks_hides_a_nan(backend: str) -> None:
    """What is made of the gradient is kept, as any element may be in it; the rest goes on."""
    made = bound(OTHER_BLOCKS + DECODE)
    x = np.arange(40, dtype=F32) / 8
    _, _, held = encode(made, backend, x, [np.zeros(m, np.int64) for m in (20, 3, 20)])
    assert held[0].tolist() == [2 * i + (i >= 8) for i in range(20)]
    assert held[1].tolist() == [0, 1, 1]
    for bad in (np.nan, np.inf, -np.inf):
        later = x + F32(4.5)
        later[18] = bad
        flag, _, after = encode(made, backend, later, held)
        assert flag
        for new, old in zip(after[:2], held[:2], strict=True):
            np.testing.assert_array_equal(new, old)
        assert after[2].tolist() == [2] * 20


def codec(what: str, backend: str | None = None) -> ProgramCodec:
    return ProgramCodec(bound(STATES[what] + DECODE), name="x", backend=backend)


def test_a_codec_makes_and_checks_them() -> None:
    c, x = codec("codes of 8 bits and a scale per block"), torch.randn(67)
    state = c.init(x)
    assert {name: (v.dtype, v.numel()) for name, v in state.items()} == {
        "code": (torch.uint8, 67),
        "scale": (torch.float32, 5),
    }
    c.encode(x, state)
    assert state["code"].float().std() > 10
    state["scale"] = torch.zeros(67)
    with pytest.raises(UsageError, match="has 67 elements of torch.float32; the gradient needs 5"):
        c.encode(x, state)
    state = {**c.init(x), "code": torch.zeros(67)}
    with pytest.raises(UsageError, match="the gradient needs 67 of torch.uint8"):
        c.encode(x, state)


def test_a_residual_of_8_bits_brings_all_of_a_gradient() -> None:
    """The mean of what is sent nears the gradient, as with a residual of 32 bits."""
    path = Path(__file__).parents[2] / "examples" / "ef8.pse"
    c, x = hipress.codec(str(path)), torch.randn(5000, generator=torch.Generator().manual_seed(0))
    state, total = c.init(x), torch.zeros(5000)
    for _ in range(200):
        total += c.decode(c.encode(x, state))
    assert state["code"].dtype == torch.uint8
    assert (total / 200 - x).abs().mean() < 0.1
    assert (c.decode(c.encode(x, c.init(x))) - x).abs().mean() > 0.4


REFUSED = {
    "inout uint4* s": "state 's': write inout T\\* s",
    "inout uint16 s": "T is float, float16, bfloat16, uint8, int",
    "inout float* s[4]": "state 's': write inout T\\* s",
    "float s[4]": "argument 's': only an inout array has a size of its own",
    "inout float s[g.size * 0.5]": "a size is an int",
}


@pytest.mark.parametrize("arg", REFUSED)
def test_refused(arg: str) -> None:
    with pytest.raises(ProgramError, match=REFUSED[arg]):
        made = bound(f"void XEncode(float* g, {arg}, uint8* c) {{ c = concat(g); }}" + DECODE)
        made.kernels()


def test_what_takes_floats_by_element_only_refuses_others() -> None:
    c = codec("a number that counts")
    with pytest.raises(UsageError, match="keeps 'turn', which is not one float for each element"):
        c.bulk([3, 4])
    with pytest.raises(UsageError, match="state 'turn' is not one float for each element"):
        emit.functions(emit.Package(bound=c.bound))
    with pytest.raises(UsageError, match="an exchange cuts, groups and saves states by elements"):
        check_state(c)
    check_state(codec("floats of 16 bits"))
