"""Tests and times the gpu backend on a machine with a GPU, in one go of at most nine minutes.

    PYTHONPATH=src:. python benchmarks/gpu_check.py --log logs --out results.json

The suite of tests runs first, its output in the folder of `--log`. Then come the time of the host
for a call, times beside a copy as a plain caller sees them and in CUDA graphs, and shapes of tiles.
Results are written after each row, so that what was measured is not lost when time is up. Without
a GPU, `TRITON_INTERPRET=1 HIPRESS_BACKEND=gpu` and `--numel 5003` try the script itself.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gpu import LEAST, graph_of, median_ms

import hipress
from hipress.codecs import program
from hipress.codecs.program import ProgramCodec
from hipress.compll import build
from hipress.compll.backends.gpu import tiles

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BUCKET = 25 * 2**20 // 4
"""Elements of a bucket of DDP."""
HOST = ("fp16", "int8", "ef(onebit)", "tbq", "minmax(bits=2)", "terngrad", "topk", "dgc")
HOST_BAR_US = {"topk": 90, "dgc": 90}
"""Most time of the host for a call of a sparse codec; 30 us for the others."""
TWO_PASSES = ("minmax(bits=2)", "terngrad", "dithering(levels=2)")
BARS = {"minmax(bits=2)": 0.8, "16-bit": 0.6}
"""Least share of the copy bandwidth in a graph; that of 16 bits is for codecs of two passes."""
SWEEPS = {
    "random": ((8192, 32), (8192, 16), (4096, 16), (4096, 32), (2048, 16), (16384, 32), (4096, 8)),
    "encode": ((4096, 8), (4096, 16), (8192, 16), (2048, 8)),
}
"""Elements of a tile and of a thread that are tried: in passes that draw random numbers, and in
those before them, which find a scale."""
TESTS = [
    "tests/gpu",
    "tests/torch/test_optim.py::test_own_steps_do_what_is_meant",
    "--ignore=tests/gpu/test_interpreted.py",
]


class Report:
    """Results so far, in a file that is whole after every row."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.end = time.monotonic() + seconds
        self.content: dict[str, Any] = {
            "device": torch.cuda.get_device_properties(0).name if ON_GPU else platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version("triton"),
            "date": datetime.date.today().isoformat(),
            "rows": [],
        }

    def left_s(self) -> float:
        return self.end - time.monotonic()

    def write(self, **more: Any) -> None:
        self.content |= more
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")

    def add(self, row: dict[str, Any]) -> None:
        self.content["rows"].append(row)
        print(json.dumps(row), flush=True)
        self.write()


def run_suite(folder: Path, processes: int, seconds: float, tests: list[str]) -> dict[str, Any]:
    """Runs the tests of the gpu backend; returns counts, seconds and what failed."""
    log, begin = folder / "suite.log", time.monotonic()
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", "--durations=40"]
    command += ["-p", "no:cacheprovider", "-p", "xdist"]
    command += ["-n", str(processes), "--dist", "loadgroup", *tests]
    # Plugins that happen to be installed there may not go with the settings of our tests.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with log.open("w") as out:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=out, timeout=seconds, env=env
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    text = log.read_text(errors="replace")
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected)", text[-2000:])
    return {
        "tests": " ".join(tests),
        "processes": processes,
        "seconds": round(time.monotonic() - begin, 1),
        "ended": code in (0, 1),  # else it had no time, or could not start
        **{name: int(number) for number, name in counts},
        "failures": re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, re.M),
    }


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def host_us(job: Callable[[], Any]) -> float:
    """Returns the time that a call takes the host, which never waits for the device."""
    for _ in range(3):
        job()
    calls, times = 20 if ON_GPU else 1, []
    for _ in range(15 if ON_GPU else 1):
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            job()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    synchronize()
    return statistics.median(times)


def caller_ms(job: Callable[[], Any]) -> float:
    """Returns the time from a call until its result is there."""
    for _ in range(2):
        job()
    times = []
    for _ in range(9 if ON_GPU else 1):
        synchronize()
        begin = time.perf_counter()
        job()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def device_ms(job: Callable[[], Any]) -> float:
    """Returns the time inside a graph; without a GPU, that of a call."""
    return median_ms(graph_of(job).replay, 0.05) if ON_GPU else caller_ms(job)


class Trial:
    """One codec with a gradient, its state and its memory."""

    def __init__(
        self, name: str, numel: int, dtype: torch.dtype = torch.float32, *, anew: bool = False
    ) -> None:
        made = hipress.codec(name)
        assert isinstance(made, ProgramCodec)
        self.codec = made.on_backend("gpu") if anew else made  # a copy loads its kernels again
        self.x = torch.randn(numel, device=DEVICE).to(dtype)
        self.state = self.codec.init(self.x)
        for key in {"residual", "velocity"} & self.state.keys():
            self.state[key].normal_(std=0.1)
        self.frame = self.codec.encode(self.x, self.state)
        self.out = torch.zeros(numel, device=DEVICE)

    def encode(self) -> None:
        self.codec.encode(self.x, self.state, out=self.frame)

    def decode(self) -> None:
        self.codec.decode(self.frame, out=self.out)

    def decode_add(self) -> None:
        self.codec.decode(self.frame, out=self.out, add=True, alpha=0.25)


