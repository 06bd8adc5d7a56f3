"""The documentation site: its navigation, and how pages of the repository become pages of the site.

`make docs` builds it strictly; here is what can be told without mkdocs.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import types
from pathlib import Path

from ruamel.yaml import YAML

from hipress.session import Session

ROOT = Path(__file__).parents[2]
CONFIG = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text("utf-8"))


def load_hooks() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load_hooks()


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"[\w-]+\.md", str(CONFIG["nav"]))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | set(hooks.OUTSIDE)
    assert sorted(listed) == sorted(pages)


def test_links_lead_to_pages_of_the_site() -> None:
    pages = {"index.md", "speed.md", "changelog.md", "images/demo.png"}
    told = {
        "[a](docs/speed.md#auto)": "[a](speed.md#auto)",
        "![a](docs/images/demo.png)": "![a](images/demo.png)",
        "[`a`](CHANGELOG.md)": "[`a`](changelog.md)",
        "[a](LICENSE)": "a",
        "[a](#here) [b](https://example.com)": "[a](#here) [b](https://example.com)",
        "`[&](float) [a](LICENSE)`": "`[&](float) [a](LICENSE)`",
    }
    for text, expected in told.items():
        assert hooks.for_site(text, "README.md", pages) == expected
    assert hooks.for_site("[a](../CHANGELOG.md)", "docs/x.md", pages) == "[a](changelog.md)"


def test_a_file_name_is_a_title() -> None:
    text = "```c a.pse\n[&](x)\n```\n"
    assert hooks.for_site(text, "README.md", set()) == '```c title="a.pse"\n[&](x)\n```\n'


def test_the_reference_names_what_exists() -> None:
    """Catches: a page that `make docs` cannot build, or a name that is not there."""
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    names = re.findall(r"^::: ([\w.]+)$", text.partition("<!--")[0], re.MULTILINE)
    assert "hipress.attach" in names and len(names) > 10
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name


INSIDE = set(
    "is_recording gradients numels rules engine is_open open register use_auto use_overrides "
    "announce begin_idle pay warn_of_momentum facts begin_step exchange end_step check note_wait "
    "meets_at_end".split()
)
"""Members of a session that other modules use, and that are not for users."""


def members(text: str) -> set[str]:
    """The members of a session that the reference lists."""
    block = text.partition("::: hipress.session.Session\n")[2].partition("\n:::")[0]
    return set(block.partition("members: [")[2].partition("]")[0].split(", "))


def test_the_reference_lists_the_members_of_a_session() -> None:
    public = {name for name in vars(Session) if not name.startswith("_")}
    assert public >= INSIDE
    assert members((ROOT / "docs" / "api.md").read_text("utf-8")) == public - INSIDE


def test_members_are_those_of_the_session() -> None:
    page = "::: hipress.session.Session\n    members: [a, b]\n::: x\n    members: [c]\n"
    assert members(page) == {"a", "b"}
