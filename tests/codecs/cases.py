"""The codecs that the shared tests run on, with their wire format written out by hand.

Nothing here calls `hipress`: a payload is cut, unpacked and decoded from the documented layout
alone, so that what tests compare with is a second opinion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.grid import thinned

BACKENDS = ("reference", "cpu")
SIZES = (0, 1, 7, 8, 4095, 4096, 4097, 10007)
HEAD = 80
"""Header (64) and one table entry (16)."""
FLAGS = 6
"""Offset of the flags; bit 0 says that the gradient was not finite."""

Field = tuple[str, int, int | None]
"""A section of a body: its name, bits of an element, number of elements; None is a scalar.

Scalars stand side by side, each on a multiple of its size; arrays, and what follows the last
section, start on a multiple of 16 bytes.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One codec expression and what is true of it."""

    expr: str
    plain: str
    """The expression of the same program without wrappers."""
    feedback: bool = False
    mu: float | None = None
    nesterov: bool = False
    """Of the wrapper; `dgc` has an option of its own for it."""
    decay: float = 1.0
    """The factor on the residual."""

    @property
    def name(self) -> str:
        """The program: `onebit`, `topk`, ..."""
        return self.plain.partition("(")[0]

    @property
    def options(self) -> dict[str, str]:
        inside = self.plain.partition("(")[2].rstrip(")")
        return dict(item.strip().split("=") for item in inside.split(",") if item)

    @property
    def own_memory(self) -> bool:
        """Whether it keeps velocity and residual itself, and takes no wrapper."""
        return self.name == "dgc"

    @property
    def states(self) -> set[str]:
        """The names of its state, as long as the gradient each."""
        names = {"residual"} if self.feedback else set()
        names |= {"momentum"} if self.mu is not None else set()
        names |= {"velocity", "residual"} if self.own_memory else set()
        return names | ({"weight"} if self.weight_decay else set())

    @property
    def random(self) -> bool:
        """Whether it draws random numbers: to round, to sample a threshold, to pick places."""
        return self.rounds or self.sampled or self.name == "randomk"

    @property
    def rounds(self) -> bool:
        """Whether it rounds at random."""
        return self.name in ("minmax", "terngrad", "dithering")

    @property
    def sparse(self) -> bool:
        """Whether it sends indices and values of the largest elements."""
        return self.name in RATIOS and self.name != "randomk"

    @property
    def sampled(self) -> bool:
        """Whether it sends what is above a threshold that comes from a sample."""
        return self.sparse and not self.exact

    @property
    def summed(self) -> bool:
        """Whether a scale comes from a sum of floats, whose order a backend may choose."""
        clips = self.name in ("terngrad", "dgc") and self.clip > 0
        return clips or self.name == "onebit" or self.options.get("norm") == "l2"

    @property
    def block(self) -> int:
        return int(self.options.get("block", BLOCKS.get(self.name, 1024)))

    @property
    def bits(self) -> int:
        """Of a code: an option of `minmax`, given by the levels of `dithering` and `tbq`."""
        if self.name == "tbq" and self.levels == 1:
            return 2
        if self.name in ("dithering", "tbq"):
            return 4 if self.levels <= 7 else 8
        return int(self.options.get("bits", 2))

    @property
    def levels(self) -> int:
        return int(self.options.get("levels", 1 if self.name == "tbq" else 2))

    @property
    def natural(self) -> bool:
        return self.options.get("partition") == "natural"

    @property
    def tau(self) -> float:
        return float(self.options.get("tau", 0.5))

    @property
    def clip(self) -> float:
        """Standard deviations of `terngrad`, the norm of `dgc`; 0 is off."""
        return float(self.options.get("clip", 0 if self.own_memory else 2.5))

    @property
    def weight_decay(self) -> float:
        return float(self.options.get("weight_decay", 0))

    @property
    def exact(self) -> bool:
        return self.options.get("exact") == "true"

    @property
    def ratio(self) -> float:
        return float(self.options.get("ratio", RATIOS[self.name]))

    @property
    def k(self) -> int:
        """Elements that a block of `blocktopk` sends."""
        return int(self.options.get("k", 64))

    def room(self, n: int) -> int:
        """The most elements that a sparse codec sends of n: k."""
        workers = int(self.options.get("workers", 1))
        return min(n, workers * max(1, math.floor(self.ratio * n)))

    def fields(self, n: int) -> list[Field]:
        """The sections of the body of n elements, in order."""
        if self.name == "none":
            return [("value", 32, n)]
        if self.name in ("fp16", "bf16"):
            return [("value", 16, n)]
        if self.name == "int8":
            return [("scale", 32, -(-n // self.block)), ("code", 8, n)]
        if self.name == "int4":
            return [("scale", 32, -(-n // self.block)), ("code", 4, n)]
        if self.name == "blocktopk":
            num_blocks = -(-n // self.block)
            levels = ("low", "high")[: self.bits]
            width = next(w for w in (6, 8, 12, 16) if self.block <= 2**w)
            return [
                *((level, 16, num_blocks) for level in levels),
                ("place", width, self.k * num_blocks),
                ("code", self.bits, self.k * num_blocks),
            ]
        if self.name == "onebit":
            names = ("low", "high") if self.options.get("means") == "2" else ("scale",)
            return [*((s, 32, -(-n // self.block)) for s in names), ("negative", 1, n)]
        if self.name == "tbq":
            return [("code", self.bits, n)]
        if self.name == "dithering":
            return [("norm", 32, None), ("code", self.bits, n)]
        if self.name == "minmax":
            return [
                ("bitwidth", 8, None),
                ("tail", 8, None),
                ("min", 32, None),
                ("max", 32, None),
                ("code", self.bits, n),
            ]
        if self.name == "terngrad":
            return [("scale", 32, None), ("code", 2, n)]
        k = self.room(n)
        if self.name == "randomk":
            return [("key", 32, None), ("value", 32, k)]
        return [("count", 32, None), ("index", 32, k), ("value", 32, k)]

    def places(self, n: int) -> list[slice]:
        """Where the sections lie in a frame; the last entry is its end."""
        at, places = HEAD, []
        for _, bits, count in self.fields(n):
            num_bytes = -(-bits * (1 if count is None else count) // 8)
            at = _multiple(at, num_bytes if count is None else 16)
            places.append(slice(at, at + num_bytes))
            at += num_bytes
        end = _multiple(at, 16)
        return [*places, slice(end, end)]

    def wire_bytes(self, n: int) -> int:
        return self.places(n)[-1].stop

    def padding(self, n: int) -> NDArray[np.bool_]:
        """Which bytes of a frame belong to no field."""
        free = np.ones(self.wire_bytes(n), bool)
        for place in (slice(0, HEAD), *self.places(n)):
            free[place] = False
        return free

    def parts(self, payload: torch.Tensor, n: int) -> dict[str, NDArray[Any]]:
        """The sections of a frame: 32 bits as float32 or uint32, codes as integers."""
        parts = {}
        for (name, bits, count), place in zip(self.fields(n), self.places(n), strict=False):
            raw = payload.numpy()[place].copy()
            if bits == 32:
                parts[name] = raw.view("<u4" if name in WORDS else "<f4")
            elif bits == 16:
                parts[name] = raw.view("<u2")
            elif bits == 8:
                parts[name] = raw
            else:
                whole = -(-8 * raw.size // bits) * bits
                low_first = np.unpackbits(raw, count=whole, bitorder="little").reshape(-1, bits)
                parts[name] = (low_first << np.arange(bits)).sum(axis=1)[:count]
        return parts

    def decoded(self, payload: torch.Tensor, n: int) -> torch.Tensor:
        """What a payload means, by the formula of the codec."""
        parts = self.parts(payload, n)
        if self.name == "none":
            return torch.from_numpy(parts["value"])
        if self.name == "fp16":
            return torch.from_numpy(parts["value"].view(np.float16).astype(np.float32))
        if self.name == "bf16":
            return torch.from_numpy((parts["value"].astype(np.uint32) << 16).view(np.float32))
        if self.name == "int8":
            scale = np.repeat(parts["scale"], self.block)[:n]
            return torch.from_numpy((parts["code"].astype(np.float32) - 128) * scale)
        if self.name == "int4":
            scale = np.repeat(parts["scale"], self.block)[:n]
            return torch.from_numpy((parts["code"].astype(np.float32) - 8) * scale)
        if self.name == "blocktopk":
            return self.picked(parts, n)
        if self.name == "onebit":
            low, high = parts.get("low"), parts.get("high")
            if low is None or high is None:
                low, high = -parts["scale"], parts["scale"]
            low, high = (np.repeat(value, self.block)[:n] for value in (low, high))
            return torch.from_numpy(np.where(parts["negative"] == 1, low, high))
        if self.name == "tbq":
            multiple = parts["code"].astype(np.float32) - self.levels
            return torch.from_numpy(multiple * np.float32(self.tau / self.levels))
        if self.name == "dithering":
            level = np.minimum(parts["code"] >> 1, self.levels).astype(np.float32)
            if self.natural:
                share = np.where(level == 0, 0, np.exp2(level - self.levels)).astype(np.float32)
            else:
                share = level / np.float32(self.levels)
            size = parts["norm"][0] * share
            return torch.from_numpy(np.where(parts["code"] & 1 == 1, -size, size))
        if self.name == "minmax":
            low, high = parts["min"][0], parts["max"][0]
            gap = (high - low) / np.float32(2**self.bits - 1)
            return torch.from_numpy(low + parts["code"].astype(np.float32) * gap)
        if self.name == "terngrad":
            s = parts["scale"][0]
            return torch.from_numpy(np.array([0, s, -s, 0], np.float32)[parts["code"]])
        out = np.zeros(n, np.float32)
        if self.name == "randomk":
            if n:
                out[places_of(int(parts["key"][0]), n, self.room(n))] = parts["value"]
            return torch.from_numpy(out)
        count = int(parts["count"][0])
        np.add.at(out, parts["index"][:count], parts["value"][:count])  # two at one place add up
        return torch.from_numpy(out)

    def picked(self, parts: dict[str, NDArray[Any]], n: int) -> torch.Tensor:
        """What `blocktopk` decodes: a level with a sign at each place that lies in its block."""
        out = np.zeros(n, np.float32)
        block = np.repeat(np.arange(-(-n // self.block)), self.k)
        length = np.minimum(self.block, n - block * self.block)
        low, high = (
            (parts[name].astype(np.uint32) << 16).view(np.float32)[block]
            for name in ("low", "high" if self.bits == 2 else "low")
        )
        size = np.where(parts["code"] > 1, high, low)
        value = np.where(parts["code"] % 2 == 1, -size, size)
        place = parts["place"].astype(np.int64)
        used = (place < length) & (np.tile(np.arange(self.k), len(block) // self.k) < length)
        np.add.at(out, (block * self.block + place)[used], value[used])
        return torch.from_numpy(out)


def places_of(key: int, n: int, k: int) -> NDArray[np.int64]:
    """Where `randomk` sends: one place in each of k stretches of n elements, drawn by a key."""
    j = np.arange(k)
    start = j * (n // k) + np.minimum(j, n % k)
    word = philox(j // 4, key)[j % 4, j]
    return start + (word * (n // k + (j < n % k)) >> 32)


def philox(counter: NDArray[np.int64], key: int) -> NDArray[np.int64]:
    """Four words for each counter (Philox4x32-7, Salmon et al., SC'11): stream, step and site 0.

    A key of 32 bits. Products of two words are cut to 64 bits, which is all that is asked of them.
    """
    low = np.uint64(2**32 - 1)
    a = counter.astype(np.uint64)
    b, c, d = (np.zeros_like(a) for _ in range(3))
    keys = [key, 0]
    for _ in range(7):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = right >> np.uint64(32) ^ b ^ np.uint64(keys[0]), right & low
        c, d = left >> np.uint64(32) ^ d ^ np.uint64(keys[1]), left & low
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return np.stack([a, b, c, d]).astype(np.int64)


def _multiple(num_bytes: int, of: int) -> int:
    return -(-num_bytes // of) * of


RATIOS = {"topk": 0.01, "graddrop": 0.01, "dgc": 0.001, "randomk": 0.01}
"""The share of the elements that a sparse codec sends, where nothing is said."""
BLOCKS = {"int8": 256, "int4": 128, "blocktopk": 4096}
"""Elements that share a scale, where nothing is said; 1024 in other codecs."""
WORDS = ("count", "index", "key")
"""Sections of 32 bits that are whole numbers."""
NEEDS_FEEDBACK = ("int8", "int4", "onebit", "tbq", "graddrop", "topk", "blocktopk", "randomk")
"""Codecs that have error feedback unless told otherwise."""

PLAIN = tuple(
    Case(expr=e, plain=e)
    for e in (
        "none",
        "fp16",
        "bf16",
        "int8(ef=false)",
        "int8(block=64, ef=false)",
        "int4(ef=false)",
        "int4(block=72, ef=false)",
        "onebit(ef=false)",
        "onebit(block=64, ef=false)",
        "onebit(block=64, means=2, ef=false)",
        "tbq(ef=false)",
        "tbq(levels=4, ef=false)",
        *(f"minmax(bits={b})" for b in (1, 2, 4, 8)),
        "terngrad",
        "terngrad(clip=0)",
        "dithering",
        "dithering(levels=100, norm=l2)",
        "dithering(levels=7, partition=natural)",
        "dithering(levels=9, partition=natural, norm=l2)",
        "graddrop(ef=false)",
        "topk(ef=false)",
        "topk(exact=true, ef=false)",
        "topk(ratio=0.1, exact=true, ef=false)",
        "blocktopk(ef=false)",
        "blocktopk(k=9, block=64, bits=1, ef=false)",
        "blocktopk(k=20, block=512, union=false, ef=false)",
        "randomk(ef=false)",
        "randomk(ratio=0.1, ef=false)",
    )
)
# Where feedback is the default, the expression that says nothing of it stands for `ef(...)`.
FEEDBACK = tuple(
    Case(
        expr=(
            c.plain.replace("(ef=false)", "").replace(", ef=false", "")
            if c.name in NEEDS_FEEDBACK
            else f"ef({c.plain})"
        ),
        plain=c.plain,
        feedback=True,
    )
    for c in PLAIN
)
MOMENTUM = (
    Case(
        expr="momentum(ef(onebit), mu=0.9, nesterov=true)",
        plain="onebit(ef=false)",
        feedback=True,
        mu=0.9,
        nesterov=True,
    ),
    Case(expr="momentum(fp16, nesterov=false)", plain="fp16", mu=0.9),
    Case(
        expr="momentum(randomk, mu=0.5, nesterov=false)",
        plain="randomk(ef=false)",
        feedback=True,
        mu=0.5,
    ),
    Case(
        expr="momentum(dithering)",
        plain="dithering",
        mu=0.9,
        nesterov=True,
    ),
)
DECAYED = (
    Case(expr="ef(onebit, decay=0.75)", plain="onebit(ef=false)", feedback=True, decay=0.75),
    Case(
        expr="momentum(ef(onebit, decay=0.75), mu=0.5, nesterov=false)",
        plain="onebit(ef=false)",
        feedback=True,
        mu=0.5,
        decay=0.75,
    ),
)
DGC = tuple(
    Case(expr=e, plain=e)
    for e in (
        "dgc",
        "dgc(ratio=0.05, momentum=0)",
        "dgc(ratio=0.05, nesterov=true)",
        "dgc(ratio=0.05, momentum=0.5, clip=2.0, weight_decay=0.25)",
    )
)
WARMUP = "dgc(ratio=0.05, warmup=4)"
"""Its last phase is a case above but for the ratio, which is a number and no other kernel."""
WIRE = (*PLAIN, *DGC)
"""One case for each kind of frame."""
CASES = (*PLAIN, *FEEDBACK, *MOMENTUM, *DECAYED, *DGC)
STATEFUL = tuple(c for c in CASES if c.feedback or c.mu is not None)
NAMES = tuple(sorted({c.name for c in CASES} - {"none"}, key=lambda name: (-len(name), name)))
"""The longest first, so that `blocktopk` is not taken for `topk`; in one order in all processes."""

# `make test` compiles the kernels of these cases: every program, every option that makes another
# loop, every wrapper. The others are compiled in `make test-all`, and interpreted in both.
QUICK = (
    *("none", "fp16", "bf16", "int8(ef=false)", "onebit(ef=false)", "tbq(ef=false)"),
    *("onebit(block=64, means=2, ef=false)", "minmax(bits=2)", "terngrad", "dithering"),
    *("topk(ef=false)", "topk(exact=true, ef=false)", "randomk(ef=false)", "blocktopk"),
    *("int8", "int4", "onebit", "topk", "ef(terngrad)", MOMENTUM[0].expr, DGC[2].expr),
    DECAYED[0].expr,
)
NOT_QUICK = {case.expr for case in CASES} - set(QUICK)
QUICK_SIZES = (7, 4097)
"""The sizes that `make test` tries with other cases."""


def compiled(cases: Sequence[Case]) -> list[Any]:
    """The cases of a test that compiles kernels for each of them, all but QUICK marked `full`."""
    return thinned(cases, lambda case: case.expr in QUICK)


def quick(case: Case, params: Mapping[str, Any]) -> bool:
    """Whether `make test` runs a test with this case, a backend and a size n, where it has them."""
    size = params.get("n", QUICK_SIZES[0])
    return case.expr in QUICK or (params.get("backend") != "cpu" and size in QUICK_SIZES)


def gaussian(n: int, seed: int = 0) -> torch.Tensor:
    """A gradient for tests: normal, the same on every machine for one torch."""
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * seed + n))


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest number of float32 steps between two tensors, 0 where both are empty."""
    keys = [_ordered(t.numpy().view(np.int32).astype(np.int64)) for t in (a, b)]
    return int(np.abs(keys[0] - keys[1]).max(initial=0))


def _ordered(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
