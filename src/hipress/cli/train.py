"""`hipress train`: data-parallel training of a named model on named data, with any codec."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hipress.errors import HipressError, UsageError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from hipress.cli._train_view import View
    from hipress.launch import World
    from hipress.train.config import TrainConfig
    from hipress.train.ranks import Ranks
    from hipress.train.result import Facts, Result

app = typer.Typer()

PARTING_S = 5.0
"""How long rank 0 waits at most for the others at the end."""
MARGIN_S = 30.0
"""By how much torch's patience is longer than ours."""

DATA = "Data"
LENGTH = "Length and learning rate"
EXCHANGE = "Exchange"
OUTPUT = "Checkpoints and output"
PLACE = "Machine"


@app.command(
    epilog="Example: hipress train --model cnn --data digits --codec onebit --epochs 5; "
    "on four ranks: hipress run --nproc 4 -- hipress train --model cnn"
)
def train(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Folder or files of --data, where it has any.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="A built-in model (docs/models.md), or package.module:callable.")
    ] = "cnn",
    data: Annotated[
        str,
        typer.Option(
            help="digits, synthetic, fashion-mnist DIR, cifar100 DIR, imagefolder DIR, text FILE "
            "or parallel-text SRC TGT.",
            rich_help_panel=DATA,
        ),
    ] = "digits",
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Examples per rank and step.", rich_help_panel=DATA),
    ] = None,
    side: Annotated[
        int | None, typer.Option(min=1, help="Pixels of an image's side.", rich_help_panel=DATA)
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence.", rich_help_panel=DATA)
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="What text is cut into: bytes or words.", rich_help_panel=DATA),
    ] = None,
    loaders: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that prepare batches.", rich_help_panel=DATA),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="Expression, e.g. 'dgc(ratio=0.01)'; auto; uncompressed: DDP as it comes.",
            rich_help_panel=EXCHANGE,
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="ps, ring, hierarchical or allreduce.", rich_help_panel=EXCHANGE),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="File that decides for each gradient: plan.json, or SeCoPaPlan.txt with --codec.",
            rich_help_panel=EXCHANGE,
        ),
    ] = None,
    min_size: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Gradients with fewer elements are left alone; 4096 if not given.",
            rich_help_panel=EXCHANGE,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Parameters left alone: name or pattern.", rich_help_panel=EXCHANGE),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Parameters compressed though small.", rich_help_panel=EXCHANGE),
    ] = None,
    plain_steps: Annotated[
        int,
        typer.Option(min=0, help="First steps without compression.", rich_help_panel=EXCHANGE),
    ] = 0,
    epochs: Annotated[
        float | None,
        typer.Option(help="How long; 1 if neither is given.", rich_help_panel=LENGTH),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="How long, in steps.", rich_help_panel=LENGTH)
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="sgd, adam or adamw.", rich_help_panel=LENGTH)
    ] = "sgd",
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate, not scaled by ranks; 0.01 for sgd, else 0.001.",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    momentum: Annotated[
        float | None,
        typer.Option(help="Of sgd, 0.9; left out where the codec has it.", rich_help_panel=LENGTH),
    ] = None,
    nesterov: Annotated[
        bool, typer.Option("--nesterov", help="Nesterov's momentum.", rich_help_panel=LENGTH)
    ] = False,
    weight_decay: Annotated[float, typer.Option(help="L2 term.", rich_help_panel=LENGTH)] = 0.0,
    lr_mode: Annotated[
        str, typer.Option(help="constant, step or cosine.", rich_help_panel=LENGTH)
    ] = "constant",
    lr_decay: Annotated[
        float | None, typer.Option(help="Factor of each step, 0.1.", rich_help_panel=LENGTH)
    ] = None,
    lr_decay_epochs: Annotated[
        str | None, typer.Option(help="When, e.g. 50,80.", rich_help_panel=LENGTH)
    ] = None,
    warmup_epochs: Annotated[
        float,
        typer.Option(help="In which the rate rises from --warmup-lr.", rich_help_panel=LENGTH),
    ] = 0.0,
    warmup_lr: Annotated[float, typer.Option(help="Where it starts.", rich_help_panel=LENGTH)] = 0,
    clip_norm: Annotated[
        float | None, typer.Option(help="Largest norm of the gradient.", rich_help_panel=LENGTH)
    ] = None,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Batches of a step.", rich_help_panel=LENGTH)
    ] = 1,
    amp: Annotated[
        str, typer.Option(help="Mixed precision: off, bf16 or fp16.", rich_help_panel=LENGTH)
    ] = "off",
    seed: Annotated[
        int, typer.Option(min=0, help="Of weights, order and codecs.", rich_help_panel=LENGTH)
    ] = 0,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints, seen by all hosts.", rich_help_panel=OUTPUT),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps; each epoch if not given.", rich_help_panel=OUTPUT),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from --checkpoint.", rich_help_panel=OUTPUT)
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(help="File for JSON lines; - for stdout.", rich_help_panel=OUTPUT),
    ] = None,
    log_every: Annotated[
        int, typer.Option(min=1, help="Steps between lines.", rich_help_panel=OUTPUT)
    ] = 10,
    eval_every: Annotated[
        float, typer.Option(help="Epochs; 0: at the end.", rich_help_panel=OUTPUT)
    ] = 1.0,
    no_eval: Annotated[
        bool, typer.Option("--no-eval", help="Never evaluate.", rich_help_panel=OUTPUT)
    ] = False,
    check_every: Annotated[
        int,
        typer.Option(min=0, help="Steps between comparisons of ranks.", rich_help_panel=OUTPUT),
    ] = 0,
    timeline: Annotated[
        Path | None, typer.Option(help="Trace of five steps, for Perfetto.", rich_help_panel=OUTPUT)
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write the result here; - for stdout.", rich_help_panel=OUTPUT),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=PLACE)] = "auto",
    backend: Annotated[
        str, typer.Option(help="auto, gloo or nccl.", rich_help_panel=PLACE)
    ] = "auto",
) -> None:
    """Train a model with data parallelism and compressed gradients.

    Every rank runs this command: start it with hipress run, torchrun,
    srun or hipress lab run; alone it is one rank. Speed is counted without
    evaluations, checkpoints and the first 3 steps. A loss that is not
    finite, or ranks that end with different parameters, are errors.
    """
    from hipress.bench.table import check_json, is_stdout
    from hipress.train.config import TrainConfig

    if str(log) == "-" and is_stdout(json):
        raise UsageError("--log - and --json - both want stdout; give one of them a file.")
    check_json(json)
    config = TrainConfig(
        model=model,
        data=data,
        paths=tuple(paths or ()),
        codec=codec,
        strategy=strategy,
        plan=plan,
        min_size=min_size,
        exclude=tuple(exclude or ()),
        include=tuple(include or ()),
        plain_steps=plain_steps,
        batch=batch,
        accumulate=accumulate,
        epochs=epochs,
        steps=steps,
        optimizer=optimizer,
        rate=lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        rate_mode=lr_mode,
        rate_decay=lr_decay,
        decay_epochs=_epochs(lr_decay_epochs),
        warmup_epochs=warmup_epochs,
        warmup_rate=warmup_lr,
        clip_norm=clip_norm,
        amp=amp,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        log_every=log_every,
        eval_every=eval_every,
        evaluates=not no_eval,
        check_every=check_every,
        timeline=timeline,
        device=device,
        backend=backend,
        seed=seed,
        loaders=loaders,
        side=side,
        length=length,
        tokens=tokens,
    )
    _run(config, log, json)


