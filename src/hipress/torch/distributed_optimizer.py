"""An optimizer that exchanges gradients itself, without DDP, so that the exchange goes on while the
next forward pass computes.

    backward        each unit of gradients is sent as soon as it is there, always in one order
    step            notes learning rates and the like; updates what has arrived
    next forward    the first read of a parameter waits for its mean and updates it (`pending.py`)

The order in which messages leave is that of a schedule (`hipress.casync.graphs.schedules`): the
forward pass of the second step shows in which order parameters are needed.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from hipress.casync.graphs import schedules
from hipress.casync.graphs.schedules import FIFO, PRIORITY, Order, Schedule
from hipress.codecs.base import Codec
from hipress.errors import UsageError, public
from hipress.plan import MIN_SIZE, Plan
from hipress.session import Session, Settings, StepObserver, replicas
from hipress.session.groups import has_other_ranks
from hipress.session.setup import AUTO, begin, decide
from hipress.torch.adapter import TorchAdapter
from hipress.torch.ddp import clean, observe
from hipress.torch.optim import Adam, AdamW, flat
from hipress.torch.pending import (
    PendingGradient,
    PendingParameter,
    mark_parameter,
    pending_gradient,
    unmark_parameter,
)
from hipress.units import counted

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

PER_PARAMETER = frozenset(
    {
        "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam",
        "RMSprop", "Rprop", "Adafactor", "Muon",
    }
)  # fmt: skip
"""Optimizers of torch whose update of a parameter depends on no other parameter, and which keep
nothing in their groups. All others are called once for all parameters."""


@dataclass(eq=False)
class _Unit:
    """Gradients that are started together, and their memory."""

    index: int
    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    spans: tuple[tuple[int, int], ...]
    """First element and end of each gradient in the buffer."""
    dtype: torch.dtype
    device: torch.device
    """Of its parameters when it was made."""
    buffer: torch.Tensor | None = None
    """Memory for several gradients, or for one that cannot be sent from its own."""
    order: Order | None = None
    # What follows belongs to one step.
    ready: set[int] = field(default_factory=set)
    """The places of gradients that backward has computed."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """What will hold the means, by place; while it does not, `.grad` is a `PendingGradient`."""
    zeros: set[int] = field(default_factory=set)
    """The places of parameters for which this rank has no gradient."""
    future: torch.futures.Future[Any] | None = None
    updates: dict[torch.Tensor, torch.Tensor] | None = None
    """What to update each parameter with; None before `step`."""
    options: list[dict[str, Any]] | None = None
    """The optimizer's groups as they were when `step` was called."""

    @property
    def is_under_way(self) -> bool:
        """Whether it was started, and its means were not used yet."""
        return self.future is not None

    @property
    def has_arrived(self) -> bool:
        """Whether its means are there."""
        return self.future is not None and self.future.done()

    def clear(self) -> None:
        """Ends its step."""
        for place, gradient in self.gradients.items():
            if isinstance(self.parameters[place].grad, PendingGradient):
                self.parameters[place].grad = gradient
        self.ready.clear()
        self.zeros.clear()
        self.gradients = {}
        self.future = self.updates = self.options = None


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
        self._exchanger: _Exchanger | None = None
        trained = [(name, p) for name, p in named if p.requires_grad]
        specs = self._adapter.specs(reversed(trained))
        begin(self.sync, decision, specs, [name for name, _ in named])
        if alone:
            return
        self._send_first([(name, parameter) for name, parameter in named])
        self._exchanger = _Exchanger(self, dict(trained))
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
            self._exchanger.finish()
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def synchronize(self) -> None:
        """Waits for all means, and for the updates that `step` has asked for."""
        if self._exchanger is not None:
            self._exchanger.finish()

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
        self.synchronize()
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the wrapped optimizer."""
        self.synchronize()
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
        """The state of the wrapped optimizer."""
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

    exchanger: weakref.ref[_Exchanger] | Callable[[], None] = staticmethod(lambda: None)

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

    def finish_step(self) -> None:
        """Makes the updates of a step that has yet to end."""
        if (exchanger := self.exchanger()) is not None:
            exchanger.finish()

    def parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns all trained parameters."""
        return self._parameters.items()


