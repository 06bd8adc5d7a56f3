"""The time of a training step with a plan on a profile: the lowered graphs on a simulated clock."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

from hipress.casync.graphs import strategies
from hipress.casync.graphs.grouping import GroupKey, grouped
from hipress.casync.graphs.partitions import CHUNK_NUMEL, Partitioner, Placement
from hipress.casync.graphs.shape import Shape
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

    @cached_property
    def buckets(self) -> list[list[GradientProfile]]:
        """The gradients of each of DDP's buckets."""
        by_name = {gradient.name: gradient for gradient in self.model.gradients}
        if self.model.buckets:
            return [[by_name[name] for name in bucket] for bucket in self.model.buckets]
        return ddp_buckets(self.model.gradients, self.model.bucket_mb, self.model.element_bytes)

    @cached_property
    def _model_work(self) -> ModelWork:
        edges: list[float] = []
        for bucket in self.buckets:
            ready_s = max((gradient.ready_s for gradient in bucket), default=0.0)
            edges.append(max([ready_s, *edges[-1:]]))  # DDP starts buckets in their order
        return ModelWork(
            forward_s=self.model.forward_s,
            bucket_s=tuple(edges),
            backward_s=max([self.model.backward_s, *edges[-1:]]),
            rest_s=self.model.rest_s,
            threads=self.model.threads,
        )

    def step_s(self, plan: Plan | Decisions | None) -> float:
        """Returns the seconds of a step; None stands for DDP without HiPress."""
        return self.run(plan).step_s

    def run(self, plan: Plan | Decisions | None, *, record: bool = False) -> SimulatedStep:
        """Simulates a step with a plan.

        Args:
            plan: A decision for each gradient; gradients that it does not name are sent as they
                are. None leaves all of them to DDP.
            record: Whether to record spans, for a timeline.
        """
        with _without_gc():
            syncs = self._syncs(plan.gradients if isinstance(plan, Plan) else plan)
            total = sum(
                task.num_bytes for sync in syncs for task in sync.graphs[0].tasks if task.peer != -1
            )
            total += 0 if plan is not None else sum(2 * 4 * g.numel for g in self.model.gradients)
            cluster = SimulatedCluster(
                self.profile, self.num_ranks, self.ranks, self.hosts, total, record=record
            )
            return cluster.run(self._model_work, syncs)

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
                more = f" and {len(group) - 1} more" if len(group) > 1 else ""
                syncs.append(
                    Synchronisation(
                        name=group[0].name + more,
                        label=", ".join(g.name for g in group[:4]),
                        bucket=number,
                        graphs=self._costed_graphs(key.strategy, key.codec, group, known),
                    )
                )
        return syncs

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
            is_plain = strategies.get(strategy).sums_in_transport(codec)
            none = next((costs for costs in self.profile.codecs if costs.codec == "none"), FREE)
            costs = none if codec == "none" else self.profile.codec(codec)
            shape = Shape(
                numels=tuple(g.numel for g in group),
                hosts=self.hosts,
                strategy=strategy,
                is_plain=is_plain,
                bulk=is_plain or costs.bulk,
                codes_local=costs.codes_local,
                chunk_numel=costs.chunk_numel,
                placements=placements,
            )
            is_whole = len(self.ranks) == self.num_ranks
            self._graphs[key] = tuple(
                costed_graph(shape, rank, costs, none, self.model.element_bytes)
                for rank in (self.ranks if is_whole else (_representative(shape),))
            )
        return self._graphs[key]


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
