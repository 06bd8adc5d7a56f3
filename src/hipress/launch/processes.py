"""The end of processes that an agent has started: all of them, and all that these started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, as init does."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """Kill all below this process; again and again, as some may fork while /proc is read."""
    killed: set[int] = set()
    while new := set(descendants(os.getpid())) - killed:
        killed |= new
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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
