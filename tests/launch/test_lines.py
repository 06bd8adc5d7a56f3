"""Lines are found whole however their bytes arrive, and messages among other text."""

import random

from hipress.launch.lines import LONGEST_BYTES, Lines
from hipress.launch.messages import pack, unpack
from hipress.launch.screen import Screen

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


def test_messages_are_told_from_other_text():
    assert unpack(pack({"is": "line", "text": "a\nb"}).rstrip(b"\n")) == {
        "is": "line",
        "text": "a\nb",
    }
    assert pack({"text": "a\nb"}).count(b"\n") == 1
    for other in (b'{"is": "up"}', b"Welcome to node1", b"\x1enot json", b"\x1e[1]", b""):
        assert unpack(other) is None


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_progress_bar_stays_a_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    screen = Screen(None)
    screen.show("rank 0", "stderr", "10%", "\r")
    screen.show("rank 0", "stderr", "20%", "\r")
    screen.show("rank 1", "stderr", "x", "\n")
    screen.show("rank 1", "stderr", "y", "\n")
    clear = "\x1b[K"
    assert terminal.text == (
        f"[rank 0] 10%{clear}\r[rank 0] 20%{clear}\r[rank 1] x{clear}\n[rank 1] y\n"
    )


def test_elsewhere_each_state_of_a_bar_is_a_line(capsys):
    screen = Screen(None)
    screen.show("rank 0", "stdout", "10%", "\r")
    screen.show("rank 0", "stdout", "20%", "\n")
    assert capsys.readouterr().out == "[rank 0] 10%\n[rank 0] 20%\n"
