"""What ranks that measure together share: the slowest counts, results agree, bytes are counted."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from hipress.errors import HipressError

INTERFACE = "eth0"
NUM_IDLE = 10
"""Barriers whose bytes are averaged, to be taken off those of a sample."""
LEAST_BYTES = 10**6
"""Less is not compared with the interface: heartbeats and the like would count."""


class Interface:
    """The bytes that this rank's `eth0` has sent; none where hosts have no network of their own."""

    def __init__(self, *, is_shaped: bool) -> None:
        self.is_shaped = is_shaped
        self.idle_bytes = 0.0
        """Of the two barriers of a sample."""

    def sent_bytes(self) -> int:
        """So far."""
        return sent_bytes(Path("/proc/self/net/dev").read_text()) if self.is_shaped else 0

    def measure_idle(self) -> None:
        """Find `idle_bytes`; on all ranks."""
        dist.barrier()  # what the last sync has queued must not count
        before = self.sent_bytes()
        for _ in range(2 * NUM_IDLE):
            dist.barrier()
        self.idle_bytes = (self.sent_bytes() - before) / NUM_IDLE

    def per_sample(self, total_bytes: int, num_samples: int) -> float:
        """Bytes of one sample, without its barriers."""
        return max(total_bytes / num_samples - self.idle_bytes, 0.0)

    def deviation(self, counted_bytes: float, wire_bytes: float, num_samples: int) -> float:
        """How far the interface is from what the engine says, as a part of it; -1: unknown."""
        counts = self.is_shaped and wire_bytes * num_samples >= LEAST_BYTES
        return abs(counted_bytes - wire_bytes) / wire_bytes if counts else -1.0


def sent_bytes(text: str) -> int:
    """Bytes that `eth0` has sent, out of the text of /proc/net/dev.

    Example:
        >>> sent_bytes("  eth0: 10 1 0 0 0 0 0 0 99 2 0 0 0 0 0 0")
        99
    """
    for line in text.splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise AssertionError(f"no {INTERFACE} here:\n{text}")


def largest(values: Sequence[float]) -> list[float]:
    """The largest over all ranks, each."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(value) for value in found]


def ranks_agree(values: Sequence[torch.Tensor]) -> bool:
    """Whether all ranks hold the same bits."""
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(value.detach().cpu().numpy().data)
    own = torch.tensor([int.from_bytes(digest.digest(), "little", signed=True)])
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return all(torch.equal(each, own) for each in found)


def tell(num_done: int, total: int, label: str) -> None:
    """Rank 0 tells on stdout how far it is, for the progress bar."""
    if dist.get_rank() == 0:
        print(f"@@ {num_done} {total} {label}", flush=True)


def run_rank(main: Callable[[str], None]) -> None:
    """Run a worker with the config of its command line; an error of ours is one line on stderr."""
    try:
        main(sys.argv[1])
    except HipressError as failure:
        sys.exit(str(failure))
    leave()


def leave(code: int = 0) -> NoReturn:
    """End this rank's process.

    Not through the interpreter's end: gloo's threads may still hold callbacks of torch's hooks, and
    one that is freed while Python shuts down aborts the process (seen once in some 30 runs).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
