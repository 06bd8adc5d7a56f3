"""`hipress run` across emulated hosts, with a real sshd on each and the real torchrun."""

import functools
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from hipress.lab import Lab
from tests.lab.conftest import refusal
from tests.launch.conftest import hipress, marked, wait_until_gone

pytestmark = pytest.mark.alone

PORT = 22222
STAND_IN = Path(__file__).parent / "stand_in"  # for torchrun, where the real one adds nothing
CONFIG = """
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
MaxStartups 100
"""
AGREE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(2 ** dist.get_rank())])
dist.all_reduce(x)
print(os.uname().nodename, os.environ["LOCAL_RANK"], x.item(), os.environ.get("A"), flush=True)
if "--once" in sys.argv and dist.get_rank() == 1:
    flag = sys.argv[-1]
    if not os.path.exists(flag):
        open(flag, "w").close()
        os._exit(5)
dist.barrier()
dist.destroy_process_group()
"""


@functools.cache
def sshd():
    """Return the path of sshd, which must be whole, or None."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Cluster:
    """Three hosts; sshd runs on two, and this program on the third."""

    def __init__(self, lab, folder):
        self.lab = lab
        self.folder = folder
        options = [
            "StrictHostKeyChecking=no",
            f"UserKnownHostsFile={folder}/known",
            "LogLevel=ERROR",
        ]
        self.ssh = " ".join([f"ssh -i {folder}/key", *(f"-o {option}" for option in options)])

    def start(self, *args, hosts="host1,host2:2", port=PORT, marker="none", constants=None):
        program = hipress(**(constants or {}))
        command = [
            *(*program, "run", "-H", hosts, "--ssh", self.ssh, "--ssh-port", str(port)),
            *("--interface", "eth0", "--env", f"M={marker}", "--timeout", "90", *map(str, args)),
        ]
        # On host 0 only; the others have their sshd already.
        script = '[ "$RANK" = 0 ] || exit 0; exec "$@"'
        # The launcher must find nothing of torchrun around it: it is a shell, not a rank.
        return self.lab.start(
            ["sh", "-c", script, "sh", *command],
            env={"M2": marker, "A": "of host0"},
            cwd=str(self.folder),
            keep_output=True,
        )

    def run(self, *args, **options):
        finished = self.start(*args, **options).wait(150)
        return finished.exit_codes[0], finished.stdout[0], finished.stderr[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if sshd() is None or shutil.which("ssh") is None:
        pytest.skip("these tests need ssh and sshd (apt-get install openssh-server)")
    if (why := refusal()) is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    (folder / "sshd_config").write_text(CONFIG.format(port=PORT, folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # its empty room; it refuses to start without
    with Lab(3, rate="1gbit") as lab:
        script = '[ "$RANK" = 0 ] && exec sleep 3600; exec "$@"'
        daemon = [sshd(), "-D", "-e", "-f", str(folder / "sshd_config")]
        up = []
        job = lab.start(
            ["sh", "-c", script, "sh", *daemon],
            on_line=lambda rank, _, line: up.append(rank) if "listening on" in line else None,
        )
        until = time.monotonic() + 30
        while len(set(up)) < 2:
            if job.poll() or time.monotonic() > until:
                pytest.fail("sshd does not start on an emulated host")
            time.sleep(0.05)
        yield Cluster(lab, folder)


def test_hosts_of_different_size_agree(cluster):
    code, out, err = cluster.run("--env", "A=a 'b'", "--", "python", "-c", AGREE)
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        "[rank 0] host1 0 7.0 a 'b'",
        "[rank 1] host2 0 7.0 a 'b'",
        "[rank 2] host2 1 7.0 a 'b'",
    ]
    assert err.startswith("hipress: ranks 0 on host1, 1-2 on host2; they meet at host1:")


def test_restarts_keep_the_order_of_hosts(cluster):
    flag = cluster.folder / "failed-once"
    # The first host's name comes last in the alphabet.
    code, out, err = cluster.run(
        *("--max-restarts", 1, "--", "python", "-c", AGREE, "--once", flag), hosts="host2,host1"
    )
    assert code == 0, err
    assert flag.exists()
    assert "hipress: rank 1 on host1 ended with exit code 5" in err.splitlines()
    assert "hipress: all ranks start over, for the 2. time" in err.splitlines()
    assert sorted(out.splitlines()) == [
        *["[rank 0] host2 0 3.0 None"] * 2,
        *["[rank 1] host1 0 3.0 None"] * 2,
    ]


# All four are there before the last fails.
FAIL = """
echo $RANK
: > there-$RANK
[ $RANK = 3 ] || exec sleep 300
while [ "$(ls | grep -c ^there-)" -lt 4 ]; do sleep 0.05; done
exit 7
"""


def test_a_rank_that_fails_ends_all_hosts(cluster, marker):
    code, out, err = cluster.run(
        *("--env", f"PYTHONPATH={STAND_IN}", "sh", "-c", FAIL),
        marker=marker,
        hosts="host1:2,host2:2",
    )
    assert code == 7, err
    assert sorted(out.splitlines()) == [f"[rank {rank}] {rank}" for rank in range(4)]
    assert err.splitlines()[-1] == (
        "hipress: rank 3 on host2 ended with exit code 7; the others were ended"
    )


def wait_for_sleepers(marker, number):
    """Wait until as many ranks as that sleep."""
    until = time.monotonic() + 60
    while sum(command.strip() == "sleep 300" for command in marked(marker).values()) != number:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_hosts_that_are_cut_off_end_by_themselves(cluster, marker):
    known = cluster.ssh
    cluster.ssh += " -o ServerAliveInterval=1 -o ServerAliveCountMax=3"
    try:
        job = cluster.start(
            *("--env", f"PYTHONPATH={STAND_IN}", "sh", "-c", "exec sleep 300"),
            marker=marker,
            hosts="host1,host2",
            constants={"SILENCE_S": 4},
        )
        wait_for_sleepers(marker, 2)
        cluster.lab.cut(0)  # nobody is told, and no connection is closed
        wait_for_sleepers(marker, 0)
        assert job.wait(60).exit_codes[0] == 255
    finally:
        cluster.ssh = known
        cluster.lab.heal(0)
    wait_until_gone(marker)


def test_after_sigkill_of_the_launcher_nothing_is_left(cluster, marker):
    job = cluster.start(
        *("--env", f"PYTHONPATH={STAND_IN}", "sh", "-c", "exec sleep 300"),
        marker=marker,
        hosts="host1,host2",
    )
    wait_for_sleepers(marker, 2)
    # Seen from outside the hosts.
    (launcher,) = (p for p, c in marked(marker).items() if "hipress.cli.main" in c)
    os.kill(launcher, 9)
    assert job.wait(60).exit_codes[0] == 137
    wait_until_gone(marker)


def test_a_wrong_port_gives_the_sentence(cluster):
    code, out, err = cluster.run("true", port=22223, hosts="host1")
    assert (code, out) == (255, "")
    (line,) = err.splitlines()
    assert line.startswith("hipress: ssh cannot connect to host1 (")
    assert line.endswith("refused); is sshd running there, and on that port (--ssh-port)?")


def test_a_key_that_is_not_known_gives_the_sentence(cluster):
    stranger = cluster.folder / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    known = cluster.ssh
    cluster.ssh = known.replace("/key ", "/stranger ") + " -o IdentitiesOnly=yes"
    try:
        code, _, err = cluster.run("true", hosts="host1")
    finally:
        cluster.ssh = known
    assert code == 255
    assert "let it in without a password: ssh-copy-id host1" in err
