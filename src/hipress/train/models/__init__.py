"""The models of the training jobs, by name: a table of builders, or a callable of the user's.

Each belongs to a task (`hipress.train.tasks`), which says what it is trained with and how its loss
is taken. Weights come from torch's random numbers only, so a seed decides them on every rank.
"""

from __future__ import annotations

import difflib

from hipress.errors import UsageError
from hipress.train.models.base import Model
from hipress.train.models.custom import custom
from hipress.train.models.gpt import Gpt
from hipress.train.models.table import MODELS
from hipress.train.tasks import Batch

__all__ = ["MODELS", "Batch", "Gpt", "Model", "model", "names"]


def model(name: str) -> Model:
    """The table's line of a name, or one made for a `package.module:callable`.

    Raises:
        UsageError: There is no such model.
    """
    if name in MODELS:
        return MODELS[name]
    if ":" in name:
        return custom(name)
    near = difflib.get_close_matches(name.lower(), names(), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UsageError(
        f"model {name!r}{hint} is none of {', '.join(names())}; choose one, or name your own as "
        "package.module:callable."
    )


def names() -> list[str]:
    """The models that a user is told of."""
    return [name for name, line in MODELS.items() if not line.is_hidden]
