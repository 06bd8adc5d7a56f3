"""The step of a built-in model on this machine, timed in a few seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hipress.profile import ModelProfile

if TYPE_CHECKING:
    import torch

    from hipress.train.models import Model

FEW_EXAMPLES = 2
STEP_S = 1.5
"""A step that is timed takes about so long; longer ones are timed with fewer examples."""
NUM_STEPS = 2


def time_model(name: str, batch: int | None, device: torch.device) -> tuple[ModelProfile, int]:
    """Times a few steps.

    Args:
        name: Of a built-in model.
        batch: Examples per step; the model's own if None.
        device: To train on.

    Returns:
        The model with the work of all examples, and how many the steps had.

    Raises:
        UsageError: There is not enough memory for it.
    """
    import torch

    from hipress.cli._cluster import check_memory
    from hipress.torch.ddp import time_gradients
    from hipress.train.models import model as line_of
    from hipress.train.tasks import TASKS

    line = line_of(name)
    batch = batch or line.batch
    # Parameters, gradients and momentum, and what a step of few examples needs.
    check_memory(f"model {name!r}", 4 * 4 * line.num_parameters, "name a smaller one", device.type)
    loss = TASKS[line.task or ""].loss
    net = line.make().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    seen = time_gradients(net)

    def step(num_examples: int) -> float:
        data = _data(line, num_examples, device)
        start = time.perf_counter()
        torch.autograd.backward(loss(net, data))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.end_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    def steps(num_examples: int, skip: int) -> ModelProfile:
        seen.steps.clear()
        for _ in range(NUM_STEPS):
            step(num_examples)
        return seen.profile(name=name, batch=batch, skip=skip)

    all_threads = torch.get_num_threads()
    # Threads that wait for each other count as work, so that others on this machine would make
    # the model look slower: one thread works.
    torch.set_num_threads(1)
    try:
        few = steps(min(FEW_EXAMPLES, batch), skip=1)
        timed = int(FEW_EXAMPLES * STEP_S / max(_work_s(few), 1e-6))
        timed = min(batch, max(2 * FEW_EXAMPLES, timed))
        found = steps(timed, skip=0)
        torch.set_num_threads(all_threads)
        if device.type == "cpu" and all_threads > 1:
            wall_s = min(step(timed) for _ in range(NUM_STEPS))
            threads = min(max(_work_s(found) / wall_s, 1.0), float(all_threads))
            found = found.model_copy(update={"threads": threads})
    finally:
        torch.set_num_threads(all_threads)
        seen.close()
    if timed == batch:
        return found, timed
    # A part of the work is the same for any number of examples.
    example_s = (_work_s(found) - _work_s(few)) / (timed - min(FEW_EXAMPLES, batch))
    most = batch / timed
    times = 1 + example_s * (batch - timed) / max(_work_s(found), 1e-9)
    return scaled(found, min(max(times, 1.0), most)), timed


def _work_s(model: ModelProfile) -> float:
    """Of a step's forward and backward."""
    return model.forward_s + model.backward_s


def _data(line: Model, num_examples: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(part.to(device) for part in line.data(0, num_examples))


def scaled(model: ModelProfile, times: float) -> ModelProfile:
    """A model whose forward and backward work for so many times the examples; the optimizer's work
    stays."""
    return model.model_copy(
        update={
            "forward_s": model.forward_s * times,
            "backward_s": model.backward_s * times,
            "gradients": tuple(
                one.model_copy(update={"ready_s": one.ready_s * times}) for one in model.gradients
            ),
        }
    )
