"""`Adam` and `AdamW` whose momentum is exchanged instead of the gradient.

Adam divides by a second moment that must come from true gradients; one sign and one scale per block
say nothing about the size of an element. So each rank compresses its *momentum*, and the second
moment is refreshed from nearly exact gradients on some steps only (1-bit Adam, Tang et al., ICML
2021; 0/1 Adam, Lu et al., 2022):

    ordinary step   rank w sends b1 * M + (1 - b1) * g_w; `.grad` receives the mean, the new M
    refresh         rank w sends g_w, mildly compressed; `.grad` receives the mean, from which M and
                    the second moment are updated as in torch

`MomentumExchange` is what a session asks of any such optimizer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.utils.weak import TensorWeakRef

from hipress.errors import UsageError, public

REFRESH_WARMUP = 100
"""Number of first steps that all refresh the second moment."""
REFRESH_EVERY = 50
"""Number of steps from one refresh to the next after that."""
LEAST_SHARE = 0.01
"""Updates from momentum divide by no second moment below this share of the parameter's mean.

A codec of signs gives a small element the size of its block, and between refreshes the second
moment does not grow along. A perceptron on digits (lr 3e-4) went from a loss of 0.3 to 1e21 within
100 steps; with 0.0001 to 0.09 it reached the loss of uncompressed training, with lr 3e-3 only from
0.001 on. A small GPT reached the same loss with 0, 0.0001 and 0.01."""
DECAY_POWER = 0.5
"""At a refresh n steps after the last one, the second moment decays by beta2 ** (n ** DECAY_POWER).

An exponent of 1 would forget as fast as torch but average few gradients; 0 would react too slowly.
A GPT ended 0.67 % above the loss of uncompressed training with 0, and 0.48 % with 0.5."""
MANY_STEPS = 2.0**80
"""A step count at which torch's kernels correct no bias; the rates below contain that."""
FROZEN = 1 - 2.0**-53
"""A beta2 that leaves the second moment as it is, to 1e-16 of the squared momentum."""

_torch_step: Any = inspect.unwrap(torch.optim.Adam.step)
"""Torch's step without its hooks, which the step of the subclass has run already."""


@runtime_checkable
class MomentumExchange(Protocol):
    """What a session asks of an optimizer that wants something else than gradients exchanged.

    An optimizer that has these methods, and is given to `attach`, is asked in every step for each
    group of compressed parameters that travel together. All ranks must get the same answers. It may
    also have

        begin_exchange()            called when it is decided that momentum is exchanged
        momentum_factor(parameter)  the factor of the last momentum in what `make_outgoing` makes,
                                    for the accuracy guard; 0.9 is assumed otherwise
        note_noisy(parameters)      `.grad` will hold gradients that are right on average only, as
                                    codecs without error feedback make them: it must not learn
                                    sizes from them. Without it such codecs get momentum too
        exchange_counts(parameter)  what decides `wants_gradients`, as a text: ranks compare it in
                                    the first step, and after `load_state_dict`
    """

    def exchange_facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks.

        Raises:
            UsageError: Momentum cannot be exchanged with the optimizer's options.
        """

    def num_refreshes_left(self) -> int:
        """Returns how many steps with gradients must come before momentum is exchanged."""

    def wants_gradients(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Returns whether the gradients themselves are to be exchanged in this step."""

    def make_outgoing(
        self, parameter: torch.Tensor, gradient: torch.Tensor, loss_scale: float
    ) -> None:
        """Turns this rank's gradient into what is exchanged instead, in place.

        Args:
            parameter: The parameter.
            gradient: Its gradient times the loss scale, flat, in the order of its memory.
            loss_scale: The factor that the result must carry too.
        """

    def known_part(self, parameter: torch.Tensor, loss_scale: float) -> torch.Tensor:
        """Returns what `make_outgoing` makes of a gradient of zero, flat."""

    def note_incoming(self, parameters: Iterable[torch.Tensor], *, is_momentum: bool) -> None:
        """Takes note of what `.grad` of these parameters holds when `step` is called next."""


