"""Random faults on the ranks of small training jobs: `make chaos`.

    python -m tests.chaos --minutes 10                 a new seed, which is printed
    python -m tests.chaos --seed 1234 --episode 7      one episode again

`job.py` is what a rank runs, `faults.py` says for each fault what is done and what must hold
afterwards, `seen.py` is what the ranks have told, `run.py` draws episodes from a seed and plays
them, and `report.py` writes the table of docs/chaos.md.
"""

DOORS = {"attach": 2, "hook": 1, "session": 1, "allreduce": 1, "optimizer": 2}
"""The entry points, and how often each is drawn; `job.py` has them as code."""
