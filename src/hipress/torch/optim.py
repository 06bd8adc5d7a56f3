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
A GPT ended 0.67 % above the loss of uncompressed training with 0, and 0.48 % with 0.5, both without
the floor above; with it, 0.11 %."""
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
        note_cleared()              `.grad` was cleared and a backward pass makes it anew: unless it
                                    is noted again, it will hold gradients of this rank alone
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


@dataclass(frozen=True, slots=True)
class _Counts:
    """How often the two moments of a parameter were updated; on the host, unlike torch's."""

    step: int = 0
    """Number of steps."""
    sq_updates: int = 0
    """Number of updates of the second moment."""
    sq_step: int = 0
    """The step of the last of them."""
    sq_weight: float = 0.0
    """The sum of the weights of all gradients in the second moment, 1 in the end."""

    @property
    def is_behind(self) -> bool:
        """Whether the second moment has missed a step, so that torch's update would be wrong."""
        return self.sq_updates != self.step

    def after_step(self) -> _Counts:
        """Returns the counts after a step that leaves the second moment as it is."""
        return replace(self, step=self.step + 1)

    def after_torch(self, beta2: float) -> _Counts:
        """Returns the counts after a step of torch."""
        step = self.step + 1
        return _Counts(step, self.sq_updates + 1, step, 1 - beta2**step)

    def after_refresh(self, beta2: float) -> tuple[_Counts, float, float]:
        """Returns the counts after a refresh, which makes the second moment old * v + new * g**2.

        What is stored after step s is then of torch's kind: its weights add up to 1 - b2**s, so
        that torch's correction of bias applies to it.
        """
        step = self.step + 1
        decay = beta2 ** ((step - self.sq_step) ** DECAY_POWER)
        weight = decay * self.sq_weight + 1 - decay
        scale, old = (1 - beta2**step) / weight, 0.0
        if self.sq_updates:
            old = decay * self.sq_weight / (1 - beta2**self.sq_step) * scale
        return _Counts(step, self.sq_updates + 1, step, weight), old, (1 - decay) * scale


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
        self.knows_incoming = False
        """Whether every exchange is announced (`note_incoming`), so that nothing is concluded from
        what happened to `.grad` since."""
        self._exchanges = False
        """Whether momentum may be exchanged."""
        self._holds_momentum: set[torch.Tensor] = set()
        """Parameters whose `.grad` holds the averaged momentum."""
        self._holds_noise: set[torch.Tensor] = set()
        """Parameters whose `.grad` must not go into the second moment."""
        self._used: dict[torch.Tensor, tuple[TensorWeakRef, int]] = {}
        """The `.grad` of those two kinds that the last step has used, and its version."""
        self._counts: dict[torch.Tensor, _Counts] = {}
        self._group_numbers: dict[torch.Tensor, int] = {}
        self._known_factors: dict[torch.Tensor, _Factors] = {}

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

    def note_cleared(self) -> None:
        """Forgets what `.grad` held, also where no step has used it."""
        self._forget_incoming()

    def _forget_incoming(self) -> None:
        self._holds_momentum.clear()
        self._holds_noise.clear()
        self._used.clear()

    def _forget_replaced(self) -> None:
        """Forgets what `.grad` held where it has been replaced or written since a step used it."""
        # A second step may use the same `.grad`, which still holds no gradient: the step itself
        # forgets nothing. One that was made without an exchange, as in no_sync, is a gradient.
        for parameter, (used, version) in self._used.items():
            grad = parameter.grad
            if grad is None or used() is not grad or grad._version != version:
                self._holds_momentum.discard(parameter)
                self._holds_noise.discard(parameter)
        self._used.clear()

    def _note_used(self) -> None:
        held = self._holds_momentum | self._holds_noise
        self._used = {
            p: (TensorWeakRef(p.grad), p.grad._version) for p in held if p.grad is not None
        }
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
        if not self.knows_incoming:
            self._forget_replaced()
        for parameter in [p for p in self._counts if not self.state.get(p)]:
            del self._counts[parameter]  # its state was cleared
            self._known_factors.pop(parameter, None)
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
                beta2 = float(self._group_of(parameter)["betas"][1])
                self._counts[parameter] = count.after_torch(beta2)
        self._store_counts(own, trained)
        if not self.knows_incoming:
            self._note_used()
        return loss

    def _store_counts(self, own: set[torch.Tensor], trained: set[torch.Tensor]) -> None:
        """Puts the counts into the state, which checkpoints contain."""
        for parameter, state in self.state.items():
            # In an exchange all have them: torch.distributed.checkpoint loads what a step with
            # gradients of zero has made. A step may be one of some parameters only.
            if state and parameter in trained and (self._exchanges or parameter in own):
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
                self._counts[parameter] = _Counts()
        together: dict[Any, list[torch.Tensor]] = {}
        for parameter in parameters:
            key = (
                self._count(parameter),  # from torch's, if not known
                parameter in self._holds_momentum,
                parameter in self._holds_noise,
                parameter.device,
                parameter.dtype,
            )
            together.setdefault(key, []).append(parameter)
        torch._foreach_add_([self.state[p]["step"] for p in parameters], 1)
        for (count, is_momentum, is_noise, *_), members in together.items():
            self._update_together(group, count, members, is_momentum=is_momentum, is_noise=is_noise)

    def _update_together(
        self,
        group: dict[str, Any],
        count: _Counts,
        parameters: list[torch.Tensor],
        *,
        is_momentum: bool,
        is_noise: bool,
    ) -> None:
        """Updates parameters with equal counts, on one device.

        With the bias correction c of a moment:

            m = .grad, or b1 * m + (1 - b1) * g
            v = v, or in a refresh old * v + new * g**2
            p = (1 - lr * decay) * p - lr * (m / c1) / (sqrt(v / c2) + eps)
        """
        beta1, beta2 = map(float, group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        is_decoupled = group["decoupled_weight_decay"]
        firsts = [self.state[p]["exp_avg"] for p in parameters]
        gradients: list[Any] = [p.grad for p in parameters]
        if is_momentum:  # it contains `maximize` and the other kind of weight decay
            torch._foreach_copy_(firsts, gradients)
        else:
            if group["maximize"]:
                gradients = list(torch._foreach_neg(gradients))
            if decay and not is_decoupled:
                gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
            gradients = [g.to(m.dtype) for g, m in zip(gradients, firsts, strict=True)]
            torch._foreach_lerp_(firsts, gradients, 1 - beta1)
        if is_momentum or is_noise:
            count = count.after_step()
        else:
            count, old, new = count.after_refresh(beta2)
            seconds = [self.state[p]["exp_avg_sq"] for p in parameters]
            torch._foreach_mul_(seconds, old)
            torch._foreach_addcmul_(seconds, gradients, gradients, value=new)
        self._counts.update((p, count) for p in parameters)
        # A parameter that has only had noise has no second moment, and only decays.
        root = math.sqrt(1 - beta2 ** max(count.sq_step, 1))
        factors = [self._factors(p, group["eps"] * root) for p in parameters]
        if decay and is_decoupled:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        rate = lr / (1 - beta1**count.step) * root
        torch._foreach_addcmul_(parameters, firsts, factors, value=-rate)

    def _factors(self, parameter: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns 1 / (sqrt(v) + eps), with small v raised, and 0 where v is 0.

        It stays the same from one refresh to the next. An element that has never had a gradient is
        not moved by the noise of a codec.
        """
        moment, known = self.state[parameter]["exp_avg_sq"], self._known_factors.get(parameter)
        if known is not None and known.is_current(moment, eps):
            return known.values
        if known is not None and known.moment is moment:
            values = known.values
        else:
            values = torch.empty_like(moment, dtype=torch.promote_types(moment.dtype, torch.float))
        least = LEAST_SHARE * moment.mean(dtype=values.dtype)
        values.copy_(moment).clamp_(min=least).sqrt_().add_(eps).reciprocal_()
        values.masked_fill_(moment == 0, 0)
        self._known_factors[parameter] = _Factors(moment, moment._version, eps, values)
        return values

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and what is known of them."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if not self.knows_incoming:
            self._forget_incoming()

    # --- state ------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dictionary of this class or of torch's."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._counts.clear()
        self._known_factors.clear()
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
            updates = int(state.get("sq_updates", step)) + since
            if since == 0 and "sq_step" in state:
                found = _Counts(step, updates, int(state["sq_step"]), float(state["sq_weight"]))
            else:
                beta2 = float(self._group_of(parameter)["betas"][1])
                found = _Counts(step, updates, step, 1 - beta2**step)
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


@dataclass(frozen=True, slots=True)
class _Factors:
    """What the momentum of a parameter is multiplied by, besides the learning rate."""

    moment: torch.Tensor
    """The second moment that they were made from, in the optimizer's state."""
    version: int
    eps: float
    values: torch.Tensor

    def is_current(self, moment: torch.Tensor, eps: float) -> bool:
        """Returns whether nothing has changed since."""
        return moment is self.moment and moment._version == self.version and eps == self.eps


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in the order of their memory, which is that of DDP's buckets."""
    tensor = tensor.detach()
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if tensor.is_contiguous() or span != tensor.numel():  # DDP leaves gaps out
        return tensor.reshape(-1)
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
