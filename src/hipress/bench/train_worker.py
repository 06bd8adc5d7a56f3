"""What each rank of `hipress bench train` runs: training steps with each way to exchange gradients.

Every variant has a copy of the model of its own, in a DDP of its own, and is idle while another
runs. A sample is a barrier and some steps, timed on every rank; the slowest rank's time counts.
Each round runs all variants, in an order that all ranks shuffle alike, so that slow moments of the
machine hit all of them. Rank 0 tells on stdout how far it is and writes the result.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
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
from hipress.bench._ranks import Interface, largest, ranks_agree, tell
from hipress.bench.train_rows import AUTO, BASELINE, COMPUTE, Config
from hipress.errors import UsageError
from hipress.session.buckets import has_momentum
from hipress.torch import Sync

WARM_UP_STEPS = 3
"""DDP lays its buckets out anew after the first; the third is PowerSGD's first."""
MAX_SETTLE_STEPS = 200
"""That `auto` may take to decide."""
LEARNING_RATE = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained."""

    model: nn.Module
    """On the device, the same on all ranks."""
    loss: Callable[[nn.Module], Tensor]
    """Of a model on the rank's own batch."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A way to exchange gradients that torch brings."""

    register: Callable[[DistributedDataParallel], Any]
    """Registers it and returns the state that it keeps, or None."""
    one_bucket: bool = False
    """Whether all gradients must be in one bucket."""
    num_copies: int = 0
    """Of the gradient, that it keeps beyond DDP."""


def _register_powersgd(rank: int) -> Callable[[DistributedDataParallel], Any]:
    def register(ddp: DistributedDataParallel) -> Any:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return state

    return register


def _powersgd(rank: int) -> Hook:
    # It starts all-reduces in callbacks, in an order that differs among ranks where several
    # buckets are on their way: gloo then aborts or stalls.
    return Hook(register=_register_powersgd(rank), one_bucket=True, num_copies=2)


HOOKS: dict[str, Hook] = {
    BASELINE: Hook(register=lambda ddp: None),
    "fp16": Hook(
        register=lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ),
    "powersgd-1": _powersgd(1),
    "powersgd-2": _powersgd(2),
    "powersgd-4": _powersgd(4),
}
"""Name: hook. PowerSGD is Vogels et al., NeurIPS 2019, its rank behind the name."""


