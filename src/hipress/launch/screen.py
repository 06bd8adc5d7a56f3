"""Where lines go: this terminal, with their rank in front, and a file for each rank."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TextIO

from hipress.errors import UsageError

_CLEAR = "\x1b[K"


class Screen:
    """Prints lines of ranks and hosts.

    Args:
        folder: Where to keep the lines of each rank too, in rank0.log and so on; None for nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files: dict[int, TextIO] = {}
        self._has_bar = False
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--output {str(folder)!r} can not be made: {error.strerror}; name a folder "
                    f"that can be written"
                ) from None

    def show(self, prefix: str, stream: str, text: str, end: str = "\n") -> None:
        """Print one line.

        Args:
            prefix: What is between the brackets.
            stream: "stdout" or "stderr".
            text: The line without its end.
            end: A return where the next line shall take its place, as with a progress bar.
        """
        out: TextIO = getattr(sys, stream)
        if not out.isatty():
            print(f"[{prefix}] {text}", file=out, flush=True)
            return
        # A shorter line over a bar would leave the end of the bar there.
        clear = _CLEAR if self._has_bar or end == "\r" else ""
        print(f"[{prefix}] {text}{clear}", end=end, file=out, flush=True)
        self._has_bar = end == "\r"

    def keep(self, rank: int, text: str) -> None:
        """Write a line of a rank to its file."""
        if self._folder is None:
            return
        if rank not in self._files:
            path = self._folder / f"rank{rank}.log"
            self._files[rank] = path.open("w", encoding="utf-8", buffering=1)
        self._files[rank].write(text + "\n")

    def close(self) -> None:
        """Leave the terminal on a line of its own, and close the files."""
        if self._has_bar:
            print(file=sys.stderr, flush=True)
            self._has_bar = False
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
