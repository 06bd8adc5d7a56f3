"""Scenarios of checkpoints under DDP, for a rank of a lab (see `tests/scenarios.py`)."""

import copy
import ctypes
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

import hipress
from hipress import session

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main
from tests.torch.scripts.models import (
    Halves,
    Ledger,
    Named,
    backward,
    batch,
    bits,
    kinds_of_error,
    left,
    loss_of,
    mlp,
    pretend_hosts,
    same_state,
    setup,
    train,
    warm_up,
    wrap,
)


def resume(rank, num_ranks, folder, cases, writer=0, whole=False, shards=False):
    """Losses of a run that goes on and of one that is started from its checkpoint.

    Args:
        writer: The rank that saves.
        whole: By torch.distributed.checkpoint instead.
        shards: By `sync.save` instead, which writes nothing but shards.
    """
    pretend_hosts(rank, 2)
    found = {}
    for number, (codec, strategy) in enumerate(cases):
        path = Path(folder) / str(number)
        module, ddp, optimizer, sync = setup(codec, strategy)
        train(ddp, optimizer, rank, range(4))
        state = sync.state_dict()
        kept = copy.deepcopy(module.state_dict())
        if shards:
            sync.save(path)
        elif whole:
            dcp.save({"model": module.state_dict(), "sync": sync}, checkpoint_id=path)
        elif rank == writer:
            torch.save({"model": module.state_dict(), "sync": state}, path)
        dist.barrier()
        on = train(ddp, optimizer, rank, range(4, 9))
        again, ddp, optimizer, other = setup(codec, strategy)
        if shards:
            again.load_state_dict(kept)
            other.load(path)
        elif whole:
            parts = {"model": again.state_dict(), "sync": other}
            dcp.load(parts, checkpoint_id=path)
            again.load_state_dict(parts["model"])
        else:
            parts = torch.load(path, weights_only=True)
            again.load_state_dict(parts["model"])
            other.load_state_dict(parts["sync"])
        straight = same_state(other.state_dict(), state)
        found[f"{codec} {strategy}"] = {
            "losses": [on, train(ddp, optimizer, rank, range(4, 9))],
            "bits": [bits(module), bits(again)],
            "steps": [sync.step, other.step],
            "straight": straight,
            "kept": max(left(state, name).abs().max().item() for name in state["gradients"]),
        }  # fmt: skip
    return found


