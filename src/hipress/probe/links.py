"""Measures what links, collectives and messages cost between the ranks of an engine.

All ranks take part, between two steps: nothing else may be under way. Sizes start tiny and grow
with what was measured, so that a round takes about as long on 10 Mbit as in memory. Ranks decide
(how large, how often) from what all of them measured, and so they decide alike.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.transport import LinkError, finish
from hipress.casync.graphs.graph import Verb
from hipress.casync.graphs.partitions import Placement
from hipress.codecs.table import codec as named_codec
from hipress.probe.cache import processor
from hipress.profile import Curve, Machine, Network, Pair

TAG = 2**30
"""Tags of the probe's messages start here, above all tags of the executor, which have 30 bits."""
ROUND_S = 0.2
"""A round in which all ranks send to all grows until it takes this long."""
MAX_ROUND_BYTES = 2**25
"""The most bytes that a rank sends in a round."""
MOST_PAIRS_RANKS = 8
"""With more ranks, only links between neighbours are measured by themselves."""
DRAIN_BYTES = 5 * 2**15
"""More bytes than a slow link shaped by tokens lets pass at once after it was idle."""
LEAST_PAIR_BYTES = 2**17
NUM_JOBS, NUM_ROUTES, TINY_NUMEL = 4, 4, 64
"""To measure messages: jobs under way at once, chunks of each, and elements of a chunk."""
WARM_UP_STEPS = 3

Message = tuple[torch.Tensor, int]
"""A tensor to send or receive into, and the rank at the other end."""


def machine(engine: Engine) -> Machine:
    """Returns what the ranks of this machine share, as rank 0 sees it; collective.

    Ranks share a machine if its kernel was started at the same moment: hosts of a lab, and
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
    here = [one for one in found if one["boot"] == first["boot"]]
    return Machine(
        name=first["name"],
        device=device.type,
        cores=first["cores"],
        num_ranks=len(here),
        num_device_ranks=sum(one["gpu"] == first["gpu"] for one in here) if gpu else 1,
        exchange_threads=first["threads"],
    )


def cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Returns the cores that this process may use; a container's quota may be less than it sees."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()[:2]
        return min(float(seen), int(quota) / int(period))
    except (OSError, ValueError):  # "max": no quota
        return float(seen)


def barrier(engine: Engine) -> Callable[[], None]:
    """Returns a function that waits for all ranks; it uses the transport and takes a round trip."""
    return _Messages(engine).wait_for_all


def measure(
    engine: Engine,
    *,
    budget_s: float = 3.0,
    on_part: Callable[[float, str], None] = lambda fraction, label: None,
) -> Network:
    """Measures how ranks reach each other; collective, with the same result on all ranks.

    Args:
        engine: The engine of all ranks; nothing may be under way.
        budget_s: About how long it may take; on links below 10 Mbit it takes longer.
        on_part: Called with the fraction that is done, from 0 to 1, and what is measured.

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


