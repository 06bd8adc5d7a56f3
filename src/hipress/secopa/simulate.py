"""The time of a training step with a plan on a profile: the lowered graphs on a simulated clock."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

from hipress.casync.graphs import schedules, strategies
from hipress.casync.graphs.grouping import GroupKey, grouped
from hipress.casync.graphs.partitions import CHUNK_NUMEL, Partitioner, Placement
from hipress.casync.graphs.schedules import Order, Schedule
from hipress.casync.graphs.shape import Shape, slice_numel
from hipress.errors import UsageError
from hipress.plan import Decision, Plan
from hipress.profile import CodecCosts, Curve, GradientProfile, ModelProfile, Profile
from hipress.secopa.cluster import (
    MODEL,
    ModelWork,
    SimulatedCluster,
    SimulatedStep,
    Span,
    Synchronisation,
    Unit,
    forward_order,
)
from hipress.secopa.costs import CostedGraph, costed_graph
from hipress.timeline import Event, RankTrace

FIRST_BUCKET_MB = 1.0
BUCKET_MB = 25.0
"""DDP's defaults."""

MOST_SIMULATED = 8
"""Up to this many ranks all are simulated; of more, one stands for all."""
MOST_WHOLE = 16
"""The same where one step is simulated, not a search: a step of all ranks takes a second, and a
tenth of that with one rank."""

_NOTHING = Curve(fixed=0.0, slope=0.0)
_FLOATS = Curve(fixed=0.0, slope=4.0)
FREE = CodecCosts(
    codec="none",
    encode=_NOTHING,
    decode=_NOTHING,
    add=_NOTHING,
    back=_NOTHING,
    wire=_FLOATS,
    back_wire={2: _FLOATS},
    chunk_numel=CHUNK_NUMEL,
    bulk=True,
    codes_local=False,
)
"""The costs of elements sent as they are, for a profile in which they were not measured."""

NOT_NAMED = Decision(codec="none", strategy="ps")
"""The decision for a gradient that a plan does not name."""

Decisions = Mapping[str, Decision]


class _SlicedUnit(NamedTuple):
    """A unit of a schedule, cut into slices."""

    gradients: tuple[GradientProfile, ...]
    needed_s: float
    graphs: tuple[CostedGraph, ...]
    """One for each rank that is simulated; none where there is only one rank."""


