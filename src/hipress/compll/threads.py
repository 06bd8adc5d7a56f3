"""Runs the steps of a CPU kernel on several threads.

Kernels release Python's lock and work on ranges of tiles, so a pass is cut into as many ranges as
there are threads. Results do not depend on the number of threads: reductions keep one result per
tile and are joined in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

Step = tuple[Callable[..., None], int, int]
"""A pass, the entry of I that holds its length (-1: one thread only), its tile."""

MIN_TILES = 16
"""Fewer tiles than this a thread are not worth handing over (about 10 us against 16 KiB each)."""


def runner(num_threads: int) -> Callable[[Sequence[Step], tuple[Any, ...], int], None] | None:
    """What a kernel's entry point takes as `pool`; None for one thread."""
    if num_threads == 1:
        return None

    def run(steps: Sequence[Step], args: tuple[Any, ...], status: int) -> None:
        numbers = args[0]
        for kernel, slot, tile in steps:
            num_tiles = -(-int(numbers[slot]) // tile) if slot >= 0 else 0
            ranges = max(1, min(num_threads, num_tiles // MIN_TILES))
            if ranges == 1:
                kernel(0, -1, *args)
            else:
                edges = [num_tiles * r // ranges for r in range(ranges + 1)]
                jobs = [
                    _executor(num_threads).submit(kernel, lo, hi, *args)
                    for lo, hi in zip(edges[1:-1], edges[2:], strict=True)
                ]
                kernel(edges[0], edges[1], *args)
                for job in jobs:
                    job.result()
            if numbers[status]:
                return

    return run


@cache
def _executor(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads - 1, thread_name_prefix="hipress-codec")
