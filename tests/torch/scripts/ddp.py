"""Scenarios of `hipress.attach` under DDP, for a rank of a lab (see `tests/scenarios.py`)."""

import contextlib
import copy
import gc
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress
import hipress.torch
from hipress.casync.engine.engine import Engine
from hipress.plan import Decision, Plan
from hipress.session import replicas
from hipress.train.virtual import VirtualSync, _Compressed, is_exempt

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main, tell
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
    residuals,
    setup,
    train,
    warm_up,
    wrap,
)

# --- training -------------------------------------------------------------------------------------


def agree(rank, num_ranks, codecs, strategies, steps):
    """For each codec and strategy the bits of all parameters; for `none` the distance to DDP."""
    pretend_hosts(rank, 2)
    plain = wrap(mlp())
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05), rank, range(steps))
    found = {}
    for codec in codecs:
        for strategy in strategies:
            module, ddp, optimizer, sync = setup(codec, strategy)
            train(ddp, optimizer, rank, range(steps))
            pairs = zip(module.parameters(), plain.module.parameters(), strict=True)
            distance = max(float((p - q).detach().abs().max()) for p, q in pairs)
            found[f"{codec} {strategy}"] = {
                "bits": bits(module),
                "distance": distance,
                "compressed": sync.stats().num_compressed,
                "buckets": len(sync.layout._buckets),
                "rebuilt": ddp._get_ddp_logging_data()["has_rebuilt_buckets"],
                "hosts": list(sync.engine.hosts),
            }
    return found


def reference(rank, num_ranks, codec, rates, micro=1, follow=True):
    """Trains, and again in one process with `VirtualSync`; micro: backwards of each step."""
    module, ddp, optimizer, sync = setup(codec, follow=follow)
    inside = 0
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        for part in range(micro):
            last = part == micro - 1
            before = sync.engine.stats.num_syncs
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss_of(ddp, rank, micro * step + part).backward()
            if not last:
                inside += sync.engine.stats.num_syncs - before
        optimizer.step()
    again = mlp()
    optimizer = torch.optim.SGD(again.parameters(), lr=rates[0])
    virtual = VirtualSync(codec, list(again.parameters()), num_workers=num_ranks)
    # What is exempt travels in frames too: torch's own sum rounds otherwise.
    plain = VirtualSync("none", list(again.parameters()), num_workers=num_ranks)
    none = hipress.codec("none")
    virtual.tensors = [
        _Compressed(plain, none, p, 0, k) if is_exempt(p) else one
        for k, (p, one) in enumerate(zip(again.parameters(), virtual.tensors, strict=True))
    ]
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        gradients = []
        for worker in range(num_ranks):
            optimizer.zero_grad()
            for part in range(micro):
                loss_of(again, worker, micro * step + part).backward()
            gradients.append([p.grad.clone() for p in again.parameters()])
        ratio = rates[max(step - 1, 0)] / rate
        means = virtual.average(gradients, step, ratio)
        for p, mean in zip(again.parameters(), means, strict=True):
            p.grad = mean
        optimizer.step()
    pairs = zip(module.named_parameters(), again.parameters(), strict=True)
    return {
        "bits": bits(module),
        "again": bits(again),
        "distances": {name: float((p - q).detach().abs().max()) for (name, p), q in pairs},
        "rebuilt": ddp._get_ddp_logging_data()["has_rebuilt_buckets"],
        "buckets": len(sync.layout._buckets),
        "steps": sync.step,
        "inside": inside,
    }


def clip(rank, num_ranks):
    """The norm that clipping saw, that of the mean it should see, and what came of it."""
    found = {}
    for codec in ("none", "onebit"):
        module, ddp, optimizer, sync = setup(codec)
        ledger = Ledger(module)
        ledger.expect(lambda m: loss_of(m, rank, 0))
        backward(ddp, optimizer, rank, 0)
        own = torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item()
        mean = torch.cat(list(ledger.true.values())).norm().item()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        clipped = torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item()
        optimizer.step()
        found[codec] = {
            "norm": norm.item(), "own": own, "mean": mean, "clipped": clipped, "bits": bits(module),
        }  # fmt: skip
    return found


