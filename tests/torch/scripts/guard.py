"""Scenarios of the accuracy guard, for ranks (see `tests/scenarios.py`)."""

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

import hipress
import hipress.torch
from hipress.session import guard

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests import guarded
from tests.scenarios import main
from tests.torch.scripts import momentum
from tests.torch.scripts.auto import Lines, Run
from tests.torch.scripts.models import (
    Ledger,
    backward,
    bits,
    left,
    loss_of,
    mean_of,
    mlp,
    pretend_hosts,
    train,
    warm_up,
    wrap,
)

LAYERS = ("0.weight", "3.weight", "5.weight")
FOLDER = Path(tempfile.mkdtemp())


def remove(folder, process):
    if os.getpid() == process:  # and no rank
        shutil.rmtree(folder)


def wrong(kind):
    """A codec with error feedback; around a ring, one that is right on the way back is half right,
    and two wrong signs make none."""
    if kind == "sign":
        return guarded.bad(FOLDER, kind, feedback=True)
    return hipress.codec(f"ef({guarded.program(FOLDER, kind)})")


def codec_names(sync):
    return [sync.gradients[name].choice.codec.name for name in LAYERS]


def lines():
    found = Lines()
    hipress.session.session._log.handlers = [found]
    return found.found


def sgd(rank, num_ranks, cases):
    """Wrong codecs under SGD: codecs and bits after each step, what is lost in all."""
    pretend_hosts(rank, 2)
    found = {}
    for case in cases:
        kind, strategy, micro = case.split(" ")
        said = lines()
        codec = wrong(kind)
        module = mlp()
        ddp = wrap(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
        sync = hipress.attach(ddp, codec, strategy, guard=True)
        ledger, codecs, seen = Ledger(module), [], []
        for step in range(50):
            for _ in range(int(micro)):
                ledger.expect(lambda model, step=step: loss_of(model, rank, step))
            optimizer.zero_grad()
            for part in range(int(micro)):
                is_last = part == int(micro) - 1
                with contextlib.nullcontext() if is_last else ddp.no_sync():
                    loss_of(ddp, rank, step).backward()
            ledger.note()
            optimizer.step()
            codecs.append(codec_names(sync))
            seen.append(bits(module))
        state = sync.state_dict()
        found[case] = {
            "codecs": codecs, "bits": seen, "gaps": ledger.gaps(state), "lines": said,
            "wrong": codec.name,
        }  # fmt: skip
        sync.engine.close()
    return found


def first_gradients(module, ddp, optimizer, sync, rank, step):
    """Takes the step after unsent momentum was sent: gradients come, or wait in a new residual."""
    again = mlp()
    again.load_state_dict(module.state_dict())
    gradients = momentum.plain_gradients(again, rank, step)
    backward(ddp, optimizer, rank, step)
    gaps = {}
    for name, parameter in module.named_parameters():
        if name in LAYERS:
            into = mean_of(gradients[name].view(-1))
            out = parameter.grad.view(-1).double() + momentum.unsent(sync, name)
            gaps[name] = [float((into - out).abs().max() / into.abs().max()), 1e-6, False]
    optimizer.step()
    return gaps


def adamw(rank, num_ranks, cases):
    """Wrong codecs on AdamW's momentum: what each step loses, and what comes after them."""
    found = {}
    for kind in cases:
        said = lines()
        codec = wrong(kind)
        module = mlp()
        ddp = wrap(module)
        optimizer = hipress.torch.AdamW(
            ddp.parameters(), lr=1e-5, refresh_warmup=3, refresh_every=20
        )
        sync = hipress.attach(ddp, codec, optimizer=optimizer, guard=True)
        gaps, codecs, senders = [], [], []
        for step in range(56):
            leaves = any(made.flushes for made in sync.layout.overrides.values())
            take = first_gradients if leaves else momentum.step_gaps
            gaps.append(take(module, ddp, optimizer, sync, rank, step))
            codecs.append(codec_names(sync))
            senders.append(len(sync.layout.senders))
        found[kind] = {
            "gaps": gaps, "codecs": codecs, "senders": senders, "bits": bits(module),
            "lines": said, "owed": len(sync.owed.momentum),
            "left": [float(left(sync.state_dict(), name).abs().max()) for name in LAYERS],
        }  # fmt: skip
        sync.engine.close()
    return found


def healthy(rank, num_ranks, cases, steps):
    """Codecs that train well: what has changed after hundreds of steps, and the last numbers."""
    found = {}
    for case in cases:
        codec, _, kind = case.partition(" ")
        module = mlp()
        ddp = wrap(module)
        made = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
            "adamw": lambda p: hipress.torch.AdamW(p, lr=1e-3, refresh_warmup=20),
        }[kind](ddp.parameters())
        sync = hipress.attach(ddp, codec, optimizer=made, guard=True)
        train(ddp, made, rank, range(steps))
        told = sync.stats().guard
        found[case] = {
            "overrides": {name: one.reason for name, one in told.overrides.items()},
            "measured": {name: str(one) for name, one in told.measured.items()},
            "looks": told.num_looks,
            "bits": bits(module),
        }
        sync.engine.close()
    return found


