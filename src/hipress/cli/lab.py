"""`hipress lab`: run a command on an emulated cluster."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer import Argument, Option

from hipress.cli.options import Delay, Loopback

app = typer.Typer(no_args_is_help=True)

TIMED_OUT = 124
"""Exit code of a job that took too long, as with timeout(1)."""


@app.callback(epilog="Example: hipress lab run --hosts 4 --rate 1gbit -- python train.py")
def lab() -> None:
    """Emulate a cluster on this machine: hosts with their own address, links with a rate."""


@app.command(
    epilog="Example: hipress lab run --hosts 4 --rate 1gbit --delay 1ms -- python train.py",
    # What follows the command's name belongs to the command, with or without "--".
    context_settings={"allow_interspersed_args": False},
)
def run(
    command: Annotated[list[str], Argument(help="The command, run once per rank.")],
    hosts: Annotated[int, Option(help="Number of hosts, up to 64.")] = 2,
    rate: Annotated[
        str,
        Option(help="Rate of each host's link, each way: 1gbit, or one per host: 1gbit,100mbit."),
    ] = "none",
    delay: Delay = "none",
    loss: Annotated[str, Option(help="Share of the packets that is lost: 0.1%.")] = "none",
    ranks_per_host: Annotated[
        str, Option(help="Ranks on each host: 2, or one number per host: 2,1,1.")
    ] = "1",
    timeout: Annotated[
        float | None, Option(min=0, help="Seconds after which all ranks are ended.")
    ] = None,
    loopback: Loopback = False,
) -> None:
    """Run a command once per rank, with torchrun's environment.

    Lines are prefixed with the host: [host0], or [host0.1] for the second
    rank there. When one rank fails all are ended, and the exit code is
    that of the first failure (124 where --timeout was too short).
    """
    from hipress.errors import LabError, UsageError
    from hipress.lab import Lab

    rates = rate.split(",")
    counts = ranks_per_host.split(",")
    if not all(count.strip().isdecimal() for count in counts):
        raise UsageError(
            f"--ranks-per-host {ranks_per_host!r} is not a number, or one per host: 2, or 2,1,1."
        )
    with Lab(
        hosts,
        rate=rates[0] if len(rates) == 1 else rates,
        delay=delay,
        loss=loss,
        ranks_per_host=int(counts[0]) if len(counts) == 1 else [int(count) for count in counts],
        shaped=not loopback,
    ) as cluster:
        labels = [placement.label for placement in cluster.ranks]

        def on_line(rank: int, stream: str, line: str) -> None:
            print(f"[{labels[rank]}] {line}", file=getattr(sys, stream), flush=True)

        job = cluster.start(command, on_line=on_line, keep_output=False)
        try:
            finished = job.wait(timeout)
        except LabError as error:
            print(f"hipress: {error}", file=sys.stderr)
            raise typer.Exit(TIMED_OUT) from None
        except BaseException:
            job.end()
            raise
    if finished.failed_rank is not None:
        label, code = labels[finished.failed_rank], finished.exit_code
        how = f"was ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        print(
            f"hipress: rank {finished.failed_rank} ({label}) {how}; the others were ended.",
            file=sys.stderr,
        )
    raise typer.Exit(finished.exit_code)
