"""Plays the lowered graphs of one training step on a simulated cluster.

It does what `casync.executor` does, on another clock: computing tasks wait for a thread, the task
that stands first in the graph of the oldest job goes first; messages wait for their line.

Where ranks are many and alike only one is played, and stands for all: what it sends, others send
at the same time, so each of its receives gets its bytes when a send of its own of the same kind
does. Where they are few, all are played.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipress.profile import Profile
from hipress.secopa.hardware import Clock, Line, Processor
from hipress.secopa.rank import Player
from hipress.secopa.step import Backward, Job, Played, Span

MOST_SEGMENTS = 256
"""Of a rank's bytes in a step."""
LEAST_SEGMENT_BYTES = 2**16


class Cluster:
    """What the ranks that are played run on.

    Args:
        profile: Measured, or made up.
        num_ranks: N.
        ranks: Those that are played: all, or one for all.
        hosts: The host of each of the N ranks.
        total_bytes: About what a rank sends: decides the size of segments.
        spans: Where to note what happened, if anywhere.
    """

    def __init__(
        self,
        profile: Profile,
        num_ranks: int,
        ranks: Sequence[int],
        hosts: Sequence[int],
        total_bytes: float,
        spans: list[Span] | None = None,
    ) -> None:
        self.clock = Clock()
        self.profile = profile
        self.num_ranks = num_ranks
        self.ranks = tuple(ranks)
        self.hosts = tuple(hosts)
        self.spans = spans
        machine, network = profile.machine, profile.network
        on_gpu = machine.device == "cuda"
        # One rank that stands for all has its share of what they share; so has one that exchanges
        # nothing, whose step is what others are compared with.
        alone = len(self.ranks) < num_ranks or num_ranks == 1
        together = 1 if alone else min(machine.num_ranks, num_ranks)
        cores = machine.cores / machine.num_ranks if alone else machine.cores
        segment = max(total_bytes / MOST_SEGMENTS, LEAST_SEGMENT_BYTES)
        self.players: list[Player] = []
        hosts_of: dict[int, Processor] = {}
        for place, rank in enumerate(self.ranks):
            host = hosts_of.get(place // together) or Processor(self.clock, cores)
            hosts_of[place // together] = host
            # What was timed on a GPU that ranks share holds the wait for the others already.
            device = Processor(self.clock, 1.0) if on_gpu else host
            half = network.byte_work_s / 2
            rate = network.bytes_per_s
            local = network.local_bytes_per_s or rate
            lines = [
                Line(self.clock, each, segment, host, half) for each in (rate, rate, local, local)
            ]
            self.players.append(Player(self, rank, host, device, lines))
        self.by_rank = {player.rank: player for player in self.players}

    def play(self, model: Backward, jobs: Sequence[Job]) -> Played:
        """One step."""
        # A job starts on the wire when all ranks have come to it; so does an all-reduce.
        for player in self.players:
            player.begin(model, jobs)
        self.clock.run()
        left = sum(player.jobs_left for player in self.players)
        assert left == 0, f"{left} synchronisations never end"
        return Played(
            step_s=max(player.end_s for player in self.players),
            backward_end_s=max(player.backward_end_s for player in self.players),
            exchange_end_s=max(player.exchange_end_s for player in self.players),
            sent_bytes=self.players[0].sent_bytes,
            spans=self.spans or [],
        )

    @property
    def sent_share(self) -> float:
        """Of what an all-reduce adds up, that each rank must send."""
        return _sent_share(self.num_ranks)

    def all_reduce_bytes(self, num_bytes: float) -> float:
        """What an all-reduce keeps a line busy for, as bytes: what it must send, and more where
        it was measured to take longer."""
        network = self.profile.network
        measured = _sent_share(network.num_ranks)
        if measured == 0:
            return _sent_share(self.num_ranks) * num_bytes
        seconds = network.all_reduce.slope * num_bytes
        return seconds * network.bytes_per_s * _sent_share(self.num_ranks) / measured

    def all_reduce_delay_s(self) -> float:
        """What it takes besides."""
        network = self.profile.network
        if network.num_ranks < 2:
            return 2 * (self.num_ranks - 1) * network.latency_s
        return network.all_reduce.fixed * (self.num_ranks - 1) / (network.num_ranks - 1)


def _sent_share(num_ranks: int) -> float:
    """Of what an all-reduce adds up, that each rank must send."""
    return 2 * (num_ranks - 1) / num_ranks
