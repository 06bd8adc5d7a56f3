"""Draws episodes from a seed and plays them on an emulated cluster.

An episode is one configuration and a few faults, one after the other. A job that has ended is
started again from its last checkpoint, as a user would, until all faults were injected.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hipress.casync.graphs.schedules import SCHEDULES
from hipress.lab import Lab
from hipress.torch.distributed_optimizer import LEAST_SLICE_BYTES
from hipress.train import checkpoints
from tests.chaos import DOORS, disk
from tests.chaos.faults import (
    FAULTS,
    FINDING,
    MISSED,
    UNSEEN,
    BadHeader,
    BadMessage,
    Fault,
)
from tests.chaos.report import Row
from tests.chaos.seen import (
    ERROR_S,
    EXIT_S,
    THOROUGH_S,
    Seen,
    replicas_agree,
    resumed,
    stopped,
    went_on,
)

HOSTS = 4
TIMEOUT_S = 8
"""HIPRESS_TIMEOUT of the jobs."""
START_S = 60.0
"""How long a job may take to begin, beyond what a fault takes."""
EPISODES = 20
"""Episodes in one lab; then another is made, and the first must have left nothing behind."""
STOP_STEPS = 60
"""A job that is told to stop does so after this many steps: all ranks have been told by then."""
DISK = "64m"
JOB = Path(__file__).with_name("job.py")

CODECS = ("none", "fp16", "int8", "onebit", "terngrad", "topk(ratio=0.01)", "dgc(ratio=0.01)")
STRATEGIES = ("ps", "ring", "hierarchical", "allreduce")


@dataclass(frozen=True)
class Config:
    """What the jobs of an episode have in common."""

    door: str
    codec: str
    strategy: str | None
    width: int
    """Of the model's hidden layer; the widest is cut into slices by a schedule."""
    check_every: int
    """Steps between two replica checks; 0: none."""
    together: bool
    """Whether tensors are in flight together (`hipress.allreduce` alone)."""
    thorough: bool
    """Whether processes take Python down when they end, as users' do."""
    schedule: str | None = None
    """`schedule` of `DistributedOptimizer`, as is what follows; None leaves it to `auto`."""
    slice_bytes: int | None = None
    num_credits: int = 4
    """Slices that may be on their way out of a rank at once."""
    optimizer: str = "SGD"
    clips: bool = False
    """Whether gradients are clipped, which waits for all means before the step."""


def draw_config(draw: random.Random, door: str | None = None) -> Config:
    """Draws the configuration of an episode, with any door or with this one."""
    (drawn,) = draw.choices(list(DOORS), list(DOORS.values()))
    door = door or drawn
    codec = draw.choice(CODECS)
    strategies = [one for one in STRATEGIES if (door, one) != ("optimizer", "allreduce")]
    strategy: str | None = draw.choice(strategies)
    width = draw.choice([160, 1024, 2560] if door == "optimizer" else [160, 160, 1024])
    check_every = draw.choice([0, 6]) if door in ("attach", "optimizer") else 0
    together, thorough = draw.random() < 0.5, draw.random() < 0.25
    if door in ("attach", "session", "optimizer") and draw.random() < 0.15:
        codec, strategy = "auto", None
    config = Config(door, codec, strategy, width, check_every, together, thorough)
    if door != "optimizer":
        return config
    config = replace(
        config, optimizer=draw.choice(["SGD", "SGD", "AdamW"]), clips=draw.random() < 0.2
    )
    if codec == "auto":
        return config
    return replace(
        config,
        schedule=draw.choice(SCHEDULES),
        slice_bytes=draw.choice([LEAST_SLICE_BYTES, 4 * LEAST_SLICE_BYTES]),
        num_credits=draw.choice([1, 2, 4]),
    )


def draw_fault(draw: random.Random, config: Config, num_ranks: int) -> Fault:
    """Draws a fault that can happen in this configuration."""
    kinds = dict(FAULTS)
    no_messages = (config.codec, config.strategy) == ("none", "allreduce")
    no_frames = config.strategy == "hierarchical" and num_ranks == 2
    if (config.door, config.codec, config.strategy) == ("optimizer", "none", "ps"):
        no_frames = True  # slices go as they are
    for kind in FAULTS:
        if issubclass(kind, BadMessage) and (config.codec == "auto" or no_messages):
            del kinds[kind]
        elif kind is BadHeader and no_frames:
            del kinds[kind]
    (kind,) = draw.choices(list(kinds), list(kinds.values()))
    return kind(draw, num_ranks)


