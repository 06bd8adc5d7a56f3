"""Frames: the layout is fixed, every refusal has its sentence, and no bytes get past the checks."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipress import errors
from hipress.codecs import frame
from hipress.codecs.frame import (
    ALIGN,
    ENTRY_BYTES,
    FLAG_NONFINITE,
    HEADER_BYTES,
    MAX_BODIES,
    MAX_NUMEL,
    Body,
    BodyView,
    Header,
    align,
    frame_bytes,
    read_frame,
    read_single,
    set_flag,
    write_header,
)
from hipress.errors import FrameError, HipressError

HEADER = Header(
    codec_hash=0x0123456789ABCDEF,
    plan_epoch=3,
    sender=2,
    step=0x1122334455,
    first_gradient=7,
    first_partition=1,
)
GOLDEN = bytes.fromhex(
    "48695046"  # magic
    "0100"  # version
    "0000"  # flags
    "5544332211000000"  # step
    "f9a7b235"  # check
    "02000000"  # num_bodies
    "efcdab8967452301"  # codec_hash
    "8000000000000000"  # total_bytes
    "03000000"  # plan_epoch
    "02000000"  # sender
    "07000000"  # first_gradient
    "01000000"  # first_partition
    "0000000000000000"  # reserved
    "6400000000000000" "2000000000000000"  # body 0: 100 elements, 32 bytes
    "0000000000000000" "0000000000000000"  # body 1: empty
)  # fmt: skip


def make(bodies: list[Body], header: Header = HEADER) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A frame whose bodies are filled with 0xA5."""
    frame = np.full(frame_bytes([body.body_bytes for body in bodies]), 0xA5, dtype=np.uint8)
    write_header(frame, header, bodies)
    return frame


def forge(
    entries: tuple[tuple[int, int], ...] = ((100, 32),), size: int = 112, **fields: int
) -> bytes:
    """A frame written from the documented layout alone, with a right check and any field wrong."""
    named = {
        "version": 1, "flags": 0, "step": 5, "num_bodies": len(entries), "codec_hash": 9,
        "total_bytes": size, "plan_epoch": 0, "sender": 0, "first_gradient": 0,
        "first_partition": 0, "reserved": 0, **fields,
    }  # fmt: skip
    head = struct.pack("<4sHHQ", b"HiPF", named["version"], named["flags"], named["step"])
    rest = struct.pack(
        "<IQQIIIIQ",
        *(named[name] for name in ("num_bodies", "codec_hash", "total_bytes", "plan_epoch")),
        *(named[name] for name in ("sender", "first_gradient", "first_partition", "reserved")),
    )
    rest += b"".join(struct.pack("<QQ", *entry) for entry in entries)
    whole = head + struct.pack("<I", fields.get("check", zlib.crc32(rest))) + rest
    return whole + bytes(max(0, size - len(whole)))


def refusal(frame: Any, **options: Any) -> str:
    """The sentence with which read_frame, and read_single too, refuse a frame."""
    with pytest.raises(FrameError) as first:
        read_frame(frame, **options)
    with pytest.raises(FrameError) as second:
        read_single(frame, **options)
    assert str(first.value) == str(second.value)
    return str(first.value)


# --- what is written -----------------------------------------------------------------------------


def test_golden_bytes() -> None:
    frame = make([Body(100, 32), Body(0, 0)])
    assert frame.tobytes() == GOLDEN + b"\xa5" * 32


def test_documented_layout_reads_back() -> None:
    header, body = read_single(forge(sender=4, flags=1), 9)
    assert header == Header(codec_hash=9, step=5, sender=4, flags=FLAG_NONFINITE)
    assert body == BodyView(numel=100, offset=80, num_bytes=32)