def under_auto(rank, num_ranks):
    """A plan of auto with a wrong codec, a change of plans, and the codecs of all steps."""
    path = f"ef({guarded.program(FOLDER, 'zeros')})"
    lists = [[(path,)], [(path, "ring"), ("onebit",)]]

    def pace(codec, step):
        fast = {None: 0.02, path: 0.005, "onebit": 0.006}[codec]
        return fast if step < 90 or codec != path else 0.012

    run = Run(rank, lists, pace, codecs=[path, "onebit"])
    codecs = []
    for step in range(150):
        run.step(step)
        codecs.append(codec_names(run.sync))
    return {**run.told(), "codecs": codecs, "path": path}


def resumed(rank, num_ranks, folder):
    """A run with a wrong codec goes on from its checkpoint: codecs, bits, and the same again."""
    path = f"ef({guarded.program(FOLDER, 'zeros')})"

    def setup():
        module = mlp()
        ddp = wrap(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        return module, ddp, optimizer, hipress.attach(ddp, path, guard=True)

    module, ddp, optimizer, sync = setup()
    train(ddp, optimizer, rank, range(60))
    sync.save(Path(folder) / "saved")
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    train(ddp, optimizer, rank, range(60, 66))
    other, ddp, optimizer, again = setup()
    other.load_state_dict(weights)
    again.load(Path(folder) / "saved")
    names = codec_names(again)
    train(ddp, optimizer, rank, range(60, 66))
    return {"codecs": names, "wrong": path, "bits": [bits(module), bits(other)]}


def cost(rank, num_ranks, steps):
    """Median milliseconds of a step without a guard, and with it in and between windows."""
    found = {}
    for case in (False, True):
        module = mlp(512)
        ddp = wrap(module, bucket_cap_mb=1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        sync = hipress.attach(ddp, "onebit", guard=case)
        times = {False: [], True: []}
        for step in range(steps):
            start = time.perf_counter()
            backward(ddp, optimizer, rank, step)
            optimizer.step()
            taken = time.perf_counter() - start
            times[bool(sync.guard and sync.guard.is_active)].append(1e3 * taken)
        for active, values in times.items():
            if values:
                found[f"{case} {active}"] = [len(values), sorted(values)[len(values) // 2]]
        sync.engine.close()
    return found


if __name__ == "__main__":
    atexit.register(remove, FOLDER, os.getpid())
    warm_up("none", "onebit", "int8", "int8(ef=false)", "topk(ratio=0.01)")
    for kind in ("zeros", "sign", "large"):
        warm_up(guarded.program(FOLDER, kind), f"ef({guarded.program(FOLDER, kind)})")
    assert guard.LOOKS[-1] < 46
    main(globals(), thorough=False)
