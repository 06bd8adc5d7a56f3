"""Memory of the slots: frames, elements, and the pinned twins of a GPU's frames."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from hipress.casync.graphs.partitions import Partition
from hipress.codecs.base import Codec
from hipress.codecs.bulk import Bulk


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of our own on a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Scratch(threading.local):
    """Where merges add up: one place for each thread that computes."""

    def __init__(self) -> None:
        self._held = torch.empty(0)

    def take(self, numel: int, device: torch.device) -> torch.Tensor:
        """Some float32, whatever they hold."""
        if self._held.numel() < numel or self._held.device != device:
            self._held = torch.zeros(numel, device=device)
        return self._held[:numel]


scratch = Scratch()
_NOTHING = torch.empty(0)


class Cell:
    """Memory of a slot: where codecs work, and where the transport does."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, on_host: bool) -> None:
        self.device = torch.empty(numel, dtype=dtype, device=device)
        self.staged = device.type == "cuda" and on_host
        self._wire = self.device
        self._event: torch.cuda.Event | None = None
        if self.staged:
            self._wire = torch.empty(numel, dtype=dtype, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def cut(self, numel: int) -> Cell:
        """The first elements, in the same memory."""
        part = Cell.__new__(Cell)
        part.device, part._wire = self.device[:numel], self._wire[:numel]
        part.staged, part._event = self.staged, self._event
        return part

    @property
    def wire(self) -> torch.Tensor:
        """The bytes that the transport moves."""
        return self._wire.view(torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Of memory, a pinned twin among it."""
        return self.device.nbytes * (2 if self.staged else 1)

    def publish(self) -> None:
        """Computing queue, after writing: starts the way to where the transport reads it."""
        if self.staged:
            assert self._event is not None
            self._wire.copy_(self.device, non_blocking=True)
            self._event.record()

    def fetch(self) -> torch.Tensor:
        """Computing queue, before reading: starts the way from where the transport wrote it."""
        if self.staged:
            self.device.copy_(self._wire, non_blocking=True)
        return self.device

    @property
    def settles(self) -> bool:
        """Whether `settle` may wait or copy."""
        return self.staged

    def settle(self) -> None:
        """Communicating queue, before a send: waits until what `publish` started is done."""
        if self._event is not None:
            self._event.synchronize()

    def arrive(self) -> None:
        """Communicating queue, after a receive."""
        return None


class Elements(Cell):
    """The gradient's own memory as the transport moves it: plain, and another in every step."""

    def __init__(self, part: Part, on_host: bool) -> None:
        self._part = part
        self._on_host = on_host
        self._pinned: torch.Tensor | None = None
        self.staged = False

    @property
    def settles(self) -> bool:
        return True

    def _through_host(self) -> bool:
        return self._on_host and self._part.elements.is_cuda

    @property
    def wire(self) -> torch.Tensor:
        elements = self._part.elements
        if self._through_host():
            if self._pinned is None:
                self._pinned = torch.empty(elements.numel(), dtype=elements.dtype, pin_memory=True)
            elements = self._pinned
        return elements.view(torch.uint8)

    @property
    def num_bytes(self) -> int:
        return 0 if self._pinned is None else self._pinned.nbytes

    def settle(self) -> None:
        elements = self._part.gather()
        if self._through_host():
            self.wire.copy_(elements.view(torch.uint8))  # and waits: this memory is pinned

    def arrive(self) -> None:
        if self._through_host():
            self._part.elements.view(torch.uint8).copy_(self.wire)
        self._part.scatter()


class Part:
    """A chunk of the graph: some partitions that travel together.

    Args:
        partitions: Of the caller's tensors.
        codec: Decides how several lie side by side; None: without gaps.
        dtype: Of the tensors.
        home: Where the tensors are.
        device: Where they are worked on.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        codec: Codec | None,
        dtype: torch.dtype,
        *,
        home: torch.device,
        device: torch.device,
    ) -> None:
        self.partitions = partitions
        numels = [part.numel for part in partitions]
        starts = [sum(numels[:k]) for k in range(len(numels))]
        self.numel = sum(numels)
        self._numels = numels
        self._bulks: dict[str, Bulk] = {}
        self._in_bulk = codec is not None and len(numels) > 1
        if codec is not None and self._in_bulk:
            bulk = self.bulk(codec)
            self.numel, starts = bulk.numel, bulk.offsets
        # Several gradients lie side by side in memory of their own; so does one on another device.
        self._staged = len(numels) > 1 or device != home
        self.elements = torch.empty(0)
        """The gradient, or a copy."""
        self._copies: list[torch.Tensor] = []
        self._originals: list[torch.Tensor] = []
        if self._staged:
            pin = device.type == "cpu" and home.type == "cuda"
            self.elements = torch.zeros(self.numel, dtype=dtype, device=device, pin_memory=pin)
            pairs = zip(starts, numels, strict=True)
            self._copies = [self.elements[at : at + n] for at, n in pairs]

    def hold(self, flats: Sequence[torch.Tensor]) -> None:
        """Takes the gradients of this step."""
        views = [flats[part.tensor][part.start : part.stop] for part in self.partitions]
        if self._staged:
            self._originals = views
        else:
            self.elements = views[0]

    def let_go(self) -> None:
        """Forgets them, so that they can be freed."""
        self._originals = []
        if not self._staged:
            self.elements = _NOTHING

    def gather(self) -> torch.Tensor:
        """The elements to read."""
        if self._staged:
            torch._foreach_copy_(self._copies, self._originals)
        return self.elements

    def scatter(self) -> None:
        """Hands out what was written."""
        if self._staged:
            torch._foreach_copy_(self._originals, self._copies)

    @property
    def num_bytes(self) -> int:
        """Of the copy, if there is one."""
        return self.elements.nbytes if self._staged else 0

    @property
    def is_bulk(self) -> bool:
        """Whether its frames hold several gradients."""
        return self._in_bulk

    def bulk(self, codec: Codec) -> Bulk:
        """A codec for all of its gradients at once."""
        if codec.name not in self._bulks:
            self._bulks[codec.name] = codec.bulk(self._numels)
        return self._bulks[codec.name]

    def coder(self, codec: Codec) -> Codec | Bulk:
        """What encodes and decodes it."""
        return self.bulk(codec) if self._in_bulk else codec

    def wire_bytes(self, codec: Codec) -> int:
        """Of a frame."""
        return self.bulk(codec).wire_bytes if self._in_bulk else codec.wire_bytes(self.numel)
