"""`hipress bench prediction`: simulated steps beside measured ones, on an emulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hipress.cli import _cluster
from hipress.cli._expressions import split_expressions

EXAMPLE = (
    "Example: hipress bench prediction --hosts 2,4 --rate 100mbit,1gbit --model vgg "
    "--codec onebit,int8 --json f.json"
)


def prediction(
    hosts: Annotated[str, typer.Option(help="Hosts, one rank each; several with commas.")] = "2,4",
    rate: Annotated[
        str, typer.Option(help="Rates of each host's link, with commas between.")
    ] = "100mbit,300mbit,1gbit",
    delay: Annotated[str, typer.Option(help="Time from host to host: 5ms, 100us.")] = "none",
    model: Annotated[
        str, typer.Option(help="Models (docs/models.md), with commas between.")
    ] = "vgg,gpt",
    codec: Annotated[
        str, typer.Option(help="Codec expressions, with commas between.")
    ] = "onebit,int8,dgc(ratio=0.001)",
    strategy: Annotated[str, typer.Option(help="Strategies, with commas between.")] = "ps,ring",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each round.")] = 2,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; with cuda all ranks share the first GPU.")
    ] = "cpu",
    timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which a run is given up.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the rows to this file; - for stdout.")
    ] = None,
) -> None:
    """How far simulated steps are from measured ones.

    For each number of hosts, rate and model the cluster is profiled, as
    hipress profile does, and then, in a run of its own, training steps are
    timed as hipress bench train does. The simulator sees the profile only.
    Exit code 1: the median error is above 12 %, the largest above 30 %, or
    a measured run has a problem.
    """
    from hipress.bench.prediction_rows import rows
    from hipress.bench.table import check_json, is_stdout, progress_bar, write_json
    from hipress.bench.train_rows import BASELINE
    from hipress.bench.train_rows import rows as train_rows
    from hipress.cli import bench_train, profile

    check_json(json)
    numbers = _cluster.host_numbers(hosts)
    codecs = tuple(dict.fromkeys(split_expressions(codec)))
    settings = [
        (number, one_rate, name)
        for name in dict.fromkeys(split_expressions(model))
        for one_rate in dict.fromkeys(part.strip() for part in rate.split(","))
        for number in numbers
    ]
    pairs = []
    for number, one_rate, name in settings:  # all that can be refused is refused before the first
        shared: dict[str, Any] = {"hosts": number, "delay": delay, "device": device}
        pairs.append(
            (
                profile.config(
                    rate=one_rate, model=name, batch=None, codecs=("none", *codecs),
                    is_shaped=True, fresh=False, **shared,
                ),
                bench_train.configs(
                    rates=[one_rate], models=(name,), batch=None, codecs=codecs,
                    strategies=tuple(dict.fromkeys(split_expressions(strategy))),
                    hooks=(BASELINE,), bucket_mb=None, repeats=repeats, steps=steps,
                    is_shaped=True, **shared,
                )[0],
            )
        )  # fmt: skip
    found: list[dict[str, Any]] = []
    with progress_bar(len(pairs)) as begin:
        for profiled, timed in pairs:
            on_part = begin(f"{timed.model}, {timed.num_hosts} hosts, {timed.rate}")
            measured = profile.run(profiled, timeout, _part(on_part, 0.0, 0.25))
            result = bench_train.run(timed, timeout, _part(on_part, 0.25, 1.0))
            found += rows(measured, train_rows(timed, result), BASELINE)
    _print_rows(found, to_stderr=is_stdout(json))
    if json is not None:
        write_json(json, "bench prediction", found)
    _cluster.tell_problems(found)
    _judge(found)


def _part(on_part: Callable[[float], None], start: float, stop: float) -> Callable[[float], None]:
    return lambda done: on_part(start + done * (stop - start))


def _print_rows(found: list[dict[str, Any]], to_stderr: bool) -> None:
    from hipress.bench.table import Column, fixed, print_table

    columns = [
        Column(header="model", show=lambda row: str(row["model"]), is_text=True),
        Column(header="hosts", show=lambda row: str(row["hosts"])),
        Column(header="rate", show=lambda row: str(row["rate"])),
        Column(header="codec", show=lambda row: row["codec"] or "ddp", is_text=True),
        Column(header="strategy", show=lambda row: row["strategy"], is_text=True),
        Column(header="measured\nms", show=fixed("measured_seconds", 1, scale=1e3)),
        Column(header="simulated\nms", show=fixed("simulated_seconds", 1, scale=1e3)),
        Column(header="error\n%", show=fixed("error", 1, scale=100)),
    ]
    print_table("Simulated and measured training steps", columns, found, to_stderr=to_stderr)


def _judge(found: list[dict[str, Any]]) -> None:
    from hipress.bench.prediction_rows import MEDIAN_BAR, WORST_BAR, summary

    middle, worst = summary(found)
    typer.echo(
        f"{len(found)} settings: median error {middle:.1%} (bar {MEDIAN_BAR:.0%}), worst "
        f"{worst:.1%} (bar {WORST_BAR:.0%}).",
        err=True,
    )
    if middle > MEDIAN_BAR or worst > WORST_BAR:
        raise typer.Exit(1)
