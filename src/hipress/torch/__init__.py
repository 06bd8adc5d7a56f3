"""The PyTorch door: `attach` for a DDP model, `comm_hook` for who registers hooks by hand."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hipress.codecs.base import Codec
from hipress.errors import UsageError
from hipress.plan import Plan
from hipress.session import auto, planner, selection
from hipress.session.selection import MIN_SIZE
from hipress.session.stats import Stats
from hipress.settings import LOG, log_level
from hipress.torch.sync import Settings, Sync

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("hipress")

__all__ = ["Stats", "Sync", "attach", "comm_hook"]

DEFAULT_CODEC = "int8"
"""Where nobody says and nobody can measure: the one that no optimizer minds."""
AUTO = "auto"
"""In place of a codec: measure, plan, and compress where it pays."""


def attach(
    ddp_model: nn.Module,
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
) -> Sync:
    """Compresses the gradients that a DDP model exchanges, while backward goes on.

    Call it once on all ranks, after the model is wrapped and before the first step. Without codec,
    strategy and plan it measures in the first steps, makes plans, tries them, and compresses where
    that is faster; later it goes on watching (docs/auto.md).

    Args:
        ddp_model: A `DistributedDataParallel`, also one that torch.compile has wrapped.
        codec: An expression such as `onebit` or `dgc(ratio=0.01)`, or a codec; `auto`, also if
            None, measures and decides; `int8` if only a strategy is given.
        strategy: `ps`, `ring`, `hierarchical` or `allreduce`; `ps` if None.
        plan: A plan or the path of one, which decides for each gradient instead.
        exclude: Parameters or modules that are left alone, by name or pattern (`*.embed.*`).
        include: Those that are compressed although they are small or have one dimension.
        min_size: Gradients with fewer elements are left alone.
        warmup_steps: Steps in which nothing is compressed.
        optimizer: To be warned where it applies momentum or weight decay a second time, and for
            codecs with momentum to follow its learning rate.
        scaler: The GradScaler, if there is one: residuals follow its scale.
        enabled: False leaves everything to DDP.
        check_every: Compare the parameters of all ranks every so many steps; 0: never.
        log_every: Log a line, and write scalars, every so many steps; 0: never.
        writer: A TensorBoard `SummaryWriter`, which gets scalars with every line of the log.
        seed: Of the random numbers that some codecs draw; the same on all ranks.
        codecs: What auto may use; those that keep up with the optimizer if None: `bf16`, `fp16`,
            `int8`, and `onebit` where `optimizer` is SGD without momentum.
        budget: For auto: `careful`, `table` (all codecs that passed our convergence table), or
            how much of a gradient's norm one message may lack.

    Returns:
        The exchange: `stats`, `state_dict`, `timeline`, `detach`.

    Raises:
        UsageError: An argument is wrong.
        AgreementError: Ranks were given different things.

    Example:
        >>> import torch, torch.distributed as dist, hipress
        >>> from torch.nn.parallel import DistributedDataParallel as DDP
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DDP(torch.nn.Linear(128, 128))
        >>> sync = hipress.attach(model, codec="onebit")
        >>> model(torch.randn(4, 128)).sum().backward()
        >>> sync.stats().skipped
        {'bias': 'one dimension (norm or bias)'}
        >>> dist.destroy_process_group()
    """
    ddp = _unwrapped(ddp_model)
    if not isinstance(enabled, bool):
        raise UsageError(f"enabled is {enabled!r}; give True or False.")
    is_auto = _is_auto(codec, strategy, plan)
    if not is_auto and (codecs is not None or budget is not None):
        given = "codecs" if codecs is not None else "budget"
        raise UsageError(f"{given} is for auto, and a codec or plan was given; give one of them.")
    asked = selection.rules(
        codec=None if is_auto else codec,
        strategy=strategy,
        plan=plan,
        exclude=exclude,
        include=include,
        min_size=min_size,
        default_codec=DEFAULT_CODEC,
    )
    named = [
        (selection.clean(name), parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    ]
    # Also those that are frozen: naming them is no mistake.
    everything = [selection.clean(name) for name, _ in ddp.module.named_parameters()]
    selection.check_names(asked, everything)
    settings = _settings(
        warmup_steps=warmup_steps,
        check_every=check_every,
        log_every=log_every,
        writer=writer,
        seed=seed,
        optimizer=optimizer,
        scaler=scaler,
        finds_unused=ddp.find_unused_parameters and not ddp.static_graph,
        # A model that does not fill a bucket is cut as finely as if it did.
        bucket_numel=min(int(ddp.bucket_bytes_cap) // 4, sum(p.numel() for _, p in named)),
    )
    may_use = planner.allowed(codecs, budget, optimizer) if is_auto else ()
    _make_heard(settings, is_auto=is_auto and enabled)
    sync = Sync(asked, settings, ddp.process_group, enabled=enabled)
    if not enabled:
        return sync
    if not named:
        raise UsageError("the model has no parameter that is trained; there is nothing to attach.")
    engine = sync.open(named[0][1].device)
    if is_auto:
        sync.auto = auto.Auto(sync, planner.Planner(may_use, budget))
    try:
        # Backward makes the gradients of the last layers first.
        sync.register(reversed(named), selection.sparse_names(ddp.module))
        told = {"codecs for auto": list(may_use), "budget": budget}
        engine.agree("attach", _facts(sync, ddp) | (told if is_auto else {}))
        _register(ddp, sync)
    except BaseException:
        engine.close()
        raise
    made_for = None if asked.plan is None else asked.plan.num_ranks
    if made_for not in (None, engine.transport.num_ranks) and engine.transport.rank == 0:
        _log.warning(
            "the plan was made for %d ranks and %d are here; make one for so many with hipress "
            "plan --nodes.", made_for, engine.transport.num_ranks,
        )  # fmt: skip
    sync.others = frozenset(everything) - set(sync.gradients)
    sync.watch(ddp)
    sync.tell()
    if sync.auto is not None:
        sync.auto.start()
    return sync


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
) -> tuple[Sync, Any]:
    """A (state, hook) pair for `register_comm_hook`, and for whoever wraps it.

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
        process_group: That of the DDP model; all ranks if None.
        check_every: As for `attach`.
        log_every: As for `attach`.
        writer: As for `attach`.
        seed: As for `attach`.

    Example:
        >>> import hipress.torch
        >>> state, hook = hipress.torch.comm_hook(codec="onebit")
        >>> # ddp_model.register_comm_hook(state, hook)
    """
    if codec == AUTO:
        raise UsageError("a bare hook has no model to measure; use attach, or name a codec.")
    asked = selection.rules(
        codec=codec,
        strategy=strategy,
        plan=None,
        exclude=(),
        include=(),
        min_size=min_size,
        default_codec=DEFAULT_CODEC,
    )
    settings = _settings(
        warmup_steps=warmup_steps,
        check_every=check_every,
        log_every=log_every,
        writer=writer,
        seed=seed,
        optimizer=optimizer,
        scaler=scaler,
    )
    _make_heard(settings)
    return Sync(asked, settings, process_group), hook


def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations as objects
    """What DDP calls for each bucket."""
    return state.on_bucket(bucket)


def _is_auto(codec: Any, strategy: Any, plan: Any) -> bool:
    """Whether nobody has decided, or said that auto shall."""
    if codec == AUTO and (strategy is not None or plan is not None):
        given = "strategy" if strategy is not None else "plan"
        raise UsageError(f"codec 'auto' makes plans itself, and a {given} was given; give one.")
    return codec == AUTO or (codec is None and strategy is None and plan is None)


def _unwrapped(model: nn.Module) -> DistributedDataParallel:
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if not isinstance(inner, DistributedDataParallel):
        kind = type(model).__name__
        hint = (
            "FSDP is not supported yet"
            if "FSDP" in kind or "FullyShard" in kind
            else "wrap it first: model = DistributedDataParallel(model)"
        )
        raise UsageError(f"attach was given a {kind}; it takes a DistributedDataParallel: {hint}.")
    return inner


def _settings(**given: Any) -> Settings:
    for name in ("warmup_steps", "check_every", "log_every"):
        value = given[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{name} is {value!r}; give a number of steps, 0 for none.")
    if not isinstance(given["seed"], int) or not 0 <= given["seed"] < 2**31:
        raise UsageError(f"seed is {given['seed']!r}; give a whole number from 0 to 2^31 - 1.")
    optimizer, scaler, writer = given["optimizer"], given["scaler"], given["writer"]
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}; give a torch optimizer.")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise UsageError(f"scaler is a {type(scaler).__name__}; give a torch.amp.GradScaler.")
    if writer is not None and not hasattr(writer, "add_scalar"):
        raise UsageError(f"writer is a {type(writer).__name__}; give a SummaryWriter.")
    if writer is not None and not given["log_every"]:
        raise UsageError(
            "writer is given and log_every is 0, so nothing would be written; give log_every=100."
        )
    return Settings(**given)


def _make_heard(asked: Settings, *, is_auto: bool = False) -> None:
    """Lets lines that the user asked for be seen, where the program has set up no logging."""
    logger = logging.getLogger("hipress")
    wanted = os.environ.get(LOG.name) is not None
    if asked.log_every or wanted or is_auto:
        level = log_level() if wanted else logging.INFO
        if not logger.isEnabledFor(level):
            logger.setLevel(level)
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("hipress: %(message)s"))
            logger.addHandler(handler)


def _facts(sync: Sync, ddp: DistributedDataParallel) -> dict[str, Any]:
    gradients = sync.gradients.values()
    plan = sync.rules.plan
    return {
        "parameters": [g.name for g in gradients],
        "elements of parameters": [g.parameter.numel() for g in gradients],
        "dtypes of parameters": [str(g.parameter.dtype) for g in gradients],
        "codecs": [g.choice.codec.name for g in gradients],
        "strategies": [g.choice.strategy for g in gradients],
        "epoch of the plan": None if plan is None else plan.epoch,
        "warmup_steps": sync.settings.warmup_steps,
        "check_every": sync.settings.check_every,
        "whether there is a scaler": sync.settings.scaler is not None,
        "whether there is an optimizer": sync.settings.optimizer is not None,
        "bytes of a bucket": int(ddp.bucket_bytes_cap),
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
    }


def _register(ddp: DistributedDataParallel, sync: Sync) -> None:
    try:
        ddp.register_comm_hook(sync, hook)
    except RuntimeError as error:
        if "only be called once" in str(error):
            raise UsageError(
                "the model has a communication hook already, by an earlier attach or by others, "
                "and DDP takes one, once: wrap the module in a new DistributedDataParallel."
            ) from error
        raise
