"""The memory of codecs by gradient; it outlives exchanges and the grouping of gradients.

The codecs of an exchange work on tensors of their own, one for each chunk. The store holds views of
them, one for each partition of a gradient, so that the next exchange, which may group gradients in
another way, starts where this one ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hipress.casync.graphs.graph import Kind
from hipress.codecs import residual
from hipress.codecs.base import RANDOM_KEYS, WEIGHT, Codec, State
from hipress.codecs.bulk import Bulk


class Key(NamedTuple):
    """Names the memory of one partition of a gradient in one role."""

    name: str
    start: int
    stop: int
    kind: Kind
    """The kind of slot that is encoded: a worker's frame, a partial mean, or the mean for all."""
    merged: int
    """The number of contributions in what is encoded."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


class StateStore:
    """The memory of codecs, as tensors by name, for every partition of every gradient."""

    def __init__(self) -> None:
        self._held: dict[str, dict[Key, State]] = {}
        self._preloaded: dict[tuple[str, Kind, int], State] = {}
        """Memory of whole gradients, for partitions that no exchange has worked on yet."""

    def register(self, keys: Sequence[Key], state: State, coder: Codec | Bulk) -> None:
        """Fills the new state of an exchange with what is stored, and stores it from now on.

        Args:
            keys: The partitions of a chunk, in order.
            state: The state of the chunk.
            coder: What works on the state, and knows its layout.
        """
        for name, held in state.items():
            if name in RANDOM_KEYS:
                continue
            views = coder.state_views(name, held, keys[0].numel)
            for key, view in zip(keys, views, strict=True):
                mine = self._held.setdefault(key.name, {}).setdefault(key, {})
                preloaded = self._preloaded.get((key.name, key.kind, key.merged), {})
                if name in mine:
                    residual.put(view, mine[name], key.numel)
                elif name in preloaded:
                    residual.put(view, preloaded[name][key.start : key.stop], key.numel)
                mine[name] = view

    def preload(
        self, gradient: str, kind: Kind, merged: int, name: str, value: torch.Tensor
    ) -> None:
        """Sets the memory of a whole gradient, now or when an exchange first works on it."""
        self._preloaded.setdefault((gradient, kind, merged), {})[name] = value
        for key, state in self.partitions_of(gradient).items():
            if (key.kind, key.merged) == (kind, merged) and name in state:
                residual.put(state[name], value[key.start : key.stop], key.numel)

    def preloaded(self, gradient: str, kind: Kind, merged: int, name: str) -> torch.Tensor | None:
        """Returns what `preload` was given, until `drop_preloaded`."""
        return self.preloads(gradient, kind, merged).get(name)

    def preloads(self, gradient: str, kind: Kind, merged: int) -> State:
        """Returns all that `preload` was given for a role of a gradient, until it is dropped."""
        return self._preloaded.get((gradient, kind, merged), {})

    def has_preloaded(self, gradient: str) -> bool:
        """Returns whether a gradient still has to take over what was preloaded."""
        return any(name == gradient for name, _, _ in self._preloaded)

    def restore(self, key: Key, state: State) -> None:
        """Sets the memory of one partition, which a later exchange takes over."""
        mine = self._held.setdefault(key.name, {}).setdefault(key, {})
        for name, value in state.items():
            if name in mine:
                residual.put(mine[name], value, key.numel)
            else:
                mine[name] = value

    def drop_preloaded(self) -> None:
        """Drops what was preloaded, once every exchange that needs it has taken it."""
        self._preloaded.clear()

    def scale(self, factor: float) -> None:
        """Multiplies all memory that has the unit of gradients."""
        for key, state in self:
            for name, held in state.items():
                if name != WEIGHT:
                    residual.scale(held, factor, key.numel)
        for preloaded in self._preloaded.values():
            for name in preloaded:
                preloaded[name] = preloaded[name] * factor  # the tensor belongs to the caller

    def assemble(
        self, gradient: str, numel: int, device: torch.device
    ) -> dict[tuple[Kind, int, str], torch.Tensor]:
        """Returns this rank's memory of a whole gradient, zero where nothing is stored."""
        found: dict[tuple[Kind, int, str], torch.Tensor] = {}
        for (name, kind, merged), state in self._preloaded.items():
            for part, value in state.items() if name == gradient else ():
                found[kind, merged, part] = value.to(device, copy=True)
        for key, state in self.partitions_of(gradient).items():
            for part, value in state.items():
                role = (key.kind, key.merged, part)
                if role not in found:
                    found[role] = torch.zeros(numel, device=device)
                found[role][key.start : key.stop] = residual.values(value, key.numel)
        return found

    def clear(self) -> None:
        """Sets all memory to zero."""
        self._preloaded.clear()
        for _, state in self:
            for held in state.values():
                held.zero_()

    def partitions_of(self, name: str) -> dict[Key, State]:
        """Returns what is stored for the partitions of a gradient."""
        return self._held.get(name, {})

    def forget(self, name: str) -> None:
        """Drops what is stored for a gradient."""
        self._held.pop(name, None)
        for key in [key for key in self._preloaded if key[0] == name]:
            del self._preloaded[key]

    def __iter__(self) -> Iterator[tuple[Key, State]]:
        for mine in self._held.values():
            yield from mine.items()

    @property
    def num_bytes(self) -> int:
        """Bytes of all memory."""
        return sum(held.nbytes for _, state in self for held in state.values())
