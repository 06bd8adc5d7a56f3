"""`hipress top`: what it shows of snapshots, from this machine and from others, and its errors."""

import fcntl
import http.server
import json
import os
import pty
import select
import socket
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from hipress import snapshots
from hipress.cli import main as cli
from hipress.cli import top
from hipress.cli.top import grouped, view
from hipress.snapshots import Snapshot, Writer
from tests.scenarios import free_ports
from tests.test_snapshots import snapshot, split


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "hipress"


@pytest.fixture
def two_ranks(folder):
    """A job of two ranks, of which the second computes longer."""
    writers = [Writer(folder, "abcd", rank) for rank in range(2)]
    slow = split(compute_s=0.09, wait_s=0.01).model_dump()
    writers[0].write(snapshot())
    writers[1].write(snapshot(rank=1, host="there", split=slow))
    yield writers
    for writer in writers:
        writer.close()


def run(*args):
    with pytest.raises(SystemExit) as caught:
        cli.main(["top", *args])
    return caught.value.code


def test_once_shows_ranks_split_and_decisions(two_ranks, capsys):
    """Catches: a column with the numbers of another, a slow rank that is not marked."""
    assert run("--once") == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    ranks = [line for line in lines if line and line[0] in ("0", "1*")]
    assert [line[:10] for line in ranks] == [
        ["0", "here", "100.0", "60.0", "40.0", "10.0", "50.0", "20.0", "1.000", "30.0"],
        ["1*", "there", "100.0", "90.0", "10.0", "10.0", "50.0", "20.0", "1.000", "30.0"],
    ]
    assert "train.py  job abcd, 2 ranks on 2 hosts, step 40, compressed" in out
    assert "slowest: rank 1 computes 30.0 ms longer than the others" in out
    assert out.count("step 7  plan  onebit is faster") == 1


def test_json_is_one_document(two_ranks, capsys):
    """Catches: text beside the document, ranks of two jobs in one."""
    other = Writer(snapshots.folder(), "ffff", 0)
    other.write(snapshot(job="ffff", num_ranks=1, split=None, events=[]))
    assert run("--json") == 0
    first, second = json.loads(capsys.readouterr().out)["jobs"]
    other.close()
    assert (first["job"], first["num_ranks"], first["slowest_rank"]) == ("abcd", 2, 1)
    assert [one["rank"] for one in first["ranks"]] == [0, 1]
    assert first["ranks"][1]["split"]["compute_s"] == 0.09
    assert first["events"] == [
        {"time": 1e9, "step": 7, "kind": "plan", "text": "onebit is faster"}
    ]  # fmt: skip
    assert (second["job"], second["slowest_rank"], second["ranks"][0]["split"]) == (
        "ffff", None, None,
    )  # fmt: skip


def shown(*found):
    from rich.console import Console

    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(grouped(found)))
    console.file.close()
    return console.export_text()


def test_a_job_of_which_ranks_are_missing_or_late_says_so():
    """Catches: two of eight ranks shown as a whole job, a rank that hangs shown as healthy."""
    late = Snapshot(**snapshot(num_ranks=8, age_s=42.0, split=None))
    text = shown(late, Snapshot(**snapshot(rank=1, num_ranks=8)))
    assert "2 of 8 ranks" in text and "rank 0: no step has ended for 42 s" in text
    assert "hipress top HOST:PORT" in text
    assert "all ranks: no step has ended for 42 s" in shown(late)


def test_a_stranger_does_not_write_on_the_terminal():
    """Catches: escape sequences and markup in names that come over the network."""
    text = shown(Snapshot(**snapshot(program="\x1b[2Jx", host="[red]h", plan="a\nb\x07")))
    assert "?[2Jx" in text and "[red]h" in text and "a?b?" in text
    assert "\x1b" not in text and "\x07" not in text


def test_no_job_says_how_to_see_one(folder, capsys):
    assert run("--once") == 2
    assert capsys.readouterr().err == (
        f"hipress: no job of this user has finished a step on this machine (it looks in {folder}); "
        "start one with hipress run or torchrun, or name the host and port of one that was started "
        "with HIPRESS_MONITOR=9400: hipress top HOST:9400.\n"
    )


@pytest.mark.parametrize("text", ["node1", "node1:", ":9400", "node1:0", "node1:70000", "a:b",
                                  "a..b:80", "[]:80", "a:" + "9" * 5000])  # fmt: skip
def test_an_address_is_a_host_and_a_port(text, capsys):
    assert run(text, "--once") == 2
    assert capsys.readouterr().err == (
        f"hipress: {text!r} is not the host and port of a job; write it as node1:9400.\n"
    )


def test_nobody_answers(capsys):
    (port,) = free_ports(1)
    assert run(f"127.0.0.1:{port}", "--once") == 2
    assert capsys.readouterr().err == (
        f"hipress: nobody answers at 127.0.0.1:{port} (Connection refused); the job must run with "
        f"HIPRESS_MONITOR={port} in its environment, and listens on the network card that its "
        "ranks use.\n"
    )


