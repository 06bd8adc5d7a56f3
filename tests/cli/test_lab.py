"""`hipress lab run` as a user meets it: prefixes, exit codes, Ctrl-C, what it refuses."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hipress.errors import HipressError
from hipress.lab import Lab

HIPRESS = [sys.executable, "-c", "from hipress.cli.main import main; main()", "lab", "run"]


def run(*args, timeout=100):
    return subprocess.run([*HIPRESS, *args], capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def namespaces():
    try:
        Lab(1).close()
    except HipressError as error:
        pytest.skip(str(error))


@pytest.mark.alone
def test_lines_have_the_host_in_front(namespaces):
    done = run("--hosts", "2", "--rate", "1gbit,100mbit", "--", "sh", "-c", "hostname; echo e >&2")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[host0] host0", "[host1] host1"]
    assert sorted(done.stderr.splitlines()) == ["[host0] e", "[host1] e"]


@pytest.mark.alone
def test_several_ranks_on_a_host_have_numbers():
    done = run("--loopback", "--ranks-per-host", "1,2", "sh", "-c", "echo $RANK")
    assert sorted(done.stdout.splitlines()) == ["[host0] 0", "[host1.0] 1", "[host1.1] 2"]


@pytest.mark.alone
def test_the_exit_code_is_that_of_the_first_failure():
    done = run("--loopback", "--", "sh", "-c", "[ $RANK = 1 ] && exit 9; exec sleep 60")
    assert done.returncode == 9
    done = run("--loopback", "--hosts", "1", "--", "sh", "-c", "kill -9 $$")
    assert done.returncode == 137


@pytest.mark.alone
def test_too_slow_is_exit_code_124():
    done = run("--loopback", "--timeout", "0.5", "--", "sleep", "60")
    assert done.returncode == 124
    assert done.stderr.startswith("hipress: the job was not done after 0.5 s")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--rate", "1gb"], "rate '1gb' is not a number and a unit; write 1gbit"),
        (["--rate", "1gbit,1gbit,1gbit"], "there are 3 rates for 2 hosts"),
        (["--delay", "5"], "delay '5' is not a number and a unit"),
        (["--loss", "half"], "loss 'half' is not a percentage"),
        (["--hosts", "0"], "hosts is 0"),
        (["--ranks-per-host", "two"], "--ranks-per-host 'two' is not a number"),
    ],
)
def test_what_is_refused(option, says):
    done = run(*option, "--", "true")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("hipress: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.alone
def test_ctrl_c_lets_ranks_end_in_order_and_exits_with_130():
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
        "print('up', flush=True); time.sleep(60)"
    )
    program = subprocess.Popen(
        [*HIPRESS, "--loopback", "--", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert sorted(program.stdout.readline() for _ in range(2)) == ["[host0] up\n", "[host1] up\n"]
    start = time.monotonic()
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=50)
    assert program.returncode == 130
    assert sorted(out.splitlines()) == ["[host0] bye", "[host1] bye"]
    assert err == ""
    assert time.monotonic() - start < 30
