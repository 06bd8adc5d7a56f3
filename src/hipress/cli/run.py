"""`hipress run`: start a script on this machine or on many."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from hipress.errors import UsageError
from hipress.version import docs_url

if TYPE_CHECKING:
    from hipress.launch.hosts import Host

app = typer.Typer()


@app.command(
    epilog="Example: hipress run -H node1:4,node2:4 --interface eth0 -- python train.py",
    # What follows the command's name belongs to the command, with or without "--".
    context_settings={"allow_interspersed_args": False},
)
def run(
    command: Annotated[list[str], Argument(help="The command, run once per rank.")],
    hosts: Annotated[
        str | None, Option("--hosts", "-H", help="Hosts and ranks on each: node1,me@node2:4.")
    ] = None,
    hosts_file: Annotated[
        Path | None, Option(help=f"A JSON list of hosts instead, as {docs_url('launch')} says.")
    ] = None,
    nproc: Annotated[
        int | None, Option("--nproc", "-n", help="Ranks on this machine, without ssh.")
    ] = None,
    interface: Annotated[
        str | None, Option(help="The network card that ranks use on all hosts: eth0.")
    ] = None,
    env: Annotated[
        list[str] | None,
        Option(help="Send a variable: NAME as it is here, or NAME=VALUE; may be repeated."),
    ] = None,
    directory: Annotated[
        str | None, Option("--dir", help="Where to run; the name of this folder if not given.")
    ] = None,
    python: Annotated[
        str | None, Option(help="The Python of the hosts; the path of this one if not given.")
    ] = None,
    ssh: Annotated[str | None, Option(help='The ssh to use, with options: "ssh -i key".')] = None,
    ssh_port: Annotated[int | None, Option(help="Where sshd listens on the hosts.")] = None,
    port: Annotated[
        int | None,
        Option(help="Where the first host listens for the others; a free port if not given."),
    ] = None,
    max_restarts: Annotated[
        int, Option(min=0, help="How often all ranks start over when one fails.")
    ] = 0,
    timeout: Annotated[
        float, Option(min=1, help="Seconds that all ranks together may take to start.")
    ] = 120.0,
    output: Annotated[
        Path | None, Option(help="A folder for the output of each rank, in rank0.log ...")
    ] = None,
) -> None:
    """Run a command once per rank, on this machine or on many over ssh.

    It runs torchrun on each host, so ranks find RANK, WORLD_SIZE and the
    rest. Lines are prefixed with the rank. When one rank fails
    all are ended, and the exit code is that of the first failure.
    """
    from hipress.launch.hosts import check_port
    from hipress.launch.launcher import LaunchSpec, launch
    from hipress.launch.torchrun import forwarded

    for number, option in ((port, "--port"), (ssh_port, "--ssh-port")):
        if number is not None:
            check_port(number, option)
    found = _hosts(hosts, hosts_file, nproc)
    given = {"--ssh": ssh, "--ssh-port": ssh_port} if nproc is not None else {}
    if len(found) == 1:
        given["--port"] = port
    _refuse_idle([option for option, value in given.items() if value is not None], nproc)
    spec = LaunchSpec(
        command=command,
        hosts=found,
        is_local=nproc is not None,
        env=forwarded(env or [], interface, os.environ),
        folder=_here() if directory is None else directory,
        python=sys.executable if python is None else python,
        ssh=_ssh("ssh" if ssh is None else ssh),
        ssh_port=ssh_port,
        port=port or 0,
        max_restarts=max_restarts,
        timeout_s=timeout,
        output=output,
    )
    raise typer.Exit(launch(spec).code)


def _hosts(hosts: str | None, hosts_file: Path | None, nproc: int | None) -> tuple[Host, ...]:
    from hipress.launch.hosts import Host, parse_hosts, read_hosts

    given = [
        option
        for option, value in (("-H", hosts), ("--hosts-file", hosts_file), ("--nproc", nproc))
        if value is not None
    ]
    if len(given) != 1:
        said = " and ".join(given) + " are given" if given else "no host is given"
        raise UsageError(
            f"{said}; write one of -H node1:4,node2:4, --hosts-file hosts.json, or --nproc 4 for "
            f"this machine."
        )
    if hosts is not None:
        return parse_hosts(hosts)
    if hosts_file is not None:
        return read_hosts(hosts_file)
    assert nproc is not None
    if nproc < 1:
        raise UsageError(f"--nproc is {nproc}; it must be 1 or more.")
    return (Host(name="localhost", slots=nproc),)


def _refuse_idle(options: list[str], nproc: int | None) -> None:
    if options:
        where = "one host" if nproc is None else "this machine alone (--nproc)"
        raise UsageError(
            f"{options[0]} does nothing for a job on {where}; leave it out, or name hosts with "
            f"-H node1,node2."
        )


def _here() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the current folder does not exist any more ({error.strerror}); go to another, "
            f"or name one with --dir."
        ) from None


def _ssh(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--ssh {text!r} cannot be read: {error}; close the quote.") from None
    if not words:
        raise UsageError('--ssh is empty; name the program, as in --ssh "ssh -i key".')
    return words
