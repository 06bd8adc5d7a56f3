"""Messages between the processes of a lab: JSON after its length, file descriptors on the side."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
_MOST_FDS = 200
"""The kernel passes at most 253 descriptors at once."""


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
        head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, _MOST_FDS)
        head += _exactly(sock, _LENGTH.size - len(head)) if head else b""
        if len(head) < _LENGTH.size:
            return None
        length = _LENGTH.unpack(head)[0]
        body = _exactly(sock, length)
    except ConnectionError:
        return None
    return (json.loads(body), list(fds)) if len(body) == length else None


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size > 0:
        part = sock.recv(size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
