"""What the benchmarks on an emulated cluster share: their description, the start of the ranks,
and how ranks measure together.

A sample is a barrier and some calls, timed on every rank; the slowest rank's time counts. Each
round runs all candidates, in an order that all ranks shuffle alike, so that slow moments of the
machine hit all of them. Rank 0 prints its progress on stdout ("@@ done total label").
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from hipress import settings
from hipress.errors import HipressError
from hipress.session.groups import make_group
from hipress.session.replicas import digest

INTERFACE = "eth0"
NUM_IDLE = 10
"""Pairs of barriers whose bytes are averaged, to be subtracted from those of a sample."""
LEAST_BYTES = 10**6
"""Fewer bytes are not compared with the interface: heartbeats and the like would count."""
MOST_DEVIATION = 0.05
"""How far the interface may be from what the engine counts: headers, acknowledgements."""
MOST_TIMEOUT_S = 10**6

B = TypeVar("B", bound="ClusterBenchmark")
OnPart = Callable[[float], None]
"""Called with how far a benchmark is, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class ClusterBenchmark:
    """What all ranks of a benchmark receive: the cluster, and how often to measure on it."""

    num_hosts: int
    rate: str
    """The rate as the user wrote it; none: links are not shaped."""
    rate_bits: int | None
    delay: str
    is_shaped: bool
    """Whether each rank has an eth0 of its own."""
    device: str
    num_elements: int
    repeats: int = 1
    result: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole gradient as float32."""
        return 4 * self.num_elements

    @property
    def all_reduce_bytes(self) -> float:
        """What each rank must send in an all-reduce of float32."""
        return 2 * (self.num_hosts - 1) / self.num_hosts * self.size_bytes

    @property
    def torch_device(self) -> torch.device:
        """The device of a rank: all of them share the first GPU."""
        return torch.device("cuda:0" if self.device == "cuda" else self.device)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls: type[B], text: str) -> B:
        fields: dict[str, Any] = json.loads(text)
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)


# --- starting ranks -------------------------------------------------------------------------------


def run(
    module: str, benchmark: ClusterBenchmark, timeout: float | None, on_part: OnPart
) -> dict[str, Any]:
    """Runs `python -m MODULE BENCHMARK` on all ranks of a lab of its own, for `timeout` seconds at
    most, and returns what rank 0 wrote.
    """
    from hipress.lab import Lab  # here, because ranks do without it

    def on_line(rank: int, stream: str, line: str) -> None:
        if rank == 0 and stream == "stdout" and line.startswith("@@ "):
            _, done, total, _ = line.split(" ", 3)
            on_part(int(done) / int(total))

    # Torch's PowerSGD waits for the GPU wherever there is one, and fails for a CPU's gradients.
    env = {"CUDA_VISIBLE_DEVICES": ""} if benchmark.device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        with Lab(
            benchmark.num_hosts,
            rate=benchmark.rate if benchmark.is_shaped else None,
            delay=benchmark.delay if benchmark.is_shaped else None,
            shaped=benchmark.is_shaped,
        ) as lab:
            lab.run(
                [sys.executable, "-m", module, replace(benchmark, result=str(result)).dump()],
                env=env | environment(benchmark),
                timeout=timeout,
                on_line=on_line,
                check=True,
            )
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def environment(benchmark: ClusterBenchmark) -> dict[str, str]:
    """Returns a timeout that even a slow line does not reach, unless the user has set one."""
    if benchmark.rate_bits is None or os.environ.get(settings.TIMEOUT.name):
        return {}
    wanted_s = 10 * benchmark.all_reduce_bytes * 8 / benchmark.rate_bits
    if wanted_s <= default_pg_timeout.total_seconds():  # which holds without a setting
        return {}
    return {settings.TIMEOUT.name: f"{min(wanted_s, MOST_TIMEOUT_S):.0f}"}


def run_rank(main: Callable[[str], Any]) -> None:
    """Runs this process as a rank: an error of ours becomes one line on stderr.

    `main` takes the benchmark's text and returns what rank 0 writes to the result's file, if
    anything, after all ranks have measured.
    """
    torch.set_num_threads(1)
    try:
        make_group("gloo")
        found = main(sys.argv[1])
        if dist.get_rank() == 0:
            Path(json.loads(sys.argv[1])["result"]).write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    except HipressError as failure:
        sys.exit(str(failure))
    leave()


def leave(code: int = 0) -> NoReturn:
    """Ends this rank's process.

    Not through the interpreter's end: gloo's threads may still hold callbacks of torch's hooks, and
    one that is freed while Python shuts down aborts the process (seen once in some 30 runs).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# --- measuring together ---------------------------------------------------------------------------


class Interface:
    """The bytes that this rank's `eth0` has sent; 0 where hosts have no network of their own."""

    def __init__(self, *, is_shaped: bool) -> None:
        self.is_shaped = is_shaped
        self.idle_bytes = 0.0
        """Bytes of the two barriers of a sample."""

    def sent_bytes(self) -> int:
        return sent_bytes(Path("/proc/self/net/dev").read_text()) if self.is_shaped else 0

    def measure_idle(self) -> None:
        """Measures `idle_bytes`; collective."""
        dist.barrier()  # what the last sync has queued must not count
        before = self.sent_bytes()
        for _ in range(2 * NUM_IDLE):
            dist.barrier()
        self.idle_bytes = (self.sent_bytes() - before) / NUM_IDLE

    def per_sample(self, total_bytes: int, num_samples: int) -> float:
        """Returns the bytes of one sample, without its barriers."""
        return max(total_bytes / num_samples - self.idle_bytes, 0.0)

    def deviation(self, counted_bytes: float, wire_bytes: float, num_samples: int) -> float:
        """Returns the relative difference from what the engine counts; -1 where it is unknown."""
        counts = self.is_shaped and wire_bytes * num_samples >= LEAST_BYTES
        return abs(counted_bytes - wire_bytes) / wire_bytes if counts else -1.0


