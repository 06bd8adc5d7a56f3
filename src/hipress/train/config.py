"""The options of a training job and its learning rate schedule, with checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hipress.casync.graphs import schedules
from hipress.errors import UsageError
from hipress.recommendations import ADAM, SAFE, SGD, momentum_codec, recommended
from hipress.units import parse_size
from hipress.version import docs_url

OPTIMIZERS = ("sgd", "adam", "adamw")
AMP = ("off", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
TEXTS = ("text", "parallel-text")
RATE_MODES = ("constant", "step", "cosine")
AUTO = "auto"
"""Used in place of a codec expression: measure, plan, and compress where it pays."""
PLAIN = "uncompressed"
"""Used in place of a codec expression: plain averaging without any codec."""
DEFAULT_MOMENTUM = 0.9
DEFAULT_DECAY = 0.1
DEFAULT_RATE = {"sgd": 0.01, "adam": 0.001, "adamw": 0.001}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate by epoch: a warm-up, then constant, in steps, or half a cosine.

    Example:
        >>> plan = Schedule(base=0.1, mode="step", num_epochs=90, decay_epochs=(30, 60))
        >>> [round(plan.rate_at(epoch), 6) for epoch in (0, 29.9, 30, 60)]
        [0.1, 0.1, 0.01, 0.001]
    """

    base: float
    mode: str = "constant"
    num_epochs: float = 1.0
    """Epochs of the whole run, at whose end the cosine ends."""
    warmup_epochs: float = 0.0
    """Epochs in which the rate grows linearly from `warmup_rate` to `base`."""
    warmup_rate: float = 0.0
    decay: float = 0.1
    """Factor of the rate at each of `decay_epochs`."""
    decay_epochs: tuple[float, ...] = ()
    """Counted from the start of the run, warm-up included."""
    step_epochs: float = 0.0
    """Epochs of a step; a warm-up step has the rate of its end, so that the first is not 0."""

    def check(self) -> None:
        """Raise a UsageError if the schedule is invalid."""
        if self.mode not in RATE_MODES:
            raise UsageError(
                f"--lr-mode {self.mode!r} is none of {', '.join(RATE_MODES)}; choose one."
            )
        for name, value in (("--lr", self.base), ("--lr-decay", self.decay)):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value:g}; it must be above 0.")
        if not (math.isfinite(self.warmup_rate) and self.warmup_rate >= 0):
            raise UsageError(f"--warmup-lr is {self.warmup_rate:g}; it must be 0 or more.")
        if not 0 <= self.warmup_epochs <= self.num_epochs:
            raise UsageError(
                f"--warmup-epochs is {self.warmup_epochs:g} and the run has {self.num_epochs:g}; "
                "it must be from 0 to that."
            )
        if self.mode == "step" and not self.decay_epochs:
            raise UsageError("--lr-mode step needs epochs; give --lr-decay-epochs, e.g. 50,80.")
        if self.mode != "step" and self.decay_epochs:
            raise UsageError(f"--lr-decay-epochs needs --lr-mode step; it is {self.mode!r}.")
        ordered = tuple(sorted(set(self.decay_epochs)))
        if self.decay_epochs != ordered or any(epoch <= 0 for epoch in ordered):
            given = ",".join(f"{epoch:g}" for epoch in self.decay_epochs)
            raise UsageError(
                f"--lr-decay-epochs {given} is not above 0 and rising; give e.g. 50,80."
            )

    def rate_at(self, epoch: float) -> float:
        """Return the rate at an epoch, which may be a fraction."""
        if epoch < self.warmup_epochs:
            risen = min((epoch + self.step_epochs) / self.warmup_epochs, 1.0)
            return self.warmup_rate + (self.base - self.warmup_rate) * risen
        if self.mode == "step":
            return self.base * self.decay ** sum(epoch >= each for each in self.decay_epochs)
        if self.mode == "cosine":
            left = self.num_epochs - self.warmup_epochs
            done = min((epoch - self.warmup_epochs) / left, 1.0) if left > 0 else 0.0
            return self.base * 0.5 * (1 + math.cos(math.pi * done))
        return self.base


_data = partial(Option, rich_help_panel="Data")
_length = partial(Option, rich_help_panel="Length and learning rate")
_exchange = partial(Option, rich_help_panel="Exchange")
_output = partial(Option, rich_help_panel="Checkpoints and output")
_machine = partial(Option, rich_help_panel="Machine")

