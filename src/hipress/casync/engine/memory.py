"""Memory of the slots: frames, elements, and pinned copies of a GPU's frames."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hipress.casync.graphs.partitions import Partition
from hipress.codecs.base import Codec
from hipress.codecs.bulk import Bulk
from hipress.codecs.tensors import Scratch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Makes a stream of our own on a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def keep_for(stream: torch.cuda.Stream | None, values: Sequence[torch.Tensor]) -> None:
    """Makes memory that is freed while a stream still works on it stay as it is until then.

    Without this, the memory of a tensor that was made on another stream is given to the next one
    that is made there, as soon as Python drops it, whatever this stream still has to do.
    """
    if stream is not None:
        for value in values:
            value.detach().record_stream(stream)


scratch = Scratch()
"""Memory in which merges add up."""
CLIP_NUMEL = 2**20
"""Elements of 16 bits that are widened at a time."""
_NOTHING = torch.empty(0)


def clip_norm(flat: torch.Tensor, limit: float) -> None:
    """Scales a tensor down to a norm, in place; the host does not wait for a GPU.

    A tensor with NaN or an infinity stays as it is, so that every rank sees it.
    """
    if flat.numel() == 0:
        return
    norm_of = torch.linalg.vector_norm
    # From about 1e19 on squares overflow float32; those of 2^-80 times the elements do not.
    largest = norm_of(flat, ord=torch.inf).float()
    down = torch.where((largest > 1e15) & largest.isfinite(), 2.0**-80, 1.0)
    # 16-bit elements are widened in parts.
    parts = (flat,) if flat.dtype is torch.float32 else torch.split(flat, CLIP_NUMEL)
    norm = norm_of(torch.stack([norm_of(_scaled(part, down)) for part in parts]))
    clips = norm.isfinite() & (norm > limit * down)
    factor = torch.where(clips, limit / norm, 1.0 / down)
    for part in parts:
        wide = part if flat.dtype is torch.float32 else _scaled(part, down)
        torch.mul(wide, factor, out=part)


def _scaled(part: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Returns a part times a factor: in place if it is float32, else in memory of our own."""
    is_wide = part.dtype is torch.float32
    wide = part if is_wide else scratch.take(part.numel(), part.device)
    return torch.mul(part, factor, out=wide)


class Buffer:
    """Memory of a slot: where codecs work, and, if that differs, where the transport does."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, on_host: bool) -> None:
        self.data = torch.empty(numel, dtype=dtype, device=device)
        """Memory that codecs read and write."""
        self.staged = device.type == "cuda" and on_host
        """Whether the transport works on a pinned copy in host memory."""
        self._wire = self.data
        self._event: torch.cuda.Event | None = None
        if self.staged:
            self._wire = torch.empty(numel, dtype=dtype, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def prefix(self, numel: int) -> Buffer:
        """Returns the first elements, in the same memory."""
        part = copy.copy(self)
        part.data, part._wire = self.data[:numel], self._wire[:numel]
        return part

    @property
    def wire(self) -> torch.Tensor:
        """The bytes that the transport moves."""
        return self._wire.view(torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, including a pinned copy."""
        return self.data.nbytes * (2 if self.staged else 1)

    def publish(self) -> None:
        """Starts the copy to where the transport reads; the computing queue calls it."""
        if self.staged:
            assert self._event is not None
            self._wire.copy_(self.data, non_blocking=True)
            self._event.record()

    def fetch(self) -> torch.Tensor:
        """Starts the copy from where the transport wrote; the computing queue calls it."""
        if self.staged:
            self.data.copy_(self._wire, non_blocking=True)
        return self.data

    @property
    def waits_before_send(self) -> bool:
        """Whether `before_send` may wait or copy."""
        return self.staged

    def before_send(self) -> None:
        """Waits until what `publish` started is done; the communicating queue calls it."""
        if self._event is not None:
            self._event.synchronize()

    def after_recv(self) -> None:
        """Hands on what was received; the communicating queue calls it."""
        return None


