"""The documentation site: its navigation, and how pages of the repository become pages of the site.

`make docs` builds it strictly; here is what can be told without mkdocs.
"""

from __future__ import annotations

import importlib.util
import re
import types
from pathlib import Path

from ruamel.yaml import YAML

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