class Cluster:
    """A lab with one process on each host that starts ranks (see `job.py`).

    Args:
        folder: For pipes, logs and checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        folder.mkdir()
        disk.mount(self.disk, DISK)
        for rank in range(HOSTS):
            os.mkfifo(folder / f"pipe{rank}")
        self._job: Job | None = None
        self._ready = threading.Semaphore(0)
        self._ports = itertools.count(20_000)
        # With a delay: without netem only such a lab can change delay and loss later.
        self.lab = Lab(HOSTS, rate="1gbit", delay="1us")
        command = [sys.executable, str(JOB), f"{folder}/pipe", json.dumps(CODECS)]
        self._run = self.lab.start(command, on_line=self._on_line, keep_going=True)
        for _ in range(HOSTS):
            if not self._ready.acquire(timeout=4 * START_S):
                raise RuntimeError(f"a host does not start: {self._run.poll()}")
        for host in range(HOSTS):
            self.lab.set_link(host, delay="none")

    def _on_line(self, rank: int, stream: str, text: str) -> None:
        if stream == "stderr" or not text.startswith("{"):
            return
        line = json.loads(text)
        if "ready" in line:
            self._ready.release()
        elif self._job is not None and line["job"] == self._job.id:
            self._job.seen.add(line)

    def start(self, config: Config, num_ranks: int, id: str, folder: Path) -> Job:
        """Starts a job on the first hosts."""
        job = self._job = Job(self, config, num_ranks, id)
        order = {
            **asdict(config),
            "job": id,
            "ranks": num_ranks,
            "port": next(self._ports),
            "timeout_s": TIMEOUT_S,
            "pairs": config.strategy == "hierarchical" and num_ranks > 2,
            "folder": str(folder),
            "log": str(self.folder / "log"),
        }
        for rank in range(num_ranks):
            self.tell(rank, do="start", **order)
        return job

    def tell(self, rank: int, **command: Any) -> None:
        """Sends a line to the process that starts the ranks of a host."""
        pipe = os.open(self.folder / f"pipe{rank}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, json.dumps(command).encode() + b"\n")
        finally:
            os.close(pipe)

    def log(self, rank: int) -> str:
        """Returns what a rank of the last job has written to stderr."""
        try:
            return (self.folder / f"log.{rank}").read_text(errors="replace")
        except OSError:
            return ""

    def processes(self) -> set[int]:
        """Returns the processes of all ranks, also those that `job.py` does not know of any more.

        A forked process has the command line of its parent.
        """
        mark = f"{self.folder}/pipe".encode()
        return {pid for pid in _pids() if mark in _read(f"/proc/{pid}/cmdline")}

    def left(self) -> list[str]:
        """Returns a sentence if there are more processes than one on each host."""
        deadline = time.monotonic() + 2.0
        while len(found := self.processes()) > HOSTS and time.monotonic() < deadline:
            time.sleep(0.05)
        return [] if len(found) <= HOSTS else [f"{len(found) - HOSTS} processes are left"]

    def close(self) -> list[str]:
        """Ends everything; returns sentences about what is left behind."""
        processes = self.processes()
        namespaces = set().union(*map(_namespaces, processes)) - _namespaces(os.getpid())
        self.lab.close()
        disk.unmount_all(self.folder)
        problems = [f"process {pid} outlives the lab" for pid in self.processes()]
        alive = set().union(*map(_namespaces, _pids()))
        problems += [f"namespace {name} outlives the lab" for name in sorted(namespaces & alive)]
        shutil.rmtree(self.folder)
        return problems


class Job:
    """One start of the ranks of an episode; faults act on it."""

    now = staticmethod(time.monotonic)

    def __init__(self, cluster: Cluster, config: Config, num_ranks: int, id: str) -> None:
        self._cluster = cluster
        self.config = config
        self.id = id
        self.lab = cluster.lab
        self.disk = cluster.disk
        exit_s = THOROUGH_S if config.thorough else EXIT_S
        self.seen = Seen(num_ranks, TIMEOUT_S, exit_s=exit_s)

    def tell(self, rank: int, **command: Any) -> None:
        """Sends a line to a rank."""
        self._cluster.tell(rank, **command)

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank."""
        self._cluster.tell(rank, do="signal", signal=int(number))

    def wait_exits(self, ranks: Iterable[int]) -> None:
        """Waits until ranks have ended, for as long as any rule allows."""
        seen, listed = self.seen, list(ranks)
        limit_s = seen.timeout_s + ERROR_S + seen.exit_s
        if not seen.wait(lambda: all(seen.exit(rank) for rank in listed), limit_s):
            self.ask_where()

    def wait_progress(self, more: int = 0) -> int:
        """Waits until all ranks have made some steps, or one has failed; returns the last step."""
        seen = self.seen
        seen.wait(lambda: seen.failed or seen.latest >= 0, START_S)
        target = seen.latest + 6 + more
        limit_s = seen.timeout_s + ERROR_S
        if self.config.codec == "auto":  # which measures, and compiles kernels
            limit_s += START_S
        if not seen.wait(lambda: seen.failed or min(map(seen.step, seen.ranks)) >= target, limit_s):
            self.ask_where()
        return target

    def ask_where(self) -> None:
        """Lets all ranks write to their logs where their threads are."""
        for rank in self.seen.ranks:
            self.signal(rank, signal.SIGUSR1)
        time.sleep(0.5)

    def wait_begun(self) -> list[str]:
        """Waits until all ranks train."""
        seen = self.seen
        seen.wait(lambda: seen.failed or min(map(seen.step, seen.ranks)) >= 0, START_S)
        late = [rank for rank in seen.ranks if seen.step(rank) < 0]
        errors = [error for rank in seen.ranks if (error := seen.error(rank))]
        problems = [f"{error.kind} at the start: {error.text}" for error in errors]
        return problems or [f"rank {rank} does not begin" for rank in late]

    def stop(self) -> list[str]:
        """Lets all ranks stop at one step; returns how they broke the rules."""
        step = self.seen.latest + STOP_STEPS
        for rank in self.seen.ranks:
            self.tell(rank, do="stop", step=step)
        self.wait_exits(self.seen.ranks)
        return stopped(self.seen) + replicas_agree(self.seen)

    def end(self) -> list[str]:
        """Kills what is left of the job; returns sentences about processes that stay."""
        for rank in self.seen.ranks:
            self.signal(rank, signal.SIGKILL)
        self.wait_exits(self.seen.ranks)
        return self._cluster.left()


