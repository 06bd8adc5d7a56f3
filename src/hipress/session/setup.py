"""From what a user asked for to a session that is ready for its first step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hipress.codecs.base import Codec
from hipress.errors import UsageError
from hipress.plan import Plan
from hipress.recommendations import SAFE, UNKNOWN
from hipress.session import planner, selection
from hipress.session.adapter import GradientSpec
from hipress.session.buckets import has_momentum
from hipress.session.planner import Planner
from hipress.session.selection import Rules
from hipress.session.session import ONE_PROCESS, Session
from hipress.settings import log_level
from hipress.units import counted

_log = logging.getLogger("hipress")

DEFAULT_CODEC = SAFE
"""Used when only a strategy was given."""
AUTO = "auto"
"""Given in place of a codec: measures, plans, and compresses where that is faster."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the user asked for, checked."""

    rules: Rules
    is_auto: bool
    codecs: tuple[str, ...] = ()
    """Codecs that `auto` may use."""
    budget: float | str | None = None


def decide(
    *,
    codec: str | Codec | None,
    strategy: str | None,
    plan: str | Plan | dict[str, Any] | None,
    exclude: str | Iterable[str],
    include: str | Iterable[str],
    min_size: int,
    codecs: Iterable[str] | None = None,
    budget: float | str | None = None,
    optimizer_kind: str = UNKNOWN,
) -> Decision:
    """Checks the arguments that `attach` and `start` share.

    Args:
        codec: A codec or an expression; `auto` or None, without strategy and plan, measures.
        strategy: Name of a strategy.
        plan: A plan, its path or its content.
        exclude: Patterns of names that are not compressed.
        include: Patterns of names that are compressed although they are exempt by default.
        min_size: Gradients with fewer elements are exempt.
        codecs: Codecs that `auto` may use; by the budget if None.
        budget: Accuracy budget of `auto`.
        optimizer_kind: A kind of `hipress.recommendations`.
    """
    if codec == AUTO and (strategy is not None or plan is not None):
        given = "strategy" if strategy is not None else "plan"
        raise UsageError(f"codec 'auto' makes plans itself, and a {given} was given; give one.")
    is_auto = codec == AUTO or (codec is None and strategy is None and plan is None)
    if not is_auto and (codecs is not None or budget is not None):
        given = "codecs" if codecs is not None else "budget"
        raise UsageError(f"{given} is for auto, and a codec or plan was given; give one of them.")
    rules = selection.rules(
        codec=None if is_auto else codec,
        strategy=strategy,
        plan=plan,
        exclude=exclude,
        include=include,
        min_size=min_size,
        default_codec=DEFAULT_CODEC,
    )
    allowed = planner.allowed(codecs, budget, optimizer_kind) if is_auto else ()
    return Decision(rules=rules, is_auto=is_auto, codecs=allowed, budget=budget)


def begin(
    session: Session,
    decision: Decision,
    specs: Sequence[GradientSpec],
    names: Sequence[str],
    register_hook: Callable[[], None] = lambda: None,
) -> Session:
    """Opens a session: engine, decisions, agreement of all ranks. Collective.

    Args:
        session: A new session.
        decision: What the user asked for.
        specs: The gradients, in the order in which backward computes them.
        names: All parameters, also those without a gradient: naming them is no mistake.
        register_hook: Called when all ranks agree.
    """
    selection.check_names(decision.rules, names)
    show_log()
    if session.idle:
        session.untrained = frozenset(names) - {spec.name for spec in specs}
        session.begin_idle(specs)
        choices = {spec.name: decision.rules.choice(spec) for spec in specs}
        session.warn_of_momentum(
            [name for name, choice in choices.items() if has_momentum(choice.codec)],
            "on one process" if session.idle == ONE_PROCESS else "with enabled=False",
        )
        return session
    if not specs:
        raise UsageError("the model has no parameter that is trained; set requires_grad on some.")
    engine = session.open(specs[0].device)
    facts = {}
    try:
        if decision.is_auto:
            is_scheduled = session.schedule is not None
            session.use_auto(
                Planner(
                    decision.codecs,
                    decision.budget,
                    keeps_rest=is_scheduled,
                    is_scheduled=is_scheduled,
                )
            )
            facts = {"codecs for auto": list(decision.codecs), "budget": decision.budget}
        session.register(specs)
        engine.agree("attach", session.facts() | facts)
        register_hook()
    except BaseException:
        session.monitor.close()
        engine.close()
        raise
    plan = decision.rules.plan
    num_ranks = engine.transport.num_ranks
    if plan is not None and plan.num_ranks not in (None, num_ranks) and engine.transport.rank == 0:
        _log.warning(
            "the plan was made for %s and this job has %d; make one for this number with hipress "
            "plan --nodes.", counted(plan.num_ranks or 0, "rank"), num_ranks,
        )  # fmt: skip
    session.untrained = frozenset(names) - set(session.gradients)
    session.announce()
    return session


def show_log() -> None:
    """Shows the lines of the logger `hipress` on stderr, unless the program shows them itself.

    The program's own level of this logger stays. Without one it is that of HIPRESS_LOG.
    """
    level = log_level()
    if _log.level in (logging.NOTSET, _stderr.given):
        _log.setLevel(level)
        _stderr.given = level
    if not _log.hasHandlers():
        _log.addHandler(_stderr)


class _Stderr(logging.Handler):
    """Writes to stderr as long as the program has no handler of its own."""

    given: int | None = None
    """The level that the logger was given here."""

    def emit(self, record: logging.LogRecord) -> None:
        if _log.handlers == [self] and not logging.getLogger().handlers:
            try:
                print(self.format(record), file=sys.stderr, flush=True)
            except Exception:  # a closed stderr is no reason to end a training run
                self.handleError(record)


_stderr = _Stderr()
_stderr.setFormatter(logging.Formatter("hipress: %(message)s"))
