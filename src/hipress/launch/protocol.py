"""What agent and launcher say to each other: one JSON object per line.

Those of the agent begin with a mark: on its way lies a login shell, which may print as well. Every
object has "is", which tells what it is.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
SILENCE_S = 60.0
"""Seconds without a word from the launcher after which an agent ends all; it speaks four times."""

_MARK = b"\x1e"
"""The record separator of ASCII, which nobody prints."""


def pack(message: Message) -> bytes:
    """Return the line that carries a message."""
    return _MARK + json.dumps(message).encode() + b"\n"


def unpack(line: bytes) -> tuple[bytes, Message | None]:
    """Return somebody else's text in a line, and the message after it or None.

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


def exit_code(status: int) -> int:
    """Return the exit code for how a process ended: -n, signal n, becomes 128 + n as in a shell."""
    return status if status >= 0 else 128 - status
