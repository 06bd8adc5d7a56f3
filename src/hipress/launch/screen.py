"""Shows lines in two places: this terminal, with their rank in front, and a file for each rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from hipress.errors import UsageError
from hipress.processes.pipes import StdoutWriter

_CLEAR = "\x1b[K"


def open_files(folder: Path, num_ranks: int) -> dict[int, TextIO]:
    """Open the file of each rank, so that an error is raised before anything starts.

    Args:
        folder: The folder, which is made.
        num_ranks: How many files: rank0.log and so on.
    """
    files: dict[int, TextIO] = {}
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(num_ranks):
            path = folder / f"rank{rank}.log"
            files[rank] = path.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        for file in files.values():
            file.close()
        raise UsageError(
            f"--output {str(folder)!r} cannot be used, as {str(path)!r} cannot be made: "
            f"{error.strerror}; name a folder that can be written."
        ) from None
    return files


class Screen:
    """Prints lines of ranks and hosts.

    Args:
        out: What to print with.
        files: Where to keep the lines of each rank too; see `open_files`.
    """

    def __init__(self, out: StdoutWriter, files: Mapping[int, TextIO] | None = None) -> None:
        self.drops = False
        """Whether lines for which there is no room are dropped; or else the caller reads slower."""
        self.num_dropped = 0
        self._out = out
        self._files = dict(files or {})
        self._has_bar = False
        self._is_terminal = {
            name: stream is not None and stream.isatty()
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr))
        }

    def show(self, prefix: str, stream: str, text: str, end: str = "\n") -> None:
        """Print one line.

        Args:
            prefix: What is between the brackets.
            stream: "stdout" or "stderr".
            text: The line without its end.
            end: A return where the next line shall take its place, as with a progress bar.
        """
        if self.drops and self._out.is_full:
            self.num_dropped += 1
            return
        if not self._is_terminal[stream]:
            self._out.write(stream, f"[{prefix}] {text}\n")
            return
        # A shorter line over a bar would leave the end of the bar there.
        clear = _CLEAR if self._has_bar or end == "\r" else ""
        self._out.write(stream, f"[{prefix}] {text}{clear}{end}")
        self._has_bar = end == "\r"

    def note(self, text: str) -> None:
        """Print a line of the launcher itself."""
        begin = "\n" if self._has_bar else ""
        self._has_bar = False
        self._out.write("stderr", f"{begin}hipress: {text}\n")

    def keep(self, rank: int, text: str) -> None:
        """Write a line of a rank to its file."""
        if rank not in self._files:
            return
        try:
            self._files[rank].write(text + "\n")
        except OSError as error:
            file = self._files.pop(rank)
            with contextlib.suppress(OSError):
                file.close()
            self.note(f"{file.name!r} cannot be written any more ({error.strerror})")

    def close(self) -> None:
        """Leave the terminal on a line of its own, and close the files."""
        if self._has_bar:
            self._out.write("stderr", "\n")
            self._has_bar = False
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files = {}
