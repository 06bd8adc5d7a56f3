"""`python -m tests.chaos` leaves nothing behind when it is interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import scenarios

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.alone, pytest.mark.full]


def processes(mark):
    """Those on this machine that have a text in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_left_after_an_interrupt(tmp_path, number, code):
    """Catches: a rank, a mount or a folder that outlives Ctrl-C."""
    if (why := scenarios.refusal()) is not None:
        pytest.skip(why)
    mounts = Path("/proc/self/mounts").read_text()
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", "--seed", "1"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for line in child.stdout:
            if line.startswith("episode"):
                break
        assert processes(str(tmp_path).encode())
        child.send_signal(number)
        child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == code
    deadline = time.monotonic() + 30
    while processes(str(tmp_path).encode()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(str(tmp_path).encode()) == []
    assert list(tmp_path.glob("hipress-chaos-*")) == []
    assert Path("/proc/self/mounts").read_text() == mounts
