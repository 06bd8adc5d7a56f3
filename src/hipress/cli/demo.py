"""`hipress demo`: one training on an emulated cluster, without compression and with it.

Both are `hipress train`, as a user would start it, on a lab of their own. What is sent is counted
by the hosts' interfaces.
"""

from __future__ import annotations

import json as json_text
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hipress.bench.machine import package_version
from hipress.cli import ui
from hipress.cli.options import JsonFile, takes_options
from hipress.errors import HipressError, LabError, UsageError, install_command
from hipress.version import docs_url

if TYPE_CHECKING:
    from hipress.codecs.base import Codec
    from hipress.lab import Lab

app = typer.Typer()

MODEL = "cnn"
CODEC = "momentum(ef(onebit))"
"""dist-EF-SGDM, which has Nesterov's momentum. In so few steps `onebit` beside the optimizer's
momentum ends some points lower."""
BATCH = 16
LEARNING_RATE = 0.02
NEEDS = {"matplotlib": "the picture", "pyroute2": "emulated links", "scikit-learn": "the data"}
"""Packages that hipress itself can do without, and what the demo uses them for."""
LONGEST_S = 600.0
"""Seconds of one training: a demo that takes longer is broken."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What both trainings have in common."""

    hosts: Annotated[int, Option(min=2, max=16, help="Emulated hosts, a rank each.")] = 4
    rate: Annotated[str | None, Option(help="Rate of each host's link, each way.")] = "100mbit"
    """Rate of the emulated links; None where links cannot be emulated."""
    steps: Annotated[int, Option(min=10, help="Steps of each run.")] = 120
    seed: Annotated[int, Option(min=0, help="Seed of weights and batches.")] = 0

    @property
    def where(self) -> str:
        return "no emulated links" if self.rate is None else f"{self.rate} links"

    def argv(self, codec: str) -> list[str]:
        """Returns the command of each rank."""
        return [
            *(sys.executable, "-m", "hipress", "train"),
            *("--model", MODEL, "--data", "digits", "--codec", codec),
            *("--batch", str(BATCH), "--steps", str(self.steps), "--seed", str(self.seed)),
            *("--lr", str(LEARNING_RATE), "--lr-mode", "cosine"),
            *("--log", "-", "--log-every", "1", "--eval-every", "2", "--device", "cpu"),
        ]


@app.command(epilog="Example: hipress demo --rate 50mbit --codec 'dgc(ratio=0.01)'")
@takes_options
def demo(
    options: DemoOptions,
    codec: Annotated[str, Option(help="Codec expression of the second run.")] = CODEC,
    plot: Annotated[Path, Option(help="PNG of the loss over time.")] = Path("demo.png"),
    json: JsonFile = None,
) -> None:
    """Train the same model on an emulated cluster, without and with compression.

    Each host has an address and a link of its own (see hipress lab); a
    small CNN learns scikit-learn's digits. Where this system refuses
    emulated links both runs use 127.0.0.1, and nothing is slow.
    """
    import hipress
    from hipress.lab.links import parse_link_rate
    from hipress.train.config import PLAIN

    output = ui.JsonOutput(json, "demo")
    _check_plot(plot)
    parse_link_rate(options.rate)
    _check_needs(hipress.codec(codec))
    why = _refusal(str(options.rate))
    where = f"{options.hosts} emulated hosts with {options.where}"
    if why:
        options = replace(options, rate=None)
        where = f"{options.hosts} ranks, no links"
    typer.echo(f"Training {MODEL} on digits, {options.steps} steps: {where}.", err=True)
    if why:
        typer.echo(f"Links cannot be emulated here: {why} Nothing is slow, then.", err=True)
    started = time.monotonic()
    with ui.demo_view() as view:
        rows = [_train(options, name, view) for name in dict.fromkeys((PLAIN, codec))]
    for row in rows:
        row["speedup"] = row["steps_per_s"] / rows[0]["steps_per_s"]
    columns = [
        ui.text("gradients", "codec"),
        ui.number("steps/s", "steps_per_s", 2),
        ui.Column(header="speed-up", show=lambda row: f"{row['speedup']:.1f} x"),
        ui.number("seconds", digits=1),
        ui.Column(header="MB sent per\nrank and step", show=_megabytes),
        ui.number("accuracy\n%", "accuracy", 1),
    ]
    title = f"{options.steps} steps of {MODEL} on digits, {options.hosts} hosts, {options.where}"
    ui.print_table(title, columns, rows, to_stderr=output.is_stdout)
    _draw(plot, rows, options)
    typer.echo(
        f"The loss over time is in {plot}. It took {time.monotonic() - started:.0f} s in all.\n"
        f"Next: {docs_url('pytorch')} puts this into your own script in one line.",
        err=output.is_stdout,
    )
    output.write(rows)


