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
from collections.abc import Callable
from functools import partial
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
    "ef(onebit)": (12.13, 4.13, 8.13),
    "tbq": (12.25, 4.25, 8.25),
    "minmax(bits=2)": (8.25, 4.25, 8.25),
    "terngrad": (8.25, 4.25, 8.25),
    "dithering(levels=2)": (8.5, 4.5, 8.5),
    "topk": (12, 4, None),
    "graddrop": (12, 4, None),
    "randomk": (12, 4, None),
    "dgc": (20, 4, None),
}
"""Fewest bytes per element of float32: encode, decode, decode-add."""

MORE = ("none", "onebit(means=2)", "dithering(partition=natural, norm=l2)", "topk(exact=true)",
        "momentum(ef(onebit))", "onebit(block=65536)", "int8(block=72)")  # fmt: skip
"""Codecs that are checked but not timed."""


def median_ms(job: Callable[[], Any], budget_s: float = 0.15) -> float:
    """The median time of a job by device events, after a warm-up."""
    for _ in range(2):
        job()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    times = []
    while len(times) < 5 or (time.perf_counter() - begin < budget_s and len(times) < 30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        job()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_of(job: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A job captured, after a warm-up on a side stream."""
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
    """Empty if CPU and GPU agree, else what differs: codes equal, floats within some ulp."""
    codec = hipress.codec(name)
    torch.manual_seed(numel)
    first = torch.randn(numel).to(dtype)
    on_cpu = codec.init(first, seed=3, stream=1)
    on_gpu = {key: value.cuda() for key, value in on_cpu.items()}
    for step in range(3):
        x = torch.randn(numel).to(dtype)
        want, have = codec.encode(x, on_cpu), codec.encode(x.cuda(), on_gpu)
        differ = (want != have.cpu()).sum().item()
        if differ > max(64, 0.02 * numel / 4096 * 4 + 0.0005 * want.numel()):
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
    """Empty if a captured encode and decode give the bytes of plain ones."""
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
    """Bytes per second of a copy on the device, read and written."""
    a, b = (torch.empty(numel, device="cuda").normal_() for _ in range(2))
    return 8 * numel / median_ms(lambda: b.copy_(a), 0.3) * 1e3


def time_codec(name: str, numel: int, dtype: torch.dtype, bandwidth: float) -> dict[str, Any]:
    """Times of encode, decode and decode-add, and their ratios."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--numel", type=int, default=256 * 2**20)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    args = parser.parse_args()
    props = torch.cuda.get_device_properties(0)
    import triton

    report: dict[str, Any] = {
        "device": props.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "checks": {},
        "rows": [],
    }
    names = [n for n in LEAST if args.only is None or n in args.only]
    failed = 0
    if not args.skip_checks:
        for name in [*names, *(MORE if args.only is None else ())]:
            for numel, dtype in ((1, torch.float32), (5001, torch.float32),
                                 (1_000_003, torch.float32), (70_001, torch.bfloat16),
                                 (70_001, torch.float16)):  # fmt: skip
                failed += note(
                    report, f"{name} {numel} {dtype}", partial(check, name, numel, dtype)
                )
            failed += note(report, f"{name} graph", partial(check_graph, name))
    bandwidth = copy_bandwidth(args.numel)
    report["copy_gb_s"] = round(bandwidth / 1e9, 1)
    print(f"copy {report['copy_gb_s']} GB/s", flush=True)
    for dtype in args.dtypes:
        for name in names:
            try:
                row = time_codec(name, args.numel, getattr(torch, dtype), bandwidth)
            except Exception as error:
                row = {"codec": name, "dtype": dtype, "error": repr(error)[:500]}
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
            torch.cuda.empty_cache()
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("failed checks:", failed)
    return 1 if failed else 0


def note(report: dict[str, Any], label: str, job: Callable[[], str]) -> int:
    """Runs one check and writes down what it found."""
    try:
        found = job()
    except Exception as error:
        found = f"{error!r}"[:400] + traceback.format_exc()[-600:]
    report["checks"][label] = found or "ok"
    if found:
        print("FAIL", label, found, flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
