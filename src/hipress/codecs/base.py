"""What a codec is: state in and state out, a frame on the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

State = dict[str, torch.Tensor]
"""A codec's memory by name: "residual", "momentum", "step", ...; empty if it has none."""


def lr_ratio(state: State | None) -> float:
    """The factor on the residual: last step's learning rate over this one's, 1 unless given.

    dist-EF-SGDM (Zheng et al., NeurIPS 2019) needs it where the rate changes; set
    `state["lr_ratio"] = torch.tensor(lr_before / lr_now)` before `encode`.
    """
    given = None if state is None else state.get("lr_ratio")
    return 1.0 if given is None else float(given)


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
        """Fresh state for tensors like `x`.

        Args:
            x: A tensor with the shape, dtype and device of those to come.
            seed: Feeds the random numbers, with `stream` and the step.
            stream: Ranks that must draw different numbers differ in this.
        """

    @abstractmethod
    def encode(
        self, x: torch.Tensor, state: State | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The frame of `x`; updates `state` in place and leaves `x` as it is.

        Args:
            x: float32, float16 or bfloat16, any shape.
            state: From `init`; may be left out where that is empty.
            out: Where to write: a uint8 tensor of `wire_bytes(x.numel())`.
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
        """`out = alpha * decoded`, or `out += alpha * decoded` with `add`.

        Args:
            payload: A frame of this codec.
            out: Where to write; a new 1-D float32 tensor if None.
            add: Add to `out` instead of overwriting it.
            alpha: A factor, e.g. one over the number of ranks.

        Raises:
            FrameError: `payload` is damaged, foreign, or of another codec.
        """

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Bytes of the frame of a tensor with `numel` elements."""

    def __repr__(self) -> str:
        return f"codec({self.name!r})"
