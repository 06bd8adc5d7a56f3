"""How a list of gradients is cut: large ones into partitions, small ones put together.

A *partition* is a contiguous run of elements of one gradient. A *chunk* is what one frame carries:
one large partition, or a group of small ones. Chunks are assigned to routes so that each route
carries about as much as another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

CHUNK_NUMEL = 2**21
"""Elements of a chunk, roughly: 8 MB, which onebit encodes in 1 ms. Four ranks on two cores at
1 Gbit took 133, 124 and 85 ms for 100 MB with chunks of 2, 4 and 8 MB, since each message costs
time there. With 12 chunks encode, wire and decode still overlap."""

GPU_CHUNK_NUMEL = 2**24
"""The same on a GPU, where a chunk costs 1 ms of launches from Python and hardly any time besides:
500 MB over 10 Gbit took 74, 42, 23 and 20 ms with chunks of 2^21, 2^22, 2^23 and 2^24."""

FRAME_BYTES, GPU_FRAME_BYTES = 2**22, 2**24
"""Most bytes of a frame, so that the wire is not idle while the first are made: without a codec
100 MB took 1395 ms around the ring in chunks of 8 MB and 1291 in chunks of 4."""

LEAST_NUMEL = 2**16
"""Least elements of a partition that is only made so that all ranks have work."""

BULK_NUMEL = 2**17
"""Partitions up to this size share a frame. That costs memory and two copies (0.3 ms for so many
elements, cold, on a busy core) and saves six messages among four ranks (0.1 ms each)."""

GPU_SHARE_NUMEL = 2**22
"""The same on a GPU, where a launch costs more."""

GRAIN = 4096
"""Partitions start on a multiple of this, so that no block of a codec is cut."""


class Placement(NamedTuple):
    """Elements `start` to `stop` of a gradient, and the route they take in every step."""

    start: int
    stop: int
    route: int


class Partition(NamedTuple):
    """Elements `start` to `stop` of one gradient."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Partitions, the group of each, and the route of each group."""

    partitions: tuple[Partition, ...]
    groups: tuple[int, ...]
    """The group of each partition; groups are numbered in order."""
    routes: tuple[int, ...]
    """The route of each group."""

    @cached_property
    def members(self) -> tuple[tuple[Partition, ...], ...]:
        """The partitions of each group."""
        found: list[list[Partition]] = [[] for _ in self.routes]
        for part, group in zip(self.partitions, self.groups, strict=True):
            found[group].append(part)
        return tuple(map(tuple, found))

    @cached_property
    def firsts(self) -> tuple[tuple[int, int], ...]:
        """For each group, the tensor of its first partition and that partition's index in it."""
        found: dict[int, tuple[int, int]] = {}
        counts: dict[int, int] = {}
        for part, group in zip(self.partitions, self.groups, strict=True):
            index = counts.get(part.tensor, 0)
            counts[part.tensor] = index + 1
            found.setdefault(group, (part.tensor, index))
        return tuple(found[group] for group in range(len(self.routes)))

    @property
    def partition_routes(self) -> tuple[int, ...]:
        """The route of each partition, which is that of its group."""
        return tuple(self.routes[group] for group in self.groups)


