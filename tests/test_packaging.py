"""What the package says of itself: hints to install, versions of Python, the long description.

`make dist` builds the distributions and tries the wheel; here is what can be told without.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tarfile
import tomllib
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hipress.cli import demo
from tests.wheel import __main__ as dist

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


# --- hints to install ----------------------------------------------------------------------------


def hints(source: str) -> Iterator[tuple[str, str]]:
    """The package and the extra of each MissingDependencyError that a source raises."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingDependencyError":
            words = [*node.args, *(keyword.value for keyword in node.keywords)]
            package, extra = (ast.literal_eval(word) for word in words)
            yield package, extra


def wrong_hints(source: str) -> list[tuple[str, str]]:
    return [(name, extra) for name, extra in hints(source) if name not in EXTRAS.get(extra, [])]


def bad_commands(text: str) -> list[str]:
    """Commands that ask PyPI for hipress, which is not there."""
    return re.findall(r"pip install (?:-\S+ )*[\"']?hipress\b(?![-/])\S*", text)


def test_each_hint_names_a_package_of_its_extra() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    assert sum(len(list(hints(source))) for source in sources) >= 6
    assert [wrong for source in sources for wrong in wrong_hints(source)] == []
    offered = {package for packages in EXTRAS.values() for package in packages}
    assert set(demo.NEEDS) <= offered


def test_no_command_asks_pypi_for_hipress() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    found = {path.name: bad_commands(path.read_text("utf-8")) for path in pages}
    assert {name: commands for name, commands in found.items() if commands} == {}


def test_checks_of_hints_can_fail() -> None:
    assert wrong_hints("raise MissingDependencyError('pillow', 'lab')") == [("pillow", "lab")]
    assert wrong_hints("raise MissingDependencyError('jax', extra='jax')") == [("jax", "jax")]
    assert wrong_hints("raise MissingDependencyError('pillow', extra='data')") == []
    assert bad_commands('`pip install "hipress[lab]"`') != []
    assert bad_commands("pip install -U hipress") != []
    assert bad_commands("pip install ./examples/hipress-maxsign") == []


# --- versions of Python --------------------------------------------------------------------------


def test_the_lowest_python_is_the_same_everywhere() -> None:
    project, tools = PROJECT["project"], PROJECT["tool"]
    lowest = project["requires-python"].removeprefix(">=")
    versions = re.findall(r"Python :: (3\.\d+)", str(project["classifiers"]))
    assert versions[0] == lowest == tools["mypy"]["python_version"]
    assert tools["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"


# --- the long description ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setup_py() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_are_absolute(setup_py: types.ModuleType) -> None:
    told = {
        "[a](docs/speed.md#auto)": "[a](https://hipress.readthedocs.io/en/latest/speed/#auto)",
        "![a](docs/images/demo.png)": "![a](https://raw.githubusercontent.com/hipress-project/"
        "hipress/HEAD/docs/images/demo.png)",
        "[a](LICENSE)": "[a](https://github.com/hipress-project/hipress/blob/HEAD/LICENSE)",
        "[a](#here) [b](https://example.com)": "[a](#here) [b](https://example.com)",
        "`[&](float)`\n```c\n[&](float)\n```\n": "`[&](float)`\n```c\n[&](float)\n```\n",
    }
    for text, expected in told.items():
        assert setup_py.long_description(text) == expected


def test_the_readme_has_no_relative_link(setup_py: types.ModuleType) -> None:
    text = setup_py.long_description((ROOT / "README.md").read_text("utf-8"))
    prose = "".join(setup_py.CODE.split(text)[::2])
    targets = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", prose)
    assert len(targets) > 10
    assert [a or b for a, b in targets if not re.match("https://|#", a or b)] == []


def test_the_addresses_are_those_of_the_project(setup_py: types.ModuleType) -> None:
    urls = PROJECT["project"]["urls"]
    assert setup_py.DOCS == urls["Documentation"]
    assert setup_py.FILES.startswith(urls["Source"] + "/")


# --- make dist -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "archive, lost, added, named",
    [
        ("a.tar.gz", None, None, None),
        ("a.tar.gz", "src/hipress/compll/front/grammar.lark", None, "lacks ['src/hipress/compll/"),
        ("a.tar.gz", None, "tests/test_units.py", "has ['tests/test_units.py'] too much"),
        ("a.whl", "hipress/py.typed", None, "lacks ['hipress/py.typed']"),
        ("a.whl", None, "tests/__init__.py", "has ['tests/__init__.py'] too much"),
    ],
)
def test_what_a_distribution_holds_is_compared(
    tmp_path: Path, archive: str, lost: str | None, added: str | None, named: str | None
) -> None:
    """Catches: a check of `make dist` that takes any wheel."""
    files = [path for path in (ROOT / "src" / "hipress").rglob("*") if path.is_file()]
    package = {str(p.relative_to(ROOT / "src")) for p in files if "__pycache__" not in p.parts}
    held = {
        "a.tar.gz": {f"src/{name}" for name in package} | dist.BESIDES_SOURCE,
        "a.whl": package | {"hipress-0.dist-info/METADATA"},
    }
    held[archive] = held[archive] - {lost} | ({added} if added else set())
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as source:
        for name in held["a.tar.gz"]:
            source.addfile(tarfile.TarInfo(f"hipress-0/{name}"))
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name in held["a.whl"]:
            wheel.writestr(name, "")
    if named is None:
        dist.check_contents(tmp_path / "a.tar.gz", tmp_path / "a.whl")
        return
    with pytest.raises(SystemExit) as ended:
        dist.check_contents(tmp_path / "a.tar.gz", tmp_path / "a.whl")
    assert str(ended.value).startswith(archive) and named in str(ended.value)
