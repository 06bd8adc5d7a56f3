"""`hipress profile`: what links, codecs and a model's backward cost, on a lab or inside a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hipress import probe
from hipress.cli import ui
from hipress.cli.options import (
    MOST_HOSTS,
    OWN,
    Batch,
    ClusterOptions,
    Data,
    check_memory,
    expressions,
    refuse,
    takes_options,
    timed_model,
)
from hipress.environment import read_environment
from hipress.errors import UsageError
from hipress.version import docs_url

if TYPE_CHECKING:
    from hipress.bench.profile import ProfileBenchmark
    from hipress.profile import Profile

app = typer.Typer()

CODECS = ",".join(probe.CODECS)
HOSTS = 4
LONGEST_S = 300.0
"""Seconds unless the user gives others: a profile that takes longer is broken."""
RANK_BYTES = 600 * 10**6
"""Memory of a rank without a model: the process, and what codecs are measured on."""


@dataclass(frozen=True, kw_only=True)
class ProfileCluster(ClusterOptions):
    """A cluster for one profile; hosts, rate and timeout are given for the lab only."""

    hosts: Annotated[
        int | None,
        Option(min=1, max=MOST_HOSTS, help=f"Emulated hosts, a rank each; {HOSTS} if not given."),
    ] = None  # type: ignore[assignment]
    rate: Annotated[
        str | None,
        Option(help="Rate of each host's link, each way; 1gbit if not given, none: no limit."),
    ] = None
    timeout: Annotated[
        float | None,
        Option(min=1, help=f"Seconds after which it is given up; {LONGEST_S:g} if not given."),
    ] = None


@app.command(epilog="Example: hipress profile --hosts 4 --rate 1gbit --model gpt -o profile.json")
@takes_options
def profile(
    cluster: ProfileCluster,
    model: Annotated[
        str | None,
        Option(help=f"A model ({docs_url('models')}), {OWN}, whose backward is measured."),
    ] = None,
    data: Data = None,
    batch: Batch = None,
    codecs: Annotated[str, Option(help="Codec expressions, separated by commas.")] = CODECS,
    fresh: Annotated[
        bool, Option("--fresh", help="Measure codecs that this machine knows already.")
    ] = False,
    output: Annotated[Path, Option("--output", "-o", help="The file to write.")] = Path(
        "profile.json"
    ),
    json: Annotated[
        bool, Option("--json", help="Print the profile as JSON on stdout, and only that.")
    ] = False,
) -> None:
    """Measure links, codecs and a model's backward, with all ranks busy at once.

    It measures on an emulated cluster (see hipress lab), or, inside a job
    that hipress run, torchrun, srun or mpirun started, between the ranks
    of that job; rank 0 writes the file. What codecs cost is kept for this
    machine and not measured again, unless --fresh is given.
    """
    from hipress.profile import Profile

    started = time.monotonic()
    in_job = in_a_job(os.environ)
    if in_job and replace(cluster, device="cpu", timeout=None) != ProfileCluster():
        raise UsageError(
            "this runs inside a job, whose ranks are measured: leave out --hosts, --rate, --delay "
            "and --loopback, or unset RANK and WORLD_SIZE to measure in the lab."
        )
    if in_job and cluster.timeout is not None:
        raise UsageError(
            "--timeout acts on the lab; leave it out inside a job: the job's launcher ends it."
        )
    if not in_job or read_environment().rank == 0:
        # It makes the file and takes it away: not on all ranks at once.
        ui.check_writable(output, "--output (-o)")
    hosts = 0 if in_job else cluster.hosts or HOSTS
    cluster = replace(cluster, hosts=hosts, loopback=cluster.loopback or in_job)
    made = benchmark(cluster, model=model, data=data, batch=batch, codecs=codecs, fresh=fresh)
    if in_job:
        found = _in_job(made)
    else:
        with ui.progress_bar(1) as begin:
            found = run(made, cluster.timeout or LONGEST_S, begin(made.where))
    if found is None:
        return  # not rank 0
    found.save(output)
    found = Profile.load(output)
    show(found, to_stderr=json)
    typer.echo(f"Wrote {output} in {time.monotonic() - started:.1f} s.", err=json)
    if json:
        print(found.model_dump_json(indent=1, by_alias=True))


def in_a_job(environ: Mapping[str, str]) -> bool:
    """Returns whether a launcher has started this process as a rank, even as the only one.

    Example:
        >>> in_a_job({"RANK": "0", "WORLD_SIZE": "2"}), in_a_job({"SLURM_PROCID": "0"})
        (True, False)
    """
    if any(environ.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK")):
        return True
    # A batch script has no step, and a shell that srun opened has one task.
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    return bool(environ.get("SLURM_STEP_ID")) and tasks != "1"


def benchmark(
    cluster: ClusterOptions,
    *,
    model: str | None,
    data: str | None = None,
    batch: int | None = None,
    codecs: str,
    fresh: bool = False,
) -> ProfileBenchmark:
    """Returns what the ranks measure; refuses all that can be refused."""
    import hipress
    from hipress.bench.profile import LEAST_ELEMENTS, ProfileBenchmark

    names = expressions(codecs)
    for name in names:
        hipress.codec(name)
    num_parameters = 0
    if model is not None:
        num_parameters = timed_model(model, data, cluster.device).num_parameters
    else:
        refuse(
            {"--batch": batch, "--data": data},
            "acts on a model; give --model too, or leave it out.",
        )
    shared = cluster.one_benchmark()
    if cluster.hosts:
        # Parameters, gradients, momentum, and what the activations and one copy need.
        check_memory(
            f"model {model!r}" if model else "the profile",
            cluster.hosts * (RANK_BYTES + 6 * 4 * num_parameters),
            "give fewer --hosts or a smaller model",
            cluster.device,
        )
    return ProfileBenchmark(
        **shared,
        num_elements=max(num_parameters, LEAST_ELEMENTS),
        model=model,
        data=data,
        batch=batch,
        codecs=names,
        fresh=fresh,
    )


def run(
    benchmark: ProfileBenchmark, timeout: float | None, on_part: Callable[[float], None]
) -> Profile:
    """Measures on all ranks of a lab of its own."""
    import json

    from hipress.bench import cluster
    from hipress.profile import Profile

    found = cluster.run("hipress.bench.profile", benchmark, timeout, on_part)
    return Profile.parse(json.dumps(found))


def _in_job(benchmark: ProfileBenchmark) -> Profile | None:
    import torch
    import torch.distributed as dist

    from hipress.bench.profile import measure
    from hipress.launch import join
    from hipress.session.groups import engine_of, make_group
    from hipress.train.ranks import choose_device

    world = join()
    device, backend = choose_device(
        benchmark.device, "auto", local_rank=world.local_rank, num_local=world.local_size
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    make_group(backend)
    if world.rank == 0:
        with ui.progress_bar(1) as begin:
            move = begin(f"{world.size} ranks")
            found = measure(benchmark, device, lambda done, label: move(done))
    else:
        found = measure(benchmark, device, lambda done, label: None)
    engine = engine_of(None, device)
    engine.agree("the end of the profile", {})  # rank 0 may hold the store of the others
    engine.close()
    dist.destroy_process_group()
    return found


def show(found: Profile, *, to_stderr: bool = False) -> None:
    """Prints what a profile holds, in short."""
    for line in _lines(found):
        typer.echo(line, err=to_stderr)
    rows: list[dict[str, Any]] = []
    for costs in found.codecs:
        curves = {"encode": costs.encode, "decode": costs.decode, "add": costs.add}
        row: dict[str, Any] = {"codec": costs.codec, "error": costs.error}
        row["ratio"] = 4 / costs.wire.slope if costs.wire.slope else None
        row["fit"] = max(100 * curve.error for curve in (*curves.values(), costs.back))
        for verb, curve in (*curves.items(), ("back", costs.back)):
            row[verb] = 4e-9 / curve.slope if curve.slope > 4e-13 else None
        row["fixed"] = 1e6 * costs.encode.fixed
        rows.append(row)
    if rows:
        columns = [
            ui.text("codec"),
            ui.number("encode\nGB/s", "encode", 1),
            ui.number("decode\nGB/s", "decode", 1),
            ui.number("add\nGB/s", "add", 1),
            ui.number("back\nGB/s", "back", 1),
            ui.number("fixed\nus", "fixed", 0),
            ui.number("fit\n%", "fit", 1),
            ui.number("smaller\nx", "ratio", 1),
            ui.number("error", "error", 3),
        ]
        ui.print_table("Codecs, per core or GPU", columns, rows, to_stderr=to_stderr)


def _lines(found: Profile) -> list[str]:
    machine, network = found.machine, found.network
    lines = [
        f"{machine.num_ranks} of {network.num_ranks} rank(s) share {machine.cores:g} core(s) of "
        f"{machine.name}, {machine.device}, {machine.exchange_threads} exchange thread(s) each."
    ]
    if network.num_ranks > 1:
        inside = network.local_bytes_per_s
        lines += [
            f"Links: {network.bytes_per_s / 1e6:.1f} MB/s per rank while all send "
            f"(+-{100 * network.error:.0f} %), latency {1e6 * network.latency_s:.0f} us"
            + (f", inside a host {inside / 1e6:.0f} MB/s." if inside else "."),
            f"All-reduce: {1e3 * network.all_reduce.fixed:.2f} ms + "
            f"{1e9 * network.all_reduce.slope:.2f} ms per MB "
            f"(fit +-{100 * network.all_reduce.error:.0f} %).",
            f"Work: {1e6 * network.message_work_s:.0f} us per message, "
            f"{1e9 * network.byte_work_s:.2f} ns per byte.",
        ]
        slow = [p for p in network.pairs if p.bytes_per_s < 0.5 * network.bytes_per_s]
        if slow:
            named = ", ".join(f"{p.sender} to {p.receiver}" for p in slow[:4])
            lines.append(f"Slower than half of that by themselves: {named}.")
    if found.model is not None:
        one = found.model
        lines.append(
            f"Model {one.name}, batch {one.batch}: forward {1e3 * one.forward_s:.1f} ms, backward "
            f"{1e3 * one.backward_s:.1f} ms, rest {1e3 * one.rest_s:.1f} ms of work on "
            f"{one.threads:.1f} thread(s) (+-{100 * one.error:.0f} %); {len(one.gradients)} "
            f"gradients, {4e-6 * one.num_elements:.1f} MB."
        )
    return lines
