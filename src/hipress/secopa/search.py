"""Searches for the plan with the shortest step; each try is judged by simulating the whole step.

    uniform      all gradients get one codec and one strategy
    sizes        the same, without gradients below some size
    buckets      the same, without the first buckets, which backward hides, or without the last
    one by one   gradients of one size and bucket get another choice together: sent as they are,
                 another codec, another strategy, another number of partitions
    orders       in every bucket, gradients that are sent as they are start first
    spares       what gains nothing is sent as it is: no error for no time

Each stage keeps what it finds better. The search ends when its patience does, with the best so far.

All of that is for DDP. For a loop without it, `schedule_tries` then tries the schedules with what
was found, and with nothing compressed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from hipress.casync.graphs.schedules import SCHEDULES, Schedule
from hipress.casync.graphs.strategies import candidates
from hipress.plan import Decision, Plan, ScheduleName, exempt_reason, plain_strategy
from hipress.profile import GradientProfile, Network, Profile
from hipress.secopa.budget import Budget
from hipress.secopa.simulate import Simulator

STRATEGIES = candidates()
"""Strategies that are tried unless the user names others."""

WORTH = 0.002
"""The share of a step that a finer choice must save; less cannot be measured."""

MOST_TRIES = 8
"""The most sizes, and the most numbers of buckets, that are tried."""

SLICES = (2**19, 2**18, 2**22)
"""Bytes of the slices that are tried, the usual size first."""

CREDITS = (4, 1, 16)
"""Credits that are tried, in slices, the usual one first."""

LEAST_SLICE_TIMES = 4
"""A slice is on the link for at least so many times what a message costs without its bytes, which
then is at most a fifth of an exchange that sends one slice after the other."""

Decisions = dict[str, Decision]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan and its predicted step time."""

    label: str
    plan: Plan
    step_s: float


@dataclass(frozen=True, kw_only=True)
class ScheduleTry:
    """A schedule and its predicted step time."""

    schedule: Schedule
    is_compressed: bool
    """Whether gradients are compressed as in the plan; if not, all are sent as they are."""
    step_s: float

    def applied_to(self, plan: Plan) -> Plan:
        """Returns a plan with this schedule."""
        update = {
            "schedule": self.schedule.name,
            "slice_bytes": self.schedule.slice_bytes,
            "credit_bytes": self.schedule.credit_bytes,
        }
        return plan.model_copy(update=update)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    plan: Plan
    """The best plan; it may leave all gradients as they are."""
    step_s: float
    plain_step_s: float
    """The step time with DDP without HiPress."""
    everything: dict[str, float]
    """Step times with one codec and strategy for all gradients, by label."""
    candidates: tuple[Candidate, ...] = ()
    """Plans that compress something, the best first."""
    schedules: tuple[ScheduleTry, ...] = ()
    """Schedules for a loop without DDP, the best first."""


def search(
    profile: Profile,
    *,
    num_ranks: int | None = None,
    strategies: Sequence[str] = STRATEGIES,
    codecs: Sequence[str] | None = None,
    budget: Budget | None = None,
    reasons: Mapping[str, str] | None = None,
    schedules: Sequence[ScheduleName] = SCHEDULES,
    patience_s: float = 10.0,
    epoch: int = 0,
) -> SearchResult:
    """Searches for the best plan for a profile.

    Args:
        profile: A profile with a model.
        num_ranks: N; that of the profile if None.
        strategies: The strategies that may be used.
        codecs: The codecs that may be used, whatever the budget says about them; with `none`
            alone, or if empty, only a schedule is searched.
        budget: What may be done to gradients; codecs of the convergence table if None.
        reasons: By gradient, why it is not compressed; small gradients and those of one dimension
            are not if None.
        schedules: The schedules to try with what was found; none if DDP is certain to be used.
        patience_s: Seconds after which to stop searching, again to stop explaining, and again to
            stop trying schedules; a few tries are always made.
        epoch: The epoch of the plan.

    Raises:
        UsageError: The budget does not fit the codecs, or is a bound on errors and none were
            measured on gradients.
    """
    simulator = Simulator(profile, num_ranks)
    if reasons is None:
        reasons = {g.name: exempt_reason(g.dims, g.numel) for g in simulator.model.gradients}
    found = _Search(simulator, strategies, budget or Budget(), codecs, reasons, patience_s).run(
        epoch
    )
    tries = schedule_tries(simulator, found.plan, schedules, patience_s)
    is_compressed = found.plan.num_compressed > 0
    best = next((one for one in tries if one.is_compressed == is_compressed), None)
    if best is None:
        return found
    return replace(found, plan=best.applied_to(found.plan), schedules=tries)


