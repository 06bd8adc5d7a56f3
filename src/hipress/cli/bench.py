"""`hipress bench`: tables of speed and accuracy, each with its baseline from the same run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Option

from hipress.bench import machine
from hipress.cli import bench_cluster, bench_convergence, ui
from hipress.cli.options import (
    JsonFile,
    Repeats,
    Size,
    split_expressions,
    whole_numbers,
)
from hipress.errors import UsageError
from hipress.units import parse_size
from hipress.version import docs_url

app = typer.Typer(no_args_is_help=True)

LEAST_COPIES = 4
"""Arrays of the gradient's size that the cheapest row needs: itself, a copy, frame, decoded."""
MOST_THREADS = 9999
WIDTH = 1984
"""Two hidden layers of this width make 4.1M parameters: 16 MB, enough to time."""

LEGEND = """\
Error is ||decoded - gradient|| / ||gradient||: 0 is exact, 1 is as far off as sending nothing.
One message may be far off and training may go well. With error feedback the next messages bring
what it left out, as the mean of {num_steps} shows. terngrad, minmax and dithering are unbiased:
their errors cancel over steps and workers. tbq sends nothing until an element has gathered tau, 0.5
by default, more than this gradient has; dgc sends gathered momentum, larger than the gradient.

Next: {compll} shows how a codec is written, and `hipress bench codecs` times
them on 100 MB.
"""


@app.callback(epilog="Example: hipress bench codecs --size 25MB")
def bench() -> None:
    """Measure speed and accuracy, with the baseline in the same run."""


app.command(epilog=bench_convergence.EXAMPLE)(bench_convergence.convergence)


@app.command(epilog="Example: hipress bench gradient --json gradient.json")
def gradient(json: JsonFile = None) -> None:
    """Run every codec on the gradient of a small network and show what it costs and saves."""
    from hipress.bench.codecs import digits_gradient, gradient_row, line_up

    output = ui.JsonOutput(json, "bench gradient")
    taken = digits_gradient(WIDTH)
    names = line_up()
    with ui.progress_bar(len(names)) as begin:
        rows = [gradient_row(name, taken, on_round=begin(name)) for name in names]
    num_steps = rows[0]["num_steps"]
    columns = [
        ui.text("codec"),
        ui.number("smaller\nby", "ratio", 1),
        ui.number("error,\n1 step", "error", 4),
        ui.number(f"error, mean\nof {num_steps} steps", "mean_error", 4),
        ui.number("encode\nGB/s", "encode_gb_per_s", 1),
        ui.number("decode\nGB/s", "decode_gb_per_s", 1),
        ui.number("memcpy\nGB/s", "memcpy_gb_per_s", 1),
    ]
    title = f"The gradient of an MLP on digits, {taken.numel() / 1e6:.1f}M parameters, one thread"
    ui.print_table(title, columns, rows, to_stderr=output.is_stdout)
    typer.echo(
        LEGEND.format(num_steps=num_steps, compll=docs_url("compll")),
        err=output.is_stdout,
        nl=False,
    )
    output.write(rows)


app.command(epilog=bench_cluster.PREDICTION_EXAMPLE)(bench_cluster.prediction)
app.command(epilog=bench_cluster.SYNC_EXAMPLE)(bench_cluster.sync)
app.command(epilog=bench_cluster.TRAIN_EXAMPLE)(bench_cluster.train)


@app.command(
    epilog="Example: hipress bench codecs --size 25MB --codecs 'ef(onebit),terngrad' --json f.json"
)
def codecs(
    size: Size = "100MB",
    threads: Annotated[
        str, Option(help="Threads for codecs and torch alike; 1,2 times each codec with both.")
    ] = "1",
    codecs: Annotated[
        str | None, Option(help="Codec expressions, separated by commas; all if not given.")
    ] = None,
    repeats: Repeats = 9,
    eager: Annotated[bool, Option(help="Time the eager-torch form too.")] = True,
    json: JsonFile = None,
) -> None:
    """Time encode, decode and decode-add beside memcpy and beside eager torch.

    "x memcpy" is memcpy's time divided by the codec's: 0.5 is half the
    speed of a plain copy of the gradient. "x eager" is the time of the
    same algorithm in eager torch divided by the codec's; "x tuned" is the
    same for eager torch with every buffer made beforehand.
    """
    from hipress.bench.codecs import line_up

    output = ui.JsonOutput(json, "bench codecs")
    size_bytes = parse_size(size)
    _check_memory(size, size_bytes)
    counts = whole_numbers("--threads", threads, 1, MOST_THREADS)
    expressions = line_up() if codecs is None else split_expressions(codecs)
    rows = _codec_rows(expressions, size_bytes, counts, repeats, eager)
    columns = [
        ui.text("codec"),
        *([ui.number("threads")] if len(counts) > 1 else []),
        ui.number("ratio", digits=1),
        ui.number("encode\nms", "encode_seconds_median", 2, 1e3),
        ui.number("x\nmemcpy", "encode_x_memcpy", 2),
        ui.number("x\neager", "encode_x_eager", 1),
        ui.number("x\ntuned", "encode_x_tuned", 1),
        ui.number("decode\nms", "decode_seconds_median", 2, 1e3),
        ui.number("x\nmemcpy", "decode_x_memcpy", 2),
        ui.number("dec-add\nms", "decode_add_seconds_median", 2, 1e3),
        ui.number("x\nmemcpy", "decode_add_x_memcpy", 2),
    ]
    said = " and ".join(map(str, counts))
    title = f"{size_bytes // 4 * 4 / 1e6:g} MB of float32, {said} thread(s), medians"
    ui.print_table(title, columns, rows, to_stderr=output.is_stdout)
    output.write(rows)


def _check_memory(text: str, size_bytes: int) -> None:
    """Refuses a gradient that memory cannot hold, with what a run makes of it."""
    available = machine.available_memory_bytes()
    if available is not None and LEAST_COPIES * size_bytes > available:
        raise UsageError(
            f"size {text!r} is {size_bytes / 1e6:,.0f} MB, and a run holds at least {LEAST_COPIES} "
            f"arrays of it; {available / 1e6:,.0f} MB of memory are available: give --size "
            f"{max(available // (2 * LEAST_COPIES) // 10**6, 1)}MB or less."
        )


def _codec_rows(
    expressions: list[str], size_bytes: int, threads: list[int], repeats: int, with_eager: bool
) -> list[dict[str, Any]]:
    import hipress
    from hipress.bench.codecs import gaussian, speed_row

    for expression in expressions:
        # A misspelt last one must not cost a minute, nor one that takes fewer elements.
        hipress.codec(expression).wire_bytes(size_bytes // 4)
    x = gaussian(size_bytes)
    with ui.progress_bar(len(expressions) * len(threads)) as begin:
        return [
            speed_row(
                expression,
                x,
                threads=count,
                repeats=repeats,
                with_eager=with_eager,
                on_round=begin(expression),
            )
            for expression in expressions
            for count in threads  # side by side, so that a slow minute of the machine hits all
        ]
