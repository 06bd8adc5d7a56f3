"""What ranks find in their environment beyond what torchrun sets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hipress import settings
from hipress.errors import UsageError

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Each library of torch that opens sockets has its own variable for the network card."""


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
        found.update(dict.fromkeys(INTERFACE_VARIABLES, check_interface(interface)))
    for word in wanted:
        name, given, text = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                f"--env {word!r} has no name of a variable; write --env NAME or --env NAME=VALUE"
            )
        if not given and name not in environ:
            raise UsageError(
                f"--env {name} asks for a variable that is not set here; export it first, or "
                f"write --env {name}=VALUE"
            )
        found[name] = text if given else environ[name]
    return found


def check_interface(interface: str) -> str:
    """Return the name of a network card, or several with commas, if it can be one."""
    if not all(re.fullmatch(r"[A-Za-z0-9_.:-]{1,15}", name) for name in interface.split(",")):
        raise UsageError(
            f"--interface {interface!r} is not the name of a network card; write eth0, or what "
            f"`ip addr` shows on the hosts"
        )
    return interface


def with_defaults(
    environ: Mapping[str, str], forwarded: Mapping[str, str], num_ranks: int, folder: str
) -> dict[str, str]:
    """Return the whole environment of the ranks on a host.

    Args:
        environ: That of the host.
        forwarded: What the launcher sends.
        num_ranks: Ranks on this host.
        folder: Where the Python is that runs the agent.
    """
    defaults = {
        "PYTHONUNBUFFERED": "1",  # or what a rank printed is lost when it is ended
        # The process that holds torch's store ends before others, which would all warn of that.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if num_ranks > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun, which says so at length
    whole = {**defaults, **environ, **forwarded}
    # `python` is the one that runs the agent, also where its environment is not activated.
    path = forwarded.get("PATH", environ.get("PATH", ""))
    whole["PATH"] = f"{folder}:{path}" if path else folder
    return whole
