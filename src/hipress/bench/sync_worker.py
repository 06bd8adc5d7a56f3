"""What each rank of `hipress bench sync` runs: `python -m hipress.bench.sync_worker CONFIG`.

A sample is a barrier and one call, timed on every rank; the slowest rank's time counts. Each round
runs all candidates, in an order that all ranks shuffle alike, so that slow moments of the machine
hit all of them. Rank 0 tells on stdout how far it is ("@@ done of label") and writes the result.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hipress.bench._ranks import Interface, largest, ranks_agree, run_rank, tell
from hipress.bench.sync_rows import Config
from hipress.casync.engine.engine import Options
from hipress.casync.graphs import strategies
from hipress.session.world import engine_of
from hipress.timeline import overlap_s


def main(text: str) -> None:
    """Measure, as the config says, and write the result on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    worker = _Worker(Config.load(text))
    result = worker.measure()
    if dist.get_rank() == 0:
        Path(worker.config.result).write_text(json.dumps(result))
    dist.barrier()
    worker.engine.close()
    dist.destroy_process_group()


@dataclass(kw_only=True)
class _Candidate:
    """Something to time: the call, where it leaves its result, and what was seen of it."""

    label: str
    call: Callable[[], object]
    values: list[torch.Tensor]
    scale: float
    """What makes its result a mean."""
    codec: str = ""
    strategy: str = ""
    samples_s: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    """By the engine's count, in all samples."""
    interface_bytes: int = 0
    num_messages: int = 0
    seen: dict[str, Any] = field(default_factory=dict)


