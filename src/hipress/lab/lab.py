"""`Lab`: what a user holds of an emulated cluster."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType

from hipress.environment import INTERFACE_VARIABLES, free_port, with_defaults
from hipress.errors import LabError, UsageError
from hipress.lab.cluster import Cluster, Message
from hipress.lab.links import Counters, Link, parse_delay, parse_link_rate, parse_links, parse_loss
from hipress.lab.network import address
from hipress.lab.run import KILLED, CommandRun, Finished, OnLine

_MAX_HOSTS = 64
_FIRST_PORT, _NUM_PORTS = 29500, 1000
_MAX_RANKS_PER_HOST = 64


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Where a rank runs."""

    host: int
    local_rank: int
    local_world_size: int

    @property
    def label(self) -> str:
        """The name of a rank in front of its lines: host0, or host0.1 among several there."""
        several = self.local_world_size > 1
        return f"host{self.host}.{self.local_rank}" if several else f"host{self.host}"


class Lab:
    """An emulated cluster on this machine; use it in a `with` statement.

    Each host has its own network, process numbers and host name. They are joined by one switch
    without a limit of its own. All of it ends with this process, in whatever way that ends.

    Args:
        hosts: The number of hosts, up to 64.
        rate: Bits per second of each host's link, each way: "1gbit", or one per host. None or
            "none" is as fast as this machine can.
        delay: Time from a host to any other, such as "5ms"; the answer takes as long again.
        loss: Part of the packets that is lost on the way from a host to any other: "0.1%".
        ranks_per_host: How many ranks run on each host, or one number per host.
        shaped: False puts all ranks on 127.0.0.1, where this system allows nothing better.

    Example:
        with Lab(hosts=4, rate="1gbit") as lab:
            finished = lab.run([sys.executable, "train.py"], timeout=60)
    """

    def __init__(
        self,
        hosts: int,
        *,
        rate: str | Sequence[str | None] | None = None,
        delay: str | None = None,
        loss: str | None = None,
        ranks_per_host: int | Sequence[int] = 1,
        shaped: bool = True,
    ) -> None:
        if not 1 <= hosts <= _MAX_HOSTS:
            raise UsageError(f"hosts is {hosts}; it must be from 1 to {_MAX_HOSTS}.")
        self.hosts = hosts
        """The number of hosts."""
        self.shaped = shaped
        """Whether hosts have networks of their own; False on loopback."""
        self.ranks = _place_ranks(hosts, ranks_per_host)
        """Where each rank runs."""
        self._links = parse_links(hosts, rate, delay, loss)
        if not shaped and any(link != Link() for link in self._links):
            raise UsageError("rate, delay and loss need a network; leave them out on loopback.")
        self._run_numbers = itertools.count()
        self._is_closed = False
        self._runs: dict[int, CommandRun] = {}
        self._cluster = Cluster(
            self._links, shaped=shaped, on_exit=self._rank_exited, on_host_gone=self._host_gone
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        on_line: OnLine | None = None,
        keep_output: bool = True,
        keep_going: bool = False,
        check: bool = False,
    ) -> Finished:
        """Run a command once per rank and wait for its end.

        Args:
            argv: The command and its arguments.
            env: Variables on top of this process's and torchrun's.
            cwd: Folder to run in; this process's if None.
            timeout: Seconds after which the run is ended and a `LabError` raised.
            on_line: Called with rank, "stdout" or "stderr", and each line, from another thread.
            keep_output: Whether `Finished` holds the output.
            keep_going: Whether ranks go on when one has failed.
            check: Whether a failure raises a `LabError`.

        Returns:
            How it ended. When one rank fails all others are ended, unless they are to keep going.
        """
        run = self.start(
            argv,
            env=env,
            cwd=cwd,
            on_line=on_line,
            keep_output=keep_output,
            keep_going=keep_going,
        )
        try:
            finished = run.wait(timeout)
        except BaseException:
            run.end()
            raise
        if check and finished.exit_code != 0:
            raise LabError(finished.failure())
        return finished

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        on_line: OnLine | None = None,
        keep_output: bool = True,
        keep_going: bool = False,
    ) -> CommandRun:
        """Start a command once per rank and return at once; the arguments are those of `run`."""
        if isinstance(argv, str) or not argv:
            raise UsageError(f"command is {argv!r}; give a list of words, the program first.")
        if self._is_closed:
            raise LabError("this lab is closed; make another")
        number = next(self._run_numbers)
        pipes = [(os.pipe(), os.pipe()) for _ in self.ranks]
        readers = [(stdout[0], stderr[0]) for stdout, stderr in pipes]
        run = CommandRun(
            self._cluster,
            number,
            readers,
            on_line=on_line,
            keep_output=keep_output,
            keep_going=keep_going,
        )
        # Runs that are over are dropped here: their output may be large.
        self._runs = {n: old for n, old in self._runs.items() if not old.is_over()}
        self._runs[number] = run
        master = (self.address(0), self._master_port(number))
        for rank, (stdout, stderr) in enumerate(pipes):
            message = {
                "do": "spawn",
                "run": number,
                "rank": rank,
                "argv": [os.fspath(word) for word in argv],
                "cwd": os.path.abspath(cwd or "."),
                "env": _environment(self.ranks, rank, master, shaped=self.shaped) | dict(env or {}),
            }
            try:
                self._cluster.tell(self.ranks[rank].host, message, [stdout[1], stderr[1]])
            except OSError:
                run.rank_exited(rank, KILLED, time.monotonic())
            os.close(stdout[1])
            os.close(stderr[1])
        return run

    def _master_port(self, number: int) -> int:
        """Return a port that no earlier run of this lab has used on host 0."""
        # A shaped network is new: no other program is there.
        return _FIRST_PORT + number % _NUM_PORTS if self.shaped else free_port()

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        self._check_host(host)
        return address(host) if self.shaped else "127.0.0.1"

    def set_link(
        self,
        host: int,
        *,
        rate: str | None = None,
        delay: str | None = None,
        loss: str | None = None,
    ) -> None:
        """Change a host's link while it is in use; what is None stays, "none" takes it off."""
        self._check_host(host)
        link = self._links[host]
        if rate is not None:
            link = replace(link, rate_bits=parse_link_rate(rate))
        if delay is not None:
            link = replace(link, delay_us=parse_delay(delay))
        if loss is not None:
            link = replace(link, loss=parse_loss(loss))
        self._ask_switch("link", host, link=asdict(link))
        self._links[host] = link

    def set_rate(self, host: int, rate: str) -> None:
        """Change the rate of a host's link while it is in use."""
        self.set_link(host, rate=rate)

    def cut(self, host: int) -> None:
        """Drop every packet from and to a host, without any error at either end."""
        self._ask_switch("cut", host)

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        self._ask_switch("heal", host)

    def counters(self, host: int) -> Counters:
        """Return what went through a host's link since the lab began."""
        return Counters(**self._ask_switch("counters", host)["counters"])

    def pause(self, host: int) -> None:
        """Stop all processes of a host where they are."""
        self._check_host(host)
        self._cluster.signal(host, signal.SIGSTOP)

    def resume(self, host: int) -> None:
        """Undo `pause`."""
        self._check_host(host)
        self._cluster.signal(host, signal.SIGCONT)

    def kill(self, host: int) -> None:
        """Kill all processes of a host; the host itself stays and can run the next command."""
        self._check_host(host)
        self._cluster.signal(host, signal.SIGKILL)

    def close(self) -> None:
        """End all that runs and take the cluster down; a second call does nothing."""
        self._is_closed = True
        self._cluster.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _rank_exited(self, number: int, rank: int, code: int, at_s: float) -> None:
        if number in self._runs:
            self._runs[number].rank_exited(rank, code, at_s)

    def _host_gone(self, host: int) -> None:
        for run in list(self._runs.values()):
            for rank, placement in enumerate(self.ranks):
                if placement.host == host:
                    run.rank_exited(rank, KILLED, time.monotonic())

    def _check_host(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise UsageError(f"host {host} is not there; give one from 0 to {self.hosts - 1}.")

    def _ask_switch(self, what: str, host: int, **more: object) -> Message:
        self._check_host(host)
        if not self.shaped:
            raise LabError(
                f"{what!r} needs a link and this lab has none: on loopback all ranks share "
                f"127.0.0.1; make the lab with shaped=True, without --loopback"
            )
        return self._cluster.ask_switch({"do": what, "host": host, **more})


def _place_ranks(hosts: int, ranks_per_host: int | Sequence[int]) -> tuple[RankPlacement, ...]:
    """Return the place of each rank: those of host 0 come first, as with torchrun."""
    counts = [ranks_per_host] * hosts if isinstance(ranks_per_host, int) else list(ranks_per_host)
    if len(counts) != hosts:
        raise UsageError(
            f"ranks_per_host has {len(counts)} numbers for {hosts} hosts; give one, or one each."
        )
    for count in counts:
        if not 1 <= count <= _MAX_RANKS_PER_HOST:
            raise UsageError(
                f"ranks_per_host is {count}; it must be from 1 to {_MAX_RANKS_PER_HOST}."
            )
    return tuple(
        RankPlacement(host=host, local_rank=local_rank, local_world_size=count)
        for host, count in enumerate(counts)
        for local_rank in range(count)
    )


def _environment(
    ranks: Sequence[RankPlacement], rank: int, master: tuple[str, int], *, shaped: bool
) -> dict[str, str]:
    """Return the environment of a rank: this process's, and on top what torchrun sets."""
    where = ranks[rank]
    interface = "eth0" if shaped else "lo"
    # One thread each, as with torchrun: hosts share the cores of one machine.
    folder = os.path.dirname(sys.executable)
    return with_defaults(os.environ, python_folder=folder, one_thread=True) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_RANK": str(where.local_rank),
        "LOCAL_WORLD_SIZE": str(where.local_world_size),
        "GROUP_RANK": str(where.host),
        "GROUP_WORLD_SIZE": str(ranks[-1].host + 1),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        **dict.fromkeys(INTERFACE_VARIABLES, interface),
    }