def time_host(name: str, numel: int) -> dict[str, Any]:
    """Times what a call costs the host, and what it would cost without a graph."""
    trial = Trial(name, numel)
    bar = HOST_BAR_US.get(name, 30)
    row: dict[str, Any] = {"job": f"host time of {name}", "numel": numel, "bar_us": bar}
    for label in ("encode", "decode", "decode_add"):
        row[f"{label}_us"] = round(host_us(getattr(trial, label)), 1)
    row["ok"] = max(row["encode_us"], row["decode_us"]) <= bar
    key_of, program.call_key = program.call_key, lambda *call: None
    try:
        row["encode_alone_us"] = round(host_us(trial.encode), 1)
        row["decode_alone_us"] = round(host_us(trial.decode), 1)
    finally:
        program.call_key = key_of
    return row


def least_bytes(name: str, dtype: torch.dtype) -> list[float | None]:
    """Returns the fewest bytes per element of encode, decode and decode-add."""
    encode, *rest = LEAST[name]
    if dtype != torch.float32:
        encode -= 4 if name in TWO_PASSES else 2
    return [encode, *rest]


def time_codec(
    name: str, numel: int, dtype: torch.dtype, bandwidth: float, labels: tuple[str, ...]
) -> dict[str, Any]:
    """Times a codec for a plain caller and in a graph, beside the copy bandwidth."""
    trial = Trial(name, numel, dtype)
    row: dict[str, Any] = {"codec": name, "numel": numel, "dtype": str(dtype)[6:]}
    for label, least in zip(
        ("encode", "decode", "decode_add"), least_bytes(name, dtype), strict=True
    ):
        if label not in labels:
            continue
        job = getattr(trial, label)
        for way, ms in (("", caller_ms(job)), ("graph_", device_ms(job))):
            row[f"{label}_{way}ms"] = round(ms, 4)
            if least is not None:
                row[f"{label}_{way}ratio"] = round(least * numel / ms * 1e3 / bandwidth, 3)
    bar = BARS.get(name) if dtype == torch.float32 else BARS["16-bit"] * (name in TWO_PASSES)
    if bar and "encode" in labels:
        row |= {"bar": bar, "ok": row["encode_graph_ratio"] >= bar}
    return row


def time_decode_without_out(name: str, numel: int) -> dict[str, Any]:
    trial = Trial(name, numel)
    return {
        "job": f"decode of {name} without out",
        "numel": numel,
        "ms": round(caller_ms(lambda: trial.codec.decode(trial.frame)), 4),
        "with_out_ms": round(caller_ms(trial.decode), 4),
    }


def time_exact_topk(numel: int, ratio: float) -> dict[str, Any]:
    """Times our exact top-k beside torch's, which gives values and indices and no more."""
    trial = Trial(f"topk(ratio={ratio}, exact=true, ef=false)", numel)
    x, k = trial.x, max(1, int(ratio * numel))

    def theirs() -> None:
        found = torch.topk(x.abs(), k, sorted=False).indices
        x[found]

    row: dict[str, Any] = {"job": "exact top-k beside torch.topk", "numel": numel, "ratio": ratio}
    for way, clock in (("", caller_ms), ("graph_", device_ms)):
        row[f"ours_{way}ms"] = round(clock(trial.encode), 4)
        row[f"torch_{way}ms"] = round(clock(theirs), 4)
    return row | {"ok": row["ours_graph_ms"] <= row["torch_graph_ms"]}