def schedule_tries(
    simulator: Simulator, plan: Plan, names: Sequence[ScheduleName], patience_s: float
) -> tuple[ScheduleTry, ...]:
    """Returns the predicted steps of schedules with several sizes, the shortest first.

    Args:
        simulator: Simulates the cluster.
        plan: Its decisions are tried, and nothing compressed.
        names: The schedules to try.
        patience_s: Seconds after which only the usual sizes are tried.
    """
    if simulator.num_ranks == 1:
        return ()
    deadline_s = time.perf_counter() + patience_s
    sides = [True, False] if plan.num_compressed else [False]
    least_bytes = least_slice_bytes(simulator.profile.network)
    sizes = list(dict.fromkeys(max(size, least_bytes) for size in SLICES))
    found = []
    # Steps with slices of one size are simulated one after the other: the simulator keeps them.
    for slice_bytes, is_compressed, credit, name in product(sizes, sides, CREDITS, names):
        is_usual = slice_bytes == sizes[0] and credit == CREDITS[0]
        if not is_usual and time.perf_counter() > deadline_s:
            continue
        schedule = Schedule(name=name, slice_bytes=slice_bytes, credit_bytes=credit * slice_bytes)
        step_s = simulator.step_s(plan if is_compressed else {}, schedule)
        found.append(ScheduleTry(schedule=schedule, is_compressed=is_compressed, step_s=step_s))
    return tuple(sorted(found, key=lambda one: one.step_s))


def usual_schedule(name: ScheduleName, network: Network) -> Schedule:
    """Returns a schedule with the sizes that are tried first."""
    slice_bytes = max(SLICES[0], least_slice_bytes(network))
    return Schedule(name=name, slice_bytes=slice_bytes, credit_bytes=CREDITS[0] * slice_bytes)


def least_slice_bytes(network: Network) -> int:
    """Returns the size below which slices cost too much, by `LEAST_SLICE_TIMES`."""
    message_s = network.message_work_s + network.latency_s
    return math.ceil(LEAST_SLICE_TIMES * message_s * network.bytes_per_s)


def shortlist(
    profile: Profile, *, most: int = 3, slack: float = 0.1, **options: object
) -> list[Candidate]:
    """Returns the plans worth a trial: those predicted to be faster than plain all-reduce, or
    slower by less than `slack`, which is how far a prediction may be off.

    Args:
        profile: A profile with a model.
        most: The most plans to return.
        slack: A share of the plain step.
        options: Options of `search`.
    """
    found = search(profile, schedules=(), **options)  # type: ignore[arg-type]
    limit_s = found.plain_step_s * (1 + slack)
    return [one for one in found.candidates if one.step_s < limit_s][:most]


def schedule_shortlist(
    profile: Profile, *, slack: float = 0.1, **options: object
) -> list[Candidate]:
    """Returns what is worth a trial in a loop without DDP, the best first: each schedule in its
    best sizes, with nothing compressed and with the best plan.

    Args:
        profile: A profile with a model.
        slack: As for `shortlist`.
        options: Options of `search`.
    """
    found = search(profile, **options)  # type: ignore[arg-type]
    limit_s = found.plain_step_s * (1 + slack)
    nothing = {
        name: Decision(strategy=plain_strategy(made.numel), numel=made.numel)
        for name, made in found.plan.gradients.items()
    }
    uncompressed = found.plan.model_copy(update={"gradients": nothing})
    best = {(one.schedule.name, one.is_compressed): one for one in reversed(found.schedules)}
    candidates = []
    for one in sorted(best.values(), key=lambda one: one.step_s):
        plan = found.plan if one.is_compressed else uncompressed
        made = ", ".join(sorted({d.codec for d in plan.gradients.values() if d.is_compressed}))
        candidates.append(
            Candidate(
                label=f"{one.schedule.name} with {made or 'nothing compressed'}",
                plan=one.applied_to(plan),
                step_s=one.step_s,
            )
        )
    return [one for one in candidates if one.step_s < limit_s]


