"""The interface of a codec: state in and state out, a frame on the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING

import torch

from hipress.codecs import tensors
from hipress.errors import FrameError, UsageError

if TYPE_CHECKING:
    from hipress.codecs.bulk import Bulk

State = dict[str, torch.Tensor]
"""A codec's memory by name: "residual", "momentum", "step", ...; empty if it has none."""

RANDOM_KEYS = ("seed", "stream", "step")
"""Keys of a state that feed the random numbers; they are not memory of the gradient."""

WEIGHT = "weight"
"""Key of a state that holds the parameter; the caller writes it and no checkpoint saves it."""


def lr_ratio(state: State | None) -> float:
    """Returns the factor on the residual: the last step's learning rate over this one's, or 1.

    dist-EF-SGDM (Zheng et al., NeurIPS 2019) needs it when the rate changes; set
    `state["lr_ratio"] = torch.tensor(lr_before / lr_now)` before `encode`.
    """
    given = None if state is None else state.get("lr_ratio")
    try:
        return 1.0 if given is None else float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"state 'lr_ratio' is {given!r}; it must be one number, e.g. "
            "torch.tensor(lr_before / lr_now)."
        ) from error


def workers(num_workers: int) -> int:
    """Returns the number of workers of an aggregator; refuses any but a whole number above 0."""
    whole = isinstance(num_workers, Integral) and not isinstance(num_workers, bool)
    if not whole or num_workers < 1:
        raise UsageError(
            f"aggregator(num_workers={num_workers!r}): the number of workers must be a whole "
            "number, at least 1, e.g. c.aggregator(4)."
        )
    return int(num_workers)


def frames_to_merge(
    payloads: Sequence[torch.Tensor], worker: Codec, numel: int
) -> list[torch.Tensor]:
    """Returns the frames of workers as `merge` takes them; refuses what cannot be merged."""
    if isinstance(payloads, torch.Tensor) or not isinstance(payloads, Iterable):
        raise UsageError(
            f"merge was given one {type(payloads).__name__} as payloads; it takes a list, the "
            "frame of each worker: merge([payload, ...], worker, numel, state)."
        )
    if not isinstance(worker, Codec):
        raise UsageError(
            f"merge was given a {type(worker).__name__} as worker; it takes the codec that made "
            "the frames: merge(payloads, worker, numel, state)."
        )
    if isinstance(numel, dict):
        raise UsageError(
            "merge was given a state in place of the number of elements; call "
            "merge(payloads, worker, numel, state)."
        )
    size = worker.wire_bytes(numel)
    frames = [tensors.checked_payload(payload) for payload in payloads]
    if not frames:
        raise UsageError("merge was given no frame; give a list of at least one.")
    for k, payload in enumerate(frames):
        if payload.numel() != size or payload.device != frames[0].device:
            raise FrameError(
                f"merge: frame {k} has {payload.numel()} bytes on {payload.device}; for "
                f"numel={numel} elements {worker.name} makes {size}, on {frames[0].device} like "
                "the first frame."
            )
    return frames


