"""The tables of docs/codecs.md and README.md follow from the code."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import hipress
from hipress.codecs import table
from tests.docs.test_docs import rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "codecs.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
WRAPPER_OPTIONS = {"ef": (("decay", 1.0),), "momentum": (("mu", 0.9), ("nesterov", True))}


def load_generator() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


generator = load_generator()


def test_generated_tables_are_up_to_date() -> None:
    assert generator.generate(PAGE, generator.CODECS) == PAGE, "run python docs/generate.py"


def test_the_check_can_fail() -> None:
    stale = PAGE.replace("| 129,008 |", "| 129,009 |")
    assert stale != PAGE and generator.generate(stale, generator.CODECS) == PAGE
    with pytest.raises(ValueError, match="generated: codecs"):
        generator.generate(PAGE.replace("<!-- generated: codecs -->", ""), generator.CODECS)


def test_the_table_of_the_readme() -> None:
    header = ("codec", "what is sent", "times smaller", "error feedback", "trained: GPT / ResNet")
    found = rows(README, *header)
    assert [row[0].partition("(")[0] for row in found] == hipress.codecs.names()
    for expression, _, ratio, feedback, _ in found:
        assert ratio == generator.ratio_of(expression), expression
        assert feedback == generator.feedback_of(expression), expression


def section_of(name: str) -> str:
    """The section of a codec or of a wrapper."""
    (found,) = re.findall(
        rf"^### `{name}(?:\(\.\.\.\))?`.*?(?=^##)", PAGE, re.DOTALL | re.MULTILINE
    )
    return str(found)


@pytest.mark.parametrize("name", table.TABLE)
def test_a_section_describes_the_codec(name: str) -> None:
    words = " ".join(section_of(name).split())
    for title in hipress.codecs.describe(name).paper.split("; "):
        assert title == "-" or title in words, f"{name}: {title}"
    assert "Body" in words or "Bytes" in words or "body" in words


@pytest.mark.parametrize("name", table.WRAPPERS)
def test_options_of_a_wrapper(name: str) -> None:
    section_of(name)
    found = [row[:2] for row in rows(PAGE, "wrapper", "default", "rule", "meaning")]
    expected = WRAPPER_OPTIONS[name]
    told = [row for row in found if row[0].endswith(f"` of `{name}")]
    assert told == [(f"{key}` of `{name}", str(value).lower()) for key, value in expected]
    spelt = "".join(f", {key}={str(value).lower()}" for key, value in expected)
    implied, given = hipress.codec(f"{name}(bf16)"), hipress.codec(f"{name}(bf16{spelt})")
    x = torch.linspace(-1, 1, 100)
    states = implied.init(x), given.init(x)
    for _ in range(3):
        assert torch.equal(implied.encode(x, states[0]), given.encode(x, states[1]))
