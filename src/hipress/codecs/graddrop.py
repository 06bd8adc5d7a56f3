"""`graddrop(ratio=0.01, sample=0.001)`: all but the largest elements dropped."""

from hipress.codecs.spec import Spec, feedback_off, ratio
from hipress.codecs.topk import MAX_WORKERS

SPEC = Spec(
    program="graddrop.pse",
    summary="indices and values above a threshold from a small sample",
    paper="Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017",
    feedback=True,
    chooses_largest=True,
    options=(
        ratio("ratio", 0.01, "share of the elements that is kept (the paper drops 99 %)"),
        ratio(
            "sample",
            0.001,
            "share of the elements that the threshold is estimated from (at least 4096)",
        ),
    ),
    back=lambda o, workers: (
        f"topk(ratio={o['ratio']!r}, workers={min(workers, MAX_WORKERS)}{feedback_off(o)})"
    ),
)
