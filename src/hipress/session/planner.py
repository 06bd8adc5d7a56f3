"""Whom `auto` asks: what links, codecs and the model cost here, and which plans may pay."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hipress.codecs.table import codec as named_codec
from hipress.errors import UsageError
from hipress.plan import Plan
from hipress.probe import codec_costs, links
from hipress.probe.cache import Points
from hipress.profile import GradientProfile, Machine, ModelProfile, Profile
from hipress.secopa import search
from hipress.secopa.budget import BUDGETS, CAREFUL, PASSED, Budget
from hipress.torch.gradient_timer import GradientTimer, one_device

if TYPE_CHECKING:
    from hipress.torch.sync import Sync

_log = logging.getLogger("hipress")

FOR_SGD = ("onebit",)
"""Besides the careful ones: keep up with SGD that has no momentum of its own."""
LINKS_S, SEARCH_S = 1.5, 2.0
"""About how long links are measured, and plans looked for."""
UNCOUNTED_STEPS = 2
"""DDP makes its buckets in them."""
DIGITS = 4
"""Of times that ranks tell: less than they differ from step to step."""
WORK = ("forward_s", "backward_s", "rest_s", "threads", "error")
"""Of a model, beside its gradients."""


class Candidate(Protocol):
    """A plan that may pay."""

    @property
    def plan(self) -> Plan:
        """What happens to each gradient."""

    @property
    def step_s(self) -> float:
        """Predicted."""

    @property
    def label(self) -> str:
        """For people."""


def allowed(
    codecs: Iterable[str] | None,
    budget: float | str | None,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[str, ...]:
    """The codecs that auto may use.

    Args:
        codecs: As the user gave them; None: those of the budget.
        budget: A name of `BUDGETS` or a bound; None: what keeps up with the optimizer.
        optimizer: If it is known.

    Example:
        >>> allowed(None, None, None), allowed(["onebit"], None, None)
        (('bf16', 'fp16', 'int8'), ('onebit',))
    """
    Budget.read(budget)
    if codecs is None:
        if budget is None:
            return CAREFUL + (FOR_SGD if _is_bare_sgd(optimizer) else ())
        return BUDGETS.get(str(budget), PASSED)
    if isinstance(codecs, str) or not isinstance(codecs, Iterable):
        raise UsageError(f"codecs is {codecs!r}; give a list of them, e.g. ['int8', 'onebit'].")
    found = tuple(codecs)
    if not found:
        raise UsageError("codecs is empty; name at least one, or give enabled=False.")
    for name in found:
        if not isinstance(name, str):
            raise UsageError(f"codecs holds {name!r}; give expressions such as 'int8'.")
        named_codec(name)
    return tuple(dict.fromkeys(found))


def _is_bare_sgd(optimizer: torch.optim.Optimizer | None) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(
        group.get("momentum") for group in optimizer.param_groups
    )


class Planner:
    """Measures, and makes plans from that.

    Args:
        codecs: That plans may use.
        budget: See `attach`.
    """

    def __init__(self, codecs: tuple[str, ...], budget: float | str | None = None) -> None:
        self.codecs = codecs
        self._budget = Budget.read(budget)
        self._readiness: GradientTimer | None = None
        self._machine: Machine | None = None
        self._points: list[dict[str, Points]] = []
        """What each rank saw codecs cost."""
        self._patience_s = SEARCH_S
        self._model: ModelProfile | None = None
        self._reasons: dict[str, str] = {}

    def begin(self, sync: Sync) -> None:
        """Before the first step."""
        module = sync.module
        if module is None:
            return
        names = {name: gradient.parameter for name, gradient in sync.gradients.items()}
        try:
            one_device(names.values())
        except UsageError as error:
            if sync.engine.transport.rank == 0:
                _log.warning("auto: no plan can be made: %s", error)
            return
        self._readiness = GradientTimer(module, names)  # type: ignore[arg-type]

    def end(self) -> None:
        """Nothing is measured any more."""
        if self._readiness is not None:
            self._readiness.close()

    def measure(self, sync: Sync) -> Profile | None:
        """What everything costs; all ranks call it, between two steps.

        Codecs and the model are measured once, links every time. The model is known on rank 0 only.
        """
        engine = sync.engine
        self._patience_s = min(SEARCH_S, engine.timeout_s / 4)  # the others wait meanwhile
        if self._machine is None:
            self._machine = links.machine(engine)
            self._model = self._model_of(sync)
        network = links.measure(engine, budget_s=LINKS_S)
        names = ("none", *self.codecs)
        if not self._points:
            self._points = codec_costs.points(
                engine,
                names,
                num_machine_ranks=self._machine.num_ranks,
                most_numel=max(g.parameter.numel() for g in sync.gradients.values()),
                barrier=links.barrier(engine),
            )
        try:  # nobody waits for this rank any more: what fails costs advice, not the job
            costs = codec_costs.fitted(engine, names, self._points)
            return Profile(machine=self._machine, network=network, codecs=costs, model=self._model)
        except Exception as error:
            if engine.transport.rank == 0:
                _log.warning(
                    "auto: what was measured makes no sense (%s: %s).", type(error).__name__, error
                )
            return None

    def shortlist(self, profile: Profile | None) -> Sequence[Candidate]:
        """Plans that may be faster than plain all-reduce, the most promising first; rank 0."""
        if profile is None or profile.model is None or not profile.model.gradients:
            return []
        return search.shortlist(
            profile,
            codecs=self.codecs,
            budget=self._budget,
            reasons=self._reasons,
            patience_s=self._patience_s,
        )

    def _model_of(self, sync: Sync) -> ModelProfile | None:
        """When gradients are ready, the median over all ranks; None where some rank cannot tell,
        and on all but rank 0."""
        own: ModelProfile | None = None
        if self._readiness is not None:
            self._readiness.close()
            if self._readiness.steps:
                own = self._readiness.profile(skip=UNCOUNTED_STEPS, clock="thread")
            self._readiness = None
        names = sorted(sync.gradients)  # the same on all ranks
        of_all = [json.loads(one) for one in sync.engine.gather(told_of(own, names))]
        open_names = set(sync.auto.names) if sync.auto is not None else set()
        self._reasons = {
            name: gradient.choice.reason
            for name, gradient in sync.gradients.items()
            if name not in open_names
        }
        if own is None or not of_all or any(one is None for one in of_all):
            return None
        found = model_of(own, names, of_all)
        known = {gradient.name for gradient in found.gradients}  # some are not in every step
        buckets = [tuple(one for one in names if one in known) for names in sync.bucket_names]
        return found.model_copy(
            update={"buckets": tuple(filter(None, buckets)), "bucket_mb": _bucket_mb(sync.module)}
        )


def told_of(own: ModelProfile | None, names: Sequence[str]) -> bytes:
    """What a rank tells of its model: 4 kB for 400 gradients, where a profile has 40.

    Args:
        own: As this rank saw it; None: it cannot tell.
        names: Of all gradients, in an order that all ranks have.
    """
    if own is None:
        return b"null"
    ready = {gradient.name: _short(gradient.ready_s) for gradient in own.gradients}
    told = [[_short(getattr(own, name)) for name in WORK], [ready.get(name) for name in names]]
    return json.dumps(told, separators=(",", ":")).encode()


def model_of(own: ModelProfile, names: Sequence[str], of_all: Sequence[Any]) -> ModelProfile:
    """Medians of what ranks have told; sizes, and which gradients there are, by this one."""
    work = [statistics.median(values) for values in zip(*(one[0] for one in of_all), strict=True)]
    seen: Mapping[str, list[float]] = {
        name: [ready for ready in values if ready is not None]
        for name, values in zip(names, zip(*(one[1] for one in of_all), strict=True), strict=True)
    }
    gradients: list[GradientProfile] = [
        one.model_copy(update={"ready_s": statistics.median(seen[one.name])})
        for one in own.gradients
    ]
    gradients.sort(key=lambda one: one.ready_s)
    return own.model_copy(
        update={**dict(zip(WORK, work, strict=True)), "gradients": tuple(gradients)}
    )


def _short(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def _bucket_mb(ddp: Any) -> float | None:
    """Of a DDP, unless it is its default, where the first bucket is smaller."""
    cap_bytes = getattr(ddp, "bucket_bytes_cap", 25 * 2**20)
    is_default = getattr(ddp, "bucket_bytes_cap_default", cap_bytes == 25 * 2**20)
    return None if is_default else cap_bytes / 2**20
