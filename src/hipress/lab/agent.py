"""Init of one emulated host: starts its ranks, passes signals on, reaps, reports exit codes.

It is PID 1 of its namespace, so when it ends the kernel ends the whole host. On loopback there is
no such namespace; there it adopts orphans and ends its descendants itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from typing import NoReturn

from hipress.lab.cluster import Message, receive, send
from hipress.processes.family import (
    TERMINATION_SIGNALS,
    exit_code,
    reap,
    signal_descendants,
    signal_group,
    start,
)

COULD_NOT_START = 127
"""Exit code of a command that could not be started, as a shell reports it."""


class Agent:
    """The init of one host.

    Args:
        control: The socket to the lab's process; the host ends when that is gone.
        is_init: Whether this process is PID 1 of a namespace.
    """

    def __init__(self, control: socket.socket, *, is_init: bool) -> None:
        self._control = control
        self._is_init = is_init
        self._ranks: dict[int, tuple[int, int]] = {}  # pid: (run, rank)

    async def serve(self) -> None:
        """Serve until the lab's process is gone, and end this process then."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for ignored in TERMINATION_SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        if not self._is_init:
            # How the kernel tells that the switch is gone; see switch.py.
            self._loop.add_signal_handler(signal.SIGTERM, self._leave)
        self._loop.add_reader(self._control, self._read)
        await self._loop.create_future()

    def _read(self) -> None:
        received = receive(self._control)
        if received is None:
            self._leave()
        self._obey(*received)

    def _obey(self, message: Message, fds: list[int]) -> None:
        what = message["do"]
        if what == "spawn":
            self._spawn(message, *fds)
        elif what == "signal":
            self._signal_all(message["signal"])
            self._send({"did": message["id"]})
        elif what == "end":
            self._end(message["run"], message["grace_s"])
        else:
            assert what == "sweep", what
            # A rank may have left processes behind; another run on this host keeps its own.
            if not self._ranks:
                self._signal_all(signal.SIGKILL)

    def _spawn(self, message: Message, stdout: int, stderr: int) -> None:
        run, rank, argv = message["run"], message["rank"], message["argv"]
        try:
            pid = start(argv, env=message["env"], cwd=message["cwd"], stdout=stdout, stderr=stderr)
            self._ranks[pid] = (run, rank)
        except (OSError, subprocess.SubprocessError) as error:
            # Not only the command can be at fault: a folder that is not there reads the same.
            with open(stderr, "w", closefd=False, errors="replace") as file:
                file.write(f"hipress: {argv[0]!r} could not be started: {error}\n")
            self._report(run, rank, COULD_NOT_START)
        finally:
            os.close(stdout)
            os.close(stderr)

    def _reap(self) -> None:
        for pid, status in reap():
            if pid in self._ranks:
                self._report(*self._ranks.pop(pid), exit_code(status))

    def _report(self, run: int, rank: int, code: int) -> None:
        # All hosts share one clock, so the lab can tell which rank failed first.
        self._send({"exit": code, "run": run, "rank": rank, "at_s": time.monotonic()})

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the lab is gone; the next read says so too
            send(self._control, message)

    def _end(self, run: int, grace_s: float) -> None:
        self._signal_run(run, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
        self._signal_run(run, signal.SIGCONT)  # a stopped process would sleep through the grace
        if grace_s > 0:
            self._loop.call_later(grace_s, self._signal_run, run, signal.SIGKILL)

    def _signal_run(self, run: int, number: int) -> None:
        for pid, (owner, _) in self._ranks.items():
            if owner == run:
                signal_group(pid, number)

    def _signal_all(self, number: int) -> None:
        if self._is_init:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)  # everyone in this PID namespace but this process
            return
        signal_descendants(number)

    def _leave(self) -> NoReturn:
        self._signal_all(signal.SIGKILL)
        os._exit(0)
