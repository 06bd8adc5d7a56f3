"""Timing: interleaved rounds, percentiles, and the facts beside a number."""

from __future__ import annotations

import json
import time

import pytest

from hipress.bench.machine import machine_facts
from hipress.bench.timing import Timing, measure


def test_percentiles_of_known_samples() -> None:
    timing = Timing.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    assert (timing.p20_s, timing.p50_s, timing.p80_s) == (2.0, 3.5, 5.0)
    assert timing.num_samples == 6


def test_one_sample_is_every_percentile() -> None:
    assert Timing.of([2.0]) == Timing(p20_s=2.0, p50_s=2.0, p80_s=2.0, num_samples=1)


def test_each_round_runs_every_candidate() -> None:
    log: list[str] = []

    def candidate(name: str) -> None:
        log.append(name)
        time.sleep(0.001)  # longer than a sample, so that one call is one sample

    times = measure({name: lambda name=name: candidate(name) for name in "abc"}, repeats=4)
    assert list(times) == ["a", "b", "c"]
    rounds = log[6:]  # two calls each come before
    assert [sorted(rounds[i : i + 3]) for i in range(0, 12, 3)] == [["a", "b", "c"]] * 4
    assert all(timing.p50_s >= 0.001 and timing.num_samples == 4 for timing in times.values())


def test_a_slow_candidate_shows() -> None:
    times = measure({"fast": lambda: None, "slow": lambda: time.sleep(0.002)}, repeats=3)
    assert times["fast"].p50_s < times["slow"].p50_s


def test_rounds_report_progress() -> None:
    fractions: list[float] = []
    measure({"a": lambda: time.sleep(0.001)}, repeats=4, on_round=fractions.append)
    assert fractions == [0.25, 0.5, 0.75, 1.0]


def test_no_rounds_is_an_error() -> None:
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        measure({"a": lambda: None}, repeats=0)


def test_machine_facts_are_plain_and_complete() -> None:
    facts = machine_facts()
    assert set(facts) == {"cpu", "cores", "python", "torch", "numba", "hipress", "date_utc"}
    assert json.loads(json.dumps(facts)) == facts
    assert int(facts["cores"]) >= 1 and str(facts["date_utc"]).endswith("Z")
