"""`hipress top`: a live view of running jobs, from their snapshots."""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress import snapshots
from hipress.errors import UsageError
from hipress.snapshots import Event, Snapshot, Split, slowest

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

REFRESH_S = 1.0
TIMEOUT_S = 3.0
"""Seconds within which a whole answer must arrive."""
MAX_BYTES = 2**23
"""Most bytes of an answer; a snapshot of a rank has about 1 kB."""
LATE_S = 10.0
"""A rank whose snapshot is older is shown as late."""
SHOWN_EVENTS = 6
PARTS = ("compute", "wait", "encode", "wire", "decode")

app = typer.Typer()


@app.command(epilog="Example: hipress top --once")
def top(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST:PORT",
            help="Hosts of a job that was started with HIPRESS_MONITOR=PORT; without any, all jobs "
            "of this user on this machine.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the present state and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the present state as one JSON object and exit.")
    ] = False,
) -> None:
    """Show running jobs: where the time of a step goes, bytes, the slowest rank, and decisions.

    A step is compute + wait: wait is the time from the last gradient to the
    end of the exchange, compute is all the rest, data and optimizer included.
    The exchange of a step overlaps with it and is encode + wire + decode:
    gradients are encoded, frames are decoded and merged, and in the rest
    messages are under way or awaited. All are means over the last second;
    steps that set exchanges up are left out. The rank marked with * computes
    longest, and the others wait for it. Press q to end.
    """
    read = _reader(addresses or [])
    jobs = read()
    if not jobs:
        where = " and ".join(addresses or []) or f"this machine (it looks in {snapshots.folder()})"
        raise UsageError(
            f"no job of this user has finished a step on {where}; start one with hipress run or "
            "torchrun, or name the host and port of one that was started with "
            "HIPRESS_MONITOR=9400: hipress top HOST:9400."
        )
    if as_json:
        print(json.dumps({"jobs": [job.as_dict() for job in jobs]}, indent=2))
    elif once or not sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console.width = 200  # into a pipe rich would cut cells to fit 80 columns
        console.print(view(jobs))
    else:
        _show(jobs, read)


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """The ranks of one job that have been found."""

    ranks: tuple[Snapshot, ...]

    @property
    def slowest(self) -> Snapshot | None:
        """The rank that the others wait for."""
        found = slowest([one.split for one in self.ranks])
        return None if found is None else self.ranks[found]

    @property
    def events(self) -> list[Event]:
        """The last events of all ranks, each once."""
        seen = {(event.step, event.kind, event.text): event for one in self.ranks
                for event in one.events}  # fmt: skip
        return sorted(seen.values())[-SHOWN_EVENTS:]

    def as_dict(self) -> dict[str, Any]:
        """Returns the job for JSON."""
        first, late = self.ranks[0], self.slowest
        return {
            "job": first.job,
            "program": first.program,
            "num_ranks": first.num_ranks,
            "slowest_rank": None if late is None else late.rank,
            "events": [event._asdict() for event in self.events],
            "ranks": [one.model_dump(exclude={"events", "job", "program"}) for one in self.ranks],
        }


def _reader(addresses: Sequence[str]) -> Callable[[], list[RunningJob]]:
    """Returns a function that reads the jobs anew; it raises UsageError if nobody answers."""
    pairs = [_parsed(text) for text in addresses]

    def read() -> list[RunningJob]:
        if pairs:
            found = [one for host, port in pairs for one in fetch(host, port)]
        else:
            found = snapshots.read(snapshots.folder())
        return grouped(found)

    return read


def grouped(found: Sequence[Snapshot]) -> list[RunningJob]:
    """Returns the jobs of snapshots, each rank once."""
    jobs: dict[str, dict[int, Snapshot]] = {}
    for one in sorted(found, key=lambda one: (one.job, one.rank, one.time)):
        jobs.setdefault(one.job, {})[one.rank] = one
    return [RunningJob(ranks=tuple(ranks.values())) for ranks in jobs.values()]


def _parsed(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):  # an IPv6 address
        host = host[1:-1]
    try:
        host.encode("idna")  # as the resolver does
        if host and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536:
            return host, int(port)
    except UnicodeError:
        pass
    raise UsageError(f"{text!r} is not the host and port of a job; write it as node1:9400.")


