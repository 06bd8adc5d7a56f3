"""HiPress's own TernGrad program, unchanged, and the seven defects its published code had.

The list is in our notes on the original (section 3.5), found by reading: each test below fails on
code that has the defect.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hipress.compll.backends.reference import prelude
from hipress.compll.build import Bound, read_program
from tests.compll.harness import RNG, decode, encode
from tests.grid import thinned

PROGRAM = Path(__file__).parent / "programs" / "TernGradEncode.pse"
BACKENDS = ("reference", "cpu")
WIDTHS = (1, 2, 4, 8)
CODES = 16
"""Where codes start: bitwidth, tail, two bytes of room, min, max, four bytes of room."""

both = pytest.mark.parametrize("backend", BACKENDS)


def widths(tried: Sequence[int], *, compiled: int) -> list[Any]:
    """Both backends with all widths; `make test` compiles one of them."""
    return thinned(
        itertools.product(BACKENDS, tried), lambda c: c[0] == "reference" or c[1] == compiled
    )


@cache
def terngrad(bitwidth: int) -> Bound:
    return read_program(PROGRAM).bind({"bitwidth": bitwidth})


def unpack(body: np.ndarray, bitwidth: int, n: int) -> np.ndarray:
    """Codes as the language lays them: element k in bits k * bitwidth and up, low bits first."""
    bits = np.unpackbits(body[CODES:], bitorder="little")[: n * bitwidth]
    return (bits.reshape(n, bitwidth) << np.arange(bitwidth)).sum(axis=1)


def whole_levels(bitwidth: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A gradient on the levels themselves, so that no draw can move it: codes, values."""
    codes = np.random.RandomState(n).randint(0, 2**bitwidth, n)
    codes[: 2 * (n > 1)] = (2**bitwidth - 1, 0)[: 2 * (n > 1)]
    return codes, codes.astype(np.float32)


def test_the_program_is_the_published_one() -> None:
    digest = hashlib.sha256(PROGRAM.read_bytes()).hexdigest()
    assert digest == "a3eb348ff022a7db691fa7acd17877e3f7d2ff57ac755a4fa407c046987c9c02"


@pytest.mark.parametrize(("backend", "bitwidth"), widths(WIDTHS, compiled=2))
def test_it_compiles_unchanged_and_round_trips_within_a_step(backend: str, bitwidth: int) -> None:
    program = terngrad(bitwidth)
    for n in (1, 7, 8, 1000, 4097):
        x = np.random.RandomState(n).standard_normal(n).astype(np.float32)
        flag, body, _ = encode(program, backend, x)
        low, high = body[4:12].view(np.float32)
        assert not flag and (body[0], body[1]) == (bitwidth, n % 2**bitwidth % 256)
        assert (low, high) == (x.min(), x.max())
        y = decode(program, backend, body, n)
        gap = (np.float64(high) - low) / (2**bitwidth - 1)
        # At most one step away; a few roundings of the largest magnitude come on top.
        assert np.abs(y.astype(np.float64) - x).max() <= gap + 4 * np.spacing(np.abs(x).max())


def test_both_backends_write_the_same_bytes() -> None:
    x = np.random.RandomState(3).standard_normal(4097).astype(np.float32)
    bodies = [encode(terngrad(2), backend, x)[1].tobytes() for backend in BACKENDS]
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize(("backend", "bitwidth"), widths([2, 4], compiled=2))
def test_1_a_byte_holds_its_own_elements(backend: str, bitwidth: int) -> None:
    """Defect: byte i packed elements i+1 ... i+4 in place of 4i ... 4i+3."""
    codes, x = whole_levels(bitwidth, 1001)
    _, body, _ = encode(terngrad(bitwidth), backend, x)
    np.testing.assert_array_equal(unpack(body, bitwidth, len(x)), codes)


