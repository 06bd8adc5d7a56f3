"""What an optimizer does that a codec does already, or that it must leave to the codec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hipress.codecs.base import WEIGHT, Codec


def has_momentum(codec: Codec) -> bool:
    """Whether a codec sends the momentum of gradients."""
    return bool({"momentum", "velocity"}.intersection(codec.state_names))


def decays(codec: Codec) -> bool:
    """Whether a codec adds weight decay before it accumulates."""
    return WEIGHT in codec.state_names


def warnings(
    optimizer: torch.optim.Optimizer, compressed: Sequence[tuple[torch.Tensor, Codec]]
) -> list[str]:
    """What is wrong with an optimizer beside these codecs: a sentence each.

    Args:
        optimizer: As the user made it.
        compressed: Parameters and their codecs.
    """
    kind = type(optimizer).__name__
    found = []
    for group, codecs in _by_group(optimizer, compressed):
        for codec in {codec.name: codec for codec in codecs}.values():
            found += _about(kind, group, codec)
    return list(dict.fromkeys(found))


def _about(kind: str, group: dict[str, Any], codec: Codec) -> list[str]:
    found = []
    momentum = group.get("momentum") or 0.0
    adaptive = "betas" in group
    if has_momentum(codec):
        if momentum:
            found.append(
                f"{codec.name} sends momentum and {kind} has momentum={momentum:g} on the same "
                "parameters, so it counts twice: set momentum=0 for them (exempt gradients keep "
                "theirs in a group of their own)."
            )
        if adaptive:
            found.append(
                f"{codec.name} sends momentum and {kind} averages gradients again (betas="
                f"{tuple(group['betas'])}): take a codec without momentum, such as onebit, "
                "int8 or topk, or SGD."
            )
        decay = group.get("weight_decay") or 0.0
        if decay and not adaptive and not decays(codec):
            found.append(
                f"{kind} has weight_decay={decay:g}, which acts on what {codec.name} has "
                "accumulated already: set it to 0 there and give it to the codec, e.g. "
                f"dgc(weight_decay={decay:g})."
            )
    if decays(codec) and (group.get("weight_decay") or 0.0):
        found.append(
            f"{codec.name} decays weights and so does {kind} (weight_decay="
            f"{group['weight_decay']:g}): set the optimizer's to 0 for compressed parameters."
        )
    return found


def _by_group(
    optimizer: torch.optim.Optimizer, compressed: Iterable[tuple[torch.Tensor, Codec]]
) -> list[tuple[dict[str, Any], list[Codec]]]:
    codecs = {id(parameter): codec for parameter, codec in compressed}
    return [
        (group, [codecs[id(p)] for p in group["params"] if id(p) in codecs])
        for group in optimizer.param_groups
    ]