# --- a loss scale ---------------------------------------------------------------------------------


def amp(rank, num_ranks):
    """One rank overflows in step 3: scales, what each step changed, and the residuals."""
    module = mlp()
    ddp = wrap(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    sync = hipress.attach(ddp, "onebit", scaler=scaler)
    found = {"scales": [], "bits": [], "finite": [], "factors": []}
    for step in range(7):
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, step)
        if step == 3 and rank == 1:
            loss = loss * torch.inf
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        held = residuals(sync)
        sync._follow_scale()  # what the next step begins with
        now = residuals(sync)
        ratio = scaler.get_scale() / before
        found["scales"].append(scaler.get_scale())
        found["bits"].append(bits(module))
        found["finite"].append(all(bool(r.isfinite().all()) for r in now))
        found["factors"].append(
            all(torch.equal(a * ratio, b) for a, b in zip(held, now, strict=True))
        )
    found["largest"] = max(float(r.abs().max()) for r in residuals(sync))
    return found


def amp_ledger(rank, num_ranks):
    """What is lost while the scale grows, and shrinks in step 4 since all overflow."""
    module = mlp()
    ddp = wrap(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    sync = hipress.attach(ddp, "onebit", scaler=scaler)
    ledger, scales = Ledger(module), []
    for step in range(9):
        scales.append(scaler.get_scale())
        if step != 4:
            ledger.expect(lambda m, step=step: loss_of(m, rank, step))
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, step) * (torch.inf if step == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if step != 4:
            ledger.note()
        scaler.step(optimizer)
        scaler.update()
    state = sync.state_dict()
    shares = [left(state, name).abs().max().item() for name in state["gradients"]]
    return {
        "gaps": ledger.gaps(state, scale=state["scale"]),
        "scales": scales,
        "left": min(shares),
        "bits": bits(module),
    }


# --- what models may hold -------------------------------------------------------------------------


def unused(rank, num_ranks, view, to_none, door="attach"):
    """What is lost where a parameter takes part on all ranks, on one, on none, in turns."""
    module = Halves()
    ddp = wrap(module, find_unused_parameters=True, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    if door == "attach":
        sync = hipress.attach(ddp, "onebit")
    else:
        sync, hook = hipress.torch.comm_hook("onebit")
        ddp.register_comm_hook(sync, hook)
    ledger, owed = Ledger(module), []
    for step in range(8):
        use = step % 4 == 0 or (step % 4 == 1 and rank == 0)

        def make_loss(model, step=step, use=use):
            return (model(batch(rank, step), use) - 1).pow(2).mean()

        ledger.expect(make_loss)
        optimizer.zero_grad(set_to_none=to_none)
        make_loss(ddp).backward()
        ledger.note()
        owed.append(sorted(sync.owed))
        optimizer.step()
    state = sync.state_dict()
    if door != "attach":  # the hook has names of its own
        names = {sync.adapter._names[id(p)]: name for name, p in module.named_parameters()}
        for part in ("mean", "owed"):
            state[part] = {names[name]: value for name, value in state[part].items()}
    return {"gaps": ledger.gaps(state), "owed": owed, "bits": bits(module)}


def static(rank, num_ranks):
    """A static graph, with a parameter that never takes part."""
    module = Halves(never=True)
    ddp = wrap(module, static_graph=True, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sync = hipress.attach(ddp, "onebit")
    ledger = Ledger(module)
    for step in range(5):

        def make_loss(model, step=step):
            return (model(batch(rank, step)) - 1).pow(2).mean()

        ledger.expect(make_loss)
        optimizer.zero_grad()
        make_loss(ddp).backward()
        ledger.note()
        optimizer.step()
    return {
        "gaps": ledger.gaps(sync.state_dict()),
        "steps": sync.step,
        "buckets": len(sync.layout._buckets),
        "bits": bits(module),
    }


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(80, 64)
        self.middle = nn.Linear(64, 64)
        self.out = nn.Linear(64, 80, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.middle(self.table(x.argmax(1))))


def kinds(rank, num_ranks):
    """Frozen and tied parameters, other memory formats, other dtypes: what is lost, what skipped.

    Two steps, so that the second works on what the first left in the codecs.
    """

    def frozen():
        module = mlp()
        module[3].weight.requires_grad_(False)
        return module

    def last():
        torch.manual_seed(7)
        module = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten())
        return module.to(memory_format=torch.channels_last)

    def mixed():
        module = mlp()
        module[5].double()
        module[4] = Cast(torch.float64)
        return module

    cases = {
        "frozen": (frozen, (16, 64)),
        "tied": (Tied, (16, 80)),
        "channels_last": (last, (4, 16, 7, 7)),
        "bfloat16": (lambda: mlp().bfloat16(), (16, 64)),
        "float64": (lambda: mlp().double(), (16, 64)),
        "mixed": (mixed, (16, 64)),
    }
    found = {}
    for name, (make, shape) in cases.items():
        for codec in ("none", "onebit"):
            module = make()
            ddp = wrap(module)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            sync = hipress.attach(ddp, codec)
            ledger = Ledger(module)
            dtype = next(module.parameters()).dtype
            for step in range(3):

                def make_loss(model, step=step, dtype=dtype, shape=shape):
                    return (model(batch(rank, step, *shape).to(dtype)) - 1).pow(2).mean()

                ledger.expect(make_loss)
                optimizer.zero_grad()
                make_loss(ddp).backward()
                ledger.note()
                optimizer.step()
            formats = [p.is_contiguous() for p in module.parameters()]
            found[f"{name} {codec}"] = {
                "gaps": ledger.gaps(sync.state_dict()),
                "skipped": sync.skipped,
                "gradients": list(sync.gradients),
                "bits": bits(module),
                "contiguous": formats,
            }
    return found


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.relu().to(self.dtype)


def sparse(rank, num_ranks):
    """A table with sparse gradients, against plain DDP; bits, distances, what is said of it."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.table = nn.Embedding(200, 64, sparse=True)
            self.body = nn.Linear(64, 80)

        def forward(self, x):
            return self.body(self.table(x))

    def run(codec):
        module = Bag()
        ddp = wrap(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        sync = hipress.attach(ddp, codec) if codec else None
        for step in range(4):
            optimizer.zero_grad()
            rows = batch(rank, step, 12).mul(1000).long().remainder(200)
            (ddp(rows) - 1).pow(2).mean().backward()
            is_sparse = module.table.weight.grad.is_sparse
            optimizer.step()
        return module, sync, is_sparse

    plain, _, _ = run(None)
    found = {}
    for codec in ("none", "onebit"):
        module, sync, is_sparse = run(codec)
        pairs = zip(module.parameters(), plain.parameters(), strict=True)
        found[codec] = {
            "distances": [float((p - q).detach().abs().max()) for p, q in pairs],
            "bits": bits(module),
            "sparse": is_sparse,
            "skipped": sync.stats().skipped,
            "sent": sync.stats().sent_bytes,
        }
    return found


# --- the life of an exchange ----------------------------------------------------------------------


def detach(rank, num_ranks, cases):
    """What is lost over a whole run that detaches in its midst, and what comes after."""
    pretend_hosts(rank, 2)
    found = {}
    for codec, strategy in cases:
        module, ddp, optimizer, sync = setup(codec, strategy)
        ledger, errors = Ledger(module), []
        for step in range(7):
            if step == 4:
                sync.detach()
                sync.detach()
            if step == 6:
                sync.detach()
            alone = Ledger(module)
            for one in (ledger, alone):
                one.expect(lambda m, step=step: loss_of(m, rank, step))
            backward(ddp, optimizer, rank, step)
            for one in (ledger, alone):
                one.note()
            errors.append(max(alone.gaps().values()))
            optimizer.step()
        found[f"{codec} {strategy}"] = {
            "gaps": ledger.gaps(),
            "errors": errors,
            "bits": bits(module),
            "state_bytes": sync.stats().state_bytes,
        }
    return found


def detach_unused(rank, num_ranks):
    """A parameter that no rank uses in the step after detach: what is lost of it."""
    module = Halves()
    ddp = wrap(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sync = hipress.attach(ddp, "onebit")
    ledger = Ledger(module)
    for step in range(5):
        use = step != 3

        def make_loss(model, step=step, use=use):
            return (model(batch(rank, step), use) - 1).pow(2).mean()

        if step == 3:
            sync.detach()
        ledger.expect(make_loss)
        optimizer.zero_grad()
        make_loss(ddp).backward()
        ledger.note()
        optimizer.step()
    return ledger.gaps()


def choices(rank, num_ranks, folder):
    """What is compressed under each way to say so."""
    path = Path(folder) / f"plan{rank}.json"
    decisions = {
        "3.weight": {"codec": "int8", "strategy": "ring", "partitions": 2},
        "0.weight": {"codec": "none", "reason": "the first layer stays"},
    }
    path.write_text(json.dumps({"version": 1, "gradients": decisions}))
    plan = Plan(gradients={"3.weight": {"codec": "onebit"}, "5.bias": Decision(codec="int8")})
    cases = {
        "default": {"strategy": "ps"},
        "exclude": {"codec": "int8", "exclude": ["3", "*5.w*"]},
        "include": {"codec": "int8", "include": "3.bias"},
        "min_size": {"codec": "int8", "min_size": 20_000},
        "all": {"codec": "int8", "min_size": 0, "include": "*"},
        "plan": {"plan": plan},
        "file": {"plan": str(path)},
    }
    found = {}
    for name, options in cases.items():
        module = mlp()
        ddp = wrap(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        sync = hipress.attach(ddp, **options)
        train(ddp, optimizer, rank, range(2))
        found[name] = {
            "codecs": {n: g.choice.codec.name for n, g in sync.gradients.items()},
            "strategies": {n: g.choice.strategy for n, g in sync.gradients.items()},
            "kept": sorted({key.name for key, _ in sync.engine.states}),
            "partitions": {n: len(g.placements) for n, g in sync.gradients.items()},
            "skipped": sync.stats().skipped,
            "bits": bits(module),
        }
    return found


def warmup(rank, num_ranks, steps):
    """The error of each step's mean, and what was kept after it."""
    module, ddp, optimizer, sync = setup("onebit", warmup_steps=steps)
    errors, kept, whole = [], [], Ledger(module)
    for step in range(steps + 3):
        ledger = Ledger(module)
        for one in (ledger, whole):
            one.expect(lambda m, step=step: loss_of(m, rank, step))
        backward(ddp, optimizer, rank, step)
        for one in (ledger, whole):
            one.note()
        errors.append(ledger.gaps()["3.weight"])
        kept.append(sync.stats().state_bytes)
        optimizer.step()
    return {
        "errors": errors,
        "kept": [bool(size) for size in kept],
        "bits": bits(module),
        "gaps": whole.gaps(sync.state_dict()),
    }


def hook_pair(rank, num_ranks):
    """The bare hook: bits, bytes, names; and a run that stops and goes on."""

    def make():
        module = mlp()
        ddp = wrap(module)
        state, hook = hipress.torch.comm_hook("onebit")
        ddp.register_comm_hook(state, hook)
        return module, ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), state

    module, ddp, optimizer, sync = make()
    too_early = kinds_of_error(lambda: sync.engine)
    train(ddp, optimizer, rank, range(4))
    kept = copy.deepcopy([module.state_dict(), optimizer.state_dict(), sync.state_dict()])
    on = train(ddp, optimizer, rank, range(4, 8))
    again, ddp, optimizer, other = make()
    for one, state in zip((again, optimizer, other), kept, strict=True):
        one.load_state_dict(state)
    resumed = train(ddp, optimizer, rank, range(4, 8))
    return {
        "bits": [bits(module), bits(again)],
        "losses": [on, resumed],
        "names": list(sync.gradients),
        "skipped": sync.skipped,
        "ratio": sync.stats().ratio,
        "steps": [sync.step, other.step],
        "early": too_early,
        "residual": max(float(r.abs().max()) for r in residuals(sync)),
    }


def dropped(rank, num_ranks):
    """Engines and threads of HiPress after each of some models is dropped, trained as before."""

    def alive():
        deadline = time.monotonic() + 10
        while True:  # a thread that is about to end may still hold its engine
            gc.collect()
            engines = sum(type(one) is Engine for one in gc.get_objects())
            threads = sum(one.name.startswith("hipress-") for one in threading.enumerate())
            if not (engines or threads) or time.monotonic() > deadline:
                return engines, threads
            time.sleep(0.1)

    def hooked():
        ddp = wrap(mlp())
        ddp.register_comm_hook(*hipress.torch.comm_hook("onebit"))
        return ddp

    def attached(codec):
        ddp = wrap(mlp())
        hipress.attach(ddp, codec)
        return ddp

    def use(make):
        ddp = make()
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), rank, range(3))

    found = [alive()]

    def wrapped_by_attach():
        return hipress.attach(mlp(), "onebit").model

    for make in (
        hooked, lambda: attached("onebit"), lambda: attached("auto"), wrapped_by_attach
    ):  # fmt: skip
        for _ in range(2):
            use(make)
        found.append(alive())
    return found


