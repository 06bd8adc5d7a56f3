"""Many small gradients in one frame; on a GPU that takes as few launches as one gradient.

The gradients lie in one flat buffer, each on a multiple of `ALIGN` elements, and so do the states
of their codec. A frame holds their bodies side by side, as `frame` describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from hipress.codecs import frame, tensors
from hipress.codecs.base import State, lr_ratio
from hipress.codecs.gpu import call_key, started_again
from hipress.compll.backends.gpu.replay import Replays
from hipress.compll.backends.gpu.runtime import DeviceCache
from hipress.errors import FrameError, UsageError

if TYPE_CHECKING:
    from hipress.codecs.program import ProgramCodec

ALIGN = 16
"""Every gradient starts on a multiple of this many elements of the flat buffer."""


class Bulk:
    """A codec for a fixed list of gradients at once.

    Args:
        codec: A codec of the table, with the wrappers that are fused into it.
        numels: The number of elements of each gradient, in order.

    Example:
        >>> import torch, hipress
        >>> bulk = hipress.codec("onebit").bulk([100, 7, 4096])
        >>> flat = torch.zeros(bulk.numel)
        >>> for gradient, view in zip(map(torch.randn, bulk.numels), bulk.views(flat)):
        ...     _ = view.copy_(gradient)
        >>> state = bulk.init(flat)
        >>> payload = bulk.encode(flat, state)
        >>> payload.numel() == bulk.wire_bytes
        True
        >>> out = bulk.decode(payload, out=torch.zeros(bulk.numel))
    """

    def __init__(self, codec: ProgramCodec, numels: Iterable[int]) -> None:
        if codec.uneven_state:
            raise UsageError(
                f"{codec.name} keeps {codec.uneven_state!r}, which is not one float for each "
                "element, so many gradients cannot share it; encode each one by itself."
            )
        self.codec = codec
        self.numels = _checked(numels)
        self._bodies = [codec.wire_bytes(n) - frame.frame_bytes([0]) for n in self.numels]
        self.wire_bytes = frame.frame_bytes(self._bodies)
        """Bytes of the frame."""
        padded = [-(-n // ALIGN) * ALIGN for n in self.numels]
        self.offsets = list(accumulate(padded[:-1], initial=0))
        """Where each gradient starts in the flat buffer."""
        self.numel = sum(padded)
        """Elements of the flat buffer."""
        self._keeper = Bulk(codec.keeper, self.numels) if codec.stored else None
        self._wide = Bulk(codec.wide, self.numels) if codec.stored else None
        self.kept = DeviceCache()
        """What kernels on a device need to know about these gradients."""
        self.replays = Replays()
        """Graphs of the calls that were made with the same memory before."""

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the gradients inside a flat buffer."""
        pairs = zip(self.offsets, self.numels, strict=True)
        return [flat[at : at + n] for at, n in pairs]

    def state_views(self, name: str, held: torch.Tensor, numel: int) -> list[torch.Tensor]:
        """Returns what a state holds for each gradient, as `Codec.state_views` does."""
        if self._keeper is None or name != self.codec.stored_name:
            return self.views(held)
        from hipress.codecs.residual import body

        rows = zip(self._keeper.places, self._keeper._bodies, self.numels, strict=True)
        return [body(self.codec.stored, held[at : at + size], n) for at, size, n in rows]

    def init(self, flat: torch.Tensor, *, seed: int = 0, stream: int = 0) -> State:
        """Returns new state for buffers like `flat`; gradient k draws its numbers with seed + k."""
        self._check(flat, "the buffer")
        seed, stream = tensors.seed(seed, "seed"), tensors.seed(stream, "stream")
        state: State = self.codec.init(flat)
        if self._keeper is not None:
            held = torch.zeros(self._keeper.wire_bytes, dtype=torch.uint8, device=flat.device)
            held[: self._keeper.header.numel()] = self._keeper.header.to(flat.device)
            state[self.codec.stored_name] = held
        if "seed" in state:
            count = len(self.numels)
            device = flat.device
            state["seed"] = torch.arange(count, dtype=torch.int64, device=device) + seed
            state["stream"] = torch.full((count,), stream, dtype=torch.int64, device=device)
        return state

    def encode(
        self, flat: torch.Tensor, state: State | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns one frame of all gradients; updates `state` in place."""
        dtype = self._check(flat, "the buffer")
        if self._keeper is not None and self._wide is not None:
            self.codec.held(state, flat, self._keeper.wire_bytes)
            self._check_seeds(state)
            run = partial(self._wide.encode, flat, out=out)
            return self.codec.widened(self._keeper, state, self.numel, flat.device, run)
        if out is None:
            out = torch.empty(self.wire_bytes, dtype=torch.uint8, device=flat.device)
        key = call_key(flat.device, (flat, out), state, "encode")
        if started_again(self.replays, key, flat.device):
            return out.view(-1)
        out = tensors.checked_out(out, self.wire_bytes, flat.device)
        held = self.codec.held(state, flat)
        self._check_seeds(state)
        if self.codec.runs_on_gpu(flat):
            self.codec.gpu(dtype).encode_bulk(self, flat, held, state, out, key)
            return out
        self._encode_each(dtype, flat, held, state, out)
        if state is not None and self.codec.random:
            state["step"] += 1
        return out

    def _check_seeds(self, state: State | None) -> None:
        """Refuses a state of the codec itself, which has one seed only."""
        if state is None or not self.codec.random:
            return
        for key in ("seed", "stream"):
            held = state[key]
            if not isinstance(held, torch.Tensor) or held.numel() != len(self.numels):
                raise UsageError(
                    f"state {key!r} is not one number for each of the {len(self.numels)} "
                    "gradients; make the state with bulk.init(flat)."
                )

    def decode(
        self, payload: torch.Tensor, *, out: torch.Tensor, add: bool = False, alpha: float = 1.0
    ) -> torch.Tensor:
        """Sets `out = alpha * decoded` (`out +=` with `add`) for all gradients of a flat buffer.

        Elements between gradients stay as they are.

        Raises:
            FrameError: `payload` is damaged or belongs to another bulk.
        """
        dtype = self._check(out, "out")
        alpha = tensors.factor(alpha)
        payload = tensors.checked_payload(payload)
        if payload.numel() != self.wire_bytes:
            raise FrameError(
                f"the frame has {payload.numel()} bytes; this bulk needs {self.wire_bytes}."
            )
        if payload.device != out.device:
            raise UsageError(f"the payload is on {payload.device}, out on {out.device}; move one.")
        key = call_key(out.device, (payload, out), None, "decode", add, alpha)
        if started_again(self.replays, key, out.device):
            return out
        if self.codec.runs_on_gpu(out):
            self.codec.gpu(dtype).decode_bulk(self, payload, out, add=add, alpha=alpha, key=key)
        else:
            self._decode_each(payload, out, add=add, alpha=alpha)
        return out

    @cached_property
    def header(self) -> torch.Tensor:
        """Header and table of the frame."""
        whole = torch.zeros(self.wire_bytes, dtype=torch.uint8)
        bodies = list(map(frame.Body, self.numels, self._bodies))
        header = frame.Header(codec_hash=self.codec.codec_hash)
        frame.write_header(whole.numpy(), header, bodies)
        return whole[: frame.frame_bytes([0] * len(bodies))].clone()

    @cached_property
    def places(self) -> list[int]:
        """Where each body starts in the frame."""
        return list(accumulate(self._bodies[:-1], initial=self.header.numel()))

    def _check(self, flat: torch.Tensor, what: str) -> str:
        if not isinstance(flat, torch.Tensor):
            raise UsageError(
                f"{what} is a {type(flat).__name__}; a bulk takes one tensor with all gradients: "
                "flat = torch.zeros(bulk.numel), filled through bulk.views(flat)."
            )
        dtype = tensors.storage(flat, what)
        if flat.numel() != self.numel or flat.dim() != 1 or not flat.is_contiguous():
            raise UsageError(
                f"{what} has {flat.numel()} elements; this bulk needs one dimension of "
                f"{self.numel}: torch.zeros(bulk.numel), filled through bulk.views."
            )
        return dtype

    # On a CPU, where launches cost nothing, one gradient after the other.

    def _encode_each(
        self,
        dtype: str,
        flat: torch.Tensor,
        held: Sequence[torch.Tensor],
        state: State | None,
        out: torch.Tensor,
    ) -> None:
        draws = state is not None and self.codec.random
        step = int(state["step"]) if state is not None and draws else 0
        out[: self.header.numel()] = self.header
        out[8:16].view(torch.int64).fill_(step)
        flagged = False
        for k, (at, n) in enumerate(zip(self.offsets, self.numels, strict=True)):
            rng = (0, 0, 0)
            if state is not None and draws:
                rng = (int(state["seed"][k]), int(state["stream"][k]), step)
            body = out[self.places[k] : self.places[k] + self._bodies[k]]
            states = [h[at : at + n] for h in held]
            flagged |= self.codec.encode_body(
                dtype, flat[at : at + n], body, states, rng, lr_ratio(state)
            )
        if flagged:
            frame.set_flag(out.numpy(), frame.FLAG_NONFINITE)

    def _decode_each(
        self, payload: torch.Tensor, out: torch.Tensor, *, add: bool, alpha: float
    ) -> None:
        header, bodies = frame.read_frame(payload.numpy(), codec_hash=self.codec.codec_hash)
        if tuple(body.numel for body in bodies) != self.numels:
            raise FrameError("the frame holds other gradients than this bulk; send it again.")
        for view, body in zip(self.views(out), bodies, strict=True):
            if header.nonfinite:
                view.fill_(float("nan"))
                continue
            part = payload[body.offset : body.offset + body.num_bytes]
            self.codec.decode_body(part, view, add=add, alpha=alpha)


def _checked(numels: Iterable[int]) -> tuple[int, ...]:
    """Returns the numbers of elements; refuses what is not a list of them."""
    if not isinstance(numels, Iterable) or isinstance(numels, torch.Tensor | str):
        raise UsageError(
            f"bulk was given a {type(numels).__name__}; it takes the number of elements of each "
            "gradient, e.g. codec.bulk([p.numel() for p in model.parameters()])."
        )
    found = tuple(tensors.integer(n, f"bulk: numels[{k}]") for k, n in enumerate(numels))
    if not 1 <= len(found) <= frame.MAX_BODIES:
        raise UsageError(
            f"bulk was given {len(found)} gradients; it takes 1 to {frame.MAX_BODIES}."
        )
    for k, numel in enumerate(found):
        if numel < 1:
            raise UsageError(
                f"bulk: numels[{k}] is {numel}; each gradient must have at least one element, "
                "leave the others out."
            )
    return found
