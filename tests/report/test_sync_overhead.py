"""The executor's cost per task is measured over enough tasks."""

from __future__ import annotations

import pytest

from hipress.report.sync_overhead import overhead_row


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_enough_tasks_and_consistent_fields(num_ranks: int) -> None:
    row = overhead_row("onebit", num_ranks=num_ranks, repeats=2)
    assert row["ranks"] == num_ranks and row["tasks"] >= 500
    expected = (row["seconds_median"] - row["codec_seconds_median"]) / row["tasks"]
    assert row["overhead_seconds_per_task"] == pytest.approx(expected)
    assert row["overhead_seconds_500_tasks"] == pytest.approx(500 * expected)