class FrameBuffer(Buffer):
    """Memory of a frame, with the functions that write and check the stamp in its header.

    Both work on host memory. Where the transport takes the memory of a GPU (NCCL) they are not
    called: that would cost a kernel for each frame, and such a transport has no tags that could be
    mixed up, since its messages arrive in the order in which they were sent.

    Args:
        num_bytes: Bytes of the longest frame.
        write: Called with a frame that was encoded here before it is sent; None if it never is.
        check: Called with a frame that was received; raises if it is another than expected.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        on_host: bool,
        write: Callable[[memoryview[Any]], None] | None,
        check: Callable[[memoryview[Any]], None] | None,
    ) -> None:
        super().__init__(num_bytes, torch.uint8, device, on_host)
        is_visible = self._wire.device.type == "cpu"
        self._write = write if is_visible else None
        self._check = check if is_visible else None
        data: Any = self._wire.numpy() if is_visible else b""  # numpy's stubs hide its buffer
        self._bytes = memoryview(data)

    def prefix(self, numel: int) -> FrameBuffer:
        part = copy.copy(self)
        part.data, part._wire = self.data[:numel], self._wire[:numel]
        part._bytes = self._bytes[:numel]
        return part

    def publish(self) -> None:
        super().publish()
        # Here and not before the send: tasks that read this frame may run while it is sent.
        if self._write is not None and not self.staged:
            self._write(self._bytes)

    def before_send(self) -> None:
        super().before_send()
        if self._write is not None and self.staged:
            self._write(self._bytes)

    def after_recv(self) -> None:
        if self._check is not None:
            self._check(self._bytes)


class GradientBuffer(Buffer):
    """The gradient's own memory as the transport moves it: uncompressed, another in every step."""

    def __init__(self, chunk: Chunk, on_host: bool) -> None:
        self._chunk = chunk
        self._on_host = on_host
        self._pinned: torch.Tensor | None = None
        self.staged = False

    @property
    def waits_before_send(self) -> bool:
        return True

    def _through_host(self) -> bool:
        return self._on_host and self._chunk.elements.is_cuda

    @property
    def wire(self) -> torch.Tensor:
        elements = self._chunk.elements
        if self._through_host():
            if self._pinned is None:
                self._pinned = torch.empty(elements.numel(), dtype=elements.dtype, pin_memory=True)
            elements = self._pinned
        return elements.view(torch.uint8)

    @property
    def num_bytes(self) -> int:
        return 0 if self._pinned is None else self._pinned.nbytes

    def before_send(self) -> None:
        elements = self._chunk.gather()
        if self._through_host():
            self.wire.copy_(elements.view(torch.uint8))  # and waits: this memory is pinned

    def after_recv(self) -> None:
        if self._through_host():
            self._chunk.elements.view(torch.uint8).copy_(self.wire)
        self._chunk.scatter()


class Chunk:
    """Some partitions that travel together in one frame.

    Args:
        partitions: Where they are in the caller's tensors.
        codec: Decides how several lie side by side; without one there are no gaps.
        dtype: The dtype of the tensors.
        home: The device of the tensors.
        device: The device on which codecs work.
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
        self.is_bulk = codec is not None and len(numels) > 1
        """Whether its frames hold several gradients."""
        if codec is not None and self.is_bulk:
            bulk = self.bulk(codec)
            self.numel, starts = bulk.numel, bulk.offsets
        # Several gradients lie side by side in memory of their own; so does one on another device.
        self._staged = len(numels) > 1 or device != home
        self.elements = torch.empty(0)
        """The gradient, or a copy of it."""
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

    def release(self) -> None:
        """Drops the gradients, so that they can be freed."""
        self._originals = []
        if not self._staged:
            self.elements = _NOTHING

    def gather(self) -> torch.Tensor:
        """Returns the elements to read."""
        if self._staged:
            torch._foreach_copy_(self._copies, self._originals)
        return self.elements

    def scatter(self) -> None:
        """Copies what was written to the caller's tensors."""
        if self._staged:
            torch._foreach_copy_(self._originals, self._copies)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy, if there is one."""
        return self.elements.nbytes if self._staged else 0

    def bulk(self, codec: Codec) -> Bulk:
        """Returns a codec for all of its gradients at once."""
        if codec.name not in self._bulks:
            self._bulks[codec.name] = codec.bulk(self._numels)
        return self._bulks[codec.name]

    def drop_bulks(self) -> None:
        """Drops what `bulk` has made, for codecs that are no longer used."""
        self._bulks.clear()

    def coder(self, codec: Codec) -> Codec | Bulk:
        """Returns what encodes and decodes it."""
        return self.bulk(codec) if self.is_bulk else codec

    def wire_bytes(self, codec: Codec) -> int:
        """Returns the bytes of a frame."""
        return self.bulk(codec).wire_bytes if self.is_bulk else codec.wire_bytes(self.numel)