class Simulator:
    """Simulates training steps on one profile.

    Args:
        profile: A profile with a model.
        num_ranks: N; that of the profile if None.
        ranks_per_host: Ranks that share a host; as in the profile if None.
        most_simulated: Up to this many ranks all are simulated; of more, one stands for all.
    """

    def __init__(
        self,
        profile: Profile,
        num_ranks: int | None = None,
        ranks_per_host: int | None = None,
        *,
        most_simulated: int = MOST_SIMULATED,
    ) -> None:
        if profile.model is None:
            raise UsageError(
                "the profile has no model, so there is no step to simulate; measure one with "
                "hipress profile --model NAME."
            )
        self.profile = profile
        self.model = profile.model
        self.num_ranks = num_ranks or profile.network.num_ranks
        self.hosts = _hosts(profile, self.num_ranks, ranks_per_host)
        self.ranks = tuple(range(self.num_ranks)) if self.num_ranks <= most_simulated else (0,)
        """The ranks that are simulated."""
        self._graphs: dict[object, tuple[CostedGraph, ...]] = {}
        self._sliced: tuple[object, list[_SlicedUnit]] = (None, [])
        """The units of the last step that had a schedule, and what they were made from."""

    @cached_property
    def buckets(self) -> list[list[GradientProfile]]:
        """The gradients of each of DDP's buckets."""
        by_name = {gradient.name: gradient for gradient in self.model.gradients}
        if self.model.buckets:
            return [[by_name[name] for name in bucket] for bucket in self.model.buckets]
        return ddp_buckets(self.model.gradients, self.model.bucket_mb, self.model.element_bytes)

    @cached_property
    def _model_work(self) -> ModelWork:
        return self._work_of(self.buckets)

    def _work_of(
        self, buckets: Sequence[Sequence[GradientProfile]], units: tuple[Unit, ...] | None = None
    ) -> ModelWork:
        edges: list[float] = []
        for bucket in buckets:
            ready_s = max((gradient.ready_s for gradient in bucket), default=0.0)
            edges.append(max([ready_s, *edges[-1:]]))  # buckets and units start in their order
        return ModelWork(
            forward_s=self.model.forward_s,
            bucket_s=tuple(edges),
            backward_s=max([self.model.backward_s, *edges[-1:]]),
            rest_s=self.model.rest_s,
            threads=self.model.threads,
            units=units,
        )

    def step_s(self, plan: Plan | Decisions | None, schedule: Schedule | None = None) -> float:
        """Returns the seconds of a step; None stands for DDP without HiPress."""
        return self.run(plan, schedule).step_s

    def run(
        self,
        plan: Plan | Decisions | None,
        schedule: Schedule | None = None,
        *,
        record: bool = False,
    ) -> SimulatedStep:
        """Simulates a step with a plan.

        Args:
            plan: A decision for each gradient; gradients that it does not name are sent as they
                are. None leaves all of them to DDP; with a schedule, it sends all as they are.
            schedule: The order of messages in a loop without DDP, whose forward pass waits for
                single parameters; None simulates DDP. The schedule of a plan is not looked at.
            record: Whether to record spans, for a timeline.
        """
        decisions = plan.gradients if isinstance(plan, Plan) else plan
        with _without_gc():
            if schedule is None:
                model, syncs = self._model_work, self._syncs(decisions)
            else:
                model, syncs = self._scheduled(decisions or {}, schedule)
            total = sum(
                task.num_bytes for sync in syncs for task in sync.graphs[0].tasks if task.peer != -1
            )
            if plan is None and schedule is None:
                total += sum(2 * 4 * g.numel for g in self.model.gradients)
            cluster = SimulatedCluster(
                self.profile,
                self.num_ranks,
                self.ranks,
                self.hosts,
                total,
                credit_bytes=math.inf if schedule is None else schedule.credit_bytes,
                record=record,
            )
            return cluster.run(model, syncs)

    def _syncs(self, decisions: Decisions | None) -> list[Synchronisation]:
        if self.num_ranks == 1:
            return []
        syncs = []
        placements = self._placements(decisions or {})
        for number, bucket in enumerate(self.buckets):
            if decisions is None:
                groups = {GroupKey("none", "allreduce"): bucket}
            else:
                groups = grouped(bucket, lambda gradient: _group_key(gradient, decisions))
            for key, group in groups.items():
                known = tuple(placements[g.name] for g in group) if key.codec != "none" else None
                graphs = self._costed_graphs(key.strategy, key.codec, group, known)
                syncs.append(_synchronisation(number, group, graphs))
        return syncs

    # --- schedules --------------------------------------------------------------------------------

    def _scheduled(
        self, decisions: Decisions, schedule: Schedule
    ) -> tuple[ModelWork, list[Synchronisation]]:
        """Returns the model's work and the synchronisations of a step with a schedule."""
        key = (schedule.slice_bytes, tuple(decisions.items()))
        if self._sliced[0] != key:
            self._sliced = key, self._sliced_units(decisions, schedule.slice_bytes)
        sliced = self._sliced[1]
        places = [0] * len(sliced)
        for place, unit in enumerate(forward_order([one.needed_s for one in sliced])):
            places[unit] = place
        orders = schedules.orders(schedule.name, places)
        syncs = [
            _synchronisation(number, one.gradients, one.graphs, order)
            for number, (one, order) in enumerate(zip(sliced, orders, strict=True))
            if one.graphs
        ]
        element_s = self.model.rest_s / max(self.model.num_elements, 1)
        units = tuple(
            Unit(
                needed_s=one.needed_s,
                update_s=element_s * sum(gradient.numel for gradient in one.gradients),
            )
            for one in sliced
        )
        return self._work_of([one.gradients for one in sliced], units), syncs

    def _sliced_units(self, decisions: Decisions, slice_bytes: int) -> list[_SlicedUnit]:
        gradients = self.model.gradients
        made = [_without_all_reduce(decisions.get(g.name, NOT_NAMED)) for g in gradients]
        slices = {
            codec: self._slice_numel(codec, slice_bytes) for codec in {one.codec for one in made}
        }
        found = schedules.units(
            [gradient.numel for gradient in gradients],
            [slices[one.codec] for one in made],
            [(one.codec, one.strategy) for one in made],
        )
        partitioner = Partitioner(
            self.num_ranks,
            bucket_numel=self.model.num_elements,
            on_gpu=self.profile.machine.device == "cuda",
        )
        placements: list[tuple[tuple[Placement, ...], ...]] = []
        loads = [0] * self.num_ranks
        for unit in found:
            placed = []
            for k in unit:
                numel, one = gradients[k].numel, made[k]
                parts = partitioner.place(
                    numel, slices[one.codec], one.partitions, joins_last=k != unit[0]
                )
                placed.append(parts)
                for part in parts:
                    loads[part.route] += part.stop - part.start
            placements.append(tuple(placed))
        # A rank that stands for all aggregates in some units and not in others, as every rank does.
        stands_for_all = loads.index(max(loads))
        units = []
        for unit, known in zip(found, placements, strict=True):
            members, one = tuple(gradients[k] for k in unit), made[unit[0]]
            graphs: tuple[CostedGraph, ...] = ()
            if self.num_ranks > 1:
                shape = self._shape(one.strategy, one.codec, members, known, slices[one.codec])
                graphs = self._costed(shape, one.codec, stands_for_all)
            needed_s = min(self.model.needed_s_of(gradient) for gradient in members)
            units.append(_SlicedUnit(members, needed_s, graphs))
        return units

    def _slice_numel(self, codec: str, slice_bytes: int) -> int:
        costs = self._codec(codec)
        if costs.wire.slope * costs.chunk_numel <= slice_bytes:
            return costs.chunk_numel
        return slice_numel(
            lambda numel: round(costs.wire.at(numel)), slice_bytes, costs.chunk_numel
        )

    # --- graphs -----------------------------------------------------------------------------------

    def _placements(self, decisions: Decisions) -> dict[str, tuple[Placement, ...]]:
        """Returns the partitions of every compressed gradient."""
        partitioner = Partitioner(
            self.num_ranks,
            bucket_numel=bucket_numel(self.model),
            on_gpu=self.profile.machine.device == "cuda",
        )
        found: dict[str, tuple[Placement, ...]] = {}
        for gradient in self.model.gradients:
            made = decisions.get(gradient.name, NOT_NAMED)
            if made.is_compressed:
                chunk_numel = self.profile.codec(made.codec).chunk_numel
                found[gradient.name] = partitioner.place(
                    gradient.numel, chunk_numel, made.partitions
                )
        return found

    def _costed_graphs(
        self,
        strategy: str,
        codec: str,
        group: Sequence[GradientProfile],
        placements: tuple[tuple[Placement, ...], ...] | None,
    ) -> tuple[CostedGraph, ...]:
        key = (strategy, codec, tuple(g.numel for g in group), placements)
        if key not in self._graphs:
            shape = self._shape(strategy, codec, group, placements)
            self._graphs[key] = self._costed(shape, codec, _representative(shape))
        return self._graphs[key]

    def _shape(
        self,
        strategy: str,
        codec: str,
        group: Sequence[GradientProfile],
        placements: tuple[tuple[Placement, ...], ...] | None,
        sliced_numel: int | None = None,
    ) -> Shape:
        costs, way = self._codec(codec), strategies.get(strategy)
        is_plain = way.sums_in_transport(codec)
        return Shape(
            numels=tuple(g.numel for g in group),
            hosts=self.hosts,
            strategy=strategy,
            is_plain=is_plain,
            bulk=is_plain or costs.bulk,
            codes_local=costs.codes_local,
            sends_elements=sliced_numel is not None and codec == "none" and way.can_send_elements,
            chunk_numel=sliced_numel or costs.chunk_numel,
            placements=placements,
        )

    def _costed(self, shape: Shape, codec: str, stands_for_all: int) -> tuple[CostedGraph, ...]:
        is_whole = len(self.ranks) == self.num_ranks
        return tuple(
            costed_graph(
                shape, rank, self._codec(codec), self._codec("none"), self.model.element_bytes
            )
            for rank in (self.ranks if is_whole else (stands_for_all,))
        )

    def _codec(self, name: str) -> CodecCosts:
        if name == "none":
            return next((costs for costs in self.profile.codecs if costs.codec == "none"), FREE)
        return self.profile.codec(name)


