"""`onebit(block=1024, means=1)`: signs, and one or two values per block."""

from hipress.codecs.spec import Option, Spec, block, number

SPEC = Spec(
    program="onebit.pse",
    summary="the sign of each element and the mean magnitude of each block",
    paper="Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014",
    feedback=True,
    options=(
        block(1024),
        Option(
            name="means",
            default=1,
            rule="1 (mean magnitude) or 2 (mean of each sign, as in the paper)",
            allowed=lambda v: number(v) and v in (1, 2),
            about="values per block",
        ),
    ),
)