def resume_scaled(rank, num_ranks):
    """Stops right after the loss scale has changed."""

    def make():
        module = mlp()
        ddp = wrap(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        return module, ddp, optimizer, scaler, hipress.attach(ddp, "onebit", scaler=scaler)

    def run(ddp, optimizer, scaler, steps):
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(ddp, rank, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    module, ddp, optimizer, scaler, sync = make()
    run(ddp, optimizer, scaler, range(3))
    kept = copy.deepcopy([m.state_dict() for m in (module, optimizer, scaler, sync)])
    on = run(ddp, optimizer, scaler, range(3, 8))
    module, ddp, optimizer, again, sync = make()
    for one, state in zip((module, optimizer, again, sync), kept, strict=True):
        one.load_state_dict(state)
    resumed = run(ddp, optimizer, again, range(3, 8))
    return [on, resumed, kept[3]["scale"], kept[2]["scale"]]


def first_half(rank, num_ranks, folder, codec, strategy, per_host=1):
    """Trains and saves, as a file and with torch.distributed.checkpoint; what is left then."""
    pretend_hosts(rank, per_host)
    module, ddp, optimizer, sync = setup(codec, strategy)
    ledger = Ledger(module)
    for step in range(4):
        ledger.expect(lambda m, step=step: loss_of(m, rank, step))
        backward(ddp, optimizer, rank, step)
        ledger.note()
        optimizer.step()
    state = sync.state_dict()
    dcp.save({"model": module.state_dict(), "sync": sync}, checkpoint_id=Path(folder) / "dcp")
    parts = {"model": module.state_dict(), "sync": sync.shards()}
    dcp.save(parts, checkpoint_id=Path(folder) / "shards")
    if rank == 0:
        torch.save({"model": module.state_dict(), "sync": state}, Path(folder) / "file")
    shares = [left(state, name).abs().max().item() for name in state["gradients"]]
    return {"gaps": ledger.gaps(state), "left": min(shares), "bits": bits(module)}


def second_half(rank, num_ranks, folder, codec, strategy, per_host=1, whole=False, shards=False):
    """Goes on with another number of ranks: what was left before and after, what is lost."""
    pretend_hosts(rank, per_host)
    module, ddp, optimizer, sync = setup(codec, strategy)
    saved = torch.load(Path(folder) / "file", weights_only=True)
    if shards:
        parts = {"model": module.state_dict()}
        dcp.load(parts, checkpoint_id=Path(folder) / "shards")
        module.load_state_dict(parts["model"])
        sync.load(Path(folder) / "shards", entry="sync")
    elif whole:
        parts = {"model": module.state_dict(), "sync": sync}
        grows = num_ranks > saved["sync"]["world_size"]
        planner = DefaultLoadPlanner(allow_partial_load=True) if grows else None
        dcp.load(parts, checkpoint_id=Path(folder) / "dcp", planner=planner)
        module.load_state_dict(parts["model"])
    else:
        module.load_state_dict(saved["model"])
        sync.load_state_dict(saved["sync"])
    carried = {name: left(saved["sync"], name) for name in saved["sync"]["gradients"]}
    loaded = sync.state_dict()
    changes = [float((left(loaded, n) - value).abs().max()) for n, value in carried.items()]
    start = sync.step
    ledger, first = Ledger(module), None
    for step in range(4, 8):
        ledger.expect(lambda m, step=step: loss_of(m, rank, step))
        backward(ddp, optimizer, rank, step)
        ledger.note()
        first = first or ledger.gaps(sync.state_dict(), carried=carried)
        optimizer.step()
    return {
        "changes": changes,
        "first": first,
        "gaps": ledger.gaps(sync.state_dict(), carried=carried),
        "without": ledger.gaps(sync.state_dict()),
        "carried": min(float(value.abs().max()) for value in carried.values()),
        "steps": [start, sync.step],
        "bits": bits(module),
    }


def memory(rank, num_ranks, folder):
    """Peak memory of checkpoints, as a share of what the rank's codecs hold, and those bytes."""

    def peak(work):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is used now
        before = status("VmRSS")
        work()
        return (status("VmHWM") - before) / held

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

    def make(codec):
        return session.start({"w": gradient}, codec=codec)

    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    gradient = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(rank))
    sync = make("onebit")
    sync.average({"w": gradient})
    held = sync.stats().state_bytes
    dcp.save({"sync": torch.ones(rank + 1)}, checkpoint_id=Path(folder) / "first")  # imports
    found = {"held": held, "save": peak(lambda: sync.save(Path(folder) / "sync"))}
    same, other = make("onebit"), make("topk(ratio=0.1)")
    found["load"] = peak(lambda: same.load(Path(folder) / "sync"))
    found["load, other codec"] = peak(lambda: other.load(Path(folder) / "sync"))
    found["state_dict"] = peak(sync.state_dict)
    return found


def full_disk(rank, num_ranks, folder):
    """A rank that cannot write: what all ranks say, and whether the last checkpoint is intact."""
    module, ddp, optimizer, sync = setup("onebit")
    train(ddp, optimizer, rank, range(2))
    sync.save(Path(folder) / "sync")
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    kind, text, _ = kinds_of_error(lambda: sync.save(Path(folder) / "sync"))
    *kept, other = setup("onebit")
    other.load(Path(folder) / "sync")
    return [kind, text, same_state(other.state_dict(), sync.state_dict())]


def owed_saved(rank, num_ranks, folder, whole):
    """What is owed of a parameter that no rank used in the last step, over a checkpoint."""

    def make():
        module = Halves()
        ddp = wrap(module, find_unused_parameters=True)
        return module, ddp, hipress.attach(ddp, "onebit")

    module, ddp, sync = make()
    for step in range(3):
        ddp.zero_grad()
        (ddp(batch(rank, step), step == 0) - 1).pow(2).mean().backward()
    again, twin, other = make()
    if whole:
        dcp.save({"sync": sync}, checkpoint_id=folder)
        dcp.load({"sync": other}, checkpoint_id=folder)
    else:
        other.load_state_dict(sync.state_dict())
    return [{name: float(v.abs().max()) for name, v in s.owed.items()} for s in (sync, other)]


def late_start(rank, num_ranks):
    """A checkpoint is loaded by a run that still warms up: what is lost."""
    module, ddp, optimizer, sync = setup("onebit")
    train(ddp, optimizer, rank, range(3))
    state = sync.state_dict()
    again, ddp, optimizer, other = setup("onebit", warmup_steps=5)
    again.load_state_dict(module.state_dict())
    other.load_state_dict(state)
    ledger = Ledger(again)
    for step in range(3, 8):
        ledger.expect(lambda m, step=step: loss_of(m, rank, step))
        backward(ddp, optimizer, rank, step)
        ledger.note()
        optimizer.step()
    carried = {name: left(state, name) for name in state["gradients"]}
    return ledger.gaps(other.state_dict(), carried=carried)


def resume_rates(rank, num_ranks):
    """A codec that follows the learning rate, which falls in every step: on, and resumed."""

    def make():
        module = mlp()
        ddp = wrap(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.08)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        sync = hipress.attach(ddp, "momentum(ef(onebit))", optimizer=optimizer)
        return module, ddp, optimizer, rates, sync

    def run(ddp, optimizer, rates, steps):
        losses = []
        for step in steps:
            losses += train(ddp, optimizer, rank, [step])
            rates.step()
        return losses

    module, ddp, optimizer, rates, sync = make()
    run(ddp, optimizer, rates, range(3))
    kept = copy.deepcopy([m.state_dict() for m in (module, optimizer, rates, sync)])
    on = run(ddp, optimizer, rates, range(3, 7))
    module, ddp, optimizer, rates, sync = make()
    for one, state in zip((module, optimizer, rates, sync), kept, strict=True):
        one.load_state_dict(state)
    resumed = run(ddp, optimizer, rates, range(3, 7))
    without = {**kept[3], "rates": {}}
    module, ddp, optimizer, rates, sync = make()
    for one, state in zip((module, optimizer, rates, sync), [*kept[:3], without], strict=True):
        one.load_state_dict(state)
    return [on, resumed, run(ddp, optimizer, rates, range(3, 7))]


def other_scales(rank, num_ranks):
    """What is left, in the units of the gradients, when a scaler comes or goes with a restart."""
    found = []
    for before, after in ((1024.0, None), (None, 1024.0), (512.0, 2048.0)):
        scalers = [s and torch.amp.GradScaler("cpu", init_scale=s) for s in (before, after)]
        module = mlp()
        ddp = wrap(module)
        sync = hipress.attach(ddp, "onebit", scaler=scalers[0])
        (loss_of(ddp, rank, 0) * (before or 1.0)).backward()
        state = sync.state_dict()
        other = wrap(mlp())
        twin = hipress.attach(other, "onebit", scaler=scalers[1])
        twin.load_state_dict(state)
        if after:
            scalers[1].scale(torch.ones(1))
        twin._follow_scale()
        loaded = twin.state_dict()
        pairs = [
            (left(state, name) / (before or 1.0), left(loaded, name) / (after or 1.0))
            for name in state["gradients"]
        ]
        found.append([float((a - b).abs().max()) for a, b in pairs])
        found[-1].append(-min(float(a.abs().max()) for a, _ in pairs))
    return found


def detach_loaded(rank, num_ranks):
    """Loads and detaches at once: what is lost."""
    module, ddp, optimizer, sync = setup("onebit")
    train(ddp, optimizer, rank, range(3))
    state = sync.state_dict()
    again, ddp, optimizer, other = setup("onebit")
    again.load_state_dict(module.state_dict())
    other.load_state_dict(state)
    other.detach()
    ledger = Ledger(again)
    for step in range(3, 6):
        ledger.expect(lambda m, step=step: loss_of(m, rank, step))
        backward(ddp, optimizer, rank, step)
        ledger.note()
        optimizer.step()
    carried = {name: left(state, name) for name in state["gradients"]}
    return [ledger.gaps(other.state_dict(), carried=carried), ledger.gaps(other.state_dict())]


def bad_loads(rank, num_ranks):
    """Checkpoints that are none, or of other models; and that the run goes on after each."""
    module, ddp, optimizer, sync = setup("onebit")
    train(ddp, optimizer, rank, range(2))
    good = sync.state_dict()
    models = [wrap(Named("second")), wrap(mlp(width=200))]
    other, wider = (hipress.attach(model, "onebit") for model in models)
    cases = {
        "none": None,
        "list": [1, 2],
        "empty": {},
        "model": module.state_dict(),
        "newer": {**good, "version": 99},
        "other": other.state_dict(),
        "wider": wider.state_dict(),
        "version": {**good, "version": "1"},
        "cut": {key: good[key] for key in ("version", "gradients")},
        "part": {**good, "gradients": {"3.weight": {}}},
        "one rank": {} if rank else good,
    }
    found = {}
    for name, state in cases.items():
        kind, text, _ = kinds_of_error(lambda s=state: sync.load_state_dict(s))
        found[name] = [kind, text, same_state(sync.state_dict(), good)]
        sync.load_state_dict(good)
        train(ddp, optimizer, rank, range(2))  # what was offered is taken
        good = sync.state_dict()
    train(ddp, optimizer, rank, range(2, 4))
    found["after"] = [bits(module), sync.step]
    return found


if __name__ == "__main__":
    warm_up("none", "onebit", "int8", "topk(ratio=0.05)", "dgc(ratio=0.05)", "terngrad")
    main(globals(), thorough=False, limit_s=100.0)
