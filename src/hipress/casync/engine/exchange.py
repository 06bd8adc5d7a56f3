"""Binds a lowered graph: memory for every slot, a function for every computing task.

A `Recipe` is what all ranks agree on; an `Exchange` is one set of buffers for it that is used again
and again. In a steady step nothing is allocated: an exchange is given the caller's tensors, and its
functions run.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hipress.casync.engine.memory import (
    Buffer,
    Chunk,
    FrameBuffer,
    GradientBuffer,
    clip_norm,
    scratch,
)
from hipress.casync.engine.recipe import Recipe, without_state
from hipress.casync.engine.state_store import Key, StateStore
from hipress.casync.engine.transport import Pending
from hipress.casync.graphs.graph import COMPUTING, Kind, Slot, Task, Verb
from hipress.casync.graphs.schedules import Order
from hipress.codecs import frame
from hipress.codecs.base import RANDOM_KEYS, WEIGHT, Codec, State
from hipress.codecs.bulk import Bulk
from hipress.errors import FrameError

LIGHT_BYTES = 2**17
"""Sends up to this size take less time than handing them to another thread (50 us, busy core)."""


@dataclass(frozen=True, slots=True)
class Message:
    """The (buffer, peer, tag) of each send and receive of a communicating task."""

    sends: tuple[tuple[Buffer, int, int], ...]
    recvs: tuple[tuple[Buffer, int, int], ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes of all sends and receives."""
        return sum(buffer.wire.nbytes for buffer, *_ in (*self.sends, *self.recvs))

    @property
    def is_light(self) -> bool:
        """Whether its sends take no longer than handing them to another thread would."""
        return all(
            not buffer.waits_before_send and buffer.wire.nbytes <= LIGHT_BYTES
            for buffer, *_ in self.sends
        )


@dataclass(frozen=True, slots=True)
class BoundTasks:
    """The tasks of a graph, bound to buffers and to the codecs of one phase."""

    work: tuple[Callable[[], object] | None, ...]
    messages: tuple[Message | None, ...]
    is_light: tuple[bool, ...]
    """Whether a send is small enough to be started between two computing tasks."""
    sent_bytes: int
    received_bytes: int
    num_messages: int


_NOTHING_BOUND = BoundTasks(
    work=(), messages=(), is_light=(), sent_bytes=0, received_bytes=0, num_messages=0
)


