"""The error of a rank that does not reach the store any more: one text for every use of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hipress.errors import HipressError, PeerError


@contextmanager
def in_the_store(rank: int) -> Iterator[None]:
    """Turns torch's error of a store that is gone into a PeerError that names its holder.

    Args:
        rank: The rank that uses the store.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HipressError):
            raise
        raise lost_store(rank, error) from error


def lost_store(rank: int, error: BaseException) -> PeerError:
    """Returns the error to raise where a rank does not reach the store."""
    holder = "rank 0, or the process that holds the store," if rank else "the process that holds it"
    return PeerError(
        f"rank {rank} does not reach the store: {holder} is gone or frozen, or the link of rank "
        f"{rank} is down ({first_line(error)}); look at the output there.",
        ranks=(0,) if rank else (),
    )


def is_connection_lost(error: BaseException) -> bool:
    """Returns whether an error of the store came from its connection.

    Such a connection must not be used again: after a time limit the answer may still come, and
    would be taken for that of the next question.
    """
    import torch.distributed as dist

    return isinstance(error, dist.DistNetworkError)


def first_line(error: BaseException) -> str:
    """Returns the first sentence of an error, without the location in torch's sources."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|hpp):\d+\] ", "", line).split(". ")[0][:200]
