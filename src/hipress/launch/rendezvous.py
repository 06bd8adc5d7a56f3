"""Where hosts meet: the port of the first one, and the way of the others to it."""

from __future__ import annotations

import socket
from collections.abc import Callable

_TRY_S = 2.0
"""Seconds for one try to reach the first host."""


def reserve(port: int) -> socket.socket:
    """Return a socket that holds a port for torchrun, which may listen there meanwhile.

    torch takes seconds to load: until then the kernel could give a port that is only known to be
    free to any connection that goes out.

    Args:
        port: Which; 0 finds a free one.

    Raises:
        OSError: Somebody listens there, or only root may.
    """
    if socket.has_dualstack_ipv6():
        sock = socket.socket(socket.AF_INET6)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        sock = socket.socket()
    try:
        if port:
            # Connections of an earlier job that are only remembered do not count, nor for torch.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))
        # After a free one was found, or it could be one that another reserves.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        sock.close()
        raise
    return sock


def reach(
    address: str, port: int, say_why: Callable[[str | None], None], may_go_on: Callable[[], bool]
) -> bool:
    """Wait until the first host listens; torchrun would wait in silence.

    Args:
        address: Of the first host.
        port: Where it listens.
        say_why: Told why it is not reached when that changes, and None when it is at last.
        may_go_on: Called between tries; waits a moment, and says whether to try again.

    Returns:
        Whether it was reached.
    """
    said: str | None = None
    while may_go_on():
        why: str | None = None
        try:
            socket.create_connection((address, port), timeout=_TRY_S).close()
        except OSError as error:
            why = error.strerror or "no answer"
        if why != said:
            say_why(why)
            said = why
        if why is None:
            return True
    return False
