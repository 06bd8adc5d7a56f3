"""`hipress bench convergence`: what each codec does to the accuracy that training reaches."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress.cli import _cluster
from hipress.cli._expressions import split_expressions
from hipress.cli.bench_train import PROCESS_BYTES
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.cli._convergence_rank import Config
    from hipress.train.convergence import ConvergenceTask

EXAMPLE = "Example: hipress bench convergence --data digits --codecs onebit,topk --plot curves.png"
LEAST_RATE = 1e-6


def convergence(
    data: Annotated[
        str | None,
        typer.Option(
            help="digits and fashion-mnist, with a comma between, or all; if not given, both, "
            "the second only where its folder is known."
        ),
    ] = None,
    codecs: Annotated[
        str | None, typer.Option(help="Codec expressions, with commas between; all if not given.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per codec; their mean counts.")] = 3,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Virtual workers of a run; 4 if not given.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a run; if not given, the task's own.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(min=LEAST_RATE, help="At the start; if not given, the task's own."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs at a time, 1 if not given; the results do not depend on it."
        ),
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(min=2, max=64, help="Train over a network instead: hosts, one rank each."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="With --hosts the rate of each host's link, each way; 1gbit if not given, none "
            "as fast as this machine can. Without --hosts the learning rate."
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="With --hosts: ps, ring, hierarchical or allreduce; ps if not given."),
    ] = None,
    loopback: Annotated[
        bool,
        typer.Option("--loopback", help="With --hosts: all ranks on 127.0.0.1, nothing shaped."),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0, help="With --hosts: seconds after which the runs of a data set are given up."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of Fashion-MNIST; if not given, HIPRESS_FASHION_MNIST."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the rows to this file; - for stdout.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Put the table between the markers of this page.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to this file.")] = None,
) -> None:
    """Train with every codec and with none, and compare test accuracies.

    Several virtual workers share one process; gradients go through the
    worker's codec and the aggregator's, as in a real sync. With --hosts
    every worker is a rank on an emulated cluster (see hipress lab): DDP
    with hipress.attach, and uncompressed is DDP alone. "Difference" is
    the accuracy in points above (+) or below (-) the uncompressed run of
    the same seed and number of steps, the mean of all seeds.
    Exit code 1: ranks of a run ended with different parameters.
    """
    from hipress.bench import convergence_table as table
    from hipress.bench.table import check_json, is_stdout, write_json
    from hipress.train.convergence import default_codecs

    check_json(json)
    table.check_outputs(markdown, plot)
    if hosts is None:
        _refuse(
            {"--strategy": strategy, "--loopback": loopback or None, "--timeout": timeout},
            "is for a network; give --hosts too, or leave it out.",
        )
        learning_rate = _learning_rate(rate, learning_rate)
    else:
        _refuse(
            {"--workers": workers, "--jobs": jobs},
            "is for virtual workers; leave it out with --hosts.",
        )
    tasks = _tasks(data, data_dir, steps, learning_rate)
    expressions = default_codecs() if codecs is None else split_expressions(codecs)
    if hosts is None:
        rows = _rows(tasks, expressions, seeds, workers or 4, data_dir, jobs or 1)
    else:
        configs = _configs(
            tasks,
            expressions,
            num_seeds=seeds,
            hosts=hosts,
            rate=rate or ("none" if loopback else "1gbit"),
            strategy=strategy or "ps",
            is_shaped=not loopback,
            folder=data_dir,
        )
        rows = _cluster_rows(configs, timeout)
    table.print_rows(rows, to_stderr=is_stdout(json))
    if json is not None:
        write_json(json, "bench convergence", rows)
    if markdown is not None:
        table.write_markdown(markdown, rows)
    if plot is not None:
        table.plot(plot, rows)
    if hosts is not None:
        _cluster.tell_problems(rows)


def _refuse(given: dict[str, Any], why: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} {why}")


def _learning_rate(rate: str | None, learning_rate: float | None) -> float | None:
    """The wish of a run without a network, where `--rate` speaks of learning."""
    if rate is None:
        return learning_rate
    if learning_rate is not None:
        raise UsageError("--rate is the learning rate too where --hosts is not given; give one.")
    try:
        value = float(rate)
    except ValueError:
        value = math.nan
    if not LEAST_RATE <= value < math.inf:
        raise UsageError(
            f"--rate {rate!r} is no learning rate of at least {LEAST_RATE:g}; the rate of a "
            "network needs --hosts."
        )
    return value


def _tasks(
    data: str | None, folder: Path | None, num_steps: int | None, rate: float | None
) -> list[ConvergenceTask]:
    """What is to be trained; without a wish, all that is there."""
    from hipress import settings
    from hipress.train.convergence import TASKS, task

    names = list(TASKS) if data in (None, "all") else [name.strip() for name in data.split(",")]
    if data is None and (folder or settings.fashion_mnist()) is None:
        names.remove("fashion-mnist")
        typer.echo(
            "fashion-mnist is left out: set HIPRESS_FASHION_MNIST or --data-dir to its folder.",
            err=True,
        )
    tasks = [task(name) for name in dict.fromkeys(names)]
    return [
        dataclasses.replace(t, num_steps=num_steps or t.num_steps, rate=rate or t.rate)
        for t in tasks
    ]


def _rows(
    tasks: list[ConvergenceTask],
    expressions: list[str],
    num_seeds: int,
    num_workers: int,
    folder: Path | None,
    jobs: int,
) -> list[dict[str, Any]]:
    """One row per data set and codec, with a progress bar on stderr."""
    from hipress.bench.table import progress_bar
    from hipress.train.convergence import check, compare, names_of

    for task in tasks:  # a missing second data set must not cost the minutes of the first
        check(task, expressions, num_workers=num_workers, folder=folder)
    num_runs = len(tasks) * num_seeds * len(names_of(expressions))
    rows = []
    with progress_bar(num_runs) as begin:
        for task in tasks:
            rows += compare(
                task,
                expressions,
                num_seeds=num_seeds,
                num_workers=num_workers,
                folder=folder,
                jobs=jobs,
                on_run=lambda label: begin(label)(1.0),
            )
    return rows


def _configs(
    tasks: list[ConvergenceTask],
    expressions: list[str],
    *,
    num_seeds: int,
    hosts: int,
    rate: str,
    strategy: str,
    is_shaped: bool,
    folder: Path | None,
) -> list[Config]:
    """What the ranks are told for each data set; all that can be refused is refused here."""
    from hipress import settings
    from hipress.casync.graphs.strategies import check as check_strategy
    from hipress.cli._convergence_rank import Config
    from hipress.lab.links import parse_rate
    from hipress.train.convergence import check, loaded, make_model, names_of

    check_strategy(strategy)
    _cluster.check_network([rate], "none", is_shaped=is_shaped)
    folder = folder or settings.fashion_mnist()
    configs = []
    for task in tasks:
        check(task, expressions, num_workers=hosts, folder=folder)
        data = loaded(task.data, folder)
        # As bytes, and once as float32 to find their mean.
        data_bytes = 5 * (data.train_images.nbytes + data.test_images.nbytes)
        _cluster.check_memory(
            f"{task.data} on {hosts} hosts",
            hosts * (PROCESS_BYTES + data_bytes),
            "give fewer --hosts",
        )
        configs.append(
            Config(
                num_hosts=hosts,
                rate=rate,
                rate_bits=parse_rate(rate),
                delay="none",
                is_shaped=is_shaped,
                repeats=num_seeds,
                device="cpu",
                result="",
                data=task.data,
                folder=None if folder is None else str(folder.absolute()),
                num_steps=task.num_steps,
                learning_rate=task.rate,
                num_parameters=sum(p.numel() for p in make_model(task, data, 0).parameters()),
                names=tuple(names_of(expressions)),
                strategy=strategy,
            )
        )
    return configs


def _cluster_rows(configs: list[Config], timeout: float | None) -> list[dict[str, Any]]:
    """The rows of all data sets, each a job on a lab of its own, with a progress bar on stderr."""
    from hipress.bench.table import progress_bar

    rows = []
    with progress_bar(len(configs)) as begin:
        for config in configs:
            label = f"{config.data}, {config.num_hosts} hosts"
            found = _cluster.run("hipress.cli._convergence_rank", config, timeout, begin(label))
            rows += _with_network(config, found["runs"])
    return rows


def _with_network(config: Config, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of runs, and in each what was seen of the network."""
    from hipress.train.convergence import Run, rows
    from hipress.train.virtual_sync import PLAIN

    by_name = {name: [one for one in found if one["run"]["codec"] == name] for name in config.names}
    plain_bytes = by_name[PLAIN][0]["wire_bytes"]
    runs = [Run(**one["run"]) for one in found]
    compared = []
    for row in rows(config.task, config.names, runs, num_workers=config.num_hosts):
        group = by_name[row["codec"]]
        first = group[0]
        compared.append(
            row
            | {
                "hosts": config.num_hosts,
                "rate": config.rate,
                "learning_rate": config.learning_rate,
                "strategy": None if row["codec"] == PLAIN else config.strategy,
                "ratio": round(plain_bytes / first["wire_bytes"], 2),
                "wire_bytes_per_rank": first["wire_bytes"],
                "wire_bytes_busiest_rank": first["busiest_bytes"],
                "interface_bytes_per_rank": first["interface_bytes"],
                "problem": _problem(config, group),
            }
        )
    return compared


def _problem(config: Config, runs: list[dict[str, Any]]) -> str | None:
    seeds = [str(one["run"]["seed"]) for one in runs if not one["ranks_agree"]]
    if not seeds:
        return None
    return (
        f"{config.data} with {runs[0]['run']['codec']}: ranks ended with different parameters, "
        f"seed {', '.join(seeds)}."
    )
