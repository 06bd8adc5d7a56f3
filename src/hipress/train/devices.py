"""Where a rank computes, and what carries its gradients there."""

from __future__ import annotations

import torch

from hipress.errors import UsageError


def choose(
    device: str, backend: str, *, local_rank: int, num_local: int
) -> tuple[torch.device, str]:
    """The rank's device and torch.distributed's backend.

    Args:
        device: auto (a GPU where there is one), cpu or cuda.
        backend: auto, gloo or nccl. NCCL takes one rank per GPU: where ranks share one, auto is
            gloo.
        local_rank: Of the ranks on this host.
        num_local: How many those are.

    Raises:
        UsageError: What is asked for is not there.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and num_gpus == 0:
        raise UsageError("--device cuda and torch sees no GPU here; give --device cpu.")
    on_gpu = device != "cpu" and num_gpus > 0
    shares = num_local > num_gpus
    if backend == "nccl" and (not on_gpu or shares):
        why = f"{num_local} ranks share {num_gpus} GPU(s)" if on_gpu else "the device is a CPU"
        raise UsageError(f"--backend nccl needs a GPU for each rank and {why}; give gloo.")
    if not on_gpu:
        return torch.device("cpu"), "gloo"
    where = torch.device("cuda", local_rank % num_gpus)
    return where, backend if backend != "auto" else "gloo" if shares else "nccl"
