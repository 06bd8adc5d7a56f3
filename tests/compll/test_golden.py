"""Rendered kernels of the built-in codecs, compared as text: a change of the compiler shows what
it changes.

After a change that is meant, write the files anew and read the difference:

    pytest tests/compll/test_golden.py --update-golden
    git diff tests/compll/golden
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from hipress.compll.build import parse_program
from hipress.compll.passes.derive import PLAIN, Variant

GOLDEN = Path(__file__).parent / "golden"
FEEDBACK = Variant(feedback=True)
# Name of the golden file: program, integer parameters, wrappers.
MODULES: dict[str, tuple[str, dict[str, Any], Variant]] = {
    "ef_onebit": ("onebit", {}, FEEDBACK),
    "minmax_2": ("minmax", {"bitwidth": 2}, PLAIN),
    "terngrad": ("terngrad", {}, PLAIN),
    "ef_topk": ("topk", {}, FEEDBACK),
}


def rendered(name: str, backend: str) -> str:
    codec, params, variant = MODULES[name]
    text = resources.files("hipress.codecs").joinpath(f"{codec}.pse").read_text("utf-8")
    return parse_program(text, file=f"{codec}.pse").bind(params).source(backend, variant=variant)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", MODULES)
def test_rendered_kernels_are_the_golden_ones(
    name: str, backend: str, request: pytest.FixtureRequest
) -> None:
    path = GOLDEN / f"{name}.{backend}.txt"
    made = rendered(name, backend)
    if request.config.getoption("--update-golden"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(made, encoding="utf-8")
    assert path.exists(), f"{path} is missing; make it with --update-golden"
    assert made == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODULES)
def test_rendering_is_the_same_every_time(name: str) -> None:
    assert rendered(name, "cpu") == rendered(name, "cpu")


def test_no_golden_file_is_left_over() -> None:
    known = {f"{name}.{backend}.txt" for name in MODULES for backend in ("cpu", "reference")}
    assert {p.name for p in GOLDEN.glob("*")} <= known
