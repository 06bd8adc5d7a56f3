"""The recipe that all ranks agree on before a synchronisation: tensors, codec and strategy."""

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
from hipress.errors import UsageError


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
    """Elements of a chunk; if None, the kind of device decides."""
    slice_bytes: int | None = None
    """About the bytes of a message, where a schedule decides which message leaves next."""
    credit_bytes: int | None = None
    """Bytes that may be on their way out of a rank at once, where a schedule decides; None: any."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One kind of synchronisation, the same on all ranks; the graph is that of this rank."""

    name: str = ""
    """Shown in errors and timelines."""
    names: tuple[str, ...] | None
    """Names of the tensors, which key the codec's state; without names there is no state."""
    numels: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    codec: Codec
    strategy: str
    total: bool
    """Whether the result is the sum instead of the mean."""
    rank: int
    hosts: tuple[int, ...]
    ordered: bool
    number: int = 0
    """Counts the recipes that ranks agreed on; part of the tags of messages."""
    options: Options = field(default_factory=Options)
    placements: tuple[tuple[partitions.Placement, ...], ...] | None = None
    """The partitions of each tensor and their routes; if None, `partitions.cut` makes them."""

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The gradients of each chunk, and which part of them, as shown in timelines."""
        return tuple(self._label(members) for members in self.layout.members)

    def _label(self, members: Sequence[partitions.Partition]) -> str:
        texts = []
        for tensor, start, stop in members[:4]:
            text = self.tensor_title(tensor)
            whole = stop - start == self.numels[tensor]
            texts.append(text if whole else f"{text}[{start}:{stop}]")
        more = f" and {len(members) - 4} more" if len(members) > 4 else ""
        return ", ".join(texts) + more

    def tensor_title(self, tensor: int) -> str:
        """Returns the name of a tensor, or its place in the call if it has none."""
        return self.names[tensor] if self.names is not None else f"tensor {tensor}"

    @cached_property
    def keeps_state(self) -> bool:
        """Whether a rank keeps state from step to step."""
        back = self.codec.aggregator(len(self.hosts))
        return bool(self.codec.state_names or back.state_names)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the transport's own all-reduce takes its place."""
        return strategies.get(self.strategy).sums_in_transport(self.codec.name)

    @cached_property
    def sends_elements(self) -> bool:
        """Whether messages are the elements themselves, without frames."""
        # Frames cost two copies of each element, which training with a schedule has no time for.
        is_scheduled = self.options.slice_bytes is not None and not self.ordered
        can = strategies.get(self.strategy).can_send_elements
        return is_scheduled and can and self.codec.name == "none" and not self.total

    @cached_property
    def shape(self) -> Shape:
        """How the gradients are cut and what each rank does, without tensors."""
        options = self.options
        return Shape(
            numels=self.numels,
            hosts=self.hosts,
            strategy=self.strategy,
            is_plain=self.is_plain,
            bulk=options.bulk and (self.is_plain or isinstance(self.codec, ProgramCodec)),
            codes_local=codes_local(self.codec, len(self.hosts)),
            sends_elements=self.sends_elements,
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
        """The graph that this rank runs."""
        return self.shape.graph(self.rank)

    def facts(self) -> dict[str, object]:
        """Returns what ranks compare before they use the recipe."""
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
    """Returns the elements of a chunk for a codec on a device (see `shape.chunk_numel`)."""
    if options.chunk_numel is not None:
        return options.chunk_numel
    on_gpu = device.type == "cuda" and not options.compress_on_cpu
    numel = shape.chunk_numel(codec.wire_bytes, on_gpu=on_gpu)
    if options.slice_bytes is not None:
        numel = shape.slice_numel(codec.wire_bytes, options.slice_bytes, numel)
    return numel


def codes_local(codec: Codec, num_ranks: int) -> bool:
    """Returns whether a rank's gradient must pass its own codec before a ring merges it.

    A hop encodes the own gradient together with that of others. That would lose momentum, which
    each rank keeps for itself, and what a way back without a residual does not send.
    """
    own, back = set(codec.state_names), set(codec.aggregator(num_ranks).state_names)
    return not (own <= {"residual"} and own <= back)


def without_state(codec: Codec) -> Codec:
    """Returns the codec without the error feedback and momentum of wrappers."""
    if isinstance(codec, ProgramCodec) and (codec.variant.feedback or codec.variant.momentum):
        return codec.with_variant(PLAIN, codec.name)
    return codec


def check_state(codec: Codec) -> None:
    """Refuses a codec whose state cannot be cut and joined with the gradient."""
    if isinstance(codec, ProgramCodec) and codec.uneven_state:
        raise UsageError(
            f"{codec.name} keeps {codec.uneven_state!r}, which is not one float for each element; "
            "an exchange cuts, groups and saves states by elements: keep it as a float* of the "
            "gradient's length, or call encode and decode yourself."
        )
