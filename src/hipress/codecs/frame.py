"""The wire frame: one fixed header, a table of bodies, the bodies.

`encode` makes a frame of one body; the engine packs many small gradients into one frame. All
numbers are little-endian and unsigned.

    offset  bytes  field            rule
         0      4  magic            b"HiPF"
         4      2  version          1
         6      2  flags            bit 0: a gradient had NaN or Inf; every other bit is 0
         8      8  step             training step of the sender
        16      4  check            CRC-32 of bytes 20 .. 64 + 16 * num_bodies
        20      4  num_bodies       1 .. 2**20
        24      8  codec_hash       codec and parameter hash
        32      8  total_bytes      64 + 16 * num_bodies + sum of body_bytes
        40      4  plan_epoch       plan that cut the gradients
        44      4  sender           rank that wrote the frame
        48      4  first_gradient   gradient of the first body
        52      4  first_partition  partition of the first body
        56      8  reserved         0
        64     16  one entry per body:
                     8  numel       below 2**40
                     8  body_bytes  a multiple of 16, 0 allowed
       ...         the bodies, in table order, without gaps

Header, entries and bodies are multiples of 16 bytes, so each section starts 16-byte aligned
wherever the frame does.

Flags and step stand before the check and outside it: they change every step while the rest is
fixed by the plan, and a kernel can set them in place without computing a CRC. The check finds
mix-ups and torn writes; it is no defence against an attacker, which is why every length is also
compared with the bytes at hand.
"""

from __future__ import annotations

import operator
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex, TypeAlias

from hipress.errors import FrameError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Readable: TypeAlias = NDArray[np.uint8] | memoryview[Any] | bytes | bytearray
    Writable: TypeAlias = NDArray[np.uint8] | memoryview[Any] | bytearray

HEADER_BYTES = 64
ENTRY_BYTES = 16
"""Bytes of one entry of the body table."""
ALIGN = 16
"""Every section starts at, and every body_bytes is, a multiple of this."""
FLAG_NONFINITE = 1
"""Some gradient in the frame had NaN or Inf; decoding it gives NaN."""
MAGIC = b"HiPF"
VERSION = 1
"""The number of the layout above; any change to it takes the next one."""
MAX_BODIES = 2**20
"""Most bodies in one frame, so that a hostile table cannot fill memory with Python objects."""
MAX_NUMEL = 2**40
"""The number of elements of one body is below this."""

_HEADER = struct.Struct("<4sHHQIIQQIIIIQ")
_ENTRY = struct.Struct("<QQ")
_FLAGS = struct.Struct("<H")
_FLAGS_AT = 6
_CHECK = struct.Struct("<I")
_CHECK_AT = 16
_CHECKED_FROM = 20
_NUM_BODIES_AT = 20
_STEP = struct.Struct("<Q")
_STEP_AT = 8
_PLACE = struct.Struct("<IIII")
_PLACE_AT = 40
_KNOWN_FLAGS = FLAG_NONFINITE
_FIELDS = struct.Struct("<QQIIIIH")
_FIELD_LIMITS = {
    "codec_hash": 2**64,
    "step": 2**64,
    "plan_epoch": 2**32,
    "sender": 2**32,
    "first_gradient": 2**32,
    "first_partition": 2**32,
    "flags": _KNOWN_FLAGS + 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The fields of a frame's header; version, counts and sizes follow from the bodies."""

    codec_hash: int
    plan_epoch: int = 0
    sender: int = 0
    step: int = 0
    first_gradient: int = 0
    first_partition: int = 0
    flags: int = 0

    def __post_init__(self) -> None:
        # Packing applies all range rules at once, 0.3 us cheaper than field by field.
        try:
            _FIELDS.pack(
                self.codec_hash, self.step, self.plan_epoch, self.sender, self.first_gradient,
                self.first_partition, self.flags,
            )  # fmt: skip
        except struct.error:
            self._refuse_field()
        if self.flags & ~_KNOWN_FLAGS:
            self._refuse_field()

    def _refuse_field(self) -> NoReturn:
        for name, limit in _FIELD_LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, SupportsIndex) or not 0 <= operator.index(value) < limit:
                break
        raise FrameError(
            f"frame header field {name} is {value!r}, not an integer from 0 to {limit - 1}; "
            "give a value in that range."
        )

    @property
    def nonfinite(self) -> bool:
        """Whether a gradient in the frame had NaN or Inf."""
        return bool(self.flags & FLAG_NONFINITE)


