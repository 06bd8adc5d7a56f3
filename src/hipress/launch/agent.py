"""On each host: starts torchrun there, reads its ranks, reports to the launcher, ends everything.

The first message on standard input is the job. After it the input stays open, and the launcher
speaks every now and then: when the input closes or falls silent the launcher is gone, and all that
runs here is ended. Nothing of the job is in the arguments. Nothing here waits for the launcher to
read: while too much is on its way to it, ranks are not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from hipress.launch import environment, rendezvous, torchrun
from hipress.launch.outbox import Outbox
from hipress.launch.protocol import GRACE_S, SILENCE_S, Message, exit_code, pack
from hipress.launch.streams import Rank, Stream
from hipress.processes import adopt_orphans, die_with_parent, signal_descendants
from hipress.version import __version__

REFUSED = 2
"""Exit code of an agent that can not do its job, and has said why."""
_DRAIN_S = 2.0
"""Seconds for the last words to a launcher that wants the end, or is gone."""
_KILLED = -signal.SIGKILL


def main() -> NoReturn:
    """Do the job that comes on standard input, and exit as its ranks do."""
    agent = Agent()
    status = agent.run()
    agent.drain()
    # At once: threads there are none, and what is to be ended has been.
    os._exit(exit_code(status))


class Agent:
    """The loop of an agent: its input, its ranks, the clock."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._input = b""
        self._out = Outbox(1)
        self._streams: dict[int, Stream] = {}  # what is not read while the outbox is full
        self._is_held = False
        self._heard_s: float | None = time.monotonic()  # None: silence means nothing
        self._silence_s = SILENCE_S
        self._job: Message | None = None
        self._torchrun: int | None = None
        self._status: int | None = None
        self._ranks: list[Rank] = []
        self._failures: list[tuple[int, int, int]] = []  # attempt, rank, status
        self._max_restarts = 0
        self._deadline_s: float | None = None
        self._is_ending = False
        self._is_signalled = False
        self._refused: set[int] = set()  # processes that can not be killed
        self._wake, wake_out = socket.socketpair()
        for end in (self._wake, wake_out):
            end.setblocking(False)
        self._wake_out = wake_out
        signal.set_wakeup_fd(wake_out.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note_signal)
        self._watch(self._wake.fileno(), self._woken)
        os.set_blocking(0, False)
        self._watch(0, self._read_input)

    def run(self) -> int:
        """Run the job.

        Returns:
            How the first rank that failed ended, or torchrun: an exit code, or -n for signal n.
        """
        adopt_orphans()
        self._say({"is": "up", "version": __version__, "machine": _machine()})
        while self._job is None and not self._is_ending:
            self._turn()
        if self._job is None:
            return REFUSED  # the launcher is gone before it said what to do
        try:
            log_folder = tempfile.mkdtemp(prefix="hipress-")
        except OSError as error:
            return self._refuse(f"no temporary folder can be made there: {error.strerror}")
        try:
            return self._do(self._job, log_folder)
        finally:
            shutil.rmtree(log_folder, ignore_errors=True)

    def drain(self) -> None:
        """Wait until the launcher has taken everything, as long as it is there."""
        for stream in list(self._streams.values()):
            self._close(stream)
        until: float | None = None
        while not self._out.is_empty:
            if self._is_ending and until is None:
                until = time.monotonic() + _DRAIN_S
            if until is not None and time.monotonic() >= until:
                return
            self._turn(0.1)

    # --- before the ranks start ----------------------------------------------------------------

    def _do(self, job: Message, log_folder: str) -> int:
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
            try:
                self._reserved = rendezvous.reserve(place.port)
            except OSError as error:
                return self._refuse(
                    f"port {place.port} can not be used there ({error.strerror}); name another "
                    f"with --port, or leave it out and a free one is found"
                )
            port = self._reserved.getsockname()[1]
            place = torchrun.Place(**{**job["place"], "port": port})
            self._say({"is": "meeting", "port": port})
        elif place.meeting and not rendezvous.reach(
            place.meeting,
            place.port,
            lambda why: self._say({"is": "waiting", "why": why}),
            self._may_go_on,
        ):
            return REFUSED  # told to end
        self._max_restarts = place.max_restarts
        try:
            self._start(place, job["env"], job["command"], log_folder)
        except OSError as error:
            return self._refuse(f"torchrun can not be started there: {error.strerror}")
        while self._status is None:
            self._turn()
        self._read_all()
        self._kill()
        return self._say_how_it_ended()

    def _refuse(self, why: str) -> int:
        self._say({"is": "refused", "why": why})
        return REFUSED

    def _may_go_on(self) -> bool:
        self._turn(0.2)
        return not self._is_ending

    def _start(
        self, place: torchrun.Place, env: dict[str, str], command: list[str], log_folder: str
    ) -> None:
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
            torchrun.command_line(place, name, command, log_folder),
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        assert child.stdout is not None and child.stderr is not None
        for name, pipe in (("stdout", child.stdout), ("stderr", child.stderr)):
            self._follow(Stream(os.dup(pipe.fileno()), name, None))
            pipe.close()
        self._torchrun = child.pid
        child.returncode = 0  # this loop reaps: Popen would warn of a child that it dropped

    # --- the loop ------------------------------------------------------------------------------

    def _watch(self, fd: int, then: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, then)

    def _turn(self, most_s: float | None = None) -> bool:
        """Wait for something and do what it asks for; say whether anything was there."""
        ready = self._selector.select(self._seconds_left(most_s))
        for key, _ in ready:
            # What was called before in this turn may have closed it.
            if key.fd in self._selector.get_map():
                key.data()
        self._look_at_the_clock()
        return bool(ready)

    def _seconds_left(self, most_s: float | None) -> float | None:
        waits = [] if most_s is None else [most_s]
        if self._deadline_s is not None:
            waits.append(self._deadline_s - time.monotonic())
        if self._heard_s is not None and not self._is_ending:
            waits.append(self._heard_s + self._silence_s - time.monotonic())
        return max(0.0, min(waits)) if waits else None

    def _look_at_the_clock(self) -> None:
        now_s = time.monotonic()
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self._deadline_s = None
            self._kill()
        if self._is_ending or self._heard_s is None or now_s < self._heard_s + self._silence_s:
            return
        # Words that are there and were not read yet: this process was stopped for a while.
        if not select.select([0], [], [], 0)[0]:
            self._end(GRACE_S)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        self._reap()
        if self._is_signalled:
            self._is_signalled = False
            self._end(GRACE_S)

    def _note_signal(self, *_: object) -> None:
        self._is_signalled = True  # and no more: it comes in the middle of anything

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._torchrun:
                self._status = os.waitstatus_to_exitcode(status)

    # --- the launcher --------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self._out.put(pack(message))
        self._mind_the_outbox()

    def _say_lines(self, stream: Stream, lines: list[tuple[str, str]]) -> None:
        for text, end in lines:
            # At the end nobody may be there to read: how it ended is worth more than a line.
            if not (self._is_ending and self._out.is_full):
                about = {} if stream.rank is None else {"rank": stream.rank.rank}
                self._say({"is": "line", **about, "stream": stream.name, "text": text, "end": end})

    def _mind_the_outbox(self) -> None:
        fd = self._out.fd
        if self._out.is_empty == (fd in self._selector.get_map()):
            if self._out.is_empty:
                self._selector.unregister(fd)
            else:
                self._selector.register(fd, selectors.EVENT_WRITE, self._write)
        if self._out.is_gone and not self._is_ending:
            self._end(GRACE_S)
        is_held = self._out.is_full and not self._is_ending
        if is_held == self._is_held:
            return
        self._is_held = is_held
        for stream in self._streams.values():
            if is_held:
                self._selector.unregister(stream.fd)
            else:
                self._watch(stream.fd, partial(self._read, stream))

    def _write(self) -> None:
        self._out.flush()
        self._mind_the_outbox()

    def _read_input(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(0)
            self._end(GRACE_S)
            return
        self._heard_s = time.monotonic()
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, message: Message) -> None:
        if message["is"] == "job":
            self._job = message
            self._silence_s = message["silence_s"]
        elif message["is"] == "end":
            self._end(message["grace_s"])
        elif message["is"] == "stopped":
            self._heard_s = None  # by Ctrl-Z, until its next word

    # --- the end -------------------------------------------------------------------------------

    def _end(self, grace_s: float) -> None:
        """End torchrun, which passes SIGTERM on to its ranks; kill what is left after a grace."""
        self._is_ending = True
        self._mind_the_outbox()
        if grace_s <= 0:
            self._kill()
            return
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + grace_s
        if self._torchrun is not None and self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._torchrun, signal.SIGTERM)

    def _kill(self) -> None:
        """Kill all that was started here."""
        groups = [rank.pid for rank in self._ranks]
        if self._torchrun is not None and self._status is None:
            groups.append(self._torchrun)
        for group in groups:
            _kill_group(group)
        # Those that left their group, as far as /proc shows them.
        for pid in signal_descendants(signal.SIGKILL):
            if pid not in self._refused:
                self._refused.add(pid)
                self._say({"is": "note", "text": f"{_name(pid)} is another user's: kill it there"})

    def _read_all(self) -> None:
        """Read what is left when torchrun has ended; not for ever, as orphans may go on writing."""
        until = time.monotonic() + 1.0
        while self._turn(0) and time.monotonic() < until:
            pass
        for stream in list(self._streams.values()):
            self._read_last(stream)

    def _say_how_it_ended(self) -> int:
        assert self._status is not None
        status, failed_rank = self._status, None
        if status != 0 and self._failures:
            last = max(attempt for attempt, _, _ in self._failures)
            _, failed_rank, status = next(f for f in self._failures if f[0] == last)
        self._say({"is": "over", "code": status, "rank": failed_rank})
        return status

    # --- ranks ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        pid, uid, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if uid != os.getuid():
            connection.close()  # such sockets have no owner: another user may have come in
            return
        rank = Rank(pid)
        self._watch(connection.fileno(), lambda: self._hear(rank, connection))

    def _hear(self, rank: Rank, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            if rank in self._ranks:
                self._lose(rank)
            return
        message = json.loads(data)
        if "rank" in message:
            self._take_in(rank, connection, message)
        else:
            self._let_go(rank, message["code"], message["told"] or self._is_ending)

    def _take_in(self, rank: Rank, connection: socket.socket, message: Message) -> None:
        rank.rank, rank.attempt = message["rank"], message["attempt"]
        theirs = []
        for name in ("stdout", "stderr"):
            reader, writer = os.pipe()
            theirs.append(writer)
            self._follow(Stream(reader, name, rank))
        self._ranks.append(rank)
        self._say({"is": "started", "rank": rank.rank, "attempt": rank.attempt})
        with contextlib.suppress(OSError):  # killed meanwhile
            socket.send_fds(connection, [b"go"], theirs)
        for writer in theirs:
            os.close(writer)

    def _lose(self, rank: Rank) -> None:
        """Policy a rank that ended without a word: what stands around it was killed too."""
        time.sleep(0.05)  # until a torchrun that was killed, and took it along, can be seen
        self._reap()
        was_told = (
            self._is_ending
            or (self._status is not None and self._status < 0)
            # By torchrun, if another had failed before and this one did not listen.
            or any(attempt == rank.attempt for attempt, _, _ in self._failures)
        )
        _kill_group(rank.pid)
        self._let_go(rank, _KILLED, was_told)

    def _let_go(self, rank: Rank, status: int, was_told: bool) -> None:
        for stream in list(self._streams.values()):
            if stream.rank is rank:
                self._read_last(stream)
        self._ranks.remove(rank)  # its number may become another's
        if status != 0 and not was_told:
            self._failures.append((rank.attempt, rank.rank, status))
        self._say({"is": "ended", "rank": rank.rank, "code": status, "told": was_told})

    def _follow(self, stream: Stream) -> None:
        self._streams[stream.fd] = stream
        if not self._is_held:
            self._watch(stream.fd, partial(self._read, stream))

    def _read(self, stream: Stream) -> None:
        data = stream.read()
        if data is None:
            return
        lines = stream.lines.feed(data) if data else stream.lines.rest()
        # Not torchrun's page about a failure, which is told shorter.
        if stream.rank is not None or (
            not self._is_ending and (self._max_restarts or not self._failures)
        ):
            self._say_lines(stream, lines)
        if not data:
            self._close(stream)

    def _read_last(self, stream: Stream) -> None:
        """Read what is there now, and no more: a child of the rank may write for ever."""
        data = stream.read_all()
        if stream.rank is not None:
            self._say_lines(stream, [*stream.lines.feed(data), *stream.lines.rest()])

    def _close(self, stream: Stream) -> None:
        del self._streams[stream.fd]
        with contextlib.suppress(KeyError):  # held
            self._selector.unregister(stream.fd)
        os.close(stream.fd)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _name(pid: int) -> str:
    """Return how to call a process."""
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


def _missing_interfaces(env: dict[str, str]) -> str | None:
    """Return a network card that ranks shall use and this host has not."""
    values = {env[name] for name in environment.INTERFACE_VARIABLES if name in env}
    present = {name for _, name in socket.if_nameindex()}
    wanted = {name for value in values for name in value.split(",")}
    # NCCL's own spellings, which --env may bring, are for NCCL to judge.
    plain = {name for name in wanted if name and name[0] not in "^="}
    return next(iter(sorted(plain - present)), None)
