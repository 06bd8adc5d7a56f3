"""What the executor costs per task: many tiny tensors, without a network.

The engine records when each task starts and ends; what is left of the wall time is the executor's:
queues, threads, bookkeeping. Both come from the same sync, so that a slow moment of the machine
hits both. One rank has computing tasks only; what a message costs is the transport's.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from hipress.bench.codec_rows import num_threads
from hipress.casync.engine.engine import Engine, Options
from hipress.casync.engine.loopback import Hub, Loopback

NUM_TENSORS = 250
NUMEL = 64


def overhead_row(expression: str, *, repeats: int = 9) -> dict[str, Any]:
    """Seconds per task of a sync of 250 tensors, beyond the codec's own calls.

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
