"""Jobs on an emulated cluster: environment, output, exit codes, the end of all when one fails."""

import os
import signal
import sys
import threading
import time

import pytest

from hipress.errors import LabError, UsageError
from hipress.lab import Lab
from tests.grid import thinned

pytestmark = pytest.mark.alone

# Both kinds of cluster run the same jobs.
KINDS = thinned([True, False], keep=(True,))


@pytest.fixture(params=KINDS, ids=["shaped", "loopback"])
def shaped(request):
    if request.param:
        request.getfixturevalue("namespaces")
    return request.param


SHOW = """
import os, socket
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
         "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MINE"]
print(*(os.environ[name] for name in names))
print(socket.gethostname(), os.getpid() < 20, os.getcwd())
"""


def test_environment_of_each_rank(shaped, python, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Lab(2, ranks_per_host=[1, 2], shaped=shaped) as lab:
        assert lab.shaped is shaped
        finished = lab.run(python(SHOW), env={"MINE": "x y"}, cwd=tmp_path, timeout=40, check=True)
        address, interface = lab.address(0), "eth0" if shaped else "lo"
    assert address == ("10.77.0.1" if shaped else "127.0.0.1")
    places = [(0, 0, 1), (1, 0, 2), (1, 1, 2)]  # host, local rank, local world size
    for rank, (host, local_rank, local_size) in enumerate(places):
        first, second = finished.stdout[rank].splitlines()
        assert first == (
            f"{rank} 3 {local_rank} {local_size} {host} {address} 1 "
            f"{interface} {interface} {interface} x y"
        )
        if shaped:
            assert second == f"host{host} True {tmp_path}"
    assert finished.exit_code == 0
    assert finished.failed_rank is None
    assert finished.exit_codes == (0, 0, 0)


def test_each_run_has_a_port_of_its_own(shaped, python):
    with Lab(1, shaped=shaped) as lab:
        code = "import os; print(os.environ['MASTER_PORT'])"
        ports = {lab.run(python(code), timeout=40).stdout[0] for _ in range(3)}
    assert len(ports) == 3


def test_output_is_told_by_rank_and_stream_and_line(shaped, python):
    code = (
        "import os, sys; r = os.environ['RANK']\n"
        "print('out', r); print(); print('err', r, file=sys.stderr); print('end', end='')"
    )
    seen = []
    with Lab(2, shaped=shaped) as lab:
        finished = lab.run(python(code), on_line=lambda *line: seen.append(line), timeout=40)
    assert finished.stdout == ("out 0\n\nend\n", "out 1\n\nend\n")
    assert finished.stderr == ("err 0\n", "err 1\n")
    for rank in (0, 1):
        own = [line[1:] for line in seen if line[0] == rank]
        assert [text for stream, text in own if stream == "stdout"] == [f"out {rank}", "", "end"]
        assert [text for stream, text in own if stream == "stderr"] == [f"err {rank}"]


def test_the_first_failure_ends_all_and_gives_the_exit_code(shaped, python):
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); time.sleep(60)"
    with Lab(3, shaped=shaped) as lab:
        finished = lab.run(python(code), timeout=40)
    assert (finished.exit_code, finished.failed_rank) == (7, 1)
    assert finished.exit_codes == (128 + signal.SIGTERM, 7, 128 + signal.SIGTERM)
    assert finished.seconds < 20


def test_a_signal_is_an_exit_code(shaped, python):
    with Lab(1, shaped=shaped) as lab:
        finished = lab.run(python("import os; os.kill(os.getpid(), 11)"), timeout=40)
    assert finished.exit_code == 128 + 11


def test_who_ignores_sigterm_is_killed(shaped, python, tmp_path):
    code = (
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w').close()\n"
        "    time.sleep(60)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"
        "raise SystemExit(3)"
    )
    with Lab(2, shaped=shaped) as lab:
        finished = lab.run(python(code, tmp_path / "ready"), timeout=30)
    assert finished.exit_codes == (128 + signal.SIGKILL, 3)
    assert 3 < finished.seconds < 20  # the grace is 3 s


def test_a_command_that_is_not_there(shaped):
    with Lab(1, shaped=shaped) as lab:
        finished = lab.run(["./no-such-program"], timeout=40)
        assert finished.exit_code == 127
        assert "'./no-such-program' could not be started" in finished.stderr[0]
        with pytest.raises(LabError, match="rank 0 ended with exit code 127: hipress: './no-such"):
            lab.run(["./no-such-program"], timeout=40, check=True)


def test_a_timeout_ends_all_and_names_the_late(shaped, python):
    code = "import os, time; os.environ['RANK'] == '0' or time.sleep(60); print('over')"
    over = threading.Event()
    with Lab(3, shaped=shaped) as lab:
        job = lab.start(python(code), on_line=lambda *_: over.set())
        assert over.wait(20)
        with pytest.raises(LabError, match="not done after 2 s and was ended.*ranks 1, 2 of 3"):
            job.wait(2)
        assert job.poll().exit_codes == (0, 128 + signal.SIGTERM, 128 + signal.SIGTERM)
        assert lab.run(python("print('again')"), timeout=40).stdout == ("again\n",) * 3


def test_kill_ends_a_job_at_once(shaped, python):
    with Lab(2, shaped=shaped) as lab:
        job = lab.start(python("import time; time.sleep(60)"))
        assert job.poll() is None
        job.kill()
        assert job.poll().exit_codes == (128 + signal.SIGKILL,) * 2


