"""`blocktopk(k=64, block=4096, bits=2)`: the largest elements of each block in few bits."""

from collections.abc import Mapping
from typing import Any

from hipress.codecs.spec import Option, Spec, count, feedback_off, flag, number
from hipress.errors import UsageError

WIDTHS = (6, 8, 12, 16)
"""Bits of a place: the fewest of these that tell the places of a block apart."""


def _params(options: Mapping[str, Any]) -> dict[str, Any]:
    k, block = options["k"], options["block"]
    if k > block:
        raise UsageError(
            f"blocktopk: k={k} must be at most block={block}, the number of elements "
            "of a block; write e.g. k=64."
        )
    width = next(w for w in WIDTHS if block <= 1 << w)
    return {"k": k, "block": block, "bits": options["bits"], "width": width}


def _back(options: Mapping[str, Any], workers: int) -> str:
    k, block = options["k"], options["block"]
    if options["union"]:
        k = min(block, k * workers)
    return f"blocktopk(k={k}, block={block}, bits={options['bits']}{feedback_off(options)})"


SPEC = Spec(
    program="blocktopk.pse",
    summary="the k largest elements of each block: places, signs and a level",
    paper="Stich et al., Sparsified SGD with Memory, NeurIPS 2018",
    feedback=True,
    chooses_largest=True,
    options=(
        count("k", 64, 16384, "elements that a block sends, at most block"),
        Option(
            name="block",
            default=4096,
            rule="a power of two from 64 to 16384",
            allowed=lambda v: number(v) and v in {1 << b for b in range(6, 15)},
            about="elements of a block; a place has 6, 8, 12 or 16 bits",
        ),
        Option(
            name="bits",
            default=2,
            rule="1 (the sign) or 2 (the sign and one of two levels)",
            allowed=lambda v: number(v) and v in (1, 2),
            about="bits of a value",
        ),
        flag("union", True, "whether the way back has room for what all workers picked"),
    ),
    params=_params,
    back=_back,
)
