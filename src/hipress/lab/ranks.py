"""Where ranks run and what their environment says: the variables of torchrun."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hipress.errors import UsageError
from hipress.lab.job import Finished

_FIRST_PORT, _NUM_PORTS = 29500, 1000
_MOST_RANKS_PER_HOST = 64


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs."""

    host: int
    local_rank: int
    local_world_size: int

    @property
    def label(self) -> str:
        """The name of a rank in front of its lines: host0, or host0.1 among several there."""
        several = self.local_world_size > 1
        return f"host{self.host}.{self.local_rank}" if several else f"host{self.host}"


def place(hosts: int, ranks_per_host: int | Sequence[int]) -> tuple[Place, ...]:
    """Return the place of each rank: those of host 0 come first, as with torchrun."""
    counts = [ranks_per_host] * hosts if isinstance(ranks_per_host, int) else list(ranks_per_host)
    if len(counts) != hosts:
        raise UsageError(
            f"ranks_per_host has {len(counts)} numbers for {hosts} hosts; give one, or one each"
        )
    for count in counts:
        if not 1 <= count <= _MOST_RANKS_PER_HOST:
            raise UsageError(
                f"ranks_per_host is {count}; it must be from 1 to {_MOST_RANKS_PER_HOST}"
            )
    return tuple(
        Place(host=host, local_rank=local_rank, local_world_size=count)
        for host, count in enumerate(counts)
        for local_rank in range(count)
    )


def environment(
    ranks: Sequence[Place], rank: int, master: tuple[str, int], *, shaped: bool
) -> dict[str, str]:
    """Return the environment of a rank: this process's, and on top what torchrun sets."""
    where = ranks[rank]
    interface = "eth0" if shaped else "lo"
    return {
        # Rank 0 holds the store of torch; ranks that end after it would all print a page about it.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",  # or what a rank printed is lost when it is ended
        "OMP_NUM_THREADS": "1",  # as torchrun: hosts share the cores of one machine
        **os.environ,
        # `python` is the one that runs the lab, also where its environment is not activated.
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_RANK": str(where.local_rank),
        "LOCAL_WORLD_SIZE": str(where.local_world_size),
        "GROUP_RANK": str(where.host),
        "GROUP_WORLD_SIZE": str(ranks[-1].host + 1),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }


def free_port(number: int, *, shaped: bool) -> int:
    """Return a port that no earlier job of this lab has used on host 0."""
    if shaped:
        return _FIRST_PORT + number % _NUM_PORTS  # the network is new: nobody else is there
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def failure(finished: Finished) -> str:
    """Say in one sentence which rank failed first, and the last that it wrote to stderr."""
    assert finished.failed_rank is not None
    lines = finished.stderr[finished.failed_rank].strip().splitlines()
    said = f": {lines[-1]}" if lines else ", without a word on stderr"
    return f"rank {finished.failed_rank} ended with exit code {finished.exit_code}{said}"