def _epochs(text: str | None) -> tuple[float, ...]:
    try:
        return () if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--lr-decay-epochs {text!r} is no list of numbers; give e.g. 50,80."
        ) from None


def _run(config: TrainConfig, log: Path | None, json: Path | None) -> None:
    """This process as a rank."""
    from hipress import launch, settings
    from hipress.bench._ranks import leave
    from hipress.errors import AgreementError, TrainingError
    from hipress.train.ranks import JointError, Ranks

    world = launch.join()
    if world.rank > 0 and not os.environ.get(settings.LOG.name):
        logging.getLogger("hipress").setLevel(logging.ERROR)  # all say the same
    store = _meet(world)
    try:
        facts, result = _train(config, log, Ranks(store, world.rank, world.size), world, store)
    except HipressError as error:
        if world.size == 1:
            _part(world, store)
            raise
        # What all ranks raise alike is said once.
        is_joint = isinstance(error, (AgreementError, JointError, TrainingError))
        if world.rank == 0 or not is_joint:
            who = "" if is_joint else f"rank {world.rank}: "
            print(f"hipress: {who}{error}", file=sys.stderr, flush=True)
        if is_joint:
            _part(world, store)
        leave(2)
    if world.rank == 0:
        _tell(facts, result, json)
    _part(world, store)
    if world.size > 1:
        leave()


def _meet(world: World) -> Store:
    """The store that all ranks share, before they have a process group."""
    from datetime import timedelta

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
    """The whole job of this rank."""
    from datetime import timedelta

    import torch.distributed as dist

    from hipress import settings
    from hipress.cli._train_view import Silent, view
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
        watcher: Silent | View = Silent()
        if world.rank == 0:
            opened = view(log)
            watcher = ranks.jointly("--log", lambda: stack.enter_context(opened))
        else:
            ranks.jointly("--log", lambda: None)
        result = job.run(watcher)
        watcher.on_end(result)
    dist.barrier()
    job.close()
    return facts, result


def _part(world: World, store: Store) -> None:
    """Leave together, rank 0 last: the others may still read from the store that it holds."""
    import torch.distributed as dist

    num_left = store.add("hipress/train/left", 1)
    deadline = time.monotonic() + PARTING_S
    while world.rank == 0 and num_left < world.size and time.monotonic() < deadline:
        time.sleep(0.02)
        num_left = store.add("hipress/train/left", 0)
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell(facts: Facts, result: Result, json: Path | None) -> None:
    from dataclasses import asdict

    from hipress.bench.table import is_stdout, write_json
    from hipress.cli._train_view import summary

    typer.echo(summary(facts, result), err=is_stdout(json))
    if json is not None:
        write_json(json, "train", [asdict(facts) | asdict(result)])
