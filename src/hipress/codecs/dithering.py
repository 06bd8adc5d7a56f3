"""`dithering(levels=2, partition=linear, norm=max)`: a few levels, rounded at random."""

from collections.abc import Mapping
from typing import Any

from hipress.codecs.spec import Option, Spec, count

MAX_LEVELS = 127


def _params(options: Mapping[str, Any]) -> dict[str, Any]:
    levels = options["levels"]
    return {
        "levels": levels,
        "natural": options["partition"] == "natural",
        "l2": options["norm"] == "l2",
        "bits": 4 if levels <= 7 else 8,
    }


SPEC = Spec(
    program="dithering.pse",
    summary="one of a few levels and the sign of each element, the mean kept",
    paper="Alistarh et al., QSGD, NeurIPS 2017; Horvath et al., Natural Compression, 2019",
    options=(
        count("levels", 2, MAX_LEVELS, "levels above zero; up to 7 take 4 bits, more take 8"),
        Option(
            name="partition",
            default="linear",
            rule="linear or natural",
            allowed=lambda v: v in ("linear", "natural"),
            about="levels evenly spaced, or at powers of two",
        ),
        Option(
            name="norm",
            default="max",
            rule="max or l2",
            allowed=lambda v: v in ("max", "l2"),
            about="what the top level stands for",
        ),
    ),
    params=_params,
)
