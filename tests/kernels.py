"""Kernels that all processes of a test run share: each is compiled once, whoever needs it first.

Ranks of a job start together and need the same kernels, and so do the processes of pytest-xdist.
Without a lock each of them would compile, for seconds, what another one is about to write to the
cache.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_mine: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
_depth: defaultdict[str, int] = defaultdict(int)


def compile_once() -> None:
    """Makes numba wait where another process is compiling functions of the same file."""
    from numba.core.dispatcher import Dispatcher

    plain = Dispatcher.compile
    if getattr(plain, "waits", False):
        return

    def compile(self: Any, sig: Any) -> Any:
        with _alone_with(self.py_func.__code__.co_filename):
            return plain(self, sig)

    compile.waits = True  # type: ignore[attr-defined]
    Dispatcher.compile = compile


@contextmanager
def _alone_with(file: str) -> Iterator[None]:
    """Holds the lock of a file of kernels; the functions that one of them calls are in it too."""
    if Path(file).parent.name != "kernels":
        yield
        return
    with _mine[file]:
        _depth[file] += 1
        try:
            if _depth[file] > 1:
                yield
            else:
                folder = Path(tempfile.gettempdir()) / f"hipress-test-locks-{os.getuid()}"
                folder.mkdir(exist_ok=True)
                with open(folder / Path(file).name, "w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    yield
        finally:
            _depth[file] -= 1
