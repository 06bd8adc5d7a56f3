"""From the lowered graph to work: memory for every slot, a function for every computing task.

A `Recipe` is what all ranks agree on; a `Job` is one set of buffers for it, used again and again.
In a steady step nothing is allocated: a job is given the caller's tensors, and its functions run.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hipress.casync.engine.memory import Cell, Elements, Part, scratch
from hipress.casync.engine.recipe import Recipe
from hipress.casync.engine.state_store import Key, StateStore
from hipress.casync.engine.transport import Pending
from hipress.casync.graphs.graph import COMPUTING, Kind, Slot, Task, Verb
from hipress.codecs.base import RANDOM_KEYS, WEIGHT, Codec, State
from hipress.codecs.bulk import Bulk

LIGHT_BYTES = 2**17
"""Handing a message to another thread costs 50 us of a busy core; sending so many bytes less."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a communicating task moves, as (memory, peer, tag)."""

    sends: tuple[tuple[Cell, int, int], ...]
    recvs: tuple[tuple[Cell, int, int], ...]

    @property
    def is_light(self) -> bool:
        """Whether its sends take no longer than handing them over would."""
        cells = [cell for cell, *_ in self.sends]
        return all(not cell.settles and cell.wire.nbytes <= LIGHT_BYTES for cell in cells)


@dataclass(frozen=True, slots=True)
class Bound:
    """The tasks of a graph with the codecs of one phase."""

    work: tuple[Callable[[], object] | None, ...]
    messages: tuple[Message | None, ...]
    is_light: tuple[bool, ...]
    """Whether a send is small enough to be started between two computing tasks."""
    sent_bytes: int
    received_bytes: int
    num_messages: int


