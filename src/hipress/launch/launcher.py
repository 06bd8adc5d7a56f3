"""Runs a command on all hosts: an agent on each, their output here, one end for all.

Everything happens in one asyncio loop, in which nothing waits for a slow reader: what is shown goes
through a `StdoutWriter`, what agents are told through a `PipeWriter` each.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hipress.launch import failure_text
from hipress.launch.hosts import Host
from hipress.launch.remote import (
    GRACE_S,
    SILENCE_S,
    Message,
    RemoteAgent,
    local_command,
    ssh_command,
    unpack,
)
from hipress.launch.screen import Screen, open_files
from hipress.processes.family import exit_code
from hipress.processes.pipes import (
    PipeReaders,
    StdoutWriter,
    read_available,
    read_buffered,
    run_loop,
)
from hipress.version import __version__

__all__ = ["TIMED_OUT", "LaunchSpec", "Outcome", "launch"]

TIMED_OUT = 124
"""Exit code where ranks did not start in time, as timeout(1) has it."""
_BROKEN_PIPE = 128 + signal.SIGPIPE
_END_S = 10.0
"""Seconds that the end may take beyond the grace."""
_KILL_S = 2.0
"""Seconds that the end may take after the second Ctrl-C, and the last output after the first."""
_EXPLAIN_S = 20.0
"""Seconds after which a start that hangs is explained."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
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

    @property
    def num_ranks(self) -> int:
        """The number of ranks on all hosts."""
        return sum(host.slots for host in self.hosts)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a launch ended."""

    code: int
    sentence: str | None = None
    """What went wrong, if anything did."""


def launch(spec: LaunchSpec) -> Outcome:
    """Run a command to its end on all hosts, and say on stderr what went wrong.

    Only the main thread may call this: it handles Ctrl-C and SIGTERM meanwhile.
    """

    async def run() -> Outcome:
        launcher = _Launcher(spec)
        try:
            return await launcher.run()
        finally:
            launcher.close()

    return run_loop(run())


class _Launcher:
    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        files = {} if spec.output is None else open_files(spec.output, spec.num_ranks)
        self._stdout = StdoutWriter(self._pause_if_full, self._take_write_error)
        self._screen = Screen(self._stdout, files)
        self._readers = PipeReaders()
        self._job_id = secrets.token_hex(8)
        self._outcome: Outcome | None = None
        self._give_up_s: float | None = None  # when agents may take no longer to end
        self._port = spec.port
        self._agents: list[RemoteAgent] = []
        self._machines: dict[str, RemoteAgent] = {}
        self._is_explained = False
        self._num_starts: Counter[int] = Counter()
        self._num_rounds = 0
        self._was_signalled = False
        self._began_s = self._greeted_s = time.monotonic()

    async def run(self) -> Outcome:
        with self._signal_handlers():
            first_rank = 0
            for node, host in enumerate(self._spec.hosts):
                if (agent := self._start(host, node, first_rank)) is None:
                    break
                self._agents.append(agent)
                first_rank += host.slots
            self._tick()
            await asyncio.gather(*map(self._await_end, self._agents))
            if self._screen.num_dropped:
                self._note(f"{self._screen.num_dropped} lines were dropped: nobody read them")
            if self._outcome is not None and self._outcome.sentence is not None:
                self._note(self._outcome.sentence)
            self._screen.close()
            await self._drain()
        return self._outcome or Outcome(code=0)

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        for agent in self._agents:
            agent.close()
        for agent in self._agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(GRACE_S + 1)
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait()
        self._screen.close()

    def _start(self, host: Host, node: int, first_rank: int) -> RemoteAgent | None:
        spec = self._spec
        command = (
            local_command(spec.python)
            if spec.is_local
            else ssh_command(host, ssh=spec.ssh, port=spec.ssh_port, python=spec.python)
        )
        try:
            agent = RemoteAgent(host, node, first_rank, command)
        except OSError as error:
            self._decide(
                127,
                f"{command[0]!r} cannot be started: {error.strerror}; name another with "
                f"{'--python' if spec.is_local else '--ssh'}",
            )
            return None
        for stream, fd in agent.fds.items():
            self._readers.add(fd, partial(self._read, agent, stream))
        return agent

    async def _await_end(self, agent: RemoteAgent) -> None:
        # Not the end of stderr: an ssh that serves other connections too may hold it open for long.
        await agent.stdout_ended.wait()
        while (status := agent.process.poll()) is None:
            await asyncio.sleep(0.02)
        if "stderr" in agent.fds:
            fd, splitter = agent.fds.pop("stderr"), agent.splitters["stderr"]
            self._readers.remove(fd)
            # What is there now, and not what an ssh that goes on may write later.
            for line in [*splitter.feed(read_buffered(fd)), *splitter.rest()]:
                self._take_line(agent, "stderr", line)
        agent.writer.close()
        agent.code = exit_code(status)
        if agent.over is None and self._outcome is None:
            self._decide(agent.code or 1, failure_text.why_it_ended(self._spec, agent, agent.code))

    # --- signals -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # Those that are ignored stay so: nohup, and a shell that runs a script's job with "&".
        before = {
            number: handler
            for number in _SIGNALS
            if (handler := signal.getsignal(number)) != signal.SIG_IGN
        }
        for number in before:
            loop.add_signal_handler(number, self._take_signal, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self._suspend()
            return
        self._was_signalled = True
        if self._give_up_s is None or number != signal.SIGINT:
            self._decide(128 + number, None)
        else:
            self._end_all(0.0, _KILL_S)

    def _suspend(self) -> None:
        """Stop as Ctrl-Z asks; ranks go on, and agents do not take the silence for an end."""
        for agent in self._agents:
            agent.send({"is": "stopped"})
        stopped_s = time.monotonic()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._began_s += time.monotonic() - stopped_s
        self._greet()

    # --- time and room -------------------------------------------------------------------------

    def _tick(self) -> None:
        if all(agent.code is not None for agent in self._agents):
            return
        self._check_time(time.monotonic())
        asyncio.get_running_loop().call_later(min(0.5, SILENCE_S / 8), self._tick)

    def _check_time(self, now_s: float) -> None:
        if now_s > self._greeted_s + SILENCE_S / 4:
            self._greet()
        if self._give_up_s is not None:
            for agent in self._agents if now_s > self._give_up_s else ():
                # Its host does not answer; there the agent hears nothing and ends by itself.
                agent.process.kill()
            return
        if all(agent.has_started for agent in self._agents):
            return
        seconds = now_s - self._began_s
        if seconds > self._spec.timeout_s:
            self._decide(
                TIMED_OUT,
                f"not all ranks have started after {self._spec.timeout_s:g} s: "
                f"{failure_text.who_waits(self._spec, self._agents, self._port)}",
            )
        elif seconds > _EXPLAIN_S and not self._is_explained:
            self._is_explained = True
            waits = failure_text.who_waits(self._spec, self._agents, self._port)
            self._note(f"still starting: {waits}")

    def _greet(self) -> None:
        """Let all agents know that the launcher is there."""
        self._greeted_s = time.monotonic()
        for agent in self._agents:
            if agent.is_up:
                agent.send({"is": "here"})

    def _pause_if_full(self) -> None:
        """Read agents no more while those who read here are slow, and again when they are not."""
        self._readers.pause(self._stdout.is_full and self._give_up_s is None)

    def _take_write_error(self, stream: str, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):  # `hipress run ... | head`
            self._decide(_BROKEN_PIPE, None)
        else:
            self._note(f"{stream} cannot be written any more ({error.strerror})")

    async def _drain(self) -> None:
        """Wait until all is shown, as long as it takes; after a signal, for a short time only."""
        until = time.monotonic() + _KILL_S
        while not self._stdout.is_empty:
            if self._was_signalled and time.monotonic() > until:
                return
            await asyncio.sleep(0.01)

    # --- what agents say -----------------------------------------------------------------------

    def _read(self, agent: RemoteAgent, stream: str) -> None:
        data = read_available(agent.fds[stream])
        if data is None:
            return
        splitter = agent.splitters[stream]
        for line in splitter.feed(data) if data else splitter.rest():
            self._take_line(agent, stream, line)
        if not data:
            self._readers.remove(agent.fds.pop(stream))
            if stream == "stdout":
                agent.stdout_ended.set()
        self._pause_if_full()

    def _take_line(self, agent: RemoteAgent, stream: str, line: bytes) -> None:
        message = None
        if stream == "stdout":
            line, message = unpack(line)
        if line or message is None:
            text = line.decode(errors="replace").rstrip("\r")
            if stream == "stderr" and not agent.is_up:
                # Part of the sentence if the connection fails, and shown if it does not.
                agent.errors.append(text)
            else:
                self._screen.show(agent.name, stream, text)
        if message is not None:
            self._obey(agent, message)

    def _obey(self, agent: RemoteAgent, message: Message) -> None:
        kind = message["is"]
        if kind == "line":
            rank, text = message.get("rank"), message["text"]
            if rank is not None:
                self._screen.keep(rank, text)
            prefix = agent.name if rank is None else f"rank {rank}"
            self._screen.show(prefix, message["stream"], text, message["end"])
        elif kind == "note":
            self._note(f"{agent.name}: {message['text']}")
        elif kind == "up":
            self._take_up(agent, message["version"], message.get("machine", ""))
        elif kind == "listening":
            self._port = message["port"]
            self._note(failure_text.who_is_where(self._spec, self._agents, self._port))
            for other in self._agents:
                self._send_job(other)
        elif kind == "waiting":
            agent.waits_for = message["why"]
        elif kind == "refused":
            self._decide(2, f"{agent.name}: {message['why']}")
        elif kind == "started":
            self._take_start(agent, message["rank"])
        elif kind == "ended":
            if message["code"] and not message["told"]:
                self._take_failure(agent, message["rank"], message["code"])
        elif kind == "over":
            agent.over = message
            if message["code"]:
                self._fail(agent, message["rank"], message["code"])

    def _take_up(self, agent: RemoteAgent, version: str, machine: str) -> None:
        agent.is_up = True
        for text in agent.errors:
            self._screen.show(agent.name, "stderr", text)
        if version != __version__:
            self._decide(
                2,
                f"{agent.name} has hipress {version} and this machine {__version__}; install the "
                f"same on all, or name another Python there with --python",
            )
        if machine and self._machines.setdefault(machine, agent) is not agent:
            self._note(failure_text.one_machine(self._machines[machine], agent))
        # The first host says where it listens before the others are told what to run.
        if agent.node == 0 or self._port and self._agents[0].has_job:
            self._send_job(agent)

    def _send_job(self, agent: RemoteAgent) -> None:
        spec = self._spec
        if agent.has_job or not agent.is_up or self._give_up_s is not None:
            return
        agent.has_job = True
        agent.send(
            {
                "is": "job",
                "silence_s": SILENCE_S,
                "folder": spec.folder,
                "env": dict(spec.env),
                "command": list(spec.command),
                "node": {
                    "index": agent.node,
                    "num_nodes": len(spec.hosts),
                    "slots": agent.host.slots,
                    # One host alone needs no port that others reach.
                    "master_addr": spec.hosts[0].address if len(spec.hosts) > 1 else "",
                    "master_port": self._port,
                    "job_id": self._job_id,
                    "max_restarts": spec.max_restarts,
                },
            }
        )

    def _take_start(self, agent: RemoteAgent, rank: int) -> None:
        agent.started.add(rank)
        self._num_starts[rank] += 1
        if self._num_starts[rank] > self._num_rounds:
            self._num_rounds += 1
            if self._num_rounds > 1:
                self._note(f"all ranks start over, for the {self._num_rounds}. time")

    def _take_failure(self, agent: RemoteAgent, rank: int, status: int) -> None:
        if not self._spec.max_restarts:
            self._fail(agent, rank, status)
        elif self._outcome is None:
            # torchrun decides what it means, and the end of the agent reports that.
            self._note(failure_text.how(self._spec, agent, rank, status))

    # --- the end -------------------------------------------------------------------------------

    def _fail(self, agent: RemoteAgent, rank: int | None, status: int) -> None:
        others = "; the others were ended" if self._spec.num_ranks > 1 else ""
        how = failure_text.how(self._spec, agent, rank, status)
        self._decide(exit_code(status), how + others)

    def _decide(self, code: int, sentence: str | None) -> None:
        """Keep the first reason for the end, and end what still runs."""
        if self._outcome is None:
            self._outcome = Outcome(code=code, sentence=sentence)
        if self._give_up_s is None:
            self._end_all(GRACE_S, GRACE_S + _END_S)

    def _end_all(self, grace_s: float, timeout_s: float) -> None:
        self._give_up_s = time.monotonic() + timeout_s
        # The end must not wait until somebody reads.
        self._screen.drops = True
        self._pause_if_full()
        for agent in self._agents:
            agent.send({"is": "end", "grace_s": grace_s})
            if not agent.has_job:
                # It waits for its job, or ssh for its host: there is nothing to end in order.
                agent.process.kill()

    def _note(self, text: str) -> None:
        self._screen.note(text)
