"""The executor's cost per task is measured over enough tasks, and small."""

from __future__ import annotations

import pytest

from hipress.bench.sync_overhead import overhead_row


def test_enough_tasks_and_consistent_fields() -> None:
    row = overhead_row("onebit", repeats=3)
    assert row["tasks"] >= 500
    expected = (row["seconds_median"] - row["codec_seconds_median"]) / row["tasks"]
    assert row["overhead_seconds_per_task"] == pytest.approx(expected)
    assert row["overhead_seconds_500_tasks"] == pytest.approx(500 * expected)
    assert row["overhead_seconds_500_tasks"] > 0
