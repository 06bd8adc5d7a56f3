"""`minmax(bits=2)`: uniform levels between minimum and maximum; HiPress shipped it as TernGrad."""

from hipress.codecs.spec import Option, Spec, number

SPEC = Spec(
    program="minmax.pse",
    summary="uniform levels between minimum and maximum, rounded at random",
    paper="Bai et al., Gradient Compression Supercharged High-Performance Data Parallel DNN "
    "Training, SOSP 2021",
    options=(
        Option(
            name="bits",
            default=2,
            rule="1, 2, 4 or 8",
            allowed=lambda v: number(v) and v in (1, 2, 4, 8),
            about="bits of an element",
        ),
    ),
    params=lambda o: {"bitwidth": o["bits"]},
)
