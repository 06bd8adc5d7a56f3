"""How much error a plan may bring: which codecs it may use, and how large an error may be.

The verdicts on codecs are those of `docs/convergence.md`. By default a plan uses codecs that passed
there and that leave the optimizer as it is. A bound limits the error of one message of a layer, as
a share of the gradient's norm; error feedback sends the missing part later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hipress.errors import UsageError
from hipress.profile import GradientProfile, Profile

CAREFUL = ("bf16", "int8")
"""A message has an error of at most 1 %, however small gradients are; no difference was seen with
any model or optimizer."""

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
"""Codecs within a point of accuracy on both data sets of the table. So are `fp16`, `dgc` and
`momentum(...)`, which a user must name (`ONLY_NAMED`)."""

ONLY_NAMED = re.compile(r"(dgc|momentum|fp16|tbq)\b")
"""Matches the beginning of codecs that a user must name: `dgc` and `momentum(...)` apply momentum,
which the optimizer must then not do. `fp16` sends zero for elements below 3e-8 and keeps no
residual, and `tbq` has a threshold in units of the gradient; under Adam, which learns from
gradients of any size, such a layer would stop learning."""

BUDGETS = {"careful": CAREFUL, "table": PASSED}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan may do to gradients.

    Example:
        >>> Budget.read("careful").codecs
        ('bf16', 'int8')
        >>> Budget.read("0.1").bound
        0.1
    """

    codecs: tuple[str, ...] | None = PASSED
    """Codecs that may be used; None stands for all that were measured but `ONLY_NAMED`."""
    bound: float | None = None
    """The largest error of a message, as a share of the gradient's norm."""
    name: str | None = None
    """The name in `BUDGETS` if the user asked for one of them."""

    @classmethod
    def read(cls, given: str | float | None) -> Budget:
        """Reads a budget as a user writes it: a name in `BUDGETS`, or a bound.

        Raises:
            UsageError: The value is neither.
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
        """Checks codecs that the user named together with this budget.

        Raises:
            UsageError: The budget has a name and lacks a codec.
        """
        if self.name is None or self.codecs is None:
            return
        for name in asked:
            if name != "none" and name not in self.codecs:
                raise UsageError(
                    f"codec {name!r} is not in budget {self.name!r}, which has "
                    f"{', '.join(self.codecs)}; name one of these, or leave out the budget."
                )

    def allowed(self, profile: Profile, asked: Sequence[str] | None = None) -> tuple[str, ...]:
        """Returns the codecs of a profile that may be used.

        Args:
            profile: A profile with costs of codecs.
            asked: The codecs that the user named; they are the result. With `none` alone, nothing
                is compressed.

        Raises:
            UsageError: A codec that was named is not in the profile, or not in the budget.
        """
        if asked is not None:
            self.check(asked)
            for name in asked:
                profile.codec(name)
            return tuple(dict.fromkeys(name for name in asked if name != "none"))
        measured = [costs.codec for costs in profile.codecs if costs.codec != "none"]
        if self.codecs is None:
            return tuple(name for name in measured if not ONLY_NAMED.match(name))
        return tuple(name for name in measured if name in self.codecs)

    def check_errors(self, gradients: Sequence[GradientProfile], codecs: Sequence[str]) -> None:
        """Checks that errors were measured if this budget is a bound on them.

        A codec's error on noise tells nothing of gradients, most of whose elements are small.

        Args:
            gradients: The gradients that may be compressed.
            codecs: The codecs that may be used.

        Raises:
            UsageError: No error of any of these codecs was measured on any of these gradients.
        """
        if self.bound is None or not gradients or not codecs:
            return
        if all(gradient.errors.keys().isdisjoint(codecs) for gradient in gradients):
            raise UsageError(
                f"budget {self.bound:g} bounds the error of a layer's message, and the profile has "
                f"no error of {', '.join(codecs)} that was measured on gradients of its model; "
                "measure with hipress profile --model, or give a budget by name: "
                f"{' or '.join(BUDGETS)}."
            )

    def reason(self, gradient: GradientProfile, codec: str) -> str:
        """Returns why a codec may not be used for a gradient; empty if it may."""
        if self.bound is None:
            return ""
        if codec not in gradient.errors:
            return f"the error of {codec} was not measured"
        off = gradient.errors[codec]
        if off > self.bound:
            return f"{codec} is {off:.2g} off, more than {self.bound:g}"
        return ""
