"""The sentences about hosts and ranks: who is where, who waits for what, how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hipress.launch import remote

if TYPE_CHECKING:
    from hipress.launch.launcher import LaunchSpec
    from hipress.launch.remote import RemoteAgent

_MAX_SHOWN = 8
"""Hosts in a line about all of them."""


def who_is_where(spec: LaunchSpec, agents: Sequence[RemoteAgent], port: int) -> str:
    """Say which ranks are on which host."""
    parts = []
    for agent in agents[:_MAX_SHOWN]:
        last = agent.first_rank + agent.host.slots - 1
        ranks = f"{agent.first_rank}-{last}" if last > agent.first_rank else f"{last}"
        parts.append(f"{ranks} on {agent.name}")
    if len(agents) > _MAX_SHOWN:
        parts.append(f"and so on to {agents[-1].name}")
    return f"ranks {', '.join(parts)}; they meet at {spec.hosts[0].address}:{port}"


def who_waits(spec: LaunchSpec, agents: Sequence[RemoteAgent], port: int) -> str:
    """Say which hosts keep the others waiting, and what to do: torchrun itself is silent."""
    first = spec.hosts[0]
    where = f"{first.address}:{port}"
    late = [agent for agent in agents if not agent.has_started]
    parts = []
    for agent in late:
        if not agent.is_up:
            by_hand = remote.manual_command(agent.host, ssh=spec.ssh, port=spec.ssh_port)
            parts.append(f"{agent.name} has not answered through ssh (try: {by_hand})")
        elif agent.waits_for is not None:
            parts.append(
                f"{agent.name} cannot reach {where} ({agent.waits_for}): open that port, give "
                f"another with --port, or put the right address of {first.name} first"
            )
    return "; ".join(parts) or (
        f"{', '.join(agent.name for agent in late)} loads torch or waits in torchrun (a longer "
        f"--timeout helps where disks are slow)"
    )


def why_it_ended(spec: LaunchSpec, agent: RemoteAgent, code: int) -> str:
    """Say what went wrong with an agent that ended before its ranks did."""
    if agent.is_up:
        return f"the connection to {agent.name} was lost (exit code {code}); all ranks were ended"
    errors = [text for text in agent.errors if text.strip()]
    last = f" ({errors[-1].strip()})" if errors else ""
    everything = "\n".join(errors)
    if code == remote.SSH_FAILED:
        step = remote.next_step(agent.host, everything, ssh=spec.ssh, port=spec.ssh_port)
        return f"ssh cannot connect to {agent.name}{last}; {step}"
    if "No module named" in everything and "hipress" in everything:
        return (
            f"{agent.name} has no hipress for its {spec.python}; install it there, or name a "
            f"Python that has it with --python"
        )
    if code in (126, 127):
        return (
            f"{agent.name} has no {spec.python}{last}; name the Python of that host with --python"
        )
    return f"{agent.name} could not start its agent, exit code {code}{last}"


def how(spec: LaunchSpec, agent: RemoteAgent, rank: int | None, status: int) -> str:
    """Say how a rank ended, or torchrun if no rank is given."""
    who = "torchrun" if rank is None else f"rank {rank}"
    where = "" if spec.is_local else f" on {agent.name}"
    did = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
    return f"{who}{where} {did}"


def one_machine(agent: RemoteAgent, other: RemoteAgent) -> str:
    """Say that two hosts are the same machine."""
    return (
        f"{agent.name} and {other.name} are one machine, and ranks of both count its GPUs from 0; "
        f"name it once, with as many slots as it shall have ranks"
    )
