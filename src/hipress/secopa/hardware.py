"""What a simulated cluster is made of: a clock, processors that are shared, and lines.

A processor gives everything that is active on it the same share of its cores, as an operating
system does. A line serves its connections in turn, a segment at a time, as TCP flows share a link.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

Call = Callable[[], None]
OnSegment = Callable[[float, bool], None]

LEAST_SHARE = 0.1
"""Of a processor, that work gets however busy the network is."""


class Clock:
    """Time, and what happens when.

    Example:
        >>> clock = Clock()
        >>> clock.after(2.0, lambda: print(clock.now_s))
        >>> clock.run()
        2.0
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.processors: list[Processor] = []
        self._due: list[tuple[float, int, Call]] = []
        self._count = 0

    def after(self, delay_s: float, call: Call) -> None:
        """Calls something later."""
        self._count += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._count, call))

    def run(self) -> None:
        """Goes on until nothing is left to happen."""
        due, processors = self._due, self.processors
        while True:
            first: Processor | None = None
            next_s = due[0][0] if due else float("inf")
            for processor in processors:
                if processor.items:
                    end_s = processor.next_end_s(self.now_s)
                    if end_s < next_s:
                        next_s, first = end_s, processor
            if next_s == float("inf"):
                return
            passed_s = max(next_s - self.now_s, 0.0)
            for processor in processors:
                if processor.items:
                    processor.progress_s += passed_s * processor.speed()
            self.now_s = max(next_s, self.now_s)
            if first is None:
                heapq.heappop(due)[2]()
            else:
                first.finish_first()


class Processor:
    """Cores that all active work shares evenly.

    Args:
        clock: Of the cluster.
        cores: How many; with a part of one, everything takes longer.
    """

    def __init__(self, clock: Clock, cores: float) -> None:
        self.cores = cores
        self.taken = 0.0
        """Cores that the network uses; it comes first."""
        self.progress_s = 0.0
        """Work that each core would have done so far for one who was always active."""
        self.items: list[tuple[float, int, float, Call]] = []
        self._demand = 0.0
        self._count = 0
        clock.processors.append(self)

    def speed(self) -> float:
        """Of what is active, against a core of its own."""
        free = max(self.cores - self.taken, LEAST_SHARE * self.cores)
        return 1.0 if self._demand <= free else free / self._demand

    def work(self, work_s: float, then: Call, threads: float = 1.0) -> None:
        """Does work on so many threads and calls back when it is done."""
        self._count += 1
        self._demand += threads
        heapq.heappush(self.items, (self.progress_s + work_s / threads, self._count, threads, then))

    def next_end_s(self, now_s: float) -> float:
        """When the first of what is active ends, if nothing changes."""
        return now_s + max(self.items[0][0] - self.progress_s, 0.0) / self.speed()

    def finish_first(self) -> None:
        """Ends it."""
        _, _, threads, then = heapq.heappop(self.items)
        self._demand -= threads
        if not self.items:
            self._demand = 0.0  # no rounding is left
        then()


class Thread:
    """A thread that does one thing after another."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._waiting: deque[tuple[float, Call]] = deque()
        self._busy = False

    def serve(self, work_s: float, then: Call) -> None:
        """Does some work in its turn."""
        if work_s <= 0 and not self._busy:
            then()
            return
        self._waiting.append((work_s, then))
        if not self._busy:
            self._busy = True
            self._serve()

    def _serve(self) -> None:
        work_s, then = self._waiting.popleft()

        def done() -> None:
            then()
            if self._waiting:
                self._serve()
            else:
                self._busy = False

        self._processor.work(work_s, done)


class Line:
    """One direction of a link: connections share it, and each is first in first out.

    Args:
        clock: Of the cluster.
        bytes_per_s: Of all connections together.
        segment_bytes: What a connection sends before it is another's turn.
        processor: That works for it.
        byte_work_s: Work for each byte.

    Example:
        >>> clock = Clock()
        >>> line = Line(clock, 100.0, 50.0, Processor(clock, 1.0))
        >>> line.carry(0, 100.0, lambda share, last: print(clock.now_s, share, last))
        >>> line.carry(1, 50.0, lambda share, last: print(clock.now_s, share, last))
        >>> clock.run()
        0.5 0.5 False
        1.0 1.0 True
        1.5 0.5 True
    """

    def __init__(
        self,
        clock: Clock,
        bytes_per_s: float,
        segment_bytes: float,
        processor: Processor,
        byte_work_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._segment_bytes = segment_bytes
        self._processor = processor
        self._cores = byte_work_s * bytes_per_s
        self._waiting: dict[int, deque[_Load]] = {}
        self._turns: deque[int] = deque()
        self._busy = False
        self.sent_bytes = 0.0

    def carry(self, connection: int, num_bytes: float, on_segment: OnSegment) -> None:
        """Carries some bytes of a connection.

        Args:
            connection: Which.
            num_bytes: How many.
            on_segment: Called for each segment that has passed, with its share of the bytes and
                whether it was the last.
        """
        queue = self._waiting.get(connection)
        if queue is None:
            queue = self._waiting[connection] = deque()
        if not queue:
            self._turns.append(connection)
        queue.append(_Load(max(num_bytes, 1.0), on_segment))
        self.sent_bytes += num_bytes
        if not self._busy:
            self._busy = True
            self._processor.taken += self._cores
            self._serve()

    def _serve(self) -> None:
        connection = self._turns.popleft()
        load = self._waiting[connection][0]
        segment = min(load.left_bytes, self._segment_bytes)
        self._clock.after(
            segment / self._bytes_per_s, lambda: self._served(connection, load, segment)
        )

    def _served(self, connection: int, load: _Load, segment: float) -> None:
        queue = self._waiting[connection]
        load.left_bytes -= segment
        last = load.left_bytes <= 0
        if last:
            queue.popleft()
        if queue:
            self._turns.append(connection)
        if self._turns:
            self._serve()
        else:
            self._busy = False
            self._processor.taken -= self._cores
        load.on_segment(segment / load.num_bytes, last)


class _Load:
    __slots__ = ("left_bytes", "num_bytes", "on_segment")

    def __init__(self, num_bytes: float, on_segment: OnSegment) -> None:
        self.num_bytes = num_bytes
        self.left_bytes = num_bytes
        self.on_segment = on_segment
