"""What generated CPU code calls: copied, function by function, into each module that needs it.

These are plain functions that numba compiles; they are also what the tests call. The names they
use (`f32`, `u64`, ...) are NumPy's types, as in every generated module. Loops run from 0 over a
slice: with computed indices the same loops are ten times slower.
"""

# ruff: noqa: SIM108
from __future__ import annotations

from typing import Any

import numpy as np

f32, f64, i32, i64 = np.float32, np.float64, np.int32, np.int64
u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
_view = np.ndarray.view
"""The same memory as elements of another type; generated modules have an intrinsic of this name."""


def _copy(out: Any, x: Any) -> None:
    """As `out[:] = x`, for which numba compiles its error of unequal lengths for a second."""
    for i in range(min(len(out), len(x))):
        out[i] = x[i]


def _clear(out: Any) -> None:
    for i in range(len(out)):
        out[i] = 0


def _min(a: Any, b: Any) -> Any:
    return a if a < b else b


def _max(a: Any, b: Any) -> Any:
    return a if a > b else b


def _min_nan(a: Any, b: Any) -> Any:
    return a if a < b or a != a else b


def _max_nan(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


def _sign_f(x: Any) -> Any:
    return f32(1.0) if x > f32(0.0) else (f32(-1.0) if x < f32(0.0) else f32(0.0))


def _sign_i(x: Any) -> Any:
    return i32(1) if x > 0 else (i32(-1) if x < 0 else i32(0))


def _exponent(x: Any) -> Any:
    """floor(log2(abs(x))) from the bits; a subnormal number is made normal first."""
    b = i32(f32(x).view(i32) & i32(0x7FFFFFFF))
    small = f32(abs(f32(x)) * f32(8388608.0)).view(i32)
    e = i32(i32(b >> i32(23)) - i32(127))
    tiny = i32(i32(small >> i32(23)) - i32(150))
    e = tiny if b < i32(0x00800000) else e
    return i32(-150) if b == i32(0) else e


def _bits(x: Any) -> Any:
    return i64(f32(x).view(u32))


def _from_bits(k: Any) -> Any:
    return u32(k & i64(0xFFFFFFFF)).view(f32)


def _power(e: Any) -> Any:
    """2.0 to the power of an int from -126 to 127."""
    return i32(i32(i32(e) + i32(127)) << i32(23)).view(f32)


def _finite(x: Any) -> Any:
    return abs(x) <= f32(3.4028234663852886e38)


def _add(a: Any, b: Any) -> Any:
    """Wraps; of signed ints, numba tells LLVM that no sum, difference or product overflows."""
    return i64(u64(a) + u64(b))


def _sub(a: Any, b: Any) -> Any:
    return i64(u64(a) - u64(b))


def _mul(a: Any, b: Any) -> Any:
    return i64(u64(a) * u64(b))


def _magnitude(a: Any) -> Any:
    return u64(a) if a >= 0 else u64(0) - u64(a)


def _idiv(a: Any, b: Any) -> Any:
    """Towards zero, as in C; by zero gives 0."""
    if b == 0:
        return i64(0)
    q = _magnitude(a) // _magnitude(b)
    return i64(q if (a < 0) == (b < 0) else u64(0) - q)


def _imod(a: Any, b: Any) -> Any:
    if b == 0:
        return i64(0)
    r = _magnitude(a) % _magnitude(b)
    return i64(r if a >= 0 else u64(0) - r)


def _shl(a: Any, b: Any) -> Any:
    return i64(a) << i64(b) if 0 <= b and b < 63 else i64(0)


def _shr(a: Any, b: Any) -> Any:
    return i64(a) >> i64(b) if 0 <= b and b < 63 else (i64(-1) if a < 0 else i64(0))


def _to_int(x: Any) -> Any:
    """Towards zero; NaN is 0, what does not fit saturates."""
    v = x if abs(x) < f32(9.0e18) else (f32(9.0e18) if x > f32(0) else f32(-9.0e18))
    return i64(v if x == x else f32(0))


def _to_small_int(x: Any) -> Any:
    """Towards zero, of what is known to be at least zero and to fit, or NaN, which is 0."""
    return i32(x if x > f32(0) else f32(0))


def _sat_f(x: Any, top: Any) -> Any:
    """A float as an unsigned code: NaN and negatives are 0, what is too large is `top`."""
    v = x if x > f32(0) else f32(0)
    return i32(v if v < f32(top) else f32(top))


def _sat_f32(x: Any) -> Any:
    v = x if x > f32(0) else f32(0)
    w = i64(v if v < f32(4294967296.0) else f32(4294967296.0))
    return w if w < i64(4294967295) else i64(4294967295)


def _sat_i(x: Any, top: Any) -> Any:
    v = i64(x) if x > 0 else i64(0)
    return v if v < i64(top) else i64(top)


def _key(x: Any) -> Any:
    """An int that orders as the floats do: a maximum of ints vectorises, of floats not."""
    b = f32(x).view(i32)
    return i32(b ^ ((b >> i32(31)) & i32(0x7FFFFFFF)))


def _unkey(k: Any) -> Any:
    return i32(k ^ ((k >> i32(31)) & i32(0x7FFFFFFF))).view(f32)


def _to_f16_bits(x: Any) -> Any:
    """Bits of the nearest float16 (ties to even)."""
    b = f32(x).view(u32)
    a = u32(b & u32(0x7FFFFFFF))
    # Normal: rebias the exponent and round; the carry may reach infinity, as it should.
    normal = u32(u32(a + u32(0xFFF) + u32((a >> u32(13)) & u32(1))) - u32(0x38000000)) >> u32(13)
    # Subnormal: adding 0.5 lets the hardware round at 2**-24.
    small = u32(f32(a.view(f32) + f32(0.5)).view(u32) - u32(0x3F000000))
    h = small if a < u32(0x38800000) else normal
    h = u32(0x7C00) if a >= u32(0x477FF000) else h
    h = u32(0x7E00) if a > u32(0x7F800000) else h
    return u16(h | u32((b >> u32(16)) & u32(0x8000)))


def _from_f16_bits(h: Any) -> Any:
    a = u32(u32(h) & u32(0x7FFF))
    e = u32(a & u32(0x7C00))
    shifted = u32(a << u32(13))
    normal = u32(shifted + u32(0x38000000))
    big = u32(shifted + u32(0x70000000))
    # Subnormal: as a normal number 2**-14 too large; the subtraction is exact.
    small = f32(u32(shifted + u32(0x38800000)).view(f32) - f32(6.103515625e-05)).view(u32)
    b = small if e == u32(0) else (big if e == u32(0x7C00) else normal)
    return u32(b | u32(u32(u32(h) & u32(0x8000)) << u32(16))).view(f32)


def _to_bf16(x: Any) -> Any:
    """Bits of the nearest bfloat16 (ties to even)."""
    b = f32(x).view(u32)
    r = u32(u32(b + u32(0x7FFF)) + u32((b >> u32(16)) & u32(1))) >> u32(16)
    quiet = u32(u32(b >> u32(16)) | u32(0x40))
    return u16(quiet if u32(b & u32(0x7FFFFFFF)) > u32(0x7F800000) else r)


def _from_bf16(h: Any) -> Any:
    return u32(u32(h) << u32(16)).view(f32)


def _at(array: Any, ix: Any) -> Any:
    """An element, the index clamped into the array; zero where that is empty."""
    if len(array) == 0:
        return array.dtype.type(0)
    return array[min(max(i64(ix), i64(0)), i64(len(array) - 1))]


def _at_packed(array: Any, ix: Any, length: Any, bits: Any) -> Any:
    """An element of a packed array, the index clamped."""
    if length <= 0:
        return i32(0)
    bit = min(max(i64(ix), i64(0)), i64(length) - 1) * i64(bits)
    return i32((i32(array[bit >> 3]) >> i32(bit & 7)) & ((1 << bits) - 1))


def _pack1(codes: Any, out: Any, m: Any) -> None:
    """Eight codes of 0 or 1 to a byte, low bits first; codes past m count as 0."""
    num_bytes = (m + 7) >> 3
    for i in range(m, num_bytes * 8):
        codes[i] = u8(0)
    words = _view(codes[: num_bytes * 8], u64)
    for j in range(num_bytes):
        w = words[j]
        w = (w | (w >> u64(7))) & u64(0x0003000300030003)
        w = (w | (w >> u64(14))) & u64(0x0000000F0000000F)
        out[j] = u8((w | (w >> u64(28))) & u64(0xFF))


def _pack2(codes: Any, out: Any, m: Any) -> None:
    """Four codes to a byte: the factor moves each code to its place in the top byte."""
    num_bytes = (m + 3) >> 2
    for i in range(m, num_bytes * 4):
        codes[i] = u8(0)
    words = _view(codes[: num_bytes * 4], u32)
    for j in range(num_bytes):
        out[j] = u8(u32(words[j] * u32(0x01041040)) >> u32(24))


def _pack4(codes: Any, out: Any, m: Any) -> None:
    """Two codes to a byte."""
    num_bytes = (m + 1) >> 1
    for i in range(m, num_bytes * 2):
        codes[i] = u8(0)
    words = _view(codes[: num_bytes * 2], u16)
    for j in range(num_bytes):
        w = u32(words[j])
        out[j] = u8((w | (w >> u32(4))) & u32(0xFF))


def _unpack1(packed: Any, codes: Any, m: Any) -> None:
    """The eight codes of each byte; up to seven codes past m are written too."""
    num_bytes = (m + 7) >> 3
    words = _view(codes[: num_bytes * 8], u64)
    for j in range(num_bytes):
        spread = u64(packed[j]) * u64(0x0101010101010101) & u64(0x8040201008040201)
        words[j] = ((spread + u64(0x7F7F7F7F7F7F7F7F)) >> u64(7)) & u64(0x0101010101010101)


def _unpack2(packed: Any, codes: Any, m: Any) -> None:
    num_bytes = (m + 3) >> 2
    words = _view(codes[: num_bytes * 4], u32)
    for j in range(num_bytes):
        b = u32(packed[j])
        b = u32(b | u32(b << u32(12))) & u32(0x000F000F)
        words[j] = u32(b | u32(b << u32(6))) & u32(0x03030303)


def _unpack4(packed: Any, codes: Any, m: Any) -> None:
    num_bytes = (m + 1) >> 1
    words = _view(codes[: num_bytes * 2], u16)
    for j in range(num_bytes):
        b = u32(packed[j])
        words[j] = u16(u32(b | u32(b << u32(4))) & u32(0x0F0F))


def _philox(g: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Philox4x32-7 (Salmon et al., SC'11) of the counter (g, c1, c2, c3)."""
    a, b, c, d = u32(g), u32(c1), u32(c2), u32(c3)
    x, y = u32(k0), u32(k1)
    for _ in range(7):
        p = u64(a) * u64(0xD2511F53)
        q = u64(c) * u64(0xCD9E8D57)
        a, c = u32(u32(q >> u64(32)) ^ b ^ x), u32(u32(p >> u64(32)) ^ d ^ y)
        b, d = u32(q & u64(0xFFFFFFFF)), u32(p & u64(0xFFFFFFFF))
        x = u32((u64(x) + u64(0x9E3779B9)) & u64(0xFFFFFFFF))
        y = u32((u64(y) + u64(0xBB67AE85)) & u64(0xFFFFFFFF))
    return a, b, c, d


def _keyed(key: Any) -> Any:
    """What stands for (seed, stream, step) where a program gives its own key."""
    return (i64(key) & i64(0xFFFFFFFF), (i64(key) >> i64(32)) & i64(0xFFFFFFFF), i64(0), i64(0))


def _bits32(i: Any, site: Any, rng: Any) -> Any:
    """32 random bits for element i: philox(seed, stream, step, i // 4)[i % 4]."""
    words = _philox(u32((i64(i) >> 2) & 0xFFFFFFFF), site, rng[3], rng[2], rng[0], rng[1])
    lane = i64(i) & 3
    low = words[0] if lane == 0 else words[1]
    high = words[2] if lane == 2 else words[3]
    return i64(low if lane < 2 else high)


def _uniform(i: Any, site: Any, rng: Any) -> Any:
    """A float in [0, 1) of 24 random bits."""
    return f32(i32(_bits32(i, site, rng) >> 8)) * f32(5.9604644775390625e-08)


def _uniforms(out: Any, m: Any, start: Any, site: Any, rng: Any) -> None:
    """`_uniform` for m elements from `start`, a multiple of 4: one Philox per four."""
    step, stream = u32(rng[3]), u32(rng[2])
    k0, k1 = u32(rng[0]), u32(rng[1])
    first = u32((start >> 2) & 0xFFFFFFFF)
    for j in range((m + 3) >> 2):
        a, b, c, d = _philox(u32(first + u32(j)), u32(site), step, stream, k0, k1)
        out[4 * j] = f32(i32(a >> u32(8))) * f32(5.9604644775390625e-08)
        out[4 * j + 1] = f32(i32(b >> u32(8))) * f32(5.9604644775390625e-08)
        out[4 * j + 2] = f32(i32(c >> u32(8))) * f32(5.9604644775390625e-08)
        out[4 * j + 3] = f32(i32(d >> u32(8))) * f32(5.9604644775390625e-08)


def _bits32s(out: Any, m: Any, start: Any, site: Any, rng: Any) -> None:
    """`_bits32` for m elements from `start`, a multiple of 4."""
    step, stream = u32(rng[3]), u32(rng[2])
    k0, k1 = u32(rng[0]), u32(rng[1])
    first = u32((start >> 2) & 0xFFFFFFFF)
    for j in range((m + 3) >> 2):
        a, b, c, d = _philox(u32(first + u32(j)), u32(site), step, stream, k0, k1)
        out[4 * j] = a
        out[4 * j + 1] = b
        out[4 * j + 2] = c
        out[4 * j + 3] = d


def _range_of(lo: Any, ranges: Any) -> Any:
    """The number of the range that starts at tile `lo`; the first where there is one only."""
    for k in range(1, 64):
        if ranges[k] == lo and lo > 0:
            return i64(k)
    return i64(0)