def traces(step: SimulatedStep, *, device: str = "cpu") -> list[RankTrace]:
    """Returns a simulated step as `hipress.timeline.chrome_trace` takes it.

    Args:
        step: A step that was simulated with `record=True`.
        device: The type of the model's device.
    """
    ranks: dict[int, list[Event]] = {}
    for span in step.spans:
        ranks.setdefault(span.rank, []).append(_event(span, step.syncs))
    return [
        RankTrace(rank=rank, host=f"simulated {rank}", events=tuple(events), device=device)
        for rank, events in sorted(ranks.items())
    ]


def _event(span: Span, syncs: Sequence[Synchronisation]) -> Event:
    sync = None if span.sync == MODEL else syncs[span.sync]
    return Event(
        verb=span.verb,
        name=sync.name if sync else "",
        chunk=span.chunk,
        queue=span.queue,
        start_ns=round(span.start_s * 1e9),
        end_ns=round(span.end_s * 1e9),
        label=sync.label if sync else "",
        wire_bytes=None if span.num_bytes is None else round(span.num_bytes),
    )


@contextmanager
def _without_gc() -> Iterator[None]:
    """Turns garbage collection off: a step makes a hundred thousand objects and hardly any cycles,
    and in a large process every collection looks at all other objects too."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _synchronisation(
    bucket: int,
    group: Sequence[GradientProfile],
    graphs: tuple[CostedGraph, ...],
    order: Order | None = None,
) -> Synchronisation:
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return Synchronisation(
        name=group[0].name + more,
        label=", ".join(g.name for g in group[:4]),
        bucket=bucket,
        graphs=graphs,
        order=order,
    )


def _without_all_reduce(made: Decision) -> Decision:
    """Returns a decision as a schedule carries it out: torch's all-reduce cannot be cut."""
    if strategies.get(made.strategy).sums_in_transport(made.codec):
        return made.model_copy(update={"strategy": "ps"})
    return made


