"""Injects random faults into small training jobs and judges what comes of them: `make chaos`.

    python -m tests.chaos --minutes 10               a new seed, which is printed
    python -m tests.chaos --seed 1234 --episode 7    one episode again
    python -m tests.chaos --door optimizer           jobs with this entry point alone
    python -m tests.chaos --faults 1000 --record     also writes the table of docs/chaos.md; with
                                                     --door, only the rows of that entry point

Exit code 1: a rule was broken, or something was left behind. Needs Linux, and root or user
namespaces.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.chaos import DOORS, disk


def main() -> int:
    """Plays episodes and prints one line for each fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="no episode begins later")
    parser.add_argument("--faults", type=int, default=10**9, help="no episode begins after so many")
    parser.add_argument("--seed", type=int, help="of all random numbers; drawn if not given")
    parser.add_argument("--episode", type=int, help="plays only this one")
    parser.add_argument("--door", choices=DOORS, help="the entry point of all jobs")
    parser.add_argument("--labs", type=int, default=2, help="episodes at a time")
    parser.add_argument("--record", action="store_true", help="write results.csv and the docs")
    options = parser.parse_args()
    disk.own_mounts()  # before torch is imported
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="hipress-chaos-"))
    try:
        return _play(options, folder)
    except KeyboardInterrupt:
        return 130
    finally:
        disk.unmount_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _play(options: argparse.Namespace, folder: Path) -> int:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see tests/conftest.py
    from tests.chaos import report, run
    from tests.chaos.faults import FINDING

    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    rows: list[report.Row] = []
    lock = threading.Lock()
    deadline = time.monotonic() + 60 * options.minutes

    def on_row(row: report.Row) -> None:
        with lock:
            rows.append(row)
            print(row, flush=True)
            for rank, text in row.evidence.items():
                print(f"--- rank {rank}\n{text.rstrip()}", flush=True)

    def is_enough() -> bool:
        return time.monotonic() > deadline or len(rows) >= options.faults

    episodes = itertools.count() if options.episode is None else iter([options.episode])
    players = [
        run.Player(folder, seed, episodes, is_enough, on_row, options.door)
        for _ in range(options.labs)
    ]
    for player in players:
        player.start()
    try:
        for player in players:
            while player.is_alive():
                player.join(0.5)
    finally:
        for player in players:  # after Ctrl-C they are in the middle of an episode
            if player.is_alive():
                player.interrupt()
    problems = [problem for player in players for problem in player.problems]
    problems += [f"a player failed: {player.error}" for player in players if player.error]
    print(report.table(rows))
    findings = [row for row in rows if row.outcome == FINDING]
    for row in findings:
        again = f"python -m tests.chaos --seed {row.seed} --episode {row.episode}"
        again += f" --door {options.door}" * bool(options.door)
        print(f"{row}\n    again: {again}")
    for problem in problems:
        print(problem)
    if options.record and rows:
        report.record(rows, options.door)
    print(f"{len(rows)} faults, {len(findings)} findings")
    return 1 if findings or problems or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
