"""Training with `DistributedOptimizer`, for ranks (see `tests/scenarios.py`).

A scenario plays several cases one after the other in the same ranks: each makes its own model and
optimizer, and returns what the tests compare.
"""

import atexit
import copy
import gc
import io
import logging
import random
import sys
import threading
import time
import traceback
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch._dynamo  # once here: the first optimizer of every scenario would, for seconds
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint

import hipress
import hipress.torch
from hipress.plan import Plan
from hipress.session import auto as session_auto
from hipress.session import planner, setup
from hipress.session.policy import Limits
from hipress.session.timing import StepClock
from hipress.torch.exchanger import _finish_all
from hipress.torch.pending import PendingParameter

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main, tell
from tests.torch.scripts.models import digest, mean_of, warm_up, wrap

SLICE_BYTES = 2**14
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "exchange": lambda groups: hipress.torch.AdamW(
        groups, lr=1e-3, refresh_warmup=2, refresh_every=3
    ),
}


# --- a model in which everything happens ----------------------------------------------------------


class Rich(nn.Module):
    """Layers of many kinds, some of which are read by others; `never` takes part in nothing.

    Args:
        norm: With a BatchNorm.
        never: With a layer that no rank uses.
    """

    def __init__(self, norm=False, never=True):
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8)
        self.a = nn.Linear(8 * 25, 160)
        self.emb = nn.Embedding(10, 160)
        self.att = nn.MultiheadAttention(160, 4, batch_first=True)  # reads out_proj's weight
        self.drop = nn.Linear(160, 160)
        self.b = nn.Linear(160, 10)
        self.tied = nn.Linear(10, 160, bias=False)
        self.tied.weight = nn.Parameter(torch.randn(160, 10))
        self.again = nn.Linear(10, 160, bias=False)
        self.again.weight = self.tied.weight
        if never:
            self.never = nn.Linear(80, 80)
        self.checkpoints = False

    def trunk(self, x, y):
        h = functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).flatten(1)
        return torch.relu(self.a(h)) + self.emb(y)

    def forward(self, x, y, use=True):
        if self.checkpoints:
            h = checkpoint(self.trunk, x, y, use_reentrant=False)[:, None]
        else:
            h = self.trunk(x, y)[:, None]
        h = self.att(h, h, h)[0][:, 0]
        if use:
            h = h + torch.tanh(self.drop(h))
        o = self.b(h) + self.b(torch.tanh(self.again(self.b(h)) + self.tied(self.b(h))))
        # The weight of another module, without that module.
        return functional.linear(torch.tanh(functional.linear(o, self.tied.weight)), self.b.weight)


def batch(rank, step):
    generator = torch.Generator().manual_seed(1009 * step + rank)
    return (
        torch.randn(6, 1, 12, 12, generator=generator),
        torch.randint(0, 10, (6,), generator=generator),
    )


class Run:
    """A model with its optimizer and exchange, and how it is trained.

    Args:
        kind: `ddp` and attach, `own`, or `barrier`: with a `synchronize` after every step.
        delays: Seconds that a message may be held up at most.
    """

    def __init__(
        self, kind, rank, *, opt="sgd", codec="none", strategy="ps", schedule=None, delays=0.0,
        model=None, groups=None, norm=False, find=True, scaler=None, **options,
    ):  # fmt: skip
        self.kind, self.rank, self.losses, self.scaler = kind, rank, [], scaler
        self.module = Rich(norm) if model is None else model
        make = OPTIMIZERS.get(opt, opt)
        inner = make(groups(self.module) if groups else self.module.parameters())
        self.inner = inner
        if kind == "ddp":
            self.model = wrap(self.module, find_unused_parameters=find, broadcast_buffers=False)
            self.optimizer = inner
            self.sync = hipress.attach(
                self.model, codec, strategy, optimizer=inner, scaler=scaler, **options
            )
        else:
            self.model = self.module
            how = [strategy, schedule, SLICE_BYTES, 2 * SLICE_BYTES]
            self.optimizer = hipress.torch.DistributedOptimizer(
                inner, self.module.named_parameters(), codec, *(how if codec != "auto" else ()),
                scaler=scaler, **options,
            )  # fmt: skip
            self.sync = self.optimizer.sync
            if delays:
                hold_up(self.sync.engine.transport, delays, rank)

    def loss(self, step, **options):
        x, y = batch(self.rank, step)
        found = functional.cross_entropy(self.model(x, y, **options), y)
        self.losses.append(found.item())
        return found

    def backward(self, step, **options):
        loss = self.loss(step, **options)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self):
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.kind == "barrier":
            self.optimizer.synchronize()

    def train(self, steps, after_backward=None, after_step=None, **options):
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step, **options)
            if after_backward:
                after_backward(step)
            self.step()
            if after_step:
                after_step(step)
        return self

    def pending(self):
        return sum(type(p) is PendingParameter for p in self.module.parameters())

    def bits(self):
        return digest(*self.module.parameters())

    def told(self):
        return {"losses": self.losses, "bits": self.bits()}


