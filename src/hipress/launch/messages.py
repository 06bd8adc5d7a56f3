"""What agent and launcher say to each other: one JSON object per line.

Those of the agent begin with a mark: on its way lies a login shell, which may print as well.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

_MARK = b"\x1e"
"""The record separator of ASCII, which nobody prints."""


def pack(message: Message) -> bytes:
    """Return the line that carries a message."""
    return _MARK + json.dumps(message).encode() + b"\n"


def unpack(line: bytes) -> Message | None:
    """Return the message of a line, None if it is somebody else's text."""
    if not line.startswith(_MARK):
        return None
    try:
        message = json.loads(line[1:])
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
