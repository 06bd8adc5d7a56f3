"""A codec made from a CompLL program, with error feedback and momentum fused in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from hipress import settings
from hipress.codecs import frame, tensors
from hipress.codecs.base import RANDOM_KEYS, Codec, State, frames_to_merge, lr_ratio, workers
from hipress.codecs.gpu import GpuKernels, GpuMerge, call_key, header_of, started_again
from hipress.compll.backends.gpu.replay import Replays
from hipress.compll.backends.threads import runner
from hipress.compll.build import Bound, Loaded
from hipress.compll.ir import MAX_NUMEL
from hipress.compll.passes.derive import ALPHA, DECAY, MU, PLAIN, RHO, Variant
from hipress.errors import BackendError, FrameError, UsageError

if TYPE_CHECKING:
    from hipress.codecs.bulk import Bulk

MAX_MERGED = 16
"""Most frames that one kernel averages: each adds a pointer, and a load to its loop."""
WRAPPER_KEYS = frozenset({"residual", "added_residual", "momentum", "added_momentum"})
"""Keys whose content a codec that does not keep them would lose; other keys are allowed, since a
caller may keep something of its own in the same dict."""
RESERVED = {*RANDOM_KEYS, "lr_ratio"}
"""Keys of a state that no program can use for its own."""
MAX_BYTES = 2**48
"""Most bytes of a frame; 2^32 - 1 elements in double precision take 2^35."""
GENERATOR = "philox4x32-7"
"""Where random numbers come from: `randomk` draws in decode what encode has drawn."""
OTHER_STREAM = 2**31
"""Added to the stream for the rounding of a stored residual; ranks have small numbers."""
HEAD_BYTES = frame.frame_bytes([0])
"""Header and table of a frame with one body."""


@dataclass(frozen=True)
class Family:
    """The codecs that belong to a codec of the table."""

    back: Callable[[int, bool], Codec | None] = lambda workers, feedback: None
    """Returns the codec for the way back, from the number of workers and whether there is error
    feedback; None stands for the codec itself."""
    phases: Callable[[], list[tuple[int, ProgramCodec]]] = list
    """Returns the first step and the codec of each phase; nothing if there is one phase only."""
    scaled: Callable[[float], ProgramCodec | None] = lambda loss_scale: None
    """Returns the codec for a loss scale; None stands for the codec itself."""
    clip: float = 0.0
    """Largest norm of a gradient; 0 if nothing is clipped."""
    unclipped: Callable[[], ProgramCodec | None] = lambda: None
    """Returns the codec without clipping; None stands for the codec itself."""
    for_momentum: Callable[[], ProgramCodec | None] = lambda: None
    """Returns the codec without momentum of its own; None stands for the codec itself."""


class ProgramCodec(Codec):
    """Runs the kernels of a program on tensors.

    Args:
        bound: The program with its parameters.
        name: The expression that makes this codec.
        variant: The wrappers that are fused into its encode.
        mu: The momentum factor, if `variant` has momentum.
        decay: The factor on the residual, if `variant` decays.
        backend: A CompLL backend; by default the one of `HIPRESS_BACKEND` at each call.
        family: The codecs for the way back and for other phases of training.
        shares_stream: Whether all ranks must draw the same random numbers.
        keeps_sizes: Whether each decoded element has nearly the size of the one encoded.
        chooses_largest: Whether it sends the largest elements only.
        stored: How the residual is kept between steps; "" is as float32 (see `residual`).
    """

    def __init__(
        self,
        bound: Bound,
        *,
        name: str,
        variant: Variant = PLAIN,
        mu: float = 0.9,
        decay: float = 1.0,
        backend: str | None = None,
        family: Family | None = None,
        shares_stream: bool = False,
        keeps_sizes: bool = False,
        chooses_largest: bool = False,
        stored: str = "",
    ) -> None:
        self.bound = bound
        self.variant = variant
        self.mu = mu
        self.decay = decay
        self._name = name
        self._backend = backend
        self.family = family or Family()
        self._shares_stream = shares_stream
        self._keeps_sizes = keeps_sizes
        self._chooses_largest = chooses_largest
        self._gpu_kernels: dict[str, GpuKernels] = {}
        self.replays = Replays()
        """Graphs of the calls that were made with the same memory before."""
        self._merges: dict[tuple[int, int], GpuMerge | None] = {}
        # Made now, not at first use, so that a wrong program, or a wrapper that cannot be fused,
        # is refused here.
        self._kernel = bound.kernels(variant=variant)[0]
        self._body_bytes = lru_cache(4096)(bound.body_bytes())
        self._state_numels = bound.state_numels(self._kernel)
        self._dtypes = [tensors.STATES[array.storage] for array in self._kernel.states]
        kept = [n for n in ("added_residual", "residual") if n in self.state_names]
        self.stored_name = kept[0] if stored and variant.feedback and kept else ""
        """The name of the state that is a frame of `keeper`; empty if there is none."""
        self.stored = stored if self.stored_name else ""
        taken = sorted(set(self.state_names) & RESERVED)
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
        identity = repr((self.bound.program.text, self.bound.values, frame.VERSION, GENERATOR))
        return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")

    @property
    def backend(self) -> str:
        """The CompLL backend that CPU tensors use now."""
        chosen = self._backend or settings.backend()
        return "cpu" if chosen == "auto" else chosen

    def runs_on_gpu(self, x: torch.Tensor) -> bool:
        """Returns whether the gpu backend takes a tensor; refuses one that the backend cannot."""
        chosen = self._backend or settings.backend()
        if chosen == "auto":
            return x.is_cuda
        if chosen == "gpu" and not tensors.gpu_takes(x):
            raise BackendError(
                f"the gradient is on {x.device} and the backend is gpu; move it to a CUDA device, "
                "or set HIPRESS_BACKEND=auto."
            )
        if chosen != "gpu" and x.is_cuda:
            raise BackendError(
                f"the gradient is on {x.device} and the backend is {chosen}; use x.cpu(), or set "
                "HIPRESS_BACKEND=auto."
            )
        return chosen == "gpu"

    def with_variant(
        self, variant: Variant, name: str, mu: float = 0.9, family: Family | None = None
    ) -> ProgramCodec:
        """Returns the same program under other wrappers."""
        return self._copy(variant=variant, name=name, mu=mu, family=family or self.family)

    def with_residual(self, decay: float, stored: str, name: str, family: Family) -> ProgramCodec:
        """Returns the same codec with a factor on its residual, or with another way to keep it."""
        variant = replace(self.variant, decays=decay < 1)
        return self._copy(variant=variant, name=name, decay=decay, family=family, stored=stored)

    @cached_property
    def keeper(self) -> ProgramCodec:
        """The codec whose frame is the residual, if that is `stored`."""
        from hipress.codecs.residual import keeper

        return keeper(self.stored, self._backend)

    @cached_property
    def wide(self) -> ProgramCodec:
        """The same codec with a residual of float32."""
        return self._copy(stored="")

    def on_backend(self, backend: str) -> ProgramCodec:
        """Returns the same codec on one backend, whatever the settings are."""
        return self._copy(backend=backend)

    def _copy(self, **changed: Any) -> ProgramCodec:
        kept: dict[str, Any] = {"name": self.name, "variant": self.variant, "mu": self.mu}
        kept |= {"decay": self.decay, "backend": self._backend, "family": self.family}
        kept |= {"shares_stream": self._shares_stream, "keeps_sizes": self._keeps_sizes}
        kept |= {"chooses_largest": self._chooses_largest}
        kept |= {"stored": self.stored}
        return ProgramCodec(self.bound, **{**kept, **changed})

    def aggregator(self, num_workers: int) -> Codec:
        return self.family.back(workers(num_workers), self.variant.feedback) or self

    @property
    def random(self) -> bool:
        """Whether it draws random numbers, and so keeps a seed, a stream and a step."""
        return self._kernel.random or bool(self.stored)

    @property
    def shares_stream(self) -> bool:
        return self._shares_stream

    @property
    def keeps_sizes(self) -> bool:
        return self._keeps_sizes and not self.variant.momentum

    @property
    def chooses_largest(self) -> bool:
        return self._chooses_largest

    def for_momentum(self) -> Codec:
        return self._relative(self.family.for_momentum())

    def scaled(self, loss_scale: float) -> Codec:
        return self._relative(self.family.scaled(loss_scale))

    @property
    def clip(self) -> float:
        return self.family.clip

    def unclipped(self) -> Codec:
        return self._relative(self.family.unclipped())

    def _relative(self, made: ProgramCodec | None) -> ProgramCodec:
        """Returns a codec of the family on the backend of this one; itself if there is none."""
        if made is None:
            return self
        return made if self._backend is None else made.on_backend(self._backend)

    @property
    def phases(self) -> tuple[tuple[int, Codec], ...]:
        return tuple(self.family.phases()) or ((0, self),)

    def __reduce__(self) -> tuple[Any, ...]:
        # By name: a program's kernels and the functions of its family do not travel.
        from hipress.codecs.table import remade

        return remade, (self.name, self.codec_hash, self._backend)

    def wire_bytes(self, numel: int) -> int:
        if not isinstance(numel, int):
            numel = tensors.integer(numel, "the number of elements")
        if not 0 <= numel <= MAX_NUMEL:
            raise UsageError(f"the gradient has {numel} elements; a codec takes 0 to {MAX_NUMEL}.")
        size = HEAD_BYTES + self._body_bytes(numel)
        if size > MAX_BYTES:
            raise UsageError(
                f"{self.name} would make {size:,} bytes of {numel} elements, more than a frame can "
                f"have ({MAX_BYTES:,}): a size in its program is too large."
            )
        return size

    def init(self, x: torch.Tensor, *, seed: int = 0, stream: int = 0) -> State:
        if not isinstance(x, torch.Tensor):
            found = f"{x!r}" if isinstance(x, int) else f"a {type(x).__name__}"
            raise UsageError(
                f"init was given {found}; it takes a tensor with the shape, dtype and device of "
                "the gradients to come, e.g. c.init(torch.empty(1000))."
            )
        tensors.storage(x, "the gradient")
        seed, stream = tensors.seed(seed, "seed"), tensors.seed(stream, "stream")
        state: State = {}
        for name, numel, dtype in self._shapes(x.numel()):
            state[name] = torch.zeros(numel, dtype=dtype, device=x.device)
        if self.stored:
            head = torch.frombuffer(bytearray(header_of(self.keeper, x.numel())), dtype=torch.uint8)
            state[self.stored_name][:HEAD_BYTES] = head.to(x.device)
        if self.random:
            for key, value in zip(RANDOM_KEYS, (seed, stream, 0), strict=True):
                state[key] = torch.tensor(value, dtype=torch.int64, device=x.device)
        return state

    def encode(
        self, x: torch.Tensor, state: State | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        dtype = tensors.storage(x, "the gradient")
        numel = x.numel()
        size = self.wire_bytes(numel)
        if self.stored:
            self.held(state, x)
            run = partial(self.wide.encode, x, out=out)
            return self.widened(self.keeper, state, numel, x.device, run)
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=x.device)
        key = call_key(x.device, (x, out), state, "encode")
        if started_again(self.replays, key, x.device):
            return out.view(-1)
        payload = tensors.checked_out(out, size, x.device)
        held = self.held(state, x)
        if self.runs_on_gpu(x):
            self.gpu(dtype).encode(x, held, state, payload, key)
            return payload
        rng = self._rng(state)
        data = payload.numpy()
        header = frame.Header(codec_hash=self.codec_hash, step=rng[2])
        frame.write_header(data, header, [frame.Body(numel, size - HEAD_BYTES)])
        body = payload[HEAD_BYTES:]
        if numel == 0:
            body.zero_()
        elif self.encode_body(dtype, x, body, held, rng, lr_ratio(state)):
            frame.set_flag(data, frame.FLAG_NONFINITE)
        if state is not None and self._kernel.random:
            state["step"] += 1
        return payload

    def widened(
        self,
        keeper: ProgramCodec | Bulk,
        state: State | None,
        numel: int,
        device: torch.device,
        encode: Callable[[State], torch.Tensor],
    ) -> torch.Tensor:
        """Runs an encode on the residual as float32, in shared memory, and stores what is left."""
        assert state is not None
        held, wide = state[self.stored_name], _wide.take(numel, device)
        keeper.decode(held, out=wide)
        rng = {key: state[key] for key in RANDOM_KEYS}
        if self.wide.random:  # draws of its own, or what is sent would decide how it is rounded
            rng |= {"stream": rng["stream"] + OTHER_STREAM, "step": rng["step"].clone()}
        made = encode({**state, self.stored_name: wide})
        keeper.encode(wide, rng, out=held)
        return made

    def decode(
        self,
        payload: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        add: bool = False,
        alpha: float = 1.0,
    ) -> torch.Tensor:
        if not isinstance(alpha, float):
            alpha = tensors.factor(alpha)
        key = None
        if out is None and add:
            raise UsageError(
                "decode was given add=True and no out; give out=, the tensor to add to."
            )
        if out is not None:
            _check_target(payload, out)
        payload = tensors.checked_payload(payload)
        if out is not None:
            key = call_key(out.device, (payload, out), None, "decode", add, alpha)
            if started_again(self.replays, key, out.device):
                return out
        if self.runs_on_gpu(payload):
            return self._decode_on_gpu(payload, out, add, alpha, key)
        data = payload.numpy()
        header, body = frame.read_single(data, self.codec_hash)
        numel = body.numel
        self._check_body(body)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32)
        elif out.numel() != numel:
            raise UsageError(f"out has {out.numel()} elements; the frame holds {numel}.")
        if header.nonfinite:
            out.detach().fill_(float("nan"))
        elif numel:
            part = payload[body.offset : body.offset + body.num_bytes]
            self.decode_body(part, out, add=add, alpha=alpha)
        return out

    def bulk(self, numels: Iterable[int]) -> Bulk:
        from hipress.codecs.bulk import Bulk

        return Bulk(self, numels)

    def _decode_on_gpu(
        self, payload: torch.Tensor, out: torch.Tensor | None, add: bool, alpha: float, key: Any
    ) -> torch.Tensor:
        """Reads and checks the frame's header on the host if there is no `out`."""
        waits = out is None
        if out is None:
            head = payload[:HEAD_BYTES].cpu().numpy()
            _, body = frame.read_single(head, self.codec_hash, payload.numel())
            self._check_body(body)
            out = torch.empty(body.numel, dtype=torch.float32, device=payload.device)
        if payload.numel() != self.wire_bytes(out.numel()):
            raise FrameError(
                f"the frame has {payload.numel()} bytes; {self.name} needs "
                f"{self.wire_bytes(out.numel())} for the {out.numel()} elements of out."
            )
        if out.numel():
            kernels = self.gpu(tensors.storage(out, "out"))
            kernels.decode(payload, out, add=add, alpha=alpha, waits=waits, key=key)
        return out

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
        frames = frames_to_merge(payloads, worker, numel)
        if state is None and self._state_keys:
            raise self._stateless("merge(payloads, worker, numel, state)")
        if self.stored:
            device = frames[0].device
            self.held(state, torch.empty(1, device=device).expand(numel))

            def run(wide: State) -> torch.Tensor:
                return self.wide.merge(frames, worker, numel, wide, alpha=alpha, out=out)

            return self.widened(self.keeper, state, numel, device, run)
        fused = self._merge_of(worker, frames) if numel else None
        if fused is None:
            return super().merge(frames, worker, numel, state, alpha=alpha, out=out)
        alpha = 1 / len(frames) if alpha is None else tensors.factor(alpha)
        size, device = self.wire_bytes(numel), frames[0].device
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=device)
        out = tensors.checked_out(out, size, device)
        memory = out.untyped_storage().data_ptr()
        if any(p.untyped_storage().data_ptr() == memory for p in frames):
            raise UsageError("out lies in the memory of a frame that is merged; give its own.")
        key = call_key(device, (*frames, out), state, "merge", worker.codec_hash, numel, alpha)
        if started_again(self.replays, key, device):
            return out
        held = self.held(state, torch.empty(1, device=device).expand(numel))
        fused(frames, numel, held, state, out, alpha, key)
        return out

    def _merge_of(self, worker: Codec, payloads: Sequence[torch.Tensor]) -> GpuMerge | None:
        """Returns the kernel that merges frames of `worker`, if there is one."""
        if not isinstance(worker, ProgramCodec):
            return None
        if len(payloads) > MAX_MERGED or not self.runs_on_gpu(payloads[0]):
            return None
        key = (worker.codec_hash, len(payloads))
        if key not in self._merges:
            merge = self.bound.load_merge(worker.bound, len(payloads), variant=self.variant)
            self._merges[key] = None if merge is None else GpuMerge(worker, self, merge)
        return self._merges[key]

    def gpu(self, dtype: str) -> GpuKernels:
        """Returns the kernels for tensors of a dtype on a GPU."""
        if dtype not in self._gpu_kernels:
            self._gpu_kernels[dtype] = GpuKernels(self, dtype)
        return self._gpu_kernels[dtype]

    def encode_body(
        self,
        dtype: str,
        x: torch.Tensor,
        body: torch.Tensor,
        states: Sequence[torch.Tensor],
        rng: tuple[int, int, int],
        rho: float,
    ) -> bool:
        """Writes the body of a frame on the CPU; returns whether x had a NaN or an infinity."""
        loaded = self._load(dtype)
        params = self.bound.floats(loaded.encode, {MU: self.mu, RHO: rho, DECAY: self.decay})
        elements, pool = tensors.flat(x.contiguous()), runner(settings.num_threads())
        held = [tensors.flat(state) for state in states]
        try:
            return bool(
                loaded.module.encode(
                    x.numel(), params, rng, body.numpy(), elements, held, tensors.scratch, pool
                )
            )
        except IndexError as error:
            raise UsageError(f"{self.name}: {error}; the program is wrong there.") from error

    def decode_body(
        self, body: torch.Tensor, out: torch.Tensor, *, add: bool, alpha: float
    ) -> None:
        """Reads the body of a frame on the CPU."""
        loaded = self._load(tensors.storage(out, "out"))
        refusal = (loaded.module.decode_add if add else loaded.module.decode)(
            out.numel(),
            self.bound.floats(loaded.decode, {ALPHA: alpha}),
            (0, 0, 0),
            body.numpy(),
            tensors.flat(out),
            tensors.scratch,
            runner(settings.num_threads()),
        )
        if refusal is not None:
            raise FrameError(f"the frame is damaged: {refusal}; send it again.")

    def _load(self, dtype: str) -> Loaded:
        return self.bound.load(self.backend, dtype=dtype, variant=self.variant)

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        return tuple(array.label for array in self._kernel.states)

    @cached_property
    def uneven_state(self) -> str:
        """The name of a state that is not one float for each element; empty if there is none."""
        for array in self._kernel.states:
            if array.length.op != "n" or array.type != "float":
                return array.label
        return ""

    def _shapes(self, numel: int) -> Iterable[tuple[str, int, torch.dtype]]:
        """Returns the name, the elements and the dtype of each state for a gradient."""
        numels = self._state_numels(numel) if self.uneven_state else [numel] * len(self._dtypes)
        for name, count, dtype in zip(self.state_names, numels, self._dtypes, strict=True):
            if name == self.stored_name:
                yield name, self.keeper.wire_bytes(numel), torch.uint8
            else:
                yield name, count, dtype

    def state_views(self, name: str, held: torch.Tensor, numel: int) -> list[torch.Tensor]:
        if name != self.stored_name:
            return [held]
        from hipress.codecs.residual import body

        return [body(self.stored, held[HEAD_BYTES:], numel)]

    def _check_body(self, body: frame.BodyView) -> None:
        """Refuses a body whose length does not fit its number of elements."""
        expected = self._body_bytes(body.numel) if body.numel <= MAX_NUMEL else -1
        if body.num_bytes != expected:
            raise FrameError(
                f"the frame gives {body.num_bytes} bytes for {body.numel} elements; {self.name} "
                f"needs {expected}: it is damaged, send it again."
            )

    @cached_property
    def _state_keys(self) -> frozenset[str]:
        return frozenset([*self.state_names, *RANDOM_KEYS * self.random])

    def held(
        self, state: State | None, x: torch.Tensor, stored_bytes: int | None = None
    ) -> list[torch.Tensor]:
        """Returns the state's arrays in the order that kernels take them.

        A residual that is stored has `stored_bytes`; if None, those of one gradient.
        """
        keys = self._state_keys
        if state is None:
            if keys:
                raise self._stateless("encode(x, state)")
            return []
        if not isinstance(state, dict) or state.keys() & (WRAPPER_KEYS | keys) != keys:
            raise self._foreign(state)
        for name, numel, dtype in self._shapes(x.numel()):
            if name == self.stored_name and stored_bytes is not None:
                numel = stored_bytes
            tensors.check_state(name, state[name], x, numel, dtype)
        return [state[name].view(-1) for name in self.state_names]

    def _rng(self, state: State | None) -> tuple[int, int, int]:
        """Returns (seed, stream, step) on the host."""
        if state is None or not self._kernel.random:
            return (0, 0, 0)
        seed, stream, step = (tensors.whole(key, state[key]) for key in RANDOM_KEYS)
        return seed & (2**64 - 1), stream & (2**32 - 1), step & (2**32 - 1)

    def _stateless(self, call: str) -> UsageError:
        return UsageError(
            f"{self.name} keeps state; make it once with state = c.init(x) and pass it: c.{call}."
        )

    def _foreign(self, state: Any) -> UsageError:
        if not isinstance(state, dict):
            return UsageError(
                f"the state is a {type(state).__name__}, not a dict; make it with "
                f"{self.name}.init(x)."
            )
        missing = [key for key in (*self.state_names, *RANDOM_KEYS) if key not in state]
        if missing and missing[0] in self._state_keys:
            return UsageError(f"the state has no {missing[0]!r}; make it with {self.name}.init(x).")
        extra = min(state.keys() & WRAPPER_KEYS - self._state_keys)
        return UsageError(
            f"the state has {extra!r}, which {self.name} does not keep, so it would be lost: it is "
            f"the state of another codec; make it with {self.name}.init(x)."
        )


_wide = tensors.Scratch()
"""Memory for one residual as float32."""


def _check_target(payload: torch.Tensor, out: torch.Tensor) -> None:
    tensors.storage(out, "out")
    if not out.is_contiguous():
        raise UsageError("out is not contiguous; decode into a contiguous tensor and copy.")
    if isinstance(payload, torch.Tensor) and payload.device != out.device:
        raise UsageError(
            f"the payload is on {payload.device}, out on {out.device}; they must be on one device: "
            "move the payload with payload.to(out.device)."
        )