def compiled(rank, num_ranks, backend):
    """Compiled inside DDP and around it: names, bits, and the way of the same model uncompiled."""

    def run(kind, codec="onebit"):
        module = mlp()
        inner = torch.compile(module, backend=backend) if kind == "inside" else module
        ddp = DDP(inner, bucket_cap_mb=1)
        outer = torch.compile(ddp, backend=backend) if kind == "around" else ddp
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        sync = hipress.attach(outer, codec, check_every=2)
        train(outer, optimizer, rank, range(3))
        return {
            "names": list(sync.gradients), "bits": bits(module),
            "kept": sorted({key.name for key, _ in sync.engine.states}), "steps": sync.step,
        }  # fmt: skip

    def adamw(kind):
        """Whether momentum came in each step, what was sent, and losses."""
        module = mlp()
        inner = torch.compile(module, backend=backend) if kind == "inside" else module
        ddp = DDP(inner, bucket_cap_mb=1)
        outer = torch.compile(ddp, backend=backend) if kind == "around" else ddp
        optimizer = hipress.torch.AdamW(
            module.parameters(), lr=1e-3, refresh_warmup=2, refresh_every=5
        )
        sync = hipress.attach(outer, "onebit", optimizer=optimizer, check_every=2)
        found = {"momentum": [], "sent": [], "losses": []}
        for step in range(8):
            before = sync.engine.stats.sent_bytes
            found["losses"].append(backward(outer, optimizer, rank, step))
            held = {n for n, p in module.named_parameters() if p in optimizer._holds_momentum}
            found["momentum"].append(sorted(held))
            found["sent"].append(sync.engine.stats.sent_bytes - before)
            optimizer.step()
        return {"bits": bits(module), **found}

    kinds = ("not", "inside", "around")
    momentum = {f"{kind} momentum": run(kind, "momentum(ef(onebit))") for kind in kinds}
    return (
        {kind: run(kind) for kind in kinds}
        | momentum
        | {f"{kind} adamw": adamw(kind) for kind in kinds}
    )


