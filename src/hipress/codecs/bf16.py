"""`bf16`: rounded to bfloat16."""

from hipress.codecs.spec import Spec

SPEC = Spec(
    program="bf16.pse",
    summary="each element rounded to bfloat16",
    paper="Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
    keeps_sizes=True,
)
