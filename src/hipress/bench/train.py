"""`hipress bench train`: training steps with every way to exchange gradients, beside DDP and beside
no exchange.

`TrainBenchmark` is what the ranks measure, `_TrainWorker` is what they run (`python -m
hipress.bench.train BENCHMARK`), and `rows` makes one row per variant of the numbers that rank 0
writes. `problem` says what a row must not show. Every variant has a copy of the model of its own,
in a DDP of its own, and is idle while another runs.

A variant's step is compared with two others of the same run: DDP as it comes, and `compute`, the
same step without any exchange. What lies between those two is DDP's exposed communication, and
`exposed_removed` is the part of it that a variant takes away: 0 is DDP, 1 is the bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

import hipress
import hipress.torch
from hipress.bench.cluster import (
    Candidate,
    ClusterBenchmark,
    ClusterWorker,
    interface_problem,
    ranks_agree,
    run_rank,
)
from hipress.bench.emulated import emulate
from hipress.bench.timing import Timing
from hipress.errors import UsageError, did_you_mean
from hipress.session.buckets import has_momentum
from hipress.torch import Sync
from hipress.train.models import timed

COMPUTE = "compute"
"""The variant without any exchange: the bound."""
BASELINE = "ddp"
AUTO = "auto"
"""Given in place of a codec: `attach` chooses among the other codecs of the run."""
WARM_UP_STEPS = 3
"""DDP arranges its buckets anew after the first; the third is PowerSGD's first."""
MAX_DECISION_STEPS = 200
OPTIMIZERS = ("sgd", "adamw")
LEARNING_RATE, ADAM_RATE = 0.01, 1e-4
MOMENTUM = 0.9
SCHEDULE_FIELDS = ("schedule", "slice_bytes", "credit_bytes")
"""Fields of a row that say how messages were ordered and cut; None with DDP."""


@dataclass(frozen=True, kw_only=True)
class TrainBenchmark(ClusterBenchmark):
    """What all ranks measure."""

    model: str
    data: str | None = None
    """The user's own data, package.module:callable; None is the model's."""
    batch: int
    steps: int
    hooks: tuple[str, ...]
    """Hooks of torch, DDP itself among them."""
    codecs: tuple[str, ...]
    strategies: tuple[str, ...]
    bucket_mb: int | None
    """MiB of DDP's buckets; None is its default."""
    optimizer: str = "sgd"
    """`sgd` with momentum, or `adamw`."""
    schedules: tuple[str, ...] = ()
    """Schedules of `hipress.torch.DistributedOptimizer`, which are timed with each codec."""
    slice_bytes: int | None = None
    credit_bytes: int | None = None
    emulated: bool = False
    """Whether the model's work is replaced by pauses (see `hipress.bench.emulated`)."""

    @property
    def num_copies(self) -> int:
        """Arrays of the gradient's size that a rank holds."""
        num_ours = len(self.codecs) * len(self.strategies) * (1 + len(self.schedules))
        # Parameters, gradients and momentum of each variant and of `compute`; ours have residuals
        # and buffers; the model that all are copies of, and what the one that runs needs.
        num_variants = 1 + len(self.hooks) + num_ours
        num_arrays = 3 if self.optimizer == "sgd" else 4  # AdamW has two moments
        return (
            num_arrays * num_variants
            + sum(HOOKS[h].num_copies for h in self.hooks)
            + 2 * num_ours
            + 2
        )


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A way to exchange gradients that comes with torch."""

    register: Callable[[DistributedDataParallel], Any]
    """Registers it and returns the state that it keeps, or None."""
    one_bucket: bool = False
    bucket_mb: int | None = None
    """Size of DDP's buckets; None: that of the benchmark."""
    num_copies: int = 0
    """Copies of the gradient that it keeps beyond DDP."""


def _powersgd(rank: int) -> Hook:
    def register(ddp: DistributedDataParallel) -> Any:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return state

    # It starts all-reduces in callbacks, in an order that differs among ranks where several
    # buckets are on their way: gloo then aborts or stalls.
    return Hook(register=register, one_bucket=True, num_copies=2)


