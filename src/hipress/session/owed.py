"""What must still be added to the next gradients or means, so that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hipress.casync.engine.engine import Engine
from hipress.session import checkpoint
from hipress.session.adapter import Adapter
from hipress.session.buckets import Bucket, Content, has_momentum


@dataclass(frozen=True)
class _Sent:
    """A bucket of this step whose mean the framework may throw away."""

    bucket: Bucket
    buffer: torch.Tensor
    contents: Sequence[Content]


class Owed(dict[str, torch.Tensor]):
    """Tensors by gradient, the same on all ranks: each rank adds them to its next gradient.

    A codec with momentum would apply that to what is owed, which contains it already, and one that
    clips would cut it off. So what is owed to their gradients is added to the next mean instead.

    Where the optimizer's momentum is exchanged in place of the gradient, what is owed is momentum
    too: it is kept in `momentum`, and added to what is sent then.

    Something is owed after a checkpoint from another number of ranks was loaded, and after the
    framework threw away what was sent for a parameter that no rank used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.momentum: dict[str, torch.Tensor] = {}
        self._sent: list[_Sent] = []

    def __bool__(self) -> bool:
        return bool(len(self) or self.momentum)

    def pay(
        self,
        bucket: Bucket,
        buffer: torch.Tensor,
        contents: Sequence[Content],
        *,
        compresses: bool,
    ) -> tuple[bool, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Adds what is owed to the gradients of a bucket.

        Args:
            bucket: What lies in the buffer.
            buffer: Its elements.
            contents: What the part of each group holds.
            compresses: Whether the codecs of the bucket are used in this step.

        Returns:
            Whether anything was owed, and pairs (part of the buffer, what to add to its mean).
        """
        if not self:
            return False, []
        later = []
        for group, content in zip(bucket.groups, contents, strict=True):
            due = self.momentum if content is Content.MOMENTUM else self
            waits = compresses and (has_momentum(group.codec) or group.codec.clip > 0)
            for name, (start, stop) in zip(group.names, group.spans, strict=True):
                if (owed := due.pop(name, None)) is not None:
                    part = buffer[start:stop]
                    owed = owed.to(buffer.device)
                    if waits:
                        later.append((part, owed))
                    else:
                        part.add_(owed)
        return True, later

    def flush(self, engine: Engine, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Adds what the codecs of a bucket have not sent, and clears their state."""
        for group in bucket.groups:
            for gradient, (start, stop) in zip(group.gradients, group.spans, strict=True):
                if gradient.is_compressed:
                    engine.wait_idle()
                    buffer[start:stop].add_(checkpoint.unsent(engine, gradient))
            engine.forget((*group.names, *group.refresh_names))

    def note_sent(self, bucket: Bucket, buffer: torch.Tensor, contents: Sequence[Content]) -> None:
        """Notes a bucket of this step whose mean the framework may throw away."""
        self._sent.append(_Sent(bucket, buffer, contents))

    def forget_sent(self) -> None:
        """Drops what `note_sent` noted."""
        self._sent.clear()

    def keep_dropped(self, adapter: Adapter, scale: float, *, only_compressed: bool) -> None:
        """Keeps the means of this step that the framework threw away.

        Args:
            adapter: Knows what was thrown away.
            scale: The loss scale of this step.
            only_compressed: Whether uncompressed gradients contain nothing that was owed.
        """
        dropped: list[tuple[str, torch.Tensor, bool]] = []
        for sent in self._sent:
            for group, content in zip(sent.bucket.groups, sent.contents, strict=True):
                is_momentum = content is Content.MOMENTUM
                if only_compressed and group.codec.name == "none":
                    continue
                for name, (start, stop) in zip(group.names, group.spans, strict=True):
                    mean = sent.buffer[start:stop]
                    if adapter.was_dropped(name, mean):
                        dropped.append((name, mean, is_momentum))
                        if is_momentum:  # what is in `.grad` is none
                            adapter.note_exchanged([name], is_momentum=False)
        self._sent.clear()
        if not dropped:
            return
        # A step with NaN is skipped, and drops what was sent in it.
        flags = [mean.isfinite().all() & mean.any() for _, mean, _ in dropped]
        counts = torch.stack(flags).tolist()  # the only time that the host waits for a GPU
        for (name, mean, is_momentum), is_kept in zip(dropped, counts, strict=True):
            if not is_kept:
                continue
            mean = mean.to(torch.float32, copy=True)
            if is_momentum:  # the optimizer still has the rest
                self.momentum[name] = mean.sub_(adapter.known_momentum(name, scale))
            else:
                self[name] = mean

    def scale(self, ratio: float) -> None:
        """Brings everything to another loss scale."""
        for owed in (*self.values(), *self.momentum.values()):
            owed.mul_(ratio)
