"""`hipress bench convergence`: rows, page, picture, and one sentence on bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hipress.cli.main import main
from hipress.report.convergence_table import BEGIN, END

QUICK = ("--data", "digits", "--steps", "4", "--seeds", "2", "--codecs", "onebit,topk(ratio=0.1)")


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "convergence", *arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.fixture(autouse=True)
def no_fashion_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIPRESS_FASHION_MNIST", raising=False)


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*QUICK, "--workers", "2", "--json", str(tmp_path / "f.json")) == 0
    document = json.loads((tmp_path / "f.json").read_text())
    assert document["command"] == "bench convergence" and document["machine"]["cores"] >= 1
    rows: list[dict[str, Any]] = document["rows"]
    assert [row["codec"] for row in rows] == ["uncompressed", "onebit", "topk(ratio=0.1)"]
    for row in rows:
        assert (row["data"], row["num_workers"], row["num_steps"]) == ("digits", 2, 4)
        assert row["curve_steps"] == [0, 1, 2, 3, 4] and len(row["curves"]) == 2
        assert [curve[-1] for curve in row["curves"]] == row["accuracies"]
        assert row["difference_min"] <= row["difference"] <= row["difference_max"]
        assert row["within"] == (row["difference"] >= -1)
    out = capsys.readouterr().out
    assert (
        "digits: 2 worker(s), 4 step(s) from rate 0.05, 2 seed(s)" in out
        and "topk(ratio=0.1)" in out
    )


def test_json_dash_leaves_stdout_to_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*QUICK, "--json", "-") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3


def test_page_and_picture(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "curves.png"
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    for _ in range(2):  # the second time it replaces its own table
        assert bench(*QUICK, "--markdown", str(page), "--plot", str(picture)) == 0
        text = page.read_text()
        assert text.startswith(f"# Before\n\n{BEGIN}\n\n| codec | digits, times smaller |")
        assert text.endswith(f"|\n\n{END}\n\nAfter.\n") and "old" not in text
        assert text.count("| `topk(ratio=0.1)` |") == 1
        assert text.count("| uncompressed | 1.0 / 1.0 |") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_folder_fashion_mnist_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--steps", "1", "--seeds", "1", "--codecs", "none", "--json", "-") == 0
    said = capsys.readouterr()
    assert {row["data"] for row in json.loads(said.out)["rows"]} == {"digits"}
    assert "fashion-mnist is left out: set HIPRESS_FASHION_MNIST or --data-dir" in said.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--data", "mnist"), "no data set 'mnist'; there are: digits, fashion-mnist."),
        (("--data", "all"), "the folder of Fashion-MNIST is not known; set HIPRESS_FASHION_MNIST"),
        (("--data", "fashion-mnist", "--data-dir", "nowhere"), "which is not in 'nowhere'"),
        (("--codecs", "onebit,topq"), "topq"),
        (("--codecs", "onebit,"), "codec"),
        (("--data", "digits", "--workers", "76"), "use at most 75"),
        ((*QUICK, "--markdown", "nowhere.md"), "cannot read 'nowhere.md'"),
        ((*QUICK, "--plot", "nowhere/curves.png"), "nowhere/curves.png"),
        ((*QUICK, "--plot", "curves.nonesuch"), "cannot draw 'curves.nonesuch'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    arguments: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench(*arguments) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("hipress: ") and complaint in said


def test_files_that_cannot_be_written_cost_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hipress.cli.bench_convergence._rows", lambda *_: pytest.fail("it ran"))
    assert bench(*QUICK, "--json", str(tmp_path)) == 2
    assert f"cannot write {str(tmp_path)!r}: Is a directory" in capsys.readouterr().err
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")

    def no_writing(self: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "a" in mode:  # of file modes root knows nothing
            raise PermissionError(13, "Permission denied")
        return open(self, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", no_writing)
    assert bench(*QUICK, "--markdown", str(page)) == 2
    assert "page.md': Permission denied; give --markdown a page that" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--seeds", "--workers", "--steps", "--jobs"])
def test_counts_start_at_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(option, "0") == 2
    assert f"'{option}'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n"])
def test_a_page_without_its_markers_stays_as_it_is(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert bench(*QUICK, "--markdown", str(page)) == 2
    assert "once each" in capsys.readouterr().err
    assert page.read_text() == text
