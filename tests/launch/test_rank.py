"""What stands around a rank: its output, its exit code, its signals, its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from hipress.launch import rank


@pytest.fixture
def agent(tmp_path):
    """The socket of an agent, and a function that starts a rank at it."""
    name = f"hipress-test-{os.getpid()}-{time.monotonic_ns()}"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(f"\0{name}")
    server.listen()
    server.settimeout(30)
    started = []

    def start(*command):
        environ = {"RANK": "3", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
        program = subprocess.Popen(
            [sys.executable, "-I", "-S", rank.__file__, name, *command],
            env={**os.environ, **environ},
            start_new_session=True,
        )
        connection = server.accept()[0]
        connection.settimeout(30)
        pipes = [os.pipe(), os.pipe()]
        assert json.loads(connection.recv(4096)) == {"rank": 3, "local_rank": 1, "attempt": 2}
        socket.send_fds(connection, [b"go"], [writer for _, writer in pipes])
        for _, writer in pipes:
            os.close(writer)
        files = [open(reader) for reader, _ in pipes]
        started.append((program, connection, files))
        return program, connection, *files

    os.mkfifo(tmp_path / "fifo")
    start.folder = tmp_path
    yield start
    server.close()
    for program, connection, files in started:
        connection.close()
        for file in files:
            file.close()
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.wait(60)


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [("exit 0", 0, 0), ("exit 137", 137, 137), ("kill -9 $$", -9, 137), ("kill -15 $$", -15, 143)],
)
def test_how_it_ended_is_reported_and_returned(agent, script, status, code):
    program, connection, out, err = agent("sh", "-c", f"echo out; echo err >&2; {script}")
    assert (out.read(), err.read()) == ("out\n", "err\n")
    assert json.loads(connection.recv(4096)) == {"code": status, "told": False}
    assert program.wait(60) == code


def test_nothing_but_the_standard_streams_is_handed_on(agent):
    _, _, out, _ = agent(sys.executable, "-c", "import os; print(os.listdir('/proc/self/fd'))")
    assert out.read() == "['0', '1', '2', '3']\n"  # the last is that of the folder itself


def test_what_it_leaves_is_killed_before_its_end_is_told(agent):
    # In sessions of their own, one below the other, and deaf to all but SIGKILL.
    script = "trap '' TERM; setsid sh -c 'sleep 300 & echo $! $$; wait' & read x < fifo; exit 7"
    _, connection, out, _ = agent("sh", "-c", f"cd {agent.folder}; {script}")
    pids = [int(word) for word in out.readline().split()]
    (agent.folder / "fifo").write_text("\n")
    assert json.loads(connection.recv(4096)) == {"code": 7, "told": False}
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_a_signal_to_the_group_reaches_the_rank_and_is_noted(agent):
    script = "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.05; done"
    program, connection, out, _ = agent("sh", "-c", script)
    assert out.readline() == "up\n"
    os.killpg(program.pid, signal.SIGTERM)
    assert out.readline() == "bye\n"
    assert json.loads(connection.recv(4096)) == {"code": 4, "told": True}
    assert program.wait(60) == 4


def test_the_rank_dies_with_what_stands_around_it(agent):
    program, connection, out, _ = agent("sh", "-c", "echo up; exec sleep 300")
    assert out.readline() == "up\n"
    program.kill()
    program.wait(60)
    assert out.read() == ""  # the last writer is gone
    assert connection.recv(4096) == b""


def test_a_command_that_cannot_be_started(agent, tmp_path):
    _, connection, _, err = agent("no-such-command")
    assert err.read().startswith("hipress: command 'no-such-command' is not there")
    assert json.loads(connection.recv(4096)) == {"code": 127, "told": False}
    _, connection, _, err = agent(str(tmp_path))
    assert err.read().endswith("cannot be started: Permission denied\n")
    assert json.loads(connection.recv(4096)) == {"code": 126, "told": False}
