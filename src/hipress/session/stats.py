"""The figures of a session, for the log and for TensorBoard."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hipress.units import counted

if TYPE_CHECKING:
    from hipress.casync.engine.engine import Engine
    from hipress.session.auto import AutoStats
    from hipress.session.guard import GuardStats
    from hipress.session.session import Session
    from hipress.snapshots import Split

_log = logging.getLogger("hipress")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What this rank has done since the session started; `print` gives a summary of five lines."""

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
    """Seconds in each verb, in `num_timed_steps` steps: a receive counts from its start to its end,
    GPU work when launched."""
    num_timed_steps: int = 0
    """Number of steps without those in which kernels may have been compiled."""
    state_bytes: int
    """Bytes of codec state: a residual for each compressed element, float32 unless the codec says
    otherwise, and this rank's share of those of the way back."""
    buffer_bytes: int
    """Bytes of frames and other buffers."""
    skipped: dict[str, str]
    """Gradients that are not compressed, and why."""
    idle: str = ""
    """Why the session does nothing; empty if it exchanges gradients."""
    auto: AutoStats | None = None
    """The present decision of `auto`; None if a codec or plan was given."""
    guard: GuardStats | None = None
    """What the accuracy guard has measured and changed; None without one."""

    def __str__(self) -> str:
        if self.idle:
            return f"hipress does nothing: {self.idle}."
        steps = max(self.num_steps, 1)
        reasons = Counter(self.skipped.values()).most_common()
        left = ", ".join(f"{count} ({reason})" for reason, count in reasons[:3])
        left += f" and {sum(count for _, count in reasons[3:])} others" if reasons[3:] else ""
        last = f"{self.num_compressed} of {self.num_gradients} gradients are compressed"
        last += f"; not compressed: {left}" if left else ""
        if self.auto is not None:
            last += f"; auto: {self.auto.mode}, because {self.auto.reason}"
        if self.guard is not None:
            changed = len(self.guard.overrides)
            last += f"; the guard has given {changed} of them a milder codec" if changed else ""
        lines = (
            f"{counted(self.num_steps, 'step')}: {self.sent_bytes / 1e6:.3f} MB sent, "
            f"{self.received_bytes / 1e6:.3f} MB received, "
            f"{counted(self.num_messages, 'message')}",
            f"{self.sent_bytes / steps / 1e6:.3f} MB sent per step: this rank sent "
            f"{fewer_bytes(self.ratio)}",
            # Receives overlap, so that their seconds add up to more than a step has.
            _times(self, {v: s for v, s in self.verb_seconds.items() if v not in ("send", "recv")}),
            f"memory: {self.state_bytes / 1e6:.1f} MB of codec state, "
            f"{self.buffer_bytes / 1e6:.1f} MB of buffers",
            last,
        )
        return "\n".join(lines)


