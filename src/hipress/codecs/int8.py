"""`int8(block=256)`: a byte an element, one scale per block."""

from hipress.codecs.spec import Option, Spec, number

SPEC = Spec(
    program="int8.pse",
    summary="a byte for each element and the largest magnitude of each block",
    paper="Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016",
    feedback=True,
    options=(
        Option(
            name="block",
            default=256,
            rule="a multiple of 8 from 64 to 65536",
            allowed=lambda v: number(v) and 64 <= v <= 65536 and v % 8 == 0,
            about="elements that share a scale",
        ),
    ),
)