def test_what_a_rank_leaves_behind_is_swept(shaped):
    # The orphan holds the output open: without the sweep, `wait` would sit out its minute.
    with Lab(1, shaped=shaped) as lab:
        finished = lab.run(["sh", "-c", "setsid sleep 60 & echo done"], timeout=40)
    assert finished.stdout == ("done\n",)
    assert finished.seconds < 20


def test_an_orphan_that_is_just_starting_is_swept_too(shaped):
    # The orphan forks while the job is ended: one look at /proc would miss what it forks.
    command = ["sh", "-c", "setsid sh -c 'sleep 60; :' & echo up; sleep 60"]
    with Lab(2, shaped=shaped) as lab:
        for _ in range(10):
            up = []
            job = lab.start(command, on_line=lambda *line, up=up: up.append(line))
            while len(up) < 2:
                time.sleep(0.0005)
            job.end()


def test_an_error_in_on_line_ends_the_job(shaped, python):
    def on_line(rank, stream, line):
        raise ZeroDivisionError

    with Lab(1, shaped=shaped) as lab:
        code = "import time; print(1, flush=True); time.sleep(60)"
        with pytest.raises(ZeroDivisionError):
            lab.run(python(code), on_line=on_line, timeout=40)


TICK = "import time\nwhile True: print(time.time(), flush=True); time.sleep(0.02)"


def test_pause_resume_and_kill_a_host(shaped, python):
    counts = [0, 0]

    def on_line(rank, stream, line):
        counts[rank] += 1

    def ticks():
        """Return how many lines come in half a second."""
        before = list(counts)
        time.sleep(0.5)
        return [now - then for now, then in zip(counts, before, strict=True)]

    def wait_until(is_so):
        until = time.monotonic() + 20
        while not is_so(*ticks()):
            assert time.monotonic() < until

    with Lab(2, shaped=shaped) as lab:
        job = lab.start(python(TICK), on_line=on_line, keep_output=False)
        while min(counts) == 0:
            time.sleep(0.01)
        lab.pause(1)
        wait_until(lambda first, second: first > 5 and second == 0)
        lab.resume(1)
        wait_until(lambda first, second: first > 5 and second > 5)
        lab.pause(0)  # ended all the same when host 1 fails
        lab.kill(1)
        finished = job.wait(40)
        assert (finished.exit_code, finished.failed_rank) == (128 + signal.SIGKILL, 1)
        assert finished.stdout == ("", "")
        assert lab.run(python("print('alive')"), timeout=40).stdout == ("alive\n",) * 2


def test_a_lab_closes_quickly_whatever_runs(shaped, python):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    with Lab(2, shaped=shaped) as lab:
        job = lab.start(python(code))
        lab.pause(0)
        start = time.monotonic()
    assert time.monotonic() - start < 20
    assert job.wait(20).exit_codes == (128 + signal.SIGKILL,) * 2
    lab.close()  # a second time does nothing
    with pytest.raises(LabError, match="this lab is closed"):
        lab.run(["true"])


def test_a_lab_made_in_a_thread_outlives_it(shaped, python):
    labs = []
    thread = threading.Thread(target=lambda: labs.append(Lab(1, shaped=shaped)))
    thread.start()
    thread.join()
    time.sleep(0.7)
    with labs[0] as lab:
        assert lab.run(python("print(1)"), timeout=40).exit_code == 0


def test_many_hosts(namespaces):
    with Lab(64, rate="1gbit") as lab:
        finished = lab.run(["hostname"], timeout=60)
    assert finished.stdout == tuple(f"host{host}\n" for host in range(64))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"hosts": 0}, "hosts is 0; it must be from 1 to 64"),
        ({"hosts": 2, "ranks_per_host": 0}, "ranks_per_host is 0"),
        ({"hosts": 2, "ranks_per_host": [1, 1, 1]}, "3 numbers for 2 hosts"),
        ({"hosts": 2, "rate": "1gb"}, "rate '1gb'"),
        ({"hosts": 2, "rate": "1gbit", "shaped": False}, "need a network"),
    ],
)
def test_what_is_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        Lab(**arguments)


def test_loopback_has_no_links():
    with Lab(2, shaped=False) as lab:
        for what in (lab.counters, lab.cut, lab.heal):
            with pytest.raises(LabError, match="on loopback all ranks share 127.0.0.1"):
                what(0)
        with pytest.raises(LabError, match="needs a link"):
            lab.set_rate(0, "1gbit")
        with pytest.raises(UsageError, match="host 2 is not there; give one from 0 to 1"):
            lab.pause(2)
        with pytest.raises(UsageError, match="give a list of words"):
            lab.run("echo hello")


def test_without_pyroute2_the_command_is_named(monkeypatch):
    from hipress.errors import MissingDependencyError

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install pyroute2"):
        Lab(1)


def test_a_system_that_refuses_is_told_with_the_way_out(monkeypatch, tmp_path):
    pytest.importorskip("pyroute2")
    # A stand-in for a locked-down kernel: an interpreter whose unshare fails.
    fake = tmp_path / "python"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import runpy, sys\n"
        "from hipress.lab import namespaces\n"
        "def unshare(flags, what):\n"
        "    raise PermissionError(1, 'Operation not permitted', what)\n"
        "namespaces.unshare = unshare\n"
        "sys.argv = sys.argv[4:]\n"
        "runpy.run_module('hipress.lab.switch', run_name='__main__')\n"
    )
    os.chmod(fake, 0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(LabError) as caught:
        Lab(1)
    assert str(caught.value) == (
        "an emulated cluster needs namespaces of its own and this system refused a network "
        "namespace (Operation not permitted); run as root or allow user namespaces, or put all "
        "ranks on 127.0.0.1, without shaping: Lab(..., shaped=False) or "
        "`hipress lab run --loopback`"
    )
