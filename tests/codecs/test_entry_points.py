"""Codecs of other packages: the example package, broken ones, and names that are taken.

Entry points are read from what is installed, so each test runs its lines in a new interpreter
whose path holds a distribution made here: a folder with METADATA and entry_points.txt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import hipress
from hipress.codecs.table import TABLE
from tests.grid import full

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hipress-maxsign"
BUILT_IN = list(TABLE)

START = """
import json, torch, hipress
from hipress.codecs import codec, describe, names

def told(ask):
    try:
        return ask()
    except hipress.errors.HipressError as error:
        return f"{type(error).__name__}: {error}"

def works(expression):
    c, x = codec(expression), torch.linspace(-1, 1, 1000)
    payload = c.encode(x, c.init(x, seed=1))
    return len(payload) == c.wire_bytes(1000) and bool((c.decode(payload) * x).sum() > 0)
"""


def install(folder: Path, points: dict[str, str], name: str = "some-package") -> None:
    """What pip would leave of a package with these entry points."""
    made = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = [f"{key} = {value}" for key, value in points.items()]
    (made / "entry_points.txt").write_text("\n".join(["[hipress.codecs]", *lines, ""]))


def run(code: str, *path: Path) -> Any:
    """What `print(json.dumps(...))` of a new interpreter printed, with `path` on its path."""
    env = {**os.environ, "HIPRESS_BACKEND": "reference"}
    env["PYTHONPATH"] = os.pathsep.join([*map(str, path), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", START + code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def example_points() -> dict[str, str]:
    """The entry points that the example package declares."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    points: dict[str, str] = project["entry-points"]["hipress.codecs"]
    return points


# --- the example package -------------------------------------------------------------------------

USE = """
x = torch.linspace(-1, 1, 640)
c = codec("maxsign(block=64)")
sizes = c.decode(c.encode(x, c.init(x, seed=1))).abs().view(10, 64)
fed_back = codec("ef(maxsign)")
kept = fed_back.init(x)
sums = fed_back.decode(fed_back.encode(x, kept)) + kept["residual"]
print(json.dumps({
    "names": names(),
    "sent": torch.equal(sizes, x.abs().view(10, 64).amax(1, keepdim=True).expand(10, 64)),
    "lost": (sums - x).abs().max().item(),
    "bytes": [c.wire_bytes(1000), fed_back.wire_bytes(10**6)],
    "back": fed_back.aggregator(4).name,
    "options": dict(describe("maxsign").options),
    "program": describe("maxsign").program,
    "described": [describe("maxsign").feedback, describe("maxsign").summary],
    "refused": told(lambda: codec("maxsign(block=3)")),
}))
"""


def check_use(found: dict[str, Any]) -> None:
    assert found["names"] == [*BUILT_IN, "maxsign"]
    assert found["sent"]  # the largest magnitude of the block, as its program says
    assert found["lost"] < 1e-6
    assert found["bytes"] == [80 + 64 + 128, 80 + 3_920 + 125_008]
    assert found["back"] == "ef(maxsign)"
    assert found["options"] == {
        "block": "1024: elements that share a scale (a multiple of 8 from 64 to 65536)"
    }
    program = EXAMPLE / "src" / "hipress_maxsign" / "maxsign.pse"
    assert found["program"] == program.read_text("utf-8")
    assert found["described"] == [False, "-s or s at random so that the mean is kept, s per block"]
    assert found["refused"] == (
        "UsageError: maxsign: block=3 must be a multiple of 8 from 64 to 65536."
    )


def test_the_example_package(tmp_path: Path) -> None:
    install(tmp_path, example_points(), "hipress-maxsign")
    check_use(run(USE, tmp_path, EXAMPLE / "src"))


