"""`Lab`: what a user holds of an emulated cluster."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType

from hipress.errors import LabError, UsageError
from hipress.lab import ranks as ranks_
from hipress.lab import wire
from hipress.lab.hosts import Hosts
from hipress.lab.job import KILLED, Finished, Job, Jobs, OnLine
from hipress.lab.links import Counters, Link, parse_delay, parse_links, parse_loss, parse_rate
from hipress.lab.network import address
from hipress.lab.switchboard import Switchboard

_MOST_HOSTS = 64


class Lab:
    """An emulated cluster on this machine; use it in a `with` statement.

    Each host has its own network, process numbers and host name. They are joined by one switch
    without a limit of its own. All of it ends with this process, in whatever way that ends.

    Args:
        hosts: How many hosts, up to 64.
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
        if not 1 <= hosts <= _MOST_HOSTS:
            raise UsageError(f"hosts is {hosts}; it must be from 1 to {_MOST_HOSTS}")
        self.hosts = hosts
        """How many hosts there are."""
        self.shaped = shaped
        """Whether hosts have networks of their own; False on loopback."""
        self.ranks = ranks_.place(hosts, ranks_per_host)
        """Where each rank runs."""
        self._links = parse_links(hosts, rate, delay, loss)
        if not shaped and any(link != Link() for link in self._links):
            raise UsageError("rate, delay and loss need a network; leave them out on loopback")
        self._numbers = itertools.count()
        self._is_closed = False
        self._jobs = Jobs([place.host for place in self.ranks])
        self._board = Switchboard(self._links, shaped=shaped)
        self._hosts = Hosts(self._board.agents, self._jobs)

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
            timeout: Seconds after which the job is ended and a `LabError` raised.
            on_line: Called with rank, "stdout" or "stderr", and each line, from another thread.
            keep_output: Whether `Finished` holds the output.
            keep_going: Whether ranks go on when one has failed.
            check: Whether a failure raises a `LabError`.

        Returns:
            How it ended. When one rank fails all others are ended, unless they are to keep going.
        """
        job = self.start(
            argv,
            env=env,
            cwd=cwd,
            on_line=on_line,
            keep_output=keep_output,
            keep_going=keep_going,
        )
        try:
            finished = job.wait(timeout)
        except BaseException:
            job.end()
            raise
        if check and finished.exit_code != 0:
            raise LabError(ranks_.failure(finished))
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
    ) -> Job:
        """Start a command once per rank and return at once; the arguments are those of `run`."""
        if isinstance(argv, str) or not argv:
            raise UsageError(f"command {argv!r} must be a list of words, the program first")
        if self._is_closed:
            raise LabError("this lab is closed; make another")
        number = next(self._numbers)
        pipes = [(os.pipe(), os.pipe()) for _ in self.ranks]
        readers = [(stdout[0], stderr[0]) for stdout, stderr in pipes]
        job = Job(
            self._hosts,
            number,
            readers,
            on_line=on_line,
            keep_output=keep_output,
            keep_going=keep_going,
        )
        self._jobs.add(job)
        master = (self.address(0), ranks_.free_port(number, shaped=self.shaped))
        for rank, (stdout, stderr) in enumerate(pipes):
            message = {
                "do": "spawn",
                "job": number,
                "rank": rank,
                "argv": [os.fspath(word) for word in argv],
                "cwd": os.path.abspath(cwd or "."),
                "env": ranks_.environment(self.ranks, rank, master, shaped=self.shaped)
                | dict(env or {}),
            }
            try:
                self._hosts.tell(self.ranks[rank].host, message, [stdout[1], stderr[1]])
            except OSError:
                job.rank_exited(rank, KILLED, time.monotonic())
            os.close(stdout[1])
            os.close(stderr[1])
        return job

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
            link = replace(link, rate_bits=parse_rate(rate))
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
        """Lose every packet from and to a host, in silence; nobody is told."""
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
        self._hosts.signal(host, signal.SIGSTOP)

    def resume(self, host: int) -> None:
        """Undo `pause`."""
        self._check_host(host)
        self._hosts.signal(host, signal.SIGCONT)

    def kill(self, host: int) -> None:
        """Kill all processes of a host; the host itself stays and can run the next job."""
        self._check_host(host)
        self._hosts.signal(host, signal.SIGKILL)

    def close(self) -> None:
        """End all that runs and take the cluster down; a second call does nothing."""
        self._is_closed = True
        self._board.close()
        self._hosts.hang_up()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_host(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise UsageError(f"host {host} is not there; this lab has hosts 0 to {self.hosts - 1}")

    def _ask_switch(self, what: str, host: int, **more: object) -> wire.Message:
        self._check_host(host)
        if not self.shaped:
            raise LabError(
                f"{what!r} needs a link and this lab has none: on loopback all ranks share "
                f"127.0.0.1; make the lab with shaped=True, without --loopback"
            )
        return self._board.ask({"do": what, "host": host, **more})
