"""`randomk(ratio=0.01)`: values at random places that all ranks share."""

from hipress.codecs.spec import Spec, ratio

SPEC = Spec(
    program="randomk.pse",
    summary="values at random places; only their key travels",
    paper="Stich et al., Sparsified SGD with Memory, NeurIPS 2018",
    feedback=True,
    shares_stream=True,
    options=(ratio("ratio", 0.01, "share of the elements that is sent"),),
    # The sum lives on the same places, so nothing is lost on the way back.
    back=lambda o, workers: f"randomk(ratio={o['ratio']!r}, ef=false)",
)