def hold_up(transport, most, rank):
    """Lets every message of this rank wait, some for long."""
    send, numbers = transport.send, random.Random(rank)

    def late(*args):
        time.sleep(most * numbers.random() ** 2)
        return send(*args)

    transport.send = late


class Lines(logging.Handler):
    """What is logged meanwhile."""

    def __enter__(self):
        self.lines = []
        self.logger = logging.getLogger("hipress")
        self.logger.addHandler(self)
        self.level_before = self.logger.level
        self.logger.setLevel(logging.INFO)
        return self.lines

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __exit__(self, *_):
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)


def error_of(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


# --- cases: what they return on each rank is compared by the tests --------------------------------


def both(rank, script, kinds=("ddp", "own"), delays=0.003, own=None, **options):
    """What DDP and the optimizer say that are used by one script."""
    found = {}
    for kind in kinds:
        more = {} if kind == "ddp" else {"delays": delays, **(own or {})}
        run = Run(kind, rank, **options, **more)
        extra = script(run)
        found[kind] = {"losses": run.losses, "bits": run.bits(), "extra": extra}
    return found


def equal(rank, opt, schedule, clear="before"):
    """A scheduler changes the rate right after each step."""

    def script(run):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        pending = 0
        for step in range(5):
            if clear == "before":
                run.optimizer.zero_grad()
            run.backward(step)
            run.step()
            pending += run.pending()
            if clear == "after":
                run.optimizer.zero_grad()
            elif clear == "module":
                run.module.zero_grad()
            elif clear == "zeros":
                run.optimizer.zero_grad(set_to_none=False)
            scheduler.step()
        return pending

    return both(rank, script, ("ddp", "own", "barrier"), opt=opt, own={"schedule": schedule})


class Offers(planner.Planner):
    """Offers schedules without measuring anything; the second one seems to be fastest."""

    def measure(self, session):
        return None

    def shortlist(self, profile):
        plans = [
            Plan(schedule="overlap", slice_bytes=2**14, credit_bytes=2**15),
            Plan(schedule="priority", slice_bytes=2**16, credit_bytes=2**17),
        ]
        return [SimpleNamespace(plan=one, step_s=0.01, label=one.schedule) for one in plans]


def auto(rank):
    """The units and the order of messages change while a model is trained. Every step begins where
    DDP begins it too: torch's own sums, of plain steps, round in another order."""
    seen, gaps = [], []

    class Clock(StepClock):
        def read(self, *, wait):
            seconds = {"fifo": 3.0, "overlap": 2.0, "priority": 1.0}[seen[-1][0]]
            return [seconds] * len(super().read(wait=wait))

    limits = Limits(block=(2, 3), control_every=(12, 24), control_share=0.5, window=4)
    with (
        mock.patch.object(setup, "Planner", Offers),
        mock.patch.object(session_auto, "Limits", lambda: limits),
        mock.patch.object(session_auto, "StepClock", Clock),
    ):
        run = Run("own", rank, codec="auto", codecs=["none"], delays=0.001)
        ddp = Run("ddp", rank)
        for step in range(40):
            run.train([step])
            ddp.train([step])
            run.optimizer.synchronize()
            seen.append([run.optimizer.schedule, run.sync.mode.current.value])
            pairs = list(zip(ddp.module.parameters(), run.module.parameters(), strict=True))
            gaps.append(max(float((p - q).detach().abs().max()) for p, q in pairs))
            with torch.no_grad():
                for p, q in pairs:
                    p.copy_(q)
                    if (state := run.inner.state.get(q)) is not None:
                        ddp.inner.state[p]["momentum_buffer"].copy_(state["momentum_buffer"])
    told = run.sync.stats().auto
    return {"seen": seen, "gap": max(gaps), "mode": told.mode, "bits": run.bits()}


def auto_measured(rank):
    """All is measured, planned and tried as for users."""
    run = Run("own", rank, codec="auto", codecs=["none"])
    for step in range(120):
        run.train([step])
        if run.sync.stats().auto.mode in ("plain", "compressed"):
            break
    run.train(range(121, 124))
    told = run.sync.stats().auto
    return {"mode": told.mode, "reason": told.reason, **run.told()}


def rates(rank):
    """Groups with their own rates, which change between step and forward."""

    def groups(module):
        split = [[], []]
        for k, parameter in enumerate(module.parameters()):
            split[k % 2].append(parameter)
        return [{"params": split[0]}, {"params": split[1], "lr": 0.2, "momentum": 0.5}]

    def script(run):
        def change(step):
            run.optimizer.param_groups[0]["lr"] *= 0.3
            run.optimizer.param_groups[1]["momentum"] += 0.1

        run.train(range(5), after_step=change)

    return both(rank, script, groups=groups)


def tensor_rate(rank):
    def script(run):
        run.train(range(4), after_step=lambda _: run.optimizer.param_groups[0]["lr"].mul_(0.5))

    return both(rank, script, opt=lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)))


