"""`hipress bench sync`: one synchronisation on an emulated cluster, beside gloo's all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress.cli import _cluster
from hipress.cli._expressions import split_expressions

if TYPE_CHECKING:
    from hipress.bench.sync_rows import Config

EXAMPLE = (
    "Example: hipress bench sync --hosts 4 --rate 1gbit --size 100MB "
    "--codec 'onebit,dgc(ratio=0.001)' --strategy ps,ring --json f.json"
)
LINE_UP = "onebit,dgc(ratio=0.001),int8,none"


def sync(
    hosts: Annotated[int, typer.Option(min=2, max=64, help="Hosts, one rank each.")] = 4,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Rate of each host's link, each way; 1gbit if not given. 100mbit,1gbit measures "
            "with both, none as fast as this machine can."
        ),
    ] = None,
    delay: Annotated[str, typer.Option(help="Time from host to host: 5ms, 100us.")] = "none",
    size: Annotated[str, typer.Option(help="Gradient size: 100MB, 4MiB, 25e6 (bytes).")] = "100MB",
    tensors: Annotated[
        int,
        typer.Option(min=1, help="Cut it into so many tensors, from 1 KB to a fifth of the whole."),
    ] = 1,
    codec: Annotated[str, typer.Option(help="Codec expressions, with commas between.")] = LINE_UP,
    strategy: Annotated[
        str, typer.Option(help="ps, ring, hierarchical or allreduce, with commas between.")
    ] = "ps",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; with cuda all ranks share the first GPU.")
    ] = "cpu",
    pipelining: Annotated[
        bool, typer.Option("--pipelining/--no-pipelining", help="Cut gradients into pieces.")
    ] = True,
    bulk: Annotated[
        bool, typer.Option("--bulk/--no-bulk", help="Put small gradients into one frame.")
    ] = True,
    compress_on_cpu: Annotated[
        bool, typer.Option("--compress-on-cpu", help="Run codecs on the host, with --device cuda.")
    ] = False,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="All ranks on 127.0.0.1, nothing shaped.")
    ] = False,
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Instead: what the executor costs per task.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which the run is given up.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the rows to this file; - for stdout.")
    ] = None,
) -> None:
    """One sync with each codec and strategy, beside gloo's all-reduce.

    Each host is a rank on an emulated cluster (see hipress lab). A sync
    takes as long as its slowest rank. "x gloo" is the time of gloo's
    all-reduce of the same float32 in the same run, divided by ours;
    "x bf16" the same for an all-reduce in bfloat16, the casts to and fro
    among it. "ideal" is what the bytes on the wire take at the line's rate.
    Exit code 1: a result is wrong, or the bytes do not add up.
    """
    from hipress.bench.table import check_json, is_stdout, write_json

    check_json(json)
    to_stderr = is_stdout(json)
    if overhead:
        rows = _overhead_rows(split_expressions(codec), repeats, to_stderr)
        if json is not None:
            write_json(json, "bench sync --overhead", rows)
        return
    configs = _configs(
        hosts=hosts,
        rates=(rate or ("none" if loopback else "1gbit")).split(","),
        delay=delay,
        size=size,
        num_tensors=tensors,
        codecs=tuple(dict.fromkeys(split_expressions(codec))),
        strategies=tuple(dict.fromkeys(split_expressions(strategy))),
        repeats=repeats,
        device=device,
        switches={"pipelined": pipelining, "bulk": bulk, "compress_on_cpu": compress_on_cpu},
        is_shaped=not loopback,
    )
    rows = _rows(configs, timeout)
    _print_rows(rows, to_stderr)
    if json is not None:
        write_json(json, "bench sync", rows)
    _cluster.tell_problems(rows)


def _configs(
    *,
    hosts: int,
    rates: list[str],
    delay: str,
    size: str,
    num_tensors: int,
    codecs: tuple[str, ...],
    strategies: tuple[str, ...],
    repeats: int,
    device: str,
    switches: dict[str, bool],
    is_shaped: bool,
) -> list[Config]:
    """What to measure, one for each rate; all that can be refused is refused here."""
    import hipress
    from hipress.bench.sync_rows import Config, tensor_numels
    from hipress.casync.graphs.strategies import check
    from hipress.cli.bench import parse_size
    from hipress.lab.links import parse_rate

    size_bytes = parse_size(size)
    # Gradient, tensors, baselines, and about one more for each plan.
    _cluster.check_memory(
        f"size {size!r}",
        hosts * size_bytes * (4 + len(codecs) * len(strategies)),
        "give a smaller --size, or fewer --hosts, codecs or strategies",
    )
    numels = tensor_numels(size_bytes, num_tensors)
    for expression in codecs:
        hipress.codec(expression).wire_bytes(max(numels))
    for strategy in strategies:
        check(strategy)
    _cluster.check_device(device)
    _cluster.check_network(rates, delay, is_shaped=is_shaped)
    return [
        Config(
            num_hosts=hosts,
            rate=rate,
            rate_bits=parse_rate(rate),
            delay=delay,
            is_shaped=is_shaped,
            numels=numels,
            codecs=codecs,
            strategies=strategies,
            repeats=repeats,
            device=device,
            result="",
            **switches,
        )
        for rate in dict.fromkeys(rate.strip() for rate in rates)
    ]


def _rows(configs: list[Config], timeout: float | None) -> list[dict[str, Any]]:
    """The rows of all rates, with a progress bar on stderr."""
    from hipress.bench.sync_rows import rows
    from hipress.bench.table import progress_bar

    found: list[dict[str, Any]] = []
    with progress_bar(len(configs)) as begin:
        for config in configs:
            found += rows(config, _run(config, timeout, begin(config.rate)))
    return found


def _run(config: Config, timeout: float | None, on_part: Callable[[float], None]) -> dict[str, Any]:
    """Run the worker on all ranks of a lab of its own and return what rank 0 wrote."""
    return _cluster.run("hipress.bench.sync_worker", config, timeout, on_part)


def _print_rows(rows: list[dict[str, Any]], to_stderr: bool) -> None:
    from hipress.bench.table import Column, fixed, print_table

    columns = [
        Column(header="codec", show=lambda row: str(row["codec"]), is_text=True),
        Column(header="strategy", show=lambda row: str(row["strategy"]), is_text=True),
        Column(header="rate", show=lambda row: str(row["rate"])),
        Column(header="ms", show=fixed("seconds_median", 1, scale=1e3)),
        Column(header="ideal\nms", show=fixed("ideal_seconds", 1, scale=1e3)),
        Column(header="codec\nms", show=fixed("codec_seconds", 1, scale=1e3)),
        Column(header="MB\nper rank", show=fixed("wire_bytes_per_rank", 3, scale=1e-6)),
        Column(header="gloo\nms", show=fixed("baseline_seconds_median", 1, scale=1e3)),
        Column(header="x\ngloo", show=fixed("speedup", 2)),
        Column(header="x\nbf16", show=fixed("speedup_over_bf16", 2)),
    ]
    first = rows[0]
    title = (
        f"{first['size_bytes'] / 1e6:g} MB of float32 in {first['tensors']} tensor(s), "
        f"{first['hosts']} hosts, {first['device']}, medians of {first['repeats']}"
    )
    print_table(title, columns, rows, to_stderr=to_stderr)


def _overhead_rows(codecs: list[str], repeats: int, to_stderr: bool) -> list[dict[str, Any]]:
    import hipress
    from hipress.bench.sync_overhead import overhead_row
    from hipress.bench.table import Column, fixed, print_table

    for expression in codecs:
        hipress.codec(expression)
    rows = [overhead_row(expression, repeats=3 * repeats) for expression in codecs]
    columns = [
        Column(header="codec", show=lambda row: str(row["codec"]), is_text=True),
        Column(header="tasks", show=lambda row: str(row["tasks"])),
        Column(header="sync\nms", show=fixed("seconds_median", 2, scale=1e3)),
        Column(header="codec\nms", show=fixed("codec_seconds_median", 2, scale=1e3)),
        Column(header="us per\ntask", show=fixed("overhead_seconds_per_task", 1, scale=1e6)),
        Column(header="ms per\n500 tasks", show=fixed("overhead_seconds_500_tasks", 2, scale=1e3)),
    ]
    title = "The executor, without a network"
    print_table(title, columns, rows, to_stderr=to_stderr)
    return rows
