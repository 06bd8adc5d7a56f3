"""The table of results: it has a row for each defect, and a part of them can be played anew."""

import sys

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants.defects import DEFECTS, Defect


def defect(name, path="session/owed.py"):
    return Defect(name, path, "old", "new", ("tests/test_plan.py",))


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Plays with a table of its own; returns the names that were played, and the table."""
    file = tmp_path / "results.csv"
    file.write_text("defect,file,result\na b,plan.py,not caught\ngone,plan.py,caught by y\n")
    made = [defect("a b", "plan.py"), defect("c"), defect("d")]
    monkeypatch.setattr(mutants, "DEFECTS", made)
    monkeypatch.setattr(mutants, "TABLE", file)

    def play(*options):
        played = []
        monkeypatch.setattr(mutants, "tried", lambda one: played.append(one.name) or "caught by x")
        monkeypatch.setattr(sys, "argv", ["mutants", "--no-baseline", *options])
        assert mutants.main() == 0
        return sorted(played), file.read_text().splitlines()[1:]

    return play


def test_each_defect_has_a_row_and_is_caught():
    """Catches: a defect that was added without `python -m tests.mutants --missing`."""
    known = mutants.from_csv(mutants.TABLE.read_text("utf-8"))
    assert list(known) == [mutants.key(one) for one in DEFECTS]
    assert all(by.startswith("caught by tests/") for by in known.values())
    assert mutants.table((one, known[mutants.key(one)]) for one in DEFECTS).endswith("\n")


def test_missing_plays_what_has_no_row(play):
    """Catches: rows that are lost, played twice, or left of a defect that is gone."""
    rows = ["a b,plan.py,not caught", "c,session/owed.py,caught by x"]
    assert play("--missing", "-k", "c") == (["c"], rows)
    assert play("--missing") == (["d"], [*rows, "d,session/owed.py,caught by x"])
    assert play("--missing")[0] == []


def test_a_row_is_replaced(play):
    """Catches: `-k` that leaves the table as it was."""
    assert play("-k", "a b") == (["a b"], ["a b,plan.py,caught by x"])