def replicas(rank, codec, strategy="ps"):
    def script(run):
        run.train(range(6))

    return both(rank, script, ("own", "barrier"), codec=codec, strategy=strategy)


def exchange(rank):
    """AdamW exchanges momentum; steps 0, 1 and 4 refresh the second moment."""
    found = {}
    for kind in ("ddp", "own"):
        run = Run(kind, rank, opt="exchange", codec="onebit", delays=0.003 * (kind == "own"))
        bits = []
        sent = []
        for step in range(8):
            before = run.sync.engine.stats.sent_bytes
            run.train([step])
            bits.append(run.bits())
            sent.append(run.sync.engine.stats.sent_bytes - before)
        found[kind] = {"bits": bits, "losses": run.losses, "sent": sent}
    return found


def exchange_loads(rank):
    """AdamW of HiPress goes on with a state of torch's."""
    plain = Run("own", rank, opt="adamw").train(range(2))
    state = copy.deepcopy(plain.optimizer.state_dict())
    run = Run("own", rank, opt="exchange", codec="onebit", delays=0.003)
    run.optimizer.load_state_dict(state)
    return run.train(range(3)).bits()


def inner_cleared(rank):
    """Gradients are cleared through the wrapped optimizer, while momentum is on its way."""
    found = []
    for through_inner in (False, True):
        run = Run("own", rank, opt="exchange", codec="onebit", delays=0.003)
        for step in range(5):
            run.backward(step)
            run.step()
            (run.inner if through_inner else run.optimizer).zero_grad()
        found.append(run.bits())
    return found


def accumulation(rank):
    """Two passes without an exchange before each step, one of them in a nested no_sync."""

    def script(run):
        no_sync = run.model.no_sync if run.kind == "ddp" else run.optimizer.no_sync
        for step in range(4):
            run.optimizer.zero_grad()
            with no_sync():
                run.backward(10 * step)
                if run.kind != "ddp":
                    with no_sync():
                        pass
                run.backward(10 * step + 1)
            run.backward(10 * step + 2)
            run.step()

    return both(rank, script)


def two_backwards(rank):
    def script(run):
        for step in range(4):
            run.optimizer.zero_grad()
            run.backward(10 * step)
            run.backward(10 * step + 1)
            run.step()

    return both(rank, script)


def clip(rank, use=True):
    """use: A layer takes part on rank 1, too."""

    def script(run):
        def limit(_):
            norms.append(nn.utils.clip_grad_norm_(run.module.parameters(), 0.1).item())

        norms = []
        with Lines() as lines:
            run.train(range(4), limit, use=use or rank != 1)
        if run.kind == "own":
            said.append(sum("gradients are read" in line for line in lines))
        return norms

    said = []
    return {**both(rank, script), "said": said[0]}


def partly_used(rank, readers=()):
    """A layer takes part on rank 0 only; some ranks look at gradients before the step."""

    def script(run):
        def look(_):
            if rank in readers:
                run.extra = [p.grad.norm().item() for p in run.module.parameters()
                             if p.grad is not None]  # fmt: skip

        run.train(range(5), look, use=rank == 0)
        return digest(*(p.grad for p in run.module.parameters() if p.grad is not None))

    return both(rank, script)


def discarded(rank):
    """What a backward pass made is thrown away, and another one is made; a layer is used on rank 0
    only."""

    def script(run):
        for step in range(4):
            run.optimizer.zero_grad()
            run.backward(10 * step, use=rank == 0)
            run.optimizer.zero_grad()
            run.backward(10 * step + 1, use=rank == 0)
            run.step()

    return both(rank, script)


