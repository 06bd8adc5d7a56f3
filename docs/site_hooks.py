"""What mkdocs does with the pages of this repository beyond its own rules.

Some pages of the site lie outside docs/. Links between pages are written for readers of the
repository; on the site they lead to the pages there, and a link to any other file becomes its text.
A block that begins with a language and a file name (three backquotes, `c linear.pse`) gets the file
name as its title.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

OUTSIDE = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
"""Pages of the site that lie outside docs/, by their name there."""

CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, path in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    source = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return for_site(markdown, source, set(files.src_uris))


def for_site(text: str, source: str, pages: set[str]) -> str:
    """Returns a page of the repository as a page of the site, whose files are `pages`."""
    codes: list[str] = []

    def hide(found: re.Match[str]) -> str:
        codes.append(
            re.sub(r"\A```(\w+) +(\S+)$", r'```\1 title="\2"', found[0], flags=re.MULTILINE)
        )
        return f"\0{len(codes) - 1}\0"

    text = CODE.sub(hide, text)
    text = LINK.sub(lambda found: _link(found, source, pages), text)
    return re.sub(r"\0(\d+)\0", lambda found: codes[int(found[1])], text)


def _link(found: re.Match[str], source: str, pages: set[str]) -> str:
    image, text, target = found.groups()
    path, mark, anchor = target.partition("#")
    if not path or ":" in path:
        return found[0]
    whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    names = {kept: name for name, kept in OUTSIDE.items()}
    name = names.get(whole, whole.removeprefix("docs/") if whole.startswith("docs/") else None)
    if name not in pages:
        return text
    return f"{image}[{text}]({name}{mark}{anchor})"
