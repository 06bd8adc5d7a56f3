"""`hipress bench sync`: time beside gloo's all-reduce, bytes on the wire, and correctness.

`SyncBenchmark` is what the ranks measure, `_SyncWorker` is what they run (`python -m
hipress.bench.sync BENCHMARK`), and `rows` makes one row per codec and strategy of the numbers that
rank 0 writes. `problem` says what a row must not show. `overhead_row` measures the executor alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hipress.bench.cluster import (
    Candidate,
    ClusterBenchmark,
    ClusterWorker,
    interface_problem,
    largest,
    ranks_agree,
    run_rank,
)
from hipress.bench.codecs import num_threads
from hipress.bench.timing import Timing
from hipress.casync.engine.engine import Engine, Options
from hipress.casync.engine.loopback import Hub, Loopback
from hipress.errors import UsageError
from hipress.session.groups import engine_of
from hipress.timeline import overlap_s

LEAST_NUMEL = 256
"""The smallest of several tensors: 1 KB."""
LARGEST_PART = 0.2
"""The part of the whole that the largest of many tensors has: 20 MB of 100 MB."""
NUM_TENSORS, NUMEL = 250, 64
"""The tensors whose tasks show what the executor costs."""


@dataclass(frozen=True, kw_only=True)
class SyncBenchmark(ClusterBenchmark):
    """What all ranks measure."""

    numels: tuple[int, ...]
    codecs: tuple[str, ...]
    strategies: tuple[str, ...]
    pipelined: bool
    bulk: bool
    compress_on_cpu: bool


def tensor_numels(size_bytes: int, num_tensors: int) -> tuple[int, ...]:
    """Returns the elements of tensors from 1 KB to about a fifth of the whole, most of them small.

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


