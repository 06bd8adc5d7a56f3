"""A transport between threads of one process, for tests and examples."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

import torch

from hipress.casync.engine.transport import Pending, Transport
from hipress.errors import PeerError


class Hub:
    """Holds the messages between the ranks of one process.

    Args:
        num_ranks: The number of ranks.
        timeout_s: Time after which a receive fails.

    Example:
        >>> hub = Hub(2)
        >>> a, b = (Loopback(hub, rank) for rank in range(2))
        >>> out = torch.zeros(3, dtype=torch.uint8)
        >>> _ = a.send(torch.tensor([1, 2, 3], dtype=torch.uint8), 1, tag=7)
        >>> b.recv(out, 0, tag=7).wait(); out
        tensor([1, 2, 3], dtype=torch.uint8)
    """

    def __init__(self, num_ranks: int, timeout_s: float = 60.0) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.messages: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(
            queue.SimpleQueue
        )
        self.lock = threading.Lock()

    def wire(self, of: int, to: int, tag: int) -> queue.SimpleQueue[torch.Tensor]:
        """Returns the messages from one rank to another under a tag."""
        with self.lock:
            return self.messages[of, to, tag]


class Loopback(Transport):
    """One rank of a hub."""

    def __init__(self, hub: Hub, rank: int, *, ordered: bool = False) -> None:
        self.hub = hub
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self.ordered = ordered
        self._reductions = 0

    def send(self, data: torch.Tensor, to: int, tag: int) -> Pending:
        self.hub.wire(self.rank, to, tag).put(data.clone())
        return _Done()

    def recv(self, data: torch.Tensor, of: int, tag: int) -> Pending:
        return _Receive(self, data, of, tag)

    def all_reduce(self, data: torch.Tensor) -> Pending:
        self._reductions += 1
        tag = -self._reductions
        for peer in range(self.num_ranks):
            if peer != self.rank:
                self.send(data, peer, tag)
        return _Sum(self, data, tag)


class _Done:
    def wait(self) -> None:
        return None


class _Receive:
    def __init__(self, transport: Loopback, data: torch.Tensor, of: int, tag: int) -> None:
        self.transport, self.data, self.of, self.tag = transport, data, of, tag

    def wait(self) -> None:
        transport, hub = self.transport, self.transport.hub
        try:
            found = hub.wire(self.of, transport.rank, self.tag).get(timeout=hub.timeout_s)
        except queue.Empty:
            raise PeerError(
                f"rank {transport.rank} waited {hub.timeout_s:g} s for rank {self.of}; "
                "it is late or gone: look at its output.",
                ranks=(self.of,),
            ) from None
        if found.numel() != self.data.numel():
            raise PeerError(
                f"rank {self.of} sent {found.numel()} bytes where rank {transport.rank} expects "
                f"{self.data.numel()}: give all ranks the same codec and tensors.",
                ranks=(self.of,),
            )
        self.data.copy_(found)


class _Sum:
    def __init__(self, transport: Loopback, data: torch.Tensor, tag: int) -> None:
        self.transport, self.data, self.tag = transport, data, tag

    def wait(self) -> None:
        own = self.data.clone()
        part = torch.empty_like(own)
        for peer in range(self.transport.num_ranks):
            if peer != self.transport.rank:
                _Receive(self.transport, part, peer, self.tag).wait()
            found = own if peer == self.transport.rank else part
            if peer == 0:
                self.data.copy_(found)
            else:
                self.data.add_(found)