@dataclass(slots=True)
class _Counts:
    """How often the two moments of a parameter were updated; on the host, unlike torch's."""

    step: int
    """Number of steps."""
    sq_updates: int
    """Number of updates of the second moment."""
    sq_step: int
    """The step of the last of them."""
    sq_weight: float
    """The sum of the weights of all gradients in the second moment, 1 in the end."""

    @property
    def is_behind(self) -> bool:
        """Whether the second moment has missed a step, so that torch's update would be wrong."""
        return self.sq_updates != self.step


class _AdamExchange:
    """The exchange of momentum, for both classes; see the module."""

    param_groups: list[dict[str, Any]]
    state: Any

    @public
    def __init__(
        self,
        *args: Any,
        refresh_warmup: int = REFRESH_WARMUP,
        refresh_every: int = REFRESH_EVERY,
        **kwargs: Any,
    ) -> None:
        for name, value in (("refresh_warmup", refresh_warmup), ("refresh_every", refresh_every)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is {value!r}; give a number of steps, at least 1.")
        self._init_exchange(refresh_warmup, refresh_every)
        super().__init__(*args, **kwargs)

    def _init_exchange(self, warmup: int, every: int) -> None:
        self.refresh_warmup = warmup
        self.refresh_every = every
        self._exchanges = False
        """Whether momentum may be exchanged."""
        self._holds_momentum: set[torch.Tensor] = set()
        """Parameters whose `.grad` holds the averaged momentum."""
        self._holds_noise: set[torch.Tensor] = set()
        """Parameters whose `.grad` must not go into the second moment."""
        self._used: dict[torch.Tensor, TensorWeakRef] = {}
        """The `.grad` of those two kinds that the last step has used."""
        self._counts: dict[torch.Tensor, _Counts] = {}
        self._group_numbers: dict[torch.Tensor, int] = {}
        self._divisors: dict[torch.Tensor, _Divisor] = {}

    # --- what the session asks --------------------------------------------------------------------

    def exchange_facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks, or refuses options that cannot work."""
        for group in self.param_groups:
            self._check_options(group)
        return {
            "optimizer that exchanges momentum": type(self).__name__,
            "refresh_warmup": self.refresh_warmup,
            "refresh_every": self.refresh_every,
        }

    def begin_exchange(self) -> None:
        """Prepares for steps with momentum in place of gradients."""
        self._exchanges = True
        self._forget_incoming()  # of an earlier exchange
        # A GradScaler then divides gradients by itself and skips the whole step if one is not
        # finite, as it does with optimizers that are not fused.
        self._step_supports_amp_scaling = False

    def _check_options(self, group: dict[str, Any]) -> None:
        for option in ("amsgrad", "capturable", "differentiable"):
            if group[option]:
                raise UsageError(
                    f"{type(self).__name__} has {option}=True, with which momentum cannot be "
                    "exchanged: leave it out, or choose codec='int8', which sends gradients."
                )

    def num_refreshes_left(self) -> int:
        """Returns how many of the first refreshes are left."""
        counts = [
            self._count(p)
            for group in self.param_groups
            for p in group["params"]
            if self.state.get(p)
        ]
        done = min((count.sq_updates for count in counts), default=0)
        return max(0, self.refresh_warmup - done)

    def wants_gradients(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Returns whether the second moment of any of these parameters is to be refreshed."""
        found = [self._count(p) for p in parameters if self.state.get(p)]
        return not found or any(
            count.sq_updates < self.refresh_warmup
            or count.step + 1 - count.sq_step >= self.refresh_every
            for count in found
        )

    def make_outgoing(
        self, parameter: torch.Tensor, gradient: torch.Tensor, loss_scale: float
    ) -> None:
        """Replaces a gradient by the momentum of this rank: b1 * M + (1 - b1) * g."""
        group = self._group_of(parameter)
        beta1 = group["betas"][0]
        decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
        if group["maximize"]:
            gradient.neg_()
        if decay:
            gradient.add_(flat(parameter), alpha=decay * loss_scale)
        state = self.state.get(parameter)
        if state and state["exp_avg"].stride() != parameter.stride():
            # Loaded, or made before the parameter changed its memory format.
            state["exp_avg"] = torch.empty_like(parameter).copy_(state["exp_avg"])
        if not state:
            gradient.mul_(1 - beta1)
        elif loss_scale == 1.0:
            gradient.lerp_(flat(state["exp_avg"]).to(gradient.dtype), beta1)
        else:
            gradient.mul_(1 - beta1)
            gradient.add_(flat(state["exp_avg"]), alpha=beta1 * loss_scale)

    def known_part(self, parameter: torch.Tensor, loss_scale: float) -> torch.Tensor:
        """Returns b1 * M."""
        known = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        self.make_outgoing(parameter, known, loss_scale)
        return known

    def exchange_counts(self, parameter: torch.Tensor) -> str:
        """Returns the counts that decide when the second moment is refreshed."""
        if not self.state.get(parameter):
            return "no steps"
        count = self._count(parameter)
        return f"{count.step} steps, {count.sq_updates} refreshes, the last in step {count.sq_step}"

    def momentum_factor(self, parameter: torch.Tensor) -> float:
        """Returns b1."""
        return float(self._group_of(parameter)["betas"][0])

    def note_incoming(self, parameters: Iterable[torch.Tensor], *, is_momentum: bool) -> None:
        """Takes note of what `.grad` of these parameters holds when `step` is called next."""
        parameters = list(parameters)
        self._holds_noise.difference_update(parameters)
        for parameter in parameters:
            self._used.pop(parameter, None)
        if is_momentum:
            self._holds_momentum.update(parameters)
        else:
            self._holds_momentum.difference_update(parameters)

    def note_noisy(self, parameters: Iterable[torch.Tensor]) -> None:
        """Takes note that `.grad` of these parameters must not go into the second moment."""
        self._holds_noise.update(parameters)

    def _forget_incoming(self) -> None:
        self._holds_momentum.clear()
        self._holds_noise.clear()
        self._used.clear()

    def _forget_replaced(self) -> None:
        """Forgets what `.grad` held where it has been replaced since a step used it."""
        # A second step may use the same `.grad`, which still holds no gradient: the step itself
        # forgets nothing. One that was replaced without an exchange, as in no_sync, is a gradient.
        for parameter, used in self._used.items():
            if used() is not parameter.grad:
                self._holds_momentum.discard(parameter)
                self._holds_noise.discard(parameter)
        self._used.clear()

    def _note_used(self) -> None:
        held = self._holds_momentum | self._holds_noise
        self._used = {p: TensorWeakRef(p.grad) for p in held if p.grad is not None}
        self._holds_momentum &= self._used.keys()
        self._holds_noise &= self._used.keys()

    # --- the step ---------------------------------------------------------------------------------

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step, as torch does except for parameters whose momentum is exchanged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._forget_replaced()
        for parameter in [p for p in self._counts if not self.state.get(p)]:
            del self._counts[parameter]  # its state was cleared
            self._divisors.pop(parameter, None)
        own = self._own_parameters()
        if not own:
            _torch_step(self)
        else:
            groups = self.param_groups
            rest = [[p for p in group["params"] if p not in own] for group in groups]
            self.param_groups = [
                {**group, "params": params} for group, params in zip(groups, rest, strict=True)
            ]
            try:
                _torch_step(self)
            finally:
                self.param_groups = groups
            for group in groups:
                self._own_step(group, [p for p in group["params"] if p in own])
        self._group_numbers.clear()  # groups may have been added or removed
        trained = {p for group in self.param_groups for p in group["params"]}
        for parameter, count in self._counts.items():
            if parameter not in own and parameter.grad is not None and parameter in trained:
                count.step, count.sq_updates = count.step + 1, count.sq_updates + 1
                count.sq_step = count.step
                count.sq_weight = 1 - float(self._group_of(parameter)["betas"][1]) ** count.step
        self._store_counts(own)
        self._note_used()
        return loss

    def _store_counts(self, own: set[torch.Tensor]) -> None:
        """Puts the counts into the state, which checkpoints contain."""
        for parameter, state in self.state.items():
            # In an exchange all have them: torch.distributed.checkpoint loads what a step with
            # gradients of zero has made.
            if state and (self._exchanges or parameter in own):
                count = self._count(parameter)
                state["sq_updates"], state["sq_step"] = count.sq_updates, count.sq_step
                state["sq_weight"], state["sq_at"] = count.sq_weight, count.step

    def _own_parameters(self) -> set[torch.Tensor]:
        """Returns the parameters that torch's step would update wrongly."""
        behind = {p for p, count in self._counts.items() if count.is_behind}
        found = self._holds_momentum | self._holds_noise | behind
        return {p for p in found if p.grad is not None and p.numel()}

    def _own_step(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Updates parameters of one group: from momentum, or with a late second moment."""
        if not parameters:
            return
        self._check_options(group)
        for parameter in parameters:
            if not self.state[parameter]:
                lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
                self._init_group({**group, "params": [parameter]}, *lists)  # type: ignore[attr-defined]
                self._counts[parameter] = _Counts(0, 0, 0, 0.0)
        counts = [self._count(parameter) for parameter in parameters]  # from torch's, if not known
        torch._foreach_add_([self.state[p]["step"] for p in parameters], 1)
        self._find_divisors(parameters)
        together: dict[Any, list[torch.Tensor]] = {}
        for parameter, count in zip(parameters, counts, strict=True):
            count.step += 1
            given = parameter in self._holds_momentum
            held = given or parameter in self._holds_noise
            update = _Update.of(group, count, first_is_given=given, second_is_held=held)
            key = update, parameter.device, parameter.dtype
            together.setdefault(key, []).append(parameter)
        for (update, *_), members in together.items():
            if not update.second_is_held:  # small ones must be known before anything moves
                self._run(update.of_moments(), members)
                self._find_divisors(members)
                self._run(update.after_moments(), members, from_state=True)
            else:
                self._run(update, members)

    def _run(
        self, update: _Update, parameters: Sequence[torch.Tensor], *, from_state: bool = False
    ) -> None:
        """Updates parameters from their gradients, or from the momentum in their state."""
        states = [self.state[p] for p in parameters]
        firsts = [state["exp_avg"] for state in states]
        gradients: list[Any] = firsts if from_state else [p.grad for p in parameters]
        gradients = [_laid_out_like(m, g) for m, g in zip(firsts, gradients, strict=True)]
        divisors = [self._divisors[p] for p in parameters]
        if update.second_is_held:
            update.run(parameters, gradients, firsts, [divisor.values for divisor in divisors])
        else:
            update.run(parameters, gradients, firsts, [state["exp_avg_sq"] for state in states])
        if update.second_is_held:
            for divisor in divisors:
                divisor.note_unchanged()

    def _find_divisors(self, parameters: Sequence[torch.Tensor]) -> None:
        """Brings up to date what the updates of these parameters divide by."""
        changed: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in parameters:
            state, known = self.state[parameter], self._divisors.get(parameter)
            if known is None or not known.is_current(state["exp_avg_sq"]):
                state["exp_avg"] = _laid_out_like(parameter, state["exp_avg"])
                state["exp_avg_sq"] = _laid_out_like(state["exp_avg"], state["exp_avg_sq"])
                changed.setdefault(parameter.device, []).append(parameter)
        for members in changed.values():
            moments = [self.state[p]["exp_avg_sq"] for p in members]
            # The host waits for a GPU, once after a refresh.
            found = [torch.stack([moment.min(), moment.mean()]) for moment in moments]
            for parameter, moment, (low, mean) in zip(
                members, moments, torch.stack(found).tolist(), strict=True
            ):
                values, least = moment, LEAST_SHARE * mean
                if low < least or low == 0:
                    last = self._divisors.get(parameter)
                    reuses = last is not None and last.is_replaced and last.moment is moment
                    values = last.values if last and reuses else torch.empty_like(moment)
                    torch.clamp(moment, min=least, out=values).masked_fill_(moment == 0, math.inf)
                self._divisors[parameter] = _Divisor(moment, moment._version, values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and what is known of them."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._forget_incoming()

    # --- state ------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dictionary of this class or of torch's."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._counts.clear()
        self._divisors.clear()
        self._forget_incoming()

    def __getstate__(self) -> dict[str, Any]:
        found: Any = super().__getstate__()
        return {**found, "refresh": (self.refresh_warmup, self.refresh_every)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "refresh" in state:  # a copy or a pickle; torch calls this after loading, too
            self._init_exchange(*state.pop("refresh"))
        super().__setstate__(state)  # type: ignore[misc]

    def _count(self, parameter: torch.Tensor) -> _Counts:
        found = self._counts.get(parameter)
        if found is None:
            state = self.state[parameter]
            step = int(state["step"])  # once: for a fused optimizer the host waits for a GPU
            since = step - int(state.get("sq_at", step))  # steps that torch has made
            found = _Counts(step, int(state.get("sq_updates", step)) + since, step, 0.0)
            if since == 0 and "sq_step" in state:
                found.sq_step, found.sq_weight = int(state["sq_step"]), float(state["sq_weight"])
            else:
                found.sq_weight = 1 - float(self._group_of(parameter)["betas"][1]) ** step
            self._counts[parameter] = found
        return found

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        index = self._group_numbers.get(parameter, -1)
        if index < 0:
            self._group_numbers = {
                p: k for k, group in enumerate(self.param_groups) for p in group["params"]
            }
            index = self._group_numbers[parameter]
        return self.param_groups[index]


class Adam(_AdamExchange, torch.optim.Adam):
    """`torch.optim.Adam`, whose momentum HiPress can exchange; see `AdamW`."""


class AdamW(_AdamExchange, torch.optim.AdamW):
    """`torch.optim.AdamW`, whose momentum HiPress can exchange instead of the gradient.

    It takes the arguments of torch's class, and its state dictionaries load in either one. Given to
    `attach` together with a codec that does not keep the sizes of elements, such as `onebit` or
    `topk`, every rank sends its momentum through that codec. The second moment is refreshed from
    gradients (`int8`) in the first `refresh_warmup` steps, and in every `refresh_every`-th step
    after that. Without `attach`, and while nothing is compressed, it is torch's AdamW.

    On ordinary steps `.grad` holds the averaged momentum, so `clip_grad_norm_` limits the norm of
    the momentum; on a refresh it limits that of the gradient.

    Args:
        args: As for `torch.optim.AdamW`.
        refresh_warmup: Number of first steps that all refresh the second moment.
        refresh_every: Number of steps from one refresh to the next after that.
        kwargs: As for `torch.optim.AdamW`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamW(model.parameters(), lr=1e-3)
        >>> # sync = hipress.attach(ddp_model, codec="onebit", optimizer=optimizer)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """


@dataclass(slots=True)
class _Divisor:
    """The second moment of a parameter as updates from momentum use it.

    Small ones are raised to `LEAST_SHARE` of the mean. Infinity stands in place of 0, so that an
    element that has never had a gradient only decays.
    """

    moment: torch.Tensor
    """What is in the optimizer's state."""
    version: int
    values: torch.Tensor
    """The same tensor if nothing had to be replaced."""

    @property
    def is_replaced(self) -> bool:
        """Whether some are zero or small."""
        return self.values is not self.moment

    def is_current(self, moment: torch.Tensor) -> bool:
        """Returns whether nothing unknown has changed the moment since."""
        return moment is self.moment and moment._version == self.version

    def note_unchanged(self) -> None:
        """Takes note that a kernel has written what was there before."""
        self.version = self.moment._version


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """Numbers of an update: p = (1 - rate * decay) * p - rate * m / (sqrt(v) + eps).

    Torch's own fused kernels do it: with `beta1=0` they take the "gradient" for the new first
    moment. Corrections of bias are in `rate` and `eps`. After an update of the second moment at
    step s, what is stored is that of torch at step s: its weights add up to 1 - b2**s, so that
    torch's correction of bias applies to it.
    """

    first_is_given: bool
    """Whether the gradient is the new first moment."""
    second_is_held: bool
    """Whether the second moment stays as it is."""
    rate: float
    eps: float
    decay: float
    l2: float
    maximize: bool
    beta1: float
    old: float
    new: float
    """The second moment of a refresh is old * v + new * g**2."""

    @classmethod
    def of(
        cls, group: dict[str, Any], count: _Counts, *, first_is_given: bool, second_is_held: bool
    ) -> _Update:
        """Returns the update of a step that is counted already; counts its refresh."""
        beta1, beta2 = map(float, group["betas"])
        old = new = 0.0
        if not second_is_held:
            decay = beta2 ** ((count.step - count.sq_step) ** DECAY_POWER)
            weight = decay * count.sq_weight + 1 - decay
            scale = (1 - beta2**count.step) / weight
            new = (1 - decay) * scale
            if count.sq_updates:
                old = decay * count.sq_weight / (1 - beta2**count.sq_step) * scale
            count.sq_updates += 1
            count.sq_step, count.sq_weight = count.step, weight
        lr, decoupled = float(group["lr"]), group["decoupled_weight_decay"]
        weight_decay, bias1 = float(group["weight_decay"]), 1 - beta1**count.step
        root = math.sqrt(1 - beta2 ** max(count.sq_step, 1))
        return cls(
            first_is_given=first_is_given,
            second_is_held=second_is_held,
            rate=lr / bias1 * root,
            eps=group["eps"] * root,
            decay=weight_decay * bias1 / root if decoupled else 0.0,
            l2=0.0 if decoupled else weight_decay,
            maximize=group["maximize"],
            beta1=beta1,
            old=old,
            new=new,
        )

    def of_moments(self) -> _Update:
        """Returns the part of a refresh that moves no parameter."""
        return replace(self, rate=0.0, eps=1.0)

    def after_moments(self) -> _Update:
        """Returns the part of a refresh after that, whose gradient is the first moment."""
        return replace(self, first_is_given=True, second_is_held=True)

    def run(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        firsts: Sequence[torch.Tensor],
        seconds: list[torch.Tensor],
    ) -> None:
        """Updates parameters and moments in one pass over memory."""
        beta1, beta2, l2, maximize = 0.0, FROZEN, 0.0, False  # momentum contains the last two
        if not self.first_is_given:
            beta1, l2, maximize = self.beta1, self.l2, self.maximize
        if not self.second_is_held:
            beta2 = 1 - self.new
            if self.old != beta2:
                torch._foreach_mul_(seconds, self.old / beta2)
        written = [_laid_out_like(m, p) for m, p in zip(firsts, parameters, strict=True)]
        many = torch.full((), MANY_STEPS, dtype=torch.float32, device=parameters[0].device)
        kernel: Any = torch._fused_adam_ if l2 else torch._fused_adamw_
        kernel(
            written,
            gradients,
            firsts,
            seconds,
            [],
            [many] * len(written),
            lr=self.rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=l2 or self.decay,
            eps=self.eps,
            amsgrad=False,
            maximize=maximize,
        )
        torch.autograd.graph.increment_version([*written, *firsts, *seconds])  # they do not
        for parameter, values in zip(parameters, written, strict=True):
            if values is not parameter:
                parameter.copy_(values)


def _laid_out_like(other: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with its elements in the order of another's memory."""
    if tensor.stride() == other.stride() and tensor.dtype is other.dtype:
        return tensor
    return torch.empty_like(other).copy_(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in the order of their memory, which is that of DDP's buckets."""
    tensor = tensor.detach()
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if tensor.is_contiguous() or span != tensor.numel():  # DDP leaves gaps out
        return tensor.reshape(-1)
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
