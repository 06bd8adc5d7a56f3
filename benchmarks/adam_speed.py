"""Times the steps of `hipress.torch.AdamW` beside those of `torch.optim.AdamW`, in one run.

    PYTHONPATH=src python benchmarks/adam_speed.py --device cpu --numel 25e6 124e6 --json f.json

`x_fused` and `x_foreach` are the time of a step over that of torch's step. `x_limit` is its time
over the time that its bytes need: p, m, v and g are read and p, m and v written; in a momentum step
v is only read and m only written. Memory moves as many bytes per second as in the faster of a copy
and a multiplication in place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hipress.torch
from hipress.bench.machine import machine_facts

FULL, MOMENTUM = 7 * 4, 5 * 4
"""Fewest bytes per parameter of a step."""
NO_STEPS = "copy", "multiplication"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--numel", type=float, nargs="+", default=[25e6, 124e6])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = [row for numel in options.numel for row in time_all(int(numel), device, options.repeats)]
    if options.json is not None:
        document = {"command": "adam_speed", "machine": machine_facts(), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def time_all(numel: int, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Times all kinds of steps in turn, so that a slower machine slows all of them."""
    source = torch.empty(numel, device=device).fill_(1)
    target = torch.empty_like(source)
    jobs: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "multiplication": lambda: target.mul_(1.0),
    }
    for name in ("foreach", "fused"):
        jobs[f"torch {name}"] = Steps(numel, device, torch.optim.AdamW, **{name: True}).step
    for label, zeros in (("", False), (", zeros in v", True)):
        ours = Steps(numel, device, hipress.torch.AdamW, zeros=zeros)
        jobs[f"refresh{label}"] = partial(ours.step, is_momentum=False)
        jobs[f"first momentum{label}"] = partial(ours.step, is_momentum=True)
        jobs[f"momentum{label}"] = partial(ours.step, is_momentum=True)
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(repeats + 3):
        for name, job in jobs.items():
            seconds = timed(job, device)
            if number >= 3:
                samples[name].append(seconds)
    for label in ("", ", zeros in v"):
        kinds = (samples[f"{kind}{label}"] for kind in ("refresh", "first momentum", "momentum"))
        samples[f"mean of 50{label}"] = [
            (refresh + first + 48 * other) / 50
            for refresh, first, other in zip(*kinds, strict=True)
        ]
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    byte_s = min(medians["copy"], medians["multiplication"]) / (8 * numel)
    rows = []
    for name, taken in samples.items():
        limit = byte_s * numel * (FULL if name.startswith(("torch", "refresh")) else MOMENTUM)
        cuts = statistics.quantiles(taken, n=5)
        row = {
            "step": name,
            "device": str(device),
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
            "numel": numel,
            "repeats": repeats,
            "seconds_median": medians[name],
            "seconds_p20": cuts[0],
            "seconds_p80": cuts[-1],
            "x_fused": medians[name] / medians["torch fused"],
            "x_foreach": medians[name] / medians["torch foreach"],
            "x_limit": medians[name] / limit if name not in NO_STEPS else None,
        }
        rows.append(row)
        print(
            f"{numel / 1e6:5.0f}M {name:22} {1000 * row['seconds_median']:8.2f} ms, "
            f"{row['x_fused']:.2f} x torch fused, {row['x_foreach']:.2f} x torch foreach, "
            f"{row['x_limit'] or 0:.2f} x limit"
        )
    return rows


class Steps:
    """Parameters as in a GPT of width 768, with gradients, and their optimizer."""

    def __init__(
        self, numel: int, device: torch.device, kind: Any, *, zeros: bool = False, **options: Any
    ) -> None:
        self.parameters = []
        while numel > 0:
            for rows in (768, 4 * 768, 1, 768):
                size = max(0, min(numel, rows * 768))
                if size:
                    self.parameters.append(torch.nn.Parameter(torch.randn(size, device=device)))
                numel -= size
        self.optimizer = kind(self.parameters, **options)
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
            if zeros:
                parameter.grad[:5] = 0
        self.optimizer.step()

    def step(self, *, is_momentum: bool | None = None) -> None:
        """Makes one step; `is_momentum` says what gradients hold, for ours alone."""
        if is_momentum is not None:
            self.optimizer.note_incoming(self.parameters, is_momentum=is_momentum)
        self.optimizer.step()


def timed(job: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of a job, to its end on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    job()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
