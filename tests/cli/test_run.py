"""`hipress run` as a user meets it: on this machine with the real torchrun, and what it refuses."""

import os
import signal
import subprocess
import sys

import pytest

from hipress.cli.main import main
from tests.grid import full

HIPRESS = [sys.executable, "-c", "from hipress.cli.main import main; main()", "run"]

# They agree, and then one fails.
AGREE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(x)
print(os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"], x.item())
dist.barrier()
if dist.get_rank() == 1:
    os._exit(9)
time.sleep(300)
"""


def test_ranks_on_this_machine_under_the_real_torchrun():
    command = [*HIPRESS, "--nproc", "2", "--", "python", "-c", AGREE, "--log", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 1 3.0", "[rank 1] 1 1 3.0"]
    assert done.stderr == "hipress: rank 1 ended with exit code 9; the others were ended\n"
    assert done.returncode == 9


TRAP = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("bye"), sys.exit(0)))
print("up")
time.sleep(300)
"""


@pytest.mark.alone
@full
def test_ctrl_c_under_the_real_torchrun(tmp_path):
    program = subprocess.Popen(
        [*HIPRESS, "--nproc", "2", "--", "python", "-c", TRAP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
        # As a shell starts it, also where the tests run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert sorted(program.stdout.readline() for _ in range(2)) == ["[rank 0] up\n", "[rank 1] up\n"]
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["[rank 0] bye", "[rank 1] bye"]
    assert (program.returncode, err) == (130, "")
    assert list(tmp_path.iterdir()) == []  # torchrun leaves its notes where it is told to


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "no host is given; write one of -H node1:4,node2:4, --hosts-file hosts.json, or"),
        (["-H", "a", "--nproc", "2"], "-H and --nproc are given; write one of"),
        (["--nproc", "0"], "--nproc is 0; it must be 1 or more"),
        (["-H", "a:0"], "host a has 0 slots"),
        (["-H", "a", "--port", "70000"], "--port is 70000; it must be from 1 to 65535"),
        (["-H", "a", "--ssh-port", "-1"], "--ssh-port is -1; it must be from 1 to 65535"),
        (["-H", "a", "--ssh", "ssh '"], '--ssh "ssh \'" cannot be read: No closing quotation'),
        (["-H", "a", "--ssh", ""], "--ssh is empty; name the program"),
        (["-H", "a", "--env", "NOT_SET_HERE"], "--env NOT_SET_HERE asks for a variable that is"),
        (["-H", "a", "--interface", "a/b"], "--interface 'a/b' is not the name of a network card"),
        (
            ["--hosts-file", "none.json"],
            "hosts file 'none.json' cannot be read (No such file or directory); give",
        ),
        (["--nproc", "1", "--output", "/dev/null/x"], "--output '/dev/null/x' cannot be used"),
        (["-H", "a", "--ssh-port", "0"], "--ssh-port is 0; it must be from 1 to 65535"),
        (["-H", "a,b", "--port", "0"], "--port is 0; it must be from 1 to 65535"),
        (["-H", "a:4", "--port", "5"], "--port does nothing for a job on one host; leave it out"),
        (["--nproc", "2", "--port", "5"], "--port does nothing for a job on this machine alone"),
        (["--nproc", "2", "--ssh", "ssh"], "--ssh does nothing for a job on this machine alone"),
        (["--nproc", "2", "--ssh-port", "22"], "--ssh-port does nothing for a job on this machine"),
    ],
)
def test_what_is_refused(options, says, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", *options, "--", "true"])
    said = capsys.readouterr()
    assert (caught.value.code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert line.startswith("hipress: ")
    assert says in line
