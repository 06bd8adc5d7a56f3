"""Lines are found whole however their bytes arrive, and messages among other text."""

import os
import random

from hipress.launch.lines import LONGEST_BYTES, Lines
from hipress.launch.protocol import pack, unpack
from hipress.launch.screen import Screen
from hipress.launch.streams import Stream

TEXT = b"one\ntwo\r\n\n\r10%\r20%\r\nend \xc3\xa9\nrest"
WANTED = [("one", "\n"), ("two", "\n"), ("", "\n"), ("10%", "\r"), ("20%", "\n")]
WANTED += [("end \u00e9", "\n"), ("rest", "\n")]


def test_lines_are_the_same_however_they_are_cut():
    generator = random.Random(0)
    for _ in range(200):
        lines, found, start = Lines(), [], 0
        while start < len(TEXT):
            size = generator.randint(1, 8)
            found += lines.feed(TEXT[start : start + size])
            start += size
        assert found + lines.rest() == WANTED
        assert lines.rest() == []


def test_a_line_without_end_does_not_fill_the_memory():
    lines = Lines()
    found = lines.feed(b"x" * (LONGEST_BYTES + 1)) + lines.feed(b"y\n")
    assert [len(text) for text, _ in found] == [LONGEST_BYTES + 1, 1]


def test_the_last_read_takes_what_is_there_and_no_more():
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb", buffering=0) as file:
        stream = Stream(reader, "stdout", None)
        assert stream.read_all() == b""
        file.write(b"x" * 2500)
        reads = []
        # More comes at once whenever some is read.
        stream.read = lambda: reads.append(0) or (b"x" * 1000 if len(reads) < 100 else b"")
        assert len(stream.read_all()) == 3000


def test_messages_are_told_from_other_text():
    message = {"is": "line", "text": "a\nb"}
    line = pack(message).rstrip(b"\n")
    assert unpack(line) == (b"", message)
    assert unpack(b"\x1b]0;title\x07" + line) == (b"\x1b]0;title\x07", message)
    assert pack({"text": "a\nb"}).count(b"\n") == 1
    for other in (b'{"is": "up"}', b"Welcome to node1", b"\x1enot json", b"\x1e[1]", b""):
        assert unpack(other) == (other, None)


class Terminal:
    """What a screen writes to."""

    is_full = False

    def __init__(self):
        self.text = {"stdout": "", "stderr": ""}

    def put(self, stream, text):
        self.text[stream] += text


def test_a_progress_bar_stays_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    terminal = Terminal()
    screen = Screen(terminal)
    screen.show("rank 0", "stderr", "10%", "\r")
    screen.show("rank 0", "stderr", "20%", "\r")
    screen.show("rank 1", "stderr", "x", "\n")
    screen.show("rank 1", "stderr", "y", "\n")
    screen.show("rank 1", "stderr", "30%", "\r")
    screen.note("z")
    clear = "\x1b[K"
    assert terminal.text["stderr"] == (
        f"[rank 0] 10%{clear}\r[rank 0] 20%{clear}\r[rank 1] x{clear}\n[rank 1] y\n"
        f"[rank 1] 30%{clear}\r\nhipress: z\n"
    )


def test_elsewhere_each_state_of_a_bar_is_a_line():
    terminal = Terminal()
    screen = Screen(terminal)
    screen.show("rank 0", "stdout", "10%", "\r")
    screen.show("rank 0", "stdout", "20%", "\n")
    assert terminal.text == {"stdout": "[rank 0] 10%\n[rank 0] 20%\n", "stderr": ""}


def test_a_file_that_can_not_be_written_any_more_is_told_once():
    terminal = Terminal()
    with open("/dev/full", "w", buffering=1) as full:
        screen = Screen(terminal, {0: full})
        screen.keep(0, "a")
        screen.keep(0, "b")
    assert terminal.text["stderr"] == (
        "hipress: '/dev/full' can not be written any more (No space left on device)\n"
    )