def test_constants() -> None:
    assert (HEADER_BYTES, ENTRY_BYTES, ALIGN, FLAG_NONFINITE) == (64, 16, 16, 1)
    assert [align(n) for n in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
    assert frame_bytes([]) == 64
    assert frame_bytes([32, 0]) == 128


@given(
    st.lists(
        st.builds(Body, st.integers(0, MAX_NUMEL - 1), st.sampled_from(range(0, 112, 16))),
        min_size=1, max_size=40,
    ),
    st.builds(
        Header,
        codec_hash=st.integers(0, 2**64 - 1), plan_epoch=st.integers(0, 2**32 - 1),
        sender=st.integers(0, 2**32 - 1), step=st.integers(0, 2**64 - 1),
        first_gradient=st.integers(0, 2**32 - 1), first_partition=st.integers(0, 2**32 - 1),
        flags=st.sampled_from([0, FLAG_NONFINITE]),
    ),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_round_trip(bodies: list[Body], header: Header) -> None:
    frame = make(bodies, header)
    found, views = read_frame(frame, codec_hash=header.codec_hash)
    assert found == header
    assert [(view.numel, view.num_bytes) for view in views] == bodies
    offset = HEADER_BYTES + ENTRY_BYTES * len(bodies)
    for view in views:
        assert view.offset == offset and offset % ALIGN == 0
        offset += view.num_bytes
    assert offset == frame.size
    assert (frame[HEADER_BYTES + ENTRY_BYTES * len(bodies) :] == 0xA5).all()
    if len(bodies) == 1:
        assert read_single(frame, header.codec_hash) == (header, views[0])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.asarray])
def test_reads_any_bytes(kind: Any) -> None:
    frame = make([Body(100, 32)])
    source = frame if kind is np.asarray else kind(frame.tobytes())
    assert read_frame(source) == (HEADER, (BodyView(100, 80, 32),))


def test_writes_any_buffer() -> None:
    buffer = bytearray(112)
    write_header(memoryview(buffer), HEADER, [Body(100, 32)])
    assert bytes(buffer[:80]) == make([Body(100, 32)])[:80].tobytes()


def test_flag_in_place() -> None:
    frame = make([Body(100, 32)])
    assert read_frame(frame)[0].flags == 0
    set_flag(frame, FLAG_NONFINITE)
    set_flag(frame, FLAG_NONFINITE)
    assert read_frame(frame)[0].flags == FLAG_NONFINITE
    header, _ = read_single(frame, HEADER.codec_hash)
    assert header.nonfinite and not HEADER.nonfinite
    write_header(frame, HEADER, [Body(100, 32)])
    assert read_frame(frame)[0].flags == 0


def test_numpy_integers_are_integers() -> None:
    four: Any = np.int64(4)
    frame = make([Body(four, 4 * four)], Header(codec_hash=1, step=four))
    assert read_frame(frame) == (Header(codec_hash=1, step=4), (BodyView(4, 80, 16),))


def test_imports_no_torch() -> None:
    # A fresh interpreter with torch barred: what sits in this one's sys.modules proves nothing.
    script = (
        "import sys, types; sys.modules['torch'] = None\n"
        "package = types.ModuleType('hipress'); package.__path__ = [sys.argv[1]]\n"
        "codecs = types.ModuleType('hipress.codecs'); codecs.__path__ = [sys.argv[1] + '/codecs']\n"
        "sys.modules.update({'hipress': package, 'hipress.codecs': codecs})\n"
        "import hipress.codecs.frame, hipress.codecs.expression\n"
    )
    root = str(Path(errors.__file__).parent)
    subprocess.run([sys.executable, "-c", script, root], check=True, timeout=60)


# --- what is refused -----------------------------------------------------------------------------


def test_error_is_both() -> None:
    assert issubclass(FrameError, HipressError) and issubclass(FrameError, ValueError)


@pytest.mark.parametrize("size", [0, 1, 63])
def test_shorter_than_header(size: int) -> None:
    assert refusal(GOLDEN[:size]) == (
        f"frame is {size} bytes, shorter than its 64-byte header: it was cut short or is no frame; "
        "pass all bytes that encode returned."
    )


def test_foreign() -> None:
    assert refusal(b"\x89PNG" + GOLDEN[4:]) == (
        "frame starts with b'\\x89PNG' and not with b'HiPF': HiPress did not write it; "
        "pass the bytes that encode returned."
    )


def test_newer_version() -> None:
    assert refusal(forge(version=2)) == (
        "frame has version 2 and this rank reads version 1: it was written by a newer HiPress; "
        "upgrade this rank."
    )


