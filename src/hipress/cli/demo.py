"""`hipress demo`: one training on an emulated cluster, without compression and with it.

Both are `hipress train`, as a user would start it, on a lab of their own. What is sent is counted
by the hosts' interfaces.
"""

from __future__ import annotations

import json as json_
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress.cli._demo_view import DemoView, demo_view
from hipress.errors import HipressError, LabError, UsageError

if TYPE_CHECKING:
    from hipress.lab import Lab

app = typer.Typer()

RATE = "100mbit"
MODEL = "cnn"
CODEC = "momentum(ef(onebit))"
"""dist-EF-SGDM. In so few steps `onebit` beside the optimizer's momentum ends some points lower."""
BATCH = 16
STEPS = 120
LEARNING_RATE = 0.02
LONGEST_S = 600.0
"""Of one training: a demo that takes longer is broken."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both trainings have in common."""

    hosts: int
    rate: str | None
    """None: not shaped."""
    steps: int
    seed: int

    def argv(self, codec: str) -> list[str]:
        """The command of each rank."""
        return [
            *(sys.executable, "-m", "hipress", "train"),
            *("--model", MODEL, "--data", "digits", "--codec", codec),
            *("--batch", str(BATCH), "--steps", str(self.steps), "--seed", str(self.seed)),
            *("--lr", str(LEARNING_RATE), "--lr-mode", "cosine"),
            *("--log", "-", "--log-every", "1", "--eval-every", "2", "--device", "cpu"),
        ]


@app.command(epilog="Example: hipress demo --rate 50mbit --codec 'dgc(ratio=0.01)'")
def demo(
    hosts: Annotated[int, typer.Option(min=2, max=16, help="Emulated hosts, a rank each.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of each host's link, each way.")] = RATE,
    codec: Annotated[str, typer.Option(help="Codec expression of the second run.")] = CODEC,
    steps: Annotated[int, typer.Option(min=10, help="Steps of each run.")] = STEPS,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
    plot: Annotated[Path, typer.Option(help="PNG of the loss over time.")] = Path("demo.png"),
    json: Annotated[
        Path | None, typer.Option(help="Write the rows to this file; - for stdout.")
    ] = None,
) -> None:
    """Train the same model on an emulated cluster, without and with compression.

    Each host has an address and a link of its own (see hipress lab); a
    small CNN learns scikit-learn's digits. Where this system refuses
    emulated links both runs use 127.0.0.1, and nothing is slow.
    """
    import hipress
    from hipress.bench.table import check_json, is_stdout, write_json
    from hipress.lab.links import parse_rate
    from hipress.train.virtual_sync import PLAIN

    check_json(json)
    _check_plot(plot)
    hipress.codec(codec)
    parse_rate(rate)
    why = _refusal(rate)
    setting = Setting(hosts=hosts, rate=None if why else rate, steps=steps, seed=seed)
    where = f"{hosts} emulated hosts with {rate} links" if not why else f"{hosts} ranks, no links"
    typer.echo(f"Training {MODEL} on digits, {steps} steps: {where}.", err=True)
    if why:
        typer.echo(f"Links cannot be emulated here: {why} Nothing is slow, then.", err=True)
    started = time.monotonic()
    with demo_view() as view:
        rows = [_train(setting, name, view) for name in dict.fromkeys((PLAIN, codec))]
    for row in rows:
        row["speedup"] = row["steps_per_s"] / rows[0]["steps_per_s"]
    _print(rows, setting, to_stderr=is_stdout(json))
    _draw(plot, rows, setting)
    typer.echo(
        f"The loss over time is in {plot}. It took {time.monotonic() - started:.0f} s in all.\n"
        "Next: docs/pytorch.md puts this into your own script in one line.",
        err=is_stdout(json),
    )
    if json is not None:
        write_json(json, "demo", rows)


def _check_plot(plot: Path) -> None:
    if plot.suffix != ".png":
        raise UsageError(f"--plot {str(plot)!r} is no PNG; give a name that ends in .png.")
    if not plot.parent.is_dir():
        raise UsageError(f"--plot {str(plot)!r} is in a folder that is not there; give another.")


