"""Rows about synchronisation: time beside gloo's all-reduce, bytes on the wire, and correctness.

`Config` is what the ranks are told, `sync_worker` is what they run, and `rows` makes of the numbers
that rank 0 hands back one row per codec and strategy. `problem` says what a row must not show.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hipress.bench._cluster import ClusterConfig
from hipress.bench.timing import Timing
from hipress.errors import UsageError

LEAST_NUMEL = 256
"""The smallest of several tensors: 1 KB."""
LARGEST_PART = 0.2
"""Of the whole, the part that the largest of many tensors has: 20 MB of 100 MB."""
MOST_DEVIATION = 0.05
"""How far the interface may be from what the engine says it sent: headers, acknowledgements."""


@dataclass(frozen=True, kw_only=True)
class Config(ClusterConfig):
    """What all ranks are told."""

    numels: tuple[int, ...]
    """Elements of each tensor."""
    codecs: tuple[str, ...]
    strategies: tuple[str, ...]
    pipelined: bool
    bulk: bool
    compress_on_cpu: bool

    @property
    def size_bytes(self) -> int:
        """Of the whole gradient as float32."""
        return 4 * sum(self.numels)


def tensor_numels(size_bytes: int, num_tensors: int) -> tuple[int, ...]:
    """Elements of tensors from 1 KB to about a fifth of the whole, many small and few large.

    The logarithms of their sizes lie on a power curve, bent so that the sizes add up to the whole;
    small and large are mixed, in the same order on every call.

    Example:
        >>> numels = tensor_numels(100_000_000, 160)
        >>> sum(numels), min(numels), max(numels) // 10**6
        (25000000, 256, 5)
    """
    numel = size_bytes // 4
    if num_tensors == 1:
        return (numel,)
    if numel < 2 * LEAST_NUMEL * num_tensors:
        raise UsageError(
            f"{num_tensors} tensors of 1 KB and more need --size {2 * num_tensors}KiB or more, not "
            f"{size_bytes} bytes; give fewer --tensors or a larger --size."
        )
    largest = numel * max(LARGEST_PART, 1.5 / num_tensors)
    low, high = 0.01, 100.0  # a larger bend makes all but the last smaller
    for _ in range(60):
        bend = (low + high) / 2
        if sum(_curve(largest, num_tensors, bend)) > numel:
            low = bend
        else:
            high = bend
    numels = _curve(largest, num_tensors, high)
    numels[-1] += numel - sum(numels)  # what rounding left
    random.Random(0).shuffle(numels)
    return tuple(numels)


def _curve(largest: float, count: int, bend: float) -> list[int]:
    growth = largest / LEAST_NUMEL
    return [int(LEAST_NUMEL * growth ** ((k / (count - 1)) ** bend)) for k in range(count)]


def rows(config: Config, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per codec and strategy, out of what rank 0 wrote."""
    baselines = result["baselines"]
    return [_row(config, one, baselines["fp32"], baselines["bf16"]) for one in result["syncs"]]


def _row(
    config: Config, one: Mapping[str, Any], fp32: Mapping[str, Any], bf16: Mapping[str, Any]
) -> dict[str, Any]:
    timing, fp32_timing, bf16_timing = (Timing.of(each["samples_s"]) for each in (one, fp32, bf16))
    wire_bytes = one["wire_bytes"]
    return {
        "codec": one["codec"],
        "strategy": one["strategy"],
        "rate": config.rate,
        "delay": config.delay,
        "hosts": config.num_hosts,
        "size_bytes": config.size_bytes,
        "tensors": len(config.numels),
        "device": config.device,
        "pipelined": config.pipelined,
        "bulk": config.bulk,
        "compress_on_cpu": config.compress_on_cpu,
        "repeats": timing.num_samples,
        "seconds_median": timing.p50_s,
        "seconds_p20": timing.p20_s,
        "seconds_p80": timing.p80_s,
        "baseline_seconds_median": fp32_timing.p50_s,
        "baseline_seconds_p20": fp32_timing.p20_s,
        "baseline_seconds_p80": fp32_timing.p80_s,
        "baseline_bf16_seconds_median": bf16_timing.p50_s,
        "baseline_bf16_seconds_p20": bf16_timing.p20_s,
        "baseline_bf16_seconds_p80": bf16_timing.p80_s,
        "speedup": fp32_timing.p50_s / timing.p50_s,
        "speedup_over_bf16": bf16_timing.p50_s / timing.p50_s,
        "wire_bytes_per_rank": wire_bytes,
        "interface_bytes_per_rank": one["interface_bytes"],
        "interface_deviation": one["interface_deviation"],
        "baseline_wire_bytes_per_rank": config.all_reduce_bytes,
        "baseline_interface_bytes_per_rank": fp32["interface_bytes"],
        "ideal_seconds": _seconds(wire_bytes, config.rate_bits),
        "baseline_ideal_seconds": _seconds(config.all_reduce_bytes, config.rate_bits),
        "messages_per_rank": one["num_messages"],
        "tasks": one["num_tasks"],
        "threads": one["num_threads"],
        "codec_seconds": one["codec_s"],
        "overlap_seconds": one["overlap_s"],
        "relative_error": one["relative_error"],
        "ranks_agree": one["ranks_agree"],
        "problem": problem(config, one),
    }


def _seconds(num_bytes: float, rate_bits: int | None) -> float | None:
    return None if rate_bits is None else num_bytes * 8 / rate_bits


def problem(config: Config, one: Mapping[str, Any]) -> str | None:
    """What is wrong with a measured sync, in one sentence; None where nothing is."""
    label = f"{one['codec']} with {one['strategy']}"
    if not one["ranks_agree"]:
        return f"{label}: ranks hold different results."
    if one["is_own"]:
        return f"{label}: a rank was left with its own gradient; nothing was averaged."
    # Each of N sums rounds by half a unit in the last place of float32, 6e-8.
    if one["codec"] == "none" and not one["relative_error"] <= 6e-8 * (config.num_hosts + 1):
        return f"{label}: the result is {one['relative_error']:.1e} off the mean."
    return interface_problem(label, one)


def interface_problem(label: str, one: Mapping[str, Any]) -> str | None:
    """Says that the interface counted other bytes than the engine; None where it did not."""
    deviation = one["interface_deviation"]
    if deviation is None or deviation <= MOST_DEVIATION:
        return None
    return (
        f"{label}: eth0 of a rank differs by {deviation:.0%} from what the engine says it "
        f"sent, {one['wire_bytes']:,.0f} bytes; at most {MOST_DEVIATION:.0%} are headers."
    )
