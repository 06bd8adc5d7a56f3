"""Scenarios of the exchange, for a rank of a lab (see `tests/scenarios.py`)."""

import gc
import hashlib
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hipress
from hipress.casync.engine.engine import Options
from hipress.session.groups import engine_of

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main, tell
from tests.torch.scripts.models import warm_up

CPU = torch.device("cpu")


def gradient(numel, rank, step=0):
    seed = 1_000_003 * numel + 1009 * rank + step
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def digest(value):
    return hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


# --- scenarios: each gets this rank, N, and what stands in its description ------------------------


def agree(rank, num_ranks, groups, codecs, strategies):
    """What came out in every group: a hash for each codec and strategy, the error of `none`."""
    found = {}
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    for ranks, group in made:
        if rank not in ranks:
            try:
                hipress.allreduce(torch.ones(3), group=group)
                found[f"{ranks}"] = "taken"
            except hipress.errors.UsageError as error:
                found[f"{ranks}"] = str(error)
            continue
        for codec in codecs:
            for strategy in strategies:
                name = f"{codec} {strategy}"
                for step in range(2):
                    values = [gradient(n, rank, step) for n in (70_001, 5, 300_000)]
                    hipress.allreduce(values, codec, strategy, name=name, group=group)
                hashes = [digest(value) for value in values]
                exact = [
                    torch.stack([gradient(v.numel(), r, 1).double() for r in ranks]).mean(0)
                    for v in values
                ]
                pairs = zip(values, exact, strict=True)
                error = max(float((value - mean).abs().max()) for value, mean in pairs)
                found[f"{ranks} {name}"] = [hashes, error]
        value = gradient(1000, rank)
        future = hipress.allreduce(value, op="sum", async_op=True, group=group)
        total = sum(gradient(1000, r).double() for r in ranks)
        same = future.wait() is value
        found[f"{ranks} sum"] = [same, float((value - total).abs().max())]
    return found


def interface_bytes():
    """Sent and received by this host so far."""
    with open("/proc/self/net/dev") as lines:
        (line,) = [line for line in lines if "eth0:" in line]
    fields = line.split(":")[1].split()
    return int(fields[8]), int(fields[0])


def wire(rank, num_ranks, cases, numel, steps):
    """For each (codec, strategy): what the engine counted and what the interface did."""
    found = []
    engine = engine_of(None, CPU)
    for codec, strategy in cases:
        value = gradient(numel, rank)

        def sync(codec=codec, strategy=strategy, value=value):
            hipress.allreduce(value, codec, strategy, name=f"{codec} {strategy}")

        sync()  # agreement and kernels are not what is counted
        dist.barrier()
        time.sleep(0.1)  # the last acknowledgements
        before, counted = (engine.stats.sent_bytes, engine.stats.received_bytes), interface_bytes()
        dist.barrier()
        for _ in range(steps):
            sync()
        dist.barrier()
        time.sleep(0.1)
        now = interface_bytes()
        found.append(
            {
                "case": [codec, strategy],
                "engine": [
                    engine.stats.sent_bytes - before[0],
                    engine.stats.received_bytes - before[1],
                ],
                "interface": [now[0] - counted[0], now[1] - counted[1]],
            }
        )
        dist.barrier()
    return found


def steady(rank, num_ranks, steps, warm, numel):
    """Resident bytes, tensors, new storage and plans at the end of the warm-up and of all."""
    made = {}
    engine = engine_of(None, CPU)
    value = gradient(numel, rank)

    def count(owner, name):
        function = getattr(owner, name)

        def call(*args, **options):
            made[name] = made.get(name, 0) + 1
            return function(*args, **options)

        setattr(owner, name, call)

    names = "empty zeros ones full arange tensor empty_like zeros_like empty_strided cat stack"
    for name in names.split():
        count(torch, name)
    for name in ("clone", "new_empty", "new_zeros"):
        count(torch.Tensor, name)

    def look():
        gc.collect()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        tensors = sum(1 for one in gc.get_objects() if type(one) is torch.Tensor)
        return {
            "resident": resident,
            "tensors": tensors,
            "made": dict(made),
            "recipes": len(engine._recipes),
            "exchanges": sum(one.exchange is not None for one in engine._recipes.values()),
            "threads": threading.active_count(),
        }

    looks = []
    for step in range(steps):
        hipress.allreduce(value, "onebit", "ps", name="w")
        if step + 1 in (1, warm, steps):
            looks.append(look())
    return looks


def messages(rank, num_ranks, count):
    """Messages for many small tensors, with bulk and without; and that both give one result."""
    found = []
    for bulk in (True, False):
        engine = engine_of(None, CPU, Options(bulk=bulk))
        values = [gradient(50 + k, rank) for k in range(count)]
        engine.allreduce(values, codec="onebit", name="w").wait()
        found.append([engine.stats.num_messages, digest(torch.cat(values))])
    return found


def pipelining(rank, num_ranks, numel, tries):
    """How often a decode or merge was over before the last encode began."""
    found = []
    for pipelined in (True, False):
        engine = engine_of(None, CPU, Options(pipelined=pipelined, chunk_numel=2**18))
        value, times = gradient(numel, rank), 0
        engine.allreduce([value], codec="onebit", name="w").wait()
        events = engine.record()
        for _ in range(tries):
            del events[:]
            engine.allreduce([value], codec="onebit", name="w").wait()
            last = max(e.start_ns for e in events if e.verb == "encode")
            times += any(e.end_ns <= last for e in events if e.verb in ("decode", "merge"))
        found.append([times, sum(e.verb == "encode" for e in events)])
    return found


def mismatch(rank, num_ranks, codecs):
    hipress.allreduce(torch.ones(1000), codecs[rank], name="w")


def forever(rank, num_ranks, id, strategy, codec, victim=None):
    """Synchronises until something fails; the victim kills itself in the midst of it."""
    value = gradient(200_000, rank)
    hipress.allreduce(value, codec, strategy, name="w")
    tell(id=id, rank=rank, ready=True)
    if rank == victim:

        def die():
            tell(id=id, rank=rank, died=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(1.0, die).start()
    while True:
        hipress.allreduce(value, codec, strategy, name="w")
        time.sleep(0.02)


def loses(rank, num_ranks, id, victim, where):
    """A rank is killed while the others wait for it, or do something else.

    Args:
        where: Where the others are: before their `first` exchange, in `agree`, or `outside`.
    """
    engine = None if where == "first" else engine_of(None, CPU)
    dist.barrier()
    if rank == victim:
        time.sleep(1.0)
        tell(id=id, rank=rank, died=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "first":
        time.sleep(2.0)
        hipress.allreduce(gradient(1000, rank), "onebit", name="w")
    elif where == "agree":
        engine.agree("tea", {})
    while True:
        engine.executor.check()
        time.sleep(0.1)


if __name__ == "__main__":
    warm_up("none", "onebit", "int8", "fp16", "topk(ratio=0.05)", "terngrad")
    main(globals())