def rows(benchmark: SyncBenchmark, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns one row per codec and strategy, from what rank 0 wrote."""
    baselines = result["baselines"]
    return [_row(benchmark, one, baselines["fp32"], baselines["bf16"]) for one in result["syncs"]]


def _row(
    benchmark: SyncBenchmark,
    one: Mapping[str, Any],
    fp32: Mapping[str, Any],
    bf16: Mapping[str, Any],
) -> dict[str, Any]:
    timing, fp32_timing, bf16_timing = (Timing.of(each["samples_s"]) for each in (one, fp32, bf16))
    wire_bytes = one["wire_bytes"]
    return {
        "codec": one["codec"],
        "strategy": one["strategy"],
        "rate": benchmark.rate,
        "delay": benchmark.delay,
        "hosts": benchmark.num_hosts,
        "size_bytes": benchmark.size_bytes,
        "tensors": len(benchmark.numels),
        "device": benchmark.device,
        "pipelined": benchmark.pipelined,
        "bulk": benchmark.bulk,
        "compress_on_cpu": benchmark.compress_on_cpu,
        "repeats": timing.num_samples,
        **timing.fields(),
        **fp32_timing.fields("baseline_"),
        **bf16_timing.fields("baseline_bf16_"),
        "speedup": fp32_timing.p50_s / timing.p50_s,
        "speedup_over_bf16": bf16_timing.p50_s / timing.p50_s,
        "wire_bytes_per_rank": wire_bytes,
        "interface_bytes_per_rank": one["interface_bytes"],
        "interface_deviation": one["interface_deviation"],
        "baseline_wire_bytes_per_rank": benchmark.all_reduce_bytes,
        "baseline_interface_bytes_per_rank": fp32["interface_bytes"],
        "ideal_seconds": _seconds(wire_bytes, benchmark.rate_bits),
        "baseline_ideal_seconds": _seconds(benchmark.all_reduce_bytes, benchmark.rate_bits),
        "messages_per_rank": one["num_messages"],
        "tasks": one["num_tasks"],
        "threads": one["num_threads"],
        "codec_seconds": one["codec_s"],
        "overlap_seconds": one["overlap_s"],
        "relative_error": one["relative_error"],
        "ranks_agree": one["ranks_agree"],
        "problem": problem(benchmark, one),
    }


def _seconds(num_bytes: float, rate_bits: int | None) -> float | None:
    return None if rate_bits is None else num_bytes * 8 / rate_bits


def problem(benchmark: SyncBenchmark, one: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a measured sync, in one sentence; None where nothing is."""
    label = f"{one['codec']} with {one['strategy']}"
    if not one["ranks_agree"]:
        return f"{label}: ranks hold different results."
    if one["is_own"]:
        return f"{label}: a rank was left with its own gradient; nothing was averaged."
    # Each of N sums rounds by half a unit in the last place of float32, 6e-8.
    if one["codec"] == "none" and not one["relative_error"] <= 6e-8 * (benchmark.num_hosts + 1):
        return f"{label}: the result is {one['relative_error']:.1e} off the mean."
    return interface_problem(label, one)


# --- a rank ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Sync(Candidate):
    make: Callable[[], object]
    values: list[torch.Tensor]
    scale: float = 1.0
    """The factor that makes its result a mean."""


class _SyncWorker(ClusterWorker[_Sync]):
    def __init__(self, benchmark: SyncBenchmark) -> None:
        self.benchmark = benchmark
        num_syncs = len(benchmark.codecs) * len(benchmark.strategies)
        super().__init__(benchmark, (2 + benchmark.repeats) * (2 + num_syncs) - 2)
        self.gradient = _gradient(benchmark, dist.get_rank()).to(self.device)
        self.values = [part.clone() for part in torch.split(self.gradient, list(benchmark.numels))]
        options = Options(
            pipelined=benchmark.pipelined,
            bulk=benchmark.bulk,
            compress_on_cpu=benchmark.compress_on_cpu,
        )
        self.engine = engine_of(None, self.device, options)
        self.baselines = self._baselines()
        self.syncs = [
            self._sync(codec, strategy)
            for codec in benchmark.codecs
            for strategy in benchmark.strategies
        ]
        self.candidates = [*self.baselines, *self.syncs]

    def measure(self) -> dict[str, Any]:
        """Warms up and checks, takes the samples, and records one sync each."""
        mean = _mean(self.benchmark) if dist.get_rank() == 0 else None
        for one in self.candidates:
            self.progress(f"check {one.label}")
            self._check(one, mean)
        del mean
        self.run_rounds()
        for one in self.syncs:
            self.progress(f"record {one.label}")
            self._record(one)
        for one in self.candidates:
            self._count(one)
        return {
            "baselines": {one.label: one.result() for one in self.baselines},
            "syncs": [one.result() for one in self.syncs],
        }

    def call(self, one: _Sync) -> None:
        one.make()

    def counts(self, one: _Sync) -> tuple[int, int]:
        return self.engine.stats.sent_bytes, self.engine.stats.num_messages

    def prepare(self, one: _Sync) -> None:
        parts = torch.split(self.gradient, [value.numel() for value in one.values])
        for value, part in zip(one.values, parts, strict=True):
            value.copy_(part)

    def _baselines(self) -> list[_Sync]:
        whole = self.values[0] if len(self.values) == 1 else self.gradient.clone()
        half = torch.empty_like(whole, dtype=torch.bfloat16)

        def in_half() -> None:
            half.copy_(whole)
            dist.all_reduce(half)
            whole.copy_(half)

        scale = 1.0 / dist.get_world_size()
        return [
            _Sync(label="fp32", make=lambda: dist.all_reduce(whole), values=[whole], scale=scale),
            _Sync(label="bf16", make=in_half, values=[whole], scale=scale),
        ]

    def _sync(self, codec: str, strategy: str) -> _Sync:
        label, values, engine = f"{codec} {strategy}", self.values, self.engine

        def make() -> None:
            engine.allreduce(values, codec=codec, strategy=strategy, name=label).wait()

        return _Sync(label=label, make=make, values=values, codec=codec, strategy=strategy)

    def _check(self, one: _Sync, mean: torch.Tensor | None) -> None:
        """Compares the first call, without a residual yet, with the exact mean and among ranks."""
        self.prepare(one)
        one.make()
        self.wait_for_device()
        found = torch.cat([value.reshape(-1) for value in one.values]).cpu().mul_(one.scale)
        is_own = float(torch.equal(found, self.gradient.cpu()))
        error = 0.0
        if mean is not None:
            # Norms in float64: in float32 the sum of 25 million squares loses digits.
            scale = torch.linalg.vector_norm(mean, dtype=torch.float64)
            error = float(torch.linalg.vector_norm(found - mean, dtype=torch.float64) / scale)
        is_own, error = largest([is_own, error])
        one.found |= {
            "is_own": bool(is_own),
            "relative_error": error,
            "ranks_agree": ranks_agree(one.values),
        }
        self.prepare(one)
        one.make()  # once more: a second phase, a first use of a residual

    def _record(self, one: _Sync) -> None:
        """Records the tasks of one more sync; it is not a sample, since recording costs time."""
        self.prepare(one)
        events = self.engine.record()
        first = len(events)
        dist.barrier()
        one.make()
        self.wait_for_device()
        dist.barrier()
        found = events[first:]
        # Seconds of one thread: several share the partitions.
        threads = self.engine.executor.num_threads
        busy_ns = sum(e.end_ns - e.start_ns for e in found if e.queue == "compute")
        codec_s = busy_ns / 1e9 / threads
        codec_s, overlap, num_tasks = largest([codec_s, overlap_s(found), float(len(found))])
        one.found |= {"codec_s": codec_s, "overlap_s": overlap, "num_tasks": int(num_tasks)}
        one.found["num_threads"] = threads
        one.found["ranks_agree"] = one.found["ranks_agree"] and ranks_agree(one.values)

    def _count(self, one: _Sync) -> None:
        wire = one.sent_bytes / self.repeats
        if one in self.baselines or (one.codec == "none" and one.strategy == "allreduce"):
            # The transport's own sum, of which the engine's count knows nothing.
            wire = self.benchmark.all_reduce_bytes / (2 if one.label == "bf16" else 1)
        (one.found["num_messages"],) = self.count_bytes(one, wire, one.num_messages / self.repeats)


def _gradient(benchmark: SyncBenchmark, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.empty(benchmark.num_elements).normal_(0.0, 0.01, generator=generator)


def _mean(benchmark: SyncBenchmark) -> torch.Tensor:
    """The slow, obvious mean: every rank's gradient, added up in float64."""
    total = torch.zeros(benchmark.num_elements, dtype=torch.float64)
    for rank in range(benchmark.num_hosts):
        total += _gradient(benchmark, rank)
    return total.div_(benchmark.num_hosts).float()


def _main(text: str) -> dict[str, Any]:
    worker = _SyncWorker(SyncBenchmark.load(text))
    result = worker.measure()
    dist.barrier()
    worker.engine.close()
    return result


# --- the executor alone ---------------------------------------------------------------------------


def overhead_row(expression: str, *, repeats: int = 9) -> dict[str, Any]:
    """Measures the seconds per task of a sync of 250 tensors, beyond the codec's own calls.

    The engine records when each task starts and ends; what is left of the wall time is the
    executor's: queues, threads, bookkeeping. Both come from the same sync, so that a slow moment
    of the machine hits both. One rank has computing tasks only; what a message costs is the
    transport's.

    Example:
        >>> row = overhead_row("none", repeats=1)
        >>> row["tasks"] >= 500
        True
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    with num_threads(1):  # or the times of tasks that overlap would add up
        engine = Engine(Loopback(Hub(1), 0), store, options=Options(bulk=False))
    values = [torch.ones(NUMEL) for _ in range(NUM_TENSORS)]

    def sync() -> None:
        engine.allreduce(values, codec=expression, name="overhead").wait()

    sync()  # lays everything out
    sync()
    events = engine.record()
    samples = []
    for _ in range(repeats):
        events.clear()
        start_s = time.perf_counter()
        sync()
        wall_s = time.perf_counter() - start_s
        codec_s = sum(event.end_ns - event.start_ns for event in events) / 1e9
        samples.append(((wall_s - codec_s) / len(events), wall_s, codec_s))
    engine.close()
    overhead_s, wall_s, codec_s = sorted(samples)[len(samples) // 2]
    return {
        "codec": expression,
        "tensors": NUM_TENSORS,
        "repeats": repeats,
        "tasks": len(events),
        "seconds_median": wall_s,
        "codec_seconds_median": codec_s,
        "overhead_seconds_per_task": overhead_s,
        "overhead_seconds_500_tasks": 500 * overhead_s,
    }


if __name__ == "__main__":
    run_rank(_main)
