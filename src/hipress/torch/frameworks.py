"""What the integrations of training frameworks share: attaching to their model, and its figures."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hipress.environment import read_environment
from hipress.errors import UsageError
from hipress.session.checkpoint import VERSION
from hipress.torch import Sync, attach


def attach_wrapped(model: nn.Module, remedy: str, **options: Any) -> Sync:
    """Attaches to the model that a framework trains, if the framework has wrapped it in DDP.

    Args:
        model: The model as the framework calls it.
        remedy: How to make the framework use DDP, for the error.
        **options: Those of `attach`.

    Returns:
        The session; in a job of one process one that does nothing.
    """
    wrapped = isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)
    is_job = dist.is_initialized()
    if not wrapped and (dist.get_world_size() if is_job else read_environment().num_ranks) > 1:
        raise UsageError(
            f"the model that is trained is a {type(model).__name__}, and HiPress compresses what a "
            f"DistributedDataParallel exchanges: {remedy}."
        )
    return attach(model, **options)


def blank() -> dict[str, Any]:
    """Returns a checkpoint without steps and residuals, which fits every session."""
    tables = ("rates", "gradients", "ranks", "shared", "mean", "owed")
    facts = {"version": VERSION, "world_size": 1, "hosts": "0", "step": 0, "scale": 1.0}
    return facts | {name: {} for name in tables}


class Figures:
    """Reads what a session has sent since the last time, as scalars for a framework's log."""

    def __init__(self) -> None:
        self._last = (0, 0, 0.0)

    def read(self, sync: Sync) -> dict[str, float]:
        """Returns the scalars; none if no step was made since the last time."""
        stats = sync.stats()
        now = (stats.num_steps, stats.sent_bytes, stats.ratio * stats.sent_bytes)
        steps, sent, plain = (new - old for new, old in zip(now, self._last, strict=True))
        if not steps:
            return {}
        self._last = now
        return {
            "hipress/ratio": plain / sent if sent else 1.0,
            "hipress/sent_mb_per_step": sent / steps / 1e6,
        }
