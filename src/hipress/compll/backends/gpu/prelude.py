"""What generated GPU code calls: copied, function by function, into each module that needs it.

These are functions of Triton's language; here they are only text. Tiles have two dimensions, rows
(blocks) and columns (elements of a block), so that one way of writing serves both kinds of loop.
"""

# ruff: noqa: SIM108
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # text may be made where Triton is not installed
    import triton.language as tl


def _f32(x: tl.constexpr) -> Any:
    return tl.full((), x, tl.float32)


def _i32(x: tl.constexpr) -> Any:
    return tl.full((), x, tl.int32)


def _i64(x: tl.constexpr) -> Any:
    return tl.full((), x, tl.int64)


def _bool(x: tl.constexpr) -> Any:
    return tl.full((), x, tl.int1)


def _min(a: Any, b: Any) -> Any:
    return tl.where(a < b, a, b)


def _max(a: Any, b: Any) -> Any:
    return tl.where(a > b, a, b)


def _min_nan(a: Any, b: Any) -> Any:
    return tl.where(a < b, a, tl.where(a != a, a, b))


def _max_nan(a: Any, b: Any) -> Any:
    return tl.where(a > b, a, tl.where(a != a, a, b))


def _sign_f(x: Any) -> Any:
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0)).to(tl.float32)


def _sign_i(x: Any) -> Any:
    return (x > 0).to(tl.int32) - (x < 0).to(tl.int32)


def _exponent(x: Any) -> Any:
    """floor(log2(abs(x))) from the bits; a subnormal number is made normal first."""
    b = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    small = (tl.abs(x) * 8388608.0).to(tl.int32, bitcast=True)
    e = tl.where(b < 0x00800000, (small >> 23) - 150, (b >> 23) - 127)
    return tl.where(b == 0, -150, e)


def _bits(x: Any) -> Any:
    return x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


