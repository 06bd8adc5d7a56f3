"""Frames that no codec made: each is refused with its reason, or decodes to the right size.

CPU kernels check no bounds, so an index or a count that slips through writes into other memory.
What could do so also runs in a process of its own: there a crash is a failure of one test.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hipress
from hipress.codecs.frame import Body, Header, frame_bytes, write_header
from hipress.compll.ir import MAX_NUMEL
from hipress.errors import FrameError, UsageError
from tests.codecs.cases import BACKENDS, CASES, HEAD, PLAIN, Case, gaussian

ROOT = Path(__file__).parents[2]
NUM_EXAMPLES = 1500
"""For each backend, and as many again in a process of its own."""
SMALL = (0, 1, 7, 64, 100, 130)
BY_EXPR = {c.expr: c for c in CASES}
TOPK = BY_EXPR["topk(ratio=0.1, exact=true, ef=false)"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HIPRESS_BACKEND", request.param)
    monkeypatch.setenv("HIPRESS_THREADS", "1")
    return str(request.param)


def frame(case: Case, n: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(_frame(case.plain, n)), dtype=torch.uint8)


@cache
def _frame(expr: str, n: int) -> bytes:
    c, x = hipress.codec(expr), gaussian(n)
    return c.encode(x, c.init(x)).numpy().tobytes()


def refusal(case: Case, payload: torch.Tensor, out: torch.Tensor | None = None) -> str:
    """The sentence with which decode, and decode that adds, refuse a frame."""
    c = hipress.codec(case.expr)
    with pytest.raises(FrameError) as first:
        c.decode(payload)
    acc = torch.zeros(1000) if out is None else out
    with pytest.raises(FrameError) as second:
        c.decode(payload, out=acc, add=True)
    assert str(first.value) == str(second.value)
    return str(first.value)


def signed(data: bytes) -> torch.Tensor:
    """A frame with the right check for whatever its header and table now say."""
    end = HEAD if len(data) >= HEAD else 64
    check = struct.pack("<I", zlib.crc32(data[20:end]))
    return torch.frombuffer(bytearray(data[:16] + check + data[20:]), dtype=torch.uint8)


def poke(payload: torch.Tensor, at: int, layout: str, *values: int | float) -> torch.Tensor:
    """A frame with some bytes replaced; the check is set right."""
    data = bytearray(payload.numpy().tobytes())
    struct.pack_into(layout, data, at, *values)
    return signed(bytes(data))


# --- any bytes -----------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Case, int, torch.Tensor]:
    """A codec, the number of elements of a frame of it, and that frame after some damage."""
    case, n = draw(st.sampled_from(PLAIN)), draw(st.sampled_from(SMALL))
    data = bytearray(_frame(case.plain, n))
    kind = draw(st.sampled_from(["cut", "longer", "flip", "flip body", "overwrite", "field"]))
    if kind == "cut":
        del data[draw(st.integers(0, len(data) - 1)) :]
    elif kind == "longer":
        data += draw(st.binary(min_size=1, max_size=40))
    elif kind == "overwrite":
        new = draw(st.binary(min_size=1, max_size=40))
        at = draw(st.integers(HEAD if len(data) > HEAD else 0, len(data) - 1))
        data[at : at + len(new)] = new[: len(data) - at]
    elif kind == "field":
        # One number of header or table, with the check made right again.
        at, size = draw(
            st.sampled_from([(6, 2), (8, 8), (20, 4), (24, 8), (32, 8), (40, 8), (56, 8), (64, 8),
                             (72, 8)])
        )  # fmt: skip
        top = 2 ** (8 * size) - 1
        value = draw(st.one_of(st.integers(0, 300), st.integers(0, top), st.just(top)))
        data[at : at + size] = value.to_bytes(size, "little")
        return case, n, signed(bytes(data))
    else:
        low = HEAD if kind == "flip body" and len(data) > HEAD else 0
        for bit in draw(st.lists(st.integers(8 * low, 8 * len(data) - 1), min_size=1, max_size=6)):
            data[bit // 8] ^= 1 << bit % 8
    return case, n, torch.tensor(list(data), dtype=torch.uint8)


def decodes_or_refuses(case: Case, n: int, payload: torch.Tensor) -> None:
    c = hipress.codec(case.expr)
    fences = [torch.full((n + 64,), 7.0) for _ in range(2)]
    outs = [fence[32 : 32 + n] for fence in fences]
    for out, add in zip(outs, (False, True), strict=True):
        try:
            assert c.decode(payload, out=out, add=add) is out
        except FrameError as error:
            assert str(error).endswith(".") and "\n" not in str(error)
        except UsageError as error:
            assert str(error).startswith(f"out has {n} elements; the frame holds ")
    for fence in fences:  # nothing is written beside `out`
        assert (fence[:32] == 7).all() and (fence[32 + n :] == 7).all()
    try:
        decoded = c.decode(payload)
    except FrameError:
        return
    # Only a frame whose table was changed, and signed again, may hold another number of elements.
    numel = struct.unpack_from("<Q", payload.numpy(), 64)[0]
    assert decoded.dtype == torch.float32 and decoded.shape == (numel,)


@pytest.mark.parametrize("name", BACKENDS)
def test_damaged_frames(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", name)
    monkeypatch.setenv("HIPRESS_THREADS", "1")
    check_damaged()


@given(damaged())
@settings(deadline=None, max_examples=NUM_EXAMPLES, derandomize=True, database=None)
def check_damaged(example: tuple[Case, int, torch.Tensor]) -> None:
    decodes_or_refuses(*example)


CHILD = """
import random, sys
import torch
from tests.codecs.cases import PLAIN, gaussian
from tests.codecs.test_frames_of_codecs import SMALL, decodes_or_refuses, frame, hostile_topk
dice = random.Random(int(sys.argv[1]))
for payload, n, case in hostile_topk():
    decodes_or_refuses(case, n, payload)
