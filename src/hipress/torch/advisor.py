"""Whom `auto` asks: what links, codecs and the model cost here, and which plans may pay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from hipress.casync import probe, probe_codecs
from hipress.codecs.table import codec as named_codec
from hipress.errors import UsageError
from hipress.plan import Plan
from hipress.profile import CodecCosts, Machine, ModelProfile, Profile
from hipress.secopa import search
from hipress.secopa.budget import BUDGETS, CAREFUL, PASSED, Budget
from hipress.torch.readiness import Readiness, merged

if TYPE_CHECKING:
    from hipress.torch.sync import Sync

FOR_SGD = ("onebit",)
"""Besides the careful ones: keep up with SGD that has no momentum of its own."""
LINKS_S, SEARCH_S = 1.5, 2.0
"""About how long links are measured, and plans looked for."""
UNCOUNTED_STEPS = 2
"""DDP makes its buckets in them."""


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


class Advisor:
    """Measures, and makes plans from that.

    Args:
        codecs: That plans may use.
        budget: See `attach`.
    """

    def __init__(self, codecs: tuple[str, ...], budget: float | str | None = None) -> None:
        self.codecs = codecs
        self._budget = Budget.read(budget)
        self._readiness: Readiness | None = None
        self._machine: Machine | None = None
        self._costs: tuple[CodecCosts, ...] = ()
        self._model: ModelProfile | None = None
        self._reasons: dict[str, str] = {}

    def begin(self, sync: Sync) -> None:
        """Before the first step."""
        module = sync.module
        if module is not None:
            names = {name: gradient.parameter for name, gradient in sync.gradients.items()}
            self._readiness = Readiness(module, names)  # type: ignore[arg-type]

    def measure(self, sync: Sync) -> Profile:
        """What everything costs; all ranks call it, between two steps.

        Codecs and the model are measured once, links every time.
        """
        engine = sync.engine
        if self._machine is None:
            self._machine = probe.machine(engine)
            self._model = self._model_of(sync)
        network = probe.measure(engine, budget_s=LINKS_S)
        if not self._costs:
            self._costs = probe_codecs.costs(
                engine,
                ("none", *self.codecs),
                num_machine_ranks=self._machine.num_ranks,
                barrier=probe.barrier(engine),
            )
        return Profile(
            machine=self._machine, network=network, codecs=self._costs, model=self._model
        )

    def shortlist(self, profile: Profile) -> Sequence[Candidate]:
        """Plans that may be faster than plain all-reduce, the most promising first; rank 0."""
        if profile.model is None or not profile.model.gradients:
            return []
        return search.shortlist(
            profile,
            codecs=self.codecs,
            budget=self._budget,
            reasons=self._reasons,
            patience_s=SEARCH_S,
        )

    def _model_of(self, sync: Sync) -> ModelProfile | None:
        """When gradients are ready, the median over all ranks; None where some rank cannot tell."""
        own: ModelProfile | None = None
        if self._readiness is not None:
            self._readiness.close()
            if self._readiness.steps:
                own = self._readiness.profile(skip=UNCOUNTED_STEPS, clock="thread")
            self._readiness = None
        told = None if own is None else own.model_dump(mode="json")
        of_all = sync.engine.agree("ready times", {}, told=told)
        open_names = set(sync.auto.names) if sync.auto is not None else set()
        self._reasons = {
            name: gradient.choice.reason
            for name, gradient in sync.gradients.items()
            if name not in open_names
        }
        if any(one is None for one in of_all):
            return None
        found = merged([ModelProfile.model_validate(one) for one in of_all])
        known = {gradient.name for gradient in found.gradients}  # some are not in every step
        buckets = [tuple(one for one in names if one in known) for names in sync.bucket_names]
        return found.model_copy(update={"buckets": tuple(filter(None, buckets))})
