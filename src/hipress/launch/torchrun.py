"""What torchrun and the ranks of one host are given: arguments, variables, the port to meet at.

All hosts of a job meet at one port of the first host; a host alone needs none.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hipress import settings
from hipress.environment import INTERFACE_VARIABLES, LOOPBACK
from hipress.errors import UsageError

RESTART_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it ranks that start over find the store of those before them, and what these wrote."""
_RANK = Path(__file__).with_name("rank.py")
_CONNECT_S = 2.0
"""Seconds for one attempt to reach the first host."""
_RETRY_S = 0.2


def call_main(module: str) -> str:
    """Return what `python -c` shall run to call `main` of a module.

    As `python -m`, but the folder we are in is not searched: a secrets.py or a torch that lies
    there is meant for the ranks only. Not `-P`, which a Python before 3.11 on another host would
    refuse without a word about its version. No quotes, as a login shell of any kind reads it too.
    """
    return f"import sys; sys.path[:] = filter(None, sys.path); from {module} import main; main()"


# --- the command line --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host of a job, as its torchrun is told."""

    index: int
    """Its number, in the order of the hosts."""
    num_nodes: int
    slots: int
    """The number of its ranks."""
    master_addr: str
    """The address of the first host; empty where there is no other."""
    master_port: int
    """Where the first host listens for the others."""
    job_id: str
    """The same on all hosts, and never used before."""
    max_restarts: int


def command_line(node: Node, agent_name: str, command: Sequence[str], log_folder: str) -> list[str]:
    """Return the command that starts the ranks of a host.

    Args:
        node: The host.
        agent_name: The socket that ranks report to.
        command: What each rank runs.
        log_folder: Where torchrun keeps its own logs, which it never removes itself.
    """
    return [
        sys.executable,
        "-c",
        call_main("torch.distributed.run" if node.master_addr else "hipress.launch.standalone"),
        f"--nnodes={node.num_nodes}",
        f"--nproc-per-node={node.slots}",
        f"--max-restarts={node.max_restarts}",
        f"--log-dir={log_folder}",
        *_rendezvous(node),
        "--no-python",
        # Else torchrun takes an option of the command for its own where the first letters fit.
        "--",
        # -I -S: nothing but the standard library, whatever the environment of the ranks says.
        sys.executable,
        "-I",
        "-S",
        str(_RANK),
        agent_name,
        *command,
    ]


def _rendezvous(node: Node) -> list[str]:
    if not node.master_addr:
        # Without an endpoint torchrun warns that it has none; this rendezvous finds a port itself.
        return [
            "--rdzv-backend=hipress",
            f"--rdzv-endpoint={LOOPBACK}:0",
            f"--rdzv-id={node.job_id}",
        ]
    address = f"[{node.master_addr}]" if ":" in node.master_addr else node.master_addr
    here = [f"--rdzv-endpoint={address}:{node.master_port}", f"--rdzv-id={node.job_id}"]
    if node.max_restarts == 0:
        return ["--rdzv-backend=static", f"--node-rank={node.index}", *here]
    # Only c10d lets all hosts start over together. It has no --node-rank: it sorts hosts by their
    # --local-addr, as texts. That of the first is handed to all ranks as MASTER_ADDR and must be
    # its address; those of the others are used for nothing else, so they may say their index. A
    # tilde comes after all that an address begins with.
    is_first = node.index == 0
    label = node.master_addr if is_first else f"~{node.index:06d}"
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-conf=is_host={int(is_first)}",
        f"--local-addr={label}",
        *here,
    ]


# --- variables ----------------------------------------------------------------------------------


def forwarded(
    wanted: Sequence[str], interface: str | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that go to every host.

    Args:
        wanted: NAME for the value that this shell has, or NAME=VALUE.
        interface: The network card to use, by its name, or None.
        environ: The environment of this shell.
    """
    found = {name: text for name, text in environ.items() if name.startswith(settings.PREFIX)}
    if interface is not None:
        # Several have commas between them.
        if not all(re.fullmatch(r"[A-Za-z0-9_.:-]{1,15}", name) for name in interface.split(",")):
            raise UsageError(
                f"--interface {interface!r} is not the name of a network card; write eth0, or what "
                f"`ip addr` shows on the hosts."
            )
        found.update(dict.fromkeys(INTERFACE_VARIABLES, interface))
    for word in wanted:
        name, given, text = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                f"--env {word!r} has no name of a variable; write --env NAME or --env NAME=VALUE."
            )
        if not given and name not in environ:
            raise UsageError(
                f"--env {name} asks for a variable that is not set here; export it first, or "
                f"write --env {name}=VALUE."
            )
        found[name] = text if given else environ[name]
    return found


# --- the port of the first host -----------------------------------------------------------------


def reserve(port: int) -> socket.socket:
    """Return a socket that holds a port for torchrun, which may listen there meanwhile.

    torch takes seconds to load: until then the kernel could give a port that is only known to be
    free to any connection that goes out.

    Args:
        port: The port; 0 finds a free one.

    Raises:
        OSError: Another program listens there, or only root may.
    """
    if socket.has_dualstack_ipv6():
        sock = socket.socket(socket.AF_INET6)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        sock = socket.socket()
    try:
        if port:
            # Connections of an earlier job that are only remembered do not count, nor for torch.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))
        # After a free one was found, or it could be one that another reserves.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        sock.close()
        raise
    return sock


async def reach(
    address: str, port: int, say_why: Callable[[str | None], None], may_go_on: Callable[[], bool]
) -> bool:
    """Wait until the first host listens; torchrun would wait in silence.

    Args:
        address: The address of the first host.
        port: Where it listens.
        say_why: Called with the reason why it is not reached when that changes, and with None when
            it is reached at last.
        may_go_on: Called before each attempt; False gives up.

    Returns:
        Whether it was reached.
    """
    last: str | None = None
    while may_go_on():
        why = await asyncio.to_thread(_connect, address, port)
        if why != last:
            say_why(why)
            last = why
        if why is None:
            return True
        await asyncio.sleep(_RETRY_S)
    return False


def _connect(address: str, port: int) -> str | None:
    """Return why a host is not reached, or None."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or "no answer"
    return None
