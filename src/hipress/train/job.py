"""One rank of a training job: model, data and codec by name, DDP and `hipress.attach`, or, with a
schedule, `hipress.torch.DistributedOptimizer`.

    start         build model, DDP, optimizer and exchange; load a checkpoint
    every step    batch -> forward -> backward, which exchanges gradients -> optimizer
    at intervals  a row for the log, an evaluation by all ranks, a checkpoint

A step depends on the seed and its number only, so that a job that is resumed computes the same bits
as one that was not interrupted. The caller creates the process group.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress.codecs.base import Codec
from hipress.errors import HipressError, TrainingError, UsageError
from hipress.plan import MIN_SIZE
from hipress.recommendations import SAFE
from hipress.session import selection
from hipress.session.buckets import applies_decay, has_momentum
from hipress.session.replicas import compare
from hipress.session.setup import DEFAULT_CODEC
from hipress.session.trace import check_path
from hipress.torch.adapter import spec_of
from hipress.torch.ddp import clean, sparse_names
from hipress.torch.distributed_optimizer import LEAST_SLICE_BYTES, DistributedOptimizer
from hipress.train import checkpoints, models
from hipress.train.batches import Sampler, test_batches, train_batches
from hipress.train.config import AUTO, PLAIN, TrainConfig
from hipress.train.data import open_data
from hipress.train.ranks import Ranks
from hipress.train.result import Facts, Result, Throughput
from hipress.train.tasks import TASKS, Batch
from hipress.train.user_code import misfit

_log = logging.getLogger("hipress")

NUM_UNTIMED = 3
"""Steps at the start that do not count for speed, because they compile kernels and plan buckets."""
TRACED_STEPS = 5
FILE_LOADERS = 2
_HOST_OPTIONS = ("paths", "checkpoint", "timeline", "plan", "loaders")
_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Watcher(Protocol):
    """Receives the progress of a job; all ranks get the same rows."""

    def on_start(self, facts: Facts) -> None:
        """Called before the first step."""

    def on_step(self, step: int) -> None:
        """Called after every step; must be quick."""

    def on_row(self, row: dict[str, Any]) -> None:
        """Called every `log_every` steps, and after an evaluation."""


class Job:
    """One rank's part of a training job; the config is the same on all ranks.

    The ranks are those of the default process group if None. An invalid option raises a UsageError.
    """

    def __init__(
        self, config: TrainConfig, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        self.ranks = ranks or Ranks.of_group()
        self.config = config = config.with_default_codec(self.ranks.num_ranks)
        self.device = device
        self.ranks.compute_on(device)
        self.rank, self.num_ranks = self.ranks.rank, self.ranks.num_ranks
        self.ranks.jointly("hipress train", self._prepare)
        self.ranks.compare("hipress train", self._common_facts())
        self._build()
        self.step = checkpoints.resume(self) if config.resume else 0
        self._first = self.step

    def _prepare(self) -> None:
        """Do everything, checks included, that needs no other rank."""
        config = self.config
        config.check()
        line = models.model(config.model)
        self.data = open_data(
            config.data,
            config.paths or (),
            task=line.task,
            draw=line.draw,
            least_side=line.least_side,
            side=config.side or (line.side if config.data == "imagefolder" else None),
            length=config.length or line.length,
            tokens=config.tokens or "bytes",
            seed=config.seed,
        )
        if config.loaders and config.data == "synthetic":
            raise UsageError("--loaders has nothing to load of synthetic data; leave it out.")
        self.task = self.data.learning_task or TASKS[line.task or self.data.task]
        self.batch = config.batch or line.batch
        self.sampler = Sampler(
            num_examples=self.data.num_train,
            batch=self.batch * config.accumulate,
            rank=self.rank,
            num_ranks=self.num_ranks,
            seed=config.seed,
        )
        self.sampler.check(config.accumulate)
        per_epoch = self.sampler.steps_per_epoch
        self.num_steps = config.num_steps(per_epoch)
        if config.timeline is not None and self.rank == 0:  # which writes it
            try:
                check_path(config.timeline)
            except UsageError as error:
                raise UsageError(f"--timeline: {error}") from None
        if config.timeline is not None and self.num_steps < NUM_UNTIMED + TRACED_STEPS:
            raise UsageError(
                f"--timeline records steps {NUM_UNTIMED + 1} to {NUM_UNTIMED + TRACED_STEPS} and "
                f"the run has {self.num_steps}; train longer, or leave it out."
            )
        self.schedule = config.schedule(self.num_steps / per_epoch, per_epoch)
        self._evaluates = not config.no_eval and self.data.num_test > 0
        self._eval_steps = 0
        if config.eval_every:
            self._eval_steps = max(round(config.eval_every * per_epoch), 1)
        default_loaders = FILE_LOADERS if self.data.reads_files else 0
        self._loading: dict[str, Any] = {
            "num_loaders": default_loaders if config.loaders is None else config.loaders,
            "pin": self.device.type == "cuda",
        }
        for option, size in (("--slice", config.slice_bytes), ("--credit", config.credit_bytes)):
            if size is not None and size < LEAST_SLICE_BYTES:
                raise UsageError(
                    f"{option} is {size} bytes; give {LEAST_SLICE_BYTES} at least: smaller "
                    "messages take longer to handle than to send."
                )
        if config.checkpoint is not None:
            checkpoints.check_folder(config.checkpoint, resumes=config.resume)
        arguments = self._selection_arguments()
        if config.codec == AUTO:  # which never selects a codec with momentum
            arguments["codec"] = None
        self.rules = selection.rules(**arguments, default_codec=DEFAULT_CODEC)
        self._is_own = line.task is None or self.data.learning_task is not None
        self.model = line.make(config.seed, **line.fitting(self.data.sizes))
        selection.check_names(self.rules, [name for name, _ in self.model.named_parameters()])
        if config.plain_steps and sent_as_momentum(self.rules, self.model):
            raise UsageError(
                "--plain-steps would train without momentum, which this codec brings only when it "
                f"compresses; leave it out, or take a codec without momentum such as {SAFE}."
            )

    def _common_facts(self) -> dict[str, Any]:
        options = {k: v for k, v in asdict(self.config).items() if k not in _HOST_OPTIONS}
        return options | {
            "training examples": self.data.num_train,
            "test examples": self.data.num_test,
            "sizes of the data": dict(self.data.sizes),
            "steps": self.num_steps,
        }

    def _selection_arguments(self) -> dict[str, Any]:
        config = self.config
        return {
            "codec": None if config.codec == PLAIN else config.codec,
            "strategy": config.strategy,
            "plan": None if config.plan is None else str(config.plan),
            "exclude": config.exclude or (),
            "include": config.include or (),
            "min_size": MIN_SIZE if config.min_size is None else config.min_size,
        }

    def _build(self) -> None:
        config, device = self.config, self.device
        self.model.to(device)
        self.scaler = torch.amp.GradScaler(device.type) if config.amp == "fp16" else None
        # One rank sends no messages that a schedule could order, and may yet apply a codec.
        if config.order is not None and self.num_ranks > 1:
            self._build_without_ddp()
            return
        ddp = DistributedDataParallel(
            self.model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # Ranks that drew the same weights need not send them, which takes minutes at low rates.
            init_sync=not self.ranks.have_same(self.model),
        )
        enabled = config.codec != PLAIN
        if self.num_ranks == 1 and config.codec != AUTO:
            enabled = enabled and self._compresses_any()
        self.trained: nn.Module = ddp
        """The model to train with: in DDP, unless there is a schedule."""
        self._no_sync: Callable[[], AbstractContextManager[None]] = ddp.no_sync
        rules = self.rules if enabled else None
        self.optimizer: torch.optim.Optimizer = make_optimizer(config, self.model, rules)
        with contextlib.nullcontext() if enabled else _without_information():
            self.sync = hipress.attach(
                ddp,
                **self._selection_arguments(),
                warmup_steps=config.plain_steps,
                optimizer=self.optimizer,
                scaler=self.scaler,
                enabled=enabled,
                check_every=config.check_every,
                seed=config.seed,
                guard=config.guard,
            )

    def _build_without_ddp(self) -> None:
        config = self.config
        arguments = self._selection_arguments()
        if config.order == AUTO:
            arguments["codec"] = AUTO
            arguments["codecs"] = ["none"] if config.codec == "none" else None
        optimizer = DistributedOptimizer(
            make_optimizer(config, self.model, self.rules),
            self.model.named_parameters(),
            **arguments,
            schedule=None if config.order == AUTO else config.order,
            slice_bytes=config.slice_bytes,
            credit_bytes=config.credit_bytes,
            warmup_steps=config.plain_steps,
            scaler=self.scaler,
            check_every=config.check_every,
            seed=config.seed,
            guard=config.guard,
        )
        self.trained, self._no_sync = self.model, optimizer.no_sync
        self.optimizer, self.sync = optimizer, optimizer.sync

    def _compresses_any(self) -> bool:
        return any(
            self.rules.choice(spec_of(clean(name), parameter)).codec.name != "none"
            for name, parameter in self.model.named_parameters()
        )

    def facts(self) -> Facts:
        """Return what is known before the first step."""
        config, sync = self.config, self.sync
        sizes = {n: p.numel() for n, p in self.model.named_parameters() if p.requires_grad}
        skipped = sync.skipped
        compressed = [name for name in sync.gradients if name not in skipped]
        per_epoch = self.sampler.steps_per_epoch
        codec = config.codec or "plan"
        return Facts(
            model=config.model,
            num_parameters=sum(sizes.values()),
            data=self.data.name,
            num_train=self.data.num_train,
            num_test=self.data.num_test,
            codec=codec,
            strategy=None if codec in (PLAIN, AUTO, "plan") else sync.rules.strategy,
            schedule=config.order,
            num_compressed=len(compressed),
            num_gradients=len(sizes),
            compressed_share=sum(sizes[name] for name in compressed) / sum(sizes.values()),
            num_ranks=self.num_ranks,
            device=str(self.device),
            backend=dist.get_backend(),
            batch=self.sampler.batch,
            first_step=self.step,
            num_steps=self.num_steps,
            num_epochs=self.num_steps / per_epoch,
            steps_per_epoch=per_epoch,
            unit=self.task.unit,
        )

    # --- the run ----------------------------------------------------------------------------------

    def run(self, watcher: Watcher) -> Result:
        """Train to the end; raise a TrainingError if the loss is not finite."""
        watcher.on_start(self.facts())
        config, first = self.config, self._first
        save_steps = config.checkpoint_every or self.sampler.steps_per_epoch
        throughput = Throughput(first, self.step + NUM_UNTIMED)
        losses, num_losses = torch.zeros((), device=self.device), 0
        last: dict[str, Any] = {}
        for batch in train_batches(self.data, self.sampler, first, self.num_steps, **self._loading):
            if self.step == first + NUM_UNTIMED:
                self._wait_for_device()
                throughput.begin(self.step)
                if config.timeline is not None:
                    self.sync.timeline(str(config.timeline), steps=TRACED_STEPS)
            losses, num_losses = losses + self._checked_step(batch), num_losses + 1
            self.step += 1
            throughput.num_units += self.task.num_units(batch)
            watcher.on_step(self.step)
            tests = self._evaluates and self._is_due(self._eval_steps)
            saves = config.checkpoint is not None and self._is_due(save_steps)
            if not (tests or saves or self._is_due(config.log_every)):
                continue
            # float() waits for the device. Ranks may have different numbers of tokens.
            mine = [float(losses) / num_losses, throughput.num_units]
            sums = torch.tensor(mine, dtype=torch.float64)
            loss, units = (value / self.num_ranks for value in self.ranks.total(sums))
            self.check_finite("loss", loss)
            losses, num_losses = torch.zeros_like(losses), 0
            speed = throughput.end(self.step, units)
            row = {"kind": "step", **speed, "epoch": self._epoch, "loss": loss}
            watcher.on_row(row | {"rate": self._rate(self.step - 1)})
            last |= row
            if saves:  # before the test, so that a failing test does not lose an epoch
                checkpoints.save(self)
            if tests:
                last |= self._test(throughput, watcher)
            throughput.begin(self.step)
        if self.sync.is_recording and self.rank == 0:
            _log.warning(
                "no timeline is written: the run ended before auto had decided and %d more steps "
                "were recorded; train longer.", TRACED_STEPS,
            )  # fmt: skip
        if self.step == first and self._evaluates:  # a finished job was resumed
            last = self._test(throughput, watcher)
        compare(self.ranks.gather_digests(self.model), self.step)
        return self._result(throughput, last, first)

    def _test(self, throughput: Throughput, watcher: Watcher) -> dict[str, Any]:
        found = self.evaluate()
        if found["test_loss"] is not None:
            self.check_finite("test loss", found["test_loss"])
        at = {"step": self.step, "time_s": throughput.elapsed_s, "epoch": self._epoch}
        watcher.on_row({"kind": "test", **at, **found})
        return found

    def evaluate(self) -> dict[str, float | None]:
        """Return loss and accuracy on the test data, which is distributed over all ranks."""
        self.model.eval()
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)  # running statistics differ between ranks
        total = torch.zeros(4, dtype=torch.float64)
        mine = torch.arange(self.rank, self.data.num_test, self.num_ranks)
        with torch.no_grad(), self._autocast():
            for batch in test_batches(self.data, mine, self.batch, **self._loading):
                with self._explained(f"a batch of the test data of {self.data.name}", batch):
                    score = self.task.evaluate(self.model, self._on_device(batch))
                # Without predictions the loss is a mean over examples.
                scored = score.num_scored
                found = (score.loss_sum, scored or len(batch[0]), score.num_right, scored)
                total += torch.tensor(found, dtype=torch.float64)
        self.model.train()
        loss_sum, weight, num_right, num_scored = self.ranks.total(total)
        return {
            "test_loss": loss_sum / weight if weight else None,
            "accuracy": 100 * num_right / num_scored if num_scored else None,
        }

    def close(self) -> None:
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.synchronize()
        if self.sync.enabled:
            self.sync.engine.close()

    # --- a step -----------------------------------------------------------------------------------

    def _checked_step(self, batch: Batch) -> Tensor:
        is_first = self.step == self._first
        which = "its first batch" if is_first else f"the batch of step {self.step + 1}"
        which += f" of {self.data.name}"
        with self._explained(which, batch):
            return self._train(batch)

    @contextlib.contextmanager
    def _explained(self, which: str, batch: Batch) -> Iterator[None]:
        """Explain an error in a model or data of the user's in one sentence."""
        try:
            yield
        except Exception as error:
            is_network = isinstance(error, dist.DistError) or "gloo" in str(error)
            if not self._is_own or is_network or isinstance(error, HipressError):
                raise
            raise misfit(self.config.model, batch, error, which) from error

    def _train(self, batch: Batch) -> Tensor:
        torch.manual_seed(self.sampler.seed_of(self.step))  # for dropout
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        parts = list(zip(*(t.chunk(self.config.accumulate) for t in batch), strict=True))
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(parts, 1):
            waits = number < len(parts)
            with self._no_sync() if waits else contextlib.nullcontext():
                with self._autocast():
                    loss = self.task.loss(self.trained, self._on_device(part)) / len(parts)
                torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))
            total += loss.detach()
        if self._is_own and self.step == self._first:  # DDP would raise in the next step
            models.check_gradients(self.model, self.config.model)
        if self.config.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return total

    def _rate(self, step: int) -> float:
        return self.schedule.rate_at(step / self.sampler.steps_per_epoch)

    def _autocast(self) -> torch.autocast:
        dtype = _AMP.get(self.config.amp)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _on_device(self, batch: Batch) -> Batch:
        return tuple(part.to(self.device, non_blocking=True) for part in batch)

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- intervals and results --------------------------------------------------------------------

    @property
    def _epoch(self) -> float:
        return self.step / self.sampler.steps_per_epoch

    def _is_due(self, num_steps: int) -> bool:
        """Return whether an interval ends with this step; 0 means the end of the run only."""
        return self.step == self.num_steps or (num_steps > 0 and self.step % num_steps == 0)

    def check_finite(self, what: str, value: float) -> None:
        """Raise a TrainingError if a value is not finite."""
        if not math.isfinite(value):
            saved = self.config.checkpoint is not None
            raise TrainingError(
                f"the {what} is {value} at step {self.step}; start again with a smaller --lr than "
                f"{self.config.base_rate:g}, --warmup-epochs or --clip-norm"
                f"{', or continue from the last checkpoint with --resume' if saved else ''}."
            )

    def _result(self, throughput: Throughput, last: dict[str, Any], first: int) -> Result:
        stats = self.sync.stats()
        num_done = max(self.step - first, 1)
        numel = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        plain = 2 * (self.num_ranks - 1) / self.num_ranks * 4 * numel
        sent = stats.sent_bytes / num_done if self.sync.enabled else plain
        sent = self.ranks.total(torch.tensor([sent], dtype=torch.float64))[0] / self.num_ranks
        steps_per_s, units_per_s = throughput.speed()
        return Result(
            num_steps=self.step - first,
            seconds=throughput.elapsed_s,
            steps_per_s=steps_per_s,
            units_per_s=units_per_s * self.num_ranks,
            units_per_s_per_rank=units_per_s,
            unit=self.task.unit,
            wire_bytes_per_step=sent,
            ratio=plain / sent if sent else 1.0,
            loss=last.get("loss"),
            test_loss=last.get("test_loss"),
            accuracy=last.get("accuracy"),
            memory_bytes=stats.state_bytes + stats.buffer_bytes,
        )


