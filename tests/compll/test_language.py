"""Each operator and construct of the language: small programs with known answers, on both backends.

Many expressions share a program, because compiling is what takes the time.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hipress.compll.build import parse_program
from hipress.compll.passes.derive import Variant
from hipress.errors import UsageError
from tests.compll.harness import bound, decode, encode, run
from tests.grid import thinned

both = pytest.mark.parametrize("backend", ["reference", "cpu"])
long = pytest.mark.parametrize("backend", thinned(["reference", "cpu"], keep=("reference",)))
"""Of tests whose kernels take long to compile; random programs try the same there."""
F32 = np.float32


def lines(*statements: str) -> str:
    return "\n".join(f"    {s}" for s in statements)


def numbers_sent(statements: list[str], names: list[str]) -> str:
    """A program that sends some numbers as floats, and decodes to the first of them."""
    sent = [f"float s_{name} = {name};" for name in names]
    listed = ", ".join(f"s_{name}" for name in names)
    declared = [f"float s_{name};" for name in names]
    every = f"g = map(range(g.size), [&](int q) -> float {{ return s_{names[0]}; }});"
    return (
        f"void XEncode(float* g, uint8* c) {{\n{lines(*statements, *sent)}\n"
        f"    c = concat({listed});\n}}\n"
        f"void XDecode(uint8* c, float* g) {{\n"
        f"{lines(*declared, f'extract(c, {listed});', every)}\n}}\n"
    )


def received(backend: str, text: str, x: np.ndarray, count: int) -> list[float]:
    _, body, _ = encode(bound(text), backend, x)
    return body[: 4 * count].view(F32).tolist()


# Numbers.

GIVEN = np.array([3, -2.5, 7, -7, 0, 2, 0.5, 1e10], F32)
KNOWN = ("float a", "float b", "int i", "int j", "int z", "int k", "float h", "float e")
NUMBERS = {
    "1 + 2 * 3 - 4 / 2": 5,
    "i + k * k": 11,
    "(i + k) * k": 18,
    "a - b - h": 5,
    "a * b + h": -7,
    "i / k": 3,
    "j / k": -3,
    "i / -k": -3,
    "i % k": 1,
    "j % k": -1,
    "i / z": 0,
    "a / 2": 1.5,
    "i / 2.0": 3.5,
    "-i + +k": -5,
    "- -i": 7,
    "~i": -8,
    "!i + !z": 1,
    "!a": 0,
    "!!h": 1,
    "i << k": 28,
    "j >> 1": -4,
    "1 + k << 2": 12,
    "i & 5 | 8 ^ 1": 13,
    "i & 3 == 3": 1,
    "i > k && a > b || z": 1,
    "z && i || z": 0,
    "i > k > z": 1,
    "a < b": 0,
    "a >= 3.0": 1,
    "b <= a != z": 1,
    "i == 7.0": 1,
    "z ? 10 : k ? 20 : 30": 20,
    "i > k ? a : b": 3,
    "(i > k) + (a > b) * 2": 3,
    "abs(b) + abs(j)": 9.5,
    "sign(b) + sign(i) * 10 + sign(z)": 9,
    "floor(b)": -3,
    "floor(i) / 2": 3,
    "sqrt(i + k)": 3,
    "exp2(a) + log2(8)": 11,
    "min(i, a, k) + max(b, h)": 2.5,
    "max(i, 7.5)": 7.5,
    "i * 0.1": float(F32(7) * F32(0.1)),
    "e * e / e": 1e10,
    ".5 + 5. + 1e1 + 2.5e-1f": 15.75,
}
CONVERTED = {
    ("uint8", "i * 100"): 255,
    ("uint8", "j"): 0,
    ("uint8", "b"): 0,
    ("uint2", "a - 0.25"): 2,
    ("uint1", "i"): 1,
    ("uint4", "e"): 15,
    ("uint32", "e"): 4294967296,
    ("uint16", "a * 1000.5"): 3001,
    ("int", "b"): -2,
    ("int", "-b"): 2,
    ("float", "i"): 7,
    ("float16", "a + 0.0001"): 3,
    ("float16", "e"): np.inf,
    ("bfloat16", "a + 0.01"): 3.015625,
    ("uint1", "a > b"): 1,
    ("uint8", "(a - a) / (b - b)"): 0,
    ("int", "(a - a) / (b - b)"): 0,
}


LITERALS = ("3.0", "0.0 - 2.5", "7", "0 - 7", "0", "2", "0.5", "1e10")
# How a, b, i, ... are known: on the host, as single values of a kernel, for each element.
MODES = {
    "literal": [f"{n} = {v};" for n, v in zip(KNOWN, LITERALS, strict=True)],
    "single": [f"{n} = g[{q}];" for q, n in enumerate(KNOWN)],
    "element": [f"{n} = g[{q} + 0 * x];" for q, n in enumerate(KNOWN)],
}
EXPRESSIONS = {("float", text): value for text, value in NUMBERS.items()} | CONVERTED


def expressions(mode: str) -> dict[tuple[str, str], float]:
    """What is tried in a mode; a literal float16 is an open bug: see test_regressions."""
    return {e: v for e, v in EXPRESSIONS.items() if mode != "literal" or "float16" not in e[0]}


def chosen_by_index(mode: str) -> str:
    """A program that sends an array: element k is the k-th expression."""
    made = [f"{type_} r{k} = {text};" for k, (type_, text) in enumerate(expressions(mode))]
    chosen = [f"if (x == {k}) {{ return r{k}; }}" for k in range(len(made))]
    outside, inside = MODES[mode], [*made, *chosen, "return 0.0;"]
    if mode == "element":
        outside, inside = [], [*outside, *inside]
    return (
        f"void XEncode(float* g, uint8* c) {{\n{lines(*outside)}\n"
        f"    float* v = map(range({len(made)}), [&](int x) -> float {{\n"
        f"{lines(*inside)}\n    }});\n"
        "    c = concat(v);\n}\n"
        "void XDecode(uint8* c, float* g) {\n    float* v;\n    extract(c, v);\n"
        "    g = map(range(g.size), [&](int i) -> float { return v[i]; });\n}\n"
    )


def check_numbers(mode: str, body: np.ndarray) -> None:
    want = expressions(mode)
    got = body[: 4 * len(want)].view(F32)
    wrong = {e: (g, w) for (e, w), g in zip(want.items(), got, strict=True) if g != F32(w)}
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("backend", "mode"),
    thinned(
        itertools.product(["reference", "cpu"], MODES),
        lambda cell: cell[0] == "reference" or cell[1] == "element",
    ),
)
def test_numbers(backend: str, mode: str) -> None:
    check_numbers(mode, encode(bound(chosen_by_index(mode)), backend, GIVEN)[1])


@pytest.mark.parametrize("mode", ["literal", "single"])
def test_numbers_sent_one_by_one(mode: str) -> None:
    made = [f"{type_} r{k} = {text};" for k, (type_, text) in enumerate(expressions(mode))]
    text = numbers_sent([*MODES[mode], *made], [f"r{k}" for k in range(len(made))])
    check_numbers(mode, encode(bound(text), "reference", GIVEN)[1])


# Arrays.

A = np.array([3, -1, 2, 0, 5, 5, -4.5, 0.25, 1], F32)
ARRAYS: dict[str, list[float]] = {
    "map(g, abs)": [3, 1, 2, 0, 5, 5, 4.5, 0.25, 1],
    "map(g, g, max)": A.tolist(),
    "map(g, [&](float x) -> float { return x * x; })": (A * A).tolist(),
    "map(g, range(g.size), g, [&](float x, int i, float y) -> float { return x + 10 * i - y; })": [
        10.0 * i for i in range(9)
    ],
    "map(range(3), [&](int i) -> float { return i; })": [0, 1, 2],
    "map(range(g.size), [&](int i) -> float { return g[i + 1] + g[99] + g[-1]; })": [
        *(A[1:] + 4).tolist(),
        5,
    ],
    "map(g, [&](float x) -> uint2 { return x; })": [3, 0, 2, 0, 3, 3, 0, 0, 1],
    "scan(g, 0.5, [&](float x, float y) -> float { return x + y; })": np.cumsum(
        np.concatenate([A[:1] + F32(0.5), A[1:]])
    ).tolist(),
    "scan(g, 1, max)": np.maximum.accumulate(np.maximum(A, 1)).tolist(),
    "filter(g, [&](float x) -> uint1 { return x > 0.5; }, 4)": [3, 2, 5, 5],
    "filter(range(g.size), [&](int i) -> uint1 { return g[i] < 0.5; }, 6)": [1, 3, 6, 7, 0, 0],
    "gather(g, filter(range(g.size), [&](int i) -> uint1 { return g[i] < 0.0; }, 3))": [
        -1,
        -4.5,
        0,
    ],
    "map(filter(g, [&](float x) -> uint1 { return x < 0.0; }, 2), [&](float x) -> float"
    " { return x * 2.0; })": [-2, -9],
    "sort(g)": sorted(A.tolist()),
    "sort(g, abs)": [0, 0.25, -1, 1, 2, 3, -4.5, 5, 5],
    "sort(range(g.size), [&](int i) -> float { return -g[i]; })": [4, 5, 0, 2, 8, 7, 3, 1, 6],
    "sample(g, g.size)": A.tolist(),
    "gather(g, map(range(4), [&](int i) -> int { return 10 - 3 * i; }))": [1, 0.25, 5, -1],
    "scatter(map(g, [&](float x) -> int { return x > 0.5 ? 1 : 3; }), g, 5)": [
        *(0, 16, 0),
        *(-5.25, 0),
    ],
    "first(sort(g), 2)": [-4.5, -1],
}
REDUCED = {
    "reduce(g, 0.0, [&](float x, float y) -> float { return x + y; })": 10.75,
    "reduce(g, 10.0, max)": 10,
    "reduce(g, 99999, min)": -4.5,
    "reduce(map(g, [&](float x) -> int { return x > 0.5; }), 0,"
    " [&](int x, int y) -> int { return x + y; })": 5,
    "reduce(map(g, [&](float x) -> int { return abs(x) + 1.0; }), 0,"
    " [&](int x, int y) -> int { return x | y; })": 7,
    "reduce(map(g, sign), 1.0, [&](float x, float y) -> float { return x == 0.0 ? y : "
    "(y == 0.0 ? x : x * y); })": 1,
    "reduce(filter(g, [&](float x) -> uint1 { return x < 0.0; }, 5), 0.0, min)": -4.5,
    "reduce(range(g.size), 0, [&](int x, int y) -> int { return x + y; })": 36,
    "sort(g)[g.size / 2]": 1,
    "sort(map(g, [&](float x) -> uint4 { return x; }))[g.size - 1]": 5,
    "filter(g, [&](float x) -> uint1 { return x > 0.5; }, 3).size": 3,
    "blocks(g.size, 8) * 10 + blocks(16, 8)": 22,
    "map(g, abs)[1] + g[g.size - 1]": 2,
}


@long
def test_arrays(backend: str) -> None:
    made = [f"float* t{k} = {text};" for k, text in enumerate(ARRAYS)]
    names = ", ".join(f"t{k}" for k in range(len(ARRAYS)))
    declared = [f"float* t{k};" for k in range(len(ARRAYS))]
    text = (
        f"void XEncode(float* g, uint8* c) {{\n{lines(*made)}\n    c = concat({names});\n}}\n"
        f"void XDecode(uint8* c, float* g) {{\n{lines(*declared, f'extract(c, {names});')}\n"
        "    g = t0;\n}\n"
    )
    _, body, _ = encode(bound(text), backend, A)
    start = 0
    for expression, want in ARRAYS.items():
        got = body[start : start + 4 * len(want)].view(F32).tolist()
        assert got == want, expression
        start += -(-4 * len(want) // 16) * 16
    assert start == len(body)


@long
def test_reductions(backend: str) -> None:
    made = [f"float r{k} = {text};" for k, text in enumerate(REDUCED)]
    names = [f"r{k}" for k in range(len(REDUCED))]
    got = received(backend, numbers_sent(made, names), A, len(names))
    wrong = {e: g for (e, w), g in zip(REDUCED.items(), got, strict=True) if g != w}
    assert not wrong, wrong


@long
def test_a_sample_takes_one_element_of_each_stretch(backend: str) -> None:
    text = """
