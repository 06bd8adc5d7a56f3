"""`topk(ratio=0.01, exact=false)`: the largest elements by magnitude."""

from hipress.codecs.spec import Option, Spec, share

SPEC = Spec(
    program="topk.pse",
    summary="indices and values of the largest elements by magnitude",
    paper="Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017",
    feedback=True,
    options=(
        Option(
            name="ratio",
            default=0.01,
            rule="above 0, at most 1",
            allowed=share,
            about="share of the elements that is sent",
        ),
        Option(
            name="exact",
            default=False,
            rule="true or false",
            allowed=lambda v: v in (True, False),
            about="exactly the largest, or all above a threshold estimated from a sample",
        ),
        Option(
            name="sample",
            default=0.01,
            rule="above 0, at most 1",
            allowed=share,
            about="share of the elements in that sample (at least 4096)",
        ),
    ),
)
