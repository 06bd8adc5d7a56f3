"""Lines are found whole however their bytes arrive, and a slow reader makes nobody wait."""

import asyncio
import os
import random

import pytest

from hipress.processes import pipes
from hipress.processes.pipes import MAX_LINE_BYTES, LineSplitter, TerminalLineSplitter

TEXT = b"one\ntwo\r\n\n\r10%\r20%\r\nend \xc3\xa9\nrest"
WANTED = [("one", "\n"), ("two", "\n"), ("", "\n"), ("10%", "\r"), ("20%", "\n")]
WANTED += [("end \u00e9", "\n"), ("rest", "\n")]


def test_lines_are_the_same_however_they_are_cut():
    generator = random.Random(0)
    for _ in range(200):
        lines, found, start = TerminalLineSplitter(), [], 0
        while start < len(TEXT):
            size = generator.randint(1, 8)
            found += lines.feed(TEXT[start : start + size])
            start += size
        assert found + lines.rest() == WANTED
        assert lines.rest() == []


def test_a_line_without_end_does_not_fill_the_memory():
    lines = TerminalLineSplitter()
    found = lines.feed(b"x" * (MAX_LINE_BYTES + 1)) + lines.feed(b"y\n")
    assert [len(text) for text, _ in found] == [MAX_LINE_BYTES + 1, 1]


def test_plain_lines_end_with_a_newline_only():
    lines = LineSplitter()
    assert lines.feed(b"one\r\ntw") == [b"one\r"]
    assert lines.feed(b"o\n\n10%\rrest") == [b"two", b""]
    assert lines.rest() == [b"10%\rrest"]
    assert lines.rest() == []


def test_the_last_read_takes_what_is_there_and_no_more(monkeypatch):
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb", buffering=0) as file:
        assert pipes.read_buffered(reader) == b""
        file.write(b"x" * 2500)
        reads = []
        # More comes at once whenever some is read.
        monkeypatch.setattr(
            pipes,
            "read_available",
            lambda fd: reads.append(0) or (b"x" * 1000 if len(reads) < 100 else b""),
        )
        assert len(pipes.read_buffered(reader)) == 3000


def test_a_writer_keeps_what_its_reader_does_not_take():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    data = os.urandom(3 * pipes.MAX_WAITING_BYTES)
    states = []

    async def write():
        out = pipes.PipeWriter(writer, lambda: states.append(out.is_full))
        out.write(data)
        assert out.is_full
        found = b""
        while len(found) < len(data):
            found += pipes.read_available(reader) or b""
            await asyncio.sleep(0)
        assert (found, out.is_empty, out.is_full, out.is_broken) == (data, True, False, False)
        os.close(reader)
        out.write(b"x")
        assert (out.is_empty, out.is_broken) == (True, True)

    pipes.run_loop(write())
    os.close(writer)
    assert sorted(set(states)) == [False, True]


def test_an_error_in_a_callback_is_raised():
    async def main():
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(60)

    with pytest.raises(ZeroDivisionError):
        pipes.run_loop(main())
