"""`hipress bench codecs`: fields, their consistency, and errors."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hipress
from hipress.bench import codecs as codec_rows
from hipress.bench.machine import available_memory_bytes
from hipress.cli.main import main
from hipress.cli.options import split_expressions

SIZE_BYTES = 40_004  # 10,001 floats: no multiple of a block or of 8


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "codecs", "--size", str(SIZE_BYTES), "--repeats", "2", *arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def rows_of(path: Path, *arguments: str) -> list[dict[str, Any]]:
    assert bench("--json", str(path), *arguments) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_default_line_up_covers_every_codec_with_consistent_fields(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "f.json")
    names = {row["codec"] for row in rows}
    assert {"none", "ef(onebit)", "minmax(bits=2)", "terngrad"} <= names
    for name in hipress.codecs.names():
        assert any(name in shown for shown in names)
    for row in rows:
        check_row(row)


def check_row(row: dict[str, Any]) -> None:
    codec = hipress.codec(row["codec"])
    assert row["size_bytes"] == SIZE_BYTES and row["threads"] == 1
    assert row["wire_bytes"] == codec.wire_bytes(SIZE_BYTES // 4)
    assert row["ratio"] == pytest.approx(SIZE_BYTES / row["wire_bytes"])
    for verb in ("encode", "decode", "decode_add"):
        seconds = row[f"{verb}_seconds_median"]
        assert row[f"{verb}_seconds_p20"] <= seconds <= row[f"{verb}_seconds_p80"]
        expected = row["memcpy_seconds_median"] / seconds
        assert row[f"{verb}_x_memcpy"] == pytest.approx(expected)
    if row["eager_encode_seconds_median"] is not None:
        expected = row["eager_encode_seconds_median"] / row["encode_seconds_median"]
        assert row["encode_x_eager"] == pytest.approx(expected)


def test_no_eager_leaves_its_fields_empty(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "f.json", "--no-eager", "--codecs", "ef(onebit)")
    assert row["eager_encode_seconds_median"] is None and row["encode_x_eager"] is None


def test_eager_form_exists_for_the_fixed_line_up(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "f.json", "--codecs", ",".join(codec_rows.FIXED_LINE_UP))
    assert all(row["encode_x_eager"] > 0 and row["decode_add_x_eager"] > 0 for row in rows)


def test_several_numbers_of_threads_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(tmp_path / "f.json", "--codecs", "none,ef(onebit)", "--threads", "1, 2,1")
    asked = [(row["codec"], row["threads"]) for row in rows]
    assert asked == [(name, count) for name in ("none", "ef(onebit)") for count in (1, 2)]
    out = capsys.readouterr().out
    assert "1 and 2 thread(s)" in out and "threads" in out


@pytest.mark.parametrize("text", ["0", "", "two", "1,", "-1", "1.5", "10000"])
def test_threads_that_are_no_number(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--threads", text) == 2
    assert capsys.readouterr().err == (
        f"hipress: --threads {text.split(',')[-1]!r} is not a whole number from 1 to 9999; write "
        "4, or 2,4,8.\n"
    )


def test_table_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--codecs", "none,ef(onebit)") == 0
    out = capsys.readouterr().out
    assert "memcpy" in out and "ef(onebit)" in out and "0.040004 MB of float32" in out


def test_json_dash_leaves_stdout_to_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--codecs", "none", "--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"][0]["codec"] == "none" and document["machine"]["cores"] >= 1


def test_bad_codec_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--codecs", "none,nonesuch") == 2
    err = capsys.readouterr().err
    assert err.startswith("hipress: ") and "nonesuch" in err and "Traceback" not in err


def test_a_size_that_memory_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--size", "1e15") == 2
    assert re.fullmatch(
        r"hipress: size '1e15' is 1,000,000,000 MB, and a run holds at least 4 arrays of it; "
        r"[0-9,]+ MB of memory are available: give --size [0-9]+MB or less.\n",
        capsys.readouterr().err,
    )


def test_memory_that_nothing_tells(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "absent") is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    3 kB\n")
    assert available_memory_bytes(tmp_path / "meminfo") == 3072


def test_a_file_that_cannot_be_written_costs_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hipress.cli.bench._codec_rows", lambda *_: pytest.fail("it ran"))
    for path in (tmp_path / "absent" / "f.json", tmp_path):
        assert bench("--json", str(path)) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"hipress: cannot write {str(path)!r}: ") and err.count("\n") == 1


def test_commas_inside_brackets_do_not_split() -> None:
    text = "none, ef(topk(ratio=0.01,exact=true)),fp16"
    assert split_expressions(text) == ["none", "ef(topk(ratio=0.01,exact=true))", "fp16"]


def test_thread_settings_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIPRESS_THREADS", raising=False)
    torch_before = torch.get_num_threads()
    with codec_rows.num_threads(torch_before + 1):
        assert os.environ["HIPRESS_THREADS"] == str(torch_before + 1)
        assert torch.get_num_threads() == torch_before + 1
    assert "HIPRESS_THREADS" not in os.environ and torch.get_num_threads() == torch_before
