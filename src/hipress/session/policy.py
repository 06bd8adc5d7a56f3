"""The policy of `auto`: what all ranks do next, decided on rank 0 from step times alone.

    measure   uncompressed steps, then all ranks measure links, codecs and the model
    trial     blocks of steps with each candidate plan, and uncompressed steps as their control
    watch     the winner; from time to time a few uncompressed steps, and step times all the time

This module knows neither torch nor other ranks. Rank 0 asks its policy for a `Directive`, and all
ranks carry it out (`auto.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

Times = dict["int | None", list[float]]
"""Step times by the epoch of the plan; None stands for plain all-reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the phases last, and how much step times must differ to matter."""

    first_steps: int = 5
    """Uncompressed steps before anything is measured; DDP builds its buckets in the first two."""
    gain: float = 0.03
    """A plan is chosen only if it is faster than plain all-reduce by this share."""
    drift_up: float = 1.3
    drift_down: float = 0.7
    """Step times outside these multiples of the reference count as a change."""
    window: int = 6
    """Number of steps whose median is watched."""
    in_a_row: int = 3
    """Number of consecutive medians that must be outside before a change is believed."""
    look_every: tuple[int, int] = (4, 16)
    """Least and most steps between two looks at the times."""
    look_s: float = 0.12
    """Least seconds between two looks; each costs the other ranks a store read of 0.3 ms."""
    control_every: tuple[int, int] = (200, 2000)
    """Steps between two uncompressed controls of a plan: at first, and in the end."""
    close: float = 1.15
    close_every: tuple[int, int] = (50, 400)
    """The same for a plan that is faster by less than `close`, where a control costs little."""
    control_share: float = 0.01
    """Share of all time that uncompressed controls may cost."""
    block: tuple[int, int] = (3, 8)
    """Least and most counted steps of a trial block."""
    block_s: float = 0.4
    """Approximate seconds of a trial block."""
    far: float = 1.5
    """Median times that differ by this factor need no second block."""
    rounds: int = 4
    """Most blocks of each kind when they do not."""
    replan_share: float = 0.02
    """Share of all time that planning without a new result may cost."""
    tolerance: float = 1.15
    """A predicted time worse than the best measured one by this factor is not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What all ranks do for the next steps."""

    number: int
    steps: int
    epoch: int | None
    """Epoch of the plan to use; None means plain all-reduce."""
    keeps_state: bool = False
    """Whether codec state is kept for later; otherwise the first plain step sends it."""
    measures: bool = False
    """Whether all ranks measure now. Such a directive has no steps; another one follows."""
    waits: bool = True
    """Whether the times of all its steps are needed before the next directive."""
    phase: str = "measure"
    """`measure`, `trial`, `plain` or `compressed`."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that may be faster than plain all-reduce."""

    epoch: int
    label: str
    step_s: float
    """Predicted seconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Measured steps with one plan, or with plain all-reduce."""

    label: str
    step_s: float
    """Median seconds of a step."""
    num_steps: int
    predicted_s: float | None
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one directive."""

    times: Sequence[float] = ()
    candidates: Sequence[Candidate] = ()
    problem: str = ""
    """Why no plan could be made; planning again would not help."""


class Turns:
    """Lets the models of one process try plans one after the other.

    Models that one backward pass trains, such as the two of a GAN, have steps that overlap, so a
    trial of one would show in the step times of the other. Nobody waits in `take`: a policy that
    has no turn goes on with what it uses.
    """

    PATIENCE = 32
    """A holder that does nothing while others ask this often is taken for gone."""

    def __init__(self) -> None:
        self.holder: Turn | None = None
        self.num_taken = 0
        self.num_refused = 0
        """How often others have asked since the holder last did something."""


class Turn:
    """The turn of one policy.

    Args:
        turns: Shared with the other policies of the process.
        is_over: Returns whether the model of this policy is not trained any more.
    """

    def __init__(
        self, turns: Turns | None = None, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self._turns = turns or Turns()
        self._is_over = is_over

    def take(self) -> bool:
        """Takes the turn unless another policy has it; returns whether this one has it now."""
        turns = self._turns
        if turns.holder is self:
            return True
        if self._is_taken() and turns.num_refused < Turns.PATIENCE:
            turns.num_refused += 1
            return False
        turns.holder = self
        turns.num_taken += 1
        turns.num_refused = 0
        return True

    def end(self) -> None:
        """Gives the turn back, if this policy has it."""
        if self._turns.holder is self:
            self._turns.holder = None

    def use(self) -> None:
        """Notes that this policy is still there."""
        if self._turns.holder is self:
            self._turns.num_refused = 0

    def others(self) -> tuple[int, bool]:
        """Returns how many turns there were so far, and whether another policy has one now."""
        return self._turns.num_taken, self._is_taken()

    def _is_taken(self) -> bool:
        holder = self._turns.holder
        return holder is not None and holder is not self and not holder._is_over()


Directives = Generator[Directive, Outcome, None]

FIRST_REASON = "it measures first"


def first_directive(steps: int) -> Directive:
    """Returns the directive that every rank starts with, without communication."""
    return Directive(number=0, steps=steps, epoch=None, reason=FIRST_REASON)


class Policy:
    """Issues one directive after the other.

    Args:
        limits: Durations and thresholds.
        say: Called with one sentence for every change of the choice.
        clock: Returns seconds.
        turn: Of the policies of this process, only the one that has its turn tries plans.
        drops_state: Whether uncompressed steps are laid out anew, for which residuals are sent
            first; else they wait while uncompressed steps are timed.

    Example:
        >>> from hipress.session.policy import Limits, Outcome, Policy
        >>> policy = Policy(Limits(first_steps=5))
        >>> policy.first().steps
        5
        >>> policy.next(Outcome([0.1] * 5)).measures, policy.next(Outcome(candidates=[])).phase
        (True, 'plain')
    """

    def __init__(
        self,
        limits: Limits | None = None,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        turn: Turn | None = None,
        drops_state: bool = False,
    ) -> None:
        self._turn = turn or Turn()
        self._drops_state = drops_state
        self.limits = limits or Limits()
        self._say = say
        self._clock = clock
        self._number = -1
        self._epoch: int | None = None
        self._reason = FIRST_REASON
        self._labels: dict[int, str] = {}
        self._predicted_s: dict[int, float] = {}
        self._state_epoch: int | None = None
        """Epoch of the plan whose codecs hold state."""
        self._times: Times = {}
        """Step times of the last trial."""
        self._pairs: deque[float] = deque(maxlen=7)
        """Ratios of uncompressed to compressed step times in the last controls."""
        self._replan_after = 0.0
        """Time from which planning may be tried again."""
        self._num_unchanged = 0
        self._problem = ""
        """Why no plan could be made when it was last tried."""
        self._directives = self._phases()

    def first(self) -> Directive:
        """Returns the directive to start with."""
        return next(self._directives)

    def next(self, outcome: Outcome) -> Directive:
        """Returns the directive that follows, given the outcome of the last one."""
        return self._directives.send(outcome)

    def trials(self) -> list[Trial]:
        """Returns the step times that the last choice was made from, the shortest first."""
        found = [
            Trial(
                label="plain all-reduce" if epoch is None else self._labels.get(epoch, "a plan"),
                step_s=median(times),
                num_steps=len(times),
                predicted_s=None if epoch is None else self._predicted_s.get(epoch),
                is_chosen=epoch == self._epoch,
            )
            for epoch, times in self._times.items()
            if times
        ]
        return sorted(found, key=lambda trial: trial.step_s)

    # --- the phases -------------------------------------------------------------------------------

    def _phases(self) -> Directives:
        limits = self.limits
        outcome = yield self._directive(None, limits.first_steps, phase="measure")
        has_waited = False
        while not self._turn.take():
            has_waited = True
            yield self._directive(None, limits.look_every[0], phase="measure", waits=False)
        if has_waited:
            outcome = yield self._directive(None, limits.block[0] + 2, phase="measure")
        known: Times = {None: list(outcome.times[2:] or outcome.times)}
        candidates = yield from self._measure(keeps_state=False)
        times = yield from self._trial(candidates, known, is_old=True)
        # Without candidates the first steps are no reference for those to come.
        self._choose(times if candidates else {}, "")
        while True:
            self._turn.end()
            why, recent = yield from self._watch()
            if not why:
                continue
            began, before = self._clock(), self._epoch
            self._say(f"{why}: it measures and plans again.")
            self._reason = why
            candidates = yield from self._measure(keeps_state=True)
            times = yield from self._trial(candidates, {before: recent}, is_old=False)
            self._choose(times, f"{why}, and ")
            # Planning that changes nothing must stay a small share of all time, so each such
            # attempt doubles the pause. A change halves the count: two equal plans may alternate.
            self._num_unchanged = (
                self._num_unchanged + 1 if self._epoch == before else self._num_unchanged // 2
            )
            rest = (self._clock() - began) * 2.0**self._num_unchanged
            self._replan_after = self._clock() + (
                rest / limits.replan_share / 2 if self._num_unchanged else 2 * rest
            )

    def _measure(self, *, keeps_state: bool) -> Generator[Directive, Outcome, Sequence[Candidate]]:
        """Lets all ranks measure; returns plans that may pay."""
        outcome = yield self._directive(
            None, 0, measures=True, keeps_state=keeps_state, phase="measure"
        )
        self._problem = outcome.problem
        return outcome.candidates

    def _trial(
        self, candidates: Sequence[Candidate], known: Times, *, is_old: bool
    ) -> Generator[Directive, Outcome, Times]:
        """Returns step times of the candidates and of uncompressed steps.

        Args:
            candidates: The most promising first.
            known: Step times of what has just been running.
            is_old: Whether `known` comes from the first steps, which may reject a plan but not
                choose one.
        """
        limits, times = self.limits, dict(known)
        self._labels.update((candidate.epoch, candidate.label) for candidate in candidates)
        self._predicted_s.update((candidate.epoch, candidate.step_s) for candidate in candidates)
        if not candidates and self._epoch is None:
            return times
        count = self._count(min(map(median, times.values())))
        if None not in times:
            times[None] = yield from self._block(None, limits.block[0])
        for candidate in candidates:
            if candidate.epoch in times:
                continue
            best, plain = _best(times), median(times[None])
            if best * limits.far < plain and candidate.step_s > limits.tolerance * best:
                continue
            found = yield from self._block(candidate.epoch, 2)
            if min(found) < limits.far * plain:
                found += yield from self._block(candidate.epoch, count - 2, skip=0)
            times[candidate.epoch] = found
        # Short alternating blocks, because other load on the machine comes and goes.
        count = max(limits.block[0], count // 2)
        for _ in range(limits.rounds):
            best_epoch = _fastest(times)
            if best_epoch is None:
                break
            far = are_far(times[best_epoch], times[None], limits.far)
            if far and not (is_old and median(times[best_epoch]) < median(times[None])):
                break
            plain_times = yield from self._block(None, count)
            times[None] = plain_times if is_old else times[None] + plain_times
            is_old = False
            if is_clear(times[best_epoch], times[None], limits.gain):
                break
            times[best_epoch] = times[best_epoch] + (yield from self._block(best_epoch, count))
            if is_clear(times[best_epoch], times[None], limits.gain):
                break
        return times

    def _choose(self, times: Times, why: str) -> None:
        """Chooses the fastest plan or plain all-reduce, and logs the choice."""
        before = self._epoch
        plain = median(times[None]) if times.get(None) else math.nan
        best = _fastest(times)
        if best is None:
            text = self._problem or "no plan is expected to be faster than plain all-reduce"
            self._epoch = None
        elif is_faster(times[best], times[None], self.limits.gain):
            self._epoch = best
            text = f"{self._labels.get(best, 'a plan')}: {_ms(median(times[best]))} a step"
            text += f" against {_ms(plain)} plain"
        else:
            self._epoch = None
            text = f"plain all-reduce: {_ms(plain)} a step against {_ms(median(times[best]))}"
            text += f" with {self._labels.get(best, 'a plan')}"
        self._times, self._reason = times, text
        self._pairs.clear()
        same = "still " if why and self._epoch == before else ""
        if not (self._problem and best is None):  # who made no plan has said so
            self._say(f"{why}{same}{text}.")

    def _watch(self) -> Generator[Directive, Outcome, tuple[str, list[float]]]:
        """Runs the choice; returns the reason to plan again (empty if none) and recent times."""
        limits, epoch = self.limits, self._epoch
        ref = median(self._times[epoch]) if self._times.get(epoch) else 0.0
        window: deque[float] = deque(maxlen=limits.window)
        # Steps in which ranks switch to a plan or away from one do not count.
        skip = 0 if epoch == self._state_epoch else (2 if epoch is None else 3)
        num_beyond = since = 0
        every = limits.control_every
        if epoch is not None and not are_far(self._times[epoch], self._times[None], limits.close):
            every = limits.close_every
        wait = every[0]
        while True:
            others = self._turn.others()
            times = (yield self._run(ref)).times
            since += len(times)
            if self._turn.others() != others or others[1]:
                # Another model of this process tried plans, which these times may show.
                window.clear()
                num_beyond, skip = 0, max(0, skip - len(times))
                continue
            for seconds in times[skip:]:
                window.append(seconds)
                if len(window) < limits.window:
                    continue
                now = median(window)
                ref = ref or now
                beyond = not limits.drift_down * ref <= now <= limits.drift_up * ref
                num_beyond = num_beyond + 1 if beyond else 0
            skip = max(0, skip - len(times))
            if num_beyond >= limits.in_a_row:
                recent = list(window)[-4:]
                if self._may_plan():
                    return _changed(ref, median(recent)), recent
                if epoch is not None and since >= min(wait, every[0]):
                    since = wait  # compare a plan that became slow at once
            is_due = epoch is not None and since >= max(wait, self._control_steps(ref))
            if is_due and window and self._turn.take():
                since, wait = 0, min(2 * wait, every[1])
                ended = yield from self._control(list(window))
                if ended is not None:
                    return ended
                self._turn.end()

    def _control(
        self, own: list[float]
    ) -> Generator[Directive, Outcome, tuple[str, list[float]] | None]:
        """Runs uncompressed steps beside the plan; returns a result if `_watch` must end."""
        limits, epoch = self.limits, self._epoch
        assert epoch is not None
        before = median(self._times[None])
        plain = yield from self._block(None, self._num_controls(), phase="compressed")
        self._pairs.append(median(plain) / median(own))
        if len(self._pairs) > 2 and median(self._pairs) < 1:
            self._drop(plain, own)
            return "", []
        if median(plain) < median(own):
            own = own[-2:] + (yield from self._block(epoch, limits.block[0], skip=1))
            count = self._count(median(own))
            plain += yield from self._block(None, count)
            own += yield from self._block(epoch, count, skip=1)
            if median(plain) < median(own):
                self._drop(plain, own)
                return "", []
        now = median(plain)
        self._times[None] = plain if len(plain) > 2 else [before, *plain]
        is_changed = not limits.drift_down * before <= now <= limits.drift_up * before
        if is_changed and self._may_plan():
            return _changed(before, now, "a plain step"), own[-4:]
        return None

    def _may_plan(self) -> bool:
        """Returns whether planning again may help now; takes the turn for it if so."""
        return not self._problem and self._clock() >= self._replan_after and self._turn.take()

    def _drop(self, plain: list[float], own: list[float]) -> None:
        """Returns to plain all-reduce."""
        assert self._epoch is not None
        label = self._labels.get(self._epoch, "the plan")
        self._times = {None: plain, self._epoch: own}
        self._epoch = None
        self._reason = (
            f"{label} has stopped paying: {_ms(median(own))} a step against "
            f"{_ms(median(plain))} plain"
        )
        self._say(f"{self._reason}; back to plain all-reduce.")

    # --- directives ------------------------------------------------------------------------------

    def _directive(
        self,
        epoch: int | None,
        steps: int,
        *,
        phase: str,
        keeps_state: bool = False,
        measures: bool = False,
        waits: bool = True,
    ) -> Directive:
        self._number += 1
        self._turn.use()
        if epoch is not None:
            self._state_epoch = epoch
        elif not (keeps_state or measures):
            self._state_epoch = None
        return Directive(
            number=self._number,
            steps=steps,
            epoch=epoch,
            keeps_state=keeps_state,
            measures=measures,
            waits=waits,
            phase=phase,
            reason=self._reason,
        )

    def _run(self, step_s: float) -> Directive:
        """Lets the choice run until the next look at the times."""
        least, most = self.limits.look_every
        steps = min(max(math.ceil(self.limits.look_s / step_s), least), most) if step_s else least
        phase = "plain" if self._epoch is None else "compressed"
        return self._directive(self._epoch, steps, phase=phase, waits=False)

    def _block(
        self, epoch: int | None, count: int, *, skip: int | None = None, phase: str = "trial"
    ) -> Generator[Directive, Outcome, list[float]]:
        """Returns the times of `count` steps, without the steps in which ranks switch."""
        if count <= 0:
            return []
        if self._drops_state and epoch != self._state_epoch:
            skip = 3  # residuals are sent, all is laid out anew, and the pipeline fills
        elif skip is None:
            # The first step of a plan agrees on recipes and allocates buffers; before it, one step
            # sends the residuals of the previous plan.
            skip = 1 if epoch in (None, self._state_epoch) else 2 + (self._state_epoch is not None)
        keeps_state = epoch is None and not self._drops_state
        outcome = yield self._directive(epoch, skip + count, keeps_state=keeps_state, phase=phase)
        return list(outcome.times[skip:])

    def _count(self, step_s: float) -> int:
        """Returns the number of counted steps in a block: more when steps are short."""
        least, most = self.limits.block
        return min(max(math.ceil(self.limits.block_s / max(step_s, 1e-6)), least), most)

    def _num_controls(self) -> int:
        """Returns the counted steps of a control: one if the plan is much faster than plain."""
        assert self._epoch is not None
        times = self._times
        return 1 if are_far(times[self._epoch], times[None], 1.3) else self.limits.block[0]

    def _control_steps(self, step_s: float) -> int:
        """Returns the steps between controls that keep their cost within `control_share`."""
        count = self._num_controls() + 1
        slower = max(median(self._times[None]) / max(step_s, 1e-6) - 1, 0.0)
        return math.ceil(count * slower / self.limits.control_share)


def are_far(a: Iterable[float], b: Iterable[float], far: float) -> bool:
    """Returns whether medians differ by more than a factor."""
    first, second = median(a), median(b)
    return max(first, second) > far * min(first, second)


def is_clear(own: Sequence[float], plain: Sequence[float], gain: float) -> bool:
    """Returns whether more steps would hardly move the plan across the required gain."""
    beside = abs(median(own) - (1 - gain) * median(plain))
    return beside > 2 * math.hypot(_standard_error(own), _standard_error(plain))


def is_faster(own: Sequence[float], plain: Sequence[float], gain: float) -> bool:
    """Returns whether a plan is faster by the required gain, and by more than noise."""
    before = median(plain)
    return before - median(own) >= max(
        gain * before, math.hypot(_standard_error(own), _standard_error(plain))
    )


def _standard_error(times: Sequence[float]) -> float:
    """Returns the standard error of a median, from the median absolute deviation."""
    middle = median(times)
    spread = 1.4826 * median(abs(t - middle) for t in times)
    return 1.2533 * spread / math.sqrt(len(times))


def _best(times: Times) -> float:
    return min((median(t) for epoch, t in times.items() if epoch is not None), default=math.inf)


def _fastest(times: Times) -> int | None:
    """Returns the plan with the shortest median step."""
    plans = [epoch for epoch in times if epoch is not None]
    return min(plans, key=lambda epoch: median(times[epoch]), default=None)


def _changed(before: float, now: float, what: str = "a step") -> str:
    return f"{what} takes {_ms(now)} instead of {_ms(before)}"


def _ms(seconds: float) -> str:
    """Formats a duration.

    Example:
        >>> _ms(0.0042), _ms(0.123), _ms(2.5)
        ('4.2 ms', '123 ms', '2.50 s')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms"