@both
def test_2_encode_and_decode_agree_on_the_order_of_bits(backend: str) -> None:
    """Defect: encode put the first element into the high bits, decode took it from the low ones."""
    x = np.array([3, 0, 1, 0], np.float32)
    _, body, _ = encode(terngrad(2), backend, x)
    assert body[CODES] == 3 | 0 << 2 | 1 << 4 | 0 << 6
    np.testing.assert_array_equal(decode(terngrad(2), backend, body, 4), x)


@both
def test_3_reductions_run_in_float(backend: str) -> None:
    """Defect: integer start values made them run in ints: min = max = 0 inside (-1, 1)."""
    x = np.linspace(-0.75, 0.5, 1000, dtype=np.float32)
    _, body, _ = encode(terngrad(4), backend, x)
    assert body[4:12].view(np.float32).tolist() == [-0.75, 0.5]
    y = decode(terngrad(4), backend, body, len(x))
    assert len(np.unique(y)) == 16 and np.abs(y - x).max() <= 1.25 / 15 + 1e-6


@pytest.mark.parametrize(("backend", "bitwidth"), widths(WIDTHS, compiled=2))
def test_4_no_element_is_lost_to_a_wrong_tail(backend: str, bitwidth: int) -> None:
    """Defect: the tail is size mod 2**bitwidth, and decode dropped as many elements.

    The program still sends that byte; nothing is decoded by it.
    """
    for n in range(2, 20):
        codes, x = whole_levels(bitwidth, n)
        _, body, _ = encode(terngrad(bitwidth), backend, x)
        for tail in (body[1], 0, 255):
            body[1] = tail
            np.testing.assert_array_equal(decode(terngrad(bitwidth), backend, body, n), x)


@both
def test_5_the_dither_does_not_repeat(backend: str) -> None:
    """Defect: every byte's generator was seeded with the same clock value."""
    n = 4096
    x = np.full(n, 0.5, np.float32)
    x[0], x[1] = 0, 3
    _, body, _ = encode(terngrad(2), backend, x)
    codes = unpack(body, 2, n)[4:]
    assert set(codes) == {0, 1} and abs(codes.mean() - 0.5) < 4 * 0.5 / np.sqrt(n)
    assert len(np.unique(body[CODES + 1 : CODES + 1024])) == 16  # of four elements of 0 or 1
    for lag in range(1, 65):
        assert np.mean(codes[lag:] == codes[:-lag]) < 0.6
    assert encode(terngrad(2), backend, x, rng=(1, 2, 3))[1].tobytes() != body.tobytes()


@pytest.mark.parametrize(("backend", "bitwidth"), widths([4, 8], compiled=4))
def test_6_rounding_up_never_leaves_the_code(backend: str, bitwidth: int) -> None:
    """Defect: a draw of (nearly) 1 at the top gave 2**bitwidth, which ran into the neighbour."""
    n, top = 4096, 2**bitwidth - 1
    x = np.zeros(n, np.float32)
    x[::2] = top
    # A step among whose draws one is so near 1 that the sum is rounded up to 2**bitwidth.
    rng = (*RNG[:2], {4: 1156, 8: 289}[bitwidth])
    drawn = prelude._uniform(np.arange(0, n, 2), 0, rng)
    assert np.any(np.float32(top) + drawn == top + 1), "no draw puts this to the test"
    _, body, _ = encode(terngrad(bitwidth), backend, x, rng=rng)
    np.testing.assert_array_equal(unpack(body, bitwidth, n), x.astype(np.int64))


@both
def test_7_sizes_are_rounded_up(backend: str) -> None:
    """Defect: C's integer division in a symbolic size (7/8 = 0) lost the last byte."""
    for bitwidth in WIDTHS:
        program = terngrad(bitwidth)
        for n in (1, 3, 7, 8, 9, 15, 17, 31, 33, 63):
            num_bytes = -(-n * bitwidth // 8)
            assert program.body_bytes()(n) == CODES + -(-num_bytes // 16) * 16
            codes, x = whole_levels(bitwidth, n)
            _, body, _ = encode(program, backend, x)
            if n > 1:  # one element alone is its own minimum
                np.testing.assert_array_equal(decode(program, backend, body, n), x)
