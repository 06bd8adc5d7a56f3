"""The family of a process, as Linux knows it: who ends with whom, and everyone below."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, as init does."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_descendants(number: int) -> list[int]:
    """Send a signal to all below this process; again, as some fork while /proc is read.

    Returns:
        Those that may not be signalled, as they belong to another user.
    """
    refused: list[int] = []
    signalled: set[int] = set()
    while new := set(descendants(os.getpid())) - signalled:
        signalled |= new
        for pid in new:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
            except PermissionError:
                refused.append(pid)
    return refused


def descendants(root: int) -> list[int]:
    """Return every process below one, by what /proc says of parents."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold spaces; state and parent are the words after it.
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":  # dead already, only not yet reaped
                children.setdefault(int(parent), []).append(int(folder.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
