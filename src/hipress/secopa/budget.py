"""How much error a plan may bring: which codecs it may use, and how far off each layer may be.

The verdicts are those of `docs/convergence.md`. By default a plan uses codecs that passed there
and that leave the optimizer as it is. A bound is on one message of a layer: what the message lacks,
as a share of the gradient's norm; feedback sends that later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hipress.errors import UsageError
from hipress.profile import GradientProfile, Profile

CAREFUL = ("bf16", "fp16", "int8")
"""At most 1 % off in a message: no difference was seen with any model or optimizer."""

PASSED = (
    *CAREFUL,
    "onebit",
    "terngrad",
    "dithering",
    "graddrop",
    "topk",
    "topk(ratio=0.01)",
    "dithering(levels=8)",
    "minmax(bits=4)",
)
"""Within a point of accuracy on both data sets of the table. `dgc` and `momentum(...)` are too, but
they bring momentum, which the optimizer must then leave to them: name them to have them."""

MOMENTUM = re.compile(r"(dgc|momentum)\b")
"""How codecs begin that bring momentum."""

BUDGETS = {"careful": CAREFUL, "table": PASSED}

MIN_NUMEL = 4096
"""Smaller gradients, and those of one dimension, are left alone: little to gain, much to lose."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan may do to gradients.

    Example:
        >>> Budget.read("careful").codecs
        ('bf16', 'fp16', 'int8')
        >>> Budget.read("0.1").bound
        0.1
    """

    codecs: tuple[str, ...] | None = PASSED
    """That may be used; None: any that was measured and brings no momentum."""
    bound: float | None = None
    """The most that a message of a layer may be off, as a share of the gradient's norm."""
    name: str | None = None
    """Of `BUDGETS`, where the user asked for one of them."""

    @classmethod
    def read(cls, given: str | float | None) -> Budget:
        """A budget from what a user wrote: a name of the table, or a bound.

        Raises:
            UsageError: It is neither.
        """
        if given is None:
            return cls()
        if isinstance(given, str) and given in BUDGETS:
            return cls(codecs=BUDGETS[given], name=given)
        try:
            bound = float(given)
        except (TypeError, ValueError):
            bound = math.nan
        if not 0 < bound <= 1:
            raise UsageError(
                f"budget {given!r} is neither {' nor '.join(BUDGETS)} nor a bound on the error of "
                "a layer's message, above 0 and up to 1, e.g. 0.1; choose one."
            )
        return cls(codecs=None, bound=bound)

    def check(self, asked: Sequence[str]) -> None:
        """Refuses codecs that the user named beside a budget by name which does not have them.

        Raises:
            UsageError: There is such a codec, or nothing but `none` is named.
        """
        if not set(asked) - {"none"}:
            raise UsageError(
                "none is no codec to plan with; name another, or leave the choice to the budget."
            )
        if self.name is None or self.codecs is None:
            return
        for name in asked:
            if name != "none" and name not in self.codecs:
                raise UsageError(
                    f"codec {name!r} is not in budget {self.name!r}, which has "
                    f"{', '.join(self.codecs)}; name one of these, or leave out the budget."
                )

    def allowed(self, profile: Profile, asked: Sequence[str] | None = None) -> tuple[str, ...]:
        """Codecs of a profile that may be used.

        Args:
            profile: Where they were measured.
            asked: Those that the user named, which then are the ones.

        Raises:
            UsageError: One that was named is not in the profile, or not in the budget.
        """
        if asked is not None:
            self.check(asked)
            for name in asked:
                profile.codec(name)
            return tuple(dict.fromkeys(name for name in asked if name != "none"))
        measured = [costs.codec for costs in profile.codecs if costs.codec != "none"]
        if self.codecs is None:
            return tuple(name for name in measured if not MOMENTUM.match(name))
        return tuple(name for name in measured if name in self.codecs)

    def reason(self, gradient: GradientProfile, codec: str, error: float) -> str:
        """Why a codec may not be used for a gradient; empty if it may.

        Args:
            gradient: Which.
            codec: Which.
            error: Of the codec on noise, for gradients that it was not tried on.
        """
        off = gradient.errors.get(codec, error)
        if self.bound is not None and off > self.bound:
            return f"{codec} is {off:.2g} off, more than {self.bound:g}"
        return ""


def exempt(gradient: GradientProfile) -> str:
    """Why a gradient is left alone whatever it would gain; empty if it is not."""
    if gradient.dims < 2:
        return "one dimension (norm or bias)"
    if gradient.numel < MIN_NUMEL:
        return f"{gradient.numel} elements, fewer than {MIN_NUMEL}"
    return ""
