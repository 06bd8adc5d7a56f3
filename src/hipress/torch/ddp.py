"""DistributedDataParallel as a framework of the session: buckets, futures, hooks.

first bucket    begin_step; the watchdog notes that the training loop is inside DDP
every bucket    exchange: DDP gets a future of the bucket's mean
last bucket     DDP waits for all futures and hands the means out; then end_step
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import TensorWeakRef

from hipress import settings as hipress_settings
from hipress.codecs.base import Codec
from hipress.errors import UsageError
from hipress.recommendations import ADAM, UNKNOWN
from hipress.session import Adapter, GradientSpec, Mode, Session, StepObserver
from hipress.session.groups import has_other_ranks, meet
from hipress.session.selection import takes
from hipress.session.timing import GradientTimer
from hipress.session.watchdog import PATIENCE_S, Watchdog
from hipress.torch import optimizer_checks
from hipress.torch.optim import MomentumExchange, flat

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

_log = logging.getLogger("hipress")

MANY_STEPS_BY_OTHERS = 10
"""So many steps in a row, without one of the attached optimizer, are no accident."""
MANY_OWN_STEPS = 10
"""After so many exchanges in a row that the attached optimizer used, an accident is forgotten."""

Future = torch.futures.Future[torch.Tensor]

BUCKET_NUMEL = 25 * 2**18
"""Elements of DDP's default bucket."""


NOTHING_TRAINED = "the model has no parameter that is trained; there is nothing to attach."


