"""Codecs: one algorithm is one `.pse` program, one small file and one line in `table`.

`codec(expression)` makes one; see `base.Codec` for what it does.
"""

from hipress.codecs.base import Codec
from hipress.codecs.table import codec, describe, names

__all__ = ["Codec", "codec", "describe", "names"]
