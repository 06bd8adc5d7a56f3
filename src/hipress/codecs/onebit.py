"""`onebit(block=1024, means=1)`: signs, and one or two values per block."""

from hipress.codecs.spec import Option, Spec, number

SPEC = Spec(
    program="onebit.pse",
    summary="the sign of each element and the mean magnitude of each block",
    paper="Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014",
    feedback=True,
    options=(
        Option(
            name="block",
            default=1024,
            rule="a multiple of 8 from 64 to 65536",
            allowed=lambda v: number(v) and 64 <= v <= 65536 and v % 8 == 0,
            about="elements that share a scale",
        ),
        Option(
            name="means",
            default=1,
            rule="1 (mean magnitude) or 2 (mean of each sign, as in the paper)",
            allowed=lambda v: number(v) and v in (1, 2),
            about="values per block",
        ),
    ),
)