def check_hook(name: str) -> None:
    """Refuse a name that is not in the table."""
    if name in HOOKS:
        return
    near = difflib.get_close_matches(name.lower(), HOOKS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UsageError(f"hook {name!r}{hint} is none of {', '.join(HOOKS)}; choose one.")


def main(text: str, make_task: Callable[[Config, int, torch.device], Task]) -> None:
    """Measure, as the config says, and write the result on rank 0.

    Args:
        text: The config's.
        make_task: From the config, the rank and the device to what is trained.
    """
    torch.set_num_threads(1)
    config = Config.load(text)
    device = torch.device("cuda:0" if config.device == "cuda" else config.device)
    dist.init_process_group("gloo")
    worker = _Worker(config, make_task(config, dist.get_rank(), device), device)
    result = worker.measure()
    if dist.get_rank() == 0:
        Path(config.result).write_text(json.dumps(result))
    dist.barrier()
    for one in worker.variants:
        if one.sync is not None:
            one.sync.engine.close()
    dist.destroy_process_group()


@dataclass(kw_only=True)
class _Variant:
    """One way to exchange gradients, with a model of its own, and what was seen of it."""

    label: str
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    codec: str | None = None
    strategy: str | None = None
    note: str | None = None
    sync: Sync | None = None
    state: Any = None
    """Of a hook of torch's."""
    loss: Tensor = field(default_factory=lambda: torch.tensor(torch.nan))
    """Of the last step."""
    samples_s: list[float] = field(default_factory=list)
    """Per step."""
    sent_bytes: int = 0
    """By the engine's count, in all samples."""
    interface_bytes: int = 0
    seen: dict[str, Any] = field(default_factory=dict)


class _Worker:
    def __init__(self, config: Config, task: Task, device: torch.device) -> None:
        self.config = config
        self.task = task
        self.device = device
        self.interface = Interface(is_shaped=config.is_shaped)
        self.variants = [
            self._hooked(COMPUTE, Hook(register=_register_nothing)),
            *(self._hooked(name, HOOKS[name]) for name in config.hooks),
            *(
                self._ours(codec, strategy)
                for codec in config.codecs
                for strategy in (config.strategies if codec != AUTO else (None,))
            ),
        ]
        self._num_done = 0

    def measure(self) -> dict[str, Any]:
        """Warm up, time, and check."""
        for one in self.variants:
            self._tell(f"warm up {one.label}")
            for _ in range(WARM_UP_STEPS):
                self._step(one)
            if one.codec == AUTO:
                self._settle(one)
            self._check(one)
        self.interface.measure_idle()
        order = list(self.variants)
        shuffle = random.Random(0).shuffle
        for _ in range(self.config.repeats):
            shuffle(order)
            for one in order:
                self._tell(one.label)
                self._sample(one)
        for one in self.variants:
            self._check(one)
            self._count(one)
        return {"variants": [_told(one) for one in self.variants]}

    def _hooked(self, label: str, hook: Hook) -> _Variant:
        whole_mb = self.config.size_bytes // 2**20 + 1
        ddp = self._ddp(whole_mb if hook.one_bucket else self.config.bucket_mb)
        return _Variant(
            label=label,
            ddp=ddp,
            optimizer=_optimizer(ddp, MOMENTUM),
            note="one bucket" if hook.one_bucket else None,
            state=hook.register(ddp),
        )

    def _settle(self, one: _Variant) -> None:
        """Steps until `auto` has decided, which it does on all ranks in the same step."""
        assert one.sync is not None
        for _ in range(MAX_SETTLE_STEPS):
            auto = one.sync.stats().auto
            if auto is not None and auto.mode in ("plain", "compressed"):
                one.note = auto.reason
                return
            self._step(one)
        raise UsageError(f"auto has not decided within {MAX_SETTLE_STEPS} steps; report this.")

    def _ours(self, codec: str, strategy: str | None) -> _Variant:
        ddp = self._ddp(self.config.bucket_mb)
        others = [other for other in self.config.codecs if other != AUTO]
        if codec == AUTO:
            optimizer = _optimizer(ddp, MOMENTUM)
            sync = hipress.attach(ddp, codecs=others or None, optimizer=optimizer)
            return _Variant(label=AUTO, ddp=ddp, optimizer=optimizer, codec=AUTO, sync=sync)
        brings_momentum = has_momentum(hipress.codec(codec))
        optimizer = _optimizer(ddp, 0.0 if brings_momentum else MOMENTUM)
        return _Variant(
            label=f"{codec} {strategy}",
            ddp=ddp,
            optimizer=optimizer,
            codec=codec,
            strategy=strategy,
            sync=hipress.attach(ddp, codec=codec, strategy=strategy, optimizer=optimizer),
        )

    def _ddp(self, bucket_mb: int | None) -> DistributedDataParallel:
        # A cap that is given holds for the first bucket too; without one that is 1 MiB. All ranks
        # have the same model: sending it would take a slow line minutes, once for each variant.
        return DistributedDataParallel(
            copy.deepcopy(self.task.model),
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )

    def _tell(self, label: str) -> None:
        tell(self._num_done, (1 + self.config.repeats) * len(self.variants), label)
        self._num_done += 1

    def _step(self, one: _Variant) -> None:
        one.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(one.ddp)
        torch.autograd.backward(loss)
        one.optimizer.step()
        one.loss = loss.detach()

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _sample(self, one: _Variant) -> None:
        self._wait_for_device()
        before = (_sent_bytes(one), self.interface.sent_bytes())
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.config.steps):
            self._step(one)
        self._wait_for_device()
        seconds = time.perf_counter() - start
        dist.barrier()  # all have received: nothing of it is still to leave
        one.sent_bytes += _sent_bytes(one) - before[0]
        one.interface_bytes += self.interface.sent_bytes() - before[1]
        one.samples_s += largest([seconds / self.config.steps])

    def _check(self, one: _Variant) -> None:
        """Whether all ranks hold the same parameters, as they did before."""
        same = ranks_agree(list(one.ddp.parameters()))
        one.seen["ranks_agree"] = one.seen.get("ranks_agree", True) and same

    def _count(self, one: _Variant) -> None:
        """Bytes of one step, the most that a rank sent, by both counts; memory; the loss."""
        steps, repeats = self.config.steps, self.config.repeats
        wire = one.sent_bytes / repeats
        interface = self.interface.per_sample(one.interface_bytes, repeats)
        deviation = -1.0
        if one.sync is not None:
            deviation = self.interface.deviation(interface, wire, repeats)
        memory, loss = float(_memory_bytes(one)), float(one.loss)
        # The largest of a number and NaN may be the number.
        loss = loss if math.isfinite(loss) else math.inf
        found = largest([wire / steps, interface / steps, deviation, memory, loss])
        one.seen |= {
            "wire_bytes": None if one.sync is None else found[0],
            "interface_bytes": found[1] if self.config.is_shaped else None,
            "interface_deviation": None if found[2] < 0 else found[2],
            "memory_bytes": int(found[3]),
            "loss": found[4] if math.isfinite(found[4]) else None,
            "skipped": {} if one.sync is None else one.sync.stats().skipped,
        }


def _register_nothing(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)


def _optimizer(ddp: DistributedDataParallel, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE, momentum=momentum)


def _sent_bytes(one: _Variant) -> int:
    return 0 if one.sync is None else one.sync.stats().sent_bytes


def _memory_bytes(one: _Variant) -> int:
    """What is kept beyond DDP from step to step."""
    if one.sync is not None:
        stats = one.sync.stats()
        return stats.state_bytes + stats.buffer_bytes
    if one.state is None:
        return 0
    kept = (one.state.error_dict, one.state.p_memory_dict, one.state.q_memory_dict)
    return sum(value.nbytes for each in kept for value in each.values())


def _told(one: _Variant) -> dict[str, Any]:
    return {
        "variant": one.label,
        "codec": one.codec,
        "strategy": one.strategy,
        "note": one.note,
        "samples_s": one.samples_s,
        **one.seen,
    }
