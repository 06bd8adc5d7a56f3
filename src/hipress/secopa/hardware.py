"""The parts of a simulated cluster: a clock, shared processors, and links.

A processor gives all active work an equal share of its cores, as an operating system does. A link
serves its connections in turn, a segment at a time, as TCP flows share it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

Call = Callable[[], None]
OnSegment = Callable[[float, bool], None]

LEAST_SHARE = 0.1
"""The share of a processor that is left for work however busy the network is."""


class Clock:
    """A simulated clock and the calls that are due.

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
        """Schedules a call."""
        self._count += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._count, call))

    def run(self) -> None:
        """Runs until no call is due and no work is active."""
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
    """Cores that all active work shares evenly; there may be a fraction of one."""

    def __init__(self, clock: Clock, cores: float) -> None:
        self.cores = cores
        self.taken = 0.0
        """Cores that the network uses; it has priority over work."""
        self.progress_s = 0.0
        """Work that one thread would have done if it had always been active."""
        self.items: list[tuple[float, int, float, Call]] = []
        self._demand = 0.0
        self._count = 0
        clock.processors.append(self)

    def speed(self) -> float:
        """Returns the speed of active work, relative to a core of its own."""
        free = max(self.cores - self.taken, LEAST_SHARE * self.cores)
        return 1.0 if self._demand <= free else free / self._demand

    def work(self, work_s: float, then: Call, threads: float = 1.0) -> None:
        """Does work on some threads and calls back when it is done."""
        self._count += 1
        self._demand += threads
        heapq.heappush(self.items, (self.progress_s + work_s / threads, self._count, threads, then))

    def next_end_s(self, now_s: float) -> float:
        """Returns when the first active work ends, if nothing changes."""
        return now_s + max(self.items[0][0] - self.progress_s, 0.0) / self.speed()

    def finish_first(self) -> None:
        """Ends the work that ends first."""
        _, _, threads, then = heapq.heappop(self.items)
        self._demand -= threads
        if not self.items:
            self._demand = 0.0  # drops rounding errors
        then()


class WorkQueue:
    """A thread that does one piece of work after another."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._waiting: deque[tuple[float, Call]] = deque()
        self._is_busy = False

    def add(self, work_s: float, then: Call) -> None:
        """Queues some work and calls back when it is done."""
        if work_s <= 0 and not self._is_busy:
            then()
            return
        self._waiting.append((work_s, then))
        if not self._is_busy:
            self._is_busy = True
            self._start_next()

    def _start_next(self) -> None:
        work_s, then = self._waiting.popleft()

        def done() -> None:
            then()
            if self._waiting:
                self._start_next()
            else:
                self._is_busy = False

        self._processor.work(work_s, done)


class Link:
    """One direction of a link: connections share it, and each is first in first out.

    Args:
        clock: The clock of the cluster.
        bytes_per_s: The rate of all connections together.
        segment_bytes: Bytes that a connection sends before another gets its turn.
        processor: The processor that does the work of sending.
        byte_work_s: Its work for each byte.

    Example:
        >>> clock = Clock()
        >>> link = Link(clock, 100.0, 50.0, Processor(clock, 1.0))
        >>> link.carry(0, 100.0, lambda share, is_last: print(clock.now_s, share, is_last))
        >>> link.carry(1, 50.0, lambda share, is_last: print(clock.now_s, share, is_last))
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
        self._waiting: dict[int, deque[_Message]] = {}
        self._turns: deque[int] = deque()
        self._is_busy = False
        self.sent_bytes = 0.0

    def carry(self, connection: int, num_bytes: float, on_segment: OnSegment) -> None:
        """Queues a message.

        Args:
            connection: The number of its connection.
            num_bytes: Its size.
            on_segment: Called for each segment that has passed, with its share of the bytes and
                whether it was the last.
        """
        queue = self._waiting.get(connection)
        if queue is None:
            queue = self._waiting[connection] = deque()
        if not queue:
            self._turns.append(connection)
        queue.append(_Message(max(num_bytes, 1.0), on_segment))
        self.sent_bytes += num_bytes
        if not self._is_busy:
            self._is_busy = True
            self._processor.taken += self._cores
            self._start_segment()

    def _start_segment(self) -> None:
        connection = self._turns.popleft()
        message = self._waiting[connection][0]
        segment = min(message.left_bytes, self._segment_bytes)
        self._clock.after(
            segment / self._bytes_per_s, lambda: self._end_segment(connection, message, segment)
        )

    def _end_segment(self, connection: int, message: _Message, segment: float) -> None:
        queue = self._waiting[connection]
        message.left_bytes -= segment
        is_last = message.left_bytes <= 0
        if is_last:
            queue.popleft()
        if queue:
            self._turns.append(connection)
        if self._turns:
            self._start_segment()
        else:
            self._is_busy = False
            self._processor.taken -= self._cores
        message.on_segment(segment / message.num_bytes, is_last)


class _Message:
    __slots__ = ("left_bytes", "num_bytes", "on_segment")

    def __init__(self, num_bytes: float, on_segment: OnSegment) -> None:
        self.num_bytes = num_bytes
        self.left_bytes = num_bytes
        self.on_segment = on_segment
