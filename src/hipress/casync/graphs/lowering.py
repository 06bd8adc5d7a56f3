"""Turns the graph that a strategy builds into the graph that the engine runs, in passes.

    bulk         chunks that share a route become one chunk: one frame, one message
    fuse         decode, merge, encode become one merge that reads and writes frames
    whole        without a codec, an exchange of everything becomes the transport's all-reduce
    schedule     the order that pipelines chunks, the same on all ranks
    stages       without pipelining, a depth starts when the one before is done
    exchanges    sends and receives of one depth become one call, for transports without tags

Every pass is a function from graph to graph. Each finds what a task needs from its slots again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hipress.casync.graphs.graph import COMPUTING, Draft, Graph, Kind, Slot, Task, Verb

STRIDE = 2
"""Depths between one wave of N chunks and the next: small enough that several run at once."""


def lower(
    graph: Graph,
    *,
    groups: Sequence[int] | None = None,
    plain: bool = False,
    pipelined: bool = True,
    ordered: bool = False,
) -> Graph:
    """Runs the passes.

    Args:
        graph: The graph of a strategy.
        groups: The new chunk that each chunk becomes part of; chunks of a group share a route.
        plain: Whether there is no codec, so that the transport may add what is sent.
        pipelined: Whether chunks may overtake each other.
        ordered: Whether the transport has no tags, so that all communicate in one order.
    """
    if groups is not None:
        graph = bulk(graph, groups)
    graph = whole(graph) if plain else fuse(graph)
    graph = schedule(graph)
    if not pipelined:
        graph = stages(graph)
    if ordered:
        graph = exchanges(graph, STRIDE if pipelined else 0)
    return graph


def bulk(graph: Graph, groups: Sequence[int]) -> Graph:
    """Makes one chunk of the chunks of a group."""
    routes: dict[int, int] = {}
    for group, route in zip(groups, graph.routes, strict=True):
        assert routes.setdefault(group, route) == route, "chunks of a group share a route"

    def moved(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return tuple(slot._replace(chunk=groups[slot.chunk]) for slot in slots)

    tasks = [
        replace(t, reads=moved(t.reads), writes=moved(t.writes), needs=()) for t in graph.tasks
    ]
    # The tasks of the members differ in the chunk only, so those of the first stand for all.
    return _redrawn(graph, list(dict.fromkeys(tasks)), [routes[k] for k in sorted(routes)])


def fuse(graph: Graph) -> Graph:
    """Makes each merge do the decodes before it and the encode behind it."""
    decodes = {t.writes[0]: t for t in graph.tasks if t.verb is Verb.DECODE}
    encodes = {t.reads[0]: t for t in graph.tasks if t.verb is Verb.ENCODE}
    reads = Counter(slot for t in graph.tasks for slot in t.reads)
    dropped: set[Task] = set()
    tasks = []
    for task in graph.tasks:
        if task.verb is Verb.MERGE:
            parts = []
            for slot in task.reads:
                if slot.kind is Kind.PLAIN and slot in decodes and reads[slot] == 1:
                    dropped.add(decodes[slot])
                    parts.append(decodes[slot].reads[0])
                else:
                    parts.append(slot)
            mean = task.writes[0]
            if mean.kind is Kind.PLAIN and mean in encodes and reads[mean] == 1:
                dropped.add(encodes[mean])
                mean = encodes[mean].writes[0]
            task = replace(task, reads=tuple(parts), writes=(mean,))
        tasks.append(task)
    return _redrawn(graph, [task for task in tasks if task not in dropped])


def whole(graph: Graph) -> Graph:
    """Makes one all-reduce of the tasks of each chunk."""
    chunks = sorted({task.chunk for task in graph.tasks})
    slots = [(Slot(Kind.GRADIENT, chunk),) for chunk in chunks]
    return _redrawn(graph, [Task(verb=Verb.ALL_REDUCE, reads=s, writes=s) for s in slots])


def schedule(graph: Graph) -> Graph:
    """Sorts tasks by when they would run if every depth took the same time."""
    return _redrawn(graph, sorted(graph.tasks, key=lambda task: _moment(graph, task)))


def stages(graph: Graph) -> Graph:
    """Makes each task need all tasks of a smaller depth."""
    draft = Draft(graph.num_ranks, graph.rank, graph.routes)
    tasks = sorted(graph.tasks, key=lambda task: (task.depth, task.chunk))
    behind: list[int] = []
    for index, task in enumerate(tasks):
        if index and task.depth != tasks[index - 1].depth:
            behind = [k for k in range(index) if tasks[k].depth == tasks[index - 1].depth]
        # A receive may start early; the tasks that read it wait for their stage.
        draft.add(task, () if task.verb is Verb.RECV else behind)
    return draft.graph()


def exchanges(graph: Graph, stride: int = STRIDE) -> Graph:
    """Makes one call of the sends of a depth and the receives one below.

    All ranks have the same sends and receives at the same moment, so all make their calls in one
    order. `ps` among all ranks becomes an all-to-all, then an all-gather.
    """
    groups: dict[tuple[int, ...], list[Task]] = defaultdict(list)
    timed: list[tuple[tuple[int, ...], int, Task]] = []
    for task in graph.tasks:
        moment = _moment(graph, task, stride)[0]
        if task.verb in COMPUTING or task.verb is Verb.ALL_REDUCE:
            timed.append(((moment, 0), task.chunk, task))
        else:
            groups[(moment - (task.verb is Verb.RECV), 1)].append(task)
    for moment_of, members in groups.items():
        sends = sorted((t for t in members if t.verb is Verb.SEND), key=lambda t: (t.to, t.chunk))
        recvs = sorted((t for t in members if t.verb is Verb.RECV), key=lambda t: (t.of, t.chunk))
        task = Task(
            verb=Verb.EXCHANGE,
            reads=tuple(t.reads[0] for t in sends),
            writes=tuple(t.writes[0] for t in recvs),
            to=tuple(t.to[0] for t in sends),
            of=tuple(t.of[0] for t in recvs),
            depth=members[0].depth - (members[0].verb is Verb.RECV),
        )
        timed.append((moment_of, task.chunk, task))
    return _redrawn(graph, [task for *_, task in sorted(timed, key=lambda row: row[:2])])


def _moment(graph: Graph, task: Task, stride: int = STRIDE) -> tuple[int, int, int]:
    """Returns when a task is due; ties are broken so that messages of a pair stay in order."""
    chunk, num_ranks = task.chunk, graph.num_ranks
    moment = chunk // num_ranks * stride + task.depth
    # Each rank starts with another chunk, or all would send to one rank at the same time.
    turn = (graph.routes[chunk] - graph.rank - 1) % num_ranks if task.verb is Verb.ENCODE else 0
    return moment, turn, chunk


def _redrawn(graph: Graph, tasks: Sequence[Task], routes: Sequence[int] | None = None) -> Graph:
    draft = Draft(graph.num_ranks, graph.rank, graph.routes if routes is None else routes)
    for task in tasks:
        draft.add(task)
    return draft.graph()