class Episode:
    """One configuration and its faults.

    Args:
        cluster: Where it is played.
        seed: Of the run.
        number: Of the episode.
        door: The entry point; drawn if None.
    """

    def __init__(self, cluster: Cluster, seed: int, number: int, door: str | None = None) -> None:
        self._cluster = cluster
        self._seed = seed
        self._number = number
        draw = self._random("config")
        self.config = draw_config(draw, door)
        self._num_faults = draw.randint(4, 8)
        self._folder = cluster.disk / f"episode{number}"
        self._saved: tuple[int, str] | None = None
        self._num_jobs = 0

    def _random(self, *place: object) -> random.Random:
        return random.Random("/".join(map(str, (self._seed, self._number, *place))))

    def play(self) -> Iterator[Row]:
        """Injects all faults; yields a row for each."""
        self._folder.mkdir()
        job = None
        for place in range(self._num_faults):
            draw = self._random(place)
            num_ranks = draw.choice([2, 3, 3, 4]) if job is None else job.seen.num_ranks
            fault = draw_fault(draw, self.config, num_ranks)
            fault.early = fault.early and job is None
            job = job or self._start(num_ranks)
            row, problems = self._inject(job, fault, place, draw)
            is_over = job.seen.failed or bool(problems) or fault.outcome == UNSEEN
            if place + 1 == self._num_faults and not is_over:
                problems += job.stop()
                is_over = True
            if is_over or not job.seen.is_finite:
                problems += job.end() + self._check_checkpoint(job)
                if problems:
                    row.outcome, row.problem = FINDING, _without_folders("; ".join(problems))
                    row.evidence = self._evidence(job)
                job = None
            yield row
        shutil.rmtree(self._folder)

    def _inject(
        self, job: Job, fault: Fault, place: int, draw: random.Random
    ) -> tuple[Row, list[str]]:
        """Injects one fault; returns its row, and how the job has broken rules."""
        fault.at = job.now()
        if fault.early:  # not before torch's own group is made, which is torch's to get right
            job.seen.wait(lambda: len(job.seen.find("joined")) == job.seen.num_ranks, START_S)
            time.sleep(draw.uniform(0, 1))
        else:
            problems = job.wait_begun() + resumed(job.seen, self._saved)
            if not problems:
                self._wait_for_moment(job, draw)
                problems = went_on(job.seen, target=0)
            if problems:
                job.ask_where()
                row = self._row(job, fault, place)
                row.fault, row.detail = "none", "before the next fault"
                return row, problems
        step = job.seen.latest
        fault.strike(job)
        problems = fault.judge(job.seen) if fault.outcome != MISSED else []
        row = self._row(job, fault, place)
        row.step = step
        return row, problems

    def _start(self, num_ranks: int) -> Job:
        self._num_jobs += 1
        id = f"{self._seed}.{self._number}.{self._num_jobs}"
        return self._cluster.start(self.config, num_ranks, id, self._folder)

    def _wait_for_moment(self, job: Job, draw: random.Random) -> None:
        """Waits for a random number of steps and a part of one."""
        seen = job.seen
        target = max(seen.latest, 0) + draw.randint(0, 20)
        seen.wait(lambda: seen.failed or seen.latest >= target, ERROR_S)
        time.sleep(draw.uniform(0, 0.03))

    def _check_checkpoint(self, job: Job) -> list[str]:
        """The last checkpoint loads, and is not older than one that rank 0 has told of."""
        told = [line["saved"] for line in job.seen.find("saved")]
        if not job.seen.is_finite:  # what can be seen of replicas would be less from here on
            shutil.rmtree(self._folder)
            self._folder.mkdir()
            self._saved = None
            return []
        try:
            found = checkpoints.read(self._folder)
        except Exception as error:
            return [f"the checkpoint does not load: {error}"]
        if found is None:
            return ["the checkpoint is gone"] if told or self._saved else []
        self._saved = (found["step"], found["digest"])
        if told and found["step"] < max(told):
            return [f"the checkpoint is of step {found['step']}, and {max(told)} was saved"]
        return []

    def _row(self, job: Job, fault: Fault, place: int) -> Row:
        return Row(
            seed=self._seed,
            episode=self._number,
            place=place,
            fault=fault.name,
            victim=fault.victim,
            detail=", ".join(filter(None, [fault.detail, "at the start" * fault.early])),
            door=self.config.door,
            codec=self.config.codec,
            strategy=self.config.strategy or "",
            ranks=job.seen.num_ranks,
            step=-1,
            seconds=round(fault.seconds(job.seen), 1),
            outcome=fault.outcome,
            problem="",
        )

    def _evidence(self, job: Job) -> dict[int, str]:
        """Returns the last words of each rank."""
        traces = {line["rank"]: line["trace"] for line in job.seen.find("trace")}
        logs = {rank: self._cluster.log(rank).splitlines()[-120:] for rank in job.seen.ranks}
        return {rank: traces.get(rank, "") + "\n".join(log) for rank, log in logs.items()}


