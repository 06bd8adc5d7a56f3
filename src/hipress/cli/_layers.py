"""The gradients of a built-in model and the work that backward does for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hipress.errors import UsageError
from hipress.secopa.sosp21.presets import Layer, spread_work

if TYPE_CHECKING:
    from torch import nn

    from hipress.train.models import Model

COUNTED = 2
"""Examples that floating-point operations are counted with: they are proportional."""


def layers(name: str) -> tuple[list[Layer], int]:
    """The layers of a model in the order of backward, and the examples of a step.

    The model is built without memory for its numbers, and its operations are counted, not done.
    Backward works for a layer in proportion to what forward does in it.

    Raises:
        UsageError: There is no such model, or it brings no data.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from hipress.train.models import model as line_of
    from hipress.train.tasks import TASKS

    line = line_of(name)
    if line.task is None or line.draw is None:
        raise UsageError(f"--model {name!r} brings no data to count with; name a built-in one.")
    with torch.device("meta"):
        model = line.build()
    batch = tuple(part.to("meta") for part in line.data(0, COUNTED))
    with FlopCounterMode(display=False) as counter:
        TASKS[line.task].loss(model, batch)
    counts = {key: sum(ops.values()) for key, ops in counter.get_flop_counts().items()}
    return _layers(model, counts, line), line.batch


def _layers(model: nn.Module, counts: dict[str, int], line: Model) -> list[Layer]:
    root = type(model).__name__
    scale = 3 * line.batch / COUNTED  # backward takes twice what forward does
    found = []
    for name, parameter in reversed(list(model.named_parameters())):
        owner = name.rpartition(".")[0]
        # Of a layer that has weight and bias, the weight stands for its work.
        work = counts.get(f"{root}.{owner}", 0) if parameter.ndim > 1 else 0
        found.append(
            Layer(
                name=name,
                numel=parameter.numel(),
                dims=parameter.ndim,
                work=work * scale,
            )
        )
    return spread_work(found, counts.get("Global", 0) * scale)