def _refusal(rate: str) -> str | None:
    """Why there is no lab with links here, if there is none."""
    from hipress.lab import Lab

    try:
        Lab(1, rate=rate).close()
    except (LabError, ImportError) as error:
        return str(error)
    return None


def _train(setting: Setting, codec: str, view: DemoView) -> dict[str, Any]:
    """One training on a lab of its own: what rank 0 logs, and what the interfaces count."""
    from hipress.lab import Lab

    found: list[dict[str, Any]] = []

    def on_line(rank: int, stream: str, line: str) -> None:
        if rank == 0 and stream == "stdout" and line.startswith("{"):
            row = json_.loads(line)
            found.append(row)
            view.on_row(codec, row, setting.steps)

    view.begin(codec, setting.steps)
    with Lab(setting.hosts, rate=setting.rate, shaped=setting.rate is not None) as lab:
        before = _sent_bytes(lab)
        lab.run(
            setting.argv(codec),
            # A thread for each rank: more would fight for the cores of this machine.
            env={"OMP_NUM_THREADS": "1"},
            timeout=LONGEST_S,
            on_line=on_line,
            check=True,
        )
        sent = None if before is None else (_sent_bytes(lab) or 0) - before
    return _row(setting, codec, found, sent)


def _sent_bytes(lab: Lab) -> int | None:
    if not lab.shaped:
        return None
    return sum(lab.counters(host).sent_bytes for host in range(lab.hosts))


def _row(
    setting: Setting, codec: str, found: list[dict[str, Any]], sent: int | None
) -> dict[str, Any]:
    (facts,) = (row for row in found if row["kind"] == "start")
    (end,) = (row for row in found if row["kind"] == "end")
    curve = [row for row in found if row["kind"] == "step"]
    return {
        "codec": codec,
        "strategy": facts["strategy"],
        "model": facts["model"],
        "num_parameters": facts["num_parameters"],
        "hosts": setting.hosts,
        "rate": setting.rate,
        "steps": setting.steps,
        "batch": facts["batch"],
        "seed": setting.seed,
        "seconds": end["seconds"],
        "steps_per_s": end["steps_per_s"],
        "wire_bytes_per_step": end["wire_bytes_per_step"],
        "interface_bytes": sent,
        "interface_bytes_per_step": None if sent is None else sent / setting.hosts / setting.steps,
        "loss": end["loss"],
        "accuracy": end["accuracy"],
        "curve": [{key: row[key] for key in ("step", "time_s", "loss")} for row in curve],
    }


def _print(rows: list[dict[str, Any]], setting: Setting, *, to_stderr: bool) -> None:
    from hipress.bench.table import Column, Row, fixed, print_table

    def megabytes(row: Row) -> str | None:
        """By the interfaces; without any, what the engine says."""
        total = row["interface_bytes_per_step"] or row["wire_bytes_per_step"]
        return f"{total / 1e6:.2f}"

    columns = [
        Column(header="gradients", show=lambda row: str(row["codec"]), is_text=True),
        Column(header="steps/s", show=fixed("steps_per_s", 2)),
        Column(header="speed-up", show=lambda row: f"{row['speedup']:.1f} x"),
        Column(header="seconds", show=fixed("seconds", 1)),
        Column(header="MB sent per\nrank and step", show=megabytes),
        Column(header="accuracy\n%", show=fixed("accuracy", 1)),
    ]
    link = "no emulated links" if setting.rate is None else f"{setting.rate} links"
    title = f"{setting.steps} steps of {MODEL} on digits, {setting.hosts} hosts, {link}"
    print_table(title, columns, rows, to_stderr=to_stderr)


def _draw(plot: Path, rows: list[dict[str, Any]], setting: Setting) -> None:
    from hipress.bench.loss_plot import Curve, draw

    link = "without emulated links" if setting.rate is None else f"at {setting.rate}"
    title = f"{MODEL} ({rows[0]['num_parameters'] / 1e6:.1f}M) on {setting.hosts} hosts {link}"
    curves = [
        Curve(
            label=f"{row['codec']}: {row['accuracy']:.1f} % right after {row['seconds']:.0f} s",
            rows=row["curve"],
        )
        for row in rows
    ]
    try:
        draw(plot, title, curves)
    except HipressError as error:
        typer.echo(f"hipress: no picture: {error}", err=True)
