"""What generated CPU code calls to order and pick elements; see `prelude`."""

# ruff: noqa: SIM108
from __future__ import annotations

from typing import Any

import numpy as np

from hipress.compll.backends.cpu.prelude import _clear, _copy, _view

f32, f64, i32, i64 = np.float32, np.float64, np.int32, np.int64
u8, u32, u64 = np.uint8, np.uint32, np.uint64


def _first_byte(word: Any) -> Any:
    """The number of the lowest byte that is set, where bytes are 0 or 1."""
    low = word & (~word + u64(1))
    # Eight times the byte number is the exponent of the bit; a float tells it.
    return i64((f64(low).view(i64) >> i64(52)) - i64(1023)) >> i64(3)


def _places(marks: Any, m: Any, places: Any, room: Any) -> Any:
    """The places of the first marks that are set, in order; the rest is 0. Returns how many.

    Without a branch: each place is written, and overwritten where there was no mark. `places` has
    room for m of them.
    """
    count = i64(0)
    for i in range(m):
        places[count] = i32(i)
        count += i64(marks[i])
    count = min(count, i64(room))
    _clear(places[count:room])
    return count


def _order(keys: Any, m: Any, places: Any) -> None:
    """The places of keys in ascending order; equal ones keep their order."""
    _copy(places[:m], np.argsort(keys[:m], kind="mergesort"))


def _count_from(raw: Any, mask: Any, m: Any, limit: Any) -> Any:
    """How many keys reach a limit; a key is what a mask leaves of an int."""
    count = i32(0)
    for i in range(m):
        count = i32(count + (i32(1) if (raw[i] & mask) >= limit else i32(0)))
    return i64(count)


def _least_and_most(raw: Any, mask: Any, m: Any) -> Any:
    least, most = raw[0] & mask, raw[0] & mask
    for i in range(m):
        k = raw[i] & mask
        least = k if k < least else least
        most = k if k > most else most
    return i64(least), i64(most)


def _narrowed(raw: Any, mask: Any, m: Any, enough: Any, wanted: Any, bounds: Any) -> Any:
    """Raises a limit until no more than `enough` keys reach it, but `wanted` do.

    `bounds` are the limit, how many reach it, a key that fewer than `wanted` exceed, and how many
    do. Each count is a vector loop over the cache.
    """
    low, reach, high, above = bounds
    guesses = True
    while reach > enough and low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # no sum that may wrap
        if guesses:  # as if keys were spread evenly; every other time, for they may not be
            share = f64(wanted + enough - 2 * above) / f64(2 * (reach - above))
            middle = high - i64((f64(high) - f64(low)) * min(share, 1.0))
            middle = min(max(middle, low + 1), high)
        guesses = not guesses
        count = _count_from(raw, mask, m, raw.dtype.type(middle))
        if count >= wanted:
            low, reach = middle, count
        else:
            high, above = middle - 1, count
    return low, reach, high, above


def _marked(raw: Any, mask: Any, m: Any, limit: Any, marks: Any) -> Any:
    """Marks the keys that reach a limit; returns how many do."""
    count = i32(0)
    for i in range(m):
        reaches = (raw[i] & mask) >= limit
        marks[i] = u8(reaches)
        count = i32(count + i32(reaches))
    return i64(count)


def _few_places(marks: Any, m: Any, places: Any, words: Any) -> None:
    """The places of the marks, in order; fast where they are few.

    Words of eight marks are found without a branch: 135 ns for 20 of 512 keys, against 250 with a
    branch and 200 mark by mark.
    """
    end = i64(m) + 7 & -8
    _clear(marks[m:end])
    eights, num_words, count = _view(marks[:end], u64), i64(0), i64(0)
    for w in range(end >> 3):
        words[num_words] = i32(w)
        num_words += i64(eights[w] != u64(0))
    for j in range(num_words):
        word = eights[words[j]]
        while word != u64(0):
            places[count] = i32(words[j] * 8 + _first_byte(word))
            word &= word - u64(1)
            count += 1


