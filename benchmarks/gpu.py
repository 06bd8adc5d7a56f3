"""Checks and times every codec on a GPU, in one run.

    PYTHONPATH=src python benchmarks/gpu.py --out results.json

Each time is a median beside the copy bandwidth of the same run; `ratio` is the fewest bytes that
the job has to move, over its time, over that bandwidth.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import hipress

HEAD = 80
"""Bytes of a frame before its body."""

LEAST = {
    "fp16": (6, 6, 10),
    "bf16": (6, 6, 10),
    "ef(int8)": (13, 5, 9),
    "ef(int4)": (12.53, 4.53, 8.53),
    "ef(onebit)": (12.13, 4.13, 8.13),
    "tbq": (12.25, 4.25, 8.25),
    "minmax(bits=2)": (8.25, 4.25, 8.25),
    "terngrad": (8.25, 4.25, 8.25),
    "dithering(levels=2)": (8.5, 4.5, 8.5),
    "topk": (12, 4, None),
    "graddrop": (12, 4, None),
    "blocktopk": (12, 4, 8),
    "randomk": (12, 4, None),
    "dgc": (20, 4, None),
}
"""Fewest bytes per element of float32: encode, decode, decode-add."""

MORE = ("none", "onebit(means=2)", "dithering(partition=natural, norm=l2)", "topk(exact=true)",
        "momentum(ef(onebit))", "onebit(block=65536)", "int8(block=72)")  # fmt: skip
"""Codecs that are checked but not timed."""


def median_ms(job: Callable[[], Any], budget_s: float = 0.15) -> float:
    """Return the median time of a job by device events, in groups so that none waits."""
    for _ in range(2):
        job()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    times = []
    while len(times) < 5 or (time.perf_counter() - begin < budget_s and len(times) < 30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        job()
        start.record()
        for _ in range(5):
            job()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 5)
    return statistics.median(times)


def graph_of(job: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture a job as a graph, after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        job()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job()
    return graph


def check(name: str, numel: int, dtype: torch.dtype) -> str:
    """Return how CPU and GPU differ; empty if codes are equal and floats are within some ulps."""
    codec = hipress.codec(name)
    torch.manual_seed(numel)
    first = torch.randn(numel).to(dtype)
    on_cpu = codec.init(first, seed=3, stream=1)
    on_gpu = {key: value.cuda() for key, value in on_cpu.items()}
    for step in range(3):
        x = torch.randn(numel).to(dtype)
        want, have = codec.encode(x, on_cpu), codec.encode(x.cuda(), on_gpu)
        differ = (want != have.cpu()).sum().item()
        # A scale may differ by an ulp, which changes the last one or two bytes of each float of the
        # payload, and the codes of elements on the edge between two levels.
        if differ > 8 + numel // 256 + 0.0005 * want.numel():
            return f"step {step}: {differ} of {want.numel()} bytes differ"
        for key, value in on_cpu.items():
            gap = (value.double() - on_gpu[key].cpu().double()).abs()
            if gap.numel() and (gap > 1e-5).sum() > 0.0005 * numel + 2:
                return f"step {step}: state {key} differs by {gap.max():.2e}"
            on_gpu[key].copy_(value)
        for payload in (want, have.cpu()):
            want_out, have_out = codec.decode(payload), codec.decode(payload.cuda())
            if not torch.equal(want_out, have_out.cpu()):
                return f"step {step}: decode differs"
            total = torch.randn(numel)
            sums = total.cuda()
            codec.decode(payload, out=total, add=True, alpha=0.25)
            codec.decode(payload.cuda(), out=sums, add=True, alpha=0.25)
            if not torch.equal(total, sums.cpu()):
                return f"step {step}: decode-add differs"
    return ""


def check_graph(name: str, numel: int = 1_000_003) -> str:
    """Compare the bytes of captured encode and decode with plain ones; empty if they are equal."""
    codec = hipress.codec(name)
    x = torch.randn(numel, device="cuda")
    plain, captured = codec.init(x, seed=1), codec.init(x, seed=1)
    frame = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device="cuda")
    out = torch.empty(numel, device="cuda")

    def job() -> None:
        codec.encode(x, captured, out=frame)
        codec.decode(frame, out=out)

    graph = graph_of(job)
    for key, value in codec.init(x, seed=1).items():
        captured[key].copy_(value)
    for step in range(3):
        x.normal_()
        want = codec.encode(x, plain)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(want, frame):
            return f"step {step}: {(want != frame).sum().item()} bytes differ"
        if not torch.equal(codec.decode(want), out):
            return f"step {step}: decode differs"
    return ""


def copy_bandwidth(numel: int) -> float:
    """Return the bytes per second, read and written, of a copy on the device."""
    a, b = (torch.empty(numel, device="cuda").normal_() for _ in range(2))
    return 8 * numel / median_ms(lambda: b.copy_(a), 0.3) * 1e3


def time_codec(name: str, numel: int, dtype: torch.dtype, bandwidth: float) -> dict[str, Any]:
    """Return the times of encode, decode and decode-add, and their ratios."""
    codec = hipress.codec(name)
    x = torch.empty(numel, device="cuda", dtype=dtype).normal_()
    state = codec.init(x)
    for key in ("residual", "velocity"):
        if key in state:
            state[key].normal_(std=0.1)
    frame = codec.encode(x, state)
    out = torch.zeros(numel, device="cuda", dtype=torch.float32)
    least = list(LEAST[name])
    if dtype == torch.bfloat16:
        # Reads of the gradient are half as long; a codec of two passes reads it twice.
        passes = 2 if name in ("minmax(bits=2)", "terngrad", "dithering(levels=2)") else 1
        least[0] -= 2 * passes
    jobs: list[tuple[str, Callable[[], Any], float | None]] = [
        ("encode", lambda: codec.encode(x, state, out=frame), least[0]),
        ("decode", lambda: codec.decode(frame, out=out), least[1]),
        ("decode_add", lambda: codec.decode(frame, out=out, add=True, alpha=0.25), least[2]),
    ]
    row: dict[str, Any] = {"codec": name, "numel": numel, "dtype": str(dtype)[6:]}
    for label, job, num_bytes in jobs:
        row[f"{label}_ms"] = round(median_ms(job), 4)
        if num_bytes is not None:
            row[f"{label}_ratio"] = round(
                num_bytes * numel / row[f"{label}_ms"] * 1e3 / bandwidth, 3
            )
    return row


def time_bulk(bandwidth: float) -> dict[str, Any]:
    """Time a thousand gradients of 16 KB in one frame, replayed as a graph."""
    bulk = hipress.codec("ef(onebit)").bulk([4096] * 1000)
    flat = torch.empty(bulk.numel, device="cuda").normal_()
    state = bulk.init(flat)
    frame = bulk.encode(flat, state)
    out = torch.zeros_like(flat)
    jobs = {
        "encode": lambda: bulk.encode(flat, state, out=frame),
        "decode": lambda: bulk.decode(frame, out=out),
        "decode_add": lambda: bulk.decode(frame, out=out, add=True, alpha=0.25),
    }
    row: dict[str, Any] = {"job": "bulk of 1000 x 16 KB, ef(onebit), in a graph"}
    for label, job in jobs.items():
        row[f"{label}_us"] = round(replayed_us(job), 2)
    row["encode_ratio"] = round(12.13 * bulk.numel / row["encode_us"] * 1e6 / bandwidth, 3)
    return row


def time_bucket(bandwidth: float) -> dict[str, Any]:
    """Time one bucket of 25 MB, warm in the cache, replayed as a graph."""
    codec = hipress.codec("ef(onebit)")
    x = torch.empty(25 * 2**20 // 4, device="cuda").normal_()
    state = codec.init(x)
    frame = codec.encode(x, state)
    out = torch.zeros_like(x)
    return {
        "job": "bucket of 25 MB, ef(onebit), in a graph",
        "encode_us": round(replayed_us(lambda: codec.encode(x, state, out=frame)), 2),
        "decode_us": round(replayed_us(lambda: codec.decode(frame, out=out)), 2),
        "decode_add_us": round(
            replayed_us(lambda: codec.decode(frame, out=out, add=True, alpha=0.25)), 2
        ),
    }


def replayed_us(job: Callable[[], Any], repeat: int = 20) -> float:
    """Return the microseconds of a job inside a captured graph that repeats it."""

    def several() -> None:
        for _ in range(repeat):
            job()

    graph = graph_of(several)
    return median_ms(graph.replay) * 1e3 / repeat


def time_merge(name: str, numel: int, bandwidth: float, count: int = 4) -> dict[str, Any]:
    """Decode some frames, average, encode again with error feedback."""
    codec = hipress.codec(name)
    back = codec.aggregator(count)
    x = torch.empty(numel, device="cuda").normal_()
    frames = [codec.encode(x, codec.init(x, stream=k)) for k in range(count)]
    state = back.init(x)
    out = back.merge(frames, codec, numel, state)
    ms = median_ms(lambda: back.merge(frames, codec, numel, state, out=out))
    held = 8 * numel if "residual" in state else 0
    least = sum(f.numel() for f in frames) + out.numel() + held
    return {
        "job": f"merge of {count} frames of {name} into {back.name}",
        "numel": numel,
        "ms": round(ms, 4),
        "bytes_per_element": round(least / numel, 2),
        "ratio": round(least / ms * 1e3 / bandwidth, 3),
    }


EAGER = ("onebit", "minmax(bits=2)", "terngrad", "topk(ratio=0.01, exact=true)")


def time_eager(name: str, numel: int) -> dict[str, Any]:
    """Time our encode and the same algorithm in eager torch, with and without reused buffers."""
    from hipress.bench import eager

    ours = hipress.codec(name)
    x = torch.empty(numel, device="cuda").normal_()
    state = ours.init(x)
    frame = ours.encode(x, state)
    row: dict[str, Any] = {"job": f"eager {name}, in graphs", "numel": numel}

    # As graphs, so that no form waits for the host and all are timed on the device alone.
    def graph_ms(job: Callable[[], Any]) -> float:
        return round(median_ms(graph_of(job).replay), 4)

    row["ours_ms"] = graph_ms(lambda: ours.encode(x, state, out=frame))
    with torch.device("cuda"):
        tuned = eager.build(name, numel)
        assert tuned is not None
        row["plain_ms"] = graph_ms(lambda: eager.build(name, numel).encode(x))
        row["plain_over_ours"] = round(row["plain_ms"] / row["ours_ms"], 1)
        row["tuned_ms"] = graph_ms(lambda: tuned.encode(x))
        row["tuned_over_ours"] = round(row["tuned_ms"] / row["ours_ms"], 1)
    return row


GRACE = {
    "onebit(means=2)": ("onebit", "OneBitCompressor", ()),
    "terngrad": ("terngrad", "TernGradCompressor", ()),
    "dithering(levels=127, norm=l2)": ("qsgd", "QSGDCompressor", (127,)),
    "topk(ratio=0.01)": ("topk", "TopKCompressor", (0.01,)),
    "randomk(ratio=0.01)": ("randomk", "RandomKCompressor", (0.01,)),
    "dgc(ratio=0.001)": ("dgc", "DgcCompressor", (0.001,)),
}
"""Codecs, and module, class and arguments of GRACE's compressor for the same algorithm."""