def sent_bytes(text: str) -> int:
    """Returns the bytes that `eth0` has sent, out of the text of /proc/net/dev.

    Example:
        >>> sent_bytes("  eth0: 10 1 0 0 0 0 0 0 99 2 0 0 0 0 0 0")
        99
    """
    for line in text.splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise AssertionError(f"no {INTERFACE} here:\n{text}")


def largest(values: Sequence[float]) -> list[float]:
    """Returns the largest of each value over all ranks; collective."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(value) for value in found]


def ranks_agree(values: Sequence[torch.Tensor]) -> bool:
    """Returns whether all ranks hold the same bits; collective."""
    own = torch.tensor([digest(value) for value in values])
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return all(torch.equal(each, own) for each in found)


def print_progress(num_done: int, total: int, label: str) -> None:
    """Prints how far rank 0 is, for the progress bar."""
    if dist.get_rank() == 0:
        print(f"@@ {num_done} {total} {label}", flush=True)


@dataclass(kw_only=True)
class Candidate:
    """One thing to time, and what was measured of it."""

    label: str
    codec: str | None = None
    strategy: str | None = None
    samples_s: list[float] = field(default_factory=list)
    """Seconds of one call."""
    sent_bytes: int = 0
    """Bytes by the engine's count, in all samples."""
    num_messages: int = 0
    interface_bytes: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    def result(self) -> dict[str, Any]:
        own = {"variant": self.label, "codec": self.codec, "strategy": self.strategy}
        return own | {"samples_s": self.samples_s} | self.found


C = TypeVar("C", bound=Candidate)


class ClusterWorker(ABC, Generic[C]):
    """One rank of a benchmark that times several candidates in shuffled rounds."""

    candidates: list[C]
    num_calls = 1
    """Calls of a sample that are timed."""
    num_first_calls = 0
    """Calls of a sample before those: what a call leaves under way is then timed with the next."""

    def __init__(self, benchmark: ClusterBenchmark, num_progress: int) -> None:
        self.device = benchmark.torch_device
        self.repeats = benchmark.repeats
        self.interface = Interface(is_shaped=benchmark.is_shaped)
        self._progress = (0, num_progress)

    @abstractmethod
    def call(self, one: C) -> None:
        """Makes one call of a candidate."""

    @abstractmethod
    def counts(self, one: C) -> tuple[int, int]:
        """Returns the bytes and messages that the engine has sent for a candidate."""

    def prepare(self, one: C) -> None:
        """Makes a candidate ready for a sample."""

    def finish(self, one: C) -> None:
        """Ends what the calls of a sample have left under way."""

    def progress(self, label: str) -> None:
        num_done, total = self._progress
        print_progress(num_done, total, label)
        self._progress = (num_done + 1, total)

    def wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run_rounds(self) -> None:
        """Takes the samples of all candidates."""
        self.interface.measure_idle()
        order = list(self.candidates)
        shuffle = random.Random(0).shuffle
        for _ in range(self.repeats):
            shuffle(order)
            for one in order:
                self.progress(one.label)
                self._sample(one)

    def _sample(self, one: C) -> None:
        self.prepare(one)
        self.wait_for_device()
        before = (*self.counts(one), self.interface.sent_bytes())
        dist.barrier()
        for _ in range(self.num_first_calls):
            self.call(one)
        self.wait_for_device()
        start = time.perf_counter()
        for _ in range(self.num_calls):
            self.call(one)
        self.wait_for_device()
        seconds = time.perf_counter() - start
        self.finish(one)
        dist.barrier()  # all have received: nothing of it is still to leave
        after = (*self.counts(one), self.interface.sent_bytes())
        one.sent_bytes += after[0] - before[0]
        one.num_messages += after[1] - before[1]
        one.interface_bytes += after[2] - before[2]
        one.samples_s += largest([seconds / self.num_calls])

    def count_bytes(self, one: C, wire_bytes: float | None, *others: float) -> list[float]:
        """Adds the bytes of one call by both counts, the most that a rank sent; collective.

        `wire_bytes` of a sample are those of the engine's count, None where it knows nothing.
        Returns the largest of the other values over all ranks.
        """
        interface = self.interface.per_sample(one.interface_bytes, self.repeats)
        deviation = -1.0
        if wire_bytes is not None:
            deviation = self.interface.deviation(interface, wire_bytes, self.repeats)
        num_calls = self.num_first_calls + self.num_calls
        wire, interface, deviation, *rest = largest(
            [(wire_bytes or 0.0) / num_calls, interface / num_calls, deviation, *others]
        )
        one.found |= {
            "wire_bytes": None if wire_bytes is None else wire,
            "interface_bytes": interface if self.interface.is_shaped else None,
            "interface_deviation": None if deviation < 0 else deviation,
        }
        return rest


def interface_problem(label: str, one: Mapping[str, Any]) -> str | None:
    """Returns a sentence where the interface counted other bytes than the engine, else None."""
    deviation = one["interface_deviation"]
    if deviation is None or deviation <= MOST_DEVIATION:
        return None
    return (
        f"{label}: eth0 of a rank differs by {deviation:.0%} from what the engine says it "
        f"sent, {one['wire_bytes']:,.0f} bytes; at most {MOST_DEVIATION:.0%} are headers."
    )