class _Worker:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = torch.device("cuda:0" if config.device == "cuda" else config.device)
        self.gradient = _gradient(config, dist.get_rank()).to(self.device)
        self.values = [part.clone() for part in torch.split(self.gradient, list(config.numels))]
        options = Options(
            pipelined=config.pipelined, bulk=config.bulk, compress_on_cpu=config.compress_on_cpu
        )
        self.engine = engine_of(None, self.device, options)
        self.baselines = self._baselines()
        self.syncs = [
            self._sync(codec, strategy) for codec in config.codecs for strategy in config.strategies
        ]
        self.candidates = [*self.baselines, *self.syncs]
        self.interface = Interface(is_shaped=config.is_shaped)
        self._num_done = 0

    def measure(self) -> dict[str, Any]:
        """Warm up and check, time, and record one sync each."""
        mean = _mean(self.config) if dist.get_rank() == 0 else None
        for one in self.candidates:
            self._tell(f"check {one.label}")
            self._check(one, mean)
        del mean
        self.interface.measure_idle()
        order = list(self.candidates)
        shuffle = random.Random(0).shuffle
        for _ in range(self.config.repeats):
            shuffle(order)
            for one in order:
                self._tell(one.label)
                self._sample(one)
        for one in self.syncs:
            self._tell(f"record {one.label}")
            self._record(one)
        for one in self.candidates:
            self._count(one)
        return {
            "baselines": {one.label: _told(one) for one in self.baselines},
            "syncs": [_told(one) for one in self.syncs],
        }

    def _baselines(self) -> list[_Candidate]:
        whole = self.values[0] if len(self.values) == 1 else self.gradient.clone()
        half = torch.empty_like(whole, dtype=torch.bfloat16)

        def in_half() -> None:
            half.copy_(whole)
            dist.all_reduce(half)
            whole.copy_(half)

        scale = 1.0 / dist.get_world_size()
        return [
            _Candidate(
                label="fp32", call=lambda: dist.all_reduce(whole), values=[whole], scale=scale
            ),
            _Candidate(label="bf16", call=in_half, values=[whole], scale=scale),
        ]

    def _sync(self, codec: str, strategy: str) -> _Candidate:
        label, values, engine = f"{codec} {strategy}", self.values, self.engine
        return _Candidate(
            label=label,
            call=lambda: engine.allreduce(
                values, codec=codec, strategy=strategy, name=label
            ).wait(),
            values=values,
            scale=1.0,
            codec=codec,
            strategy=strategy,
        )

    def _tell(self, label: str) -> None:
        total = (2 + self.config.repeats) * len(self.candidates) - len(self.baselines)
        tell(self._num_done, total, label)
        self._num_done += 1

    def _fill(self, one: _Candidate) -> None:
        parts = torch.split(self.gradient, [value.numel() for value in one.values])
        for value, part in zip(one.values, parts, strict=True):
            value.copy_(part)

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check(self, one: _Candidate, mean: torch.Tensor | None) -> None:
        """The first call, without a residual yet: against the exact mean, and among ranks."""
        self._fill(one)
        one.call()
        self._wait_for_device()
        found = torch.cat([value.reshape(-1) for value in one.values]).cpu().mul_(one.scale)
        is_own = float(torch.equal(found, self.gradient.cpu()))
        error = 0.0
        if mean is not None:
            # Norms in float64: in float32 the sum of 25 million squares loses digits.
            scale = torch.linalg.vector_norm(mean, dtype=torch.float64)
            error = float(torch.linalg.vector_norm(found - mean, dtype=torch.float64) / scale)
        is_own, error = largest([is_own, error])
        one.seen |= {
            "is_own": bool(is_own),
            "relative_error": error,
            "ranks_agree": ranks_agree(one.values),
        }
        self._fill(one)
        one.call()  # once more: a second phase, a first use of a residual

    def _sample(self, one: _Candidate) -> None:
        self._fill(one)
        self._wait_for_device()
        stats = self.engine.stats
        before = (stats.sent_bytes, stats.num_messages, self.interface.sent_bytes())
        dist.barrier()
        start = time.perf_counter()
        one.call()
        self._wait_for_device()
        seconds = time.perf_counter() - start
        dist.barrier()  # all have received: nothing of it is still to leave
        one.sent_bytes += stats.sent_bytes - before[0]
        one.num_messages += stats.num_messages - before[1]
        one.interface_bytes += self.interface.sent_bytes() - before[2]
        one.samples_s += largest([seconds])

    def _record(self, one: _Candidate) -> None:
        """One more sync, with its tasks recorded; not among the samples, since recording costs."""
        self._fill(one)
        events = self.engine.record()
        first = len(events)
        dist.barrier()
        one.call()
        self._wait_for_device()
        dist.barrier()
        found = events[first:]
        # Of one thread: several share the chunks.
        num_threads = self.engine.executor.num_threads
        busy_ns = sum(e.end_ns - e.start_ns for e in found if e.queue == "compute")
        codec_s = busy_ns / 1e9 / num_threads
        codec_s, overlap, num_tasks = largest([codec_s, overlap_s(found), float(len(found))])
        one.seen |= {"codec_s": codec_s, "overlap_s": overlap, "num_tasks": int(num_tasks)}
        one.seen["num_threads"] = num_threads
        one.seen["ranks_agree"] = one.seen["ranks_agree"] and ranks_agree(one.values)

    def _count(self, one: _Candidate) -> None:
        """Bytes of one sync: the most that a rank sent, by both counts."""
        repeats = self.config.repeats
        wire = one.sent_bytes / repeats
        if one in self.baselines or strategies.get(one.strategy).sums_in_transport(one.codec):
            # The transport's own sum, of which the engine's count knows nothing.
            wire = self.config.all_reduce_bytes / (2 if one.label == "bf16" else 1)
        interface = self.interface.per_sample(one.interface_bytes, repeats)
        deviation = self.interface.deviation(interface, wire, repeats)
        messages = one.num_messages / repeats
        wire, interface, deviation, messages = largest([wire, interface, deviation, messages])
        one.seen |= {
            "wire_bytes": wire,
            "interface_bytes": interface if self.config.is_shaped else None,
            "interface_deviation": None if deviation < 0 else deviation,
            "num_messages": messages,
        }


def _gradient(config: Config, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.empty(config.size_bytes // 4).normal_(0.0, 0.01, generator=generator)


def _mean(config: Config) -> torch.Tensor:
    """The slow, obvious one: every rank's gradient, added up in float64."""
    total = torch.zeros(config.size_bytes // 4, dtype=torch.float64)
    for rank in range(config.num_hosts):
        total += _gradient(config, rank)
    return total.div_(config.num_hosts).float()


def _told(one: _Candidate) -> dict[str, Any]:
    return {
        "codec": one.codec,
        "strategy": one.strategy,
        "samples_s": one.samples_s,
        **one.seen,
    }


if __name__ == "__main__":
    run_rank(main)
