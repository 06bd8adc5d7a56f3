"""`attach(model)` without a codec: measures, plans, tries, switches, watches, plans again.

Rank 0 alone decides, from its own step times: ranks are in lockstep. It posts an order behind the
last step of the one before; the others read it when the first bucket of the next step is ready,
which is later than a forward. So all ranks change in the same step, and a step in which nothing
is due touches no store. What rank 0 thinks is in `judge`; in here is what all ranks do.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hipress.casync.engine.transport import LinkError
from hipress.errors import AgreementError, PeerError
from hipress.plan import Plan
from hipress.session.directives import Limits, Offer, Order, Reply, first_order
from hipress.session.planner import Planner
from hipress.session.policy import Policy
from hipress.session.selection import NONE, Choice
from hipress.torch import optimizer_checks
from hipress.torch.step_clock import StepClock

if TYPE_CHECKING:
    from hipress.torch.sync import Sync

_log = logging.getLogger("hipress")

MAX_OFFERS = 3
"""Plans that are tried at once."""
KEPT_PLANS = 8
UNDECIDED = "auto"
"""Why a gradient is left alone that a plan might compress; `skipped` says more."""
ALONE = "one rank has nobody to send to"


@dataclass(frozen=True, kw_only=True)
class AutoStats:
    """What `auto` is about."""

    mode: str
    """`measure`, `trial`, `plain` or `compressed`."""
    epoch: int | None
    """Of the plan that is in use; None: plain all-reduce."""
    reason: str
    """Of the last decision."""
    num_switches: int
    """How often this rank has gone from one plan, or plain all-reduce, to another."""


class Auto:
    """What one rank does on its way from plain all-reduce to a plan and back.

    Args:
        sync: The exchange, whose gradients are known.
        advisor: Measures, and makes plans; on rank 0.
        limits: Of the judge.
    """

    def __init__(self, sync: Sync, advisor: Planner, limits: Limits | None = None) -> None:
        self.is_plain = True
        """Whether this step's gradients are left to torch."""
        self.flushes = False
        """Whether what codecs remember goes with them."""
        self.mode, self.reason = "measure", "it measures first"
        self.num_switches = 0
        self._sync = sync
        self._advisor = advisor
        self._limits = limits or Limits()
        self._plans: dict[int, Plan] = {}
        self._installed: int | None = None
        """The plan that gradients are laid out for."""
        self._holder: int | None = None
        """The plan whose codecs remember something."""
        self._last: int | None = None
        """What the last step was exchanged with."""
        self._judge: Policy | None = None
        self._clock: StepClock | None = None
        """Of rank 0, which alone reads it."""
        self._warnings: set[str] = set()
        """Of the optimizer, that were given."""
        self._num_plans = 0
        self._upcoming: Order | None = None
        self._is_first = False
        self.is_alone = False

    def start(self) -> None:
        """Begins; the engine is open and gradients are registered."""
        engine = self._sync.engine
        self.is_alone = engine.transport.num_ranks == 1
        self._is_first = engine.transport.rank == 0
        steps = max(self._limits.first_steps, self._sync.settings.warmup_steps)
        self._limits = replace(self._limits, first_steps=steps)
        self._order = first_order(steps)
        self._left = steps
        if self.is_alone:
            self.mode, self.reason = "plain", ALONE
            self.say(f"{ALONE}: nothing is compressed.")
            return
        if self._is_first:
            self._clock = StepClock(engine.device)
            self._clock.stand_at(self._sync.module)
            self._judge = Policy(self._limits, self.say)
            self._judge.first()
            self.say(
                f"{steps} steps are left as they are and measured, then plans with "
                f"{', '.join(self._advisor.codecs)} are tried."
            )
        self._advisor.begin(self._sync)

    def stop(self) -> None:
        """The exchange is detached: nothing is measured any more."""
        self._advisor.end()
        if self._clock is not None:
            self._clock.leave()

    # --- a step -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first bucket of a step is ready: this is where all ranks change, if they do."""
        if self.is_alone:
            return
        if self._left == 0:
            self._advance()
        self._left -= 1
        order, holder = self._order, self._holder
        if order.epoch is None:
            self.is_plain, self.flushes = True, holder is not None and not order.keeps
        else:
            self.is_plain = self.flushes = holder not in (None, order.epoch)
        if self.flushes:
            self._holder = None
        elif self.is_plain and holder is None:
            self._install(None)
        elif not self.is_plain:
            self._install(order.epoch)
            self._holder = order.epoch
        now = None if self.is_plain else order.epoch
        self.num_switches += now != self._last
        self._last = now

    def end(self) -> None:
        """A step has ended well."""
        if self._judge is None or self._clock is None:
            return
        self._clock.end()
        if self._left == 0:
            times = self._clock.read(wait=self._order.waits)
            self._post(self._judge.next(Reply(times)))

    def _advance(self) -> None:
        """Goes over to the next order."""
        while True:
            self._take(self._hear())
            if not self._order.probes:
                return
            profile = self._measured()
            if self._judge is not None:
                self._post(self._judge.next(Reply(offers=self._offers(profile))))

    def _measured(self) -> Any:
        """What the advisor measures; where one rank fails in it, all hear of that."""
        engine = self._sync.engine
        try:
            return self._advisor.measure(self._sync)
        except (PeerError, AgreementError):
            raise
        except (LinkError, dist.DistError) as error:
            raise engine.explain(error) from error
        except Exception as error:
            engine.give_up(error)  # the others wait for this rank
            raise

    def _take(self, order: Order) -> None:
        self._order, self._left = order, order.steps
        self.mode, self.reason = order.mode, order.reason
        if order.waits and self._clock is not None:
            self._clock.restart()

    def _post(self, order: Order) -> None:
        """Tells all ranks what is next."""
        order = replace(order, number=self._order.number + 1)
        text: dict[str, Any] = {"order": asdict(order)}
        if order.epoch not in (None, self._installed):  # others may have dropped it
            text["plan"] = self._plans[order.epoch].model_dump(mode="json", exclude_defaults=True)
        self._sync.engine.post(order.number, json.dumps(text))
        self._upcoming = order

    def _hear(self) -> Order:
        """What rank 0 has posted."""
        if self._judge is not None:
            if self._upcoming is None:  # a backward that failed has left its order unfinished
                self._post(self._order)
            order, self._upcoming = self._upcoming, None
            assert order is not None
            return order
        what = f"what comes after step {self._sync.step}"
        text = json.loads(self._sync.engine.read_post(self._order.number + 1, what))
        order = Order(**text["order"])
        if "plan" in text:
            plan = Plan.model_validate(text["plan"])
            self._keep(plan)
        return order

    def _keep(self, plan: Plan) -> None:
        self._plans[plan.epoch] = plan
        in_use = (self._installed, self._holder, plan.epoch)
        for epoch in list(self._plans)[:-KEPT_PLANS]:
            if epoch not in in_use:
                del self._plans[epoch]

    def _offers(self, profile: Any) -> list[Offer]:
        """Plans that may pay, numbered; one that is known keeps its number."""
        try:
            found = self._advisor.shortlist(profile)[:MAX_OFFERS]
        except Exception as error:  # a job must not end since there is no advice
            _log.warning("auto: no plan could be made (%s: %s).", type(error).__name__, error)
            return []
        offers = []
        for candidate in found:
            plan = self._known(candidate.plan)
            offers.append(Offer(epoch=plan.epoch, label=candidate.label, step_s=candidate.step_s))
        return offers

    def _known(self, plan: Plan) -> Plan:
        def essence(one: Plan) -> list[tuple[Any, ...]]:
            return [
                (name, d.codec, d.strategy, d.partitions, d.bulk, d.order)
                for name, d in sorted(one.gradients.items())
            ]

        for known in self._plans.values():
            if essence(known) == essence(plan):
                self._plans[known.epoch] = self._plans.pop(known.epoch)  # the last to be dropped
                return known
        self._num_plans += 1
        made = plan.model_copy(update={"epoch": self._num_plans})
        self._keep(made)
        return made

    # --- plans ------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan that is in use; None: plain all-reduce."""
        return None if self._last is None else self._plans[self._last]

    @property
    def loses_offers(self) -> bool:
        """Whether what was loaded need no longer wait for codecs that take it over."""
        return self._holder is None or not self.is_plain

    @property
    def holds_nothing(self) -> bool:
        """Whether no codec remembers anything."""
        return self.is_plain and self._holder is None and not self.flushes

    def stats(self) -> AutoStats:
        """Where it stands."""
        return AutoStats(
            mode=self.mode, epoch=self._last, reason=self.reason, num_switches=self.num_switches
        )

    def choice(self, name: str, parameter: torch.Tensor, sparse: frozenset[str]) -> Choice:
        """What happens to a gradient for now."""
        rules = self._sync.rules
        plan = None if self._installed is None else self._plans[self._installed]
        asked = rules.choice(name, parameter, sparse)
        if plan is None:
            undecided = Choice(codec=NONE, strategy="allreduce", reason=UNDECIDED)
            return asked if asked.reason else undecided
        choice = replace(rules, plan=plan).choice(name, parameter, sparse)
        return replace(choice, codec=NONE, reason=asked.reason) if asked.reason else choice

    def skipped(self, reasons: dict[str, str]) -> dict[str, str]:
        """Why gradients are left alone, with what was last decided."""
        return {
            name: f"auto: {self.reason}" if reason == UNDECIDED else reason
            for name, reason in reasons.items()
        }

    def _install(self, epoch: int | None) -> None:
        """Lays gradients out for a plan; all ranks come here in the same step."""
        if epoch == self._installed:
            return
        sync = self._sync
        if epoch is not None:
            text = self._plans[epoch].model_dump_json()
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            facts = {"step": sync.step, "epoch of the plan": epoch, "plan": digest}
            sync.engine.agree("a new plan", facts)
        self._installed = epoch
        sync.lay_out()
        optimizer = sync.settings.optimizer
        if epoch is not None and self._is_first and optimizer is not None:
            compressed = [g for g in sync.gradients.values() if g.is_compressed]
            pairs = [(g.parameter, g.choice.codec) for g in compressed]
            for sentence in optimizer_checks.warnings(optimizer, pairs):
                if sentence not in self._warnings:
                    self._warnings.add(sentence)
                    _log.warning(sentence)

    def say(self, line: str) -> None:
        """A line in the log, from rank 0."""
        if self._is_first:
            _log.info("auto, step %d: %s", self._sync.step, line)

    # --- checkpoints ------------------------------------------------------------------------------

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint that does not depend on the plan of the moment.

        A run that goes on begins plain. So what codecs remember is owed by every rank: the mean
        of it, which is all that training sees of it.
        """
        state["gradients"], state["ranks"], state["shared"] = {}, {}, {}
        for name in self.names:
            # Always there: DCP loads what a fresh run would save.
            numel = self._sync.gradients[name].parameter.numel()
            owed = state["owed"].setdefault(name, torch.zeros(numel))
            if (left := state["mean"].get(name, {}).get("residual")) is not None:
                state["owed"][name] = owed + left
        state["mean"] = {}
        return state

    @property
    def names(self) -> list[str]:
        """Gradients that plans may compress."""
        sync = self._sync
        return [
            name
            for name, gradient in sync.gradients.items()
            if not sync.rules.choice(name, gradient.parameter, sync.sparse).reason
        ]
