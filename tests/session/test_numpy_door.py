"""The example that trains in plain NumPy: nothing but public names of `session`."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from hipress.lab import Lab
from tests import scenarios
from tests.grid import full, thinned

EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_door.py"


@pytest.fixture(autouse=True)
def needs_a_lab():
    if (why := scenarios.refusal()) is not None:
        pytest.skip(why)


def trained(hosts, *options):
    lines = []
    command = [sys.executable, str(EXAMPLE), *map(str, options)]
    with Lab(hosts, rate="1gbit") as lab:
        lab.run(command, timeout=120, check=True, on_line=lambda r, s, line: lines.append(line))
    return json.loads(next(line for line in lines if line.startswith("{")))


@pytest.mark.parametrize("ranks", thinned([3, 4], keep=(3,)))
def test_it_trains_with_a_codec_and_resumes_on_fewer_ranks(tmp_path, ranks):
    """Catches: a session that only works behind DDP, state that depends on the number of ranks."""
    path = tmp_path / "state.pt"
    first = trained(ranks, "--codec", "onebit", "--steps", "100", "--save", path)
    assert (first["ranks"], first["compressed"], first["steps"]) == (ranks, 1, 100)
    assert first["accuracy"] > 0.85 and first["times_less"] > 3
    again = trained(ranks - 1, "--codec", "onebit", "--steps", "50", "--resume", path)
    assert (again["ranks"], again["steps"]) == (ranks - 1, 150)
    assert again["accuracy"] > first["accuracy"] - 0.02


@full
def test_it_trains_with_auto():
    """Catches: `auto` that waits for a forward pass which such a loop never reports."""
    found = trained(4, "--codec", "auto", "--steps", "60")
    assert found["accuracy"] > 0.8 and found["steps"] == 60


def test_it_is_short_and_uses_public_names_only():
    """Catches: an example that reaches into the package."""
    text = EXAMPLE.read_text("utf-8")
    assert len(text.splitlines()) <= 100
    imports = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module.startswith("hipress")
    ]
    assert imports == ["hipress.session"]
    assert not re.search(r"\w\._[a-z]", text)
