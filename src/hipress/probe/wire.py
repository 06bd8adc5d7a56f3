"""Messages of a probe: outside of any job, with tags that no job has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.transport import finish

TAG = 2**30
"""Above all tags of the executor, which have 30 bits."""


class Wire:
    """Messages outside of any job."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transport = engine.transport
        self.rank, self.num_ranks = self.transport.rank, self.transport.num_ranks
        self._place = engine.device if self.transport.on_device else torch.device("cpu")
        self._token = torch.zeros(1, device=self._place)

    def memory(self, num_bytes: int) -> torch.Tensor:
        """That the transport takes."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._place)

    def swap(
        self,
        sends: Sequence[tuple[torch.Tensor, int]] = (),
        recvs: Sequence[tuple[torch.Tensor, int]] = (),
    ) -> None:
        """Sends and receives some, and waits for all."""
        if self.transport.ordered:
            pending = list(self.transport.exchange(sends, recvs))
        else:
            # Receives first: gloo moves no byte before the receiver has asked.
            pending = [self.transport.recv(data, of, TAG + k) for k, (data, of) in _numbered(recvs)]
            pending += [
                self.transport.send(data, to, TAG + k) for k, (data, to) in _numbered(sends)
            ]
        for one in pending:
            finish(one)
        self._settle()

    def all_reduce(self, data: torch.Tensor) -> None:
        """The transport's own sum."""
        finish(self.transport.all_reduce(data))
        self._settle()

    def meet(self) -> None:
        """Returns when all ranks are here."""
        self.all_reduce(self._token)

    def share(self, what: str, told: Any) -> list[Any]:
        """What each rank tells."""
        return self.engine.agree(f"the probe of {what}", {}, share=told)

    def slowest(self, what: str, seconds: float) -> float:
        """The longest of all ranks' times."""
        return float(max(self.share(what, seconds)))

    def _settle(self) -> None:
        if self._place.type == "cuda":
            torch.cuda.synchronize(self._place)


def _numbered(
    messages: Sequence[tuple[torch.Tensor, int]],
) -> Iterator[tuple[int, tuple[torch.Tensor, int]]]:
    """Each with its number among those of the same peer, which both ends count alike."""
    seen: dict[int, int] = {}
    for message in messages:
        number = seen.get(message[1], 0)
        seen[message[1]] = number + 1
        yield number, message


def between(least: int, value: int, most: int) -> int:
    """The value, unless it is too small or too large.

    Example:
        >>> between(2, 1, 5), between(2, 9, 5)
        (2, 5)
    """
    return max(least, min(value, most))
