"""A rank of a real group trains as the virtual worker of its number; one rank needs no network."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hipress.train import data
from hipress.train.config import PLAIN
from hipress.train.forms import SGD_MOMENTUM
from hipress.train.workers import RealWorker, Run, train
from hipress.train.workloads import TASKS

SHORT = dataclasses.replace(TASKS["digits"], num_steps=12)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def real(expression: str, *, num_points: int = 4) -> tuple[Run, list[int]]:
    digits = data.load("digits")
    worker = RealWorker(expression, SHORT, digits, seed=2, strategy="ps")
    points: list[int] = []
    run = worker.train(num_points, points.append)
    worker.close()
    return run, points


@pytest.mark.parametrize("expression", [PLAIN, "none", "onebit", "momentum(onebit)"])
def test_a_lone_rank_trains_as_a_lone_virtual_worker(one_rank: None, expression: str) -> None:
    run, points = real(expression)
    virtual = train(expression, SHORT, data.load("digits"), seed=2, num_workers=1, num_points=4)
    assert run.steps == virtual.steps == (0, *points) == (0, 3, 6, 9, 12)
    assert run.scores[0] == virtual.scores[0]  # the same weights
    # Rounding may move an image or two of 597 to the other side.
    assert run.scores == pytest.approx(virtual.scores, abs=0.4)
    assert run.scores[-1] > run.scores[0] + 20
    assert run.bytes_out is None and run.bytes_back is None


def test_ranks_that_take_no_accuracy_take_that_of_the_first_weights(one_rank: None) -> None:
    run, points = real(PLAIN, num_points=0)
    assert run.steps == (0,) and points == []


@pytest.mark.parametrize(
    ("expression", "num_without"), [(PLAIN, 0), ("onebit", 0), ("dgc(ratio=0.01)", 2)]
)
def test_momentum_is_off_where_the_codec_brings_its_own(
    one_rank: None, expression: str, num_without: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker = RealWorker(expression, SHORT, data.load("digits"), seed=0, strategy="ring")
    groups = {g["momentum"]: g["params"] for g in worker.optimizer.param_groups}
    assert len(groups.pop(0.0, [])) == num_without  # the two large matrices
    assert len(groups.pop(SGD_MOMENTUM)) == 6 - num_without and groups == {}
    assert worker.sync.enabled is (expression != PLAIN)
    if worker.sync.enabled:
        assert worker.sync.rules.strategy == "ring"
        assert worker.sync.stats().num_compressed == 2
    worker.close()
    assert "counts twice" not in caplog.text
    assert ("overshoots" in caplog.text) == (expression == "onebit")  # as measured and known
