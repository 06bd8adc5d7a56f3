"""`hipress bench gradient`: what each codec makes of a real gradient, in under half a minute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress.errors import MissingDependencyError

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLE = "Example: hipress bench gradient --json gradient.json"

# Two hidden layers of this width make 4.1M parameters: 16 MB, enough to time.
_WIDTH = 1984

LEGEND = """\
Error is ||decoded - gradient|| / ||gradient||: 0 is exact, 1 is as far off as sending nothing.
One message may be far off and training go well. With error feedback the next messages bring what
it left out: see the mean of {num_steps}. terngrad, minmax and dithering are right on average: their
errors cancel over steps and workers. tbq sends nothing until an element has gathered tau, 0.5 by
default, more than this gradient has; dgc sends gathered momentum, larger than the gradient.
"""


def gradient(
    json: Annotated[
        Path | None, typer.Option(help="Write the rows to this file; - for stdout.")
    ] = None,
) -> None:
    """Run every codec on the gradient of a small network and show what it costs and saves."""
    from hipress.bench.table import check_json, is_stdout, write_json

    check_json(json)
    taken = digits_gradient(_WIDTH)
    rows = gradient_rows(taken)
    _print_rows(rows, taken.numel(), to_stderr=is_stdout(json))
    if json is not None:
        write_json(json, "bench gradient", rows)


def digits_gradient(width: int) -> Tensor:
    """All parameter gradients of a multi-layer perceptron on scikit-learn's digits, end to end."""
    import torch
    from torch import nn

    images, labels = _digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
    nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


def gradient_rows(gradient: Tensor, expressions: list[str] | None = None) -> list[dict[str, Any]]:
    """One row per codec (all of them unless named), with a progress bar on stderr."""
    from hipress.bench.codec_rows import gradient_row, line_up
    from hipress.bench.table import progress_bar

    names = line_up() if expressions is None else expressions
    rows = []
    with progress_bar(len(names)) as begin:
        for name in names:
            rows.append(gradient_row(name, gradient, on_round=begin(name)))
    return rows


def _digits() -> tuple[Tensor, Tensor]:
    import torch

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", extra="data") from error
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    return images, torch.from_numpy(digits.target)


def _print_rows(rows: list[dict[str, Any]], num_parameters: int, to_stderr: bool) -> None:
    from hipress.bench.table import Column, fixed, print_table

    num_steps = rows[0]["num_steps"]
    columns = [
        Column(header="codec", show=lambda row: str(row["codec"]), is_text=True),
        Column(header="smaller\nby", show=fixed("ratio", 1)),
        Column(header="error,\n1 step", show=fixed("error", 4)),
        Column(header=f"error, mean\nof {num_steps} steps", show=fixed("mean_error", 4)),
        Column(header="encode\nGB/s", show=fixed("encode_gb_per_s", 1)),
        Column(header="decode\nGB/s", show=fixed("decode_gb_per_s", 1)),
        Column(header="memcpy\nGB/s", show=fixed("memcpy_gb_per_s", 1)),
    ]
    title = f"The gradient of an MLP on digits, {num_parameters / 1e6:.1f}M parameters, one thread"
    print_table(title, columns, rows, to_stderr=to_stderr)
    typer.echo(LEGEND.format(num_steps=num_steps), err=to_stderr)
    typer.echo(
        "Next: docs/compll.md shows how a codec is written, "
        "and `hipress bench codecs` times them on 100 MB.",
        err=to_stderr,
    )
