"""A codec made from a CompLL program, with error feedback and momentum fused in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hipress import settings
from hipress.codecs import frame, tensors
from hipress.codecs.base import Codec, State, lr_ratio
from hipress.compll.build import Bound, Loaded
from hipress.compll.derive import ALPHA, MU, PLAIN, RHO, Variant
from hipress.compll.ir import MAX_NUMEL
from hipress.compll.threads import runner
from hipress.errors import FrameError, UsageError

RESERVED = {"seed", "stream", "step", "lr_ratio"}
"""Keys of a state that no program can take."""

HEAD_BYTES = frame.frame_bytes([0])
"""Header and table of a frame with one body."""


@dataclass(frozen=True)
class Family:
    """The codecs that belong to a codec of the table."""

    back: Callable[[int, bool], Codec | None] = lambda workers, feedback: None
    """For the way back, from the number of workers and whether there is feedback; None: itself."""
    phases: Callable[[], list[tuple[int, Codec]]] = list
    """First step and codec of each phase; none where there is one only."""


class ProgramCodec(Codec):
    """Runs the kernels of a program on tensors.

    Args:
        bound: The program with its parameters.
        name: The expression that makes this codec.
        variant: Wrappers that are fused into its encode.
        mu: The momentum factor, where `variant` has momentum.
        backend: A CompLL backend; by default what `HIPRESS_BACKEND` says at each call.
        family: Where it comes from, if that decides the way back or has phases.
        shares_stream: Whether all ranks must draw the same random numbers.
    """

    def __init__(
        self,
        bound: Bound,
        *,
        name: str,
        variant: Variant = PLAIN,
        mu: float = 0.9,
        backend: str | None = None,
        family: Family | None = None,
        shares_stream: bool = False,
    ) -> None:
        self.bound = bound
        self.variant = variant
        self.mu = mu
        self._name = name
        self._backend = backend
        self._family = family or Family()
        self._shares_stream = shares_stream
        # Made now, not at first use: a wrong program, or a wrapper that cannot be fused, shows.
        self._kernel = bound.kernels(variant=variant)[0]
        self._body_bytes = bound.body_bytes()
        taken = sorted(set(self._state_names) & RESERVED)
        if taken:
            raise UsageError(
                f"{name}: a state cannot be called {taken[0]!r}, a codec's state has one already; "
                "rename it in the program."
            )

    @property
    def name(self) -> str:
        return self._name

    @cached_property
    def codec_hash(self) -> int:
        # Wrappers change what is encoded, not how: their frames are interchangeable.
        identity = repr((self.bound.program.text, self.bound.values, frame.VERSION))
        return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")

    @property
    def backend(self) -> str:
        """The CompLL backend that CPU tensors use now."""
        chosen = self._backend or settings.backend()
        return "cpu" if chosen == "auto" else chosen

    def with_variant(
        self, variant: Variant, name: str, mu: float = 0.9, family: Family | None = None
    ) -> ProgramCodec:
        """The same program under other wrappers."""
        return ProgramCodec(
            self.bound,
            name=name,
            variant=variant,
            mu=mu,
            backend=self._backend,
            family=family or self._family,
            shares_stream=self._shares_stream,
        )

    def aggregator(self, num_workers: int) -> Codec:
        if num_workers < 1:
            raise UsageError(f"an aggregator of {num_workers} workers; there is at least one.")
        return self._family.back(num_workers, self.variant.feedback) or self

    @property
    def shares_stream(self) -> bool:
        return self._shares_stream

    @property
    def phases(self) -> tuple[tuple[int, Codec], ...]:
        return tuple(self._family.phases()) or ((0, self),)

    def wire_bytes(self, numel: int) -> int:
        if not 0 <= numel <= MAX_NUMEL:
            raise UsageError(f"a gradient of {numel} elements; a codec takes 0 to {MAX_NUMEL}.")
        return HEAD_BYTES + self._body_bytes(numel)

    def init(self, x: torch.Tensor, *, seed: int = 0, stream: int = 0) -> State:
        tensors.storage(x, "the gradient")
        state: State = {}
        for name in self._state_names:
            state[name] = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
        if self._kernel.random:
            for key, value in (("seed", seed), ("stream", stream), ("step", 0)):
                state[key] = torch.tensor(value, dtype=torch.int64)
        return state

    def encode(
        self, x: torch.Tensor, state: State | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        loaded = self._load(tensors.storage(x, "the gradient"))
        numel = x.numel()
        size = self.wire_bytes(numel)
        payload = torch.empty(size, dtype=torch.uint8) if out is None else _checked_out(out, size)
        states, rng = self._open(state, numel)
        data = payload.numpy()
        header = frame.Header(codec_hash=self.codec_hash, step=rng[2])
        frame.write_header(data, header, [frame.Body(numel, size - HEAD_BYTES)])
        body = data[HEAD_BYTES:]
        if numel == 0:
            body[:] = 0
        elif self._run_encode(loaded, x, body, states, rng, lr_ratio(state)):
            frame.set_flag(data, frame.FLAG_NONFINITE)
        if state is not None and self._kernel.random:
            state["step"] += 1
        return payload

    def decode(
        self,
        payload: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        add: bool = False,
        alpha: float = 1.0,
    ) -> torch.Tensor:
        data = _checked_payload(payload)
        header, body = frame.read_single(data, self.codec_hash)
        numel = body.numel
        if body.num_bytes != self._expected_bytes(numel):
            raise FrameError(
                f"the frame gives {body.num_bytes} bytes for {numel} elements; {self.name} needs "
                f"{self._expected_bytes(numel)}: it is damaged, send it again."
            )
        if out is None:
            if add:
                raise UsageError("decode with add=True needs out=, the tensor to add to.")
            out = torch.empty(numel, dtype=torch.float32)
        elif out.numel() != numel:
            raise UsageError(f"out has {out.numel()} elements; the frame holds {numel}.")
        elif not out.is_contiguous():
            raise UsageError("out is not contiguous; decode into a contiguous tensor and copy.")
        loaded = self._load(tensors.storage(out, "out"))
        if numel == 0:
            return out
        if header.nonfinite:
            out.detach().fill_(float("nan"))
            return out
        kernel = loaded.module.decode_add if add else loaded.module.decode
        params = self.bound.floats(loaded.decode, {ALPHA: alpha})
        refusal = kernel(
            numel,
            params,
            (0, 0, 0),
            data[body.offset : body.offset + body.num_bytes],
            tensors.flat(out),
            tensors.scratch,
            runner(settings.num_threads()),
        )
        if refusal is not None:
            raise FrameError(f"the frame is damaged: {refusal}; send it again.")
        return out

    # Inside.

    def _run_encode(
        self,
        loaded: Loaded,
        x: torch.Tensor,
        body: NDArray[np.uint8],
        states: list[Any],
        rng: tuple[int, int, int],
        rho: float,
    ) -> bool:
        """Whether the gradient held a NaN or an infinity."""
        params = self.bound.floats(loaded.encode, {MU: self.mu, RHO: rho})
        elements, pool = tensors.flat(x.contiguous()), runner(settings.num_threads())
        try:
            return bool(
                loaded.module.encode(
                    x.numel(), params, rng, body, elements, states, tensors.scratch, pool
                )
            )
        except IndexError as error:
            raise UsageError(f"{self.name}: {error}; the program is wrong there.") from error

    def _load(self, dtype: str) -> Loaded:
        return self.bound.load(self.backend, dtype=dtype, variant=self.variant)

    @cached_property
    def _state_names(self) -> list[str]:
        return [array.label for array in self._kernel.states]

    def _expected_bytes(self, numel: int) -> int:
        return self._body_bytes(numel) if numel <= MAX_NUMEL else -1

    def _open(self, state: State | None, numel: int) -> tuple[list[Any], tuple[int, int, int]]:
        """State tensors as kernels take them, and (seed, stream, step)."""
        names = self._state_names
        if state is None:
            if names or self._kernel.random:
                raise UsageError(
                    f"{self.name} keeps state; make it once with state = c.init(x) and pass it: "
                    "c.encode(x, state)."
                )
            return [], (0, 0, 0)
        arrays = []
        for name in names:
            held = state.get(name)
            if held is None:
                raise UsageError(f"the state has no {name!r}; make it with {self.name}.init(x).")
            if held.dtype != torch.float32 or held.numel() != numel or not held.is_contiguous():
                raise UsageError(
                    f"state {name!r} has {held.numel()} elements of {held.dtype}; the gradient "
                    f"needs {numel} of torch.float32: make a new state with init(x)."
                )
            arrays.append(tensors.flat(held))
        if not self._kernel.random:
            return arrays, (0, 0, 0)
        missing = [key for key in ("seed", "stream", "step") if key not in state]
        if missing:
            raise UsageError(f"the state has no {missing[0]!r}; make it with {self.name}.init(x).")
        seed, stream, step = (int(state[key]) for key in ("seed", "stream", "step"))
        return arrays, (seed & (2**64 - 1), stream & (2**32 - 1), step & (2**32 - 1))


def _checked_out(out: torch.Tensor, size: int) -> torch.Tensor:
    if out.dtype != torch.uint8 or out.numel() != size or not out.is_contiguous():
        raise UsageError(
            f"out has {out.numel()} elements of {out.dtype}; encode needs {size} contiguous bytes: "
            "torch.empty(c.wire_bytes(x.numel()), dtype=torch.uint8)."
        )
    if out.data_ptr() % frame.ALIGN:
        raise UsageError(f"out does not start on a multiple of {frame.ALIGN} bytes; allocate it.")
    return out.view(-1)


def _checked_payload(payload: torch.Tensor) -> NDArray[np.uint8]:
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise FrameError(
            f"a payload is a 1-D uint8 tensor; this has dtype {payload.dtype} and "
            f"{payload.dim()} dimensions."
        )
    payload = payload.detach().contiguous()
    if payload.data_ptr() % frame.ALIGN:  # kernels read floats and words from it
        payload = payload.clone()
    return payload.numpy()