HOOKS: dict[str, Hook] = {
    BASELINE: Hook(register=lambda ddp: None),
    "ddp-4mb": Hook(register=lambda ddp: None, bucket_mb=4),
    "ddp-100mb": Hook(register=lambda ddp: None, bucket_mb=100),
    "fp16": Hook(
        register=lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ),
    "powersgd-1": _powersgd(1),
    "powersgd-2": _powersgd(2),
    "powersgd-4": _powersgd(4),
}
"""Hooks by name. PowerSGD (Vogels et al., NeurIPS 2019) has its rank behind the name."""


def check_hook(name: str) -> None:
    """Refuses a name that is not in the table."""
    if name not in HOOKS:
        hint = did_you_mean(name.lower(), HOOKS)
        raise UsageError(f"hook {name!r}{hint} is none of {', '.join(HOOKS)}; choose one.")


def rows(benchmark: TrainBenchmark, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns one row per variant, from what rank 0 wrote."""
    variants = result["variants"]
    timings = {one["variant"]: Timing.of(one["samples_s"]) for one in variants}
    return [_row(benchmark, one, timings) for one in variants]


def _row(
    benchmark: TrainBenchmark, one: Mapping[str, Any], timings: Mapping[str, Timing]
) -> dict[str, Any]:
    timing, ddp, compute = (timings[name] for name in (one["variant"], BASELINE, COMPUTE))
    return {
        "model": benchmark.model,
        "rate": benchmark.rate,
        **{key: one[key] for key in ("variant", "codec", "strategy", *SCHEDULE_FIELDS, "note")},
        "delay": benchmark.delay,
        "hosts": benchmark.num_hosts,
        "device": benchmark.device,
        "num_parameters": benchmark.num_elements,
        "batch": benchmark.batch,
        "optimizer": benchmark.optimizer,
        "emulated": benchmark.emulated,
        "bucket_mb": benchmark.bucket_mb,
        "repeats": timing.num_samples,
        "steps": benchmark.steps,
        **timing.fields(),
        "compute_seconds": compute.p50_s,
        "ddp_seconds": ddp.p50_s,
        "speedup": ddp.p50_s / timing.p50_s,
        "exposed_removed": exposed_removed(ddp.p50_s, compute.p50_s, timing.p50_s),
        "wire_bytes_per_rank": one["wire_bytes"],
        "interface_bytes_per_rank": one["interface_bytes"],
        "interface_deviation": one["interface_deviation"],
        "extra_memory_bytes": one["memory_bytes"],
        **{key: one[key] for key in ("skipped", "loss", "ranks_agree")},
        "problem": problem(benchmark, one),
    }


def exposed_removed(ddp_s: float, compute_s: float, seconds: float) -> float | None:
    """Returns the part of DDP's exposed communication that a step saves; None if there is none.

    Example:
        >>> exposed_removed(ddp_s=1.0, compute_s=0.5, seconds=0.625)
        0.75
    """
    exposed_s = ddp_s - compute_s
    return (ddp_s - seconds) / exposed_s if exposed_s > 0 else None


def problem(benchmark: TrainBenchmark, one: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a measured variant, in one sentence; None where nothing is."""
    label = f"{benchmark.model} with {one['variant']}"
    if one["variant"] == COMPUTE:
        return None  # its ranks exchange nothing
    if not one["ranks_agree"]:
        return f"{label}: ranks hold different parameters."
    if one["loss"] is None:
        return f"{label}: the loss is not finite; steps on such numbers measure nothing."
    return interface_problem(label, one)


# --- a rank ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Variant(Candidate):
    model: nn.Module
    """The model to train with: a DDP, or a module whose optimizer exchanges gradients."""
    optimizer: torch.optim.Optimizer
    note: str | None = None
    schedule: str | None = None
    sync: Sync | None = None
    state: Any = None
    loss: Tensor = field(default_factory=lambda: torch.tensor(torch.nan))

    def result(self) -> dict[str, Any]:
        sizes = self.sync.schedule if self.schedule and self.sync else None
        return super().result() | {
            "note": self.note,
            "schedule": self.schedule,
            "slice_bytes": sizes and sizes.slice_bytes,
            "credit_bytes": sizes and sizes.credit_bytes,
        }

    @property
    def memory_bytes(self) -> int:
        """What is kept beyond DDP from step to step."""
        if self.sync is not None:
            stats = self.sync.stats()
            return stats.state_bytes + stats.buffer_bytes
        if self.state is None:
            return 0
        kept = (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict)
        return sum(value.nbytes for each in kept for value in each.values())


class _TrainWorker(ClusterWorker[_Variant]):
    def __init__(self, benchmark: TrainBenchmark) -> None:
        num_each = len(benchmark.strategies) * (1 + len(benchmark.schedules))
        num_ours = sum(1 if codec == AUTO else num_each for codec in benchmark.codecs)
        num_variants = 1 + len(benchmark.hooks) + num_ours
        super().__init__(benchmark, (1 + benchmark.repeats) * num_variants)
        self.benchmark = benchmark
        self.num_calls = benchmark.steps
        self.num_first_calls = 1 if benchmark.schedules else 0
        line = timed(benchmark.model, benchmark.data)
        data = line.data(dist.get_rank(), benchmark.batch)
        self.batch = tuple(part.to(self.device) for part in data)
        self.loss = line.learning_task.loss
        self.model: nn.Module = line.make().to(self.device)
        if benchmark.emulated:
            self.model = emulate(self.model, lambda model: self.loss(model, self.batch))
            self.loss = lambda model, batch: model(torch.ones(1, requires_grad=True)).sum()
        self.candidates = [
            self._hooked(COMPUTE, Hook(register=_register_nothing)),
            *(self._hooked(name, HOOKS[name]) for name in benchmark.hooks),
            *(
                self._ours(codec, strategy)
                for codec in benchmark.codecs
                for strategy in (benchmark.strategies if codec != AUTO else (None,))
            ),
            *(
                self._scheduled(codec, strategy, schedule)
                for codec in benchmark.codecs
                if codec != AUTO
                for strategy in benchmark.strategies
                for schedule in benchmark.schedules
            ),
        ]

    def measure(self) -> dict[str, Any]:
        """Warms up, takes the samples, and checks."""
        for one in self.candidates:
            self.progress(f"warm up {one.label}")
            for _ in range(WARM_UP_STEPS):
                self.call(one)
            if one.codec == AUTO:
                self._wait_for_decision(one)
            self._check(one)
        self.run_rounds()
        for one in self.candidates:
            self._check(one)
            self._count(one)
        return {"variants": [one.result() for one in self.candidates]}

    def call(self, one: _Variant) -> None:
        one.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(one.model, self.batch)
        torch.autograd.backward(loss)
        one.optimizer.step()
        one.loss = loss.detach()

    def finish(self, one: _Variant) -> None:
        if isinstance(one.optimizer, hipress.torch.DistributedOptimizer):
            one.optimizer.synchronize()

    def counts(self, one: _Variant) -> tuple[int, int]:
        return (0 if one.sync is None else one.sync.stats().sent_bytes), 0

    def _hooked(self, label: str, hook: Hook) -> _Variant:
        whole_mb = self.benchmark.size_bytes // 2**20 + 1
        bucket_mb = hook.bucket_mb or self.benchmark.bucket_mb
        ddp = self._ddp(whole_mb if hook.one_bucket else bucket_mb)
        return _Variant(
            label=label,
            model=ddp,
            optimizer=self._optimizer(ddp, MOMENTUM),
            note="one bucket" if hook.one_bucket else None,
            state=hook.register(ddp),
        )

    def _ours(self, codec: str, strategy: str | None) -> _Variant:
        ddp = self._ddp(self.benchmark.bucket_mb)
        others = [other for other in self.benchmark.codecs if other != AUTO]
        if codec == AUTO:
            optimizer = self._optimizer(ddp, MOMENTUM)
            sync = hipress.attach(ddp, codecs=others or None, optimizer=optimizer)
            return _Variant(label=AUTO, model=ddp, optimizer=optimizer, codec=AUTO, sync=sync)
        momentum = 0.0 if has_momentum(hipress.codec(codec)) else MOMENTUM
        optimizer = self._optimizer(ddp, momentum)
        return _Variant(
            label=f"{codec} {strategy}",
            model=ddp,
            optimizer=optimizer,
            codec=codec,
            strategy=strategy,
            sync=hipress.attach(ddp, codec=codec, strategy=strategy, optimizer=optimizer),
        )

    def _scheduled(self, codec: str, strategy: str, schedule: str) -> _Variant:
        model = copy.deepcopy(self.model)
        momentum = 0.0 if has_momentum(hipress.codec(codec)) else MOMENTUM
        optimizer = hipress.torch.DistributedOptimizer(
            self._optimizer(model, momentum),
            model.named_parameters(),
            codec=codec,
            strategy=strategy,
            schedule=schedule,
            slice_bytes=self.benchmark.slice_bytes,
            credit_bytes=self.benchmark.credit_bytes,
        )
        return _Variant(
            label=f"{codec} {strategy} {schedule}",
            model=model,
            optimizer=optimizer,
            codec=codec,
            strategy=strategy,
            schedule=schedule,
            sync=optimizer.sync if optimizer.sync.enabled else None,
        )

    def _optimizer(self, model: nn.Module, momentum: float) -> torch.optim.Optimizer:
        if self.benchmark.optimizer == "adamw":
            # With so short a warm-up, momentum is exchanged in the steps that are timed.
            return hipress.torch.AdamW(
                model.parameters(), lr=ADAM_RATE, fused=True, refresh_warmup=WARM_UP_STEPS - 1
            )
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=momentum)

    def _ddp(self, bucket_mb: int | None) -> DistributedDataParallel:
        # A cap that is given holds for the first bucket too; without one that is 1 MiB. All ranks
        # have the same model: sending it would take a slow line minutes, once for each variant.
        return DistributedDataParallel(
            copy.deepcopy(self.model),
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )

    def _wait_for_decision(self, one: _Variant) -> None:
        """Makes steps until `auto` has decided, which it does on all ranks in the same step."""
        assert one.sync is not None
        for _ in range(MAX_DECISION_STEPS):
            auto = one.sync.stats().auto
            if auto is not None and auto.mode in ("plain", "compressed"):
                one.note = auto.reason
                return
            self.call(one)
        raise UsageError(f"auto has not decided within {MAX_DECISION_STEPS} steps; report this.")

    def _check(self, one: _Variant) -> None:
        """Notes whether all ranks hold the same parameters, as they did before."""
        same = ranks_agree(list(one.model.parameters()))
        one.found["ranks_agree"] = one.found.get("ranks_agree", True) and same

    def _count(self, one: _Variant) -> None:
        wire = None if one.sync is None else one.sent_bytes / self.repeats
        loss = float(one.loss)
        # The largest of a number and NaN may be the number.
        loss = loss if math.isfinite(loss) else math.inf
        memory, loss = self.count_bytes(one, wire, float(one.memory_bytes), loss)
        one.found |= {
            "memory_bytes": int(memory),
            "loss": loss if math.isfinite(loss) else None,
            "skipped": {} if one.sync is None else one.sync.stats().skipped,
        }


def _register_nothing(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)


def _main(text: str) -> dict[str, Any]:
    worker = _TrainWorker(TrainBenchmark.load(text))
    result = worker.measure()
    dist.barrier()
    for one in worker.candidates:
        if one.sync is not None:
            one.sync.engine.close()
    return result


if __name__ == "__main__":
    run_rank(_main)
