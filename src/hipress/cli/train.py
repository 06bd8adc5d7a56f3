"""`hipress train`: data-parallel training of a named model on named data, with any codec."""

from __future__ import annotations

import contextlib
import json as json_text
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer import Argument, Option

from hipress.cli.options import takes_options
from hipress.cli.ui import JsonOutput, bars
from hipress.errors import HipressError, UsageError

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress, TaskID
    from torch._C._distributed_c10d import Store

    from hipress.launch import World
    from hipress.train.config import TrainConfig
    from hipress.train.ranks import Ranks
    from hipress.train.result import Facts, Result

app = typer.Typer()

LEAVING_S = 5.0
"""How long rank 0 waits at most for the others at the end."""
MARGIN_S = 30.0
"""By how much torch's timeout is longer than ours."""

_data = partial(Option, rich_help_panel="Data")
_length = partial(Option, rich_help_panel="Length and learning rate")
_exchange = partial(Option, rich_help_panel="Exchange")
_output = partial(Option, rich_help_panel="Checkpoints and output")
_machine = partial(Option, rich_help_panel="Machine")

DATA = (
    "digits, synthetic, fashion-mnist DIR, cifar100 DIR, imagefolder DIR, text FILE or "
    "parallel-text SRC TGT."
)
CODEC = "Expression, e.g. 'dgc(ratio=0.01)'; auto; uncompressed is plain DDP."
PLAN = "File that decides for each gradient: plan.json, or SeCoPaPlan.txt with --codec."
MODEL = "A built-in model (docs/models.md), or package.module:callable."


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of a training: the fields of its `TrainConfig`, as the command line has them."""

    model: Annotated[str, Option(help=MODEL)] = "cnn"
    data: Annotated[str, _data(help=DATA)] = "digits"
    batch: Annotated[int | None, _data(min=1, help="Examples per rank and step.")] = None
    side: Annotated[int | None, _data(min=1, help="Pixels of an image's side.")] = None
    length: Annotated[int | None, _data(min=2, help="Tokens of a sequence.")] = None
    tokens: Annotated[str | None, _data(help="What text is cut into: bytes or words.")] = None
    loaders: Annotated[int | None, _data(min=0, help="Processes that prepare batches.")] = None
    codec: Annotated[str | None, _exchange(help=CODEC)] = None
    strategy: Annotated[str | None, _exchange(help="ps, ring, hierarchical or allreduce.")] = None
    plan: Annotated[Path | None, _exchange(help=PLAN)] = None
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

    def config(self, paths: list[Path] | None) -> TrainConfig:
        """Returns the configuration of the training."""
        from hipress.train.config import TrainConfig

        fields = vars(self) | {
            "paths": tuple(paths or ()),
            "exclude": tuple(self.exclude or ()),
            "include": tuple(self.include or ()),
            "decay_epochs": _epochs(self.decay_epochs),
            "evaluates": not self.no_eval,
        }
        del fields["no_eval"]
        return TrainConfig(**fields)


@app.command(
    epilog="Example: hipress train --model cnn --data digits --codec onebit --epochs 5; "
    "on four ranks: hipress run --nproc 4 -- hipress train --model cnn"
)
@takes_options
def train(
    options: TrainOptions,
    paths: Annotated[
        list[Path] | None, Argument(help="Folder or files of --data, where it has any.")
    ] = None,
    log: Annotated[Path | None, _output(help="File for JSON lines; - for stdout.")] = None,
    json: Annotated[Path | None, _output(help="Write the result here; - for stdout.")] = None,
) -> None:
    """Train a model with data parallelism and compressed gradients.

    Every rank runs this command: start it with hipress run, torchrun,
    srun or hipress lab run; alone it is one rank. Speed is counted without
    evaluations, checkpoints and the first 3 steps. A loss that is not
    finite, or ranks that end with different parameters, are errors.
    """
    output = JsonOutput(json, "train")
    if str(log) == "-" and output.is_stdout:
        raise UsageError("--log - and --json - both want stdout; give one of them a file.")
    _run(options.config(paths), log, output)


def _epochs(text: str | None) -> tuple[float, ...]:
    try:
        return () if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--lr-decay-epochs {text!r} is not a list of numbers; give e.g. 50,80."
        ) from None


# --- a rank ---------------------------------------------------------------------------------------


def _run(config: TrainConfig, log: Path | None, output: JsonOutput) -> None:
    """Runs this process as a rank."""
    from hipress import launch, settings
    from hipress.bench.cluster import leave
    from hipress.errors import AgreementError, TrainingError
    from hipress.train.ranks import JointError, Ranks

    world = launch.join()
    if world.rank > 0 and not os.environ.get(settings.LOG.name):
        logging.getLogger("hipress").setLevel(logging.ERROR)  # all say the same
    store = _store(world)
    try:
        facts, result = _train(config, log, Ranks(store, world.rank, world.size), world, store)
    except HipressError as error:
        if world.size == 1:
            _leave_together(world, store)
            raise
        # What all ranks raise alike is printed once.
        is_joint = isinstance(error, (AgreementError, JointError, TrainingError))
        if world.rank == 0 or not is_joint:
            who = "" if is_joint else f"rank {world.rank}: "
            print(f"hipress: {who}{error}", file=sys.stderr, flush=True)
        if is_joint:
            _leave_together(world, store)
        leave(2)
    if world.rank == 0:
        typer.echo(summary(facts, result), err=output.is_stdout)
        output.write([asdict(facts) | asdict(result)])
    _leave_together(world, store)
    if world.size > 1:
        leave()


def _store(world: World) -> Store:
    """Returns the store that all ranks share, before they have a process group."""
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.rendezvous import rendezvous

    from hipress import settings

    if world.size == 1:
        return HashStore()
    limit = timedelta(seconds=settings.timeout_s() + MARGIN_S)
    met: tuple[Store, int, int] = next(
        iter(rendezvous("env://", world.rank, world.size, timeout=limit))
    )
    store = met[0]
    store.set_timeout(limit)
    return store


def _train(
    config: TrainConfig, log: Path | None, ranks: Ranks, world: World, store: Store
) -> tuple[Facts, Result]:
    """Trains as this rank, from its device to the result."""
    import torch.distributed as dist

    from hipress import settings
    from hipress.train.job import Job
    from hipress.train.ranks import choose_device

    def place() -> tuple[torch.device, str]:
        config.check()
        return choose_device(
            config.device, config.backend, local_rank=world.local_rank, num_local=world.local_size
        )

    where, backend = ranks.jointly("hipress train", place)
    # A little longer than ours, which names the rank that is late; torch's own is half an hour.
    limit = timedelta(seconds=settings.timeout_s() + MARGIN_S)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=limit
    )
    job = Job(config, where, ranks)
    facts = job.facts()
    with contextlib.ExitStack() as stack:
        opened = train_view(log, is_shown=world.rank == 0)
        view = ranks.jointly("--log", lambda: stack.enter_context(opened))
        result = job.run(view)
        view.on_end(result)
    dist.barrier()
    job.close()
    return facts, result


def _leave_together(world: World, store: Store) -> None:
    """Ends the process group, rank 0 last: the others may still read from the store it holds."""
    import torch.distributed as dist

    num_left = store.add("hipress/train/left", 1)
    deadline = time.monotonic() + LEAVING_S
    while world.rank == 0 and num_left < world.size and time.monotonic() < deadline:
        time.sleep(0.02)
        num_left = store.add("hipress/train/left", 0)
    if dist.is_initialized():
        dist.destroy_process_group()


# --- what is shown --------------------------------------------------------------------------------


class TrainView:
    """Shows a training: a bar where stderr is a terminal, lines where it is not, and the log.

    Args:
        log: Where JSON lines go, if anywhere.
        progress: The bar, if there is one.
        is_shown: False on all ranks but one, since all of them have the same rows.
    """

    def __init__(
        self, log: TextIO | None, progress: Progress | None, *, is_shown: bool = True
    ) -> None:
        self._log = log
        self._progress = progress
        self._is_shown = is_shown
        self._bar: TaskID | None = None
        self.facts: Facts | None = None

    def on_start(self, facts: Facts) -> None:
        """Prints what is trained, how, and on what."""
        self.facts = facts
        self._write({"kind": "start", **asdict(facts)})
        self._print(introduction(facts))
        if self._progress is not None:
            self._bar = self._progress.add_task(
                "train", total=facts.num_steps, completed=facts.first_step, status=""
            )

    def on_step(self, step: int) -> None:
        """Moves the bar."""
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=step)

    def on_row(self, row: dict[str, Any]) -> None:
        """Shows a row and writes it to the log."""
        self._write(row)
        assert self.facts is not None
        if self._progress is None or self._bar is None or row["kind"] == "test":
            self._print(line(row, self.facts))
        else:
            # Beside the bar there is room for little on 80 columns.
            speed = row["units_per_s_per_rank"] * self.facts.num_ranks
            status = f"loss {row['loss']:.4f}  {speed:,.0f} {self.facts.unit}/s"
            self._progress.update(self._bar, status=status)

    def on_end(self, result: Result) -> None:
        """Writes the last line of the log."""
        self._write({"kind": "end", **asdict(result)})

    def _print(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._is_shown:
            print(text, file=sys.stderr, flush=True)

    def _write(self, row: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(json_text.dumps(row) + "\n")
            self._log.flush()


@contextlib.contextmanager
def train_view(log: Path | None, *, is_shown: bool = True) -> Iterator[TrainView]:
    """Opens the log (a file, which is appended to, or `-` for stdout) and shows the bar."""
    if not is_shown:
        yield TrainView(None, None, is_shown=False)
        return
    with contextlib.ExitStack() as stack:
        stream: TextIO | None = None
        if str(log) == "-":
            stream = sys.stdout
        elif log is not None:
            try:
                stream = stack.enter_context(log.open("a"))
            except OSError as error:
                raise UsageError(
                    f"--log {str(log)!r} cannot be written: {error.strerror}; give another file."
                ) from error
        progress = None
        if sys.stderr.isatty():
            from rich.progress import TimeRemainingColumn

            bar = bars(TimeRemainingColumn(), width=24, transient=True)
            progress = stack.enter_context(bar)
        yield TrainView(stream, progress)


def introduction(facts: Facts) -> str:
    """Returns what is trained, in two lines."""
    ranks = "1 rank" if facts.num_ranks == 1 else f"{facts.num_ranks} ranks"
    if facts.codec == "auto":
        how = "auto: measures first, then compresses where that is faster"
    elif facts.strategy is None and facts.codec != "plan":
        how = "gradients go as DDP sends them"
    else:
        way = facts.codec if facts.strategy is None else f"{facts.codec} by {facts.strategy}"
        how = (
            f"{way} for {facts.num_compressed} of {facts.num_gradients} gradients "
            f"({100 * facts.compressed_share:.1f} % of the elements)"
        )
    if facts.num_ranks == 1:
        how = "one rank: gradients are not exchanged"
        if facts.num_compressed:
            how += f", but {facts.codec} is applied"
    return (
        f"{facts.model} ({facts.num_parameters:,} parameters) on {facts.data} "
        f"({facts.num_train:,} examples), {ranks} x {facts.batch} a step, {facts.device}\n"
        f"{how}; steps {facts.first_step} to {facts.num_steps} ({facts.num_epochs:.3g} epochs)"
    )


def line(row: dict[str, Any], facts: Facts) -> str:
    """Returns a row of the log for people."""
    if row["kind"] == "test":
        found = [] if row["accuracy"] is None else [f"accuracy {row['accuracy']:.2f} %"]
        if row["test_loss"] is not None:
            found.append(f"loss {row['test_loss']:.4f}")
        return f"step {row['step']}: on the test data {', '.join(found) or 'nothing to score'}"
    each = row["units_per_s_per_rank"]
    return (
        f"step {row['step']}/{facts.num_steps} epoch {row['epoch']:.2f} loss {row['loss']:.4f} "
        f"lr {row['rate']:.3g} {each * facts.num_ranks:,.0f} {facts.unit}/s ({each:,.0f} per rank)"
    )


def summary(facts: Facts, result: Result) -> str:
    """Returns what came out, for people."""
    lines = [
        f"{result.num_steps} steps in {result.seconds:.1f} s with all around them; steps alone: "
        f"{result.steps_per_s:.2f} steps/s, {result.units_per_s:,.0f} {result.unit}/s in all, "
        f"{result.units_per_s_per_rank:,.0f} per rank",
        f"{result.wire_bytes_per_step / 1e6:.3f} MB sent a step by each rank, "
        f"{result.ratio:.1f} x less than plain; "
        f"{result.memory_bytes / 1e6:.1f} MB of memory for it",
    ]
    if facts.num_ranks == 1 or not facts.num_compressed:
        lines.pop()
    scores = []
    if result.loss is not None:
        scores.append(f"training loss {result.loss:.4f}")
    if result.test_loss is not None:
        scores.append(f"test loss {result.test_loss:.4f}")
    if result.accuracy is not None:
        scores.append(f"accuracy {result.accuracy:.2f} %")
    return "\n".join([*lines, ", ".join(scores)])