def frozen(rank):
    """A layer is frozen while training goes on."""

    def script(run):
        run.train(range(3))
        before = digest(run.module.a.weight)
        run.optimizer.zero_grad()
        run.module.a.requires_grad_(False)
        run.train(range(3, 6))
        return digest(run.module.a.weight) == before

    return both(rank, script, ("own", "barrier"))


def scaled(rank, fused=False):
    """The third step overflows on rank 1."""

    def script(run):
        def backward(step):
            loss = run.loss(step)
            if step == 2 and rank == 1:
                loss = loss * torch.inf
            run.scaler.scale(loss).backward()

        run.backward = backward
        scales = []
        run.train(range(5), after_step=lambda _: scales.append(run.scaler.get_scale()))
        return scales

    found = {}
    for kind in ("ddp", "own"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        opt = (lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)) if fused else "sgd"
        found |= both(rank, script, (kind,), opt=opt, scaler=scaler)
    return found


def closure(rank):
    def script(run):
        for step in range(4):

            def evaluate(step=step):
                run.optimizer.zero_grad()
                loss = run.loss(step)
                loss.backward()
                return loss

            run.extra = run.optimizer.step(evaluate).item()
        return run.extra

    return both(rank, script)


def checkpointed(rank):
    def script(run):
        run.module.checkpoints = True
        run.train(range(4))

    return both(rank, script)


def read(rank, how):
    """Something is read right after each step, while updates are on their way."""

    def script(run):
        def look(step):
            module = run.module
            pending.append(run.pending())
            if how == "evaluation":
                module.eval()
                with torch.no_grad():
                    found.append(module(*batch(0, 99)).sum().item())
                module.train()
            elif how == "inference":
                with torch.inference_mode():
                    found.append(module(*batch(0, 99)).sum().item())
            elif how == "average":
                averaged.update_parameters(module)
                found.append(digest(*averaged.module.parameters()))
            elif how == "state":
                found.append(digest(*module.state_dict().values()))
            elif how == "optimizer":
                state = run.optimizer.state_dict()["state"]
                found.append(digest(*(state[k]["momentum_buffer"] for k in sorted(state))))
            elif how == "copy":
                found.append(digest(*copy.deepcopy(module).parameters()))
            elif how == "saved":
                file = io.BytesIO()
                torch.save(module, file)
                file.seek(0)
                found.append(digest(*torch.load(file, weights_only=False).parameters()))
            elif how == "data":
                found.append(digest(*(p.data for p in module.parameters())))
            elif how == "vector":
                found.append(nn.utils.parameters_to_vector(module.parameters()).norm().item())
            elif how == "functional":
                with torch.no_grad():
                    given = dict(module.named_parameters())
                    out = torch.func.functional_call(module, given, batch(0, 99))
                found.append(out.sum().item())

        found, pending = [], []
        averaged = torch.optim.swa_utils.AveragedModel(
            run.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        run.train(range(4), after_step=look)
        return [found, sum(pending)]

    return both(rank, script, ("ddp", "own"), delays=0.006)


def autocast(rank):
    """Updates are made in a forward pass under autocast, by an optimizer with products."""

    def script(run):
        for step in range(4):
            run.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run.loss(step)
            loss.backward()
            run.step()

    return both(rank, script, ("own", "barrier"), opt=lambda p: torch.optim.Adafactor(p, lr=0.01))


def user_collectives(rank):
    """The program sums between backward and step, and a layer takes part on rank 0 only."""

    def script(run):
        sums = []

        def add(step):
            sums.append(float(mean_of(torch.tensor([float(rank + step)]))))

        run.train(range(4), add, use=rank == 0)
        return sums

    return both(rank, script, own={"codec": "auto", "codecs": ["none"]})


def gradients_read(rank):
    """Gradients are logged between backward and step, on rank 0 only."""

    def script(run):
        norms = []

        def log(_):
            if rank == 0:
                norms.append([p.grad.norm().item() for p in run.module.parameters()
                              if p.grad is not None])  # fmt: skip

        run.train(range(4), log)
        return norms

    return both(rank, script)


def norms(rank):
    """Running statistics of a BatchNorm, and the same after an evaluation."""
    run = Run("own", rank, norm=True, delays=0.003).train(range(4))
    values = dict(run.module.named_buffers())
    own = Rich(norm=True)
    own(*batch(rank, 0))
    mean = mean_of(own.norm.running_mean)
    first = Run("own", rank, norm=True).train([0]).module.norm.running_mean
    double = Rich(norm=True)
    double.register_buffer("wide", torch.full((2,), float(rank), dtype=torch.float64))
    wide = Run("own", rank, model=double).train(range(2)).module.wide
    return {"bits": digest(*values.values()), "parameters": run.bits(), "wide": wide.tolist(),
            "gap": float((first - mean).abs().max())}  # fmt: skip


def micro_batches(rank):
    """Two forward and backward passes for each step, without no_sync()."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    alone = copy.deepcopy(model)
    optimizer = hipress.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters()
    )
    alone.load_state_dict(model.state_dict())  # the parameters of rank 0
    for step in range(6):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).pow(2).mean().backward()
        alone(x)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.synchronize()
    mean = mean_of(alone[1].running_mean)
    return float((model[1].running_mean - mean).abs().max())


def parts(rank):
    """Two parts of a model are called one after the other; no module holds both."""
    torch.manual_seed(7)
    encoder = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
    decoder = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    both = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = hipress.torch.DistributedOptimizer(
        torch.optim.SGD(both.parameters(), lr=0.1), both.named_parameters()
    )
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        decoder(encoder(x)).pow(2).mean().backward()
        optimizer.step()
    return [digest(*both.parameters()), digest(*both.buffers())]


class Forked(nn.Module):
    """Two layers that may be called in either order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, x, first):
        one = self.a(x) if first else self.b(x)
        return (one + (self.b(x) if first else self.a(x))).pow(2).mean()


