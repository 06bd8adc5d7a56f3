"""`int4(block=128)`: four bits an element, one scale per block."""

from hipress.codecs.spec import Spec, block

SPEC = Spec(
    program="int4.pse",
    summary="four bits for each element and the largest magnitude of each block",
    paper="Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016",
    options=(block(128),),
    feedback=True,
    keeps_sizes=True,
)
