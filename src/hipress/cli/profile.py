"""`hipress profile`: what links, codecs and a model's backward cost, on a lab or inside a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress.cli import _cluster
from hipress.cli._expressions import split_expressions
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.cli._profile_rank import Config
    from hipress.profile import Profile

app = typer.Typer()

CODECS = "none,fp16,bf16,int8,onebit,dgc(ratio=0.001),topk(ratio=0.01)"
HOSTS, RATE = 4, "1gbit"
LONGEST_S = 300.0
"""Unless the user says otherwise: a profile that takes longer is broken."""
RANK_BYTES = 600 * 10**6
"""Of a rank without a model: the process, and what codecs are measured on."""


@app.command(epilog="Example: hipress profile --hosts 4 --rate 1gbit --model gpt -o profile.json")
def profile(
    hosts: Annotated[
        int | None,
        typer.Option(min=1, max=64, help=f"Emulated hosts, a rank each; {HOSTS} if not given."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help=f"Rate of each host's link, each way; {RATE} if not given, none: no limit."
        ),
    ] = None,
    delay: Annotated[str, typer.Option(help="Time from host to host: 5ms, 100us.")] = "none",
    loopback: Annotated[
        bool, typer.Option("--loopback", help="All ranks on 127.0.0.1, nothing shaped.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="A model (docs/models.md) whose backward is measured.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Examples per rank and step; if not given, the model's own."),
    ] = None,
    codecs: Annotated[str, typer.Option(help="Codec expressions, with commas between.")] = CODECS,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; in the lab all ranks share the first GPU.")
    ] = "cpu",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure codecs that this machine knows already.")
    ] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "profile.json"
    ),
    json: Annotated[
        bool, typer.Option("--json", help="Print the profile as JSON on stdout, and only that.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1, help=f"Seconds after which it is given up; {LONGEST_S:g} if not given."
        ),
    ] = None,
) -> None:
    """Measure links, codecs and a model's backward, all ranks busy at once.

    On an emulated cluster (see hipress lab), or, where it runs inside a
    job that hipress run, torchrun, srun or mpirun started, between the
    ranks of that job; rank 0 writes the file. What codecs cost is kept
    for this machine and not measured again, unless --fresh is given.
    """
    from hipress.bench.table import check_json
    from hipress.profile import Profile

    started = time.monotonic()
    in_job = in_a_job(os.environ)
    if in_job and (hosts is not None or rate is not None or delay != "none" or loopback):
        raise UsageError(
            "this runs inside a job, whose ranks are measured: leave out --hosts, --rate, --delay "
            "and --loopback, or unset RANK and WORLD_SIZE to measure in the lab."
        )
    if in_job and timeout is not None:
        raise UsageError(
            "--timeout is of the lab; inside a job leave it out: the job's launcher ends it."
        )
    if not in_job or rank_of(os.environ) == "0":
        check_json(output)  # makes the file and takes it away: not on all ranks at once
    _cluster.check_device(device)
    made = config(
        hosts=0 if in_job else hosts or HOSTS,
        rate=rate or ("none" if loopback or in_job else RATE),
        delay=delay,
        is_shaped=not loopback and not in_job,
        model=model,
        batch=batch,
        codecs=tuple(dict.fromkeys(split_expressions(codecs))),
        device=device,
        fresh=fresh,
    )
    found = _in_job(made) if in_job else _in_lab(made, timeout or LONGEST_S)
    if found is None:
        return  # not rank 0
    found.save(output)
    found = Profile.load(output)
    show(found, to_stderr=json)
    typer.echo(f"Wrote {output} in {time.monotonic() - started:.1f} s.", err=json)
    if json:
        print(found.model_dump_json(indent=1, by_alias=True))


def in_a_job(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one rank of several, or as the only one.

    Example:
        >>> in_a_job({"RANK": "0", "WORLD_SIZE": "2"}), in_a_job({"SLURM_PROCID": "0"})
        (True, False)
    """
    if any(environ.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK")):
        return True
    # A batch script has no step, and a shell that srun opened has one task.
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    return bool(environ.get("SLURM_STEP_ID")) and tasks != "1"


def rank_of(environ: Mapping[str, str]) -> str:
    """The rank that a launcher has given this process.

    Example:
        >>> rank_of({"RANK": "1"}), rank_of({"SLURM_PROCID": "0"})
        ('1', '0')
    """
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    return next((found for name in names if (found := environ.get(name))), "0")


def config(
    *,
    hosts: int,
    rate: str,
    delay: str,
    is_shaped: bool,
    model: str | None,
    batch: int | None,
    codecs: tuple[str, ...],
    device: str,
    fresh: bool,
) -> Config:
    """What the ranks are told; all that can be refused is refused here."""
    import hipress
    from hipress.cli._profile_rank import Config
    from hipress.lab.links import parse_rate
    from hipress.train.models import model as named_model

    for expression in codecs:
        hipress.codec(expression)
    num_parameters = 0
    if model is not None:
        line = named_model(model)
        if line.task is None:
            raise UsageError(
                f"--model {model!r} brings no data to time it with; name a built-in one."
            )
        num_parameters = line.num_parameters
    elif batch is not None:
        raise UsageError("--batch is of a model; give --model too, or leave it out.")
    if hosts:
        _cluster.check_network([rate], delay, is_shaped=is_shaped)
        # Parameters, gradients, momentum, and what the activations and one copy need.
        _cluster.check_memory(
            f"model {model!r}" if model else "the profile",
            hosts * (RANK_BYTES + 6 * 4 * num_parameters),
            "give fewer --hosts or a smaller model",
            device,
        )
    return Config(
        num_hosts=hosts,
        rate=rate,
        rate_bits=parse_rate(rate),
        delay=delay,
        is_shaped=is_shaped,
        repeats=1,
        device=device,
        result="",
        model=model,
        num_parameters=num_parameters,
        batch=batch,
        codecs=codecs,
        fresh=fresh,
    )


def _in_lab(config: Config, timeout: float) -> Profile:
    from hipress.bench.table import progress_bar

    with progress_bar(1) as begin:
        return run(config, timeout, begin(config.where))


def run(config: Config, timeout: float | None, on_part: Callable[[float], None]) -> Profile:
    """Measure on all ranks of a lab of its own."""
    import json

    from hipress.profile import Profile

    env = {"CUDA_VISIBLE_DEVICES": ""} if config.device == "cpu" else {}
    found = _cluster.run("hipress.cli._profile_rank", config, timeout, on_part, env)
    return Profile.parse(json.dumps(found))


def _in_job(config: Config) -> Profile | None:
    """Measures between the ranks of the job that this process is one of."""
    import torch
    import torch.distributed as dist

    from hipress.bench.table import progress_bar
    from hipress.cli._profile_rank import measure
    from hipress.launch import join
    from hipress.session.groups import engine_of
    from hipress.train.ranks import choose_device

    world = join()
    device, backend = choose_device(
        config.device, "auto", local_rank=world.local_rank, num_local=world.local_size
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    if world.rank == 0:
        with progress_bar(1) as begin:
            move = begin(f"{world.size} ranks")
            found = measure(config, device, lambda done, label: move(done))
    else:
        found = measure(config, device, lambda done, label: None)
    engine = engine_of(None, device)
    engine.agree("the end of the profile", {})  # rank 0 may hold the store of the others
    engine.close()
    dist.destroy_process_group()
    return found


def show(found: Profile, *, to_stderr: bool = False) -> None:
    """Print what a profile holds, in short."""
    from hipress.bench.table import Column, fixed, print_table

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
            Column(header="codec", show=lambda row: str(row["codec"]), is_text=True),
            Column(header="encode\nGB/s", show=fixed("encode", 1)),
            Column(header="decode\nGB/s", show=fixed("decode", 1)),
            Column(header="add\nGB/s", show=fixed("add", 1)),
            Column(header="back\nGB/s", show=fixed("back", 1)),
            Column(header="fixed\nus", show=fixed("fixed", 0)),
            Column(header="fit\n%", show=fixed("fit", 1)),
            Column(header="smaller\nx", show=fixed("ratio", 1)),
            Column(header="error", show=fixed("error", 3)),
        ]
        print_table("Codecs, per core or GPU", columns, rows, to_stderr=to_stderr)


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
