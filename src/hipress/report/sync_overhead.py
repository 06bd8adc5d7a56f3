"""What the executor costs per task: many tiny tensors, without a network.

A sync of tensors too small to matter is nearly all overhead: queues, threads, bookkeeping. What is
not, the codec's own calls, is timed in a plain loop in the same rounds and taken off. Both are
times of the processor, so that waiting for a core or for Python's lock counts for neither.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hipress
from hipress.casync.engine import Engine, Options
from hipress.casync.loopback import Hub, Loopback

NUM_TENSORS = 250
NUMEL = 64


def overhead_row(expression: str, *, num_ranks: int = 1, repeats: int = 9) -> dict[str, Any]:
    """Seconds per task of a sync of 250 tensors, beyond the codec's own calls.

    With two ranks messages are among the tasks; both share one interpreter, so their tasks add up.

    Example:
        >>> row = overhead_row("none", repeats=1)
        >>> row["tasks"] >= 500
        True
    """
    engines = _engines(num_ranks)
    values = [[torch.ones(NUMEL) for _ in range(NUM_TENSORS)] for _ in engines]

    def sync() -> None:
        # From one thread: after the first call nothing in `allreduce` waits for another rank.
        handles = [
            engine.allreduce(own, codec=expression, name="overhead")
            for engine, own in zip(engines, values, strict=True)
        ]
        for handle in handles:
            handle.wait()

    _together(
        [_start(engine, own, expression) for engine, own in zip(engines, values, strict=True)]
    )
    num_tasks = sum(len(engine.recipe("overhead").graph.tasks) for engine in engines)
    loop = _plain_loop(expression, num_ranks)
    sync_s, codec_s = [], []
    for _ in range(repeats):
        sync_s.append(_processor_s(sync))
        codec_s.append(_processor_s(loop))
    for engine in engines:
        engine.close()
    sync_median_s, codec_median_s = statistics.median(sync_s), statistics.median(codec_s)
    overhead_s = (sync_median_s - codec_median_s) / num_tasks
    return {
        "codec": expression,
        "ranks": num_ranks,
        "tensors": NUM_TENSORS,
        "repeats": repeats,
        "tasks": num_tasks,
        "seconds_median": sync_median_s,
        "codec_seconds_median": codec_median_s,
        "overhead_seconds_per_task": overhead_s,
        "overhead_seconds_500_tasks": 500 * overhead_s,
    }


def _processor_s(call: Callable[[], None]) -> float:
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def _engines(num_ranks: int) -> list[Engine]:
    hub, store = Hub(num_ranks), dist.HashStore()  # type: ignore[attr-defined]
    found: dict[int, Engine] = {}

    def make(rank: int) -> Callable[[], None]:
        def run() -> None:
            found[rank] = Engine(Loopback(hub, rank), store, options=Options(bulk=False))

        return run

    _together([make(rank) for rank in range(num_ranks)])
    return [found[rank] for rank in range(num_ranks)]


def _start(engine: Engine, values: list[torch.Tensor], expression: str) -> Callable[[], None]:
    return lambda: engine.allreduce(values, codec=expression, name="overhead").wait()


def _together(calls: list[Callable[[], None]]) -> None:
    """Ranks agree before the first step, so each needs a thread of its own there."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _plain_loop(expression: str, num_ranks: int) -> Callable[[], None]:
    """The codec's calls of all ranks in a sync with strategy `ps`, one after the other."""
    worker = hipress.codec(expression)
    back = worker.aggregator(num_ranks)
    mean, weight = torch.zeros(NUMEL), 1.0 / num_ranks
    # Memory of its own for each tensor, as in a sync: one place for all would stay in the cache.
    sends, answers = [], []
    for _ in range(NUM_TENSORS):
        for rank in range(num_ranks):
            x = torch.ones(NUMEL)
            state = worker.init(x, seed=0, stream=rank)
            sends.append((rank, x, state, worker.encode(x, state)))
        state = back.init(mean, seed=0, stream=0)
        answers.append((state, back.encode(mean, state)))

    def run() -> None:
        for place, (state, answer) in enumerate(answers):
            group = sends[place * num_ranks : (place + 1) * num_ranks]
            for rank, x, own, payload in group:
                worker.encode(x, own, out=payload)
                worker.decode(payload, out=mean, add=rank > 0, alpha=weight)
            back.encode(mean, state, out=answer)
            for _, x, _, _ in group:
                back.decode(answer, out=x)

    return run
