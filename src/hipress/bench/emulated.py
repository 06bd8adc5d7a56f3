"""Models whose computation is a pause: gradients of the real sizes at the real moments, without
work. On a machine with fewer cores than ranks, computing and exchanging otherwise share the cores.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hipress.torch.ddp import named_gradients, time_gradients

STEPS = 4
"""Steps of the real model that are timed; the first two do not count."""


class Emulated(nn.Module):
    """A model with the parameters of another one, and pauses in the place of its work.

    Args:
        model: The real model.
        layers: For each layer in the order of the forward pass the names of its parameters, and
            the seconds of its forward and backward pass.
    """

    def __init__(self, model: nn.Module, layers: list[tuple[list[str], float, float]]) -> None:
        super().__init__()
        named = named_gradients(model)
        self.layers = nn.ModuleList(
            _Layer([named[name] for name in names], forward_s, backward_s)
            for names, forward_s, backward_s in layers
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, parameters: list[nn.Parameter], forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in parameters)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        weights = [weight[:0] for weight in self.own]  # reads them, as a real layer does
        assert len(weights) == len(self.own)
        pause: Any = _Pause
        result: Tensor = pause.apply(x, self.forward_s, self.backward_s, *self.own)
        return result


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float, *own: Tensor) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        ctx.save_for_backward(*own)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        # Any gradient will do, as long as it depends on nothing.
        return outputs[0], None, None, *(p.mul(1e-3) for p in ctx.saved_tensors)


def emulate(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Emulated:
    """Times a model's layers on rank 0, and returns it with pauses of that length; collective.

    Args:
        model: A model on the CPU.
        loss: Returns the loss of a batch of the model.
    """
    text = json.dumps(_layers(model, loss)) if dist.get_rank() == 0 else ""
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0)
    told = torch.tensor(bytearray(text.encode().ljust(int(size))), dtype=torch.uint8)
    dist.broadcast(told, src=0)
    return Emulated(model, json.loads(bytes(told.tolist())))


def _layers(
    model: nn.Module, loss: Callable[[nn.Module], Tensor]
) -> list[tuple[list[str], float, float]]:
    with time_gradients(model) as timer:
        for _ in range(STEPS):
            model.zero_grad(set_to_none=True)
            torch.autograd.backward(loss(model))
            timer.end_step()
        profile = timer.profile()
    model.zero_grad(set_to_none=True)
    moments: dict[str, float] = {gradient.name: gradient.ready_s for gradient in profile.gradients}
    layers: dict[str, list[str]] = {}
    for name in sorted(moments, key=moments.__getitem__):
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    # In the order of backward: the work of a layer ends with its last gradient.
    ends = [max(moments[name] for name in names) for names in layers.values()]
    order = sorted(range(len(ends)), key=ends.__getitem__)
    grouped = list(layers.values())
    total, before, rows = max(ends), 0.0, []
    for place in order:
        backward_s = ends[place] - before
        before = ends[place]
        forward_s = profile.forward_s * backward_s / total
        rows.append((grouped[place], forward_s, backward_s))
    return rows[::-1]