def try_many_elements(name: str, numel: int) -> dict[str, Any]:
    """Encodes and decodes more elements than 31 bits can count; compares what came back."""
    codec = hipress.codec(name)
    x = torch.zeros(numel, device=DEVICE)
    x[:7], x[-5:] = 2.0, -2.0
    x[numel // 2] = 2.0
    frame = codec.encode(x, codec.init(x))
    back = codec.decode(frame)
    at = torch.tensor([0, 6, numel // 2, numel - 5, numel - 1], device=DEVICE)
    signs = torch.equal(torch.sign(back[at]), torch.sign(x[at]))
    return {"job": f"{name} of many elements", "numel": numel, "ok": bool(signs)}


def sweep(
    kind: str, shape: tuple[int, int], name: str, numel: int, dtype: torch.dtype, bandwidth: float
) -> dict[str, Any]:
    """Times encode with another shape of tiles in one kind of pass."""
    before = tiles.SHAPES[kind]
    tiles.SHAPES[kind] = shape
    build._loaded.clear()
    try:
        ms = device_ms(Trial(name, numel, dtype, anew=True).encode)
    finally:
        tiles.SHAPES[kind] = before
        build._loaded.clear()
    least = least_bytes(name, dtype)[0]
    assert least is not None
    ratio = round(least * numel / ms * 1e3 / bandwidth, 3)
    row = {"sweep": f"{kind} {name}", "dtype": str(dtype)[6:], "numel": numel, "tile": shape[0]}
    return row | {"per_thread": shape[1], "encode_graph_ms": round(ms, 4), "ratio": ratio}


def jobs(args: argparse.Namespace, bandwidth: float) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields what is timed, the most important first."""
    n, f32, bf16 = args.numel, torch.float32, torch.bfloat16
    every = ("encode", "decode", "decode_add")
    for name in HOST:
        yield lambda name=name: time_host(name, min(n, BUCKET))
    for name in TWO_PASSES:
        for dtype in (f32, bf16, torch.float16):
            yield lambda name=name, dtype=dtype: time_codec(name, n, dtype, bandwidth, every[:1])
    for ratio in (0.01, 0.001):
        yield lambda ratio=ratio: time_exact_topk(min(n, 64 * 2**20), ratio)
    for name in ("fp16", "int8"):
        yield lambda name=name: time_decode_without_out(name, n)
    for name in LEAST:
        labels = every if name not in TWO_PASSES else every[1:]
        yield lambda name=name, labels=labels: time_codec(name, n, f32, bandwidth, labels)
    yield lambda: time_codec("ef(onebit)", n, bf16, bandwidth, every[:1])
    for name in ("onebit", "minmax(bits=2)", "topk"):
        yield lambda name=name: try_many_elements(name, args.many)
    for kind, shapes in SWEEPS.items():
        for case in itertools.product(shapes, TWO_PASSES, (f32, bf16)):
            yield lambda kind=kind, case=case: sweep(kind, *case[:2], n, case[2], bandwidth)


def copy_bandwidth(numel: int) -> float:
    """Returns the bytes per second, read and written, of a copy on the device.

    A device that was idle is slow at first: the best of some tries counts.
    """
    a, b = (torch.randn(numel, device=DEVICE) for _ in range(2))
    clock = median_ms if ON_GPU else caller_ms
    return 8 * numel / min(clock(lambda: b.copy_(a)) for _ in range(5)) * 1e3


def best_shapes(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the fastest shape of each sweep."""
    best: dict[str, Any] = {}
    for row in rows:
        if "sweep" in row and "error" not in row:
            key = f"{row['sweep']} {row['dtype']}"
            if key not in best or row["ratio"] > best[key]["ratio"]:
                best[key] = {k: row[k] for k in ("tile", "per_thread", "ratio")}
    return best


def main() -> int:
    """Runs the suite and the jobs; exits with 1 if a test or a job failed or missed its bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where to write the results")
    parser.add_argument("--log", type=Path, default=Path("."), help="a folder for the suite's log")
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    parser.add_argument("--suite-seconds", type=float, default=365, help="for the suite")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--tests", type=shlex.split, default=TESTS, help="arguments for pytest")
    parser.add_argument("--no-suite", action="store_true")
    parser.add_argument("--numel", type=int, default=256 * 2**20)
    parser.add_argument("--many", type=int, default=2**31 + 5)
    args = parser.parse_args()
    report = Report(args.out, args.seconds)
    if not args.no_suite:
        args.log.mkdir(parents=True, exist_ok=True)
        seconds = min(args.suite_seconds, report.left_s())
        report.write(suite=run_suite(args.log, args.processes, seconds, args.tests))
        print(json.dumps(report.content["suite"]), flush=True)
    bandwidth = copy_bandwidth(args.numel)
    report.write(copy_gb_s=round(bandwidth / 1e9, 1))
    left_out = 0
    for job in jobs(args, bandwidth):
        if report.left_s() < 10:
            left_out += 1
            continue
        try:
            row = job()
        except Exception as error:
            row = {"error": f"{error!r}"[:300] + traceback.format_exc()[-500:], "ok": False}
        report.add(row)
        if ON_GPU:
            torch.cuda.empty_cache()
    rows = report.content["rows"]
    report.write(best=best_shapes(rows), left_out=left_out)
    missed = [row for row in rows if row.get("ok") is False]
    suite = report.content.get("suite", {"ended": True, "failures": []})
    print(f"{len(rows)} rows, {len(missed)} missed, {left_out} left out for lack of time")
    return 1 if missed or suite["failures"] or not suite["ended"] else 0


if __name__ == "__main__":
    if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("torch sees no GPU; to try the script, set TRITON_INTERPRET=1 and --numel 5003.")
    sys.exit(main())
