"""The defects: those that were found in earlier versions, and others of the same kinds.

A defect replaces one text of one file; the text must occur exactly once, so that a refactoring
which moves it fails loudly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Defect:
    """One way to break the source, and the tests that must notice it."""

    name: str
    """What a user would see."""
    path: str
    """File below src/hipress."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or node ids that `make test` runs."""

    def apply(self, root: Path) -> None:
        """Breaks a copy of the source.

        Raises:
            ValueError: The text is not there exactly once.
        """
        path = root / "src" / "hipress" / self.path
        text = path.read_text("utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.old!r} occurs {count} times in {self.path}")
        path.write_text(text.replace(self.old, self.new), "utf-8")


DEFECTS: tuple[Defect, ...] = ()
