"""The seam between a session and the framework that drives it.

A framework adapter describes its gradients once (`GradientSpec`), hands over flat buffers in every
step, and answers a few questions (`Adapter`). The defaults suit a hand-written training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hipress.codecs.base import Codec
    from hipress.session.session import Session


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """One gradient as the framework describes it."""

    name: str
    numel: int
    """Number of elements."""
    dims: int
    """Number of dimensions."""
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_sparse: bool = False
    """Whether the framework makes it as a sparse tensor, which no codec takes."""
    rate_group: int | None = None
    """Gradients with different numbers may have different learning rates; None: not known."""


class StepObserver:
    """Receives the moments of a training step; every method may be overridden."""

    def forward_begin(self, trains: bool = True) -> None:
        """The forward pass begins; `trains` is false for an evaluation, which is no step."""

    def parameter_needed(self, name: str) -> None:
        """The forward pass is about to use a parameter; frameworks may not report all of them."""

    def forward_end(self) -> None:
        """The forward pass has ended."""

    def backward_begin(self) -> None:
        """The backward pass begins."""

    def gradient_ready(self, name: str) -> None:
        """A gradient has been computed."""


class Adapter:
    """Answers what a session asks of the framework; override what the framework knows."""

    bucket_mb: float | None = None
    """Size of the framework's buckets; None: its default, with a smaller first bucket."""
    bucket_numel: int | None = None
    """Elements of a full bucket, or of the model if it does not fill one; None: of the model."""

    model_name: str = ""
    """Name of the model, for people."""

    def __init__(self) -> None:
        self.observers: list[StepObserver] = []

    @property
    def can_observe(self) -> bool:
        """Whether `observe` works: a bare DDP hook has no model to observe."""
        return True

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Calls the methods of an observer in every step; the result stops that."""
        self.observers.append(observer)
        return lambda: self.observers.remove(observer) if observer in self.observers else None

    def finish_step(self) -> None:
        """Ends a step whose averages the framework has yet to take, on all ranks alike."""

    def arrange(self, units: Sequence[Sequence[str]], schedule: str) -> None:
        """Takes note of a new schedule, before the first exchange of a step.

        Args:
            units: The gradients that are exchanged together from this step on, by name.
            schedule: The order of their messages.
        """

    @property
    def model(self) -> Any:
        """The model to train with; None if the framework's own is used."""
        return None

    def about_optimizer(self) -> str:
        """Returns which optimizer is checked, for the log; empty if there is none to check."""
        return ""

    def pay_owed(self, session: Session) -> None:
        """Gives each next gradient of a session that does nothing to `session.pay`.

        A loop that calls `average` needs no more: that pays.
        """

    def shaped(self, name: str, values: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns values in the order of a bucket in the shape of a gradient."""
        return values.view(gradient.shape)

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks."""
        return {}

    def loss_scale(self) -> float | None:
        """Returns the scale of this step's gradients (a GradScaler's); None: there is no scaler."""
        return None

    def learning_rates(self) -> Mapping[str, float]:
        """Returns the learning rate of each gradient, as far as it is known."""
        return {}

    def rate_groups(self) -> Mapping[str, int]:
        """Returns a number for each gradient; those with one number share a learning rate."""
        return {}

    def applies_momentum(self, names: Sequence[str]) -> bool:
        """Returns whether the optimizer is known to apply momentum to all these gradients."""
        return False

    # What an optimizer wants exchanged in place of gradients.

    def offers_momentum(self, name: str) -> bool:
        """Returns whether the optimizer can have its momentum exchanged in place of a gradient."""
        return False

    def momentum_facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks where momentum is exchanged.

        Raises:
            UsageError: The optimizer cannot have its momentum exchanged with its options.
        """
        return {}

    def momentum_warmup(self) -> int:
        """Returns how many steps must pass before momentum is exchanged."""
        return 0

    def wants_gradients(self, names: Sequence[str]) -> bool:
        """Returns whether this step exchanges these gradients and not their momentum.

        The answer must be the same on all ranks.
        """
        return True

    def new_momentum_counts(self, names: Sequence[str]) -> dict[str, str] | None:
        """Returns by gradient what decides `wants_gradients`, once after it may have been loaded.

        Args:
            names: Gradients in whose place momentum is exchanged; for none the answer is None.
        """
        return None

    def has_new_parameters(self) -> bool:
        """Returns whether the optimizer has got more parameters since this was asked last."""
        return False

    def make_momentum(self, name: str, gradient: torch.Tensor, scale: float) -> None:
        """Turns this rank's gradient, flat, into the momentum that it sends, in place."""

    def known_momentum(self, name: str, scale: float) -> torch.Tensor:
        """Returns the part of `make_momentum` that all ranks know, flat."""
        raise NotImplementedError("this adapter does not exchange momentum")

    def momentum_factor(self, name: str) -> float:
        """Returns the factor with which the momentum of a step goes into that of the next."""
        return 0.9

    @property
    def takes_noisy(self) -> bool:
        """Whether the optimizer can be told that gradients are right on average only."""
        return False

    def note_noisy(self, names: Sequence[str]) -> None:
        """Takes note that the optimizer receives gradients that are right on average only."""

    def note_exchanged(self, names: Sequence[str], *, is_momentum: bool) -> None:
        """Takes note of what the optimizer receives for these gradients in this step."""

    def note_means(self, names: Sequence[str]) -> None:
        """Takes note that the means of a step have been handed out.

        Args:
            names: Gradients whose codec applies momentum; there is at least one.
        """

    def holds_means(self) -> bool:
        """Returns whether the means of the last step are still in the gradients of this one.

        A codec with momentum would take momentum of them a second time.
        """
        return False

    def weights(self, name: str) -> torch.Tensor:
        """Returns a parameter's elements, flat, for codecs that apply weight decay."""
        raise NotImplementedError("this adapter does not give weights to codecs")

    def parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns the parameters that the replica check compares."""
        return ()

    def was_dropped(self, name: str, sent: torch.Tensor) -> bool:
        """Returns whether the framework threw away the averaged gradient, as for unused layers."""
        return False

    def has_new_options(self) -> bool:
        """Returns whether the optimizer may have got other options since this was asked."""
        return False

    def warnings(self, compressed: Sequence[tuple[str, Codec]]) -> list[str]:
        """Returns what is wrong with the optimizer beside these codecs, a sentence each."""
        return []
