"""The engine: tensors in, their mean on every rank out.

Before the first step of its kind a synchronisation is laid out and agreed on; after that things
are only looked up: the recipe, a free job with its buffers, and off it goes to the executor.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hipress import settings
from hipress.casync import strategies
from hipress.casync.agree import Council
from hipress.casync.executor import Executor
from hipress.casync.graph import Slot
from hipress.casync.handle import Handle, Settler
from hipress.casync.health import Health
from hipress.casync.job import Job
from hipress.casync.ordered import OrderedExecutor
from hipress.casync.recipe import Options, Recipe, forgetful
from hipress.casync.transport import Transport
from hipress.codecs import frame, tensors
from hipress.codecs.base import Codec, State
from hipress.codecs.table import codec as named_codec
from hipress.errors import PeerError, UsageError
from hipress.timeline import Event
from hipress.version import __version__

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


MAX_UNNAMED = 32
"""Recipes of unnamed calls that are kept, each with its buffers."""


@dataclass(slots=True)
class Stats:
    """What an engine has done so far."""

    num_syncs: int = 0
    gradient_bytes: int = 0
    """Of the tensors that were given, as float32."""
    sent_bytes: int = 0
    """Handed to the transport, headers of frames among them; not what an all-reduce sends."""
    received_bytes: int = 0
    num_messages: int = 0
    """Sent."""


class Engine:
    """Synchronises tensors among the ranks of a transport.

    Args:
        transport: Nobody else uses it.
        store: Shared by exactly these ranks; used for agreement and heartbeats.
        device: Where tensors will be.
        options: The same on all ranks.
        timeout_s: How long a rank may be late.
        seed: Feeds the random numbers of codecs; the same on all ranks.
        host: The name of this rank's host; the machine's if None.

    Example:
        >>> from torch.distributed import HashStore
        >>> from hipress.casync.loopback import Hub, Loopback
        >>> engine = Engine(Loopback(Hub(1), 0), HashStore())
        >>> x = torch.ones(4)
        >>> engine.allreduce([x], codec="none").wait(); x
        tensor([1., 1., 1., 1.])
        >>> engine.close()
    """

    def __init__(
        self,
        transport: Transport,
        store: Store,
        *,
        device: torch.device | str = "cpu",
        options: Options | None = None,
        timeout_s: float = 60.0,
        seed: int = 0,
        host: str | None = None,
    ) -> None:
        self.transport = transport
        self.device = torch.device(device)
        self.options = options or Options()
        self.stats = Stats()
        self._seed = seed
        self._recipes: dict[tuple[Any, ...], Recipe] = {}
        self._names: dict[str, Recipe] = {}
        self._free: dict[tuple[Any, ...], list[Job]] = {}
        self._busy: dict[str, Handle] = {}
        self._states: dict[str, dict[Slot, State]] = {}
        self._steps: dict[str, int] = {}
        self._codecs: dict[tuple[str, bool], Codec] = {}
        self._sequence = 0
        self._settler = Settler()
        self._num_agreed = 0
        self._lock = threading.Lock()
        self._council = Council(store, transport.rank, transport.num_ranks, timeout_s)
        names = self._council.agree("the start", self._facts(), told=host or socket.gethostname())
        known = {name: k for k, name in enumerate(dict.fromkeys(names))}
        self.hosts = tuple(known[name] for name in names)
        self._health = Health(
            store.clone() if hasattr(store, "clone") else store,
            transport.rank,
            transport.num_ranks,
            timeout_s,
            on_failure=self._fail,
        )
        self.executor: Executor | OrderedExecutor
        if transport.ordered:
            self.executor = OrderedExecutor(transport, self.device, self._health.explain)
        else:
            num_local_ranks = self.hosts.count(self.hosts[transport.rank])
            self.executor = Executor(
                transport,
                self.device,
                self._health.explain,
                settings.exchange_threads(num_local_ranks),
            )

    def allreduce(
        self,
        values: Sequence[torch.Tensor],
        *,
        codec: str | Codec = "none",
        strategy: str = "ps",
        name: str | None = None,
        total: bool = False,
    ) -> Handle:
        """Starts to replace tensors by their mean over all ranks, in place.

        Args:
            values: Of one dtype, on this engine's device; the same on all ranks but for what
                they hold.
            codec: An expression, or a codec.
            strategy: `ps`, `ring`, `hierarchical` or `allreduce`.
            name: Keys the codec's state, and so its error feedback; without it there is none.
            total: The sum instead of the mean.
        """
        self.executor.check()
        recipe, key = self._recipe(values, codec, strategy, name, total)
        if name is not None and (before := self._busy.get(name)) is not None:
            before.wait()  # its state is in use
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
            free = self._free.setdefault(key, [])
            job = free.pop() if free else None
        if job is None:
            states = {} if name is None else self._states.setdefault(name, {})
            on_host = not self.transport.on_device
            job = Job(recipe, states, on_host=on_host, seed=self._seed)
        step = sequence
        if name is not None:
            step = self._steps.get(name, 0)
            self._steps[name] = step + 1
        return self._start(job, key, values, sequence, step)

    def recipe(self, name: str) -> Recipe:
        """What is done in the synchronisation of a name; it has been used before."""
        return self._names[name]

    def record(self) -> list[Event]:
        """Records tasks from now on; what has been recorded so far is in the list returned."""
        if self.executor.events is None:
            self.executor.events = []
        return self.executor.events

    def close(self) -> None:
        """Ends the engine; its jobs must be done."""
        self._health.close()
        self.executor.close()
        self._settler.close()

    def _start(
        self,
        job: Job,
        key: tuple[Any, ...],
        values: Sequence[torch.Tensor],
        sequence: int,
        step: int,
    ) -> Handle:
        stream = self.executor.stream
        handle = Handle(values, stream, self._settler)
        originals = [value.detach() for value in values]
        flats = [value.contiguous().view(-1) for value in originals]
        apart = [
            (value, flat)
            for value, flat in zip(originals, flats, strict=True)
            if not value.is_contiguous()
        ]

        def on_done(error: BaseException | None) -> None:
            try:
                for value, flat in apart if error is None else ():
                    value.copy_(flat.view(value.shape))
            except BaseException as problem:  # whoever waits must hear of it
                error = problem
            job.let_go()
            handle.end(error)
            if error is None:
                job.last_use = handle.event
                with self._lock:
                    if key in self._free:
                        self._free[key].append(job)
            if job.recipe.name is not None:
                self._busy.pop(job.recipe.name, None)

        job.begin(flats, sequence, step)
        job.on_done = on_done
        if job.recipe.name is not None:
            self._busy[job.recipe.name] = handle
        self._count(job)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            self.executor.submit(job)
        except BaseException as error:
            on_done(error)
            raise
        return handle

    def _fail(self, error: BaseException) -> None:
        if (executor := getattr(self, "executor", None)) is not None:
            executor.fail(error)

    def _count(self, job: Job) -> None:
        stats = self.stats
        stats.num_syncs += 1
        stats.gradient_bytes += 4 * sum(job.recipe.numels)
        stats.sent_bytes += job.bound.sent_bytes
        stats.received_bytes += job.bound.received_bytes
        stats.num_messages += job.bound.num_messages

    def _recipe(
        self,
        values: Sequence[torch.Tensor],
        codec: str | Codec,
        strategy: str,
        name: str | None,
        total: bool,
    ) -> tuple[Recipe, tuple[Any, ...]]:
        if not values:
            raise UsageError("allreduce was given no tensor; give at least one.")
        numels = tuple(value.numel() for value in values)
        text = codec if isinstance(codec, str) else codec.name
        key = (name, numels, values[0].dtype, values[0].device, text, strategy, total)
        recipe = self._recipes.get(key)
        if recipe is None or any(
            v.dtype != recipe.dtype or v.device != recipe.device for v in values
        ):
            recipe = self._new_recipe(key, values, codec, strategy, name, total)
        return recipe, key

    def _new_recipe(
        self,
        key: tuple[Any, ...],
        values: Sequence[torch.Tensor],
        codec: str | Codec,
        strategy: str,
        name: str | None,
        total: bool,
    ) -> Recipe:
        strategies.check(strategy)
        made = named_codec(codec) if isinstance(codec, str) else codec
        if name is None:
            made = forgetful(made)
        first = values[0]
        for value in values:
            _check(value, first, self.device, plain=made.name == "none" and strategy == "allreduce")
        if not first.is_floating_point() and not total:
            raise UsageError(
                f"the mean of {first.dtype} is no whole number; ask for op='sum', or convert."
            )
        recipe = Recipe(
            name=name,
            numels=tuple(value.numel() for value in values),
            dtype=first.dtype,
            device=first.device,
            codec=made,
            strategy=strategy,
            total=total,
            rank=self.transport.rank,
            hosts=self.hosts,
            ordered=self.transport.ordered,
            number=self._num_agreed + 1,
            options=self.options,
        )
        if name is not None and name in self._names:
            old = self._names[name].facts()
            changed = [k for k, v in recipe.facts().items() if v != old[k]]
            raise UsageError(
                f"name {name!r} was used before with another {' and '.join(changed)}; it keys the "
                "codec's state: give another name, or the same tensors and codec."
            )
        self._council.agree(f"allreduce of {name!r}" if name else "an allreduce", recipe.facts())
        self._num_agreed += 1
        self._recipes[key] = recipe
        if name is not None:
            self._names[name] = recipe
        else:
            self._forget_old()
        return recipe

    def _forget_old(self) -> None:
        """Drops what unnamed calls left, but for the latest: their sizes may never come again."""
        unnamed = [key for key, recipe in self._recipes.items() if recipe.name is None]
        for key in unnamed[:-MAX_UNNAMED]:
            del self._recipes[key]
            with self._lock:
                self._free.pop(key, None)

    def _facts(self) -> dict[str, Any]:
        return {
            "version of hipress": __version__,
            "version of torch": torch.__version__.split("+")[0],
            "version of frames": frame.VERSION,
            "byte order": sys.byteorder,
            "number of ranks": self.transport.num_ranks,
            "kind of device": self.device.type,
            "pipelining": self.options.pipelined,
            "bulk": self.options.bulk,
            "elements of a piece": self.options.piece_numel,
            "compression on the CPU": self.options.compress_on_cpu,
            "seed": self._seed,
        }


def _check(value: torch.Tensor, first: torch.Tensor, device: torch.device, plain: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"allreduce was given a {type(value).__name__}; it takes torch.Tensors.")
    if value.dtype != first.dtype:
        raise UsageError(
            f"allreduce was given tensors of {first.dtype} and {value.dtype}; those of one call "
            "must have one dtype: make a call for each."
        )
    if value.device != first.device or value.device.type != device.type:
        raise UsageError(
            f"a tensor is on {value.device}, where {first.device} is expected; move it."
        )
    if any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)):
        raise UsageError(
            "the tensor is expanded, so that several elements share memory and cannot be written; "
            "give tensor.contiguous()."
        )
    if not (plain and value.layout is torch.strided):
        tensors.storage(value, "the tensor")


__all__ = ["Engine", "Handle", "Options", "PeerError", "Stats"]
