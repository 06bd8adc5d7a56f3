"""Runs programs on a backend, and on the oracle, in the same shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hipress.compll.build import Bound, parse_program
from hipress.compll.front.parse import parse
from hipress.compll.passes.derive import ALPHA, MU, PLAIN, Variant
from tests.compll import oracle

Rng = tuple[int, int, int]
RNG: Rng = (0x1234_5678_9ABC_DEF0, 3, 7)
MU_VALUE = 0.9
GUARD = 64
"""Bytes beyond each buffer that a kernel must leave alone."""


@dataclass
class Result:
    """What a program made of a gradient."""

    flag: Any
    body: np.ndarray
    decoded: np.ndarray
    added: np.ndarray
    states: list[np.ndarray]
    refusal: Any = None


def bound(text: str, params: Mapping[str, Any] | None = None) -> Bound:
    return parse_program(text).bind(params or {})


def scratch(num_bytes: int) -> np.ndarray:
    return np.full(num_bytes, 0xA5, np.uint8)  # dirty, as reused memory is


def guarded(num_bytes: int, fill: int) -> tuple[np.ndarray, np.ndarray]:
    """A buffer on a 16-byte boundary, and the bytes after it."""
    whole = np.full(num_bytes + GUARD + 16, fill, np.uint8)
    start = -whole.ctypes.data % 16
    rest = whole[start + num_bytes : start + num_bytes + GUARD]
    return whole[start : start + num_bytes], rest


def encode(
    program: Bound,
    backend: str,
    x: np.ndarray,
    states: Sequence[np.ndarray] = (),
    *,
    variant: Variant = PLAIN,
    dtype: str = "f32",
    rng: Rng = RNG,
    pool: Any = None,
) -> tuple[Any, np.ndarray, list[np.ndarray]]:
    """Whether the kernel saw a NaN or an infinity, the payload's body, the states after."""
    loaded = program.load(backend, dtype=dtype, variant=variant)
    after = [s.copy() for s in states] or [np.zeros(len(x), np.float32) for _ in range(9)]
    # A kernel takes the states that it uses; the caller gives all of them, in this order.
    own = sum(a.inout for a in program.program.pair.encode[1].args)
    names = [f"state{k}" for k in range(own)]
    names += ["momentum"] * variant.momentum + ["residual"] * variant.feedback
    by_name = dict(zip(names, after, strict=False))
    held = [by_name[s.name] for s in loaded.encode.states]
    body, rest = guarded(program.body_bytes()(len(x)), 0xEE)
    given = x.copy()
    params = program.floats(loaded.encode, {MU: MU_VALUE})
    flag = loaded.module.encode(len(x), params, rng, body, given, held, scratch, pool)
    assert (rest == 0xEE).all(), "encode wrote past the payload"
    assert given.tobytes() == x.tobytes(), "encode changed the gradient"
    return flag, body, after[: len(names)]


def decode(
    program: Bound,
    backend: str,
    body: np.ndarray,
    n: int,
    *,
    into: np.ndarray | None = None,
    alpha: float = 1.0,
    dtype: str = "f32",
    variant: Variant = PLAIN,
    pool: Any = None,
) -> np.ndarray:
    """The decoded gradient, or `into` with it added; a refusal is an `oracle.Refused`."""
    loaded = program.load(backend, dtype=dtype, variant=variant)
    kind = np.float32 if dtype == "f32" else np.uint16
    memory, rest = guarded(n * np.dtype(kind).itemsize, 0x77)
    out = memory.view(kind)
    if into is not None:
        out[:] = into
    kernel = loaded.module.decode if into is None else loaded.module.decode_add
    given = body.copy()
    params = program.floats(loaded.decode, {ALPHA: alpha})
    refusal = kernel(n, params, (0, 0, 0), given, out, scratch, pool)
    assert (rest == 0x77).all(), "decode wrote past the gradient"
    assert given.tobytes() == body.tobytes(), "decode changed the payload"
    if refusal is not None:
        raise oracle.Refused(refusal)
    return out


def run(
    program: Bound,
    backend: str,
    x: np.ndarray,
    states: Sequence[np.ndarray] = (),
    *,
    into: np.ndarray | None = None,
    alpha: float = 0.5,
    add: bool = True,
    **options: Any,
) -> Result:
    """encode, decode and, with `add`, decode_add of one gradient."""
    flag, body, after = encode(program, backend, x, states, **options)
    options.pop("rng", None)
    decoded = decode(program, backend, body, len(x), **options)
    base = np.zeros(len(x), decoded.dtype) if into is None else into
    if not add:
        return Result(flag, body, decoded, base, after)
    added = decode(program, backend, body, len(x), into=base, alpha=alpha, **options)
    return Result(flag, body, decoded, added, after)


def run_oracle(
    text: str,
    params: Mapping[str, Any],
    x: np.ndarray,
    states: Sequence[np.ndarray] = (),
    *,
    into: np.ndarray | None = None,
    alpha: float = 0.5,
    variant: Variant = PLAIN,
    rng: Rng = RNG,
) -> Result:
    """The same by the oracle, wrappers by the book.

    States come in the order of the kernels: the program's, then momentum, then residual.
    """
    machine = oracle.Machine(parse(text), params)
    inner = list(states)
    residual = inner.pop() if variant.feedback else None
    momentum = inner.pop() if variant.momentum else None
    with np.errstate(all="ignore"):
        v, mu, wrapped = x, np.float32(MU_VALUE), []
        if momentum is not None:
            moved = mu * momentum + x
            v = x + mu * moved if variant.nesterov else moved
            wrapped.append(np.where(np.isfinite(moved), moved, momentum))
        v = v if residual is None else v + residual
        parts, new = machine.encode(v, inner, rng)
        after = [np.where(np.isfinite(a), a, b) for a, b in zip(new, inner, strict=True)]
        decoded = machine.decode(parts, len(x))
        if residual is not None:
            left = v - decoded
            wrapped.append(np.where(np.isfinite(left), left, residual))
        base = np.zeros(len(x), np.float32) if into is None else into
        added = base + np.float32(alpha) * decoded
    flag = not np.isfinite(v).all()
    body = np.frombuffer(oracle.pack(parts), np.uint8)
    return Result(flag, body, decoded, added, [*after, *wrapped])
