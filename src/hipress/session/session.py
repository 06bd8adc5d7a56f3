"""The exchange of one model's gradients, for every framework.

    begin_step      what this step's mode is: plain, warm-up, compressed, trial, flushing, detached
    exchange        one bucket of gradients: to the engine as decided, or one uncompressed sum
    end_step        the averages were handed out: errors, unused parameters, logging, `auto`

Gradients are known by name, number of elements, dimensions, dtype and device; values come in flat
torch buffers. The framework answers questions through its `Adapter`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hipress.casync.engine.engine import Engine, Options
from hipress.casync.engine.handle import Handle, joint
from hipress.casync.graphs.schedules import Order, Schedule
from hipress.errors import UsageError
from hipress.plan import Plan
from hipress.recommendations import SAFE
from hipress.session import checkpoint, replicas, report, selection, shards, start_line
from hipress.session.adapter import Adapter, GradientSpec
from hipress.session.auto import Auto, note_step_end
from hipress.session.buckets import Bucket, Content, Gradient, Group, has_momentum
from hipress.session.groups import as_tensor, engine_of
from hipress.session.guard import Guard
from hipress.session.layout import Layout
from hipress.session.milder import Override
from hipress.session.mode import Mode, StepMode
from hipress.session.momentum import REFRESH, Momentum
from hipress.session.monitor import Monitor, Totals
from hipress.session.owed import Owed
from hipress.session.plain import PlainSum
from hipress.session.profiler import STEPS, Profiler
from hipress.session.selection import NONE, Rules
from hipress.session.stats import (
    Stats,
    VerbTimes,
    collect,
    log_line,
    since,
    write_scalars,
    write_split,
)
from hipress.session.trace import Tracer, check_path

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hipress.session.planner import Planner

_log = logging.getLogger("hipress")

Future = torch.futures.Future[torch.Tensor]

ONE_PROCESS = "there is one process, which has no other to send to"
NOT_ENABLED = "enabled=False was given"

SMALLEST_RATE = 1e-20
"""A smaller learning rate moves no parameter; the ratio of another rate to it might overflow."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for besides codecs."""

    warmup_steps: int = 0
    check_every: int = 0
    log_every: int = 0
    writer: Any = None
    seed: int = 0
    guard: bool | None = None
    """Whether the accuracy of codecs is watched; None: with `auto`."""

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "check_every", "log_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UsageError(f"{name} is {value!r}; give a number of steps, 0 for none.")
        if self.guard not in (True, False, None):
            raise UsageError(f"guard is {self.guard!r}; give True, False, or None for the default.")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise UsageError(f"seed is {self.seed!r}; give a whole number from 0 to 2^31 - 1.")
        if self.writer is not None and not hasattr(self.writer, "add_scalar"):
            raise UsageError(f"writer is a {type(self.writer).__name__}; give a SummaryWriter.")
        if self.writer is not None and not self.log_every:
            raise UsageError(
                "writer is given and log_every is 0, so nothing would be written; give "
                "log_every=100."
            )


