"""Gradients, and how those of a bucket are put together for the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hipress.casync.graphs import grouping
from hipress.casync.graphs.partitions import Placement
from hipress.codecs.base import Codec
from hipress.session.selection import Choice
from hipress.torch import optimizer_checks


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One parameter's gradient and what was decided for it."""

    name: str
    parameter: torch.Tensor
    choice: Choice
    placements: tuple[Placement, ...]

    @property
    def is_compressed(self) -> bool:
        """Whether a codec works on it."""
        return self.choice.codec.name != "none"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Gradients of a bucket that travel together."""

    codec: Codec
    strategy: str
    gradients: tuple[Gradient, ...]
    placements: tuple[tuple[Placement, ...], ...] | None
    spans: tuple[tuple[int, int], ...]
    """Of each in the bucket's buffer."""
    wants_rate: bool
    wants_weights: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the gradients."""
        return tuple(gradient.name for gradient in self.gradients)


def grouped(
    gradients: Sequence[Gradient], optimizer: torch.optim.Optimizer | None = None
) -> list[Group]:
    """The gradients of a bucket, in its order, by what is decided for them.

    Args:
        gradients: Of the bucket.
        optimizer: Parameters in different groups of it have different learning rates, which
            codecs with momentum want to know.
    """
    rated = _groups_of(optimizer)
    placed: list[tuple[Gradient, tuple[int, int]]] = []
    at = 0
    for gradient in gradients:
        placed.append((gradient, (at, at + gradient.parameter.numel())))
        at = placed[-1][1][1]

    def key(item: tuple[Gradient, tuple[int, int]]) -> grouping.GroupKey:
        gradient, choice = item[0], item[0].choice
        has_rate = optimizer_checks.has_momentum(choice.codec)
        return grouping.GroupKey(
            codec=choice.codec.name,
            strategy=choice.strategy,
            rate=rated.get(id(gradient.parameter)) if has_rate else None,
            bulk=choice.bulk,
            order=choice.order,
        )

    groups = []
    for (_, strategy, *_), members in grouping.grouped(placed, key).items():
        codec = members[0][0].choice.codec
        inside = tuple(gradient for gradient, _ in members)
        groups.append(
            Group(
                codec=codec,
                strategy=strategy,
                gradients=inside,
                placements=tuple(g.placements for g in inside) if inside[0].is_compressed else None,
                spans=tuple(span for _, span in members),
                wants_rate="momentum" in codec.state_names,
                wants_weights=optimizer_checks.decays(codec),
            )
        )
    return groups


def flat(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's elements in the order in which DDP's buckets hold its gradient."""
    parameter = parameter.detach()
    if parameter.is_contiguous():
        return parameter.view(-1)
    return torch.as_strided(parameter, (parameter.numel(),), (1,), parameter.storage_offset())


def _groups_of(optimizer: torch.optim.Optimizer | None) -> Mapping[int, int]:
    groups = () if optimizer is None else optimizer.param_groups
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}
