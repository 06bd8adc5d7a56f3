"""The ranks of a host, and the pipes from which the agent reads them."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from dataclasses import dataclass

from hipress.launch.lines import Lines


@dataclass(eq=False)
class Rank:
    """One start of one rank."""

    pid: int
    """Of the process around it, and of its process group."""
    rank: int = -1
    attempt: int = 0


class Stream:
    """One stream of one rank.

    Args:
        fd: The end to read from; it is made non-blocking.
        name: "stdout" or "stderr".
        rank: Whose; None for torchrun.
    """

    def __init__(self, fd: int, name: str, rank: Rank | None) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.name = name
        self.rank = rank
        self.lines = Lines()
        """The lines so far."""

    def read(self) -> bytes | None:
        """Return some of what is there: nothing at the end, None if there is nothing yet."""
        try:
            return os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return None

    def read_all(self) -> bytes:
        """Return what is there at this moment, which a pipe bounds, and not what follows it."""
        there = bytearray(4)
        fcntl.ioctl(self.fd, termios.FIONREAD, there)
        left = struct.unpack("i", there)[0]
        data = b""
        while left > 0 and (more := self.read()):
            data += more
            left -= len(more)
        return data
