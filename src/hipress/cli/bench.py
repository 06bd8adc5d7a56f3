"""`hipress bench`: tables of speed and accuracy, each with its baseline from the same run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from hipress.cli import (
    bench_convergence,
    bench_gradient,
    bench_prediction,
    bench_sync,
    bench_train,
)
from hipress.cli._expressions import split_expressions
from hipress.cli._machine import available_memory_bytes
from hipress.errors import UsageError

app = typer.Typer(no_args_is_help=True)

LEAST_COPIES = 4
"""Arrays of the gradient's size that the cheapest row needs: itself, a copy, frame, decoded."""

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


@app.callback(epilog="Example: hipress bench codecs --size 25MB")
def bench() -> None:
    """Measure speed and accuracy, with the baseline in the same run."""


app.command(epilog=bench_convergence.EXAMPLE)(bench_convergence.convergence)
app.command(epilog=bench_gradient.EXAMPLE)(bench_gradient.gradient)
app.command(epilog=bench_prediction.EXAMPLE)(bench_prediction.prediction)
app.command(epilog=bench_sync.EXAMPLE)(bench_sync.sync)
app.command(epilog=bench_train.EXAMPLE)(bench_train.train)


@app.command(
    epilog="Example: hipress bench codecs --size 25MB --codecs 'ef(onebit),terngrad' --json f.json"
)
def codecs(
    size: Annotated[str, typer.Option(help="Gradient size: 100MB, 4MiB, 25e6 (bytes).")] = "100MB",
    threads: Annotated[
        str,
        typer.Option(help="Threads for codecs and torch alike; 1,2 times each codec with both."),
    ] = "1",
    codecs: Annotated[
        str | None, typer.Option(help="Codec expressions, with commas between; all if not given.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per codec; medians count.")] = 9,
    eager: Annotated[bool, typer.Option(help="Time the eager-torch form too.")] = True,
    json: Annotated[
        Path | None, typer.Option(help="Write the rows to this file; - for stdout.")
    ] = None,
) -> None:
    """Encode, decode and decode-add beside memcpy and beside eager torch.

    "x memcpy" is memcpy's time divided by the codec's: 0.5 is half the
    speed of a plain copy of the gradient. "x eager" is the time of the
    same algorithm in eager torch divided by the codec's; "x tuned" the
    same for eager torch with every buffer made beforehand.
    """
    from hipress.bench.codec_rows import line_up
    from hipress.bench.table import check_json, is_stdout, write_json

    check_json(json)
    size_bytes = parse_size(size)
    _check_memory(size, size_bytes)
    expressions = line_up() if codecs is None else split_expressions(codecs)
    rows = _codec_rows(expressions, size_bytes, parse_threads(threads), repeats, eager)
    _print_codec_rows(rows, to_stderr=is_stdout(json))
    if json is not None:
        write_json(json, "bench codecs", rows)


def parse_size(text: str) -> int:
    """Bytes that a size such as 100MB, 4MiB or 25e6 means, at least one float32.

    >>> parse_size("100MB"), parse_size("4MiB"), parse_size("25e6")
    (100000000, 4194304, 25000000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([kmg]?i?b?)\s*", text.lower())
    num_bytes = 0
    if found is not None and found[2] in _UNIT_BYTES:
        num_bytes = int(float(found[1]) * _UNIT_BYTES[found[2]])
    if num_bytes < 4:
        raise UsageError(
            f"size {text!r} is not a number of bytes, at least 4; write e.g. 100MB (10^6), "
            "4MiB (2^20) or 25e6."
        )
    return num_bytes


def _check_memory(text: str, size_bytes: int) -> None:
    """Refuse a gradient that memory cannot hold, with what a run makes of it."""
    available = available_memory_bytes()
    if available is not None and LEAST_COPIES * size_bytes > available:
        raise UsageError(
            f"size {text!r} is {size_bytes / 1e6:,.0f} MB, and a run holds at least {LEAST_COPIES} "
            f"arrays of it; {available / 1e6:,.0f} MB of memory are available: give --size "
            f"{max(available // (2 * LEAST_COPIES) // 10**6, 1)}MB or less."
        )


def parse_threads(text: str) -> list[int]:
    """The numbers of threads that a text such as 1 or 1,2 means.

    >>> parse_threads("1,2")
    [1, 2]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}", part) for part in parts):
        raise UsageError(
            f"threads {text!r} is no number of threads from 1 to 9999; write e.g. 2, or 1,2 to "
            "time each codec with both."
        )
    return [int(part) for part in dict.fromkeys(parts)]


def _codec_rows(
    expressions: list[str], size_bytes: int, threads: list[int], repeats: int, with_eager: bool
) -> list[dict[str, Any]]:
    """One row per codec and number of threads, with a progress bar on stderr."""
    import hipress
    from hipress.bench.codec_rows import gaussian, speed_row
    from hipress.bench.table import progress_bar

    for expression in expressions:
        # A misspelt last one must not cost a minute, nor one that takes fewer elements.
        hipress.codec(expression).wire_bytes(size_bytes // 4)
    x = gaussian(size_bytes)
    rows = []
    with progress_bar(len(expressions) * len(threads)) as begin:
        for expression in expressions:
            for count in threads:  # side by side, so that a slow minute of the machine hits all
                rows.append(
                    speed_row(
                        expression,
                        x,
                        threads=count,
                        repeats=repeats,
                        with_eager=with_eager,
                        on_round=begin(expression),
                    )
                )
    return rows


def _print_codec_rows(rows: list[dict[str, Any]], to_stderr: bool) -> None:
    from hipress.bench.table import Column, fixed, print_table

    columns = [
        Column(header="codec", show=lambda row: str(row["codec"]), is_text=True),
        Column(header="ratio", show=fixed("ratio", 1)),
    ]
    counts = list(dict.fromkeys(str(row["threads"]) for row in rows))
    if len(counts) > 1:
        columns.insert(1, Column(header="threads", show=lambda row: str(row["threads"])))
    for verb, header in (("encode", "encode"), ("decode", "decode"), ("decode_add", "dec-add")):
        columns += [
            Column(header=f"{header}\nms", show=fixed(f"{verb}_seconds_median", 2, scale=1e3)),
            Column(header="x\nmemcpy", show=fixed(f"{verb}_x_memcpy", 2)),
        ]
        if verb == "encode":
            columns.append(Column(header="x\neager", show=fixed("encode_x_eager", 1)))
            columns.append(Column(header="x\ntuned", show=fixed("encode_x_tuned", 1)))
    size = rows[0]["size_bytes"]
    title = f"{size / 1e6:g} MB of float32, {' and '.join(counts)} thread(s), medians"
    print_table(title, columns, rows, to_stderr=to_stderr)
