"""Error feedback and momentum around any codec, by the book.

The package fuses both into a program's kernels. The classes here do the same in plain torch and for
every codec: they are slower, and the fused kernels are compared with them.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from hipress.codecs.base import Codec, State, lr_ratio
from hipress.codecs.program import ProgramCodec
from hipress.codecs.table import feedback, momentum
from hipress.codecs.tensors import check_state
from hipress.errors import UsageError


class _Wrapper(Codec):
    """What a wrapper leaves to the codec inside."""

    def __init__(self, inner: Codec) -> None:
        self.inner = inner

    @property
    def codec_hash(self) -> int:
        return self.inner.codec_hash

    @property
    def shares_stream(self) -> bool:
        return self.inner.shares_stream

    @property
    def phases(self) -> tuple[tuple[int, Codec], ...]:
        return tuple(
            (at, self if c is self.inner else self.around(c)) for at, c in self.inner.phases
        )

    @abstractmethod
    def around(self, inner: Codec) -> Codec:
        """The same wrapper around another codec."""

    def wire_bytes(self, numel: int) -> int:
        return self.inner.wire_bytes(numel)

    def aggregator(self, num_workers: int) -> Codec:
        return self.inner.aggregator(num_workers)

    def decode(
        self,
        payload: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        add: bool = False,
        alpha: float = 1.0,
    ) -> torch.Tensor:
        return self.inner.decode(payload, out=out, add=add, alpha=alpha)

    def _memory(self, name: str, x: torch.Tensor, state: State | None) -> torch.Tensor:
        if state is None or name not in state:
            raise UsageError(
                f"{self.name} keeps state; make it once with state = c.init(x) and pass it."
            )
        check_state(name, state[name], x, x.numel(), torch.float32)
        return state[name]

    def _inside(self, name: str, state: State | None) -> State:
        """What the codec inside knows of a state: all but what the wrapper keeps."""
        return {key: held for key, held in (state or {}).items() if key != name}


class Feedback(_Wrapper):
    """Error feedback by the book: c = g + decay r; p = encode(c); r = c - decode(p)."""

    def __init__(self, inner: Codec, *, decay: float = 1.0) -> None:
        super().__init__(inner)
        self.decay = decay
        self._residual = "added_residual" if "residual" in inner.state_names else "residual"

    @property
    def name(self) -> str:
        decay = f", decay={self.decay!r}" if self.decay < 1 else ""
        return f"ef({self.inner.name}{decay})"

    def around(self, inner: Codec) -> Codec:
        wrap = feedback if isinstance(inner, ProgramCodec) else Feedback
        return wrap(inner, decay=self.decay)

    def aggregator(self, num_workers: int) -> Codec:
        return self.around(self.inner.aggregator(num_workers))

    def init(self, x: torch.Tensor, *, seed: int = 0, stream: int = 0) -> State:
        state = self.inner.init(x, seed=seed, stream=stream)
        state[self._residual] = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
        return state

    def encode(
        self, x: torch.Tensor, state: State | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        residual = self._memory(self._residual, x, state)
        corrected = x.detach().reshape(-1).float() + residual * (lr_ratio(state) * self.decay)
        payload = self.inner.encode(corrected, self._inside(self._residual, state), out=out)
        left = self.inner.decode(payload)
        torch.sub(corrected, left, out=left)
        # A NaN or an infinity never enters the residual: such an element keeps what it had.
        residual.copy_(torch.where(left.isfinite(), left, residual))
        return payload


class Momentum(_Wrapper):
    """m = mu * m + g is sent; with Nesterov's look-ahead, g + mu * m."""

    def __init__(self, inner: Codec, *, mu: float = 0.9, nesterov: bool = True) -> None:
        super().__init__(inner)
        self.mu = mu
        self.nesterov = nesterov

    @property
    def name(self) -> str:
        nesterov = "true" if self.nesterov else "false"
        return f"momentum({self.inner.name}, mu={self.mu!r}, nesterov={nesterov})"

    def around(self, inner: Codec) -> Codec:
        wrap = momentum if isinstance(inner, ProgramCodec) else Momentum
        return wrap(inner, mu=self.mu, nesterov=self.nesterov)

    def init(self, x: torch.Tensor, *, seed: int = 0, stream: int = 0) -> State:
        state = self.inner.init(x, seed=seed, stream=stream)
        state["momentum"] = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
        return state

    def encode(
        self, x: torch.Tensor, state: State | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        held = self._memory("momentum", x, state)
        gradient = x.detach().reshape(-1).float()
        fresh = held * self.mu + gradient
        sent = gradient + fresh * self.mu if self.nesterov else fresh
        held.copy_(torch.where(fresh.isfinite(), fresh, held))
        return self.inner.encode(sent, self._inside("momentum", state), out=out)
