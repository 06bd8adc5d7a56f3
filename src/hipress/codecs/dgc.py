"""`dgc(ratio=0.001, ...)`: Deep Gradient Compression."""

from collections.abc import Mapping
from typing import Any

from hipress.codecs.spec import (
    FRACTION_RULE,
    POSITIVE_RULE,
    Option,
    Spec,
    flag,
    fraction,
    number,
    positive,
    ratio,
)
from hipress.codecs.topk import MAX_WORKERS

WARMUP_RATIOS = (0.25, 0.0625, 0.015625, 0.004)
"""The paper's sparsities of 75, 93.75, 98.44 and 99.6 % before the final one."""


def _params(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ratio": options["ratio"],
        "sample": options["sample"],
        "momentum": options["momentum"],
        "nesterov": options["nesterov"],
        "clip": options["clip"],
        "clips": options["clip"] > 0,
        "decay": options["weight_decay"],
        "decays": options["weight_decay"] > 0,
    }


def _phases(options: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    steps = options["warmup"]
    ratios = [share for share in WARMUP_RATIOS if share > options["ratio"]]
    if steps == 0 or not ratios:
        return []
    ramp: dict[int, float] = {}
    for k, share in enumerate(ratios):
        ramp.setdefault(steps * k // len(ratios), share)  # fewer steps than ratios skip some
    rows = [*ramp.items(), (steps, options["ratio"])]
    return [(start, {"ratio": share, "warmup": 0}) for start, share in rows]


SPEC = Spec(
    program="dgc.pse",
    summary="the largest elements of a local accumulation of momentum",
    paper="Lin et al., Deep Gradient Compression, ICLR 2018",
    options=(
        ratio("ratio", 0.001, "share of the elements that is sent"),
        Option(
            name="momentum",
            default=0.9,
            rule=FRACTION_RULE,
            allowed=fraction,
            about="the optimizer's momentum, kept here instead of there",
        ),
        flag("nesterov", False, "Nesterov's form of it"),
        Option(
            name="clip",
            default=0.0,
            rule=f"0 (off), or {POSITIVE_RULE}",
            allowed=lambda v: number(v) and (v == 0 or positive(v)),
            about="largest norm of the local gradient; the paper divides the usual one by the "
            "square root of the number of workers",
            is_in_gradient_units=True,
        ),
        Option(
            name="weight_decay",
            default=0.0,
            rule="0 (off), or from 1e-30 to 1e6",
            allowed=lambda v: number(v) and (v == 0 or 1e-30 <= v <= 1e6),
            about='added before accumulation, times state["weight"], which the caller keeps equal '
            "to the parameter",
        ),
        Option(
            name="warmup",
            default=0,
            rule="0 (off) or a number of steps",
            allowed=lambda v: number(v) and v >= 0 and v == int(v),
            about="steps over which the ratio falls from 25 % to its value",
        ),
        ratio(
            "sample",
            0.01,
            "share of the elements that the threshold is estimated from (at least 4096)",
        ),
    ),
    params=_params,
    phases=_phases,
    clip="clip",
    own_memory=True,
    # Without momentum of its own it is topk with error feedback.
    for_momentum=lambda o: f"topk(ratio={o['ratio']!r}, sample={o['sample']!r})",
    # The workers have applied momentum already, and the residual keeps what is not sent back.
    back=lambda o, workers: f"topk(ratio={o['ratio']!r}, workers={min(workers, MAX_WORKERS)})",
)
