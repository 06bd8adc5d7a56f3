"""A transport that forgives nothing, for checking graphs without data.

Every rank runs its tasks one after the other in the order of its graph. There are no tags: what
a rank receives from another is the next thing that one sent. The first thing that is not what was
expected, or a standstill, is an error.

Values are what a real run would compute, as weights: {rank: how much of its gradient is in it}.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hipress.casync.graphs.graph import Graph, Kind, Slot, Task, Verb

Weights = dict[int, float]


class Mismatch(AssertionError):
    """The graphs of the ranks do not fit together."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a slot holds: whose gradients, and which encode or merge made it."""

    weights: tuple[tuple[int, float], ...]
    made: tuple[int, Slot] | None = None


def play(graphs: Sequence[Graph]) -> list[dict[int, Value]]:
    """Runs the graphs of all ranks; for each rank what every chunk's gradient became.

    Raises:
        Mismatch: They would hang, or a rank would take one message for another.
    """
    wires: dict[tuple[int, int], deque[tuple[Slot, Value]]] = defaultdict(deque)
    memories: list[dict[Slot, Value]] = [{} for _ in graphs]
    runs = [_rank(graph, memory, wires) for graph, memory in zip(graphs, memories, strict=True)]
    waiting = {rank: "" for rank in range(len(graphs))}
    while waiting:
        moved = False
        for rank in list(waiting):
            for blocked in runs[rank]:
                moved |= blocked is None
                if blocked is not None:
                    waiting[rank] = blocked
                    break
            else:
                del waiting[rank]
                moved = True
        if not moved:
            raise Mismatch(f"standstill: {'; '.join(waiting.values())}")
    left = [f"{a} -> {b}: {queue[0][0]}" for (a, b), queue in wires.items() if queue]
    if left:
        raise Mismatch(f"sent and never received: {'; '.join(left)}")
    return [
        {slot.chunk: value for slot, value in memory.items() if slot.kind is Kind.GRADIENT}
        for memory in memories
    ]


def _rank(
    graph: Graph,
    memory: dict[Slot, Value],
    wires: dict[tuple[int, int], deque[tuple[Slot, Value]]],
) -> Iterator[str | None]:
    """Runs one rank; yields None after a step, or why it must wait."""
    rank = graph.rank
    for chunk in range(len(graph.routes)):
        memory[Slot(Kind.GRADIENT, chunk)] = Value(((rank, 1.0),))
    for index, task in enumerate(graph.tasks):
        if any(need >= index for need in task.needs):
            raise Mismatch(f"rank {rank}: {_say(task)} stands before what it needs")
        for slot in task.reads:
            if slot not in memory:
                raise Mismatch(f"rank {rank}: {_say(task)} reads {slot}, which nobody wrote")
        for slot, peer in zip(task.reads, task.to, strict=False):
            wires[rank, peer].append((slot, memory[slot]))
        for slot, peer in zip(task.writes, task.of, strict=False):
            while not wires[peer, rank]:
                yield f"rank {rank} waits for rank {peer} in {_say(task)}"
            sent, value = wires[peer, rank].popleft()
            if not _same(sent, slot):
                raise Mismatch(f"rank {rank} expects {slot} from rank {peer}, which sent {sent}")
            memory[slot] = value
        if task.verb is Verb.ALL_REDUCE:
            yield from _all_reduce(graph, task, memory, wires)
        elif not task.to and not task.of:
            memory[task.writes[0]] = _computed(task, memory, rank)
        yield None


def _all_reduce(
    graph: Graph,
    task: Task,
    memory: dict[Slot, Value],
    wires: dict[tuple[int, int], deque[tuple[Slot, Value]]],
) -> Iterator[str | None]:
    slot = task.reads[0]
    others = [peer for peer in range(graph.num_ranks) if peer != graph.rank]
    for peer in others:
        wires[graph.rank, peer].append((slot, memory[slot]))
    for peer in others:
        while not wires[peer, graph.rank]:
            yield f"rank {graph.rank} waits for rank {peer} in {_say(task)}"
        sent, _ = wires[peer, graph.rank].popleft()
        if sent != slot:
            raise Mismatch(f"rank {graph.rank} reduces {slot}, rank {peer} {sent}")
    share = 1 / graph.num_ranks
    memory[slot] = Value(tuple((rank, share) for rank in range(graph.num_ranks)), (-1, slot))


def _computed(task: Task, memory: dict[Slot, Value], rank: int) -> Value:
    weights = task.weights or (1.0,)
    total: Weights = defaultdict(float)
    for slot, weight in zip(task.reads, weights, strict=True):
        for owner, share in memory[slot].weights:
            total[owner] += weight * share
    made = memory[task.reads[0]].made
    if task.verb is not Verb.DECODE:
        # Merging the same frames in the same order gives the same bits wherever it is done.
        parts = all(memory[slot].made is not None for slot in task.reads)
        kept = task.verb is Verb.MERGE and parts and task.writes[0].kind is Kind.GRADIENT
        made = (-1, task.writes[0]) if kept else (rank, task.writes[0])
    return Value(tuple(sorted(total.items())), made)


def _same(sent: Slot, expected: Slot) -> bool:
    if expected.kind is Kind.RAW:
        return sent.kind is Kind.GRADIENT and sent.chunk == expected.chunk
    return sent == expected


def _say(task: Task) -> str:
    return f"{task.verb.value} of chunk {task.chunk}"
