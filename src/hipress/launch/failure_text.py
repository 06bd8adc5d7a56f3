"""What the launcher says about hosts and ranks: who is where, who waits for what, how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from hipress.launch import remote
from hipress.launch.job import Job
from hipress.launch.peer import Peer

_MOST_SHOWN = 8
"""Hosts in a line about all of them."""


def who_is_where(job: Job, peers: Sequence[Peer], port: int) -> str:
    """Say which ranks are on which host."""
    parts = []
    for peer in peers[:_MOST_SHOWN]:
        last = peer.first_rank + peer.host.slots - 1
        ranks = f"{peer.first_rank}-{last}" if last > peer.first_rank else f"{last}"
        parts.append(f"{ranks} on {peer.name}")
    if len(peers) > _MOST_SHOWN:
        parts.append(f"and so on to {peers[-1].name}")
    return f"ranks {', '.join(parts)}; they meet at {job.hosts[0].address}:{port}"


def who_waits(job: Job, peers: Sequence[Peer], port: int) -> str:
    """Say which hosts keep the others waiting, and what to do: torchrun itself is silent."""
    first = job.hosts[0]
    where = f"{first.address}:{port}"
    late = [peer for peer in peers if not peer.has_started]
    parts = []
    for peer in late:
        if not peer.is_up:
            hand = remote.by_hand(peer.host, ssh=job.ssh, port=job.ssh_port)
            parts.append(f"{peer.name} has not answered through ssh (try: {hand})")
        elif peer.waits_for is not None:
            parts.append(
                f"{peer.name} can not reach {where} ({peer.waits_for}): open that port, give "
                f"another with --port, or put the right address of {first.name} first"
            )
    return "; ".join(parts) or (
        f"{', '.join(peer.name for peer in late)} loads torch or waits in torchrun (a longer "
        f"--timeout helps where disks are slow)"
    )


def why_it_ended(job: Job, peer: Peer, code: int) -> str:
    """Say what went wrong with an agent that ended before its job."""
    if peer.is_up:
        return f"the connection to {peer.name} was lost (exit code {code}); all was ended"
    said = [text for text in peer.said if text.strip()]
    last = f" ({said[-1].strip()})" if said else ""
    everything = "\n".join(said)
    if code == remote.SSH_FAILED:
        step = remote.next_step(peer.host, everything, ssh=job.ssh, port=job.ssh_port)
        return f"ssh can not connect to {peer.name}{last}; {step}"
    if "No module named" in everything and "hipress" in everything:
        return (
            f"{peer.name} has no hipress for its {job.python}; install it there, or name a "
            f"Python that has it with --python"
        )
    if code in (126, 127):
        return f"{peer.name} has no {job.python}{last}; name the Python of that host with --python"
    return f"{peer.name} could not start its agent, exit code {code}{last}"


def how(job: Job, peer: Peer, rank: int | None, status: int) -> str:
    """Say how a rank ended, or torchrun where none is given."""
    who = "torchrun" if rank is None else f"rank {rank}"
    where = "" if job.is_local else f" on {peer.name}"
    did = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
    return f"{who}{where} {did}"


def one_machine(peer: Peer, other: Peer) -> str:
    """Say that two hosts are one."""
    return (
        f"{peer.name} and {other.name} are one machine, and ranks of both count its GPUs from 0; "
        f"name it once, with as many slots as it shall have ranks"
    )
