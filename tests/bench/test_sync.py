"""Rows about synchronisation: sizes of tensors, arithmetic of a row, what counts as a problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hipress.bench.cluster import sent_bytes
from hipress.bench.sync import SyncBenchmark, overhead_row, problem, rows, tensor_numels
from hipress.errors import UsageError

BENCHMARK = SyncBenchmark(
    num_hosts=4,
    rate="1gbit",
    rate_bits=10**9,
    delay="none",
    is_shaped=True,
    num_elements=1_000_000,
    numels=(600_000, 400_000),
    codecs=("onebit",),
    strategies=("ps",),
    repeats=3,
    device="cpu",
    pipelined=True,
    bulk=True,
    compress_on_cpu=False,
    result="f.json",
)

GOOD: dict[str, Any] = {
    "codec": "none",
    "strategy": "ps",
    "samples_s": [0.02, 0.01, 0.03],
    "wire_bytes": 125_000.0,
    "interface_bytes": 126_000.0,
    "interface_deviation": 0.008,
    "num_messages": 6.0,
    "num_tasks": 20,
    "num_threads": 1,
    "codec_s": 0.001,
    "overlap_s": 0.0005,
    "relative_error": 1e-8,
    "ranks_agree": True,
    "is_own": False,
}


def result(**changes: object) -> dict[str, Any]:
    fp32 = {"samples_s": [0.1, 0.3, 0.2], "interface_bytes": 6_000_000.0}
    bf16 = {"samples_s": [0.1, 0.1, 0.1], "interface_bytes": 3_000_000.0}
    return {"baselines": {"fp32": fp32, "bf16": bf16}, "syncs": [GOOD | changes]}


@pytest.mark.parametrize(
    ("size_bytes", "count"),
    [
        (100_000_000, 160),
        (100_000_000, 2),
        (100_000_000, 3),
        (100_000_000, 4),
        (100_000_000, 7),
        (100_000_001, 1000),
        (2048 * 160, 160),
        (2048 * 2, 2),
    ],
)
def test_tensors_add_up_and_span_the_sizes(size_bytes: int, count: int) -> None:
    numels = tensor_numels(size_bytes, count)
    assert len(numels) == count and sum(numels) == size_bytes // 4
    assert min(numels) == 256
    assert numels == tensor_numels(size_bytes, count)


def test_many_tensors_are_small_and_few_are_large() -> None:
    numels = sorted(tensor_numels(100_000_000, 160))
    assert 4 * numels[-1] == pytest.approx(20e6, rel=0.01)
    assert 4 * numels[80] < 100_000
    assert list(tensor_numels(100_000_000, 160)) != numels


def test_one_tensor_is_the_whole() -> None:
    assert tensor_numels(4004, 1) == (1001,)
    assert tensor_numels(4, 1) == (1,)


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match="160 tensors of 1 KB and more need --size 320KiB or more"):
        tensor_numels(100_000, 160)


def test_a_benchmark_survives_its_text() -> None:
    assert SyncBenchmark.load(BENCHMARK.dump()) == BENCHMARK
    assert BENCHMARK.size_bytes == 4_000_000 and BENCHMARK.all_reduce_bytes == 6_000_000


def test_a_row_follows_from_what_was_measured() -> None:
    (row,) = rows(BENCHMARK, result())
    assert row["seconds_median"] == 0.02 and row["baseline_seconds_median"] == 0.2
    assert row["speedup"] == pytest.approx(10) and row["speedup_over_bf16"] == pytest.approx(5)
    assert row["ideal_seconds"] == pytest.approx(0.001)
    assert row["baseline_ideal_seconds"] == pytest.approx(0.048)
    assert row["tensors"] == 2 and row["repeats"] == 3 and row["problem"] is None


def test_without_a_rate_there_is_no_ideal() -> None:
    config = dataclasses.replace(BENCHMARK, rate="none", rate_bits=None)
    (row,) = rows(config, result())
    assert row["ideal_seconds"] is None and row["baseline_ideal_seconds"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranks_agree": False}, "ranks hold different results"),
        ({"is_own": True}, "nothing was averaged"),
        ({"relative_error": 1e-6}, "1.0e-06 off the mean"),
        ({"relative_error": float("nan")}, "off the mean"),
        ({"interface_deviation": 0.06}, "differs by 6% from what the engine says it sent, 125,000"),
    ],
)
def test_problems(changes: dict[str, Any], says: str) -> None:
    found = problem(BENCHMARK, GOOD | changes)
    assert found is not None and found.startswith("none with ps: ") and says in found


def test_what_is_no_problem() -> None:
    assert problem(BENCHMARK, GOOD) is None
    assert problem(BENCHMARK, GOOD | {"codec": "onebit", "relative_error": 0.8}) is None
    assert problem(BENCHMARK, GOOD | {"interface_deviation": None}) is None


def test_bytes_of_the_interface() -> None:
    text = (
        "Inter-|\n face |bytes\n    lo: 1 2 3 4 5 6 7 8 9 10\n  eth0:7 1 0 0 0 0 0 0 99 2 0 0 0 0\n"
    )
    assert sent_bytes(text) == 99
    with pytest.raises(AssertionError, match="no eth0"):
        sent_bytes("lo: 1")


def test_enough_tasks_and_consistent_fields() -> None:
    row = overhead_row("onebit", repeats=3)
    assert row["tasks"] >= 500
    expected = (row["seconds_median"] - row["codec_seconds_median"]) / row["tasks"]
    assert row["overhead_seconds_per_task"] == pytest.approx(expected)
    assert row["overhead_seconds_500_tasks"] == pytest.approx(500 * expected)
    assert row["overhead_seconds_500_tasks"] > 0