@contextlib.contextmanager
def _without_information() -> Iterator[None]:
    """Silence lines of a session that does nothing: the first lines of the job say it."""
    level = _log.level
    _log.setLevel(max(_log.getEffectiveLevel(), logging.WARNING))
    try:
        yield
    finally:
        _log.setLevel(level)


# --- the optimizer --------------------------------------------------------------------------------


def make_optimizer(
    config: TrainConfig, model: nn.Module, rules: selection.Rules | None
) -> torch.optim.Optimizer:
    """Return the optimizer of the config, without momentum for parameters whose codec applies it.

    If the rules are None, nothing is compressed.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decay = config.weight_decay
    if config.optimizer != "sgd":
        kind = hipress.torch.Adam if config.optimizer == "adam" else hipress.torch.AdamW
        return kind([p for _, p in named], lr=config.base_rate, weight_decay=decay)
    sent = {} if rules is None else sent_as_momentum(rules, model)
    # If the codec applies weight decay, the optimizer must not.
    decayed = {name for name, codec in sent.items() if applies_decay(codec)}
    no_momentum = {"momentum": 0.0, "nesterov": False}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if name not in sent]},
        {"params": [p for name, p in named if name in sent and name not in decayed], **no_momentum},
        {"params": [p for name, p in named if name in decayed], "weight_decay": 0.0, **no_momentum},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=config.base_rate,
        momentum=config.sgd_momentum,
        nesterov=config.nesterov,
        weight_decay=decay,
    )


def sent_as_momentum(rules: selection.Rules, model: nn.Module) -> dict[str, Codec]:
    """Return the codecs that send momentum, by parameter; a second momentum would count twice."""
    sparse = sparse_names(model)
    sent = {}
    for name, parameter in model.named_parameters():
        spec = spec_of(clean(name), parameter, is_sparse=clean(name) in sparse)
        codec = rules.choice(spec).codec
        if has_momentum(codec):
            sent[name] = codec
    return sent
