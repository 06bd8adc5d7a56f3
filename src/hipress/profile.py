"""A profile: the measured costs of links, codecs and a model's backward; frozen, with a version.

Work is in seconds of one core of the host, or of the GPU; the time of a message on its way is in
seconds of the clock. Every cost is an affine curve, with the distance of measured points from it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from hipress.errors import UsageError

VERSION = 2
"""Version of written profiles; version 1 had no `needed_s`."""


def version_of(found: object, other: str = "") -> int:
    """Returns the version of a document before anything else of it is read: a newer one may have
    fields that would be refused. It is 0 if there is none, or if it is another kind of document.

    Args:
        found: The document's text, or its parsed content.
        other: A field that only another kind of document has.

    Example:
        >>> version_of('{"version": 3}'), version_of({"version": 2}), version_of("not JSON")
        (3, 2, 0)
    """
    if isinstance(found, str | bytes):
        try:
            found = from_json(found)
        except ValueError:
            return 0
    if not isinstance(found, dict) or other in found:
        return 0
    version = found.get("version")
    return version if isinstance(version, int) else 0


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Curve(_Value):
    """fixed + slope * x.

    Example:
        >>> curve = Curve.fit([(0, 1.0), (10, 2.0), (20, 3.0)])
        >>> round(curve.at(40), 6), curve.error < 1e-9
        (5.0, True)
    """

    fixed: float = Field(ge=0)
    slope: float = Field(ge=0)
    error: float = Field(default=0.0, ge=0)
    """The median distance of points from the curve, as a share of their value."""

    def at(self, x: float) -> float:
        """Returns the value for x."""
        return self.fixed + self.slope * x

    @classmethod
    def fit(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Fits a curve by least squares of the *relative* error: small x count as much as large.

        Neither part is negative: a curve that would start below zero starts at zero.
        """
        found = [(1.0 / max(float(y), 1e-12) ** 2, float(x), float(y)) for x, y in points]
        total = sum(w for w, _, _ in found)
        mean_x = sum(w * x for w, x, _ in found) / total
        mean_y = sum(w * y for w, _, y in found) / total
        spread = sum(w * (x - mean_x) ** 2 for w, x, _ in found)
        shared = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in found)
        slope = max(shared / spread, 0.0) if spread > 0 else 0.0
        fixed = mean_y - slope * mean_x
        if fixed < 0:
            slope = sum(w * x * y for w, x, y in found) / sum(w * x * x for w, x, _ in found)
            fixed = 0.0
        errors = [abs(fixed + slope * x - y) / max(y, 1e-12) for _, x, y in found]
        return cls(fixed=fixed, slope=slope, error=statistics.median(errors))


class CodecCosts(_Value):
    """The costs of one codec on one kind of device; x is a number of elements."""

    codec: str
    encode: Curve
    """Work to encode a worker's gradient into a frame and to update its state."""
    decode: Curve
    """Work to decode the frame with the mean into the gradient."""
    add: Curve
    """Work to add one worker's frame to a sum."""
    back: Curve
    """Work to encode the mean into the frame that is sent back."""
    wire: Curve
    """Bytes of a worker's frame."""
    back_wire: dict[int, Curve] = Field(min_length=1)
    """Bytes of the frame that is sent back, by the number of workers whose mean is in it."""
    chunk_numel: int = Field(
        ge=1,
        validation_alias=AliasChoices("piece_numel", "chunk_numel"),
        serialization_alias="piece_numel",  # the key of the file format
    )
    """Elements of a chunk, as the engine cuts them on this device."""
    bulk: bool
    """Whether small gradients share frames."""
    codes_local: bool
    """Whether a rank's own gradient passes its codec before a ring merges it."""
    error: float = 0.0
    """The error of a message of normal noise, as a share of its norm, without error feedback."""

    def back_bytes(self, numel: float, num_workers: int) -> float:
        """Returns the bytes of the frame with the mean of some workers, interpolated between known
        numbers of them."""
        known = sorted(self.back_wire)
        place = bisect_left(known, num_workers)
        if place == len(known):
            return self.back_wire[known[-1]].at(numel)
        above = known[place]
        if above == num_workers or place == 0:
            return self.back_wire[above].at(numel)
        below = known[place - 1]
        share = (num_workers - below) / (above - below)
        low, high = self.back_wire[below].at(numel), self.back_wire[above].at(numel)
        return low + share * (high - low)


class Pair(_Value):
    """The link from one rank to another while no other link is used."""

    sender: int
    receiver: int
    latency_s: float = Field(ge=0)
    bytes_per_s: float = Field(gt=0)
    error: float = 0.0


class Network(_Value):
    """How ranks reach each other."""

    hosts: tuple[int, ...] = Field(min_length=1)
    """The host of each rank."""
    latency_s: float = Field(ge=0)
    """Seconds from the send of an empty message to its arrival."""
    bytes_per_s: float = Field(gt=0)
    """Bytes per second that each rank sends, and receives, while all ranks do."""
    rate_bits: int | None = Field(default=None, gt=0)
    """Nominal bits per second of the link; None if they are not known."""
    error: float = 0.0
    """The error of the latency and the bytes per second, as a share."""
    local_bytes_per_s: float | None = Field(default=None, gt=0)
    """The same between ranks of one host, if hosts have several."""
    message_work_s: float = Field(default=0.0, ge=0)
    """Work of both hosts to send a message and to receive it."""
    byte_work_s: float = Field(default=0.0, ge=0)
    """Work of both hosts for each byte; it has priority over other work."""
    all_reduce: Curve
    """Seconds of the transport's own all-reduce of x bytes while nothing else is under way."""
    all_gather: Curve | None = None
    """Seconds of an all-gather of x bytes from each rank."""
    pairs: tuple[Pair, ...] = ()
    """Each link by itself, for people, e.g. to find a slow host."""

    @property
    def num_ranks(self) -> int:
        """N."""
        return len(self.hosts)