class Stamp(NamedTuple):
    """The fields of a header that tell the frames of a job apart; the same as in `Header`."""

    step: int
    plan_epoch: int
    sender: int
    first_gradient: int
    first_partition: int


class Body(NamedTuple):
    """A body to be written: its number of elements and its padded size."""

    numel: int
    body_bytes: int


class BodyView(NamedTuple):
    """A body that was read: its number of elements and where it lies in the frame."""

    numel: int
    offset: int
    num_bytes: int


def align(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to a multiple of ALIGN."""
    return -(-num_bytes // ALIGN) * ALIGN


def frame_bytes(body_bytes: Sequence[int]) -> int:
    """Returns the size of a frame with bodies of these (aligned) sizes."""
    return HEADER_BYTES + ENTRY_BYTES * len(body_bytes) + sum(body_bytes)


def write_header(frame: Writable, header: Header, bodies: Sequence[Body]) -> None:
    """Writes header and table into `frame`, which must be exactly as long as the frame.

    The bytes of the bodies are left as they are, so they may be written before or after.
    """
    view = _view(frame, writable=True)
    total_bytes = _check_bodies(bodies)
    if len(view) != total_bytes:
        raise FrameError(
            f"frame buffer is {len(view)} bytes where its bodies need {total_bytes}; "
            "give a buffer of frame_bytes(...) bytes."
        )
    _HEADER.pack_into(
        view, 0, MAGIC, VERSION, header.flags, header.step, 0, len(bodies), header.codec_hash,
        total_bytes, header.plan_epoch, header.sender, header.first_gradient,
        header.first_partition, 0,
    )  # fmt: skip
    if len(bodies) == 1:
        _ENTRY.pack_into(view, HEADER_BYTES, *bodies[0])
    else:
        struct.pack_into(f"<{2 * len(bodies)}Q", view, HEADER_BYTES, *chain(*bodies))
    _CHECK.pack_into(view, _CHECK_AT, _crc(view, len(bodies)))


def read_frame(
    frame: Readable, *, codec_hash: int | None = None
) -> tuple[Header, tuple[BodyView, ...]]:
    """Checks a whole frame and returns its header and where its bodies lie.

    Args:
        frame: all bytes of the frame and no others.
        codec_hash: the hash the frame must carry; None takes any.

    Raises:
        FrameError: for any bytes that `write_header` and bodies could not have made.
    """
    view = _view(frame)
    header, num_bodies = _read_header(view, codec_hash)
    end = HEADER_BYTES + ENTRY_BYTES * num_bodies
    bodies: list[BodyView] = []
    for numel, num_bytes in _ENTRY.iter_unpack(view[HEADER_BYTES:end]):
        _check_entry(len(bodies), numel, num_bytes)
        bodies.append(BodyView(numel, end, num_bytes))
        end += num_bytes
    # Bodies lie without gaps, so this one comparison finds each body that leaves the frame.
    if end != len(view):
        raise _bad_end(end, len(view))
    return header, tuple(bodies)


def read_single(
    frame: Readable, codec_hash: int | None = None, num_bytes: int | None = None
) -> tuple[Header, BodyView]:
    """Checks a frame of one body, as `read_frame` does, and returns its header and that body.

    Args:
        frame: All bytes of the frame, or those before its body.
        codec_hash: The hash that the frame must carry; None takes any.
        num_bytes: The length of the whole frame where only its start is given.
    """
    view = _view(frame)
    total_bytes = len(view) if num_bytes is None else num_bytes
    header, num_bodies = _read_header(view, codec_hash, total_bytes)
    if num_bodies != 1:
        raise FrameError(
            f"frame holds {num_bodies} bodies where one was expected; decode it with "
            "codec.bulk([...]).decode, or read it with read_frame."
        )
    numel, body_bytes = _ENTRY.unpack_from(view, HEADER_BYTES)
    _check_entry(0, numel, body_bytes)
    offset = HEADER_BYTES + ENTRY_BYTES
    if offset + body_bytes != total_bytes:
        raise _bad_end(offset + body_bytes, total_bytes)
    return header, BodyView(numel, offset, body_bytes)


def set_flag(frame: Writable, flag: int) -> None:
    """Sets a flag of a written frame in place; `write_header` clears it."""
    if flag != FLAG_NONFINITE:
        raise FrameError(
            f"flag {flag!r} is unknown in frame version {VERSION}; "
            f"set FLAG_NONFINITE ({FLAG_NONFINITE})."
        )
    view = _view(frame, writable=True)
    if len(view) < HEADER_BYTES:
        raise _short(len(view))
    _FLAGS.pack_into(view, _FLAGS_AT, _FLAGS.unpack_from(view, _FLAGS_AT)[0] | flag)


def stamp(frame: Writable, fields: Stamp) -> None:
    """Sets the fields of a stamp in a written frame, in place, and computes its check again.

    A frame that has this stamp already is not written to, so it may be read meanwhile.
    """
    view = _view(frame, writable=True)
    num_bodies = _num_bodies(view)
    if _read_stamp(view) == fields:
        return
    step, *place = fields
    _STEP.pack_into(view, _STEP_AT, step)
    _PLACE.pack_into(view, _PLACE_AT, *place)
    _CHECK.pack_into(view, _CHECK_AT, _crc(view, num_bodies))


def other_stamp(frame: Readable, expected: Stamp) -> Stamp | None:
    """Returns the stamp of a frame if it is not the expected one.

    Raises:
        FrameError: The fields differ because the header is damaged.
    """
    view = _view(frame)
    _num_bodies(view)
    found = _read_stamp(view)
    if found == expected:
        return None  # whether the rest is intact is for the reader of the frame to check
    _read_header(view, None)
    return found


# `frame` is a Readable, which numpy's stubs do not declare a buffer before Python 3.12.
def _view(frame: Any, writable: bool = False) -> memoryview[Any]:
    view = memoryview(frame)
    if view.ndim != 1 or view.itemsize != 1 or not view.c_contiguous:
        raise FrameError(
            f"frame has {view.ndim} dimensions of {view.itemsize}-byte items, strides "
            f"{view.strides}, not one contiguous row of bytes; give a 1-D uint8 array."
        )
    if writable and view.readonly:
        raise FrameError("frame is read-only; give a buffer that can be written.")
    return view


def _crc(view: memoryview[Any], num_bodies: int) -> int:
    return zlib.crc32(view[_CHECKED_FROM : HEADER_BYTES + ENTRY_BYTES * num_bodies])


def _read_stamp(view: memoryview[Any]) -> Stamp:
    return Stamp(*_STEP.unpack_from(view, _STEP_AT), *_PLACE.unpack_from(view, _PLACE_AT))


def _num_bodies(view: memoryview[Any]) -> int:
    """Returns the number of bodies of a frame whose table lies within its bytes."""
    if len(view) >= HEADER_BYTES and view[:4] == MAGIC:
        num_bodies: int = _CHECK.unpack_from(view, _NUM_BODIES_AT)[0]
        if HEADER_BYTES + ENTRY_BYTES * num_bodies <= len(view):
            return num_bodies
    return _read_header(view, None)[1]  # raises and says what is wrong


def _read_header(
    view: memoryview[Any], codec_hash: int | None, num_bytes: int | None = None
) -> tuple[Header, int]:
    """Returns header and number of bodies; header and table are then known to be whole.

    Of the first bytes of a frame of `num_bytes`, what they hold of the two is checked.
    """
    num_bytes = len(view) if num_bytes is None else num_bytes
    if num_bytes < HEADER_BYTES:
        raise _short(num_bytes)
    (
        magic, version, flag_bits, step, check, num_bodies, found_hash, total_bytes, plan_epoch,
        sender, first_gradient, first_partition, reserved,
    ) = _HEADER.unpack_from(view)  # fmt: skip
    # The order matters: what the frame is, then how long it is (so that the bytes under the check
    # exist), then whether it is intact, and only then what its fields say.
    if magic != MAGIC:
        raise FrameError(
            f"frame starts with {magic!r} and not with {MAGIC!r}: HiPress did not write it; "
            "pass the bytes that encode returned."
        )
    if version != VERSION:
        newer = "it was written by a newer HiPress; upgrade this rank."
        unknown = "no HiPress wrote that; encode it again."
        raise FrameError(
            f"frame has version {version} and this rank reads version {VERSION}: "
            + (newer if version > VERSION else unknown)
        )
    if not 1 <= num_bodies <= MAX_BODIES:
        raise FrameError(
            f"frame claims {num_bodies} bodies, outside 1 to {MAX_BODIES}: it is damaged; "
            "send it again."
        )
    if num_bytes < total_bytes:
        raise FrameError(
            f"frame is cut short, {num_bytes} of {total_bytes} bytes; receive all of it."
        )
    if num_bytes > total_bytes:
        raise FrameError(
            f"frame is oversized, {num_bytes} bytes where its header says {total_bytes}; "
            "pass the frame without what follows it."
        )
    if HEADER_BYTES + ENTRY_BYTES * num_bodies > num_bytes:
        raise FrameError(
            f"frame claims {num_bodies} bodies, whose table does not fit in its {num_bytes} bytes: "
            "it is damaged; send it again."
        )
    is_whole = HEADER_BYTES + ENTRY_BYTES * num_bodies <= len(view)
    if is_whole and check != (expected := _crc(view, num_bodies)):
        raise FrameError(
            f"frame has check {check:#010x} and its header and table give {expected:#010x}: they "
            "were changed after they were written; send it again."
        )
    if flag_bits & ~_KNOWN_FLAGS:
        raise FrameError(
            f"frame has flags {flag_bits:#06x}, of which {flag_bits & ~_KNOWN_FLAGS:#06x} are "
            f"unknown in version {VERSION}; send it again."
        )
    if reserved:
        raise FrameError(
            f"frame has reserved bytes {reserved:#018x}, which are 0 in version {VERSION}; "
            "send it again."
        )
    if codec_hash is not None and found_hash != codec_hash:
        raise FrameError(
            f"frame has codec hash {found_hash:#018x} and this rank expects {codec_hash:#018x}: it "
            "was written by another codec or with other parameters; give every rank the same codec."
        )
    header = Header(
        codec_hash=found_hash,
        plan_epoch=plan_epoch,
        sender=sender,
        step=step,
        first_gradient=first_gradient,
        first_partition=first_partition,
        flags=flag_bits,
    )
    return header, num_bodies


def _check_entry(index: int, numel: int, num_bytes: int) -> None:
    if not 0 <= numel < MAX_NUMEL:
        raise FrameError(
            f"frame body {index} has {numel} elements, outside 0 to {MAX_NUMEL - 1}; "
            "cut the gradient into partitions."
        )
    if num_bytes < 0 or num_bytes % ALIGN:
        raise FrameError(
            f"frame body {index} has {num_bytes} bytes, not a multiple of {ALIGN}; "
            "pad it to align(...) bytes."
        )


def _check_bodies(bodies: Sequence[Body]) -> int:
    """Returns the size of a frame with these bodies."""
    if not 1 <= len(bodies) <= MAX_BODIES:
        raise FrameError(
            f"frame has {len(bodies)} bodies to write, outside 1 to {MAX_BODIES}; "
            "give at least one, and cut a longer list into several frames."
        )
    total_bytes = HEADER_BYTES + ENTRY_BYTES * len(bodies)
    for index, (numel, num_bytes) in enumerate(bodies):
        _check_entry(index, numel, num_bytes)
        total_bytes += num_bytes
    return total_bytes


def _short(num_bytes: int) -> FrameError:
    return FrameError(
        f"frame is {num_bytes} bytes, shorter than its {HEADER_BYTES}-byte header: it was cut "
        "short or is no frame; pass all bytes that encode returned."
    )


def _bad_end(end: int, num_bytes: int) -> FrameError:
    return FrameError(
        f"frame has bodies that end at byte {end} and is {num_bytes} bytes long: its table is "
        "wrong; send it again."
    )
