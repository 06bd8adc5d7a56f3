"""docs/architecture.md names every module of src/hipress, and no module that does not exist.

A section `### room/` is a list; an item names modules in backquotes before its colon, as paths
below the room, with braces for several: `graphs/{partitions,shape}.py`. The section that begins
with `src/hipress` is about the modules beside the rooms. `__init__.py` and `__main__.py` belong to
their folder and are not named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hipress"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def modules(source: Path) -> set[str]:
    """The paths of all modules below a folder."""
    found = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    return {path for path in found if Path(path).name not in ("__init__.py", "__main__.py")}


def expanded(name: str) -> Iterator[str]:
    """`a/{b,c}.py` is a/b.py and a/c.py."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    if found is None:
        yield name
        return
    for part in found[2].split(","):
        yield f"{found[1]}{part}{found[3]}"


def named(page: str) -> list[str]:
    """The paths that the lists of the page name, in order."""
    found = []
    for room, body in re.findall(
        r"^### (\S+)[^\n]*\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE
    ):
        prefix = "" if room.startswith("src/hipress") else room
        for item in re.findall(r"^- (`[^:]*):", body, re.MULTILINE):
            for name in re.findall(r"`([^`]+\.py)`", item):
                found += [f"{prefix}{path}" for path in expanded(name)]
    return found


def mentioned(page: str) -> set[str]:
    """The modules that the text names by their whole path, such as `casync/engine/engine.py`."""
    rooms = "|".join(sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
    return set(re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", page.partition("## Every module")[0]))


def test_every_module_is_on_the_map() -> None:
    assert sorted(modules(SOURCE) - set(named(PAGE))) == []


def test_the_map_names_no_module_that_is_gone() -> None:
    assert sorted(set(named(PAGE)) - modules(SOURCE)) == []
    assert sorted(path for path in mentioned(PAGE) if not (SOURCE / path).exists()) == []


def test_no_module_is_named_twice() -> None:
    found = named(PAGE)
    assert sorted({path for path in found if found.count(path) > 1}) == []


def test_every_room_is_on_the_map() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert rooms - set(re.findall(r"^### (\w+)/$", PAGE, re.MULTILINE)) == set()


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = "### a/\n- `{b,c}.py`, `d/e.py`: x\n### src/hipress: f\n- `g.py`: x `h.py`\n"
    assert named(page) == ["a/b.py", "a/c.py", "a/d/e.py", "g.py"]
    assert mentioned("`casync/engine/engine.py` ## Every module") == {"casync/engine/engine.py"}
    (tmp_path / "a").mkdir()
    for name in ("a/b.py", "a/new.py", "a/__init__.py", "g.py"):
        (tmp_path / name).touch()
    assert modules(tmp_path) - set(named(page)) == {"a/new.py"}
