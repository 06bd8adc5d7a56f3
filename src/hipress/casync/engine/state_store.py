"""The codecs' memory by gradient: it outlives jobs, and how gradients are put together.

A job's codecs work on tensors of their own, one for each chunk. What the keeper holds are views of
them, one for each partition of a gradient, so that the next job, which may put other gradients
together, starts where this one ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hipress.casync.graphs.graph import Kind
from hipress.codecs.base import RANDOM_KEYS, WEIGHT, State
from hipress.codecs.bulk import Bulk


class Key(NamedTuple):
    """Whose memory it is: a partition of a gradient, and what this rank encodes there."""

    name: str
    start: int
    stop: int
    kind: Kind
    """A worker's frame, a partial mean of a ring, or what goes back to all."""
    merged: int
    """How many contributions are in what is encoded."""


class StateStore:
    """What codecs remember, as tensors by name, for every partition of every gradient."""

    def __init__(self) -> None:
        self._held: dict[str, dict[Key, State]] = {}
        self._offers: dict[tuple[str, Kind, int], State] = {}
        """Of whole gradients, for partitions that no job has worked on yet."""

    def adopt(self, keys: Sequence[Key], state: State, bulk: Bulk | None) -> None:
        """Moves what is known of some partitions into the fresh state of a job.

        Args:
            keys: The partitions of a chunk, in order.
            state: Of the chunk.
            bulk: How several partitions lie in it; None: there is one.
        """
        for name, held in state.items():
            if name in RANDOM_KEYS:
                continue
            views = [held] if bulk is None else bulk.views(held)
            for key, view in zip(keys, views, strict=True):
                mine = self._held.setdefault(key.name, {}).setdefault(key, {})
                offer = self._offers.get((key.name, key.kind, key.merged), {})
                if name in mine:
                    view.copy_(mine[name])
                elif name in offer:
                    view.copy_(offer[name][key.start : key.stop])
                mine[name] = view

    def offer(self, gradient: str, kind: Kind, merged: int, name: str, value: torch.Tensor) -> None:
        """Sets what is remembered of a whole gradient, now or when a job first works on it."""
        self._offers.setdefault((gradient, kind, merged), {})[name] = value
        for key, state in self.of(gradient).items():
            if (key.kind, key.merged) == (kind, merged) and name in state:
                state[name].copy_(value[key.start : key.stop])

    def offered(self, gradient: str, kind: Kind, merged: int, name: str) -> torch.Tensor | None:
        """What was offered, until offers are forgotten."""
        return self._offers.get((gradient, kind, merged), {}).get(name)

    def scale(self, factor: float) -> None:
        """Multiplies all that is in the gradients' unit."""
        for _, state in self:
            for name, held in state.items():
                if name != WEIGHT:
                    held.mul_(factor)
        for offer in self._offers.values():
            for name in offer:
                offer[name] = offer[name] * factor  # what was offered belongs to others

    def forget_offers(self) -> None:
        """Drops what was offered: whoever wanted it has taken it."""
        self._offers.clear()

    def whole(
        self, gradient: str, numel: int, device: torch.device
    ) -> dict[tuple[Kind, int, str], torch.Tensor]:
        """What this rank remembers of a gradient, zero where it holds nothing."""
        found: dict[tuple[Kind, int, str], torch.Tensor] = {}
        for (name, kind, merged), state in self._offers.items():
            for part, value in state.items() if name == gradient else ():
                found[kind, merged, part] = value.to(device, copy=True)
        for key, state in self.of(gradient).items():
            for part, value in state.items():
                place = (key.kind, key.merged, part)
                if place not in found:
                    found[place] = torch.zeros(numel, device=device)
                found[place][key.start : key.stop] = value
        return found

    def clear(self) -> None:
        """All that is held becomes zero."""
        self._offers.clear()
        for _, state in self:
            for held in state.values():
                held.zero_()

    def of(self, name: str) -> dict[Key, State]:
        """What is held for a gradient."""
        return self._held.get(name, {})

    def forget(self, name: str) -> None:
        """Drops what is held for a gradient."""
        self._held.pop(name, None)

    def __iter__(self) -> Iterator[tuple[Key, State]]:
        for mine in self._held.values():
            yield from mine.items()

    @property
    def num_bytes(self) -> int:
        """Of all that is held."""
        return sum(held.nbytes for _, state in self for held in state.values())