def _largest(
    raw: Any, mask: Any, m: Any, places: Any, room: Any, hint: Any, marks: Any, words: Any,
    found: Any, keys: Any,
) -> None:  # fmt: skip
    """The places of the largest keys, in ascending order; of equal ones the first.

    A limit that half as many again reach leaves few keys to look at. What the last block left in
    `hint` is tried first: blocks are alike. What follows `hint` is scratch memory.
    """
    wanted = min(i64(room), i64(m))
    _clear(places[:room])
    if wanted == 0:
        return
    enough = 4 * wanted + 16
    low = i64(raw.dtype.type(hint[0]))
    reach, high, above = _marked(raw, mask, m, raw.dtype.type(low), marks), i64(0), i64(0)
    is_close = wanted <= reach <= enough
    if not is_close:
        low, high = _least_and_most(raw, mask, m)
        reach = i64(m)
        if low < high:
            count = _count_from(raw, mask, m, raw.dtype.type(low + 1))
            if count < wanted:  # mostly one value, as zeros in a sparse gradient
                high, above = low, count
        low, reach, high, above = _narrowed(raw, mask, m, enough, wanted, (low, reach, high, above))
        _marked(raw, mask, m, raw.dtype.type(low), marks)
    _few_places(marks, m, found, words)
    for j in range(reach):
        keys[j] = raw[found[j]] & mask
    every = raw.dtype.type(-1)
    if is_close:
        high = _least_and_most(keys, every, reach)[1]
    num_keys, limit, top = reach, low, high
    bounds = (low, reach, high, above)
    low, reach, high, above = _narrowed(keys, every, num_keys, wanted, wanted, bounds)
    # From the share of keys between the two limits: where half of `wanted` would lie between them.
    more = max(num_keys - wanted, wanted >> 2, i64(1))
    gap = i64((f64(low) - f64(limit)) * (f64(wanted) / f64(2 * more)))
    hint[0] = low - max(gap, ((top - low) >> 6) + 1)
    count = i64(0)
    if reach == wanted:
        for j in range(num_keys):
            places[count] = found[j]
            count += i64(keys[j] >= low)
        return
    equal = wanted - above
    for j in range(num_keys):
        key = i64(keys[j])
        places[count] = found[j]
        is_equal = key == low and equal > 0
        equal -= i64(is_equal)
        count += i64(key > low or is_equal)


def _select(values: Any, rank: Any) -> Any:
    """The element of this rank in ascending order, by counting 11, 11 and 10 bits of its key."""
    counts = np.zeros(2048, np.int64)
    keys = _view(values, u32)
    prefix, left = u32(0), min(max(i64(rank), i64(0)), i64(len(values) - 1))
    for level in range(3):
        shift = u32(21) if level == 0 else (u32(10) if level == 1 else u32(0))
        width = u32(11) if level < 2 else u32(10)
        _clear(counts)
        done = u32(u32(shift) + width)
        for i in range(len(keys)):
            k = keys[i]
            k = u32(k ^ (u32(0xFFFFFFFF) if k >> u32(31) else u32(0x80000000)))
            if level == 0 or u32(k >> done) == u32(prefix >> done):
                counts[(k >> shift) & u32(2047 if level < 2 else 1023)] += 1
        digit = 0
        while digit < 2047 and left >= counts[digit]:
            left -= counts[digit]
            digit += 1
        prefix = u32(prefix | u32(u32(digit) << shift))
    b = u32(prefix ^ (u32(0x80000000) if prefix >> u32(31) else u32(0xFFFFFFFF)))
    return b.view(f32)


def _select_i(values: Any, rank: Any) -> Any:
    r = min(max(i64(rank), i64(0)), i64(len(values) - 1))
    return i64(np.partition(values, r)[r])