@pytest.mark.parametrize("kind", ["slow", "endless"])
def test_an_answer_has_a_deadline_and_a_size(kind, capsys, monkeypatch):
    """Catches: a view that hangs on a byte now and then, or fills the memory."""
    monkeypatch.setattr(top, "TIMEOUT_S", 0.5 if kind == "slow" else 60.0)
    monkeypatch.setattr(top, "MAX_BYTES", 2**16)

    def drip():
        client, _ = server.accept()
        with client, suppress(OSError):
            for _ in range(50):
                client.sendall(b"H" if kind == "slow" else b"H" * 10_000)
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip)
        thread.start()
        begin = time.monotonic()
        assert run(f"127.0.0.1:{server.getsockname()[1]}", "--once") == 2
        assert time.monotonic() - begin < 3
        thread.join()
    said = capsys.readouterr().err
    assert ("(timed out)" if kind == "slow" else "is no HiPress job of this version") in said


def test_an_ipv6_address_has_brackets():
    """Catches: brackets that are looked up as part of a name."""
    assert top._parsed("[::1]:9400") == ("::1", 9400)


class Answers(http.server.HTTPServer):
    """Answers each request with a text."""

    def __init__(self, text):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return f"127.0.0.1:{self.server_address[1]}"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


def served(*found):
    body = json.dumps({"hipress": "0.1.0", "snapshots": found})
    return f"HTTP/1.0 200 OK\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b"HTTP/1.0 200 OK\r\n\r\n[1, 2]",
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.0 404 No\r\n\r\n{}",
        served({"rank": 0}),
        served(snapshot(rank=-1)),
        served(snapshot(plan="x" * 10_000)),
        served(snapshot(setup_s=float("nan"))),
    ],
    ids=["ssh", "html", "list", "deep", "404", "fields", "range", "long", "nan"],
)
def test_something_else_answers(text, capsys):
    """Catches: a traceback for what a stranger sends."""
    with Answers(text) as address:
        assert run(address, "--once") == 2
    assert capsys.readouterr().err == (
        f"hipress: what answers at {address} is no HiPress job of this version; give the port that "
        "HIPRESS_MONITOR names in the environment of the job.\n"
    )


def test_several_hosts_are_one_job(capsys):
    """Catches: a job for each host, or a rank that is shown twice."""
    with (
        Answers(served(snapshot(time=1.0, step=3), snapshot(rank=1))) as first,
        Answers(served(snapshot(time=2.0, step=4))) as second,
    ):
        assert run(first, second, "--json") == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert [(one["rank"], one["step"]) for one in job["ranks"]] == [(0, 4), (1, 40)]


@pytest.mark.parametrize("kind", ["slow", "unreachable", "cut off"])
def test_a_job_that_does_not_answer_once_has_not_ended(kind, capsys, monkeypatch):
    """Catches: the end of a job that is only busy, or a view that stays although it has ended."""
    answers = [served(snapshot(step=40)), kind, kind, served(snapshot(step=41)), "refused"]
    given, clock = [], iter(range(0, 700, 7))

    def answer(host, port):
        given.append(answers[len(given)])
        if given[-1] == "slow":
            raise TimeoutError("timed out")
        if given[-1] == "unreachable":
            raise OSError(113, "No route to host")
        if given[-1] == "refused":
            raise ConnectionRefusedError(111, "Connection refused")
        return b"" if given[-1] == "cut off" else given[-1]

    shown = []
    monkeypatch.setattr(top, "_answer", answer)
    watch = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(top, "time", watch)
    monkeypatch.setattr("rich.live.Live.update", lambda self, one, refresh: shown.append(one))
    read = top._reader(["node1:9400"])
    top._show(read(), read)
    assert len(given) == 5
    from rich.console import Console

    for one in shown:
        Console(width=150).print(one)
    out = capsys.readouterr().out
    assert out.count("no answer for 7 s") == 1 and out.count("no answer for 14 s") == 1
    assert out.count("the job has ended.") == 1


@pytest.mark.parametrize("end", ["q", "\x03", "the job ends"])
def test_a_terminal_is_live_until_q_ctrl_c_or_the_end(two_ranks, folder, end):
    """Catches: a view that stays as it was, a key that does nothing, a terminal left raw."""
    outside, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hipress", "top"],
        stdin=inside, stdout=inside, stderr=inside, close_fds=True, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C comes from it
    )  # fmt: skip
    os.close(inside)
    text = ""

    def wait_for(wanted):
        nonlocal text
        until = time.monotonic() + 30
        while wanted not in text:
            assert select.select([outside], [], [], max(0.0, until - time.monotonic()))[0], text
            text += os.read(outside, 65536).decode(errors="replace")

    try:
        wait_for("step 40, ")
        for writer in two_ranks:
            writer.write(snapshot(step=41))
        wait_for("step 41, ")
        if end == "the job ends":
            for writer in two_ranks:
                writer.close()
            wait_for("the job has ended.")
        else:
            os.write(outside, end.encode())
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(outside)
