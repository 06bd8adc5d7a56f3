"""`hipress bench train`: fields, a small run on a lab and on loopback, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hipress.bench import cluster, machine
from hipress.cli.main import main
from tests.grid import full
from tests.lab.conftest import refusal

FIELDS = {
    "model", "rate", "variant", "codec", "strategy", "note", "hosts", "device", "num_parameters",
    "batch", "repeats", "steps", "seconds_median", "seconds_p20", "seconds_p80", "compute_seconds",
    "ddp_seconds", "speedup", "exposed_removed", "wire_bytes_per_rank", "interface_bytes_per_rank",
    "interface_deviation", "extra_memory_bytes", "skipped", "loss", "ranks_agree", "problem",
}  # fmt: skip
SMALL = ("--model", "mlp", "--steps", "2")
NUM_PARAMETERS = 102_090


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "train", "--hosts", "2", "--repeats", "1", "--timeout", "250", *arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def check_rows(rows: list[dict[str, Any]]) -> None:
    times = {row["variant"]: row["seconds_median"] for row in rows}
    for row in rows:
        assert row.keys() >= FIELDS
        assert row["model"] == "mlp" and row["num_parameters"] == NUM_PARAMETERS
        assert row["hosts"] == 2 and row["repeats"] == 1 and row["device"] == "cpu"
        assert row["ddp_seconds"] == times["ddp"] and row["compute_seconds"] == times["compute"]
        assert row["speedup"] == pytest.approx(times["ddp"] / row["seconds_median"])
        assert row["ranks_agree"] is (row["variant"] != "compute") and row["problem"] is None
        assert 0 < row["loss"] < 4
        if row["codec"] is None:
            assert row["wire_bytes_per_rank"] is None
        else:
            assert 0 < row["wire_bytes_per_rank"] < 4 * NUM_PARAMETERS


@full
def test_all_hooks_and_ours_on_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--loopback", *SMALL, "--json", "-") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["command"] == "bench train"
    rows = {row["variant"]: row for row in document["rows"]}
    assert list(rows) == [
        "compute", "ddp", "fp16", "powersgd-1", "powersgd-2", "powersgd-4", "onebit ps",
        "dgc(ratio=0.001) ps",
    ]  # fmt: skip
    check_rows(document["rows"])
    for row in rows.values():
        assert row["rate"] == "none" and row["interface_bytes_per_rank"] is None
    assert rows["ddp"]["extra_memory_bytes"] == 0 and rows["ddp"]["note"] is None
    assert rows["powersgd-1"]["extra_memory_bytes"] > 4 * NUM_PARAMETERS  # its error feedback
    assert rows["powersgd-1"]["note"] == "one bucket"
    assert rows["onebit ps"]["extra_memory_bytes"] > 0
    # The same gradients, the same steps: what differs is rounding alone.
    assert rows["fp16"]["loss"] == pytest.approx(rows["ddp"]["loss"], rel=1e-2)
    assert "onebit" in captured.err and "one bucket" in captured.err  # the table


@full
@pytest.mark.alone
def test_on_a_shaped_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (why := refusal()) is not None:
        pytest.skip(why)
    path = tmp_path / "f.json"
    more = ("--rate", "10mbit, 100mbit", "--codec", "none", "--hooks", "fp16", "--strategy", "ring")
    assert bench(*SMALL, *more, "--repeats", "3", "--json", str(path)) == 0
    rows = json.loads(path.read_text())["rows"]
    variants = ["compute", "ddp", "fp16", "none ring"]
    asked = [(row["rate"], row["variant"]) for row in rows]
    assert asked == [(rate, name) for rate in ("10mbit", "100mbit") for name in variants]
    size = 4 * NUM_PARAMETERS
    for row in rows:
        sent = {"compute": 0, "ddp": size, "fp16": size / 2, "none ring": size}[row["variant"]]
        # Headers and acknowledgements; a barrier more or less counts where little is sent.
        assert row["interface_bytes_per_rank"] == pytest.approx(sent, rel=0.05, abs=20_000)
    slow = {row["variant"]: row for row in rows[:4]}
    assert slow["ddp"]["seconds_median"] > 0.5 * size * 8 / 10e6
    assert 0.2 < slow["fp16"]["exposed_removed"] < 0.8  # half of the bytes
    out = capsys.readouterr().out
    assert "Training steps, 2 hosts, cpu, medians of 3 rounds of 2 step(s)" in out


def test_ranks_that_differ_are_told_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one: dict[str, Any] = dict.fromkeys(
        (
            "codec", "strategy", "schedule", "slice_bytes", "credit_bytes", "note", "wire_bytes",
            "interface_bytes", "interface_deviation",
        )
    )  # fmt: skip
    one |= {"samples_s": [1.0], "memory_bytes": 0, "skipped": {}, "loss": 2.0}
    one["ranks_agree"] = False
    found = {"variants": [one | {"variant": name} for name in ("compute", "ddp")]}
    monkeypatch.setattr(cluster, "run", lambda *_: found)
    assert bench("--loopback", *SMALL) == 1
    assert capsys.readouterr().err.endswith(
        "hipress: mlp with ddp: ranks hold different parameters.\n"
    )


@full
def test_a_rank_that_fails_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HIPRESS_TIMEOUT", "soon")  # only ranks read it
    assert bench("--loopback", *SMALL, "--codec", "none") == 2
    err = capsys.readouterr().err
    assert "ended with exit code 1: HIPRESS_TIMEOUT is 'soon'" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "vgg,gtp"], "model 'gtp' (did you mean 'gpt'?) is none of vgg, gpt"),
        (["--hooks", "ddp,fp61"], "hook 'fp61' (did you mean 'fp16'?) is none of ddp, ddp-4mb"),
        (["--codec", "none,onebitt"], "onebitt"),
        (["--strategy", "ps,rign"], "strategy 'rign' (did you mean 'ring'?) is none of ps"),
        (["--rate", "1gb"], "rate '1gb' is not a number and a unit"),
        (["--delay", "5"], "delay '5' is not a number and a unit"),
        (["--device", "tpu"], "--device 'tpu' is neither cpu nor cuda"),
        (["--loopback", "--rate", "1gbit"], "--rate and --delay need a network"),
        (["--loopback", "--delay", "1ms"], "--rate and --delay need a network"),
        (["--json", "/absent/f.json"], "cannot write '/absent/f.json'"),
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


def test_too_little_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "run", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 10**9)
    assert bench("--model", "mlp,gpt", "--hooks", "ddp", "--codec", "onebit") == 2
    # 13 arrays of gpt's size on each host: three of each variant, two more of ours, two to run.
    assert capsys.readouterr().err == (
        "hipress: model 'gpt' needs 3,210 MB with all ranks on this machine and 1,000 MB are "
        "available; give fewer --hosts, --hooks, codecs or strategies.\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--device", "cuda") == 2
    assert "torch sees none here; choose cpu" in capsys.readouterr().err
