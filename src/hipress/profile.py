"""A profile: what links, codecs and a model's backward cost, as measured; frozen, with a version.

Work is in seconds of one core of the host, or of the GPU; time that a message takes on its way is
in seconds of the clock. Every cost is an affine curve, with how far measured points lie from it.
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

VERSION = 1


def version_of(found: object, other: str = "") -> int:
    """The version that a document says it has, before anything else of it is read: a newer one may
    have fields that would be refused. 0 where it says none, and where it is another document.

    Args:
        found: Its text, or what that holds.
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
    """The median of what points lie beside the curve, as a share of their value."""

    def at(self, x: float) -> float:
        """The value for x."""
        return self.fixed + self.slope * x

    @classmethod
    def fit(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """The curve with the least squares of *relative* error: small x count as much as large.

        Neither part is negative: a curve that would start below zero starts at zero.
        """
        found = [(float(x), float(y)) for x, y in points]
        weights = [1.0 / max(y, 1e-12) ** 2 for _, y in found]
        total = sum(weights)
        mean_x = sum(w * x for w, (x, _) in zip(weights, found, strict=True)) / total
        mean_y = sum(w * y for w, (_, y) in zip(weights, found, strict=True)) / total
        spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, found, strict=True))
        shared = sum(
            w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, found, strict=True)
        )
        slope = max(shared / spread, 0.0) if spread > 0 else 0.0
        fixed = mean_y - slope * mean_x
        if fixed < 0:
            square = sum(w * x * x for w, (x, _) in zip(weights, found, strict=True))
            slope = sum(w * x * y for w, (x, y) in zip(weights, found, strict=True)) / square
            fixed = 0.0
        beside = [abs(fixed + slope * x - y) / max(y, 1e-12) for x, y in found]
        return cls(fixed=fixed, slope=slope, error=statistics.median(beside))


class CodecCosts(_Value):
    """What one codec costs on one kind of device; x is a number of elements."""

    codec: str
    encode: Curve
    """Work: a worker's gradient into a frame, its state brought up to date."""
    decode: Curve
    """Work: the frame of the way back into the gradient."""
    add: Curve
    """Work: one worker's frame added to a sum."""
    back: Curve
    """Work: the mean into the frame of the way back."""
    wire: Curve
    """Bytes of a worker's frame."""
    back_wire: dict[int, Curve] = Field(min_length=1)
    """Bytes of the frame of the way back, by the number of workers whose mean is in it."""
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
    """Of one message of normal noise, as a share of its norm, error feedback apart."""

    def back_bytes(self, numel: float, num_workers: int) -> float:
        """Bytes of the frame that holds the mean of some workers; between known numbers of them
        a straight line."""
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
    """The link from one rank to another, used by nobody else."""

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
    """From a send to its arrival, of an empty message."""
    bytes_per_s: float = Field(gt=0)
    """That each rank sends, and receives, while all do."""
    rate_bits: int | None = Field(default=None, gt=0)
    """Bits per second that the link is sold as, or shaped to; None where that is not known."""
    error: float = 0.0
    """Of the latency and the bytes per second, as a share."""
    local_bytes_per_s: float | None = Field(default=None, gt=0)
    """The same between ranks of one host, where hosts have several."""
    message_work_s: float = Field(default=0.0, ge=0)
    """Work on the host to send a message and to take it in, shared by both ends."""
    byte_work_s: float = Field(default=0.0, ge=0)
    """Work on the host for each byte sent and taken in; the network takes it before others do."""
    all_reduce: Curve
    """Seconds of the transport's own all-reduce of x bytes, with nothing else under way."""
    all_gather: Curve | None = None
    """Seconds of an all-gather of x bytes from each rank."""
    pairs: tuple[Pair, ...] = ()
    """Each link by itself; for people, and to see a slow host."""

    @property
    def num_ranks(self) -> int:
        """N."""
        return len(self.hosts)


class Machine(_Value):
    """What ranks compute on."""

    name: str = ""
    """Of the processor or GPU."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    cores: float = Field(gt=0)
    """Of the host, that ranks share."""
    num_ranks: int = Field(ge=1)
    """That share them."""
    num_device_ranks: int = Field(default=1, ge=1)
    """That share one GPU."""
    exchange_threads: int = Field(default=1, ge=1)
    """That encode and decode on each rank."""


class GradientProfile(_Value):
    """One gradient."""

    name: str
    numel: int = Field(ge=0)
    dims: int = Field(default=2, ge=0)
    ready_s: float = Field(ge=0)
    """Work of backward before it is there."""
    errors: dict[str, float] = Field(default_factory=dict)
    """By codec: of one message of this gradient, as a share of its norm."""


class ModelProfile(_Value):
    """One training step without any exchange, all ranks busy at once."""

    name: str = ""
    batch: int | None = None
    """Examples per rank and step."""
    element_bytes: int = Field(default=4, ge=1)
    forward_s: float = Field(ge=0)
    """Work before backward begins."""
    backward_s: float = Field(ge=0)
    """Work of backward, to its end."""
    rest_s: float = Field(default=0.0, ge=0)
    """Work behind backward: the optimizer, and what comes before the next forward."""
    threads: float = Field(default=1.0, gt=0)
    """Cores that the model keeps busy, if it gets them."""
    error: float = 0.0
    """How much a step differs from another, as a share."""
    gradients: tuple[GradientProfile, ...]
    """In the order in which backward makes them."""
    buckets: tuple[tuple[str, ...], ...] = ()
    """Names of gradients as DDP puts them together, in its order; by its defaults if empty."""
    bucket_mb: float | None = Field(default=None, gt=0)
    """Of DDP, in MiB; None is its default: 25, the first 1."""

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
        """Of all gradients."""
        return sum(gradient.numel for gradient in self.gradients)


class Profile(_Value):
    """All that was measured, on one cluster, for at most one model."""

    version: int = Field(default=VERSION, ge=1)
    made: str = ""
    """When, where and with which versions; for people."""
    machine: Machine
    network: Network
    codecs: tuple[CodecCosts, ...] = ()
    model: ModelProfile | None = None

    def codec(self, name: str) -> CodecCosts:
        """What a codec costs.

        Raises:
            UsageError: It was not measured.
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
        """Writes it as JSON."""
        Path(path).write_text(self.model_dump_json(indent=1, by_alias=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads one from a file.

        Raises:
            UsageError: There is no such file, it is no profile, or of a version this reader does
                not know.
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
        """Reads one from its JSON text; `name` names it in errors."""
        version = version_of(text, other="gradients")
        if version > VERSION:
            raise UsageError(
                f"profile {name} has version {version} and this hipress reads up to {VERSION}; "
                "update hipress, or measure again."
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            why = first["msg"].removeprefix("Value error, ")
            if b'"gradients"' in _bytes(text) and b'"network"' not in _bytes(text):
                where, why = "the file", "this is a plan"
            raise UsageError(
                f"profile {name} is not a profile: {where}: {why}; make one with "
                "hipress profile -o profile.json."
            ) from error


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _twice(names: Sequence[str]) -> str | None:
    """The first name that is there a second time."""
    return next((name for name, count in Counter(names).items() if count > 1), None)
