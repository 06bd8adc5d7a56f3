"""One version, told the same way everywhere."""

import re
from pathlib import Path

import hipress

ROOT = Path(__file__).parents[1]


def test_pyproject_and_package_agree():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "([^"]+)"$', text, re.MULTILINE)
    assert declared and declared[1] == hipress.__version__


def test_the_changelog_has_an_entry_for_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(hipress.__version__)}\]", text, re.MULTILINE)


def test_tools_are_pinned_alike_in_pyproject_and_constraints():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    for tool in ("build", "mkdocs", "mkdocs-material", "mypy", "ruff", "triton", "twine"):
        pin = re.search(rf'"({tool}==[^";]+)', pyproject)
        assert pin and pin[1] in constraints
