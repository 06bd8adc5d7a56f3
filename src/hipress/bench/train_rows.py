"""Rows about training steps: every way to exchange gradients beside DDP and beside no exchange.

`Config` is what the ranks are told, `train_worker` is what they run, and `rows` makes of the
numbers that rank 0 hands back one row per variant. `problem` says what a row must not show.

A variant's step is compared with two others of the same run: DDP as it comes, and `compute`, the
same step without any exchange. What lies between those two is DDP's exposed communication, and
`exposed_removed` is the part of it that a variant takes away: 0 is DDP, 1 is the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hipress.bench._cluster import ClusterConfig
from hipress.bench.sync_rows import interface_problem
from hipress.bench.timing import Timing

COMPUTE = "compute"
"""The variant without any exchange: the bound."""
BASELINE = "ddp"
AUTO = "auto"
"""Stands for a codec: `attach` decides, among the other codecs of the run."""


@dataclass(frozen=True, kw_only=True)
class Config(ClusterConfig):
    """What all ranks are told."""

    model: str
    num_parameters: int
    batch: int
    """Examples per rank and step."""
    steps: int
    """In a sample."""
    hooks: tuple[str, ...]
    """Of torch, DDP itself among them."""
    codecs: tuple[str, ...]
    strategies: tuple[str, ...]
    bucket_mb: int | None
    """Of DDP, in MiB; None is its default."""

    @property
    def size_bytes(self) -> int:
        """Of the whole gradient as float32."""
        return 4 * self.num_parameters


def rows(config: Config, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per variant, out of what rank 0 wrote."""
    variants = result["variants"]
    timings = {one["variant"]: Timing.of(one["samples_s"]) for one in variants}
    return [_row(config, one, timings) for one in variants]


def _row(config: Config, one: Mapping[str, Any], timings: Mapping[str, Timing]) -> dict[str, Any]:
    timing, ddp, compute = (timings[name] for name in (one["variant"], BASELINE, COMPUTE))
    return {
        "model": config.model,
        "rate": config.rate,
        "variant": one["variant"],
        "codec": one["codec"],
        "strategy": one["strategy"],
        "note": one["note"],
        "delay": config.delay,
        "hosts": config.num_hosts,
        "device": config.device,
        "num_parameters": config.num_parameters,
        "batch": config.batch,
        "bucket_mb": config.bucket_mb,
        "repeats": timing.num_samples,
        "steps": config.steps,
        "seconds_median": timing.p50_s,
        "seconds_p20": timing.p20_s,
        "seconds_p80": timing.p80_s,
        "compute_seconds": compute.p50_s,
        "ddp_seconds": ddp.p50_s,
        "speedup": ddp.p50_s / timing.p50_s,
        "exposed_removed": exposed_removed(ddp.p50_s, compute.p50_s, timing.p50_s),
        "wire_bytes_per_rank": one["wire_bytes"],
        "interface_bytes_per_rank": one["interface_bytes"],
        "interface_deviation": one["interface_deviation"],
        "extra_memory_bytes": one["memory_bytes"],
        "skipped": one["skipped"],
        "loss": one["loss"],
        "ranks_agree": one["ranks_agree"],
        "problem": problem(config, one),
    }


def exposed_removed(ddp_s: float, compute_s: float, seconds: float) -> float | None:
    """The part of DDP's exposed communication that a step does without; None where there is none.

    Example:
        >>> exposed_removed(ddp_s=1.0, compute_s=0.5, seconds=0.625)
        0.75
    """
    exposed_s = ddp_s - compute_s
    return (ddp_s - seconds) / exposed_s if exposed_s > 0 else None


def problem(config: Config, one: Mapping[str, Any]) -> str | None:
    """What is wrong with a measured variant, in one sentence; None where nothing is."""
    label = f"{config.model} with {one['variant']}"
    if one["variant"] == COMPUTE:
        return None  # its ranks go ways of their own
    if not one["ranks_agree"]:
        return f"{label}: ranks hold different parameters."
    if one["loss"] is None:
        return f"{label}: the loss is not finite; steps on such numbers measure nothing."
    return interface_problem(label, one)
