"""Frames that no codec made: each is refused with its reason, or decodes to the right size.

CPU kernels check no bounds, so an index or a count that slips through writes into other memory.
What could do so also runs in a process of its own, see `damage`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path

import pytest
import torch

import hipress
from hipress.codecs.frame import Body, Header, frame_bytes, write_header
from hipress.compll.ir import MAX_NUMEL
from hipress.errors import FrameError
from tests.codecs.cases import BACKENDS, CASES, HEAD, QUICK, WIRE, Case, gaussian
from tests.grid import thinned

ROOT = Path(__file__).parents[2]
BY_EXPR = {c.expr: c for c in CASES}
TOPK = BY_EXPR["topk(ratio=0.1, exact=true, ef=false)"]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers are checked before any kernel runs: only what has a `backend` compiles one."""
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")


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

NUM_CASES = 50_000
"""Damaged frames for each backend, the same number of each codec."""


def in_a_process(*args: str) -> subprocess.CompletedProcess[str]:
    """Runs Python: a crash is then an exit status."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-X", "faulthandler", "-W", "error", *args]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("name", "num_cases"),
    thinned(itertools.product(BACKENDS, [10_000, NUM_CASES]), lambda cell: cell[1] < NUM_CASES),
)
def test_damaged_frames(name: str, num_cases: int) -> None:
    exprs = [case.expr for case in WIRE if num_cases == NUM_CASES or case.expr in QUICK]
    result = in_a_process("-m", "tests.codecs.damage", name, str(num_cases), *exprs)
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout)
    assert seen["cases"] == sum(seen[expr] for expr in exprs) >= num_cases
    assert all(seen[expr] >= num_cases // len(exprs) for expr in exprs)
    # Neither of the two answers hides the other.
    assert seen["refused"] + seen["decoded"] == seen["cases"]
    assert min(seen["refused"], seen["decoded"]) > 0.3 * seen["cases"]


def test_there_are_enough_damaged_frames() -> None:
    assert NUM_CASES * len(BACKENDS) >= 100_000


TOO_FAR = """
import ctypes
from tests.codecs.damage import Edge
edge = Edge(100)
assert ctypes.string_at(edge.end - 1, 1) == bytes(1)
print("still here", flush=True)
ctypes.string_at(edge.end, 1)
"""


def test_the_edge_of_memory_holds() -> None:
    result = in_a_process("-c", TOO_FAR)
    assert result.stdout == "still here\n"
    assert result.returncode == -signal.SIGSEGV


# --- counts and indices --------------------------------------------------------------------------

COUNT = "the frame is damaged: a count is larger than the room it was given; send it again."
INDEX = (
    "the frame is damaged: an index in the payload is out of range or out of order; send it again."
)
SPARSE = (TOPK, BY_EXPR["graddrop(ef=false)"], BY_EXPR["dgc(ratio=0.05, momentum=0)"])
every_sparse = pytest.mark.parametrize("case", SPARSE, ids=lambda c: c.expr)


@every_sparse
@pytest.mark.parametrize("more", [1, 2, 2**16, 2**31 - 11, 2**31, 2**32 - 11])
def test_count_out_of_range(case: Case, more: int, backend: str) -> None:
    payload = poke(frame(case, 100), HEAD, "<I", case.room(100) + more)
    assert refusal(case, payload, torch.zeros(100)) == COUNT


@every_sparse
@pytest.mark.parametrize("index", [100, 101, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("at", ["first", "last", "all"])
def test_index_out_of_range(case: Case, index: int, at: str, backend: str) -> None:
    payload, k, start = frame(case, 100), case.room(100), case.places(100)[1].start
    if at == "all":
        payload = poke(payload, start, f"<{k}I", *[index] * k)
    else:
        payload = poke(payload, start + (4 * (k - 1) if at == "last" else 0), "<I", index)
    assert refusal(case, payload, torch.zeros(100)) == INDEX


@every_sparse
@pytest.mark.parametrize("at", ["twice", "swapped"])
def test_index_out_of_order(case: Case, at: str, backend: str) -> None:
    """Catches: an index that comes twice, which a GPU would add at once and lose one of the two."""
    payload, start = frame(case, 1000), case.places(1000)[1].start
    a, b = struct.unpack_from("<2I", payload.numpy(), start)
    assert a < b
    swapped = poke(payload, start, "<2I", *((a, a) if at == "twice" else (b, a)))
    out = torch.zeros(1000)
    assert refusal(case, swapped, out) == INDEX
    assert not out.any()


@every_sparse
def test_frame_within_its_limits(case: Case, backend: str) -> None:
    # The last index, fewer than k, none, and an index past the count, which nobody reads.
    c, payload = hipress.codec(case.expr), frame(case, 100)
    k, last_index = case.room(100), case.places(100)[1].start + 4 * (case.room(100) - 1)
    last = poke(payload, last_index, "<I", 99)
    assert c.decode(last)[99] == case.parts(payload, 100)["value"][-1]
    assert torch.equal(c.decode(last), case.decoded(last, 100))
    none = poke(payload, HEAD, "<I", 0)
    assert not c.decode(none).any()
    fewer = poke(poke(payload, HEAD, "<I", k - 1), last_index, "<I", 2**32 - 1)
    assert torch.equal(c.decode(fewer), case.decoded(fewer, 100))


@every_sparse
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_refused_frame_leaves_out_as_it_was(case: Case, at: str, backend: str) -> None:
    # Or one damaged frame would spoil the sum of the good ones that came before it.
    payload, k = frame(case, 130), case.room(130)
    place = case.places(130)[1].start + 4 * (k - 1 if at == "last" else 0)
    acc = gaussian(130, seed=1)
    before = acc.clone()
    with pytest.raises(FrameError):
        hipress.codec(case.expr).decode(poke(payload, place, "<I", 130), out=acc, add=True)
    assert torch.equal(acc, before)


@pytest.mark.parametrize("key", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("n", [1, 7, 100, 4097])
def test_any_key_of_randomk_stays_inside(key: int, n: int, backend: str) -> None:
    case = BY_EXPR["randomk(ratio=0.1, ef=false)"]
    payload = poke(frame(case, n), HEAD, "<I", key)
    decoded = hipress.codec(case.expr).decode(payload)
    assert torch.equal(decoded, case.decoded(payload, n))
    assert decoded.count_nonzero() == case.room(n)


def test_minmax_of_another_width(backend: str) -> None:
    case = BY_EXPR["minmax(bits=2)"]
    for width in (0, 1, 4, 8, 255):
        message = refusal(case, poke(frame(case, 100), HEAD, "<B", width), torch.zeros(100))
        assert message.startswith("the frame is damaged: ")
        assert message.endswith("; send it again.")


# --- header and table, as codecs see them --------------------------------------------------------


@pytest.mark.parametrize("case", WIRE, ids=lambda c: c.expr)
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


@pytest.mark.parametrize("case", WIRE, ids=lambda c: c.expr)
def test_every_header_byte_counts(case: Case) -> None:
    # All but flags and step, which stand outside the check.
    c, payload = hipress.codec(case.expr), frame(case, 7)
    for at in [*range(6), *range(16, HEAD)]:
        hurt = payload.clone()
        hurt[at] ^= 0x10
        with pytest.raises(FrameError):
            c.decode(hurt)


@pytest.mark.parametrize("n, numel", [(100, 101), (100, 10_000), (7, 0), (0, 7), (1, MAX_NUMEL)])
@pytest.mark.parametrize("case", WIRE, ids=lambda c: c.expr)
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
        "frame holds 2 bodies where one was expected; decode it with "
        "codec.bulk([...]).decode, or read it with read_frame."
    )


def test_every_codec_has_its_own_frames() -> None:
    hashes = {c.expr: hipress.codec(c.expr).codec_hash for c in WIRE}
    assert len(set(hashes.values())) == len(WIRE)
    for case in WIRE:
        payload = frame(case, 64)
        for other in WIRE:
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
        ("int8", "int8(block=64)"),
        ("int4", "int4(block=64)"),
        ("tbq", "tbq(tau=0.25)"),
        ("onebit", "onebit(means=2)"),
        ("dithering", "dithering(levels=3)"),
        ("dithering", "dithering(partition=natural)"),
        ("dithering", "dithering(norm=l2)"),
        ("graddrop", "graddrop(ratio=0.011)"),
        ("randomk", "randomk(ratio=0.011)"),
        ("blocktopk", "blocktopk(k=63)"),
        ("blocktopk", "blocktopk(bits=1)"),
        ("dgc", "dgc(ratio=0.0011)"),
    ],
)
def test_other_parameters(ours: str, theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")
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


@pytest.mark.parametrize("case", WIRE, ids=lambda c: c.expr)
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


@pytest.mark.parametrize("case", WIRE, ids=lambda c: c.expr)
def test_decode_leaves_the_frame_as_it_is(case: Case, backend: str) -> None:
    payload = frame(case, 130)
    before = payload.clone()
    hipress.codec(case.expr).decode(payload)
    assert torch.equal(payload, before)


@pytest.mark.parametrize("case", WIRE, ids=lambda c: c.expr)
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
