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
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import _use_grad_for_differentiable

from hipress.errors import UsageError

REFRESH_WARMUP = 100
"""Number of first steps that all refresh the second moment."""
REFRESH_EVERY = 50
"""Number of steps from one refresh to the next after that."""
DECAY_POWER = 0.5
"""At a refresh n steps after the last one, the second moment decays by beta2 ** (n ** DECAY_POWER).

An exponent of 1 would forget as fast as torch but average few gradients; 0 would react too slowly.
A GPT ended 0.67 % above the loss of uncompressed training with 0, and 0.48 % with 0.5."""
TINY = 1e-30
"""Elements whose second moment has a root far below this divided by eps do not move."""

_torch_step: Any = inspect.unwrap(torch.optim.Adam.step)
"""Torch's step without its hooks, which the step of the subclass has run already."""


@runtime_checkable
class MomentumExchange(Protocol):
    """What a session asks of an optimizer that wants something else than gradients exchanged.

    An optimizer that has these methods, and is given to `attach`, is asked in every step for each
    group of compressed parameters that travel together. All ranks must get the same answers. It may
    also have `momentum_factor(parameter)`, the factor of the last momentum in what `make_outgoing`
    makes, for the accuracy guard; 0.9 is assumed otherwise.
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
        self._holds_momentum: set[torch.Tensor] = set()
        """Parameters whose `.grad` holds the averaged momentum."""
        self._counts: dict[torch.Tensor, _Counts] = {}
        self._group_numbers: dict[torch.Tensor, int] = {}

    # --- what the session asks --------------------------------------------------------------------

    def exchange_facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks, or refuses options that cannot work."""
        for group in self.param_groups:
            self._check_options(group)
        self._holds_momentum.clear()  # of an earlier exchange
        # A GradScaler then divides gradients by itself and skips the whole step if one is not
        # finite, as it does with optimizers that are not fused.
        self._step_supports_amp_scaling = False
        return {
            "optimizer that exchanges momentum": type(self).__name__,
            "refresh_warmup": self.refresh_warmup,
            "refresh_every": self.refresh_every,
        }

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

    def momentum_factor(self, parameter: torch.Tensor) -> float:
        """Returns b1."""
        return float(self._group_of(parameter)["betas"][0])

    def note_incoming(self, parameters: Iterable[torch.Tensor], *, is_momentum: bool) -> None:
        """Takes note of what `.grad` of these parameters holds when `step` is called next."""
        if is_momentum:
            self._holds_momentum.update(parameters)
        elif self._holds_momentum:
            self._holds_momentum.difference_update(parameters)

    # --- the step ---------------------------------------------------------------------------------

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step, as torch does except for parameters whose momentum is exchanged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in [p for p in self._counts if not self.state.get(p)]:
            del self._counts[parameter]  # its state was cleared
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
        for parameter, count in self._counts.items():
            if parameter not in own and parameter.grad is not None:
                count.step, count.sq_updates = count.step + 1, count.sq_updates + 1
                count.sq_step = count.step
                count.sq_weight = 1 - float(self._group_of(parameter)["betas"][1]) ** count.step
        self._holds_momentum.clear()
        return loss

    def _own_parameters(self) -> set[torch.Tensor]:
        """Returns the parameters that torch's step would update wrongly."""
        behind = {p for p, count in self._counts.items() if count.is_behind}
        return {p for p in self._holds_momentum | behind if p.grad is not None}

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
        updates = []
        for parameter, count in zip(parameters, counts, strict=True):
            state = self.state[parameter]
            count.step += 1
            update = _Update.of(group, parameter, state, count, parameter in self._holds_momentum)
            updates.append(update)
            state["sq_updates"], state["sq_step"] = count.sq_updates, count.sq_step
            state["sq_weight"], state["sq_at"] = count.sq_weight, count.step
        in_one_pass = [update for update in updates if update.fits_kernel]
        for update in in_one_pass:
            update.run()
        _update_all(group, [update for update in updates if not update.fits_kernel])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and what is known of them."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._holds_momentum.clear()

    # --- state ------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dictionary of this class or of torch's."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._counts.clear()
        self._holds_momentum.clear()

    def __getstate__(self) -> dict[str, Any]:
        found: dict[str, Any] = super().__getstate__()  # type: ignore[misc]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """One step of one parameter: p = keep * p - rate * m / (root * sqrt(v) + eps).

    Without a second moment an element only decays: a codec of signs gives it the size of its block
    all the same. After an update of the second moment at step s, what is stored is that of torch at
    step s: its weights add up to 1 - b2**s, so that torch's correction of bias applies to it.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, Any]
    is_momentum: bool
    """Whether `gradient` holds the new first moment."""
    keep: float
    rate: float
    root: float
    eps: float
    sign: float
    l2: float
    beta1: float
    old: float
    new: float
    """The second moment of a refresh is old * v + new * g**2."""

    @classmethod
    def of(
        cls,
        group: dict[str, Any],
        parameter: torch.Tensor,
        state: dict[str, Any],
        count: _Counts,
        is_momentum: bool,
    ) -> _Update:
        """Returns the update of a step that is counted already; counts its refresh."""
        assert parameter.grad is not None
        beta1, beta2 = map(float, group["betas"])
        old = new = 0.0
        if not is_momentum:
            decay = beta2 ** ((count.step - count.sq_step) ** DECAY_POWER)
            weight = decay * count.sq_weight + 1 - decay
            scale = (1 - beta2**count.step) / weight
            new = (1 - decay) * scale
            if count.sq_updates:
                old = decay * count.sq_weight / (1 - beta2**count.sq_step) * scale
            count.sq_updates += 1
            count.sq_step, count.sq_weight = count.step, weight
        lr, decoupled = float(group["lr"]), group["decoupled_weight_decay"]
        weight_decay = group["weight_decay"]
        return cls(
            parameter=parameter,
            gradient=parameter.grad,
            state=state,
            is_momentum=is_momentum,
            keep=1 - lr * weight_decay if decoupled else 1.0,
            rate=lr / (1 - beta1**count.step),
            root=1 / math.sqrt(1 - beta2 ** max(count.sq_step, 1)),
            eps=group["eps"],
            sign=-1.0 if group["maximize"] else 1.0,
            l2=0.0 if decoupled else weight_decay,
            beta1=beta1,
            old=old,
            new=new,
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameter, both moments and the gradient."""
        moments = self.state["exp_avg"], self.state["exp_avg_sq"]
        return [self.parameter.detach(), *moments, self.gradient]

    @property
    def fits_kernel(self) -> bool:
        """Whether a kernel on the CPU takes these tensors as they are."""
        strides = self.parameter.stride()
        return all(
            t.device.type == "cpu" and t.dtype is torch.float32 and t.stride() == strides
            for t in self.tensors
        )

    def run(self) -> None:
        """Updates everything in one pass over memory."""
        from hipress.torch import adam_kernels

        tensors = [flat(tensor) for tensor in self.tensors]
        numbers = [self.keep, self.rate, self.root, self.eps]
        if self.is_momentum:
            adam_kernels.run(adam_kernels.from_momentum, tensors, numbers)
            return
        numbers += [self.sign, self.l2, 1 - self.beta1, self.old, self.new]
        adam_kernels.run(adam_kernels.from_gradient, tensors, numbers)

    def update_moments(self) -> None:
        """Updates the moments with torch's operators."""
        first, second = self.state["exp_avg"], self.state["exp_avg_sq"]
        if self.is_momentum:
            first.copy_(self.gradient)
            return
        gradient = self.gradient * self.sign if self.sign != 1 else self.gradient
        if self.l2:
            gradient = gradient.add(self.parameter, alpha=self.l2)
        first.lerp_(gradient, 1 - self.beta1)
        second.mul_(self.old).addcmul_(gradient, gradient, value=self.new)


def _update_all(group: dict[str, Any], updates: Sequence[_Update]) -> None:
    """Updates parameters of one group with torch's operators, many at a time."""
    if not updates:
        return
    for update in updates:
        update.update_moments()
    parameters = [update.parameter for update in updates]
    if updates[0].keep != 1.0:
        torch._foreach_mul_(parameters, updates[0].keep)
    denominators = torch._foreach_sqrt([update.state["exp_avg_sq"] for update in updates])
    # Where the second moment is 0, the reciprocal of its root, infinity, is the denominator.
    limits = torch._foreach_reciprocal(denominators)
    torch._foreach_mul_(limits, TINY)
    torch._foreach_mul_(denominators, [update.root for update in updates])
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_maximum_(denominators, limits)
    torch._foreach_addcdiv_(
        parameters,
        [update.state["exp_avg"] for update in updates],
        denominators,
        [-update.rate for update in updates],
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in the order of their memory, which is that of DDP's buckets."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
