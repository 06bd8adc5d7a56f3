"""Scenarios of `attach(model)` without a codec, for a rank of a lab (see `tests/scenarios.py`).

Plans come from a list and step times from a table, so that what is fast is known; real are DDP,
the exchange, and how ranks agree.
"""

import contextlib
import functools
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._dynamo  # once here: the first optimizer of every scenario would, for seconds
import torch.distributed as dist

import hipress
import hipress.torch
from hipress.plan import Decision, Plan
from hipress.secopa.search import search
from hipress.session import auto, planner, policy, setup
from hipress.session.adapter import StepObserver
from hipress.session.policy import Limits
from hipress.session.timing import StepClock

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main, tell
from tests.secopa import made_up
from tests.torch.scripts.models import (
    Halves,
    Ledger,
    batch,
    bits,
    kinds_of_error,
    loss_of,
    mlp,
    warm_up,
    wrap,
)

LAYERS = ("0.weight", "3.weight", "5.weight")
CALM = Limits(block=(2, 3), window=4)
LIMITS = Limits(block=(2, 3), control_every=(12, 24), control_share=0.5, window=4)


class Planner(planner.Planner):
    """Offers what it was given, one list for each time it measures; the last one for all others."""

    lists = []

    def measure(self, sync):
        sync.engine.agree("a measurement", {"step": sync.step})
        tell_probe(sync)
        self.num_measured = getattr(self, "num_measured", 0) + 1
        return None

    def shortlist(self, profile):
        made = self.lists[min(self.num_measured, len(self.lists)) - 1]
        if made == "fails":
            raise ValueError("no idea")
        return [candidate(*one) for one in made]


tell_probe = lambda sync: None  # noqa: E731  # replaced where a rank comes to harm there

TOPK = "topk(ratio=0.05)"
SLOW = "topk(ratio=0.01, exact=true)"


def candidate(codec, strategy="ps", step_s=0.01, names=LAYERS):
    gradients = {name: Decision(codec=codec, strategy=strategy) for name in names}
    plan = Plan(gradients=gradients)
    return SimpleNamespace(plan=plan, step_s=step_s, label=f"{codec} by {strategy}")


class Clock(StepObserver):
    """Step times by what a step is exchanged with, instead of those of the clock."""

    pace = sync = None
    now = 0.0

    def __init__(self, device):
        self.times = []
        Clock.now = 0.0

    def end(self):
        if Clock.sync is not None:
            self.times.append(Clock.pace(codec_of(Clock.sync), Clock.sync.step - 1))
            Clock.now += self.times[-1]

    def restart(self):
        self.times.clear()

    def resume(self):
        pass

    def read(self, *, wait):
        found = list(self.times)
        self.times.clear()
        return found


def codec_of(sync):
    """What a plan that is in use compresses with."""
    found = {made.codec for made in sync.plan.gradients.values()} if sync.plan else {None}
    return found.pop()


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        # The made-up plans have onebit, and most runs here pass no optimizer.
        if "depends on the optimizer" not in record.getMessage():
            self.found.append(record.getMessage())


class Run:
    """A model under auto whose steps seem to take as long as they are told to.

    Args:
        lists: The candidates of the planner, each time it is asked.
        pace: (codec of the plan in use or None, step) -> seconds.
    """

    def __init__(
        self, rank, lists, pace, module=None, ddp=None, limits=LIMITS, clock=Clock, **options
    ):
        Planner.lists = lists
        setup.Planner = Planner
        auto.Limits = lambda: limits
        auto.StepClock = clock
        auto.Policy = functools.partial(policy.Policy, clock=lambda: Clock.now)
        Clock.sync, Clock.pace = None, pace
        self.rank = rank
        self.module = module or mlp()
        self.ddp = wrap(self.module, **(ddp or {}))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        self.lines = Lines()
        logging.getLogger("hipress").handlers = [self.lines]
        self.sync = Clock.sync = hipress.attach(self.ddp, **options)
        Clock.pace = pace
        self.ledger = Ledger(self.module)
        self.seen = []
        """Of each step: the plan, what it compressed with, whether residuals were sent."""
        self.bits, self.modes = [], []
        self.flushed = False
        mode = self.sync.mode
        flush = mode.flush

        def noted(*, then):
            self.flushed = True
            flush(then=then)

        mode.flush = noted

    def step(self, step, make_loss=loss_of, micro=1):
        args = (self.rank, step)
        self.flushed = False
        for part in range(micro):
            self.ledger.expect(lambda model, part=part: make_loss(model, *args))
        self.optimizer.zero_grad()
        for part in range(micro):
            last = part == micro - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                make_loss(self.ddp, *args).backward()
        self.ledger.note()
        self.optimizer.step()
        made = self.sync.auto
        self.seen.append([made.stats().epoch, codec_of(self.sync), self.flushed])
        self.modes.append(made.stats().mode)
        self.bits.append(bits(self.module))

    def steps(self, count, first=0, **options):
        for step in range(first, first + count):
            self.step(step, **options)
        return self

    def told(self):
        return {
            "seen": self.seen,
            "modes": self.modes,
            "bits": self.bits,
            "gaps": self.ledger.gaps(self.sync.state_dict()),
            "lines": self.lines.found,
            "skipped": self.sync.skipped,
            "state_bytes": self.sync.stats().state_bytes,
            "auto": [self.sync.stats().auto.reason, self.sync.stats().auto.num_switches],
            "ratio": self.sync.stats().ratio,
        }


