"""`tbq(tau=0.5, levels=1)`: plus or minus tau where the accumulated element has reached it."""

from collections.abc import Mapping
from typing import Any

from hipress.codecs.spec import POSITIVE_RULE, Option, Spec, count, feedback_off, positive

MAX_LEVELS = 127


def _params(options: Mapping[str, Any]) -> dict[str, Any]:
    levels = options["levels"]
    return {**options, "bits": 2 if levels == 1 else 4 if levels <= 7 else 8}


SPEC = Spec(
    program="tbq.pse",
    summary="tau, nothing or -tau for each accumulated element",
    paper="Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, "
    "Interspeech 2015",
    feedback=True,
    options=(
        Option(
            name="tau",
            default=0.5,
            rule=POSITIVE_RULE,
            allowed=positive,
            about="the threshold, in units of the gradient",
            is_in_gradient_units=True,
        ),
        count(
            "levels",
            1,
            MAX_LEVELS,
            "1 is the threshold; more send the nearest multiple of tau / levels, up to tau: "
            "2 to 7 take 4 bits, more take 8",
        ),
    ),
    params=_params,
    # The mean of N messages is a multiple of tau / N, at most tau: it comes back whole.
    back=lambda o, workers: (
        f"tbq(tau={o['tau']!r}, levels={min(workers * o['levels'], MAX_LEVELS)}{feedback_off(o)})"
    ),
)