def other_order(rank, schedule):
    """In the first steps each rank calls layers in an order of its own."""
    module = Forked()
    optimizer = hipress.torch.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), module.named_parameters(),
        schedule=schedule, slice_bytes=SLICE_BYTES,
    )  # fmt: skip
    hold_up(optimizer.sync.engine.transport, 0.003, rank)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(100 * step + rank))
        module(x, (rank + step) % 2 == 0).backward()
        optimizer.step()
    orders = [unit.order for unit in optimizer._exchanger._sequence]
    return [digest(*module.parameters()), orders]


def two_models(rank):
    """Each has its own optimizer, as a generator and a discriminator do."""
    torch.manual_seed(7)
    models = [nn.Linear(96, 96), nn.Linear(96, 96)]
    found = {}
    for kind in ("alone", "together"):
        parts = copy.deepcopy(models)
        made = [
            hipress.torch.DistributedOptimizer(
                torch.optim.SGD(part.parameters(), lr=0.1), part.named_parameters()
            )
            for part in parts
        ]
        for step in range(4):
            x = torch.randn(8, 96, generator=torch.Generator().manual_seed(100 * step + rank))
            for k, optimizer in enumerate(made):
                for one in made if kind == "together" else [optimizer]:
                    one.zero_grad()
                if kind == "together":  # also through the other model
                    parts[1 - k].requires_grad_(False)
                    (parts[k](x).pow(2).mean() + 0 * parts[1 - k](x).sum()).backward()
                    parts[1 - k].requires_grad_(True)
                else:
                    parts[k](x).pow(2).mean().backward()
                optimizer.step()
        found[kind] = digest(*(p for part in parts for p in part.parameters()))
    return found


def hooks(rank):
    """Hooks of the wrapped optimizer: how often each was called, and what one saw."""

    def script(run):
        calls = []  # a hook before the step sees gradients of this rank, so only counts
        run.inner.register_step_pre_hook(lambda *_: calls.append("before"))
        run.train(range(2))
        run.inner.register_step_post_hook(lambda *_: calls.append(digest(*run.module.parameters())))
        run.train(range(2, 4))
        return calls

    return both(rank, script)


