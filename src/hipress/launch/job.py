"""What to run and where, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hipress.launch.hosts import Host


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run, and where."""

    command: Sequence[str]
    hosts: Sequence[Host]
    is_local: bool = False
    """Whether the one host is this machine, without ssh."""
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str
    python: str
    ssh: Sequence[str] = ("ssh",)
    ssh_port: int | None = None
    port: int = 0
    """Where the first host listens for the others; 0 lets it choose."""
    max_restarts: int = 0
    timeout_s: float = 120.0
    """How long all ranks may take to start."""
    output: Path | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts."""
        return sum(host.slots for host in self.hosts)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    code: int
    sentence: str | None = None
    """What went wrong, where anything did."""
