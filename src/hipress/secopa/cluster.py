"""Runs the lowered graphs of one training step on a simulated cluster.

Each rank does what `casync.engine.executors` does, on a simulated clock: computing tasks wait for a
thread, and the task that stands first in the graph of the oldest synchronisation goes first;
messages wait for their link.

A cluster of few ranks simulates all of them. Where ranks are many and alike, one rank stands for
all: the others send what it sends, at the same time, so each of its receives gets its bytes when a
send of its own of the same kind does (see `hipress.secopa.symmetry`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from hipress.casync.graphs.graph import COMPUTING, Verb
from hipress.casync.graphs.strategies import ring
from hipress.profile import Network, Profile
from hipress.secopa.costs import CostedGraph
from hipress.secopa.hardware import Call, Clock, Link, Processor, WorkQueue
from hipress.secopa.symmetry import BEGIN, Hops, Mirrors, mirrors

MOST_SEGMENTS = 256
"""The bytes that a rank sends in a step are cut into about this many segments."""
LEAST_SEGMENT_BYTES = 2**16
RING = -1
"""The number of the connection that all-reduces use."""
MODEL = -1
"""Stands for the model where a span names its synchronisation."""


@dataclass(frozen=True, kw_only=True)
class Synchronisation:
    """One synchronisation of a step: gradients of a bucket that travel together."""

    name: str
    label: str
    bucket: int
    graphs: tuple[CostedGraph, ...]
    """One for each rank that is simulated."""


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """The model's part of a step: its work, and when buckets become ready."""

    forward_s: float
    bucket_s: tuple[float, ...]
    """Work of backward before each bucket is ready."""
    backward_s: float
    rest_s: float
    threads: float


@dataclass(frozen=True, slots=True)
class Span:
    """One recorded activity of a rank."""

    rank: int
    verb: str
    sync: int
    """The index of the synchronisation, or `MODEL`."""
    chunk: int
    queue: str
    start_s: float
    end_s: float
    num_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """The result of simulating one step."""

    step_s: float
    """Seconds of the step on the slowest rank."""
    backward_end_s: float
    """When the slowest rank had computed its last gradient."""
    exchange_end_s: float
    """When the slowest rank had the last mean."""
    sent_bytes: float
    """Bytes that the first rank sent."""
    syncs: Sequence[Synchronisation] = field(repr=False)
    spans: list[Span] = field(repr=False)
    """What happened when; empty unless the step was recorded."""

    @property
    def exposed_s(self) -> float:
        """The part of the exchange that backward did not hide."""
        return max(self.exchange_end_s - self.backward_end_s, 0.0)


class SimulatedCluster:
    """The ranks that are simulated, and the hardware that they share.

    Args:
        profile: Costs of the hardware, measured or made up.
        num_ranks: N.
        ranks: The ranks that are simulated: all, or one that stands for all.
        hosts: The host of each of the N ranks.
        total_bytes: About how much a rank sends, which decides the size of segments.
        record: Whether to record spans.
    """

    def __init__(
        self,
        profile: Profile,
        num_ranks: int,
        ranks: Sequence[int],
        hosts: Sequence[int],
        total_bytes: float,
        *,
        record: bool = False,
    ) -> None:
        self.clock = Clock()
        self.profile = profile
        self.num_ranks = num_ranks
        self.hosts = tuple(hosts)
        self.spans: list[Span] | None = [] if record else None
        self.is_alone = len(ranks) < num_ranks
        """Whether one rank stands for all."""
        machine = profile.machine
        # A rank that stands for all gets its share of what they share; so does a rank that
        # exchanges nothing, whose step the others are compared with.
        has_share = self.is_alone or num_ranks == 1
        num_sharing = 1 if has_share else min(machine.num_ranks, num_ranks)
        cores = machine.cores / machine.num_ranks if has_share else machine.cores
        segment_bytes = max(total_bytes / MOST_SEGMENTS, LEAST_SEGMENT_BYTES)
        self.ranks: list[SimulatedRank] = []
        host = Processor(self.clock, cores)
        for place, rank in enumerate(ranks):
            if place and place % num_sharing == 0:
                host = Processor(self.clock, cores)
            # Times from a GPU that ranks share include the wait for the other ranks already.
            device = Processor(self.clock, 1.0) if machine.device == "cuda" else host
            self.ranks.append(SimulatedRank(self, rank, host, device, segment_bytes))
        self.by_rank = {one.rank: one for one in self.ranks}

    def run(self, model: ModelWork, syncs: Sequence[Synchronisation]) -> SimulatedStep:
        """Runs one step."""
        # A synchronisation reaches the wire when all ranks have begun it; so does an all-reduce.
        for place, one in enumerate(self.ranks):
            one.begin(model, syncs, place)
        self.clock.run()
        left = sum(one.num_syncs_left for one in self.ranks)
        assert left == 0, f"{left} synchronisations never end"
        return SimulatedStep(
            step_s=max(one.end_s for one in self.ranks),
            backward_end_s=max(one.backward_end_s for one in self.ranks),
            exchange_end_s=max(one.exchange_end_s for one in self.ranks),
            sent_bytes=self.ranks[0].sent_bytes,
            syncs=syncs,
            spans=self.spans or [],
        )


