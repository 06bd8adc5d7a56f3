"""`hipress bench train`: a training step on an emulated cluster, beside DDP and its hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress.cli import _cluster
from hipress.cli._expressions import split_expressions
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.bench.train_rows import Config

EXAMPLE = (
    "Example: hipress bench train --hosts 4 --rate 1gbit --model vgg,gpt "
    "--codec 'onebit,dgc(ratio=0.001)' --strategy ps --json f.json"
)
LINE_UP = "onebit,dgc(ratio=0.001)"
HOOKS = "ddp,fp16,powersgd-1,powersgd-2,powersgd-4"
PROCESS_BYTES = 300 * 10**6
"""Of a rank, before it has a model."""


def train(
    hosts: Annotated[int, typer.Option(min=1, max=64, help="Hosts, one rank each.")] = 4,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Rate of each host's link, each way; 1gbit if not given. 100mbit,1gbit measures "
            "with both, none as fast as this machine can."
        ),
    ] = None,
    delay: Annotated[str, typer.Option(help="Time from host to host: 5ms, 100us.")] = "none",
    model: Annotated[
        str, typer.Option(help="Models (docs/models.md), with commas between.")
    ] = "vgg,gpt",
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Examples per rank and step; if not given, the model's own."),
    ] = None,
    codec: Annotated[
        str,
        typer.Option(help="Codec expressions, with commas between; auto decides among the others."),
    ] = LINE_UP,
    strategy: Annotated[
        str, typer.Option(help="ps, ring, hierarchical or allreduce, with commas between.")
    ] = "ps",
    hooks: Annotated[
        str, typer.Option(help="Torch's own hooks to stand beside; ddp always does.")
    ] = HOOKS,
    bucket_mb: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bucket of DDP in MiB; if not given, its default: 25, the first 1."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each round.")] = 2,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; with cuda all ranks share the first GPU.")
    ] = "cpu",
    loopback: Annotated[
        bool, typer.Option("--loopback", help="All ranks on 127.0.0.1, nothing shaped.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which a run is given up.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the rows to this file; - for stdout.")
    ] = None,
) -> None:
    """A training step with each codec and strategy, beside DDP and its hooks.

    Each host is a rank on an emulated cluster (see hipress lab). A step
    takes as long as its slowest rank. "compute" is the step without any
    exchange: what lies between it and ddp is the communication that ddp
    does not hide, and "removed" the part of that which is gone: 0 % is
    ddp, 100 % the bound. "x ddp" is ddp's time divided by the row's.
    "extra MB" is memory beyond ddp's. PowerSGD gets all gradients in one
    bucket, because with several its all-reduces meet on gloo. "auto" is
    timed when it has decided; the note is its reason.
    Exit code 1: ranks hold different parameters, a loss is not finite, or
    the bytes do not add up.
    """
    from hipress.bench.table import check_json, is_stdout, write_json

    check_json(json)
    made = configs(
        hosts=hosts,
        rates=(rate or ("none" if loopback else "1gbit")).split(","),
        delay=delay,
        models=tuple(dict.fromkeys(split_expressions(model))),
        batch=batch,
        codecs=tuple(dict.fromkeys(split_expressions(codec))),
        strategies=tuple(dict.fromkeys(split_expressions(strategy))),
        hooks=tuple(dict.fromkeys(["ddp", *split_expressions(hooks)])),
        bucket_mb=bucket_mb,
        repeats=repeats,
        steps=steps,
        device=device,
        is_shaped=not loopback,
    )
    rows = _rows(made, timeout)
    _print_rows(rows, to_stderr=is_stdout(json))
    if json is not None:
        write_json(json, "bench train", rows)
    _cluster.tell_problems(rows)


def configs(
    *,
    hosts: int,
    rates: list[str],
    delay: str,
    models: tuple[str, ...],
    batch: int | None,
    codecs: tuple[str, ...],
    strategies: tuple[str, ...],
    hooks: tuple[str, ...],
    bucket_mb: int | None,
    repeats: int,
    steps: int,
    device: str,
    is_shaped: bool,
) -> list[Config]:
    """What to measure, one for each model and rate; all that can be refused is refused here."""
    import hipress
    from hipress.bench.train_rows import AUTO, Config
    from hipress.bench.train_worker import check_hook
    from hipress.casync.graphs.strategies import check
    from hipress.lab.links import parse_rate
    from hipress.train.models import model

    lines = {name: model(name) for name in models}
    for name, line in lines.items():
        if line.task is None:
            raise UsageError(
                f"--model {name!r} brings no data to time it with; name a built-in one."
            )
    for hook in hooks:
        check_hook(hook)
    for expression in codecs:
        if expression != AUTO:
            hipress.codec(expression)
    for strategy in strategies:
        check(strategy)
    _cluster.check_device(device)
    _cluster.check_network(rates, delay, is_shaped=is_shaped)
    found = [
        Config(
            num_hosts=hosts,
            rate=rate,
            rate_bits=parse_rate(rate),
            delay=delay,
            is_shaped=is_shaped,
            model=name,
            num_parameters=line.num_parameters,
            batch=batch or line.batch,
            steps=steps,
            hooks=hooks,
            codecs=codecs,
            strategies=strategies,
            bucket_mb=bucket_mb,
            repeats=repeats,
            device=device,
            result="",
        )
        for name, line in lines.items()
        for rate in dict.fromkeys(rate.strip() for rate in rates)
    ]
    for config in found:
        _cluster.check_memory(
            f"model {config.model!r}",
            hosts * (PROCESS_BYTES + _num_copies(config) * config.size_bytes),
            "give fewer --hosts, --hooks, codecs or strategies",
            device,
        )
    return found


def _num_copies(config: Config) -> int:
    """Arrays of the gradient's size that a rank holds."""
    from hipress.bench.train_worker import HOOKS

    num_ours = len(config.codecs) * len(config.strategies)
    # Parameters, gradients and momentum of each variant and of `compute`; ours have residuals and
    # buffers; the model that all are copies of, and what the one that runs needs.
    num_variants = 1 + len(config.hooks) + num_ours
    return 3 * num_variants + sum(HOOKS[h].num_copies for h in config.hooks) + 2 * num_ours + 2


