"""The lab's side of its processes: the switch (switch.py) and the init of each host (agent.py).

Messages are JSON after their length, with file descriptors on the side.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hipress
from hipress.errors import LabError, MissingDependencyError
from hipress.lab.links import Link

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
_MAX_FDS = 200
"""The kernel passes at most 253 descriptors at once."""
_START_S = 60.0
"""Seconds to make 64 hosts on a machine that is busy with something else."""
_ANSWER_S = 10.0
_END_S = 5.0


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message, and descriptors with it."""
    body = json.dumps(message).encode()
    head = _LENGTH.pack(len(body))
    # Descriptors go with the head: the body of a large environment may need several calls.
    if fds:
        socket.send_fds(sock, [head], list(fds))
    else:
        sock.sendall(head)
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Wait for one message and its descriptors; None where the other side is gone."""
    try:
        head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, _MAX_FDS)
        head += _receive_bytes(sock, _LENGTH.size - len(head)) if head else b""
        if len(head) < _LENGTH.size:
            return None
        length = _LENGTH.unpack(head)[0]
        body = _receive_bytes(sock, length)
    except ConnectionError:
        return None
    return (json.loads(body), list(fds)) if len(body) == length else None


def _receive_bytes(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    return data


class Cluster:
    """The processes of one lab: starts them, tells them what to do, ends them.

    Args:
        links: The link of each host.
        shaped: Whether hosts get namespaces and links at all.
        on_exit: Called with the number of a run, a rank, its exit code and the time of its end.
        on_host_gone: Called with a host whose init ended, and with it the host. Both are called
            from the thread that listens.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        shaped: bool,
        on_exit: Callable[[int, int, int, float], None],
        on_host_gone: Callable[[int], None],
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise LabError(f"the lab runs on Linux only, and this is {sys.platform}")
        if shaped and importlib.util.find_spec("pyroute2") is None:
            raise MissingDependencyError("pyroute2", "lab")
        self._on_exit = on_exit
        self._on_host_gone = on_host_gone
        self._owner = os.getpid()
        self._switch_lock, self._hosts_lock = threading.Lock(), threading.Lock()
        self._request_ids = itertools.count()
        self._answers: dict[int, threading.Event] = {}
        self._hosts: list[socket.socket] = []
        self._switch, theirs = socket.socketpair()
        self._process = _start_switch(theirs)
        theirs.close()
        try:
            send(self._switch, {"shaped": shaped, "links": [asdict(link) for link in links]})
            self._switch.settimeout(_START_S)
            received = receive(self._switch)
            if received is None:
                raise _refusal("its first process, which ended at once")
            message, fds = received
            if "refused" in message:
                raise _refusal(message["refused"])
            self._hosts = [socket.socket(fileno=fd) for fd in fds]
            self._switch.settimeout(_ANSWER_S)
        except BaseException:
            self._end_processes()
            raise
        self._listener = start_thread(self._listen)

    def ask_switch(self, message: Message) -> Message:
        """Send the switch a message and return its answer."""
        try:
            with self._switch_lock:
                send(self._switch, message)
                received = receive(self._switch)
        except OSError:
            received = None
        if received is None:
            raise LabError("the lab's switch does not answer; close this lab and make another")
        if "refused" in received[0]:
            raise LabError(f"{message['do']!r} on host {message['host']}: {received[0]['refused']}")
        return received[0]

    def tell(self, host: int, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a host a message; an `OSError` says that it is gone."""
        with self._hosts_lock:
            send(self._hosts[host], message, fds)

    def tell_all(self, message: Message) -> None:
        """Send every host that is still there a message."""
        for host in range(len(self._hosts)):
            with contextlib.suppress(OSError):
                self.tell(host, message)

    def signal(self, host: int, number: int) -> None:
        """Send a signal to all processes of a host and wait until that is done."""
        request = next(self._request_ids)
        done = self._answers[request] = threading.Event()
        try:
            self.tell(host, {"do": "signal", "signal": int(number), "id": request})
            if not done.wait(_ANSWER_S):
                raise TimeoutError
        except OSError:
            raise LabError(
                f"host {host} does not answer; close this lab and make another"
            ) from None
        finally:
            del self._answers[request]

    def close(self) -> None:
        """End every process of the cluster; in a process that was forked, do nothing."""
        if os.getpid() != self._owner:
            return
        self._end_processes()
        self._listener.join(_ANSWER_S)
        for host in self._hosts:
            host.close()

    def _end_processes(self) -> None:
        for sock in (*self._hosts, self._switch):
            # Not close: the listening thread still reads, until each host is gone.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # The kernel passes this on to every process below.
            self._process.kill()
            self._process.wait()
        self._switch.close()

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        for number, host in enumerate(self._hosts):
            selector.register(host, selectors.EVENT_READ, number)
        while selector.get_map():
            for key, _ in selector.select():
                received = receive(self._hosts[key.data])
                if received is None:
                    selector.unregister(key.fileobj)
                    self._on_host_gone(key.data)
                    continue
                message = received[0]
                if "did" not in message:
                    self._on_exit(message["run"], message["rank"], message["exit"], message["at_s"])
                elif (done := self._answers.get(message["did"])) is not None:
                    done.set()
        selector.close()


def start_thread(target: Callable[[], None]) -> threading.Thread:
    """Start a thread that does not keep a program alive that forgot to close its lab."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def _start_switch(theirs: socket.socket) -> subprocess.Popen[bytes]:
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