def time_grace(name: str, numel: int) -> dict[str, Any]:
    """Time our encode and decode (state and packing included) and GRACE's (neither included)."""
    module, kind, arguments = GRACE[name]
    theirs = getattr(import_module(f"grace_dl.dist.compressor.{module}"), kind)(*arguments)
    ours = hipress.codec(name)
    x = torch.empty(numel, device="cuda").normal_()
    state = ours.init(x)
    frame, out = ours.encode(x, state), torch.zeros(numel, device="cuda")
    row: dict[str, Any] = {"job": f"GRACE {kind} beside {name}", "numel": numel}
    row["ours_ms"] = round(median_ms(lambda: ours.encode(x, state, out=frame)), 4)
    row["grace_ms"] = round(median_ms(lambda: theirs.compress(x, "x")), 4)
    row["grace_over_ours"] = round(row["grace_ms"] / row["ours_ms"], 1)
    parts, context = theirs.compress(x, "x")
    row["ours_decode_ms"] = round(median_ms(lambda: ours.decode(frame, out=out)), 4)
    row["grace_decode_ms"] = round(median_ms(lambda: theirs.decompress(parts, context)), 4)
    return row


SIZES = (
    (1, torch.float32),
    (5001, torch.float32),
    (1_000_003, torch.float32),
    (70_001, torch.bfloat16),
    (70_001, torch.float16),
)


