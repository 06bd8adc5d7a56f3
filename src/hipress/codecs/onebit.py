"""`onebit(block=4096)`: signs, and one scale per block."""

from hipress.codecs.spec import Option, Spec

SPEC = Spec(
    program="onebit.pse",
    summary="the sign of each element and the mean magnitude of each block",
    paper="Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014",
    feedback=True,
    options=(
        Option(
            name="block",
            default=4096,
            rule="a multiple of 8 from 64 to 65536",
            allowed=lambda v: isinstance(v, int) and 64 <= v <= 65536 and v % 8 == 0,
            about="elements that share a scale",
        ),
    ),
)
