"""The codecs that the shared tests run on, with their wire format written out by hand.

Nothing here calls `hipress`: a payload is cut, unpacked and decoded from the documented layout
alone, so that what tests compare with is a second opinion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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

    @property
    def name(self) -> str:
        """The program: `onebit`, `topk`, ..."""
        return self.plain.partition("(")[0]

    @property
    def options(self) -> dict[str, str]:
        inside = self.plain.partition("(")[2].rstrip(")")
        return dict(item.strip().split("=") for item in inside.split(",") if item)

    @property
    def random(self) -> bool:
        """Whether it draws random numbers: to round, or to sample a threshold."""
        sampled = self.name == "topk" and not self.exact
        return self.name in ("minmax", "terngrad") or sampled

    @property
    def summed(self) -> bool:
        """Whether a scale comes from a sum of floats, whose order a backend may choose."""
        return self.name == "onebit" or (self.name == "terngrad" and self.clip > 0)

    @property
    def block(self) -> int:
        return int(self.options.get("block", 4096))

    @property
    def bits(self) -> int:
        return int(self.options.get("bits", 2))

    @property
    def clip(self) -> float:
        return float(self.options.get("clip", 2.5))

    @property
    def exact(self) -> bool:
        return self.options.get("exact") == "true"

    def room(self, n: int) -> int:
        """The most elements that `topk` sends of n: k."""
        return min(n, max(1, math.floor(float(self.options.get("ratio", 0.01)) * n)))

    def fields(self, n: int) -> list[Field]:
        """The sections of the body of n elements, in order."""
        if self.name == "none":
            return [("value", 32, n)]
        if self.name in ("fp16", "bf16"):
            return [("value", 16, n)]
        if self.name == "onebit":
            return [("scale", 32, -(-n // self.block)), ("negative", 1, n)]
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
                parts[name] = raw.view("<u4" if name in ("count", "index") else "<f4")
            elif bits == 16:
                parts[name] = raw.view("<u2")
            elif bits == 8:
                parts[name] = raw
            else:
                low_first = np.unpackbits(raw, bitorder="little").reshape(-1, bits)
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
        if self.name == "onebit":
            scale = np.repeat(parts["scale"], self.block)[:n]
            return torch.from_numpy(np.where(parts["negative"] == 1, -scale, scale))
        if self.name == "minmax":
            low, high = parts["min"][0], parts["max"][0]
            gap = (high - low) / np.float32(2**self.bits - 1)
            return torch.from_numpy(low + parts["code"].astype(np.float32) * gap)
        if self.name == "terngrad":
            s = parts["scale"][0]
            return torch.from_numpy(np.array([0, s, -s, 0], np.float32)[parts["code"]])
        out = np.zeros(n, np.float32)
        count = int(parts["count"][0])
        out[parts["index"][:count]] = parts["value"][:count]
        return torch.from_numpy(out)


def _multiple(num_bytes: int, of: int) -> int:
    return -(-num_bytes // of) * of


PLAIN = (
    *(Case(expr=e, plain=e) for e in ("none", "fp16", "bf16")),
    *(Case(expr=e, plain=e) for e in ("onebit(ef=false)", "onebit(block=64, ef=false)")),
    *(Case(expr=e, plain=e) for e in (f"minmax(bits={b})" for b in (1, 2, 4, 8))),
    *(Case(expr=e, plain=e) for e in ("terngrad", "terngrad(clip=0)")),
    *(
        Case(expr=e, plain=e)
        for e in (
            "topk(ef=false)",
            "topk(exact=true, ef=false)",
            "topk(ratio=0.1, exact=true, ef=false)",
        )
    ),
)
# Where feedback is the default, the expression that says nothing of it stands for `ef(...)`.
FEEDBACK = tuple(
    Case(
        expr=(
            c.plain.replace("(ef=false)", "").replace(", ef=false", "")
            if c.name in ("onebit", "topk")
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
)
CASES = (*PLAIN, *FEEDBACK, *MOMENTUM)
STATEFUL = tuple(c for c in CASES if c.feedback or c.mu is not None)


def gaussian(n: int, seed: int = 0) -> torch.Tensor:
    """A gradient for tests: normal, the same on every machine for one torch."""
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * seed + n))


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest number of float32 steps between two tensors, 0 where both are empty."""
    keys = [_ordered(t.numpy().view(np.int32).astype(np.int64)) for t in (a, b)]
    return int(np.abs(keys[0] - keys[1]).max(initial=0))


def _ordered(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
