"""Pipes between processes: lines out of bytes, and writers that never wait for a slow reader.

`PipeReaders` and `PipeWriter` work in the running asyncio loop. What fills a writer is paused while
`is_full` is true, so that memory stays bounded and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import struct
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TextIO, TypeVar

MAX_LINE_BYTES = 1 << 20
"""A longer line is cut, so that a rank cannot fill the memory with one."""
MAX_WAITING_BYTES = 1 << 20
"""With more than this waiting to be written, a writer is full."""
_CHUNK_BYTES = 1 << 16
_LINE_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)

_T = TypeVar("_T")


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine as `asyncio.run` does; an error in a callback ends it too, and is raised."""
    errors: list[BaseException] = []

    async def run() -> _T:
        task = asyncio.ensure_future(main)

        def fail(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            errors.append(context.get("exception") or RuntimeError(context["message"]))
            task.cancel()

        asyncio.get_running_loop().set_exception_handler(fail)
        return await task

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if errors:
            raise errors[0] from None
        raise


class LineSplitter:
    """The lines of one stream, whole, however their bytes arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes, and return the lines that they complete, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def rest(self) -> list[bytes]:
        """Return the last line, if it has no end, when nothing more will come."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


TerminalLine = tuple[str, str]
"""A text, and what ended it: a newline or a return."""


class TerminalLineSplitter:
    """The lines of one stream as a terminal shows them: a return ends one too (progress bars)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[TerminalLine]:
        """Take more bytes, and return the lines that they complete."""
        self._rest += data
        found: list[TerminalLine] = []
        start = 0
        # A return at the very end may be the first half of a line end of two bytes: it waits.
        for match in _LINE_END.finditer(self._rest):
            found.append(_terminal_line(self._rest[start : match.start()], match[0]))
            start = match.end()
        self._rest = self._rest[start:]
        if len(self._rest) > MAX_LINE_BYTES:
            found.append(_terminal_line(self._rest, b"\n"))
            self._rest = b""
        # A bar writes its return in front, so that the first line would be empty.
        return [line for line in found if line != ("", "\r")]

    def rest(self) -> list[TerminalLine]:
        """Return the last line, if it has no end, when nothing more will come."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [_terminal_line(rest, b"\n")] if rest else []


def _terminal_line(text: bytes, end: bytes) -> TerminalLine:
    return text.decode(errors="replace"), "\r" if end == b"\r" else "\n"


def read_available(fd: int) -> bytes | None:
    """Return bytes of a non-blocking pipe: none at its end, None if there are none yet."""
    try:
        return os.read(fd, _CHUNK_BYTES)
    except BlockingIOError:
        return None


def read_buffered(fd: int) -> bytes:
    """Return what a pipe holds at this moment, and not what a writer may add for ever."""
    available = bytearray(4)
    fcntl.ioctl(fd, termios.FIONREAD, available)
    left = struct.unpack("i", available)[0]
    data = b""
    while left > 0 and (more := read_available(fd)):
        data += more
        left -= len(more)
    return data


class PipeReaders:
    """Pipes that the running loop reads, and that can all be paused."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._is_paused = False

    def add(self, fd: int, callback: Callable[[], object]) -> None:
        """Call back whenever a pipe, which becomes non-blocking, has bytes or has ended."""
        os.set_blocking(fd, False)
        self._callbacks[fd] = callback
        if not self._is_paused:
            self._loop.add_reader(fd, callback)

    def remove(self, fd: int) -> None:
        """Read a pipe no more."""
        if self._callbacks.pop(fd, None) is not None:
            self._loop.remove_reader(fd)

    def pause(self, is_paused: bool) -> None:
        """Stop reading all pipes, or go on."""
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        for fd, callback in self._callbacks.items():
            if is_paused:
                self._loop.remove_reader(fd)
            else:
                self._loop.add_reader(fd, callback)


class PipeWriter:
    """Writes to a pipe what its reader takes, and keeps the rest.

    Args:
        fd: The end to write to; it becomes non-blocking, so no other process may share it.
        on_change: Called when `is_full` or `is_broken` has changed.
    """

    def __init__(self, fd: int, on_change: Callable[[], object] = lambda: None) -> None:
        self.is_full = False
        """Whether too much waits; it stays so until half of that is written."""
        self.is_broken = False
        """Whether the reader is gone; what is written then is dropped."""
        self._fd = fd
        self._on_change = on_change
        self._waiting = bytearray()
        self._is_blocked = False  # the loop calls `_flush` when the reader has taken some
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting

    def write(self, data: bytes) -> None:
        """Add bytes, and write what can be written at once."""
        if self.is_broken:
            return
        self._waiting += data
        if self._is_blocked:
            self._check_room()
        else:
            self._flush()

    def close(self) -> None:
        """Drop what waits, before the descriptor is closed."""
        self.is_broken = True
        self._waiting.clear()
        self._set_blocked(False)

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._fd, memoryview(self._waiting)[:_CHUNK_BYTES])]
        except BlockingIOError:
            self._set_blocked(True)
        except OSError:
            self.close()
            self._on_change()
        else:
            self._set_blocked(False)
        self._check_room()

    def _set_blocked(self, is_blocked: bool) -> None:
        if is_blocked == self._is_blocked:
            return
        self._is_blocked = is_blocked
        if is_blocked:
            self._loop.add_writer(self._fd, self._flush)
        else:
            self._loop.remove_writer(self._fd)

    def _check_room(self) -> None:
        limit = MAX_WAITING_BYTES // 2 if self.is_full else MAX_WAITING_BYTES
        if (len(self._waiting) > limit) != self.is_full:
            self.is_full = not self.is_full
            self._on_change()


class StdoutWriter:
    """Writes to stdout and stderr of this process in a thread: a reader that stalls stops no loop.

    Not a `PipeWriter`: a terminal is shared with the shell, which a non-blocking one would confuse.

    Args:
        on_change: Called in the loop when `is_full` or `is_empty` may have changed.
        on_error: Called in the loop with a stream that cannot be written any more, and why.
    """

    def __init__(
        self, on_change: Callable[[], object], on_error: Callable[[str, OSError], object]
    ) -> None:
        self._on_change = on_change
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._fds = {name: _fileno(stream) for name, stream in streams.items()}
        self._encodings = {
            name: getattr(stream, "encoding", None) or "utf-8" for name, stream in streams.items()
        }
        self._num_bytes = 0  # waiting or being written
        self._queue: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        threading.Thread(target=self._write_all, daemon=True).start()

    @property
    def is_full(self) -> bool:
        """Whether too much waits."""
        return self._num_bytes > MAX_WAITING_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        return self._num_bytes == 0

    def write(self, stream: str, text: str) -> None:
        """Add a text; characters that the stream's encoding lacks get a backslash.

        Args:
            stream: "stdout" or "stderr"; nothing happens where it was closed from the start.
            text: What to write.
        """
        if self._fds[stream] is not None:
            data = text.encode(self._encodings[stream], errors="backslashreplace")
            self._num_bytes += len(data)
            self._queue.put((stream, data))

    def _write_all(self) -> None:
        waiting: deque[tuple[str, bytes]] = deque()
        while True:
            while not waiting or not self._queue.empty():
                waiting.append(self._queue.get())
            stream, data = waiting.popleft()
            # Many lines in one call, or a job that prints much is slowed down.
            chunks, size = [data], len(data)
            while waiting and waiting[0][0] == stream and size < _CHUNK_BYTES:
                chunks.append(waiting.popleft()[1])
                size += len(chunks[-1])
            error = self._write_chunk(stream, b"".join(chunks))
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._take_written, stream, size, error)

    def _write_chunk(self, stream: str, data: bytes) -> OSError | None:
        fd = self._fds[stream]
        try:
            while data and fd is not None:
                data = data[os.write(fd, data) :]
        except OSError as error:
            self._fds[stream] = None
            return error
        return None

    def _take_written(self, stream: str, size: int, error: OSError | None) -> None:
        self._num_bytes -= size
        if error is not None:
            self._on_error(stream, error)
        self._on_change()


def _fileno(stream: TextIO | None) -> int | None:
    """Return the descriptor of a stream, or None where it was closed: the number may be reused."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None
