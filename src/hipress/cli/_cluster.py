"""What commands that measure on an emulated cluster share: checks, the run, and its problems."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hipress.cli._machine import available_memory_bytes
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.bench._cluster import ClusterConfig

MOST_TIMEOUT_S = 10**6


def check_device(device: str) -> None:
    """Refuse a device that is none, or that is not there."""
    import torch

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r} is neither cpu nor cuda; choose one.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device 'cuda' needs a GPU and torch sees none here; choose cpu.")


def check_memory(what: str, needed_bytes: int, advice: str, device: str = "cpu") -> None:
    """Refuse what the memory of this machine, or of its first GPU, cannot hold."""
    available = available_memory_bytes()
    if device == "cuda":
        import torch

        available = torch.cuda.get_device_properties(0).total_memory
    if available is not None and needed_bytes > available:
        raise UsageError(
            f"{what} needs {needed_bytes / 1e6:,.0f} MB with all ranks on this machine and "
            f"{available / 1e6:,.0f} MB are available; {advice}."
        )


def host_numbers(text: str, least: int = 2, most: int = 64) -> list[int]:
    """Numbers of hosts, with commas between, each once."""
    found = []
    for part in text.split(","):
        try:
            number = int(part)
        except ValueError:
            number = -1
        if not least <= number <= most:
            raise UsageError(
                f"--hosts {text!r} holds {part.strip()!r}; give numbers from {least} to {most}, "
                "with commas between, e.g. 2,4."
            )
        found.append(number)
    return list(dict.fromkeys(found))


def check_network(rates: Sequence[str], delay: str, *, is_shaped: bool) -> None:
    """Refuse rates and delays that are misspelt, or that there is no network for."""
    from hipress.lab.links import parse_delay, parse_rate

    for rate in rates:
        parse_rate(rate)
    parse_delay(delay)
    if not is_shaped and (delay, *rates) != ("none", "none"):
        raise UsageError("--rate and --delay need a network; leave them out with --loopback.")


def run(
    module: str,
    config: ClusterConfig,
    timeout: float | None,
    on_part: Callable[[float], None],
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a worker on all ranks of a lab of its own and return what rank 0 wrote.

    Args:
        module: Run as `python -m MODULE CONFIG`.
        config: What the ranks are told; the file to write is added here.
        timeout: Seconds after which it is given up.
        on_part: Told how far it is, from 0 to 1.
        env: Variables of the ranks.
    """
    from hipress.lab import Lab

    def on_line(rank: int, stream: str, line: str) -> None:
        if rank == 0 and stream == "stdout" and line.startswith("@@ "):
            _, done, total, _ = line.split(" ", 3)
            on_part(int(done) / int(total))

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        told = replace(config, result=str(result)).dump()
        with Lab(
            config.num_hosts,
            rate=config.rate if config.is_shaped else None,
            delay=config.delay if config.is_shaped else None,
            shaped=config.is_shaped,
        ) as lab:
            lab.run(
                [sys.executable, "-m", module, told],
                env=environment(config) | dict(env or {}),
                timeout=timeout,
                on_line=on_line,
                check=True,
            )
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def environment(config: ClusterConfig) -> dict[str, str]:
    """A patience that even a slow line does not try, unless the user has set one."""
    from hipress import settings

    if config.rate_bits is None or os.environ.get(settings.TIMEOUT.name):
        return {}
    wanted_s = max(settings.timeout_s(), 10 * config.all_reduce_bytes * 8 / config.rate_bits)
    return {settings.TIMEOUT.name: f"{min(wanted_s, MOST_TIMEOUT_S):.0f}"}


def tell_problems(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say on stderr what is wrong with rows, and exit with 1 where something is."""
    problems = [row["problem"] for row in rows if row["problem"] is not None]
    for problem in problems:
        print(f"hipress: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)
