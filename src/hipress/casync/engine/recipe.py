"""One synchronisation as all ranks must see it: tensors, codec, strategy, and the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hipress.casync.graphs import partitions, shape, strategies
from hipress.casync.graphs.graph import Graph
from hipress.casync.graphs.shape import Shape
from hipress.codecs.base import Codec
from hipress.codecs.program import ProgramCodec
from hipress.compll.passes.derive import PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Switches of the engine, the same on all ranks; each turns one part off for an ablation."""

    pipelined: bool = True
    """Cut gradients into chunks that overtake each other."""
    bulk: bool = True
    """Put small gradients into one frame."""
    compress_on_cpu: bool = False
    """Run codecs on the host although the gradient is on a GPU."""
    chunk_numel: int | None = None
    """Elements of a chunk; by the kind of device if None."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One synchronisation, as all ranks must see it; the graph is that of this rank."""

    name: str = ""
    """For people."""
    names: tuple[str, ...] | None
    """Of the tensors: they key the codec's state; None: there is none."""
    numels: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    codec: Codec
    strategy: str
    total: bool
    """Sum, not mean."""
    rank: int
    hosts: tuple[int, ...]
    ordered: bool
    number: int = 0
    """In the order in which ranks agreed on recipes; part of the tags of messages."""
    options: Options = field(default_factory=Options)
    placements: tuple[tuple[partitions.Placement, ...], ...] | None = None
    """The partitions of each tensor and their routes; None: they depend on the tensors together."""

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """For people: the gradients of each chunk, and which part of them."""
        return tuple(self._label(members) for members in self.layout.members)

    def _label(self, members: Sequence[partitions.Partition]) -> str:
        texts = []
        for tensor, start, stop in members[:4]:
            text = self.names[tensor] if self.names is not None else f"tensor {tensor}"
            whole = stop - start == self.numels[tensor]
            texts.append(text if whole else f"{text}[{start}:{stop}]")
        more = f" and {len(members) - 4} more" if len(members) > 4 else ""
        return ", ".join(texts) + more

    @cached_property
    def remembers(self) -> bool:
        """Whether a rank keeps something from step to step."""
        back = self.codec.aggregator(len(self.hosts))
        return bool(self.codec.state_names or back.state_names)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the transport's own sum does it."""
        return strategies.get(self.strategy).sums_in_transport(self.codec.name)

    @cached_property
    def shape(self) -> Shape:
        """How the gradients are cut and what each rank does."""
        options = self.options
        return Shape(
            numels=self.numels,
            hosts=self.hosts,
            strategy=self.strategy,
            is_plain=self.is_plain,
            bulk=options.bulk and (self.is_plain or isinstance(self.codec, ProgramCodec)),
            codes_local=codes_local(self.codec, len(self.hosts)),
            chunk_numel=chunk_numel(self.codec, self.device, options),
            pipelined=options.pipelined,
            ordered=self.ordered,
            placements=self.placements,
        )

    @property
    def layout(self) -> partitions.Layout:
        """How the gradients are cut."""
        return self.shape.layout

    @cached_property
    def graph(self) -> Graph:
        """What this rank runs."""
        return self.shape.graph(self.rank)

    @cached_property
    def num_needs(self) -> list[int]:
        """For each task, how many others it needs."""
        return [len(task.needs) for task in self.graph.tasks]

    @cached_property
    def followers(self) -> list[list[int]]:
        """For each task, those that need it."""
        found: list[list[int]] = [[] for _ in self.graph.tasks]
        for place, task in enumerate(self.graph.tasks):
            for need in task.needs:
                found[need].append(place)
        return found

    def facts(self) -> dict[str, object]:
        """What ranks compare before they use it."""
        return {
            "names of tensors": list(self.names) if self.names is not None else None,
            "codec": self.codec.name,
            "codec program": f"{self.codec.codec_hash:016x}",
            "strategy": self.strategy,
            "operation": "sum" if self.total else "mean",
            "dtype": str(self.dtype).removeprefix("torch."),
            "number of tensors": len(self.numels),
            "elements of each tensor": list(self.numels),
            "pipelining": self.options.pipelined,
            "bulk": self.options.bulk,
            "compression on the CPU": self.options.compress_on_cpu,
            "number of chunks": len(self.layout.routes),
            "routes": list(self.layout.routes),
        }


def chunk_numel(codec: Codec, device: torch.device, options: Options) -> int:
    """Elements of a chunk: as many as encode well, fewer where that makes a long message."""
    if options.chunk_numel is not None:
        return options.chunk_numel
    on_gpu = device.type == "cuda" and not options.compress_on_cpu
    return shape.chunk_numel(codec.wire_bytes, on_gpu=on_gpu)


def codes_local(codec: Codec, num_ranks: int) -> bool:
    """Whether a rank's gradient must pass its own codec before a ring merges it.

    A hop encodes the own gradient with that of others. That would lose momentum, which is each
    rank's own, and what a way back without a residual does not send.
    """
    own, back = set(codec.state_names), set(codec.aggregator(num_ranks).state_names)
    return not (own <= {"residual"} and own <= back)


def forgetful(codec: Codec) -> Codec:
    """The codec without error feedback and momentum, as far as wrappers brought them."""
    if isinstance(codec, ProgramCodec) and (codec.variant.feedback or codec.variant.momentum):
        return codec.with_variant(PLAIN, codec.name)
    inner = getattr(codec, "inner", None)
    return forgetful(inner) if isinstance(inner, Codec) else codec
