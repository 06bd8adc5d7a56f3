"""Speed counts steps, and nothing that lies between them."""

import pytest

from hipress.train import result
from hipress.train.result import Throughput


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(result.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_evaluations_and_first_steps_do_not_count(clock):
    run = Throughput(0, counts_from=3)
    clock(30)  # 3 slow steps
    assert run.end(3, 0)["steps_per_s"] == pytest.approx(0.1)
    run.begin(3)
    clock(2)
    row = run.end(7, 80)
    assert row["steps_per_s"] == pytest.approx(2) and row["time_s"] == pytest.approx(32)
    assert row["units_per_s_per_rank"] == pytest.approx(40)
    clock(50)  # an evaluation
    run.begin(7)
    clock(1)
    run.end(8, 20)
    assert run.speed() == (pytest.approx(5 / 3), pytest.approx(100 / 3))
    assert run.elapsed_s == pytest.approx(83)


def test_a_stretch_that_is_begun_anew_is_forgotten(clock):
    run = Throughput(5, counts_from=8)
    clock(10)
    run.begin(8)
    clock(1)
    run.end(9, 1)
    assert run.speed()[0] == pytest.approx(1)


def test_a_run_of_first_steps_only(clock):
    run = Throughput(0, counts_from=3)
    clock(4)
    run.end(2, 1)
    assert run.speed()[0] == pytest.approx(0.5)
    assert Throughput(0, counts_from=3).speed() == (0.0, 0.0)
