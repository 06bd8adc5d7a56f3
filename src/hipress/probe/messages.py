"""What a message costs on the host, as jobs of the engine handle it."""

from __future__ import annotations

import statistics
import time
from dataclasses import fields

import torch

from hipress.casync.engine.engine import Engine
from hipress.casync.graphs.graph import Verb
from hipress.casync.graphs.partitions import Placement
from hipress.codecs.table import codec as named_codec
from hipress.probe.wire import Wire, between

NUM_JOBS, NUM_ROUTES, TINY_NUMEL = 4, 4, 64
"""Jobs under way at once when messages are counted, chunks of each, elements of a chunk."""
WARM_UP_STEPS = 3


def message_work_s(wire: Wire, budget_s: float) -> float:
    """Work of a message as jobs of the engine handle it: its threads and queues among it.

    A job of hardly any elements is work for messages only, but for the calls of the codec,
    which are taken off. CPU time of the processes counts. The kernel's work for messages is mostly
    charged to them: threads of idle priority were left with 3 to 11 % less than that explains.

    Args:
        wire: Between all ranks; collective.
        budget_s: Of the whole probe, of which this takes a tenth.
    """
    engine, routes = wire.engine, min(NUM_ROUTES, wire.num_ranks)
    placements = tuple(Placement(k * TINY_NUMEL, (k + 1) * TINY_NUMEL, k) for k in range(routes))
    values = [torch.zeros(routes * TINY_NUMEL, device=engine.device) for _ in range(NUM_JOBS)]
    names = [f"hipress probe {k}" for k in range(NUM_JOBS)]
    kept = {field.name: getattr(engine.stats, field.name) for field in fields(engine.stats)}
    verb_ns = dict(engine.executor.verb_ns)

    def step() -> None:
        handles = [
            engine.allreduce(
                [value], codec="none", strategy="ps", names=[name], placements=[placements], step=0
            )
            for value, name in zip(values, names, strict=True)
        ]
        for handle in handles:
            handle.wait()

    try:
        for _ in range(WARM_UP_STEPS):
            step()
        start = time.perf_counter()
        step()
        step_s = wire.slowest("messages", time.perf_counter() - start)
        repeats = between(6, int(0.1 * budget_s / step_s), 25)
        num_before = engine.stats.num_messages
        wire.meet()
        clock = [time.process_time()]
        for _ in range(repeats):
            step()
            clock.append(time.process_time())
        num_messages = (engine.stats.num_messages - num_before) // repeats
        num_calls = NUM_JOBS * _num_calls(engine, names[0])
    finally:
        engine.forget(names)
        for name, value in kept.items():
            setattr(engine.stats, name, value)
        engine.executor.verb_ns = verb_ns
    works_s = [after - before for before, after in zip(clock, clock[1:], strict=False)]
    found = wire.share("messages", [works_s, num_calls * _call_s(engine), num_messages])
    # The median of steps: in one of them a rank may collect its garbage.
    step_work_s = statistics.median(map(sum, zip(*(one[0] for one in found), strict=True)))
    calls_s, num = (sum(float(one[k]) for one in found) for k in (1, 2))
    return max(step_work_s - calls_s, 0.0) / max(num, 1.0)


def _num_calls(engine: Engine, name: str) -> int:
    """Of codecs, in one job on this rank."""
    num = 0
    for task in engine.recipe(name).graph.tasks:
        if task.verb is Verb.MERGE:
            num += len(task.reads) + 1
        elif task.verb in (Verb.ENCODE, Verb.DECODE):
            num += 1
    return num


def _call_s(engine: Engine) -> float:
    """Work of one, for hardly any elements."""
    codec = named_codec("none")
    x = torch.zeros(TINY_NUMEL, device=engine.device)
    frame = codec.encode(x)
    start = time.thread_time()
    for _ in range(20):
        codec.encode(x, out=frame)
        codec.decode(frame, out=x)
    return float(time.thread_time() - start) / 40
