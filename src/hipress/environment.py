"""The variables of ranks: which rank this process is, and what a new rank is given.

torchrun (and with it `hipress run` and the PyTorchJob of Kubernetes), Open MPI's mpirun and Slurm's
srun each set their own variables; `read_environment` reads all of them and changes none.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from hipress.errors import UsageError

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Each library of torch that opens sockets has its own variable for the network card."""
LOOPBACK = "127.0.0.1"
"""Where ranks of one host meet: no other host reaches it."""
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Below the ports that Linux hands out by itself, from 32768 on."""
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MAX_HOSTS = 100_000


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """The position of this process among all ranks, and where the ranks meet."""

    rank: int
    """Index of this process among all ranks, from 0 to `num_ranks` - 1."""
    num_ranks: int
    """Number of ranks on all hosts."""
    local_rank: int
    """Index among the ranks of this host, from 0; usually the index of its GPU."""
    local_size: int
    """Number of ranks on this host."""
    master_addr: str
    """The host of rank 0, as the other ranks reach it."""
    master_port: int
    """The port on which rank 0 listens; 0 for a process that runs alone: any free port will do."""
    launcher: Literal["torchrun", "mpirun", "srun", "none"]
    """Whose variables were read; "torchrun" also under `hipress run` and in a PyTorchJob."""

    def __post_init__(self) -> None:
        for kind, rank, size in (
            ("rank", self.rank, self.num_ranks),
            ("local rank", self.local_rank, self.local_size),
        ):
            if not 0 <= rank < size:
                raise UsageError(
                    f"{kind} {rank} of {size} cannot be: ranks count from 0 to the size less 1; "
                    f"look at how this process was started."
                )
        if self.local_size > self.num_ranks:
            raise UsageError(
                f"{self.local_size} ranks on this host are more than all {self.num_ranks}; look at "
                f"how this process was started."
            )


def read_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Return which rank this process is.

    The variables of torchrun come first, then those of mpirun, then those of Slurm; a process with
    none of them runs alone.

    Args:
        environ: The variables to read; those of this process if None.

    Raises:
        UsageError: Some variables of a launcher are set and others are missing.

    Example:
        >>> found = read_environment({})
        >>> found.rank, found.num_ranks, found.launcher
        (0, 1, 'none')
    """
    environ = os.environ if environ is None else environ
    if any(environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        return _from_torchrun(environ)
    if environ.get("OMPI_COMM_WORLD_RANK"):
        return _from_mpirun(environ)
    if environ.get("SLURM_PROCID"):
        return _from_srun(environ)
    if found := [name for name in (*_TORCH, "LOCAL_RANK") if environ.get(name)]:
        raise _half_set(found[0], ["RANK", "WORLD_SIZE"])
    return RankEnvironment(
        rank=0,
        num_ranks=1,
        local_rank=0,
        local_size=1,
        master_addr="127.0.0.1",
        master_port=0,
        launcher="none",
    )


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    if missing := [name for name in _TORCH if not environ.get(name)]:
        found = next(name for name in _TORCH if environ.get(name))
        raise _half_set(found, missing)
    # A PyTorchJob starts one rank per container and says nothing of local ranks.
    local_rank = _number(environ, "LOCAL_RANK") if environ.get("LOCAL_RANK") else 0
    if environ.get("LOCAL_WORLD_SIZE"):
        local_size = _number(environ, "LOCAL_WORLD_SIZE")
    elif local_rank == 0:
        local_size = 1
    else:
        raise _half_set("LOCAL_RANK", ["LOCAL_WORLD_SIZE"])
    return RankEnvironment(
        rank=_number(environ, "RANK"),
        num_ranks=_number(environ, "WORLD_SIZE"),
        local_rank=local_rank,
        local_size=local_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=_port(environ),
        launcher="torchrun",
    )


def _from_mpirun(environ: Mapping[str, str]) -> RankEnvironment:
    names = [f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if missing := [name for name in names if not environ.get(name)]:
        raise _half_set(names[0], missing)
    rank, size, local_rank, local_size = (_number(environ, name) for name in names)
    address = environ.get("MASTER_ADDR")
    if not address and size > local_size:
        raise UsageError(
            f"mpirun started {size} ranks on several hosts and MASTER_ADDR, the host of rank 0, "
            f"is not set; add -x MASTER_ADDR=HOST -x MASTER_PORT=29500 to mpirun."
        )
    if environ.get("MASTER_PORT"):
        port = _port(environ)
    elif size > local_size:
        raise _half_set("MASTER_ADDR", ["MASTER_PORT"])
    else:
        # What all ranks of one mpirun share and two of them do not: its namespace, or its process.
        job = environ.get("PMIX_NAMESPACE") or str(os.getppid())
        port = _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    return RankEnvironment(
        rank=rank,
        num_ranks=size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=address or "127.0.0.1",
        master_port=port,
        launcher="mpirun",
    )


def _from_srun(environ: Mapping[str, str]) -> RankEnvironment:
    total = next(
        (n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if environ.get(n)), "SLURM_NTASKS"
    )
    wanted = ["SLURM_PROCID", total, "SLURM_LOCALID"]
    if missing := [name for name in wanted if not environ.get(name)]:
        raise _half_set("SLURM_PROCID", missing)
    size = _number(environ, total)
    # sbatch runs its script once, on the first host, with the variables of all tasks: rank 0 of
    # many would wait for ranks that nobody starts.
    if size > 1 and environ.get("ENVIRONMENT") == "BATCH" and not environ.get("SLURM_STEP_ID"):
        raise UsageError(
            f"this is the batch script of a Slurm job with {size} tasks, and only srun starts "
            f"them all; write srun in front of the command."
        )
    hosts = _slurm_hosts(environ)
    local_size = _slurm_local_size(environ, size, hosts)
    address = environ.get("MASTER_ADDR") or (hosts[0] if hosts else "")
    if not address:
        raise _half_set("SLURM_PROCID", ["SLURM_STEP_NODELIST"])
    if environ.get("MASTER_PORT"):
        port = _port(environ)
    elif not environ.get("SLURM_JOB_ID"):
        raise _half_set("SLURM_PROCID", ["SLURM_JOB_ID"])
    else:
        # 16 steps of a job that run at a time, and jobs that follow each other, get their own port.
        step = _number(environ, "SLURM_STEP_ID") if environ.get("SLURM_STEP_ID") else 0
        port = _FIRST_PORT + (_number(environ, "SLURM_JOB_ID") * 16 + step % 16) % _NUM_PORTS
    return RankEnvironment(
        rank=_number(environ, "SLURM_PROCID"),
        num_ranks=size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_size=local_size,
        master_addr=address,
        master_port=port,
        launcher="srun",
    )


def _slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return expand_hosts(environ[name])
    return []


def _slurm_local_size(environ: Mapping[str, str], size: int, hosts: list[str]) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if environ.get(name):
            counts = expand_counts(environ[name])
            node = _number(environ, "SLURM_NODEID") if environ.get("SLURM_NODEID") else 0
            # The second is of the whole job: of use only where this step has as many tasks.
            if sum(counts) == size and node < len(counts):
                return counts[node]
    if hosts and size % len(hosts) == 0:
        return size // len(hosts)
    raise _half_set("SLURM_PROCID", ["SLURM_STEP_TASKS_PER_NODE"])


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(
            f"{name} is {text!r}; it must be a whole number from 0, which the launcher sets: "
            f"unset it, or start this with torchrun, srun or mpirun."
        )
    return int(text)


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT is {port}; it must be from 1 to 65535, such as 29500.")
    return port


def _half_set(found: str, missing: list[str]) -> UsageError:
    verb = "is" if len(missing) == 1 else "are"
    return UsageError(
        f"{found} is set and {' and '.join(missing)} {verb} not, so this process does not know "
        f"its rank; set what is missing, unset {found} to run alone, or start it with "
        f"hipress run, torchrun, srun or mpirun."
    )


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list as Slurm writes it in SLURM_STEP_NODELIST.

    Example:
        >>> expand_hosts("n[01-03,7],gpu1")
        ['n01', 'n02', 'n03', 'n7', 'gpu1']
    """
    words = re.split(r",(?![^\[]*\])", text.strip())  # commas outside brackets
    if not text.strip() or not all(words):
        raise _bad_node_list(text)
    return [host for word in words for host in _expand_word(word, text)]


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks on each host, as Slurm writes it in SLURM_STEP_TASKS_PER_NODE.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for word in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            raise UsageError(
                f"the tasks per node {text!r} are not counts such as 2(x3),1; Slurm sets them, "
                f"so start the script with srun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_word(word: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]+)\](.*))?", word)
    if match is None:
        raise _bad_node_list(text)
    head, ranges, tail = match.groups()
    if ranges is None:
        return [head]
    tails = _expand_word(tail, text)
    hosts = [f"{head}{number}{rest}" for number in _expand_ranges(ranges, text) for rest in tails]
    if len(hosts) > _MAX_HOSTS:
        raise _bad_node_list(text)
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise _bad_node_list(text)
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + _MAX_HOSTS:
            raise _bad_node_list(text)
        # Zeros in front belong to the name: 01-03 is 01, 02, 03.
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _bad_node_list(text: str) -> UsageError:
    return UsageError(
        f"the node list {text!r} is not one that Slurm writes, such as n[01-03,7],gpu1; "
        f"set MASTER_ADDR to the first host yourself."
    )


def with_defaults(
    environ: Mapping[str, str],
    *,
    python_folder: str,
    one_thread: bool,
    interface: str | None = None,
) -> dict[str, str]:
    """Return the variables for a new rank: those given, and defaults for what they leave out.

    Args:
        environ: The variables that the rank gets in any case.
        python_folder: Comes first in PATH: `python` is the one that runs hipress, also where its
            environment is not activated.
        one_thread: Whether ranks share the cores of a machine, so that each gets one thread.
        interface: The network card that ranks use; None leaves the choice to each library.
    """
    defaults = {
        "PYTHONUNBUFFERED": "1",  # or what a rank printed is lost when it is ended
        # The process that holds torch's store ends before others, which would all warn of that.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if one_thread:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun, which says so at length
    if interface is not None:
        defaults.update(dict.fromkeys(INTERFACE_VARIABLES, interface))
    path = environ.get("PATH")
    return {**defaults, **environ, "PATH": f"{python_folder}:{path}" if path else python_folder}


def job_address(*, one_host: bool, environ: Mapping[str, str] | None = None) -> str:
    """Return the IPv4 address of this host on the network card that its ranks use.

    The card that a launcher or user has named comes first; without one it is loopback if all ranks
    are on one host, and otherwise the card of the host's name, as for gloo. NCCL_SOCKET_IFNAME is
    read as NCCL does: `eth` is the beginning of names, `=eth0` a whole name, and `^docker,lo`
    excludes cards.

    Args:
        one_host: Whether all ranks are on this host.
        environ: The variables to read; those of this process if None.

    Raises:
        OSError: There is no such card, or it has no IPv4 address.
    """
    environ = os.environ if environ is None else environ
    for name in INTERFACE_VARIABLES:
        text = environ.get(name, "").strip()
        if name == "NCCL_SOCKET_IFNAME" and text:
            return _first_address(text, one_host)
        if card := text.split(",")[0].strip():
            return _address_of(card)
    return LOOPBACK if one_host else socket.gethostbyname(socket.gethostname())


def _first_address(text: str, one_host: bool) -> str:
    """Returns the address of the first card that a value of NCCL_SOCKET_IFNAME allows."""
    excludes, words = text.startswith("^"), text.removeprefix("^")
    exact = words.startswith("=")
    names = tuple(word.strip() for word in words.removeprefix("=").split(",") if word.strip())
    for _, card in socket.if_nameindex():
        if (card in names if exact else card.startswith(names)) == excludes:
            continue
        with suppress(OSError):  # it has no IPv4 address
            address = _address_of(card)
            # An exclusion leaves loopback in, which other hosts do not reach.
            if one_host or not excludes or not address.startswith("127."):
                return address
    raise OSError(f"no network card with an IPv4 address fits NCCL_SOCKET_IFNAME={text}")


def _address_of(card: str) -> str:
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", card.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(sock, get_address, request)[20:24])


def free_port() -> int:
    """Return a port that no program of this machine uses at the moment."""
    with bind_loopback() as sock:
        return int(sock.getsockname()[1])


def bind_loopback(port: int = 0) -> socket.socket:
    """Return a socket that is bound to a port of 127.0.0.1; 0 finds a free one."""
    sock = socket.socket()
    try:
        if port:
            # Connections of an earlier job that are only remembered do not count.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LOOPBACK, port))
    except OSError:
        sock.close()
        raise
    return sock
