"""Bytes in, lines out: a line ends with a newline or, as those of a progress bar, a return."""

from __future__ import annotations

import re

LONGEST_BYTES = 1 << 20
"""A line that is longer comes in pieces, so that a rank can not fill the memory with one."""
_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)

Line = tuple[str, str]
"""A text, and what ended it: a newline or a return."""


class Lines:
    """The lines of one stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Line]:
        """Take more bytes, and return the lines that they complete."""
        self._rest += data
        found: list[Line] = []
        start = 0
        # A return at the very end may be the first half of a line end of two bytes: it waits.
        for match in _END.finditer(self._rest):
            found.append(_line(self._rest[start : match.start()], match[0]))
            start = match.end()
        self._rest = self._rest[start:]
        if len(self._rest) > LONGEST_BYTES:
            found.append(_line(self._rest, b"\n"))
            self._rest = b""
        # A bar writes its return in front, so that the first line would be empty.
        return [line for line in found if line != ("", "\r")]

    def rest(self) -> list[Line]:
        """Return what no line end followed, when nothing more will come."""
        rest, self._rest = self._rest, b""
        return [_line(rest.rstrip(b"\r"), b"\n")] if rest.rstrip(b"\r") else []


def _line(text: bytes, end: bytes) -> Line:
    return text.decode(errors="replace"), "\r" if end == b"\r" else "\n"