class _Progress:
    """How far one synchronisation has come on one rank."""

    def __init__(self, index: int, graph: CostedGraph) -> None:
        self.index = index
        self.graph = graph
        self.tasks = graph.tasks
        self.waiting = list(graph.num_needs)
        self.num_left = len(graph.tasks)
        self.start_s: float | None = None
        self.arrived: list[Call] = []
        """Messages that wait for this rank to begin."""
        self.with_sends: Mirrors = {}
        """Where one rank stands for all: its sends, and the receives that come with them."""
        self.with_others: Mirrors = {}
        """The same for other tasks."""


class SimulatedRank:
    """One rank: its model, which runs on `device` as codecs do, its queues and its messages."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        rank: int,
        host: Processor,
        device: Processor,
        segment_bytes: float,
    ) -> None:
        network = cluster.profile.network
        self.cluster = cluster
        self.clock = cluster.clock
        self.rank = rank
        self.host = host
        self.device = device
        rate, local = network.bytes_per_s, network.local_bytes_per_s or network.bytes_per_s
        self.egress, self.ingress, self.local_out, self.local_in = (
            Link(self.clock, each, segment_bytes, host, network.byte_work_s / 2)
            for each in (rate, rate, local, local)
        )
        self.half_message_s = network.message_work_s / 2
        self.latency_s = network.latency_s
        self.num_idle = cluster.profile.machine.exchange_threads
        self.ready: list[tuple[int, int]] = []
        self.sending = WorkQueue(host)
        self.receiving = WorkQueue(host)
        self.num_syncs_left = 0
        self.is_backward_done = False
        self.end_s = self.backward_end_s = self.exchange_end_s = 0.0
        self.arrivals: dict[tuple[int, int], int] = {}
        """On the first rank: how many ranks have come to each all-reduce."""
        self.uncounted_bytes = 0.0
        """Bytes that all-reduces send, less the bytes for which they occupy the link."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that were sent so far."""
        return self.egress.sent_bytes + self.local_out.sent_bytes + self.uncounted_bytes

    # --- the model --------------------------------------------------------------------------------

    def begin(self, model: ModelWork, syncs: Sequence[Synchronisation], place: int) -> None:
        """Starts the step; `place` is this rank's among those that are simulated."""
        self.syncs = [_Progress(k, sync.graphs[place]) for k, sync in enumerate(syncs)]
        self.num_syncs_left = len(syncs)
        self.model = model
        self.by_bucket: dict[int, list[_Progress]] = {}
        for sync, progress in zip(syncs, self.syncs, strict=True):
            self.by_bucket.setdefault(sync.bucket, []).append(progress)
        self.bucket = 0
        self._compute("forward", model.forward_s, self._backward)

    def _compute(self, verb: str, work_s: float, then: Call) -> None:
        start_s = self.clock.now_s

        def done() -> None:
            if verb:
                self.record(verb, MODEL, 0, "model", start_s)
            then()

        self.device.work(work_s, done, self.model.threads)

    def _backward(self) -> None:
        """Computes gradients up to the next bucket, or to the end."""
        edges = self.model.bucket_s
        before = edges[self.bucket - 1] if self.bucket else 0.0
        if self.bucket == 0:
            self.backward_start_s = self.clock.now_s
        if self.bucket < len(edges):
            self._compute("", max(edges[self.bucket] - before, 0.0), self._bucket_ready)
        else:
            self._compute("", max(self.model.backward_s - before, 0.0), self._backward_done)

    def _bucket_ready(self) -> None:
        for progress in self.by_bucket.get(self.bucket, ()):
            self._submit(progress)
        self.bucket += 1
        self._backward()

    def _backward_done(self) -> None:
        self.backward_end_s = self.clock.now_s
        self.is_backward_done = True
        self.record("backward", MODEL, 0, "model", self.backward_start_s)
        if self.num_syncs_left == 0:
            self._rest()

    def _rest(self) -> None:
        self.exchange_end_s = self.clock.now_s
        self._compute("optimizer", self.model.rest_s, self._end)

    def _end(self) -> None:
        self.end_s = self.clock.now_s

    # --- tasks ------------------------------------------------------------------------------------

    def _submit(self, progress: _Progress) -> None:
        progress.start_s = self.clock.now_s
        is_alone = self.cluster.is_alone
        if is_alone:
            progress.with_sends, progress.with_others = mirrors(progress.tasks, self._hops())
        for arrive in progress.arrived:
            arrive()
        progress.arrived.clear()
        for place, needs in enumerate(progress.waiting):
            if needs == 0:
                self._dispatch(progress, place)
        if not progress.tasks:
            self._finish()
        if is_alone:
            self._receive_with(progress, BEGIN)

    def _dispatch(self, progress: _Progress, place: int) -> None:
        task = progress.tasks[place]
        if task.verb in COMPUTING:
            heapq.heappush(self.ready, (progress.index, place))
            self._start_ready()
        elif task.verb is Verb.SEND:
            self.sending.add(self.half_message_s, lambda: self._send(progress, place))
        elif task.verb is Verb.ALL_REDUCE:
            self.sending.add(self.half_message_s, lambda: self._all_reduce(progress, place))

    def _start_ready(self) -> None:
        while self.num_idle and self.ready:
            index, place = heapq.heappop(self.ready)
            self.num_idle -= 1
            self._start(self.syncs[index], place)

    def _start(self, progress: _Progress, place: int) -> None:
        task, start_s = progress.tasks[place], self.clock.now_s

        def done() -> None:
            self.num_idle += 1
            self.record(task.verb.value, progress.index, task.chunk, "compute", start_s)
            self.complete(progress, place)
            self._start_ready()

        self.device.work(task.work_s, done)

    def complete(self, progress: _Progress, place: int) -> None:
        """Ends a task and dispatches those that waited for it alone."""
        for follower in progress.tasks[place].followers:
            progress.waiting[follower] -= 1
            if progress.waiting[follower] == 0:
                self._dispatch(progress, follower)
        progress.num_left -= 1
        if self.cluster.is_alone:
            self._receive_with(progress, place)
        if progress.num_left == 0:
            self._finish()

    def _finish(self) -> None:
        self.num_syncs_left -= 1
        if self.num_syncs_left == 0 and self.is_backward_done:
            self._rest()

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, progress: _Progress, place: int) -> None:
        task, start_s = progress.tasks[place], self.clock.now_s
        peer = self if self.cluster.is_alone else self.cluster.by_rank[task.peer]
        there = peer.syncs[progress.index]
        if self.cluster.is_alone:
            targets = progress.with_sends.get(place, [])
        else:
            targets = [(there.graph.receives[task.chunk, task.kind, self.rank], 0.0)]

        def passed(share: float, is_last: bool) -> None:
            for target, delay_s in targets:
                peer.receive(there, target, share, is_last, delay_s)
            if is_last:
                self.record("send", progress.index, task.chunk, "send", start_s, task.num_bytes)
                self.complete(progress, place)

        def go() -> None:
            link = self.local_out if self._is_local(progress, task.peer) else self.egress
            link.carry(task.peer, task.num_bytes, passed)

        # No byte moves before the receiver has asked for it.
        if there.start_s is None:
            there.arrived.append(go)
        else:
            go()

    def _is_local(self, progress: _Progress, peer: int) -> bool:
        hosts = self.cluster.hosts
        return hosts[peer] == hosts[progress.graph.rank]

    def receive(
        self, progress: _Progress, place: int, share: float, is_last: bool, delay_s: float
    ) -> None:
        """Takes in a segment, a share of a message, after the link's latency and a delay."""
        task = progress.tasks[place]
        link = self.local_in if self._is_local(progress, task.peer) else self.ingress

        def passed(_: float, is_done: bool) -> None:
            if is_done and is_last:
                self.receiving.add(self.half_message_s, lambda: self._received(progress, place))

        self.clock.after(
            self.latency_s + delay_s,
            lambda: link.carry(task.peer, task.num_bytes * share, passed),
        )

    def _received(self, progress: _Progress, place: int) -> None:
        task, start_s = progress.tasks[place], progress.start_s
        assert start_s is not None
        self.record("recv", progress.index, task.chunk, "recv", start_s, task.num_bytes)
        self.complete(progress, place)

    def _hops(self) -> Hops:
        """Returns what hops between other ranks cost, which this rank does not see."""
        network, speed = self.cluster.profile.network, min(self.host.cores, 1.0)
        return Hops(
            message_s=network.latency_s + network.message_work_s / speed,
            byte_s=1 / network.bytes_per_s,
            work_factor=1 / speed,
            last_merge=ring.last_merge_depth(self.cluster.num_ranks),
        )

    def _receive_with(self, progress: _Progress, place: int) -> None:
        """Where this rank stands for all: starts the receives that come with another task."""
        for other, delay_s in progress.with_others.get(place, ()):
            self.receive(progress, other, 1.0, True, delay_s)

    def _all_reduce(self, progress: _Progress, place: int) -> None:
        """Waits for all ranks; then everyone sends and receives."""
        task, ranks = progress.tasks[place], self.cluster.ranks
        arrivals, key = ranks[0].arrivals, (progress.index, place)
        arrivals[key] = arrivals.get(key, 0) + 1
        if arrivals[key] < len(ranks):
            return
        network, num_ranks = self.cluster.profile.network, self.cluster.num_ranks
        busy_bytes = _all_reduce_bytes(network, num_ranks, task.num_bytes)
        num_left = len(ranks)
        start_s = self.clock.now_s

        def passed(_: float, is_last: bool) -> None:
            nonlocal num_left
            num_left -= is_last
            if num_left == 0:
                self.clock.after(_all_reduce_delay_s(network, num_ranks), all_done)

        def all_done() -> None:
            for one in ranks:
                one.record(
                    "all_reduce", progress.index, task.chunk, "communicate", start_s, task.num_bytes
                )
                one.complete(one.syncs[progress.index], place)

        sent_bytes = _sent_share(num_ranks) * task.num_bytes
        is_local = len(set(self.cluster.hosts)) == 1
        for one in ranks:
            one.uncounted_bytes += sent_bytes - busy_bytes
            (one.local_out if is_local else one.egress).carry(RING, busy_bytes, passed)

    def record(
        self,
        verb: str,
        sync: int,
        chunk: int,
        queue: str,
        start_s: float,
        num_bytes: float | None = None,
    ) -> None:
        """Records a span that ends now."""
        spans = self.cluster.spans
        if spans is not None:
            end_s = self.clock.now_s
            spans.append(Span(self.rank, verb, sync, chunk, queue, start_s, end_s, num_bytes))


def _sent_share(num_ranks: int) -> float:
    """Returns how many bytes each rank must send for each byte that an all-reduce adds up."""
    return 2 * (num_ranks - 1) / num_ranks


def _all_reduce_bytes(network: Network, num_ranks: int, num_bytes: float) -> float:
    """Returns the bytes for which an all-reduce occupies a link: those that it must send, and
    more where it was measured to take longer."""
    measured = _sent_share(network.num_ranks)
    if measured == 0:
        return _sent_share(num_ranks) * num_bytes
    seconds = network.all_reduce.slope * num_bytes
    return seconds * network.bytes_per_s * _sent_share(num_ranks) / measured


def _all_reduce_delay_s(network: Network, num_ranks: int) -> float:
    """Returns the time of an all-reduce that does not depend on its bytes."""
    if network.num_ranks < 2:
        return 2 * (num_ranks - 1) * network.latency_s
    return network.all_reduce.fixed * (num_ranks - 1) / (network.num_ranks - 1)