DATA = (
    "digits, synthetic, fashion-mnist DIR, cifar100 DIR, imagefolder DIR, text FILE, "
    "parallel-text SRC TGT, or package.module:callable, which returns a Dataset."
)
CODEC = "Expression, e.g. 'dgc(ratio=0.01)'; auto; uncompressed is plain DDP."
PLAN = "File that decides for each gradient: plan.json, or SeCoPaPlan.txt with --codec."
SCHEDULE = "Without DDP, messages in order: fifo, priority, overlap; auto."
MODEL = f"A built-in model ({docs_url('models')}), or package.module:callable."


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a job, the same on all ranks, as the command line declares them."""

    model: Annotated[str, Option(help=MODEL)] = "cnn"
    data: Annotated[str, _data(help=DATA)] = "digits"
    paths: Annotated[
        list[Path] | None, Argument(help="Folder or files of --data, where it has any.")
    ] = None
    batch: Annotated[int | None, _data(min=1, help="Examples per rank and step.")] = None
    side: Annotated[int | None, _data(min=1, help="Pixels of an image's side.")] = None
    length: Annotated[int | None, _data(min=2, help="Tokens of a sequence.")] = None
    tokens: Annotated[str | None, _data(help="What text is cut into: bytes or words.")] = None
    loaders: Annotated[int | None, _data(min=0, help="Processes that prepare batches.")] = None
    """None selects 2 for image files and 0 for other data."""
    codec: Annotated[str | None, _exchange(help=CODEC)] = None
    """None selects a default, by optimizer and number of ranks."""
    strategy: Annotated[str | None, _exchange(help="ps, ring, hierarchical or allreduce.")] = None
    order: Annotated[str | None, _exchange("--schedule", help=SCHEDULE)] = None
    """The schedule of a DistributedOptimizer, `auto` if it decides; None trains with DDP."""
    slice: Annotated[str | None, _exchange(help="Bytes of a message of --schedule; 512KiB.")] = None
    credit: Annotated[
        str | None, _exchange(help="Bytes on their way out at once, of --schedule; 4 slices.")
    ] = None
    plan: Annotated[Path | None, _exchange(help=PLAN)] = None
    """Codec and strategy fill in what the file leaves open, as a SeCoPaPlan.txt does."""
    min_size: Annotated[
        int | None,
        _exchange(min=0, help="Gradients with fewer elements are left alone; 4096 if not given."),
    ] = None
    exclude: Annotated[
        list[str] | None, _exchange(help="Parameters left alone: name or pattern.")
    ] = None
    include: Annotated[list[str] | None, _exchange(help="Parameters compressed though small.")] = (
        None
    )
    guard: Annotated[
        bool | None,
        _exchange("--guard/--no-guard", help="Leave inaccurate codecs; with auto if not given."),
    ] = None
    plain_steps: Annotated[int, _exchange(min=0, help="First steps without compression.")] = 0
    epochs: Annotated[float | None, _length(help="How long; 1 if neither is given.")] = None
    steps: Annotated[int | None, _length(min=1, help="How long, in steps.")] = None
    optimizer: Annotated[str, _length(help="sgd, adam or adamw.")] = "sgd"
    rate: Annotated[
        float | None,
        _length("--lr", help="Learning rate, not scaled by ranks; 0.01 for sgd, else 0.001."),
    ] = None
    momentum: Annotated[
        float | None, _length(help="Momentum of sgd, 0.9; left out where the codec has it.")
    ] = None
    nesterov: Annotated[bool, _length("--nesterov", help="Nesterov's momentum.")] = False
    weight_decay: Annotated[float, _length(help="L2 term.")] = 0.0
    rate_mode: Annotated[str, _length("--lr-mode", help="constant, step or cosine.")] = "constant"
    rate_decay: Annotated[float | None, _length("--lr-decay", help="Factor of each step, 0.1.")] = (
        None
    )
    decay_epochs: Annotated[
        str | None, _length("--lr-decay-epochs", help="When the rate steps, e.g. 50,80.")
    ] = None
    warmup_epochs: Annotated[
        float, _length(help="Epochs in which the rate rises from --warmup-lr.")
    ] = 0.0
    warmup_rate: Annotated[float, _length("--warmup-lr", help="Where the rate starts.")] = 0
    clip_norm: Annotated[float | None, _length(help="Largest norm of the gradient.")] = None
    accumulate: Annotated[int, _length(min=1, help="Batches of a step.")] = 1
    amp: Annotated[str, _length(help="Mixed precision: off, bf16 or fp16.")] = "off"
    seed: Annotated[int, _length(min=0, help="Seed of weights, order and codecs.")] = 0
    checkpoint: Annotated[
        Path | None, _output(help="Folder for checkpoints, seen by all hosts.")
    ] = None
    checkpoint_every: Annotated[
        int | None, _output(min=1, help="Steps between checkpoints; each epoch if not given.")
    ] = None
    resume: Annotated[bool, _output("--resume", help="Go on from --checkpoint.")] = False
    log_every: Annotated[int, _output(min=1, help="Steps between lines.")] = 10
    eval_every: Annotated[float, _output(help="Epochs between evaluations; 0: at the end.")] = 1.0
    no_eval: Annotated[bool, _output("--no-eval", help="Never evaluate.")] = False
    check_every: Annotated[int, _output(min=0, help="Steps between comparisons of ranks.")] = 0
    timeline: Annotated[Path | None, _output(help="Trace of five steps, for Perfetto.")] = None
    device: Annotated[str, _machine(help="auto, cpu or cuda.")] = "auto"
    backend: Annotated[str, _machine(help="auto, gloo or nccl.")] = "auto"

    @property
    def slice_bytes(self) -> int | None:
        return None if self.slice is None else parse_size(self.slice)

    @property
    def credit_bytes(self) -> int | None:
        return None if self.credit is None else parse_size(self.credit)

    @property
    def sgd_momentum(self) -> float:
        return DEFAULT_MOMENTUM if self.momentum is None else self.momentum

    @property
    def has_momentum(self) -> bool:
        return self.optimizer == "sgd" and self.sgd_momentum > 0

    @property
    def base_rate(self) -> float:
        """The learning rate after the warm-up."""
        return DEFAULT_RATE[self.optimizer] if self.rate is None else self.rate

    def schedule(self, num_epochs: float, steps_per_epoch: int) -> Schedule:
        """Return the checked learning rate schedule of a run of so many epochs."""
        schedule = Schedule(
            step_epochs=1 / steps_per_epoch,
            base=self.base_rate,
            mode=self.rate_mode,
            num_epochs=num_epochs,
            warmup_epochs=self.warmup_epochs,
            warmup_rate=self.warmup_rate,
            decay=DEFAULT_DECAY if self.rate_decay is None else self.rate_decay,
            decay_epochs=_epochs(self.decay_epochs),
        )
        schedule.check()
        return schedule

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of the whole run, by default one epoch."""
        if self.steps is not None:
            return self.steps
        return max(round((1.0 if self.epochs is None else self.epochs) * steps_per_epoch), 1)

    def check(self) -> None:
        """Raise a UsageError for the first option that is invalid."""
        for option, value, choices in (
            ("--optimizer", self.optimizer, OPTIMIZERS),
            ("--amp", self.amp, AMP),
            ("--device", self.device, DEVICES),
            ("--backend", self.backend, BACKENDS),
        ):
            if value not in choices:
                raise UsageError(f"{option} {value!r} is none of {', '.join(choices)}; choose one.")
        if self.epochs is not None and self.steps is not None:
            raise UsageError("--epochs and --steps both say how long to train; give one of them.")
        if self.epochs is not None and not (math.isfinite(self.epochs) and self.epochs > 0):
            raise UsageError(f"--epochs is {self.epochs:g}; it must be above 0.")
        for option, number in (
            ("--weight-decay", self.weight_decay),
            ("--eval-every", self.eval_every),
        ):
            if not (math.isfinite(number) and number >= 0):
                raise UsageError(f"{option} is {number:g}; it must be 0 or more.")
        if not 0 <= self.sgd_momentum < 1:
            raise UsageError(f"--momentum is {self.sgd_momentum:g}; it must be from 0 to below 1.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"--clip-norm is {self.clip_norm:g}; it must be above 0.")
        if self.nesterov and (self.optimizer != "sgd" or self.sgd_momentum == 0):
            raise UsageError(
                "--nesterov needs momentum; give --optimizer sgd and a --momentum above 0."
            )
        self._check_effect()
        if self.resume and self.checkpoint is None:
            raise UsageError(
                "--resume needs a checkpoint; give --checkpoint DIR, the folder to resume from."
            )
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise UsageError(
                "--checkpoint-every needs a folder to write to; give --checkpoint DIR."
            )
        self._check_order()
        self._check_plan()

    def _check_order(self) -> None:
        """Raise a UsageError for a schedule that nothing could follow."""
        if self.order is None:
            return
        if self.order == AUTO:
            self._check_auto_order()
            return
        schedules.check(self.order)
        if self.codec == AUTO:
            raise UsageError(
                f"--codec {AUTO} decides about the schedule too; give --schedule {AUTO}, or a "
                "codec."
            )
        if self.strategy == "allreduce":
            raise UsageError(
                "--strategy allreduce leaves messages to torch, so --schedule cannot order them; "
                "give ps, ring or hierarchical."
            )

    def _check_auto_order(self) -> None:
        """Raise a UsageError for what is not left to `auto`."""
        if self.codec not in (AUTO, "none"):
            raise UsageError(
                f"--schedule {AUTO} goes with --codec {AUTO}, or with none, which sends gradients "
                "as they are; give one of these, or a schedule."
            )
        given = {
            "--slice": self.slice, "--credit": self.credit,
            "--strategy": self.strategy, "--plan": self.plan,
        }  # fmt: skip
        for option, value in given.items():
            if value is not None:
                raise UsageError(f"--schedule {AUTO} decides about {option}; leave it out.")

    def _check_plan(self) -> None:
        """Raise a UsageError for a codec or strategy if the plan leaves none open."""
        if self.codec == AUTO and (self.plan is not None or self.strategy is not None):
            given = "--plan" if self.plan is not None else "--strategy"
            raise UsageError(f"--codec {AUTO} makes plans itself; leave {given} out, or {AUTO}.")
        if self.plan is None or (self.codec is None and self.strategy is None):
            return
        from hipress.plan import Plan  # pydantic takes longer than the help of a command may

        path = Path(self.plan)
        if not path.exists() and path.suffix != ".json":
            return  # The reader of the plan reports the missing file.
        plan = Plan.load(path) if path.exists() else Plan()
        fills_codec = self.codec is None or plan.takes_codec
        fills_strategy = self.strategy is None or plan.takes_strategy
        if not (fills_codec and fills_strategy):
            raise UsageError(
                "--plan decides codec and strategy for each gradient; leave --codec and --strategy "
                "out, or the plan."
            )

    def _check_effect(self) -> None:
        needed = {
            "--momentum": (self.momentum is not None, self.optimizer == "sgd", "--optimizer sgd"),
            "--lr-decay": (self.rate_decay is not None, self.rate_mode == "step", "--lr-mode step"),
            "--warmup-lr": (self.warmup_rate != 0, self.warmup_epochs > 0, "--warmup-epochs"),
            "--side": (self.side is not None, self.data == "imagefolder", "--data imagefolder"),
            "--length": (self.length is not None, self.data in TEXTS, "text"),
            "--tokens": (self.tokens is not None, self.data in TEXTS, "text"),
            "--slice": (self.slice is not None, self.order is not None, "--schedule"),
            "--credit": (self.credit is not None, self.order is not None, "--schedule"),
        }
        for option, (is_given, has_effect, needs) in needed.items():
            if is_given and not has_effect:
                raise UsageError(f"{option} has an effect only with {needs}; leave it out.")
        if self.codec == PLAIN and self._exchange_options:
            raise UsageError(
                f"--codec {PLAIN} leaves gradients to DDP, so {self._exchange_options[0]} has "
                "nothing to act on; leave it out, or give --codec none, which sends gradients as "
                "they are."
            )

    @property
    def _exchange_options(self) -> list[str]:
        given = {
            "--strategy": self.strategy is not None,
            "--schedule": self.order is not None,
            "--plan": self.plan is not None,
            "--timeline": self.timeline is not None,
            "--check-every": self.check_every > 0,
            "--plain-steps": self.plain_steps > 0,
            "--min-size": self.min_size is not None,
            "--exclude": bool(self.exclude),
            "--include": bool(self.include),
            "--guard": self.guard is True,
        }
        return [option for option, is_given in given.items() if is_given]

    def with_default_codec(self, num_ranks: int) -> TrainConfig:
        """Return the config with a codec, if none was given.

        A single rank has no peers and stays uncompressed. Otherwise it is the one that
        `hipress.recommendations` has for the optimizer. A codec with momentum cannot begin with
        `plain_steps`, so these get the codec that works with every optimizer.
        """
        if self.codec is not None or self.plan is not None:
            return self
        if num_ranks == 1 and not self._exchange_options:
            return replace(self, codec=PLAIN)
        if self.optimizer != "sgd":
            return replace(self, codec=recommended(ADAM).codec)
        if not self.has_momentum:
            return replace(self, codec=recommended(SGD).codec)
        if self.plain_steps:
            return replace(self, codec=SAFE)
        return replace(self, codec=momentum_codec(self.sgd_momentum, nesterov=self.nesterov))


def _epochs(text: str | None) -> tuple[float, ...]:
    try:
        return () if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--lr-decay-epochs {text!r} is not a list of numbers; give e.g. 50,80."
        ) from None
