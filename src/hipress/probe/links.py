"""What links, collectives and messages cost between the ranks of an engine, and what ranks run on.

All ranks take part, between two steps: nothing else may be under way. Sizes start tiny and grow by
what was seen, so that a round takes about as long on 10 Mbit as in memory. Whatever ranks decide
(how large, how often) they decide from what all of them measured, and so alike.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.transport import LinkError
from hipress.probe.cache import processor
from hipress.probe.messages import message_work_s
from hipress.probe.wire import Wire, between
from hipress.profile import Curve, Machine, Network, Pair

ROUND_S = 0.2
"""A round in which all send to all grows until it takes so long."""
MAX_ROUND_BYTES = 2**25
"""That a rank sends in one."""
MOST_PAIRS_RANKS = 8
"""Beyond this only neighbours are measured by themselves."""
DRAIN_BYTES = 5 * 2**15
"""More than a slow link that is shaped by tokens lets pass at once, after it was idle."""
LEAST_PAIR_BYTES = 2**17


def machine(engine: Engine) -> Machine:
    """What the ranks of this machine share; collective, told as rank 0 sees it.

    Ranks share a machine where its kernel was started at the same moment: hosts of a lab, and
    containers, have names of their own and cores in common.
    """
    device = engine.device
    gpu = ""
    if device.type == "cuda":
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    own = {
        "boot": _boot_id(),
        "gpu": gpu,
        "cores": cores(),
        "threads": engine.executor.num_threads,
        "name": processor(device),
    }
    found = engine.agree("the machine", {}, share=own)
    first = found[0]
    return Machine(
        name=first["name"],
        device=device.type,
        cores=first["cores"],
        num_ranks=sum(one["boot"] == first["boot"] for one in found),
        num_device_ranks=sum(
            (one["boot"], one["gpu"]) == (first["boot"], first["gpu"]) for one in found
        )
        if gpu
        else 1,
        exchange_threads=first["threads"],
    )


def cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Those that this process may use: a container's quota may be less than it sees."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()[:2]
        return min(float(seen), int(quota) / int(period))
    except (OSError, ValueError):  # "max": no quota
        return float(seen)


def barrier(engine: Engine) -> Callable[[], None]:
    """What returns when all ranks have called it; through the transport, so within a round trip."""
    return Wire(engine).meet


def measure(
    engine: Engine,
    *,
    budget_s: float = 3.0,
    on_part: Callable[[float, str], None] = lambda fraction, label: None,
) -> Network:
    """How ranks reach each other; collective, and the same on all of them.

    Args:
        engine: Of all ranks; nothing may be under way.
        budget_s: About how long it may take; on links below 10 Mbit it takes longer.
        on_part: Told how far it is, from 0 to 1, and with what.

    Raises:
        PeerError: A rank is gone or late.
    """
    if engine.transport.num_ranks == 1:
        free = Curve(fixed=0.0, slope=0.0)
        return Network(hosts=engine.hosts, latency_s=0.0, bytes_per_s=1e12, all_reduce=free)
    try:
        return _Probe(engine, budget_s).measure(on_part)
    except LinkError as error:
        raise engine.explain(error) from error


@dataclass(frozen=True, slots=True)
class _Rounds:
    """What rounds, in which some send to some, have shown."""

    bytes_per_s: float
    byte_work_s: float
    error: float


class _Probe:
    def __init__(self, engine: Engine, budget_s: float) -> None:
        self.engine, self.budget_s = engine, budget_s
        self.wire = Wire(engine)
        self.rank, self.num_ranks = self.wire.rank, self.wire.num_ranks
        self._near = [r for r in range(self.num_ranks) if self._is_near(r)]
        self._far = [r for r in range(self.num_ranks) if r != self.rank and r not in self._near]

    def measure(self, on_part: Callable[[float, str], None]) -> Network:
        several_hosts = len(set(self.engine.hosts)) > 1
        shares_host = len(set(self.engine.hosts)) < self.num_ranks
        on_part(0.0, "links")
        rounds = self._rounds("links", self._far if several_hosts else self._near)
        local = None
        if shares_host:
            local = self._rounds("links inside hosts", self._near) if several_hosts else rounds
        on_part(0.35, "pairs")
        pairs, ping_work_s = self._pairs(rounds.bytes_per_s)
        on_part(0.6, "all-reduce")
        all_reduce = self._all_reduce(rounds.bytes_per_s)
        on_part(0.9, "messages")
        work_s = message_work_s(self.wire, self.budget_s)
        on_part(1.0, "messages")
        # Half a round trip holds the work at both ends, which is counted with the messages.
        latency_s = max(statistics.median(pair.latency_s for pair in pairs) - ping_work_s, 0.0)
        return Network(
            hosts=self.engine.hosts,
            latency_s=latency_s,
            bytes_per_s=rounds.bytes_per_s,
            error=rounds.error,
            local_bytes_per_s=None if local is None else local.bytes_per_s,
            message_work_s=work_s,
            byte_work_s=rounds.byte_work_s,
            all_reduce=all_reduce,
            pairs=tuple(pairs),
        )

    def _is_near(self, rank: int) -> bool:
        hosts = self.engine.hosts
        return rank != self.rank and hosts[rank] == hosts[self.rank]

    def _rounds(self, what: str, peers: Sequence[int]) -> _Rounds:
        """All ranks send a block to each of their peers, at once, as the parameter server does."""
        most = max(self.wire.share(what, len(peers)))
        longest = MAX_ROUND_BYTES // max(most, 1)
        out = self.wire.memory(longest)
        into = [self.wire.memory(longest) for _ in peers]

        def sample(size: int, many: int = 1) -> tuple[float, float]:
            sends = [(out[:size], peer) for peer in peers]
            recvs = [(memory[:size], peer) for memory, peer in zip(into, peers, strict=True)]
            before, start = time.process_time(), time.perf_counter()
            self.wire.swap(many * sends, many * recvs)
            return time.perf_counter() - start, time.process_time() - before

        size = min(4096, longest)
        sample(size)
        while True:
            round_s = self.wire.slowest(what, sample(size)[0])
            if round_s >= ROUND_S:
                # Once more: a rank that had to wait for a core is no slow link.
                round_s = min(round_s, self.wire.slowest(what, sample(size)[0]))
            if round_s >= ROUND_S or size >= longest:
                break
            # At most four times as much: links may let a burst pass and then be slow.
            wanted = int(size * ROUND_S / max(round_s, 1e-6))
            size = min(longest, max(2 * size, min(4 * size, wanted)))
        # Several under way, as chunks are: in rounds that wait for each other links are idle at
        # the end of each. The last round has taken what an idle link lets pass at once.
        many = between(2, int(0.15 * self.budget_s / round_s), 8)
        samples = [sample(size, many) for _ in range(2)]
        found = self.wire.share(what, [len(peers), samples])
        # On the slowest rank; of the two the quicker, for a link is never faster than it is.
        times_s = sorted(max(ranks[1][k][0] for ranks in found) for k in (0, 1))
        work_s = sum(one[1] for ranks in found for one in ranks[1])
        sent = 2 * many * size * sum(ranks[0] for ranks in found)
        return _Rounds(
            bytes_per_s=most * many * size / times_s[0],
            byte_work_s=work_s / sent,
            error=(times_s[1] - times_s[0]) / times_s[1] / 2,
        )

    def _pairs(self, rate: float) -> tuple[list[Pair], float]:
        """Each link by itself, and the work of a message between two that have nothing else."""
        num, rank = self.num_ranks, self.rank
        ring = [(r, (r + 1) % num) for r in range(num)]
        every = [(a, b) for a in range(num) for b in range(num) if a != b]
        share_s = 0.3 * self.budget_s
        takes_s = (DRAIN_BYTES + 2 * LEAST_PAIR_BYTES) / rate
        pairs = every if num <= MOST_PAIRS_RANKS and takes_s * len(every) < share_s else ring
        size = between(LEAST_PAIR_BYTES, int(rate * share_s / (2.5 * len(pairs))), 2**22)
        drain = max(DRAIN_BYTES, size // 2)
        data, token = self.wire.memory(max(size, drain)), self.wire.memory(1)
        ping_s = self._ping_all(token)
        repeats = between(2, int(0.1 * self.budget_s / (2 * ping_s * len(pairs))), 8)

        def there_and_back(a: int, b: int, size: int) -> float:
            start = time.perf_counter()
            if rank == a:
                self.wire.swap(sends=[(data[:size], b)])
                self.wire.swap(recvs=[(token, b)])
            else:
                self.wire.swap(recvs=[(data[:size], a)])
                self.wire.swap(sends=[(token, a)])
            return time.perf_counter() - start

        found: dict[str, list[float]] = {}
        work_s = 0.0
        for a, b in pairs:
            self.wire.meet()
            if rank not in (a, b):
                continue
            before = time.process_time()
            trips = [there_and_back(a, b, 1) for _ in range(repeats)]
            work_s += time.process_time() - before
            # The first takes what a link that was idle lets pass at once.
            wholes = [there_and_back(a, b, part) for part in (drain, size, size)][1:]
            if rank == a:
                found[f"{a} {b}"] = [min(trips), *wholes]
        told = self.wire.share("pairs", [work_s, found])
        seen = {key: value for _, of in told for key, value in of.items()}
        made = [_pair(a, b, size, *seen[f"{a} {b}"]) for a, b in pairs]
        return made, sum(work for work, _ in told) / (2 * repeats * len(pairs))

    def _ping_all(self, token: torch.Tensor) -> float:
        """Seconds of a tiny message to the next rank, while all send one."""
        after, before = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        into = self.wire.memory(1)
        times = []
        for _ in range(3):
            self.wire.meet()
            start = time.perf_counter()
            self.wire.swap([(token, after)], [(into, before)])
            times.append(time.perf_counter() - start)
        return max(self.wire.slowest("latency", min(times)), 1e-6)

    def _all_reduce(self, rate: float) -> Curve:
        """The transport's own sum, over sizes up to what takes 0.3 s."""
        per_byte_s = 2 * (self.num_ranks - 1) / self.num_ranks / rate
        largest = between(4096, int(min(0.3, 0.1 * self.budget_s) / per_byte_s), MAX_ROUND_BYTES)
        step = 32 ** (1 / 3)
        numels = [int(largest / step**k) // 4 for k in (3, 2, 1, 0)]
        data = self.wire.memory(4 * numels[-1]).view(torch.float32)
        self.wire.all_reduce(data)  # what links let pass at once after a pause is gone now
        samples: list[list[float]] = []
        for numel in numels:
            # Several in a row, so that who starts first does not wait for the others each time.
            many = between(2, int(0.06 / (per_byte_s * 4 * numel)), 8)
            samples.append([])
            for _ in range(1 if numel == numels[-1] else 3):
                start = time.perf_counter()
                for _ in range(many):
                    self.wire.all_reduce(data[:numel])
                samples[-1].append((time.perf_counter() - start) / many)
        found = self.wire.share("all-reduce", samples)
        points = []
        for k, numel in enumerate(numels):
            slowest = [max(ranks[k][n] for ranks in found) for n in range(len(samples[k]))]
            points.append((4.0 * numel, statistics.median(slowest)))
        return Curve.fit(points)


def _pair(a: int, b: int, size: int, trip_s: float, *wholes: float) -> Pair:
    """A link from times with the way back: of a byte, and of so many."""
    # All of them together: one that had to wait leaves a burst for the next.
    mean_s = statistics.mean(wholes)
    return Pair(
        sender=a,
        receiver=b,
        latency_s=trip_s / 2,
        bytes_per_s=size / max(mean_s - trip_s, 1e-9),
        error=(max(wholes) - mean_s) / mean_s,
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
