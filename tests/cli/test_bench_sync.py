"""`hipress bench sync`: fields, a small run on a lab and on loopback, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hipress.bench import cluster
from hipress.cli.bench_cluster import SyncOptions
from hipress.cli.main import main
from hipress.cli.options import ClusterOptions
from tests.grid import full
from tests.lab.conftest import refusal

FIELDS = {
    "codec", "strategy", "rate", "hosts", "size_bytes", "seconds_median",
    "baseline_seconds_median", "baseline_bf16_seconds_median", "speedup", "wire_bytes_per_rank",
    "ideal_seconds", "repeats", "seconds_p20", "seconds_p80", "interface_bytes_per_rank",
    "ranks_agree", "relative_error", "messages_per_rank", "tasks", "codec_seconds",
    "overlap_seconds", "device", "problem",
}  # fmt: skip


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "sync", "--hosts", "2", "--repeats", "1", "--timeout", "250", *arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def check_row(row: dict[str, Any]) -> None:
    assert row.keys() >= FIELDS
    assert row["hosts"] == 2 and row["repeats"] == 1 and row["device"] == "cpu"
    assert row["speedup"] == pytest.approx(row["baseline_seconds_median"] / row["seconds_median"])
    assert row["ranks_agree"] is True and row["problem"] is None
    assert row["tasks"] >= 2 and 0 < row["overlap_seconds"] + row["codec_seconds"] < 250
    if row["codec"] == "none":
        assert row["relative_error"] < 2e-7
        assert row["wire_bytes_per_rank"] == pytest.approx(row["size_bytes"], rel=0.01)
    else:
        assert 0.1 < row["relative_error"] < 1.0
        assert row["wire_bytes_per_rank"] < row["size_bytes"] / 16


@full
@pytest.mark.alone
def test_on_a_shaped_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (why := refusal()) is not None:
        pytest.skip(why)
    path = tmp_path / "f.json"
    size = ("--rate", "100mbit,1gbit", "--size", "4MB")
    assert bench(*size, "--codec", "onebit,none", "--json", str(path)) == 0
    document = json.loads(path.read_text())
    assert document["command"] == "bench sync"
    asked = [(row["rate"], row["codec"]) for row in document["rows"]]
    assert asked == [(r, c) for r in ("100mbit", "1gbit") for c in ("onebit", "none")]
    for row in document["rows"]:
        check_row(row)
        rate = {"100mbit": 1e8, "1gbit": 1e9}[row["rate"]]
        assert row["ideal_seconds"] == pytest.approx(row["wire_bytes_per_rank"] * 8 / rate)
        # Headers and acknowledgements; a barrier more or less counts where little is sent.
        assert row["interface_bytes_per_rank"] == pytest.approx(
            row["wire_bytes_per_rank"], rel=0.05, abs=20_000
        )
    slow = document["rows"][1]  # none at 100mbit: a lower bound that no machine can beat
    assert slow["seconds_median"] > 0.8 * slow["ideal_seconds"]
    assert slow["baseline_seconds_median"] > 0.8 * slow["baseline_ideal_seconds"]
    out = capsys.readouterr().out
    assert "4 MB of float32 in 1 tensor(s), 2 hosts" in out and "100mbit" in out


def test_on_loopback_with_several_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    switches = ("--no-pipelining", "--no-bulk", "--tensors", "9", "--strategy", "ps, ring")
    assert bench("--loopback", "--size", "1MB", "--codec", "onebit", *switches, "--json", "-") == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["rows"]
    assert [row["strategy"] for row in rows] == ["ps", "ring"]
    for row in rows:
        check_row(row)
        assert row["rate"] == "none" and row["ideal_seconds"] is None
        assert row["interface_bytes_per_rank"] is None
        assert row["tensors"] == 9 and row["pipelined"] is False and row["bulk"] is False
    assert "onebit" in captured.err  # the table


def test_a_wrong_result_is_told_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one: dict[str, Any] = dict.fromkeys(
        ("wire_bytes", "interface_bytes", "num_messages", "codec_s", "overlap_s"), 1.0
    )
    one |= {"codec": "none", "strategy": "ps", "num_tasks": 1, "num_threads": 1, "samples_s": [1.0]}
    one |= {"ranks_agree": False, "is_own": False, "relative_error": 0.0}
    one["interface_deviation"] = None
    baseline = {"samples_s": [1.0], "interface_bytes": None}
    found = {"baselines": {"fp32": baseline, "bf16": baseline}, "syncs": [one]}
    monkeypatch.setattr(cluster, "run", lambda *_: found)
    assert bench("--loopback", "--codec", "none") == 1
    assert capsys.readouterr().err.endswith(
        "hipress: none with ps: ranks hold different results.\n"
    )


@full
def test_a_rank_that_fails_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HIPRESS_TIMEOUT", "soon")  # only ranks read it
    assert bench("--loopback", "--size", "4KB", "--codec", "none") == 2
    err = capsys.readouterr().err
    assert "ended with exit code 1: HIPRESS_TIMEOUT is 'soon'" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--codec", "none,onebitt"], "onebitt"),
        (["--strategy", "ps,rign"], "strategy 'rign' (did you mean 'ring'?) is none of ps"),
        (["--rate", "1gb"], "rate '1gb' is not a number and a unit"),
        (["--delay", "5"], "delay '5' is not a number and a unit"),
        (["--size", "big"], "size 'big' is not a number of bytes"),
        (["--size", "1e15"], "size '1e15' needs "),
        (["--tensors", "99", "--size", "9KB"], "99 tensors of 1 KB and more"),
        (["--device", "tpu"], "--device 'tpu' is neither cpu nor cuda"),
        (["--loopback", "--rate", "1gbit"], "--rate and --delay need a network"),
        (["--loopback", "--delay", "1ms"], "--rate and --delay need a network"),
        (["--json", "/absent/f.json"], "cannot write '/absent/f.json'"),
        (["--overhead", "--codec", "onebitt"], "onebitt"),
    ],
)
def test_refused_before_a_lab_starts(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cluster, "run", lambda *_: pytest.fail("it ran"))
    assert bench(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("hipress: ") and says in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--device", "cuda") == 2
    assert "torch sees none here; choose cpu" in capsys.readouterr().err


@pytest.mark.alone
def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.json"
    assert bench("--overhead", "--codec", "none", "--json", str(path)) == 0
    document = json.loads(path.read_text())
    assert document["command"] == "bench sync --overhead"
    assert [row["codec"] for row in document["rows"]] == ["none"]
    assert "500 tasks" in capsys.readouterr().out


def test_a_slow_line_gets_more_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIPRESS_TIMEOUT", raising=False)
    slow = ClusterOptions(hosts=2, rate="1mbit")
    (benchmark,) = SyncOptions(size="10MB", codec="none").benchmarks(slow)
    assert cluster.environment(benchmark) == {}  # 800 s, and torch waits for 1800
    (benchmark,) = SyncOptions(size="100MB", codec="none").benchmarks(slow)
    assert cluster.environment(benchmark) == {"HIPRESS_TIMEOUT": "8000"}
    monkeypatch.setenv("HIPRESS_TIMEOUT", "5")
    assert cluster.environment(benchmark) == {}