@full
def test_the_example_package_installed_by_pip(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    # A copy: a build leaves its folders beside the sources.
    source = shutil.copytree(
        EXAMPLE, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info")
    )
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--target", tmp_path / "site"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *options, source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check_use(run(USE, tmp_path / "site"))


def test_the_example_is_the_one_of_the_docs() -> None:
    page = (ROOT / "docs" / "adding-a-codec.md").read_text("utf-8")
    program = (EXAMPLE / "src" / "hipress_maxsign" / "maxsign.pse").read_text("utf-8")
    assert f"```c maxsign.pse\n{program}```\n" in page
    assert '[project.entry-points."hipress.codecs"]\nmaxsign = "hipress_maxsign:SPEC"\n' in page


@full
def test_without_it_there_is_no_such_codec() -> None:
    found = run('print(json.dumps([names(), told(lambda: codec("maxsign"))]))')
    assert found[0] == BUILT_IN
    assert found[1].startswith("UsageError: no codec 'maxsign'; there are: none, fp16,")


# --- broken packages -----------------------------------------------------------------------------

MEND = "; mend or remove the package that brings it."
BROKEN = {
    "gone": (
        "no_such_module:SPEC",
        "the codec 'gone' of 'no_such_module:SPEC' cannot be loaded (No module named "
        f"'no_such_module'){MEND}",
    ),
    "unlucky": (
        "unlucky_module:SPEC",
        f"the codec 'unlucky' of 'unlucky_module:SPEC' cannot be loaded (out of luck){MEND}",
    ),
    "misspelt": (
        "hipress_maxsign:SPECK",
        "the codec 'misspelt' of 'hipress_maxsign:SPECK' cannot be loaded (module "
        f"'hipress_maxsign' has no attribute 'SPECK'){MEND}",
    ),
    "wrong": (
        "wrong_module:SPEC",
        "the entry point 'wrong' gives dict; it must name a hipress.codecs.spec.Spec.",
    ),
}
"""Name of a codec: what its entry point says, and the one sentence a user reads."""

ASK = """
print(json.dumps({
    "broken": {n: [told(lambda: f(n)) for f in (codec, describe)] for n in BROKEN},
    "inside": told(lambda: codec("ef(wrong)")),
    "unknown": told(lambda: codec("maxsing")),
    "names": names(),
    "good": [works(e) for e in ("onebit", "ef(maxsign)", "topk", "momentum(maxsign)")],
}))
"""


def test_broken_packages_say_so_and_break_no_other(tmp_path: Path) -> None:
    install(tmp_path, example_points(), "hipress-maxsign")
    install(tmp_path, {name: point for name, (point, _) in BROKEN.items()}, "broken")
    (tmp_path / "unlucky_module.py").write_text("raise RuntimeError('out of luck')\n")
    (tmp_path / "wrong_module.py").write_text("SPEC = {'program': 'maxsign.pse'}\n")
    found = run(f"BROKEN = {list(BROKEN)}\n{ASK}", tmp_path, EXAMPLE / "src")
    for name, (_, sentence) in BROKEN.items():
        assert found["broken"][name] == [f"UsageError: {sentence}"] * 2
    assert found["inside"] == f"UsageError: {BROKEN['wrong'][1]}"
    assert "did you mean 'maxsign'?" in found["unknown"]
    assert found["good"] == [True, True, True, True]
    assert set(found["names"]) >= {*BUILT_IN, "maxsign"}


# --- names that are taken ------------------------------------------------------------------------


@full
def test_a_built_in_name_cannot_be_taken(tmp_path: Path) -> None:
    install(tmp_path, {name: "hipress_maxsign:SPEC" for name in BUILT_IN}, "greedy")
    asked = "[names(), {n: describe(n).program for n in names()}, codec('onebit').codec_hash]"
    found = run(f"print(json.dumps({asked}))", tmp_path, EXAMPLE / "src")
    assert found[0] == BUILT_IN
    assert found[1] == {name: hipress.codecs.describe(name).program for name in BUILT_IN}
    assert found[2] == hipress.codec("onebit").codec_hash


UNUSABLE = {
    "ef": "that name is built in",
    "momentum": "that name is built in",
    "onebit": "that name is built in",
    "1bit": "a name is letters, digits, _ and -, and does not start with a digit",
    "two words": "a name is letters, digits, _ and -, and does not start with a digit",
    "my.pse": "a name is letters, digits, _ and -, and does not start with a digit",
}


@full
def test_names_that_no_expression_can_use_are_told_and_not_listed(tmp_path: Path) -> None:
    install(tmp_path, {**example_points(), **dict.fromkeys(UNUSABLE, "hipress_maxsign:SPEC")})
    code = """
import io, logging
told_in_log = io.StringIO()
logging.getLogger("hipress").addHandler(logging.StreamHandler(told_in_log))
found = [names(), names(), works("ef(maxsign)"), works("momentum(onebit)")]
print(json.dumps([*found, told_in_log.getvalue().splitlines()]))
"""
    first, second, *good, told = run(code, tmp_path, EXAMPLE / "src")
    assert first == second == [*BUILT_IN, "maxsign"] and good == [True, True]
    assert sorted(told) == sorted(
        f"the codec {name!r} of 'hipress_maxsign:SPEC' is ignored: {reason}; rename its entry "
        "point."
        for name, reason in UNUSABLE.items()
    )


# --- walking over all of them --------------------------------------------------------------------


@full
def test_a_broken_package_does_not_stop_the_line_up(tmp_path: Path) -> None:
    install(tmp_path, example_points(), "hipress-maxsign")
    install(tmp_path, {"gone": BROKEN["gone"][0], "odd": "odd_module:SPEC"}, "broken")
    (tmp_path / "odd_module.py").write_text(
        "from hipress.codecs.spec import Spec\n"
        "SPEC = Spec(program='maxsign.pse', package='hipress_maxsign', summary='', paper='',\n"
        "            params=lambda o: o['block'])\n"
    )
    code = """
import io, logging
from hipress.codecs import table
from hipress.bench.codecs import line_up
told_in_log = io.StringIO()
logging.getLogger("hipress").addHandler(logging.StreamHandler(told_in_log))
print(json.dumps([names(), table.broken(), line_up(), told_in_log.getvalue().splitlines()]))
"""
    listed, broken, shown, told = run(code, tmp_path, EXAMPLE / "src")
    assert listed[-3:] == ["gone", "maxsign", "odd"]
    assert broken == {"gone": BROKEN["gone"][1], "odd": "odd: KeyError('block')"}
    assert "maxsign" in shown and not {"gone", "odd"} & set(shown)
    assert told == [f"{name} is left out: {reason}" for name, reason in broken.items()]