frames = [(case, n, frame(case, n)) for case in PLAIN for n in SMALL if n]
for i in range(int(sys.argv[2])):
    case, n, whole = frames[i % len(frames)]
    data = whole.clone()
    for _ in range(dice.choice((1, 2, 8))):
        value = dice.choice((0, 1, 127, 128, 255, dice.randrange(256)))
        data[dice.randrange(80, len(data))] = value
    decodes_or_refuses(case, n, data)
print("alive", i + 1)
"""


def test_damaged_bodies_never_crash_the_interpreter() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "HIPRESS_BACKEND": "cpu", "HIPRESS_THREADS": "1", "PYTHONPATH": path}
    child = [sys.executable, "-X", "faulthandler", "-W", "error", "-c", CHILD, "1", "6000"]
    result = subprocess.run(child, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, "alive 6000\n"), result.stderr[-3000:]


# --- topk: counts and indices --------------------------------------------------------------------

COUNT = "the frame is damaged: a count is larger than the room it was given; send it again."
INDEX = "the frame is damaged: an index in the payload is out of range; send it again."
K = TOPK.room(100)
_, INDICES, VALUES, _ = (place.start for place in TOPK.places(100))
BAD_COUNTS = (K + 1, K + 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
BAD_INDICES = (100, 101, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


def hostile_topk() -> list[tuple[torch.Tensor, int, Case]]:
    """Frames of 100 elements whose count or whose indices point outside."""
    found = []
    for case in (TOPK, BY_EXPR["topk(ef=false)"]):
        payload, k = frame(case, 100), case.room(100)
        indices = case.places(100)[1].start
        for count in (k + 1, *BAD_COUNTS):
            found.append((poke(payload, HEAD, "<I", count), 100, case))
        for index in BAD_INDICES:
            found.append((poke(payload, indices + 4 * (k - 1), "<I", index), 100, case))
            found.append((poke(payload, indices, f"<{k}I", *[index] * k), 100, case))
    return found


@pytest.mark.parametrize("count", BAD_COUNTS)
def test_topk_count_out_of_range(count: int, backend: str) -> None:
    assert refusal(TOPK, poke(frame(TOPK, 100), HEAD, "<I", count), torch.zeros(100)) == COUNT


@pytest.mark.parametrize("index", BAD_INDICES)
@pytest.mark.parametrize("place", [0, K - 1])
def test_topk_index_out_of_range(index: int, place: int, backend: str) -> None:
    payload = poke(frame(TOPK, 100), INDICES + 4 * place, "<I", index)
    assert refusal(TOPK, payload, torch.zeros(100)) == INDEX


def test_topk_frame_within_its_limits(backend: str) -> None:
    # The last index, fewer than k, none, and an index past the count, which nobody reads.
    c, payload = hipress.codec(TOPK.expr), frame(TOPK, 100)
    last = poke(payload, INDICES + 4 * (K - 1), "<I", 99)
    assert c.decode(last)[99] == TOPK.parts(payload, 100)["value"][-1]
    assert torch.equal(c.decode(last), TOPK.decoded(last, 100))
    none = poke(payload, HEAD, "<I", 0)
    assert not c.decode(none).any()
    fewer = poke(poke(payload, HEAD, "<I", K - 1), INDICES + 4 * (K - 1), "<I", 2**32 - 1)
    assert torch.equal(c.decode(fewer), TOPK.decoded(fewer, 100))


@pytest.mark.parametrize("expr", ["topk(ef=false)", TOPK.expr])
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_refused_frame_leaves_out_as_it_was(expr: str, at: str, backend: str) -> None:
    # Or one damaged frame would spoil the sum of the good ones that came before it.
    case = BY_EXPR[expr]
    payload, k = frame(case, 130), case.room(130)
    place = case.places(130)[1].start + 4 * (k - 1 if at == "last" else 0)
    acc = gaussian(130, seed=1)
    before = acc.clone()
    with pytest.raises(FrameError):
        hipress.codec(expr).decode(poke(payload, place, "<I", 130), out=acc, add=True)
    assert torch.equal(acc, before)


def test_minmax_of_another_width(backend: str) -> None:
    case = BY_EXPR["minmax(bits=2)"]
    for width in (0, 1, 4, 8, 255):
        message = refusal(case, poke(frame(case, 100), HEAD, "<B", width), torch.zeros(100))
        assert message.startswith("the frame is damaged: ")
        assert message.endswith("; send it again.")


# --- header and table, as codecs see them --------------------------------------------------------


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.expr)
def test_cut_and_longer(case: Case) -> None:
    payload = frame(case, 100)
    size = len(payload)
    assert refusal(case, payload[:-1]) == (
        f"frame is cut short, {size - 1} of {size} bytes; receive all of it."
    )
    assert refusal(case, payload[:63]) == (
        "frame is 63 bytes, shorter than its 64-byte header: it was cut short or is no frame; "
        "pass all bytes that encode returned."
    )
    assert refusal(case, torch.cat([payload, payload[:16]])) == (
        f"frame is oversized, {size + 16} bytes where its header says {size}; "
        "pass the frame without what follows it."
    )


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.expr)
def test_every_header_byte_counts(case: Case) -> None:
    # All but flags and step, which stand outside the check.
    c, payload = hipress.codec(case.expr), frame(case, 7)
    for at in [*range(6), *range(16, HEAD)]:
        hurt = payload.clone()
        hurt[at] ^= 0x10
        with pytest.raises(FrameError):
            c.decode(hurt)


@pytest.mark.parametrize("n, numel", [(100, 101), (100, 10_000), (7, 0), (0, 7), (1, MAX_NUMEL)])
@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.expr)
def test_number_of_elements_that_does_not_fit(case: Case, n: int, numel: int) -> None:
    have, need = case.wire_bytes(n) - HEAD, case.wire_bytes(numel) - HEAD
    if have == need:  # 100 and 101 codes of two bits fill the same bytes
        return
    c = hipress.codec(case.expr)
    assert refusal(case, poke(frame(case, n), 64, "<Q", numel)) == (
        f"the frame gives {have} bytes for {numel} elements; {c.name} needs {need}: "
        "it is damaged, send it again."
    )


@pytest.mark.parametrize("numel", [MAX_NUMEL + 1, 2**40 - 1, 2**40, 2**63, 2**64 - 1])
def test_number_of_elements_that_no_codec_takes(numel: int) -> None:
    case = BY_EXPR["none"]
    refusal(case, poke(frame(case, 7), 64, "<Q", numel))


def test_frame_of_two_bodies() -> None:
    c = hipress.codec("none")
    data = bytearray(frame_bytes([32, 32]))
    write_header(data, Header(codec_hash=c.codec_hash), [Body(7, 32), Body(7, 32)])
    assert refusal(BY_EXPR["none"], torch.frombuffer(data, dtype=torch.uint8)) == (
        "frame holds 2 bodies where one was expected; read it with read_frame."
    )


def test_every_codec_has_its_own_frames() -> None:
    hashes = {c.expr: hipress.codec(c.expr).codec_hash for c in PLAIN}
    assert len(set(hashes.values())) == len(PLAIN)
    for case in PLAIN:
        payload = frame(case, 64)
        for other in PLAIN:
            if other is not case:
                assert refusal(other, payload) == (
                    f"frame has codec hash {hashes[case.expr]:#018x} and this rank expects "
                    f"{hashes[other.expr]:#018x}: it was written by another codec or with other "
                    "parameters; give every rank the same codec."
                )


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("onebit", "onebit(block=64)"),
        ("minmax(bits=2)", "minmax(bits=4)"),
        ("topk(ratio=0.01)", "topk(ratio=0.011)"),
        ("terngrad(clip=2.5)", "terngrad(clip=2.0)"),
    ],
)
def test_other_parameters(ours: str, theirs: str) -> None:
    x = gaussian(64)
    writer, reader = hipress.codec(theirs), hipress.codec(ours)
    payload = writer.encode(x, writer.init(x))
    with pytest.raises(FrameError, match="written by another codec or with other parameters"):
        reader.decode(payload)


def test_parameters_that_say_the_same_share_frames() -> None:
    assert hipress.codec("topk").codec_hash == hipress.codec("topk(ratio=0.01)").codec_hash
    assert hipress.codec("terngrad").codec_hash == hipress.codec("terngrad(clip=2.5)").codec_hash
    assert hipress.codec("onebit").codec_hash == hipress.codec("onebit(ef=false)").codec_hash


# --- where the frame lies ------------------------------------------------------------------------


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.expr)
def test_frame_at_any_address(case: Case, backend: str) -> None:
    c, payload = hipress.codec(case.expr), frame(case, 130)
    expected = c.decode(payload)
    room = torch.zeros(len(payload) + 40, dtype=torch.uint8)
    for offset in range(1, 18):
        part = room[offset : offset + len(payload)]
        part.copy_(payload)
        assert torch.equal(c.decode(part), expected)
        acc = torch.ones(130)
        assert torch.equal(c.decode(part, out=acc, add=True), 1 + expected)
    spread = torch.zeros(2 * len(payload), dtype=torch.uint8)[::2]
    spread.copy_(payload)
    assert torch.equal(c.decode(spread), expected)


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.expr)
def test_decode_leaves_the_frame_as_it_is(case: Case, backend: str) -> None:
    payload = frame(case, 130)
    before = payload.clone()
    hipress.codec(case.expr).decode(payload)
    assert torch.equal(payload, before)


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.expr)
def test_out_at_any_address(case: Case, backend: str) -> None:
    # A gradient in a bucket starts on a multiple of 4 bytes, not of 16.
    c, payload = hipress.codec(case.expr), frame(case, 130)
    expected = c.decode(payload)
    for offset in (1, 2, 3):
        room = torch.full((140,), 7.0)
        c.decode(payload, out=room[offset : offset + 130])
        assert torch.equal(room[offset : offset + 130], expected)
        assert (room[:offset] == 7).all() and (room[offset + 130 :] == 7).all()
        x = torch.zeros(140)
        x[offset : offset + 130] = gaussian(130)
        view = x[offset : offset + 130]
        assert torch.equal(c.encode(view, c.init(view)), c.encode(gaussian(130), c.init(view)))