class _Search:
    def __init__(
        self,
        simulator: Simulator,
        strategies: Sequence[str],
        budget: Budget,
        asked: Sequence[str] | None,
        reasons: Mapping[str, str],
        patience_s: float,
    ) -> None:
        self.deadline_s = time.perf_counter() + patience_s
        self.simulator = simulator
        self.gradients = simulator.model.gradients
        self.strategies = strategies
        self.budget = budget
        self.codecs = budget.allowed(simulator.profile, asked)
        self._why_no_codec = (
            "the budget allows no codec that was measured"
            if asked is None
            else "none was asked for"
        )
        self.exempt = {g.name: reasons[g.name] for g in self.gradients if reasons.get(g.name)}
        budget.check_errors([g for g in self.gradients if g.name not in self.exempt], self.codecs)
        self.patience_s = patience_s
        self._seen: dict[object, float] = {}
        self.best: Decisions = {}
        self.best_s = self.plain_s = simulator.step_s(None)

    def run(self, epoch: int) -> SearchResult:
        tries: list[Candidate] = []
        uniform: list[tuple[float, str, Decisions]] = []
        if self.simulator.num_ranks > 1:
            uniform = self._uniform_tries()
        if not uniform:
            return self._nothing(epoch)
        uniform.sort(key=lambda row: row[0])
        self.best_s, label, self.best = uniform[0]
        for stage in (self._sizes, self._buckets, self._one_by_one, self._orders, self._spares):
            stage()
        rows = list(uniform)
        if self.best != uniform[0][2]:
            rows.insert(0, (self.best_s, f"mixed, mostly {label}", self.best))
        bulk = {g.name: k for k, bucket in enumerate(self.simulator.buckets) for g in bucket}
        for seconds, name, decisions in rows:
            if not tries:
                decisions = self._explained(seconds, decisions)
            numbered = {
                key: made.model_copy(update={"bulk": bulk[key]}) for key, made in decisions.items()
            }
            plan = self._plan(numbered, seconds, epoch)
            tries.append(Candidate(label=name, step_s=seconds, plan=plan))
        found = SearchResult(
            plan=tries[0].plan,
            step_s=tries[0].step_s,
            plain_step_s=self.plain_s,
            everything={name: seconds for seconds, name, _ in uniform},
            candidates=tuple(tries),
        )
        pays = found.step_s < self.plain_s * (1 - WORTH)
        return found if pays else self._nothing(epoch, found)

    # --- tries ------------------------------------------------------------------------------------

    def _uniform_tries(self) -> list[tuple[float, str, Decisions]]:
        """Returns times, labels and decisions with one codec and strategy for all gradients."""
        found: list[tuple[float, str, Decisions]] = []
        for codec, strategy in product(self.codecs, self.strategies):
            if found and time.perf_counter() > self.deadline_s + self.patience_s:
                break
            decisions: Decisions = {}
            for g in self.gradients:
                why = self.exempt.get(g.name) or self._reason(g, codec)
                decisions[g.name] = _plain(g, why) if why else _compressed(codec, strategy, None, g)
            if _compresses(decisions):
                found.append((self._step_s(decisions), f"{codec} {strategy}", decisions))
        return found

    def _step_s(self, decisions: Decisions) -> float:
        key = tuple(
            (name, made.codec, made.strategy, made.partitions, made.order)
            for name, made in decisions.items()
        )
        if key not in self._seen:
            self._seen[key] = self.simulator.step_s(decisions)
        return self._seen[key]

    def _try(self, tried: Decisions) -> None:
        """Keeps decisions that compress something and save enough."""
        if time.perf_counter() > self.deadline_s or not _compresses(tried):
            return
        step_s = self._step_s(tried)
        if step_s < self.best_s * (1 - WORTH):
            self.best_s, self.best = step_s, tried

    def _sizes(self) -> None:
        """Tries without gradients below some size."""
        first = self.best
        usable = [g for g in self.gradients if g.name not in self.exempt]
        for size in _spread(sorted({g.numel for g in usable})[1:], MOST_TRIES):
            self._try(_without(first, [g for g in usable if g.numel < size]))

    def _buckets(self) -> None:
        """Tries without the first buckets, and without the last."""
        buckets = self.simulator.buckets
        for number in _spread(range(1, len(buckets)), MOST_TRIES):
            for part in (buckets[:number], buckets[number:]):
                self._try(_without(self.best, [g for bucket in part for g in bucket]))

    def _one_by_one(self) -> None:
        """Tries other choices for gradients of one size and bucket, the largest first."""
        for members in self._classes():
            for choose in self._choices(members[0]):
                self._try(self.best | {g.name: choose(g) for g in members})

    def _classes(self, *, with_exempt: bool = False) -> list[list[GradientProfile]]:
        """Returns gradients by size, bucket and codecs that they may use, the largest first."""
        found: dict[tuple[int, int, str, tuple[str, ...]], list[GradientProfile]] = {}
        for number, bucket in enumerate(self.simulator.buckets):
            for gradient in bucket:
                why = self.exempt.get(gradient.name, "")
                if with_exempt or not why:
                    key = (gradient.numel, number, why, self._usable(gradient))
                    found.setdefault(key, []).append(gradient)
        return [found[key] for key in sorted(found, reverse=True)]

    def _usable(self, gradient: GradientProfile) -> tuple[str, ...]:
        """Returns the codecs that the budget allows for a gradient."""
        return tuple(codec for codec in self.codecs if not self._reason(gradient, codec))

    def _reason(self, gradient: GradientProfile, codec: str) -> str:
        return self.budget.reason(gradient, codec)

    def _choices(self, like: GradientProfile) -> list[Callable[[GradientProfile], Decision]]:
        num_ranks = self.simulator.num_ranks
        partitions = [None, num_ranks, 2 * num_ranks]
        if len(self.simulator.ranks) == num_ranks:
            # Where chunks are few, a rank that stands for all is not like the others.
            partitions.append(1)
        compressed = product(self._usable(like), self.strategies, partitions)
        return [_plain, *(partial(_compressed, *choice) for choice in compressed)]

    def _orders(self) -> None:
        """Tries to start gradients that are sent as they are first, in every bucket."""
        if not all(made.is_compressed for made in self.best.values()):
            self._try(
                {
                    name: made.model_copy(update={"order": int(made.is_compressed)})
                    for name, made in self.best.items()
                }
            )

    def _spares(self) -> None:
        """Sends as they are gradients that gain nothing, while the step stays as short."""
        limit_s = self.best_s * (1 + WORTH)
        for members in reversed(self._classes()):
            if time.perf_counter() > self.deadline_s:
                break
            tried = self.best | {g.name: _plain(g) for g in members}
            if tried == self.best or not _compresses(tried):
                continue
            tried_s = self._step_s(tried)
            if tried_s <= limit_s:
                self.best_s, self.best = tried_s, tried

    # --- the plan ---------------------------------------------------------------------------------

    def _plan(self, decisions: Decisions, step_s: float, epoch: int) -> Plan:
        return Plan(
            epoch=epoch,
            gradients=decisions,
            step_s=step_s,
            plain_step_s=self.plain_s,
            num_ranks=self.simulator.num_ranks,
            made_from=self.simulator.profile.made,
        )

    def _explained(self, step_s: float, decisions: Decisions) -> Decisions:
        """Adds to each decision the two times it was made from, and why it was made."""
        until_s = time.perf_counter() + self.patience_s
        found = dict(decisions)
        usual = next(made for made in decisions.values() if made.is_compressed)
        for members in self._classes(with_exempt=True):
            is_compressed = decisions[members[0].name].is_compressed
            other = _plain if is_compressed else partial(_like, usual)
            other_s = None
            if time.perf_counter() <= until_s:
                tried = decisions | {g.name: other(g) for g in members}
                other_s = self._step_s(tried) if _compresses(tried) else self.plain_s
            why = self.exempt.get(members[0].name, "")
            has_none = not why and not self._usable(members[0])
            for g in members:
                own = self._all_reasons(g) if has_none else why
                update = _explanation(is_compressed, own, step_s, other_s)
                found[g.name] = decisions[g.name].model_copy(update=update)
        return found

    def _all_reasons(self, gradient: GradientProfile) -> str:
        return "; ".join(self._reason(gradient, codec) for codec in self.codecs)

    def _nothing(self, epoch: int, found: SearchResult | None = None) -> SearchResult:
        """Returns a plan that compresses nothing; `found` is the best that does."""
        decisions: Decisions = {}
        for gradient in self.gradients:
            why = self.exempt.get(gradient.name, "")
            times: dict[str, float | None] = {"plain_s": self.plain_s, "compressed_s": None}
            if not why:
                if self.simulator.num_ranks == 1:
                    why = "one rank: nothing is exchanged"
                elif not self.codecs:
                    why = self._why_no_codec
                elif found is None:
                    why = self._all_reasons(gradient)
                else:
                    times["compressed_s"] = found.step_s
                    longer = _difference(found.step_s - self.plain_s, "longer by", "")
                    why = f"compressed, the step would take {longer}"
            decisions[gradient.name] = _plain(gradient, why).model_copy(update=times)
        return SearchResult(
            plan=self._plan(decisions, self.plain_s, epoch),
            step_s=self.plain_s,
            plain_step_s=self.plain_s,
            everything={} if found is None else found.everything,
            candidates=() if found is None else found.candidates,
        )


