"""Checks an optimizer against codecs: what both would apply, or only the codec may apply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hipress.codecs.base import Codec
from hipress.session import buckets
from hipress.torch.optim import MomentumExchange

MEASURED = (
    "A GPT trained with AdamW reached a loss of 2.04 with onebit on gradients, 1.51 with onebit on "
    "momentum, 1.50 with int8 and 1.51 uncompressed."
)
"""What `docs/convergence.md` shows."""


def warnings(
    optimizer: torch.optim.Optimizer, compressed: Sequence[tuple[torch.Tensor, Codec]]
) -> list[str]:
    """Returns what is wrong with an optimizer beside these codecs, a sentence each.

    Args:
        optimizer: The user's optimizer.
        compressed: Parameters and their codecs.
    """
    kind = type(optimizer).__name__
    sends_momentum = isinstance(optimizer, MomentumExchange)
    found = []
    for group, codecs in _by_group(optimizer, compressed):
        for codec in {codec.name: codec for codec in codecs}.values():
            found += _about(kind, group, codec)
            adds_momentum = buckets.has_momentum(codec)  # said already
            if "betas" in group and not (codec.keeps_sizes or sends_momentum or adds_momentum):
                found.append(_about_sizes(kind, codec))
    return list(dict.fromkeys(found))


def has_momentum(group: dict[str, Any]) -> bool:
    """Returns whether an optimizer averages the past gradients of one of its groups."""
    return bool(group.get("momentum") or "betas" in group)


def is_plain_sgd(optimizer: torch.optim.Optimizer | None) -> bool:
    """Returns whether an optimizer is SGD without momentum."""
    return isinstance(optimizer, torch.optim.SGD) and not any(
        group.get("momentum") for group in optimizer.param_groups
    )


def _about(kind: str, group: dict[str, Any], codec: Codec) -> list[str]:
    found = []
    momentum = group.get("momentum") or 0.0
    adaptive = "betas" in group
    if buckets.has_momentum(codec):
        if momentum:
            found.append(
                f"{codec.name} sends momentum and {kind} has momentum={momentum:g} on the same "
                "parameters, so it counts twice: set momentum=0 for them (exempt gradients keep "
                "theirs in a group of their own)."
            )
        if adaptive:
            found.append(
                f"{codec.name} sends momentum and {kind} averages gradients again (betas="
                f"{tuple(group['betas'])}): take int8, or {_own(kind)} with onebit or topk, or "
                "SGD."
            )
        decay = group.get("weight_decay") or 0.0
        if decay and not adaptive and not buckets.applies_decay(codec):
            found.append(
                f"{kind} has weight_decay={decay:g}, which acts on what {codec.name} has "
                "accumulated already: set it to 0 there and give it to the codec, e.g. "
                f"dgc(weight_decay={decay:g})."
            )
    if buckets.applies_decay(codec) and (group.get("weight_decay") or 0.0):
        found.append(
            f"{codec.name} decays weights and so does {kind} (weight_decay="
            f"{group['weight_decay']:g}): set the optimizer's to 0 for compressed parameters."
        )
    return found


def _about_sizes(kind: str, codec: Codec) -> str:
    return (
        f"{kind} divides by the size of past gradients, which {codec.name} does not keep. "
        f"{MEASURED} Use {_own(kind)} in place of {kind}, which has its momentum exchanged "
        "instead, or codec='int8'."
    )


def _own(kind: str) -> str:
    """Returns the optimizer that can have its momentum exchanged, in place of torch's."""
    return f"hipress.torch.{kind if kind in ('Adam', 'AdamW') else 'AdamW'}"


def _by_group(
    optimizer: torch.optim.Optimizer, compressed: Iterable[tuple[torch.Tensor, Codec]]
) -> list[tuple[dict[str, Any], list[Codec]]]:
    codecs = {id(parameter): codec for parameter, codec in compressed}
    return [
        (group, [codecs[id(p)] for p in group["params"] if id(p) in codecs])
        for group in optimizer.param_groups
    ]
