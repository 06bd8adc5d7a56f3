"""HiPress: compressed gradient exchange for data-parallel training.

`hipress.codec("ef(onebit)")` makes a codec; `hipress.codecs` lists and describes them;
`hipress.allreduce(tensor, codec="onebit")` averages a tensor over all ranks;
`hipress.attach(model)` compresses what a DDP model exchanges;
`hipress.lightning`, `hipress.accelerate` and `hipress.transformers` do so in these frameworks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hipress.version import __version__

if TYPE_CHECKING:
    from hipress import accelerate as accelerate
    from hipress import codecs, torch
    from hipress import lightning as lightning
    from hipress import transformers as transformers
    from hipress.codecs import Codec, codec
    from hipress.session import allreduce, init
    from hipress.torch import attach

# Without the integrations: `from hipress import *` would load their frameworks.
__all__ = ["Codec", "__version__", "allreduce", "attach", "codec", "codecs", "init", "torch"]

# Public name: where it lives. Loaded when first used, so that `import hipress` costs nothing.
_LAZY = {
    "Codec": "hipress.codecs",
    "accelerate": "hipress.accelerate",
    "allreduce": "hipress.session",
    "attach": "hipress.torch",
    "codec": "hipress.codecs",
    "codecs": "hipress.codecs",
    "init": "hipress.session",
    "lightning": "hipress.lightning",
    "torch": "hipress.torch",
    "transformers": "hipress.transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hipress' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = module if _LAZY[name] == f"hipress.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
