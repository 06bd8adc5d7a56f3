"""The long description of the package; all else is in pyproject.toml.

It is README.md with absolute links, because relative ones lead nowhere on PyPI.
"""

import re
from pathlib import Path

from setuptools import setup

DOCS = "https://hipress.readthedocs.io/en/latest/"
FILES = "https://github.com/hipress-project/hipress/blob/HEAD/"
RAW_FILES = "https://raw.githubusercontent.com/hipress-project/hipress/HEAD/"

CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?\[[^\]]*\])\((?!#|[a-z]+:)([^)\s#]+)(#[^)\s]*)?\)")


def long_description(readme: str) -> str:
    """Returns the README with links to the documentation site and to files of the repository."""
    parts = CODE.split(readme)  # every second part is code
    parts[::2] = [LINK.sub(_absolute, part) for part in parts[::2]]
    return "".join(parts)


def _absolute(link: re.Match[str]) -> str:
    text, path, anchor = link[1], link[2], link[3] or ""
    if text.startswith("!"):
        return f"{text}({RAW_FILES}{path})"
    if page := re.fullmatch(r"docs/([\w-]+)\.md", path):
        return f"{text}({DOCS}{page[1]}/{anchor})"
    return f"{text}({FILES}{path}{anchor})"


if __name__ == "__main__":
    setup(
        long_description=long_description(Path("README.md").read_text("utf-8")),
        long_description_content_type="text/markdown",
    )
