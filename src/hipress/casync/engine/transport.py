"""The interface between the executors and torch.distributed.

`Transport` is the contract; `GroupTransport` fulfils it on a process group of any backend, and
`loopback` inside one process.

The sockets that gloo opens are kept, so that they can be shut down. gloo waits for a message until
it comes, the peer hangs up, or the timeout is over; torch cannot make it stop (`abort` of a group
leaves the waiting threads where they are). A process with such a thread cannot end well: a thread
that comes back while Python shuts down aborts the process. Shutting the connection down wakes it.
"""

from __future__ import annotations

import os
import socket
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

import torch

from hipress.errors import HipressError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LinkError(RuntimeError):
    """A message failed in the transport."""


@contextmanager
def on_the_link() -> Iterator[None]:
    """Turns a RuntimeError of torch into a LinkError: the link or the peer has failed."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HipressError | LinkError):
            raise
        raise LinkError(str(error)) from error


def finish(pending: Pending) -> None:
    """Waits for a pending message."""
    with on_the_link():
        pending.wait()


class Pending(Protocol):
    """A message, or an all-reduce, that was started."""

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
        """Makes what is pending fail; nothing can be sent any more."""
        return None


class GroupTransport(Transport):
    """A process group of our own, gloo or any other backend.

    Args:
        group: A group that nothing else communicates in.
        backend: Its backend. gloo has tags and takes host memory; others are assumed to have no
            tags and to take the memory of the device.
        sockets: The sockets it communicates through, as far as they are known.
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
        try:
            self.group.abort()
        finally:
            shut_down(self._sockets)

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
    ) -> Sequence[Pending]:
        if not self.ordered:
            return super().exchange(sends, recvs)
        import torch.distributed as dist

        # One grouped call, as NCCL's own all-to-all.
        ops = [dist.P2POp(dist.irecv, data, group=self.group, group_peer=of) for data, of in recvs]
        ops += [dist.P2POp(dist.isend, data, group=self.group, group_peer=to) for data, to in sends]
        with on_the_link():
            return dist.batch_isend_irecv(ops) if ops else []


Sockets = dict[int, int]
"""File descriptors with their inodes, which tell whether it is still the same socket."""


def open_sockets() -> Sockets:
    """Returns the sockets of this process; none where the system does not list them."""
    found: Sockets = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                facts = os.fstat(int(name))
                if stat.S_ISSOCK(facts.st_mode):
                    found[int(name)] = facts.st_ino
    return found


def shut_down(sockets: Sockets) -> None:
    """Ends the connections; a thread that waits on one gets an error."""
    for fd, inode in sockets.items():
        with suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                with socket.socket(fileno=os.dup(fd)) as one:
                    one.getpeername()  # raises for one that listens: gloo dies if that ends
                    one.shutdown(socket.SHUT_RDWR)
