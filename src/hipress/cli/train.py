"""`hipress train`: data-parallel training of a named model on named data, with any codec."""

from __future__ import annotations

import contextlib
import json as json_text
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer import Option

from hipress.cli.options import takes_options
from hipress.cli.ui import JsonOutput, bars, writing
from hipress.errors import HipressError, UsageError
from hipress.train.config import PLAIN, TrainConfig

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress, TaskID
    from torch._C._distributed_c10d import Store

    from hipress.launch import World
    from hipress.train.ranks import Ranks
    from hipress.train.result import Facts, Result

app = typer.Typer()

LEAVING_S = 5.0
"""How long rank 0 waits at most for the others at the end."""
MARGIN_S = 30.0
"""Seconds by which torch's timeout is longer than ours."""

_output = partial(Option, rich_help_panel="Checkpoints and output")


@app.command(
    epilog="Example: hipress train --model cnn --data digits --codec int8 --epochs 5; "
    "on four ranks: hipress run --nproc 4 -- hipress train --model cnn"
)
@takes_options
def train(
    config: TrainConfig,
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
    _run(config, log, output)


# --- a rank ---------------------------------------------------------------------------------------


def _run(config: TrainConfig, log: Path | None, output: JsonOutput) -> None:
    from hipress import launch, settings
    from hipress.bench.cluster import leave
    from hipress.errors import AgreementError, TrainingError
    from hipress.train.ranks import JointError, Ranks

    world = launch.join()
    if world.rank > 0 and settings.log_level() > logging.DEBUG:
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

    from hipress.casync.ranks.lost_store import in_the_store
    from hipress.environment import read_environment
    from hipress.session.groups import loopback_store

    if world.size == 1:
        return HashStore()
    limit = _limit()
    with in_the_store(world.rank):
        store: Store | None = loopback_store(read_environment(), limit)
        if store is None:
            store = next(iter(rendezvous("env://", world.rank, world.size, timeout=limit)))[0]
    store.set_timeout(limit)
    return store


def _train(
    config: TrainConfig, log: Path | None, ranks: Ranks, world: World, store: Store
) -> tuple[Facts, Result]:
    import torch.distributed as dist

    from hipress.train.job import Job
    from hipress.train.ranks import choose_device

    def place() -> tuple[torch.device, str]:
        config.check()
        return choose_device(
            config.device, config.backend, local_rank=world.local_rank, num_local=world.local_size
        )

    where, backend = ranks.jointly("hipress train", place)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=_limit()
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


def _limit() -> timedelta:
    """Returns torch's timeout: a little longer than ours, which names the rank that is late."""
    from torch.distributed.distributed_c10d import default_pg_timeout

    from hipress import settings

    given_s = settings.timeout_s()
    return default_pg_timeout if given_s is None else timedelta(seconds=given_s + MARGIN_S)


def _leave_together(world: World, store: Store) -> None:
    """Ends the process group, rank 0 last: the others may still read from the store it holds."""
    import torch.distributed as dist

    with contextlib.suppress(dist.DistNetworkError):  # rank 0 has waited, and left
        num_left = store.add("hipress/train/left", 1)
        deadline = time.monotonic() + LEAVING_S
        while world.rank == 0 and num_left < world.size and time.monotonic() < deadline:
            time.sleep(0.02)
            num_left = store.add("hipress/train/left", 0)
    if dist.is_initialized():
        dist.destroy_process_group()


# --- what is shown --------------------------------------------------------------------------------


class TrainView:
    """Shows a training: a bar where stderr is a terminal, lines where it is not, and JSON lines in
    the log. All ranks have the same rows, so that `is_shown` is False on all but one.
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
            with writing(log, "--log"):
                stream = stack.enter_context(log.open("a"))
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
    if facts.schedule is not None:
        how += f", schedule {facts.schedule}"
    if facts.num_ranks == 1:
        how = "one rank: gradients are not exchanged"
        if facts.num_compressed:
            how += f", but {facts.codec} is applied"
        elif facts.codec not in ("auto", "plan", PLAIN):
            how += f", and {facts.codec} is applied to none, as all are exempt (--min-size)"
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
