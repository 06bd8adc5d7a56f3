"""How much is measured of a codec: sizes, and memory that is used in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hipress.probe.cache import VERBS, Points

COLD_BYTES = 2**26
"""Of gradients and states that are used in turn: twice a cache of 32 MB."""
MIN_SLOTS, MAX_SLOTS = 4, 128
SLOT_BYTES = 24
"""Of one element in a slot: gradient, state and frame, both ways, and what a codec needs."""
FREE_SHARE = 0.25
"""Of the free memory of a GPU, that measuring may take: a model is in the middle of backward."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What is measured: the same on all ranks."""

    sizes: tuple[int, ...]
    """Elements."""
    room_numel: int | None = None
    """Elements that all slots may hold together, if memory is short."""

    @classmethod
    def of(
        cls, sizes: Sequence[int], most_numel: int | None = None, room_numel: int | None = None
    ) -> Extent:
        """No more than a model needs and memory allows, but two sizes at least.

        Example:
            >>> Extent.of((100, 200, 300), most_numel=250).sizes
            (100, 200)
        """
        most = min(most_numel or sizes[-1], (room_numel or 2**62) // MIN_SLOTS)
        within = sum(size <= most for size in sizes)
        return cls(tuple(sizes[: max(within, 2)]), room_numel)

    def num_slots(self, numel: int) -> int:
        """Chunks of a size that are used in turn."""
        room = MAX_SLOTS if self.room_numel is None else self.room_numel // numel
        return max(MIN_SLOTS, min(MAX_SLOTS, COLD_BYTES // (8 * numel), room))

    def is_within(self, points: Points) -> bool:
        """Whether points from before, maybe for a smaller model, reach far enough."""
        return max(int(numel) for numel, _ in points[VERBS[0]]) >= self.sizes[-1]


def room_numel(device: torch.device) -> int | None:
    """Elements that fit in a share of the free memory of a GPU."""
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(FREE_SHARE * free_bytes) // SLOT_BYTES
