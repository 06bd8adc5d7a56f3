"""`fp16`: rounded to IEEE binary16."""

from hipress.codecs.spec import Spec

SPEC = Spec(
    program="fp16.pse",
    summary="each element rounded to float16",
    paper="IEEE 754-2008, binary16",
    keeps_sizes=True,
)