def cut(
    numels: Sequence[int],
    num_routes: int,
    *,
    chunk_numel: int = CHUNK_NUMEL,
    bulk: bool = True,
    pipelined: bool = True,
) -> Layout:
    """Cuts gradients for some routes.

    Args:
        numels: Elements of each gradient; empty ones are left out.
        num_routes: The number of ranks, or of owners.
        chunk_numel: Elements that a group should have.
        bulk: Whether small gradients are put together.
        pipelined: If False, each gradient becomes at most one partition for each route.

    Example:
        >>> layout = cut([10_000_000, 100, 200], 2)
        >>> len(layout.partitions), layout.groups[-2:]
        (8, (6, 6))
    """
    if not pipelined:
        chunk_numel = max(*numels, 1, 1)
    # If there is little in all, it is cut finer, so that every rank has something to do.
    target = min(max(-(-sum(numels) // num_routes), LEAST_NUMEL), chunk_numel)
    partitions: list[Partition] = []
    groups: list[int] = []
    sizes: list[int] = []  # of the groups
    open_group = -1
    for tensor, numel in enumerate(numels):
        parts = _partitions(tensor, numel, num_routes, target)
        small = bulk and len(parts) == 1 and numel <= target // 2
        for part in parts:
            if small and open_group >= 0 and sizes[open_group] + numel <= target:
                sizes[open_group] += numel
                groups.append(open_group)
            else:
                groups.append(len(sizes))
                open_group = len(sizes) if small else open_group
                sizes.append(part.numel)
            partitions.append(part)
    return Layout(
        partitions=tuple(partitions), groups=tuple(groups), routes=_deal(sizes, num_routes)
    )


class Partitioner:
    """Cuts gradients and assigns their partitions to routes, one gradient after the other.

    The result for a gradient depends on those before it, never on the list it travels in later, so
    its state stays where it is when others travel with it.

    Args:
        num_routes: The number of ranks.
        bucket_numel: Elements of a full bucket: every rank should have work in every bucket.
        on_gpu: Whether the gradients are on a GPU.

    Example:
        >>> partitioner = Partitioner(2, bucket_numel=2**22)
        >>> [part.route for part in partitioner.place(2**21, 2**20)]
        [0, 1]
        >>> partitioner.place(100, 2**20)
        (Placement(start=0, stop=100, route=0),)
    """

    def __init__(self, num_routes: int, *, bucket_numel: int, on_gpu: bool = False) -> None:
        self._loads = [0] * num_routes
        self._share_numel = max(bucket_numel // num_routes, GPU_SHARE_NUMEL if on_gpu else 1)
        self._last = 0
        """The route of the last partition."""

    def place(
        self,
        numel: int,
        chunk_numel: int,
        partitions: int | None = None,
        *,
        joins_last: bool = False,
    ) -> tuple[Placement, ...]:
        """Returns the partitions of the next gradient, each on the route that carries least so far.

        Args:
            numel: Elements of the gradient.
            chunk_numel: Elements of a chunk of its codec; no partition should have more.
            partitions: The number of partitions in a plan; the gradient gets fewer if some would
                not start on a multiple of `GRAIN`. If None, the number depends on the sizes.
            joins_last: Whether it travels in one frame with the gradient before it.
        """
        if joins_last and numel:
            self._loads[self._last] += numel
            return (Placement(0, numel, self._last),)
        if partitions is None:
            target = max(min(chunk_numel, self._share_numel), LEAST_NUMEL)
            parts = _partitions(0, numel, len(self._loads), target)
        else:
            parts = _even(0, numel, max(1, min(partitions, numel // GRAIN)))
        placements = []
        for part in parts:
            route = self._loads.index(min(self._loads))
            self._loads[route] += part.numel
            self._last = route
            placements.append(Placement(part.start, part.stop, route))
        return tuple(placements)


def arrange(
    placements: Sequence[Sequence[Placement]], *, chunk_numel: int, bulk_numel: int = BULK_NUMEL
) -> Layout:
    """Returns the layout of gradients whose partitions have routes already.

    Args:
        placements: The partitions of each gradient; an empty gradient has none.
        chunk_numel: Most elements that a group should have.
        bulk_numel: Partitions up to this size are put together with others of their route.

    Example:
        >>> partitioner = Partitioner(2, bucket_numel=2**22)
        >>> arrange([partitioner.place(n, 2**20) for n in (9, 8, 7)], chunk_numel=2**20).groups
        (0, 1, 1)
    """
    partitions: list[Partition] = []
    groups: list[int] = []
    routes: list[int] = []
    sizes: list[int] = []
    open_groups: dict[int, int] = {}
    for tensor, parts in enumerate(placements):
        for start, stop, route in parts:
            numel = stop - start
            small = numel <= bulk_numel
            group = open_groups.get(route, -1) if small else -1
            if group < 0 or sizes[group] + numel > chunk_numel:
                group = len(sizes)
                sizes.append(0)
                routes.append(route)
                if small:
                    open_groups[route] = group
            sizes[group] += numel
            partitions.append(Partition(tensor, start, stop))
            groups.append(group)
    return Layout(partitions=tuple(partitions), groups=tuple(groups), routes=tuple(routes))


def _partitions(tensor: int, numel: int, num_routes: int, target: int) -> list[Partition]:
    """Cuts evenly; every route gets as many if there are more partitions than routes."""
    wanted = -(-numel // target)
    if wanted > num_routes:
        wanted = -(-wanted // num_routes) * num_routes
    if numel:
        wanted = max(1, min(wanted, numel // max(min(target, LEAST_NUMEL), GRAIN)))
    return _even(tensor, numel, wanted)


def _even(tensor: int, numel: int, count: int) -> list[Partition]:
    edges = [numel * k // count // GRAIN * GRAIN for k in range(count)] + [numel]
    return [Partition(tensor, a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def _deal(sizes: Sequence[int], num_routes: int) -> tuple[int, ...]:
    """Returns the route of each group: the largest group first, each to the least loaded route.

    Groups of one size go to the routes in turn, which pipelines best.
    """
    loads = [0] * num_routes
    routes = [0] * len(sizes)
    for group in sorted(range(len(sizes)), key=lambda group: -sizes[group]):
        routes[group] = loads.index(min(loads))
        loads[routes[group]] += sizes[group]
    return tuple(routes)
