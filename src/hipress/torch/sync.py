"""The exchange of one model's gradients: what DDP calls for every bucket of every step.

    first bucket    a step begins: the loss scale, the learning rate, the replica check
    every bucket    its gradients go to the engine, grouped by what is decided for them
    last bucket     DDP waits for all and hands the means out; then the step ends

DDP takes one hook, once. So all that changes during a run (warm-up, `detach`, the plans of `auto`)
changes in here.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hipress import settings as hipress_settings
from hipress.casync.engine.engine import Engine, Options
from hipress.casync.engine.handle import joint
from hipress.casync.engine.recipe import chunk_numel
from hipress.casync.graphs.partitions import Partitioner, Placement
from hipress.errors import UsageError
from hipress.plan import Plan
from hipress.session import checkpoint, replicas, selection
from hipress.session.auto import Auto
from hipress.session.buckets import Gradient, Group, flat, grouped
from hipress.session.selection import NONE, Rules
from hipress.session.stats import Stats, log_line, write_scalars
from hipress.session.world import engine_of
from hipress.torch import optimizer_checks
from hipress.torch.trace import Tracer, check_path
from hipress.torch.watchdog import Watchdog

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket, ProcessGroup

_log = logging.getLogger("hipress")

Future = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for besides codecs."""

    warmup_steps: int = 0
    check_every: int = 0
    log_every: int = 0
    writer: Any = None
    optimizer: torch.optim.Optimizer | None = None
    scaler: Any = None
    seed: int = 0
    finds_unused: bool = False
    """Whether some parameters may take no part in a step."""
    bucket_numel: int = 25 * 2**18
    """Elements of a DDP bucket, as far as it is known."""