def _from_bits(k: Any) -> Any:
    return (k & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


def _power(e: Any) -> Any:
    """2.0 to the power of an int from -126 to 127."""
    return ((e.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


def _div_shared(
    x: Any, d: Any, TIMES: tl.constexpr, EACH: tl.constexpr, cond: Any = True, other: Any = 0.0
) -> Any:
    """x / d, correctly rounded, for a d that all elements share: three instructions each.

    Markstein (IBM J. Res. Dev. 34, 1990): with r, the float nearest to 1 / d, the estimate x * r
    is less than 1.5 ulp away, its remainder is a float, and one correction gives the float nearest
    to x / d. That holds while nothing overflows and no bit is lost below the smallest float, so a
    tile with numbers too small or too large for that is divided by the usual instructions. A
    thread looks at its own elements first: TIMES as many as the EACH that lie side by side.

    Where `cond`, which all elements share too, does not hold, `other` is the result.
    """
    r = tl.div_rn(1.0, d)
    # Less the smallest float, so that zero, which is safe, has a sign: as an unsigned int it is
    # above all other numbers, as a signed one below them.
    size = tl.abs(x) - 1.401298464324817e-45
    parts = tl.reshape(size, [TIMES, x.shape[0] * x.shape[1] // (TIMES * EACH), EACH])
    least = tl.min(tl.min(parts.to(tl.uint32, bitcast=True), axis=2), axis=0)
    largest = tl.max(tl.max(parts.to(tl.int32, bitcast=True), axis=2), axis=0)
    unsafe = (least < 0x0D800000) | (largest > 0x5F800000)  # 2^-100, 2^64
    d_is_safe = (d >= 2.168404344971009e-19) & (d <= 16777216.0)  # 2^-62, 2^24
    if cond & d_is_safe & (tl.max(unsafe.to(tl.int32)) == 0):
        q = x * r
        # The remainder is negated: one of zero is +0, times -r it is -0, and q keeps its sign.
        q = tl.fma(tl.fma(q, d, x * -1.0), -r, q)
    else:
        q = tl.where(cond, tl.div_rn(x, d), other)
    return q


def _finite(x: Any) -> Any:
    return tl.abs(x) <= 3.4028234663852886e38


def _idiv(a: Any, b: Any) -> Any:
    """Towards zero, as in C; by zero gives 0."""
    # The smallest int has no magnitude, and overflows divided by -1.
    q = a // tl.where((b == 0) | (b == -1), 1, b)
    return tl.where(b == 0, 0, tl.where(b == -1, -a, q))


def _imod(a: Any, b: Any) -> Any:
    return tl.where(b == 0, 0, a - _idiv(a, b) * b)


def _shl(a: Any, b: Any) -> Any:
    fits = (b >= 0) & (b < 63)
    return tl.where(fits, a << tl.where(fits, b, 0), 0)


def _shr(a: Any, b: Any) -> Any:
    fits = (b >= 0) & (b < 63)
    return tl.where(fits, a >> tl.where(fits, b, 0), tl.where(a < 0, -1, 0))


def _to_int(x: Any) -> Any:
    """Towards zero; NaN is 0, what does not fit saturates."""
    v = tl.where(tl.abs(x) < 9.0e18, x, tl.where(x > 0.0, 9.0e18, -9.0e18))
    return tl.where(x == x, v, 0.0).to(tl.int64)


def _to_small_int(x: Any) -> Any:
    """Towards zero, of what is known to be at least zero and to fit, or NaN, which is 0."""
    return tl.where(x > 0.0, x, 0.0).to(tl.int32)


def _sat_f(x: Any, top: tl.constexpr) -> Any:
    """A float as an unsigned code: NaN and negatives are 0, what is too large is `top`."""
    return tl.minimum(tl.maximum(x, 0.0), top * 1.0).to(tl.int32)


def _sat_f32(x: Any) -> Any:
    v = tl.where(x > 0.0, x, 0.0)
    w = tl.where(v < 4294967296.0, v, 4294967296.0).to(tl.int64)
    return tl.where(w < 4294967295, w, 4294967295)


def _sat_i(x: Any, top: tl.constexpr) -> Any:
    v = tl.where(x > 0, x, 0)
    return tl.where(v < top, v, top)


def _key(x: Any) -> Any:
    """An int that orders as the floats do."""
    b = x.to(tl.int32, bitcast=True)
    return b ^ ((b >> 31) & 0x7FFFFFFF)


def _unkey(k: Any) -> Any:
    return (k ^ ((k >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


def _to_bf16(x: Any) -> Any:
    """Bits of the nearest bfloat16 (ties to even)."""
    b = x.to(tl.uint32, bitcast=True)
    r = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    quiet = (b >> 16) | 0x40
    return tl.where((b & 0x7FFFFFFF) > 0x7F800000, quiet, r).to(tl.uint16)


def _from_bf16(h: Any) -> Any:
    return (h.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


def _round_f16(x: Any) -> Any:
    return x.to(tl.float16).to(tl.float32)


def _pack(codes: Any, BITS: tl.constexpr, UNIT: tl.constexpr, EACH: tl.constexpr) -> Any:
    """Codes of some bits side by side in units of 8 or 32 bits, low bits first.

    EACH neighbours (1, 2, 4 or 8) are in one thread, which joins them in pairs: that takes fewer
    instructions than a shift of each code by an amount that depends on the thread.
    """
    per: tl.constexpr = UNIT // BITS
    rows: tl.constexpr = codes.shape[0]
    cols: tl.constexpr = codes.shape[1]
    if EACH >= 2:
        low, high = tl.split(tl.reshape(codes, [rows, cols // 2, 2]))
        codes = low + (high << BITS)
    if EACH >= 4:
        low, high = tl.split(tl.reshape(codes, [rows, cols // 4, 2]))
        codes = low + (high << (2 * BITS))
    if EACH >= 8:
        low, high = tl.split(tl.reshape(codes, [rows, cols // 8, 2]))
        codes = low + (high << (4 * BITS))
    parts = tl.reshape(codes, [rows, cols // per, per // EACH])
    return tl.sum(parts << (tl.arange(0, per // EACH) * (EACH * BITS))[None, None, :], axis=2)


def _unpack(units: Any, BITS: tl.constexpr, UNIT: tl.constexpr) -> Any:
    """The codes of some units."""
    per: tl.constexpr = UNIT // BITS
    parts = units.to(tl.int32)[:, :, None] >> (tl.arange(0, per) * BITS)[None, None, :]
    return tl.reshape(parts & (2**BITS - 1), [units.shape[0], units.shape[1] * per])


def _partner(x: Any, STEP: tl.constexpr) -> Any:
    """The element at column i ^ STEP, a power of two, for each column i: the other of a pair."""
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x.to(tl.int32, bitcast=True), [rows, cols // (2 * STEP), 2, STEP])
    other = pairs ^ tl.xor_sum(pairs, axis=2, keep_dims=True)
    return tl.reshape(other, [rows, cols]).to(tl.float32, bitcast=True)


def _rng(seed: Any, stream: Any, step: Any) -> Any:
    """What random numbers are made from, in the types that Philox takes."""
    return (
        tl.load(seed).to(tl.uint64),
        tl.load(stream).to(tl.uint32),
        tl.load(step).to(tl.uint32),
    )


def _words(group: Any, site: tl.constexpr, rng: Any) -> Any:
    """Philox4x32-7 (Salmon et al., SC'11): four words for each group of four elements.

    A product of 64 bits gives both halves in one instruction.
    """
    a = group.to(tl.uint32)
    b = tl.zeros_like(a) + site
    c = tl.zeros_like(a) + rng[2]
    d = tl.zeros_like(a) + rng[1]
    x = rng[0].to(tl.uint32)
    y = (rng[0] >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        p = a.to(tl.uint64) * 0xD2511F53
        q = c.to(tl.uint64) * 0xCD9E8D57
        a = (q >> 32).to(tl.uint32) ^ b ^ x
        c = (p >> 32).to(tl.uint32) ^ d ^ y
        b = q.to(tl.uint32)
        d = p.to(tl.uint32)
        x += 0x9E3779B9
        y += 0xBB67AE85
    return a, b, c, d


def _bits32_row(
    first: Any, COLS: tl.constexpr, EACH: tl.constexpr, site: tl.constexpr, rng: Any
) -> Any:
    """32 random bits for COLS elements from `first`, a multiple of four: one Philox per four.

    EACH neighbours (4 or 8) are in one thread.
    """
    group = (first >> 2) + tl.arange(0, COLS // EACH) * (EACH // 4)
    a, b, c, d = _words(group, site, rng)
    if EACH == 8:
        e, f, g, h = _words(group + 1, site, rng)
        a, b, c, d = tl.join(a, e), tl.join(b, f), tl.join(c, g), tl.join(d, h)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [1, COLS])


def _bits32_at(i: Any, site: tl.constexpr, rng: Any) -> Any:
    """The same for single elements."""
    a, b, c, d = _words(i >> 2, site, rng)
    lane = i & 3
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


def _uniform_of(bits: Any) -> Any:
    """A float in [0, 1) of 24 random bits."""
    return (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


def _plus_uniform(x: Any, bits: Any) -> Any:
    """x plus that float; its last product is exact, so it may be fused."""
    return tl.fma((bits >> 8).to(tl.int32).to(tl.float32), 5.9604644775390625e-08, x)


def _keyed(key: Any) -> Any:
    """What stands for (seed, stream, step) where a program gives its own key."""
    zero = tl.full((), 0, tl.uint32)
    return key.to(tl.uint64), zero, zero


def _any(cond: Any) -> Any:
    return tl.max(cond.to(tl.int32))


def _flag(word: Any, bad: Any) -> Any:
    """Says that some element is bad: without a word between threads, and mostly without a store."""
    some = tl.max(tl.reshape(bad, [bad.shape[0], bad.shape[1] // 4, 4]), axis=2)
    tl.store(word + tl.zeros_like(some), tl.zeros_like(some) + 1, mask=some != 0)


def _popcount(x: Any) -> Any:
    """The number of bits that are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x + (x >> 8) + (x >> 16) + (x >> 24)) & 0x3F).to(tl.int32)


def _pick(x: Any, index: Any) -> Any:
    """Elements of each row at some index.

    Rows are repeated where the index is wider: Triton 3.6 fails to compile a gather from less.
    """
    if x.shape[1] < index.shape[1]:
        shape: tl.constexpr = [x.shape[0], index.shape[1] // x.shape[1], x.shape[1]]
        x = tl.reshape(tl.broadcast_to(x[:, None, :], shape), index.shape)
    return tl.gather(x, index, 1)


def _rank_limit(key: Any, wanted: Any) -> Any:
    """The largest int that as many keys of a row reach as are wanted, by halving what is left.

    Or a smaller one that exactly so many reach, which is found earlier: after 17 counts for 64 of
    4096 normal magnitudes.
    """
    low = tl.min(key, axis=1)[:, None]
    high = tl.max(key, axis=1)[:, None]
    for _ in range(32):  # Triton 3.6 fails to compile a while loop over tensors
        if tl.max((low < high).to(tl.int32)) > 0:
            middle = (low | high) - ((low ^ high) >> 1)  # no sum that may wrap
            reach = tl.sum((key >= middle).to(tl.int32), axis=1)[:, None]
            is_low = reach >= wanted
            done = (reach == wanted) | (low >= high)
            low = tl.where(is_low & (low < high), middle, low)
            high = tl.where(done, low, tl.where(is_low, high, middle - 1))
    return low


def _largest_marks(key: Any, live: Any, wanted: Any) -> Any:
    """Which keys of a row are the largest; of equal ones the first."""
    key = tl.where(live, key, -2147483648)
    limit = _rank_limit(key, wanted)
    above = live & (key > limit)
    equal = live & (key == limit)
    left = wanted - tl.sum(above.to(tl.int32), axis=1)[:, None]
    surplus = tl.sum(equal.to(tl.int32), axis=1)[:, None] - left
    # The columns up to which there is room for equal keys: all, unless there are too many.
    end = tl.full(equal.shape, 1, tl.int32)
    if tl.max(surplus) > 0:
        end = (tl.cumsum(equal.to(tl.int32), axis=1) <= left).to(tl.int32)
    return above | (equal & (end != 0))


def _mark_words(marks: Any, LANES: tl.constexpr) -> Any:
    """Marks of a row as the bits of words."""
    rows: tl.constexpr = marks.shape[0]
    groups: tl.constexpr = marks.shape[1] // LANES
    bits = tl.reshape(marks.to(tl.int32), [rows, groups, LANES])
    return tl.sum(bits << tl.arange(0, LANES)[None, None, :], axis=2).to(tl.uint32, bitcast=True)


def _marked_places(
    marks: Any, ranks: Any, LANES: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr
) -> Any:
    """The place of the mark of each rank in its row: the word by halving, then the bit."""
    words = _mark_words(marks, LANES)
    counts = _popcount(words)
    ends = tl.cumsum(counts, axis=1)
    at = tl.zeros_like(ranks)
    for step in tl.static_range(STEPS):
        half = 1 << (STEPS - 1 - step)
        at += tl.where(_pick(ends, at + (half - 1)) <= ranks, half, 0)
    at = tl.minimum(at, words.shape[1] - 1)
    word = _pick(words.to(tl.int32, bitcast=True), at).to(tl.uint32, bitcast=True)
    left = ranks - _pick(ends - counts, at)
    place = at * LANES
    for step in tl.static_range(BITS):
        half = 1 << (BITS - 1 - step)
        low = _popcount(word & ((1 << half) - 1))
        is_high = left >= low
        left -= tl.where(is_high, low, 0)
        word = tl.where(is_high, word >> half, word)
        place += tl.where(is_high, half, 0)
    return place


def _is_rising(at: Any, live: Any, cols: Any) -> Any:
    """Whether places rise in every row, as far as they are live."""
    last: tl.constexpr = at.shape[1] - 1
    after = tl.broadcast_to(tl.minimum(cols + 1, last), at.shape)
    follows = (tl.gather(live.to(tl.int32), after, 1) != 0) & (cols < last)
    return tl.max((follows & (tl.gather(at, after, 1) <= at)).to(tl.int32)) == 0


def _below(at: Any, limit: Any, STEPS: tl.constexpr) -> Any:
    """How many places of a row, which rise, lie below each limit."""
    last: tl.constexpr = at.shape[1] - 1
    count = tl.zeros_like(limit)
    for step in tl.static_range(STEPS + 1):
        half = 1 << (STEPS - step)
        here = _pick(at, tl.minimum(count + (half - 1), last))
        count += tl.where((count + half <= last + 1) & (here < limit), half, 0)
    return count


def _spread(
    at: Any, value: Any, live: Any, WIDTH: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr
) -> Any:
    """A row of zeros with each value at its place; places rise.

    The places of each group of columns are found by halving; the groups then take their values side
    by side, as many times as the fullest has places.
    """
    rows: tl.constexpr = at.shape[0]
    last: tl.constexpr = at.shape[1] - 1
    groups: tl.constexpr = WIDTH // LANES
    at = tl.where(live, at, 2147483647)
    begin = tl.broadcast_to(tl.arange(0, groups)[None, :] * LANES, [rows, groups])
    first = _below(at, begin, STEPS)
    count = _below(at, begin + LANES, STEPS) - first
    lanes = tl.arange(0, LANES)[None, None, :]
    total = tl.zeros([rows, groups, LANES], value.dtype)
    for k in range(tl.max(count)):
        one = tl.minimum(first + k, last)
        lane = tl.where(k < count, _pick(at, one) - begin, -1)
        total = tl.where(lanes == lane[:, :, None], _pick(value, one)[:, :, None], total)
    return tl.reshape(total, [rows, WIDTH])


def _picked(x: Any, at: Any, cols: Any, LANES: tl.constexpr, STEPS: tl.constexpr) -> Any:
    """Elements of each row at places that rise, until they do not: what follows is 0.

    The other way round than `_spread`. A gather from a wide row would hold all of it in each warp.
    """
    rows: tl.constexpr = x.shape[0]
    last: tl.constexpr = at.shape[1] - 1
    groups: tl.constexpr = x.shape[1] // LANES
    before = tl.broadcast_to(tl.maximum(cols - 1, 0), at.shape)
    at = tl.where((cols == 0) | (at > tl.gather(at, before, 1)), at, 2147483647)
    begin = tl.broadcast_to(tl.arange(0, groups)[None, :] * LANES, [rows, groups])
    first = _below(at, begin, STEPS)
    count = _below(at, begin + LANES, STEPS) - first
    group = tl.minimum(at // LANES, groups - 1)
    turn = tl.where(at < 2147483647, cols - _pick(first, group), -1)
    bits = tl.reshape(x.to(tl.int32, bitcast=True), [rows, groups, LANES])
    lanes = tl.arange(0, LANES)[None, None, :]
    found = tl.zeros_like(at)
    for k in range(tl.max(count)):
        lane = tl.where(k < count, _pick(at, tl.minimum(first + k, last)) - begin, -1)
        one = tl.sum(tl.where(lanes == lane[:, :, None], bits, 0), axis=2)
        found = tl.where(turn == k, _pick(one, group), found)
    return found.to(x.dtype, bitcast=True)


def _sums_before(parts: Any, count: Any) -> Any:
    """Replaces some counts by the sum of those before each; gives the sum of all."""
    lanes = tl.arange(0, 1024)
    total = tl.full((), 0, tl.int64)
    for at in range(0, count, 1024):
        live = at + lanes < count
        part = tl.load(parts + at + lanes, mask=live, other=0)
        tl.store(parts + at + lanes, total + tl.cumsum(part) - part, mask=live)
        total += tl.sum(part)
    return total


# Finding the element of a rank, digit by digit of its key: count the digits of all elements that
# share the digits found so far, then walk through the counts. Four digits of 8 bits: counting is
# slower the more digits there are to tell apart.


def _ordered(x: Any) -> Any:
    """An unsigned int that orders as the floats do."""
    b = x.to(tl.uint32, bitcast=True)
    return b ^ tl.where(b >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


def _digit(counts: Any, found: Any, LEVEL: tl.constexpr) -> Any:
    """The key's digits up to LEVEL, and the rank among those that share them."""
    prefix, left = tl.load(found + 2 * LEVEL), tl.load(found + 2 * LEVEL + 1)
    bins = tl.arange(0, 256)
    # A count of up to 2**32 - 1 elements: the bits of an int32 without its sign.
    here = tl.load(counts + LEVEL * 256 + bins).to(tl.uint32, bitcast=True).to(tl.int64)
    digit = tl.minimum(tl.sum((tl.cumsum(here) <= left).to(tl.int64)), 255)
    below = tl.sum(tl.where(bins < digit, here, 0))
    return prefix | (digit << (24 - 8 * LEVEL)), left - below


def _select_count(
    values: Any,
    length: Any,
    rank: Any,
    counts: Any,
    found: Any,
    pid: Any,
    programs: Any,
    LEVEL: tl.constexpr,
) -> Any:
    """Counts the digits of one level."""
    TILE: tl.constexpr = 4096 if LEVEL == 1 else 2048
    shift: tl.constexpr = 24 - 8 * LEVEL
    prefix = tl.full((), 0, tl.int64)
    left = tl.minimum(tl.maximum(rank, 0), length - 1)
    if LEVEL > 0:
        prefix, left = _digit(counts, found, LEVEL - 1)
    if pid == 0:
        tl.store(found + 2 * LEVEL, prefix)
        tl.store(found + 2 * LEVEL + 1, left)
    total = tl.zeros([256], tl.int32)
    for start in range(pid * TILE, length, programs * TILE):
        offs = start + tl.arange(0, TILE)
        live = offs < length
        key = _ordered(tl.load(values + offs, mask=live, other=0.0))
        if LEVEL > 0:
            live &= (key >> (shift + 8)) == (prefix >> (shift + 8)).to(tl.uint32)
        digit = ((key >> shift) & 255).to(tl.int32)
        # Mostly few elements of a tile agree in two digits or three, and a histogram is slow.
        few = 0
        if LEVEL > 1:
            few = (tl.sum(live.to(tl.int32)) <= 32).to(tl.int32)
        if few != 0:
            tl.atomic_add(counts + LEVEL * 256 + digit, 1, mask=live, sem="relaxed")
        else:
            total += tl.histogram(digit, 256, mask=live)
    bins = tl.arange(0, 256)
    tl.atomic_add(counts + LEVEL * 256 + bins, total, mask=total > 0, sem="relaxed")


def _select_value(counts: Any, found: Any, length: Any) -> Any:
    """The element whose digits were found; 0 where there is no element."""
    key, _ = _digit(counts, found, 3)
    b = key.to(tl.uint32)
    b ^= tl.where(b >> 31 != 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return tl.where(length > 0, b.to(tl.float32, bitcast=True), 0.0)


def _unit_mask(
    left: Any,
    per: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    stride: tl.constexpr,
    MASKED: tl.constexpr,
    TAIL: tl.constexpr,
) -> Any:
    """Which units of packed codes are there; None where all are."""
    mask = None
    cols = tl.arange(0, COLS)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    if MASKED:
        mask = tl.broadcast_to(cols < stride, [ROWS, COLS])
    if TAIL:
        there = rows * stride + cols < (left + per - 1) // per
        if MASKED:
            mask = mask & there
        else:
            mask = there
    return mask


def _spoil(out: Any, length: Any, pid: Any, programs: Any, value: Any) -> Any:
    """Overwrites all of an array."""
    for start in range(pid * 4096, length, programs * 4096):
        offs = start + tl.arange(0, 4096)
        tl.store(out + offs, tl.zeros([4096], value.dtype) + value, mask=offs < length)


def _unless_empty(last: Any, mask: Any) -> Any:
    """A mask without any element where the last index is that of an empty array."""
    there = last >= 0
    if mask is not None:
        there = there & mask
    return there


def _packed_at(array: Any, i: Any, BITS: tl.constexpr, mask: Any = None) -> Any:
    """Single codes of a packed array of bytes; 0 where the mask leaves them out."""
    bit = i * BITS
    at = array.to(tl.pointer_type(tl.uint8)) + (bit >> 3)
    if mask is None:
        byte = tl.load(at)
    else:
        byte = tl.load(at, mask=mask, other=0)
    return (byte.to(tl.int32) >> (bit & 7).to(tl.int32)) & (2**BITS - 1)


def _scan_sum(a: Any, b: Any) -> Any:
    return a + b


def _scan_max(a: Any, b: Any) -> Any:
    return tl.where(a > b, a, b)


def _scan_min(a: Any, b: Any) -> Any:
    return tl.where(a < b, a, b)


def _same_header(frame: Any, expected: Any) -> Any:
    """Whether a frame says what it must; flags, step, plan and sender may be any."""
    word = tl.arange(0, 32)
    fixed = (word == 0) | (word == 5) | ((word >= 6) & (word <= 9)) | ((word >= 16) & (word < 20))
    have = tl.load(frame.to(tl.pointer_type(tl.int32)) + word, mask=fixed, other=0)
    want = tl.load(expected.to(tl.pointer_type(tl.int32)) + word, mask=fixed, other=0)
    same = tl.min((have == want).to(tl.int32))
    halves, known = frame.to(tl.pointer_type(tl.uint16)), expected.to(tl.pointer_type(tl.uint16))
    version = (tl.load(halves + 2) == tl.load(known + 2)).to(tl.int32)
    flags = (tl.load(halves + 3) <= 1).to(tl.int32)
    return same & version & flags


def _same_entry(frame: Any, expected: Any, g: Any) -> Any:
    """Whether a frame of many says what it must of gradient g."""
    word = 16 + 4 * g + tl.arange(0, 4)
    have = tl.load(frame.to(tl.pointer_type(tl.int32)) + word)
    want = tl.load(expected.to(tl.pointer_type(tl.int32)) + word)
    return tl.min((have == want).to(tl.int32))


def _write_header(frame: Any, template: Any, num_words: Any, step: Any) -> Any:
    """A frame's header and table, the flags cleared."""
    for at in range(0, num_words, 1024):
        word = at + tl.arange(0, 1024)
        there = word < num_words
        text = tl.load(template.to(tl.pointer_type(tl.int32)) + word, mask=there)
        text = tl.where(word == 2, step.to(tl.int32), text)
        tl.store(frame.to(tl.pointer_type(tl.int32)) + word, text, mask=there)


def _clear(memory: Any, start: Any, end: Any) -> Any:
    """Zeroes some kilobytes."""
    for first in range(start, end, 4096):
        at = first + tl.arange(0, 4096)
        tl.store(memory + at, tl.zeros([4096], tl.uint8), mask=at < end)


def _clear_gap(body: Any, start: Any, end: Any) -> Any:
    """Zeroes the bytes between two sections, fewer than 16."""
    at = start + tl.arange(0, 16)
    tl.store(body + at, tl.zeros([16], tl.uint8), mask=at < end)