class VerbTimes:
    """Adds up the seconds in verbs, without the steps in which kernels may have been compiled."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.verb_ns: dict[str, int] = {}
        self.is_steady = False
        """Whether no kernel was compiled for the last step."""
        self._seen: dict[str, int] = {}
        self._num_first_uses = 0

    def end_step(self, engine: Engine) -> None:
        """Takes the times of a step."""
        now, num_first_uses = dict(engine.executor.verb_ns), engine.stats.num_first_uses
        self.is_steady = num_first_uses == self._num_first_uses
        if self.is_steady:
            self.num_steps += 1
            for verb, ns in now.items():
                self.verb_ns[verb] = self.verb_ns.get(verb, 0) + ns - self._seen.get(verb, 0)
        self._seen, self._num_first_uses = now, num_first_uses


def collect(session: Session) -> Stats:
    """Returns the figures of one session."""
    skipped = session.skipped
    plain = session.plain.sent_bytes
    gradient, sent, received, messages, num_ranks = 0, plain, plain, 0, 1
    state = buffers = 0
    if session.is_open:
        engine = session.engine
        done = engine.stats
        gradient, messages = done.gradient_bytes, done.num_messages
        sent, received = sent + done.sent_bytes, received + done.received_bytes
        num_ranks = engine.transport.num_ranks
        state = engine.states.num_bytes + sum(owed.nbytes for owed in session.owed.values())
        buffers = engine.buffer_bytes
    whole = 2 * (num_ranks - 1) * gradient / num_ranks + plain
    num_gradients = len(session.numels)
    times = session.times
    return Stats(
        num_steps=session.num_steps,
        num_gradients=num_gradients,
        num_compressed=num_gradients - len(skipped),
        gradient_bytes=gradient + (plain * num_ranks // (2 * max(num_ranks - 1, 1))),
        sent_bytes=sent,
        received_bytes=received,
        num_messages=messages,
        ratio=whole / sent if sent else 1.0,
        verb_seconds={verb: ns / 1e9 for verb, ns in sorted(times.verb_ns.items())},
        num_timed_steps=times.num_steps,
        state_bytes=state,
        buffer_bytes=buffers,
        skipped=skipped,
        idle=session.idle,
        auto=None if session.auto is None else session.auto.stats(),
        guard=None if session.guard is None else session.guard.stats(session),
    )


def since(before: Stats | None, now: Stats) -> Stats:
    """Returns the figures of the steps between two `collect`."""
    if before is None:
        return now
    sent = now.sent_bytes - before.sent_bytes
    plain = now.ratio * now.sent_bytes - before.ratio * before.sent_bytes
    return replace(
        now,
        num_steps=now.num_steps - before.num_steps,
        gradient_bytes=now.gradient_bytes - before.gradient_bytes,
        sent_bytes=sent,
        received_bytes=now.received_bytes - before.received_bytes,
        num_messages=now.num_messages - before.num_messages,
        ratio=plain / sent if sent else 1.0,
        verb_seconds={
            verb: seconds - before.verb_seconds.get(verb, 0.0)
            for verb, seconds in now.verb_seconds.items()
        },
        num_timed_steps=now.num_timed_steps - before.num_timed_steps,
    )


def fewer_bytes(ratio: float) -> str:
    """Returns a ratio of bytes in words.

    Example:
        >>> fewer_bytes(31.0), fewer_bytes(1.04)
        ('31.0 times fewer bytes than float32', 'no fewer bytes than float32')
    """
    times = f"{ratio:.1f} times" if ratio >= 1.05 else "no"
    return f"{times} fewer bytes than float32"


def log_line(step: int, stats: Stats) -> str:
    """Returns one line for the log.

    Example:
        >>> print(log_line(10, Stats(  # doctest: +NORMALIZE_WHITESPACE
        ...     num_steps=10, num_gradients=3, num_compressed=2,
        ...     gradient_bytes=80_000_000, sent_bytes=4_000_000, received_bytes=4_000_000,
        ...     num_messages=60, ratio=30.0, verb_seconds={"encode": 0.05}, num_timed_steps=8,
        ...     state_bytes=8_000_000, buffer_bytes=500_000, skipped={})))
        step 10: rank 0 sent 0.400 MB per step, 30.0 times fewer bytes than float32; time per step:
        encode 6.2 ms; memory 8.5 MB.
    """
    computing = {v: s for v, s in stats.verb_seconds.items() if v in ("encode", "decode", "merge")}
    return (
        f"step {step}: rank 0 sent {stats.sent_bytes / max(stats.num_steps, 1) / 1e6:.3f} MB per "
        f"step, {fewer_bytes(stats.ratio)}; {_times(stats, computing)}; "
        f"memory {(stats.state_bytes + stats.buffer_bytes) / 1e6:.1f} MB."
    )


def _times(stats: Stats, seconds: dict[str, float]) -> str:
    """Returns the milliseconds of a step in some verbs."""
    steps = stats.num_timed_steps
    if stats.num_steps and not steps:
        return "no step was timed, because kernels were compiled"
    found = [f"{verb} {1e3 * one / max(steps, 1):.1f} ms" for verb, one in seconds.items()]
    return f"time per step: {', '.join(found)}" if found else "nothing was encoded"


def write_scalars(writer: Any, step: int, stats: Stats) -> bool:
    """Writes the figures to a TensorBoard `SummaryWriter`, or anything with its `add_scalar`.

    Returns:
        Whether it went well; if not, the error has been logged.
    """
    try:
        _write(writer, step, stats)
    except Exception as error:  # no reason to end a training run
        _log_failure(step, error)
        return False
    return True


def _log_failure(step: int, error: Exception) -> None:
    _log.warning(
        "the writer failed in step %d and gets no more scalars (%s: %s).",
        step, type(error).__name__, error,
    )  # fmt: skip


def _write(writer: Any, step: int, stats: Stats) -> None:
    steps, timed = max(stats.num_steps, 1), stats.num_timed_steps
    writer.add_scalar("hipress/sent_bytes_per_step", stats.sent_bytes / steps, step)
    writer.add_scalar("hipress/ratio", stats.ratio, step)
    writer.add_scalar("hipress/memory_bytes", stats.state_bytes + stats.buffer_bytes, step)
    for verb, seconds in stats.verb_seconds.items() if stats.num_timed_steps else ():
        writer.add_scalar(f"hipress/seconds_per_step/{verb}", seconds / timed, step)


def write_split(writer: Any, step: int, split: Split | None) -> bool:
    """Writes where the time of a step went since the last scalars, as `write_scalars` does."""
    try:
        for name in ("step", "compute", "encode", "wire", "decode", "wait") if split else ():
            writer.add_scalar(f"hipress/step_seconds/{name}", getattr(split, f"{name}_s"), step)
    except Exception as error:  # no reason to end a training run
        _log_failure(step, error)
        return False
    return True
