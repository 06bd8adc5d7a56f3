"""Damaged frames by the thousand, at the edge of memory: run as `damage.py BACKEND NUM_CASES`.

CPU kernels check no bounds. So this runs in a process of its own, where a crash is the failure of
one test, and frame and result lie against pages that nobody may touch: a kernel that reads or
writes one element too far is killed there. What is left of the pages is filled and looked at.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import hipress
from hipress.errors import FrameError, UsageError
from tests import kernels
from tests.codecs.cases import FLAGS, HEAD, WIRE, Case, gaussian

SIZES = (0, 1, 7, 64, 100, 130, 300)
BATCH = 50
"""Damaged frames of one example: hypothesis chooses sizes and seeds, which costs it 1 ms each."""
KINDS = ("cut", "longer", "flip", "flip", "field", "body", "body", "word", "word", "word")
FIELDS = ((4, 2), (6, 2), (8, 8), (20, 4), (24, 8), (32, 8), (40, 8), (56, 8), (64, 8), (72, 8))
"""Offset and size of the numbers in header and table."""
WORDS = (
    0,
    1,
    2,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x7F7FFFFF,
)
"""Counts, indices and floats to stumble on: infinities, NaN, the largest number."""
FENCE = 0xA5


class Edge:
    """Memory between two pages that cannot be touched."""

    def __init__(self, num_bytes: int) -> None:
        page = mmap.PAGESIZE
        size = -(-num_bytes // page) * page
        self.memory = mmap.mmap(-1, size + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.end = start + page + size
        """The address of the first byte behind."""
        libc = ctypes.CDLL(None, use_errno=True)
        for address in (start, self.end):
            if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.bytes: NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8, size, page)

    def place(self, num_bytes: int, *, last: bool) -> NDArray[np.uint8]:
        """That many bytes at the end, or at the start; all others are filled."""
        self.bytes.fill(FENCE)
        at = len(self.bytes) - num_bytes if last else 0
        return self.bytes[at : at + num_bytes]

    def kept(self, num_bytes: int, *, last: bool) -> bool:
        """Whether all bytes but these are as they were."""
        rest = len(self.bytes) - num_bytes
        others = self.bytes[:rest] if last else self.bytes[num_bytes:]
        return bool((others == FENCE).all())


def signed(data: bytearray) -> None:
    """Sets the check right for whatever header and table now say."""
    if len(data) >= 20:
        data[16:20] = struct.pack("<I", zlib.crc32(data[20 : HEAD if len(data) >= HEAD else 64]))


def damaged(dice: random.Random, case: Case, n: int, whole: bytes) -> tuple[str, bytearray]:
    """A kind of damage, and the frame after it."""
    data, kind = bytearray(whole), dice.choice(KINDS)
    if kind in ("body", "word") and len(data) == HEAD:
        kind = "flip"
    if kind == "cut":
        del data[dice.choice((dice.randrange(len(data)), len(data) - 16, len(data) - 1)) :]
        if dice.random() < 0.5 and len(data) >= HEAD:  # a frame that says so
            data[32:40] = len(data).to_bytes(8, "little")
            data[72:80] = (len(data) - HEAD).to_bytes(8, "little")
            signed(data)
    elif kind == "longer":
        data += dice.randbytes(dice.choice((1, 15, 16, 64)))
        if dice.random() < 0.5:
            data[32:40] = len(data).to_bytes(8, "little")
            data[72:80] = (len(data) - HEAD).to_bytes(8, "little")
            signed(data)
    elif kind == "flip":
        for _ in range(dice.choice((1, 1, 2, 6))):
            bit = dice.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
    elif kind == "field":
        at, size = dice.choice(FIELDS)
        top = 2 ** (8 * size) - 1
        value = dice.choice((dice.randrange(300), n - 1 & top, n + 1, dice.randrange(top), top))
        data[at : at + size] = value.to_bytes(size, "little")
        signed(data)
    elif kind == "body":
        for _ in range(dice.choice((1, 2, 8, 40))):
            value = dice.choice((0, 1, 127, 128, 255, dice.randrange(256)))
            data[dice.randrange(HEAD, len(data))] = value
    else:
        k = n if case.name not in ("topk", "graddrop", "dgc") else case.room(n)
        near = (k, k + 1, max(0, k - 1), n, n + 1, max(0, n - 1), dice.randrange(2**32))
        places = (len(data) - HEAD) // 4
        # The first word is a count, a key or a scale; then come indices, values, codes.
        for place in dice.choice(((0,), (dice.randrange(places),), range(min(8, places)))):
            struct.pack_into("<I", data, HEAD + 4 * place, dice.choice((*WORDS, *near)))
    return kind, data


class Trial:
    """Decodes damaged frames of one codec, and counts what came of it."""

    def __init__(self) -> None:
        self.frame, self.out = Edge(4096), Edge(4096)
        self.seen: Counter[str] = Counter()

    def run(self, case: Case, n: int, seed: int) -> None:
        """One batch."""
        c, x, dice = hipress.codec(case.expr), gaussian(n), random.Random(seed)
        whole = c.encode(x, c.init(x, seed=seed)).numpy().tobytes()
        for i in range(BATCH):
            kind, data = damaged(dice, case, n, whole)
            try:
                self.one(c, case, n, data, add=i % 2 == 1, last=dice.random() < 0.7)
            except Exception as error:
                raise AssertionError(
                    f"{case.expr}, {n} elements, {kind}, add={i % 2 == 1}: {error!r}\n{data.hex()}"
                ) from error

    def one(
        self, c: hipress.Codec, case: Case, n: int, data: bytearray, *, add: bool, last: bool
    ) -> None:
        """An error in words, or numbers by the formula; and nothing else is touched."""
        self.seen["cases"] += 1
        placed = self.frame.place(len(data), last=last)
        placed[:] = data
        payload = torch.from_numpy(placed)
        target = self.out.place(4 * n, last=last).view(np.float32)
        target.fill(7)
        out = torch.from_numpy(target)
        refused = False
        try:
            assert c.decode(payload, out=out, add=add) is out
        except FrameError as error:
            refused = True
            assert str(error).endswith(".") and "\n" not in str(error)
            assert not add or (target == 7).all()  # a sum of good frames is not spoilt
        except UsageError as error:
            assert str(error).startswith(f"out has {n} elements; the frame holds ")
            self.fresh(c, payload)
            refused = True
        assert self.out.kept(4 * n, last=last) and self.frame.kept(len(data), last=last)
        assert placed.tobytes() == data
        self.seen["refused" if refused else "decoded"] += 1
        if refused:
            return
        if data[FLAGS] == 1:
            assert np.isnan(target).all()
        elif not (add and case.sparse):  # where indices may come twice, and each is added at once
            with np.errstate(all="ignore"):
                expected = case.decoded(payload, n).numpy()
                expected = expected + np.float32(7) if add else expected
            assert np.array_equal(target, expected, equal_nan=True)

    def fresh(self, c: hipress.Codec, payload: torch.Tensor) -> None:
        """A table that was changed and signed again may hold another number of elements."""
        try:
            decoded = c.decode(payload)
        except FrameError:
            return
        assert decoded.shape == (struct.unpack_from("<Q", payload.numpy(), 64)[0],)


def main(backend: str, num_cases: int, exprs: Sequence[str]) -> None:
    """As many cases as asked for at least, shared evenly; prints what came of them."""
    os.environ.update(HIPRESS_BACKEND=backend, HIPRESS_THREADS="1")
    trial = Trial()
    cases = [case for case in WIRE if case.expr in exprs]
    for case in cases:
        before = trial.seen["cases"]
        hunt(trial, case, -(-num_cases // (len(cases) * BATCH)))
        trial.seen[case.expr] = trial.seen["cases"] - before
    print(json.dumps(trial.seen))


def hunt(trial: Trial, case: Case, num_batches: int) -> None:
    @given(n=st.sampled_from(SIZES), seed=st.integers(0, 2**63 - 1))
    @settings(
        max_examples=num_batches,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(n: int, seed: int) -> None:
        trial.run(case, n, seed)

    check()


if __name__ == "__main__":
    kernels.compile_once()
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
