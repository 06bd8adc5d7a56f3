"""The error of a rank that does not reach the store any more: one text for every use of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hipress.errors import HipressError, PeerError


@contextmanager
def in_the_store(rank: int, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turns torch's error of a store that is gone into a PeerError that names its holder.

    Args:
        rank: The rank that uses the store.
        check: Raises if another rank is known to have failed: rank 0 has left because of that.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HipressError):
            raise
        check()
        raise lost_store(rank, error) from error


def lost_store(rank: int, error: BaseException) -> PeerError:
    """Returns the error to raise where a rank does not reach the store."""
    return PeerError(
        f"rank {rank} does not reach the store: rank 0, or the process that holds the store, is "
        f"gone or frozen, or the link of rank {rank} is down ({first_line(error)}); look at the "
        "output of rank 0.",
        ranks=(0,) if rank else (),
    )


def is_connection_lost(error: BaseException) -> bool:
    """Returns whether an error of the store came from its connection, which is unusable then."""
    import torch.distributed as dist

    return isinstance(error, dist.DistNetworkError)


def first_line(error: BaseException) -> str:
    """Returns the first sentence of an error, without the location in torch's sources."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|hpp):\d+\] ", "", line).split(". ")[0][:200]
