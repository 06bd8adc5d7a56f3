"""Runs the lowered graphs of one training step on a simulated cluster.

Each rank does what `casync.engine.executors` does, on a simulated clock: computing tasks wait for a
thread, and the task that stands first in the graph of the oldest synchronisation goes first;
messages wait for their link.

Where a schedule decides (`hipress.casync.graphs.schedules`), its order goes before that of the
synchronisations, and messages wait at the rank until its credit allows them to start.

A cluster of few ranks simulates all of them. Where ranks are many and alike, one rank stands for
all: the others send what it sends, at the same time, so each of its receives gets its bytes when a
send of its own of the same kind does (see `hipress.secopa.symmetry`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from hipress.casync.graphs import schedules
from hipress.casync.graphs.graph import COMPUTING, Verb
from hipress.casync.graphs.schedules import Order
from hipress.casync.graphs.strategies import ring
from hipress.profile import Network, Profile
from hipress.secopa.costs import CostedGraph, CostedTask
from hipress.secopa.hardware import Call, Clock, Link, Processor, WorkQueue
from hipress.secopa.symmetry import BEGIN, Hops, PairedReceives, pair_receives

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
    """The bucket, or with a schedule the unit, to which it belongs."""
    graphs: tuple[CostedGraph, ...]
    """One for each rank that is simulated."""
    order: Order | None = None
    """Its places in the schedule, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What the forward pass waits for: gradients that a schedule starts at once."""

    needed_s: float
    """Work of the forward pass before one of their parameters is used."""
    update_s: float
    """Work of the optimizer on them."""


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """The model's part of a step: its work, and when buckets become ready.

    Without units a step is forward, backward, what is left of the exchange, and the rest. With
    units it is backward and then the next forward pass, which waits for each unit where it needs
    it; the optimizer works on each unit by itself.
    """

    forward_s: float
    bucket_s: tuple[float, ...]
    """Work of backward before each bucket, or unit, is ready."""
    backward_s: float
    rest_s: float
    threads: float
    units: tuple[Unit, ...] | None = None
    """The units of a schedule, in the order in which backward completes them."""


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
    stalled_s: float | None = None
    """Seconds that forward waited for the exchange on the rank where it waited longest; None if
    the step has no schedule."""
    sent_bytes: float
    """Bytes that the first rank sent."""
    syncs: Sequence[Synchronisation] = field(repr=False)
    spans: list[Span] = field(repr=False)
    """What happened when; empty unless the step was recorded."""

    @property
    def exposed_s(self) -> float:
        """The part of the exchange that the model's work did not hide."""
        if self.stalled_s is not None:
            return self.stalled_s
        return max(self.exchange_end_s - self.backward_end_s, 0.0)


