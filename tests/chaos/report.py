"""The results of a run: a line of CSV for each fault, and the table of docs/chaos.md."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from tests.chaos.faults import ENDED, FAULTS, FINDING, UNSEEN, WENT_ON

RESULTS = Path(__file__).with_name("results.csv")
PAGE = Path(__file__).parents[2] / "docs" / "chaos.md"
BEGIN, END = "<!-- generated: faults -->\n", "<!-- end -->"


@dataclass
class Row:
    """One fault: what was done to which job, and what came of it."""

    seed: int
    episode: int
    place: int
    """The place of the fault in its episode."""
    fault: str
    victim: int
    """The rank that was hit."""
    detail: str
    door: str
    codec: str
    strategy: str
    ranks: int
    step: int
    """The last step before the fault that any rank has told."""
    seconds: float
    """Until the last rank had its error, or the job had made some steps more."""
    outcome: str
    problem: str
    evidence: dict[int, str] = field(default_factory=dict, repr=False)
    """For a finding: the last lines of each rank. Not in the file."""

    def __str__(self) -> str:
        job = ", ".join(
            filter(None, [self.door, self.codec, self.strategy, f"{self.ranks} ranks"])
        )  # fmt: skip
        what = f"{self.fault} of rank {self.victim}" + (f" ({self.detail})" * bool(self.detail))
        told = f"{self.outcome}, {self.seconds:g} s" + f": {self.problem}" * bool(self.problem)
        return f"episode {self.episode}.{self.place} [{job}] step {self.step}: {what}: {told}"


COLUMNS = [one.name for one in fields(Row) if one.name != "evidence"]


def to_csv(rows: Iterable[Row]) -> str:
    """Returns the rows as text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([getattr(row, name) for name in COLUMNS] for row in rows)
    return text.getvalue()


def from_csv(text: str) -> list[Row]:
    """Returns the rows of a text that `to_csv` made."""
    kinds = {one.name: {"int": int, "float": float}.get(str(one.type), str) for one in fields(Row)}
    return [
        Row(**{name: kinds[name](value) for name, value in row.items()})
        for row in csv.DictReader(io.StringIO(text))
    ]


def table(rows: Iterable[Row]) -> str:
    """Returns the table by kind of fault."""
    listed = list(rows)
    lines = [
        "| fault | what must hold | injected | went on | ended | unseen | findings | longest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in FAULTS:
        found = [row for row in listed if row.fault == kind.name]
        lines.append(_line(f"{kind.name} | {_rule(kind)}", found))
    if undisturbed := [row for row in listed if row.fault == "none"]:
        lines.append(_line("none | The job runs until the first fault.", undisturbed))
    lines.append(_line("all | ", listed))
    return "\n".join(lines) + "\n"


def _rule(kind: type) -> str:
    """Returns the docstring of a fault in one line."""
    return " ".join((kind.__doc__ or "").split())


def _line(title: str, rows: list[Row]) -> str:
    counts = [sum(row.outcome == one for row in rows) for one in (WENT_ON, ENDED, UNSEEN, FINDING)]
    longest = max((row.seconds for row in rows), default=0.0)
    cells = [title, str(len(rows)), *map(str, counts), f"{longest:.1f} s"]
    return f"| {' | '.join(cells)} |"


def page_with(page: str, rows: Iterable[Row]) -> str:
    """Returns the page with its table made anew."""
    if page.count(BEGIN) != 1:
        raise ValueError(f"{PAGE.name} must have the line {BEGIN.strip()!r} exactly once.")
    listed = list(rows)
    numbers = sorted({row.seed for row in listed})
    seeds = f"seed{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    jobs = len({(row.seed, row.episode) for row in listed})
    about = f"{len(listed)} faults in {jobs} episodes; {seeds}.\n"
    body = f"{BEGIN}\n{about}\n{table(listed)}\n"
    return re.sub(re.escape(BEGIN) + f".*?(?={END})", lambda _: body, page, flags=re.DOTALL)


def record(rows: Iterable[Row], door: str | None = None) -> None:
    """Writes the results and the table of the page; those of one door replace only its own."""
    known = from_csv(RESULTS.read_text("utf-8")) if door else []
    listed = [row for row in known if row.door != door] + list(rows)
    listed.sort(key=lambda row: (row.seed, row.episode, row.place))
    RESULTS.write_text(to_csv(listed), "utf-8")
    PAGE.write_text(page_with(PAGE.read_text("utf-8"), listed), "utf-8")