def schedulers_of_inner(rank):
    """A scheduler was made for the optimizer before it was wrapped; it warns of nothing."""
    import warnings

    module = Rich()
    inner = OPTIMIZERS["sgd"](module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = hipress.torch.DistributedOptimizer(inner, module.named_parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            functional.cross_entropy(module(x, y), y).backward()
            optimizer.step()
            scheduler.step()
    return [[str(one.message) for one in said], inner.param_groups[0]["lr"]]


def odd_steps(rank):
    """A step without backward, and two steps in a row."""

    def script(run):
        run.step()
        run.train(range(2))
        run.step()
        run.train(range(2, 4))
        run.optimizer.zero_grad()
        run.step()

    return both(rank, script)


def retried(rank):
    """Backward fails on all ranks, late, and is tried again."""

    def script(run):
        def fail(_):
            raise ValueError("on purpose")

        run.train(range(2))
        run.optimizer.zero_grad()
        handle = run.module.conv.weight.register_hook(fail)
        said = error_of(lambda: run.backward(2))
        handle.remove()
        if run.kind == "ddp":  # which cannot go on, so it goes on as if nothing had happened
            return said
        run.losses.pop()
        run.train(range(2, 4))
        return said

    found = both(rank, script, ("own",))
    return {"own": found["own"], **both(rank, lambda run: run.train(range(4)) and None, ("ddp",))}


def alternating(rank):
    """All ranks leave the same layer out in every other step; momentum must not move it."""

    def script(run):
        return [
            digest(*run.train([step], use=step % 2 == 0).module.drop.parameters())
            for step in range(5)
        ]

    return both(rank, script)


def unused_residuals(rank):
    """All ranks leave a compressed layer out for some steps, in which its residual is sent."""

    def script(run):
        for step in range(8):
            run.train([step], use=step % 4 == 0)

    return both(rank, script, codec="onebit")


def left_out_and_saved(rank):
    return left_out(rank, saves=True)


def left_out(rank, saves=False):
    """Rank 0 alone skips a batch whose backward pass has failed."""
    run = Run("own", rank, delays=0.002).train(range(2))

    def fail(_):
        raise MemoryError("on purpose")

    def script():
        if rank == 0:
            handle = run.module.conv.weight.register_hook(fail)
            with suppress(MemoryError):
                run.train([2])
            handle.remove()
            if saves:
                run.optimizer.state_dict()
        run.train(range(3 if rank == 0 else 2, 6))

    return error_of(script)


class Buffered(nn.Module):
    """Two BatchNorms, a buffer that forward replaces, and one that nothing changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.a = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.b = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("mask", torch.full((2,), torch.finfo(torch.float32).min))

    def forward(self, x):
        h = self.b(self.a(x))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0) + x.mean()
        return h


def buffers(rank):
    """Ranks call parts of a model in orders of their own before they train it."""
    model = Buffered()
    optimizer = hipress.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    if rank == 0:
        model.eval()
        model.b(torch.ones(2, 8))
        model.train()
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x + torch.arange(8)).pow(2).mean().backward()
        optimizer.step()
    near = [float((model.a[1].running_mean - model.b[1].running_mean).abs().max())]
    return {"bits": digest(*model.parameters(), *model.buffers()), "near": near[0],
            "mask": model.mask.tolist(), "mean": float(model.mean.abs().sum())}  # fmt: skip


def watched(rank):
    """Threads of rank 0 read parameters all the time."""

    def script(run):
        is_over, errors = threading.Event(), []

        def look():
            while not is_over.is_set():
                try:
                    for parameter in run.module.parameters():
                        float(parameter.detach().sum())
                except Exception as error:
                    errors.append(repr(error))
                time.sleep(0.001)

        threads = [threading.Thread(target=look) for _ in range(2 if rank == 0 else 0)]
        for thread in threads:
            thread.start()
        run.train(range(12))
        is_over.set()
        for thread in threads:
            thread.join()
        return errors

    return both(rank, script, ("own", "barrier"))


def interrupted(rank):
    """An update fails, as with Ctrl-C in a notebook, and is made by the next read."""

    def script(run):
        run.train(range(2))
        run.optimizer.zero_grad()
        run.backward(2)
        run.step()
        if run.kind == "own":
            exchanger = run.optimizer._exchanger
            with mock.patch.object(exchanger, "_step_inner", side_effect=KeyboardInterrupt) as one:
                with suppress(KeyboardInterrupt):
                    run.loss(99)
            was_called = one.called
        run.losses[3:] = []
        run.train(range(3, 5))
        return run.kind != "own" or was_called

    return both(rank, script, ("own", "barrier"), delays=0.01)


def inner_state(rank):
    """The wrapped optimizer is saved while updates are under way."""

    def script(run):
        run.train(range(3))
        saved = run.inner.state_dict()["state"]
        told = digest(*(saved[key]["momentum_buffer"] for key in sorted(saved)))
        run.train([3])
        state = run.optimizer.state
        known = [state[p]["momentum_buffer"] for p in run.module.parameters() if p in state]
        return [told, digest(*known)]

    return both(rank, script, ("own", "barrier"), delays=0.02)


def kept_gradients(rank):
    """The program compares gradients with those of the step before."""

    def script(run):
        before, products = [], []

        def compare(_):
            nonlocal before
            named = run.module.named_parameters()
            now = [p.grad for name, p in named if not name.startswith("never")]
            products.append([float((p * q).sum()) for p, q in zip(now, before, strict=False)])
            before = now

        run.train(range(4), compare)
        return products

    return both(rank, script)


def clipping_hook(rank):
    """A hook that runs before steps clips gradients."""

    def script(run):
        parameters = list(run.module.parameters())

        def clip(*_):
            nn.utils.clip_grad_norm_(parameters, 0.1)

        run.inner.register_step_pre_hook(clip)
        run.train(range(4))

    return both(rank, script)


def global_hooks(rank):
    """Hooks of all optimizers are called."""

    def script(run):
        calls = []
        handles = [
            register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
            register_optimizer_step_post_hook(lambda *_: calls.append("after")),
        ]
        run.train(range(2))
        for handle in handles:
            handle.remove()
        return calls

    return both(rank, script)


def made_again(rank):
    """An optimizer takes the place of another one, which may or may not be gone."""
    model = Rich(norm=True)
    said, first = [], None
    for step in range(3):
        inner = OPTIMIZERS["sgd"](model.parameters())
        own = hipress.torch.DistributedOptimizer(inner, model.named_parameters())
        for k in range(2):
            own.zero_grad()
            x, y = batch(rank, 2 * step + k)
            functional.cross_entropy(model(x, y), y).backward()
            own.step()
        if first is None:
            first = own
    own.synchronize()
    said.append(error_of(first.step))
    hooks = max(len(part._forward_pre_hooks) for part in model.modules())
    return {"bits": digest(*model.parameters()), "said": said, "hooks": hooks}


def transformed(rank):
    """The first read of a step is under a transform of torch.func, or is traced."""

    def script(run):
        found = []
        for step in range(4):
            run.optimizer.zero_grad()
            run.backward(step)
            run.step()
            x = torch.ones(3, 160)
            if step % 2:
                total = torch.func.vmap(torch.func.grad(lambda v: run.module.b(v).sum()))(x)
            else:
                total = torch.jit.trace(run.module.b, x)(x)
            found.append(float(total.sum()))
        return found

    return both(rank, script, delays=0.01)


def several_names(rank):
    """A parameter has two names."""
    model = Rich()
    inner = OPTIMIZERS["sgd"](model.parameters())
    named = model.named_parameters(remove_duplicate=False)
    own = hipress.torch.DistributedOptimizer(inner, named)
    x, y = batch(rank, 0)
    functional.cross_entropy(model(x, y), y).backward()
    own.step()
    own.synchronize()
    return digest(*model.parameters())


def read_by_one(rank):
    """Rank 0 alone reads gradients, and then all ranks call a collective of the program."""

    def script(run):
        found = []

        def log(step):
            if rank == 0:
                found.append(run.module.b.weight.grad.norm().item())
            found.append(float(mean_of(torch.tensor([float(rank + step)]))))

        for step in range(4):
            run.train([step], log, use=rank == 0 or step < 2)
        return found

    return both(rank, script)


def refused(rank):
    """What cannot work, and what is said to that."""

    def moved():
        run = Run("own", rank).train(range(2))
        run.module.double()
        x, y = batch(rank, 3)
        run.optimizer.zero_grad()
        functional.cross_entropy(run.module(x.double(), y), y).backward()
        run.optimizer.step()
        run.optimizer.synchronize()

    def unfrozen():
        module = Rich()
        module.a.requires_grad_(False)
        run = Run("own", rank, model=module).train(range(2))
        run.module.a.requires_grad_(True)
        run.train(range(2, 4))

    def added():
        module, extra = Rich(), nn.Parameter(torch.ones(5))
        run = Run("own", rank, model=module).train(range(2))
        run.inner.add_param_group({"params": [extra]})
        run.backward(2)
        extra.grad = torch.ones(5)
        run.optimizer.step()

    def local():
        run = Run("own", rank).train(range(2))
        run.optimizer.zero_grad()
        with run.optimizer.no_sync():
            run.backward(2)
        run.optimizer.step()

    def sparse():
        module = nn.Embedding(1000, 64, sparse=True)
        optimizer = hipress.torch.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1), module.named_parameters()
        )
        module(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    def wrapped():
        module = nn.Linear(64, 64)
        optimizer = hipress.torch.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1), module.named_parameters()
        )
        wrap(module)(torch.ones(1, 64))
        del optimizer

    def read_in_backward():
        run = Run("own", rank)
        run.module.b.weight.register_post_accumulate_grad_hook(lambda p: p.grad.norm())
        run.train([0])

    cases = (moved, unfrozen, added, local, sparse, wrapped, read_in_backward)
    return {case.__name__: error_of(case) for case in cases}


def dropped(rank):
    """The last step is under way when everything is dropped; models outlive their optimizers."""

    def alive():
        gc.collect()
        return sorted(one.name for one in threading.enumerate() if one.name.startswith("hipress-"))

    before = alive()
    known = []
    for _ in range(2):
        run = Run("own", rank, delays=0.01).train(range(2))
        known.append(weakref.ref(run.sync.engine))
        module, pending = run.module, run.pending()
        del run
        gc.collect()
        kept = digest(*module.parameters())
        del module
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (len(alive()) > len(before)):
        time.sleep(0.1)
    left = [name for name in alive() if name not in before]
    return {"left": left, "engines": [one() is None for one in known], "kept": kept,
            "pending": pending}  # fmt: skip


def stress(rank, seeds, codec="none"):
    """Losses and bits of runs with random delays per rank and message, against those without."""
    found = []
    for seed in seeds:
        torch.manual_seed(0)
        schedule = ("fifo", "priority", "overlap")[seed % 3]
        strategy = ("ps", "ring")[seed // 3 % 2]
        options = {"schedule": schedule, "strategy": strategy, "codec": codec}
        quick = Run("barrier", rank, **options).train(range(3))
        slow = Run("own", rank, delays=0.0, **options)
        hold_up(slow.sync.engine.transport, 0.004, 100 * seed + rank)
        numbers = random.Random(1000 * seed + rank)
        for module in slow.module.modules():  # and the layers of this rank
            module.register_forward_pre_hook(
                lambda *_, numbers=numbers: time.sleep(0.001 * numbers.random())
            )
        slow.train(range(3))
        found.append([quick.told() == slow.told(), slow.bits()])
    return found


def ends(rank, num_ranks, id):
    """The last step is under way when the program ends; ranks are not equally fast."""
    run = Run("own", rank, delays=0.03)

    def at_exit():  # torch's own handlers are registered later, and so run before
        waiting = run.pending()  # before the bits, whose read would make the updates
        tell(id=id, rank=rank, left=run.bits(), waiting=waiting)

    atexit.unregister(_finish_all)
    atexit.register(at_exit)
    atexit.register(_finish_all)
    run.train(range(3))
    time.sleep(0.3 * rank)
    return run.pending()


def expected(rank, steps):
    """Bits after some steps of the barrier version."""
    return Run("barrier", rank).train(range(steps)).bits()


def compiled(rank, num_ranks):
    """A model that is compiled before the first step, and one after it."""
    torch.set_num_threads(1)
    found = {}
    for when in (0, 2):
        for kind in ("barrier", "own"):
            torch._dynamo.reset()
            run = Run(kind, rank, delays=0.003)
            for step in range(5):
                if step == when and kind == "own":
                    run.model = torch.compile(run.module, backend="eager")
                run.train([step])
            found[f"{when} {kind}"] = run.told()
    return found


def first_half(rank, num_ranks, file):
    """Saves in the midst of a step what a checkpoint needs."""
    torch.set_num_threads(1)
    run = Run("own", rank, opt="exchange", codec="onebit", delays=0.003).train(range(4))
    state = {
        "model": run.module.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "sync": run.sync.state_dict(),
    }
    if rank == 0:
        torch.save(state, file)
    return run.bits()


def second_half(rank, num_ranks, file):
    torch.set_num_threads(1)
    state = torch.load(file, weights_only=True)
    run = Run("own", rank, opt="exchange", codec="onebit", delays=0.003)
    run.module.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.sync.load_state_dict(state["sync"])
    first = run.bits()
    return [first, run.sync.step, run.train(range(4, 7)).bits()]


def one_process(rank, num_ranks):
    """With one process it is the wrapped optimizer."""
    module, plain = Rich(), Rich()
    inner = OPTIMIZERS["sgd"](module.parameters())
    optimizer = hipress.torch.DistributedOptimizer(inner, module.named_parameters(), "onebit")
    other = OPTIMIZERS["sgd"](plain.parameters())
    for step in range(3):
        for model, one in ((module, optimizer), (plain, other)):
            x, y = batch(0, step)
            with getattr(one, "no_sync", nullcontext)():
                functional.cross_entropy(model(x, y), y).backward()
            one.step()
            one.zero_grad()
    optimizer.synchronize()
    return digest(*module.parameters()) == digest(*plain.parameters())


def play_cases(rank, num_ranks, cases):
    """Plays cases by name and arguments; what each returns, or its error."""
    torch.set_num_threads(1)
    found = {}
    for key, (name, options) in cases.items():
        try:
            found[key] = globals()[name](rank, **options)
        except Exception as error:
            found[key] = {"error": [type(error).__name__, str(error), traceback.format_exc()]}
    return found


if __name__ == "__main__":
    warm_up("onebit", "topk(ratio=0.05)", "int8")
    main(globals(), thorough=False, limit_s=1400.0)
