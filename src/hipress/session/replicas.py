"""The replica check: do all ranks still hold the same parameters?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from hipress.errors import AgreementError

COLUMNS = 4096
"""Words in a row; sums over rows and columns depend on the position of every word."""


def digest(value: torch.Tensor) -> int:
    """Returns a number that almost certainly differs if tensors differ in a bit or in order.

    Example:
        >>> a = torch.arange(10.0)
        >>> digest(a) == digest(a.clone()), digest(a) == digest(a.flip(0))
        (True, False)
    """
    whole = _bytes(value)
    words = whole[: whole.numel() // 4 * 4].view(torch.int32)
    rest = whole[words.numel() * 4 :]
    square = words[: words.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
    # int64 arithmetic wraps around, which suits a hash.
    total = _weighted(square.sum(1, dtype=torch.int64)) * 31 + _weighted(
        square.sum(0, dtype=torch.int64)
    )
    total = total * 31 + _weighted(words[square.numel() :].to(torch.int64))
    return int(total * 31 + _weighted(rest.to(torch.int64)))


def digests(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Returns the digest of each parameter as text."""
    return {name: f"{digest(value) & (2**64 - 1):016x}" for name, value in named}


def compare(told: Sequence[Mapping[str, str]], step: int) -> None:
    """Raises an AgreementError if ranks hold different parameters.

    Args:
        told: Digests that each rank has shared.
        step: Number of the step, for the error.
    """
    first = told[0]
    for name in first:
        ranks = [rank for rank, one in enumerate(told) if one.get(name) != first[name]]
        if ranks:
            others = sum(any(one.get(n) != first[n] for one in told) for n in first) - 1
            more = f", and so do {others} more" if others else ""
            names = ", ".join(map(str, ranks))
            who = f"ranks {names}" if len(ranks) > 1 else f"rank {names}"
            raise AgreementError(
                f"the replica check of step {step} failed: parameter {name!r} differs on {who} "
                f"from rank 0{more}; something changes it on some ranks only (a seed, an "
                "'if rank == 0', a parameter unfrozen after DDP was built): restart from a "
                "checkpoint.",
                ranks=tuple(ranks),
            )


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the elements, where they may be read as words of four."""
    value = value.detach()
    if value.layout is not torch.strided:
        value = value.to_dense()
    whole = value.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    # A view of 16-bit elements may begin between two words.
    is_aligned = whole.storage_offset() % 4 == 0 and whole.data_ptr() % 4 == 0
    return whole if is_aligned else whole.clone()


def _weighted(values: torch.Tensor) -> torch.Tensor:
    """Returns a sum in which every position has its own weight."""
    places = torch.arange(values.numel(), dtype=torch.int64, device=values.device)
    return (values * (places * 2_654_435_761 + 1)).sum()