class Session:
    """Exchanges the gradients of one model.

    `hipress.attach` and `hipress.torch.comm_hook` make one for DDP, `hipress.session.start` for
    any other loop. It is also a `Stateful` of torch.distributed.checkpoint.

    Args:
        rules: Decide which gradients are compressed.
        settings: What the user asked for besides.
        adapter: Answers questions about the framework; the defaults if None.
        group: Process group of torch.distributed; all ranks if None.
        enabled: False leaves every gradient to one uncompressed sum.
        alone: Whether this is the only process, which has nobody to exchange gradients with.
        schedule: The order and the sizes of messages, if the framework waits for single gradients;
            with `auto`, those of uncompressed steps.
    """

    def __init__(
        self,
        rules: Rules,
        settings: Settings,
        adapter: Adapter | None = None,
        group: ProcessGroup | None = None,
        *,
        enabled: bool = True,
        alone: bool = False,
        schedule: Schedule | None = None,
    ) -> None:
        self.settings = settings
        self.schedule = schedule
        """What orders messages now; None if the framework waits for all gradients at once."""
        self._first_schedule = schedule
        self.adapter = adapter or Adapter()
        self.layout = Layout(rules, self.adapter.offers_momentum)
        self.process_group = group
        self.idle = ONE_PROCESS if alone else "" if enabled else NOT_ENABLED
        """Why this session does nothing; empty if it exchanges gradients."""
        self.step = 0
        """Number of finished steps, with those before the checkpoint that was loaded."""
        self.num_steps = 0
        """Number of finished steps since the session started."""
        self.untrained: frozenset[str] = frozenset()
        """Names of parameters without a gradient: frozen, or ignored by the framework."""
        self.owed = Owed()
        self._momentum = Momentum(self.adapter, self.layout, self.owed)
        self.scale = 1.0
        """Loss scale in which codec state is kept."""
        self.rates: dict[str, float] = {}
        """Learning rate of the last step by gradient; rates of 0 are left out."""
        self.loaded: dict[str, Any] | None = None
        """A loaded checkpoint, until the step after it is done."""
        self.told: dict[str, Any] | None = None
        """The last `state_dict` of a session that does nothing."""
        self.plain = PlainSum(group)
        self.monitor = Monitor()
        """Where the time of steps goes."""
        self.auto: Auto | None = None
        self.guard = Guard() if settings.guard else None
        """Watches the accuracy of codecs."""
        self._writer = settings.writer
        """The writer of scalars, as for TensorBoard; None if there is none, or it has failed."""
        self._logged_totals = Totals()
        """Totals of the monitor at the last log line."""
        if settings.warmup_steps and not self.idle:
            _check_warmup(rules, settings.warmup_steps)
        first = Mode.WARMUP if settings.warmup_steps else Mode.COMPRESSED
        self.mode = StepMode(Mode.DETACHED if self.idle else first)
        self.times = VerbTimes()
        self._logged: Stats | None = None
        """The figures at the last line of the log."""
        self._announced: int | None = None
        """Epoch of the plan of `auto` that was logged last."""
        self._numels: dict[str, int] = {}
        """Elements of each gradient of a session that does nothing."""
        self._engine: Engine | None = None
        self._warned: set[str] = set()
        self._tracer: Tracer | None = None
        self._profiler = Profiler()
        self._rate_ratios: dict[str, float] = {}
        self._with_momentum: list[str] = []
        """Gradients whose codec applies momentum."""
        self._failure: BaseException | None = None
        self._flats: dict[tuple[str, ...], torch.Tensor] = {}
        """Buffers of `average`."""

    def __repr__(self) -> str:
        return (
            f"<Session: {len(self.layout.compressed)} of {len(self.gradients)} gradients "
            f"compressed, step "
            f"{self.step}, {self.idle or self.mode.current.value}>"
        )

    # --- for users --------------------------------------------------------------------------------

    def average(self, gradients: Mapping[str, Any]) -> None:
        """Replaces gradients by their mean over all ranks, in place: one whole step.

        Args:
            gradients: Arrays by name, all or some of those registered, the same on all ranks:
                NumPy arrays, torch tensors, or anything with `__dlpack__` that shares memory. They
                hold the gradient of this step alone: a codec with momentum would take momentum of
                a mean that is left in them a second time.

        Example:
            >>> import numpy, torch.distributed as dist, hipress.session
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> weight = numpy.ones((64, 64), dtype=numpy.float32)
            >>> session = hipress.session.start({"weight": weight}, codec="int8", min_size=0)
            >>> session.average({"weight": weight})
            >>> session.step
            1
            >>> dist.destroy_process_group()
        """
        if not isinstance(gradients, Mapping):
            raise UsageError(
                f"average was given a {type(gradients).__name__}; give a dictionary of arrays by "
                "the names that were registered."
            )
        values = {name: as_tensor(array, name) for name, array in gradients.items()}
        for name, value in values.items():
            known = self.gradients.get(name)
            if known is None and self.enabled:
                raise UsageError(
                    f"gradient {name!r} is not registered; the first registered ones are: "
                    f"{', '.join(list(self.gradients)[:5])}."
                )
            if not value.dtype.is_floating_point:
                raise UsageError(
                    f"gradient {name!r} has dtype {str(value.dtype).removeprefix('torch.')}; give "
                    "floating-point elements, which have a mean."
                )
            if known is not None and value.dtype != known.spec.dtype:
                given, registered = (
                    str(dtype).removeprefix("torch.") for dtype in (value.dtype, known.spec.dtype)
                )
                raise UsageError(
                    f"gradient {name!r} has dtype {given} and was registered with {registered}, "
                    "for which its codec was chosen; convert it, or start the session with arrays "
                    f"of {given}."
                )
            if known is not None and value.numel() != known.numel:
                raise UsageError(
                    f"gradient {name!r} has {value.numel()} elements and was registered with "
                    f"{known.numel}; start a new session for another model."
                )
        for observer in list(self.adapter.observers):
            for name in values:
                observer.gradient_ready(name)
        for name, value in values.items() if self.idle else ():
            value.copy_(self.pay(name, value))
        self.begin_step()
        by_kind: dict[Any, list[str]] = {}
        for name, value in values.items():
            by_kind.setdefault((value.dtype, value.device), []).append(name)
        under_way = []
        for index, names in enumerate(by_kind.values()):
            key = tuple(names)
            if key not in self._flats:
                self._flats[key] = torch.cat([values[name].reshape(-1) for name in names])
            else:
                torch.cat([values[name].reshape(-1) for name in names], out=self._flats[key])
            under_way.append((names, self._flats[key], self.exchange(index, key, self._flats[key])))
        for names, flat, future in under_way:
            future.wait()
            parts = torch.split(flat, [values[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                values[name].copy_(part.view(values[name].shape))
        self.end_step()
        for observer in list(self.adapter.observers):
            observer.forward_begin()  # a loop without hooks: the next step begins here
            observer.forward_end()

    def stats(self) -> Stats:
        """Returns what has been sent so far, how long it took, and what is not compressed."""
        return collect(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the codec state of all ranks, complete on every rank; collective.

        It loads with `weights_only=True`. For a large model, `save` needs far less memory.
        """
        self.adapter.finish_step()
        return checkpoint.save(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where another run stopped, with any number of ranks; collective."""
        self.adapter.finish_step()
        checkpoint.load(self, state_dict)
        self._restart()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the codec state of all ranks, each rank its own; collective.

        It needs no more memory than the largest partition. The last checkpoint in the folder stays
        until the new one is complete.

        Args:
            folder: A folder of its own that all hosts see.
        """
        self.adapter.finish_step()
        shards.save(self, Path(folder))

    def load(self, folder: str | os.PathLike[str], entry: str = "") -> None:
        """Continues from what `save` wrote, with any number of ranks; collective.

        Args:
            folder: The folder that `save` was given, or `dcp.save` together with `shards()`.
            entry: The key of `shards()` in what `dcp.save` was given.
        """
        self.adapter.finish_step()
        shards.load(self, Path(folder), entry)
        self._restart()

    def shards(self) -> dict[str, torch.Tensor]:
        """Returns this rank's part of a checkpoint of torch.distributed.checkpoint; collective.

        The tensors are the codec state itself: save them before the next step, as in
        `dcp.save({"model": model.state_dict(), "sync": sync.shards()}, checkpoint_id=folder)`, and
        load them with `sync.load(folder, entry="sync")`.
        """
        self.adapter.finish_step()
        return shards.shards(self)

    def _restart(self) -> None:
        self._momentum.note_unsent(self.layout.senders)
        if self.auto is None and not self.mode.is_leaving:
            self.mode.restart(warm=self.step >= self.settings.warmup_steps)

    def detach(self) -> None:
        """Sends what the residuals hold with the next gradients, then leaves plain all-reduce.

        Collective; call it between two steps. A framework's hook stays and does what the framework
        does without it.
        """
        if self.mode.is_leaving:
            return
        self.adapter.finish_step()
        if self._engine is not None:
            self._engine.agree("detach", {"step": self.step})
        if self.auto is not None:
            self.auto.stop()
        if self.mode.current is Mode.FLUSHING:
            self.mode.end_flush()
        self.warn_of_momentum(self._with_momentum, "after detach")
        self.mode.flush(then=Mode.DETACHED)

    def timeline(self, path: str, steps: int = 10, start: int = 0) -> None:
        """Records some steps on all ranks; rank 0 writes them for Perfetto. Collective.

        It begins when `auto` has decided and no kernel has to be compiled any more.

        Args:
            path: Path of the JSON file; open it at https://ui.perfetto.dev.
            steps: Number of steps.
            start: Number of finished steps, of all runs, before which nothing is recorded.
        """
        if self.idle:
            _log.info("no timeline is recorded: %s.", self.idle)
            return
        if type(start) is not int or start < 0:
            raise UsageError(f"start is {start!r}; give a number of steps, 0 for none.")
        if self.mode.is_leaving:
            raise UsageError(
                "this exchange is detached and has nothing to record; call timeline before detach."
            )
        engine = self.engine
        if not self.adapter.can_observe:
            raise UsageError(
                "timeline needs the model, which a bare hook does not know; use attach."
            )
        problem = None
        try:
            if engine.transport.rank == 0:
                check_path(path)
        except UsageError as error:
            problem = str(error)
        facts = {"steps": steps, "start": start}
        problem = engine.agree("timeline", facts, share=problem)[0]
        if problem is not None:
            raise UsageError(problem)
        self.adapter.finish_step()
        if self._tracer is None:
            self._tracer = Tracer(self.adapter, engine, engine.gather, engine.clock_offset)
        own = weakref.ref(self)  # the observed model must not keep this object alive

        def is_steady() -> bool:
            return (session := own()) is not None and session._is_steady(start)

        self._tracer.begin(path, steps, is_steady)

    @property
    def is_recording(self) -> bool:
        """Whether a timeline has yet to be written."""
        return self._tracer is not None and self._tracer.active

    def _is_steady(self, first: int) -> bool:
        """Returns whether the next step is like those after it, on all ranks alike."""
        settled = self.auto is None or self.auto.phase in ("plain", "compressed")
        if self.step + 1 < first or not settled:
            return False  # without a wait, which `auto` would take for a slow plan
        self.adapter.finish_step()  # ranks that are ahead would begin to record a step earlier
        return self.step >= first and self.times.is_steady

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes one page about the run so far, on rank 0; collective.

        It shows where the time went on each rank and over the run, each layer with its codec, bytes
        and residual, the plan and why it was chosen, and what the accuracy guard did. The page is
        one file that loads nothing else. It needs plotly: `pip install plotly`.

        Args:
            path: Path of the HTML file.
        """
        if self.idle:
            _log.info("no report is written: %s.", self.idle)
            return
        self.adapter.finish_step()
        report.write(self, path)

    def profile(
        self,
        path: str | os.PathLike[str],
        steps: int = STEPS,
        codecs: Iterable[str] | None = None,
    ) -> None:
        """Times the next steps, then measures links and codecs and writes a profile; collective.

        The steps run as they would without it: forward, backward and the moment at which each
        gradient is ready are timed, and the first two steps do not count. At the end of the last
        step all ranks stop for some seconds, while links and codecs are measured, and rank 0 writes
        the file. If training ends before, nothing is written. Work between backward and the next
        forward pass, such as the optimizer's, is counted on a CPU only. With accumulated gradients
        a step is one forward and one backward pass.

        Args:
            path: Path of the file, for `hipress plan --profile` and `hipress simulate --profile`.
            steps: Number of steps until the file is written, 4 or more.
            codecs: Codecs to measure; those of `hipress profile` and of this session if None.

        Raises:
            UsageError: It cannot be written or measured; on all ranks, before anything is measured.
        """
        if self.idle:
            _log.info("no profile is written: %s.", self.idle)
            return
        if self.mode.is_leaving:
            raise UsageError(
                "this exchange is detached and has nothing to measure; call profile before detach."
            )
        if not self.adapter.can_observe:
            raise UsageError(
                "profile needs the model, which a bare hook does not know; use attach."
            )
        self.adapter.finish_step()
        self._profiler.begin(self, path, steps, codecs)

    def check_replicas(self) -> None:
        """Compares the parameters of all ranks; collective.

        Raises:
            AgreementError: They differ; it names the first parameter that does.
        """
        if self.idle:
            return
        digests = replicas.digests(self.adapter.parameters())
        told = self.engine.agree("the replica check", {"step": self.step}, digests)
        replicas.compare(told, self.step)

    @property
    def enabled(self) -> bool:
        """False on one process and where `enabled=False` was given; use `detach` to stop later."""
        return not self.idle

    @property
    def model(self) -> Any:
        """The model to train with: the DDP model, or on one process what `attach` was given."""
        return self.adapter.model

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None if there is none or `auto` uses plain all-reduce."""
        return self.rules.plan if self.auto is None else self.auto.plan

    @property
    def skipped(self) -> dict[str, str]:
        """Gradients that are not compressed, and why."""
        if self.idle:
            return dict.fromkeys(self._numels, self.idle)
        found = selection.skipped({name: g.choice for name, g in self.gradients.items()})
        return found if self.auto is None else self.auto.skipped(found)

    @property
    def gradients(self) -> dict[str, Gradient]:
        """All gradients by name, compressed or not."""
        return self.layout.gradients

    @property
    def numels(self) -> dict[str, int]:
        """Number of elements of each gradient."""
        return self._numels or {name: g.numel for name, g in self.gradients.items()}

    @property
    def rules(self) -> Rules:
        """What the user asked for."""
        return self.layout.rules

    @property
    def engine(self) -> Engine:
        """The engine that carries the gradients; a bare hook has none before its first step."""
        if self._engine is None:
            raise UsageError(
                f"this session does nothing: {self.idle}."
                if self.idle
                else "this exchange has not begun: with comm_hook, run one step first."
            )
        return self._engine

    @property
    def is_open(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    # --- setting up -------------------------------------------------------------------------------

    def open(self, device: torch.device) -> Engine:
        """Makes the engine, which ends with this session; collective."""
        options = Options()
        if self.schedule is not None:
            sizes = self.schedule
            options = Options(slice_bytes=sizes.slice_bytes, credit_bytes=sizes.credit_bytes)
        self._engine = engine_of(self.process_group, device, options, self.settings.seed)
        weakref.finalize(self, self._engine.close)
        self.plain.exchanging = self._engine.executor.exchanging
        if self.schedule is not None:
            # Ranks may start units at different places of their program, before or after
            # collectives of the user.
            self.plain.use(self._engine.transport)
        self.monitor.open(self._engine)
        weakref.finalize(self, self.monitor.close)
        return self._engine

    def register(self, specs: Iterable[GradientSpec]) -> None:
        """Decides for gradients, given in the order in which backward computes them."""
        added = self.layout.register(specs, self.engine, self.adapter.bucket_numel)
        for gradient in added:
            checkpoint.restore(self, gradient)
            if has_momentum(gradient.choice.codec):
                self._with_momentum.append(gradient.name)
        if any(gradient.sends_momentum for gradient in added):
            self.engine.agree("the exchange of momentum", self.adapter.momentum_facts())

    def use_auto(self, planner: Planner) -> None:
        """Lets `auto` decide from step to step, starting with uncompressed steps."""
        self.auto = Auto(planner)
        self.layout.is_auto = True
        if self.settings.guard is None:
            self.guard = Guard()
        self.mode = StepMode(Mode.PLAIN)

    def use_overrides(self, overrides: Mapping[str, Override]) -> None:
        """Gives gradients the milder codecs of a checkpoint, unless there is no guard."""
        if self.guard is None:
            return
        self.guard.restart()
        layout = self.layout
        for name in {**layout.overrides, **overrides}:
            made = overrides.get(name)
            if name not in self.gradients:
                if made is not None and not self.gradients:  # a bare hook registers them later
                    layout.overrides[name] = made
            elif made != layout.overrides.get(name):
                self.engine.forget((name, self.gradients[name].refresh_name))
                layout.override(name, made)

    def announce(self) -> None:
        """Logs on rank 0 what is compressed, with warnings about the optimizer; starts `auto`."""
        if self.mode.is_leaving:
            return  # a bare hook that was detached before its first step
        checked = self.adapter.about_optimizer()
        if self.auto is not None:
            self.auto.start(self, checked)
            return
        if self.engine.transport.rank != 0:
            return
        _log.info("%s%s.", start_line.line(self), f"; {checked}" if checked else "")
        if not self.layout.compressed and any(codec.name != "none" for codec in self.rules.codecs):
            _log.warning(
                "no gradient is compressed: all are exempt (see sync.skipped); lower min_size, or "
                "give include=."
            )
        self._warn()

    def begin_idle(self, specs: Iterable[GradientSpec]) -> None:
        """Logs on rank 0 that this session does nothing; takes note of its gradients."""
        self._numels = {spec.name: spec.numel for spec in specs}
        if not dist.is_initialized() or dist.get_rank(self.process_group) == 0:
            _log.info("%s: hipress does nothing.", self.idle)

    def pay(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient of a session that does nothing, with what a checkpoint owes to it."""
        owed = self.owed.pop(name, None)
        if owed is None:
            return gradient
        scale = self.adapter.loss_scale()
        owed = owed * ((1.0 if scale is None else scale) / self.scale)
        return gradient + self.adapter.shaped(name, owed, gradient).to(gradient)

    def warn_of_momentum(self, names: Sequence[str], when: str) -> None:
        """Warns on rank 0 that the codec's momentum is missing, unless the optimizer has its own.

        Args:
            names: Gradients whose codec applies momentum.
            when: When it does not work.
        """
        rank = dist.get_rank(self.process_group) if dist.is_initialized() else 0
        if rank == 0 and names and not self.adapter.applies_momentum(names):
            _log.warning(
                "%s applies momentum, and %s nothing does: set the momentum of the optimizer, e.g. "
                "group['momentum'] = 0.9 in SGD's param_groups.",
                " and ".join(c.name for c in self.rules.codecs if has_momentum(c)), when,
            )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Returns what ranks compare before the first step."""
        gradients = self.gradients.values()
        plan = self.rules.plan
        return {
            "parameters": [g.name for g in gradients],
            "elements of parameters": [g.numel for g in gradients],
            "dtypes of parameters": [str(g.spec.dtype) for g in gradients],
            "codecs": [g.choice.codec.name for g in gradients],
            "strategies": [g.choice.strategy for g in gradients],
            "epoch of the plan": None if plan is None else plan.epoch,
            "warmup_steps": self.settings.warmup_steps,
            "check_every": self.settings.check_every,
            "guard": self.guard is not None,
            **(self.adapter.momentum_facts() if self.layout.senders or self.auto else {}),
            **self.adapter.facts(),
        }

    def _install(self, plan: Plan | None) -> None:
        """Lays all gradients out for a plan of `auto`; collective."""
        installed = self.layout.plan
        if (plan and plan.epoch) == (installed and installed.epoch):
            return
        if plan is not None:
            facts = {"step": self.step, "epoch of the plan": plan.epoch, "plan": _digest(plan)}
            self.engine.agree("a new plan", facts)
        if self._first_schedule is not None:
            self.schedule = (plan and Schedule.of(plan)) or self._first_schedule
            self.engine.forget(self.gradients)  # their messages get other sizes
            self.engine.resize(self.schedule.slice_bytes, self.schedule.credit_bytes)
        self.layout.install(plan)
        if self.schedule is not None:
            self.adapter.arrange(self.layout.units, self.schedule.name)
        if plan is not None and self.engine.transport.rank == 0:
            self._warn()

    def _announce_plan(self, plan: Plan) -> None:
        """Logs on rank 0 what a plan that `auto` has chosen compresses."""
        if plan.epoch != self._announced and self.engine.transport.rank == 0:
            self._announced = plan.epoch
            _log.info("auto, step %d: %s.", self.step, start_line.line(self))

    def _warn(self) -> None:
        compressed = [(g.name, g.choice.codec) for g in self.layout.compressed]
        for sentence in self.adapter.warnings(compressed):
            if sentence not in self._warned:
                self._warned.add(sentence)
                _log.warning(sentence)

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Decides the mode of this step, on all ranks alike; before the first `exchange`."""
        if self.mode.current is Mode.DETACHED:
            return
        if self.adapter.has_new_options() and self.engine.transport.rank == 0:
            self._warn()
        self._momentum.forget()
        self.owed.forget_sent()
        self._advance_mode()
        if self.guard is not None:
            self.guard.begin(self)
        self._check_gradients()
        if self.mode.current.compresses and self.layout.compressed:
            self._momentum.check(self.engine, self.step)
        every = self.settings.check_every
        if every and self.step % every == 0:
            self.check_replicas()
        self._follow_scale()
        self._follow_rates()

    def exchange(
        self,
        index: int,
        names: Sequence[str],
        buffer: torch.Tensor,
        order: Order | None = None,
    ) -> Future:
        """Starts to replace a bucket of gradients by their mean over all ranks, in place.

        Args:
            index: Number of the bucket in this step.
            names: Registered gradients that lie in the buffer one after the other.
            buffer: Their elements, flat.
            order: Its places among the buckets of the step, the same on all ranks (see
                `hipress.casync.graphs.schedules`).

        Returns:
            A torch future of the buffer.
        """
        mode = self.mode.current
        if mode is Mode.DETACHED:
            self._momentum.forget()
            return self.plain.average(buffer)
        self.monitor.note_bucket()
        bucket = self.layout.bucket(index, tuple(names), buffer)
        if self._tracer is not None:
            self._tracer.on_bucket(index, [n for group in bucket.groups for n in group.names])
        if self.auto is not None:
            self.auto.keep(self, bucket, buffer)
        contents = self._momentum.make(bucket, buffer, mode, self.scale)
        added, later = self.owed.pay(bucket, buffer, contents, compresses=mode.compresses)
        if mode is Mode.FLUSHING:
            self.owed.flush(self.engine, bucket, buffer)
        uses_engine = self._uses_engine(bucket)
        if uses_engine or added or mode is Mode.FLUSHING:
            self.owed.note_sent(bucket, buffer, contents)
        if not uses_engine:
            try:
                return self.plain.average(buffer, self._on_lost_sum)
            except RuntimeError as error:
                raise self.engine.explain(error) from error
        if self.guard is not None and self.guard.is_active:
            self.guard.take(self, bucket, buffer, contents, later)
        handles = [
            self._start_group(group, buffer, content, order)
            for group, content in zip(bucket.groups, contents, strict=True)
        ]
        on_result = partial(_add_owed, later) if later else None
        return joint(handles, buffer, partial(self._note_failure, buffer), on_result)

    @property
    def meets_at_end(self) -> bool:
        """Whether ranks wait for each other at the end of this step, so that all must end it at the
        same place of their program."""
        return not self.mode.is_leaving and (
            self._profiler.is_active
            or (self._tracer is not None and self._tracer.is_last)
            or (self.auto is not None and self.auto.is_measuring)
        )

    def note_wait(self, names: Sequence[str], start_ns: int) -> None:
        """Takes note for a timeline that the framework has waited for means until now."""
        if self._tracer is not None:
            self._tracer.on_wait(names, start_ns)

    def _start_group(
        self, group: Group, buffer: torch.Tensor, content: Content, order: Order | None
    ) -> Handle:
        """Starts the exchange of the gradients of a bucket that travel together."""
        values = [buffer[start:stop] for start, stop in group.spans]
        if self.mode.current is Mode.WARMUP:
            # What stays uncompressed keeps its recipe, and so its places, after the warm-up.
            is_kept = self.schedule is not None and group.codec.name == "none"
            return self.engine.allreduce(
                values,
                codec=NONE,
                names=group.names,
                placements=group.placements if is_kept else None,
                step=self.step,
                order=order,
            )
        if content is Content.REFRESH:
            return self.engine.allreduce(
                values,
                codec=REFRESH,
                strategy=group.strategy,
                names=group.refresh_names,
                step=self.step,
                order=order,
            )
        return self.engine.allreduce(
            values,
            codec=group.codec,
            strategy=group.strategy,
            names=group.names,
            placements=group.placements,
            step=self.step,
            lr_ratio=self._rate_ratio(group),
            weights=self._weights(group) if group.wants_weights else None,
            loss_scale=self.scale,
            order=order,
        )

    def check(self) -> None:
        """Raises what went wrong in this step, before its means are used."""
        if self._failure is not None:
            raise self._failure

    def end_step(self) -> None:
        """Ends a step after the framework took the averages; raises what went wrong in it."""
        self.step += 1
        self.num_steps += 1
        note_step_end(self.auto)
        if self.mode.current is Mode.DETACHED:
            return
        self.monitor.end_step(self)
        self.check()
        self.times.end_step(self.engine)
        if accumulating := self._with_momentum or self.layout.senders:
            self.adapter.note_means(accumulating)
        # What `auto` or the guard has left uncompressed may contain what was owed.
        only_compressed = self.auto is None and not self.layout.overrides
        self.owed.keep_dropped(self.adapter, self.scale, only_compressed=only_compressed)
        if self.guard is not None:
            self.guard.end(self)
        # What was sent for a parameter that no rank used is owed, and flushed again.
        if self.mode.current is Mode.FLUSHING and not (self.mode.is_leaving and len(self.owed)):
            if self.mode.is_leaving:
                self._on_detached()
            self.mode.end_flush()
        if self.step > self.settings.warmup_steps:
            if self.auto is None or self.auto.has_taken_state:
                self.loaded = None
                self.engine.states.drop_preloaded()
        if self._tracer is not None:
            self._tracer.on_step_end()
        every = self.settings.log_every
        if every and self.step % every == 0 and self.engine.transport.rank == 0:
            now = self.stats()
            stats, self._logged = since(self._logged, now), now
            _log.info(log_line(self.step, stats))
            if self._writer is not None and not write_scalars(self._writer, self.step, stats):
                self._writer = None
            split = self.monitor.totals.since(self._logged_totals).split()
            self._logged_totals = self.monitor.totals
            if self._writer is not None and not write_split(self._writer, self.step, split):
                self._writer = None
        if self.auto is not None and not self.mode.is_leaving:
            self.auto.end(self.engine)
        self._profiler.on_step_end(self)

    def _advance_mode(self) -> None:
        if self.mode.is_leaving:
            return
        if self.mode.current is Mode.FLUSHING:
            self.mode.end_flush()  # the last step was broken off
        if self.auto is not None:
            directed, plan = self.auto.begin(self)
            if directed is Mode.FLUSHING:
                self.mode.flush(then=Mode.PLAIN)
                return
            if directed is Mode.PLAIN:
                self.mode.use_plain()
                if self.auto.holds_state:
                    return  # the layout that the codecs' state belongs to stays
            elif directed is Mode.TRIAL:
                self.mode.try_plan()
            else:
                self.mode.use_plan()
            self._install(plan)
            if plan is not None and self.mode.current is Mode.COMPRESSED:
                self._announce_plan(plan)
        elif self.mode.current is Mode.WARMUP and self.step >= self.settings.warmup_steps:
            self.mode.end_warmup()

    def _check_gradients(self) -> None:
        """Raises if a codec would take momentum of what is momentum already."""
        accumulating = self._with_momentum or self.layout.senders
        if not (accumulating and self.mode.current.compresses):
            return
        if self.adapter.holds_means():
            first = self.gradients[accumulating[0]]
            who = "the optimizer" if first.sends_momentum else first.choice.codec.name
            raise UsageError(
                f"the gradients of this backward pass were added to the means of step {self.step}, "
                f"of which {who} would take momentum a second time: call optimizer.zero_grad() "
                "between two backward passes, put all but the last one of a step in "
                f"model.no_sync(), or take a codec without momentum, such as {SAFE}."
            )

    def _uses_engine(self, bucket: Bucket) -> bool:
        """Whether the bucket is exchanged as decided, and not by one uncompressed sum."""
        if not bucket.groups:
            return False
        if self.mode.current is Mode.WARMUP:
            return True  # a rank that is late is named in HIPRESS_TIMEOUT, as with codecs
        if not self.mode.current.compresses:
            return False
        # Plans of `auto` leave whole buckets uncompressed, for which torch's sum is fastest. Not
        # with a transport whose messages need one order on all ranks (NCCL): nothing would order
        # this sum and the exchanges of the engine.
        is_left = self.auto is not None and self.schedule is None and not bucket.has_codec
        return not is_left or self.engine.transport.ordered

    def _weights(self, group: Group) -> list[torch.Tensor]:
        """Returns the parameters, in the unit of their gradients."""
        weights = [self.adapter.weights(name) for name in group.names]
        return weights if self.scale == 1.0 else [weight * self.scale for weight in weights]

    def _on_lost_sum(self, buffer: torch.Tensor, error: RuntimeError) -> None:
        self._note_failure(buffer, self.engine.explain(error))

    def _note_failure(self, buffer: torch.Tensor, error: BaseException) -> None:
        # The mean never came: what is in its place must not be taken for it. The error is raised
        # by `end_step`, since torch would keep only the text of one raised in a future.
        self._failure = error
        (buffer if buffer.layout is torch.strided else buffer._values()).fill_(torch.nan)

    def _on_detached(self) -> None:
        if self.owed.momentum:
            _log.warning(
                "momentum that was owed to %s is dropped: nothing exchanges it any more.",
                ", ".join(self.owed.momentum),
            )
            self.owed.momentum.clear()
        if self._tracer is not None:
            self._tracer.finish()
        self.monitor.close()
        self._profiler.cancel(self)
        if self.engine.transport.rank == 0:
            _log.info("detached after step %d: plain all-reduce from here on.", self.step)

    def _follow_scale(self) -> None:
        """Brings codec state to the loss scale of this step."""
        holds_state = self.auto is None or self.auto.holds_state
        if self.mode.current is Mode.PLAIN and not holds_state and not self.owed:
            return  # reading the scale would make the host wait for a GPU
        found = self.adapter.loss_scale()
        scale = 1.0 if found is None else found
        if scale != self.scale:
            ratio = scale / self.scale
            self.engine.wait_idle()
            self.engine.states.scale(ratio)
            self.owed.scale(ratio)
            if self.guard is not None:
                self.guard.scale(ratio)
        self.scale = scale

    def _follow_rates(self) -> None:
        """Notes by how much the learning rate of each gradient has changed.

        A rate of 0 applies nothing: residuals stay as they are, and the rate that they belong to is
        kept until there is another one.
        """
        if not self._with_momentum:
            return  # reading a rate may make the host wait for a GPU
        self.layout.regroup(self.adapter.rate_groups())
        self._rate_ratios = {}
        for name, now in self.adapter.learning_rates().items():
            if _moves(now):
                last = self.rates.get(name, now)
                self._rate_ratios[name] = last / now if _moves(last) else 1.0
                self.rates[name] = now

    def _rate_ratio(self, group: Group) -> float | None:
        """Returns the factor on the residuals of a group, whose gradients have one rate."""
        if not group.wants_rate or not self.rates:
            return None
        return self._rate_ratios.get(group.names[0], 1.0)


def _moves(rate: float) -> bool:
    """Returns whether parameters move with this learning rate; NaN and infinity ruin them."""
    return math.isfinite(rate) and abs(rate) >= SMALLEST_RATE


def _check_warmup(rules: Rules, num_steps: int) -> None:
    for codec in rules.codecs:
        if has_momentum(codec):
            raise UsageError(
                f"warmup_steps is {num_steps} and {codec.name} applies momentum, which nothing "
                "would apply in uncompressed steps: leave warmup_steps out, take a codec without "
                f"momentum, such as {SAFE}, or use the warm-up of dgc, e.g. "
                f"dgc(warmup={num_steps})."
            )


def _add_owed(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for mean, owed in pairs:
        mean.add_(owed)
        if owed.is_cuda:
            owed.record_stream(torch.cuda.current_stream(owed.device))


def _digest(plan: Plan) -> str:
    return hashlib.blake2b(plan.model_dump_json().encode(), digest_size=8).hexdigest()
