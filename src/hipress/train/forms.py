"""What travels with a codec: the gradient as it is, or what suits the codec and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import hipress
from hipress.codecs import Codec
from hipress.errors import UsageError
from hipress.session.buckets import has_momentum, keeps_residual
from hipress.train.config import PLAIN

RECOMMENDED = "recommended"
GRADIENT = "gradient"
FORMS = (RECOMMENDED, GRADIENT)
SGD_MOMENTUM = 0.9
"""Momentum of SGD, in the optimizer or in the codec."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What each worker compresses, and with which codec."""

    codec: Codec | None
    """The codec; None for plain averaging."""
    refreshes: bool = False
    """Whether `hipress.torch.AdamW` learns sizes from other gradients, on some steps."""

    @property
    def is_momentum(self) -> bool:
        """Whether it is the momentum that `hipress.torch.AdamW` keeps, and not the gradient."""
        return self.refreshes and self.codec is not None and keeps_residual(self.codec)

    @property
    def text(self) -> str:
        """The codec's expression, and what it is applied to."""
        if self.codec is None:
            return PLAIN
        if self.refreshes and not self.is_momentum:
            return f"{self.codec.name} of gradients, with refreshes"
        return f"{self.codec.name} of {'momentum' if self.is_momentum else 'gradients'}"


def sent(expression: str, optimizer: str, form: str) -> Sent:
    """Return what travels if a user names a codec.

    In the form `gradient` it is the gradient, through the codec as it was named. In the form
    `recommended`, SGD's momentum moves into codecs of signs and of the largest elements; with AdamW
    a codec that does not keep the sizes of elements gets the optimizer's momentum, or, if it has no
    error feedback, gradients from which the optimizer learns no sizes.

    Args:
        expression: A codec, or `PLAIN`.
        optimizer: sgd (with momentum), plain-sgd (without) or adamw.
        form: One of `FORMS`.

    Example:
        >>> sent("onebit", "sgd", "recommended").text
        'momentum(onebit, mu=0.9, nesterov=false) of gradients'
        >>> sent("dgc(ratio=0.01)", "adamw", "recommended").text
        'topk(ratio=0.01, sample=0.01) of momentum'
        >>> sent("int8", "adamw", "recommended").text
        'int8 of gradients'
    """
    if form not in FORMS:
        raise UsageError(f"form {form!r} is none of {', '.join(FORMS)}; choose one.")
    if expression == PLAIN:
        return Sent(codec=None)
    codec = hipress.codec(expression)
    if form == GRADIENT:
        return Sent(codec=codec)
    if optimizer == "adamw" and not codec.keeps_sizes:
        return Sent(codec=codec.for_momentum(), refreshes=True)
    has_signs = codec.name.removeprefix("ef(").startswith("onebit")
    if optimizer == "sgd" and (has_signs or codec.chooses_largest) and not has_momentum(codec):
        codec = hipress.codec(f"momentum({codec.name}, mu={SGD_MOMENTUM}, nesterov=false)")
    return Sent(codec=codec)