class Codec(ABC):
    """Turns a gradient into a frame of fixed size, and back.

    Example:
        >>> import torch, hipress
        >>> c = hipress.codec("ef(onebit)")
        >>> x = torch.randn(1000)
        >>> state = c.init(x)
        >>> payload = c.encode(x, state)
        >>> payload.numel() == c.wire_bytes(1000)
        True
        >>> c.decode(payload).shape
        torch.Size([1000])
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The expression that makes this codec again."""

    @property
    @abstractmethod
    def codec_hash(self) -> int:
        """Identifies the wire format with its parameters; frames of another are refused."""

    @abstractmethod
    def init(self, x: torch.Tensor, *, seed: int = 0, stream: int = 0) -> State:
        """Returns new state for tensors like `x`.

        Args:
            x: A tensor with the shape, dtype and device of those to come.
            seed: Feeds the random numbers, with `stream` and the step.
            stream: Ranks that must draw different numbers differ in this.
        """

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        """Names of the per-element memory that the codec keeps from step to step.

        These are the keys of the state that `init` makes, in the same order, without those of the
        random numbers (`RANDOM_KEYS`). `WEIGHT` is among them where the codec wants to see the
        parameter. The default asks `init` once; a codec that knows its names may override it.

        Example:
            >>> import hipress
            >>> hipress.codec("momentum(ef(onebit))").state_names
            ('momentum', 'residual')
        """
        return tuple(name for name in self.init(torch.zeros(1)) if name not in RANDOM_KEYS)

    @abstractmethod
    def encode(
        self, x: torch.Tensor, state: State | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the frame of `x`; updates `state` in place and leaves `x` as it is.

        Args:
            x: A tensor of float32, float16 or bfloat16, of any shape.
            state: From `init`; may be left out if that is empty.
            out: A uint8 tensor of `wire_bytes(x.numel())` to write to.
        """

    @abstractmethod
    def decode(
        self,
        payload: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        add: bool = False,
        alpha: float = 1.0,
    ) -> torch.Tensor:
        """Sets `out = alpha * decoded`, or `out += alpha * decoded` with `add`, and returns it.

        Args:
            payload: A frame of this codec.
            out: The tensor to write to; a new 1-D float32 tensor if None.
            add: Add to `out` instead of overwriting it.
            alpha: A factor, e.g. one over the number of ranks.

        Raises:
            FrameError: `payload` is damaged, is not a frame, or belongs to another codec.
        """

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Returns the bytes of the frame of a tensor with `numel` elements."""

    @abstractmethod
    def aggregator(self, num_workers: int) -> Codec:
        """Returns the codec for the way back, which encodes the average of the workers' gradients.

        It has a state and a size of its own. Momentum is not applied a second time; sparse codecs
        have room for the union of what the workers picked.

        Args:
            num_workers: The number of gradients that are averaged.

        Example:
            >>> import hipress
            >>> hipress.codec("dgc(ratio=0.001)").aggregator(4).name
            'topk(ratio=0.001, workers=4)'
        """

    def merge(
        self,
        payloads: Sequence[torch.Tensor],
        worker: Codec,
        numel: int,
        state: State | None = None,
        *,
        alpha: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the frame of the workers' mean, which an aggregator sends back.

        Decodes `payloads` in the order they are given, which is that of the ranks, and encodes
        the sum times `alpha`. On a GPU this is one kernel if both codecs go element by element.

        Args:
            payloads: Frames of `worker`, all on one device.
            worker: The codec that made them.
            numel: The number of elements in each.
            state: The state of this codec, from `init`.
            alpha: A factor; one over the number of frames if None.
            out: The tensor to write to, as in `encode`.

        Example:
            >>> import torch, hipress
            >>> c = hipress.codec("onebit")
            >>> a = c.aggregator(2)
            >>> x = torch.randn(100)
            >>> frames = [c.encode(x, c.init(x)) for _ in range(2)]
            >>> a.merge(frames, c, 100, a.init(x)).numel() == a.wire_bytes(100)
            True
        """
        frames = frames_to_merge(payloads, worker, numel)
        alpha = 1 / len(frames) if alpha is None else tensors.factor(alpha)
        mean = torch.zeros(numel, dtype=torch.float32, device=frames[0].device)
        for k, payload in enumerate(frames):
            try:
                worker.decode(payload, out=mean, add=True, alpha=alpha)
            except UsageError as error:  # frames with other numbers of elements may be as long
                raise FrameError(
                    f"merge: frame {k} does not hold numel={numel} elements; give the number of "
                    "elements of the gradients."
                ) from error
        return self.encode(mean, state, out=out)

    def bulk(self, numels: Iterable[int]) -> Bulk:
        """Returns this codec for many gradients at once, in one frame (see `Bulk`).

        Args:
            numels: The number of elements of each gradient, in order.
        """
        raise UsageError(
            f"{self.name} is not made from a program alone and takes one gradient at a time; "
            "codecs of the table have bulk."
        )

    def state_views(self, name: str, held: torch.Tensor, numel: int) -> list[torch.Tensor]:
        """Returns what a state holds for each gradient, here one, without what is around it."""
        return [held]

    @property
    def shares_stream(self) -> bool:
        """Whether all ranks, including the aggregator, must use the same `stream`.

        Other codecs round at random, and their errors cancel only if each rank has its own.

        Example:
            >>> import hipress
            >>> hipress.codec("randomk").shares_stream, hipress.codec("terngrad").shares_stream
            (True, False)
        """
        return False

    @property
    def keeps_sizes(self) -> bool:
        """Whether each decoded element has nearly the size of the gradient's.

        Adam divides by the sizes of past gradients. Where a codec does not keep them, the momentum
        should travel instead of the gradient (`hipress.torch.optim`).

        Example:
            >>> import hipress
            >>> hipress.codec("int8").keeps_sizes, hipress.codec("onebit").keeps_sizes
            (True, False)
        """
        return False

    @property
    def chooses_largest(self) -> bool:
        """Whether it sends the largest elements only.

        Example:
            >>> import hipress
            >>> hipress.codec("topk").chooses_largest, hipress.codec("onebit").chooses_largest
            (True, False)
        """
        return False

    def for_momentum(self) -> Codec:
        """Returns the codec for a momentum that the optimizer keeps: without momentum of its own.

        Example:
            >>> import hipress
            >>> hipress.codec("momentum(ef(onebit))").for_momentum().name
            'onebit'
            >>> hipress.codec("dgc(ratio=0.01)").for_momentum().name
            'topk(ratio=0.01, sample=0.01)'
        """
        return self

    def scaled(self, loss_scale: float) -> Codec:
        """Returns the codec for gradients that are multiplied by a loss scale.

        Options in units of the gradient are multiplied too, so that the frames hold the same
        decisions as without a scaler. All other codecs are returned as they are.

        Example:
            >>> import hipress
            >>> hipress.codec("tbq(tau=0.5)").scaled(1024.0).name
            'tbq(tau=512.0, levels=1)'
        """
        return self

    @property
    def clip(self) -> float:
        """Largest norm of a gradient, which `encode` clips to; 0 means that nothing is clipped.

        `encode` clips what it is given. The engine, which cuts gradients into partitions, clips
        whole gradients and encodes the partitions with `unclipped()`.
        """
        return 0.0

    def unclipped(self) -> Codec:
        """Returns the same codec without clipping."""
        return self

    @property
    def phases(self) -> tuple[tuple[int, Codec], ...]:
        """First step and codec of each phase of training; all phases share one state."""
        return ((0, self),)

    def phase(self, step: int) -> Codec:
        """Returns the codec for a step of training: itself, unless its rate changes over time.

        Example:
            >>> import hipress
            >>> c = hipress.codec("dgc(ratio=0.001, warmup=400)")
            >>> [c.phase(s).wire_bytes(10**6) for s in (0, 399, 400)]
            [2000096, 32096, 8096]
        """
        return [codec for start, codec in self.phases if start <= step or start == 0][-1]

    def max_wire_bytes(self, numel: int) -> int:
        """Returns the bytes of the largest frame of any phase."""
        return max(codec.wire_bytes(numel) for _, codec in self.phases)

    def __repr__(self) -> str:
        return f"codec({self.name!r})"