class DDPAdapter(Adapter):
    """Answers the session's questions about a DDP model, and receives DDP's buckets.

    Args:
        optimizer: Learning rates, momentum and weight decay are read from it.
        scaler: The GradScaler, if there is one.
    """

    bucket_numel: int | None = BUCKET_NUMEL

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
        if self._exchange is not None:
            _watch_steps()
            _adapters.add(self)
        self._sent_momentum: set[torch.Tensor] = set()
        """Parameters whose momentum was exchanged in this step."""
        self._unused: dict[torch.Tensor, TensorWeakRef] = {}
        """Their `.grad`, until the attached optimizer makes a step with it."""
        self._used: dict[torch.Tensor, tuple[TensorWeakRef, int]] = {}
        """Their `.grad` after that step, and its version."""
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
        self._buckets: dict[int, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        self._module: weakref.ref[DistributedDataParallel] | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._facts: dict[str, Any] = {}
        self._may_drop = True
        """Whether DDP may keep the mean of a parameter to itself; a bare hook cannot know."""
        self._announces = False
        """Whether a bare hook has yet to log what is compressed, after its first step."""
        self._versions: dict[str, int | None] = {}
        """How often the `.grad` of each parameter had been written when its bucket was ready."""
        self._watched: torch.Tensor | None = None
        """A parameter that stands for all those whose codec applies momentum."""
        self._watching: Any = None
        self._holds_means = False
        """Whether its `.grad` has not been cleared since the last step."""
        self._watchdog = Watchdog(hipress_settings.timeout_s() or PATIENCE_S)

    # --- setting up -------------------------------------------------------------------------------

    def use_model(self, model: nn.Module) -> DistributedDataParallel | None:
        """Takes the model that `attach` was given; returns its DDP, None on one process."""
        ddp = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        if not isinstance(ddp, DistributedDataParallel):
            check_module(model)
            if not has_other_ranks():
                self._model = lambda: model
                return None
            trains = any(parameter.requires_grad for parameter in model.parameters())
            meet("attach", None if trains else NOTHING_TRAINED)
            model = ddp = wrapped(model)
        # The caller may keep nothing but the session.
        self._model = lambda: model
        self._module = weakref.ref(ddp)
        # What torch.compile returns has the model inside.
        self.model_name = type(getattr(ddp.module, "_orig_mod", ddp.module)).__name__
        self._may_drop = ddp.find_unused_parameters or ddp.static_graph
        self._facts = {
            "bytes of a bucket": int(ddp.bucket_bytes_cap),
            "find_unused_parameters": ddp.find_unused_parameters,
            "static_graph": ddp.static_graph,
        }
        cap_bytes = int(ddp.bucket_bytes_cap)
        is_default = getattr(ddp, "bucket_bytes_cap_default", cap_bytes == 25 * 2**20)
        self.bucket_mb = None if is_default else cap_bytes / 2**20
        return ddp

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

    def register_hook(self, session: Session) -> None:
        """Registers DDP's hook, and ends the engine together with the model."""
        ddp = self._ddp()
        assert ddp is not None
        try:
            # The session holds the model. Where C++ held the session, no collector would see the
            # cycle.
            ddp.register_comm_hook(weakref.ref(session), hook)
        except RuntimeError as error:
            if "only be called once" in str(error):
                raise UsageError(
                    "the model has a communication hook already, by an earlier attach or by "
                    "others, and DDP takes one, once: wrap the module in a new "
                    "DistributedDataParallel."
                ) from error
            raise
        ddp.__dict__["hipress_session"] = session
        self._watch_engine(session)
        weakref.finalize(ddp, session.engine.close)
        weakref.finalize(ddp, session.monitor.close)
        self._watchdog.watch_forward(ddp)

    def _watch_engine(self, session: Session) -> None:
        # The threads of the engine hold this function. The session ends the engine when it is
        # dropped, so they must not keep it alive.
        found, watchdog = weakref.ref(session), self._watchdog

        def is_over() -> bool:
            session = found()
            if session is None or session.engine.is_closed:
                return True
            return session.mode.current is Mode.DETACHED

        def on_lost(error: BaseException) -> None:
            if is_over() or not torch.distributed.is_initialized():
                return  # the job has ended here, and may have ended there
            watchdog.start(error, is_over)

        session.engine.on_lost = on_lost

    # --- a step -----------------------------------------------------------------------------------

    def on_bucket(self, session: Session, bucket: GradBucket) -> Future:
        """Exchanges a bucket whose gradients are ready."""
        try:
            return self._on_bucket(session, bucket)
        except BaseException:
            self._watchdog.error_was_raised()
            raise

    def _on_bucket(self, session: Session, bucket: GradBucket) -> Future:
        buffer, index, is_last = bucket.buffer(), bucket.index(), bucket.is_last()
        if session.mode.current is Mode.DETACHED:
            future = session.exchange(index, (), buffer)
            if is_last:
                session.end_step()
            return future
        if not session.is_open:  # a bare hook
            session.open(buffer.device)
            self._watch_engine(session)
            self._announces = True
        if index == 0:
            self._watchdog.enter()
        names = self._names_of(session, bucket)
        if self._may_drop:
            for name in names:
                given = self._parameters[name].grad
                self._versions[name] = None if given is None else given._version
        if index == 0:
            session.begin_step()
        future = session.exchange(index, names, buffer)
        if is_last:
            self._awaits_step = bool(session.layout.senders)
            self._is_first_rank = session.engine.transport.rank == 0
            self._queue_end(session)
        return future

    def _names_of(self, session: Session, bucket: GradBucket) -> tuple[str, ...]:
        parameters = bucket.parameters()
        known = tuple(map(id, parameters))
        found = self._buckets.get(bucket.index())
        if found is not None and found[0] == known:
            return found[1]
        buffer = bucket.buffer()
        if not takes(buffer):
            return ()  # no codec takes it: torch sums it, and it is not registered
        missing = [p for p in parameters if id(p) not in self._names]
        if missing:  # a bare hook learns of parameters in the order in which they come
            first = len(self._names)
            named = [(f"gradient{first + k}", p) for k, p in enumerate(missing)]
            session.register(self.specs(named))
        names = tuple(self._names[one] for one in known)
        self._buckets[bucket.index()] = (known, names)
        return names

    def _queue_end(self, session: Session) -> None:
        """Calls `end_step` after DDP has handed the means out."""

        def end() -> None:
            self._watchdog.leave()
            try:
                session.end_step()
            except BaseException:
                self._watchdog.error_was_raised()
                raise
            if self._announces:
                self._announces = False
                session.announce()

        queue = torch.autograd.Variable._execution_engine.queue_callback
        # DDP queues its own callback, which hands the means out, after this hook returns; one that
        # is queued from within ours comes behind it.
        try:
            queue(lambda: queue(end))
        except RuntimeError as error:
            raise UsageError(
                "DDP called for gradients outside backward, as its join() for uneven inputs does; "
                "that is not supported: give all ranks the same number of batches."
            ) from error

    # --- what the session asks --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """The model to train with; None for a bare hook."""
        return self._model()

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
    def can_observe(self) -> bool:
        """Whether the model is known and still there."""
        return self._ddp() is not None

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Registers hooks at the model for the methods that the observer overrides."""
        ddp = self._ddp()
        return observe(ddp, observer, self._parameters) if ddp is not None else lambda: None

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks."""
        return {
            "whether there is a scaler": self._scaler is not None,
            "whether there is an optimizer": self._optimizer is not None,
            **self._facts,
        }

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

    def parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns all parameters that DDP does not ignore, also those without a gradient."""
        ddp = self._ddp()
        if ddp is None:
            return self._parameters.items()
        return [
            (clean(name), parameter)
            for name, parameter in ddp.module.named_parameters()
            if name not in ddp.parameters_to_ignore
        ]

    def was_dropped(self, name: str, sent: torch.Tensor) -> bool:
        """Returns whether DDP kept the mean of a parameter that no rank used to itself."""
        given = self._parameters[name].grad
        if given is None or not self._may_drop:
            return given is None
        if given.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr():
            return False  # a view of the bucket, which holds the mean
        # DDP writes the mean into a `.grad` that is there; comparing values would make the host
        # wait for a GPU.
        return given._version == self._versions[name]

    def has_new_options(self) -> bool:
        """Returns whether `load_state_dict` of the optimizer was called since this was asked."""
        is_new, self._has_new_options = self._has_new_options, False
        return is_new

    def warnings(self, compressed: Sequence[tuple[str, Codec]]) -> list[str]:
        """Returns what does not suit the optimizer, or that it is not known."""
        pairs = [(self._parameters[name], codec) for name, codec in compressed]
        return optimizer_checks.warnings(self._optimizer, pairs)

    def _ddp(self) -> DistributedDataParallel | None:
        return None if self._module is None else self._module()

    def _optimized(self) -> Iterator[tuple[int, torch.Tensor]]:
        groups = () if self._optimizer is None else self._optimizer.param_groups
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                yield number, parameter


def _on_load(optimizer: Any, adapter: DDPAdapter) -> None:
    """Lets the optimizer tell the adapter, which it must not keep, when it has loaded its state."""
    reference = weakref.ref(adapter)

    def note(*_: Any) -> None:
        if (found := reference()) is not None:
            found._has_new_state = found._has_new_options = True

    optimizer.register_load_state_dict_post_hook(note)


_adapters: weakref.WeakSet[DDPAdapter] = weakref.WeakSet()
"""Those that are told of the steps of all optimizers."""


@functools.cache
def _watch_steps() -> None:
    """Registers hooks at the steps of all optimizers, once for all adapters.

    They stay: torch goes through its hooks while it calls them, and an adapter may be dropped then.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for adapter in list(_adapters):
            adapter.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
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


def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations as objects
    """Exchanges a bucket; DDP calls it with the session, or a reference to it, and each bucket."""
    session: Any = state() if isinstance(state, weakref.ref) else state
    return session.adapter.on_bucket(session, bucket)


def check_module(model: nn.Module) -> None:
    """Refuses what DDP cannot wrap."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UsageError(f"attach was given a {kind}; give a torch.nn.Module, in DDP or not.")
    for part in model.modules():
        name = type(part).__name__
        for refused in ("FSDP", "FullySharded", "DeepSpeed", "DataParallel"):
            if refused in name:
                raise UsageError(
                    f"attach was given a {kind}, which is or holds a {name}; {refused} is not "
                    "supported: give the module itself, or a DistributedDataParallel."
                )


def wrapped(module: nn.Module) -> DistributedDataParallel:
    """Returns a module in DDP, on the GPU on which its parameters are."""
    devices = {parameter.device for parameter in module.parameters()}
    on_one_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    ddp = DistributedDataParallel(module, device_ids=list(devices) if on_one_gpu else None)
    handle = module.register_forward_pre_hook(_OnlyInDDP(module))
    weakref.finalize(ddp, handle.remove)
    return ddp


class _OnlyInDDP:
    """Refuses to train a module past the DDP that `attach` has put it in.

    A copy of the module, which DDP knows nothing of, has a copy of this hook that refuses nothing.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._id = id(module)

    def __reduce__(self) -> Any:
        return type(self), ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        # Any DDP will do: the module may have been put in another one since.
        if self._id != id(module) or DistributedDataParallel._active_ddp_module is not None:
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError(
                f"the {type(module).__name__} that attach was given is trained without its "
                "DistributedDataParallel, so ranks would not exchange gradients: train with "
                "sync.model, e.g. model = sync.model after attach (model.eval() or "
                "torch.no_grad() is enough to evaluate the module itself)."
            )


def time_gradients(module: nn.Module) -> GradientTimer:
    """Starts to time the gradients of a model or of its DDP; call `close` at the end.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> timer = time_gradients(model)
        >>> for _ in range(3):
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     timer.end_step()
        >>> sorted(gradient.name for gradient in timer.profile().gradients)
        ['bias', 'weight']
    """
    named = {name: p for name, p in named_gradients(module).items() if p.requires_grad}
    timer = GradientTimer(spec_of(name, parameter) for name, parameter in named.items())
    timer.on_close(observe(module, timer, named))
    return timer


def observe(
    module: nn.Module, observer: StepObserver, parameters: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    """Calls an observer from hooks at a model; the result removes them."""

    def overrides(name: str) -> bool:
        return getattr(type(observer), name) is not getattr(StepObserver, name)

    def before(*_: object) -> None:
        observer.forward_begin(torch.is_grad_enabled())

    def after(_module: object, _args: object, output: Any) -> None:
        observer.forward_end()
        if overrides("backward_begin"):
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: observer.backward_begin())  # type: ignore[no-untyped-call]

    def ready(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: observer.gradient_ready(name)

    handles: list[Any] = [module.register_forward_pre_hook(_untraced(before))]
    if overrides("forward_end") or overrides("backward_begin"):
        handles.append(module.register_forward_hook(_untraced(after)))
    if overrides("gradient_ready"):
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                handles.append(register(_untraced(ready(name))))

    def remove() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    return remove


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


def named_gradients(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a model by name; those of a DDP without its `module.`.

    Example:
        >>> list(named_gradients(nn.Linear(2, 2)))
        ['weight', 'bias']
    """
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    return dict(inner.named_parameters())


def clean(name: str) -> str:
    """Returns a parameter's name without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def sparse_names(model: nn.Module) -> frozenset[str]:
    """Returns the parameters whose gradients are sparse."""
    found = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            found.add(clean(f"{prefix}.weight" if prefix else "weight"))
    return frozenset(found)


def _untraced(function: Callable[..., None]) -> Any:
    """Keeps torch.compile from tracing a hook, which would break the graph."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in what a model returns: alone, in lists, dictionaries, dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    inside: Any = ()
    if isinstance(output, Mapping):
        inside = output.values()
    elif isinstance(output, list | tuple | set):
        inside = output
    elif is_dataclass(output) and not isinstance(output, type):
        inside = [getattr(output, field.name) for field in fields(output)]
    for value in inside:
        yield from _tensors(value)