def checks_of(name: str) -> dict[str, str]:
    """Run all checks of a codec, in its own process: compiling takes most of the time."""
    found = {f"{name} {n} {d}": attempt(partial(check, name, n, d)) for n, d in SIZES}
    return found | {f"{name} graph": attempt(partial(check_graph, name))}


def attempt(job: Callable[[], str]) -> str:
    """Return the result of a check, or its error."""
    try:
        return job() or "ok"
    except Exception as error:
        return f"{error!r}"[:400] + traceback.format_exc()[-600:]


def rows_of(args: argparse.Namespace, names: list[str], bandwidth: float) -> Iterator[Any]:
    """Return the jobs to time."""
    for dtype in args.dtypes:
        for name in names:
            yield name, partial(time_codec, name, args.numel, getattr(torch, dtype), bandwidth)
    if args.only is None or "eager" in args.only:
        for name in EAGER:
            yield name, partial(time_eager, name, 64 * 2**20)
    if args.only is None:
        yield "bulk", partial(time_bulk, bandwidth)
        yield "bucket", partial(time_bucket, bandwidth)
        for name in ("ef(onebit)", "int8", "tbq"):
            yield name, partial(time_merge, name, args.numel, bandwidth)
        if args.grace is not None:
            sys.path.insert(0, str(args.grace))
            for name in GRACE:
                yield name, partial(time_grace, name, 64 * 2**20)


