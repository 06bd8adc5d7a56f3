"""Decides which gradients are compressed, with what, and why the others are not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from hipress.casync.graphs import strategies
from hipress.codecs.base import Codec
from hipress.codecs.table import codec as named_codec
from hipress.errors import UsageError
from hipress.plan import ANY, MIN_SIZE, Plan, exempt_reason, plain_strategy
from hipress.session.adapter import GradientSpec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Element types that codecs take."""


def takes(buffer: torch.Tensor) -> bool:
    """Returns whether codecs take the elements of a buffer."""
    return buffer.layout is torch.strided and buffer.dtype in DTYPES


def can_take(spec: GradientSpec) -> bool:
    """Returns whether codecs take the elements of a gradient."""
    return not spec.is_sparse and spec.dtype in DTYPES


NONE = named_codec("none")

UNDECIDED = "auto"
"""Why a gradient is not compressed that a plan of `auto` might compress; `skipped` says more."""
NOT_ASKED = "codec 'none' was asked for"
SPARSE = "its gradient is sparse, which codecs do not take"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What happens to one gradient."""

    codec: Codec
    """`none` sends it uncompressed."""
    strategy: str
    partitions: int | None = None
    bulk: int | None = None
    """Gradients of a bucket with the same number travel together; None: by their choices."""
    order: int | None = None
    """The lowest of a bucket starts first; None: compressed gradients start before the others."""
    reason: str = ""
    """The reason why the gradient is not compressed."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the user asked for; the one place that decides about a gradient."""

    codec: Codec
    """The codec of every gradient; with a plan, of those for which the plan leaves it open."""
    strategy: str
    plan: Plan | None = None
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    min_size: int = MIN_SIZE

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs that a gradient may be given, `none` among them."""
        if self.plan is None:
            return (self.codec,)
        names = {made.codec for made in self.plan.gradients.values()}
        return tuple(self.codec if n == ANY else named_codec(n) for n in sorted(names))

    def choice(self, spec: GradientSpec) -> Choice:
        """Returns what happens to a gradient."""
        reason = self._reason(spec)
        if self.plan is not None and not reason:
            made = self.plan.decision(spec.name)
            way = self.strategy if made.is_compressed else plain_strategy(spec.numel)
            codec = self.codec if made.codec == ANY else named_codec(made.codec)
            if not made.is_compressed:
                reason = made.reason or "the plan leaves it uncompressed"
            elif codec.name == "none":
                reason = NOT_ASKED
            return Choice(
                codec=codec,
                strategy=way if made.strategy == ANY else made.strategy,
                partitions=made.partitions,
                bulk=made.bulk,
                order=made.order,
                reason=reason,
            )
        if reason:
            return Choice(codec=NONE, strategy="ps", reason=reason)
        if self.codec.name == "none":
            return Choice(codec=NONE, strategy=self.strategy, reason=NOT_ASKED)
        return Choice(codec=self.codec, strategy=self.strategy)

    def choice_under(self, plan: Plan | None, spec: GradientSpec) -> Choice:
        """Returns what happens to a gradient under a plan of `auto`; None is plain all-reduce."""
        asked = self.choice(spec)
        if plan is None:
            undecided = Choice(codec=NONE, strategy="allreduce", reason=UNDECIDED)
            return asked if asked.reason else undecided
        choice = replace(self, plan=plan).choice(spec)
        return replace(choice, codec=NONE, reason=asked.reason) if asked.reason else choice

    def _reason(self, spec: GradientSpec) -> str:
        """Returns why a gradient is not compressed; empty if it is."""
        if spec.is_sparse:
            return SPARSE
        if spec.dtype not in DTYPES:
            return f"codecs do not take {str(spec.dtype).removeprefix('torch.')}"
        if (pattern := _first(self.exclude, spec.name)) is not None:
            return f"excluded by {pattern!r}"
        if self.plan is not None or _first(self.include, spec.name) is not None:
            return ""
        return exempt_reason(spec.dims, spec.numel, self.min_size)


def rules(
    *,
    codec: str | Codec | None,
    strategy: str | None,
    plan: Any,
    exclude: str | Iterable[str],
    include: str | Iterable[str],
    min_size: int,
    default_codec: str,
) -> Rules:
    """Checks what the user asked for; codec and strategy fill in what a plan leaves open."""
    loaded = Plan.read(plan) if plan is not None else None
    if loaded is not None:
        for given, is_given, is_open in (
            ("codec", codec is not None, loaded.takes_codec),
            ("strategy", strategy is not None, loaded.takes_strategy),
        ):
            if is_given and not is_open:
                raise UsageError(
                    f"attach was given a plan and a {given}; the plan decides both: give one."
                )
    if codec is not None and not isinstance(codec, str | Codec):
        raise UsageError(f"codec is {codec!r}; give an expression such as 'onebit', or a codec.")
    if not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 0:
        raise UsageError(f"min_size is {min_size!r}; give a number of elements, 0 for all.")
    strategies.check("ps" if strategy is None else strategy)
    for decision in loaded.gradients.values() if loaded is not None else ():
        if decision.strategy != ANY:
            strategies.check(decision.strategy)
        if decision.codec != ANY:
            named_codec(decision.codec)
    asked = default_codec if codec is None else codec
    return Rules(
        codec=named_codec(asked) if isinstance(asked, str) else asked,
        strategy="ps" if strategy is None else strategy,
        plan=loaded,
        exclude=_patterns(exclude, "exclude"),
        include=_patterns(include, "include"),
        min_size=min_size,
    )


def check_names(asked: Rules, names: Sequence[str]) -> None:
    """Raises if a pattern or the plan names a gradient that does not exist."""
    for option in ("exclude", "include"):
        for pattern in getattr(asked, option):
            if not any(_matches(pattern, name) for name in names):
                near = difflib.get_close_matches(pattern, names, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise UsageError(
                    f"{option} pattern {pattern!r} matches no parameter{hint}; the first are: "
                    f"{', '.join(names[:5])}."
                )
    unknown = [n for n in (asked.plan.gradients if asked.plan else ()) if n not in set(names)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(
            f"the plan names {unknown[0]!r}{hint}, which this model does not have; make a plan "
            f"for this model (its first parameters are: {', '.join(names[:5])})."
        )


def skipped(choices: Mapping[str, Choice]) -> dict[str, str]:
    """Returns the gradients that are not compressed, and why."""
    return {name: choice.reason for name, choice in choices.items() if choice.codec.name == "none"}


def _patterns(given: str | Iterable[str] | None, option: str) -> tuple[str, ...]:
    if given is not None and not isinstance(given, Iterable):
        raise UsageError(
            f"{option} is {given!r}; give a name or a list of them, e.g. ['*.embed.*']."
        )
    found = (given,) if isinstance(given, str) else tuple(given or ())
    for pattern in found:
        if not isinstance(pattern, str) or not pattern:
            raise UsageError(
                f"{option} holds {pattern!r}; give names of parameters or modules, or patterns "
                "such as '*.embed.*'."
            )
    return found


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _first(patterns: Sequence[str], name: str) -> str | None:
    return next((pattern for pattern in patterns if _matches(pattern, name)), None)
