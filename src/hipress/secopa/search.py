"""Looks for the plan with the shortest step, every try judged by playing the whole step.

    uniform      everything with one codec and one strategy
    sizes        the same, but for gradients below some size
    buckets      the same, but for the first buckets, which backward hides, or the last
    one by one   gradients of one size and bucket together: leave them alone, another codec, another
                 strategy, other partitions
    orders       what is left alone first, in every bucket
    spares       leaves alone what gains nothing: no error for no time

Each keeps what it finds better. The search ends with its patience; what it has then is the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hipress.casync.graphs.strategies import candidates
from hipress.plan import Decision, Plan, plain_strategy
from hipress.profile import GradientProfile, Profile
from hipress.secopa.budget import Budget, exempt
from hipress.secopa.simulate import Simulator

STRATEGIES = candidates()
"""Tried where the user leaves the choice."""

WORTH = 0.002
"""The share of a step that a finer choice must save; less is beyond what can be measured."""

MOST_TRIES = 8
"""Sizes, and numbers of buckets."""

Decisions = dict[str, Decision]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan and what it should bring."""

    label: str
    plan: Plan
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found."""

    plan: Plan
    """The best; it may leave everything alone."""
    step_s: float
    plain_step_s: float
    """With DDP as it comes."""
    everything: dict[str, float]
    """Step times with one codec and strategy for all, by label."""
    candidates: tuple[Candidate, ...] = ()
    """Plans that compress something, the best first."""


def search(
    profile: Profile,
    *,
    num_ranks: int | None = None,
    strategies: Sequence[str] = STRATEGIES,
    codecs: Sequence[str] | None = None,
    budget: Budget | None = None,
    reasons: Mapping[str, str] | None = None,
    patience_s: float = 10.0,
    epoch: int = 0,
) -> Found:
    """The best plan for a profile.

    Args:
        profile: With a model.
        num_ranks: N; that of the profile if None.
        strategies: That may be used.
        codecs: That may be used, whatever the budget says of them.
        budget: What may be done to gradients; codecs of the convergence table if None.
        reasons: By gradient, why it is left alone; small ones and those of one dimension if None.
        patience_s: When to stop looking, and again when to stop explaining; a few tries are always
            made.
        epoch: Of the plan.
    """
    return _Search(
        Simulator(profile, num_ranks),
        tuple(strategies),
        budget or Budget(),
        codecs,
        reasons,
        patience_s,
    ).run(epoch)


def shortlist(
    profile: Profile, *, most: int = 3, slack: float = 0.1, **options: object
) -> list[Candidate]:
    """Plans worth a trial: predicted to be faster than nothing, or slower by no more than `slack`,
    which is how far a prediction may be off. Empty where none is.

    Args:
        profile: With a model.
        most: How many.
        slack: As a share of the plain step.
        options: Of `search`.
    """
    found = search(profile, **options)  # type: ignore[arg-type]
    limit_s = found.plain_step_s * (1 + slack)
    return [one for one in found.candidates if one.step_s < limit_s][:most]


@dataclass
class _Search:
    simulator: Simulator
    strategies: tuple[str, ...]
    budget: Budget
    asked: Sequence[str] | None
    reasons: Mapping[str, str] | None
    patience_s: float
    _seen: dict[object, float] = field(default_factory=dict)

    def run(self, epoch: int) -> Found:
        self.deadline_s = time.perf_counter() + self.patience_s
        simulator, profile = self.simulator, self.simulator.profile
        gradients = simulator.model.gradients
        self.codecs = self.budget.allowed(profile, self.asked)
        self.left: dict[str, str] = {}
        for gradient in gradients:
            why = exempt(gradient) if self.reasons is None else self.reasons.get(gradient.name, "")
            if why:
                self.left[gradient.name] = why
        self.open = [g for g in gradients if g.name not in self.left]
        plain_s = simulator.step_s(None)
        if simulator.num_ranks == 1 or not self.open or not self.codecs:
            return self._nothing(plain_s, epoch)
        tries: list[tuple[float, str, Decisions]] = []
        for codec in self.codecs:
            for strategy in self.strategies:
                if tries and time.perf_counter() > self.deadline_s + self.patience_s:
                    break
                decisions = self._uniform(codec, strategy)
                if any(made.is_compressed for made in decisions.values()):
                    tries.append((self._step_s(decisions), f"{codec} {strategy}", decisions))
        if not tries:
            return self._nothing(plain_s, epoch)
        tries.sort(key=lambda row: row[0])
        everything = {label: step_s for step_s, label, _ in tries}
        step_s, label, decisions = tries[0]
        refined_s, refined = step_s, decisions
        for pass_ in (
            self._sizes,
            self._buckets,
            self._one_by_one,
            self._orders,
            self._spares,
        ):
            refined_s, refined = pass_(refined_s, refined)
        rows = list(tries)
        if refined != decisions:
            rows.insert(0, (refined_s, f"mixed, mostly {label}", refined))
        candidates = tuple(
            Candidate(
                label=name,
                step_s=seconds,
                plan=self._plan(made, seconds, plain_s, epoch, explain=place == 0),
            )
            for place, (seconds, name, made) in enumerate(rows)
        )
        best = candidates[0]
        found = Found(
            plan=best.plan,
            step_s=best.step_s,
            plain_step_s=plain_s,
            everything=everything,
            candidates=candidates,
        )
        pays = best.step_s < plain_s * (1 - WORTH)
        return found if pays else self._nothing(plain_s, epoch, found)

    # --- tries ------------------------------------------------------------------------------------

    def _step_s(self, decisions: Decisions) -> float:
        key = tuple(
            (name, made.codec, made.strategy, made.partitions, made.order)
            for name, made in decisions.items()
        )
        if key not in self._seen:
            self._seen[key] = self.simulator.step_s(decisions)
        return self._seen[key]

    def _uniform(self, codec: str, strategy: str) -> Decisions:
        """All that may be compressed, with one codec and strategy."""
        found: Decisions = {}
        for gradient in self.simulator.model.gradients:
            why = self.left.get(gradient.name) or self._reason(gradient, codec)
            if why:
                found[gradient.name] = self._plain(gradient, why)
            else:
                found[gradient.name] = _compressed(codec, strategy, None, gradient)
        return found

    def _plain(self, gradient: GradientProfile, reason: str = "") -> Decision:
        """As it is: a large one by the transport's own sum, small ones in one message with others
        of their bucket."""
        strategy = plain_strategy(gradient.numel)
        return Decision(codec="none", strategy=strategy, numel=gradient.numel, reason=reason)

    def _sizes(self, step_s: float, decisions: Decisions) -> tuple[float, Decisions]:
        """Leaves alone what is smaller than some size."""
        sizes = sorted({g.numel for g in self.open})[1:]
        best = (step_s, decisions)
        for size in _spread(sizes, MOST_TRIES):
            small = [g for g in self.open if g.numel < size]
            best = self._better(best, decisions, small)
        return best

    def _buckets(self, step_s: float, decisions: Decisions) -> tuple[float, Decisions]:
        """Leaves alone the first buckets, or the last."""
        buckets = self.simulator.buckets
        best = (step_s, decisions)
        for number in _spread(range(1, len(buckets)), MOST_TRIES):
            for part in (buckets[:number], buckets[number:]):
                best = self._better(best, best[1], [g for bucket in part for g in bucket])
        return best

    def _better(
        self, best: tuple[float, Decisions], of: Decisions, left: Iterable[GradientProfile]
    ) -> tuple[float, Decisions]:
        tried = of | {g.name: self._plain(g) for g in left if of[g.name].is_compressed}
        return self._best(best, tried)

    def _best(self, best: tuple[float, Decisions], tried: Decisions) -> tuple[float, Decisions]:
        """What was tried, if it compresses something and saves enough."""
        if time.perf_counter() > self.deadline_s:
            return best
        if not any(made.is_compressed for made in tried.values()):
            return best
        step_s = self._step_s(tried)
        return (step_s, tried) if step_s < best[0] * (1 - WORTH) else best

    def _one_by_one(self, step_s: float, decisions: Decisions) -> tuple[float, Decisions]:
        """Another choice for gradients of one size in one bucket, the largest first."""
        best = (step_s, decisions)
        for members in self._classes():
            for choose in self._choices(members[0]):
                best = self._best(best, best[1] | {g.name: choose(g) for g in members})
        return best

    def _classes(self, *, everything: bool = False) -> list[list[GradientProfile]]:
        """Gradients of one size and bucket that may be compressed alike; the largest first.

        Args:
            everything: Those that are exempt too.
        """
        found: dict[tuple[int, int, str, tuple[str, ...]], list[GradientProfile]] = {}
        for number, bucket in enumerate(self.simulator.buckets):
            for gradient in bucket:
                why = self.left.get(gradient.name, "")
                if everything or not why:
                    key = (gradient.numel, number, why, self._usable(gradient))
                    found.setdefault(key, []).append(gradient)
        return [found[key] for key in sorted(found, reverse=True)]

    def _usable(self, gradient: GradientProfile) -> tuple[str, ...]:
        """Codecs that the budget allows for it."""
        return tuple(codec for codec in self.codecs if not self._reason(gradient, codec))

    def _reason(self, gradient: GradientProfile, codec: str) -> str:
        error = self.simulator.profile.codec(codec).error
        return self.budget.reason(gradient, codec, error)

    def _choices(self, like: GradientProfile) -> list[Callable[[GradientProfile], Decision]]:
        num_ranks = self.simulator.num_ranks
        partition_numbers = [None, num_ranks, 2 * num_ranks]
        if len(self.simulator.ranks) == num_ranks:
            # One rank that stands for all is not like the others where chunks are few.
            partition_numbers.append(1)
        found: list[Callable[[GradientProfile], Decision]] = [self._plain]
        for codec in self._usable(like):
            for strategy in self.strategies:
                for partitions in partition_numbers:
                    found.append(partial(_compressed, codec, strategy, partitions))
        return found

    def _orders(self, step_s: float, decisions: Decisions) -> tuple[float, Decisions]:
        """What is left alone first, in every bucket."""
        first = {
            name: made.model_copy(update={"order": int(made.is_compressed)})
            for name, made in decisions.items()
        }
        if len({made.is_compressed for made in first.values()}) == 1:
            return step_s, decisions
        return self._best((step_s, decisions), first)

    def _spares(self, step_s: float, decisions: Decisions) -> tuple[float, Decisions]:
        """Leaves alone what gains nothing, as long as the step stays as short."""
        limit_s = step_s * (1 + WORTH)
        for members in reversed(self._classes()):
            if time.perf_counter() > self.deadline_s:
                break
            tried = decisions | {g.name: self._plain(g) for g in members}
            if tried == decisions or not any(made.is_compressed for made in tried.values()):
                continue
            tried_s = self._step_s(tried)
            if tried_s <= limit_s:
                step_s, decisions = tried_s, tried
        return step_s, decisions

    # --- the plan ---------------------------------------------------------------------------------

    def _plan(
        self, decisions: Decisions, step_s: float, plain_s: float, epoch: int, *, explain: bool
    ) -> Plan:
        if explain:
            decisions = self._explained(step_s, decisions)
        buckets = enumerate(self.simulator.buckets)
        bulk = {g.name: number for number, bucket in buckets for g in bucket}
        return Plan(
            epoch=epoch,
            gradients={
                name: made.model_copy(update={"bulk": bulk[name]})
                for name, made in decisions.items()
            },
            step_s=step_s,
            plain_step_s=plain_s,
            num_ranks=self.simulator.num_ranks,
            made_from=self.simulator.profile.made,
        )

    def _explained(self, step_s: float, decisions: Decisions) -> Decisions:
        """Each decision with the two times it was made from, and why gradients are left alone."""
        until_s = time.perf_counter() + self.patience_s
        found = dict(decisions)
        usual = next(made for made in decisions.values() if made.is_compressed)
        for members in self._classes(everything=True):
            is_compressed = decisions[members[0].name].is_compressed
            other = self._plain if is_compressed else partial(_like, usual)
            tried = decisions | {g.name: other(g) for g in members}
            other_s = None
            if time.perf_counter() <= until_s:
                compresses = any(one.is_compressed for one in tried.values())
                other_s = self._step_s(tried) if compresses else self.simulator.step_s(None)
            why = self.left.get(members[0].name, "")
            if not why and not self._usable(members[0]):
                why = "; ".join(self._reason(members[0], codec) for codec in self.codecs)
            for g in members:
                update = self._times(is_compressed, why, step_s, other_s)
                found[g.name] = decisions[g.name].model_copy(update=update)
        return found

    def _times(
        self, is_compressed: bool, why: str, step_s: float, other_s: float | None
    ) -> dict[str, object]:
        if is_compressed:
            why = "" if other_s is None else _why(other_s - step_s, "saves", "costs")
            return {"compressed_s": step_s, "plain_s": other_s, "reason": why}
        if not why and other_s is None:
            why = "the step is shorter without"
        elif not why and other_s is not None:
            why = _why(other_s - step_s, "compressing it costs", "compressing it saves only")
        return {"compressed_s": other_s, "plain_s": step_s, "reason": why}

    def _nothing(self, plain_s: float, epoch: int, found: Found | None = None) -> Found:
        """Everything is left alone."""
        decisions: Decisions = {}
        for gradient in self.simulator.model.gradients:
            why = self.left.get(gradient.name, "")
            other_s = None
            if not why and self.simulator.num_ranks == 1:
                why = "one rank: nothing is exchanged"
            elif not why and not self.codecs:
                why = "the budget allows no codec that was measured"
            elif not why and found is None:
                why = "; ".join(self._reason(gradient, codec) for codec in self.codecs)
            elif not why and found is not None:
                other_s = found.step_s
                why = f"compressed, the step would take {_why(other_s - plain_s, 'longer by', '')}"
            decisions[gradient.name] = self._plain(gradient, why).model_copy(
                update={"plain_s": plain_s, "compressed_s": other_s}
            )
        return Found(
            plan=Plan(
                epoch=epoch,
                gradients=decisions,
                step_s=plain_s,
                plain_step_s=plain_s,
                num_ranks=self.simulator.num_ranks,
                made_from=self.simulator.profile.made,
            ),
            step_s=plain_s,
            plain_step_s=plain_s,
            everything={} if found is None else found.everything,
            candidates=() if found is None else found.candidates,
        )


def _compressed(
    codec: str, strategy: str, partitions: int | None, gradient: GradientProfile
) -> Decision:
    return Decision(codec=codec, strategy=strategy, partitions=partitions, numel=gradient.numel)


def _like(made: Decision, gradient: GradientProfile) -> Decision:
    return _compressed(made.codec, made.strategy, None, gradient)


def _why(seconds: float, more: str, less: str) -> str:
    """A difference in words."""
    word = more if seconds >= 0 else less
    return f"{word} {abs(seconds) * 1e3:.3g} ms".strip()


def _spread(values: Iterable[int], most: int) -> list[int]:
    """At most so many of them, evenly chosen."""
    found = list(values)
    if len(found) <= most:
        return found
    return [found[round(k * (len(found) - 1) / (most - 1))] for k in range(most)]
