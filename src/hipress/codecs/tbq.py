"""`tbq(tau=0.5)`: plus or minus tau where the accumulated element has reached it."""

from hipress.codecs.spec import Option, Spec, number

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
            rule="above 0",
            allowed=lambda v: number(v) and 0 < v <= 1e30,
            about="the threshold, in units of the gradient",
        ),
    ),
    # On the way back the mean moves in steps of tau over the number of workers.
    back=lambda o, workers: f"tbq(tau={o['tau'] / workers!r})",
)
