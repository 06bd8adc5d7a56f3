"""Rows about codecs: speed beside memcpy and beside eager torch, and error on a real gradient.

Each function takes a codec expression and returns one flat row of plain numbers; the commands
`hipress bench codecs` and `hipress bench gradient` only print or store them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hipress
from hipress.bench import eager, eager_tuned
from hipress.bench.timing import Timing, measure
from hipress.codecs import table
from hipress.codecs.expression import Call, parse

if TYPE_CHECKING:
    from hipress.codecs import Codec

OnRound = Callable[[float], None]
"""Told after each round of timing which fraction of the row is done."""

FIXED_LINE_UP = (
    "none",
    "fp16",
    "bf16",
    "ef(onebit)",
    "minmax(bits=2)",
    "terngrad",
    "ef(topk(ratio=0.01, exact=false))",
    "ef(topk(ratio=0.01, exact=true))",
)
"""Always shown, so that tables of different days have the same rows."""


def line_up() -> list[str]:
    """The codecs shown when none are named: a fixed list, then any codec it does not cover.

    A codec of another package that cannot be made is told in the log and left out.
    """
    covered = {name for expression in FIXED_LINE_UP for name in _names(parse(expression))}
    broken = table.broken()
    for name, reason in broken.items():
        logging.getLogger("hipress").warning("%s is left out: %s", name, reason)
    others = [name for name in hipress.codecs.names() if name not in covered | broken.keys()]
    return [*FIXED_LINE_UP, *others]


def gaussian(size_bytes: int) -> Tensor:
    """A float32 gradient of `size_bytes` bytes: N(0, 0.01^2), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.empty(size_bytes // 4).normal_(0.0, 0.01, generator=generator)


def speed_row(
    expression: str,
    x: Tensor,
    *,
    threads: int = 1,
    repeats: int = 9,
    with_eager: bool = True,
    on_round: OnRound | None = None,
) -> dict[str, Any]:
    """Time encode, decode and decode-add beside memcpy and the eager form, all in one run.

    Returns:
        Seconds as medians with their 20th and 80th percentiles, and ratios above 1 where the codec
        is faster; the eager fields are None where there is no eager form.
    """
    codec = hipress.codec(expression)
    with num_threads(threads):
        candidates = _codec_calls(codec, x)
        if with_eager:
            candidates |= _eager_calls(expression, x) | _tuned_calls(expression, x)
        times = measure(candidates, repeats=repeats, on_round=on_round)
    size_bytes = x.numel() * x.element_size()
    wire_bytes = codec.wire_bytes(x.numel())
    row: dict[str, Any] = {
        "codec": expression,
        "size_bytes": size_bytes,
        "threads": threads,
        "repeats": times["memcpy"].num_samples,
        "wire_bytes": wire_bytes,
        "ratio": size_bytes / wire_bytes,
    }
    peers = [f"{form}_{verb}" for form in ("eager", "tuned") for verb in _VERBS]
    for name in ("memcpy", *_VERBS, *peers):
        row |= _time_fields(name, times.get(name))
    for verb in _VERBS:
        row[f"{verb}_x_memcpy"] = times["memcpy"].p50_s / times[verb].p50_s
        for form in ("eager", "tuned"):
            peer = times.get(f"{form}_{verb}")
            row[f"{verb}_x_{form}"] = None if peer is None else peer.p50_s / times[verb].p50_s
    return row


def gradient_row(
    expression: str,
    gradient: Tensor,
    *,
    num_steps: int = 20,
    repeats: int = 7,
    on_round: OnRound | None = None,
) -> dict[str, Any]:
    """What a codec makes of one real gradient: ratio, errors and speed in GB/s of gradient.

    `mean_error` is the relative error of the mean of `num_steps` decoded messages, each made from
    the same gradient; it is None for a codec without error feedback. With feedback what one message
    leaves out the next ones bring, so it falls as 1 / num_steps.
    """
    codec = hipress.codec(expression)
    size_bytes = gradient.numel() * gradient.element_size()
    wire_bytes = codec.wire_bytes(gradient.numel())
    has_feedback = "residual" in codec.init(gradient, seed=0, stream=0)
    with num_threads(1):
        times = measure(_codec_calls(codec, gradient), repeats=repeats, on_round=on_round)
    return {
        "codec": expression,
        "size_bytes": size_bytes,
        "wire_bytes": wire_bytes,
        "ratio": size_bytes / wire_bytes,
        "error": mean_error(codec, gradient, num_steps=1),
        "mean_error": mean_error(codec, gradient, num_steps) if has_feedback else None,
        "num_steps": num_steps,
        "encode_gb_per_s": size_bytes / times["encode"].p50_s / 1e9,
        "decode_gb_per_s": size_bytes / times["decode"].p50_s / 1e9,
        "memcpy_gb_per_s": size_bytes / times["memcpy"].p50_s / 1e9,
    }


def mean_error(codec: Codec, gradient: Tensor, num_steps: int) -> float:
    """||mean of the decoded messages - gradient|| / ||gradient|| over steps of one gradient."""
    state = codec.init(gradient, seed=0, stream=0)
    mean = torch.zeros_like(gradient)
    for _ in range(num_steps):
        codec.decode(codec.encode(gradient, state), out=mean, add=True, alpha=1 / num_steps)
    return float((mean - gradient).norm() / gradient.norm())


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Give codecs and torch `count` threads, and put both settings back afterwards."""
    before = os.environ.get("HIPRESS_THREADS")
    torch_before = torch.get_num_threads()
    os.environ["HIPRESS_THREADS"] = str(count)
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(torch_before)
        if before is None:
            del os.environ["HIPRESS_THREADS"]
        else:
            os.environ["HIPRESS_THREADS"] = before


_VERBS = ("encode", "decode", "decode_add")


def _names(call: Call) -> set[str]:
    return {call.name}.union(*(_names(arg) for arg in call.args))


def _codec_calls(codec: Codec, x: Tensor) -> dict[str, Callable[[], object]]:
    """The three verbs and memcpy, with every buffer made and touched beforehand."""
    state = codec.init(x, seed=0, stream=0)
    payload = codec.encode(x, state)
    out, total, copy = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    return {
        "memcpy": lambda: copy.copy_(x),
        "encode": lambda: codec.encode(x, state, out=payload),
        "decode": lambda: codec.decode(payload, out=out),
        "decode_add": lambda: codec.decode(payload, out=total, add=True, alpha=1.0),
    }


def _eager_calls(expression: str, x: Tensor) -> dict[str, Callable[[], object]]:
    """The plain eager form: every call makes its results anew, as eager torch does."""
    form = eager.build(expression)
    if form is None:
        return {}
    parts, total, n = form.encode(x), torch.zeros_like(x), x.numel()
    return {
        "eager_encode": lambda: form.encode(x),
        "eager_decode": lambda: form.decode(parts, n),
        "eager_decode_add": lambda: total.add_(form.decode(parts, n)),
    }


def _tuned_calls(expression: str, x: Tensor) -> dict[str, Callable[[], object]]:
    """The tuned form, which writes into buffers made beforehand."""
    form = eager_tuned.build(expression, x.numel())
    if form is None:
        return {}
    # Clones: encode reuses its own buffers, and decode should not depend on the shuffled order.
    parts = tuple(part.clone() for part in form.encode(x))
    out, total = torch.zeros_like(x), torch.zeros_like(x)
    return {
        "tuned_encode": lambda: form.encode(x),
        "tuned_decode": lambda: form.decode(parts, out),
        "tuned_decode_add": lambda: form.decode_add(parts, total, 1.0),
    }


def _time_fields(name: str, timing: Timing | None) -> dict[str, float | None]:
    return {
        f"{name}_seconds_median": None if timing is None else timing.p50_s,
        f"{name}_seconds_p20": None if timing is None else timing.p20_s,
        f"{name}_seconds_p80": None if timing is None else timing.p80_s,
    }
