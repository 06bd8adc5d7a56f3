"""The launcher's way to the agent of one host: ssh, the messages, and the connection.

Agent and launcher exchange one JSON object per line; the key "is" holds its kind. Lines of the
agent begin with a mark, because a login shell on the way may print as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from hipress.launch.hosts import Host
from hipress.launch.torchrun import call_main
from hipress.processes.pipes import LineSplitter, PipeWriter

Message = dict[str, Any]

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
SILENCE_S = 60.0
"""Seconds without a message from the launcher after which an agent ends all; it sends four."""
CONNECT_S = 15
"""Seconds that ssh may take to connect."""
SSH_FAILED = 255
"""Exit code of ssh itself, whatever the command there would have returned."""
_MARK = b"\x1e"
"""The record separator of ASCII, which no program prints."""
_AGENT = call_main("hipress.launch.agent")

# What ssh says, in lower case, and the next step.
_STEPS = (
    ("permission denied", "let it in without a password: ssh-copy-id {target}"),
    ("host key verification failed", "accept its key once by hand: {by_hand}"),
    ("host identification has changed", "accept its key once by hand: {by_hand}"),
    ("could not resolve", "check the name, or use its address"),
    ("name or service not known", "check the name, or use its address"),
    ("connection refused", "is sshd running there, and on that port (--ssh-port)?"),
    ("timed out", "is it up, and is the port of its sshd open (--ssh-port)?"),
    ("no route to host", "is it up, and is it on a network that this machine reaches?"),
)


def pack(message: Message) -> bytes:
    """Return the line of an agent that carries a message."""
    return _MARK + json.dumps(message).encode() + b"\n"


def unpack(line: bytes) -> tuple[bytes, Message | None]:
    """Return the text of other programs in a line, and the message after it or None.

    A shell that sets the title of a terminal writes no line end: the message follows at once.
    """
    text, mark, rest = line.partition(_MARK)
    if not mark:
        return line, None
    try:
        message = json.loads(rest)
    except ValueError:
        return line, None
    return (text, message) if isinstance(message, dict) else (line, None)


def local_command(python: str) -> list[str]:
    """Return the command that starts an agent on this machine."""
    return [python, "-c", _AGENT]


def ssh_command(host: Host, *, ssh: Sequence[str], port: int | None, python: str) -> list[str]:
    """Return the command that starts an agent on a host.

    Args:
        host: The host.
        ssh: The program and the user's own options, which come first and so win.
        port: Where sshd listens on hosts that do not say so themselves.
        python: The Python to use there.
    """
    port = host.ssh_port or port
    return [
        *ssh,
        "-T",
        *("-o", "BatchMode=yes"),  # a question for a password would wait for ever
        *("-o", f"ConnectTimeout={CONNECT_S}"),
        # A host that is gone is noticed after a minute.
        *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
        *(("-p", str(port)) if port else ()),
        _target(host),
        # A login shell reads this, whichever shell that is: plain quoted words only.
        f"exec {shlex.quote(python)} -c {shlex.quote(_AGENT)}",
    ]


def manual_command(host: Host, *, ssh: Sequence[str], port: int | None) -> str:
    """Return what to type to try the connection without this program."""
    port = host.ssh_port or port
    options = ["-p", str(port)] if port else []
    return shlex.join([*ssh, *options, _target(host), "true"])


def next_step(host: Host, said: str, *, ssh: Sequence[str], port: int | None) -> str:
    """Return what to do about a connection that failed.

    Args:
        host: The host that was not reached.
        said: What ssh wrote.
        ssh: As for `ssh_command`.
        port: As for `ssh_command`.
    """
    by_hand = manual_command(host, ssh=ssh, port=port)
    for needle, step in _STEPS:
        if needle in said.lower():
            return step.format(target=_target(host), by_hand=by_hand)
    return f"try it by hand: {by_hand}"


def _target(host: Host) -> str:
    return f"{host.user}@{host.name}" if host.user else host.name


class RemoteAgent:
    """The agent of one host as the launcher sees it, and the process that leads to it.

    Args:
        host: The host.
        node: The index of the host.
        first_rank: The lowest of its ranks.
        command: What starts the agent: ssh, usually.
    """

    def __init__(self, host: Host, node: int, first_rank: int, command: Sequence[str]) -> None:
        self.host = host
        self.name = host.name
        self.node = node
        self.first_rank = first_rank
        self.is_up = False
        self.has_job = False
        """Whether it was told what to run."""
        self.started: set[int] = set()
        """The ranks that have started."""
        self.waits_for: str | None = None
        """The reason why this host cannot reach the first one yet; None if it can."""
        self.over: Message | None = None
        """Its last message."""
        self.code: int | None = None
        """The exit code of the process, once that has ended and all was read."""
        self.errors: list[str] = []
        """The lines on stderr before it was up."""
        self.stdout_ended = asyncio.Event()
        # A session of its own: Ctrl-C is for the launcher, which ends all in order.
        self.process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        self._pipes = (stdin, stdout, stderr)
        self.fds = {"stdout": stdout.fileno(), "stderr": stderr.fileno()}
        """The streams that have not ended."""
        self.splitters = {stream: LineSplitter() for stream in self.fds}
        self.writer = PipeWriter(stdin.fileno())

    @property
    def has_started(self) -> bool:
        """Whether all its ranks have started."""
        return len(self.started) >= self.host.slots

    def send(self, message: Message) -> None:
        """Send a message, unless the process has ended."""
        if self.code is None and self.process.poll() is None:
            self.writer.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Close the pipes: an agent ends when its input does."""
        self.writer.close()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
