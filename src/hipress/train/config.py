"""The options of a training job and its learning rate schedule, with checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from hipress.errors import UsageError
from hipress.plan import Plan
from hipress.train.virtual_sync import PLAIN

OPTIMIZERS = ("sgd", "adam", "adamw")
AMP = ("off", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
TEXTS = ("text", "parallel-text")
RATE_MODES = ("constant", "step", "cosine")
AUTO = "auto"
"""Used in place of a codec expression: measure, plan, and compress where it pays."""
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
    """The rate after the warm-up."""
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
            raise UsageError("--lr-mode step needs --lr-decay-epochs, e.g. 50,80.")
        if self.mode != "step" and self.decay_epochs:
            raise UsageError(f"--lr-decay-epochs needs --lr-mode step; it is {self.mode!r}.")
        ordered = tuple(sorted(set(self.decay_epochs)))
        if self.decay_epochs != ordered or any(epoch <= 0 for epoch in ordered):
            given = ",".join(f"{epoch:g}" for epoch in self.decay_epochs)
            raise UsageError(f"--lr-decay-epochs {given} must be above 0 and rising, e.g. 50,80.")

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


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a job, the same on all ranks."""

    model: str = "cnn"
    data: str = "digits"
    paths: tuple[Path, ...] = ()
    """Folder or files of the data."""
    codec: str | None = None
    """An expression, `auto`, or `uncompressed` for DDP alone; None selects a default."""
    strategy: str | None = None
    plan: Path | None = None
    """A plan file; codec and strategy fill in what it leaves open, as a SeCoPaPlan.txt does."""
    min_size: int | None = None
    """Gradients with fewer elements are not compressed."""
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    plain_steps: int = 0
    """Number of uncompressed steps at the start."""

    batch: int | None = None
    """Examples per rank and micro-batch; None selects the model's default."""
    accumulate: int = 1
    """Micro-batches of a step."""
    epochs: float | None = None
    steps: int | None = None
    optimizer: str = "sgd"
    rate: float | None = None
    momentum: float | None = None
    """Momentum of SGD; 0.9 if None."""
    nesterov: bool = False
    weight_decay: float = 0.0
    rate_mode: str = "constant"
    rate_decay: float | None = None
    """Factor of the rate at each of `decay_epochs`; 0.1 if None."""
    decay_epochs: tuple[float, ...] = ()
    warmup_epochs: float = 0.0
    warmup_rate: float = 0.0
    clip_norm: float | None = None
    amp: str = "off"

    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    """Interval in steps; None saves at the end of every epoch."""
    resume: bool = False
    log_every: int = 10
    eval_every: float = 1.0
    """Interval in epochs; 0 evaluates only at the end."""
    evaluates: bool = True
    check_every: int = 0
    timeline: Path | None = None

    device: str = "auto"
    backend: str = "auto"
    seed: int = 0
    loaders: int | None = None
    """Processes that prepare batches; None selects 2 for image files and 0 for other data."""
    side: int | None = None
    length: int | None = None
    tokens: str | None = None

    @property
    def sgd_momentum(self) -> float:
        """Momentum of SGD."""
        return DEFAULT_MOMENTUM if self.momentum is None else self.momentum

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer is SGD with momentum."""
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
            decay_epochs=self.decay_epochs,
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
            raise UsageError("--nesterov needs --optimizer sgd and a --momentum above 0.")
        self._check_effect()
        if self.resume and self.checkpoint is None:
            raise UsageError("--resume needs --checkpoint DIR, the folder to resume from.")
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise UsageError("--checkpoint-every needs --checkpoint DIR, the folder to write to.")
        self._check_plan()

    def _check_plan(self) -> None:
        """Raise a UsageError for a codec or strategy if the plan leaves none open."""
        if self.codec == AUTO and (self.plan is not None or self.strategy is not None):
            given = "--plan" if self.plan is not None else "--strategy"
            raise UsageError(f"--codec {AUTO} makes plans itself; leave {given} out, or {AUTO}.")
        if self.plan is None or (self.codec is None and self.strategy is None):
            return
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
        """Raise a UsageError for an option that would have no effect."""
        needed = {
            "--momentum": (self.momentum is not None, self.optimizer == "sgd", "--optimizer sgd"),
            "--lr-decay": (self.rate_decay is not None, self.rate_mode == "step", "--lr-mode step"),
            "--warmup-lr": (self.warmup_rate != 0, self.warmup_epochs > 0, "--warmup-epochs"),
            "--side": (self.side is not None, self.data == "imagefolder", "--data imagefolder"),
            "--length": (self.length is not None, self.data in TEXTS, "text"),
            "--tokens": (self.tokens is not None, self.data in TEXTS, "text"),
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
        """The given options that concern the exchange, besides the codec."""
        given = {
            "--strategy": self.strategy is not None,
            "--plan": self.plan is not None,
            "--timeline": self.timeline is not None,
            "--check-every": self.check_every > 0,
            "--plain-steps": self.plain_steps > 0,
            "--min-size": self.min_size is not None,
            "--exclude": bool(self.exclude),
            "--include": bool(self.include),
        }
        return [option for option, is_given in given.items() if is_given]

    def with_default_codec(self, num_ranks: int) -> TrainConfig:
        """Return the config with a codec, if none was given.

        A single rank has no peers and stays uncompressed. Otherwise SGD's momentum goes into the
        codec, before `onebit` (dist-EF-SGDM), because `onebit` before the optimizer's momentum
        loses accuracy; Adam gets `int8`.
        """
        if self.codec is not None or self.plan is not None:
            return self
        if num_ranks == 1 and not self._exchange_options:
            return replace(self, codec=PLAIN)
        if self.optimizer != "sgd":
            return replace(self, codec="int8")
        if self.sgd_momentum == 0 or self.plain_steps:
            return replace(self, codec="onebit")
        kind = "true" if self.nesterov else "false"
        mu = f"mu={self.sgd_momentum:g}"
        return replace(self, codec=f"momentum(ef(onebit), {mu}, nesterov={kind})")
