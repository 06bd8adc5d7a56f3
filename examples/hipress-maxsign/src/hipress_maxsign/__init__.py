"""`maxsign(block=1024)`: -s or s at random, the mean kept; a codec of another package."""

from hipress.codecs.spec import Option, Spec, number

SPEC = Spec(
    program="maxsign.pse",
    package="hipress_maxsign",
    summary="-s or s at random so that the mean is kept, s per block",
    paper="Suresh et al., Distributed Mean Estimation with Limited Communication, ICML 2017",
    options=(
        Option(
            name="block",
            default=1024,
            rule="a multiple of 8 from 64 to 65536",
            allowed=lambda v: number(v) and 64 <= v <= 65536 and v % 8 == 0,
            about="elements that share a scale",
        ),
    ),
)
