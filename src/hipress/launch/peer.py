"""The launcher's side of one agent."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence

from hipress.launch.hosts import Host
from hipress.launch.outbox import Outbox
from hipress.launch.protocol import Message


class Peer:
    """One agent, and the process that leads to it.

    Args:
        host: Where it is.
        node: The number of its host.
        first_rank: The first of its ranks.
        command: What starts it: ssh, as a rule.
    """

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
        self.out = Outbox(stdin.fileno())
        """What is still to be told."""
        self.streams = {"stdout": stdout.fileno(), "stderr": stderr.fileno()}
        """Those that have not ended."""
        self._rest = {"stdout": b"", "stderr": b""}

    @property
    def name(self) -> str:
        """The host's."""
        return self.host.name

    @property
    def has_started(self) -> bool:
        """Whether all its ranks have."""
        return len(self.started) >= self.host.slots

    def tell(self, message: Message) -> None:
        """Send a message; an agent that is gone is told by its end."""
        self.out.put(json.dumps(message).encode() + b"\n")

    def lines(self, stream: str, data: bytes) -> list[bytes]:
        """Take more bytes of a stream, none at its end, and return the lines that are whole."""
        *lines, self._rest[stream] = (self._rest[stream] + data).split(b"\n")
        if not data and self._rest[stream]:
            lines, self._rest[stream] = [self._rest[stream]], b""
        return lines

    def last_errors(self) -> list[bytes]:
        """Return the lines of stderr that are there now, when the process has ended."""
        fd = self.streams["stderr"]
        os.set_blocking(fd, False)
        lines = []
        data = b"x"
        try:
            while data:
                data = os.read(fd, 1 << 16)
                lines += self.lines("stderr", data)
        except BlockingIOError:
            lines += self.lines("stderr", b"")
        return lines

    def close(self) -> None:
        """Close the pipes: an agent ends with its input."""
        for pipe in self._pipes:
            try:
                pipe.close()
            except OSError:
                pass