class SimulatedCluster:
    """The ranks that are simulated, and the hardware that they share.

    Args:
        profile: Costs of the hardware, measured or made up.
        num_ranks: N.
        ranks: The ranks that are simulated: all, or one that stands for all.
        hosts: The host of each of the N ranks.
        total_bytes: About how much a rank sends, which decides the size of segments.
        credit_bytes: Most bytes that a rank has under way at once, if there is a schedule.
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
        credit_bytes: float = math.inf,
        record: bool = False,
    ) -> None:
        self.clock = Clock()
        self.credit_bytes = credit_bytes
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
            stalled_s=None if model.units is None else max(one.stalled_s for one in self.ranks),
            sent_bytes=self.ranks[0].sent_bytes,
            syncs=syncs,
            spans=self.spans or [],
        )


class _Progress:
    """How far one synchronisation has come on one rank."""

    def __init__(self, index: int, graph: CostedGraph, order: Order | None) -> None:
        self.index = index
        self.order = order
        self.graph = graph
        self.tasks = graph.tasks
        self.waiting = list(graph.num_needs)
        self.num_left = len(graph.tasks)
        self.start_s: float | None = None
        self.arrived: list[Call] = []
        """Messages that wait for this rank to begin."""
        self.with_sends: PairedReceives = {}
        """Where one rank stands for all: its sends, and the receives that come with them."""
        self.with_others: PairedReceives = {}
        """The same for tasks other than sends."""

    def place_of(self, place: int) -> int:
        """Returns the place of a task in the schedule, or 0 if there is none."""
        if self.order is None:
            return 0
        return self.order.back if self.tasks[place].is_back else self.order.out


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
        self.ready: list[tuple[int, int, int]] = []
        self.scheduled: list[tuple[int, ...]] = []
        """Messages of a schedule that wait for credit."""
        self.num_under_way = 0
        self.under_way_bytes = 0.0
        """Messages of a schedule that have started and not yet passed this rank's link."""
        self.sending = WorkQueue(host)
        self.receiving = WorkQueue(host)
        self.num_syncs_left = 0
        self.is_backward_done = False
        self.end_s = self.backward_end_s = self.exchange_end_s = self.stalled_s = 0.0
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
        self.syncs = [_Progress(k, sync.graphs[place], sync.order) for k, sync in enumerate(syncs)]
        self.num_syncs_left = len(syncs)
        self.model = model
        self.by_bucket: dict[int, list[_Progress]] = {}
        for sync, progress in zip(syncs, self.syncs, strict=True):
            self.by_bucket.setdefault(sync.bucket, []).append(progress)
        self.bucket = 0
        if model.units is None:
            self.compute("forward", model.forward_s, self._backward)
        else:
            self.next_forward = _NextForward(self, model, model.units)
            self._backward()

    def compute(self, verb: str, work_s: float, then: Call) -> None:
        """Does work of the model; a verb names it in the timeline."""
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
            self.compute("", max(edges[self.bucket] - before, 0.0), self._bucket_ready)
        else:
            self.compute("", max(self.model.backward_s - before, 0.0), self._backward_done)

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
            self.exchange_end_s = self.clock.now_s
        if self.model.units is not None:
            self.next_forward.go_on()
        elif self.num_syncs_left == 0:
            self._rest()

    def _rest(self) -> None:
        self.compute("optimizer", self.model.rest_s, self.end)

    def end(self) -> None:
        """Ends the step."""
        self.end_s = self.clock.now_s

    # --- tasks ------------------------------------------------------------------------------------

    def _submit(self, progress: _Progress) -> None:
        progress.start_s = self.clock.now_s
        is_alone = self.cluster.is_alone
        if is_alone:
            progress.with_sends, progress.with_others = pair_receives(progress.tasks, self._hops())
        for arrive in progress.arrived:
            arrive()
        progress.arrived.clear()
        for place, needs in enumerate(progress.waiting):
            if needs == 0:
                self._dispatch(progress, place)
        if not progress.tasks:
            self._finish(progress)
        if is_alone:
            self._receive_with(progress, BEGIN)

    def _dispatch(self, progress: _Progress, place: int) -> None:
        task = progress.tasks[place]
        if task.verb in COMPUTING:
            heapq.heappush(self.ready, (progress.place_of(place), progress.index, place))
            self._start_ready()
        elif task.verb is Verb.SEND and progress.order is not None:
            self._schedule(progress, place)
        elif task.verb is Verb.SEND:
            self.sending.add(self.half_message_s, lambda: self._send(progress, place))
        elif task.verb is Verb.ALL_REDUCE:
            self.sending.add(self.half_message_s, lambda: self._all_reduce(progress, place))

    def _start_ready(self) -> None:
        while self.num_idle and self.ready:
            _, index, place = heapq.heappop(self.ready)
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
            self._finish(progress)

    def _finish(self, progress: _Progress) -> None:
        self.num_syncs_left -= 1
        if self.num_syncs_left == 0:
            self.exchange_end_s = self.clock.now_s
        if self.model.units is not None:
            self.next_forward.arrive(progress.index)
        elif self.num_syncs_left == 0 and self.is_backward_done:
            self._rest()

    # --- messages ---------------------------------------------------------------------------------

    def _schedule(self, progress: _Progress, place: int) -> None:
        """Queues a message; the first in the order of the schedule starts as credit allows."""
        task = progress.tasks[place]
        turn = schedules.turn(task.chunk, task.peer, self.rank, self.cluster.num_ranks)
        key = (progress.place_of(place), progress.index, *turn, place)
        heapq.heappush(self.scheduled, key)
        self._start_scheduled()

    def _start_scheduled(self) -> None:
        while self.scheduled:
            _, index, *_, place = self.scheduled[0]
            progress = self.syncs[index]
            task = progress.tasks[place]
            num_bytes = task.num_bytes if task.verb is Verb.SEND else 0.0
            if self.num_under_way and self.under_way_bytes + num_bytes > self.cluster.credit_bytes:
                return
            heapq.heappop(self.scheduled)
            if task.verb is Verb.SEND:
                self.num_under_way += 1
                self.under_way_bytes += num_bytes
                self.sending.add(self.half_message_s, partial(self._send, progress, place))
            else:
                # Another rank, which is like this one, sends it when this one would.
                self.receive(progress, place, 1.0, True, 0.0)

    def _has_left(self, task: CostedTask) -> None:
        self.num_under_way -= 1
        self.under_way_bytes -= task.num_bytes
        if self.num_under_way == 0:
            self.under_way_bytes = 0.0  # drops rounding errors
        self._start_scheduled()

    def _send(self, progress: _Progress, place: int) -> None:
        task, start_s = progress.tasks[place], self.clock.now_s
        peer = self if self.cluster.is_alone else self.cluster.by_rank[task.peer]
        there = peer.syncs[progress.index]
        later: list[tuple[int, float]] = []
        if self.cluster.is_alone:
            targets = progress.with_sends.get(place, [])
            if progress.order is not None:
                later = [target for target in targets if target[1] > 0]
                targets = [target for target in targets if target[1] == 0]
        else:
            targets = [(there.graph.receives[task.chunk, task.kind, self.rank], 0.0)]

        def passed(share: float, is_last: bool) -> None:
            for target, delay_s in targets:
                peer.receive(there, target, share, is_last, delay_s)
            if is_last:
                self.record("send", progress.index, task.chunk, "send", start_s, task.num_bytes)
                self.complete(progress, place)
                for other, delay_s in later:
                    self.clock.after(delay_s, partial(self._schedule, progress, other))
                if progress.order is not None:
                    self._has_left(task)

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
            if progress.order is None:
                self.receive(progress, other, 1.0, True, delay_s)
            else:
                self.clock.after(delay_s, partial(self._schedule, progress, other))

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


