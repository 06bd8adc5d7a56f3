"""stdout and stderr of the launcher, written by a thread: a reader that stalls stalls nothing else.

Not as an outbox: a terminal is shared with the shell, which a non-blocking one would confuse.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

MOST_BYTES = 1 << 20
"""With more than this waiting, nothing more shall be read that would be shown."""
_PIECE_BYTES = 1 << 16


class StdoutWriter:
    """Writes what is put, in order.

    Args:
        wake: Called from the thread when something is worth a look: room, emptiness, an error.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.errors: deque[tuple[str, OSError]] = deque()
        """Streams that can not be written any more, and why; for the caller to take."""
        self._wake = wake
        self._streams = {"stdout": _open(sys.stdout), "stderr": _open(sys.stderr)}
        self._encodings = {
            name: getattr(stream, "encoding", None) or "utf-8"
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr))
        }
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._num_bytes = 0  # waiting or being written
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, daemon=True).start()

    @property
    def is_full(self) -> bool:
        """Whether too much waits."""
        return self._num_bytes > MOST_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether all has been written."""
        return self._num_bytes == 0

    def put(self, stream: str, text: str) -> None:
        """Add a text.

        Args:
            stream: "stdout" or "stderr"; nothing happens where it was closed from the start.
            text: Signs that the stream's encoding lacks are written with a backslash.
        """
        data = text.encode(self._encodings[stream], errors="backslashreplace")
        with self._changed:
            if self._streams[stream] is not None:
                self._waiting.append((stream, data))
                self._num_bytes += len(data)
                self._changed.notify()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                stream, data = self._waiting.popleft()
                pieces = [data]
                size = len(data)
                while self._waiting and self._waiting[0][0] == stream and size < _PIECE_BYTES:
                    pieces.append(self._waiting.popleft()[1])
                    size += len(pieces[-1])
                fd = self._streams[stream]
            was_full = self.is_full
            try:
                data = b"".join(pieces)
                while data and fd is not None:
                    data = data[os.write(fd, data) :]
            except OSError as error:
                self._streams[stream] = None
                self.errors.append((stream, error))
                self._wake()
            with self._changed:
                self._num_bytes -= size
            if self.is_empty or was_full and not self.is_full:
                self._wake()


def _open(stream: TextIO | None) -> int | None:
    """Return the descriptor of a stream; None where it was closed: the number may be another's."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None
