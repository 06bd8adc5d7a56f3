"""The PyTorch adapter: `attach` for a DDP model, `comm_hook` for programs that register hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hipress.codecs.base import Codec
from hipress.errors import UsageError, public
from hipress.plan import MIN_SIZE, Plan
from hipress.session import Session, Settings, Stats
from hipress.session.setup import AUTO, DEFAULT_CODEC, begin, decide, show_log
from hipress.torch.ddp import DDPAdapter, clean, hook, sparse_names
from hipress.torch.distributed_optimizer import DistributedOptimizer
from hipress.torch.optim import Adam, AdamW, MomentumExchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Sync = Session
"""What `attach` returns."""

__all__ = [
    "Adam",
    "AdamW",
    "DistributedOptimizer",
    "MomentumExchange",
    "Stats",
    "Sync",
    "attach",
    "comm_hook",
]


@public
def attach(
    model: nn.Module,
    codec: str | Codec | None = None,
    strategy: str | None = None,
    plan: str | Plan | dict[str, Any] | None = None,
    exclude: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    min_size: int = MIN_SIZE,
    warmup_steps: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    enabled: bool = True,
    *,
    check_every: int = 0,
    log_every: int = 0,
    writer: Any = None,
    seed: int = 0,
    codecs: Iterable[str] | None = None,
    budget: float | str | None = None,
    guard: bool | None = None,
) -> Sync:
    """Compresses the gradients that a model exchanges, while backward goes on.

    Call it once on all ranks, before the first step, and train with `sync.model`. Without codec,
    strategy and plan it measures in the first steps, makes plans, tries them, and compresses where
    that is faster; it keeps watching afterwards. On one process it does nothing to a plain module;
    a DDP of one rank is compressed as one of several would be.

    Args:
        model: A `DistributedDataParallel`, also one that torch.compile has wrapped; or a module on
            its device, which is wrapped in one if there are other ranks.
        codec: An expression such as `onebit` or `dgc(ratio=0.01)`, or a codec. `auto` or None
            measures and decides; with only a strategy given it is `int8`.
        strategy: `ps`, `ring`, `hierarchical` or `allreduce`; `ps` if None.
        plan: A plan or the path of one, which decides for each gradient.
        exclude: Parameters or modules that are not compressed, by name or pattern (`*.embed.*`).
        include: Those that are compressed although they are small or have one dimension.
        min_size: Gradients with fewer elements are not compressed.
        warmup_steps: Number of first steps in which nothing is compressed.
        optimizer: Lets hipress warn if it does not suit the codec, or applies momentum or weight
            decay a second time, and lets codecs with momentum follow its learning rate. With
            `hipress.torch.AdamW` or `Adam` codecs that do not keep the sizes of elements, such as
            `onebit`, are given its momentum in place of the gradient.
        scaler: The GradScaler, if there is one; residuals follow its scale.
        enabled: False leaves everything to DDP.
        check_every: Number of steps between two comparisons of all ranks' parameters; 0: never.
        log_every: Number of steps between two log lines (and scalars); 0: never.
        writer: A TensorBoard `SummaryWriter` that gets scalars with every log line.
        seed: Seed of the random numbers that some codecs draw; the same on all ranks.
        codecs: Codecs that auto may use; if None, those that are safe with the optimizer: `bf16`,
            `int8`, and `onebit` where `optimizer` is SGD without momentum, or one of
            `hipress.torch`.
        budget: For auto: `careful`, `table` (all codecs that passed our convergence table), or the
            share of a gradient's norm by which one message may be wrong.
        guard: Whether the accuracy guard measures codecs on the job's own gradients, and gives
            layers for which one is not accurate enough a milder one; None: with auto.

    Returns:
        The session: `model`, `stats`, `state_dict`, `timeline`, `detach`. On one process, where
        the model is no DDP, its methods do nothing.

    Raises:
        UsageError: An argument is wrong.
        AgreementError: Ranks were given different things.

    Example:
        >>> import torch, torch.distributed as dist, hipress
        >>> from torch.nn.parallel import DistributedDataParallel as DDP
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DDP(torch.nn.Linear(128, 128))
        >>> sync = hipress.attach(model, codec="int8")
        >>> model(torch.randn(4, 128)).sum().backward()
        >>> sync.stats().skipped
        {'bias': 'one dimension (norm or bias)'}
        >>> dist.destroy_process_group()
    """
    if not isinstance(enabled, bool):
        raise UsageError(f"enabled is {enabled!r}; give True or False.")
    adapter = DDPAdapter(optimizer, scaler)
    decision = decide(
        codec=codec,
        strategy=strategy,
        plan=plan,
        exclude=exclude,
        include=include,
        min_size=min_size,
        codecs=codecs,
        budget=budget,
        optimizer_kind=adapter.optimizer_kind,
    )
    if decision.is_auto and not adapter.can_exchange_momentum:
        adapter.exchange_gradients()
    settings = Settings(
        warmup_steps=warmup_steps,
        check_every=check_every,
        log_every=log_every,
        writer=writer,
        seed=seed,
        guard=guard,
    )
    ddp = adapter.use_model(model)
    module = model if ddp is None else ddp.module
    ignored = () if ddp is None else ddp.parameters_to_ignore
    named = [
        (clean(name), parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    # A model that does not fill a bucket is cut as finely as if it did.
    numel = sum(parameter.numel() for _, parameter in named)
    adapter.bucket_numel = numel if ddp is None else min(int(ddp.bucket_bytes_cap) // 4, numel)
    group = None if ddp is None else ddp.process_group
    alone = ddp is None
    session = Session(decision.rules, settings, adapter, group, enabled=enabled, alone=alone)
    return begin(
        session,
        decision,
        # Backward computes the gradients of the last layers first.
        adapter.specs(reversed(named), sparse_names(module)),
        [clean(name) for name, _ in module.named_parameters()],
        register_hook=lambda: adapter.register_hook(session),
    )


@public
def comm_hook(
    codec: str | Codec | None = None,
    strategy: str | None = None,
    min_size: int = MIN_SIZE,
    warmup_steps: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    *,
    process_group: ProcessGroup | None = None,
    check_every: int = 0,
    log_every: int = 0,
    writer: Any = None,
    seed: int = 0,
    guard: bool | None = None,
) -> tuple[Sync, Any]:
    """Returns a (state, hook) pair for `register_comm_hook`, and for frameworks that call it.

    The hook learns of the gradients from DDP's buckets in the first step, without their names:
    it calls them `gradient0`, `gradient1`, ... in that order. Where you hold the DDP model, use
    `attach`, which knows them by name.

    Args:
        codec: As for `attach`.
        strategy: As for `attach`.
        min_size: As for `attach`.
        warmup_steps: As for `attach`.
        optimizer: As for `attach`.
        scaler: As for `attach`.
        process_group: Process group of the DDP model; all ranks if None.
        check_every: As for `attach`.
        log_every: As for `attach`.
        writer: As for `attach`.
        seed: As for `attach`.
        guard: As for `attach`.

    Example:
        >>> import hipress.torch
        >>> state, hook = hipress.torch.comm_hook(codec="int8")
        >>> # ddp_model.register_comm_hook(state, hook)
    """
    if codec == AUTO:
        raise UsageError("a bare hook has no model to measure; use attach, or name a codec.")
    decision = decide(
        codec=DEFAULT_CODEC if codec is None else codec,
        strategy=strategy,
        plan=None,
        exclude=(),
        include=(),
        min_size=min_size,
    )
    settings = Settings(
        warmup_steps=warmup_steps,
        check_every=check_every,
        log_every=log_every,
        writer=writer,
        seed=seed,
        guard=guard,
    )
    show_log()
    return Session(decision.rules, settings, DDPAdapter(optimizer, scaler), process_group), hook
