"""`terngrad(clip=2.5)`: -s, 0 or s at random, the mean kept."""

from hipress.codecs.spec import Option, Spec

SPEC = Spec(
    program="terngrad.pse",
    summary="-s, 0 or s at random so that the mean is kept",
    paper="Wen et al., TernGrad: Ternary Gradients to Reduce Communication, NeurIPS 2017",
    options=(
        Option(
            name="clip",
            default=2.5,
            rule="0 (off) or more",
            allowed=lambda v: not isinstance(v, bool) and 0 <= v <= 1e6,
            about="elements are clipped to this many standard deviations",
        ),
    ),
)