def disabled(rank, num_ranks):
    """Off: the same bits as DDP by itself."""
    plain = wrap(mlp())
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05), rank, range(3))
    module, ddp, optimizer, sync = setup("onebit", enabled=False)
    train(ddp, optimizer, rank, range(3))
    state = sync.state_dict()
    sync.load_state_dict(state)
    sync.detach()
    stats = sync.stats()
    return {
        "bits": [bits(module), bits(plain.module)],
        "hooks": len(ddp._comm_hooks),
        "stats": [stats.num_compressed, stats.sent_bytes, stats.ratio, stats.state_bytes],
        "state": sorted(state),
        "timeline": kinds_of_error(lambda: sync.timeline("/tmp/none.json")),
        "idle": [sync.check_replicas(), sorted(sync.shards()), str(stats)],
    }


def own_ddp(rank, num_ranks):
    """A module that attach puts in DDP: the way of one that was in DDP, compressed or not."""
    found = {}
    for enabled in (True, False):
        module, ddp, optimizer, _ = setup("onebit", enabled=enabled)
        train(ddp, optimizer, rank, range(3))
        other = mlp()
        if rank:  # DDP sends the parameters of rank 0
            torch.nn.init.zeros_(other[0].weight)
        sync = hipress.attach(other, "onebit", enabled=enabled)
        made = sync.model
        train(made, torch.optim.SGD(other.parameters(), lr=0.05), rank, range(3))
        found[str(enabled)] = [bits(module), bits(other), type(made).__name__, made is sync.model]
    return found


