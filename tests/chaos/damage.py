"""Damages a message as a faulty wire would."""

from __future__ import annotations

import torch

from hipress.codecs.frame import ENTRY_BYTES, HEADER_BYTES, MAGIC


def damaged(
    data: torch.Tensor, zone: str, place: float, flip: int
) -> tuple[torch.Tensor, str, int] | None:
    """Returns a copy of a message with one byte changed, the zone and the offset.

    Args:
        data: The message, a tensor.
        zone: `header` (fields under the check, and those before it), `free` (flags and step, which
            the check leaves out), `table` or `body`.
        place: Where in the zone, from 0 to 1.
        flip: The bits of the byte that change.

    Returns:
        None if the message has no such zone. Messages that are no frames have only a `body`, which
        is reported as `plain`.
    """
    copy = data.contiguous().view(-1).clone()
    bytes_ = copy.view(torch.uint8).numpy()
    if bytes(bytes_[:4]) != MAGIC:
        offsets, zone = (range(len(bytes_)), "plain") if zone == "body" else ((), zone)
    else:
        num_bodies = int(bytes_[20:24].view("<u4")[0])
        end = HEADER_BYTES + ENTRY_BYTES * num_bodies
        offsets = {
            "header": [*range(6), *range(16, HEADER_BYTES)],
            "free": range(6, 16),
            "table": range(HEADER_BYTES, end),
            "body": range(end, len(bytes_)),
        }[zone]
    if not len(offsets):
        return None
    offset = offsets[int(place * len(offsets))]
    bytes_[offset] ^= flip
    return copy.view(data.shape), zone, offset