def test_version_zero() -> None:
    assert refusal(forge(version=0)) == (
        "frame has version 0 and this rank reads version 1: no HiPress wrote that; encode it again."
    )


def test_unknown_flag() -> None:
    assert refusal(forge(flags=0x8003)) == (
        "frame has flags 0x8003, of which 0x8002 are unknown in version 1; send it again."
    )


def test_reserved() -> None:
    assert refusal(forge(reserved=1 << 56)) == (
        "frame has reserved bytes 0x0100000000000000, which are 0 in version 1; send it again."
    )


def test_other_codec() -> None:
    assert refusal(forge(), codec_hash=0xABC) == (
        "frame has codec hash 0x0000000000000009 and this rank expects 0x0000000000000abc: it was "
        "written by another codec or with other parameters; give every rank the same codec."
    )


def test_any_codec_when_not_asked() -> None:
    assert read_single(forge())[0].codec_hash == 9


@pytest.mark.parametrize("count", [0, MAX_BODIES + 1, 2**32 - 1])
def test_absurd_count(count: int) -> None:
    assert refusal(forge(num_bodies=count)) == (
        f"frame claims {count} bodies, outside 1 to 1048576: it is damaged; send it again."
    )


def test_table_larger_than_frame() -> None:
    assert refusal(forge(num_bodies=MAX_BODIES)) == (
        "frame claims 1048576 bodies, whose table does not fit in its 112 bytes: it is damaged; "
        "send it again."
    )


def test_truncated() -> None:
    assert refusal(forge()[:-1]) == "frame is cut short, 111 of 112 bytes; receive all of it."


def test_oversized() -> None:
    assert refusal(forge() + b"\0") == (
        "frame is oversized, 113 bytes where its header says 112; "
        "pass the frame without what follows it."
    )


def test_changed_after_writing() -> None:
    expected = zlib.crc32(forge()[20:80])
    assert refusal(forge(check=0)) == (
        f"frame has check 0x00000000 and its header and table give {expected:#010x}: they were "
        "changed after they were written; send it again."
    )


@pytest.mark.parametrize("numel", [2**40, 2**64 - 1])
def test_too_many_elements(numel: int) -> None:
    assert refusal(forge(((numel, 32),))) == (
        f"frame body 0 has {numel} elements, outside 0 to 1099511627775; "
        "cut the gradient into partitions."
    )


def test_misaligned_body() -> None:
    assert refusal(forge(((100, 33),), size=113)) == (
        "frame body 0 has 33 bytes, not a multiple of 16; pad it to align(...) bytes."
    )


@pytest.mark.parametrize("num_bytes", [0, 16, 48, 2**64 - 16])
def test_body_outside_frame(num_bytes: int) -> None:
    assert refusal(forge(((100, num_bytes),))) == (
        f"frame has bodies that end at byte {80 + num_bytes} and is 112 bytes long: "
        "its table is wrong; send it again."
    )


def test_body_sizes_do_not_wrap() -> None:
    # 2**63 + 2**63 + 16 is 16 in 64 bits.
    entries = ((1, 2**63), (1, 2**63), (1, 16))
    with pytest.raises(FrameError, match="bodies that end at byte 18446744073709551744"):
        read_frame(forge(entries, size=128))


def test_many_bodies_are_not_single() -> None:
    with pytest.raises(FrameError) as error:
        read_single(GOLDEN + bytes(32))
    assert (
        str(error.value) == "frame holds 2 bodies where one was expected; decode it with "
        "codec.bulk([...]).decode, or read it with read_frame."
    )


