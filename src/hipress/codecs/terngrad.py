"""`terngrad(clip=2.5)`: -s, 0 or s at random, the mean kept."""

from hipress.codecs.dithering import MAX_LEVELS
from hipress.codecs.spec import Option, Spec, number

SPEC = Spec(
    program="terngrad.pse",
    summary="-s, 0 or s at random so that the mean is kept",
    paper="Wen et al., TernGrad: Ternary Gradients to Reduce Communication, NeurIPS 2017",
    options=(
        Option(
            name="clip",
            default=2.5,
            rule="0 (off), or from 0.001 to 1e6",
            allowed=lambda v: number(v) and (v == 0 or 1e-3 <= v <= 1e6),
            about="elements are clipped to this many standard deviations",
        ),
    ),
    # The paper's way back: a mean of N ternary values has 2 N + 1 levels.
    back=lambda o, workers: (
        f"dithering(levels={min(workers, MAX_LEVELS)}, ef={'true' if o['ef'] else 'false'})"
    ),
)
