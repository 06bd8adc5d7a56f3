"""On each host: starts torchrun there, reads its ranks, reports to the launcher, ends everything.

The first message on standard input is the job, so that nothing of it is in the arguments. After it
the input stays open, and the launcher sends a message every now and then: when the input closes or
falls silent the launcher is gone, and all that runs here is ended. The agent never waits for the
launcher to read: while too much is on its way to it, ranks are not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from hipress.environment import INTERFACE_VARIABLES, with_defaults
from hipress.launch import torchrun
from hipress.launch.remote import GRACE_S, SILENCE_S, Message, pack
from hipress.processes.family import (
    TERMINATION_SIGNALS,
    adopt_orphans,
    exit_code,
    reap,
    signal_descendants,
    signal_group,
    start,
)
from hipress.processes.pipes import (
    LineSplitter,
    PipeReaders,
    PipeWriter,
    TerminalLine,
    TerminalLineSplitter,
    read_available,
    read_buffered,
    run_loop,
)
from hipress.version import __version__

REFUSED = 2
"""Exit code of an agent that cannot do its job, and has said why."""
_DRAIN_S = 2.0
"""Seconds for the last messages to a launcher that wants the end, or is gone."""
_KILLED = -signal.SIGKILL


def main() -> NoReturn:
    """Do the job that comes on standard input, and exit as its ranks do."""

    async def run() -> NoReturn:
        agent = Agent()
        status = await agent.run()
        await agent.drain()
        # At once: a thread may still try to connect, and what is to be ended has been.
        os._exit(exit_code(status))

    run_loop(run())


@dataclass(eq=False)
class RankProcess:
    """One start of one rank."""

    pid: int
    """The id of the process around it, which is also that of its process group."""
    rank: int = -1
    attempt: int = 0


@dataclass(eq=False)
class OutputStream:
    """One stream of one rank, or of torchrun."""

    fd: int
    name: str
    """"stdout" or "stderr"."""
    rank: RankProcess | None
    """The rank that writes the stream; None for torchrun."""
    splitter: TerminalLineSplitter = field(default_factory=TerminalLineSplitter)


class Agent:
    """Its input, its ranks and the clock, in the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._readers = PipeReaders()  # of ranks and torchrun, paused while the writer is full
        self._writer = PipeWriter(1, self._take_writer_change)
        self._input = LineSplitter()
        self._silence_s = SILENCE_S
        self._silence: asyncio.TimerHandle | None = None
        self._job: asyncio.Future[Message | None] = self._loop.create_future()
        self._torchrun: int | None = None
        self._torchrun_ended: asyncio.Future[int] = self._loop.create_future()
        self._streams: dict[int, OutputStream] = {}
        self._ranks: list[RankProcess] = []
        self._failures: list[tuple[int, int, int]] = []  # attempt, rank, status
        self._max_restarts = 0
        self._is_ending = False
        self._is_busy = False  # whether anything came since this was last cleared
        self._refused: set[int] = set()  # processes that cannot be killed
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in TERMINATION_SIGNALS:
            self._loop.add_signal_handler(number, self._end, GRACE_S)
        os.set_blocking(0, False)
        self._loop.add_reader(0, self._read_input)
        self._expect_message()

    async def run(self) -> int:
        """Run the job.

        Returns:
            How the first rank that failed ended, or torchrun: an exit code, or -n for signal n.
        """
        adopt_orphans()
        self._send({"is": "up", "version": __version__, "machine": _machine()})
        job = await self._job
        if job is None:
            return REFUSED  # the launcher was gone before it said what to do
        try:
            log_folder = tempfile.mkdtemp(prefix="hipress-")
        except OSError as error:
            return self._refuse(f"no temporary folder can be made there: {error.strerror}")
        try:
            return await self._run_job(job, log_folder)
        finally:
            shutil.rmtree(log_folder, ignore_errors=True)

    async def drain(self) -> None:
        """Wait until the launcher has taken everything, as long as it is there."""
        for stream in list(self._streams.values()):
            self._close(stream)
        until: float | None = None
        while not self._writer.is_empty:
            if self._is_ending and until is None:
                until = time.monotonic() + _DRAIN_S
            if until is not None and time.monotonic() >= until:
                return
            await asyncio.sleep(0.01)

    # --- before the ranks start ----------------------------------------------------------------

    async def _run_job(self, job: Message, log_folder: str) -> int:
        try:
            os.chdir(job["folder"])
        except OSError as error:
            return self._refuse(
                f"folder {job['folder']!r} cannot be entered there ({error.strerror}); name one "
                f"that all hosts have with --dir"
            )
        if missing := _missing_interfaces(job["env"]):
            return self._refuse(
                f"there is no network card {missing!r} there; --interface takes one of: "
                f"{', '.join(sorted(name for _, name in socket.if_nameindex()))}"
            )
        node = torchrun.Node(**job["node"])
        if node.master_addr and node.index == 0:
            try:
                self._reserved = torchrun.reserve(node.master_port)
            except OSError as error:
                return self._refuse(
                    f"port {node.master_port} cannot be used there ({error.strerror}); name "
                    f"another with --port, or leave it out and a free one is found"
                )
            node = replace(node, master_port=self._reserved.getsockname()[1])
            self._send({"is": "listening", "port": node.master_port})
        elif node.master_addr and not await torchrun.reach(
            node.master_addr,
            node.master_port,
            lambda why: self._send({"is": "waiting", "why": why}),
            lambda: not self._is_ending,
        ):
            return REFUSED  # told to end
        if self._is_ending:
            return REFUSED
        self._max_restarts = node.max_restarts
        try:
            self._start_torchrun(node, job["env"], job["command"], log_folder)
        except OSError as error:
            return self._refuse(f"torchrun cannot be started there: {error.strerror}")
        status = await self._torchrun_ended
        await self._read_rest()
        self._kill()
        return self._send_outcome(status)

    def _refuse(self, why: str) -> int:
        self._send({"is": "refused", "why": why})
        return REFUSED

    def _start_torchrun(
        self, node: torchrun.Node, env: dict[str, str], command: list[str], log_folder: str
    ) -> None:
        name = f"hipress-{os.getpid()}-{secrets.token_hex(8)}"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(f"\0{name}")
        self._server.listen(64)
        self._loop.add_reader(self._server, self._accept)
        whole = with_defaults(
            {**os.environ, **env},
            python_folder=os.path.dirname(sys.executable),
            one_thread=node.slots > 1,
            # No other host takes part, so none needs to reach these ranks.
            interface=_loopback() if not node.master_addr else None,
        )
        if node.max_restarts and node.master_addr:
            whole.update(torchrun.RESTART_VARIABLES)
        stdout, stderr = self._open_streams(None)
        try:
            self._torchrun = start(
                torchrun.command_line(node, name, command, log_folder),
                env=whole,
                stdout=stdout,
                stderr=stderr,
                parent_signal=signal.SIGTERM,
            )
        finally:
            os.close(stdout)
            os.close(stderr)

    # --- the launcher --------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        self._writer.write(pack(message))

    def _send_lines(self, stream: OutputStream, lines: list[TerminalLine]) -> None:
        for text, end in lines:
            # At the end nobody may be there to read: how it ended is worth more than a line.
            if not (self._is_ending and self._writer.is_full):
                about = {} if stream.rank is None else {"rank": stream.rank.rank}
                self._send({"is": "line", **about, "stream": stream.name, "text": text, "end": end})

    def _take_writer_change(self) -> None:
        if self._writer.is_broken and not self._is_ending:
            self._end(GRACE_S)
        self._readers.pause(self._writer.is_full and not self._is_ending)

    def _read_input(self) -> None:
        try:
            data = read_available(0)
        except OSError:
            data = b""
        if data is None:
            return
        if not data:
            self._loop.remove_reader(0)
            self._end(GRACE_S)
            return
        self._expect_message()
        for line in self._input.feed(data):
            self._obey(json.loads(line))

    def _obey(self, message: Message) -> None:
        if message["is"] == "job" and not self._job.done():
            self._silence_s = message["silence_s"]
            self._expect_message()
            self._job.set_result(message)
        elif message["is"] == "end":
            self._end(message["grace_s"])
        elif message["is"] == "stopped" and self._silence is not None:
            self._silence.cancel()  # the launcher was stopped by Ctrl-Z, until its next message

    def _expect_message(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self._loop.call_later(self._silence_s, self._take_silence)

    def _take_silence(self) -> None:
        # A message that is there and was not read yet: this process was stopped for a while.
        if select.select([0], [], [], 0)[0]:
            self._expect_message()
        elif not self._is_ending:
            self._end(GRACE_S)

    # --- the end -------------------------------------------------------------------------------

    def _end(self, grace_s: float) -> None:
        """End torchrun, which passes SIGTERM on to its ranks; kill what is left after a grace."""
        self._is_ending = True
        self._readers.pause(False)
        if not self._job.done():
            self._job.set_result(None)
        if grace_s <= 0:
            self._kill()
            return
        self._loop.call_later(grace_s, self._kill)
        if self._torchrun is not None and not self._torchrun_ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._torchrun, signal.SIGTERM)

    def _kill(self) -> None:
        """Kill all that was started here."""
        groups = [rank.pid for rank in self._ranks]
        if self._torchrun is not None and not self._torchrun_ended.done():
            groups.append(self._torchrun)
        for group in groups:
            signal_group(group, signal.SIGKILL)
        # Those that left their group, as far as /proc shows them.
        for pid in signal_descendants(signal.SIGKILL):
            if pid not in self._refused:
                self._refused.add(pid)
                text = f"{_process_name(pid)} is another user's: kill it there"
                self._send({"is": "note", "text": text})

    def _reap(self) -> None:
        for pid, status in reap():
            if pid == self._torchrun and not self._torchrun_ended.done():
                self._torchrun_ended.set_result(status)

    async def _read_rest(self) -> None:
        """Read what is left when torchrun has ended; not for ever, as orphans may go on writing."""
        until = time.monotonic() + 1.0
        self._is_busy = True
        while self._is_busy and time.monotonic() < until:
            self._is_busy = False
            await asyncio.sleep(0.001)
        for stream in list(self._streams.values()):
            self._read_last(stream)

    def _send_outcome(self, status: int) -> int:
        failed_rank = None
        if status != 0 and self._failures:
            last = max(attempt for attempt, _, _ in self._failures)
            _, failed_rank, status = next(f for f in self._failures if f[0] == last)
        self._send({"is": "over", "code": status, "rank": failed_rank})
        return status

    # --- ranks ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        self._is_busy = True
        connection, _ = self._server.accept()
        pid, uid, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if uid != os.getuid():
            connection.close()  # such sockets have no owner: another user may have come in
            return
        self._loop.add_reader(connection, self._read_rank, RankProcess(pid), connection)

    def _read_rank(self, rank: RankProcess, connection: socket.socket) -> None:
        self._is_busy = True
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(connection)
            connection.close()
            if rank in self._ranks:
                self._take_lost_rank(rank)
            return
        message = json.loads(data)
        if "rank" in message:
            self._take_start(rank, connection, message)
        else:
            self._take_end(rank, message["code"], message["told"] or self._is_ending)

    def _take_start(self, rank: RankProcess, connection: socket.socket, message: Message) -> None:
        rank.rank, rank.attempt = message["rank"], message["attempt"]
        writers = self._open_streams(rank)
        self._ranks.append(rank)
        self._send({"is": "started", "rank": rank.rank, "attempt": rank.attempt})
        with contextlib.suppress(OSError):  # killed meanwhile
            socket.send_fds(connection, [b"go"], writers)
        for writer in writers:
            os.close(writer)

    def _take_lost_rank(self, rank: RankProcess) -> None:
        """Report a rank that ended without a message: the process around it was killed too."""
        time.sleep(0.05)  # until a torchrun that was killed, and took it along, can be seen
        self._reap()
        torchrun_was_killed = self._torchrun_ended.done() and self._torchrun_ended.result() < 0
        was_told = (
            self._is_ending
            or torchrun_was_killed
            # By torchrun, if another had failed before and this one did not listen.
            or any(attempt == rank.attempt for attempt, _, _ in self._failures)
        )
        signal_group(rank.pid, signal.SIGKILL)
        self._take_end(rank, _KILLED, was_told)

    def _take_end(self, rank: RankProcess, status: int, was_told: bool) -> None:
        for stream in list(self._streams.values()):
            if stream.rank is rank:
                self._read_last(stream)
        self._ranks.remove(rank)  # its number may become another's
        if status != 0 and not was_told:
            self._failures.append((rank.attempt, rank.rank, status))
        self._send({"is": "ended", "rank": rank.rank, "code": status, "told": was_told})

    def _open_streams(self, rank: RankProcess | None) -> list[int]:
        """Read two new pipes, and return where to write to as stdout and stderr."""
        writers = []
        for name in ("stdout", "stderr"):
            reader, writer = os.pipe()
            stream = self._streams[reader] = OutputStream(reader, name, rank)
            self._readers.add(reader, partial(self._read, stream))
            writers.append(writer)
        return writers

    def _read(self, stream: OutputStream) -> None:
        data = read_available(stream.fd)
        if data is None:
            return
        self._is_busy = True
        lines = stream.splitter.feed(data) if data else stream.splitter.rest()
        # Not torchrun's page about a failure, which is reported in a shorter way.
        if stream.rank is not None or (
            not self._is_ending and (self._max_restarts or not self._failures)
        ):
            self._send_lines(stream, lines)
        if not data:
            self._close(stream)

    def _read_last(self, stream: OutputStream) -> None:
        """Read what is there now, and no more: a child of the rank may write for ever."""
        data = read_buffered(stream.fd)
        if stream.rank is not None:
            self._send_lines(stream, [*stream.splitter.feed(data), *stream.splitter.rest()])

    def _close(self, stream: OutputStream) -> None:
        del self._streams[stream.fd]
        self._readers.remove(stream.fd)
        os.close(stream.fd)


def _process_name(pid: int) -> str:
    try:
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return f"process {pid}"


def _machine() -> str:
    """Return what tells this machine, or container, from all others; empty where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])
    except OSError:
        return ""


def _loopback() -> str | None:
    """Return the name of the network card of 127.0.0.1, or None where it has another."""
    return "lo" if "lo" in {name for _, name in socket.if_nameindex()} else None


def _missing_interfaces(env: dict[str, str]) -> str | None:
    """Return a network card that ranks shall use and this host does not have."""
    values = {env[name] for name in INTERFACE_VARIABLES if name in env}
    present = {name for _, name in socket.if_nameindex()}
    wanted = {name for value in values for name in value.split(",")}
    # NCCL's own spellings, which --env may bring, are for NCCL to check.
    plain = {name for name in wanted if name and name[0] not in "^="}
    return next(iter(sorted(plain - present)), None)
