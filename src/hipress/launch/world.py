"""`join`, for scripts: which rank this process is, whichever launcher started it.

A script calls `join` before `init_process_group`, and then starts alike under `hipress run`,
torchrun, the PyTorchJob of Kubernetes, srun, Open MPI's mpirun, and alone.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from hipress.environment import free_port, read_environment


@dataclass(frozen=True, kw_only=True)
class World:
    """The position of this process among the ranks."""

    rank: int
    """Index of this process among all ranks, from 0 to `size` - 1."""
    size: int
    """Number of ranks on all hosts."""
    local_rank: int
    """Index among the ranks of this host, from 0; usually the index of its GPU."""
    local_size: int
    """Number of ranks on this host."""


def join(environ: MutableMapping[str, str] | None = None) -> World:
    """Find out which rank this process is, and set the variables that torch reads.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which
    `torch.distributed.init_process_group` reads. The variables of torchrun come first, then those
    of mpirun, then those of Slurm; a process with none of them is the only rank. Calling it again
    is harmless.

    Args:
        environ: The variables to read and to set; those of this process if None.

    Returns:
        The position of this process.

    Raises:
        UsageError: Some variables of a launcher are set and others are missing.

    Example:
        >>> world = join({})
        >>> world.rank, world.size
        (0, 1)
    """
    environ = os.environ if environ is None else environ
    found = read_environment(environ)
    environ.update(
        RANK=str(found.rank),
        WORLD_SIZE=str(found.num_ranks),
        LOCAL_RANK=str(found.local_rank),
        LOCAL_WORLD_SIZE=str(found.local_size),
        MASTER_ADDR=found.master_addr,
        MASTER_PORT=str(found.master_port or free_port()),
    )
    return World(
        rank=found.rank,
        size=found.num_ranks,
        local_rank=found.local_rank,
        local_size=found.local_size,
    )
