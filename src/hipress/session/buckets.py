"""A gradient with what was decided for it, and how the gradients of a bucket travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from hipress.casync.graphs import grouping
from hipress.casync.graphs.partitions import Placement
from hipress.codecs.base import Codec
from hipress.session.adapter import GradientSpec
from hipress.session.selection import Choice

WRAPPED = frozenset({"momentum", "added_momentum"})
"""Names that `momentum(...)` gives its state."""
MOMENTUM = WRAPPED | {"velocity"}
"""Names of codec state that hold an average of past gradients; `dgc` has `velocity`."""

UNSENT = ("residual", "added_residual")
"""Names of codec state that was not sent yet and must be; other state is an average of the past."""


class Content(Enum):
    """What the part of a buffer that belongs to a group holds."""

    GRADIENTS = "gradients"
    REFRESH = "refresh"
    """Gradients from which the optimizer also learns sizes; they travel with a mild codec."""
    MOMENTUM = "momentum"
    """The momentum that the optimizer wants exchanged in place of gradients."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One gradient and what was decided for it."""

    spec: GradientSpec
    choice: Choice
    placements: tuple[Placement, ...]
    """Its partitions and their routes; empty if each exchange decides them."""
    sends_momentum: bool = False
    """Whether the optimizer must learn sizes from other gradients than those that the codec makes:
    where it can, its momentum travels."""

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.spec.name

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.spec.numel

    @property
    def refresh_name(self) -> str:
        """The name under which the gradient itself is exchanged where otherwise momentum is."""
        return f"{self.name} (gradient)"

    @property
    def is_compressed(self) -> bool:
        """Whether a codec works on it."""
        return self.choice.codec.name != "none"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Gradients of one bucket that travel together."""

    codec: Codec
    strategy: str
    gradients: tuple[Gradient, ...]
    placements: tuple[tuple[Placement, ...], ...] | None
    spans: tuple[tuple[int, int], ...]
    """First element and end of each gradient in the buffer of the bucket."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the gradients."""
        return tuple(gradient.name for gradient in self.gradients)

    @property
    def sends_momentum(self) -> bool:
        """Whether the optimizer must learn sizes from other gradients than those of the codec."""
        return self.gradients[0].sends_momentum

    @cached_property
    def refresh_names(self) -> tuple[str, ...]:
        """Names under which the gradients themselves are exchanged, so that both keep buffers."""
        return tuple(gradient.refresh_name for gradient in self.gradients)

    @property
    def wants_rate(self) -> bool:
        """Whether the codec must follow the learning rate."""
        return bool(WRAPPED & set(self.codec.state_names))

    @property
    def wants_weights(self) -> bool:
        """Whether the codec applies weight decay."""
        return "weight" in self.codec.state_names


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The gradients that the framework hands over in one buffer."""

    names: tuple[str, ...]
    groups: tuple[Group, ...]
    """The groups in the order in which they start; empty if no codec takes the element type."""

    @property
    def has_codec(self) -> bool:
        """Whether any of its gradients is compressed."""
        return any(group.codec.name != "none" for group in self.groups)


def has_momentum(codec: Codec) -> bool:
    """Returns whether a codec sends the momentum of gradients."""
    return bool(MOMENTUM & set(codec.state_names))


def keeps_residual(codec: Codec) -> bool:
    """Returns whether a codec keeps what it has not sent for the next step."""
    return not set(UNSENT).isdisjoint(codec.state_names)


def applies_decay(codec: Codec) -> bool:
    """Returns whether a codec adds weight decay before it accumulates."""
    return "weight" in codec.state_names


def grouped(gradients: Sequence[Gradient]) -> tuple[Group, ...]:
    """Groups the gradients of a bucket, given in its order, by what was decided for them.

    Gradients with different learning rates are apart where the codec must follow the rate.
    """
    placed: list[tuple[Gradient, tuple[int, int]]] = []
    at = 0
    for gradient in gradients:
        placed.append((gradient, (at, at + gradient.numel)))
        at += gradient.numel

    def key(item: tuple[Gradient, tuple[int, int]]) -> grouping.GroupKey:
        spec, choice = item[0].spec, item[0].choice
        return grouping.GroupKey(
            codec=choice.codec.name,
            strategy=choice.strategy,
            rate=spec.rate_group if has_momentum(choice.codec) else None,
            bulk=choice.bulk,
            order=choice.order,
            sends_momentum=item[0].sends_momentum,
        )

    groups = []
    for found, members in grouping.grouped(placed, key).items():
        inside = tuple(gradient for gradient, _ in members)
        is_placed = all(gradient.placements or not gradient.numel for gradient in inside)
        groups.append(
            Group(
                codec=inside[0].choice.codec,
                strategy=found.strategy,
                gradients=inside,
                placements=tuple(g.placements for g in inside) if is_placed else None,
                spans=tuple(span for _, span in members),
            )
        )
    return tuple(groups)
