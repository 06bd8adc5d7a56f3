"""Simulated steps beside measured ones: which rows there are, and what their error is."""

import pytest

from hipress.bench.prediction import rows, summary
from hipress.casync.graphs.schedules import Schedule
from hipress.secopa.simulate import Simulator
from hipress.secopa.what_if import uniform
from tests.secopa.made_up import codec, profile

MADE = profile(numels=(2**20, 100), codecs=[codec("none", 1.0), codec("onebit", 1 / 32)])


def measured(
    variant: str, seconds: float, name: str | None = None, schedule: str | None = None
) -> dict[str, object]:
    return {
        "model": "m",
        "hosts": 4,
        "rate": "1gbit",
        "variant": variant,
        "codec": name,
        "strategy": "ps" if name else None,
        "schedule": schedule,
        "slice_bytes": schedule and 2**19,
        "credit_bytes": schedule and 2**21,
        "seconds_median": seconds,
        "seconds_p20": seconds,
        "seconds_p80": seconds,
        "problem": None,
    }


def test_a_row_sets_the_simulated_step_beside_the_measured_one():
    plain_s = Simulator(MADE).step_s(None)
    found = rows(
        MADE,
        [measured("compute", 0.1), measured("ddp", 2 * plain_s), measured("o", 1.0, "onebit")],
        "ddp",
    )
    assert [row["codec"] for row in found] == [None, "onebit"]
    assert found[0]["error"] == pytest.approx(-0.5)
    simulated_s = Simulator(MADE).step_s(uniform(MADE, "onebit", "ps"))
    assert found[1]["error"] == pytest.approx(simulated_s - 1)


def test_a_schedule_is_simulated_with_its_sizes():
    """Catches: a step without DDP that is compared with one with DDP."""
    (found,) = rows(MADE, [measured("o", 1.0, "none", "overlap")], "ddp")
    schedule = Schedule(name="overlap", slice_bytes=2**19, credit_bytes=2**21)
    simulated_s = Simulator(MADE).step_s(uniform(MADE, "none", "ps"), schedule)
    assert found["simulated_seconds"] == simulated_s
    assert simulated_s < Simulator(MADE).step_s(uniform(MADE, "none", "ps"))
    assert found["schedule"] == "overlap"


def test_errors_count_without_their_sign():
    assert summary([{"error": -0.3}, {"error": 0.1}, {"error": 0.05}]) == (0.1, 0.3)