def _rows(configs: list[Config], timeout: float | None) -> list[dict[str, Any]]:
    """The rows of all models and rates, with a progress bar on stderr."""
    from hipress.bench.table import progress_bar
    from hipress.bench.train_rows import rows

    found: list[dict[str, Any]] = []
    with progress_bar(len(configs)) as begin:
        for config in configs:
            label = f"{config.model}, {config.rate}"
            found += rows(config, run(config, timeout, begin(label)))
    return found


def run(config: Config, timeout: float | None, on_part: Callable[[float], None]) -> dict[str, Any]:
    """Run the worker on all ranks of a lab of its own and return what rank 0 wrote."""
    # Torch's PowerSGD waits for the GPU wherever there is one, and fails for a CPU's gradients.
    env = {"CUDA_VISIBLE_DEVICES": ""} if config.device == "cpu" else {}
    return _cluster.run("hipress.cli._train_rank", config, timeout, on_part, env)


def _print_rows(rows: list[dict[str, Any]], to_stderr: bool) -> None:
    from hipress.bench.table import Column, Row, fixed, print_table

    def megabytes(row: Row) -> str | None:
        """On the wire; without an interface to count, what the engine says."""
        field = "interface_bytes_per_rank"
        if row[field] is None:
            field = "wire_bytes_per_rank"
        return fixed(field, 3, scale=1e-6)(row)

    columns = [
        Column(header="model", show=lambda row: str(row["model"]), is_text=True),
        Column(header="variant", show=lambda row: row["codec"] or row["variant"], is_text=True),
        Column(header="strategy", show=lambda row: row["strategy"], is_text=True),
        Column(header="rate", show=lambda row: str(row["rate"])),
        Column(header="ms per\nstep", show=fixed("seconds_median", 1, scale=1e3)),
        Column(header="x\nddp", show=fixed("speedup", 2)),
        Column(header="removed\n%", show=fixed("exposed_removed", 1, scale=100)),
        Column(header="MB\nper rank", show=megabytes),
        Column(header="extra\nMB", show=fixed("extra_memory_bytes", 1, scale=1e-6)),
        Column(header="note", show=lambda row: row["note"], is_text=True),
    ]
    first = rows[0]
    title = (
        f"Training steps, {first['hosts']} hosts, {first['device']}, medians of "
        f"{first['repeats']} rounds of {first['steps']} step(s)"
    )
    print_table(title, columns, rows, to_stderr=to_stderr)