def fetch(host: str, port: int) -> list[Snapshot]:
    """Returns the snapshots that a job serves.

    Raises:
        UsageError: Nobody answers, or somebody else does.
    """
    try:
        text = _answer(host, port)
    except OSError as error:
        raise UsageError(
            f"nobody answers at {host}:{port} ({error.strerror or error}); the job must run with "
            f"HIPRESS_MONITOR={port} in its environment, and listens on the network card that its "
            "ranks use."
        ) from error
    head, _, body = text.partition(b"\r\n\r\n")
    try:
        told = json.loads(body)
        if head.split(b" ")[1:2] != [b"200"] or "hipress" not in told:
            raise _foreign(host, port)
        return [Snapshot.model_validate(one) for one in told["snapshots"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _foreign(host, port) from error


def _answer(host: str, port: int) -> bytes:
    """Returns what is answered to a request; http.client would wait anew for each piece of it."""
    deadline = time.monotonic() + TIMEOUT_S
    text = bytearray()
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        while len(text) <= MAX_BYTES:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left_s)
            piece = connection.recv(2**16)
            if not piece:
                return bytes(text)
            text += piece
    raise _foreign(host, port)


def _foreign(host: str, port: int) -> UsageError:
    return UsageError(
        f"what answers at {host}:{port} is no HiPress job of this version; give the port that "
        "HIPRESS_MONITOR names in the environment of the job."
    )


# --- the view -------------------------------------------------------------------------------------


def view(jobs: Sequence[RunningJob]) -> Group:
    """Returns what is shown of jobs."""
    from rich.console import Group
    from rich.text import Text

    shown: list[Any] = []
    for job in jobs:
        shown += [Text() if shown else None, _title(job), _table(job), *_notes(job)]
    return Group(*filter(lambda one: one is not None, shown))


def _title(job: RunningJob) -> Any:
    from rich.text import Text

    first = job.ranks[0]
    hosts = len({one.host for one in job.ranks})
    missing = first.num_ranks - len(job.ranks)
    ranks = (
        f"{len(job.ranks)} of {first.num_ranks} ranks" if missing else f"{first.num_ranks} ranks"
    )
    text = Text()
    text.append(printable(first.program), style="bold")
    text.append(f"  job {printable(first.job)}, {ranks} on {hosts} host{'s' * (hosts != 1)}, ")
    text.append(f"step {max(one.step for one in job.ranks)}, {printable(first.mode)}\n")
    text.append(printable(first.plan), style="cyan")
    return text


def _table(job: RunningJob) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("rank", "host"):
        table.add_column(header, no_wrap=True)
    for header in ("step ms", "= compute", "+ wait", "encode", "+ wire", "+ decode", "MB a step",
                   "x less", "set-up s", "seen"):  # fmt: skip
        table.add_column(header, justify="right", no_wrap=True)
    late = job.slowest
    for one in job.ranks:
        style = "bold yellow" if one is late else "red" if one.age_s > LATE_S else ""
        cells = [f"{one.rank}{'*' * (one is late)}", printable(one.host), *_cells(one.split)]
        cells += [f"{one.setup_s:.1f}", f"{one.age_s:.0f} s ago"]
        table.add_row(*map(Text, cells), style=style)
    return table


def _cells(split: Split | None) -> list[str]:
    if split is None:  # all steps since the last look were left out
        return ["-"] * 8
    times = [split.step_s, *(getattr(split, f"{part}_s") for part in PARTS)]
    return [*(f"{1e3 * t:.1f}" for t in times), f"{split.sent_bytes / 1e6:.3f}",
            f"{split.ratio:.1f}"]  # fmt: skip


def _notes(job: RunningJob) -> Iterator[Any]:
    from rich.text import Text

    late = job.slowest
    if late is not None and late.split is not None:
        others = [one.split.compute_s for one in job.ranks if one.split and one is not late]
        more_ms = 1e3 * (late.split.compute_s - sum(others) / len(others))
        yield Text(f"slowest: rank {late.rank} computes {more_ms:.1f} ms longer than the others")
    if old := [one for one in job.ranks if one.age_s > LATE_S]:
        which = "all ranks" if len(old) == len(job.ranks) else f"rank {old[0].rank}"
        more = "" if len(old) in (1, len(job.ranks)) else f" and {len(old) - 1} more"
        age_s = min(one.age_s for one in old)
        yield Text(f"{which}{more}: no step has ended for {age_s:.0f} s", style="red")
    if len(job.ranks) < job.ranks[0].num_ranks:
        yield Text("ranks on other hosts: hipress top HOST:PORT for each, with HIPRESS_MONITOR set")
    for event in job.events:
        yield Text(f"step {event.step}  {printable(event.kind)}  {printable(event.text)}", "dim")


def printable(text: str) -> str:
    """Returns a text of a stranger without anything that a terminal would act on.

    Example:
        >>> printable("a\\x1b[2Jb")
        'a?[2Jb'
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def _show(jobs: list[RunningJob], read: Callable[[], list[RunningJob]]) -> None:
    """Shows jobs until a key is pressed or they have ended."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    ended, seen_s = "", time.monotonic()
    shown = view(jobs)
    try:
        with Live(shown, screen=True, auto_refresh=False) as live, _keys() as pressed:
            while not pressed(REFRESH_S):
                try:
                    jobs = read()
                except UsageError as error:
                    if isinstance(error.__cause__, ConnectionRefusedError):
                        ended = "the job has ended."
                        break
                    # A busy host or network answers too late, or in part; the job may go on.
                    since_s = time.monotonic() - seen_s
                    note = Text(f"no answer for {since_s:.0f} s", style="red")
                    live.update(Group(shown, note), refresh=True)
                    continue
                if not jobs:
                    ended = "the job has ended."
                    break
                shown, seen_s = view(jobs), time.monotonic()
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        pass
    console = Console()
    console.print(shown)  # the last state stays when the screen is given back
    if ended:
        console.print(ended)


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits some seconds and returns whether q was pressed meanwhile."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield wait
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)  # Ctrl-C still interrupts

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select([fd], [], [], seconds)
        return bool(ready) and sys.stdin.read(1) in ("q", "Q", "")

    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