class Job:
    """Buffers and functions for one recipe.

    Args:
        recipe: What to do.
        keeper: Of the codecs' memory, which outlives the job where the recipe has names.
        on_host: Whether the transport takes host memory only.
        seed: Feeds the codecs' random numbers.
    """

    def __init__(self, recipe: Recipe, keeper: StateStore, *, on_host: bool, seed: int) -> None:
        self.recipe = recipe
        self._keeper = keeper
        self._on_host = on_host
        self._seed = seed
        self.device = torch.device("cpu") if recipe.options.compress_on_cpu else recipe.device
        self.parts = [
            Part(
                partitions,
                None if recipe.is_plain else recipe.codec,
                recipe.dtype,
                home=recipe.device,
                device=self.device,
            )
            for partitions in recipe.layout.members
        ]
        self._elements = [Elements(part, on_host) for part in self.parts]
        self._received = {slot for task in recipe.graph.tasks if task.of for slot in task.writes}
        self._cells: dict[Slot, Cell] = {}
        self._bounds: dict[str, Bound] = {}
        self._states: dict[Slot, State] = {}
        self._weights: list[tuple[torch.Tensor, int, int, int]] = []
        """Where a codec wants to see the parameters: memory, tensor, first element, end."""
        self._alpha = float(len(recipe.hosts)) if recipe.total else 1.0
        self._pointers: list[int] = []
        # Set for each use.
        self.sequence = 0
        self.bound: Bound
        self.lock = threading.Lock()
        self.waiting: list[int] = []
        self.left = 0
        self.sends: list[Pending] = []
        self.last_use: torch.cuda.Event | None = None
        """After which the GPU no longer reads what was received."""
        self.on_done: Callable[[BaseException | None], None] = lambda error: None

    @property
    def num_bytes(self) -> int:
        """Of buffers: frames, elements apart from the caller's, and pinned twins."""
        return sum(cell.num_bytes for cell in (*self._cells.values(), *self._elements)) + sum(
            part.num_bytes for part in self.parts
        )

    def begin(
        self,
        flats: Sequence[torch.Tensor],
        sequence: int,
        step: int,
        *,
        lr_ratio: float | None = None,
        weights: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Takes the tensors of a step, flat and contiguous.

        Args:
            flats: Of the caller.
            sequence: Of all jobs.
            step: Of training: decides the phase of a codec, and its random numbers.
            lr_ratio: The last step's learning rate over this one's, for codecs that want it.
            weights: The parameters of the tensors, for codecs that want to see them.
        """
        self.sequence = sequence
        if self.last_use is not None:
            self.last_use.synchronize()
        pointers = [flat.data_ptr() for flat in flats]
        if pointers != self._pointers:
            for part in self.parts:
                part.hold(flats)
            self._pointers = pointers
        codec = self.recipe.codec.phase(step)
        if codec.name not in self._bounds:
            self._bounds[codec.name] = self._bind(codec)
        self.bound = self._bounds[codec.name]
        for state in self._states.values():
            if self.recipe.names is None:
                for key, held in state.items():
                    if key not in RANDOM_KEYS:
                        held.zero_()
            if "step" in state:
                # Set, not counted: ranks that must draw alike agree whatever job they took.
                state["step"].fill_(step)
            if lr_ratio is not None:
                state["lr_ratio"] = torch.tensor(lr_ratio)
        if weights is not None:
            for memory, tensor, start, stop in self._weights:
                memory.copy_(weights[tensor][start:stop])
        self.waiting = list(self.recipe.num_needs)
        self.left = len(self.waiting)
        self.sends = []

    def let_go(self) -> None:
        """Forgets the caller's tensors."""
        for part in self.parts:
            part.let_go()
        self._pointers = []
        self.on_done = lambda error: None

    def addend(self, chunk: int) -> torch.Tensor:
        """What the transport's all-reduce adds up; a mean of 16 bits in shares, or it overflows."""
        elements = self.parts[chunk].gather()
        if self._shares_first:
            elements.mul_(1.0 / len(self.recipe.hosts))
        return elements

    @property
    def _shares_first(self) -> bool:
        return not self.recipe.total and self.recipe.dtype in (torch.float16, torch.bfloat16)

    # Binding: once for each phase of the codec.

    def _bind(self, codec: Codec) -> Bound:
        work: list[Callable[[], object] | None] = []
        messages: list[Message | None] = []
        for task in self.recipe.graph.tasks:
            if task.verb in COMPUTING:
                work.append(getattr(self, f"_{task.verb.value}")(task, codec))
                messages.append(None)
                continue
            work.append(self._sum_up(task) if task.verb is Verb.ALL_REDUCE else None)
            sends = zip(task.reads, task.to, strict=True) if task.to else ()
            recvs = zip(task.writes, task.of, strict=True) if task.of else ()
            messages.append(
                Message(
                    tuple((self._cell(slot, codec), to, slot.tag) for slot, to in sends),
                    tuple((self._cell(slot, codec), of, slot.tag) for slot, of in recvs),
                )
            )
        moved = [message for message in messages if message is not None]
        return Bound(
            work=tuple(work),
            messages=tuple(messages),
            is_light=tuple(m is not None and m.is_light for m in messages),
            sent_bytes=sum(cell.wire.nbytes for m in moved for cell, *_ in m.sends),
            received_bytes=sum(cell.wire.nbytes for m in moved for cell, *_ in m.recvs),
            num_messages=sum(len(m.sends) for m in moved),
        )

    def _codec_of(self, slot: Slot, worker: Codec) -> Codec:
        if slot.kind is Kind.FRAME:
            return worker
        return worker.aggregator(slot.merged)

    def _cell(self, slot: Slot, codec: Codec) -> Cell:
        """The memory of a slot, in the size that this phase needs."""
        part = self.parts[slot.chunk]
        if slot.kind is Kind.GRADIENT:
            return self._elements[slot.chunk]
        if slot.kind in (Kind.PLAIN, Kind.RAW):
            if slot not in self._cells:
                dtype = self.recipe.dtype if slot.kind is Kind.RAW else torch.float32
                self._cells[slot] = Cell(part.numel, dtype, self.device, self._on_host)
            return self._cells[slot]
        if slot not in self._cells:
            largest = max(
                part.wire_bytes(self._codec_of(slot, phase))
                for _, phase in self.recipe.codec.phases
            )
            self._cells[slot] = Cell(largest, torch.uint8, self.device, self._on_host)
        return self._cells[slot].cut(part.wire_bytes(self._codec_of(slot, codec)))

    def _state(self, slot: Slot, coder: Codec | Bulk) -> State:
        """The state for making a frame; all phases share one."""
        if slot not in self._states:
            part, recipe = self.parts[slot.chunk], self.recipe
            shape = torch.empty(part.numel, device=self.device)
            stream = recipe.rank if slot.kind is Kind.FRAME else len(recipe.hosts) + recipe.rank
            if recipe.codec.shares_stream:
                stream = 0
            seeds = [self._seed_of(tensor, start) for tensor, start, _ in part.partitions]
            state = coder.init(shape, seed=seeds[0], stream=stream)
            bulk = coder if isinstance(coder, Bulk) else None
            if bulk is not None and "seed" in state:
                state["seed"] = torch.tensor(seeds, dtype=torch.int64, device=self.device)
            if recipe.names is not None:
                keys = [
                    Key(recipe.names[tensor], start, stop, slot.kind, slot.merged)
                    for tensor, start, stop in part.partitions
                ]
                self._keeper.adopt(keys, state, bulk)
            if WEIGHT in state:
                views = [state[WEIGHT]] if bulk is None else bulk.views(state[WEIGHT])
                self._weights += [
                    (view, *part) for view, part in zip(views, part.partitions, strict=True)
                ]
            self._states[slot] = state
        return self._states[slot]

    def _seed_of(self, tensor: int, start: int) -> int:
        """The same for a partition whatever travels with it."""
        names = self.recipe.names
        name = names[tensor] if names is not None else f"{tensor}"
        own = zlib.crc32(f"{name}[{start}]".encode())
        return (self._seed * 1_000_003 + own) & (2**62 - 1)

    def _read(self, slot: Slot, codec: Codec) -> Callable[[], torch.Tensor]:
        """What gives the elements or the frame of a slot."""
        if slot.kind is Kind.GRADIENT:
            return self.parts[slot.chunk].gather
        cell = self._cell(slot, codec)
        if slot in self._received and cell.staged:
            return cell.fetch
        memory = cell.device
        return lambda: memory

    def _encode(self, task: Task, codec: Codec) -> Callable[[], object]:
        slot = task.writes[0]
        made_by = self._codec_of(slot, codec)
        coder = self.parts[slot.chunk].coder(made_by)
        state = self._state(slot, coder)
        read, cell = self._read(task.reads[0], codec), self._cell(slot, codec)
        encode, out, publish = coder.encode, cell.device, cell.publish
        if not cell.staged:
            return lambda: encode(read(), state, out=out)

        def run() -> None:
            encode(read(), state, out=out)
            publish()

        return run

    def _decode(self, task: Task, codec: Codec) -> Callable[[], object]:
        slot, target = task.reads[0], task.writes[0]
        part = self.parts[slot.chunk]
        decode = part.coder(self._codec_of(slot, codec)).decode
        read = self._read(slot, codec)
        if target.kind is not Kind.GRADIENT:
            out = self._cell(target, codec).device
            return lambda: decode(read(), out=out)
        alpha = self._alpha

        def run() -> None:
            decode(read(), out=part.elements, alpha=alpha)
            part.scatter()

        return run

    def _merge(self, task: Task, codec: Codec) -> Callable[[], object]:
        target = task.writes[0]
        part = self.parts[target.chunk]
        adds = [
            self._adder(slot, weight, codec, first=k == 0)
            for k, (slot, weight) in enumerate(zip(task.reads, task.weights, strict=True))
        ]
        if target.kind is Kind.GRADIENT:
            return self._merge_home(part, adds)
        cell = self._cell(target, codec)
        if target.kind is Kind.PLAIN:
            mean = cell.device
            return lambda: [add(mean) for add in adds]
        made_by = self._codec_of(target, codec)
        coder = part.coder(made_by)
        state = self._state(target, coder)
        frames = all(slot.kind is Kind.FRAME for slot in task.reads)
        if self.device.type == "cuda" and frames and not part.is_bulk:
            # One kernel, where there is one.
            reads = [self._read(slot, codec) for slot in task.reads]
            same = len(set(task.weights)) == 1

            def fused() -> None:
                made_by.merge(
                    [read() for read in reads], codec, part.numel, state,
                    alpha=task.weights[0], out=cell.device,
                )  # fmt: skip
                cell.publish()

            if same:
                return fused

        def run() -> None:
            mean = scratch.take(part.numel, self.device)
            for add in adds:
                add(mean)
            coder.encode(mean, state, out=cell.device)
            cell.publish()

        return run

    def _merge_home(
        self, part: Part, adds: Sequence[Callable[[torch.Tensor], object]]
    ) -> Callable[[], object]:
        """A merge that writes the gradient itself."""
        alpha = self._alpha

        def run() -> None:
            mean = scratch.take(part.numel, self.device)
            for add in adds:
                add(mean)
            if alpha != 1.0:
                mean.mul_(alpha)
            part.elements.copy_(mean)
            part.scatter()

        return run

    def _adder(
        self, slot: Slot, weight: float, codec: Codec, *, first: bool
    ) -> Callable[[torch.Tensor], object]:
        """Adds a slot, times its weight, to a sum; the first overwrites it."""
        read = self._read(slot, codec)
        if slot.kind in (Kind.GRADIENT, Kind.PLAIN, Kind.RAW):
            if first:
                return lambda mean: mean.copy_(read()).mul_(weight)
            return lambda mean: mean.add_(read(), alpha=weight)
        decode = self.parts[slot.chunk].coder(self._codec_of(slot, codec)).decode
        return lambda mean: decode(read(), out=mean, add=not first, alpha=weight)

    def _sum_up(self, task: Task) -> Callable[[], object]:
        """What follows an all-reduce: the mean, handed out."""
        part = self.parts[task.chunk]
        done = self.recipe.total or self._shares_first
        scale = 1.0 if done else 1.0 / len(self.recipe.hosts)

        def run() -> None:
            if scale != 1.0:
                part.elements.mul_(scale)
            part.scatter()

        return run
