"""A job on all hosts: an agent on each, their output here, one end for all.

Everything happens in one loop of one thread. Agents speak as `messages` says; what else comes out
of an ssh is shown with its host in front.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hipress.launch import remote
from hipress.launch.agent import GRACE_S
from hipress.launch.hosts import Host
from hipress.launch.messages import Message, unpack
from hipress.launch.screen import Screen
from hipress.version import __version__

TIMED_OUT = 124
"""Exit code where ranks did not start in time, as timeout(1) has it."""
_BROKEN_PIPE = 128 + signal.SIGPIPE
_END_S = 10.0
"""Seconds that the end may take beyond the grace."""
_MOST_SHOWN = 8
"""Hosts in a line about all of them."""
_SAY_S = 20.0
"""Seconds after which a start that hangs is explained."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run, and where."""

    command: Sequence[str]
    hosts: Sequence[Host]
    is_local: bool = False
    """Whether the one host is this machine, without ssh."""
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str
    python: str
    ssh: Sequence[str] = ("ssh",)
    ssh_port: int | None = None
    port: int = 0
    """Where the first host listens for the others; 0 lets it choose."""
    max_restarts: int = 0
    timeout_s: float = 120.0
    """How long all ranks may take to start."""
    output: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    code: int
    sentence: str | None = None
    """What went wrong, where anything did."""


def launch(job: Job) -> Outcome:
    """Run a job to its end.

    Only the main thread may call this: it takes care of Ctrl-C and SIGTERM meanwhile.
    """
    launcher = _Launcher(job)
    try:
        return launcher.run()
    finally:
        launcher.close()


class _Agent:
    """The launcher's side of one agent."""

    def __init__(self, host: Host, node: int, first_rank: int, command: Sequence[str]) -> None:
        self.host = host
        self.node = node
        self.first_rank = first_rank
        self.started: set[int] = set()
        self.is_up = False
        self.was_told = False  # what its job is
        self.waits_for: str | None = None  # why it can not reach the first host
        self.over: Message | None = None
        self.code: int | None = None
        self.said: list[str] = []  # the last that came on stderr
        self.open_streams = {"stdout", "stderr"}
        self.rest = {"stdout": b"", "stderr": b""}
        # A session of its own: Ctrl-C is for the launcher, which ends all in order.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def name(self) -> str:
        return self.host.name

    def tell(self, message: Message) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # gone; its end tells
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def lines(self, stream: str, data: bytes) -> list[bytes]:
        *lines, self.rest[stream] = (self.rest[stream] + data).split(b"\n")
        if not data and self.rest[stream]:
            lines, self.rest[stream] = [self.rest[stream]], b""
        return lines


