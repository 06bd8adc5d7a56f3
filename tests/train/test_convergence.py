"""Training on real data: the same seed gives the same run, and codecs reach the accuracy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from hipress.errors import UsageError
from hipress.train import data
from hipress.train.config import PLAIN
from hipress.train.convergence import compare, default_codecs, names_of
from hipress.train.workers import train
from hipress.train.workloads import TASKS, task
from tests.grid import full, thinned

SHORT = dataclasses.replace(TASKS["digits"], num_steps=20)


def test_a_seed_decides_the_run() -> None:
    digits = data.load("digits")
    first = train("terngrad", SHORT, digits, seed=3)
    assert train("terngrad", SHORT, digits, seed=3) == first
    other = train("terngrad", SHORT, digits, seed=4)
    assert other.scores != first.scores and other.bytes_out == first.bytes_out


def test_runs_of_a_seed_differ_in_the_codec_alone() -> None:
    digits = data.load("digits")
    plain, none = (train(name, SHORT, digits, seed=1) for name in (PLAIN, "none"))
    assert plain.scores == none.scores
    assert none.bytes_out == plain.bytes_out + 2 * 80  # the headers of two frames


def test_the_curve_starts_untrained_and_ends_at_the_end() -> None:
    run = train(PLAIN, SHORT, data.load("digits"), num_points=4)
    assert run.steps == (0, 5, 10, 15, 20)
    assert run.scores[0] < 25 < 60 < run.scores[-1]


def test_the_rate_falls_to_zero_and_stays_above() -> None:
    rates = [SHORT.rate_at(step) for step in range(SHORT.num_steps)]
    assert rates[0] == SHORT.rate and rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.01 * SHORT.rate
    assert sum(rates) == pytest.approx(SHORT.rate * (SHORT.num_steps + 1) / 2)


def test_too_many_workers_for_the_data() -> None:
    with pytest.raises(UsageError, match="76 workers take 1216 images.*has 1200; use at most 75"):
        train(PLAIN, SHORT, data.load("digits"), num_workers=76)


def test_unknown_task() -> None:
    with pytest.raises(UsageError, match="no data set 'mnist'; there are: digits, fashion-mnist"):
        task("mnist")


@pytest.mark.parametrize(
    "name", thinned(default_codecs(), keep=("onebit", "terngrad", "topk", "dgc"))
)
def test_every_codec_learns(name: str) -> None:
    """In 60 steps, two thirds of an epoch per worker, all get far from the 10 % of a guess."""
    short = dataclasses.replace(TASKS["digits"], num_steps=60)
    assert train(name, short, data.load("digits"), num_points=1).scores[-1] > 70


@full
def test_codecs_come_within_a_point() -> None:
    """300 steps are enough for these on digits; the table in the docs has the others."""
    short = dataclasses.replace(TASKS["digits"], num_steps=300)
    rows = compare(short, ["int8", "onebit", "terngrad", "topk"], num_seeds=2)
    assert [row["codec"] for row in rows] == [PLAIN, "int8", "onebit", "terngrad", "topk"]
    assert rows[0]["difference"] == 0 and rows[0]["ratio_out"] == 1 and rows[0]["accuracy"] > 97
    for row in rows:
        assert row["within"], row
        assert row["difference"] == pytest.approx(row["accuracy"] - rows[0]["accuracy"], abs=0.011)


@full
def test_rows_do_not_depend_on_jobs() -> None:
    alone, shared = (compare(SHORT, ["onebit"], num_seeds=2, jobs=jobs) for jobs in (1, 2))
    assert alone == shared


def test_plain_averaging_comes_first_and_each_codec_once() -> None:
    assert names_of(["topk", PLAIN, "topk", "none"]) == [PLAIN, "topk", "none"]


@pytest.mark.parametrize(
    ("expressions", "folder", "complaint"),
    [(["topk", "topq"], None, "topq"), (["topk"], Path("nowhere"), "'nowhere'")],
)
def test_what_cannot_run_is_refused_before_the_first_run(
    expressions: list[str], folder: Path | None, complaint: str
) -> None:
    done: list[str] = []
    name = "digits" if folder is None else "fashion-mnist"
    with pytest.raises(UsageError, match=complaint):
        compare(TASKS[name], expressions, folder=folder, on_run=done.append)
    assert done == []


@pytest.mark.skipif(
    not os.environ.get("HIPRESS_FASHION_MNIST"),
    reason="needs Fashion-MNIST: set HIPRESS_FASHION_MNIST to the folder of its files",
)
def test_fashion_mnist_trains() -> None:
    short = dataclasses.replace(TASKS["fashion-mnist"], num_steps=150)
    plain, terngrad = compare(short, ["terngrad"], num_seeds=1)
    assert plain["accuracy"] > 78 and terngrad["accuracy"] > 75
