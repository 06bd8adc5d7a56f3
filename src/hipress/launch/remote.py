"""The way to a host: its ssh command, and what to do when that fails."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hipress.launch.hosts import Host
from hipress.launch.torchrun import without_folder

CONNECT_S = 15
"""Seconds that ssh may take to connect."""
SSH_FAILED = 255
"""Exit code of ssh itself, whatever the command there would have returned."""
_AGENT = without_folder("hipress.launch.agent")

# What ssh says, in lower case, and the next step.
_STEPS = (
    ("permission denied", "let it in without a password: ssh-copy-id {target}"),
    ("host key verification failed", "accept its key once by hand: {by_hand}"),
    ("host identification has changed", "accept its key once by hand: {by_hand}"),
    ("could not resolve", "check the name, or use its address"),
    ("name or service not known", "check the name, or use its address"),
    ("connection refused", "is sshd running there, and on that port (--ssh-port)?"),
    ("timed out", "is it up, and is the port of its sshd open (--ssh-port)?"),
    ("no route to host", "is it up, and is it on a network that this machine reaches?"),
)


def local_command(python: str) -> list[str]:
    """Return the command that starts an agent on this machine."""
    return [python, "-c", _AGENT]


def ssh_command(host: Host, *, ssh: Sequence[str], port: int | None, python: str) -> list[str]:
    """Return the command that starts an agent on a host.

    Args:
        host: Where.
        ssh: The program and the user's own options, which come first and so win.
        port: Where sshd listens on hosts that do not say so themselves.
        python: The Python to use there.
    """
    # A login shell reads what follows the host, whichever shell that is: plain quoted words only.
    return [*_to(host, ssh, port), f"exec {shlex.quote(python)} -c {shlex.quote(_AGENT)}"]


def by_hand(host: Host, *, ssh: Sequence[str], port: int | None) -> str:
    """Return what to type to try the connection without this program."""
    port = host.ssh_port or port
    options = ["-p", str(port)] if port else []
    return shlex.join([*ssh, *options, _target(host), "true"])


def next_step(host: Host, said: str, *, ssh: Sequence[str], port: int | None) -> str:
    """Return what to do about a connection that failed.

    Args:
        host: Where to.
        said: What ssh wrote.
        ssh: As for `ssh_command`.
        port: As for `ssh_command`.
    """
    hand = by_hand(host, ssh=ssh, port=port)
    for needle, step in _STEPS:
        if needle in said.lower():
            return step.format(target=_target(host), by_hand=hand)
    return f"try it by hand: {hand}"


def _to(host: Host, ssh: Sequence[str], port: int | None) -> list[str]:
    port = host.ssh_port or port
    return [
        *ssh,
        "-T",
        *("-o", "BatchMode=yes"),  # a question for a password would wait for ever
        *("-o", f"ConnectTimeout={CONNECT_S}"),
        # A host that is gone is noticed after a minute.
        *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
        *(("-p", str(port)) if port else ()),
        _target(host),
    ]


def _target(host: Host) -> str:
    return f"{host.user}@{host.name}" if host.user else host.name
