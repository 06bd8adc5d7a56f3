"""Philox4x32-7: published answers, and the numbers that programs get from it."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from hipress.compll.backends.cpu import prelude as cpu_prelude
from hipress.compll.backends.reference import prelude as reference_prelude
from tests.compll import oracle
from tests.compll.harness import bound, decode, encode

ONES = 0xFFFFFFFF
# Random123 (Salmon et al., SC'11), tests/kat_vectors, "philox4x32 7": counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]
compiled = njit(error_model="numpy")(cpu_prelude._philox)


def on_cpu(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    # As generated code calls it: words that are unsigned already.
    return tuple(int(w) for w in compiled(*map(np.uint32, (*counter, *key))))


def on_reference(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    words = reference_prelude._philox([np.array([c]) for c in counter], key)
    return tuple(int(w[0]) for w in words)


@pytest.mark.parametrize("philox", [on_cpu, on_reference, oracle.philox])
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_published_answers(philox, counter, key, answer) -> None:
    assert philox(counter, key) == answer


DRAWS = """
void XEncode(float* g, uint8* c) {
    float* unit = map(g, [&](float x) -> float { return random<float>(0, 1); });
    float* wide = map(g, [&](float x) -> float { return random<float>(-2, 6); });
    uint16* whole = map(g, [&](float x) -> uint16 { return random<int>(10, 1000); });
    per (8) {
        float* block = map(g, [&](float x) -> float { return random<float>(0, 1); });
        float* index = map(range(g.size), [&](int i) -> float { return random<float>(0, 1); });
    }
    float one = random<float>(0, 1);
    c = concat(unit, wide, whole, block, index, one);
}
void XDecode(uint8* c, float* g) {
    float* unit; float* wide; uint16* whole; float* block; float* index; float one;
    extract(c, unit, wide, whole, block, index, one);
    g = unit;
}
"""
SEED, STREAM, STEP = 0xFEDC_BA98_7654_3210, 0x8000_0001, 0xFFFF_FFFF


def words(site: int, n: int) -> np.ndarray:
    """philox(seed, stream, step, i // 4)[i % 4] of the n elements, as the manual defines it."""
    key = (SEED & ONES, SEED >> 32)
    return np.array(
        [oracle.philox((i // 4, site, STEP, STREAM), key)[i % 4] for i in range(n)], np.uint64
    )


def unit_floats(site: int, n: int) -> np.ndarray:
    return (words(site, n) >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


@pytest.mark.parametrize("n", [1, 7, 2051])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_random_numbers_of_a_program(backend: str, n: int) -> None:
    program = bound(DRAWS)
    x = np.zeros(n, np.float32)
    _, body, _ = encode(program, backend, x, rng=(SEED, STREAM, STEP))
    room = -(-4 * n // 16) * 16
    unit, wide = (body[k * room :][: 4 * n].view(np.float32) for k in (0, 1))
    half = -(-2 * n // 16) * 16
    whole = body[2 * room :][: 2 * n].view(np.uint16)
    block, index = (body[2 * room + half + k * room :][: 4 * n].view(np.float32) for k in (0, 1))
    # `one` stands right behind `index`: a number needs no 16-byte boundary.
    one = body[3 * room + half + 4 * n :][:4].view(np.float32)
    np.testing.assert_array_equal(unit, unit_floats(0, n))
    np.testing.assert_array_equal(wide, np.float32(-2) + unit_floats(1, n) * np.float32(8))
    np.testing.assert_array_equal(whole, 10 + (words(2, n) * np.uint64(990) >> np.uint64(32)))
    np.testing.assert_array_equal(block, unit_floats(3, n))
    np.testing.assert_array_equal(index, unit_floats(4, n))
    np.testing.assert_array_equal(one, unit_floats(5, 1))
    assert decode(program, backend, body, n).tobytes() == unit.tobytes()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_part_of_the_counter_matters(backend: str) -> None:
    program = bound(DRAWS)
    x = np.zeros(64, np.float32)
    rngs = [(1, 2, 3), (2, 2, 3), (1 << 32 | 1, 2, 3), (1, 3, 3), (1, 2, 4)]
    drawn = [encode(program, backend, x, rng=rng)[1][:256].view(np.float32) for rng in rngs]
    sites = encode(program, backend, x, rng=rngs[0])[1][-272:-16].view(np.float32)
    for k, a in enumerate([*drawn, sites]):
        for b in drawn[:k]:
            assert np.mean(a == b) < 0.1  # not even shifted or reused in part
    again = encode(program, backend, x, rng=rngs[0])[1][:256].view(np.float32)
    np.testing.assert_array_equal(again, drawn[0])


def test_random_floats_are_uniform() -> None:
    """0 <= u < 1 with the mean and the spread of a uniform number, and no two neighbours tied."""
    program = bound(DRAWS)
    n = 100_000
    _, body, _ = encode(program, "cpu", np.zeros(n, np.float32))
    unit = body[: 4 * n].view(np.float32)
    assert unit.min() >= 0 and unit.max() < 1
    assert abs(unit.mean() - 0.5) < 4 * np.sqrt(1 / 12 / n)
    assert abs(unit.var() - 1 / 12) < 4 * np.sqrt(1 / 180 / n)
    assert abs(np.corrcoef(unit[:-1], unit[1:])[0, 1]) < 4 / np.sqrt(n)