def _representative(shape: Shape) -> int:
    """Returns the rank that stands for all: the first that aggregates something, or 0."""
    return min((route % len(shape.hosts) for route in shape.layout.routes), default=0)


def _group_key(gradient: GradientProfile, decisions: Decisions) -> GroupKey:
    made = decisions.get(gradient.name, NOT_NAMED)
    return GroupKey(codec=made.codec, strategy=made.strategy, bulk=made.bulk, order=made.order)


def bucket_numel(model: ModelProfile) -> int:
    """Returns the elements of a full bucket; a small model fills none."""
    full = int((model.bucket_mb or BUCKET_MB) * 2**20) // 4
    return min(full, model.num_elements)


def ddp_buckets(
    gradients: Sequence[GradientProfile], bucket_mb: float | None, element_bytes: int
) -> list[list[GradientProfile]]:
    """Groups gradients as DDP does: in the order of backward, closing a bucket when it is full."""
    found: list[list[GradientProfile]] = [[]]
    filled = 0.0
    for gradient in gradients:
        default_mb = FIRST_BUCKET_MB if len(found) == 1 else BUCKET_MB
        if filled >= (default_mb if bucket_mb is None else bucket_mb) * 2**20:
            found.append([])
            filled = 0.0
        found[-1].append(gradient)
        filled += gradient.numel * element_bytes
    return [bucket for bucket in found if bucket]


def _hosts(profile: Profile, num_ranks: int, ranks_per_host: int | None) -> tuple[int, ...]:
    if ranks_per_host is None:
        if num_ranks == profile.network.num_ranks:
            return profile.network.hosts
        ranks_per_host = max(profile.network.hosts.count(h) for h in profile.network.hosts)
    return tuple(rank // ranks_per_host for rank in range(num_ranks))