class Player(threading.Thread):
    """Plays episodes on a cluster of its own until there are enough.

    Args:
        folder: For clusters.
        seed: Of the run.
        episodes: Numbers of episodes, shared with other players.
        is_enough: Returns whether no other episode is to be played.
        on_row: Called with each row.
        door: The entry point of all episodes; drawn if None.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        episodes: Iterator[int],
        is_enough: Callable[[], bool],
        on_row: Callable[[Row], None],
        door: str | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self._door = door
        self._folder, self._seed, self._episodes = folder, seed, episodes
        self._is_enough, self._on_row = is_enough, on_row
        self.problems: list[str] = []
        self.error: BaseException | None = None
        self._cluster: Cluster | None = None
        self._closing = threading.Lock()
        self._is_interrupted = False

    def run(self) -> None:
        """Plays."""
        try:
            self._run()
        except BaseException as error:
            if not self._is_interrupted:
                self.error = error
                raise

    def interrupt(self) -> None:
        """Ends the cluster under the episode that is being played; call it at the very end."""
        self._is_interrupted = True
        self._close()

    def _run(self) -> None:
        for number in itertools.count():
            episodes = list(itertools.islice(self._episodes, 1))
            if not episodes or self._is_enough():
                return
            self._cluster = Cluster(self._folder / f"{self.name}-{number}")
            try:
                self._play(self._cluster, itertools.chain(episodes, self._episodes))
            finally:
                self._close()

    def _play(self, cluster: Cluster, episodes: Iterable[int]) -> None:
        for episode in itertools.islice(episodes, EPISODES):
            for row in Episode(cluster, self._seed, episode, self._door).play():
                if row.outcome != MISSED:
                    self._on_row(row)
            if self._is_enough():
                return

    def _close(self) -> None:
        with self._closing:
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                self.problems += cluster.close()


def _without_folders(text: str) -> str:
    """Returns a text in which paths are file names: results are the same on every machine."""
    return re.sub(r"(?<!\w)/(?:[\w.+-]+/)+", "", text)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # the process has just ended
        return b""


def _namespaces(pid: int) -> set[str]:
    found = set()
    for kind in ("net", "pid", "uts", "mnt"):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
        except OSError:  # the process has just ended
            continue
    return found
