"""The lab's side of the process that holds the cluster (switch.py): start it, ask it, end it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import hipress
from hipress.errors import LabError, MissingDependencyError
from hipress.lab import wire
from hipress.lab.links import Link

_START_S = 60.0
"""Seconds to make 64 hosts on a machine that is busy with something else."""
_ANSWER_S = 10.0
_END_S = 5.0


class Switchboard:
    """The connections to a cluster's processes.

    Args:
        links: The link of each host.
        shaped: Whether hosts get namespaces and links at all.
    """

    def __init__(self, links: Sequence[Link], *, shaped: bool) -> None:
        if not sys.platform.startswith("linux"):
            raise LabError(f"the lab runs on Linux only, and this is {sys.platform}")
        if shaped and importlib.util.find_spec("pyroute2") is None:
            raise MissingDependencyError("pyroute2", "lab")
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        self._process = _start(theirs)
        theirs.close()
        self.agents: list[socket.socket] = []
        """One socket to the init of each host."""
        try:
            wire.send(self._control, {"shaped": shaped, "links": [asdict(link) for link in links]})
            self._control.settimeout(_START_S)
            received = wire.receive(self._control)
            if received is None:
                raise _refusal("its first process, which ended at once")
            message, fds = received
            if "refused" in message:
                raise _refusal(message["refused"])
            self.agents = [socket.socket(fileno=fd) for fd in fds]
            self._control.settimeout(_ANSWER_S)
        except BaseException:
            self.close()
            raise

    def ask(self, message: wire.Message) -> wire.Message:
        """Send the switch a message and return its answer."""
        try:
            with self._lock:
                wire.send(self._control, message)
                received = wire.receive(self._control)
        except OSError:
            received = None
        if received is None:
            raise LabError("the lab's switch does not answer; close this lab and make another")
        if "refused" in received[0]:
            raise LabError(f"{message['do']!r} on host {message['host']}: {received[0]['refused']}")
        return received[0]

    def close(self) -> None:
        """End every process of the cluster."""
        for sock in (*self.agents, self._control):
            # Not close: the listening thread still reads, until each host is gone.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # The kernel passes this on to every process below.
            self._process.kill()
            self._process.wait()
        self._control.close()


def _start(theirs: socket.socket) -> subprocess.Popen[bytes]:
    # This hipress, wherever it was imported from, and no module of the user's folder.
    root = str(Path(hipress.__file__).parents[1])
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [root, *map(os.path.abspath, given)]  # the switch works in another folder
    return subprocess.Popen(
        # Warnings of pyroute2 are nothing to the user, and must not be errors.
        [sys.executable, "-W", "ignore", "-m", "hipress.lab.switch", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Its own session: Ctrl-C reaches the lab's process alone, which ends things in order.
        start_new_session=True,
    )


def _refusal(what: str) -> LabError:
    return LabError(
        f"an emulated cluster needs namespaces of its own and this system refused {what}; run as "
        f"root or allow user namespaces, or put all ranks on 127.0.0.1, without shaping: "
        f"Lab(..., shaped=False) or `hipress lab run --loopback`"
    )
