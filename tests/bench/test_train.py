"""Rows about training steps: the arithmetic of a row and what counts as a problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hipress.bench.train import (
    HOOKS,
    TrainBenchmark,
    check_hook,
    exposed_removed,
    problem,
    rows,
)
from hipress.errors import UsageError

BENCHMARK = TrainBenchmark(
    num_hosts=4,
    rate="1gbit",
    rate_bits=10**9,
    delay="none",
    is_shaped=True,
    model="vgg",
    num_elements=1_000_000,
    batch=8,
    steps=2,
    hooks=("ddp",),
    codecs=("onebit",),
    strategies=("ps",),
    bucket_mb=None,
    repeats=3,
    device="cpu",
    result="f.json",
)


def variant(name: str, samples_s: list[float], **changes: object) -> dict[str, Any]:
    return {
        "variant": name,
        "codec": None,
        "strategy": None,
        "schedule": None,
        "slice_bytes": None,
        "credit_bytes": None,
        "note": None,
        "samples_s": samples_s,
        "wire_bytes": None,
        "interface_bytes": 6_000_000.0,
        "interface_deviation": None,
        "memory_bytes": 0,
        "skipped": {},
        "loss": 2.0,
        "ranks_agree": True,
    } | changes


OURS = variant(
    "onebit ps",
    [0.5, 0.3, 0.4],
    codec="onebit",
    strategy="ps",
    wire_bytes=190_000.0,
    interface_bytes=192_000.0,
    interface_deviation=0.01,
    memory_bytes=5_000_000,
)
RESULT = {
    "variants": [
        variant("compute", [0.2, 0.3, 0.1], ranks_agree=False, interface_bytes=0.0),
        variant("ddp", [1.0, 1.2, 0.9]),
        OURS,
    ]
}


def test_a_benchmark_survives_its_text() -> None:
    assert TrainBenchmark.load(BENCHMARK.dump()) == BENCHMARK
    assert BENCHMARK.size_bytes == 4_000_000 and BENCHMARK.all_reduce_bytes == 6_000_000


def test_rows_follow_from_what_was_measured() -> None:
    compute, ddp, ours = rows(BENCHMARK, RESULT)
    for row in (compute, ddp, ours):
        assert row["compute_seconds"] == 0.2 and row["ddp_seconds"] == 1.0
        assert row["repeats"] == 3 and row["steps"] == 2 and row["problem"] is None
    assert compute["exposed_removed"] == 1.0 and compute["speedup"] == pytest.approx(5)
    assert ddp["exposed_removed"] == 0.0 and ddp["speedup"] == 1.0
    assert ours["seconds_median"] == 0.4
    assert ours["seconds_p20"] == pytest.approx(0.34) and ours["seconds_p80"] == pytest.approx(0.46)
    assert ours["exposed_removed"] == pytest.approx(0.75) and ours["speedup"] == pytest.approx(2.5)
    assert ours["codec"] == "onebit" and ours["extra_memory_bytes"] == 5_000_000


def test_medians_are_taken_before_they_are_divided() -> None:
    # Ratios of single rounds would have the median 1.
    slow = {"variants": [RESULT["variants"][0], variant("ddp", [9, 1, 2]), variant("x", [9, 1, 3])]}
    assert rows(BENCHMARK, slow)[2]["speedup"] == pytest.approx(2 / 3)


def test_without_exposed_communication_nothing_can_be_removed() -> None:
    assert exposed_removed(ddp_s=0.2, compute_s=0.2, seconds=0.1) is None
    assert exposed_removed(ddp_s=0.2, compute_s=0.3, seconds=0.1) is None
    assert exposed_removed(ddp_s=1.0, compute_s=0.5, seconds=2.0) == -2.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranks_agree": False}, "ranks hold different parameters"),
        ({"loss": None}, "the loss is not finite"),
        ({"interface_deviation": 0.06}, "differs by 6% from what the engine says it sent, 190,000"),
    ],
)
def test_problems(changes: dict[str, Any], says: str) -> None:
    found = problem(BENCHMARK, OURS | changes)
    assert found is not None and found.startswith("vgg with onebit ps: ") and says in found
    result = {"variants": [*RESULT["variants"][:2], OURS | changes]}
    assert [row["problem"] for row in rows(BENCHMARK, result)] == [None, None, found]


def test_what_is_no_problem() -> None:
    assert problem(BENCHMARK, OURS) is None
    assert problem(BENCHMARK, OURS | {"interface_deviation": None}) is None
    assert problem(BENCHMARK, variant("compute", [1.0], ranks_agree=False)) is None
    config = dataclasses.replace(BENCHMARK, is_shaped=False, rate_bits=None)
    assert problem(config, variant("ddp", [1.0], interface_bytes=None)) is None


def test_an_unknown_hook_names_the_nearest() -> None:
    for name in HOOKS:
        check_hook(name)
    with pytest.raises(UsageError) as caught:
        check_hook("powersgd-3")
    assert str(caught.value) == (
        "hook 'powersgd-3' (did you mean 'powersgd-4'?) is none of ddp, ddp-4mb, ddp-100mb, fp16, "
        "powersgd-1, powersgd-2, powersgd-4; choose one."
    )
