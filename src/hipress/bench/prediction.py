"""`hipress bench prediction`: a simulated step beside the measured one, and their difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from hipress.bench.train import SCHEDULE_FIELDS
from hipress.casync.graphs.schedules import Schedule
from hipress.profile import Profile
from hipress.secopa.simulate import Simulator
from hipress.secopa.what_if import uniform

MEDIAN_BAR, WORST_BAR = 0.12, 0.30
"""The errors that the product promises to stay within."""


def rows(
    profile: Profile, measured: Iterable[Mapping[str, Any]], baseline: str
) -> list[dict[str, Any]]:
    """Returns a row for each measured variant of `bench train` that can be simulated.

    The profile is of the same cluster and model, measured in another run; `baseline` is the variant
    that is DDP as it comes.
    """
    simulator = Simulator(profile)
    found = []
    for row in measured:
        if row["codec"] is not None:
            decisions = uniform(profile, row["codec"], row["strategy"])
            simulated_s = simulator.step_s(decisions, _schedule(row))
        elif row["variant"] == baseline:
            simulated_s = simulator.step_s(None)
        else:
            continue
        measured_s = row["seconds_median"]
        found.append(
            {
                **{key: row[key] for key in ("model", "hosts", "rate", "codec", "strategy")},
                **{key: row[key] for key in SCHEDULE_FIELDS},
                "measured_seconds": measured_s,
                "measured_p20": row["seconds_p20"],
                "measured_p80": row["seconds_p80"],
                "simulated_seconds": simulated_s,
                "error": simulated_s / measured_s - 1,
                "problem": row["problem"],
            }
        )
    return found


def _schedule(row: Mapping[str, Any]) -> Schedule | None:
    if row["schedule"] is None:
        return None
    name, slice_bytes, credit_bytes = (row[key] for key in SCHEDULE_FIELDS)
    return Schedule(name=name, slice_bytes=slice_bytes, credit_bytes=credit_bytes)


def summary(found: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns the median and the largest of the errors, without their sign."""
    errors = [abs(row["error"]) for row in found]
    return median(errors), max(errors)
