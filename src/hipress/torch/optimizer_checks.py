"""Checks an optimizer against codecs: what both would apply, and what it cannot learn from.

What to write instead, and what was measured, is in `hipress.recommendations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hipress import recommendations
from hipress.codecs.base import Codec
from hipress.errors import UsageError
from hipress.recommendations import ADAM, SAFE, SGD, SGD_MOMENTUM, UNKNOWN, recommended
from hipress.session import buckets
from hipress.torch.optim import MomentumExchange
from hipress.units import counted


def warnings(
    optimizer: torch.optim.Optimizer | None, compressed: Sequence[tuple[torch.Tensor, Codec]]
) -> list[str]:
    """Returns what is wrong with an optimizer beside these codecs, a sentence each.

    Args:
        optimizer: The user's optimizer; None if it is not known.
        compressed: Parameters and their codecs.
    """
    if optimizer is None:
        return _unchecked(codec for _, codec in compressed)
    name = type(optimizer).__name__
    exchanges = can_exchange_momentum(optimizer)
    found = _about_missing(optimizer, compressed)
    for group, codecs in _by_group(optimizer, compressed):
        kind = _kind_of(optimizer, group)
        for codec in {codec.name: codec for codec in codecs}.values():
            found += _about_twice(optimizer, group, codec)
            adds_momentum = buckets.has_momentum(codec)
            if codec.keeps_sizes or exchanges:
                continue
            if kind == ADAM and not adds_momentum:
                found.append(_about_sizes(optimizer, codec))
            elif kind == SGD_MOMENTUM and not adds_momentum and buckets.keeps_residual(codec):
                found.append(_about_delay(name, group, codec))
            elif kind == UNKNOWN and not (adds_momentum and has_momentum(group)):
                found.append(_about_untried(name, codec))
    return list(dict.fromkeys(found))


def kind_of(optimizer: torch.optim.Optimizer | None) -> str:
    """Returns the kind of an optimizer in `hipress.recommendations`, as it is.

    An Adam whose momentum cannot be exchanged counts as unknown, and so does one whose parameter
    groups differ in kind.
    """
    if optimizer is None:
        return UNKNOWN
    kinds = {_kind_of(optimizer, group) for group in optimizer.param_groups}
    kind = kinds.pop() if len(kinds) == 1 else UNKNOWN
    return UNKNOWN if kind == ADAM and not isinstance(optimizer, MomentumExchange) else kind


def can_exchange_momentum(optimizer: object) -> bool:
    """Returns whether an optimizer can have its momentum exchanged, with the options it has."""
    try:
        return isinstance(optimizer, MomentumExchange) and bool(optimizer.exchange_facts())
    except UsageError:
        return False


def has_momentum(group: dict[str, Any]) -> bool:
    """Returns whether an optimizer averages the past gradients of one of its groups."""
    return bool(group.get("momentum") or "betas" in group)


def _kind_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    # Lion has betas too, and divides by nothing.
    if "betas" in group and "eps" in group:
        return ADAM
    if isinstance(optimizer, torch.optim.SGD):
        return SGD_MOMENTUM if group.get("momentum") else SGD
    return UNKNOWN


def _about_missing(
    optimizer: torch.optim.Optimizer, compressed: Sequence[tuple[torch.Tensor, Codec]]
) -> list[str]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    depend = [(p, codec) for p, codec in compressed if not codec.keeps_sizes]
    missing = [codec.name for p, codec in depend if id(p) not in known]
    if not missing:
        return []
    return [
        f"{len(missing)} of {counted(len(compressed), 'compressed parameter')} "
        f"{'is' if len(missing) == 1 else 'are'} not in the {type(optimizer).__name__} that was "
        f"given, and what {' and '.join(dict.fromkeys(missing))} sends depends on it: pass the one "
        f'that trains them, or codec="{SAFE}", which works with every optimizer '
        f"({recommendations.url()})."
    ]


def _about_twice(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], codec: Codec
) -> list[str]:
    """Returns what the codec and the optimizer both apply."""
    found = []
    name = type(optimizer).__name__
    momentum = group.get("momentum") or 0.0
    adaptive = "betas" in group
    if buckets.has_momentum(codec):
        if momentum:
            found.append(
                f"{codec.name} sends momentum and {name} has momentum={momentum:g} on the same "
                "parameters, so it counts twice: set momentum=0 for them (exempt gradients keep "
                "theirs in a group of their own)."
            )
        if adaptive:
            found.append(
                f"{codec.name} sends momentum and {name} averages gradients again (betas="
                f"{tuple(group['betas'])}): {_adam(optimizer)} ({recommendations.url()})."
            )
        decay = group.get("weight_decay") or 0.0
        if (
            decay
            and codec.name.startswith("dgc")
            and not (adaptive or buckets.applies_decay(codec))
        ):
            found.append(
                f"{name} has weight_decay={decay:g}, which acts on what {codec.name} has "
                "accumulated already: set it to 0 there and give it to the codec, e.g. "
                f"dgc(weight_decay={decay:g})."
            )
    if buckets.applies_decay(codec) and (group.get("weight_decay") or 0.0):
        found.append(
            f"{codec.name} decays weights and so does {name} (weight_decay="
            f"{group['weight_decay']:g}): set the optimizer's to 0 for compressed parameters."
        )
    return found


def _about_sizes(optimizer: torch.optim.Optimizer, codec: Codec) -> str:
    return (
        f"{type(optimizer).__name__} divides by the size of past gradients, which {codec.name} "
        f"does not keep ({recommendations.warning(ADAM)}): {_adam(optimizer)} "
        f"({recommendations.url()})."
    )


def _about_delay(name: str, group: dict[str, Any], codec: Codec) -> str:
    nesterov = bool(group.get("nesterov"))
    instead = recommendations.momentum_codec(float(group["momentum"]), nesterov=nesterov)
    if codec.chooses_largest:
        instead = "dgc"
    measured = f" ({recommendations.warning(SGD_MOMENTUM)})" if "onebit" in codec.name else ""
    return (
        f"{codec.name} sends part of each gradient late, and the momentum of {name} overshoots on "
        f"it{measured}: set momentum=0 in {name} and write "
        f'{recommended(SGD_MOMENTUM).lines(codec=instead)[-1]}, or codec="{SAFE}" '
        f"({recommendations.url()})."
    )


def _about_untried(name: str, codec: Codec) -> str:
    return (
        f"{name} has not been tried with {codec.name}, which does not keep the sizes of elements: "
        f'codec="{SAFE}" works with every optimizer ({recommendations.url()}).'
    )


def _unchecked(codecs: Iterable[Codec]) -> list[str]:
    names = list(dict.fromkeys(codec.name for codec in codecs if not codec.keeps_sizes))
    if not names:
        return []
    is_one = len(names) == 1
    return [
        f"{' and '.join(names)} {'depends' if is_one else 'depend'} on the optimizer, which could "
        f'not be checked: pass optimizer=optimizer, or codec="{SAFE}", which works with every '
        f"optimizer ({recommendations.url()})."
    ]


def _adam(optimizer: torch.optim.Optimizer) -> str:
    """Returns what to write in place of an optimizer like Adam beside this codec."""
    write = f'write {recommended(ADAM).lines()[-1]}, or codec="{SAFE}"'
    name = type(optimizer).__name__
    if can_exchange_momentum(optimizer):
        return write
    if isinstance(optimizer, MomentumExchange):
        try:
            optimizer.exchange_facts()
        except UsageError as error:
            return str(error).rstrip(".")
    own = f"hipress.torch.{name if name in ('Adam', 'AdamW') else 'AdamW'}"
    return f"use {own} in place of {name} and {write}"


def _by_group(
    optimizer: torch.optim.Optimizer, compressed: Iterable[tuple[torch.Tensor, Codec]]
) -> list[tuple[dict[str, Any], list[Codec]]]:
    codecs = {id(parameter): codec for parameter, codec in compressed}
    return [
        (group, [codecs[id(p)] for p in group["params"] if id(p) in codecs])
        for group in optimizer.param_groups
    ]
