"""PyTorch as a framework of the session, whatever exchanges its gradients: parameters, optimizer,
GradScaler.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import TensorWeakRef

from hipress.codecs.base import Codec
from hipress.errors import UsageError
from hipress.recommendations import ADAM, UNKNOWN
from hipress.session import Adapter, GradientSpec, Session
from hipress.torch import optimizer_checks
from hipress.torch.optim import MomentumExchange, flat

_log = logging.getLogger("hipress")

MANY_STEPS_BY_OTHERS = 10
"""So many steps in a row, without one of the attached optimizer, are no accident."""
MANY_OWN_STEPS = 10
"""After so many exchanges in a row that the attached optimizer used, an accident is forgotten."""


class TorchAdapter(Adapter):
    """Answers the session's questions about parameters and their optimizer.

    Args:
        optimizer: Learning rates, momentum and weight decay are read from it.
        scaler: The GradScaler, if there is one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> None:
        super().__init__()
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise UsageError(f"optimizer is a {type(optimizer).__name__}; give a torch optimizer.")
        # Accelerate and Lightning wrap optimizers.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise UsageError(f"scaler is a {type(scaler).__name__}; give a torch.amp.GradScaler.")
        self._optimizer = optimizer
        self._exchange = optimizer if isinstance(optimizer, MomentumExchange) else None
        """The optimizer, if it can have momentum exchanged in place of gradients."""
        self._has_new_state = True
        """Whether the optimizer has loaded its state since ranks have compared it."""
        self._has_new_options = False
        """Whether it has loaded options, such as its momentum, since they were checked."""
        if hasattr(optimizer, "register_load_state_dict_post_hook"):
            _on_load(optimizer, self)
        self._sent_momentum: set[torch.Tensor] = set()
        """Parameters whose momentum was exchanged in this step."""
        self._unused: dict[torch.Tensor, TensorWeakRef] = {}
        """The `.grad` of each parameter until the attached optimizer makes a step with it."""
        self._used: dict[torch.Tensor, tuple[TensorWeakRef, int]] = {}
        """The `.grad` of each parameter after that step, and its version."""
        self._is_used_by_other = False
        """Whether another optimizer has made a step with it, and the attached one none since."""
        self._num_used_by_others = 0
        """Number of exchanges of momentum that only other optimizers have used."""
        self._num_used_in_a_row = 0
        """Number of exchanges since the last of them that the attached optimizer has used."""
        self._warns_of_reuse = True
        """Whether it has yet to be said that another optimizer has used momentum as well."""
        self._awaits_step = False
        """Whether a backward pass that may send momentum has ended, and no step was made since."""
        self._num_steps_by_others = 0
        """Number of such steps by others, in a row, with parameters of the attached optimizer."""
        self._is_first_rank = False
        self._num_optimized = 0
        self._scaler = scaler
        self._parameters: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._watched: torch.Tensor | None = None
        """A parameter that stands for all those whose codec applies momentum."""
        self._watching: Any = None
        self._holds_means = False
        """Whether its `.grad` has not been cleared since the last step."""

    def specs(
        self, named: Iterable[tuple[str, torch.Tensor]], sparse: frozenset[str] = frozenset()
    ) -> list[GradientSpec]:
        """Takes parameters in, and describes their gradients."""
        rate_groups = {id(p): number for number, p in self._optimized()}
        self._num_optimized = len(rate_groups)
        found = []
        for name, parameter in named:
            self._parameters[name] = parameter
            self._names[id(parameter)] = name
            group = rate_groups.get(id(parameter))
            found.append(spec_of(name, parameter, is_sparse=name in sparse, rate_group=group))
        return found

    def about_optimizer(self) -> str:
        """Returns which optimizer was checked."""
        if self._optimizer is None:
            return "no optimizer was given to check"
        name = type(self._optimizer).__name__
        if not self.rate_groups():
            return f"optimizer {name} has none of the model's parameters and was not checked"
        return f"optimizer {name} was checked"

    def pay_owed(self, session: Session) -> None:
        """Registers hooks at the parameters that something is owed to."""

        def register(name: str) -> None:
            def pay(gradient: torch.Tensor) -> torch.Tensor:
                handle.remove()
                return session.pay(name, gradient)

            handle = self._parameters[name].register_hook(pay)  # type: ignore[no-untyped-call]

        for name in session.owed:
            register(name)

    def shaped(self, name: str, values: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns values in the order of memory as a tensor like the parameter."""
        found = torch.empty_like(self._parameters[name], dtype=values.dtype)
        flat(found).copy_(values)
        return found

    @property
    def can_exchange_momentum(self) -> bool:
        """Whether the optimizer can have its momentum exchanged, with the options it has."""
        return optimizer_checks.can_exchange_momentum(self._exchange)

    @property
    def optimizer_kind(self) -> str:
        """The kind of the optimizer in `hipress.recommendations`."""
        kind = optimizer_checks.kind_of(self._optimizer)
        return UNKNOWN if kind == ADAM and not self.can_exchange_momentum else kind

    def exchange_gradients(self) -> None:
        """Leaves the optimizer's momentum where it is."""
        self._exchange = None

    def momentum_facts(self) -> dict[str, Any]:
        """Asks the optimizer, which may refuse, and lets it prepare."""
        if self._exchange is None:
            return {}
        facts = self._exchange.exchange_facts()
        getattr(self._exchange, "begin_exchange", lambda: None)()
        return facts

    def momentum_warmup(self) -> int:
        """Asks the optimizer."""
        return 0 if self._exchange is None else self._exchange.num_refreshes_left()

    def offers_momentum(self, name: str) -> bool:
        """Returns whether the optimizer has its momentum exchanged, and trains the parameter."""
        if self._exchange is None:
            return False
        parameter = self._parameters[name]
        return any(parameter is one for _, one in self._optimized())

    def wants_gradients(self, names: Sequence[str]) -> bool:
        """Asks the optimizer."""
        assert self._exchange is not None
        return self._exchange.wants_gradients([self._parameters[name] for name in names])

    def new_momentum_counts(self, names: Sequence[str]) -> dict[str, str] | None:
        """Asks the optimizer in the first step and after it has loaded its state."""
        if self._exchange is None or not names or not self._has_new_state:
            return None
        self._has_new_state = False
        ask: Callable[[torch.Tensor], str] | None
        ask = getattr(self._exchange, "exchange_counts", None)
        return None if ask is None else {name: ask(self._parameters[name]) for name in names}

    def has_new_parameters(self) -> bool:
        """Counts the parameters of the optimizer, if it has its momentum exchanged."""
        if self._exchange is None:
            return False
        before, self._num_optimized = self._num_optimized, sum(1 for _ in self._optimized())
        return self._num_optimized > before

    def make_momentum(self, name: str, gradient: torch.Tensor, scale: float) -> None:
        """Lets the optimizer turn a gradient into what it wants exchanged."""
        assert self._exchange is not None
        self._exchange.make_outgoing(self._parameters[name], gradient, scale)

    def known_momentum(self, name: str, scale: float) -> torch.Tensor:
        """Asks the optimizer for what it makes of a gradient of zero."""
        assert self._exchange is not None
        return self._exchange.known_part(self._parameters[name], scale)

    def momentum_factor(self, name: str) -> float:
        """Asks the optimizer, if it can tell."""
        ask: Callable[[torch.Tensor], float] | None
        ask = getattr(self._exchange, "momentum_factor", None)
        return super().momentum_factor(name) if ask is None else ask(self._parameters[name])

    @property
    def takes_noisy(self) -> bool:
        """Whether the optimizer has `note_noisy`."""
        return hasattr(self._exchange, "note_noisy")

    def note_noisy(self, names: Sequence[str]) -> None:
        """Tells the optimizer what `.grad` will hold."""
        exchange: Any = self._exchange
        exchange.note_noisy([self._parameters[name] for name in names])

    def note_exchanged(self, names: Sequence[str], *, is_momentum: bool) -> None:
        """Tells the optimizer what `.grad` will hold."""
        assert self._exchange is not None
        parameters = [self._parameters[name] for name in names]
        if is_momentum:
            self._holds_means = False  # `.grad` is about to hold those of this step
            self._sent_momentum.update(parameters)
        else:
            self._sent_momentum.difference_update(parameters)
            for parameter in parameters:
                self._unused.pop(parameter, None)
                self._used.pop(parameter, None)
        self._exchange.note_incoming(parameters, is_momentum=is_momentum)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses a step of the attached optimizer that would be wrong; warns of one of another.

        Raises:
            UsageError: A GradScaler makes a step with momentum, and `attach` was given none.
        """
        if optimizer is self._optimizer:
            self._check_scaler("this step was not made")
            return
        # One that calls the attached optimizer has begun its step before that one's. Whether
        # another reads `.grad` at all cannot be seen, so this is no error.
        for parameter in _trained(optimizer) if self._used and self._warns_of_reuse else ():
            known, version = self._used.get(parameter, (None, 0))
            grad = parameter.grad
            if known is None or grad is None or known() is not grad or grad._version != version:
                continue
            self._warns_of_reuse = False
            if self._is_first_rank:
                _log.warning(
                    "%s makes a step after that of the %s that attach was given, with the same "
                    ".grad of %r, which holds momentum and no gradient: leave it out, or choose "
                    "codec='int8', which sends gradients.",
                    type(optimizer).__name__, type(self._optimizer).__name__,
                    self._names[id(parameter)],
                )  # fmt: skip
            return

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses what trains wrongly without a word, after the step of any optimizer.

        Raises:
            UsageError: Only other optimizers have used the momentum of an earlier exchange, and one
                has used that of the last; or a GradScaler has made a step of the attached one with
                momentum, and `attach` was given none.
        """
        if optimizer is not self._optimizer:
            self._note_step_by_other(optimizer)
            return
        self._check_scaler("load the last checkpoint")  # its closure may have made the exchange
        self._is_used_by_other = self._awaits_step = False
        self._num_steps_by_others = 0
        if self._unused:
            self._num_used_in_a_row += 1
            if self._num_used_in_a_row == MANY_OWN_STEPS:
                self._num_used_by_others = 0
            known = self._unused.items()
            self._used = {p: (ref, p.grad._version) for p, ref in known if p.grad is not None}
            self._unused = {}

    def _check_scaler(self, remedy: str) -> None:
        if self._unused and self._scaler is None and _is_called_by_scaler():
            raise UsageError(
                f"a GradScaler calls the step of the {type(self._optimizer).__name__} whose "
                "momentum is exchanged, and attach was given no scaler: momentum would be mixed "
                "with scaled gradients, so write hipress.attach(..., scaler=scaler) and start "
                f"again ({remedy})."
            )

    def _note_step_by_other(self, optimizer: torch.optim.Optimizer) -> None:
        if not (self._awaits_step or self._unused):
            return
        parameters = _trained(optimizer)
        self._count_step_by_other(optimizer, parameters)
        for parameter in parameters:
            known = self._unused.get(parameter)
            if known is None or parameter.grad is None or known() is not parameter.grad:
                continue
            # Once proves nothing: it may be before a step of the attached one.
            self._is_used_by_other = True
            if self._num_used_by_others:
                raise UsageError(
                    f"{type(optimizer).__name__} has twice taken momentum for gradients: .grad of "
                    f"{self._names[id(parameter)]!r} holds the momentum of the "
                    f"{type(self._optimizer).__name__} that attach was given. Train with that one "
                    "alone, or wrap the module in a new DistributedDataParallel and attach it with "
                    "the new optimizer; then load the last checkpoint."
                )
            return

    def _count_step_by_other(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        own = {id(parameter) for _, parameter in self._optimized()}
        if not self._awaits_step or own.isdisjoint(map(id, parameters)):
            return
        self._awaits_step = False
        self._num_steps_by_others += 1
        if self._num_steps_by_others == MANY_STEPS_BY_OTHERS and self._is_first_rank:
            _log.warning(
                "%s has made the last %d steps, and the %s that attach was given none of them, so "
                "gradients are sent with int8 and no momentum is: give attach the optimizer that "
                "trains.",
                type(optimizer).__name__, MANY_STEPS_BY_OTHERS, type(self._optimizer).__name__,
            )  # fmt: skip

    def loss_scale(self) -> float | None:
        """Returns the scale of the GradScaler."""
        return None if self._scaler is None else float(self._scaler.get_scale())

    def learning_rates(self) -> Mapping[str, float]:
        """Returns the optimizer's learning rates."""
        groups = () if self._optimizer is None else self._optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        # Each is read once: for a tensor on a GPU the host waits.
        known = [None if rate is None else float(rate) for rate in rates]
        return {
            name: rate
            for name, number in self.rate_groups().items()
            if (rate := known[number]) is not None
        }

    def rate_groups(self) -> Mapping[str, int]:
        """Returns the number of each parameter's group in the optimizer."""
        return {
            self._names[id(parameter)]: number
            for number, parameter in self._optimized()
            if id(parameter) in self._names
        }

    def applies_momentum(self, names: Sequence[str]) -> bool:
        """Returns whether the optimizer has momentum for these, or averages as Adam does."""
        if self._optimizer is None:
            return False
        groups, found = self._optimizer.param_groups, self.rate_groups()
        numbers = {found.get(name) for name in names}
        return all(n is not None and optimizer_checks.has_momentum(groups[n]) for n in numbers)

    def note_means(self, names: Sequence[str]) -> None:
        """Watches the `.grad` of one of these parameters until it is cleared.

        Of those that hold momentum, every `.grad` is watched until the attached optimizer uses it.
        """
        if self._is_used_by_other:
            self._is_used_by_other = False
            self._num_used_by_others += 1
            self._num_used_in_a_row = 0
        sent = self._sent_momentum
        self._used = {}
        self._unused = {p: TensorWeakRef(p.grad) for p in sent if p.grad is not None}
        if self._watched is None or self._watched.grad is None:
            self._watch(names)
        self._holds_means = self._watched is not None

    def holds_means(self) -> bool:
        """Returns whether `.grad` has not been None or zero since the means were handed out.

        It is asked when a gradient is about to be added to the watched `.grad`, and when the first
        bucket is ready.
        """
        if self._holds_means:
            assert self._watched is not None
            given = self._watched.grad
            self._holds_means = given is not None and bool(given.any())
        return self._holds_means

    def _forget_cleared(self) -> None:
        """Forgets means that were cleared, with a step or without, when `.grad` is made anew."""
        if self._holds_means and not self.holds_means():
            self._unused, self._used = {}, {}
            getattr(self._exchange, "note_cleared", lambda: None)()

    def _watch(self, names: Sequence[str]) -> None:
        if self._watching is not None:
            self._watching.remove()
        trained = {id(parameter) for _, parameter in self._optimized()}
        parameters = [self._parameters[name] for name in names]
        self._watched = min(
            (p for p in parameters if p.grad is not None and (not trained or id(p) in trained)),
            key=torch.Tensor.numel,
            default=None,
        )
        if self._watched is not None:
            own = weakref.ref(self)  # the parameter must not keep this object alive

            def look(_: torch.Tensor) -> None:
                if (adapter := own()) is not None:
                    adapter._forget_cleared()

            self._watching = self._watched.register_hook(look)  # type: ignore[no-untyped-call]

    def weights(self, name: str) -> torch.Tensor:
        """Returns a parameter, flat."""
        return flat(self._parameters[name])

    def has_new_options(self) -> bool:
        """Returns whether `load_state_dict` of the optimizer was called since this was asked."""
        is_new, self._has_new_options = self._has_new_options, False
        return is_new

    def warnings(self, compressed: Sequence[tuple[str, Codec]]) -> list[str]:
        """Returns what does not suit the optimizer, or that it is not known."""
        pairs = [(self._parameters[name], codec) for name, codec in compressed]
        return optimizer_checks.warnings(self._optimizer, pairs)

    def _optimized(self) -> Iterator[tuple[int, torch.Tensor]]:
        groups = () if self._optimizer is None else self._optimizer.param_groups
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                yield number, parameter


def _on_load(optimizer: Any, adapter: TorchAdapter) -> None:
    """Lets the optimizer tell the adapter, which it must not keep, when it has loaded its state."""
    reference = weakref.ref(adapter)

    def note(*_: Any) -> None:
        if (found := reference()) is not None:
            found._has_new_state = found._has_new_options = True

    optimizer.register_load_state_dict_post_hook(note)


_adapters: weakref.WeakSet[TorchAdapter] = weakref.WeakSet()
"""Those that are told of the steps of all optimizers."""


def watch_steps(adapter: TorchAdapter) -> None:
    """Tells an adapter of the steps of all optimizers."""
    _watch_steps()
    _adapters.add(adapter)


@functools.cache
def _watch_steps() -> None:
    """Registers hooks at the steps of all optimizers, once for all adapters.

    They stay: torch goes through its hooks while it calls them, and an adapter may be dropped then.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(after_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for adapter in list(_adapters):
            adapter.before_step(optimizer)


def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tells all adapters that an optimizer has made a step."""
    if not torch.compiler.is_compiling():
        for adapter in list(_adapters):
            adapter.after_step(optimizer)


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_called_by_scaler() -> bool:
    """Returns whether an enabled GradScaler, which divides `.grad` by its scale, is calling."""
    # It tells an optimizer nothing, and clipping changes `.grad` as it does.
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step":
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler):
                return caller.is_enabled()
        frame = frame.f_back
    return False


def spec_of(
    name: str, parameter: torch.Tensor, *, is_sparse: bool = False, rate_group: int | None = None
) -> GradientSpec:
    """Describes the gradient of a parameter."""
    return GradientSpec(
        name=name,
        numel=parameter.numel(),
        dims=parameter.dim(),
        dtype=parameter.dtype,
        device=parameter.device,
        is_sparse=is_sparse,
        rate_group=rate_group,
    )
