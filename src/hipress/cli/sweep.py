"""Simulated sweeps: a profile, a number of ranks, and the codecs, strategies and plans to try."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hipress.casync.graphs import strategies
from hipress.casync.graphs.schedules import Schedule
from hipress.cli.ui import number, text
from hipress.errors import HipressError, UsageError, did_you_mean
from hipress.plan import ANY, Decision, Plan, ScheduleName
from hipress.profile import Profile
from hipress.secopa.cluster import SimulatedStep
from hipress.secopa.search import search, usual_schedule
from hipress.secopa.simulate import MOST_WHOLE, Simulator
from hipress.secopa.sosp21.presets import Layer, spread_work
from hipress.secopa.what_if import uniform

if TYPE_CHECKING:
    from torch import nn

    from hipress.train.models import Model

PLAN = "plan"
"""The label of a plan that was searched for."""
PLAN_CODEC = "int8"
"""The codec of a plan that leaves it open, as in `hipress train --plan`."""
COUNTED = 2
"""Examples that floating-point operations are counted with: they are proportional."""

STEP_COLUMNS = [
    text("codec"),
    text("strategy"),
    number("ms per\nstep", "step_s", 1, 1e3),
    number("x\nplain", "speedup", 2),
    number("exposed\nms", "exposed_s", 1, 1e3),
    number("MB\nper rank", "bytes_per_rank", 3, 1e-6),
    number("scaling\n%", "efficiency", 1, 100),
]


class _Choice(NamedTuple):
    """What one row simulates."""

    codec: str
    strategy: str | None
    decisions: Mapping[str, Decision] | None
    """If None, all is left to DDP."""
    schedule: Schedule | None = None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is simulated on one cluster."""

    profile: Profile
    num_ranks: int
    codecs: tuple[str, ...] = ()
    strategies: tuple[str, ...] = strategies.candidates()
    rate: str | None = None
    """The rate as the user wrote it; None: the rate that was measured."""
    schedules: tuple[ScheduleName, ...] = ()
    """Each choice is simulated with each of them too, and so is a step with nothing compressed."""
    plan: Plan | None = None
    plan_name: str = ""
    auto: bool = False
    auto_codecs: tuple[str, ...] | None = None
    """Codecs that the search may use; None: the budget decides."""
    patience_s: float = 10.0

    @cached_property
    def simulator(self) -> Simulator:
        return Simulator(self.profile, self.num_ranks, most_simulated=MOST_WHOLE)

    @property
    def num_choices(self) -> int:
        """The number of rows, without the plain one."""
        fixed = len(self.codecs) * len(self.strategies)
        choices = (fixed if self.num_ranks > 1 else 0) + (self.plan is not None) + self.auto
        return choices + len(self.schedules) * (choices + 1)

    def rows(
        self, on_part: Callable[[float], None] = lambda fraction: None
    ) -> list[dict[str, Any]]:
        """Returns a row for plain all-reduce, and one for each choice; one of them is the best."""
        plain = self.simulator.run(None)
        alone_s = Simulator(self.profile, 1).step_s(None)
        first = _Choice("none", "allreduce", None)
        rows = [self._row(first, plain, plain, alone_s)]
        for done, choice in enumerate(self._choices()):
            on_part(done / self.num_choices)
            played = plain
            if choice.decisions is not None:
                played = self.simulator.run(choice.decisions, choice.schedule)
            rows.append(self._row(choice, played, plain, alone_s))
        best = min(rows, key=lambda row: float(row["step_s"]))
        for row in rows:
            row["is_best"] = row is best
        return rows

    def write_timeline(self, path: Path) -> str:
        """Simulates the first choice, or plain if there is none, and writes its timeline; returns
        what was simulated, in words.
        """
        from hipress.secopa.simulate import traces
        from hipress.timeline import chrome_trace

        choice = next(self._choices(), _Choice("none", "allreduce", None))
        played = self.simulator.run(choice.decisions, choice.schedule, record=True)
        trace = chrome_trace(traces(played, device=self.profile.machine.device))
        path.write_text(json.dumps(trace) + "\n")
        shown = len({span.rank for span in played.spans})
        stands = ", one of which stands for all" if shown < self.num_ranks else ""
        words = [choice.codec, choice.strategy or ""]
        words += [choice.schedule.name] if choice.schedule else []
        return " ".join(filter(None, words)) + f" on {self.num_ranks} ranks{stands}"

    def _choices(self) -> Iterator[_Choice]:
        if self.schedules:
            yield from self._scheduled(_Choice("none", "ps", {}))
        for choice in self._without_schedule():
            yield choice
            decided = choice if choice.decisions is not None else choice._replace(decisions={})
            yield from self._scheduled(decided)

    def _scheduled(self, choice: _Choice) -> Iterator[_Choice]:
        plan = self.plan
        for name in self.schedules:
            schedule = usual_schedule(name, self.profile.network)
            if plan is not None and choice.decisions is plan.gradients and plan.schedule == name:
                schedule = Schedule(
                    name=name,
                    slice_bytes=plan.slice_bytes or schedule.slice_bytes,
                    credit_bytes=plan.credit_bytes or schedule.credit_bytes,
                )
            yield choice._replace(schedule=schedule)

    def _without_schedule(self) -> Iterator[_Choice]:
        if self.num_ranks > 1:
            for codec in self.codecs:
                for strategy in self.strategies:
                    yield _Choice(codec, strategy, uniform(self.profile, codec, strategy))
        if self.plan is not None:
            yield _Choice(self.plan_name, None, self.plan.gradients)
        if self.auto:
            found = search(
                self.profile,
                num_ranks=self.num_ranks,
                strategies=self.strategies,
                codecs=self.auto_codecs or None,
                schedules=(),
                patience_s=self.patience_s,
            ).plan
            yield _Choice(PLAN, None, found.gradients if found.num_compressed else None)

    def _row(
        self,
        choice: _Choice,
        played: SimulatedStep,
        plain: SimulatedStep,
        alone_s: float,
    ) -> dict[str, Any]:
        return {
            "nodes": self.num_ranks,
            "rate": self.rate,
            "bytes_per_s": self.profile.network.bytes_per_s,
            "codec": choice.codec,
            "strategy": choice.strategy,
            "schedule": choice.schedule and choice.schedule.name,
            "slice_bytes": choice.schedule and choice.schedule.slice_bytes,
            "credit_bytes": choice.schedule and choice.schedule.credit_bytes,
            "step_s": played.step_s,
            "speedup": plain.step_s / played.step_s,
            "exposed_s": played.exposed_s,
            "bytes_per_rank": played.sent_bytes,
            "efficiency": alone_s / played.step_s,
        }


