"""The engine: tensors in, their mean on every rank out.

The first synchronisation of its kind is laid out and agreed on among the ranks. Later ones only
look up the recipe and a free exchange with its buffers, and submit that to the executor.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from hipress import settings
from hipress.casync.engine.exchange import Exchange
from hipress.casync.engine.executors import Executor, OrderedExecutor
from hipress.casync.engine.handle import CallbackThreads, Handle
from hipress.casync.engine.memory import keep_for
from hipress.casync.engine.recipe import Options, Recipe, check_state, without_state
from hipress.casync.engine.state_store import StateStore
from hipress.casync.engine.transport import LinkError, Transport, connections, opened_sockets
from hipress.casync.graphs import strategies
from hipress.casync.graphs.partitions import Placement
from hipress.casync.graphs.schedules import Order
from hipress.casync.ranks.agreement import Agreement
from hipress.casync.ranks.heartbeats import Heartbeats, longest_silence_s
from hipress.casync.ranks.lost_store import in_the_store
from hipress.codecs import frame, tensors
from hipress.codecs.base import Codec
from hipress.codecs.table import codec as named_codec
from hipress.errors import AgreementError, PeerError, UsageError
from hipress.timeline import Event
from hipress.version import __version__

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


MAX_UNNAMED = 32
"""Number of recipes of unnamed calls that are kept."""

MAX_IDLE_BYTES = 2**26
"""Bytes of the buffers that are kept for unnamed calls to come; of one call if that needs more."""

LOOK_AHEAD_S = 5.0
"""A rank that waits for others looks so often for those that have gone on without it."""


@dataclass(slots=True)
class Stats:
    """What an engine has done so far."""

    num_syncs: int = 0
    gradient_bytes: int = 0
    """Bytes of the tensors that were given, as float32."""
    sent_bytes: int = 0
    """Bytes handed to the transport, headers included; an all-reduce counts what a ring sends."""
    received_bytes: int = 0
    num_messages: int = 0
    """Number of messages sent."""
    num_first_uses: int = 0
    """Number of uses of buffers and kernels that were new, for which kernels may be compiled."""


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """How long the exchange of some named tensors takes, in the mean over its uses."""

    names: tuple[str, ...]
    """The tensors that travel together."""
    coding_s: float
    """Time of all tasks of this rank that encode, decode and merge."""
    under_way_s: float
    """Time from start to end."""


@dataclass(slots=True)
class _Prepared:
    """A recipe that the ranks have agreed on, with its buffers."""

    recipe: Recipe
    exchange: Exchange | None = None
    """The only exchange of a named recipe, since it works on the state."""
    idle: list[Exchange] = field(default_factory=list)
    """The exchanges of an unnamed recipe that are not running."""
    num_uses: int = 0
    last: Handle | None = None
    """The last use of a named recipe."""


class Engine:
    """Synchronises tensors among the ranks of a transport.

    Args:
        transport: Used by this engine only.
        store: Shared by exactly these ranks; used for agreement and heartbeats.
        device: Where tensors will be.
        options: The same on all ranks.
        timeout_s: How long a rank may be late.
        seed: Feeds the random numbers of codecs; the same on all ranks.
        host: The name of this rank's host; the machine's if None.

    Example:
        >>> from torch.distributed import HashStore
        >>> from hipress.casync.engine.loopback import Hub, Loopback
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
        self.timeout_s = timeout_s
        self.is_closed = False
        self.on_lost: Callable[[BaseException], None] = lambda error: None
        """Called from another thread when a rank is gone."""
        self.states = StateStore()
        """The memory of the codecs of named tensors."""
        self._seed = seed
        self._recipes: dict[tuple[Any, ...], _Prepared] = {}
        self._idle: dict[Exchange, _Prepared] = {}
        """The exchanges of unnamed recipes that are not running, the last used at the end."""
        self._idle_bytes = 0
        self._names: dict[str, tuple[Any, ...]] = {}
        """The key of the recipe of each named tensor."""
        self._steps: dict[tuple[str, ...], int] = {}
        self._sequence = 0
        self._turn = 0
        self._scheduled_step: int | None = None
        """The step of the last exchange that a schedule gave an order."""
        self._callback_threads = CallbackThreads()
        self._num_agreed = 0
        self._lock = threading.Lock()
        self._agreeing = threading.Lock()
        """Held while ranks agree: callbacks of futures may start exchanges on other threads."""
        self._if_skipped = ""
        """What to say of a rank that goes on without the comparison that this rank waits in."""
        self._ahead: list[int] = []
        """Ranks that had gone on when this rank looked last."""
        self._next_look = 0.0
        self._process = os.getpid()
        self._agreement = Agreement(
            store, transport.rank, transport.num_ranks, timeout_s, self._check_alive
        )
        told = self._agreement.agree(
            "the start", self._facts(), share=[host or socket.gethostname(), secrets.token_hex(4)]
        )
        names = [name for name, _ in told]
        self.job: str = told[0][1]
        """Tells this engine from all others; the same on all its ranks."""
        known = {name: k for k, name in enumerate(dict.fromkeys(names))}
        self.hosts = tuple(known[name] for name in names)
        with in_the_store(transport.rank), opened_sockets() as made:
            beating = store.clone() if hasattr(store, "clone") else store
        silence_s = longest_silence_s(timeout_s, transport.num_lost_peers())
        connections(made, timeout_s=silence_s)
        self._heartbeats = Heartbeats(
            beating,
            transport.rank,
            transport.num_ranks,
            timeout_s,
            on_failure=self._fail,
            progress=lambda: self._sequence,
            num_lost_peers=transport.num_lost_peers,
        )
        self.executor: Executor | OrderedExecutor
        if transport.ordered:
            self.executor = OrderedExecutor(transport, self.device, self._heartbeats.explain)
        else:
            num_local_ranks = self.hosts.count(self.hosts[transport.rank])
            self.executor = Executor(
                transport,
                self.device,
                self._heartbeats.explain,
                settings.exchange_threads(num_local_ranks),
                self.options.credit_bytes,
            )
            if self.options.credit_bytes is not None:
                transport.keep_unsent_small()

    def allreduce(
        self,
        values: Sequence[torch.Tensor],
        *,
        codec: str | Codec = "none",
        strategy: str = "ps",
        name: str | None = None,
        names: Sequence[str] | None = None,
        placements: Sequence[tuple[Placement, ...]] | None = None,
        step: int | None = None,
        total: bool = False,
        lr_ratio: float | None = None,
        weights: Sequence[torch.Tensor] | None = None,
        loss_scale: float = 1.0,
        order: Order | None = None,
    ) -> Handle:
        """Starts to replace tensors by their mean over all ranks, in place.

        Args:
            values: Tensors of one dtype on this engine's device; all ranks must give the same
                number, shapes and dtype.
            codec: A codec or the expression of one.
            strategy: A name of `strategies.STRATEGIES`.
            name: Key of the codec's state; without it there is no state and no error feedback.
            names: One key for each tensor instead. With `placements` a tensor keeps its state when
                it travels with other tensors than before.
            placements: For each tensor its partitions and their routes (see `Partitioner`).
            step: Step of training; counted for each name if None.
            total: Compute the sum instead of the mean.
            lr_ratio: The last step's learning rate over this one's, for codecs with momentum.
            weights: The parameters, flat, for codecs that decay them.
            loss_scale: The factor that the tensors carry, the same on all ranks; it applies to
                options of codecs in units of the gradient (see `Codec.scaled`).
            order: Its places among the exchanges of this step, which must be given. More urgent
                ones then overtake it, the same way on all ranks; a transport without tags, whose
                messages need one order, ignores it.
        """
        self._check_process()
        self.executor.check()
        if names is None and name is not None:
            alone = len(values) == 1
            names = (name,) if alone else tuple(f"{name}[{k}]" for k in range(len(values)))
        named = None if names is None else tuple(names)
        prepared = self._prepared(values, codec, strategy, named, placements, total)
        if prepared.last is not None:
            prepared.last.wait_ended()  # its exchange and its state are in use
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
            if order is None or step != self._scheduled_step:
                self._turn += 1
                self._scheduled_step = step if order is not None else None
            turn = self._turn
            use = prepared.num_uses
            prepared.num_uses += 1
        exchange = self._exchange_for(prepared)
        exchange.turn, exchange.order = turn, order
        if step is None:
            step = use
            if named is not None:
                step = self._steps.get(named, 0)
                self._steps[named] = step + 1
        flats = [value.detach().contiguous().view(-1) for value in values]
        exchange.prepare(
            flats, sequence, use, step, lr_ratio=lr_ratio, weights=weights, loss_scale=loss_scale
        )
        return self._start(prepared, exchange, values, flats)

    def agree(
        self, what: str, facts: dict[str, Any], share: Any = None, *, skipped: str = ""
    ) -> list[Any]:
        """Compares facts among all ranks; returns what each rank shares (see `Agreement.agree`).

        Args:
            what: Names the call in errors.
            facts: Values that must be equal, by name.
            share: A value that need not be equal.
            skipped: Ends the error that names ranks which start the next exchange and do not come.
                Only where all ranks have started the same exchanges before.
        """
        self._check_process()
        self.executor.check()
        with self._agreeing:
            self._if_skipped, self._ahead, self._next_look = skipped, [], 0.0
            try:
                return self._agreement.agree(what, facts, share=share)
            finally:
                self._if_skipped = ""

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns the payload of each rank, in rank order, on rank 0; nothing on the others."""
        self._check_process()
        return self._agreement.gather(payload)

    def post(self, number: int, text: str) -> None:
        """Leaves a text of rank 0 for the other ranks without waiting (see `Agreement.post`)."""
        self._check_process()
        self._agreement.post(number, text)

    def read_post(self, number: int, what: str) -> str:
        """Returns what rank 0 has posted; raises PeerError if it did not in time, or is gone."""
        self._check_process()
        self.executor.check()
        return self._agreement.read_post(number, what)

    def explain(self, error: RuntimeError) -> BaseException:
        """Returns the error to raise for one of torch in a collective call among these ranks."""
        self._check_process()
        return self._heartbeats.explain(LinkError(str(error)))

    def give_up(self, error: Exception) -> None:
        """Tells the other ranks that this one has failed; within about a second their waits end
        with a PeerError that names it."""
        if self._is_own:
            self._heartbeats.explain(error)

    def wait_idle(self) -> None:
        """Waits until no named exchange is running, so that `states` may be read and written."""
        for prepared in list(self._recipes.values()):
            if prepared.last is not None:
                prepared.last.wait_ended()

    def resize(self, slice_bytes: int, credit_bytes: int) -> None:
        """Changes the sizes of a schedule's messages for tensors that are unknown, or forgotten."""
        self.options = replace(self.options, slice_bytes=slice_bytes, credit_bytes=credit_bytes)
        self.executor.rearrange(credit_bytes)

    def forget(self, names: Iterable[str]) -> None:
        """Drops everything about some named tensors, their state included."""
        for name in names:
            self._drop(self._names.get(name))
            self.states.forget(name)

    def recipe(self, name: str) -> Recipe:
        """Returns the recipe of a named tensor that was synchronised before."""
        return self._recipes[self._names.get(name) or self._names[f"{name}[0]"]].recipe

    @property
    def num_recipes(self) -> int:
        """Number of recipes that were made so far, also of those that were dropped."""
        return self._num_agreed

    def exchange_times(self) -> dict[str, ExchangeTimes]:
        """Returns how long the exchanges of named tensors take, by name."""
        found = {}
        for prepared in list(self._recipes.values()):
            names, exchange = prepared.recipe.names, prepared.exchange
            if names is not None and exchange is not None and exchange.num_done:
                times = ExchangeTimes(
                    names=names,
                    coding_s=exchange.coding_ns / exchange.num_done / 1e9,
                    under_way_s=exchange.under_way_ns / exchange.num_done / 1e9,
                )
                found.update(dict.fromkeys(names, times))
        return found

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers of named exchanges, and of idle unnamed ones, without the state of
        codecs."""
        with self._lock:
            recipes = list(self._recipes.values())  # other threads may add some
            named = [one.exchange for one in recipes if one.exchange is not None]
            return sum(exchange.num_bytes for exchange in (*named, *self._idle))

    def record(self) -> list[Event]:
        """Starts to record tasks; returns the list that they are appended to."""
        if self.executor.events is None:
            self.executor.events = []
        return self.executor.events

    def stop_recording(self) -> None:
        """Stops the recording that `record` started."""
        self.executor.events = None

    def clock_offset(self) -> tuple[int, int]:
        """Returns the offset of this rank's clock to rank 0's, and its error bound, in ns."""
        self._check_process()
        return self._agreement.clock_offset()

    def close(self) -> None:
        """Ends the engine; its exchanges must be done.

        In a process that was forked it does nothing: the connections are those of its parent.
        """
        if not self._is_own or self.is_closed:
            return
        self.is_closed = True
        if not isinstance(threading.current_thread(), threading._DummyThread):
            self._close()
            return
        # A thread of gloo may free the last tensor, and so whoever owns this engine. The group that
        # it belongs to would join it, which aborts the process.
        with suppress(RuntimeError):  # at the end of Python no thread starts any more
            threading.Thread(target=self._close, name="hipress-close").start()

    def _close(self) -> None:
        self._heartbeats.close()
        ended = self.executor.close()
        self._callback_threads.close()
        if ended:
            self.transport.close()

    @property
    def _is_own(self) -> bool:
        """Whether this process made the engine; one that was forked later did not."""
        return os.getpid() == self._process

    def _check_process(self) -> None:
        if not self._is_own:
            raise UsageError(
                f"process {os.getpid()} was forked from process {self._process} and cannot "
                "exchange through its connections; call hipress in the process that is the rank, "
                "not in workers that it forks."
            )

    def _start(
        self,
        prepared: _Prepared,
        exchange: Exchange,
        values: Sequence[torch.Tensor],
        flats: Sequence[torch.Tensor],
    ) -> Handle:
        stream = self.executor.stream
        handle = Handle(values, stream, self._callback_threads)
        pairs = zip(values, flats, strict=True)
        apart = [(value.detach(), flat) for value, flat in pairs if not value.is_contiguous()]
        # Python drops them when all is enqueued, and the stream may still be at work then.
        keep_for(stream, [*values, *(flat for _, flat in apart)])

        def on_done(error: BaseException | None) -> None:
            try:
                for value, flat in apart if error is None else ():
                    value.copy_(flat.view(value.shape))
            except BaseException as problem:  # the caller that waits must get it
                error = problem
            exchange.release()
            if error is None and exchange.recipe.names is None:
                exchange.last_use = None if stream is None else stream.record_event()
                self._keep_idle(prepared, exchange)
            handle.end(error)

        exchange.on_done = on_done
        if exchange.recipe.names is not None:
            prepared.last = handle
        self._count(exchange)
        ready = None
        if stream is not None:
            # blocking: a thread that waits for it leaves the core to others.
            ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self.device))
        try:
            self.executor.submit(exchange, ready)
        except BaseException as error:
            on_done(error)
            raise
        return handle

    def _check_alive(self) -> None:
        """Raises if a rank is known to be gone, or not to come."""
        if (executor := getattr(self, "executor", None)) is not None:
            executor.check()
            self._heartbeats.check()
            if self._if_skipped:
                self._check_ahead()

    def _check_ahead(self) -> None:
        """Raises if ranks have gone on without the comparison that this rank waits in."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_AHEAD_S
        # Those of the last look: had they compared, the verdict would have come here since.
        try:
            ahead, self._ahead = self._ahead, self._heartbeats.ahead()
        except RuntimeError:
            return  # the thread of the heartbeat reports a store that stays away
        if ahead:
            who = f"{'rank' if len(ahead) == 1 else 'ranks'} {', '.join(map(str, ahead[:8]))}"
            error = AgreementError(
                f"{who} began the next exchange {self._if_skipped}", ranks=tuple(ahead)
            )
            self.give_up(error)
            raise error

    def _fail(self, error: BaseException) -> None:
        if (executor := getattr(self, "executor", None)) is not None:
            executor.fail(error)
        self.on_lost(error)

    def _count(self, exchange: Exchange) -> None:
        stats = self.stats
        stats.num_syncs += 1
        stats.gradient_bytes += 4 * sum(exchange.recipe.numels)
        sent, received = exchange.bound.sent_bytes, exchange.bound.received_bytes
        if exchange.recipe.is_plain:
            # What an all-reduce sends at least; the rings of gloo and NCCL do not send more.
            num_ranks = self.transport.num_ranks
            element = torch.empty(0, dtype=exchange.recipe.dtype).element_size()
            numel = sum(exchange.recipe.numels)
            sent = received = 2 * (num_ranks - 1) * element * numel // num_ranks
        stats.sent_bytes += sent
        stats.received_bytes += received
        stats.num_messages += exchange.bound.num_messages
        stats.num_first_uses += exchange.is_first_use

    def _exchange_for(self, prepared: _Prepared) -> Exchange:
        """Returns an exchange that is not running; makes one if there is none."""
        exchange = prepared.exchange
        if exchange is not None:
            if prepared.last is not None:
                exchange.last_use = prepared.last.event
            return exchange
        with self._lock:
            if prepared.idle:
                exchange = prepared.idle.pop()
                del self._idle[exchange]
                self._idle_bytes -= exchange.num_bytes
                return exchange
        exchange = Exchange(
            prepared.recipe,
            self.states,
            on_host=not self.transport.on_device,
            seed=self._seed,
            find_recipe=self._find_recipe,
        )
        if prepared.recipe.names is not None:
            prepared.exchange = exchange
        return exchange

    def _keep_idle(self, prepared: _Prepared, exchange: Exchange) -> None:
        """Keeps an exchange for the next call of its kind; drops others that were used before it.

        What to keep is each rank's own affair: exchanges hold buffers, recipes what was agreed on.
        """
        with self._lock:
            prepared.idle.append(exchange)
            self._idle[exchange] = prepared
            self._idle_bytes += exchange.num_bytes
            if self._idle_bytes > MAX_IDLE_BYTES:
                for old in list(self._idle)[:-1]:
                    self._free_idle(old)
                    if self._idle_bytes <= MAX_IDLE_BYTES:
                        break

    def _free_idle(self, exchange: Exchange) -> None:
        """Frees the buffers of an idle exchange, unless a GPU still reads them."""
        event: Any = exchange.last_use
        if event is None or event.query():
            self._idle.pop(exchange).idle.remove(exchange)
            self._idle_bytes -= exchange.num_bytes
            exchange.free()

    def _find_recipe(self, number: int) -> Recipe | None:
        """Returns the recipe with a number, unless it was dropped."""
        found = (one.recipe for one in list(self._recipes.values()) if one.recipe.number == number)
        return next(found, None)

    def _prepared(
        self,
        values: Sequence[torch.Tensor],
        codec: str | Codec,
        strategy: str,
        names: tuple[str, ...] | None,
        placements: Sequence[tuple[Placement, ...]] | None,
        total: bool,
    ) -> _Prepared:
        if not values:
            raise UsageError("allreduce was given no tensor; give at least one.")
        first = values[0]
        numels = tuple(value.numel() for value in values)
        text = codec if isinstance(codec, str) else codec.name
        key = (names, numels, first.dtype, first.device, text, strategy, total)
        prepared = self._recipes.get(key)
        if prepared is not None and all(
            v.dtype == first.dtype and v.device == first.device for v in values
        ):
            return prepared
        with self._agreeing:
            return self._new_prepared(key, values, codec, strategy, names, placements, total)

    def _new_prepared(
        self,
        key: tuple[Any, ...],
        values: Sequence[torch.Tensor],
        codec: str | Codec,
        strategy: str,
        names: tuple[str, ...] | None,
        placements: Sequence[tuple[Placement, ...]] | None,
        total: bool,
    ) -> _Prepared:
        """Checks the tensors of a call, makes its recipe, and agrees on that with other ranks."""
        first = values[0]
        known = strategies.get(strategy)
        made = named_codec(codec) if isinstance(codec, str) else codec
        if names is None:
            made = without_state(made)
        check_state(made)
        for value in values:
            _check(value, first, self.device, plain=known.sums_in_transport(made.name))
        if not first.is_floating_point() and not total:
            raise UsageError(
                f"the mean of {first.dtype} values need not be a whole number; use op='sum', or "
                "convert the tensor to a floating-point dtype."
            )
        if key in self._recipes:  # another thread was first
            return self._recipes[key]
        recipe = Recipe(
            name=_title(names),
            names=names,
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
            placements=None if placements is None else tuple(placements),
        )
        replaced = self._replaced(recipe)
        what = f"allreduce of {recipe.name!r}" if recipe.name else "an allreduce"
        self._agreement.agree(what, recipe.facts())
        self._num_agreed += 1
        for old in replaced:
            self._drop(old)
        self._recipes[key] = prepared = _Prepared(recipe)
        if names is not None:
            self._names.update(dict.fromkeys(names, key))
        else:
            self._forget_old()
        return prepared

    def _replaced(self, recipe: Recipe) -> set[tuple[Any, ...]]:
        """Returns the keys of recipes that a new one replaces; refuses changed tensors."""
        names = recipe.names or ()
        if len(set(names)) != len(names):
            raise UsageError(
                f"two tensors of one call have the same name: {sorted(names)}; rename one."
            )
        found = set()
        for index, name in enumerate(names):
            if name not in self._names:
                continue
            old = self._recipes[self._names[name]].recipe
            changed = _changed(old, recipe, name, index)
            if changed:
                raise UsageError(
                    f"name {name!r} was used before with another {' and '.join(changed)}; it keys "
                    "the codec's state: give another name, or the same tensors and codec."
                )
            found.add(self._names[name])
        return found

    def _drop(self, key: tuple[Any, ...] | None) -> None:
        """Drops a named recipe and its buffers; the memory of its codecs stays."""
        if key is None:
            return
        prepared = self._recipes[key]
        if prepared.last is not None:
            prepared.last.wait_ended()
        del self._recipes[key]
        if prepared.exchange is not None:
            prepared.exchange.free()
        for name in prepared.recipe.names or ():
            if self._names.get(name) == key:
                del self._names[name]

    def _forget_old(self) -> None:
        """Drops all but the latest recipes of unnamed calls, whose sizes may never come again."""
        unnamed = [key for key, one in self._recipes.items() if one.recipe.names is None]
        for key in unnamed[:-MAX_UNNAMED]:
            prepared = self._recipes.pop(key)
            with self._lock:
                for exchange in list(prepared.idle):
                    self._free_idle(exchange)

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
            "elements of a chunk": self.options.chunk_numel,
            "compression on the CPU": self.options.compress_on_cpu,
            "slice_bytes": self.options.slice_bytes,
            "credit_bytes": self.options.credit_bytes,
            "seed": self._seed,
        }


def _title(names: Sequence[str] | None) -> str:
    """Returns the title of a recipe: the name that its tensors share, or the first and a count."""
    if not names:
        return ""
    if len(names) == 1:
        return names[0]
    shared = names[0].removesuffix("[0]")
    if all(name == f"{shared}[{k}]" for k, name in enumerate(names)):
        return shared
    return f"{names[0]} and {len(names) - 1} more"


def _changed(old: Recipe, new: Recipe, name: str, index: int) -> list[str]:
    """Returns what has changed, so that a tensor cannot take its state into another recipe."""
    before, now = old.facts(), new.facts()
    before_at = (old.names or ()).index(name)
    if not (old.keeps_state and new.keeps_state):
        return []
    if old.placements is None or new.placements is None:
        return [fact for fact, value in now.items() if value != before[fact]]
    same = ("codec", "codec program", "strategy", "operation", "dtype")
    changed = [fact for fact in same if before[fact] != now[fact]]
    if old.placements[before_at] != new.placements[index]:
        changed.append("number of elements or place")
    return changed


def _check(value: torch.Tensor, first: torch.Tensor, device: torch.device, plain: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"allreduce was given a {type(value).__name__}; give torch.Tensors.")
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