class Machine(_Value):
    """The hardware that ranks compute on."""

    name: str = ""
    """The name of the CPU or GPU."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    cores: float = Field(gt=0)
    """Cores of the host, which its ranks share."""
    num_ranks: int = Field(ge=1)
    """Ranks that share the host."""
    num_device_ranks: int = Field(default=1, ge=1)
    """Ranks that share one GPU."""
    exchange_threads: int = Field(default=1, ge=1)
    """Threads of each rank that encode and decode."""


class GradientProfile(_Value):
    """One gradient."""

    name: str
    numel: int = Field(ge=0)
    dims: int = Field(default=2, ge=0)
    ready_s: float = Field(ge=0)
    """Work of backward before the gradient is ready."""
    needed_s: float | None = Field(default=None, ge=0)
    """Work of the forward pass before the parameter is first used; None if it is not known."""
    errors: dict[str, float] = Field(default_factory=dict)
    """By codec, the error of one message of this gradient, as a share of its norm."""


class ModelProfile(_Value):
    """One training step without any exchange, all ranks busy at once."""

    name: str = ""
    batch: int | None = None
    """Examples per rank and step."""
    element_bytes: int = Field(default=4, ge=1)
    forward_s: float = Field(ge=0)
    """Work before backward begins."""
    backward_s: float = Field(ge=0)
    """Work of the whole backward."""
    rest_s: float = Field(default=0.0, ge=0)
    """Work after backward: the optimizer, and all before the next forward."""
    threads: float = Field(default=1.0, gt=0)
    """Cores that the model can keep busy."""
    error: float = 0.0
    """How much steps differ from each other, as a share."""
    gradients: tuple[GradientProfile, ...]
    """The gradients, in the order in which backward computes them."""
    buckets: tuple[tuple[str, ...], ...] = ()
    """Names of the gradients of each DDP bucket, in its order; by DDP's defaults if empty."""
    bucket_mb: float | None = Field(default=None, gt=0)
    """Size of DDP's buckets in MiB; None stands for its default: 25, and 1 for the first."""

    @model_validator(mode="after")
    def _check_names(self) -> ModelProfile:
        names = [gradient.name for gradient in self.gradients]
        if twice := _twice(names):
            raise ValueError(f"gradient {twice!r} is there twice")
        if not self.buckets:
            return self
        held = [name for bucket in self.buckets for name in bucket]
        if not all(self.buckets):
            raise ValueError("a bucket is empty")
        if twice := _twice(held):
            raise ValueError(f"gradient {twice!r} is in two places of the buckets")
        if unknown := [name for name in held if name not in set(names)]:
            raise ValueError(f"a bucket holds {unknown[0]!r}, which is no gradient")
        if missing := [name for name in names if name not in set(held)]:
            raise ValueError(f"gradient {missing[0]!r} is in no bucket")
        return self

    @property
    def num_elements(self) -> int:
        """The number of elements of all gradients."""
        return sum(gradient.numel for gradient in self.gradients)

    def needed_s_of(self, gradient: GradientProfile) -> float:
        """Returns the work of the forward pass before a parameter is first used.

        Where it was not measured, the forward pass is taken for the mirror image of backward.
        """
        if gradient.needed_s is not None:
            return min(gradient.needed_s, self.forward_s)
        last_s = max(one.ready_s for one in self.gradients)
        share = gradient.ready_s / last_s if last_s > 0 else 1.0
        return self.forward_s * (1 - share)


class Profile(_Value):
    """All measurements on one cluster, for at most one model."""

    version: int = Field(default=VERSION, ge=1)
    made: str = ""
    """When, where and with which versions it was made, for people."""
    machine: Machine
    network: Network
    codecs: tuple[CodecCosts, ...] = ()
    model: ModelProfile | None = None

    def codec(self, name: str) -> CodecCosts:
        """Returns the costs of a codec.

        Raises:
            UsageError: The codec was not measured.
        """
        for costs in self.codecs:
            if costs.codec == name:
                return costs
        known = ", ".join(costs.codec for costs in self.codecs) or "none at all"
        raise UsageError(
            f"codec {name!r} is not in the profile, which has {known}; measure it with "
            f"hipress profile --codecs {name!r}."
        )

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON."""
        Path(path).write_text(self.model_dump_json(indent=1, by_alias=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile from a file.

        Raises:
            UsageError: The file cannot be read, is no profile, or has a newer version.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"profile {str(path)!r} cannot be read ({error.strerror}); make one with "
                "hipress profile -o profile.json."
            ) from error
        return cls.parse(text, repr(str(path)))

    @classmethod
    def parse(cls, text: str | bytes, name: str = "given") -> Profile:
        """Reads a profile from its JSON text; `name` names it in errors."""
        version = version_of(text, other="gradients")
        if version > VERSION:
            raise UsageError(
                f"profile {name} has version {version} and this hipress reads up to {VERSION}; "
                "update hipress, or measure again."
            )
        try:
            # Fields that an older version lacks have their defaults now.
            return cls.model_validate_json(text).model_copy(update={"version": VERSION})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            why = first["msg"].removeprefix("Value error, ")
            content = text.encode() if isinstance(text, str) else text
            if b'"gradients"' in content and b'"network"' not in content:
                where, why = "the file", "this is a plan"
            raise UsageError(
                f"profile {name} is not a profile: {where}: {why}; make one with "
                "hipress profile -o profile.json."
            ) from error


def _twice(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
