"""`auto`: measures, plans, tries plans, switches to the fastest, and keeps watching.

Rank 0 alone decides, from its own step times, because ranks run in lockstep. It posts a directive
after the last step of the previous one; the other ranks read it when the first bucket of the next
step is ready, which is later than a forward pass. So all ranks switch in the same step, and a step
without a switch does not touch the store. `policy` decides; this module does what all ranks do.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hipress.casync.engine.engine import Engine
from hipress.codecs.table import codec as named_codec
from hipress.errors import UsageError
from hipress.plan import Plan
from hipress.session.buckets import Bucket
from hipress.session.mode import Mode
from hipress.session.planner import Planner, together
from hipress.session.policy import (
    FIRST_REASON,
    Candidate,
    Directive,
    Limits,
    Outcome,
    Policy,
    Trial,
    Turn,
    Turns,
    first_directive,
)
from hipress.session.selection import UNDECIDED
from hipress.session.timing import StepClock

if TYPE_CHECKING:
    from hipress.session.monitor import Monitor
    from hipress.session.session import Session

_log = logging.getLogger("hipress")

MAX_CANDIDATES = 3
"""Number of plans that are tried at once."""
KEPT_PLANS = 8
ALONE = "one rank has no other rank to send to"
TURNS = Turns()
"""The models of this process try plans one after the other."""
_running: weakref.WeakSet[Auto] = weakref.WeakSet()
"""All that time steps in this process."""


@dataclass(frozen=True, kw_only=True)
class AutoStats:
    """The present decision of `auto`."""

    mode: str
    """`measure`, `trial`, `plain` or `compressed`."""
    epoch: int | None
    """Epoch of the plan in use; None means plain all-reduce."""
    reason: str
    """Reason of the last decision."""
    num_switches: int
    """How often this rank has changed between plans, or between a plan and plain all-reduce."""


class Auto:
    """What one rank does on its way from plain all-reduce to a plan and back.

    Args:
        planner: Measures, and makes plans on rank 0.
        limits: Limits of the policy.
    """

    def __init__(self, planner: Planner, limits: Limits | None = None) -> None:
        self.phase, self.reason = "measure", FIRST_REASON
        self.num_switches = 0
        self.is_idle = False
        """Whether there is nothing to decide: plain all-reduce is used."""
        self._planner = planner
        self._limits = limits or Limits()
        self._plans: dict[int, Plan] = {}
        self._state_epoch: int | None = None
        """Epoch of the plan whose codecs hold state."""
        self._last: int | None = None
        """Epoch of the plan that the last step used."""
        self._is_plain = True
        self._policy: Policy | None = None
        self._clock: StepClock | None = None
        """Only rank 0 has a policy and a clock."""
        self._stop_clock: Callable[[], None] = lambda: None
        self._turn: Turn | None = None
        self._is_exchanging = False
        self._num_plans = 0
        self._directive = first_directive(0)
        self._left = 0
        """Steps of the present directive that are left."""
        self._upcoming: Directive | None = None
        self._posted_plan: int | None = None
        """Epoch of the plan that every rank has."""
        self._problem = ""
        """Why no plan could be made."""
        self._log_step = 0
        self._monitor: Monitor | None = None
        self._is_scheduled = False
        """Whether steps go on under the next forward pass. They are timed from end to end, with
        the steps of other models: an exchange that ends early leaves them out no more than another.
        """

    def start(self, session: Session, checked: str = "") -> None:
        """Begins; gradients are registered.

        Args:
            session: The session.
            checked: Which optimizer was checked.
        """
        self._monitor = session.monitor
        self._is_scheduled = session.schedule is not None
        engine = session.engine
        steps = max(self._limits.first_steps, session.settings.warmup_steps)
        if any(not named_codec(name).keeps_sizes for name in self._planner.codecs):
            # Until then gradients are exchanged, whose times would say nothing about the momentum.
            steps = max(steps, session.adapter.momentum_warmup())
        self._limits = replace(self._limits, first_steps=steps)
        self._directive = first_directive(steps)
        self._left = steps
        if engine.transport.num_ranks == 1:
            self._stay_plain(ALONE)
            self._say(f"{ALONE}: nothing is compressed.")
            return
        told = engine.agree("the start of auto", {}, share=self._planner.begin(session))
        if problem := next(filter(None, told), ""):
            self._planner.end()
            self._stay_plain(problem)
            if engine.transport.rank == 0:
                _log.warning("auto: %s: nothing is compressed.", problem)
            return
        _running.add(self)
        if engine.transport.rank == 0:
            self._clock = StepClock(engine.device)
            if not self._is_scheduled:
                self._stop_clock = session.adapter.observe(self._clock)
            alive = weakref.ref(engine)  # a model that is dropped does not keep its turn
            self._turn = Turn(TURNS, lambda: (found := alive()) is None or found.is_closed)
            self._policy = Policy(
                self._limits,
                self._say,
                turn=self._turn,
                drops_state=session.schedule is not None,
            )
            self._policy.first()
            self._say(
                f"the first {steps} steps run uncompressed so that they can be timed; then "
                f"{self._planner.about} are tried"
                f"{f'; {checked}' if checked else ''}."
            )

    def stop(self) -> None:
        """Ends all measuring: the session is being detached."""
        self._planner.end()
        self._stop_clock()
        _running.discard(self)
        if self._turn is not None:
            self._turn.end()

    def _stay_plain(self, reason: str) -> None:
        self.is_idle = True
        self.phase, self.reason = "plain", reason

    # --- a step -----------------------------------------------------------------------------------

    def begin(self, session: Session) -> tuple[Mode, Plan | None]:
        """Returns the mode and the plan of the step that begins; all ranks switch here."""
        self._log_step = session.step
        if self.is_idle:
            return Mode.PLAIN, None
        self._is_exchanging = True
        if self._left == 0:
            self._advance(session)
        self._left -= 1
        directive, holder = self._directive, self._state_epoch
        wanted = directive.epoch
        if wanted is None:
            flushes = holder is not None and not directive.keeps_state
        else:
            flushes = holder not in (None, wanted)
        self._is_plain = flushes or wanted is None
        if flushes:
            self._state_epoch = None
        elif not self._is_plain:
            self._state_epoch = wanted
        now = None if self._is_plain else wanted
        self.num_switches += now != self._last
        self._last = now
        if flushes:
            return Mode.FLUSHING, None
        if now is None:
            return Mode.PLAIN, None
        return Mode.TRIAL if self.phase == "trial" else Mode.COMPRESSED, self._plans[now]

    def keep(self, session: Session, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Shows the planner the gradients of a plain step after which it may measure."""
        if self._left == 0 and self._is_plain and not self.is_idle:
            self._planner.keep(session, bucket, buffer)

    def end(self, engine: Engine) -> None:
        """Ends a step that went well."""
        self._log_step += 1
        self._is_exchanging = False
        if self._policy is None or self._clock is None:
            return
        self._clock.end()
        if self._left == 0:
            times = self._clock.read(wait=self._directive.waits)
            self._post(engine, self._policy.next(Outcome(times)))

    def resume(self) -> None:
        """Notes that the step of another model of this process has ended.

        What this model has done before, such as a forward pass whose output the other was trained
        with, is then no part of its step; unless its own exchange is under way.
        """
        if self._is_exchanging:
            return
        self._planner.resume()
        if self._clock is not None and not self._is_scheduled:
            self._clock.resume()

    def _advance(self, session: Session) -> None:
        """Takes the next directive, measuring first as long as it asks for that."""
        while True:
            self._take(self._receive(session))
            if not self._directive.measures:
                return
            session.monitor.note_measuring(session)
            profile = together(session.engine, lambda: self._planner.measure(session))
            if self._policy is not None:
                outcome = Outcome(candidates=self._candidates(profile), problem=self._problem)
                self._post(session.engine, self._policy.next(outcome))

    def _take(self, directive: Directive) -> None:
        self._directive, self._left = directive, directive.steps
        self.phase, self.reason = directive.phase, directive.reason
        if directive.waits and self._clock is not None:
            self._clock.restart()

    def _post(self, engine: Engine, directive: Directive) -> None:
        """Tells all ranks what is next."""
        directive = replace(directive, number=self._directive.number + 1)
        text: dict[str, Any] = {"directive": asdict(directive)}
        if directive.epoch not in (None, self._posted_plan):  # others may have dropped it
            plan = self._plans[directive.epoch]
            text["plan"] = plan.model_dump(mode="json", exclude_defaults=True)
            self._posted_plan = directive.epoch
        engine.post(directive.number, json.dumps(text))
        self._upcoming = directive

    def _receive(self, session: Session) -> Directive:
        """Returns the directive that rank 0 has posted."""
        if self._policy is not None:
            if self._upcoming is None:  # a backward pass failed and left its directive unfinished
                self._post(session.engine, self._directive)
            directive, self._upcoming = self._upcoming, None
            assert directive is not None
            return directive
        what = f"what comes after step {session.step}"
        text = json.loads(session.engine.read_post(self._directive.number + 1, what))
        if "plan" in text:
            self._keep(Plan.model_validate(text["plan"]))
        return Directive(**text["directive"])

    def _keep(self, plan: Plan) -> None:
        self._plans[plan.epoch] = plan
        in_use = (self._posted_plan, self._last, self._state_epoch, plan.epoch)
        for epoch in list(self._plans)[:-KEPT_PLANS]:
            if epoch not in in_use:
                del self._plans[epoch]

    def _candidates(self, profile: Any) -> list[Candidate]:
        """Returns numbered plans that may pay; a plan that is known keeps its number."""
        self._problem = ""
        try:
            found = self._planner.shortlist(profile)[:MAX_CANDIDATES]
        except Exception as error:  # a job must not end because there is no plan
            kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
            self._problem = f"no plan could be made ({kind}{error})"
            _log.warning("auto: %s.", self._problem)
            return []
        candidates = []
        for one in found:
            plan = self._numbered(one.plan)
            candidates.append(Candidate(epoch=plan.epoch, label=one.label, step_s=one.step_s))
        return candidates

    def _numbered(self, plan: Plan) -> Plan:
        def essence(one: Plan) -> tuple[Any, ...]:
            return (one.schedule, one.slice_bytes, one.credit_bytes) + tuple(
                (name, d.codec, d.strategy, d.partitions, d.bulk, d.order)
                for name, d in sorted(one.gradients.items())
            )

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
    def is_measuring(self) -> bool:
        """Whether steps are being timed before there is a plan, the same on all ranks."""
        return self.phase == "measure" and not self.is_idle

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None means plain all-reduce."""
        return None if self._last is None else self._plans[self._last]

    @property
    def holds_state(self) -> bool:
        """Whether codecs hold state that has not been sent."""
        return self._state_epoch is not None

    @property
    def has_taken_state(self) -> bool:
        """Whether no codec still has to take over loaded state."""
        return self._state_epoch is None or not self._is_plain

    def stats(self) -> AutoStats:
        """Returns the present decision."""
        return AutoStats(
            mode=self.phase, epoch=self._last, reason=self.reason, num_switches=self.num_switches
        )

    def trials(self) -> list[Trial]:
        """Returns the step times behind the present decision; only rank 0 has them."""
        return [] if self._policy is None else self._policy.trials()

    def skipped(self, reasons: dict[str, str]) -> dict[str, str]:
        """Completes the reasons of uncompressed gradients with the last decision."""
        return {
            name: f"auto: {self.reason}" if reason == UNDECIDED else reason
            for name, reason in reasons.items()
        }

    def _say(self, line: str) -> None:
        """Logs a line; only rank 0 has a policy that calls this after the start."""
        _log.info("auto, step %d: %s", self._log_step, line)
        if self._monitor is not None:
            self._monitor.note(self._log_step, "plan", line)


def note_step_end(own: Auto | None) -> None:
    """Tells all other models of this process that a step of one has ended."""
    for one in tuple(_running):
        if one is not own:
            one.resume()
