"""When to compress: what an automatic exchange does next, told from the times of steps so far.

    measure   plain steps, then everybody measures links, codecs and the model
    trial     blocks of steps with each plan that may pay, and plain ones as their control
    watch     the winner; now and then a few plain steps, and all the time an eye on the clock

No torch in here and no other rank: rank 0 asks its judge, and all ranks do what it says.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from statistics import median

from hipress.session.directives import Limits, Offer, Order, Reply
from hipress.session.times import are_far, is_clear, is_faster

Times = dict["int | None", list[float]]
"""Step times by the epoch of the plan; None: plain."""


Orders = Generator[Order, Reply, None]


class Policy:
    """Gives one order after the other.

    Args:
        limits: See there.
        say: Told in a line of every change.
        clock: Seconds.

    Example:
        >>> from hipress.session.directives import Limits, Reply
        >>> judge = Policy(Limits(first_steps=5))
        >>> judge.first().steps
        5
        >>> judge.next(Reply([0.1] * 5)).probes, judge.next(Reply(offers=[])).mode
        (True, 'plain')
    """

    def __init__(
        self,
        limits: Limits | None = None,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or Limits()
        self._say = say
        self._clock = clock
        self._number = -1
        self._epoch: int | None = None
        self._reason = "it measures first"
        self._labels: dict[int, str] = {}
        self._holder: int | None = None
        """The plan whose codecs remember something."""
        self._times: Times = {}
        """Of the last trial."""
        self._pairs: deque[float] = deque(maxlen=7)
        """Plain over compressed step times, of the last controls."""
        self._free_at = 0.0
        """When planning may be tried again."""
        self._num_vain = 0
        self._life = self._live()

    def first(self) -> Order:
        """What to begin with."""
        return next(self._life)

    def next(self, reply: Reply) -> Order:
        """What to do after an order."""
        return self._life.send(reply)

    # --- the phases -------------------------------------------------------------------------------

    def _live(self) -> Orders:
        limits = self.limits
        reply = yield self._order(None, limits.first_steps, mode="measure")
        known: Times = {None: list(reply.times[2:] or reply.times)}
        offers = (yield self._order(None, 0, probes=True, mode="measure")).offers
        times = yield from self._trial(offers, known, is_old=True)
        # The first steps are no measure of those to come.
        self._settle(times if offers else {}, "")
        while True:
            why, recent = yield from self._watch()
            if not why:
                continue
            began, before = self._clock(), self._epoch
            self._say(f"{why}: it measures and plans again.")
            self._reason = why
            offers = (yield self._order(None, 0, probes=True, keeps=True, mode="measure")).offers
            times = yield from self._trial(offers, {before: recent}, is_old=False)
            self._settle(times, f"{why}, and ")
            # What it took; planning in vain must stay a small share of all time.
            # Halved and not forgotten by a change of the choice: two that are alike take turns.
            self._num_vain = self._num_vain + 1 if self._epoch == before else self._num_vain // 2
            rest = (self._clock() - began) * 2.0**self._num_vain
            self._free_at = self._clock() + (
                rest / limits.replan_share / 2 if self._num_vain else 2 * rest
            )

    def _trial(
        self, offers: Sequence[Offer], known: Times, *, is_old: bool
    ) -> Generator[Order, Reply, Times]:
        """Times of plans and of plain steps.

        Args:
            offers: The most promising first.
            known: Times of what has just been running.
            is_old: Whether they are of the first steps, which are good enough to refuse a plan
                by but not to choose one.
        """
        limits, times = self.limits, dict(known)
        self._labels.update((offer.epoch, offer.label) for offer in offers)
        if not offers and self._epoch is None:
            return times
        count = self._count(min(map(median, times.values())))
        if None not in times:
            times[None] = yield from self._block(None, limits.block[0])
        for offer in offers:
            if offer.epoch in times:
                continue
            best, plain = _best(times), median(times[None])
            if best * limits.far < plain and offer.step_s > limits.tolerance * best:
                continue
            found = yield from self._block(offer.epoch, 2)
            if min(found) < limits.far * plain:
                found += yield from self._block(offer.epoch, count - 2, skip=0)
            times[offer.epoch] = found
        # In turns, in short blocks: what else a machine does comes and goes.
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

    def _settle(self, times: Times, why: str) -> None:
        """Chooses, and says so."""
        before = self._epoch
        plain = median(times[None]) if times.get(None) else math.nan
        best = _fastest(times)
        if best is None:
            text = "no plan is expected to be faster than plain all-reduce"
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
        self._say(f"{why}{same}{text}.")

    def _watch(self) -> Generator[Order, Reply, tuple[str, list[float]]]:
        """Goes on as chosen; returns why to plan again, if so, and the times of late."""
        limits, epoch = self.limits, self._epoch
        ref = median(self._times[epoch]) if self._times.get(epoch) else 0.0
        window: deque[float] = deque(maxlen=limits.window)
        # Steps in which a plan is taken up again, or left.
        skip = 0 if epoch == self._holder else (2 if epoch is None else 3)
        num_beyond = since = 0
        every = limits.control_every
        if epoch is not None and not are_far(self._times[epoch], self._times[None], limits.close):
            every = limits.close_every
        wait = every[0]
        while True:
            times = (yield self._run(ref)).times
            since += len(times)
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
                if self._clock() >= self._free_at:
                    return _changed(ref, median(recent)), recent
                if epoch is not None and since >= min(wait, every[0]):
                    since = wait  # a plan that has become slow is compared at once
            if epoch is not None and window and since >= max(wait, self._control_steps(ref)):
                since, wait = 0, min(2 * wait, every[1])
                ended = yield from self._control(list(window))
                if ended is not None:
                    return ended

    def _control(self, own: list[float]) -> Generator[Order, Reply, tuple[str, list[float]] | None]:
        """Some plain steps beside a plan; returns what `_watch` does if that is the end of it."""
        limits, epoch = self.limits, self._epoch
        assert epoch is not None
        before = median(self._times[None])
        plain = yield from self._block(None, self._num_controls(), mode="compressed")
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
        if is_changed and self._clock() >= self._free_at:
            return _changed(before, now, "a plain step"), own[-4:]
        return None

    def _drop(self, plain: list[float], own: list[float]) -> None:
        """Goes back to plain."""
        assert self._epoch is not None
        label = self._labels.get(self._epoch, "the plan")
        self._times = {None: plain, self._epoch: own}
        self._epoch = None
        self._reason = (
            f"{label} has stopped paying: {_ms(median(own))} a step against "
            f"{_ms(median(plain))} plain"
        )
        self._say(f"{self._reason}; back to plain all-reduce.")

    # --- orders -----------------------------------------------------------------------------------

    def _order(
        self,
        epoch: int | None,
        steps: int,
        *,
        mode: str,
        keeps: bool = False,
        probes: bool = False,
        waits: bool = True,
    ) -> Order:
        self._number += 1
        if epoch is not None:
            self._holder = epoch
        elif not (keeps or probes):
            self._holder = None
        return Order(
            number=self._number,
            steps=steps,
            epoch=epoch,
            keeps=keeps,
            probes=probes,
            waits=waits,
            mode=mode,
            reason=self._reason,
        )

    def _run(self, step_s: float) -> Order:
        """The chosen one goes on until the next look."""
        least, most = self.limits.look_every
        steps = min(max(math.ceil(self.limits.look_s / step_s), least), most) if step_s else least
        mode = "plain" if self._epoch is None else "compressed"
        return self._order(self._epoch, steps, mode=mode, waits=False)

    def _block(
        self, epoch: int | None, count: int, *, skip: int | None = None, mode: str = "trial"
    ) -> Generator[Order, Reply, list[float]]:
        """The times of some steps; those of what comes before are left out."""
        if count <= 0:
            return []
        if skip is None:
            # With a plan ranks agree on recipes and make buffers first; before that the residuals
            # of another one are sent.
            skip = 1 if epoch in (None, self._holder) else 2 + (self._holder is not None)
        reply = yield self._order(epoch, skip + count, keeps=epoch is None, mode=mode)
        return list(reply.times[skip:])

    def _count(self, step_s: float) -> int:
        """Steps that count in a block: more where they are short."""
        least, most = self.limits.block
        return min(max(math.ceil(self.limits.block_s / max(step_s, 1e-6)), least), most)

    def _num_controls(self) -> int:
        """Plain steps that count in a control: one where plans differ much from plain."""
        assert self._epoch is not None
        times = self._times
        return 1 if are_far(times[self._epoch], times[None], 1.3) else self.limits.block[0]

    def _control_steps(self, step_s: float) -> int:
        """Steps between controls, so that these cost little."""
        count = self._num_controls() + 1
        slower = max(median(self._times[None]) / max(step_s, 1e-6) - 1, 0.0)
        return math.ceil(count * slower / self.limits.control_share)


def _best(times: Times) -> float:
    return min((median(t) for epoch, t in times.items() if epoch is not None), default=math.inf)


def _fastest(times: Times) -> int | None:
    """The plan with the shortest steps."""
    plans = [epoch for epoch in times if epoch is not None]
    return min(plans, key=lambda epoch: median(times[epoch]), default=None)


def _changed(before: float, now: float, what: str = "a step") -> str:
    return f"{what} takes {_ms(now)} instead of {_ms(before)}"


def _ms(seconds: float) -> str:
    """For people.

    Example:
        >>> _ms(0.0042), _ms(0.123), _ms(2.5)
        ('4.2 ms', '123 ms', '2.50 s')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms"
