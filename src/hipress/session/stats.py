"""The figures of a session, for the log and for TensorBoard."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hipress.session.auto import AutoStats
    from hipress.session.guard import GuardStats
    from hipress.session.session import Session

_log = logging.getLogger("hipress")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What this rank has done since the session started."""

    num_steps: int
    num_gradients: int
    num_compressed: int
    gradient_bytes: int
    """Bytes of the exchanged gradients as float32."""
    sent_bytes: int
    """Bytes that this rank sent, including frame headers but not those of TCP."""
    received_bytes: int
    num_messages: int
    ratio: float
    """Bytes that a plain all-reduce of float32 would have sent, over `sent_bytes`."""
    verb_seconds: dict[str, float]
    """Seconds in each verb: a receive counts from its start to its end, GPU work when launched."""
    state_bytes: int
    """Bytes of codec state: a float32 residual for each compressed element, and this rank's share
    of those of the way back."""
    buffer_bytes: int
    """Bytes of frames and other buffers."""
    skipped: dict[str, str]
    """Gradients that are not compressed, and why."""
    auto: AutoStats | None = None
    """The present decision of `auto`; None if a codec or plan was given."""
    guard: GuardStats | None = None
    """What the accuracy guard has measured and changed; None without one."""


def collect(session: Session) -> Stats:
    """Returns the figures of one session."""
    skipped = session.skipped
    plain = session.plain.sent_bytes
    gradient, sent, received, messages, num_ranks = 0, plain, plain, 0, 1
    verbs: dict[str, int] = {}
    state = buffers = 0
    if session.is_open:
        engine = session.engine
        done = engine.stats
        gradient, messages = done.gradient_bytes, done.num_messages
        sent, received = sent + done.sent_bytes, received + done.received_bytes
        verbs = dict(engine.executor.verb_ns)
        num_ranks = engine.transport.num_ranks
        state = engine.states.num_bytes + sum(owed.nbytes for owed in session.owed.values())
        buffers = engine.buffer_bytes
    whole = 2 * (num_ranks - 1) * gradient / num_ranks + plain
    return Stats(
        num_steps=session.num_steps,
        num_gradients=len(session.gradients),
        num_compressed=len(session.gradients) - len(skipped),
        gradient_bytes=gradient + (plain * num_ranks // (2 * max(num_ranks - 1, 1))),
        sent_bytes=sent,
        received_bytes=received,
        num_messages=messages,
        ratio=whole / sent if sent else 1.0,
        verb_seconds={verb: ns / 1e9 for verb, ns in sorted(verbs.items())},
        state_bytes=state,
        buffer_bytes=buffers,
        skipped=skipped,
        auto=None if session.auto is None else session.auto.stats(),
        guard=None if session.guard is None else session.guard.stats(session),
    )


def log_line(step: int, stats: Stats) -> str:
    """Returns one line for the log.

    Example:
        >>> print(log_line(10, Stats(num_steps=10, num_gradients=3, num_compressed=2,
        ...     gradient_bytes=80_000_000, sent_bytes=4_000_000, received_bytes=4_000_000,
        ...     num_messages=60, ratio=30.0, verb_seconds={"encode": 0.05}, state_bytes=8_000_000,
        ...     buffer_bytes=500_000, skipped={"bias": "one dimension (norm or bias)"})))
        step 10: 0.400 MB sent a step, 30.0 x less than plain; encode 5.0 ms a step; memory 8.5 MB.
    """
    steps = max(stats.num_steps, 1)
    verbs = ", ".join(
        f"{verb} {1e3 * seconds / steps:.1f} ms"
        for verb, seconds in stats.verb_seconds.items()
        if verb in ("encode", "decode", "merge")
    )
    return (
        f"step {step}: {stats.sent_bytes / steps / 1e6:.3f} MB sent a step, {stats.ratio:.1f} "
        f"x less than plain; {verbs or 'nothing encoded'} a step; "
        f"memory {(stats.state_bytes + stats.buffer_bytes) / 1e6:.1f} MB."
    )


def write_scalars(writer: Any, step: int, stats: Stats) -> bool:
    """Writes the figures to a TensorBoard `SummaryWriter`, or anything with its `add_scalar`.

    Returns:
        Whether it went well; if not, the error has been logged.
    """
    try:
        _write(writer, step, stats)
    except Exception as error:  # no reason to end a training run
        _log.warning(
            "the writer failed in step %d and gets no more scalars (%s: %s).",
            step, type(error).__name__, error,
        )  # fmt: skip
        return False
    return True


def _write(writer: Any, step: int, stats: Stats) -> None:
    steps = max(stats.num_steps, 1)
    writer.add_scalar("hipress/sent_bytes_per_step", stats.sent_bytes / steps, step)
    writer.add_scalar("hipress/ratio", stats.ratio, step)
    writer.add_scalar("hipress/memory_bytes", stats.state_bytes + stats.buffer_bytes, step)
    for verb, seconds in stats.verb_seconds.items():
        writer.add_scalar(f"hipress/seconds_per_step/{verb}", seconds / steps, step)
