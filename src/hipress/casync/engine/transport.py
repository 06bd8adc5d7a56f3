"""The interface between the executors and torch.distributed.

`Transport` is the contract; `GroupTransport` fulfils it on a process group of any backend, and
`loopback` inside one process.

The sockets that gloo opens are kept, so that they can be shut down. gloo waits for a message until
it comes, the peer hangs up, or the timeout is over; torch cannot make it stop (`abort` of a group
leaves the waiting threads where they are). A process with such a thread cannot end well: a thread
that comes back while Python shuts down aborts the process. Shutting the connection down wakes it.

They also tell that a process has died: the system closes its connections, and gloo then closes the
sockets on this side, whether a message is expected or not. `SO_KEEPALIVE` makes the same happen
where a host has vanished. A process that is frozen or busy still has a system that answers.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
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

    def close(self) -> None:
        """Ends its threads; nothing is pending, and nothing can be sent any more."""
        return None

    def keep_unsent_small(self) -> None:
        """Keeps what was handed over, and has not left yet, short: a send ends when it has left."""
        return None

    def num_lost_peers(self) -> int | None:
        """Returns the number of other ranks to which the connection is lost; None if unknown."""
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
        self._connections = connections(self._sockets)
        if len(self._connections) != self.num_ranks - 1:
            # Not one for each peer: gloo connects later (TORCH_GLOO_LAZY_INIT), or a library has
            # opened others meanwhile. The number of lost ones would tell nothing.
            self._connections = {}

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

    def close(self) -> None:
        # The destructor of a group of gloo joins its threads. One that frees a tensor while Python
        # shuts down aborts the process.
        del self.group

    def keep_unsent_small(self) -> None:
        for fd in connections(self._sockets):
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                one.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    def num_lost_peers(self) -> int | None:
        if not self._connections:
            return None
        return sum(is_lost(fd, inode) for fd, inode in self._connections.items())

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


UNSENT_BYTES = 2**17
"""Most bytes that wait in a connection where a schedule decides what is sent next. The system's
default of several MB would hide a tenth of a second at 1 Gbit from the schedule."""
_TCP_NOTSENT_LOWAT = 25
VANISHED_S = 25.0
"""After this time without any answer from the system of a peer, the connection is lost."""
UNANSWERED = 3
"""Number of unanswered probes or retransmissions that are needed besides."""
_TCP_INFO_BYTES = 60
_LAST_ACK_AT = 56
"""Place of `tcpi_last_ack_recv` in Linux's `struct tcp_info`, which begins with four bytes: state,
congestion state, number of unanswered retransmissions, number of unanswered probes."""


@contextmanager
def opened_sockets() -> Iterator[Sockets]:
    """Collects the sockets that this process opens in the block."""
    before, made = open_sockets(), Sockets()
    yield made
    made.update({fd: inode for fd, inode in open_sockets().items() if before.get(fd) != inode})


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


def connections(sockets: Sockets, *, timeout_s: float | None = None) -> Sockets:
    """Returns the TCP connections among some sockets, and lets the system probe idle ones.

    Args:
        sockets: Sockets of this process.
        timeout_s: Also ends a connection whose peer has not taken what was sent within this time,
            or within `VANISHED_S` if that is shorter. A process that is frozen takes nothing,
            although its system answers; a read that waits for its answer fails after this time.
            If None, only connections without an answer end.
    """
    found = Sockets()
    for fd, inode in sockets.items():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            one.getpeername()  # raises for one that listens
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(VANISHED_S) // 2)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(VANISHED_S) // 6)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNANSWERED)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if timeout_s is not None:
                limit_ms = int(1000 * min(VANISHED_S, timeout_s))
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
                seconds = struct.pack("@ll", *divmod(int(1e6 * timeout_s), 1_000_000))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            found[fd] = inode
    return found


def is_lost(fd: int, inode: int) -> bool:
    """Returns whether a connection was closed, or its peer's system has stopped answering."""
    try:
        if os.fstat(fd).st_ino != inode:
            return True
        with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as one:
            facts = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return True
    _, _, retransmits, probes = facts[:4]
    (silent_ms,) = struct.unpack_from("=I", facts, _LAST_ACK_AT)
    # The system itself closes an idle connection, but retransmits for a quarter of an hour. Its
    # own limit for that (TCP_USER_TIMEOUT) would also end connections to frozen peers.
    return max(retransmits, probes) >= UNANSWERED and silent_ms > 1000 * VANISHED_S
