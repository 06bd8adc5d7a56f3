"""Milder codecs: which one follows a codec that was not accurate enough for a gradient."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hipress.codecs import expression
from hipress.codecs.base import Codec
from hipress.codecs.program import ProgramCodec
from hipress.codecs.table import TABLE
from hipress.errors import UsageError
from hipress.session.buckets import has_momentum

LADDER = ("int4", "int8", "none")
"""What a gradient takes after a codec that is not on it; each is milder than those before."""
RUNGS = {"int4": 1, "int8": 2, "bf16": 3, "fp16": 3, "none": 4}
"""How mild a codec is; all others are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """The milder codec that a gradient has in place of what rules or a plan choose."""

    codec: str
    """Its expression; a choice that is milder still is left alone. Empty while the faster codec is
    tried again."""
    before: str
    """The codec that was not accurate enough."""
    reason: str
    """What was measured."""
    step: int
    """The step from which on it holds."""
    retry_at: int | None = None
    """The step in which the faster codec is tried again; None: never."""
    flushes: bool = False
    """Whether unsent momentum must be sent first, uncompressed."""


def rung(codec: Codec) -> int:
    """Returns how mild a codec is, as a number.

    Example:
        >>> import hipress
        >>> [rung(hipress.codec(c)) for c in ("onebit", "momentum(int8)", "none")]
        [0, 2, 4]
    """
    return RUNGS.get(_inside(codec).name, 0)


def milder(codec: Codec) -> str | None:
    """Returns the expression of the next milder codec; None if there is none.

    A codec with momentum is followed by one with the same momentum, which nothing else applies.

    Example:
        >>> import hipress
        >>> milder(hipress.codec("bf16")), milder(hipress.codec("none"))
        ('none', None)
        >>> milder(hipress.codec("momentum(int8)"))
        'momentum(none, mu=0.9, nesterov=true)'
    """
    found = next((n for n in LADDER if n in (*TABLE,) and RUNGS[n] > rung(codec)), None)
    if found is None or not has_momentum(codec):
        return found
    nesterov = dict(_inside(codec).options).get("nesterov", False)
    if isinstance(codec, ProgramCodec) and codec.variant.momentum:
        nesterov = codec.variant.nesterov
    return f"momentum({found}, mu={decay(codec)}, nesterov={str(nesterov).lower()})"


def decay(codec: Codec) -> float:
    """Returns the factor of the momentum that a codec applies; 0 if it applies none.

    Example:
        >>> import hipress
        >>> [decay(hipress.codec(c)) for c in ("onebit", "momentum(onebit, mu=0.8)", "dgc")]
        [0.0, 0.8, 0.9]
    """
    if not has_momentum(codec):
        return 0.0
    if isinstance(codec, ProgramCodec) and codec.variant.momentum:
        return codec.mu
    return float(dict(_inside(codec).options).get("momentum", 0.9))


def _inside(codec: Codec) -> expression.Call:
    """Returns the codec inside wrappers."""
    try:
        call = expression.parse(codec.name)
    except UsageError:  # a class of the user's, with a name of its own
        return expression.Call("other")
    while call.args:
        call = call.args[0]
    return call


def as_text(overrides: Mapping[str, Override]) -> str:
    """Returns overrides as text, for a checkpoint."""
    return json.dumps({name: asdict(made) for name, made in overrides.items()}, sort_keys=True)


def from_text(text: str) -> dict[str, Override]:
    """Returns the overrides that `as_text` wrote."""
    return {name: Override(**made) for name, made in json.loads(text).items()}