@pytest.mark.parametrize(
    "frame, shape",
    [
        (np.zeros((8, 16), np.uint8), "2 dimensions of 1-byte items, strides (16, 1)"),
        (np.zeros(128, np.float32), "1 dimensions of 4-byte items, strides (4,)"),
        (np.zeros(256, np.uint8)[::2], "1 dimensions of 1-byte items, strides (2,)"),
        (np.zeros((), np.uint8), "0 dimensions of 1-byte items, strides ()"),
    ],
)
def test_not_a_row_of_bytes(frame: Any, shape: str) -> None:
    sentence = f"frame has {shape}, not one contiguous row of bytes; give a 1-D uint8 array."
    assert refusal(frame) == sentence
    with pytest.raises(FrameError) as error:
        write_header(frame, HEADER, [Body(1, 16)])
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    "name, limit",
    [("codec_hash", 2**64), ("step", 2**64), ("plan_epoch", 2**32), ("sender", 2**32),
     ("first_gradient", 2**32), ("first_partition", 2**32), ("flags", 2)],
)  # fmt: skip
def test_header_ranges(name: str, limit: int) -> None:
    fields: dict[str, Any] = {"codec_hash": 0}
    Header(**{**fields, name: limit - 1})
    for value in (-1, limit, 0.5, None):
        with pytest.raises(FrameError) as error:
            Header(**{**fields, name: value})
        assert str(error.value) == (
            f"frame header field {name} is {value!r}, not an integer from 0 to {limit - 1}; "
            "give a value in that range."
        )


@pytest.mark.parametrize(
    "bodies, size, sentence",
    [
        ([], 64, "frame has 0 bodies to write, outside 1 to 1048576; "
                 "give at least one, and cut a longer list into several frames."),
        ([Body(1, 16)], 95, "frame buffer is 95 bytes where its bodies need 96; "
                            "give a buffer of frame_bytes(...) bytes."),
        ([Body(1, 16)], 97, "frame buffer is 97 bytes where its bodies need 96; "
                            "give a buffer of frame_bytes(...) bytes."),
        ([Body(1, 16), Body(1, 8)], 120, "frame body 1 has 8 bytes, not a multiple of 16; "
                                         "pad it to align(...) bytes."),
        ([Body(1, -16)], 64, "frame body 0 has -16 bytes, not a multiple of 16; "
                             "pad it to align(...) bytes."),
        ([Body(-1, 16)], 96, "frame body 0 has -1 elements, outside 0 to 1099511627775; "
                             "cut the gradient into partitions."),
    ],
)  # fmt: skip
def test_writer_refuses(bodies: list[Body], size: int, sentence: str) -> None:
    buffer = bytearray(size)
    with pytest.raises(FrameError) as error:
        write_header(buffer, HEADER, bodies)
    assert str(error.value) == sentence
    assert not any(buffer)


def test_read_only() -> None:
    writers: list[Callable[[Any], None]] = [
        lambda view: write_header(view, HEADER, [Body(1, 16)]),
        lambda view: set_flag(view, FLAG_NONFINITE),
    ]
    for write in writers:
        with pytest.raises(FrameError) as error:
            write(memoryview(bytes(96)))
        assert str(error.value) == "frame is read-only; give a buffer that can be written."


def test_flag_refusals() -> None:
    with pytest.raises(FrameError) as error:
        set_flag(bytearray(96), 2)
    assert str(error.value) == "flag 2 is unknown in frame version 1; set FLAG_NONFINITE (1)."
    with pytest.raises(FrameError, match="shorter than its 64-byte header"):
        set_flag(bytearray(63), FLAG_NONFINITE)


# --- what no bytes can do ------------------------------------------------------------------------


def read_or_refuse(data: bytes) -> bool:
    """Read any bytes; True if they are a frame. Nothing but FrameError, nothing out of bounds."""
    try:
        header, views = read_frame(data)
    except FrameError as error:
        assert str(error).endswith(".")
        with pytest.raises(FrameError):
            read_single(data)
        return False
    assert header.flags in (0, FLAG_NONFINITE)
    end = HEADER_BYTES + ENTRY_BYTES * len(views)
    for view in views:
        assert 0 <= view.numel < MAX_NUMEL
        assert view.offset == end and view.num_bytes % ALIGN == 0
        end += view.num_bytes
    assert end == len(data)
    return True


