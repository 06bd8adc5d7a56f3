"""The place of this process among the ranks, whoever started it.

A script calls `join` before `init_process_group`, and then starts alike under `hipress run`,
torchrun, the PyTorchJob of Kubernetes, srun, Open MPI's mpirun, and alone.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass

from hipress.errors import UsageError
from hipress.launch.slurm import expand_counts, expand_hosts

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Below the ports that Linux hands out by itself, from 32768 on."""
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class World:
    """Who this process is among the ranks."""

    rank: int
    """From 0 to size - 1."""
    size: int
    """Ranks in all."""
    local_rank: int
    """From 0 among the ranks of this host; the number of its GPU as a rule."""
    local_size: int
    """Ranks on this host."""

    def __post_init__(self) -> None:
        for kind, rank, size in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
        ):
            if not 0 <= rank < size:
                raise UsageError(
                    f"{kind} {rank} of {size} can not be: ranks count from 0 to the size less 1; "
                    f"look at how this process was started"
                )
        if self.local_size > self.size:
            raise UsageError(
                f"{self.local_size} ranks on this host are more than all {self.size}; look at "
                f"how this process was started"
            )


def join(environ: MutableMapping[str, str] | None = None) -> World:
    """Find out which rank this process is, and tell torch.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which
    `torch.distributed.init_process_group` reads. Those that torchrun, mpirun and Slurm set come
    first, in this order; with none of them this is a world of one. Calling it again is harmless.

    Args:
        environ: Where to look and what to set; the environment of this process if None.

    Returns:
        The place of this process.

    Raises:
        UsageError: Some variables of a launcher are set and others are missing.

    Example:
        >>> world = join({})
        >>> world.rank, world.size
        (0, 1)
    """
    environ = os.environ if environ is None else environ
    if any(environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        world, address, port = _from_torchrun(environ)
    elif environ.get("OMPI_COMM_WORLD_RANK"):
        world, address, port = _from_mpirun(environ)
    elif environ.get("SLURM_PROCID"):
        world, address, port = _from_srun(environ)
    elif found := [name for name in (*_TORCH, "LOCAL_RANK") if environ.get(name)]:
        raise _half_set(found[0], ["RANK", "WORLD_SIZE"])
    else:
        world = World(rank=0, size=1, local_rank=0, local_size=1)
        address, port = "127.0.0.1", _free_port()
    environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.local_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    return world


_Found = tuple[World, str, int]


def _from_torchrun(environ: MutableMapping[str, str]) -> _Found:
    if missing := [name for name in _TORCH if not environ.get(name)]:
        found = next(name for name in _TORCH if environ.get(name))
        raise _half_set(found, missing)
    size = _number(environ, "WORLD_SIZE")
    # A PyTorchJob starts one rank per container and says nothing of local ranks.
    local_rank = _number(environ, "LOCAL_RANK") if environ.get("LOCAL_RANK") else 0
    if environ.get("LOCAL_WORLD_SIZE"):
        local_size = _number(environ, "LOCAL_WORLD_SIZE")
    elif local_rank == 0:
        local_size = 1
    else:
        raise _half_set("LOCAL_RANK", ["LOCAL_WORLD_SIZE"])
    world = World(
        rank=_number(environ, "RANK"), size=size, local_rank=local_rank, local_size=local_size
    )
    return world, environ["MASTER_ADDR"], _port(environ)


def _from_mpirun(environ: MutableMapping[str, str]) -> _Found:
    names = [f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if missing := [name for name in names if not environ.get(name)]:
        raise _half_set(names[0], missing)
    rank, size, local_rank, local_size = (_number(environ, name) for name in names)
    world = World(rank=rank, size=size, local_rank=local_rank, local_size=local_size)
    address = environ.get("MASTER_ADDR")
    if not address and size > local_size:
        raise UsageError(
            f"mpirun started {size} ranks on several hosts and MASTER_ADDR, the host of rank 0, "
            f"is not set; add -x MASTER_ADDR=HOST -x MASTER_PORT=29500 to mpirun"
        )
    if environ.get("MASTER_PORT"):
        port = _port(environ)
    elif size > local_size:
        raise _half_set("MASTER_ADDR", ["MASTER_PORT"])
    else:
        # What all ranks of one mpirun share and two of them do not: its namespace, or its process.
        job = environ.get("PMIX_NAMESPACE") or str(os.getppid())
        port = _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    return world, address or "127.0.0.1", port


def _from_srun(environ: MutableMapping[str, str]) -> _Found:
    total = next(
        (n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if environ.get(n)), "SLURM_NTASKS"
    )
    wanted = ["SLURM_PROCID", total, "SLURM_LOCALID"]
    if missing := [name for name in wanted if not environ.get(name)]:
        raise _half_set("SLURM_PROCID", missing)
    size = _number(environ, total)
    # sbatch runs its script once, on the first host, with the variables of all tasks: rank 0 of
    # many would wait for ranks that nobody starts.
    if size > 1 and environ.get("ENVIRONMENT") == "BATCH" and not environ.get("SLURM_STEP_ID"):
        raise UsageError(
            f"this is the batch script of a Slurm job with {size} tasks, and only srun starts "
            f"them all; write srun in front of the command"
        )
    hosts = _slurm_hosts(environ)
    local_rank = _number(environ, "SLURM_LOCALID")
    world = World(
        rank=_number(environ, "SLURM_PROCID"),
        size=size,
        local_rank=local_rank,
        local_size=_slurm_local_size(environ, size, hosts),
    )
    address = environ.get("MASTER_ADDR") or (hosts[0] if hosts else "")
    if not address:
        raise _half_set("SLURM_PROCID", ["SLURM_STEP_NODELIST"])
    if environ.get("MASTER_PORT"):
        return world, address, _port(environ)
    if not environ.get("SLURM_JOB_ID"):
        raise _half_set("SLURM_PROCID", ["SLURM_JOB_ID"])
    # 16 steps of a job that run at a time, and jobs that follow each other, get their own port.
    step = _number(environ, "SLURM_STEP_ID") if environ.get("SLURM_STEP_ID") else 0
    port = _FIRST_PORT + (_number(environ, "SLURM_JOB_ID") * 16 + step % 16) % _NUM_PORTS
    return world, address, port


def _slurm_hosts(environ: MutableMapping[str, str]) -> list[str]:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return expand_hosts(environ[name])
    return []


def _slurm_local_size(environ: MutableMapping[str, str], size: int, hosts: list[str]) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if environ.get(name):
            counts = expand_counts(environ[name])
            node = _number(environ, "SLURM_NODEID") if environ.get("SLURM_NODEID") else 0
            # The second is of the whole job: of use only where this step has as many tasks.
            if sum(counts) == size and node < len(counts):
                return counts[node]
    if hosts and size % len(hosts) == 0:
        return size // len(hosts)
    raise _half_set("SLURM_PROCID", ["SLURM_STEP_TASKS_PER_NODE"])


def _number(environ: MutableMapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(
            f"{name} is {text!r}; it must be a whole number from 0, which the launcher sets: "
            f"unset it, or start this with torchrun, srun or mpirun"
        )
    return int(text)


def _port(environ: MutableMapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT is {port}; it must be from 1 to 65535, such as 29500")
    return port


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _half_set(found: str, missing: list[str]) -> UsageError:
    verb = "is" if len(missing) == 1 else "are"
    return UsageError(
        f"{found} is set and {' and '.join(missing)} {verb} not, so this process does not know "
        f"its rank; set what is missing, unset {found} to run alone, or start it with "
        f"hipress run, torchrun, srun or mpirun"
    )