def check_ranks(profile: Profile, numbers: Sequence[int], instead: str = "") -> None:
    """Refuses several ranks where the profile has one rank, and so no network."""
    most = max(numbers)
    if profile.network.num_ranks == 1 < most:
        raise UsageError(
            f"this profile is of one rank, so that nothing is known of links between {most}; "
            f"{instead}profile several ranks, e.g. hipress profile --hosts {min(most, 4)}."
        )


def read_plan(
    made: Profile, path: Path, asked: Sequence[str], strategy: str, numbers: Sequence[int]
) -> Plan:
    """Returns the plan of a file, for the model of a profile; what it leaves open is filled in.

    The first of the codecs that the user `asked` for fills in, and the strategy; `numbers` are the
    numbers of ranks to simulate it on. A plan for another model or other codecs is refused.
    """
    read = Plan.load(path)
    numels = {g.name: g.numel for g in made.model.gradients} if made.model is not None else {}
    if unknown := [name for name in read.gradients if name not in numels]:
        raise UsageError(
            f"the plan speaks of {unknown[0]!r}{did_you_mean(unknown[0], numels)}, which this "
            "model does not have; make a plan for this model (its first gradients are: "
            f"{', '.join(list(numels)[:5])})."
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
        with_what = " and ".join(filled)
        print(f"{path}: simulated with {with_what}, which it leaves open", file=sys.stderr)
        read = read.model_copy(update={"gradients": sized}).with_codec(chosen, strategy)
    for one in read.gradients.values():
        strategies.check(one.strategy)
        if one.is_compressed:
            made.codec(one.codec)
    others = [number for number in numbers if number != read.num_ranks]
    if read.num_ranks is not None and others:
        print(
            f"{path}: made for {read.num_ranks} ranks and simulated on "
            f"{', '.join(map(str, others))}",
            file=sys.stderr,
        )
    return read


def layers(name: str, data: str | None = None) -> tuple[list[Layer], int]:
    """Returns the layers of a model in the order of backward, and the examples of a step.

    The model is built without memory for its numbers, and its operations are counted, not done.
    Backward works for a layer in proportion to what forward does in it.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from hipress.train.models import timed

    line = timed(name, data)
    try:
        with torch.device("meta"):
            model = line.build()
        batch = tuple(part.to("meta") for part in line.data(0, COUNTED))
        with FlopCounterMode(display=False) as counter:
            line.learning_task.loss(model, batch)
    except Exception as error:
        if data is None or (isinstance(error, HipressError) and "meta" not in str(error)):
            raise
        raise UsageError(
            f"the operations of {name} cannot be counted on torch's device meta, as a preset needs "
            f"({type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}); measure it with "
            f"hipress profile --model {name} --data {data}, and give --profile profile.json."
        ) from error
    counts = {key: sum(ops.values()) for key, ops in counter.get_flop_counts().items()}
    return _layers(model, counts, line), line.batch


def _layers(model: nn.Module, counts: dict[str, int], line: Model) -> list[Layer]:
    root = type(model).__name__
    scale = 3 * line.batch / COUNTED  # backward takes twice what forward does
    found = []
    for name, parameter in reversed(list(model.named_parameters())):
        owner = name.rpartition(".")[0]
        # Where a layer has weight and bias, the weight gets all of its work.
        work = counts.get(f"{root}.{owner}", 0) if parameter.ndim > 1 else 0
        found.append(
            Layer(name=name, numel=parameter.numel(), dims=parameter.ndim, work=work * scale)
        )
    return spread_work(found, counts.get("Global", 0) * scale)