class _Messages:
    """Messages between ranks, outside of any job and with tags that no job has."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transport = engine.transport
        self.rank, self.num_ranks = self.transport.rank, self.transport.num_ranks
        self._device = engine.device if self.transport.on_device else torch.device("cpu")
        self._token = torch.zeros(1, device=self._device)

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Returns memory that the transport takes."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def swap(self, sends: Sequence[Message] = (), recvs: Sequence[Message] = ()) -> None:
        """Sends and receives some messages, and waits for all of them."""
        transport = self.transport
        if transport.ordered:
            pending = list(transport.exchange(sends, recvs))
        else:
            # Receives first: gloo moves no byte before the receiver has asked.
            pending = [transport.recv(data, of, TAG + k) for k, (data, of) in _numbered(recvs)]
            pending += [transport.send(data, to, TAG + k) for k, (data, to) in _numbered(sends)]
        for one in pending:
            finish(one)
        self._synchronize()

    def all_reduce(self, data: torch.Tensor) -> None:
        """Adds up memory of all ranks with the transport's own sum."""
        finish(self.transport.all_reduce(data))
        self._synchronize()

    def wait_for_all(self) -> None:
        """Returns when all ranks have called it."""
        self.all_reduce(self._token)

    def share(self, what: str, own: Any) -> list[Any]:
        """Returns the values of all ranks."""
        return self.engine.agree(f"the probe of {what}", {}, share=own)

    def slowest(self, what: str, seconds: float) -> float:
        """Returns the longest of all ranks' times."""
        return float(max(self.share(what, seconds)))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _numbered(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """Numbers the messages of each peer, in the same way at both ends."""
    seen: dict[int, int] = {}
    for message in messages:
        number = seen.get(message[1], 0)
        seen[message[1]] = number + 1
        yield number, message


@dataclass(frozen=True, slots=True)
class _Rounds:
    """The result of rounds in which ranks send to their peers."""

    bytes_per_s: float
    byte_work_s: float
    error: float


class _Probe(_Messages):
    def __init__(self, engine: Engine, budget_s: float) -> None:
        super().__init__(engine)
        self.budget_s = budget_s

    def measure(self, on_part: Callable[[float, str], None]) -> Network:
        hosts = self.engine.hosts
        others = [r for r in range(self.num_ranks) if r != self.rank]
        near = [r for r in others if hosts[r] == hosts[self.rank]]
        far = [r for r in others if r not in near]
        several_hosts = len(set(hosts)) > 1
        on_part(0.0, "links")
        rounds = self._rounds("links", far if several_hosts else near)
        local = None
        if len(set(hosts)) < self.num_ranks:
            local = self._rounds("links inside hosts", near) if several_hosts else rounds
        on_part(0.35, "pairs")
        pairs, ping_work_s = self._pairs(rounds.bytes_per_s)
        on_part(0.6, "all-reduce")
        all_reduce = self._all_reduce_curve(rounds.bytes_per_s)
        on_part(0.9, "messages")
        work_s = self._message_work_s()
        on_part(1.0, "messages")
        # Half a round trip holds the work at both ends, which is counted with the messages.
        latency_s = max(statistics.median(pair.latency_s for pair in pairs) - ping_work_s, 0.0)
        return Network(
            hosts=hosts,
            latency_s=latency_s,
            bytes_per_s=rounds.bytes_per_s,
            error=rounds.error,
            local_bytes_per_s=None if local is None else local.bytes_per_s,
            message_work_s=work_s,
            byte_work_s=rounds.byte_work_s,
            all_reduce=all_reduce,
            pairs=tuple(pairs),
        )

    def _rounds(self, what: str, peers: Sequence[int]) -> _Rounds:
        """All ranks send a block to each of their peers at once, as the parameter server does."""
        most = max(self.share(what, len(peers)))
        longest = MAX_ROUND_BYTES // max(most, 1)
        out = self.memory(longest)
        into = [self.memory(longest) for _ in peers]

        def sample(size: int, many: int = 1) -> tuple[float, float]:
            sends = [(out[:size], peer) for peer in peers]
            recvs = [(memory[:size], peer) for memory, peer in zip(into, peers, strict=True)]
            before, start = time.process_time(), time.perf_counter()
            self.swap(many * sends, many * recvs)
            return time.perf_counter() - start, time.process_time() - before

        size = min(4096, longest)
        sample(size)
        while True:
            round_s = self.slowest(what, sample(size)[0])
            if round_s >= ROUND_S:
                # Once more: a rank that had to wait for a core is no slow link.
                round_s = min(round_s, self.slowest(what, sample(size)[0]))
            if round_s >= ROUND_S or size >= longest:
                break
            # At most four times as much: links may let a burst pass and then be slow.
            wanted = int(size * ROUND_S / max(round_s, 1e-6))
            size = min(longest, max(2 * size, min(4 * size, wanted)))
        # Several are under way at once, as chunks are: in rounds that wait for each other links are
        # idle at the end of each. The last round has used up what an idle link lets pass at once.
        many = _clamp(2, int(0.15 * self.budget_s / round_s), 8)
        samples = [sample(size, many) for _ in range(2)]
        found = self.share(what, [len(peers), samples])
        # The slowest rank counts, and its quicker time: a link is never faster than it is.
        times_s = sorted(max(ranks[1][k][0] for ranks in found) for k in (0, 1))
        work_s = sum(one[1] for ranks in found for one in ranks[1])
        sent = 2 * many * size * sum(ranks[0] for ranks in found)
        return _Rounds(
            bytes_per_s=most * many * size / times_s[0],
            byte_work_s=work_s / sent,
            error=(times_s[1] - times_s[0]) / times_s[1] / 2,
        )

    def _pairs(self, rate: float) -> tuple[list[Pair], float]:
        """Measures each link by itself, and the work of a message while nothing else happens."""
        num, rank = self.num_ranks, self.rank
        ring = [(r, (r + 1) % num) for r in range(num)]
        every = [(a, b) for a in range(num) for b in range(num) if a != b]
        share_s = 0.3 * self.budget_s
        takes_s = (DRAIN_BYTES + 2 * LEAST_PAIR_BYTES) / rate
        pairs = every if num <= MOST_PAIRS_RANKS and takes_s * len(every) < share_s else ring
        size = _clamp(LEAST_PAIR_BYTES, int(rate * share_s / (2.5 * len(pairs))), 2**22)
        drain = max(DRAIN_BYTES, size // 2)
        data, token = self.memory(max(size, drain)), self.memory(1)
        ping_s = self._ping_all(token)
        repeats = _clamp(2, int(0.1 * self.budget_s / (2 * ping_s * len(pairs))), 8)

        def there_and_back(a: int, b: int, size: int) -> float:
            start = time.perf_counter()
            if rank == a:
                self.swap(sends=[(data[:size], b)])
                self.swap(recvs=[(token, b)])
            else:
                self.swap(recvs=[(data[:size], a)])
                self.swap(sends=[(token, a)])
            return time.perf_counter() - start

        found: dict[str, list[float]] = {}
        work_s = 0.0
        for a, b in pairs:
            self.wait_for_all()
            if rank not in (a, b):
                continue
            before = time.process_time()
            trips = [there_and_back(a, b, 1) for _ in range(repeats)]
            work_s += time.process_time() - before
            # The first uses up what a link that was idle lets pass at once.
            wholes = [there_and_back(a, b, part) for part in (drain, size, size)][1:]
            if rank == a:
                found[f"{a} {b}"] = [min(trips), *wholes]
        told = self.share("pairs", [work_s, found])
        seen = {key: value for _, of in told for key, value in of.items()}
        made = [_pair(a, b, size, *seen[f"{a} {b}"]) for a, b in pairs]
        return made, sum(work for work, _ in told) / (2 * repeats * len(pairs))

    def _ping_all(self, token: torch.Tensor) -> float:
        """Returns the seconds of a tiny message to the next rank, while all ranks send one."""
        after, before = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        into = self.memory(1)
        times = []
        for _ in range(3):
            self.wait_for_all()
            start = time.perf_counter()
            self.swap([(token, after)], [(into, before)])
            times.append(time.perf_counter() - start)
        return max(self.slowest("latency", min(times)), 1e-6)

    def _all_reduce_curve(self, rate: float) -> Curve:
        """Measures the transport's own sum, over sizes up to one that takes 0.3 s."""
        per_byte_s = 2 * (self.num_ranks - 1) / self.num_ranks / rate
        largest = _clamp(4096, int(min(0.3, 0.1 * self.budget_s) / per_byte_s), MAX_ROUND_BYTES)
        step = 32 ** (1 / 3)
        numels = [int(largest / step**k) // 4 for k in (3, 2, 1, 0)]
        data = self.memory(4 * numels[-1]).view(torch.float32)
        self.all_reduce(data)  # uses up what links let pass at once after a pause
        samples: list[list[float]] = []
        for numel in numels:
            # Several in a row, so that the first rank does not wait for the others each time.
            many = _clamp(2, int(0.06 / (per_byte_s * 4 * numel)), 8)
            samples.append([])
            for _ in range(1 if numel == numels[-1] else 3):
                start = time.perf_counter()
                for _ in range(many):
                    self.all_reduce(data[:numel])
                samples[-1].append((time.perf_counter() - start) / many)
        found = self.share("all-reduce", samples)
        points = []
        for k, numel in enumerate(numels):
            slowest = [max(ranks[k][n] for ranks in found) for n in range(len(samples[k]))]
            points.append((4.0 * numel, statistics.median(slowest)))
        return Curve.fit(points)

    def _message_work_s(self) -> float:
        """Measures the work of a message as jobs of the engine handle it, with threads and queues.

        A job of hardly any elements is work for messages only, except for the calls of the codec,
        which are subtracted. The CPU time of the processes counts. The kernel's work for messages
        is mostly charged to them: threads of idle priority were left with 3 to 11 % less than that
        explains. Measuring takes a tenth of the budget.
        """
        engine, routes = self.engine, min(NUM_ROUTES, self.num_ranks)
        parts = tuple(Placement(k * TINY_NUMEL, (k + 1) * TINY_NUMEL, k) for k in range(routes))
        values = [torch.zeros(routes * TINY_NUMEL, device=engine.device) for _ in range(NUM_JOBS)]
        names = [f"hipress probe {k}" for k in range(NUM_JOBS)]
        kept = {field.name: getattr(engine.stats, field.name) for field in fields(engine.stats)}
        verb_ns = dict(engine.executor.verb_ns)

        def step() -> None:
            handles = [
                engine.allreduce(
                    [value], codec="none", strategy="ps", names=[name], placements=[parts], step=0
                )
                for value, name in zip(values, names, strict=True)
            ]
            for handle in handles:
                handle.wait()

        try:
            for _ in range(WARM_UP_STEPS):
                step()
            start = time.perf_counter()
            step()
            step_s = self.slowest("messages", time.perf_counter() - start)
            repeats = _clamp(6, int(0.1 * self.budget_s / step_s), 25)
            num_before = engine.stats.num_messages
            self.wait_for_all()
            clock = [time.process_time()]
            for _ in range(repeats):
                step()
                clock.append(time.process_time())
            num_messages = (engine.stats.num_messages - num_before) // repeats
            num_calls = NUM_JOBS * _num_codec_calls(engine, names[0])
        finally:
            engine.forget(names)
            for name, value in kept.items():
                setattr(engine.stats, name, value)
            engine.executor.verb_ns = verb_ns
        works_s = [after - before for before, after in zip(clock, clock[1:], strict=False)]
        calls_work_s = num_calls * _codec_call_s(engine)
        found = self.share("messages", [works_s, calls_work_s, num_messages])
        # The median of steps: in one of them a rank may collect its garbage.
        step_work_s = statistics.median(map(sum, zip(*(one[0] for one in found), strict=True)))
        calls_s, num = (sum(float(one[k]) for one in found) for k in (1, 2))
        return max(step_work_s - calls_s, 0.0) / max(num, 1.0)


def _num_codec_calls(engine: Engine, name: str) -> int:
    """Returns the calls of codecs in one job on this rank."""
    num = 0
    for task in engine.recipe(name).graph.tasks:
        if task.verb is Verb.MERGE:
            num += len(task.reads) + 1
        elif task.verb in (Verb.ENCODE, Verb.DECODE):
            num += 1
    return num


def _codec_call_s(engine: Engine) -> float:
    """Returns the work of a codec's call for hardly any elements."""
    codec = named_codec("none")
    x = torch.zeros(TINY_NUMEL, device=engine.device)
    frame = codec.encode(x)
    start = time.thread_time()
    for _ in range(20):
        codec.encode(x, out=frame)
        codec.decode(frame, out=x)
    return float(time.thread_time() - start) / 40


def _pair(a: int, b: int, size: int, trip_s: float, *wholes: float) -> Pair:
    """Returns a link from times of round trips: of one byte, and of `size` bytes."""
    # The mean of all: one that had to wait leaves a burst for the next.
    mean_s = statistics.mean(wholes)
    return Pair(
        sender=a,
        receiver=b,
        latency_s=trip_s / 2,
        bytes_per_s=size / max(mean_s - trip_s, 1e-9),
        error=(max(wholes) - mean_s) / mean_s,
    )


def _clamp(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
