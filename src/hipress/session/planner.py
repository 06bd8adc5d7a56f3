"""The planner of `auto`: what links, codecs and the model cost here, and which plans may pay."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.transport import LinkError
from hipress.codecs.base import WEIGHT
from hipress.codecs.table import codec as named_codec
from hipress.errors import AgreementError, PeerError, UsageError
from hipress.probe import codec_costs, links
from hipress.probe.cache import Points
from hipress.profile import Machine, ModelProfile, Profile
from hipress.recommendations import SAFE, UNKNOWN, recommended
from hipress.secopa import search
from hipress.secopa.budget import BUDGETS, CAREFUL, PASSED, Budget
from hipress.session.buckets import UNSENT, Bucket, has_momentum, keeps_residual
from hipress.session.selection import can_take
from hipress.session.timing import MODEL_TIMES, GradientTimer, measure_errors, merged

if TYPE_CHECKING:
    from hipress.session.session import Session

_log = logging.getLogger("hipress")

T = TypeVar("T")

LINKS_S, SEARCH_S = 1.5, 2.0
"""Approximate seconds for measuring links, and for searching plans."""
EXEMPT = "no gradient may be compressed (see sync.skipped)"
"""Why there is nothing to plan."""
UNCOUNTED_STEPS = 2
"""DDP builds its buckets in the first steps, so they do not count."""
DIGITS = 4
"""Significant digits of the numbers that ranks exchange; they vary more from step to step."""


def allowed(
    codecs: Iterable[str] | None, budget: float | str | None, optimizer_kind: str = UNKNOWN
) -> tuple[str, ...]:
    """Returns the codecs that `auto` may use.

    Args:
        codecs: What the user gave; None takes those of the budget.
        budget: A name of `BUDGETS` or a bound; None takes what is safe with the optimizer.
        optimizer_kind: A kind of `hipress.recommendations`.

    Example:
        >>> allowed(None, None), allowed(None, None, "sgd"), allowed(["onebit"], None)
        (('bf16', 'int8'), ('bf16', 'int8', 'onebit'), ('onebit',))
    """
    Budget.read(budget)
    if codecs is None:
        if budget is None:
            own = recommended(optimizer_kind).codec
            is_usable = own not in CAREFUL and not has_momentum(named_codec(own))
            return CAREFUL + ((own,) if is_usable else ())
        return BUDGETS.get(str(budget), PASSED)
    if isinstance(codecs, str) or not isinstance(codecs, Iterable):
        raise UsageError(f"codecs is {codecs!r}; give a list of them, e.g. ['int8', 'onebit'].")
    found = tuple(codecs)
    if not found:
        raise UsageError("codecs is empty; name at least one, or give enabled=False.")
    for name in found:
        if not isinstance(name, str):
            raise UsageError(f"codecs holds {name!r}; give expressions such as 'int8'.")
        if has_momentum(named_codec(name)):
            raise UsageError(
                f"codecs holds {name!r}, which applies momentum, and auto also runs uncompressed "
                "steps, in which nothing would apply it; name codecs without momentum, such as "
                f"{SAFE!r}, or give codec={name!r} in place of auto."
            )
        if kept := set(named_codec(name).state_names) - {*UNSENT, WEIGHT}:
            raise UsageError(
                f"codecs holds {name!r}, which keeps {', '.join(sorted(kept))}, and auto sends "
                "residuals alone when it changes plans; name codecs that keep residuals only, such "
                f"as {SAFE!r}, or give codec={name!r} in place of auto."
            )
    return tuple(dict.fromkeys(found))


class Planner:
    """Measures this cluster and model, and makes plans from that.

    Args:
        codecs: Codecs that plans may use.
        budget: Accuracy budget, as for `attach`.
        keeps_rest: Whether the work between backward and the next forward pass belongs to a step.
        is_scheduled: Whether plans have a schedule, for a loop that waits for single gradients.
    """

    def __init__(
        self,
        codecs: tuple[str, ...],
        budget: float | str | None = None,
        *,
        keeps_rest: bool = False,
        is_scheduled: bool = False,
    ) -> None:
        self.codecs = tuple(name for name in codecs if name != "none")
        self._is_scheduled = is_scheduled
        self._keeps_rest = keeps_rest
        self._budget = Budget.read(budget)
        self._timer: GradientTimer | None = None
        self._stop_timer: Callable[[], None] = lambda: None
        self._machine: Machine | None = None
        self._points: list[dict[str, Points]] = []
        """Measured codec costs of each rank."""
        self._search_s = SEARCH_S
        self._model: ModelProfile | None = None
        self._reasons: dict[str, str] = {}
        self._ranks: dict[str, int] = {}
        """By gradient that may be compressed, the rank that measures errors on it."""
        self._kept: dict[str, torch.Tensor] = {}
        """This rank's share of the gradients of a step, on which errors are measured."""
        self._errors: dict[str, dict[str, float]] = {}
        """Errors by gradient and codec, the same on all ranks."""
        self.problem = ""
        """Why the measurements cannot be planned with."""

    def begin(self, session: Session) -> str:
        """Starts to time the model, before the first step; returns why no plan can be made."""
        is_exempt = all(session.rules.choice(g.spec).reason for g in session.gradients.values())
        if is_exempt and not self._is_scheduled:
            return EXEMPT
        return self.observe(session)

    @property
    def about(self) -> str:
        """What is tried, for the log."""
        codecs = ", ".join(self.codecs or ["none"])
        if not self._is_scheduled:
            return f"plans with {codecs}"
        return "schedules" + (f", and plans with {codecs}," if self.codecs else "")

    def observe(self, session: Session) -> str:
        """Starts to time the model; returns why it cannot be timed.

        Gradients that no codec takes are summed by torch with every plan, so plans leave them out.
        """
        if not session.adapter.can_observe:
            return "there is no model to time"
        specs = [g.spec for g in session.gradients.values() if can_take(g.spec)]
        try:
            self._timer = GradientTimer(specs)
        except UsageError as error:
            return str(error).removesuffix(".")
        self._stop_timer = session.adapter.observe(self._timer)
        return ""

    def resume(self) -> None:
        """Notes that the step of another model has ended before backward of this one began."""
        if self._timer is not None:
            self._timer.resume()

    def keep(self, session: Session, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Keeps gradients of a step after which `measure` may come, if errors are to be measured.

        Each gradient is kept by one rank, so that all share the work and the memory.

        Args:
            session: The session.
            bucket: The gradients.
            buffer: Their elements on this rank, before they are averaged.
        """
        if self._budget.bound is None:
            return
        if not self._ranks:
            usable = [
                gradient
                for gradient in session.gradients.values()
                if not session.rules.choice(gradient.spec).reason
            ]
            usable.sort(key=lambda gradient: (-gradient.numel, gradient.name))
            num_ranks = session.engine.transport.num_ranks
            self._ranks = {gradient.name: k % num_ranks for k, gradient in enumerate(usable)}
        for group in bucket.groups:
            for name, (start, stop) in zip(group.names, group.spans, strict=True):
                if name in self._errors:
                    continue
                if self._ranks.get(name) == session.engine.transport.rank:
                    self._kept[name] = buffer[start:stop].clone()

    def end(self) -> None:
        """Stops timing the model."""
        self._kept.clear()
        self._stop_timer()
        if self._timer is not None:
            self._timer.close()

    def measure(self, session: Session) -> Profile | None:
        """Measures what everything costs; all ranks call it, between two steps.

        Codecs and the model are measured once, links every time, and the errors of each gradient
        until there are any, if the budget is a bound on them. Only rank 0 knows the model.
        """
        engine = session.engine
        self._search_s = min(SEARCH_S, engine.timeout_s / 4)  # the other ranks wait for the search
        is_complete = bool(self._ranks) and self._ranks.keys() <= self._errors.keys()
        if self._budget.bound is not None and not is_complete:
            self._errors |= self._measured_errors(session)
        if self._machine is None:
            self._machine = links.machine(engine)
            self._model = self._model_of(session)
        network = links.measure(engine, budget_s=LINKS_S)
        names = ("none", *self.codecs)
        if not self._points:
            self._points = codec_costs.points(
                engine,
                names,
                num_machine_ranks=self._machine.num_ranks,
                most_numel=max(g.numel for g in session.gradients.values() if can_take(g.spec)),
                barrier=links.barrier(engine),
            )
        try:  # no rank waits for this one any more, so an error costs a plan and not the job
            costs = codec_costs.fitted(engine, names, self._points)
            return Profile(
                machine=self._machine,
                network=network,
                codecs=costs,
                model=self._model_with_errors(),
            )
        except Exception as error:
            self.problem = f"the measurements make no profile: {type(error).__name__}: {error}"
            return None

    def shortlist(self, profile: Profile | None) -> Sequence[search.Candidate]:
        """Returns plans that may be faster than plain all-reduce, the best first; on rank 0.

        Raises:
            UsageError: The measurements cannot be planned with.
        """
        if profile is None:
            raise UsageError(self.problem)
        if profile.model is None:
            raise UsageError("a rank has timed no whole step")
        if not profile.model.gradients:
            raise UsageError("no gradient is computed in every step")
        shortlist = search.schedule_shortlist if self._is_scheduled else search.shortlist
        return shortlist(
            profile,
            codecs=self.codecs,
            budget=self._budget,
            reasons=self._reasons,
            patience_s=self._search_s,
        )

    def _measured_errors(self, session: Session) -> dict[str, dict[str, float]]:
        """Returns what codecs make of the gradients that ranks have kept; collective."""
        own: dict[str, dict[str, float]] = {}
        for name, values in self._kept.items():
            # What the optimizer has exchanged in place of the gradient is what codecs get.
            of_momentum = [one for one in self.codecs if _sends_momentum(session, name, one)]
            of_gradient = [one for one in self.codecs if one not in of_momentum]
            own |= _rounded(measure_errors({name: values}, of_gradient))
            if of_momentum and name in own:
                scale = session.adapter.loss_scale()
                session.adapter.make_momentum(name, values, 1.0 if scale is None else scale)
                for codec_errors in _rounded(measure_errors({name: values}, of_momentum)).values():
                    own[name] |= codec_errors
        self._kept.clear()
        of_all = session.engine.agree("errors of codecs", {}, share=own)
        return {name: errors for one in of_all for name, errors in one.items()}

    def _model_with_errors(self) -> ModelProfile | None:
        if self._model is None:
            return None
        gradients = tuple(
            gradient.model_copy(update={"errors": self._errors.get(gradient.name, {})})
            for gradient in self._model.gradients
        )
        return self._model.model_copy(update={"gradients": gradients})

    def _model_of(self, session: Session) -> ModelProfile | None:
        """Returns the median over all ranks of when gradients are ready, on rank 0.

        It is None on other ranks, and if some rank has no times.
        """
        own: ModelProfile | None = None
        self.end()
        if self._timer is not None:
            if self._timer.steps:
                own = self._timer.profile(skip=UNCOUNTED_STEPS, clock="thread")
            self._timer = None
        names = sorted(session.gradients)  # the same order on all ranks
        of_all = [json.loads(one) for one in session.engine.gather(encode_times(own, names))]
        self._reasons = {
            name: gradient.choice.reason
            for name, gradient in session.gradients.items()
            if session.rules.choice(gradient.spec).reason
        }
        if own is None or not of_all or any(one is None for one in of_all):
            return None
        found = combined(own, names, of_all)
        if not self._keeps_rest:
            # A step of auto ends with its exchange: what a program does later is no part of it.
            found = found.model_copy(update={"rest_s": 0.0})
        known = {gradient.name for gradient in found.gradients}  # some are not in every step
        buckets = [
            tuple(one for one in names if one in known) for names in session.layout.bucket_names
        ]
        return found.model_copy(
            update={
                "buckets": tuple(filter(None, buckets)),
                "bucket_mb": session.adapter.bucket_mb,
            }
        )


def together(engine: Engine, measure: Callable[[], T]) -> T:
    """Measures on all ranks; if one rank fails in it, all raise an error that names it."""
    try:
        return measure()
    except (PeerError, AgreementError):
        raise
    except (LinkError, dist.DistError) as error:
        raise engine.explain(error) from error
    except Exception as error:
        engine.give_up(error)  # the others wait for this rank
        raise


def encode_times(own: ModelProfile | None, names: Sequence[str]) -> bytes:
    """Returns the times of this rank's model as JSON: 4 kB for 400 gradients (a profile: 40 kB).

    Args:
        own: The model as this rank saw it; None if there are no times.
        names: All gradients, in the same order on all ranks.
    """
    if own is None:
        return b"null"
    ready = {gradient.name: _short(gradient.ready_s) for gradient in own.gradients}
    told = [
        [_short(getattr(own, name)) for name in MODEL_TIMES],
        [ready.get(name) for name in names],
    ]
    return json.dumps(told, separators=(",", ":")).encode()


def combined(own: ModelProfile, names: Sequence[str], of_all: Sequence[Any]) -> ModelProfile:
    """Returns medians over the times of all ranks; sizes and gradients are this rank's."""
    known = {gradient.name: gradient for gradient in own.gradients}

    def decoded(times: Sequence[float], ready: Sequence[float | None]) -> ModelProfile:
        gradients = tuple(
            known[name].model_copy(update={"ready_s": seconds})
            for name, seconds in zip(names, ready, strict=True)
            if seconds is not None and name in known
        )
        fields = dict(zip(MODEL_TIMES, times, strict=True))
        return own.model_copy(update={**fields, "gradients": gradients})

    return merged([decoded(*one) for one in of_all])


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def _rounded(errors: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {codec: _short(error) for codec, error in of_codec.items()}
        for name, of_codec in errors.items()
    }


def _sends_momentum(session: Session, name: str, text: str) -> bool:
    """Returns whether a codec would be given the momentum of the optimizer."""
    made = named_codec(text)
    is_noisy = not keeps_residual(made) and session.adapter.takes_noisy
    return not made.keeps_sizes and not is_noisy and session.adapter.offers_momentum(name)
