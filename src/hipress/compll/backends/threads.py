"""Runs the steps of a CPU kernel on several threads.

Kernels release Python's lock and work on ranges of tiles, so a pass is cut into as many ranges as
there are threads. Results do not depend on the number of threads: reductions keep one result per
tile and are joined in order; what a later range of a filter took without room is put back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

Step = tuple[Callable[..., None], int, int, int]
"""A pass, the entry of I that holds its length (-1: one thread only), its tile, and the entry of I
where a filter looks up its range (-1: no filter)."""

MIN_TILES = 16
"""Fewest tiles of a thread: handing over costs about 10 us, a tile is 8 KiB."""

MAX_THREADS = 64


class Runner:
    """The `pool` argument of a kernel's entry point."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = min(num_threads, MAX_THREADS)

    def __call__(self, steps: Sequence[Step], args: tuple[Any, ...], status: int) -> None:
        """Runs `steps` in order, each on as many threads as it has work for."""
        numbers = args[0]
        for kernel, slot, tile, ranges in steps:
            edges = self._edges(int(numbers[slot]), tile) if slot >= 0 else [0, -1]
            if ranges >= 0:
                numbers[ranges : ranges + 2 * MAX_THREADS] = 0
                numbers[ranges : ranges + len(edges) - 1] = edges[:-1]
            if len(edges) == 2:
                kernel(0, -1, *args)
            else:
                self._share(kernel, edges, args)
            if numbers[status]:
                return

    def _edges(self, length: int, tile: int) -> list[int]:
        num_tiles = -(-length // tile)
        ranges = max(1, min(self.num_threads, num_tiles // MIN_TILES))
        return [num_tiles * r // ranges for r in range(ranges + 1)]

    def _share(self, kernel: Callable[..., None], edges: list[int], args: tuple[Any, ...]) -> None:
        executor = _executor(self.num_threads, os.getpid())
        jobs = [
            executor.submit(kernel, lo, hi, *args)
            for lo, hi in zip(edges[1:-1], edges[2:], strict=True)
        ]
        kernel(edges[0], edges[1], *args)
        for job in jobs:
            job.result()


def runner(num_threads: int) -> Runner | None:
    """Returns the runner for some threads; None for one, which needs none."""
    return None if num_threads == 1 or _here.alone else Runner(num_threads)


def stay_on_this_thread() -> None:
    """Makes kernels that this thread starts run on it alone: it is one of several workers."""
    _here.alone = True


class _Here(threading.local):
    alone = False


_here = _Here()


@cache
def _executor(num_threads: int, process: int) -> ThreadPoolExecutor:
    """Returns the threads of a process; one that was forked has none of its parent's."""
    return ThreadPoolExecutor(num_threads - 1, thread_name_prefix="hipress-codec")
