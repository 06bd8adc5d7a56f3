"""The costs of each task of a graph on a profile: the work of computing, the bytes of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hipress.casync.graphs.graph import COMPUTING, MESSAGE_CLASS, Graph, Kind, Slot, Task, Verb
from hipress.casync.graphs.shape import Shape
from hipress.profile import CodecCosts

FRAMES = frozenset({Kind.FRAME, Kind.PARTIAL, Kind.BACK})


@dataclass(frozen=True, slots=True)
class CostedTask:
    """One task of a graph, with its costs."""

    verb: Verb
    chunk: int
    work_s: float
    """Work of a computing task."""
    num_bytes: float
    """Bytes of a message, or all bytes that an all-reduce adds up."""
    peer: int
    """The rank at the other end of a message, or -1."""
    kind: int
    """The class of a message, by which both ends name it."""
    depth: int
    """The position in the life of the chunk."""
    is_back: bool
    """Whether it belongs to the way of the mean back to all ranks."""
    num_needs: int
    followers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CostedGraph:
    """The tasks of one rank in one synchronisation, with their costs."""

    rank: int
    tasks: tuple[CostedTask, ...]

    @cached_property
    def num_needs(self) -> list[int]:
        """The number of tasks that each task waits for."""
        return [task.num_needs for task in self.tasks]

    @cached_property
    def receives(self) -> dict[tuple[int, int, int], int]:
        """The index of the receiving task, by chunk, kind and sender."""
        return {
            (task.chunk, task.kind, task.peer): place
            for place, task in enumerate(self.tasks)
            if task.verb is Verb.RECV
        }


def costed_graph(
    shape: Shape, rank: int, costs: CodecCosts, plain: CodecCosts, element_bytes: int
) -> CostedGraph:
    """Returns the tasks of a rank with their costs.

    Args:
        shape: The synchronisation.
        rank: The rank that runs the tasks.
        costs: The costs of the codec.
        plain: The costs of `none`, for elements that are added as they are.
        element_bytes: Bytes of an element.
    """
    graph = shape.graph(rank)
    numels = [sum(part.numel for part in members) for members in shape.layout.members]
    model = _CostModel(numels, costs, plain, element_bytes)
    return CostedGraph(rank=rank, tasks=tuple(model.tasks(graph)))


@dataclass(frozen=True)
class _CostModel:
    numels: Sequence[int]
    costs: CodecCosts
    plain: CodecCosts
    element_bytes: int

    def tasks(self, graph: Graph) -> list[CostedTask]:
        found = []
        rows = zip(graph.tasks, graph.followers, graph.is_back, strict=True)
        for task, behind, is_back in rows:
            computes = task.verb in COMPUTING
            slot = (task.reads or task.writes)[0]
            found.append(
                CostedTask(
                    verb=task.verb,
                    chunk=slot.chunk,
                    work_s=self.work_s(task) if computes else 0.0,
                    num_bytes=0.0 if computes else self.num_bytes(slot),
                    peer=(task.to or task.of or (-1,))[0],
                    kind=MESSAGE_CLASS.get(slot.kind, 0),
                    depth=task.depth,
                    is_back=is_back,
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
        return float(numel * self.element_bytes)

    def work_s(self, task: Task) -> float:
        numel = self.numels[task.chunk]
        if task.verb is Verb.ENCODE:
            return self._write_s(task.writes[0], numel)
        if task.verb is Verb.DECODE:
            return self._read_s(task.reads[0], numel)
        total = sum(self._read_s(slot, numel) for slot in task.reads)
        return total + self._write_s(task.writes[0], numel)

    def _write_s(self, slot: Slot, numel: int) -> float:
        """Returns the work of writing a slot from a sum of elements."""
        if slot.kind is Kind.FRAME:
            return self.costs.encode.at(numel)
        if slot.kind in FRAMES:
            return self.costs.back.at(numel)
        return self.plain.encode.at(numel) if slot.kind is Kind.GRADIENT else 0.0

    def _read_s(self, slot: Slot, numel: int) -> float:
        """Returns the work of adding a slot to a sum, or of decoding it into the gradient."""
        if slot.kind is Kind.BACK:
            return self.costs.decode.at(numel)
        if slot.kind in FRAMES:
            return self.costs.add.at(numel)
        return self.plain.add.at(numel)
