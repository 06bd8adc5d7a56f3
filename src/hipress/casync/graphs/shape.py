"""How one synchronisation is cut and what each rank does in it, as far as that needs no tensor.

The engine and the simulator execute the same graphs, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from hipress.casync.graphs import lowering, partitions, strategies
from hipress.casync.graphs.graph import NUM_MESSAGE_CLASSES, Graph
from hipress.errors import UsageError

TAG_BITS = 15
MAX_CHUNKS = 2**TAG_BITS // NUM_MESSAGE_CLASSES
"""Most chunks in one exchange: chunk and class of a message fill the lower half of its tag."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One synchronisation without its tensors."""

    numels: tuple[int, ...]
    hosts: tuple[int, ...]
    """The host of each rank."""
    strategy: str
    is_plain: bool = False
    """Whether the transport's own all-reduce takes its place."""
    bulk: bool = True
    """Whether small gradients share frames."""
    codes_local: bool = False
    """Whether a rank's own gradient passes its codec before a ring merges it."""
    sends_elements: bool = False
    """Whether messages are the elements themselves, without frames."""
    chunk_numel: int = partitions.CHUNK_NUMEL
    pipelined: bool = True
    ordered: bool = False
    """Whether the transport has no tags."""
    placements: tuple[tuple[partitions.Placement, ...], ...] | None = None
    """The partitions of each tensor and their routes; if None, `partitions.cut` makes them."""

    @cached_property
    def layout(self) -> partitions.Layout:
        """How the gradients are cut."""
        # What the transport sums is not cut here: the transport does that.
        numel = max(*self.numels, 1, 1) if self.is_plain else self.chunk_numel
        if self.placements is not None and not self.is_plain:
            small = partitions.BULK_NUMEL if self.bulk else 0
            layout = partitions.arrange(self.placements, chunk_numel=numel, bulk_numel=small)
            if len(layout.routes) > MAX_CHUNKS:
                raise UsageError(
                    f"{len(self.numels)} gradients make {len(layout.routes)} messages, more than "
                    f"{MAX_CHUNKS} in one call; give DDP smaller buckets, or exclude small ones."
                )
            return layout
        while True:
            layout = partitions.cut(
                self.numels,
                len(self.hosts),
                chunk_numel=numel,
                bulk=self.bulk,
                pipelined=self.pipelined,
            )
            if len(layout.routes) <= MAX_CHUNKS:
                return layout
            if numel > sum(self.numels):
                raise UsageError(
                    f"{len(self.numels)} tensors make more than {MAX_CHUNKS} messages, the most in "
                    "one call; leave bulk on, use a codec of the table, or make several calls."
                )
            numel *= 2

    def graph(self, rank: int) -> Graph:
        """Returns the graph that a rank runs."""
        # If the transport sums, lowering drops all messages, so none are built for N ranks.
        hosts = self.hosts[:1] if self.is_plain else self.hosts
        cluster = strategies.Cluster(
            hosts=hosts, codes_local=self.codes_local, sends_elements=self.sends_elements
        )
        member = 0 if self.is_plain else rank
        build = strategies.get(self.strategy).build
        graph = build(cluster, member, self.layout.partition_routes)
        graph = replace(graph, num_ranks=len(self.hosts), rank=rank)
        return lowering.lower(
            graph,
            groups=self.layout.groups,
            plain=self.is_plain,
            pipelined=self.pipelined,
            ordered=self.ordered,
        )


def slice_numel(wire_bytes: Callable[[int], int], slice_bytes: int, most: int) -> int:
    """Returns the elements whose message has about `slice_bytes`, at most `most`.

    Example:
        >>> slice_numel(lambda numel: 4 * numel, 2**20, 2**21)
        262144
    """
    sample = 2**20
    element_bytes = (wire_bytes(sample) - wire_bytes(0)) / sample
    numel = int(slice_bytes / element_bytes) // partitions.GRAIN * partitions.GRAIN
    return min(max(numel, partitions.GRAIN), most)


def chunk_numel(wire_bytes: Callable[[int], int], *, on_gpu: bool) -> int:
    """Returns the elements of a chunk: as many as encode well, fewer if the message is long."""
    numel = partitions.GPU_CHUNK_NUMEL if on_gpu else partitions.CHUNK_NUMEL
    longest = partitions.GPU_FRAME_BYTES if on_gpu else partitions.FRAME_BYTES
    while wire_bytes(numel) - 4096 > longest and numel > partitions.LEAST_NUMEL:
        numel //= 2
    return numel
