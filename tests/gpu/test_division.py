"""Division by a number that all elements share gives the bits of IEEE division, for all numbers.

The function that kernels call is run here on NumPy's arrays, with a fused multiply-add of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hipress.compll.backends.gpu import prelude
from hipress.compll.backends.gpu.runtime import fused

Floats = NDArray[np.float32]


class Tile(np.ndarray):
    """An array with the one method of a tile that the function calls."""

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        return self.view(kind) if bitcast else self.astype(kind)


class Language:
    """What the function calls of Triton's language."""

    int32, uint32 = np.int32, np.uint32

    def __init__(self) -> None:
        self.usual = 0
        """Tiles that were divided by the usual instructions."""

    def div_rn(self, x: Any, d: Any) -> Any:
        self.usual += np.ndim(x) > 0
        return np.divide(x, d, dtype=np.float32)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return fused(x, y, z).view(Tile)

    def min(self, x: Any, axis: int | None = None) -> Any:
        return np.min(x, axis)

    def max(self, x: Any, axis: int | None = None) -> Any:
        return np.max(x, axis)

    abs = staticmethod(np.abs)
    where = staticmethod(np.where)
    reshape = staticmethod(np.reshape)


@pytest.fixture
def language(monkeypatch: pytest.MonkeyPatch) -> Iterator[Language]:
    made = Language()
    monkeypatch.setattr(prelude, "tl", made, raising=False)
    with np.errstate(all="ignore"):
        yield made


def floats(bits: Any) -> Floats:
    return np.asarray(bits, np.uint32).view(np.float32)


def made(exponents: Any, mantissas: Any) -> Floats:
    """Floats of exponents from -126 on and of mantissas below 2^23."""
    return floats(((np.asarray(exponents) + 127) << 23) | mantissas)


def check(x: Floats, d: np.float32, each: int = 8) -> None:
    tile = np.resize(x, (1, -(-x.size // 32) * 32)).view(Tile)
    have = np.asarray(prelude._div_shared(tile, d, 32 // each, each))  # type: ignore[attr-defined]
    want = np.asarray(tile) / d
    same = (have.view(np.uint32) == want.view(np.uint32)) | (np.isnan(have) & np.isnan(want))
    at = np.flatnonzero(~same)
    assert not at.size, (np.asarray(tile).flat[at[0]], d, have.flat[at[0]], want.flat[at[0]])


def test_a_fused_product_and_sum_is_rounded_once() -> None:
    rng = np.random.default_rng(1)
    x, y = (made(rng.integers(-40, 40, 3000), rng.integers(0, 2**23, 3000)) for _ in range(2))
    z = np.where(rng.random(3000) < 0.5, -x * y, y) * np.float32(1 + 2**-23)
    # Sums that lie beside the middle of two floats by less than double precision can tell.
    x[:2], y[:2], z[:2] = 1 + 2**-12, (2**-40, -(2**-40)), 1 + 2**-23
    z[2], x[2], y[2] = 1.0, 2**-24 + 2**-47, 1 + 2**-23
    for a, b, c, have in zip(x, y, z, fused(x, y, z), strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        others = (np.nextafter(have, np.float32(s), dtype=np.float32) for s in (-np.inf, np.inf))
        gap = abs(exact - Fraction(float(have)))
        assert all(gap <= abs(exact - Fraction(float(o))) for o in others), (a, b, c, have)


MANTISSAS = [0, 1, 2, 3, 0x2AAAAA, 0x3504F3, 0x3504F4, 0x400000, 0x555555, 0x7FFFFD, 0x7FFFFE,
             0x7FFFFF]  # fmt: skip


@pytest.mark.parametrize("each", [4, 8])
def test_numbers_of_all_safe_sizes(language: Language, each: int) -> None:
    rng = np.random.default_rng(each)
    numbers = 2**13
    for k in range(300):
        d_mantissa = MANTISSAS[k] if k < len(MANTISSAS) else rng.integers(0, 2**23)
        d = made(rng.integers(-62, 24), d_mantissa)[()]
        x = made(rng.integers(-100, 64, numbers), rng.integers(0, 2**23, numbers))
        x *= rng.choice(np.float32([1, -1]), numbers)
        x[: len(MANTISSAS)] = made(0, MANTISSAS)
        x[-2:] = 0.0, -0.0
        check(x, d, each)
    assert language.usual == 0


def test_quotients_beside_the_middle_of_two_floats(language: Language) -> None:
    """The hard cases: M * D = X * 2^t + j for an odd M of 25 bits and a small j."""
    rng = np.random.default_rng(3)
    found = 0
    divisors = [*rng.integers(2**22, 2**23, 2000) * 2 + 1, 2**24 - 1, 2**24 - 3, 2**23 + 1]
    for divisor in map(int, divisors):
        d = np.float32(divisor * 2.0 ** int(rng.integers(-60, -20)))
        quotients = []
        for t in (24, 25):
            inverse = pow(divisor, -1, 2**t)
            for j in (-7, -5, -3, -1, 1, 3, 5, 7):
                middle = inverse * j % 2**t
                middle += 2**24 if middle < 2**24 else 0
                x, rest = divmod(middle * divisor - j, 2**t)
                if rest == 0 and 2**23 <= x < 2**24:
                    quotients.append(x)
        found += len(quotients)
        if quotients:
            check(np.float32(quotients) * np.float32(2.0 ** int(rng.integers(-60, 30))), d)
    assert found > 8000 and language.usual == 0


def test_numbers_that_are_not_safe(language: Language) -> None:
    rng = np.random.default_rng(4)
    special = floats([0, 1, 2, 0x007FFFFF, 0x00800000, 0x00800001, 0x0D7FFFFF, 0x0D800000,
                      0x3F800000, 0x5F800000, 0x5F800001, 0x7F7FFFFF, 0x7F800000,
                      0x7FC00000])  # fmt: skip
    special = np.concatenate([special, -special])
    edges = np.float32([2.0**-62, 2.0**24, 1.0, 3.0, 1 / 3])
    edges = np.concatenate(
        [edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(9e9))]
    )
    for d in np.concatenate([special, edges, floats(rng.integers(0, 2**32, 500))]):
        for x in special:  # one such number among harmless ones, where the usual way must be taken
            check(np.append(np.float32([0.0, -0.0, 1.0, 2.5, -0.3]), x), d)
        check(special, d)
    assert language.usual > 100
    for _ in range(500):  # any bits
        check(floats(rng.integers(0, 2**32, 4096)), floats(rng.integers(0, 2**32))[()])


def test_a_condition_that_all_elements_share(language: Language) -> None:
    x = np.float32([1.0, -2.0, 1e-40, 0.0] * 8).reshape(1, 32).view(Tile)
    for d in np.float32([3.0, 0.0, 1e30]):
        for holds, want in ((True, np.asarray(x) / d), (False, np.full_like(x, 7.0))):
            have = prelude._div_shared(x, d, 4, 8, np.bool_(holds), np.float32(7.0))  # type: ignore[attr-defined]
            assert np.array_equal(np.asarray(have), want, equal_nan=True)


def test_a_remainder_that_is_lost_would_be_seen(language: Language) -> None:
    """What is not safe must be divided in another way, or these tests fail."""
    x, d = made(-120, np.random.default_rng(5).integers(0, 2**23, 2**16)), np.float32(0.7)
    r = np.float32(1) / d
    q = x * r
    assert (fused(fused(q, d, -x), -r, q) != x / d).any()
    check(x, d)
    assert language.usual == 1
