"""The time of a training step on a profile, for a plan: the lowered graphs on a simulated clock."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from hipress.casync.graphs import strategies
from hipress.casync.graphs.partitions import CHUNK_NUMEL, Partitioner, Placement
from hipress.casync.graphs.shape import Shape, partition_numel
from hipress.errors import UsageError
from hipress.plan import Decision, Plan
from hipress.profile import CodecCosts, Curve, GradientProfile, Profile
from hipress.secopa.costs import Script, script
from hipress.secopa.player import Cluster
from hipress.secopa.step import Backward, Job, Played

FIRST_BUCKET_MB = 1.0
BUCKET_MB = 25.0
"""DDP's defaults."""

MOST_PLAYED = 8
"""Ranks that are all played; of more, one stands for all."""

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
"""Elements as they are, where a profile does not say what moving them costs."""


class Simulator:
    """Plays training steps on one profile.

    Args:
        profile: With a model.
        num_ranks: N; that of the profile if None.
        ranks_per_host: Ranks that share a host; as in the profile if None.
    """

    def __init__(
        self, profile: Profile, num_ranks: int | None = None, ranks_per_host: int | None = None
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
        self._scripts: dict[object, tuple[Script, ...]] = {}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those that are played."""
        return tuple(range(self.num_ranks)) if self.num_ranks <= MOST_PLAYED else (0,)

    @cached_property
    def buckets(self) -> list[list[GradientProfile]]:
        """As DDP puts gradients together."""
        by_name = {gradient.name: gradient for gradient in self.model.gradients}
        if self.model.buckets:
            return [[by_name[name] for name in bucket] for bucket in self.model.buckets]
        return ddp_buckets(self.model.gradients, self.model.bucket_mb, self.model.element_bytes)

    @cached_property
    def backward(self) -> Backward:
        """The model's part of a step."""
        edges: list[float] = []
        for bucket in self.buckets:
            ready_s = max((gradient.ready_s for gradient in bucket), default=0.0)
            edges.append(max([ready_s, *edges[-1:]]))  # DDP gives them away in their order
        return Backward(
            forward_s=self.model.forward_s,
            bucket_s=tuple(edges),
            backward_s=max([self.model.backward_s, *edges[-1:]]),
            rest_s=self.model.rest_s,
            threads=self.model.threads,
        )

    def step_s(self, plan: Plan | Mapping[str, Decision] | None) -> float:
        """Seconds of a step; None is DDP as it comes."""
        return self.play(plan).step_s

    def play(
        self, plan: Plan | Mapping[str, Decision] | None, *, record: bool = False
    ) -> Simulated:
        """A step with a plan.

        Args:
            plan: What happens to each gradient; those it does not name are left alone. None: all
                is left to DDP.
            record: Note what happens when, for a timeline.
        """
        with _uncollected():
            return self._play(plan, record)

    def _play(self, plan: Plan | Mapping[str, Decision] | None, record: bool) -> Simulated:
        jobs = self._jobs(plan)
        total = sum(
            step.num_bytes for job in jobs for step in job.scripts[0].steps if step.peer != -1
        )
        total += sum(2 * 4 * g.numel for g in self.model.gradients) if plan is None else 0
        cluster = Cluster(
            self.profile,
            self.num_ranks,
            self.ranks,
            self.hosts,
            total,
            spans=[] if record else None,
        )
        played = cluster.play(self.backward, jobs)
        return Simulated(played=played, jobs=jobs, model=self.backward, num_ranks=self.num_ranks)

    def _jobs(self, plan: Plan | Mapping[str, Decision] | None) -> list[Job]:
        if self.num_ranks == 1:
            return []
        decisions = plan.gradients if isinstance(plan, Plan) else plan
        if decisions is None:
            return [
                self._job(number, "allreduce", "none", bucket, None)
                for number, bucket in enumerate(self.buckets)
            ]
        placements = self._places(decisions)
        jobs = []
        for number, bucket in enumerate(self.buckets):
            for group in groups(bucket, decisions):
                first = decisions.get(group[0].name, LEFT_ALONE)
                known = tuple(placements[g.name] for g in group) if first.codec != "none" else None
                jobs.append(self._job(number, first.strategy, first.codec, group, known))
        return jobs

    def _places(self, decisions: Mapping[str, Decision]) -> dict[str, tuple[Placement, ...]]:
        """The partitions of every compressed gradient, dealt out as the engine does."""
        dealer = Partitioner(self.num_ranks)
        on_gpu = self.profile.machine.device == "cuda"
        full = int((self.model.bucket_mb or BUCKET_MB) * 2**20) // 4
        bucket_numel = min(full, self.model.num_elements)
        found: dict[str, tuple[Placement, ...]] = {}
        for gradient in self.model.gradients:
            made = decisions.get(gradient.name, LEFT_ALONE)
            if made.codec == "none":
                continue
            costs = self.profile.codec(made.codec)
            most = partition_numel(costs.chunk_numel, bucket_numel, self.num_ranks, on_gpu=on_gpu)
            found[gradient.name] = dealer.place(gradient.numel, most, made.partitions)
        return found

    def _job(
        self,
        number: int,
        strategy: str,
        codec: str,
        group: Sequence[GradientProfile],
        placements: tuple[tuple[Placement, ...], ...] | None,
    ) -> Job:
        key = (strategy, codec, tuple(g.numel for g in group), placements)
        if key not in self._scripts:
            self._scripts[key] = self._made(strategy, codec, group, placements)
        title = group[0].name if len(group) == 1 else f"{group[0].name} and {len(group) - 1} more"
        return Job(
            name=title,
            label=", ".join(g.name for g in group[:4]),
            bucket=number,
            scripts=self._scripts[key],
        )

    def _made(
        self,
        strategy: str,
        codec: str,
        group: Sequence[GradientProfile],
        placements: tuple[tuple[Placement, ...], ...] | None,
    ) -> tuple[Script, ...]:
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
        ranks = self.ranks if len(self.ranks) == self.num_ranks else (stand_in(shape),)
        return tuple(script(shape, rank, costs, none, self.model.element_bytes) for rank in ranks)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A step that was played, and what of."""

    played: Played
    jobs: list[Job] = field(repr=False)
    model: Backward = field(repr=False)
    num_ranks: int

    @property
    def step_s(self) -> float:
        """Seconds, on the slowest rank."""
        return self.played.step_s

    @property
    def exposed_s(self) -> float:
        """Of the exchange, that backward did not hide."""
        return max(self.played.exchange_end_s - self.played.backward_end_s, 0.0)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector: a play makes a hundred thousand objects, and hardly any garbage that
    only it would find; in a large process it looks at all others each time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


LEFT_ALONE = Decision(codec="none", strategy="ps")


def stand_in(shape: Shape) -> int:
    """The rank that stands for all: the first, or one that aggregates something if it does not."""
    owners = {route % len(shape.hosts) for route in shape.layout.routes}
    return 0 if 0 in owners or not owners else min(owners)


def groups(
    bucket: Sequence[GradientProfile], decisions: Mapping[str, Decision]
) -> list[list[GradientProfile]]:
    """The gradients of a bucket by what is decided for them, in the order they start in."""
    found: dict[tuple[object, ...], list[GradientProfile]] = {}
    for gradient in bucket:
        made = decisions.get(gradient.name, LEFT_ALONE)
        found.setdefault((made.codec, made.strategy, made.bulk, made.order), []).append(gradient)

    def turn(key: tuple[object, ...]) -> int:
        # What is compressed first, unless the plan says otherwise: it takes longest.
        return key[3] if isinstance(key[3], int) else int(key[0] == "none")

    return [found[key] for key in sorted(found, key=turn)]


def ddp_buckets(
    gradients: Sequence[GradientProfile], bucket_mb: float | None, width: int
) -> list[list[GradientProfile]]:
    """Gradients in the order of backward, a bucket closed when it is full."""
    found: list[list[GradientProfile]] = [[]]
    filled = 0.0
    for gradient in gradients:
        if filled >= _cap_bytes(len(found), bucket_mb):
            found.append([])
            filled = 0.0
        found[-1].append(gradient)
        filled += gradient.numel * width
    return [bucket for bucket in found if bucket]


def _cap_bytes(number: int, bucket_mb: float | None) -> float:
    if bucket_mb is None:
        bucket_mb = FIRST_BUCKET_MB if number == 1 else BUCKET_MB
    return bucket_mb * 2**20


def _hosts(profile: Profile, num_ranks: int, ranks_per_host: int | None) -> tuple[int, ...]:
    if ranks_per_host is None:
        if num_ranks == profile.network.num_ranks:
            return profile.network.hosts
        ranks_per_host = max(profile.network.hosts.count(h) for h in profile.network.hosts)
    return tuple(rank // ranks_per_host for rank in range(num_ranks))
