"""On each host: starts torchrun there, reads its ranks, reports to the launcher, ends everything.

    python -m hipress.launch.agent

The first line on standard input is the job. After it the input stays open: when it closes the
launcher is gone, and all that runs here is ended. Nothing of the job is in the arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from hipress.launch import environment, torchrun
from hipress.launch.lines import Lines
from hipress.launch.messages import Message, pack
from hipress.processes import adopt_orphans, die_with_parent, signal_descendants
from hipress.version import __version__

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
REFUSED = 2
"""Exit code of an agent that can not do its job, and has said why."""
_TRY_S = 2.0
"""Seconds for one try to reach the first host."""


def main() -> NoReturn:
    """Do the job that comes on standard input, and exit as its ranks do."""
    agent = Agent()
    agent.say({"is": "up", "version": __version__})
    job = agent.first_message()
    if job is None:
        os._exit(REFUSED)  # the launcher is gone before it said what to do
    code = agent.run(job)
    # At once: threads there are none, and what is to be ended has been.
    os._exit(code)


@dataclass
class _Rank:
    """One start of one rank."""

    pid: int
    """Of the process around it, and of its process group."""
    rank: int = -1
    attempt: int = 0
    streams: dict[int, tuple[str, Lines]] = field(default_factory=dict)
    """The ends to read from: which stream, and the lines so far."""


class Agent:
    """The loop of an agent: its input, its ranks, the clock."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._input = b""
        self._has_input = True
        self._torchrun: int | None = None
        self._code: int | None = None
        self._ranks: list[_Rank] = []
        self._failures: list[tuple[int, int, int]] = []  # attempt, rank, code
        self._max_restarts = 0
        self._deadline_s: float | None = None
        self._is_ending = False
        self._wake, wake_out = socket.socketpair()
        for end in (self._wake, wake_out):
            end.setblocking(False)
        self._wake_out = wake_out
        signal.set_wakeup_fd(wake_out.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._end(GRACE_S))
        self._watch(self._wake.fileno(), self._woken)

    def say(self, message: Message) -> None:
        """Send a message to the launcher."""
        data = pack(message)
        try:
            while data:
                data = data[os.write(1, data) :]
        except OSError:  # the launcher is gone
            self._end(GRACE_S)

    def first_message(self) -> Message | None:
        """Wait for the job."""
        while b"\n" not in self._input:
            data = os.read(0, 1 << 16)
            if not data:
                return None
            self._input += data
        line, _, self._input = self._input.partition(b"\n")
        job: Message = json.loads(line)
        return job

    def run(self, job: Message) -> int:
        """Run a job.

        Returns:
            The exit code of the first rank that failed, or of torchrun.
        """
        adopt_orphans()
        self._watch(0, self._read_input)
        try:
            os.chdir(job["folder"])
        except OSError as error:
            return self._refuse(
                f"folder {job['folder']!r} can not be entered there ({error.strerror}); name one "
                f"that all hosts have with --dir"
            )
        if missing := _missing_interfaces(job["env"]):
            return self._refuse(
                f"there is no network card {missing!r} there; --interface takes one of: "
                f"{', '.join(sorted(name for _, name in socket.if_nameindex()))}"
            )
        place = torchrun.Place(**job["place"])
        if place.meeting and place.node == 0:
            if place.port == 0:
                place = torchrun.Place(**{**job["place"], "port": _free_port()})
            self.say({"is": "meeting", "port": place.port})
        elif place.meeting and not self._reach(place.meeting, place.port):
            return REFUSED  # told to end
        self._max_restarts = place.max_restarts
        self._start(place, job["env"], job["command"])
        while self._code is None:
            self._turn(self._seconds_left())
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                self._deadline_s = None
                self._kill()
        self._read_all()
        self._kill()
        return self._say_how_it_ended()

    # --- before the ranks start ----------------------------------------------------------------

    def _refuse(self, why: str) -> int:
        self.say({"is": "refused", "why": why})
        return REFUSED

    def _reach(self, address: str, port: int) -> bool:
        """Wait until the first host listens; say why not, as torchrun would wait in silence."""
        said = ""
        while not self._is_ending:
            try:
                with socket.create_connection((address, port), timeout=_TRY_S):
                    return True
            except OSError as error:
                why = error.strerror or "no answer"
            if why != said:
                self.say({"is": "waiting", "why": why})
                said = why
            self._turn(0.2)
        return False

    def _start(self, place: torchrun.Place, env: dict[str, str], command: list[str]) -> None:
        name = f"hipress-{os.getpid()}-{secrets.token_hex(8)}"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(f"\0{name}")
        self._server.listen(64)
        self._watch(self._server.fileno(), self._accept)
        whole = environment.with_defaults(
            os.environ, env, place.slots, os.path.dirname(sys.executable)
        )
        if place.max_restarts:
            whole.update(torchrun.RESTART_VARIABLES)
        child = subprocess.Popen(
            torchrun.command_line(place, name, command),
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        assert child.stdout is not None and child.stderr is not None
        for stream, pipe in (("stdout", child.stdout), ("stderr", child.stderr)):
            self._follow_torchrun(stream, os.dup(pipe.fileno()))
            pipe.close()
        self._torchrun = child.pid
        child.returncode = 0  # this loop reaps: Popen would warn of a child that it dropped

    # --- the loop ------------------------------------------------------------------------------

    def _watch(self, fd: int, then: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, then)

    def _turn(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            # What was called before in this turn may have closed it.
            if key.fd in self._selector.get_map():
                key.data()

    def _seconds_left(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._torchrun:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code

    def _read_input(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self._selector.unregister(0)
            self._end(GRACE_S)
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._end(json.loads(line)["grace_s"])

    def _end(self, grace_s: float) -> None:
        """End torchrun, which passes SIGTERM on to its ranks; kill what is left after a grace."""
        self._is_ending = True
        if grace_s <= 0:
            self._kill()
            return
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + grace_s
        if self._torchrun is not None and self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._torchrun, signal.SIGTERM)

    def _kill(self) -> None:
        """Kill all that was started here."""
        groups = [rank.pid for rank in self._ranks]
        if self._torchrun is not None and self._code is None:
            groups.append(self._torchrun)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        signal_descendants(
            signal.SIGKILL
        )  # those that left their group, as far as /proc shows them

    # --- ranks ---------------------------------------------------------------------------------

    def _follow_torchrun(self, stream: str, fd: int) -> None:
        """Pass on what torchrun says; not its page about a failure, which is told shorter."""
        os.set_blocking(fd, False)
        lines = Lines()

        def read() -> None:
            is_over, new = _read_lines(fd, lines)
            if not self._is_ending and (self._max_restarts or not self._failures):
                for text, end in new:
                    self.say({"is": "line", "stream": stream, "text": text, "end": end})
            if is_over:
                self._close(fd)

        self._watch(fd, read)

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        pid, uid, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if uid != os.getuid():
            connection.close()  # such sockets have no owner: another user may have come in
            return
        rank = _Rank(pid)
        self._watch(connection.fileno(), lambda: self._hear(rank, connection))

    def _hear(self, rank: _Rank, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            # Without an exit code: it was killed together with its rank.
            self._selector.unregister(connection)
            connection.close()
            return
        message = json.loads(data)
        if "rank" in message:
            self._take_in(rank, connection, message)
            return
        self._read_rank(rank, is_last=True)
        self._ranks = [other for other in self._ranks if other is not rank]
        told = message["told"] or self._is_ending
        if message["code"] != 0 and not told:
            self._failures.append((rank.attempt, rank.rank, message["code"]))
        self.say({"is": "ended", "rank": rank.rank, "code": message["code"], "told": told})

    def _take_in(self, rank: _Rank, connection: socket.socket, message: Message) -> None:
        rank.rank, rank.attempt = message["rank"], message["attempt"]
        theirs = []
        for stream in ("stdout", "stderr"):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            rank.streams[reader] = (stream, Lines())
            theirs.append(writer)
            self._watch(reader, partial(self._read_stream, rank, reader))
        self._ranks.append(rank)
        self.say({"is": "started", "rank": rank.rank, "attempt": rank.attempt})
        with contextlib.suppress(OSError):  # killed meanwhile
            socket.send_fds(connection, [b"go"], theirs)
        for writer in theirs:
            os.close(writer)

    def _read_rank(self, rank: _Rank, *, is_last: bool) -> None:
        for fd in list(rank.streams):
            stream, lines = rank.streams[fd]
            while self._read_stream(rank, fd):
                pass
            if is_last:
                self._say_lines(rank, stream, lines)

    def _read_stream(self, rank: _Rank, fd: int) -> bool:
        """Read what is there; say whether there may be more."""
        if fd not in rank.streams:
            return False
        stream, lines = rank.streams[fd]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        for text, end in lines.feed(data):
            self._say_line(rank, stream, text, end)
        if not data:
            self._say_lines(rank, stream, lines)
            del rank.streams[fd]
            self._close(fd)
        return bool(data)

    def _say_lines(self, rank: _Rank, stream: str, lines: Lines) -> None:
        for text, end in lines.rest():
            self._say_line(rank, stream, text, end)

    def _say_line(self, rank: _Rank, stream: str, text: str, end: str) -> None:
        self.say({"is": "line", "rank": rank.rank, "stream": stream, "text": text, "end": end})

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _read_all(self) -> None:
        """Read what is left when torchrun has ended; not for ever, as orphans may go on writing."""
        until = time.monotonic() + 1.0
        while self._selector.select(0) and time.monotonic() < until:
            self._turn(0)
            if 0 in self._selector.get_map():
                self._selector.unregister(0)  # nothing that it could say matters any more
        for rank in self._ranks:
            self._read_rank(rank, is_last=True)

    def _say_how_it_ended(self) -> int:
        assert self._code is not None
        code, failed_rank = self._code, None
        if code != 0 and self._failures:
            last = max(attempt for attempt, _, _ in self._failures)
            _, failed_rank, code = next(f for f in self._failures if f[0] == last)
        self.say({"is": "over", "code": code, "rank": failed_rank})
        return code


def _read_lines(fd: int, lines: Lines) -> tuple[bool, list[tuple[str, str]]]:
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return False, []
    return not data, lines.feed(data) if data else lines.rest()


def _missing_interfaces(env: dict[str, str]) -> str | None:
    """Return a network card that ranks shall use and this host has not."""
    values = {env[name] for name in environment.INTERFACE_VARIABLES if name in env}
    present = {name for _, name in socket.if_nameindex()}
    wanted = {name for value in values for name in value.split(",")}
    # NCCL's own spellings, which --env may bring, are for NCCL to judge.
    plain = {name for name in wanted if name and name[0] not in "^="}
    return next(iter(sorted(plain - present)), None)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
