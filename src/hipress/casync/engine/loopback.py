"""A transport between threads of one process, for tests and examples."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable

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
        return _Later(lambda: None)

    def recv(self, data: torch.Tensor, of: int, tag: int) -> Pending:
        return _Later(lambda: self._receive(data, of, tag))

    def all_reduce(self, data: torch.Tensor) -> Pending:
        self._reductions += 1
        tag = -self._reductions
        for peer in range(self.num_ranks):
            if peer != self.rank:
                self.send(data, peer, tag)
        return _Later(lambda: self._sum(data, tag))

    def _receive(self, data: torch.Tensor, of: int, tag: int) -> None:
        timeout_s = self.hub.timeout_s
        try:
            found = self.hub.wire(of, self.rank, tag).get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(
                f"rank {self.rank} waited {timeout_s:g} s for rank {of}; it is late or gone: look "
                "at its output.",
                ranks=(of,),
            ) from None
        if found.numel() != data.numel():
            raise PeerError(
                f"rank {of} sent {found.numel()} bytes where rank {self.rank} expects "
                f"{data.numel()}: give all ranks the same codec and tensors.",
                ranks=(of,),
            )
        data.copy_(found)

    def _sum(self, data: torch.Tensor, tag: int) -> None:
        own = data.clone()
        part = torch.empty_like(own)
        for peer in range(self.num_ranks):
            if peer != self.rank:
                self._receive(part, peer, tag)
            found = own if peer == self.rank else part
            if peer == 0:
                data.copy_(found)
            else:
                data.add_(found)


class _Later:
    """A message whose work is done by `wait`."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
