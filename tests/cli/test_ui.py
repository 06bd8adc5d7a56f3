"""Tables and JSON files from rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hipress.cli import ui
from hipress.cli.ui import JsonOutput, number, print_table, progress_bar, text
from hipress.errors import UsageError

ROWS = [{"codec": "ef(topk(ratio=0.01, exact=false))", "s": 0.00125}, {"codec": "[b]x", "s": None}]
COLUMNS = [text("codec"), number("ms", "s", 2, scale=1e3)]


def test_cells_are_whole_and_literal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Title", COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split("  ")[0].strip() == "Title" for line in lines)
    assert any("ef(topk(ratio=0.01, exact=false))" in line and "1.25" in line for line in lines)
    assert any("[b]x" in line and line.rstrip().endswith("-") for line in lines)


def test_table_can_leave_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Title", COLUMNS, ROWS, to_stderr=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "Title" in captured.err


def test_json_holds_rows_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    JsonOutput(path, "bench codecs").write(ROWS)
    document = json.loads(path.read_text())
    assert document["command"] == "bench codecs" and document["rows"] == ROWS
    assert {"cpu", "cores", "torch", "date_utc"} <= set(document["machine"])


def test_json_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    JsonOutput(Path("-"), "demo").write(ROWS)
    assert json.loads(capsys.readouterr().out)["rows"] == ROWS


def test_unwritable_json_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write .*No such file or directory; give --json"):
        JsonOutput(tmp_path / "absent" / "f.json", "demo")


def test_progress_is_a_line_now_and_then_without_a_terminal(capsys, monkeypatch) -> None:
    """Catches: minutes of silence in a log file, or a line for each of many short parts."""
    with progress_bar(2) as begin:
        begin("none")(0.5)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(ui, "QUIET_S", 0.0)
        begin("[b]onebit")(1.0)
    assert capsys.readouterr().err == "2 of 2: [b]onebit\n"


def test_progress_bar_takes_any_label(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(2) as begin:
        for label in ("[b]x", "[/]"):
            begin(label)(1.0)
    assert capsys.readouterr().out == ""
