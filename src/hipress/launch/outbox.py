"""Bytes on their way to somebody who may be slow to take them: writing never waits."""

from __future__ import annotations

import os

MOST_BYTES = 1 << 20
"""With more than this waiting, who fills an outbox shall stop reading what fills it."""


class Outbox:
    """What is still to be written to a pipe.

    Args:
        fd: The end to write to; it is made non-blocking, so nobody else may hold it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_full = False
        """Whether too much waits; over when half of that has gone."""
        self.is_gone = False
        """Whether nobody reads any more; what is put then is dropped."""
        self._waiting = bytearray()
        os.set_blocking(fd, False)

    @property
    def is_empty(self) -> bool:
        """Whether all has been written."""
        return not self._waiting

    def put(self, data: bytes) -> None:
        """Add bytes, and write what can be written at once."""
        if not self.is_gone:
            self._waiting += data
            self.flush()

    def flush(self) -> None:
        """Write what can be written at once."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self.fd, memoryview(self._waiting)[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.is_gone = True
            self._waiting.clear()
        self.is_full = len(self._waiting) > (MOST_BYTES // 2 if self.is_full else MOST_BYTES)
