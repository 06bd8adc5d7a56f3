"""The steps of a `DistributedOptimizer`: hooks, units, waits and updates.

backward        each unit of gradients is sent as soon as it is there, always in one order; at
                its end the facts of the step follow, such as which parameters were used
step            notes learning rates and the like; updates what has arrived
next forward    the first read of a parameter waits for its mean and updates it (`pending.py`)
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from hipress.casync.graphs import schedules
from hipress.casync.graphs.schedules import Order
from hipress.errors import PeerError, UsageError
from hipress.torch.adapter import after_step
from hipress.torch.optim import Adam, AdamW, flat
from hipress.torch.pending import (
    PendingGradient,
    PendingParameter,
    mark_parameter,
    pending_gradient,
    unmark_parameter,
)
from hipress.torch.running_statistics import RunningStatistics
from hipress.units import counted

if TYPE_CHECKING:
    from hipress.torch.distributed_optimizer import DistributedOptimizer

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("hipress")

PER_PARAMETER = frozenset(
    {
        "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam",
        "RMSprop", "Rprop", "Adafactor", "Muon",
    }
)  # fmt: skip
"""Optimizers of torch whose update of a parameter depends on no other parameter, and which keep
nothing in their groups. All others are called once for all parameters."""


@dataclass(eq=False)
class Unit:
    """Gradients that are started together, and their memory."""

    index: int
    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    spans: tuple[tuple[int, int], ...]
    """First element and end of each gradient in the buffer."""
    dtype: torch.dtype
    device: torch.device
    """Device of the parameters when the unit was made."""
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


def _locked(
    method: Callable[Concatenate[Exchanger, P], R],
) -> Callable[Concatenate[Exchanger, P], R]:
    """Lets one thread at a time change the step: others may read parameters meanwhile."""

    @functools.wraps(method)
    def call(self: Exchanger, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


_exchangers: weakref.WeakSet[Exchanger] = weakref.WeakSet()


class Exchanger:
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
        self._lock = threading.RLock()
        self._handles: list[RemovableHandle] = []
        """What removes the hooks."""
        weakref.finalize(self, _remove, self._handles)
        self.is_retired = False
        """Whether a later DistributedOptimizer has taken the parameters over."""
        for other in list(_exchangers):
            if not self._numbers.keys().isdisjoint(other._numbers):
                other._retire()
        self._completed: list[int] = []
        """Numbers of parameters in the order in which the first backward pass reached them."""
        self._needed: list[int] = []
        """Numbers of parameters in the order in which a forward pass has read them."""
        self._places: dict[torch.Tensor, tuple[Unit, int]] = {}
        """The unit of each parameter, and its place there."""
        self._sequence: list[Unit] = []
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
        self._in_backward = False
        """Whether that pass has not ended; it stays so if the pass ends with an error."""
        self._num_steps = 0
        """Number of steps that were begun."""
        self.accumulates = False
        self.has_local = False
        """Whether `.grad` holds gradients that were accumulated without an exchange."""
        self._used: set[torch.Tensor] = set()
        """Parameters that have had a gradient on this rank."""
        self._facts: tuple[Any, torch.Tensor] | None = None
        """The exchange of this step's facts: for each parameter whether a rank has used it, and for
        each rank whether its backward pass has failed."""
        self._unused: set[torch.Tensor] | None = None
        """Parameters that no rank has used in this step; None before that is known."""
        self.last_unused: set[torch.Tensor] = set()
        """Those of the step that has ended last."""
        self._is_updating = False
        self._forward_thread = 0
        """The thread that has run the last forward pass."""
        self._said: set[str] = set()
        self._why_whole = why_whole(self._inner)
        """Why all parameters are updated at once; empty if they are not."""
        if isinstance(self._inner, (Adam, AdamW)):
            self._inner.knows_incoming = True
        step = inspect.unwrap(type(self._inner).step)
        self._step_inner: Callable[[], Any] = functools.partial(step, self._inner)
        """Makes the updates without the hooks of the optimizer."""
        self.root: Callable[[], nn.Module | None] = lambda: None
        """Returns the first module that was called."""
        names = {parameter: name for name, parameter in parameters.items()}
        self._statistics = RunningStatistics(names, self._session)
        self._watch_parameters()
        self._watch_modules()
        self._watch_inner()
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
            hook: Any = parameter.register_hook
            self._handles += [register(ready), hook(before(parameter))]

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
                found._statistics.note(module)
            if any(isinstance(part, torch.jit.ScriptModule) for part in owners):
                found._why_whole = "TorchScript reads parameters past Python"
            for part in owners:
                found._handles.append(part.register_forward_pre_hook(need))
            seen.update(parts)

        handle = register_module_forward_pre_hook(look)
        self._handles.append(handle)

    def _watch_inner(self) -> None:
        """Makes all updates before the wrapped optimizer's state is saved or loaded."""
        own = weakref.ref(self)

        def finish(*_: Any) -> None:
            if (found := own()) is not None:
                found.finish_updates()

        self._handles += [
            self._inner.register_state_dict_pre_hook(finish),
            self._inner.register_load_state_dict_pre_hook(finish),
        ]

    def _retire(self) -> None:
        """Makes way for another optimizer of the same parameters."""
        self.finish()
        _remove(self._handles)
        self.is_retired = True
        _exchangers.discard(self)

    def _owns_some(self, module: nn.Module) -> bool:
        return any(p is not None and p in self._numbers for p in module._parameters.values())

    @_locked
    def _before_accumulation(self, parameter: torch.Tensor) -> None:
        """Backward is about to add a gradient to `.grad`, which may be on its way."""
        unit, place = self._places[parameter]
        if unit.is_under_way or place in unit.ready:
            # Another backward pass; also where `.grad` was cleared, with or without a step. What
            # ranks exchange must not depend on which units each of them has started.
            self.finish(is_dropped=self._backward != torch._C._current_graph_task_id())
        elif isinstance(parameter.grad, PendingGradient):  # an earlier pass did without it
            gradient = unit.gradients.pop(place)
            parameter.grad = None if place in unit.zeros else gradient
            unit.zeros.discard(place)

    @_locked
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
        self.finish(is_dropped=True)
        if self._num_steps and self._learns_order:
            self._agree_on_orders()
        self._session.begin_step()
        self._is_open, self._num_started, self.has_local = True, 0, False
        self._num_steps += 1
        if self._num_steps == 1:
            self._statistics.agree()
        self._statistics.start()  # the forward pass has updated them

    def _watch_backward(self) -> None:
        """Once for each backward pass, asks to be called at its end."""
        number = torch._C._current_graph_task_id()
        if number == self._backward:
            return
        self._backward = number
        own = weakref.ref(self)

        def end() -> None:
            if (found := own()) is not None:
                found._end_backward()

        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(end)

    @_locked
    def _end_backward(self) -> None:
        """Starts what is left, so that all ranks do it at the same place of their program."""
        if not self._is_open:
            return
        if _is_nested_backward(
            self._forward_thread
        ):  # as with reentrant checkpoints: more may follow
            self._take_rest()
            return
        self._in_backward = False
        self._start_rest()

    def _take(self, unit: Unit, place: int) -> None:
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

    def _start(self, unit: Unit) -> None:
        """Starts the exchange of a unit."""
        self._num_started += 1
        buffer = flat(unit.gradients[0]) if len(unit.parameters) == 1 else unit.buffer
        assert buffer is not None
        unit.future = self._session.exchange(unit.index, unit.names, buffer, unit.order)

    def _gather(self, unit: Unit, place: int, parameter: torch.Tensor) -> torch.Tensor:
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
        if not unit.gradients and unit.buffer is not None and _is_shared(unit.buffer):
            unit.buffer = None  # someone has kept a gradient of the last step
        if unit.buffer is None:
            unit.buffer = torch.empty(unit.spans[-1][1], dtype=unit.dtype, device=unit.device)
        start, stop = unit.spans[place]
        view = _shaped(unit.buffer[start:stop], parameter)
        if given is None:
            view.zero_()
        elif given.data_ptr() != view.data_ptr():
            view.copy_(given)
        return view

    def _start_rest(self, is_failed: bool = False) -> None:
        """Starts what backward has left out, which other ranks may have used, and tells the facts.

        Args:
            is_failed: Whether the backward pass of this rank has ended with an error.
        """
        if self._facts is not None:
            return
        self._take_rest()
        while self._num_started < len(self._sequence):
            self._start(self._sequence[self._num_started])
        engine = self._session.engine
        zeros = {unit.parameters[place] for unit in self._sequence for place in unit.zeros}
        is_used = [float(parameter not in zeros) for parameter in self._numbers]
        have_failed = [0.0] * engine.transport.num_ranks
        have_failed[engine.transport.rank] = float(is_failed)
        facts = torch.tensor(is_used + have_failed, device=engine.device)
        handle = engine.allreduce(
            [facts], names=("(facts of the step)",), step=self._session.step, order=Order(-1, -1)
        )
        self._facts = handle, facts
        if self._num_steps == 1 and not self._has_agreed:
            self._agree_on_first()

    @_locked
    def step(self) -> None:
        """Notes what to update with, and updates what has arrived."""
        if self.is_retired:
            raise UsageError(
                "another DistributedOptimizer was made for these parameters after this one; use "
                "that one."
            )
        if self.has_local and (self._has_stepped or not self._is_open):
            raise UsageError(
                "step was called, and all gradients since the last one were accumulated in "
                "no_sync(), so ranks have not exchanged them: leave no_sync() before the last "
                "backward pass of a step."
            )
        self._check_parameters()
        if self._is_open and not self._has_stepped:
            self._start_rest()
            reason = self._why_whole or _why_whole_now(self._inner)
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
        own_hooks = self._inner._optimizer_step_pre_hooks
        for hook in (*_global_optimizer_pre_hooks.values(), *own_hooks.values()):
            hook(self._inner, (), {})
        if not self._is_open:  # a hook has read gradients, and all means are in `.grad`
            self._step_inner()
            return
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
        self._statistics.end()
        # In the step that learns the order, the forward pass is to find all of them waiting.
        if not self._learns_order and self._has_facts:
            self._update([unit for unit in self._sequence if unit.has_arrived])
        for unit in self._sequence:
            for parameter in unit.updates or ():
                mark_parameter(parameter, self)

    def _agree_on_first(self) -> None:
        """Learns in which order backward computes gradients."""
        self._has_agreed = True
        self._completed = self._session.engine.agree("the first step", {}, self._completed)[0]
        self._sort_units()
        unused = [name for name, p in self._parameters.items() if p not in self._used]
        if unused and self._session.engine.transport.rank == 0:
            _log.info(
                "%s had no gradient on rank 0 in the first step, such as %s: where other ranks "
                "have one, rank 0 takes part with zeros.",
                counted(len(unused), "parameter"), unused[0],
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

    @_locked
    def need_parameter(self, parameter: torch.Tensor) -> None:
        """Returns when the parameter has been updated, and has its own class again."""
        unit, _ = self._places[parameter]
        if self._learns_order:
            self._needed.append(self._numbers[parameter])
        if unit.updates is not None:
            with _apart(unit.device):
                # While it is on its way there is time to update what is needed later.
                others = [one for one in self._sequence if one is not unit and one.has_arrived]
                if self._has_facts and not unit.has_arrived and not self._learns_order:
                    self._update(others)
                self._update([unit])
        if type(parameter) is PendingParameter:
            unmark_parameter(parameter)

    def begin_module(self, module: nn.Module) -> None:
        """Returns when the parameters of a module have been updated."""
        self._forward_thread = threading.get_ident()
        if self._is_updating:  # by another thread, which has read a parameter
            with self._lock:
                pass
        for parameter in module._parameters.values():
            if type(parameter) is PendingParameter:
                self.need_parameter(parameter)

    @_locked
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

    @_locked
    def finish_updates(self) -> None:
        """Makes the updates that `step` has asked for; gradients without a step stay under way."""
        if self._has_stepped:
            self.finish()

    @_locked
    def finish(self, *, is_dropped: bool = False) -> None:
        """Waits for all means, and makes the updates that `step` has asked for.

        Args:
            is_dropped: Whether what has no `step` is thrown away.
        """
        if self._is_open:
            with _apart(self._session.engine.device):
                self._finish(is_dropped and self._in_backward)

    def _finish(self, is_failed: bool) -> None:
        self._start_rest(is_failed)
        for unit in self._sequence:
            if unit.is_under_way:
                self._wait(unit)
        if self._has_stepped:
            self._update([unit for unit in self._sequence if unit.is_under_way])
            return
        unused = self._wait_for_facts()
        self._statistics.end()
        for unit in self._sequence:
            for place, gradient in unit.gradients.items():
                parameter = unit.parameters[place]
                if isinstance(parameter.grad, PendingGradient):
                    parameter.grad = None if parameter in unused else gradient
        self._close()

    @property
    def _has_facts(self) -> bool:
        return self._unused is not None or (self._facts is not None and self._facts[0].done())

    def _wait_for_facts(self) -> set[torch.Tensor]:
        """Returns the parameters that no rank has used in this step, which get no update."""
        if self._unused is None:
            assert self._facts is not None
            handle, facts = self._facts
            handle.wait()
            told = facts.tolist()
            failed = [k for k, one in enumerate(told[len(self._numbers) :]) if one]
            if failed and len(failed) < self._session.engine.transport.num_ranks:
                ranks = ", ".join(map(str, failed))
                raise PeerError(
                    f"backward ended with an error on rank {ranks} in step {self._session.step}, "
                    "and this batch was left out there alone, so replicas would differ: restart "
                    "from the last checkpoint, and leave a batch out on all ranks or on none.",
                    ranks=tuple(failed),
                )
            self._unused = {p for p, one in zip(self._numbers, told, strict=False) if not one}
        return self._unused

    def _wait(self, unit: Unit) -> None:
        assert unit.future is not None
        if not unit.future.done():
            start_ns = time.perf_counter_ns()
            unit.future.wait()
            self._session.note_wait(unit.names, start_ns)
        else:
            unit.future.wait()  # raises what went wrong
        self._session.check()

    @torch.no_grad()
    def _update(self, units: Sequence[Unit]) -> None:
        """Makes the updates of units whose means are there; closes the step after the last."""
        if not units:
            return
        unused = self._wait_for_facts()
        for unit in units:
            self._wait(unit)  # also of one that has arrived: on a GPU its work may be left
        # Taken first: what is called meanwhile, such as a handler of a signal, must not repeat it.
        taken = [(unit, unit.updates) for unit in units if unit.updates is not None]
        for unit, _ in taken:
            unit.updates = None
        given = {p: gradient for _, updates in taken for p, gradient in updates.items()}
        pending: list[torch.Tensor] = [p for p in given if type(p) is PendingParameter]
        for waiting in pending:
            unmark_parameter(waiting)
        for parameter in given:
            if parameter in unused and isinstance(parameter.grad, PendingGradient):
                parameter.grad = None
        used = {p: gradient for p, gradient in given.items() if p not in unused}
        versions = {p: p._version for p in used}
        self._is_updating = True
        try:
            if used:
                with _apart(units[0].device):
                    self._step_some(used, taken[0][0].options)
        except BaseException:  # such as KeyboardInterrupt: the next read makes what is left
            left = {p for p in given if p in unused or p._version == versions[p]}
            for unit, updates in taken:
                unit.updates = {p: gradient for p, gradient in updates.items() if p in left}
            for waiting in pending:
                if waiting in left:
                    mark_parameter(waiting, self)
            raise
        finally:
            self._is_updating = False
        for unit in units:
            unit.clear()
        if self._has_stepped and not any(unit.is_under_way for unit in self._sequence):
            self._close()

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
        self._is_open = self._has_stepped = self._in_backward = False
        self.last_unused = self._unused or set()
        self._facts = self._unused = None
        self._session.end_step()

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            if self._session.engine.transport.rank == 0:
                _log.info(
                    "%s, so each step waits for all means and none is hidden under the next "
                    "forward pass.", reason,
                )  # fmt: skip

    @_locked
    def on_compile(self) -> None:
        """Makes all updates before a compiled graph runs, which reads parameters past Python."""
        self._why_whole = self._why_whole or "torch.compile reads parameters past Python"
        if self._has_stepped:
            self.finish()


class _Need:
    """A hook of a module that waits for its parameters; in copies and pickles it does nothing."""

    def __init__(self, exchanger: Exchanger | None = None) -> None:
        self._own = None if exchanger is None else weakref.ref(exchanger)

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or self._own is None or (found := self._own()) is None:
            return
        found.begin_module(module)

    def __reduce__(self) -> Any:
        return _Need, ()


@atexit.register
def _finish_all() -> None:
    """Makes the updates of the last step, in which other ranks need this one."""
    for exchanger in list(_exchangers):
        try:
            exchanger.finish(is_dropped=True)
        except Exception as error:  # it was raised before, or the other ranks have failed
            _log.warning("the last step was not finished: %s", error)


def _watch_compiler(exchanger: Exchanger) -> None:
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


def _remove(handles: list[RemovableHandle]) -> None:
    """Removes hooks."""
    while handles:
        handles.pop().remove()


def _is_nested_backward(forward_thread: int) -> bool:
    """Returns whether a backward pass that has just ended runs inside another one."""
    # A thread of autograd's own is inside a pass of another thread.
    is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
    depth = int(is_foreign and threading.get_ident() != forward_thread)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        depth += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back
    return depth > 1


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def why_whole(optimizer: torch.optim.Optimizer) -> str:
    """Returns why an optimizer must update all parameters at once; empty if it need not."""
    kind = type(optimizer)
    name = kind.__name__
    is_known = name in PER_PARAMETER and getattr(torch.optim, name, None) is kind
    if not (is_known or kind in (Adam, AdamW)):
        return f"an update of {name} may depend on all parameters"
    kinds = {type(p) for group in optimizer.param_groups for p in group["params"]}
    other = next((kind for kind in kinds if kind is not nn.Parameter), None)
    return "" if other is None else f"parameters are of the class {other.__name__}"


def _why_whole_now(optimizer: torch.optim.Optimizer) -> str:
    """Returns why this step must update all parameters at once; empty if it need not."""
    of_all = [hook for hook in _global_optimizer_post_hooks.values() if hook is not after_step]
    if optimizer._optimizer_step_post_hooks or of_all:
        return "hooks run after the optimizer's steps"
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return "the optimizer's step was replaced"
    return ""


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Leaves all modes of a forward pass in which updates are made: inference, autocast,
    torch.func's transforms, and tracing."""
    torch_c: Any = torch._C
    tracing = torch_c._get_tracing_state()
    torch_c._set_tracing_state(None)
    try:
        with (
            torch._C._DisableFuncTorch(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        torch_c._set_tracing_state(tracing)


def _new_unit(index: int, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Unit:
    stops = list(accumulate(parameter.numel() for parameter in parameters))
    return Unit(
        index=index,
        names=tuple(names),
        parameters=tuple(parameters),
        spans=tuple(zip([0, *stops[:-1]], stops, strict=True)),
        dtype=parameters[0].dtype,
        device=parameters[0].device,
    )


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"


def _is_shared(buffer: torch.Tensor) -> bool:
    """Returns whether other tensors have the memory of a buffer."""
    storage = buffer.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # the buffer and `storage`


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