void XEncode(float* g, uint8* c) { float* s = sample(g, 7); c = concat(s); }
void XDecode(uint8* c, float* g) {
    float* s; extract(c, s);
    g = map(range(g.size), [&](int i) -> float { return s[i]; });
}
"""
    program = bound(text)
    seen = set()
    for step in range(50):
        x = np.arange(100, dtype=F32)
        picked = encode(program, backend, x, rng=(9, 9, step))[1][:28].view(F32)
        edges = [0, 15, 30, 44, 58, 72, 86, 100]  # the first 100 % 7 are one longer
        assert all(lo <= p < hi for lo, p, hi in zip(edges, picked, edges[1:], strict=False))
        seen.update(picked.tolist())
    assert len(seen) > 90


# Lambdas and statements.

LAMBDAS = """
param Shape { float slope = 0.25; int bits = 2; uint1 odd = 0; }  // defaults
param Other { float bias; }
void XEncode(float* g, uint8* c, Shape p, Other q) {
    /* a variable may have an operator's name: max and min below are numbers */
    lambda_func larger = [&](float a, float b) -> float {
        if (a > b) { return a; }
        return b;                              // fall through
    }
    float max = reduce(g, -99999, larger);
    float min = reduce(g, 99999, [&](float a, float b) -> float { return a < b ? a : b; });
    lambda_func step = [&](float x) -> float {
        float t = x * p.slope;
        if (t > 1.0) { t = 1.0; } else if (t < -1.0) { t = -1.0; } else { t = t + q.bias; }
        if (x == 0.0) { return 100.0; }
        if (x > 0.0) { if (x > 4.0) { t = t + max; } } else { return t + min; }
        return t;
    };
    float* t = map(g, step);
    lambda_func twice = [&](uint2 k) -> float { return step(k) + step(2.0 * k); }
    float* w = map(g, twice);
    uint<p.bits * 2>* q4 = map(range(g.size), [&](int max) -> uint<p.bits * 2> { return max; });
    float once = twice(1);
    float level = 1.0;
    if (max > 4.0) { level = 2.0; if (min < -100.0) { level = 3.0; } } else { level = 4.0; }
    float* chosen = g;
    lambda_func flip = [&](float x) -> float { return -x; }
    if (p.odd) { chosen = map(g, abs); } else { chosen = map(g, flip); }
    c = concat(max, min, t, w, q4, once, level, chosen);
}
void XDecode(uint8* c, float* g, Shape p) {
    float hi; float lo; float* t; float w[g.size]; uint<4>* q4; float once; float level; float* v;
    extract(c, hi, lo, t, w, q4, once, level, v);
    g = map(t, w, q4, v, [&](float a, float b, uint4 k, float x) -> float {
        return k == 0 ? a : (k == 1 ? b : (k == 2 ? once : (k == 3 ? level : x)));
    });
}
"""


@pytest.mark.parametrize(
    ("backend", "odd"),
    thinned(
        [("reference", 0), ("reference", 1), ("cpu", 0)], keep=[("reference", 0), ("reference", 1)]
    ),
)
def test_lambdas_branches_shadowing_and_parameters(backend: str, odd: int) -> None:
    program = bound(LAMBDAS, {"bias": 0.125, "odd": odd})
    _, body, _ = encode(program, backend, A)
    top, low = body[:8].view(F32)
    assert (top, low) == (5, -4.5)
    steps = [0.875, -4.625, 0.625, 100, 6, 6, -5.5, 0.1875, 0.375]
    assert body[16:52].view(F32).tolist() == steps
    # step(k) + step(2 k), where k is the element as a uint2.
    by_code = {0: 200.0, 1: 0.375 + 0.625, 2: 0.625 + 1.125, 3: 0.875 + 6.0}
    w = [by_code[k] for k in (3, 0, 2, 0, 3, 3, 0, 0, 1)]
    assert body[64:100].view(F32).tolist() == w
    assert body[112:117].tolist() == [0x10, 0x32, 0x54, 0x76, 0x08]
    y = decode(program, backend, body, len(A))
    v = np.abs(A) if odd else -A
    assert y.tolist() == [steps[0], w[1], by_code[1], 2.0, *v[4:].tolist()]


def test_parameters_must_fit() -> None:
    program = parse_program(LAMBDAS, file="lambdas.pse")
    with pytest.raises(UsageError, match="needs a value for 'bias'"):
        program.bind({})
    with pytest.raises(UsageError, match="no parameter 'slop'; it takes: slope, bits, odd, bias"):
        program.bind({"bias": 1, "slop": 2})
    with pytest.raises(UsageError, match=r"odd=2 does not fit uint1 \(0 to 1\)"):
        program.bind({"bias": 1, "odd": 2})
    with pytest.raises(UsageError, match="bits=1.5 must be an integer"):
        program.bind({"bias": 1, "bits": 1.5})


# Blocks.

BLOCKS = """
void XEncode(float* g, uint8* c) {
    float all = reduce(g, 0.0, max);
    float* d = g;
    per (8) {
        float top = reduce(map(g, abs), 0.0, max);
        int size = g.size;
        float lead = g[0] + g[g.size - 1];
        uint4 level = top;
        uint2* q = map(g, [&](float x) -> uint2 { return x > top / 2.0 ? 2 : (x < 0.0 ? 0 : 1); });
        d = map(d, range(g.size), [&](float x, int i) -> float { return x / all + 100 * i; });
        float rest = reduce(map(g, q, [&](float x, uint2 k) -> float { return x - (k - 1) * top; }),
                            0.0, [&](float a, float b) -> float { return a + b; });
    }
    float most = reduce(top, 0.0, [&](float a, float b) -> float { return a + b; });
    c = concat(top, size, lead, level, q, d, rest, most);
}
void XDecode(uint8* c, float* g) {
    float top[blocks(g.size, 8)]; int* size; float* lead; uint4* level; uint2 q[g.size];
    float* d; float* rest; float most;
    extract(c, top, size, lead, level, q, d, rest, most);
    per (8) {
        g = map(q, d, [&](uint2 k, float x) -> float { return (k - 1) * top + 1000 * size + x; });
    }
}
"""


@both
def test_blocks(backend: str) -> None:
    x = (np.arange(20, dtype=F32) - 6) / 2
    program = bound(BLOCKS)
    _, body, _ = encode(program, backend, x)
    parts = [x[:8], x[8:16], x[16:]]
    top = [float(np.abs(p).max()) for p in parts]
    assert body[:12].view(F32).tolist() == top
    assert body[16:40].view(np.int64).tolist() == [8, 8, 4]
    assert body[48:60].view(F32).tolist() == [float(p[0] + p[-1]) for p in parts]
    levels = [int(t) for t in top]
    assert body[64:66].tolist() == [levels[0] | levels[1] << 4, levels[2]]
    codes = [
        [2 if v > t / 2 else (0 if v < 0 else 1) for v in p]
        for p, t in zip(parts, top, strict=True)
    ]
    flat = np.array(sum(codes, []))
    assert body[80:85].tolist() == [
        int(sum(k << 2 * i for i, k in enumerate(flat[s : s + 4]))) for s in range(0, 20, 4)
    ]
    within = np.concatenate([np.arange(len(p)) for p in parts])
    d = (x / x.max() + (100 * within).astype(F32)).astype(F32)
    np.testing.assert_array_equal(body[96:176].view(F32), d)
    rest = [
        float((p - (np.array(k) - 1) * t).sum()) for p, k, t in zip(parts, codes, top, strict=True)
    ]
    np.testing.assert_allclose(body[176:188].view(F32), rest, rtol=1e-6)
    assert body[188:192].view(F32)[0] == sum(top)
    y = decode(program, backend, body, 20)
    sizes = np.repeat([8, 8, 4], [8, 8, 4])
    tops = np.repeat(np.array(top, F32), [8, 8, 4])
    np.testing.assert_allclose(y, (flat - 1) * tops + 1000 * sizes + d, rtol=1e-6)


# State.

DGC = """
// Deep gradient compression: momentum correction, and masking where an element was sent.
param Dgc { float mu = 0.9; int k = 3; }
void DgcEncode(float* g, uint8* c, inout float* u, inout float* v, Dgc p) {
    float* moved = map(u, g, [&](float a, float b) -> float { return p.mu * a + b; });
    float* total = map(v, moved, [&](float a, float b) -> float { return a + b; });
    float limit = sort(map(total, abs))[g.size - p.k];
    uint32* ix = filter(range(g.size), [&](int i) -> uint1 { return abs(total[i]) >= limit; }, p.k);
    float* sent = gather(total, ix);
    float* taken = scatter(ix, map(ix, [&](int i) -> float { return 1.0; }), g.size);
    lambda_func left = [&](float a, float t) -> float { return t > 0.0 ? 0.0 : a; }
    u = map(moved, taken, left);
    v = map(total, taken, left);
    uint32 count = ix.size;
    c = concat(count, ix, sent);
}
void DgcDecode(uint8* c, float* g, Dgc p) {
    uint32 count; uint32* ix; float* sent;
    extract(c, count, ix, sent);
    g = scatter(first(ix, count), first(sent, count), g.size);
}
"""


@long
def test_states_go_on_from_step_to_step(backend: str) -> None:
    rs = np.random.RandomState(0)
    program, n = bound(DGC), 50
    states = [np.zeros(n, F32), np.zeros(n, F32)]
    u, v = np.zeros(n, F32), np.zeros(n, F32)
    for _ in range(4):
        x = rs.standard_normal(n).astype(F32)
        u = F32(0.9) * u + x
        v = v + u
        sent = np.zeros(n, F32)
        largest = np.sort(np.argsort(-np.abs(v), kind="stable")[:3])
        sent[largest] = v[largest]
        result = run(program, backend, x, states)
        np.testing.assert_array_equal(result.decoded, sent)
        assert result.body[:4].view(np.uint32)[0] == 3
        assert result.body[16:28].view(np.uint32).tolist() == largest.tolist()
        u[largest], v[largest] = 0, 0
        states = result.states
        np.testing.assert_array_equal(states[0], u)
        np.testing.assert_array_equal(states[1], v)


# Gradients of other kinds.

SIGN = """
void XEncode(float* g, uint8* c) {
    bfloat16* q = map(g, [&](float x) -> bfloat16 { return x * 3.0; });
    c = concat(q);
}
void XDecode(uint8* c, float* g) {
    bfloat16* q; extract(c, q);
    g = map(q, [&](bfloat16 x) -> float { return x / 3.0; });
}
"""


@both
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_gradients(backend: str, dtype: str) -> None:
    """The program sees floats; what it decodes is rounded to the tensor's type, ties to even."""
    values = np.array([1, -2, 0.5, 3, 1.0078125, -0.0, 6e-8], F32)
    x = values.astype(np.float16).view(np.uint16)
    if dtype == "bf16":
        x = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (x.astype(np.uint32) << 16).view(F32)
    else:
        values = x.view(np.float16).astype(F32)
    program = bound(SIGN)
    _, body, _ = encode(program, backend, x, dtype=dtype)
    sent = (body[:14].view(np.uint16).astype(np.uint32) << 16).view(F32)
    np.testing.assert_allclose(sent, values * 3, rtol=2**-8)
    y = decode(program, backend, body, len(x), dtype=dtype)
    want = sent / F32(3)
    if dtype == "f16":
        np.testing.assert_array_equal(y.view(np.float16), want.astype(np.float16))
    else:
        bits = want.view(np.uint32).astype(np.int64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        np.testing.assert_array_equal(y, nearest.astype(np.uint16))


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_seen_and_never_enter_the_residual(backend: str, bad: float) -> None:
    program, feedback = bound(SIGN), Variant(feedback=True)
    x = np.linspace(-1, 1, 100, dtype=F32)
    residual = np.full(100, 0.25, F32)
    flag, _, _ = encode(program, backend, x, [residual], variant=feedback)
    assert not flag
    x[17] = bad
    flag, _, (after,) = encode(program, backend, x, [residual], variant=feedback)
    assert flag and after[17] == 0.25 and np.isfinite(after).all()
    assert (np.delete(after, 17) != 0.25).any()


@both
def test_decode_adds_and_scales(backend: str) -> None:
    program = bound(SIGN)
    x = np.array([1, 2, 3, 4], F32)
    _, body, _ = encode(program, backend, x)
    y = decode(program, backend, body, 4)
    np.testing.assert_array_equal(decode(program, backend, body, 4, alpha=-2.0), -2 * y)
    into = np.array([10, 20, 30, 40], F32)
    added = decode(program, backend, body, 4, into=into, alpha=0.5)
    np.testing.assert_array_equal(added, into + F32(0.5) * y)


def test_comments_and_line_ends_mean_nothing() -> None:
    """Quotes, backslashes and line ends in comments leave the kernels as they were."""
    noise = '// \\"""\\ \' " \\\n/* """; import os; os.abort()\n\\ */\r\n'
    text = SIGN.replace("\n", f"\n{noise}").replace("map(", "map /* , */ (")
    plain, odd = bound(SIGN), bound(text)
    for backend in ("reference", "cpu"):
        assert odd.source(backend) == plain.source(backend)
    assert bound(SIGN.replace("\n", "\r\n")).source("cpu") == plain.source("cpu")
