"""What is played and what came out of it: the values of one training step."""

from __future__ import annotations

from dataclasses import dataclass, field

from hipress.secopa.costs import Script


@dataclass(frozen=True, kw_only=True)
class Job:
    """One synchronisation of a step."""

    name: str
    label: str
    bucket: int
    scripts: tuple[Script, ...]
    """One for each rank that is played."""


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The model's part of a step: work, and when it gives buckets away."""

    forward_s: float
    bucket_s: tuple[float, ...]
    """Work of backward before each bucket is ready."""
    backward_s: float
    rest_s: float
    threads: float


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took a while on a rank; times in seconds."""

    rank: int
    verb: str
    job: int
    """-1: the model."""
    chunk: int
    queue: str
    start_s: float
    end_s: float
    num_bytes: float | None = None


@dataclass(kw_only=True)
class Played:
    """A step that was played."""

    step_s: float = 0.0
    backward_end_s: float = 0.0
    """When backward had made its last gradient, on the slowest rank."""
    exchange_end_s: float = 0.0
    sent_bytes: float = 0.0
    """By the first rank."""
    spans: list[Span] = field(default_factory=list)
