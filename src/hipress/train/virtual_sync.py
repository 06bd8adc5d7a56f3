"""The gradient exchange of several workers in one process, with the codecs of a real exchange.

With g_w the gradient of worker w and N the number of workers:

    mean      the sum over w of decode(encode(g_w)) / N, in rank order
    update    decode(encode_back(mean)), the same bits for all

There is no network and no other process, so only the effect of a codec on training remains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hipress
from hipress.codecs import Codec
from hipress.codecs.base import State
from hipress.plan import exempt_reason
from hipress.train.config import PLAIN


class VirtualSync:
    """The gradient exchange of several workers and one aggregator, without a network.

    `expression` is a codec, or `PLAIN`; exempt parameters are averaged uncompressed. Workers are
    ranks 0 to num_workers - 1; the aggregator is one more.

    Example:
        >>> sync = VirtualSync("onebit", [torch.zeros(64, 64)], num_workers=2)
        >>> mean = sync.average([[torch.ones(64, 64)], [torch.full((64, 64), 3.0)]], step=0)
        >>> mean[0].unique()
        tensor([2.])
    """

    def __init__(
        self, expression: str, parameters: Sequence[Tensor], *, num_workers: int, seed: int = 0
    ) -> None:
        self.num_workers = num_workers
        self.bytes_out = 0
        """Bytes that worker 0 has sent."""
        self.bytes_back = 0
        """Bytes that the aggregator has sent to each worker."""
        codec = None if expression == PLAIN else hipress.codec(expression)
        self.tensors = [
            _Exempt(self) if codec is None or is_exempt(p) else _Compressed(self, codec, p, seed, i)
            for i, p in enumerate(parameters)
        ]

    @property
    def has_momentum(self) -> list[bool]:
        """For each parameter, whether its codec applies momentum and the optimizer must not."""
        return [tensor.has_momentum for tensor in self.tensors]

    def average(
        self, gradients: Sequence[Sequence[Tensor]], step: int, lr_ratio: float = 1.0
    ) -> list[Tensor]:
        """Return the averaged gradient of each parameter, as every worker decodes it.

        `gradients` has those of each worker in rank order. The step selects the phase of a codec
        that has phases; `lr_ratio` is the last step's learning rate divided by this one's.
        """
        by_parameter = zip(*gradients, strict=True)
        return [
            tensor.average(group, step, lr_ratio)
            for tensor, group in zip(self.tensors, by_parameter, strict=True)
        ]


def is_exempt(parameter: Tensor) -> bool:
    """Return whether a parameter's gradient is never compressed."""
    return bool(exempt_reason(parameter.dim(), parameter.numel()))


class _Exempt:
    has_momentum = False

    def __init__(self, sync: VirtualSync) -> None:
        self.sync = sync

    def average(self, gradients: Sequence[Tensor], step: int, lr_ratio: float) -> Tensor:
        mean = torch.zeros_like(gradients[0])
        for gradient in gradients:
            mean.add_(gradient, alpha=1 / len(gradients))
        self.sync.bytes_out += 4 * mean.numel()
        self.sync.bytes_back += 4 * mean.numel()
        return mean


class _Compressed:
    def __init__(
        self, sync: VirtualSync, codec: Codec, parameter: Tensor, seed: int, index: int
    ) -> None:
        self.sync = sync
        self.codec = codec
        self.frame_back = torch.empty(0, dtype=torch.uint8)
        self._backs: dict[str, Codec] = {}
        # Parameters differ in seed; ranks differ in stream unless they must draw the same numbers.
        seed = 1_000_003 * seed + index
        streams = [0 if codec.shares_stream else rank for rank in range(sync.num_workers + 1)]
        self.states: list[State] = [
            codec.init(parameter, seed=seed, stream=stream) for stream in streams[:-1]
        ]
        self.state_back = self.back(0).init(parameter, seed=seed, stream=streams[-1])
        own = set(self.states[0])
        self.has_momentum = bool(own & {"momentum", "velocity"})
        # dist-EF-SGDM corrects residuals for a changing rate (Zheng et al., NeurIPS 2019).
        self._follows_rate = "momentum" in own

    def back(self, step: int) -> Codec:
        """Return the aggregator's codec in the phase of a step."""
        codec = self.codec.phase(step)
        if codec.name not in self._backs:
            self._backs[codec.name] = codec.aggregator(self.sync.num_workers)
        return self._backs[codec.name]

    def average(self, gradients: Sequence[Tensor], step: int, lr_ratio: float) -> Tensor:
        codec, back = self.codec.phase(step), self.back(step)
        if self._follows_rate:
            ratio = torch.tensor(lr_ratio)
            for state in (*self.states, self.state_back):
                state["lr_ratio"] = ratio
        mean = torch.zeros_like(gradients[0], memory_format=torch.contiguous_format)
        for gradient, state in zip(gradients, self.states, strict=True):
            frame = codec.encode(gradient, state)
            codec.decode(frame, out=mean, add=True, alpha=1 / len(gradients))
        self.frame_back = back.encode(mean, self.state_back)
        self.sync.bytes_out += frame.numel()
        self.sync.bytes_back += self.frame_back.numel()
        return back.decode(self.frame_back, out=mean)