def absent(rank, num_ranks):
    """A module is attached on one rank, and another does not come before that has failed."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank:
        store.wait(["failed"])
        return None
    found = kinds_of_error(lambda: hipress.attach(mlp(), "onebit"))
    store.set("failed", "")
    return found


def profiled(rank, num_ranks, folder):
    """Profiles of the running job, with a codec and beside `auto`; what is refused on all ranks."""
    module, ddp, optimizer, sync = setup("onebit")
    refused = [
        kinds_of_error(lambda: sync.profile(f"{folder}/not/there.json")),
        kinds_of_error(lambda: sync.profile(f"{folder}/p.json", steps=3)),
        kinds_of_error(lambda: sync.profile(f"{folder}/p.json", codecs=["onebitt"])),
        kinds_of_error(lambda: sync.profile(f"{folder}/p.json", codecs="int8")),
    ]
    sync.profile(f"{folder}/p.json", steps=5, codecs=["none", "onebit"])
    refused.append(kinds_of_error(lambda: sync.profile(f"{folder}/other.json")))
    train(ddp, optimizer, rank, range(4))
    early = os.path.exists(f"{folder}/p.json")
    train(ddp, optimizer, rank, range(4, 7))  # it goes on afterwards
    ddp = wrap(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    sync = hipress.attach(ddp, codecs=["int8"], optimizer=optimizer)
    sync.profile(f"{folder}/auto.json", steps=8, codecs=["int8"])
    train(ddp, optimizer, rank, range(9))  # `auto` measures after 5 steps
    return {"refused": refused, "early": early, "bits": bits(module)}


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append([record.levelname, record.getMessage()])


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, step):
        self.scalars.append([tag, float(value), step])


def figures(rank, num_ranks):
    """Bytes, ratio, memory, lines of the log, scalars."""
    lines, writer = Lines(), Writer()
    logger = logging.getLogger("hipress")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    found = {}
    for codec in ("none", "onebit", "int8", "topk(ratio=0.05)"):
        module, ddp, optimizer, sync = setup(codec, log_every=2, writer=writer)
        train(ddp, optimizer, rank, range(4))
        stats = sync.stats()
        found[codec] = {
            "sent": stats.sent_bytes, "received": stats.received_bytes, "ratio": stats.ratio,
            "gradient": stats.gradient_bytes, "state": stats.state_bytes, "steps": stats.num_steps,
            "buffer": stats.buffer_bytes, "verbs": stats.verb_seconds,
            "messages": stats.num_messages, "lines": lines.found, "scalars": writer.scalars,
            "compressed": [
                g.numel for g in sync.gradients.values() if g.is_compressed
            ],
            "timed": stats.num_timed_steps, "printed": str(stats),
            "numels": [p.numel() for p in module.parameters()],
        }  # fmt: skip
        lines.found, writer.scalars = [], []
    return found


def several(rank, num_ranks):
    """Two models in one backward; a model of some ranks; a second backward of one forward."""
    found = {}
    pairs = [setup("onebit"), setup("topk(ratio=0.05)", "ring")]
    for step in range(4):
        for _, _, optimizer, _ in pairs:
            optimizer.zero_grad()
        sum(loss_of(ddp, rank, step) for _, ddp, _, _ in pairs).backward()
        for _, _, optimizer, _ in pairs:
            optimizer.step()
    found["joint"] = [bits(module) for module, *_ in pairs]
    found["steps"] = [sync.step for *_, sync in pairs]
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        module = mlp()
        ddp = wrap(module, process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        sync = hipress.attach(ddp, "onebit")
        train(ddp, optimizer, rank, range(3))
        state = sync.state_dict()
        sync.detach()
        train(ddp, optimizer, rank, range(2))
        found["group"] = [bits(module), state["world_size"], sync.step]
    return found


# --- what codecs are shown ------------------------------------------------------------------------


def decayed(rank, num_ranks):
    """Whether a codec that decays weights was shown those of this step, in every step."""
    same = []
    module, ddp, optimizer, sync = setup("dgc(ratio=0.05, weight_decay=0.1)", lr=0.5)
    for step in range(4):
        backward(ddp, optimizer, rank, step)
        seen = []
        for key, state in sync.engine.states:
            if "weight" in state:
                parameter = sync.adapter.weights(key.name)
                seen.append(torch.equal(state["weight"], parameter[key.start : key.stop]))
        same.append(seen)
        before = bits(module)
        optimizer.step()
        assert bits(module) != before
    return same


def scaled(rank, num_ranks, codec):
    """Bits of a model that is trained without a loss scale, and with one."""
    found = []
    for scale in (1.0, 1024.0):
        module = mlp()
        ddp = wrap(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        hipress.attach(ddp, codec, scaler=scaler)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(ddp, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(bits(module))
    return found


# --- errors ---------------------------------------------------------------------------------------


def twice(rank, num_ranks):
    """A second backward on top of the means, with codecs that apply momentum and another."""
    found = {}
    for codec in ("momentum(ef(onebit))", "dgc(ratio=0.05)", "onebit"):
        module, ddp, optimizer, sync = setup(codec)
        train(ddp, optimizer, rank, range(2))
        error = kinds_of_error(lambda ddp=ddp: loss_of(ddp, rank, 2).backward())
        found[codec] = [error, sync.step]
    return found


def refused(rank, num_ranks):
    """Calls that are refused, the same on all ranks; and that the model trains after each."""
    found = {}
    module, ddp, optimizer, sync = setup("onebit")
    calls = {
        "frozen": lambda: hipress.attach(mlp().requires_grad_(False)),
        "parallel": lambda: hipress.attach(nn.DataParallel(mlp())),
        "text": lambda: hipress.attach("model"),
        "codec": lambda: hipress.attach(wrap(mlp()), codec="onebti"),
        "kind": lambda: hipress.attach(wrap(mlp()), codec=3),
        "strategy": lambda: hipress.attach(wrap(mlp()), strategy="rng"),
        "exclude": lambda: hipress.attach(wrap(mlp()), exclude="3.wieght"),
        "include": lambda: hipress.attach(wrap(mlp()), include=["head.*"]),
        "plan": lambda: hipress.attach(
            wrap(mlp()), plan=Plan(gradients={"head.weight": Decision(codec="onebit")})
        ),
        "both": lambda: hipress.attach(wrap(mlp()), codec="onebit", plan=Plan()),
        "warmup": lambda: hipress.attach(wrap(mlp()), warmup_steps=-1),
        "optimizer": lambda: hipress.attach(wrap(mlp()), optimizer=3),
        "scaler": lambda: hipress.attach(wrap(mlp()), scaler=3),
        "writer": lambda: hipress.attach(wrap(mlp()), writer=3),
        "twice": lambda: hipress.attach(ddp, "int8"),
    }
    for name, call in calls.items():
        found[name] = kinds_of_error(call)
    train(ddp, optimizer, rank, range(3))
    found["after"] = [bits(module), sync.step]
    rewrapped = wrap(module)
    other = hipress.attach(rewrapped, "int8")
    train(rewrapped, optimizer, rank, range(2))
    found["rewrapped"] = [bits(module), other.step]
    return found


def different(rank, num_ranks):
    """Ranks are given different things; each is an AgreementError on all."""
    odd = rank == 1
    return {
        "codec": kinds_of_error(lambda: setup("int8" if odd else "onebit")),
        "strategy": kinds_of_error(lambda: setup("onebit", "ring" if odd else "ps")),
        "warmup": kinds_of_error(lambda: setup("onebit", warmup_steps=2 if odd else 0)),
        "model": kinds_of_error(
            lambda: hipress.attach(wrap(Named("third" if odd else "second")), "onebit")
        ),
        "plan": kinds_of_error(
            lambda: hipress.attach(
                wrap(mlp()), plan=Plan(epoch=int(odd), gradients={"3.weight": Decision()})
            )
        ),
        "exclude": kinds_of_error(lambda: setup("onebit", exclude="3" if odd else ())),
    }


def drifted(rank, num_ranks):
    """One rank's parameter is changed by hand; the check says which, when it comes."""
    module, ddp, optimizer, sync = setup("onebit", check_every=2)
    train(ddp, optimizer, rank, range(3))
    if rank == 1:
        with torch.no_grad():
            module[3].weight[5, 5] += 1e-3
    before = kinds_of_error(lambda: backward(ddp, optimizer, rank, 3))
    optimizer.step()
    return [before, kinds_of_error(lambda: backward(ddp, optimizer, rank, 4))]


