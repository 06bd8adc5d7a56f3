"""The command line of torchrun on one host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESTART_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it ranks that start over find the store of those before them, and what these wrote."""
_RANK = Path(__file__).with_name("rank.py")


def without_folder(module: str) -> str:
    """Return what `python -c` shall run to call `main` of a module.

    As `python -m`, but the folder we are in is not searched: a secrets.py or a torch that lies
    there is the business of the ranks. Python 3.10 has no option for that. No quotes, as a login
    shell of any kind reads it too.
    """
    return f"import sys; sys.path[:] = filter(None, sys.path); from {module} import main; main()"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a host stands in the job, for its agent."""

    node: int
    """Its number, in the order of the hosts."""
    num_nodes: int
    slots: int
    """Ranks on it."""
    meeting: str
    """The address of the first host; empty where there is no other."""
    port: int
    """Where the first host listens for the others."""
    job_id: str
    """The same on all hosts, and never used before."""
    max_restarts: int


def command_line(
    place: Place, agent_name: str, command: Sequence[str], log_folder: str
) -> list[str]:
    """Return the command that starts the ranks of a host.

    Args:
        place: Where the host stands.
        agent_name: The socket that ranks report to.
        command: What each rank runs.
        log_folder: For what torchrun notes about its ranks; it never removes that itself.
    """
    return [
        sys.executable,
        "-c",
        without_folder("torch.distributed.run"),
        f"--nnodes={place.num_nodes}",
        f"--nproc-per-node={place.slots}",
        f"--max-restarts={place.max_restarts}",
        f"--log-dir={log_folder}",
        *_rendezvous(place),
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


def _rendezvous(place: Place) -> list[str]:
    if not place.meeting:
        return ["--standalone", "--local-addr=127.0.0.1"]
    address = f"[{place.meeting}]" if ":" in place.meeting else place.meeting
    here = [f"--rdzv-endpoint={address}:{place.port}", f"--rdzv-id={place.job_id}"]
    if place.max_restarts == 0:
        return ["--rdzv-backend=static", f"--node-rank={place.node}", *here]
    # Only c10d lets all hosts start over together. It has no --node-rank: it sorts hosts by their
    # --local-addr, as texts. That of the first is handed to all ranks as MASTER_ADDR and must be
    # its address; those of the others are used for nothing else, so they may say their place. A
    # tilde comes after all that an address begins with.
    is_first = place.node == 0
    label = place.meeting if is_first else f"~{place.node:06d}"
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-conf=is_host={int(is_first)}",
        f"--local-addr={label}",
        *here,
    ]
