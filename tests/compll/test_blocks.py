"""Operators inside `per` blocks, `store` and `repeat`, against the oracle, on both backends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hipress.compll.backends import threads
from hipress.compll.build import read_program
from hipress.compll.passes.derive import Variant
from tests.compll import oracle
from tests.compll.block_programs import BODIES, of_a_filter, packed, program
from tests.compll.harness import bound, decode, encode, run, run_oracle
from tests.compll.length_programs import FILTERED, LENGTHS, OTHERS, RANDOM_K, other
from tests.grid import thinned

F32 = np.float32
EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = (1, 5, 16, 67)
both = pytest.mark.parametrize("backend", ["reference", "cpu"])


def eighths(n: int, seed: int = 0) -> np.ndarray:
    """Multiples of 1/8, many of them equal: all sums are exact."""
    return (np.random.default_rng(seed).integers(-24, 25, n) / 8).astype(F32)


CELLS = [(what, backend) for what in BODIES for backend in ("reference", "cpu")]
COMPILED = (
    "the largest, put back",
    "filtered with little room",
    "stored and repeated",
    "partners of partners",
)


def is_quick(cell: tuple[str, str]) -> bool:
    """Compiling a program for the CPU takes seconds: `make test` does it for a few."""
    return cell[1] == "reference" or cell[0] in COMPILED


@pytest.mark.parametrize(("what", "backend"), thinned(CELLS, keep=is_quick))
def test_as_the_oracle(what: str, backend: str) -> None:
    text = program(BODIES[what])
    made = bound(text)
    for n in SIZES:
        x = eighths(n, seed=n)
        found, right = run(made, backend, x), run_oracle(text, {}, x)
        np.testing.assert_array_equal(found.decoded, right.decoded, err_msg=f"{n} elements")
        assert found.body.tobytes() == right.body.tobytes()


WIDTHS = [(bits, backend) for bits in (3, 5, 6, 12) for backend in ("reference", "cpu")]


@pytest.mark.parametrize(
    ("bits", "backend"), thinned(WIDTHS, keep=lambda cell: cell[1] == "reference" or cell[0] == 5)
)
def test_other_widths(bits: int, backend: str) -> None:
    text = packed(bits)
    made = bound(text)
    for n in (1, 2, 7, 16, 67):
        x = eighths(n, seed=n)
        found, right = run(made, backend, x), run_oracle(text, {}, x)
        assert found.body.tobytes() == right.body.tobytes(), n
        np.testing.assert_array_equal(found.decoded, right.decoded)


@pytest.mark.parametrize(
    ("bits", "backend"), thinned(WIDTHS, keep=lambda cell: cell[1] == "reference" or cell[0] == 12)
)
def test_other_widths_of_a_filtered_array(bits: int, backend: str) -> None:
    """Catches: bytes of other calls behind the codes, where the filter took fewer than it may."""
    text = of_a_filter(bits)
    made = bound(text)
    for n in (7, 67):
        x = eighths(n, seed=n)
        found, right = run(made, backend, x), run_oracle(text, {}, x)
        assert found.body.tobytes() == right.body.tobytes(), n
        np.testing.assert_array_equal(found.decoded, right.decoded)


OTHER_CELLS = [(what, backend) for what in OTHERS for backend in ("reference", "cpu")]
OTHER_COMPILED = ("largest and back", "blocks of the gradient and of another array, of one size")


@pytest.mark.parametrize(
    ("what", "backend"),
    thinned(OTHER_CELLS, keep=lambda cell: cell[1] == "reference" or cell[0] in OTHER_COMPILED),
)
def test_blocks_of_other_lengths(what: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MIN_TILES", 1)  # so that few elements are shared out too
    text = other(what)
    made = bound(text)
    for n in LENGTHS:
        x = eighths(n, seed=n)
        right = run_oracle(text, {}, x)
        for pool in (None, threads.runner(2)) if backend == "cpu" else (None,):
            found = run(made, backend, x, pool=pool)
            assert found.body.tobytes() == right.body.tobytes(), n
            np.testing.assert_array_equal(found.decoded, right.decoded, err_msg=f"{n} elements")
            np.testing.assert_array_equal(found.added, right.added)


@both
@pytest.mark.parametrize("feedback", [False, True])
def test_sampled_values_with_a_scale_for_each_block(backend: str, feedback: bool) -> None:
    """Decode cuts what it extracts; error feedback reads it where encode made it."""
    made, variant = bound(RANDOM_K), Variant(feedback=feedback)
    for n in (1, 8, 504, 512, 523, 1600):  # samples: none, one, and each side of a block of 64
        x, residual = eighths(n, seed=n), [eighths(n, seed=n + 1)] * feedback
        found = run(made, backend, x, residual, variant=variant)
        right = run_oracle(RANDOM_K, {}, x, residual, variant=variant)
        assert found.body.tobytes() == right.body.tobytes(), n
        np.testing.assert_array_equal(found.decoded, right.decoded)
        np.testing.assert_array_equal(found.added, right.added)
        for new, want in zip(found.states, right.states, strict=True):
            np.testing.assert_array_equal(new, want)
    num_bytes = 16 + 16 * 2 + 104  # a key, 4 scales, 200 codes
    assert made.body_bytes()(1600) <= num_bytes < 1600


@both
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("first_only", [0, 1])
def test_filtered_values_with_a_scale_for_each_block(
    backend: str, feedback: bool, first_only: int
) -> None:
    params, variant = {"first_only": first_only}, Variant(feedback=feedback)
    made = bound(FILTERED, params)
    for n in (1, 30, 62, 300):
        for scale in (0, 1, 4):  # none, half and all pass
            x, residual = scale * eighths(n, seed=n), [eighths(n, seed=n + 1) / 8] * feedback
            found = run(made, backend, x, residual, variant=variant)
            right = run_oracle(FILTERED, params, x, residual, variant=variant)
            assert found.body.tobytes() == right.body.tobytes(), n
            np.testing.assert_array_equal(found.decoded, right.decoded)
            np.testing.assert_array_equal(found.added, right.added)
            for new, want in zip(found.states, right.states, strict=True):
                np.testing.assert_array_equal(new, want)


def test_the_gradient_may_be_named() -> None:
    """`per (size)` and `per (gradient, size)` make the same kernels, in decode too."""
    short = packed(5)
    long = short.replace("per (16)", "per (g, 16)")
    assert long != short
    for backend in ("reference", "cpu", "gpu"):
        assert bound(long).source(backend) == bound(short).source(backend)


STATE = """
void XEncode(float* g, inout float* r, uint8* c) {
    per (16) {
        float* v = map(g, r, [&](float x, float y) -> float { return x + y; });
        int* at = largest(map(v, abs), 3);
        float* s = gather(v, at);
        r = map(v, scatter(at, s, g.size), [&](float x, float y) -> float { return x - y + r[3]; });
    }
    c = concat(at, s);
}
void XDecode(uint8* c, float* g) {
    int* at; float* s;
    extract(c, at, s);
    per (16) { g = scatter(at, s, g.size); }
}
"""


@both
def test_a_state_that_is_read_elsewhere_in_its_block(backend: str) -> None:
    """All of a block is read before its state changes."""
    for n in (1, 16, 67):
        x, old = eighths(n, seed=n), eighths(n, seed=n + 1)
        found, right = run(bound(STATE), backend, x, [old]), run_oracle(STATE, {}, x, [old])
        assert found.body.tobytes() == right.body.tobytes(), n
        np.testing.assert_array_equal(found.states[0], right.states[0])


SENT = "void XDecode(uint8* c, float* g) { float a[g.size]; extract(c, a); g = a; }"
WHOLE = {
    "a function that reads the block": f"""void XEncode(float* g, uint8* c) {{
    per (16) {{
        int m = g[0];
        float* s = scan(map(range(5), abs), 1.0, [&](float x, float y) -> float {{
            return x * m + y;
        }});
        int r = reduce(range(5), 1, [&](int x, int y) -> int {{ return x + y + m; }});
        float* a = map(range(g.size), [&](int i) -> float {{ return s[i] + r; }});
    }}
    c = concat(a);
}}
{SENT}""",
    "counts of blocks in decode": """void XEncode(float* g, uint8* c) {
    float* t = map(range(6), [&](int i) -> float { return g[i]; });
    per (16) { uint8 k = 10 * g[0]; }
    c = concat(k, t);
}
void XDecode(uint8* c, float* g) {
    uint8* k; float* t;
    extract(c, k, t);
    per (16) {
        float* f = first(t, k);
        float m = reduce(f, 0.0, max) + reduce(first(t, 9), 0.0, max);
        g = map(range(g.size), [&](int i) -> float { return f[i] + m + f.size; });
    }
}""",
    "a filtered part, read by the block": """void XEncode(float* g, uint8* c) {
    int* at = filter(range(g.size), [&](int i) -> uint1 { return g[i] > 0.5; }, 9);
    c = concat(at.size, at, map(g, abs));
}
void XDecode(uint8* c, float* g) {
    int k; int* at; float* a;
    extract(c, k, at, a);
    int* some = first(at, k);
    per (16) {
        float* v = gather(a, some);
        float m = reduce(v, 0.0, max);
        g = map(range(g.size), [&](int i) -> float { return v[i] + m; });
    }
}""",
}


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(
    ("what", "backend"),
    thinned(
        [(what, backend) for what in WHOLE for backend in ("reference", "cpu")],
        keep=lambda cell: cell[1] == "reference" or cell[0].startswith("counts"),
    ),
)
def test_programs_as_the_oracle(what: str, backend: str, feedback: bool) -> None:
    text, variant = WHOLE[what], Variant(feedback=feedback)
    made = bound(text)
    for n in SIZES:
        x, states = eighths(n, seed=n), [eighths(n, seed=n + 1)] * feedback
        found = run(made, backend, x, states, variant=variant)
        right = run_oracle(text, {}, x, states, variant=variant)
        assert found.body.tobytes() == right.body.tobytes(), n
        np.testing.assert_array_equal(found.decoded, right.decoded)
        for a, b in zip(found.states, right.states, strict=True):
            np.testing.assert_array_equal(a, b)


def top_k(x: np.ndarray, block: int, k: int) -> np.ndarray:
    """Each block without all but its k largest magnitudes, of equal ones the first."""
    kept = np.zeros_like(x)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        places = np.argsort(-np.abs(part), kind="stable")[:k]
        kept[start + places] = part[places]
    return kept


@both
@pytest.mark.parametrize("feedback", [False, True])
def test_block_top_k(backend: str, feedback: bool) -> None:
    """The example, with error feedback in the same pass."""
    codec = read_program(EXAMPLES / "blocktopk.pse").bind({"block": 64, "k": 5})
    for n in (1, 3, 5, 64, 65, 300):
        x, residual = eighths(n, seed=n), eighths(n, seed=n + 1)
        v = x + residual if feedback else x
        found = run(codec, backend, x, [residual] * feedback, variant=Variant(feedback=feedback))
        right = top_k(v, 64, 5)
        np.testing.assert_array_equal(found.decoded, right)
        np.testing.assert_array_equal(found.added, F32(0.5) * right)
        if feedback:
            np.testing.assert_array_equal(found.states[0], v - right)
    kernel = codec.load(backend, variant=Variant(feedback=feedback)).encode
    assert len(kernel.passes) == 1 and not kernel.temps


@both
def test_rotated_signs(backend: str) -> None:
    """The example: a block is decoded as the rotated signs times their mean magnitude."""
    codec = read_program(EXAMPLES / "rotated.pse").bind({"log": 5})
    rotation = np.ones((1, 1), F32)
    for _ in range(5):
        rotation = np.block([[rotation, rotation], [rotation, -rotation]])
    for n in (1, 32, 100):
        x = eighths(n, seed=n)
        found = run(codec, backend, x)
        signs = [1 - 2 * (oracle.bits32(i, 0, (7, 0, 0)) * 2 >> 32) for i in range(n)]
        padded = np.zeros(-(-n // 32) * 32, F32)
        padded[:n] = x * np.array(signs, F32)
        turned = padded.reshape(-1, 32) @ rotation
        coded = np.where(turned < 0, -1, 1) * np.abs(turned).sum(axis=1, keepdims=True)
        right = (coded @ rotation / 1024).reshape(-1)[:n] * np.array(signs, F32)
        np.testing.assert_allclose(found.decoded, right, rtol=1e-5, atol=1e-6)


@both
def test_a_bad_place_is_refused(backend: str) -> None:
    codec = read_program(EXAMPLES / "blocktopk.pse").bind({"block": 64, "k": 5})
    _, body, _ = encode(codec, backend, eighths(100))
    decode(codec, backend, body, 100)
    body[:20].view(np.uint16)[7] = 36  # the second block has 36 elements
    with pytest.raises(oracle.Refused, match="an index in the payload is out of range"):
        decode(codec, backend, body, 100)


def test_examples_are_short() -> None:
    for name in ("blocktopk", "rotated"):
        text = (EXAMPLES / f"{name}.pse").read_text("utf-8")
        lines = [s for s in text.splitlines() if s.strip() and not s.startswith("//")]
        assert len(lines) <= 30, name


ANY_BLOCKS = """
void XEncode(float* g, uint8* c) {
    int* whole = map(g, [&](float x) -> int { return 1e18 * x; });
    per (64) {
        uint8* a = largest(g, 5);
        uint8* b = largest(map(g, abs), 40);
        uint8* d = largest(whole, 7);
    }
    c = concat(a, b, d);
}
void XDecode(uint8* c, float* g) {
    uint8* a; uint8* b; uint8* d;
    extract(c, a, b, d);
    g = map(range(g.size), [&](int i) -> float { return a[i]; });
}
"""


def test_the_largest_of_blocks_that_are_not_alike() -> None:
    """Catches: a limit that fits the block before, and keys at the ends of their range."""
    rng = np.random.default_rng(3)
    kinds = [
        lambda: rng.standard_normal(64),
        lambda: rng.standard_normal(64) * 10.0 ** rng.integers(-30, 30),
        lambda: np.zeros(64),
        lambda: np.where(rng.random(64) < 0.05, rng.standard_normal(64), 0.0),
        lambda: rng.integers(-2, 3, 64) * 1.0,
        lambda: np.full(64, rng.standard_normal()),
        lambda: np.sort(rng.standard_normal(64)),
        lambda: -np.abs(rng.standard_normal(64)),
        lambda: rng.choice([3e38, -3e38, 1e-45, 0.0, -0.0, 1.0], 64),
    ]
    x = np.concatenate([kinds[k]() for k in rng.integers(0, len(kinds), 300)]).astype(F32)[:-3]
    made = bound(ANY_BLOCKS)
    found, right = (encode(made, backend, x)[1] for backend in ("cpu", "reference"))
    assert found.tobytes() == right.tobytes()


SMALLEST_INT = """
void XEncode(float* g, uint8* c) {
    int* code = map(g, [&](float x) -> int { return x > 0.0 ? 1 << 62 : (1 << 62) * (0 - 2); });
    per (16) { uint8* at = largest(code, 5); }
    c = concat(at);
}
void XDecode(uint8* c, float* g) {
    uint8* at;
    extract(c, at);
    g = map(range(g.size), [&](int i) -> float { return at[i]; });
}
"""


@both
def test_the_smallest_int_is_not_among_the_largest(backend: str) -> None:
    """Catches: a key that is negated, which leaves the smallest int as it is."""
    x = eighths(67)
    found, right = run(bound(SMALLEST_INT), backend, x), run_oracle(SMALLEST_INT, {}, x)
    assert found.body.tobytes() == right.body.tobytes()
    wanted = [places[-1] for places in np.split(right.body[:25], 5)]
    assert max(wanted) > 4, "the first five places are not the largest everywhere"