def unfrozen(rank, num_ranks):
    """A parameter is unfrozen when DDP holds the model already, and so is not synchronised."""
    module = mlp()
    module[3].bias.requires_grad_(False)
    ddp = wrap(module)
    sync = hipress.attach(ddp, "onebit", check_every=1)
    module[3].bias.requires_grad_(True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    backward(ddp, optimizer, rank, 0)
    optimizer.step()
    by_hand = replicas.digests(module.named_parameters())["3.bias"]
    return [sync.step, by_hand, kinds_of_error(lambda: backward(ddp, optimizer, rank, 1))]


def dies(rank, num_ranks, id, codec, strategy):
    """A rank ends in mid-training, in the midst of a backward; the others get an error."""
    module, ddp, optimizer, sync = setup(codec, strategy)
    train(ddp, optimizer, rank, range(2))
    step = 2
    while True:
        if rank == 2 and step == 5:
            loss = loss_of(ddp, rank, step)
            tell(id=id, rank=rank, died=time.monotonic())
            module[3].weight.register_hook(lambda gradient: os._exit(3))
            loss.backward()
        backward(ddp, optimizer, rank, step)
        optimizer.step()
        step += 1


if __name__ == "__main__":
    warm_up(
        "none", "onebit", "int8", "topk(ratio=0.05)", "dgc(ratio=0.05)", "terngrad",
        "randomk(ratio=0.1)", "momentum(ef(onebit))", "dgc(ratio=0.05, weight_decay=0.1)",
    )  # fmt: skip
    main(globals(), thorough=False, limit_s=300.0)