def _plain(gradient: GradientProfile, reason: str = "") -> Decision:
    strategy = plain_strategy(gradient.numel)
    return Decision(codec="none", strategy=strategy, numel=gradient.numel, reason=reason)


def _compressed(
    codec: str, strategy: str, partitions: int | None, gradient: GradientProfile
) -> Decision:
    return Decision(codec=codec, strategy=strategy, partitions=partitions, numel=gradient.numel)


def _like(made: Decision, gradient: GradientProfile) -> Decision:
    return _compressed(made.codec, made.strategy, None, gradient)


def _without(decisions: Decisions, gradients: Iterable[GradientProfile]) -> Decisions:
    """Returns the decisions with some gradients sent as they are."""
    return decisions | {g.name: _plain(g) for g in gradients if decisions[g.name].is_compressed}


def _compresses(decisions: Decisions) -> bool:
    return any(made.is_compressed for made in decisions.values())


def _explanation(
    is_compressed: bool, why: str, step_s: float, other_s: float | None
) -> dict[str, object]:
    """Returns the two times of a decision and its reason."""
    if is_compressed:
        why = "" if other_s is None else _difference(other_s - step_s, "saves", "costs")
        return {"compressed_s": step_s, "plain_s": other_s, "reason": why}
    if not why and other_s is None:
        why = "the step is shorter without"
    elif not why and other_s is not None:
        why = _difference(other_s - step_s, "compressing it costs", "compressing it saves only")
    return {"compressed_s": other_s, "plain_s": step_s, "reason": why}


def _difference(seconds: float, more: str, less: str) -> str:
    word = more if seconds >= 0 else less
    return f"{word} {abs(seconds) * 1e3:.3g} ms".strip()


def _spread(values: Iterable[int], most: int) -> list[int]:
    """Returns at most so many of the values, evenly chosen."""
    found = list(values)
    if len(found) <= most:
        return found
    return [found[round(k * (len(found) - 1) / (most - 1))] for k in range(most)]
