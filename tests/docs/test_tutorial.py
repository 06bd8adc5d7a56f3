"""docs/tutorial.md: its script runs without HiPress, with it, and resumes on other hosts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs import PAGES, Block, blocks
from tests.grid import full
from tests.lab.conftest import refusal

PAGE = "docs/tutorial.md"
BLOCKS = blocks(PAGE, PAGES[PAGE])
SPEED = re.compile(r"\[host0\] step (\d+): loss ([\d.]+), ([\d.]+) steps/s")


def only(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def patched(script: str, diff: str) -> str:
    """The script with the changes of the page."""
    for hunk in diff.split("@@\n"):
        old, new = (
            "".join(line[1:] for line in hunk.splitlines(True) if line[0] in keep)
            for keep in (" -", " +")
        )
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def scripts() -> tuple[str, str]:
    """The script of the page without HiPress and with it."""
    [script] = [block.text for block in BLOCKS if block.file == "gpt.py"]
    [diff] = only("diff")
    return script, patched(script, diff.text)


def commands() -> list[list[str]]:
    lines = "".join(block.text for block in only("sh")).splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("hipress lab run")]


def run(folder: Path, argv: list[str]) -> str:
    assert argv[argv.index("--") + 1] == "python"
    argv[argv.index("--") + 1] = sys.executable
    done = subprocess.run(
        [sys.executable, "-m", "hipress", *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_a_plain_run_a_compressed_one_and_one_on_three_hosts() -> None:
    plain, compressed, resumed = commands()
    assert plain[3] == compressed[3] == "4" and resumed[3] == "3"
    assert compressed[-1] == resumed[-1] and int(resumed[-2]) > int(compressed[-2])
    assert "hipress" not in scripts()[0]


def test_a_checkpoint_of_two_ranks_is_resumed_on_three(tmp_path: Path) -> None:
    """Catches: a script of the page that fails, in two steps of it."""
    script = scripts()[1].replace("1000 *", "THOUSAND *").replace("50", "2")
    (tmp_path / "gpt.py").write_text(script.replace("THOUSAND", "1000"))
    given = ["--", "python", "gpt.py"]
    said = run(tmp_path, ["lab", "run", "--loopback", "--hosts", "2", *given, "2", "a.pt"])
    assert SPEED.search(said), said
    assert len(said.splitlines()) > 1  # the statistics
    said = run(tmp_path, ["lab", "run", "--loopback", "--hosts", "3", *given, "4", "a.pt"])
    assert [step for step, _, _ in SPEED.findall(said)] == ["4"]


def test_changes_that_do_not_fit_are_found() -> None:
    assert patched("a\nb\n", " a\n-b\n+c\n") == "a\nc\n"
    with pytest.raises(AssertionError):
        patched("a\nb\n", "-c\n+d\n")


@full
@pytest.mark.alone
def test_what_the_page_shows(tmp_path: Path) -> None:
    """Catches: commands of the page without a speed-up, or with another loss."""
    if (why := refusal()) is not None:
        pytest.skip(why)
    plain_script, script = scripts()
    plain, compressed, resumed = commands()
    (tmp_path / "gpt.py").write_text(plain_script)
    before = SPEED.findall(run(tmp_path, plain))
    (tmp_path / "gpt.py").write_text(script)
    after = SPEED.findall(run(tmp_path, compressed))
    assert [step for step, _, _ in before] == [step for step, _, _ in after]
    assert float(after[-1][1]) < 1.2 * float(before[-1][1])
    assert float(after[-1][2]) > 1.5 * float(before[-1][2])
    assert float(SPEED.findall(run(tmp_path, resumed))[0][1]) < float(after[-1][1])