class _NextForward:
    """The forward pass that follows backward on one rank, and the optimizer's work on each unit.

    The model does one thing at a time. Where forward needs a unit whose mean has not arrived, the
    optimizer works on others meanwhile, those first that are needed first.
    """

    def __init__(self, rank: SimulatedRank, model: ModelWork, units: Sequence[Unit]) -> None:
        self._rank = rank
        self._model = model
        self._units = units
        self._missing = {sync.index for sync in rank.syncs}
        """Units whose mean has not arrived."""
        self._order = forward_order([unit.needed_s for unit in units])
        self._num_used = 0
        self._outdated = dict.fromkeys(self._order)
        """Units that the optimizer has not worked on, in the order in which they are needed."""
        self._done_s = 0.0
        """Work of forward that has been done."""
        self._is_busy = False
        self._forward_start_s: float | None = None
        """Since when forward has worked without a break."""
        self._stall_start_s: float | None = None
        """Since when there has been nothing to do."""

    def arrive(self, unit: int) -> None:
        """Takes note that the mean of a unit has arrived."""
        self._missing.discard(unit)
        self.go_on()

    def go_on(self) -> None:
        """Starts what comes next, unless backward or something else is at work."""
        if self._is_busy or not self._rank.is_backward_done:
            return
        while self._num_used < len(self._order):
            unit = self._order[self._num_used]
            if self._units[unit].needed_s > self._done_s:
                self._forward(self._units[unit].needed_s)
                return
            if unit not in self._outdated:
                self._num_used += 1
                continue
            known = next((one for one in self._outdated if one not in self._missing), None)
            if known is None:
                self._end_forward()
                if self._stall_start_s is None:
                    self._stall_start_s = self._rank.clock.now_s
                return
            del self._outdated[known]
            if self._units[known].update_s > 0:
                self._update(known)
                return
            if known == unit:
                self._end_stall()
        if self._model.forward_s > self._done_s:
            self._forward(self._model.forward_s)
        else:
            self._end_stall()
            self._end_forward()
            self._rank.end()

    def _forward(self, until_s: float) -> None:
        self._end_stall()
        if self._forward_start_s is None:
            self._forward_start_s = self._rank.clock.now_s
        work_s, self._done_s = until_s - self._done_s, until_s
        self._work("", work_s)

    def _update(self, unit: int) -> None:
        self._end_stall()
        self._end_forward()
        self._work("optimizer", self._units[unit].update_s)

    def _work(self, verb: str, work_s: float) -> None:
        self._is_busy = True

        def done() -> None:
            self._is_busy = False
            self.go_on()

        self._rank.compute(verb, work_s, done)

    def _end_forward(self) -> None:
        start_s, self._forward_start_s = self._forward_start_s, None
        if start_s is not None:
            self._rank.record("forward", MODEL, 0, "model", start_s)

    def _end_stall(self) -> None:
        start_s, self._stall_start_s = self._stall_start_s, None
        if start_s is None:
            return
        self._rank.stalled_s += self._rank.clock.now_s - start_s
        unit = self._order[self._num_used]
        self._rank.record("stall", unit, 0, "model", start_s)


def forward_order(needed_s: Sequence[float]) -> list[int]:
    """Returns the indices of units, given when forward needs each, in that order.

    Of those that it needs at once, the one that backward completes last comes first.

    Example:
        >>> forward_order([2.0, 0.0, 0.0])
        [2, 1, 0]
    """
    return sorted(range(len(needed_s)), key=lambda unit: (needed_s[unit], -unit))


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
