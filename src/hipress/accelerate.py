"""Accelerate: `sync = hipress.accelerate.attach(accelerator, model, optimizer, codec="onebit")`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hipress.errors import UsageError
from hipress.torch import Sync
from hipress.torch.frameworks import attach_wrapped

__all__ = ["attach"]


def attach(
    accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> Sync:
    """Compresses the gradients of a model that `accelerator.prepare` has wrapped in DDP.

    Call it once on all ranks, before the first step. `accelerator.save_state` and `load_state` then
    include the state of the codec; call them on all ranks, too. In one process it does nothing.

    Args:
        accelerator: The `accelerate.Accelerator`, whose gradient scaler is used if it has one.
        model: The model that `prepare` returned.
        optimizer: The optimizer that `prepare` returned.
        **options: The other arguments of `hipress.attach`, such as `codec`.

    Returns:
        What `hipress.attach` returns.
    """
    if not hasattr(accelerator, "register_for_checkpointing"):
        raise UsageError(
            f"attach was given a {type(accelerator).__name__} as its first argument; give the "
            "Accelerator, then the model and the optimizer that its prepare() returned."
        )
    options.setdefault("scaler", getattr(accelerator, "scaler", None))
    sync = attach_wrapped(
        model,
        "give the model that accelerator.prepare() returned, and use neither FSDP nor DeepSpeed",
        optimizer=optimizer,
        **options,
    )
    accelerator.register_for_checkpointing(sync)
    return sync