class _Launcher:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._screen = Screen(job.output)
        self._job_id = secrets.token_hex(8)
        self._outcome: Outcome | None = None
        self._end_asked_s: float | None = None
        self._port = job.port
        self._agents: list[_Agent] = []
        self._is_explained = False
        self._num_starts: Counter[int] = Counter()
        self._num_rounds = 0
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> Outcome:
        with self._signal_handlers():
            began_s = time.monotonic()
            first_rank = 0
            for node, host in enumerate(self._job.hosts):
                if (agent := self._start(host, node, first_rank)) is None:
                    break
                self._agents.append(agent)
                first_rank += host.slots
            while any(agent.code is None for agent in self._agents):
                self._turn()
                self._look_at_the_clock(time.monotonic() - began_s)
        return self._outcome or Outcome(code=0)

    def close(self) -> None:
        """Leave nothing behind, whatever happened; agents end with their input."""
        for agent in self._agents:
            for pipe in (agent.process.stdin, agent.process.stdout, agent.process.stderr):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
        for agent in self._agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(GRACE_S + 1)
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait()
        self._selector.close()
        with contextlib.suppress(OSError):
            self._screen.close()

    def _start(self, host: Host, node: int, first_rank: int) -> _Agent | None:
        job = self._job
        command = (
            remote.local_command(job.python)
            if job.is_local
            else remote.ssh_command(host, ssh=job.ssh, port=job.ssh_port, python=job.python)
        )
        try:
            agent = _Agent(host, node, first_rank, command)
        except OSError as error:
            self._decide(
                127,
                f"{command[0]!r} can not be started: {error.strerror}; name another with "
                f"{'--python' if job.is_local else '--ssh'}",
            )
            return None
        for stream, pipe in (("stdout", agent.process.stdout), ("stderr", agent.process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, (agent, stream))
        return agent

    # --- the loop ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        wake, wake_out = socket.socketpair()
        for end in (wake, wake_out):
            end.setblocking(False)
        before_fd = signal.set_wakeup_fd(wake_out.fileno())
        before = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        self._selector.register(wake, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            self._selector.unregister(wake)
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_fd)
            wake.close()
            wake_out.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(0.5):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    key.fileobj.recv(4096)  # type: ignore[union-attr]
                continue
            agent, stream = key.data
            if agent.code is not None:
                continue
            data = os.read(key.fd, 1 << 16)
            for line in agent.lines(stream, data):
                self._take(agent, stream, line)
            if not data:
                self._selector.unregister(key.fileobj)
                agent.open_streams.discard(stream)
                if stream == "stdout":
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        agent.process.wait(0.2)
        for agent in self._agents:
            # Not the end of stderr: an ssh that serves others too may hold it open for long.
            if agent.code is None and "stdout" not in agent.open_streams:
                self._take_end(agent)
        while self._signals:
            self._take_signal(self._signals.pop(0))

    def _take_signal(self, number: int) -> None:
        if self._end_asked_s is None or number != signal.SIGINT:
            self._decide(128 + number, None)
        else:
            self._end_all(0.0)

    def _look_at_the_clock(self, seconds: float) -> None:
        if self._end_asked_s is not None:
            late = time.monotonic() - self._end_asked_s > GRACE_S + _END_S
            for agent in self._agents if late else ():
                # Its host does not answer: with the connection the agent's input closes there.
                agent.process.kill()
            return
        if self._have_all_started():
            return
        if seconds > self._job.timeout_s:
            self._decide(
                TIMED_OUT,
                f"not all ranks have started after {self._job.timeout_s:g} s: {self._who_waits()}",
            )
        elif seconds > _SAY_S and not self._is_explained:
            self._is_explained = True
            self._note(f"still starting: {self._who_waits()}")

    def _who_is_where(self) -> str:
        parts = []
        for agent in self._agents[:_MOST_SHOWN]:
            last = agent.first_rank + agent.host.slots - 1
            ranks = f"{agent.first_rank}-{last}" if last > agent.first_rank else f"{last}"
            parts.append(f"{ranks} on {agent.name}")
        if len(self._agents) > _MOST_SHOWN:
            parts.append(f"and so on to {self._agents[-1].name}")
        first = self._job.hosts[0].address
        return f"ranks {', '.join(parts)}; they meet at {first}:{self._port}"

    def _have_all_started(self) -> bool:
        return all(len(agent.started) >= agent.host.slots for agent in self._agents)

    def _who_waits(self) -> str:
        """Say which hosts keep the others waiting, and what to do: torchrun itself is silent."""
        first = self._job.hosts[0]
        where = f"{first.address}:{self._port}"
        parts = []
        for agent in self._agents:
            if len(agent.started) >= agent.host.slots:
                continue
            if not agent.is_up:
                hand = remote.by_hand(agent.host, ssh=self._job.ssh, port=self._job.ssh_port)
                parts.append(f"{agent.name} has not answered through ssh (try: {hand})")
            elif agent.waits_for is not None:
                parts.append(
                    f"{agent.name} can not reach {where} ({agent.waits_for}): open that port, "
                    f"give another with --port, or put the right address of {first.name} first"
                )
        late = [a.name for a in self._agents if len(a.started) < a.host.slots]
        return "; ".join(parts) or (
            f"{', '.join(late)} loads torch or waits in torchrun (a longer --timeout helps where "
            f"disks are slow)"
        )

    # --- what agents say -----------------------------------------------------------------------

    def _take(self, agent: _Agent, stream: str, line: bytes) -> None:
        message = unpack(line) if stream == "stdout" else None
        if message is not None:
            self._obey(agent, message)
            return
        text = line.decode(errors="replace").rstrip("\r")
        if stream == "stderr" and not agent.is_up:
            # Told in the sentence if the connection fails, and shown below it if it does not.
            agent.said.append(text)
            return
        self._show(stream, text, host=agent.name)

    def _obey(self, agent: _Agent, message: Message) -> None:
        what = message["is"]
        if what == "line":
            self._show(
                message["stream"],
                message["text"],
                end=message["end"],
                rank=message.get("rank"),
                host=agent.name,
            )
        elif what == "up":
            self._take_up(agent, message["version"])
        elif what == "meeting":
            self._port = message["port"]
            self._note(self._who_is_where())
            for other in self._agents:
                self._tell_job(other)
        elif what == "waiting":
            agent.waits_for = message["why"]
        elif what == "refused":
            self._decide(2, f"{agent.name}: {message['why']}")
        elif what == "started":
            self._take_start(agent, message["rank"])
        elif what == "ended":
            if message["code"] and not message["told"]:
                self._take_failure(agent, message["rank"], message["code"])
        elif what == "over":
            agent.over = message
            if message["code"]:
                self._fail(agent, message["rank"], message["code"])

    def _take_up(self, agent: _Agent, version: str) -> None:
        agent.is_up = True
        for text in agent.said:
            self._show("stderr", text, host=agent.name)
        if version != __version__:
            self._decide(
                2,
                f"{agent.name} has hipress {version} and this machine {__version__}; install the "
                f"same on all, or name another Python there with --python",
            )
        # The first host says where it listens before the others are told.
        if agent.node == 0 or self._port and self._agents[0].was_told:
            self._tell_job(agent)

    def _take_start(self, agent: _Agent, rank: int) -> None:
        agent.started.add(rank)
        self._num_starts[rank] += 1
        if self._num_starts[rank] > self._num_rounds:
            self._num_rounds += 1
            if self._num_rounds > 1:
                self._note(f"all ranks start over, for the {self._num_rounds}. time")

    def _take_failure(self, agent: _Agent, rank: int, code: int) -> None:
        if not self._job.max_restarts:
            self._fail(agent, rank, code)
        elif self._outcome is None:
            # What it means is for torchrun to decide; the end of the agent tells.
            self._note(self._how(agent, rank, code))

    def _tell_job(self, agent: _Agent) -> None:
        job = self._job
        if agent.was_told or not agent.is_up or self._end_asked_s is not None:
            return
        agent.was_told = True
        agent.tell(
            {
                "folder": job.folder,
                "env": dict(job.env),
                "command": list(job.command),
                "place": {
                    "node": agent.node,
                    "num_nodes": len(job.hosts),
                    "slots": agent.host.slots,
                    # One host alone needs no port that others reach.
                    "meeting": job.hosts[0].address if len(job.hosts) > 1 else "",
                    "port": self._port,
                    "job_id": self._job_id,
                    "max_restarts": job.max_restarts,
                },
            }
        )

    def _take_end(self, agent: _Agent) -> None:
        """Judge an agent whose output has ended, once its process has."""
        code = agent.process.poll()
        if code is None:
            return
        if "stderr" in agent.open_streams:
            self._read_stderr(agent)
        agent.code = code if code >= 0 else 128 - code
        if agent.over is None and self._outcome is None:
            self._decide(agent.code or 1, self._why_it_ended(agent, agent.code))

    def _why_it_ended(self, agent: _Agent, code: int) -> str:
        if agent.is_up:
            return f"the connection to {agent.name} was lost (exit code {code}); all was ended"
        said = [text for text in agent.said if text.strip()]
        last = f" ({said[-1].strip()})" if said else ""
        everything = "\n".join(said)
        python = self._job.python
        if code == remote.SSH_FAILED:
            step = remote.next_step(
                agent.host, everything, ssh=self._job.ssh, port=self._job.ssh_port
            )
            return f"ssh can not connect to {agent.name}{last}; {step}"
        if "No module named" in everything and "hipress" in everything:
            return (
                f"{agent.name} has no hipress for its {python}; install it there, or name a "
                f"Python that has it with --python"
            )
        if code in (126, 127):
            return f"{agent.name} has no {python}{last}; name the Python of that host with --python"
        return f"{agent.name} could not start its agent, exit code {code}{last}"

    def _read_stderr(self, agent: _Agent) -> None:
        """Read the last words, and no longer than they are there."""
        assert agent.process.stderr is not None
        fd = agent.process.stderr.fileno()
        os.set_blocking(fd, False)
        data = b"x"
        with contextlib.suppress(BlockingIOError):
            while data:
                data = os.read(fd, 1 << 16)
                for line in agent.lines("stderr", data):
                    self._take(agent, "stderr", line)
        self._selector.unregister(agent.process.stderr)
        agent.open_streams.discard("stderr")

    # --- the end -------------------------------------------------------------------------------

    def _fail(self, agent: _Agent, rank: int | None, code: int) -> None:
        num_ranks = sum(host.slots for host in self._job.hosts)
        others = "; the others were ended" if num_ranks > 1 else ""
        self._decide(code, self._how(agent, rank, code) + others)

    def _how(self, agent: _Agent, rank: int | None, code: int) -> str:
        who = "torchrun" if rank is None else f"rank {rank}"
        where = "" if self._job.is_local else f" on {agent.name}"
        how = f"was ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        return f"{who}{where} {how}"

    def _decide(self, code: int, sentence: str | None) -> None:
        """Settle how the job ends, if nothing has so far, and end what still runs."""
        if self._outcome is None:
            self._outcome = Outcome(code=code, sentence=sentence)
        if self._end_asked_s is None:
            self._end_all(GRACE_S)

    def _end_all(self, grace_s: float) -> None:
        self._end_asked_s = self._end_asked_s or time.monotonic()
        for agent in self._agents:
            agent.tell({"grace_s": grace_s})
            if not agent.was_told:
                # It waits for its job, or ssh for its host: there is nothing to end in order.
                agent.process.kill()

    def _note(self, text: str) -> None:
        self._show("stderr", f"hipress: {text}")

    def _show(
        self, stream: str, text: str, *, end: str = "\n", rank: int | None = None, host: str = ""
    ) -> None:
        try:
            if rank is not None:
                self._screen.keep(rank, text)
                self._screen.show(f"rank {rank}", stream, text, end)
            elif host:
                self._screen.show(host, stream, text, end)
            else:
                print(text, file=sys.stderr, flush=True)
        except BrokenPipeError:  # `hipress run ... | head`
            self._decide(_BROKEN_PIPE, None)
