"""What the ranks of a training job tell each other besides gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from hipress import settings
from hipress.casync.agree import Council
from hipress.errors import UsageError
from hipress.torch.replicas import digests


class JointError(UsageError):
    """A refusal that all ranks raise alike."""


class Ranks:
    """All ranks of the default process group.

    Args:
        device: Where this one computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        # What NCCL carries must be on the GPU; gloo takes both, and a CPU's without a copy.
        self._device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    def agree(self, what: str, facts: dict[str, Any], refusal: str | None) -> None:
        """Raise on all ranks where one refuses, or was told something else than rank 0.

        Args:
            what: Names the occasion.
            facts: What must be the same.
            refusal: This rank's, if it has one.

        Raises:
            JointError: A rank refuses; where not all do, it is named.
            AgreementError: Ranks differ.
        """
        store = PrefixStore("hipress/train", dist.distributed_c10d._get_default_store())
        council = Council(store, self.rank, self.num_ranks, settings.timeout_s())
        told = council.agree(what, facts, told=refusal)
        for rank, text in enumerate(told):
            if text is not None:
                raise JointError(text if len(set(told)) == 1 else f"rank {rank}: {text}")

    def mean(self, value: Tensor) -> float:
        """Of one number."""
        return self.total(value.detach().reshape(1).to(torch.float64))[0] / self.num_ranks

    def total(self, values: Tensor) -> list[float]:
        """The sum over all ranks, each."""
        values = values.to(self._device)
        dist.all_reduce(values)
        found: list[float] = values.tolist()
        return found

    def gather(self, values: Tensor) -> list[list[int]]:
        """Whole numbers of all ranks."""
        values = values.to(self._device)
        found = [torch.empty_like(values) for _ in range(self.num_ranks)]
        dist.all_gather(found, values)
        return [one.tolist() for one in found]

    def gather_digests(self, model: nn.Module) -> list[dict[str, str]]:
        """By name of parameter, for each rank a number that stands for its bits."""
        mine = digests(model.named_parameters())
        values = torch.tensor([int(text, 16) - 2**63 for text in mine.values()])
        return [dict(zip(mine, map(str, one), strict=True)) for one in self.gather(values)]

    def have_same(self, model: nn.Module) -> bool:
        """Whether all hold the same parameters."""
        found = self.gather_digests(model)
        return all(one == found[0] for one in found)