def _megabytes(row: ui.Row) -> str | None:
    """Shows bytes by the interfaces' count; without interfaces, by the engine's."""
    return f"{(row['interface_bytes_per_step'] or row['wire_bytes_per_step']) / 1e6:.2f}"


def _check_plot(plot: Path) -> None:
    if plot.suffix != ".png":
        raise UsageError(f"--plot {str(plot)!r} is not a PNG file; give a name that ends in .png.")
    ui.check_writable(plot, "--plot")


def _check_needs(codec: Codec) -> None:
    """Refuses what would otherwise end the demo after the first training."""
    import torch

    missing = [package for package in NEEDS if package_version(package) is None]
    if missing:
        named = ", ".join(f"{package} ({NEEDS[package]})" for package in missing)
        raise UsageError(
            f"the demo needs packages that are not installed: {named}; run "
            f"`{install_command(*missing)}` first."
        )
    # Raises where the kernels of the codec cannot be compiled or kept.
    gradient = torch.zeros(8)
    codec.encode(gradient, codec.init(gradient))


def _refusal(rate: str) -> str | None:
    from hipress.lab import Lab

    try:
        Lab(1, rate=rate).close()
    except LabError as error:
        return str(error)
    return None


def _train(options: DemoOptions, codec: str, view: ui.DemoView) -> dict[str, Any]:
    """Trains on a lab of its own; returns what rank 0 logs and what the interfaces count."""
    from hipress.lab import Lab

    found: list[dict[str, Any]] = []

    def on_line(rank: int, stream: str, line: str) -> None:
        if rank == 0 and stream == "stdout" and line.startswith("{"):
            row = json_text.loads(line)
            found.append(row)
            view.on_row(codec, row, options.steps)

    view.begin(codec, options.steps)
    with Lab(options.hosts, rate=options.rate, shaped=options.rate is not None) as lab:
        before = _sent_bytes(lab)
        lab.run(
            options.argv(codec),
            # A thread for each rank: more would fight for the cores of this machine.
            env={"OMP_NUM_THREADS": "1"},
            timeout=LONGEST_S,
            on_line=on_line,
            check=True,
        )
        sent = None if before is None else (_sent_bytes(lab) or 0) - before
    return _row(options, codec, found, sent)


def _sent_bytes(lab: Lab) -> int | None:
    if not lab.shaped:
        return None
    return sum(lab.counters(host).sent_bytes for host in range(lab.hosts))


def _row(
    options: DemoOptions, codec: str, found: list[dict[str, Any]], sent: int | None
) -> dict[str, Any]:
    (facts,) = (row for row in found if row["kind"] == "start")
    (end,) = (row for row in found if row["kind"] == "end")
    curve = [row for row in found if row["kind"] == "step"]
    return {
        "codec": codec,
        **{key: facts[key] for key in ("strategy", "model", "num_parameters")},
        "hosts": options.hosts,
        "rate": options.rate,
        "steps": options.steps,
        "batch": facts["batch"],
        "seed": options.seed,
        **{key: end[key] for key in ("seconds", "steps_per_s", "wire_bytes_per_step")},
        "interface_bytes": sent,
        "interface_bytes_per_step": None if sent is None else sent / options.hosts / options.steps,
        "loss": end["loss"],
        "accuracy": end["accuracy"],
        "curve": [{key: row[key] for key in ("step", "time_s", "loss")} for row in curve],
    }


def _draw(plot: Path, rows: list[dict[str, Any]], options: DemoOptions) -> None:
    from hipress.bench.plots import LossCurve, draw_losses

    link = "without emulated links" if options.rate is None else f"at {options.rate}"
    title = f"{MODEL} ({rows[0]['num_parameters'] / 1e6:.1f}M) on {options.hosts} hosts {link}"
    curves = [
        LossCurve(
            label=f"{row['codec']}: {row['accuracy']:.1f} % right after {row['seconds']:.0f} s",
            rows=row["curve"],
        )
        for row in rows
    ]
    try:
        draw_losses(plot, title, curves)
    except HipressError as error:
        typer.echo(f"hipress: no picture: {error}", err=True)
