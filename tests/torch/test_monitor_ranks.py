"""`hipress top` and `sync.report` on a job of two ranks (see `scripts/monitor.py`)."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import scenarios

SCRIPT = Path(__file__).parent / "scripts" / "monitor.py"
SLOW_MS = 30


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitor")
    (port,) = scenarios.free_ports(1)
    env = {"XDG_RUNTIME_DIR": str(folder), "HIPRESS_MONITOR": str(port)}
    scenario = {"id": "watched", "do": "watched", "ranks": 2, "steps": 40, "env": env,
                "report": str(folder / "run.html")}  # fmt: skip
    told = scenarios.play(SCRIPT, [scenario])
    return SimpleNamespace(ranks=told.results("watched", range(2)), folder=folder, told=told)


@pytest.mark.parametrize("source", ["here", "by port"])
def test_top_shows_both_ranks_with_sane_numbers(job, source):
    """Catches: a rank that is missing, times that do not add up, the wrong rank named as slow."""
    (found,) = job.ranks[0][source]["jobs"]
    assert found["num_ranks"] == 2 and found["slowest_rank"] == 1
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert [one["pid"] for one in found["ranks"]] == [one["pid"] for one in job.ranks]
    for one in found["ranks"]:
        split = one["split"]
        assert split["step_s"] == pytest.approx(split["compute_s"] + split["wait_s"])
        assert split["step_s"] >= 1e-3 * SLOW_MS
        exchange_s = split["encode_s"] + split["wire_s"] + split["decode_s"]
        assert 0 < exchange_s < 1.2 * split["step_s"]
        assert 10 < split["ratio"] < 40 and split["sent_bytes"] > 1000
        assert one["plan"] == "onebit (ps) for 3 of 8 gradients"
        assert one["mode"] == "compressed" and 0 < one["step"] <= 40
    fast, slow = (one["split"] for one in found["ranks"])
    # Both take the same steps; the one that sleeps computes, and the other waits for it.
    assert slow["compute_s"] > 1e-3 * SLOW_MS and fast["wait_s"] > 0.5e-3 * SLOW_MS
    assert fast["wait_s"] > slow["wait_s"]


def test_ranks_leave_nothing_behind(job):
    """Catches: a file, or a process that does not end, because something listens."""
    assert list((job.folder / "hipress").iterdir()) == []
    assert job.told.find("exit", id="watched") == [0, 0]


def test_a_report_has_all_ranks(job):
    """Catches: a page of rank 0 alone, or a path that only rank 0 refuses while others wait."""
    for rank in job.ranks:
        assert rank["refused"].startswith("folder /nowhere does not exist; make it")
    text = (job.folder / "run.html").read_text("utf-8")
    rows = re.findall(r"<tr><td>([01])</td><td>[^<]+</td>(.*?)</tr>", text)
    assert [rank for rank, _ in rows] == ["0", "1"]
    for (_, row), rank in zip(rows, job.ranks, strict=True):
        cells = re.findall(r">([^<]+)</td>", row)
        assert cells[0] == str(rank["split"]["num_steps"])
        assert cells[2] == f"{1e3 * rank['split']['compute_s']:.2f} ms"
    assert "Rank 1 computes longest, and the others wait for it." in text
