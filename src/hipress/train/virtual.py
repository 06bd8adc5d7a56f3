"""The exchange of virtual workers, which share one process: only a codec's effect remains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hipress
from hipress.codecs import Codec
from hipress.codecs.base import State
from hipress.plan import exempt_reason
from hipress.session.buckets import keeps_residual
from hipress.torch.optim import Adam, AdamW
from hipress.train.forms import Sent, sent

REFRESH = "int8(ef=false)"
"""The codec, both ways, of gradients that refresh the second moment of an optimizer."""


def is_exempt(parameter: Tensor) -> bool:
    return bool(exempt_reason(parameter.dim(), parameter.numel()))


class VirtualSync:
    """The exchange of several workers and one aggregator, without a network.

    With g_w what worker w sends, its gradient or its momentum, and N the number of workers:

        mean      the sum over w of decode(encode(g_w)) / N, in rank order
        update    decode(encode_back(mean)), the same bits for all

    There is no other process, so only the effect of a codec on training remains. Exempt parameters
    are averaged uncompressed. Workers are ranks 0 to num_workers - 1; the aggregator is one more.

    Args:
        what: What travels: a `Sent`, or a codec or `PLAIN` for gradients.
        parameters: What is trained, on any device.
        num_workers: The number of workers.
        seed: Feeds the codecs' random numbers.
        optimizer: The optimizer of these parameters, if its momentum travels.

    Example:
        >>> sync = VirtualSync("onebit", [torch.zeros(64, 64)], num_workers=2)
        >>> mean = sync.average([[torch.ones(64, 64)], [torch.full((64, 64), 3.0)]], step=0)
        >>> mean[0].unique()
        tensor([2.])
    """

    def __init__(
        self,
        what: Sent | str,
        parameters: Sequence[Tensor],
        *,
        num_workers: int,
        seed: int = 0,
        optimizer: Adam | AdamW | None = None,
    ) -> None:
        if isinstance(what, str):
            what = sent(what, "sgd", "gradient")
        self.num_workers = num_workers
        self.bytes_out = 0
        """Bytes that worker 0 has sent."""
        self.bytes_back = 0
        """Bytes that the aggregator has sent to each worker."""
        self.optimizer = optimizer if what.refreshes else None
        self.tensors = [
            _Exempt(self, p)
            if what.codec is None or is_exempt(p)
            else _Compressed(self, what.codec, p, seed, i)
            for i, p in enumerate(parameters)
        ]

    @property
    def has_momentum(self) -> list[bool]:
        """For each parameter, whether its codec applies momentum and the optimizer must not."""
        return [tensor.has_momentum for tensor in self.tensors]

    def average(
        self, gradients: Sequence[Sequence[Tensor]], step: int, lr_ratio: float = 1.0
    ) -> list[Tensor]:
        """Return what each parameter's `.grad` becomes: the average as every worker decodes it.

        `gradients` has those of each worker in rank order. The step selects the phase of a codec
        that has phases; `lr_ratio` is the last step's learning rate divided by this one's. The next
        call overwrites what this one returned.
        """
        by_parameter = zip(*gradients, strict=True)
        return [
            tensor.average(group, step, lr_ratio)
            for tensor, group in zip(self.tensors, by_parameter, strict=True)
        ]


class _Exempt:
    """A parameter whose gradients are averaged as they are."""

    has_momentum = False

    def __init__(self, sync: VirtualSync, parameter: Tensor) -> None:
        self.sync = sync
        self.mean = torch.empty_like(parameter)

    def average(self, gradients: Sequence[Tensor], step: int, lr_ratio: float) -> Tensor:
        self.mean.zero_()
        for gradient in gradients:
            self.mean.add_(gradient, alpha=1 / len(gradients))
        self.sync.bytes_out += 4 * self.mean.numel()
        self.sync.bytes_back += 4 * self.mean.numel()
        return self.mean


class _Compressed:
    """A parameter with a state for each worker and for the aggregator.

    Gradients are copied to memory that stays where it is, as in DDP's buckets: on a GPU calls of a
    codec are then replayed.
    """

    def __init__(
        self, sync: VirtualSync, codec: Codec, parameter: Tensor, seed: int, index: int
    ) -> None:
        self.sync = sync
        self.codec = codec
        self.parameter = parameter
        self.refresh = hipress.codec(REFRESH) if sync.optimizer is not None else codec
        self.frame_back = torch.empty(0, dtype=torch.uint8)
        self._frames: dict[str, Tensor] = {}
        self._backs: dict[str, Codec] = {}
        # Parameters differ in seed; ranks differ in stream unless they must draw the same numbers.
        seed = 1_000_003 * seed + index
        streams = [0 if codec.shares_stream else rank for rank in range(sync.num_workers + 1)]
        self.states: list[State] = [
            codec.init(parameter, seed=seed, stream=stream) for stream in streams[:-1]
        ]
        self.state_back = self.back(codec.phase(0)).init(parameter, seed=seed, stream=streams[-1])
        own = set(self.states[0])
        self.has_momentum = bool(own & {"momentum", "velocity"})
        self.outgoing = [torch.empty_like(parameter).view(-1) for _ in streams[:-1]]
        self.mean = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        self._ratio: Tensor | None = None
        if "momentum" in own:
            # dist-EF-SGDM corrects residuals for a changing rate (Zheng et al., NeurIPS 2019).
            self._ratio = torch.ones(1, device=parameter.device)
            for state in (*self.states, self.state_back):
                state["lr_ratio"] = self._ratio

    def back(self, codec: Codec) -> Codec:
        """Return the aggregator's codec for frames of a codec."""
        if codec.name not in self._backs:
            self._backs[codec.name] = codec.aggregator(self.sync.num_workers)
        return self._backs[codec.name]

    def average(self, gradients: Sequence[Tensor], step: int, lr_ratio: float) -> Tensor:
        for out, gradient in zip(self.outgoing, gradients, strict=True):
            out.view_as(gradient).copy_(gradient)
        optimizer = self.sync.optimizer
        if optimizer is None:
            return self._exchange(self.codec.phase(step), lr_ratio)
        is_refresh = optimizer.wants_gradients([self.parameter])
        is_momentum = not is_refresh and keeps_residual(self.codec)
        optimizer.note_incoming([self.parameter], is_momentum=is_momentum)
        if is_refresh:
            return self._exchange(self.refresh, lr_ratio, is_refresh=True)
        if not is_momentum:
            optimizer.note_noisy([self.parameter])
            return self._exchange(self.codec.phase(step), lr_ratio)
        for out in self.outgoing:
            optimizer.make_outgoing(self.parameter, out, loss_scale=1.0)
        return self._exchange(self.codec.phase(step), lr_ratio)

    def _exchange(self, codec: Codec, lr_ratio: float, *, is_refresh: bool = False) -> Tensor:
        """Send what is outgoing through a codec and back; a refresh has no memory."""
        back = self.back(codec)
        if self._ratio is not None:
            self._ratio.fill_(lr_ratio)
        frames = []
        for rank, out in enumerate(self.outgoing):
            state = None if is_refresh else self.states[rank]
            frames.append(codec.encode(out, state, out=self._frame(codec, f"{codec.name} {rank}")))
        self.frame_back = back.merge(
            frames,
            codec,
            self.mean.numel(),
            None if is_refresh else self.state_back,
            out=self._frame(back, f"{back.name} back"),
        )
        self.sync.bytes_out += frames[0].numel()
        self.sync.bytes_back += self.frame_back.numel()
        return back.decode(self.frame_back, out=self.mean)

    def _frame(self, codec: Codec, name: str) -> Tensor:
        """Return memory for a frame of a codec, the same in every step."""
        size = codec.wire_bytes(self.mean.numel())
        found = self._frames.get(name)
        if found is None or found.numel() != size:
            found = torch.empty(size, dtype=torch.uint8, device=self.mean.device)
            self._frames[name] = found
        return found
