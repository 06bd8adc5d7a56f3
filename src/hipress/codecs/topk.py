"""`topk(ratio=0.01, exact=false)`: the largest elements by magnitude."""

from hipress.codecs.spec import Spec, count, feedback_off, flag, ratio

MAX_WORKERS = 10**6

SPEC = Spec(
    program="topk.pse",
    summary="indices and values of the largest elements by magnitude",
    paper="Stich et al., Sparsified SGD with Memory, NeurIPS 2018",
    feedback=True,
    chooses_largest=True,
    options=(
        ratio("ratio", 0.01, "share of the elements that is sent"),
        flag(
            "exact", False, "exactly the largest, or all above a threshold estimated from a sample"
        ),
        ratio("sample", 0.01, "share of the elements in that sample (at least 4096)"),
        count(
            "workers", 1, MAX_WORKERS, "of how many workers the picks have room, on the way back"
        ),
    ),
    # Workers pick different elements: the way back has room for all of them.
    back=lambda o, workers: (
        f"topk(ratio={o['ratio']!r}, exact={'true' if o['exact'] else 'false'}, "
        f"sample={o['sample']!r}, workers={min(workers * o['workers'], MAX_WORKERS)}"
        f"{feedback_off(o)})"
    ),
)
