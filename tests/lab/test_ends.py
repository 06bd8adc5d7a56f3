"""However a lab ends, nothing is left behind; and without root it is the same lab."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hipress
from tests.grid import thinned
from tests.lab.programs import MOVE

pytestmark = pytest.mark.alone

SRC = str(Path(hipress.__file__).parents[1])
NOBODY = 65534

# A lab whose ranks each start an orphan in a session of its own; the marker is in their argv.
HOLD = """
import sys
from hipress.lab import Lab
with Lab(2, rate=None, shaped=sys.argv[2] == "True") as lab:
    script = f"setsid sh -c 'sleep 100; : {sys.argv[1]}' & echo up; sleep 100; : {sys.argv[1]}"
    lab.run(["sh", "-c", script], on_line=lambda *line: print(*line, flush=True))
"""


def marked(marker):
    """Return the processes whose command line or environment holds a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in text and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until_gone(marker, seconds=30):
    until = time.monotonic() + seconds
    while left := marked(marker):
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.02)


@pytest.fixture(params=thinned([True, False], keep=(True,)), ids=["shaped", "loopback"])
def shaped(request):
    if request.param:
        request.getfixturevalue("namespaces")
    return request.param


@pytest.fixture
def held(shaped):
    """A program with a lab in which two ranks run, and the marker of all its processes."""
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    program = subprocess.Popen(
        [sys.executable, "-c", HOLD, marker, str(shaped)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MARKER": marker},
        start_new_session=True,
    )
    for _ in range(2):
        assert program.stdout.readline().endswith("stdout up\n")
    assert len(marked(marker)) >= 7  # itself, the switch, two hosts, two ranks with an orphan each
    yield program, marker
    program.stdout.close()
    if program.poll() is None:
        program.kill()
    program.wait(60)


def test_after_sigkill_of_the_program_nothing_is_left(held):
    program, marker = held
    program.kill()
    program.wait(60)
    wait_until_gone(marker)


def test_after_sigkill_of_the_switch_nothing_is_left(held):
    program, marker = held
    (switch,) = (pid for pid in marked(marker) if parent(pid) == program.pid)
    os.kill(switch, signal.SIGKILL)
    assert program.wait(60) == 0  # `run` returned: both ranks were killed
    wait_until_gone(marker)


def test_ctrl_c_ends_all(held):
    program, marker = held
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the whole group
    assert program.wait(60) == -signal.SIGINT
    wait_until_gone(marker)


ROOTLESS = """
import os, sys
from hipress.lab import Lab
assert os.geteuid() == 65534
with Lab(2, rate="100mbit") as lab:
    command = [sys.executable, "-S", "-c", sys.argv[1], "4000000", "1"]
    finished = lab.run(command, timeout=30, check=True)
    print(finished.stdout[1].strip(), lab.counters(0).sent_bytes)
"""


def run_as_nobody(*argv):
    packages = Path(pytest.importorskip("pyroute2").__file__).parents[1]
    return subprocess.run(
        argv,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{SRC}{os.pathsep}{packages}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def python_of_nobody():
    """Return a Python that user nobody can run, with hipress and pyroute2, or None."""
    # This one may be in the folder of root; all that the lab needs is pure Python.
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            if run_as_nobody(python, "-c", "import hipress.lab, pyroute2").returncode == 0:
                return python
        except OSError:
            continue
    return None


def test_without_root_a_user_namespace_gives_the_same():
    if os.geteuid() != 0:
        pytest.skip("this test becomes user nobody, which takes root")
    python = python_of_nobody()
    if python is None:
        pytest.skip("user nobody can run no Python that finds hipress and pyroute2")
    if run_as_nobody("unshare", "-Urn", "true").returncode != 0:
        pytest.skip("this system lets no ordinary user make a user namespace")
    done = run_as_nobody(python, "-c", ROOTLESS, MOVE)
    assert done.returncode == 0, done.stderr
    measured, sent_bytes = map(float, done.stdout.split())
    assert 85 <= measured <= 100 * 1.03  # the first packets leave at once
    assert 4_000_000 <= sent_bytes <= 4_200_000


FORK = """
import os, sys
from hipress.lab import Lab
with Lab(1, rate=None, shaped=False) as lab:
    pid = os.fork()
    if pid == 0:
        sys.exit(7)  # and so leaves the block
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    lab.run(["true"], check=True)
"""


def test_a_forked_process_leaves_the_lab_of_its_parent_alone():
    """Catches: a child that leaves the block of a lab and takes the lab of its parent down."""
    subprocess.run(
        [sys.executable, "-c", FORK], env={**os.environ, "PYTHONPATH": SRC}, check=True, timeout=60
    )
