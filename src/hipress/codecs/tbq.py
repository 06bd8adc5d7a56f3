"""`tbq(tau=0.5)`: plus or minus tau where the accumulated element has reached it."""

from hipress.codecs.spec import POSITIVE_RULE, Option, Spec, positive

SPEC = Spec(
    program="tbq.pse",
    summary="tau, nothing or -tau for each accumulated element",
    paper="Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, "
    "Interspeech 2015",
    feedback=True,
    options=(
        Option(
            name="tau",
            default=0.5,
            rule=POSITIVE_RULE,
            allowed=positive,
            about="the threshold, in units of the gradient",
        ),
    ),
)
