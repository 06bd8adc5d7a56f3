"""One rank of a simulated cluster: its model, its queues, its messages."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hipress.casync.graphs.graph import COMPUTING, Verb
from hipress.casync.graphs.strategies import ring
from hipress.secopa.costs import Script
from hipress.secopa.hardware import Call, Line, Processor, Thread
from hipress.secopa.step import Backward, Job, Span
from hipress.secopa.symmetry import BEGIN, Hops, Mirrors, mirrors

if TYPE_CHECKING:
    from hipress.secopa.player import Cluster

RING = -1
"""The connection of all-reduces."""


class Running:
    """One job on one rank."""

    def __init__(self, index: int, script: Script) -> None:
        self.index = index
        self.script = script
        self.steps = script.steps
        self.waiting = list(script.num_needs)
        self.left = len(script.steps)
        self.start_s: float | None = None
        self.arrived: list[Call] = []
        """Messages that wait for this rank to begin."""
        self.with_sends: Mirrors = {}
        """Where one rank stands for all: its sends, and the receives that come with them."""
        self.with_others: Mirrors = {}
        """The same for other steps."""


class Player:
    """One rank."""

    def __init__(
        self, cluster: Cluster, rank: int, host: Processor, device: Processor, lines: list[Line]
    ) -> None:
        self.cluster = cluster
        self.clock = cluster.clock
        self.rank = rank
        self.host = host
        self.device = device
        self.egress, self.ingress, self.local_out, self.local_in = lines
        self.half_message_s = cluster.profile.network.message_work_s / 2
        self.latency_s = cluster.profile.network.latency_s
        self.idle = cluster.profile.machine.exchange_threads
        self.ready: list[tuple[int, int]] = []
        self.posting = Thread(host)
        self.taking = Thread(host)
        self.is_alone = len(cluster.ranks) < cluster.num_ranks
        self.running: list[Running] = []
        self.jobs_left = 0
        self.is_waiting = False
        """Backward is done; the exchange may not be."""
        self.end_s = self.backward_end_s = self.exchange_end_s = 0.0
        self.sums: dict[tuple[int, int], int] = {}
        self._unseen_bytes = 0.0
        """What all-reduces send, less what they keep the line busy for."""

    @property
    def sent_bytes(self) -> float:
        """So far."""
        return self.egress.sent_bytes + self.local_out.sent_bytes + self._unseen_bytes

    # --- the model --------------------------------------------------------------------------------

    def begin(self, model: Backward, jobs: Sequence[Job]) -> None:
        """Starts the step."""
        place = self.cluster.ranks.index(self.rank)
        self.running = [Running(k, job.scripts[place]) for k, job in enumerate(jobs)]
        self.jobs_left = len(jobs)
        self.model = model
        self.by_bucket: dict[int, list[Running]] = {}
        for job, running in zip(jobs, self.running, strict=True):
            self.by_bucket.setdefault(job.bucket, []).append(running)
        self.bucket = 0
        self._compute("forward", model.forward_s, self._backward)

    def _compute(self, verb: str, work_s: float, then: Call) -> None:
        start_s = self.clock.now_s

        def done() -> None:
            if verb:
                self.note(verb, -1, 0, "model", start_s)
            then()

        self.device.work(work_s, done, self.model.threads)

    def _backward(self) -> None:
        """To the next bucket, or to the end."""
        edges = self.model.bucket_s
        before = edges[self.bucket - 1] if self.bucket else 0.0
        if self.bucket == 0:
            self.backward_start_s = self.clock.now_s
        if self.bucket < len(edges):
            self._compute("", max(edges[self.bucket] - before, 0.0), self._give)
        else:
            self._compute("", max(self.model.backward_s - before, 0.0), self._wait)

    def _give(self) -> None:
        for running in self.by_bucket.get(self.bucket, ()):
            self._submit(running)
        self.bucket += 1
        self._backward()

    def _wait(self) -> None:
        self.backward_end_s = self.clock.now_s
        self.is_waiting = True
        self.note("backward", -1, 0, "model", self.backward_start_s)
        if self.jobs_left == 0:
            self._rest()

    def _rest(self) -> None:
        self.exchange_end_s = self.clock.now_s
        self._compute("optimizer", self.model.rest_s, self._end)

    def _end(self) -> None:
        self.end_s = self.clock.now_s

    # --- jobs -------------------------------------------------------------------------------------

    def _submit(self, running: Running) -> None:
        running.start_s = self.clock.now_s
        if self.is_alone:
            running.with_sends, running.with_others = mirrors(running.steps, self._hops())
        for arrive in running.arrived:
            arrive()
        running.arrived.clear()
        for place, needs in enumerate(running.waiting):
            if needs == 0:
                self._dispatch(running, place)
        if not running.steps:
            self._finish()
        if self.is_alone:
            self._with(running, BEGIN)

    def _dispatch(self, running: Running, place: int) -> None:
        step = running.steps[place]
        if step.verb in COMPUTING:
            heapq.heappush(self.ready, (running.index, place))
            self._next()
        elif step.verb is Verb.SEND:
            self.posting.serve(self.half_message_s, lambda: self._send(running, place))
        elif step.verb is Verb.ALL_REDUCE:
            self.posting.serve(self.half_message_s, lambda: self._sum_up(running, place))

    def _next(self) -> None:
        while self.idle and self.ready:
            index, place = heapq.heappop(self.ready)
            self.idle -= 1
            self._start(self.running[index], place)

    def _start(self, running: Running, place: int) -> None:
        step, start_s = running.steps[place], self.clock.now_s

        def done() -> None:
            self.idle += 1
            self.note(step.verb.value, running.index, step.chunk, "compute", start_s)
            self.release(running, place)
            self._next()

        self.device.work(step.work_s, done)

    def release(self, running: Running, place: int) -> None:
        for follower in running.steps[place].followers:
            running.waiting[follower] -= 1
            if running.waiting[follower] == 0:
                self._dispatch(running, follower)
        running.left -= 1
        if self.is_alone:
            self._with(running, place)
        if running.left == 0:
            self._finish()

    def _finish(self) -> None:
        self.jobs_left -= 1
        if self.jobs_left == 0 and self.is_waiting:
            self._rest()

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, running: Running, place: int) -> None:
        step, start_s = running.steps[place], self.clock.now_s
        peer = self.cluster.by_rank[step.peer] if not self.is_alone else self
        there = peer.running[running.index]
        if self.is_alone:
            targets = running.with_sends.get(place, [])
        else:
            targets = [(there.script.receives[step.chunk, step.kind, self.rank], 0.0)]

        def passed(share: float, last: bool) -> None:
            for target, delay_s in targets:
                peer.take(there, target, share, last, delay_s)
            if last:
                self.note("send", running.index, step.chunk, "send", start_s, step.num_bytes)
                self.release(running, place)

        def go() -> None:
            line = self.local_out if self._is_local(running, step.peer) else self.egress
            line.carry(step.peer, step.num_bytes, passed)

        # No byte moves before the receiver has asked for it.
        if there.start_s is None:
            there.arrived.append(go)
        else:
            go()

    def _is_local(self, running: Running, peer: int) -> bool:
        hosts = self.cluster.hosts
        return hosts[peer] == hosts[running.script.rank]

    def take(
        self, running: Running, place: int, share: float, last: bool, delay_s: float = 0.0
    ) -> None:
        """A segment of a message is on its way to this rank, after a delay besides the link's."""
        step = running.steps[place]
        line = self.local_in if self._is_local(running, step.peer) else self.ingress

        def passed(_: float, done: bool) -> None:
            if done and last:
                self.taking.serve(self.half_message_s, lambda: self._received(running, place))

        self.clock.after(
            self.latency_s + delay_s,
            lambda: line.carry(step.peer, step.num_bytes * share, passed),
        )

    def _received(self, running: Running, place: int) -> None:
        step, start_s = running.steps[place], running.start_s
        assert start_s is not None
        self.note("recv", running.index, step.chunk, "recv", start_s, step.num_bytes)
        self.release(running, place)

    def _hops(self) -> Hops:
        """What others take for what this rank does not see."""
        network, speed = self.cluster.profile.network, min(self.host.cores, 1.0)
        return Hops(
            message_s=network.latency_s + network.message_work_s / speed,
            byte_s=1 / network.bytes_per_s,
            work_factor=1 / speed,
            last_merge=ring.last_merge_depth(self.cluster.num_ranks),
        )

    def _with(self, running: Running, place: int) -> None:
        """Where this rank stands for all: receives that come when another step is done."""
        for other, delay_s in running.with_others.get(place, ()):
            self.take(running, other, 1.0, True, delay_s)

    def _sum_up(self, running: Running, place: int) -> None:
        """All ranks must have come; then everyone sends and receives."""
        step = running.steps[place]
        key = (running.index, place)
        players = self.cluster.players
        first = players[0]
        first.sums[key] = first.sums.get(key, 0) + 1
        if first.sums[key] < len(players):
            return
        num_bytes = self.cluster.all_reduce_bytes(step.num_bytes)
        left = len(players)
        start_s = self.clock.now_s

        def passed(_: float, last: bool) -> None:
            nonlocal left
            left -= last
            if left == 0:
                self.clock.after(self.cluster.all_reduce_delay_s(), all_done)

        def all_done() -> None:
            for player in players:
                player.note(
                    "all_reduce", running.index, step.chunk, "communicate", start_s, step.num_bytes
                )
                player.release(player.running[running.index], place)

        sent_bytes = self.cluster.sent_share * step.num_bytes
        is_local = len(set(self.cluster.hosts)) == 1
        for player in players:
            player._unseen_bytes += sent_bytes - num_bytes
            (player.local_out if is_local else player.egress).carry(RING, num_bytes, passed)

    def note(
        self,
        verb: str,
        job: int,
        chunk: int,
        queue: str,
        start_s: float,
        num_bytes: float | None = None,
    ) -> None:
        spans = self.cluster.spans
        if spans is not None:
            end_s = self.clock.now_s
            spans.append(Span(self.rank, verb, job, chunk, queue, start_s, end_s, num_bytes))
