"""`minmax(bits=2)`: uniform levels between minimum and maximum; HiPress shipped it as TernGrad."""

from hipress.codecs.spec import Option, Spec

SPEC = Spec(
    program="minmax.pse",
    summary="uniform levels between minimum and maximum, rounded at random",
    paper="Bai et al., Gradient Compression Supercharged High-Performance DNN Training, SOSP 2021",
    options=(
        Option(
            name="bits",
            param="bitwidth",
            default=2,
            rule="1, 2, 4 or 8",
            allowed=lambda v: not isinstance(v, bool) and v in (1, 2, 4, 8),
            about="bits of an element",
        ),
    ),
)
