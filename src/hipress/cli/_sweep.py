"""One setting of a sweep: a profile, a number of ranks, and what is played there."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hipress.casync.graphs.strategies import candidates, check
from hipress.errors import UsageError
from hipress.plan import ANY, Decision, Plan
from hipress.profile import Profile
from hipress.secopa.cluster import SimulatedStep
from hipress.secopa.search import search
from hipress.secopa.simulate import MOST_WHOLE, Simulator, traces
from hipress.secopa.what_if import uniform

PLAN = "plan"
"""The label of a plan that was searched for."""
PLAN_CODEC = "int8"
"""Of a plan that leaves the codec open, as `hipress train --plan` has it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is played on one cluster."""

    profile: Profile
    num_ranks: int
    codecs: tuple[str, ...] = ()
    strategies: tuple[str, ...] = candidates()
    rate: str | None = None
    """As the user wrote it; None: as measured."""
    plan: Plan | None = None
    """Played besides."""
    plan_name: str = ""
    auto: bool = False
    """Whether the best plan is looked for."""
    auto_codecs: tuple[str, ...] | None = None
    """That it may use; None: the budget decides."""
    patience_s: float = 10.0
    """For how long."""
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def simulator(self) -> Simulator:
        """Plays it."""
        if "simulator" not in self._cache:
            self._cache["simulator"] = Simulator(
                self.profile, self.num_ranks, most_simulated=MOST_WHOLE
            )
        found: Simulator = self._cache["simulator"]
        return found

    @property
    def num_choices(self) -> int:
        """Rows besides the plain one."""
        fixed = len(self.codecs) * len(self.strategies)
        return (fixed if self.num_ranks > 1 else 0) + (self.plan is not None) + self.auto

    def rows(
        self, on_part: Callable[[float], None] = lambda fraction: None
    ) -> list[dict[str, Any]]:
        """A row for plain all-reduce, and one for each choice."""
        plain = self.simulator.run(None)
        alone_s = Simulator(self.profile, 1).step_s(None)
        rows = [self._row("none", "allreduce", plain, plain, alone_s)]
        for done, (codec, strategy, plan) in enumerate(self._choices()):
            on_part(done / self.num_choices)
            played = plain if plan is None else self.simulator.run(plan)
            rows.append(self._row(codec, strategy, played, plain, alone_s))
        return rows

    def write_timeline(self, path: Path) -> str:
        """Plays the first choice, or plain where there is none, and writes its timeline.

        Returns:
            What was played, in words.
        """
        import json

        from hipress.timeline import chrome_trace

        codec, strategy, plan = next(self._choices(), ("none", "allreduce", None))
        played = self.simulator.run(plan, record=True)
        trace = chrome_trace(traces(played, device=self.profile.machine.device))
        path.write_text(json.dumps(trace) + "\n")
        shown = len({span.rank for span in played.spans})
        stands = ", one of which stands for all" if shown < self.num_ranks else ""
        return f"{codec} {strategy or ''}".strip() + f" on {self.num_ranks} ranks{stands}"

    def _choices(self) -> Iterator[tuple[str, str | None, Mapping[str, Decision] | None]]:
        """Codec, strategy and decisions; without decisions all is left to DDP."""
        if self.num_ranks > 1:
            for codec in self.codecs:
                for strategy in self.strategies:
                    yield codec, strategy, uniform(self.profile, codec, strategy)
        if self.plan is not None:
            yield self.plan_name, None, self.plan.gradients
        if self.auto:
            found = search(
                self.profile,
                num_ranks=self.num_ranks,
                strategies=self.strategies,
                codecs=self.auto_codecs or None,
                patience_s=self.patience_s,
            ).plan
            yield PLAN, None, found.gradients if found.num_compressed else None

    def _row(
        self,
        codec: str,
        strategy: str | None,
        played: SimulatedStep,
        plain: SimulatedStep,
        alone_s: float,
    ) -> dict[str, Any]:
        return {
            "nodes": self.num_ranks,
            "rate": self.rate,
            "bytes_per_s": self.profile.network.bytes_per_s,
            "codec": codec,
            "strategy": strategy,
            "step_s": played.step_s,
            "speedup": plain.step_s / played.step_s,
            "exposed_s": played.exposed_s,
            "bytes_per_rank": played.sent_bytes,
            "efficiency": alone_s / played.step_s,
        }


def check_ranks(profile: Profile, numbers: Sequence[int], instead: str = "") -> None:
    """Refuses several ranks on the network of a profile that has one rank, and so no network.

    Raises:
        UsageError: There are several.
    """
    most = max(numbers)
    if profile.network.num_ranks == 1 < most:
        raise UsageError(
            f"this profile is of one rank, so that nothing is known of links between {most}; "
            f"{instead}profile several ranks, e.g. hipress profile --hosts {min(most, 4)}."
        )


def read_plan(
    made: Profile, path: Path, asked: Sequence[str], strategy: str, numbers: Sequence[int]
) -> Plan:
    """The plan of a file, for the model of a profile; what it leaves open is filled in.

    Args:
        made: With a model.
        path: Of the plan.
        asked: Codecs that the user named, the first of which fills in.
        strategy: That fills in.
        numbers: Of ranks that it is to be played on.

    Raises:
        UsageError: It is no plan, or not one for this model or these codecs.
    """
    read = Plan.load(path)
    numels = {g.name: g.numel for g in made.model.gradients} if made.model is not None else {}
    if unknown := [name for name in read.gradients if name not in numels]:
        near = difflib.get_close_matches(unknown[0], numels, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(
            f"the plan speaks of {unknown[0]!r}{hint}, which this model does not have; make a plan "
            f"for this model (its first gradients are: {', '.join(list(numels)[:5])})."
        )
    if read.takes_codec:
        known = [costs.codec for costs in made.codecs if costs.codec != "none"]
        usual = [name for name in known if name == PLAN_CODEC]
        chosen = next(iter([*asked, *usual, *known]), PLAN_CODEC)
        sized = {
            name: one.model_copy(update={"numel": numels[name]})
            for name, one in read.gradients.items()
        }
        filled = [chosen] if any(one.codec == ANY for one in sized.values()) else []
        filled += [strategy] if read.takes_strategy else []
        print(f"{path}: played with {' and '.join(filled)}, left open there", file=sys.stderr)
        read = read.model_copy(update={"gradients": sized}).with_codec(chosen, strategy)
    for one in read.gradients.values():
        check(one.strategy)
        if one.is_compressed:
            made.codec(one.codec)
    others = [number for number in numbers if number != read.num_ranks]
    if read.num_ranks is not None and others:
        print(
            f"{path}: made for {read.num_ranks} ranks and played on {', '.join(map(str, others))}",
            file=sys.stderr,
        )
    return read