BARS = {
    "fp16": 0.9,
    "bf16": 0.9,
    "ef(int8)": 0.9,
    "ef(int4)": 0.6,
    "ef(onebit)": 0.9,
    "tbq": 0.9,
    "minmax(bits=2)": 0.85,
    "terngrad": 0.75,
    "dithering(levels=2)": 0.7,
    "topk": 0.6,
    "graddrop": 0.6,
    "blocktopk": 0.6,
    "randomk": 0.6,
    "dgc": 0.6,
}
"""Target for encoding float32, as a share of the copy bandwidth."""


def table(report: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"{report['device']}, torch {report['torch']}, Triton {report['triton']}, "
        f"{report['date']}; copy: {report['copy_gb_s']:.0f} GB/s.",
        "",
        "| codec | gradient | encode, ms | ratio | bar | decode, ms | ratio | add, ms | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        if "codec" not in row:
            continue
        bar = BARS[row["codec"]] if row["dtype"] == "float32" else "-"
        cells = [f"`{row['codec']}`", row["dtype"], f"{row['encode_ms']:.3f}"]
        cells += [f"{row['encode_ratio']:.2f}", str(bar)]
        for job in ("decode", "decode_add"):
            ratio = row.get(f"{job}_ratio")
            cells += [f"{row[f'{job}_ms']:.3f}", "-" if ratio is None else f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| job | figures |", "| --- | --- |"]
    for row in report["rows"]:
        if "job" in row:
            figures = (f"{k} {v}" for k, v in row.items() if k not in ("job", "numel"))
            lines.append(f"| {row['job']} | {', '.join(figures)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the checks, then the timings; exit with 1 if a check or a job failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument("--numel", type=int, default=256 * 2**20)
    parser.add_argument("--only", nargs="*", help="codecs, or eager (and nothing else)")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--grace", type=Path, help="a checkout of GRACE, to be timed beside")
    parser.add_argument("--table", type=Path, help="print these results as Markdown, no more")
    args = parser.parse_args()
    if args.table is not None:
        print(table(json.loads(args.table.read_text())), end="")
        return 0
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_properties(0).name,
        "torch": torch.__version__,
        "triton": version("triton"),
        "date": datetime.date.today().isoformat(),
        "checks": {},
        "rows": [],
    }
    names = [n for n in LEAST if args.only is None or n in args.only]
    if not args.skip_checks:
        every = [*names, *(MORE if args.only is None else ())]
        with get_context("spawn").Pool(8) as pool:
            for found in pool.imap_unordered(checks_of, every, chunksize=1):
                report["checks"] |= found
    bandwidth = copy_bandwidth(args.numel)
    report["copy_gb_s"] = round(bandwidth / 1e9, 1)
    print(f"copy {report['copy_gb_s']} GB/s", flush=True)
    broken = 0
    for label, job in rows_of(args, names, bandwidth):
        try:
            row = job()
        except Exception as error:
            broken += 1
            row = {"job": label, "error": f"{error!r}"[:300] + traceback.format_exc()[-500:]}
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    failed = {k: v for k, v in report["checks"].items() if v != "ok"}
    for label, found in failed.items():
        print("FAIL", label, found)
    print(f"{len(report['checks'])} checks, {len(failed)} failed")
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
