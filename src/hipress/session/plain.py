"""Uncompressed buckets outside the engine: torch's all-reduce, as DDP does without a hook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from hipress.casync.engine.executors import BusyTime

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hipress.casync.engine.transport import Transport

Future = torch.futures.Future[torch.Tensor]


class PlainSum:
    """Averages whole buckets uncompressed.

    Args:
        group: Process group of torch.distributed; all ranks if None.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.sent_bytes = 0
        """Bytes that this rank has sent at least: a ring does not send more."""
        self.exchanging = BusyTime()
        """Time in which at least one sum is under way; a session counts exchanges here too."""
        self._group = group
        self._transport: Transport | None = None

    def use(self, transport: Transport) -> None:
        """Sums through a transport, where other collectives of the program may come in between."""
        self._transport = transport

    def average(
        self,
        buffer: torch.Tensor,
        on_failure: Callable[[torch.Tensor, RuntimeError], None] | None = None,
    ) -> Future:
        """Starts to replace a buffer by its mean over all ranks.

        Args:
            buffer: Elements of a bucket; sparse buffers are allowed.
            on_failure: Called when a rank is lost; the future then gives the buffer all the same.
                Without it the future raises torch's error.
        """
        if self._transport is not None:
            num_ranks = self._transport.num_ranks
            start: Callable[[torch.Tensor], Any] = self._transport.all_reduce
        else:
            group: Any = self._group or (dist.group.WORLD if dist.is_initialized() else None)
            num_ranks = 1 if group is None else group.size()
            start = partial(dist.all_reduce, group=group, async_op=True)
        if num_ranks == 1:
            future: Future = torch.futures.Future(
                devices=[buffer.device] if buffer.is_cuda else None
            )
            future.set_result(buffer)
            return future
        dense = buffer.layout is torch.strided
        if dense:  # torch does not tell the bytes of others
            self.sent_bytes += 2 * (num_ranks - 1) * buffer.nbytes // num_ranks
        # A power of two only moves the exponent and float32 has room for the sum, so dividing
        # afterwards, in torch's thread while backward goes on, gives the same bits.
        later = (
            dense
            and buffer.device.type == "cpu"
            and buffer.dtype is torch.float32
            and num_ranks & (num_ranks - 1) == 0
        )
        if not later:
            buffer.mul_(1 / num_ranks)  # as DDP does; a division takes twice as long
        share = 1 / num_ranks if later else 1.0
        work = start(buffer)
        self.exchanging.begin()
        finish = partial(_finish, buffer, share, on_failure, self.exchanging)
        return cast(Future, work.get_future().then(finish))


def _finish(
    buffer: torch.Tensor,
    share: float,
    on_failure: Callable[[torch.Tensor, RuntimeError], None] | None,
    exchanging: BusyTime,
    done: Any,
) -> torch.Tensor:
    exchanging.end()
    try:
        found = cast(torch.Tensor, done.value()[0])
        return found if share == 1.0 else found.mul_(share)
    except RuntimeError as error:
        if on_failure is None:
            raise
        on_failure(buffer, error)
        return buffer
