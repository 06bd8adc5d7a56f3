"""The sockets that gloo opens, so that they can be shut down.

gloo waits for a message until it comes, the peer hangs up, or the timeout is over; torch has no way
to make it stop (`abort` of its groups leaves the waiting threads where they are). A process with
such a thread cannot end well: a thread that comes back while Python shuts down aborts it. What
helps is to shut the connection down under it.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

Sockets = dict[int, int]
"""File descriptors with their inodes, which tell whether it is still the same socket."""


def open_sockets() -> Sockets:
    """Those of this process; none where the system does not tell."""
    found: Sockets = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                facts = os.fstat(int(name))
                if stat.S_ISSOCK(facts.st_mode):
                    found[int(name)] = facts.st_ino
    return found


def shut_down(sockets: Sockets) -> None:
    """Ends the connections; whoever waits on one gets an error."""
    for fd, inode in sockets.items():
        with suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                with socket.socket(fileno=os.dup(fd)) as one:
                    one.getpeername()  # an error for one that listens: gloo dies if that ends
                    one.shutdown(socket.SHUT_RDWR)
