"""The task graph of one synchronisation on one rank: five verbs, pure data.

Gradients are cut into *chunks*, and the tasks of one chunk do not depend on those of another. A
task reads and writes *slots*, names for memory that the engine allocates later. It waits for the
tasks that wrote the slots it reads, and for those that still read the slots it writes.

Letters: N ranks, r this rank, p a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Verb(StrEnum):
    """What a task does. The first five are CaSync's; the last two are made by lowering."""

    ENCODE = "encode"
    DECODE = "decode"
    MERGE = "merge"
    SEND = "send"
    RECV = "recv"
    EXCHANGE = "exchange"
    """Several sends and receives that start together, in the same order on all ranks."""
    ALL_REDUCE = "all_reduce"
    """The transport's own sum."""


COMPUTING = frozenset({Verb.ENCODE, Verb.DECODE, Verb.MERGE})
"""Verbs of the computing queue; the others communicate."""


class Kind(StrEnum):
    """What a slot holds."""

    GRADIENT = "gradient"
    """The caller's elements: read first, written last."""
    RAW = "raw"
    """The elements of another rank, as that rank holds them."""
    PLAIN = "plain"
    """The elements as float32."""
    FRAME = "frame"
    """A worker's gradient under the worker's codec."""
    PARTIAL = "partial"
    """The mean of some ranks under the codec for that many."""
    BACK = "back"
    """The mean of all, as every rank decodes it."""


MESSAGE_CLASS = {Kind.GRADIENT: 0, Kind.RAW: 0, Kind.FRAME: 1, Kind.PARTIAL: 2, Kind.BACK: 3}
"""Tells the messages of one chunk between two ranks apart; both ends have the same class."""

NUM_MESSAGE_CLASSES = 4


class Slot(NamedTuple):
    """Names the memory of one chunk."""

    kind: Kind
    chunk: int
    rank: int = 0
    """The rank that made it."""
    merged: int = 1
    """The number of contributions in it."""

    @property
    def tag(self) -> int:
        """The lower half of the tag of a message that carries this slot."""
        return self.chunk * NUM_MESSAGE_CLASSES + MESSAGE_CLASS[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One verb with the slots it works on."""

    verb: Verb
    reads: tuple[Slot, ...] = ()
    writes: tuple[Slot, ...] = ()
    weights: tuple[float, ...] = ()
    """The factor of each slot that a merge reads."""
    to: tuple[int, ...] = ()
    """The receiver of each slot that a send or an exchange reads."""
    of: tuple[int, ...] = ()
    """The sender of each slot that a recv or an exchange writes."""
    depth: int = 0
    """Its stage among the tasks of the chunk, alike on all ranks: a recv has its send's plus 1."""
    needs: tuple[int, ...] = ()
    """Tasks that must be done before it, as positions in the graph."""

    @property
    def chunk(self) -> int:
        """The chunk it works on (the first, for an exchange)."""
        return (self.reads or self.writes)[0].chunk


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The tasks of one rank; each stands behind those it needs."""

    num_ranks: int
    rank: int
    routes: tuple[int, ...]
    """For each chunk a number that decides which rank aggregates it, or where a ring starts."""
    tasks: tuple[Task, ...]

    @cached_property
    def num_needs(self) -> list[int]:
        """The number of other tasks that each task needs."""
        return [len(task.needs) for task in self.tasks]

    @cached_property
    def is_back(self) -> list[bool]:
        """Whether each task belongs to the way of the mean back to all ranks."""
        found: list[bool] = []
        means: set[Slot] = set()
        """Gradients that hold the mean already."""
        for task in self.tasks:
            means.update(slot for slot in task.writes if slot.kind is Kind.GRADIENT)
            slots = (*task.reads, *task.writes)
            found.append(
                any(slot.kind is Kind.BACK for slot in slots) or not means.isdisjoint(slots)
            )
        return found

    @cached_property
    def followers(self) -> list[list[int]]:
        """The tasks that need each task."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for index, task in enumerate(self.tasks):
            for need in task.needs:
                found[need].append(index)
        return found


@dataclass
class Draft:
    """Collects tasks and finds what each needs from the slots it touches."""

    num_ranks: int
    rank: int
    routes: Sequence[int]
    tasks: list[Task] = field(default_factory=list)
    _writer: dict[Slot, int] = field(default_factory=dict)
    _readers: dict[Slot, list[int]] = field(default_factory=dict)

    def add(self, task: Task, needs: Iterable[int] = ()) -> None:
        """Appends a task; it needs `needs`, and what its slots depend on."""
        index = len(self.tasks)
        found = set(needs)
        for slot in task.reads:
            if slot in self._writer:
                found.add(self._writer[slot])
        for slot in task.writes:
            found.update(self._readers.pop(slot, ()))
            if slot in self._writer:
                found.add(self._writer[slot])
        for slot in task.reads:
            self._readers.setdefault(slot, []).append(index)
        for slot in task.writes:
            self._writer[slot] = index
        found.discard(index)
        self.tasks.append(replace(task, needs=tuple(sorted(found))))

    def encode(self, x: Slot, frame: Slot, depth: int) -> None:
        """Adds the encode of x under the codec of `frame`."""
        self.add(Task(verb=Verb.ENCODE, reads=(x,), writes=(frame,), depth=depth))

    def decode(self, frame: Slot, x: Slot, depth: int) -> None:
        """Adds the decode of a frame."""
        self.add(Task(verb=Verb.DECODE, reads=(frame,), writes=(x,), depth=depth))

    def merge(
        self, parts: Sequence[Slot], mean: Slot, depth: int, weights: Sequence[float]
    ) -> None:
        """Adds the sum of `parts`, each times its weight, in the order given."""
        reads, factors = tuple(parts), tuple(weights)
        self.add(Task(verb=Verb.MERGE, reads=reads, writes=(mean,), weights=factors, depth=depth))

    def send(self, slot: Slot, to: int, depth: int) -> None:
        """Adds the send of a slot to a rank, which receives it at `depth + 1`."""
        self.add(Task(verb=Verb.SEND, reads=(slot,), to=(to,), depth=depth))

    def recv(self, slot: Slot, of: int, depth: int) -> None:
        """Adds the receive of a slot from a rank."""
        self.add(Task(verb=Verb.RECV, writes=(slot,), of=(of,), depth=depth))

    def graph(self) -> Graph:
        """Returns the graph of the tasks that were added."""
        tasks, routes = tuple(self.tasks), tuple(self.routes)
        return Graph(num_ranks=self.num_ranks, rank=self.rank, routes=routes, tasks=tasks)
