"""`hipress bench codecs` and `hipress bench gradient`: speed beside memcpy and beside eager torch,
and error on a real gradient.

Each function takes a codec expression and returns one flat row of plain numbers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

import hipress
from hipress.bench import eager
from hipress.bench.timing import measure
from hipress.codecs import table
from hipress.codecs.expression import Call, parse
from hipress.errors import MissingDependencyError

if TYPE_CHECKING:
    from hipress.codecs import Codec

OnRound = Callable[[float], None]
"""Called after each round of timing with the fraction of the row that is done."""

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
    """Returns the codecs shown when none are named: a fixed list, then those it does not cover.

    A codec of another package that cannot be made is left out, with a warning in the log.
    """
    covered = {name for expression in FIXED_LINE_UP for name in _names(parse(expression))}
    broken = table.broken()
    for name, reason in broken.items():
        logging.getLogger("hipress").warning("%s is left out: %s", name, reason)
    others = [name for name in hipress.codecs.names() if name not in covered | broken.keys()]
    return [*FIXED_LINE_UP, *others]


def gaussian(size_bytes: int) -> Tensor:
    """Returns a float32 gradient of `size_bytes` bytes: N(0, 0.01^2), the same on every call."""
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
    """Times encode, decode and decode-add beside memcpy and the eager form, all in one run.

    Seconds are medians with their 20th and 80th percentiles, ratios are above 1 where the codec is
    faster. The eager form is timed twice: `eager` makes every buffer anew in each call, as eager
    torch does, and `tuned` has them all beforehand; their fields are None where there is no eager
    form.
    """
    codec = hipress.codec(expression)
    with num_threads(threads):
        candidates = _codec_calls(codec, x)
        if with_eager:
            candidates |= _eager_calls(expression, x)
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
        timing = times.get(name)
        row |= dict.fromkeys(times["memcpy"].fields(f"{name}_"))
        row |= {} if timing is None else timing.fields(f"{name}_")
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
    """Measures what a codec makes of one gradient: ratio, errors and speed in GB/s of gradient.

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


def digits_gradient(width: int) -> Tensor:
    """Returns all parameter gradients of a multi-layer perceptron on scikit-learn's digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", extra="data") from error
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
    loss = nn.functional.cross_entropy(model(images), torch.from_numpy(digits.target))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


def mean_error(codec: Codec, gradient: Tensor, num_steps: int) -> float:
    """Returns ||mean of decoded messages - gradient|| / ||gradient|| over steps of one gradient."""
    state = codec.init(gradient, seed=0, stream=0)
    mean = torch.zeros_like(gradient)
    for _ in range(num_steps):
        codec.decode(codec.encode(gradient, state), out=mean, add=True, alpha=1 / num_steps)
    return float((mean - gradient).norm() / gradient.norm())


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Gives codecs and torch `count` threads, and restores both settings afterwards."""
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
    """The eager form, with every buffer made in each call and with all of them made beforehand."""
    tuned = eager.build(expression, x.numel())
    if tuned is None:
        return {}
    # Clones: encode reuses its own buffers, and decode should not depend on the shuffled order.
    parts = tuple(part.clone() for part in tuned.encode(x))
    out, total = torch.zeros_like(x), torch.zeros_like(x)

    def fresh() -> eager.EagerCodec:
        return cast(eager.EagerCodec, eager.build(expression, x.numel()))

    return {
        "eager_encode": lambda: fresh().encode(x),
        "eager_decode": lambda: fresh().decode(parts, torch.empty_like(x)),
        "eager_decode_add": lambda: fresh().decode_add(parts, total, 1.0),
        "tuned_encode": lambda: tuned.encode(x),
        "tuned_decode": lambda: tuned.decode(parts, out),
        "tuned_decode_add": lambda: tuned.decode_add(parts, total, 1.0),
    }