class _Exchanger:
    """The steps of a `DistributedOptimizer`: hooks, units, waits and updates.

    A step is open from its first gradient on. It is closed when all means are in `.grad`, for the
    optimizer to step as usual, or when `step` was called before that and all updates were made.
    Hooks of parameters refer to this object weakly; a parameter that waits for its update owns it.
    """

    def __init__(self, owner: DistributedOptimizer, parameters: dict[str, torch.Tensor]) -> None:
        self._session = owner.sync
        self._adapter = owner._adapter
        self._inner: Any = owner._inner
        self._parameters = parameters
        self._numbers = {parameter: k for k, parameter in enumerate(parameters.values())}
        self._completed: list[int] = []
        """Numbers of parameters in the order in which the first backward pass reached them."""
        self._needed: list[int] = []
        """Numbers of parameters in the order in which a forward pass has read them."""
        self._places: dict[torch.Tensor, tuple[_Unit, int]] = {}
        """The unit of each parameter, and its place there."""
        self._sequence: list[_Unit] = []
        """Units in the order in which they start, the same on all ranks."""
        self._num_started = 0
        """Units that were started in this step."""
        self._learns_order = True
        """Whether this is the step after which ranks agree on the order of the forward pass."""
        self.arrange(owner.sync.layout.units, owner.schedule)
        self._is_open = False
        self._has_stepped = False
        """Whether `step` was called and updates are left."""
        self._has_agreed = False
        """Whether ranks have told each other about the first step."""
        self._backward = -1
        """The number of the last backward pass."""
        self._num_steps = 0
        """Number of steps that were begun."""
        self.accumulates = False
        self.has_local = False
        """Whether `.grad` holds gradients that were accumulated without an exchange."""
        self._used: set[torch.Tensor] = set()
        """Parameters that have had a gradient on this rank."""
        self._unused: set[torch.Tensor] = set()
        """Parameters that have had no gradient on any rank, and are left alone."""
        self._said: set[str] = set()
        self._why_whole = _why_whole(self._inner)
        """Why all parameters are updated at once; empty if they are not."""
        if isinstance(self._inner, (Adam, AdamW)):
            self._inner.knows_incoming = True
        step = inspect.unwrap(type(self._inner).step)
        self._step_inner: Callable[[], Any] = lambda: step(self._inner)
        self.root: Callable[[], nn.Module | None] = lambda: None
        """Returns the first module that was called."""
        self._statistics: list[torch.Tensor] = []
        """Running statistics of the model, of which ranks take the mean."""
        self._mean_statistics: tuple[Any, torch.Tensor] | None = None
        self._watch_parameters()
        self._watch_modules()
        _watch_compiler(self)
        _exchangers.add(self)

    # --- hooks ------------------------------------------------------------------------------------

    def _watch_parameters(self) -> None:
        own = weakref.ref(self)

        def ready(parameter: torch.Tensor) -> None:
            if (found := own()) is not None:
                found._on_ready(parameter)

        def before(parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
            reference = weakref.ref(parameter)

            def look(_: torch.Tensor) -> None:
                found, known = own(), reference()
                if found is not None and known is not None:
                    found._before_accumulation(known)

            return look

        for parameter in self._numbers:
            register: Any = parameter.register_post_accumulate_grad_hook
            register(ready)
            parameter.register_hook(before(parameter))  # type: ignore[no-untyped-call]

    def _watch_modules(self) -> None:
        """In the first forward pass, registers hooks at the modules that own parameters.

        These matter where an extension reads a parameter; reads from Python wait by themselves.
        """
        own = weakref.ref(self)
        seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

        need = _Need(self)

        def look(module: nn.Module, _: Any) -> None:
            if torch.compiler.is_compiling():
                return
            found = own()
            if found is None or found._num_steps:
                handle.remove()
                return
            parts = [part for part in module.modules() if part not in seen]
            owners = [part for part in parts if found._owns_some(part)]
            if isinstance(module, DistributedDataParallel) and owners:
                raise UsageError(
                    "the model of a DistributedOptimizer is in a DistributedDataParallel, so its "
                    "gradients would be exchanged twice: train the module itself."
                )
            if owners and found.root() is None:
                found.root = weakref.ref(module)
                found._adapter.note_model(module)
            if owners:
                known = {id(one) for one in found._statistics}
                found._statistics += [
                    b
                    for b in module.buffers()
                    if b.is_floating_point()
                    and b.numel()
                    and b.device == found._session.engine.device
                    and id(b) not in known
                ]
            if any(isinstance(part, torch.jit.ScriptModule) for part in owners):
                found._why_whole = "TorchScript reads parameters past Python"
            for part in owners:
                part.register_forward_pre_hook(need)
            seen.update(parts)

        handle = register_module_forward_pre_hook(look)
        weakref.finalize(self, handle.remove)

    def _owns_some(self, module: nn.Module) -> bool:
        return any(p is not None and p in self._numbers for p in module._parameters.values())

    def _before_accumulation(self, parameter: torch.Tensor) -> None:
        """Backward is about to add a gradient to `.grad`, which may be on its way."""
        unit, place = self._places[parameter]
        if unit.is_under_way or place in unit.ready:
            # Another backward pass; also where `.grad` was cleared, with or without a step. What
            # ranks exchange must not depend on which units each of them has started.
            self.finish()
        elif isinstance(parameter.grad, PendingGradient):  # an earlier pass did without it
            gradient = unit.gradients.pop(place)
            parameter.grad = None if place in unit.zeros else gradient
            unit.zeros.discard(place)

    def _on_ready(self, parameter: torch.Tensor) -> None:
        """Backward has computed a gradient."""
        if self.accumulates:
            self.has_local = True
            return
        if not self._is_open or self._num_started == len(self._sequence):
            self._begin()
        unit, place = self._places[parameter]
        self._used.add(parameter)
        self._take(unit, place)
        unit.ready.add(place)
        self._watch_backward()
        if self._num_steps == 1:
            self._completed.append(self._numbers[parameter])
        if len(unit.ready) < len(unit.parameters):
            return
        while self._num_started < len(self._sequence):
            unit = self._sequence[self._num_started]
            if len(unit.ready) < len(unit.parameters):
                return
            self._start(unit)

    # --- a step -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begins a step with its first gradient, and ends the one before."""
        self.finish()
        if self._num_steps and self._learns_order:
            self._agree_on_orders()
        self._session.begin_step()
        self._is_open, self._num_started, self.has_local = True, 0, False
        self._num_steps += 1
        if self._statistics:  # the forward pass has updated them
            flats = torch.cat([one.detach().float().reshape(-1) for one in self._statistics])
            handle = self._session.engine.allreduce(
                [flats],
                names=("(running statistics)",),
                step=self._session.step,
                order=Order(-1, -1),
            )
            self._mean_statistics = handle, flats

    def _watch_backward(self) -> None:
        """Once for each backward pass, asks to be called at its end."""
        number = torch._C._current_graph_task_id()
        if number == self._backward:
            return
        self._backward = number
        own = weakref.ref(self)

        def end() -> None:
            if (found := own()) is not None and found._is_open:
                found._take_rest()

        # What is inside another backward pass, as with checkpoints, ends earlier: more may follow.
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _take(self, unit: _Unit, place: int) -> None:
        """Lets the first read of a gradient wait for its mean; without a gradient, that is 0 here.

        Whoever lists all gradients that are not None, as clipping does, must find the same ones on
        all ranks before anything is waited for.
        """
        parameter = unit.parameters[place]
        given = parameter.grad
        if given is None and place not in unit.ready:
            unit.zeros.add(place)
        unit.gradients[place] = self._gather(unit, place, parameter)
        if given is not None or parameter.requires_grad:
            parameter.grad = pending_gradient(unit.gradients[place], self)

    def _take_rest(self) -> None:
        for unit in self._sequence[self._num_started :]:
            for place in range(len(unit.parameters)):
                if place not in unit.gradients:
                    self._take(unit, place)

    def _start(self, unit: _Unit) -> None:
        """Starts the exchange of a unit."""
        self._num_started += 1
        buffer = flat(unit.gradients[0]) if len(unit.parameters) == 1 else unit.buffer
        assert buffer is not None
        unit.future = self._session.exchange(unit.index, unit.names, buffer, unit.order)

    def _gather(self, unit: _Unit, place: int, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a gradient in memory that can be exchanged."""
        given = parameter.grad
        if given is not None and given.layout is not torch.strided:
            raise UsageError(
                f"parameter {unit.names[place]!r} has a sparse gradient, and a "
                "DistributedOptimizer takes dense ones: give its layer sparse=False, or use DDP."
            )
        if (parameter.dtype, parameter.device) != (unit.dtype, unit.device):
            raise UsageError(
                f"parameter {unit.names[place]!r} is {_kind(parameter.dtype, parameter.device)} "
                f"and was {_kind(unit.dtype, unit.device)} when the DistributedOptimizer was made: "
                "convert or move the model before that, or make a new one."
            )
        if len(unit.parameters) == 1 and given is not None and _is_like(given, parameter):
            return given
        if unit.buffer is None:
            unit.buffer = torch.empty(unit.spans[-1][1], dtype=unit.dtype, device=unit.device)
        start, stop = unit.spans[place]
        view = _shaped(unit.buffer[start:stop], parameter)
        if given is None:
            view.zero_()
        elif given.data_ptr() != view.data_ptr():
            view.copy_(given)
        return view

    def _start_rest(self) -> None:
        """Starts what backward has left out, which other ranks may have used."""
        self._take_rest()
        while self._num_started < len(self._sequence):
            self._start(self._sequence[self._num_started])
        if self._num_steps == 1 and not self._has_agreed:
            self._agree_on_first()

    def step(self) -> None:
        """Notes what to update with, and updates what has arrived."""
        if self.has_local and (self._has_stepped or not self._is_open):
            raise UsageError(
                "step was called, and all gradients since the last one were accumulated in "
                "no_sync(), so ranks have not exchanged them: leave no_sync() before the last "
                "backward pass of a step."
            )
        self._check_parameters()
        if self._is_open and not self._has_stepped:
            self._start_rest()
            reason = self._why_whole
            if not reason and self._inner._optimizer_step_post_hooks:
                reason = "the optimizer has hooks that run after its steps"
            if not reason:
                self._step_apart()
                if self._session.meets_at_end:
                    self.finish()
                return
            self._say(reason)
        # As without this class: `.grad` holds the means.
        self.finish()
        self._inner.step()

    def _check_parameters(self) -> None:
        """Refuses gradients that were not exchanged."""
        for number, group in enumerate(self._inner.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None and parameter not in self._places:
                    raise UsageError(
                        f"parameter {place} of group {number} of the optimizer has a gradient and "
                        "had none to exchange when the DistributedOptimizer was made, because it "
                        "was frozen or not there: make the DistributedOptimizer when all that is "
                        "ever trained has requires_grad, and freeze parameters after that."
                    )

    def _step_apart(self) -> None:
        """Lets each parameter be updated when its mean is there."""
        self._inner._opt_called = True  # for schedulers that know the wrapped optimizer
        for hook in list(self._inner._optimizer_step_pre_hooks.values()):
            hook(self._inner, (), {})
        # The user may change options before an update is made.
        options = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
            for group in self._inner.param_groups
        ]
        for unit in self._sequence:
            unit.options = options
            unit.updates = {}
            for place, parameter in enumerate(unit.parameters):
                given = parameter.grad
                if isinstance(given, PendingGradient):
                    unit.updates[parameter] = unit.gradients[place]
                elif given is not None:  # put there by the user
                    unit.updates[parameter] = given
        self._has_stepped = True
        self._end_statistics()
        if not self._learns_order:  # else the forward pass is to find all of them waiting
            self._update([unit for unit in self._sequence if unit.has_arrived])
        for unit in self._sequence:
            for parameter in unit.updates or ():
                mark_parameter(parameter, self)

    def _agree_on_first(self) -> None:
        """Learns which parameters no rank uses, and in which order backward computes gradients."""
        self._has_agreed = True
        unused = [k for parameter, k in self._numbers.items() if parameter not in self._used]
        told = self._session.engine.agree("the first step", {}, [unused, self._completed])
        never = set(told[0][0]).intersection(*(theirs for theirs, _ in told))
        self._unused = {parameter for parameter, k in self._numbers.items() if k in never}
        self._completed = told[0][1]
        self._sort_units()
        if unused and self._session.engine.transport.rank == 0:
            _log.info(
                "%s had no gradient on rank 0 in the first step, such as %s: where other ranks "
                "have one, rank 0 takes part with zeros.",
                counted(len(unused), "parameter"), list(self._parameters)[unused[0]],
            )  # fmt: skip

    def _agree_on_orders(self) -> None:
        """Takes the order in which the forward pass of rank 0 has read parameters."""
        self._learns_order = False
        needed = list(dict.fromkeys(self._needed))
        self._needed = self._session.engine.agree("the order of the forward pass", {}, needed)[0]
        self._set_orders()

    def arrange(self, groups: Iterable[Sequence[str]], schedule: str) -> None:
        """Puts parameters into other units, between two steps."""
        self._schedule = schedule
        self._sequence = [
            _new_unit(index, names, [self._parameters[name] for name in names])
            for index, names in enumerate(groups)
        ]
        self._places = {
            parameter: (unit, place)
            for unit in self._sequence
            for place, parameter in enumerate(unit.parameters)
        }
        self._learns_order = not self._needed
        self._sort_units()
        self._set_orders()

    def _sort_units(self) -> None:
        """Lets units start in the order in which backward completes them, as far as it is known."""
        place = {number: k for k, number in enumerate(self._completed)}
        numbers = self._numbers
        self._sequence.sort(
            key=lambda unit: max(place.get(numbers[p], len(numbers)) for p in unit.parameters)
        )

    def _set_orders(self) -> None:
        """Gives units their orders.

        A unit is needed with the first of its parameters; parameters that the forward pass was not
        seen to read follow in the opposite order of backward.
        """
        seen = {number: k for k, number in enumerate(self._needed)}
        needed = sorted(
            range(len(self._sequence)),
            key=lambda k: (
                min(seen.get(self._numbers[p], len(seen)) for p in self._sequence[k].parameters),
                -k,
            ),
        )
        places = sorted(range(len(needed)), key=needed.__getitem__)
        for unit, order in zip(
            self._sequence, schedules.orders(self._schedule, places), strict=True
        ):
            unit.order = order

    # --- waits and updates ------------------------------------------------------------------------

    def need_parameter(self, parameter: torch.Tensor) -> None:
        """Returns when the parameter has been updated, and has its own class again."""
        unit, _ = self._places[parameter]
        if self._learns_order:
            self._needed.append(self._numbers[parameter])
        if unit.updates is not None:
            with _apart(unit.device):
                # While it is on its way there is time to update what is needed later.
                others = [one for one in self._sequence if one is not unit and one.has_arrived]
                if others and not unit.has_arrived and not self._learns_order:
                    self._update(others)
                self._update([unit])
        if type(parameter) is PendingParameter:
            unmark_parameter(parameter)

    def need_gradients(self) -> None:
        """Returns when all means are in `.grad`."""
        if torch._C._current_graph_task_id() != -1 and self._num_started < len(self._sequence):
            raise UsageError(
                "a gradient is read in the middle of a backward pass, before ranks have exchanged "
                "all of them: read it after backward, or register the hook that reads it before "
                "the DistributedOptimizer is made, which gives it the gradient of this rank."
            )
        if self._is_open and not self._has_stepped:
            self._say("gradients are read between backward and step, as clipping and GradScaler do")
        self.finish()

    def finish(self) -> None:
        """Waits for all means, and makes the updates that `step` has asked for."""
        if self._is_open:
            with _apart(self._session.engine.device):
                self._finish()

    def _finish(self) -> None:
        self._start_rest()
        for unit in self._sequence:
            if unit.is_under_way:
                self._wait(unit)
        if self._has_stepped:
            self._update([unit for unit in self._sequence if unit.is_under_way])
            return
        self._end_statistics()
        for unit in self._sequence:
            for place, gradient in unit.gradients.items():
                parameter = unit.parameters[place]
                is_used = self._is_used(parameter, gradient)
                if isinstance(parameter.grad, PendingGradient):
                    parameter.grad = gradient if is_used else None
        self._close()

    def _wait(self, unit: _Unit) -> None:
        assert unit.future is not None
        if not unit.future.done():
            start_ns = time.perf_counter_ns()
            unit.future.wait()
            self._session.note_wait(unit.names, start_ns)
        else:
            unit.future.wait()  # raises what went wrong
        self._session.check()

    @torch.no_grad()
    def _update(self, units: Sequence[_Unit]) -> None:
        """Makes the updates of units whose means are there; closes the step after the last."""
        updates: dict[torch.Tensor, torch.Tensor] = {}
        options = None
        for unit in units:
            self._wait(unit)  # also of one that has arrived: on a GPU its work may be left
            options = unit.options
            for parameter, gradient in (unit.updates or {}).items():
                if type(parameter) is PendingParameter:
                    unmark_parameter(parameter)
                if self._is_used(parameter, gradient):
                    updates[parameter] = gradient
                elif isinstance(parameter.grad, PendingGradient):
                    parameter.grad = None
        if updates:
            with _apart(units[0].device):
                self._step_some(updates, options)
        for unit in units:
            unit.clear()
        if self._has_stepped and not any(unit.is_under_way for unit in self._sequence):
            self._close()

    def _is_used(self, parameter: torch.Tensor, mean: torch.Tensor) -> bool:
        """Returns whether any rank has had a gradient for a parameter; alike on all ranks."""
        if parameter in self._unused and mean.any():
            self._unused.discard(parameter)
        return parameter not in self._unused

    def _step_some(self, updates: dict[torch.Tensor, torch.Tensor], options: Any) -> None:
        """Lets the optimizer update some parameters, with the options of the call of `step`."""
        inner, groups = self._inner, self._inner.param_groups
        given = {parameter: parameter.grad for parameter in updates}
        for parameter, gradient in updates.items():
            parameter.grad = gradient
        inner.param_groups = [
            {**group, "params": [p for p in group["params"] if p in updates]} for group in options
        ]
        try:
            self._step_inner()
        finally:
            inner.param_groups = groups
            for parameter, before in given.items():
                if not isinstance(before, PendingGradient):  # cleared since, or the user's own
                    parameter.grad = before

    def _close(self) -> None:
        """Ends the step."""
        for unit in self._sequence:
            unit.clear()
        self._is_open = self._has_stepped = False
        self._session.end_step()

    def _end_statistics(self) -> None:
        if self._mean_statistics is None:
            return
        (handle, flats), self._mean_statistics = self._mean_statistics, None
        handle.wait()
        parts = torch.split(flats, [one.numel() for one in self._statistics])
        for one, part in zip(self._statistics, parts, strict=True):
            one.detach().copy_(part.view(one.shape))

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            if self._session.engine.transport.rank == 0:
                _log.info(
                    "%s, so each step waits for all means and none is hidden under the next "
                    "forward pass.", reason,
                )  # fmt: skip

    def on_compile(self) -> None:
        """Makes all updates before a compiled graph runs, which reads parameters past Python."""
        self._why_whole = self._why_whole or "torch.compile reads parameters past Python"
        if self._has_stepped:
            self.finish()


class _Need:
    """A hook of a module that waits for its parameters; in copies and pickles it does nothing."""

    def __init__(self, exchanger: _Exchanger | None = None) -> None:
        self._own = None if exchanger is None else weakref.ref(exchanger)

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or self._own is None or (found := self._own()) is None:
            return
        for parameter in module._parameters.values():
            if type(parameter) is PendingParameter:
                found.need_parameter(parameter)

    def __reduce__(self) -> Any:
        return _Need, ()


_exchangers: weakref.WeakSet[_Exchanger] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """Makes the updates of the last step, in which other ranks need this one."""
    for exchanger in list(_exchangers):
        try:
            exchanger.finish()
        except Exception as error:  # it was raised before, or the other ranks have failed
            _log.warning("the last step was not finished: %s", error)


def _watch_compiler(exchanger: _Exchanger) -> None:
    """Lets the exchanger know before anything is compiled."""
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.utils import counters

    own = weakref.ref(exchanger)

    def on_start(_: Any) -> None:
        if (found := own()) is not None:
            found.on_compile()

    callback_handler.register_start_callback(on_start)
    weakref.finalize(exchanger, callback_handler.remove_start_callback, on_start)
    if counters["frames"].get("ok"):
        exchanger.on_compile()


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


def _why_whole(optimizer: torch.optim.Optimizer) -> str:
    """Returns why an optimizer must update all parameters at once; empty if it need not."""
    kind = type(optimizer)
    name = kind.__name__
    is_known = name in PER_PARAMETER and getattr(torch.optim, name, None) is kind
    if not (is_known or kind in (Adam, AdamW)):
        return f"an update of {name} may depend on all parameters"
    kinds = {type(p) for group in optimizer.param_groups for p in group["params"]}
    other = next((kind for kind in kinds if kind is not nn.Parameter), None)
    return "" if other is None else f"parameters are of the class {other.__name__}"


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Leaves the inference mode and the autocast of a forward pass in which updates are made."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _size(name: str, given: int | None, default: int) -> int:
    if given is None:
        return default
    if not isinstance(given, int) or isinstance(given, bool) or given < LEAST_SLICE_BYTES:
        raise UsageError(
            f"{name} is {given!r}; give a number of bytes, at least {LEAST_SLICE_BYTES}: smaller "
            "messages take longer to handle than to send."
        )
    return given


def _new_unit(index: int, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> _Unit:
    stops = list(accumulate(parameter.numel() for parameter in parameters))
    return _Unit(
        index=index,
        names=tuple(names),
        parameters=tuple(parameters),
        spans=tuple(zip([0, *stops[:-1]], stops, strict=True)),
        dtype=parameters[0].dtype,
        device=parameters[0].device,
    )


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"


def _is_like(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Returns whether a gradient lies in memory as its parameter does, without gaps."""
    return (
        gradient.dtype == parameter.dtype
        and gradient.stride() == parameter.stride()
        and flat(gradient).data_ptr() == gradient.data_ptr()
    )


def _shaped(elements: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a view of flat elements with the shape and the order in memory of a parameter."""
    if parameter.is_contiguous() or flat(parameter).data_ptr() != parameter.data_ptr():
        return elements.view(parameter.shape)
    return elements.as_strided(parameter.shape, parameter.stride())
