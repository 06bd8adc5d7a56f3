"""An optimizer that exchanges gradients itself, without DDP, so that the exchange goes on while the
next forward pass computes.

What happens in a step is in `exchanger.py`. The order in which messages leave is that of a schedule
(`hipress.casync.graphs.schedules`): the forward pass of the second step shows in which order
parameters are needed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hipress.casync.graphs.schedules import FIFO, PRIORITY, Schedule
from hipress.codecs.base import Codec
from hipress.errors import UsageError, public
from hipress.plan import MIN_SIZE, Plan
from hipress.session import Session, Settings, StepObserver, replicas
from hipress.session.groups import has_other_ranks
from hipress.session.setup import AUTO, begin, decide
from hipress.torch.adapter import TorchAdapter
from hipress.torch.ddp import clean, observe
from hipress.torch.exchanger import Exchanger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("hipress")

SLICE_BYTES = 2**19
"""About the bytes of a message, unless the user or a plan says otherwise. A VGG whose work was
pauses took 1.54 s a step with half a MiB and credit for four, 1.61 with credit for two, 1.64 with
one MiB and 1.89 with 4 MB (four hosts at 1 Gbit, two cores); DDP took 1.81."""
LEAST_SLICE_BYTES = 2**14
NUM_CREDITS = 4
"""Slices that may be on their way out of a rank at once, unless the user or a plan says so."""
BUCKET_BYTES = 25 * 2**20
"""The size of DDP's buckets, in which `auto` exchanges gradients before it has a plan."""


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: averages gradients over all ranks while backward and forward compute.

    Create it on all ranks after the model is on its device. It takes the place of both DDP and the
    optimizer; training loop, schedulers, GradScaler and gradient clipping stay as they are. The
    parameters of rank 0 are sent to all ranks first.

    A parameter is updated when its mean has arrived, at the latest where it is next read. What
    needs all means at once, such as clipping by the global norm or a GradScaler, waits for them:
    training is right, but nothing is hidden under the next forward pass. So does `torch.compile`.

    Args:
        optimizer: Any torch optimizer, or `hipress.torch.AdamW`.
        named_parameters: `model.named_parameters()`.
        codec: An expression such as `onebit`, or a codec; `none` sends gradients as they are, also
            if None. `auto` measures in the first steps, tries schedules and codecs, and takes what
            is fastest.
        strategy: `ps`, `ring` or `hierarchical`; `ps` if None.
        schedule: In which order messages leave: `fifo`, `priority` or `overlap`; `priority` if
            neither this nor a plan says so.
        slice_bytes: About the bytes of a message; 512 KiB if nothing says so.
        credit_bytes: Bytes that may be on their way out of a rank at once; four slices if nothing
            says so.
        plan: A plan or the path of one, which decides for each gradient, and about what of the
            above is not given.
        exclude: As for `hipress.attach`.
        include: As for `hipress.attach`.
        min_size: As for `hipress.attach`.
        warmup_steps: As for `hipress.attach`.
        scaler: The GradScaler, if there is one; residuals follow its scale.
        process_group: Process group of torch.distributed; all ranks if None.
        check_every: As for `hipress.attach`.
        log_every: As for `hipress.attach`.
        writer: As for `hipress.attach`.
        seed: As for `hipress.attach`.
        codecs: As for `hipress.attach`; with `["none"]`, `auto` tries schedules only.
        budget: As for `hipress.attach`.
        guard: As for `hipress.attach`.

    Example:
        >>> import torch, torch.distributed as dist, hipress.torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(128, 128)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hipress.torch.DistributedOptimizer(optimizer, model.named_parameters())
        >>> model(torch.randn(4, 128)).sum().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """

    @public
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        codec: str | Codec | None = None,
        strategy: str | None = None,
        schedule: str | None = None,
        slice_bytes: int | None = None,
        credit_bytes: int | None = None,
        *,
        plan: str | Plan | dict[str, Any] | None = None,
        exclude: str | Iterable[str] = (),
        include: str | Iterable[str] = (),
        min_size: int = MIN_SIZE,
        warmup_steps: int = 0,
        scaler: Any = None,
        process_group: ProcessGroup | None = None,
        check_every: int = 0,
        log_every: int = 0,
        writer: Any = None,
        seed: int = 0,
        codecs: Iterable[str] | None = None,
        budget: float | str | None = None,
        guard: bool | None = None,
    ) -> None:
        # Optimizer.__init__ would make groups and state; those of the inner optimizer are used.
        inner, named = _checked(optimizer, named_parameters)
        self._inner = inner
        given = {"schedule": schedule, "slice_bytes": slice_bytes, "credit_bytes": credit_bytes}
        for option, value in given.items() if codec == AUTO else ():
            if value is not None:
                raise UsageError(
                    f"codec 'auto' chooses the schedule and its sizes, and {option} is {value!r}; "
                    "give one of them."
                )
        self._adapter = _OptimizerAdapter(inner, scaler)
        if strategy == "allreduce":
            raise UsageError(
                "strategy 'allreduce' leaves messages to torch, so no schedule can order them; "
                "give 'ps', 'ring' or 'hierarchical'."
            )
        decision = decide(
            codec="none" if codec is None and plan is None else codec,
            strategy=strategy,
            plan=plan,
            exclude=exclude,
            include=include,
            min_size=min_size,
            codecs=codecs,
            budget=budget,
            optimizer_kind=self._adapter.optimizer_kind,
        )
        planned = decision.rules.plan or Plan()
        name: Any = schedule or planned.schedule or (FIFO if decision.is_auto else PRIORITY)
        size = _size(
            "slice_bytes",
            slice_bytes,
            planned.slice_bytes or (BUCKET_BYTES if decision.is_auto else SLICE_BYTES),
        )
        credit = _size("credit_bytes", credit_bytes, planned.credit_bytes or NUM_CREDITS * size)
        settings = Settings(
            warmup_steps=warmup_steps,
            check_every=check_every,
            log_every=log_every,
            writer=writer,
            seed=seed,
            guard=guard,
        )
        alone = not has_other_ranks()
        self.sync = Session(
            decision.rules,
            settings,
            self._adapter,
            process_group,
            alone=alone,
            schedule=Schedule(name=name, slice_bytes=size, credit_bytes=credit),
        )
        """The session: `stats`, `state_dict`, `save`, `load`, `detach`."""
        self._exchanger: Exchanger | None = None
        trained = [(name, p) for name, p in named if p.requires_grad]
        specs = self._adapter.specs(reversed(trained))
        begin(self.sync, decision, specs, [name for name, _ in named])
        if alone:
            return
        self._send_first([(name, parameter) for name, parameter in named])
        self._exchanger = Exchanger(self, dict(trained))
        self._adapter.exchanger = weakref.ref(self._exchanger)

    _step_supports_amp_scaling = False
    """A GradScaler then divides gradients itself, also where it would leave that to a fused one."""

    # --- what an optimizer does -------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates parameters as their means arrive, at the latest where they are read next.

        Learning rates and all other options are those of this moment.
        """
        if self._exchanger is None:
            return self._inner.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._exchanger.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients; what is under way stays."""
        if self._exchanger is None:
            self._inner.zero_grad(set_to_none)
            return
        self._exchanger.has_local = False
        if not set_to_none:
            self._exchanger.finish(is_dropped=True)
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def synchronize(self) -> None:
        """Waits for all means, and for the updates that `step` has asked for."""
        if self._exchanger is not None:
            self._exchanger.finish(is_dropped=True)

    def _finish_updates(self) -> None:
        if self._exchanger is not None:
            self._exchanger.finish_updates()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients on this rank, without an exchange, as DDP's `no_sync` does."""
        if self._exchanger is None:
            yield
            return
        before, self._exchanger.accumulates = self._exchanger.accumulates, True
        try:
            yield
        finally:
            self._exchanger.accumulates = before

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimizer, after all updates.

        `sync.state_dict()` has the state of codecs.
        """
        self._finish_updates()
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the wrapped optimizer."""
        self._finish_updates()
        self._inner.load_state_dict(state_dict)

    @property
    def schedule(self) -> str:
        """The order in which messages leave."""
        assert self.sync.schedule is not None
        return self.sync.schedule.name

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses parameters whose gradients nothing would exchange."""
        raise UsageError(
            "parameters cannot be added to a DistributedOptimizer, because their gradients would "
            "not be exchanged: add them to the optimizer before, or make a new one."
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer, after all updates."""
        self._finish_updates()
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the wrapped optimizer."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r}, schedule={self.schedule!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "a DistributedOptimizer cannot be copied or pickled, because it holds connections to "
            "other ranks; save its state_dict()."
        )

    def _send_first(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Gives all ranks the parameters of rank 0, unless they have the same already."""
        session = self.sync
        told = session.engine.agree("the parameters", {}, replicas.digests(named))
        if any(other != told[0] for other in told):
            try:
                for _, parameter in named:
                    dist.broadcast(parameter.detach(), group=session.process_group, group_src=0)
            except RuntimeError as error:
                raise session.engine.explain(error) from error


class _OptimizerAdapter(TorchAdapter):
    """Answers the session's questions without a DDP."""

    exchanger: weakref.ref[Exchanger] | Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        super().__init__(optimizer, scaler)
        self._stops: dict[StepObserver, Callable[[], None]] = {}
        """What removes the hooks of each observer."""

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Registers hooks at the model, which is known when it has been called."""
        exchanger = self.exchanger()
        self._stops[observer] = lambda: None
        if exchanger is not None and (root := exchanger.root()) is not None:
            self._stops[observer] = observe(root, observer, self._parameters)
        return lambda: self._stops.pop(observer, lambda: None)()

    def note_model(self, root: nn.Module) -> None:
        """Takes note of the model."""
        for observer in self._stops:
            self._stops[observer] = observe(root, observer, self._parameters)

    def arrange(self, units: Sequence[Sequence[str]], schedule: str) -> None:
        """Gives the exchanger other units."""
        if (exchanger := self.exchanger()) is not None:
            exchanger.arrange(units, schedule)

    def was_dropped(self, name: str, sent: torch.Tensor) -> bool:
        """Returns whether a mean was not used, because no rank has used the parameter."""
        exchanger = self.exchanger()
        return exchanger is not None and self._parameters[name] in exchanger.last_unused

    def finish_step(self) -> None:
        """Makes the updates of a step that has yet to end."""
        if (exchanger := self.exchanger()) is not None:
            exchanger.finish()

    def parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns all trained parameters."""
        return self._parameters.items()


def _checked(
    optimizer: Any, named_parameters: Any
) -> tuple[torch.optim.Optimizer, list[tuple[str, torch.Tensor]]]:
    """Checks what the user gave; returns the parameters of the optimizer by name."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}; give a torch optimizer.")
    if isinstance(optimizer, DistributedOptimizer):
        raise UsageError("optimizer is a DistributedOptimizer already; use it as it is.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the model several times in a step, each time with other gradients; "
            "use it with DistributedDataParallel and hipress.attach."
        )
    if isinstance(named_parameters, nn.Module):
        raise UsageError(
            f"named_parameters is a {type(named_parameters).__name__}; give "
            "model.named_parameters()."
        )
    try:
        named = [(clean(name), parameter) for name, parameter in named_parameters]
    except (TypeError, ValueError, AttributeError):
        raise UsageError(
            "named_parameters has no pairs of name and parameter; give model.named_parameters()."
        ) from None
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no size before the first forward pass; run one before "
                "the optimizer is made."
            )
    # Of several names of one parameter the first counts.
    firsts = {id(parameter): (name, parameter) for name, parameter in reversed(named)}
    named = list(reversed(firsts.values()))
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"two parameters have the name {twice!r}; give each its own.")
    own = {
        id(p): (k, j)
        for k, g in enumerate(optimizer.param_groups)
        for j, p in enumerate(g["params"])
    }
    known = {id(parameter) for _, parameter in named}
    for key, (group, place) in own.items():
        if key not in known:
            raise UsageError(
                f"parameter {place} of group {group} of the optimizer is not among the "
                "named_parameters, so its gradients would not be exchanged; give "
                "model.named_parameters() of the whole model."
            )
    found = [(name, parameter) for name, parameter in named if id(parameter) in own]
    if not any(parameter.requires_grad for _, parameter in found):
        raise UsageError(
            "the optimizer has no parameter that is trained; set requires_grad on some."
        )
    return optimizer, found


def _size(name: str, given: int | None, default: int) -> int:
    if given is None:
        return default
    if not isinstance(given, int) or isinstance(given, bool) or given < LEAST_SLICE_BYTES:
        raise UsageError(
            f"{name} is {given!r}; give a number of bytes, at least {LEAST_SLICE_BYTES}: smaller "
            "messages take longer to handle than to send."
        )
    return given
