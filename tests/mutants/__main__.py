"""Puts known defects back one by one and shows that `make test` catches each: `make mutants`.

    python -m tests.mutants                 all defects
    python -m tests.mutants -k residual     those whose name contains a text
    python -m tests.mutants --missing       those that have no row in the table yet

Each defect is applied to a copy of the source. The tests that should notice it run with the markers
of `make test`; a defect is caught if one of them fails. A text that has moved, a test that does not
exist and a copy that cannot be imported do not count as caught. The tests pass on the untouched
copy, which is checked first. The rows of the defects that were played replace theirs in
tests/mutants/results.csv; other rows stay, and rows of defects that no longer exist go. Exit code
1: a defect was not caught, or could not be applied.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.defects import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("results.csv")
TIMEOUT_S = 900.0


def main() -> int:
    """Runs the defects and prints one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help="only defects whose name contains this text")
    parser.add_argument("--missing", action="store_true", help="only defects without a row")
    parser.add_argument("-n", type=int, default=os.cpu_count() or 1, help="defects at a time")
    parser.add_argument("--no-baseline", action="store_true", help="skip the untouched source")
    options = parser.parse_args()
    known = from_csv(TABLE.read_text("utf-8"))
    chosen = [
        defect
        for defect in DEFECTS
        if options.k in defect.name and not (options.missing and key(defect) in known)
    ]
    if not options.no_baseline:
        tests = sorted({test for defect in chosen for test in defect.tests})
        with ThreadPoolExecutor(options.n) as pool:
            parts = [tests[k :: options.n] for k in range(min(options.n, len(tests)))]
            failed = [test for test in pool.map(lambda part: run(None, part), parts) if test]
        if failed:
            print(f"the tests fail without any defect: {', '.join(failed)}", file=sys.stderr)
            return 1
    with ThreadPoolExecutor(options.n) as pool:
        found = list(pool.map(tried, chosen))
    known |= {key(defect): by for defect, by in zip(chosen, found, strict=True)}
    TABLE.write_text(table((d, known[key(d)]) for d in DEFECTS if key(d) in known), "utf-8")
    missed = [d.name for d, by in zip(chosen, found, strict=True) if not by.startswith("caught")]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} defects caught")
    return 1 if missed else 0


def tried(defect: Defect) -> str:
    """Applies one defect and returns what came of it, in words."""
    start = time.monotonic()
    try:
        failed = run(defect, defect.tests)
    except ValueError as error:
        by = f"not applied: {error}"
    else:
        by = "not caught" if failed is None else f"caught by {failed}"
    print(f"{defect.name}: {by} ({time.monotonic() - start:.0f} s)", flush=True)
    return by


def run(defect: Defect | None, tests: Iterable[str]) -> str | None:
    """Returns the first test that fails on a copy of the source; None if all pass.

    Raises:
        ValueError: The defect cannot be applied, or its tests cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="hipress-mutant-") as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md"):
            (copy / name).symlink_to(ROOT / name)
        if defect is not None:
            defect.apply(copy)
        path = os.pathsep.join([str(copy / "src"), str(copy)])
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not full", "--no-header",
                 "-p", "no:cacheprovider", "-rfE", "--tb=no", *tests],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"its tests take more than {TIMEOUT_S:g} s") from error
    if done.returncode == 0:
        return None
    lines = done.stdout.splitlines()
    failed = [line.split(" ")[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    # No such test, or nothing can be imported. A test may fail and then leave threads behind that
    # abort the process at its end: its code is negative.
    if done.returncode > 1 or not failed:
        raise ValueError((failed or lines or done.stderr.splitlines() or ["no output"])[-1])
    return failed[0]


def key(defect: Defect) -> tuple[str, str]:
    """Returns what a row of the table is about: a defect that moves to another file is another."""
    return defect.name, defect.path


def from_csv(text: str) -> dict[tuple[str, str], str]:
    """Returns the results of a text that `table` made."""
    return {
        (row["defect"], row["file"]): row["result"] for row in csv.DictReader(io.StringIO(text))
    }


def table(rows: Iterable[tuple[Defect, str]]) -> str:
    """Returns the results as text: a line for each defect, with the test that caught it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["defect", "file", "result"])
    writer.writerows([defect.name, defect.path, by] for defect, by in rows)
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