def test_every_single_bit_of_header_and_table() -> None:
    frame = make([Body(100, 32), Body(3, 16)]).tobytes()
    # Free to change: the non-finite flag and the step.
    free = {6 * 8, *range(8 * 8, 16 * 8)}
    for bit in range(8 * (HEADER_BYTES + 2 * ENTRY_BYTES)):
        data = bytearray(frame)
        data[bit // 8] ^= 1 << bit % 8
        assert read_or_refuse(bytes(data)) == (bit in free), bit


def test_every_truncation() -> None:
    frame = make([Body(100, 32), Body(3, 16)]).tobytes()
    assert [read_or_refuse(frame[:size]) for size in range(len(frame))] == [False] * len(frame)


@given(st.lists(st.tuples(st.integers(0, 127), st.integers(1, 255)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=500)
def test_byte_flips(flips: list[tuple[int, int]]) -> None:
    data = bytearray(GOLDEN + bytes(32))
    for position, change in flips:
        data[position] ^= change
    read_or_refuse(bytes(data))


@given(st.binary(min_size=1, max_size=200))
@settings(deadline=None, max_examples=300)
def test_extension(extra: bytes) -> None:
    assert not read_or_refuse(GOLDEN + bytes(32) + extra)


@given(st.binary(max_size=300), st.sampled_from([b"", b"HiPF", b"HiPF\1\0\0\0"]))
@settings(deadline=None, max_examples=500)
def test_random_bytes(data: bytes, start: bytes) -> None:
    assert not read_or_refuse(start + data)


NUMBER_64 = st.one_of(st.integers(0, 160), st.integers(0, 2**64 - 1))
NUMBER_32 = st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1))


@given(
    st.lists(st.tuples(NUMBER_64, st.one_of(st.integers(0, 4).map(lambda k: 16 * k), NUMBER_64)),
             max_size=6).map(tuple),
    st.integers(64, 240),
    st.fixed_dictionaries(
        {},
        optional={
            "version": st.integers(0, 3), "flags": st.integers(0, 3), "num_bodies": NUMBER_32,
            "total_bytes": NUMBER_64, "reserved": NUMBER_64, "sender": NUMBER_32,
        },
    ),
)  # fmt: skip
@settings(deadline=None, max_examples=1000)
def test_forged_fields_under_a_right_check(
    entries: tuple[tuple[int, int], ...], size: int, fields: dict[str, int]
) -> None:
    read_or_refuse(forge(entries, size, **fields))


# --- stamps ---------------------------------------------------------------------------------------

STAMP = frame.Stamp(step=2**40, plan_epoch=5, sender=3, first_gradient=7, first_partition=2)


@pytest.mark.parametrize("numels", [[10], [10, 20, 30]])
def test_a_stamp_changes_its_fields_alone(numels):
    """Catches: a stamp that leaves a wrong check, clears a flag, or moves another field."""
    bodies = [frame.Body(numel, 16) for numel in numels]
    data = bytearray(frame.frame_bytes([16] * len(bodies)))
    frame.write_header(data, frame.Header(codec_hash=11), bodies)
    frame.set_flag(data, frame.FLAG_NONFINITE)
    assert frame.other_stamp(data, STAMP) == frame.Stamp(0, 0, 0, 0, 0)
    frame.stamp(data, STAMP)
    assert frame.other_stamp(data, STAMP) is None
    header, found = frame.read_frame(data, codec_hash=11)
    assert header == frame.Header(codec_hash=11, flags=1, **STAMP._asdict())
    assert [body.numel for body in found] == numels


def test_a_frame_that_has_the_stamp_is_not_written_to():
    """Catches: a second send that writes to a frame while the first one reads it."""
    data = bytearray(frame.frame_bytes([0]))
    frame.write_header(data, frame.Header(codec_hash=1, **STAMP._asdict()), [frame.Body(0, 0)])
    data[16:20] = b"\0" * 4  # the check, which a stamp would write again
    frame.stamp(data, STAMP)
    assert data[16:20] == b"\0" * 4


@pytest.mark.parametrize("at", [0, 20, 44])
def test_a_damaged_header_is_not_taken_for_another_frame(at):
    """Catches: damage that is reported as a message of another rank."""
    data = bytearray(frame.frame_bytes([0]))
    frame.write_header(data, frame.Header(codec_hash=1, **STAMP._asdict()), [frame.Body(0, 0)])
    data[at] ^= 0xFF
    with pytest.raises(FrameError):
        frame.other_stamp(data, STAMP)
