"""What generated reference code calls: slow, obvious, whole arrays at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

f32, f64, i64 = np.float32, np.float64, np.int64


def _whole(value: Any, length: Any) -> Any:
    """A value that is the same for all elements, once for each of them."""
    return np.broadcast_to(value, (int(length),))


def _load(array: Any, storage: Any, length: Any) -> Any:
    """All elements of an array as they count: floats as float32, codes as int64."""
    if storage == "f32":
        return array
    if storage == "f16":
        return array.view(np.float16).astype(f32)
    if storage == "bf16":
        return (array.astype(np.uint32) << 16).view(f32)
    if storage in ("u1", "u2", "u4"):
        bits = int(storage[1:])
        shifts = np.arange(0, 8, bits)
        codes = (array[:, None].astype(i64) >> shifts) & (2**bits - 1)
        return codes.reshape(-1)[: int(length)]
    return array.astype(i64)


def _save(array: Any, storage: Any, values: Any) -> None:
    """The other way round; codes are packed low bits first."""
    if storage == "f16":
        array[:] = values.astype(np.float16).view(np.uint16)
    elif storage == "bf16":
        array[:] = _bf16_bits(values)
    elif storage in ("u1", "u2", "u4"):
        bits = int(storage[1:])
        per = 8 // bits
        padded = np.zeros(len(array) * per, i64)
        padded[: len(values)] = values
        array[:] = (padded.reshape(-1, per) << np.arange(0, 8, bits)).sum(axis=1)
    else:
        array[:] = values


def _bf16_bits(values: Any) -> Any:
    bits = values.astype(f32).view(np.uint32).astype(i64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, nearest).astype(np.uint16)


def _round_f16(x: Any) -> Any:
    return np.asarray(x, f32).astype(np.float16).astype(f32)


def _round_bf16(x: Any) -> Any:
    return (_bf16_bits(np.atleast_1d(np.asarray(x, f32))).astype(np.uint32) << 16).view(f32).reshape(np.shape(x))  # fmt: skip # noqa: E501


def _at(values: Any, ix: Any) -> Any:
    """Elements at any index, clamped into the array; zero where that is empty."""
    if len(values) == 0:
        return np.zeros(np.shape(ix), values.dtype)
    return values[np.clip(ix, 0, len(values) - 1)]


def _padded(places: Any, room: Any) -> Any:
    whole = np.zeros(room, i64)
    whole[: len(places)] = places
    return whole


def _largest(keys: Any, count: Any) -> Any:
    """The places of the largest keys, in ascending order; of equal ones the first.

    Floats are ordered as ints that are made of their bits, so that a NaN has a place too.
    """
    if keys.dtype == f32:
        bits = (keys + f32(0)).view(np.int32)  # zeros of both signs are equal
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    falling = ~keys  # the smallest int is its own negative
    return np.sort(np.argsort(falling, kind="stable")[:count])


def _idiv(a: Any, b: Any) -> Any:
    """Towards zero, as in C; by zero gives 0."""
    safe = np.where(b == 0, 1, b)
    q = a // safe
    q += ((a < 0) != (safe < 0)) & (q * safe != a)  # Python rounds down
    return np.where(b == 0, 0, q)


def _imod(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, a - _idiv(a, b) * b)


def _shl(a: Any, b: Any) -> Any:
    return np.where((b >= 0) & (b < 63), np.left_shift(a, np.clip(b, 0, 62)), 0)


def _shr(a: Any, b: Any) -> Any:
    return np.right_shift(a, np.where((b >= 0) & (b < 63), b, 63))


def _to_int(x: Any) -> Any:
    """Towards zero; NaN is 0, what does not fit saturates."""
    return np.clip(np.nan_to_num(x, nan=0.0), f32(-9.0e18), f32(9.0e18)).astype(i64)


def _uint(x: Any, top: Any) -> Any:
    """Saturates; NaN is 0."""
    if np.asarray(x).dtype == f32:
        x = np.nan_to_num(np.asarray(x, f64), nan=0.0)
    return np.clip(x, 0, top).astype(i64)


def _exponent(x: Any) -> Any:
    """floor(log2(abs(x))); -150 for 0, 128 for NaN and infinities."""
    e = np.frexp(np.abs(np.asarray(x, f64)))[1].astype(i64) - 1
    return np.where(x == 0, -150, np.where(np.isfinite(x), e, 128))


def _bits(x: Any) -> Any:
    return np.asarray(x, f32).view(np.uint32).astype(i64)


def _from_bits(k: Any) -> Any:
    return (np.asarray(k, i64) & 0xFFFFFFFF).astype(np.uint32).view(f32)


def _fold_sum(values: Any, init: Any) -> Any:
    """In double precision; the result is rounded once."""
    if values.dtype == f32:
        return f32(f64(init) + np.add.reduce(values, dtype=f64))
    return i64(init) + np.add.reduce(values, dtype=i64)


def _fold_max(values: Any, init: Any) -> Any:
    return np.max(values, initial=init)


def _fold_min(values: Any, init: Any) -> Any:
    return np.min(values, initial=init)


def _philox(counter: Any, key: Any) -> Any:
    """Philox4x32-7 (Salmon et al., SC'11): four words for each counter of four words."""
    low = np.uint64(0xFFFFFFFF)
    a, b, c, d = (np.asarray(w, np.uint64) for w in counter)
    x, y = (np.uint64(w) for w in key)
    for _ in range(7):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (q >> np.uint64(32)) ^ b ^ x, q & low
        c, d = (p >> np.uint64(32)) ^ d ^ y, p & low
        x, y = (x + np.uint64(0x9E3779B9)) & low, (y + np.uint64(0xBB67AE85)) & low
    return a, b, c, d


def _bits32(i: Any, site: Any, rng: Any) -> Any:
    """32 random bits for each index: philox(seed, stream, step, i // 4)[i % 4]."""
    seed, stream, step = rng
    i = np.asarray(i, i64)
    group = (i // 4) & 0xFFFFFFFF
    counter = (group, np.full_like(group, site), np.full_like(group, step & 0xFFFFFFFF),
               np.full_like(group, stream & 0xFFFFFFFF))  # fmt: skip
    words = _philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return np.choose(i % 4, words).astype(i64)


def _uniform(i: Any, site: Any, rng: Any) -> Any:
    """A float in [0, 1) of 24 random bits."""
    return (_bits32(i, site, rng) >> 8).astype(f32) * f32(2.0**-24)
