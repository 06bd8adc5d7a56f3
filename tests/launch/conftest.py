"""What the tests of launching share: `hipress run`, and stand-ins for torchrun and ssh."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hipress as hipress_package

HERE = Path(__file__).parent
SOURCE = Path(hipress_package.__file__).parents[1]
"""Where the hipress under test is imported from, which need not be the one that is installed."""


def hipress(**constants):
    """Return the command `hipress`, with other values for constants of the launcher."""
    changes = "".join(f"launcher.{name} = {value}; " for name, value in constants.items())
    setup = f"from hipress.launch import launcher; {changes}" if changes else ""
    # The installed command does not search the folder it is in either.
    alone = "import sys; sys.path.remove(''); "
    return [sys.executable, "-c", f"{alone}{setup}from hipress.cli.main import main; main()"]


# Drops options and host, and runs the rest here. `host` is there as $HOST, for tests of failures.
SSH = """#!/bin/sh
while [ $# -gt 1 ]; do HOST=$1; shift; done
export HOST
{extra}
exec sh -c "$1"
"""


@pytest.fixture
def without_torch():
    """The environment in which torchrun is the stand-in: quick, and without restarts."""
    return {**os.environ, "PYTHONPATH": f"{HERE / 'stand_in'}:{SOURCE}"}


def hear_signals():
    """In a new process: as a shell starts it, also where the tests run in the background.

    There SIGINT is ignored, and SIGHUP under nohup; the launcher leaves what is ignored alone.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(without_torch, tmp_path):
    """Return a function that starts `hipress run`; what is left of it is killed at the end."""
    started = []

    def start(*args, env=None, constants=None, **options):
        program = subprocess.Popen(
            [*hipress(**(constants or {})), "run", *map(str, args)],
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "cwd": tmp_path,
                # What a killed agent leaves is here too.
                "env": {**without_torch, "TMPDIR": str(tmp_path), **(env or {})},
                "start_new_session": True,
                "preexec_fn": hear_signals,
                **options,
            },
        )
        started.append(program)
        return program

    yield start
    for program in started:
        for pipe in (program.stdout, program.stderr):
            if pipe is not None:
                pipe.close()
        if program.poll() is None:
            program.kill()
        program.wait(20)


@pytest.fixture
def run(start):
    """Return a function that runs `hipress run` to its end."""

    def run(*args, **options):
        program = start(*args, **options)
        out, err = program.communicate(timeout=90)
        return subprocess.CompletedProcess(args, program.returncode, out, err)

    return run


@pytest.fixture
def ssh(tmp_path):
    """Return a function that writes a stand-in for ssh, with more shell lines if need be."""

    def write(extra=""):
        path = tmp_path / "ssh"
        path.write_text(SSH.format(extra=extra))
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def two(tmp_path):
    """A hosts file of two hosts, which are both this machine."""
    path = tmp_path / "hosts.json"
    path.write_text('[{"host": "one", "address": "127.0.0.1"}, "two"]')
    return path


def marked(marker):
    """Return the processes whose command line or environment holds a text, with the former."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            text = command + (folder / "environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in text and int(folder.name) != os.getpid():
            found[int(folder.name)] = command.replace(b"\0", b" ").decode()
    return found


def wait_until_gone(marker, seconds=30):
    until = time.monotonic() + seconds
    while left := marked(marker):
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.05)


@pytest.fixture
def marker():
    """A text that is in the environment of all processes of a test, which all must be gone."""
    text = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    yield text
    wait_until_gone(text)
