"""Error feedback and momentum around any codec.

`feedback` and `momentum` fuse themselves into a program's kernels. The classes here are the
generic path: right for every codec, slower, and the oracle that tests hold the fused one against.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from hipress.codecs.base import Codec, State, lr_ratio
from hipress.codecs.program import Family, ProgramCodec
from hipress.codecs.spec import FRACTION_RULE, fraction
from hipress.codecs.tensors import check_state
from hipress.compll.passes.derive import Variant
from hipress.errors import UsageError


def feedback(inner: Codec) -> Codec:
    """`ef(inner)`: what compression lost is added to the next gradient."""
    if isinstance(inner, Momentum) or (isinstance(inner, ProgramCodec) and inner.variant.momentum):
        raise UsageError(
            f"ef({inner.name}) would feed back what momentum made; write momentum(ef(...)) instead."
        )
    if isinstance(inner, ProgramCodec):
        if inner.variant.feedback:
            return inner
        family = Family(
            inner.family.back, lambda: [(at, feedback(c)) for at, c in inner.family.phases()]
        )
        return inner.with_variant(Variant(feedback=True), f"ef({inner.name})", family=family)
    return inner if isinstance(inner, Feedback) else Feedback(inner)


def momentum(inner: Codec, *, mu: float = 0.9, nesterov: bool = True) -> Codec:
    """`momentum(inner, mu=..., nesterov=...)`: the momentum of the gradients is sent."""
    if not fraction(mu):
        raise UsageError(f"momentum: mu={mu} must be {FRACTION_RULE}, e.g. 0.9.")
    if isinstance(inner, Momentum) or (isinstance(inner, ProgramCodec) and inner.variant.momentum):
        raise UsageError(f"{inner.name} has momentum already; write momentum(...) once.")
    if not isinstance(inner, ProgramCodec):
        return Momentum(inner, mu=mu, nesterov=nesterov)
    variant = Variant(feedback=inner.variant.feedback, momentum=True, nesterov=nesterov)
    # Momentum is for the workers: on the way back it would be applied a second time.
    family = Family(
        back=lambda workers, _: inner.aggregator(workers),
        phases=lambda: [
            (at, momentum(c, mu=mu, nesterov=nesterov)) for at, c in inner.family.phases()
        ],
    )
    return inner.with_variant(variant, _momentum_name(inner, mu, nesterov), mu, family)


def _momentum_name(inner: Codec, mu: float, nesterov: bool) -> str:
    return f"momentum({inner.name}, mu={mu!r}, nesterov={'true' if nesterov else 'false'})"


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
        check_state(name, state[name], x)
        return state[name]

    def _inside(self, name: str, state: State | None) -> State:
        """What the codec inside knows of a state: all but what the wrapper keeps."""
        return {key: held for key, held in (state or {}).items() if key != name}


class Feedback(_Wrapper):
    """Error feedback by the book: c = g + r; p = encode(c); r = c - decode(p)."""

    def __init__(self, inner: Codec) -> None:
        super().__init__(inner)
        self._residual = "added_residual" if "residual" in inner.state_names else "residual"

    @property
    def name(self) -> str:
        return f"ef({self.inner.name})"

    def around(self, inner: Codec) -> Codec:
        return feedback(inner)

    def aggregator(self, num_workers: int) -> Codec:
        return feedback(self.inner.aggregator(num_workers))

    def init(self, x: torch.Tensor, *, seed: int = 0, stream: int = 0) -> State:
        state = self.inner.init(x, seed=seed, stream=stream)
        state[self._residual] = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
        return state

    def encode(
        self, x: torch.Tensor, state: State | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        residual = self._memory(self._residual, x, state)
        corrected = x.detach().reshape(-1).float() + residual * lr_ratio(state)
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
        return _momentum_name(self.inner, self.mu, self.nesterov)

    def around(self, inner: Codec) -> Codec:
        return momentum(inner, mu=self.mu, nesterov=self.nesterov)

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