class Exchange:
    """Buffers and functions for one recipe.

    Args:
        recipe: What all ranks agreed on.
        states: Holds the codecs' memory beyond the exchange if the recipe has names.
        on_host: Whether the transport takes host memory only.
        seed: Feeds the codecs' random numbers.
        find_recipe: Returns the recipe with a number, if it is known; for errors.
    """

    def __init__(
        self,
        recipe: Recipe,
        states: StateStore,
        *,
        on_host: bool,
        seed: int,
        find_recipe: Callable[[int], Recipe | None] = lambda number: None,
    ) -> None:
        self.recipe = recipe
        self._find_recipe = find_recipe
        self._state_store = states
        self._on_host = on_host
        self._seed = seed
        self.device = torch.device("cpu") if recipe.options.compress_on_cpu else recipe.device
        self.chunks = [
            Chunk(
                partitions,
                None if recipe.is_plain or recipe.sends_elements else recipe.codec,
                recipe.dtype,
                home=recipe.device,
                device=self.device,
            )
            for partitions in recipe.layout.members
        ]
        self._gradients = [GradientBuffer(chunk, on_host) for chunk in self.chunks]
        self._received = {slot for task in recipe.graph.tasks if task.of for slot in task.writes}
        self._sent = {slot for task in recipe.graph.tasks if task.to for slot in task.reads}
        self._firsts = recipe.layout.firsts
        self._buffers: dict[Slot, Buffer] = {}
        self._bounds: dict[str, BoundTasks] = {}
        self._states: dict[Slot, State] = {}
        self._weights: list[tuple[torch.Tensor, int, int, int]] = []
        """Memory for parameters that a codec reads: (memory, index of tensor, start, stop)."""
        self._alpha = float(len(recipe.hosts)) if recipe.total else 1.0
        self._loss_scale = 1.0
        self._clip = recipe.codec.clip
        """Largest norm of a whole tensor, in the unit of this step; 0 if nothing is clipped."""
        self._worker = recipe.codec.unclipped()
        """What encodes partitions, in the unit of this step."""
        self._pointers: list[int] = []
        # What follows adds up over all uses.
        self.num_done = 0
        self.under_way_ns = 0
        """Time from start to end."""
        self.coding_ns = 0
        """Time of tasks that encode, decode and merge."""
        # What follows is set for each use.
        self.started_ns = 0
        self.sequence = 0
        self.use = 0
        self.step = 0
        self.turn = 0
        """Exchanges of an earlier turn go first; those of one step of a schedule share a turn."""
        self.order: Order | None = None
        """Its places among the exchanges of its turn; None if no schedule decides."""
        self.is_first_use = False
        """Whether its tasks were bound for this use: kernels that are missing are compiled now."""
        self.tag = 0
        """The upper part of the tags of all its messages; the executor sets it."""
        self.bound = _NOTHING_BOUND
        self.lock = threading.Lock()
        self.waiting: list[int] = []
        self.left = 0
        self.sends: list[Pending] = []
        self.last_use: torch.cuda.Event | None = None
        """On a GPU, the event after which the device no longer reads what was received."""
        self.on_done: Callable[[BaseException | None], None] = lambda error: None

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers: frames, copies of elements, and pinned copies."""
        buffers: list[Buffer | Chunk] = [*self._buffers.values(), *self._gradients, *self.chunks]
        return sum(one.num_bytes for one in buffers)

    def urgency(self, index: int) -> tuple[int, int, int, int]:
        """Returns the key of a task; the task with the smallest one goes first."""
        order, place = self.order, 0
        if order is not None:
            place = order.back if self.recipe.graph.is_back[index] else order.out
        return self.turn, place, self.sequence, index

    def prepare(
        self,
        flats: Sequence[torch.Tensor],
        sequence: int,
        use: int,
        step: int,
        *,
        lr_ratio: float | None = None,
        weights: Sequence[torch.Tensor] | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        """Takes the tensors of a step, and clips their norms if the codec asks for that.

        Args:
            flats: The caller's tensors, flat and contiguous.
            sequence: Number of this use among those of all exchanges.
            use: Number of this use among those of the recipe.
            step: Step of training; decides the phase of a codec, and its random numbers.
            lr_ratio: The last step's learning rate over this one's, for codecs that use it.
            weights: The parameters of the tensors, for codecs that read them.
            loss_scale: The factor that the tensors carry.
        """
        self.sequence, self.use, self.step = sequence, use, step
        if self.last_use is not None:
            self.last_use.synchronize()
        pointers = [flat.data_ptr() for flat in flats]
        if pointers != self._pointers:
            for chunk in self.chunks:
                chunk.hold(flats)
            self._pointers = pointers
        if loss_scale != self._loss_scale:
            self._follow(loss_scale)
        for flat in flats if self._clip else ():
            clip_norm(flat, self._clip)
        codec = self._worker.phase(step)
        self.is_first_use = codec.name not in self._bounds
        if self.is_first_use:
            self._bounds[codec.name] = self._bind(codec)
        self.bound = self._bounds[codec.name]
        for state in self._states.values():
            if self.recipe.names is None:
                for key, held in state.items():
                    if key not in RANDOM_KEYS:
                        held.zero_()
            if "step" in state:
                # Set, not counted: ranks that must draw the same numbers agree in every exchange.
                state["step"].fill_(step)
            if lr_ratio is not None:
                # In memory that stays: what reads it can be replayed.
                held = state.setdefault("lr_ratio", torch.ones((), device=self.device))
                held.fill_(lr_ratio)
        if weights is not None:
            for memory, tensor, start, stop in self._weights:
                memory.copy_(weights[tensor][start:stop])
        self.waiting = list(self.recipe.graph.num_needs)
        self.left = len(self.waiting)
        self.sends = []

    def _follow(self, loss_scale: float) -> None:
        """Brings the codec to another loss scale; what was bound for the last one is dropped."""
        self._loss_scale = loss_scale
        scaled = self.recipe.codec.scaled(loss_scale)
        worker = scaled.unclipped()
        if self.recipe.names is None:
            worker = without_state(worker)
        self._clip = scaled.clip
        if worker.name != self._worker.name:
            self._worker = worker
            self._bounds.clear()
            for chunk in self.chunks:
                chunk.drop_bulks()

    def release(self) -> None:
        """Drops the caller's tensors."""
        for chunk in self.chunks:
            chunk.release()
        self._pointers = []
        self.on_done = lambda error: None

    def free(self) -> None:
        """Frees all buffers; the exchange cannot be used again.

        Without this they would stay until a collector comes by, since functions refer to them and
        to the exchange.
        """
        self._bounds.clear()
        self._buffers.clear()
        self._states.clear()
        self._weights.clear()
        self._gradients.clear()
        self.chunks.clear()
        self.sends = []
        self.bound = _NOTHING_BOUND

    def addend(self, chunk: int) -> torch.Tensor:
        """Returns what the transport's all-reduce adds up.

        A mean of 16-bit elements is divided first, since the sum could overflow.
        """
        elements = self.chunks[chunk].gather()
        if self._divides_first:
            elements.mul_(1.0 / len(self.recipe.hosts))
        return elements

    @property
    def _divides_first(self) -> bool:
        return not self.recipe.total and self.recipe.dtype in (torch.float16, torch.bfloat16)

    # Binding happens once for each phase of the codec.

    def _bind(self, codec: Codec) -> BoundTasks:
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
                    tuple((self._buffer(slot, codec), to, slot.tag) for slot, to in sends),
                    tuple((self._buffer(slot, codec), of, slot.tag) for slot, of in recvs),
                )
            )
        moved = [message for message in messages if message is not None]
        return BoundTasks(
            work=tuple(work),
            messages=tuple(messages),
            is_light=tuple(m is not None and m.is_light for m in messages),
            sent_bytes=sum(buffer.wire.nbytes for m in moved for buffer, *_ in m.sends),
            received_bytes=sum(buffer.wire.nbytes for m in moved for buffer, *_ in m.recvs),
            num_messages=sum(len(m.sends) for m in moved),
        )

    def _codec_of(self, slot: Slot, worker: Codec) -> Codec:
        if slot.kind is Kind.FRAME:
            return worker
        return worker.aggregator(slot.merged)

    def _buffer(self, slot: Slot, codec: Codec) -> Buffer:
        """Returns the memory of a slot, in the size that this phase needs."""
        chunk = self.chunks[slot.chunk]
        if slot.kind is Kind.GRADIENT:
            return self._gradients[slot.chunk]
        if slot.kind in (Kind.PLAIN, Kind.RAW):
            if slot not in self._buffers:
                dtype = self.recipe.dtype if slot.kind is Kind.RAW else torch.float32
                self._buffers[slot] = Buffer(chunk.numel, dtype, self.device, self._on_host)
            return self._buffers[slot]
        if slot not in self._buffers:
            largest = max(
                chunk.wire_bytes(self._codec_of(slot, phase))
                for _, phase in self.recipe.codec.phases
            )
            made_here = slot.rank == self.recipe.rank
            self._buffers[slot] = FrameBuffer(
                largest,
                self.device,
                self._on_host,
                # A frame that this rank only hands on keeps the stamp of the rank that made it.
                write=partial(self._stamp, slot) if made_here and slot in self._sent else None,
                check=partial(self._check, slot) if slot in self._received else None,
            )
        return self._buffers[slot].prefix(chunk.wire_bytes(self._codec_of(slot, codec)))

    def _stamp_of(self, slot: Slot) -> frame.Stamp:
        first = self._firsts[slot.chunk]
        return frame.Stamp(self.step, self.recipe.number, slot.rank, *first)

    def _stamp(self, slot: Slot, data: memoryview[Any]) -> None:
        frame.stamp(data, self._stamp_of(slot))

    def _check(self, slot: Slot, data: memoryview[Any]) -> None:
        """Refuses a frame that belongs to another slot, step, recipe or rank."""
        expected = self._stamp_of(slot)
        found = frame.other_stamp(data, expected)
        if found is not None:
            raise FrameError(
                f"rank {self.recipe.rank} received {self._described(found)} where it expects "
                f"{self._described(expected)}; make the same calls in the same order on all ranks."
            )

    def _described(self, stamp: frame.Stamp) -> str:
        recipe = self._find_recipe(stamp.plan_epoch)
        known = recipe is not None and stamp.first_gradient < len(recipe.numels)
        what = repr(recipe.tensor_title(stamp.first_gradient)) if recipe and known else "a tensor"
        return (
            f"{what} (partition {stamp.first_partition}, step {stamp.step}, recipe "
            f"{stamp.plan_epoch}, made by rank {stamp.sender})"
        )

    def _state(self, slot: Slot, coder: Codec | Bulk) -> State:
        """Returns the state for encoding a frame; all phases share one."""
        if slot not in self._states:
            chunk, recipe = self.chunks[slot.chunk], self.recipe
            shape = torch.empty(chunk.numel, device=self.device)
            stream = recipe.rank if slot.kind is Kind.FRAME else len(recipe.hosts) + recipe.rank
            if recipe.codec.shares_stream:
                stream = 0
            seeds = [self._seed_of(tensor, start) for tensor, start, _ in chunk.partitions]
            state = coder.init(shape, seed=seeds[0], stream=stream)
            bulk = coder if isinstance(coder, Bulk) else None
            if bulk is not None and "seed" in state:
                state["seed"] = torch.tensor(seeds, dtype=torch.int64, device=self.device)
            if recipe.names is not None:
                keys = [
                    Key(recipe.names[tensor], start, stop, slot.kind, slot.merged)
                    for tensor, start, stop in chunk.partitions
                ]
                self._state_store.register(keys, state, coder)
            if WEIGHT in state:
                views = [state[WEIGHT]] if bulk is None else bulk.views(state[WEIGHT])
                self._weights += [
                    (view, *part) for view, part in zip(views, chunk.partitions, strict=True)
                ]
            self._states[slot] = state
        return self._states[slot]

    def _seed_of(self, tensor: int, start: int) -> int:
        """Returns the seed of a partition, which does not depend on what travels with it."""
        names = self.recipe.names
        name = names[tensor] if names is not None else f"{tensor}"
        own = zlib.crc32(f"{name}[{start}]".encode())
        return (self._seed * 1_000_003 + own) & (2**62 - 1)

    def _read(self, slot: Slot, codec: Codec) -> Callable[[], torch.Tensor]:
        """Returns a function that gives the elements or the frame of a slot."""
        if slot.kind is Kind.GRADIENT:
            return self.chunks[slot.chunk].gather
        buffer = self._buffer(slot, codec)
        if slot in self._received and buffer.staged:
            return buffer.fetch
        memory = buffer.data
        return lambda: memory

    def _encode(self, task: Task, codec: Codec) -> Callable[[], object]:
        slot = task.writes[0]
        made_by = self._codec_of(slot, codec)
        coder = self.chunks[slot.chunk].coder(made_by)
        state = self._state(slot, coder)
        read, buffer = self._read(task.reads[0], codec), self._buffer(slot, codec)
        encode, out, publish = coder.encode, buffer.data, buffer.publish

        def run() -> None:
            encode(read(), state, out=out)
            publish()

        return run

    def _decode(self, task: Task, codec: Codec) -> Callable[[], object]:
        slot, target = task.reads[0], task.writes[0]
        chunk = self.chunks[slot.chunk]
        decode = chunk.coder(self._codec_of(slot, codec)).decode
        read = self._read(slot, codec)
        if target.kind is not Kind.GRADIENT:
            out = self._buffer(target, codec).data
            return lambda: decode(read(), out=out)
        alpha = self._alpha

        def run() -> None:
            decode(read(), out=chunk.elements, alpha=alpha)
            chunk.scatter()

        return run

    def _merge(self, task: Task, codec: Codec) -> Callable[[], object]:
        target = task.writes[0]
        chunk = self.chunks[target.chunk]
        adds = [
            self._adder(slot, weight, codec, first=k == 0)
            for k, (slot, weight) in enumerate(zip(task.reads, task.weights, strict=True))
        ]
        if target.kind is Kind.GRADIENT:
            kinds = {slot.kind for slot in task.reads}
            if kinds <= {Kind.GRADIENT, Kind.RAW} and self.recipe.dtype is torch.float32:
                return self._mean_home(chunk, [self._read(slot, codec) for slot in task.reads])
            return self._merge_home(chunk, adds)
        buffer = self._buffer(target, codec)
        if target.kind is Kind.PLAIN:
            mean = buffer.data
            return lambda: [add(mean) for add in adds]
        made_by = self._codec_of(target, codec)
        coder = chunk.coder(made_by)
        state = self._state(target, coder)
        frames = all(slot.kind is Kind.FRAME for slot in task.reads)
        if self.device.type == "cuda" and frames and not chunk.is_bulk:
            # One kernel, if there is one for these codecs.
            reads = [self._read(slot, codec) for slot in task.reads]
            same = len(set(task.weights)) == 1

            def fused() -> None:
                made_by.merge(
                    [read() for read in reads], codec, chunk.numel, state,
                    alpha=task.weights[0], out=buffer.data,
                )  # fmt: skip
                buffer.publish()

            if same:
                return fused

        def run() -> None:
            mean = scratch.take(chunk.numel, self.device)
            for add in adds:
                add(mean)
            coder.encode(mean, state, out=buffer.data)
            buffer.publish()

        return run

    def _merge_home(
        self, chunk: Chunk, adds: Sequence[Callable[[torch.Tensor], object]]
    ) -> Callable[[], object]:
        """Binds a merge that writes the gradient itself."""
        alpha = self._alpha

        def run() -> None:
            mean = scratch.take(chunk.numel, self.device)
            for add in adds:
                add(mean)
            if alpha != 1.0:
                mean.mul_(alpha)
            chunk.elements.copy_(mean)
            chunk.scatter()

        return run

    def _mean_home(
        self, chunk: Chunk, reads: Sequence[Callable[[], torch.Tensor]]
    ) -> Callable[[], object]:
        """Binds the mean of elements, added up in rank order, into the gradient itself."""
        scale = 1.0 / len(reads)

        def run() -> None:
            first, second, *rest = [read() for read in reads]
            total = torch.add(first, second, out=scratch.take(chunk.numel, self.device))
            for part in rest:
                total.add_(part)
            torch.mul(total, scale, out=chunk.elements)
            chunk.scatter()

        return run

    def _adder(
        self, slot: Slot, weight: float, codec: Codec, *, first: bool
    ) -> Callable[[torch.Tensor], object]:
        """Returns a function that adds a slot, times its weight, to a sum; `first` overwrites."""
        read = self._read(slot, codec)
        if slot.kind in (Kind.GRADIENT, Kind.PLAIN, Kind.RAW):
            if first:
                return lambda mean: mean.copy_(read()).mul_(weight)
            return lambda mean: mean.add_(read(), alpha=weight)
        decode = self.chunks[slot.chunk].coder(self._codec_of(slot, codec)).decode
        return lambda mean: decode(read(), out=mean, add=not first, alpha=weight)

    def _sum_up(self, task: Task) -> Callable[[], object]:
        """Binds what follows an all-reduce: the mean, copied to the caller's tensors."""
        chunk = self.chunks[task.chunk]
        done = self.recipe.total or self._divides_first
        scale = 1.0 if done else 1.0 / len(self.recipe.hosts)

        def run() -> None:
            if scale != 1.0:
                chunk.elements.mul_(scale)
            chunk.scatter()

        return run
