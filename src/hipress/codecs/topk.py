"""`topk(ratio=0.01, exact=false)`: the largest elements by magnitude."""

from hipress.codecs.spec import RATIO_RULE, Option, Spec, feedback_off, number, share, truth

MAX_WORKERS = 10**6

SPEC = Spec(
    program="topk.pse",
    summary="indices and values of the largest elements by magnitude",
    paper="Stich et al., Sparsified SGD with Memory, NeurIPS 2018",
    feedback=True,
    options=(
        Option(
            name="ratio",
            default=0.01,
            rule=RATIO_RULE,
            allowed=share,
            about="share of the elements that is sent",
        ),
        Option(
            name="exact",
            default=False,
            rule="true or false",
            allowed=truth,
            about="exactly the largest, or all above a threshold estimated from a sample",
        ),
        Option(
            name="sample",
            default=0.01,
            rule=RATIO_RULE,
            allowed=share,
            about="share of the elements in that sample (at least 4096)",
        ),
        Option(
            name="workers",
            default=1,
            rule=f"a whole number from 1 to {MAX_WORKERS}",
            allowed=lambda v: number(v) and 1 <= v <= MAX_WORKERS and v == int(v),
            about="of how many workers the picks have room, on the way back",
        ),
    ),
    # Workers pick different elements: the way back has room for all of them.
    back=lambda o, workers: (
        f"topk(ratio={o['ratio']!r}, exact={'true' if o['exact'] else 'false'}, "
        f"sample={o['sample']!r}, workers={min(workers * o['workers'], MAX_WORKERS)}"
        f"{feedback_off(o)})"
    ),
)
