"""`int8(block=256)`: a byte an element, one scale per block."""

from hipress.codecs.spec import Spec, block

SPEC = Spec(
    program="int8.pse",
    summary="a byte for each element and the largest magnitude of each block",
    paper="Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016",
    feedback=True,
    keeps_sizes=True,
    options=(block(256),),
)
