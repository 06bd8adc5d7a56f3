"""What carries messages: the seam between the executor and torch.distributed.

`Transport` is the contract; `GroupTransport` fulfils it on a process group of any backend. See
`loopback` for one inside a process, `strict` for the check of graphs without data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from hipress.casync.engine.sockets import Sockets, shut_down
from hipress.errors import HipressError, PeerError, UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LinkError(RuntimeError):
    """What the transport says of a message that failed."""


@contextmanager
def on_the_link() -> Iterator[None]:
    """What fails inside is the link's fault, or that of who is at its other end."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HipressError | LinkError):
            raise
        raise LinkError(str(error)) from error


def finish(pending: Pending) -> None:
    """Waits for something under way."""
    with on_the_link():
        pending.wait()


def raise_again(failure: BaseException | None) -> None:
    """Raises for a call that comes after a failure."""
    if failure is None:
        return
    if isinstance(failure, UsageError):
        raise failure  # closed
    ranks = getattr(failure, "ranks", ())
    text = str(failure).removesuffix(".")
    raise PeerError(
        f"the exchange is down since an earlier error ({text}); restart the job.", ranks=ranks
    ) from failure


class Pending(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Returns when it is done, raises when it failed."""


class Transport(ABC):
    """Moves bytes between ranks."""

    rank: int
    num_ranks: int
    ordered: bool = False
    """Whether it has no tags, so that all ranks must communicate in one order."""
    on_device: bool = False
    """Whether it takes the memory of a GPU; others take host memory only."""

    @abstractmethod
    def send(self, data: torch.Tensor, to: int, tag: int) -> Pending:
        """Starts to send bytes; `data` must stay as it is until that is done."""

    @abstractmethod
    def recv(self, data: torch.Tensor, of: int, tag: int) -> Pending:
        """Starts to receive what `of` sends with the same tag, exactly as many bytes."""

    @abstractmethod
    def all_reduce(self, data: torch.Tensor) -> Pending:
        """Starts to sum `data` over all ranks, in place; in the same order on all ranks."""

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
    ) -> Sequence[Pending]:
        """Starts several sends (data, to) and receives (data, of) at once; no tags."""
        received = [self.recv(data, of, 0) for data, of in recvs]
        return [*received, *(self.send(data, to, 0) for data, to in sends)]

    def abort(self) -> None:
        """Makes what is under way fail; nothing can be sent any more."""
        return None


class GroupTransport(Transport):
    """A process group of our own, gloo or any other backend.

    Args:
        group: Nobody else may communicate in it.
        backend: Its backend: gloo has tags and takes host memory; others are taken to have none
            and to take the device's.
        sockets: What it communicates through, as far as that is known.
    """

    def __init__(self, group: ProcessGroup, backend: str, sockets: Sockets | None = None) -> None:
        self.group = group
        self._sockets = sockets or {}
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.ordered = backend != "gloo"
        self.on_device = backend != "gloo"

    def send(self, data: torch.Tensor, to: int, tag: int) -> Pending:
        with on_the_link():
            return self.group.send([data], to, tag)

    def recv(self, data: torch.Tensor, of: int, tag: int) -> Pending:
        with on_the_link():
            return self.group.recv([data], of, tag)

    def all_reduce(self, data: torch.Tensor) -> Pending:
        with on_the_link():
            return self.group.allreduce([data])

    def abort(self) -> None:
        self.group.abort()
        shut_down(self._sockets)

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
    ) -> Sequence[Pending]:
        if not self.ordered:
            return super().exchange(sends, recvs)
        import torch.distributed as dist

        # One grouped call: what NCCL's own all-to-all is made of.
        ops = [dist.P2POp(dist.irecv, data, group=self.group, group_peer=of) for data, of in recvs]
        ops += [dist.P2POp(dist.isend, data, group=self.group, group_peer=to) for data, to in sends]
        with on_the_link():
            return dist.batch_isend_irecv(ops) if ops else []