class Sync:
    """Exchanges the gradients of one model; made by `hipress.attach` or `comm_hook`.

    Also a `Stateful` of torch.distributed.checkpoint.
    """

    def __init__(
        self, rules: Rules, settings: Settings, group: ProcessGroup | None, *, enabled: bool = True
    ) -> None:
        self.enabled = enabled
        """Off: the gradients are left to DDP."""
        self.step = 0
        """Steps done."""
        self.rules = rules
        self.settings = settings
        self.process_group = group
        self.gradients: dict[str, Gradient] = {}
        """By name, those that a codec works on and those that are left alone."""
        self.owed: dict[str, torch.Tensor] = {}
        """What each rank must add to its next gradient, the same on all."""
        self.scale = 1.0
        """The loss scale that the codecs' memory is in."""
        self.loaded: dict[str, Any] | None = None
        """A checkpoint, until the step after it is done."""
        self.others: frozenset[str] = frozenset()
        """Parameters without a gradient: frozen, or ignored by DDP."""
        self.sparse: frozenset[str] = frozenset()
        """Gradients that torch exchanges as they are."""
        self.auto: Auto | None = None
        """Decides from step to step, where nobody else did."""
        self._by_parameter: dict[int, Gradient] = {}
        self._dealer: Partitioner | None = None
        self._engine: Engine | None = None
        self._tracer: Tracer | None = None
        self._module: weakref.ref[nn.Module] | None = None
        self._buckets: dict[int, tuple[tuple[int, ...], list[Group]]] = {}
        self.rates: dict[str, float] = {}
        """The learning rate of the last step, by gradient."""
        self._lr_ratios: dict[str, float] = {}
        self._plain_bytes = 0
        self._flushes = False
        self._detached = False
        self._failure: BaseException | None = None
        self._watchdog = Watchdog(hipress_settings.timeout_s())
        self._under_way: list[tuple[list[Group], torch.Tensor]] = []
        """The buckets of this step."""

    def __repr__(self) -> str:
        compressed = sum(gradient.is_compressed for gradient in self.gradients.values())
        return (
            f"<Sync: {compressed} of {len(self.gradients)} gradients compressed, step {self.step}"
            f"{'' if self.enabled else ', not enabled'}{', detached' if self._detached else ''}>"
        )

    # --- the public face --------------------------------------------------------------------------

    def stats(self) -> Stats:
        """What has been sent so far, how long it took, and what was left alone."""
        return Stats.of(self)

    def state_dict(self) -> dict[str, Any]:
        """All ranks' memory, complete on every rank; collective. Loads with weights_only=True."""
        state = checkpoint.save(self)
        return state if self.auto is None else self.auto.saved(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where another run stopped, with any number of ranks; collective."""
        checkpoint.load(self, state_dict)

    def detach(self) -> None:
        """Sends what the residuals hold with the next gradients, then leaves plain all-reduce.

        Collective. Between two steps; the model's hook stays, and does what DDP does.
        """
        if not self.enabled or self._detached or self._flushes:
            return
        if self._engine is not None:
            self._engine.agree("detach", {"step": self.step})
        if self.auto is not None:
            self.auto.stop()
        self._flushes = True

    def timeline(self, path: str, steps: int = 10) -> None:
        """Records the next steps on all ranks; rank 0 writes them for Perfetto. Collective.

        Args:
            path: Of the JSON file; open it at https://ui.perfetto.dev.
            steps: How many.
        """
        if self._detached:
            raise UsageError("this exchange is detached; there is nothing to record.")
        engine = self.engine
        module = self.module
        if module is None:
            raise UsageError("timeline needs the model, which a bare hook does not know; attach.")
        problem = None
        try:
            if engine.transport.rank == 0:
                check_path(path)
        except UsageError as error:
            problem = str(error)
        problem = engine.agree("timeline", {"steps": steps}, share=problem)[0]
        if problem is not None:
            raise UsageError(problem)
        if self._tracer is None:
            self._tracer = Tracer(module, engine, engine.gather, engine.clock_offset)
        self._tracer.begin(path, steps)

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None: there is none, or `auto` leaves all to plain all-reduce."""
        return self.rules.plan if self.auto is None else self.auto.plan

    @property
    def skipped(self) -> dict[str, str]:
        """Gradients that are sent as they are, and why."""
        found = selection.skipped({name: g.choice for name, g in self.gradients.items()})
        return found if self.auto is None else self.auto.skipped(found)

    @property
    def module(self) -> nn.Module | None:
        """The DDP model, while there is one and it is known."""
        return None if self._module is None else self._module()

    @property
    def bucket_names(self) -> tuple[tuple[str, ...], ...]:
        """Gradients as DDP puts them together, in its order, as far as buckets were seen."""
        found: list[tuple[str, ...]] = []
        seen: set[int] = set()
        for index in sorted(self._buckets):
            known = self._buckets[index][0]
            if not seen.intersection(known):  # else of the first step, before DDP made them anew
                found.append(tuple(self._by_parameter[one].name for one in known))
                seen.update(known)
        return tuple(found)

    @property
    def engine(self) -> Engine:
        """What carries the gradients; there is none before the first step of a bare hook."""
        if self._engine is None:
            raise UsageError(
                "this exchange has not begun: with comm_hook, run one step first; with "
                "enabled=False there is none."
            )
        return self._engine

    # --- setting up -------------------------------------------------------------------------------

    def open(self, device: torch.device) -> Engine:
        """Makes the engine, on all ranks."""
        self._engine = engine_of(self.process_group, device, Options(), self.settings.seed)
        self._engine.on_lost = self._on_lost
        self._dealer = self._partitioner(self._engine)
        return self._engine

    def _partitioner(self, engine: Engine) -> Partitioner:
        return Partitioner(
            engine.transport.num_ranks,
            bucket_numel=self.settings.bucket_numel,
            on_gpu=engine.device.type == "cuda",
        )

    def watch(self, module: nn.Module) -> None:
        """Ends the engine with the model, and lets `timeline` see its forward."""
        self._module = weakref.ref(module)
        if self._engine is not None:
            weakref.finalize(module, self._engine.close)
        self._watchdog.stand_at(module)

    def register(
        self, named: Iterable[tuple[str, torch.Tensor]], sparse: frozenset[str] = frozenset()
    ) -> None:
        """Decides for gradients, in the order in which backward makes them."""
        self.sparse |= sparse
        for name, parameter in named:
            checkpoint.restore(self, self._lay_out(name, parameter))

    def lay_out(self) -> None:
        """Decides anew for all gradients, which no codec remembers anything of."""
        assert self._engine is not None
        self._dealer = self._partitioner(self._engine)
        self._buckets.clear()
        for gradient in list(self.gradients.values()):
            self._lay_out(gradient.name, gradient.parameter)

    def _lay_out(self, name: str, parameter: torch.Tensor) -> Gradient:
        assert self._dealer is not None and self._engine is not None
        decider = self.rules if self.auto is None else self.auto
        choice = decider.choice(name, parameter, self.sparse)
        placements: tuple[Placement, ...] = ()
        if choice.codec.name != "none":
            most = chunk_numel(choice.codec, parameter.device, self._engine.options)
            placements = self._dealer.place(parameter.numel(), most, choice.partitions)
        gradient = Gradient(name=name, parameter=parameter, choice=choice, placements=placements)
        self.gradients[name] = gradient
        self._by_parameter[id(parameter)] = gradient
        return gradient

    def tell(self) -> None:
        """Says on rank 0 what is compressed and what is not, and warns of the optimizer."""
        compressed = [g for g in self.gradients.values() if g.is_compressed]
        assert self._engine is not None
        if self._engine.transport.rank != 0 or self.auto is not None:
            return
        total = sum(g.parameter.numel() for g in self.gradients.values())
        inside = sum(g.parameter.numel() for g in compressed)
        codecs = ", ".join(sorted({g.choice.codec.name for g in compressed})) or "none"
        _log.info(
            "%d of %d gradients (%.1f %% of the elements) are compressed with %s.",
            len(compressed), len(self.gradients), 100 * inside / max(total, 1), codecs,
        )  # fmt: skip
        if not compressed:
            _log.warning(
                "no gradient is compressed: all are exempt (see sync.skipped); lower min_size, or "
                "give include=."
            )
        if self.settings.optimizer is not None:
            pairs = [(g.parameter, g.choice.codec) for g in compressed]
            for sentence in optimizer_checks.warnings(self.settings.optimizer, pairs):
                _log.warning(sentence)

    # --- a step -----------------------------------------------------------------------------------

    def on_bucket(self, bucket: GradBucket) -> Future:
        """What DDP calls when a bucket's gradients are ready."""
        try:
            return self._on_bucket(bucket)
        except BaseException:
            self._watchdog.is_heard = True
            self._watchdog.come_out()
            raise

    def _on_bucket(self, bucket: GradBucket) -> Future:
        buffer = bucket.buffer()
        if not self.enabled or self._detached:
            self.step += bucket.is_last()
            return self._leave_to_torch(buffer)
        if self._engine is None:
            self.open(buffer.device)
        index, is_last = bucket.index(), bucket.is_last()
        if index == 0:
            self._watchdog.go_in()
            if self.auto is not None and not self._flushes:
                self.auto.begin()
        groups = self._groups(bucket, buffer)
        if index == 0:
            self._begin_step()
        if self._tracer is not None:
            names = [name for group in groups for name in group.names]
            self._tracer.on_bucket(index, names, is_last)
        future = self._exchange(groups, buffer)
        if is_last:
            self._end_step()
        return future

    def _exchange(self, groups: list[Group], buffer: torch.Tensor) -> Future:
        auto = self.auto
        if not groups:  # nothing that codecs take
            return self._leave_to_torch(buffer)
        flushes = self._flushes or (auto is not None and auto.flushes)
        # Not beside a transport whose messages need one order on all ranks (NCCL): nothing says
        # which comes first, this sum or an exchange of the engine's.
        is_free = self._engine is not None and not self._engine.transport.ordered
        is_left = auto is not None and (auto.is_plain or (is_free and not _has_codec(groups)))
        if flushes or is_left:
            if flushes or self.owed:
                self.pay(groups, buffer, flush=flushes)
                self._under_way.append((groups, buffer))
            return self._leave_to_torch(buffer)
        self.pay(groups, buffer)
        self._under_way.append((groups, buffer))
        assert self._engine is not None
        handles = []
        warm = self.step >= self.settings.warmup_steps
        for group in groups:
            first = group.gradients[0].name  # all of a group have one rate
            handle = self._engine.allreduce(
                [buffer[start:stop] for start, stop in group.spans],
                codec=group.codec if warm else NONE,
                strategy=group.strategy if warm else "ps",
                names=group.names,
                placements=group.placements if warm else None,
                step=self.step,
                lr_ratio=self._lr_ratios.get(first) if group.wants_rate else None,
                weights=self._weights(group) if group.wants_weights else None,
            )
            handles.append(handle)
        return joint(handles, buffer, partial(self._note_failure, buffer))

    def _weights(self, group: Group) -> list[torch.Tensor]:
        """The parameters, in the unit of their gradients."""
        weights = [flat(gradient.parameter) for gradient in group.gradients]
        return weights if self.scale == 1.0 else [weight * self.scale for weight in weights]

    def pay(self, groups: Sequence[Group], buffer: torch.Tensor, *, flush: bool = False) -> None:
        """Adds what is owed to gradients; with `flush` also what their codecs remember."""
        if not self.owed and not flush:
            return
        engine = self.engine
        for group in groups:
            for gradient, (start, stop) in zip(group.gradients, group.spans, strict=True):
                values = buffer[start:stop]
                if (owed := self.owed.pop(gradient.name, None)) is not None:
                    values.add_(owed.to(values.device))
                if flush and gradient.is_compressed:
                    engine.wait_idle()
                    values.add_(checkpoint.unsent(engine, gradient))
            if flush:
                engine.forget(group.names)

    def _leave_to_torch(self, buffer: torch.Tensor) -> Future:
        """What DDP does without a hook."""
        import torch.distributed as dist

        group: Any = self.process_group or dist.group.WORLD
        num_ranks = group.size()
        if buffer.layout is torch.strided:  # of others torch does not tell
            self._plain_bytes += 2 * (num_ranks - 1) * buffer.nbytes // num_ranks
        # In torch's thread, while backward goes on, where that gives the same bits as before the
        # sum: a power of two only moves the exponent, and float32 has room for the sum.
        later = (
            self.auto is not None
            and not self._detached
            and buffer.device.type == "cpu"
            and buffer.dtype is torch.float32
            and num_ranks & (num_ranks - 1) == 0
        )
        if num_ranks > 1 and not later:
            buffer.mul_(1 / num_ranks)  # as DDP does: a division takes twice as long
        if self.auto is None or self._detached:
            work: Any = dist.all_reduce(buffer, group=group, async_op=True)
            future: Future = work.get_future().then(lambda done: done.value()[0])
            return future
        if num_ranks == 1:
            future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
            future.set_result(buffer)
            return future
        try:
            work = dist.all_reduce(buffer, group=group, async_op=True)
        except RuntimeError as error:
            raise self.engine.explain(error) from error
        share = 1 / num_ranks if later else 1.0
        return cast(Future, work.get_future().then(partial(self._taken, buffer, share)))

    def _taken(self, buffer: torch.Tensor, share: float, done: Any) -> torch.Tensor:
        """What torch has summed; a rank that is gone is named, as with codecs."""
        try:
            found = cast(torch.Tensor, done.value()[0])
            return found if share == 1.0 else found.mul_(share)
        except RuntimeError as error:
            self._note_failure(buffer, self.engine.explain(error))
            return buffer

    def _begin_step(self) -> None:
        every = self.settings.check_every
        if every and self.step % every == 0:
            self.check_replicas()
        self._follow_scale()
        self._follow_rate()

    def _end_step(self) -> None:
        self.step += 1
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # DDP's own callback, which hands the means out, is queued after this hook returns; one
        # that is queued from within ours comes behind it.
        try:
            queue(lambda: queue(self._after_step))
        except RuntimeError as error:
            raise UsageError(
                "DDP called for gradients outside backward, as its join() for uneven inputs does; "
                "that is not supported: give all ranks the same number of batches."
            ) from error

    def _note_failure(self, buffer: torch.Tensor, error: BaseException) -> None:
        # The mean never came: nobody may take what is in its place for it.
        buffer.fill_(torch.nan)
        self._failure = error

    def _after_step(self) -> None:
        self._watchdog.come_out()
        if self._failure is not None:
            # Here and not in the future, where torch would keep the text and lose the error.
            self._watchdog.is_heard = True
            raise self._failure
        self._keep_unused()
        # What was sent of a parameter that nobody used is sent again.
        if self._flushes and not self.owed:
            self._flushes, self._detached = False, True
            if self._tracer is not None:
                self._tracer.finish()
            if self.engine.transport.rank == 0:
                _log.info("detached after step %d: plain all-reduce from here on.", self.step)
        is_taken = self.auto is None or self.auto.loses_offers
        if self.loaded is not None and self.step > self.settings.warmup_steps and is_taken:
            self.loaded = None
            self.engine.states.drop_preloaded()
        if self._tracer is not None:
            self._tracer.on_step_end()
        every = self.settings.log_every
        if every and self.step % every == 0 and self.engine.transport.rank == 0:
            stats = self.stats()
            _log.info(log_line(self.step, stats))
            if self.settings.writer is not None:
                write_scalars(self.settings.writer, self.step, stats)
        if self.auto is not None and not (self._flushes or self._detached):
            self.auto.end()

    def _on_lost(self, error: BaseException) -> None:
        """A rank is gone."""
        import torch.distributed as dist

        if self._detached or not dist.is_initialized():
            return  # the job has ended here, and may have ended there
        self._watchdog.watch(error, lambda: self._detached or self.engine.is_closed)

    def _keep_unused(self) -> None:
        """DDP throws away what was sent of a parameter that no rank used: it is still owed."""
        for groups, buffer in self._under_way:
            for group in groups:
                for gradient, (start, stop) in zip(group.gradients, group.spans, strict=True):
                    sent = buffer[start:stop]
                    may_owe = gradient.is_compressed or self.auto is not None
                    if may_owe and self._was_left_out(gradient, sent):
                        # A step with NaN is skipped, and drops what was sent in it.
                        if sent.isfinite().all() and sent.any():
                            self.owed[gradient.name] = sent.to(torch.float32, copy=True)
        self._under_way.clear()

    def _was_left_out(self, gradient: Gradient, sent: torch.Tensor) -> bool:
        """Whether DDP kept what was sent to itself."""
        given = gradient.parameter.grad
        if given is None or not self.settings.finds_unused:
            return given is None
        if given.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr():
            return False
        return not torch.equal(flat(given).view(torch.uint8), sent.view(torch.uint8))

    def check_replicas(self) -> None:
        """Compares the parameters of all ranks; collective.

        Raises:
            AgreementError: They differ; it names the first parameter that does.
        """
        module = self.module
        named = [(name, g.parameter) for name, g in self.gradients.items()]
        if module is not None:  # with those that DDP knows nothing of
            inner, ignored = cast(Any, module).module, cast(Any, module).parameters_to_ignore
            named = [
                (selection.clean(name), parameter)
                for name, parameter in inner.named_parameters()
                if name not in ignored
            ]
        told = self.engine.agree("the replica check", {"step": self.step}, replicas.digests(named))
        replicas.compare(told, self.step)

    def _follow_scale(self) -> None:
        """Brings the codecs' memory to the loss scale of this step."""
        scaler = self.settings.scaler
        if self.auto is not None and self.auto.holds_nothing and not self.owed:
            return  # reading the scale would make the host wait for a GPU
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        if scale != self.scale:
            ratio = scale / self.scale
            self.engine.wait_idle()
            self.engine.states.scale(ratio)
            for owed in self.owed.values():
                owed.mul_(ratio)
        self.scale = scale

    def _follow_rate(self) -> None:
        """Notes by how much the learning rate of each parameter has changed."""
        if self.settings.optimizer is None:
            return
        for group in self.settings.optimizer.param_groups:
            for parameter in group["params"]:
                gradient = self._by_parameter.get(id(parameter))
                now = float(group["lr"])
                if gradient is None or now == 0.0:  # nothing is applied: nothing changes
                    continue
                self._lr_ratios[gradient.name] = self.rates.get(gradient.name, now) / now
                self.rates[gradient.name] = now

    # --- buckets ----------------------------------------------------------------------------------

    def _groups(self, bucket: GradBucket, buffer: torch.Tensor) -> list[Group]:
        """The gradients of a bucket, by what is decided for them."""
        if buffer.layout is not torch.strided or buffer.dtype not in selection.DTYPES:
            return []
        parameters = bucket.parameters()
        known = tuple(map(id, parameters))
        found = self._buckets.get(bucket.index())
        if found is not None and found[0] == known:
            return found[1]
        missing = [p for p in parameters if id(p) not in self._by_parameter]
        if missing:  # a bare hook learns of them in the order in which they come
            first = len(self.gradients)
            self.register((f"gradient{first + k}", p) for k, p in enumerate(missing))
        gradients = [self._by_parameter[id(parameter)] for parameter in parameters]
        groups = grouped(gradients, self.settings.optimizer)
        self._buckets[bucket.index()] = (known, groups)
        return groups


def _has_codec(groups: Sequence[Group]) -> bool:
    return any(gradient.is_compressed for group in groups for gradient in group.gradients)
