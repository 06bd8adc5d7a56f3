"""`none`: the gradient as it is."""

from hipress.codecs.spec import Spec

SPEC = Spec(
    program="none.pse",
    summary="the gradient as it is, 32 bits an element",
    paper="-",
    keeps_sizes=True,
)
