"""What each task of a graph costs on a profile: work of computing tasks, bytes of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hipress.casync.graphs.graph import COMPUTING, MESSAGE_CLASS, Graph, Kind, Slot, Task, Verb
from hipress.casync.graphs.shape import Shape
from hipress.profile import CodecCosts

FRAMES = frozenset({Kind.FRAME, Kind.PARTIAL, Kind.BACK})


@dataclass(frozen=True, slots=True)
class Step:
    """One task as a player needs it."""

    verb: Verb
    chunk: int
    work_s: float
    """Of a computing task."""
    num_bytes: float
    """Of a message, or of all an all-reduce adds up."""
    peer: int
    """The other end of a message."""
    kind: int
    """Of a message: what both ends call the slot."""
    depth: int
    """In the life of its chunk."""
    num_needs: int
    followers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Script:
    """The tasks of one rank in one synchronisation, with what they cost."""

    rank: int
    steps: tuple[Step, ...]

    @cached_property
    def num_needs(self) -> list[int]:
        """Of each step."""
        return [step.num_needs for step in self.steps]

    @cached_property
    def receives(self) -> dict[tuple[int, int, int], int]:
        """By chunk, kind and sender, the step that takes a message in."""
        return {
            (step.chunk, step.kind, step.peer): place
            for place, step in enumerate(self.steps)
            if step.verb is Verb.RECV
        }


def script(shape: Shape, rank: int, costs: CodecCosts, plain: CodecCosts, width: int) -> Script:
    """The tasks of a rank and their costs.

    Args:
        shape: Of the synchronisation.
        rank: Whose.
        costs: Of its codec.
        plain: Of `none`, for elements that are added as they are.
        width: Bytes of an element.
    """
    graph = shape.graph(rank)
    numels = [sum(part.numel for part in members) for members in shape.layout.members]
    followers: list[list[int]] = [[] for _ in graph.tasks]
    for place, task in enumerate(graph.tasks):
        for need in task.needs:
            followers[need].append(place)
    pricer = _Pricer(numels, costs, plain, width)
    return Script(rank=rank, steps=tuple(pricer.steps(graph, followers)))


@dataclass(frozen=True)
class _Pricer:
    numels: Sequence[int]
    costs: CodecCosts
    plain: CodecCosts
    width: int

    def steps(self, graph: Graph, followers: Sequence[Sequence[int]]) -> list[Step]:
        found = []
        for task, behind in zip(graph.tasks, followers, strict=True):
            computes = task.verb in COMPUTING
            slot = (task.reads or task.writes)[0]
            found.append(
                Step(
                    verb=task.verb,
                    chunk=slot.chunk,
                    work_s=self.work_s(task) if computes else 0.0,
                    num_bytes=0.0 if computes else self.num_bytes(slot),
                    peer=(task.to or task.of or (-1,))[0],
                    kind=MESSAGE_CLASS.get(slot.kind, 0),
                    depth=task.depth,
                    num_needs=len(task.needs),
                    followers=tuple(behind),
                )
            )
        return found

    def num_bytes(self, slot: Slot) -> float:
        numel = self.numels[slot.chunk]
        if slot.kind is Kind.FRAME:
            return self.costs.wire.at(numel)
        if slot.kind in FRAMES:
            return self.costs.back_bytes(numel, slot.merged)
        return float(numel * self.width)

    def work_s(self, task: Task) -> float:
        numel = self.numels[task.chunk]
        if task.verb is Verb.ENCODE:
            return self._made(task.writes[0], numel)
        if task.verb is Verb.DECODE:
            return self._taken(task.reads[0], numel)
        total = sum(self._taken(slot, numel) for slot in task.reads)
        return total + self._made(task.writes[0], numel)

    def _made(self, slot: Slot, numel: int) -> float:
        """Work to write a slot from a sum of elements."""
        if slot.kind is Kind.FRAME:
            return self.costs.encode.at(numel)
        if slot.kind in FRAMES:
            return self.costs.back.at(numel)
        return self.plain.encode.at(numel) if slot.kind is Kind.GRADIENT else 0.0

    def _taken(self, slot: Slot, numel: int) -> float:
        """Work to read a slot and add it up, or to write it where it belongs."""
        if slot.kind is Kind.BACK:
            return self.costs.decode.at(numel)
        if slot.kind in FRAMES:
            return self.costs.add.at(numel)
        return self.plain.add.at(numel)
