"""What the launcher shows: messages among other text, bars on a terminal, files of ranks."""

from hipress.launch.remote import pack, unpack
from hipress.launch.screen import Screen


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

    def write(self, stream, text):
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


def test_a_file_that_cannot_be_written_any_more_is_told_once():
    terminal = Terminal()
    with open("/dev/full", "w", buffering=1) as full:
        screen = Screen(terminal, {0: full})
        screen.keep(0, "a")
        screen.keep(0, "b")
    assert terminal.text["stderr"] == (
        "hipress: '/dev/full' cannot be written any more (No space left on device)\n"
    )