def follow(rank, num_ranks, cases):
    """Runs, one after the other."""
    found = {}
    for name, options in cases.items():
        run = _followed(rank, **options)
        found[name] = run.told()
        run.sync.engine.close()
    return found


def _followed(rank, lists, paces, steps, changes=None, micro=1, **options):
    """Steps of a run; what a step takes by codec, and from some step on."""

    def pace(codec, step):
        now = changes[1] if changes and step >= changes[0] else paces
        return now[codec or "plain"]

    return Run(rank, lists, pace, **options).steps(steps, micro=micro)


def unused(rank, num_ranks):
    """A parameter that takes part on all ranks, on one, on none, in turns, while plans change."""

    def pace(codec, step):
        return {None: 0.02, "onebit": 0.005 if step < 40 else 0.06}[codec]

    names = ("a.weight", "b.weight")
    lists = [[("onebit", "ps", 0.005, names)], []]
    run = Run(rank, lists, pace, Halves(), {"find_unused_parameters": True})

    def make_loss(model, rank, step):
        use = step % 4 == 0 or (step % 4 == 1 and rank == 0)
        return (model(batch(rank, step), use) - 1).pow(2).mean()

    return run.steps(80, make_loss=make_loss).told()


def amp(rank, num_ranks):
    """A loss scale that grows while plans change."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    def pace(codec, step):
        return {None: 0.02, "onebit": 0.005 if step < 35 else 0.06}[codec]

    run = Run(rank, [[("onebit",)], []], pace, scaler=scaler)
    for step in range(60):
        run.ledger.expect(lambda model, step=step: loss_of(model, rank, step))
        run.optimizer.zero_grad()
        run.flushed = False
        scaler.scale(loss_of(run.ddp, rank, step)).backward()
        scaler.unscale_(run.optimizer)
        run.ledger.note()
        scaler.step(run.optimizer)
        scaler.update()
        run.seen.append([None, codec_of(run.sync), run.flushed])
    state = run.sync.state_dict()
    gaps = run.ledger.gaps(state, scale=state["scale"])
    return {"seen": run.seen, "gaps": gaps, "scale": scaler.get_scale()}


def saved(rank, num_ranks, at):
    """Stops at some steps and goes on with a new exchange from each checkpoint; what is lost."""
    pace = lambda codec, step: {None: 0.02, "onebit": 0.005, "topk(ratio=0.05)": 0.01}[codec]  # noqa: E731
    lists = [[("onebit",), ("topk(ratio=0.05)", "ring")]]
    run = Run(rank, lists, pace)
    found = {}
    for step in range(max(at) + 1):
        run.step(step)
        if step not in at:
            continue
        state = run.sync.state_dict()
        left = {name: owed.double() for name, owed in state["owed"].items()}
        whole = run.ledger.gaps(state)
        again = Run(rank, lists, pace, limits=Limits(first_steps=9))
        again.sync.load_state_dict(state)
        loaded = again.sync.step
        again.steps(3, first=step + 1)
        Clock.sync = run.sync
        found[str(step)] = {
            "mode": run.modes[-1],
            "codec": codec_of(run.sync),
            "held": max(float(owed.abs().max()) for owed in left.values()),
            "whole": whole,
            "gaps": again.ledger.gaps(again.sync.state_dict(), carried=left),
            "step": loaded,
            "unpaid": sorted(again.sync.owed),
            "names": sorted(state["owed"]),
            "keys": [sorted(state["gradients"]), sorted(state["ranks"]), sorted(state["mean"])],
        }
        again.sync.engine.close()
    return found


def taken_over(rank, num_ranks):
    """The checkpoint of a run with a codec goes to auto, is loaded while a plan is in use too."""
    module = mlp()
    ddp = wrap(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sync = hipress.attach(ddp, "onebit")
    for step in range(4):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    state = sync.state_dict()
    left = {name: mean["residual"].double() for name, mean in state["mean"].items()}
    pace = lambda codec, step: {None: 0.02, "onebit": 0.005}[codec]  # noqa: E731
    found = []
    for before in (0, 30):
        run = Run(rank, [[("onebit",)]], pace, limits=CALM).steps(before)
        run.ledger = Ledger(run.module)
        run.sync.load_state_dict(state)
        run.steps(30, first=before)
        found.append([run.ledger.gaps(run.sync.state_dict(), carried=left), codec_of(run.sync)])
        run.sync.engine.close()
    return {"found": found, "held": max(float(one.abs().max()) for one in left.values())}


def detached(rank, num_ranks):
    """Detached while a plan is in use."""
    pace = lambda codec, step: {None: 0.02, "onebit": 0.005}[codec]  # noqa: E731
    run = Run(rank, [[("onebit",)]], pace, limits=CALM).steps(30)
    codec = codec_of(run.sync)
    run.sync.detach()
    run.steps(4, first=30)
    return {"codec": codec, "gaps": run.ledger.gaps(), "bits": bits(run.module)}


def clocks(rank, num_ranks):
    """With real clocks: what each rank keeps of its steps, and hooks that detach leaves."""
    run = Run(rank, [[("onebit",)]], None, limits=CALM, clock=StepClock).steps(40)
    clock = run.sync.auto._clock
    kept = 0 if clock is None else len(clock._steps)
    early = Run(rank, [[("onebit",)]], None, clock=StepClock).steps(2)
    early.sync.detach()
    early.steps(2, first=2)
    hooks = len(early.ddp._forward_pre_hooks) + len(early.ddp._forward_hooks)
    return {"kept": kept, "hooks": hooks, "bits": [bits(run.module), bits(early.module)]}


def breaks(rank, num_ranks, id):
    """Rank 2 fails while all measure, and lives on; the others get an error."""
    global tell_probe

    def fail(_):
        tell(id=id, rank=rank, failed=time.monotonic())
        raise ValueError("no such kernel")

    if rank == 2:
        tell_probe = fail
    run = Run(rank, [[("onebit",)]], lambda codec, step: 0.02 if codec is None else 0.01)
    try:
        run.steps(12)
    except ValueError:
        time.sleep(6)
        raise


def dies(rank, num_ranks, id, where):
    """Rank 2 ends while all measure, or in a trial; the others get an error."""
    global tell_probe

    def end(*_):
        tell(id=id, rank=rank, died=time.monotonic())
        os._exit(3)

    if rank == 2 and where == "measure":
        tell_probe = end
    pace = lambda codec, step: 0.02 if codec is None else 0.01  # noqa: E731
    run = Run(rank, [[("onebit",), ("int8",)]], pace)
    step = 0
    while True:
        mode = run.sync.stats().auto.mode
        is_plain = run.sync.plan is None
        wanted = {"plain": ("measure", True), "trial": ("trial", False)}.get(where)
        if rank == 2 and wanted == (mode, is_plain) and step > 2:
            run.module[3].weight.register_hook(end)
        run.optimizer.zero_grad()
        loss_of(run.ddp, rank, step).backward()
        run.optimizer.step()
        step += 1


def refused(rank, num_ranks):
    """Arguments that do not fit."""

    def attach(**options):
        return kinds_of_error(lambda: hipress.attach(wrap(mlp()), **options))

    found = {
        "codecs": attach(codecs="int8"),
        "empty": attach(codecs=[]),
        "unknown": attach(codecs=["int9"]),
        "beside": attach(codec="int8", codecs=["int8"]),
        "budget": attach(codec="int8", budget=0.1),
        "strategy": attach(codec="auto", strategy="ring"),
        "plan": attach(codec="auto", plan={"gradients": {}}),
        "hook": kinds_of_error(lambda: hipress.torch.comm_hook(codec="auto")),
        "differ": attach(codecs=["int8"] if rank else ["bf16"]),
    }  # fmt: skip
    return found


def pair(rank, num_ranks):
    """Two models, the second trained between forward and backward of the first; real clocks.

    Their exchange seems to take a while: the plan of the first pays, that of the second does not.
    """
    Planner.lists = [[("onebit",)]]
    setup.Planner, auto.Limits, auto.StepClock = Planner, lambda: CALM, StepClock

    def attach(plain_s, plan_s):
        ddp = wrap(mlp())
        sync = hipress.attach(ddp)

        def exchange(gradient):
            time.sleep(plain_s if sync.plan is None else plan_s)

        ddp.module[0].weight.register_hook(exchange)  # the last to be ready
        return ddp, sync, torch.optim.SGD(ddp.parameters(), lr=0.01)

    first, second = attach(0.1, 0.03), attach(0.1, 0.3)
    for step in range(70):
        loss = (first[0](batch(rank, step)) - 1).pow(2).mean()
        for one, make_loss in (
            (second, lambda step=step: loss_of(second[0], rank, step)),
            (first, lambda loss=loss: loss),
        ):
            one[2].zero_grad()
            make_loss().backward()
            one[2].step()
    return {
        "modes": [one[1].stats().auto.mode for one in (first, second)],
        "reasons": [one[1].stats().auto.reason for one in (first, second)],
        "bits": [bits(one[0].module) for one in (first, second)],
    }


def mixed(rank, num_ranks):
    """A sparse table and a layer of float64 beside others, measured and planned for real."""

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.table = torch.nn.Embedding(200, 64, sparse=True)
            self.rest = mlp()
            self.last = torch.nn.Linear(40, 4, dtype=torch.float64)

        def forward(self, index):
            return self.last(self.rest(self.table(index)).double())

    lines = Lines()
    logging.getLogger("hipress").handlers = [lines]
    module = Mixed()
    ddp = wrap(module)
    sync = hipress.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    compressed = set()
    for step in range(20):
        optimizer.zero_grad()
        ddp(torch.arange(8) + 8 * rank + step).pow(2).mean().backward()
        optimizer.step()
        compressed |= {gradient.name for gradient in sync.layout.compressed}
    return {"lines": lines.found, "skipped": sync.skipped, "compressed": sorted(compressed),
            "bits": bits(module)}  # fmt: skip


def bounded(rank, num_ranks):
    """Gradients whose errors are not those of noise, under a bound: what ranks measured, plans."""

    class Made(torch.nn.Module):
        """Gradients of one size and random signs; of few elements; of normal ones; of none."""

        def __init__(self):
            super().__init__()
            # What cannot be compressed is small, so that compressing the rest pays.
            for name, width in (("signs", 128), ("few", 1024), ("normal", 40), ("unused", 40)):
                setattr(self, name, torch.nn.Parameter(torch.zeros(128, width)))
            self.small = torch.nn.Parameter(torch.zeros(80))

        def forward(self, seed):
            draw = torch.Generator().manual_seed(seed)
            normal = torch.randn(128, 1024, generator=draw)
            few = normal * (torch.rand(128, 1024, generator=draw) < 0.01)
            parts = (
                self.signs * normal[:, :128].sign(),
                self.few * few,
                self.normal * normal[:, :40],
            )
            return sum(part.sum() for part in parts) + 0 * self.unused.sum() + self.small.sum()

    class Seen(planner.Planner):
        def measure(self, session):
            self.profile = super().measure(session)
            return self.profile

    setup.Planner = Seen
    logging.getLogger("hipress").handlers = [lines := Lines()]
    codecs, found = ["onebit", TOPK], {}
    for name, make in (
        ("sgd", lambda ps: torch.optim.SGD(ps, lr=0.01)),
        ("adamw", lambda ps: hipress.torch.AdamW(ps, lr=0.01, refresh_warmup=3)),
    ):
        ddp = wrap(Made())
        optimizer = make(ddp.parameters())
        sync = hipress.attach(ddp, codecs=codecs, budget=0.3, optimizer=optimizer)
        for step in range(6):  # the sixth begins with a measurement
            optimizer.zero_grad()
            ddp(num_ranks * step + rank).backward()
            optimizer.step()
        made = sync.auto._planner
        plan = {}
        if rank == 0:  # for a network so slow that everything pays
            network = made_up.profile(num_ranks=num_ranks, bytes_per_s=1e4).network
            slow = made.profile.model_copy(update={"network": network})
            best = search(slow, codecs=codecs, budget=made._budget, reasons=made._reasons).plan
            plan = {key: [one.codec, one.reason] for key, one in best.gradients.items()}
        found[name] = {"errors": made._errors, "kept": len(made._kept), "plan": plan}
        sync.detach()
    return found | {"lines": lines.found}


def adapts(rank, num_ranks, id):
    """All of it is real: trains until a plan has been in use for a while; tells of each step."""
    torch.set_num_threads(1)
    module = mlp(width=1000)
    ddp = wrap(module, bucket_cap_mb=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    # A codec that never pays where only the processor limits a step, as onebit may.
    sync = hipress.attach(ddp, optimizer=optimizer, codecs=[SLOW])
    epochs, times, slow_at = [], [], None
    while len(epochs) < (400 if slow_at is None else slow_at + 45):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss_of(ddp, rank, len(epochs)).backward()
        optimizer.step()
        stats = sync.stats().auto
        epochs.append(stats.epoch)
        tell(id=id, rank=rank, mode=stats.mode)
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took)  # all ranks end in the same step
        times.append(float(took) / num_ranks)
        if slow_at is None and min(times[-3:]) > 0.3:
            slow_at = len(times)
    return {"epochs": epochs, "bits": bits(module), "reason": stats.reason}


if __name__ == "__main__":
    warm_up("none", "onebit", "int8", "bf16", TOPK, SLOW)
    main(globals(), thorough=False, limit_s=400.0)
