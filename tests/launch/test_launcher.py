"""Jobs over a stand-in for ssh: who fails, who is ended, what is said; and nothing is left."""

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.grid import full
from tests.launch.conftest import marked, wait_until_gone

SLEEP = "exec sleep 300"


def say(err):
    """Return what the launcher itself said, without who is where, and that two hosts are one."""
    lines = [line for line in err.splitlines() if line.startswith("hipress: ")]
    return [line for line in lines if "they meet at" not in line and "one machine" not in line]


def test_ranks_follow_the_order_of_hosts(run, ssh, two):
    done = run(
        "--ssh", ssh(), "--hosts-file", two, "--", "sh", "-c", "echo $RANK $HOST; echo e >&2"
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 one", "[rank 1] 1 two"]
    lines = sorted(done.stderr.splitlines())
    assert lines[:2] == ["[rank 0] e", "[rank 1] e"]
    (where,) = (line for line in lines[2:] if "they meet" in line)
    assert where.startswith("hipress: ranks 0 on one, 1 on two; they meet at 127.0.0.1:")
    (warning,) = (line for line in lines[2:] if "they meet" not in line)
    assert warning.removeprefix("hipress: ") in {
        f"{names} are one machine, and ranks of both count its GPUs from 0; name it once, with as "
        f"many slots as it shall have ranks"
        for names in ("one and two", "two and one")
    }


def test_a_rank_that_fails_ends_all(run, ssh, two, marker):
    command = f"[ $RANK = 1 ] && echo why >&2 && exit 7; {SLEEP}"
    begin = time.monotonic()
    done = run("--ssh", ssh(), "--hosts-file", two, "--env", f"M={marker}", "sh", "-c", command)
    assert done.returncode == 7
    assert say(done.stderr) == [
        "hipress: rank 1 on two ended with exit code 7; the others were ended"
    ]
    assert "[rank 1] why" in done.stderr.splitlines()
    assert "a page about a failure" not in done.stderr
    assert time.monotonic() - begin < 60
    wait_until_gone(marker)


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("kill -9 $$", 137, "was ended by signal 9"),
        # With what stands around it, which can report nothing.
        ("kill -9 0", 137, "was ended by signal 9"),
        ("exit 255", 255, "ended with exit code 255"),
        # Its child has its output, and never stops.
        ("yes & sleep 0.3; exit 3", 3, "ended with exit code 3"),
    ],
    ids=["signal", "group", "code", "talkative"],
)
def test_how_a_rank_ended_is_told(run, marker, command, code, says):
    whole = f"[ $RANK = 1 ] && {{ {command}; }}; {SLEEP}"
    done = run("--nproc", 2, "--env", f"M={marker}", "sh", "-c", whole)
    assert done.returncode == code
    assert done.stderr == f"hipress: rank 1 {says}; the others were ended\n"


def test_a_command_that_is_not_there(run):
    done = run("--nproc", 1, "no-such-command", "x")
    assert done.returncode == 127
    assert done.stderr.splitlines() == [
        "[rank 0] hipress: command 'no-such-command' is not there: check its name, and PATH on "
        "this host",
        "hipress: rank 0 ended with exit code 127",
    ]


def test_lines_of_many_ranks_are_whole_and_kept(run, tmp_path):
    code = (
        "import os, sys\n"
        "for n in range(300): print(os.environ['RANK'] * 20000 if n == 7 else n)\n"
        "sys.stderr.write('10%\\r20%\\r\\nno end')"
    )
    done = run("--nproc", 4, "--output", "logs/a", "--", "python", "-c", code)
    assert done.returncode == 0
    for rank in range(4):
        prefix = f"[rank {rank}] "
        found = [line[len(prefix) :] for line in done.stdout.split("\n") if prefix in line[:9]]
        assert found == [str(rank) * 20000 if n == 7 else str(n) for n in range(300)]
        errors = [line for line in done.stderr.split("\n") if line.startswith(prefix)]
        assert errors == [f"{prefix}10%", f"{prefix}20%", f"{prefix}no end"]
        kept = (tmp_path / f"logs/a/rank{rank}.log").read_text().splitlines()
        assert sorted(kept) == sorted([*found, "10%", "20%", "no end"])
    assert len(done.stdout.splitlines()) == 4 * 300


def test_variables_and_folder(run, ssh, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    show = (
        "command -v python; pwd; echo $A,$B,$HIPRESS_LOG,$X,$GLOO_SOCKET_IFNAME,$TP_SOCKET_IFNAME"
    )
    done = run(
        *("-H", "one", "--ssh", ssh("unset A B HIPRESS_LOG X"), "--dir", there),
        *("--env", "A", "--env", "B=it's $B", "--interface", "lo"),
        *("sh", "-c", show),
        env={"A": "a b", "HIPRESS_LOG": "error", "X": "x"},
    )
    assert done.returncode == 0, done.stderr
    python = Path(sys.executable).parent / "python"  # the one that runs hipress
    assert (
        done.stdout == f"[rank 0] {python}\n[rank 0] {there}\n[rank 0] a b,it's $B,error,,lo,lo\n"
    )


def test_text_of_a_login_shell_is_shown_and_not_obeyed(run, ssh):
    # The title of a terminal is set without a line end.
    shell = "echo Welcome; echo '{\"is\": \"over\"}'; printf '\\033]0;one\\007'"
    done = run("-H", "one", "--ssh", ssh(shell), "--timeout", 20, "echo", "x")
    assert done.returncode == 0
    assert done.stdout == (
        '[one] Welcome\n[one] {"is": "over"}\n[one] \x1b]0;one\x07\n[rank 0] x\n'
    )


def test_the_folder_is_searched_by_ranks_only(run, tmp_path):
    for name in ("secrets.py", "torch.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit(77)")
    (tmp_path / "mine.py").write_text("TEXT = 'found'")
    (tmp_path / "train.py").write_text("import mine; print(mine.TEXT)")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = run("--nproc", 1, "python", "train.py", env={"TMPDIR": str(temporary)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "[rank 0] found\n", "")
    assert list(temporary.iterdir()) == []  # where torchrun keeps its notes


@pytest.mark.parametrize(
    ("extra", "code", "says"),
    [
        (
            "echo 'connect to host one port 22: Connection refused' >&2; exit 255",
            255,
            "ssh cannot connect to one (connect to host one port 22: Connection refused); is sshd "
            "running there, and on that port (--ssh-port)?",
        ),
        (
            "echo 'sh: 1: exec: /py: not found' >&2; exit 127",
            127,
            "one has no {python} (sh: 1: exec: /py: not found); name the Python of that host with "
            "--python",
        ),
        (
            f"exec {sys.executable} -I -S -c 'import hipress.launch.agent'",
            1,
            "one has no hipress for its {python}; install it there, or name a Python that has it "
            "with --python",
        ),
        ("exit 3", 3, "one could not start its agent, exit code 3"),
        (
            'printf \'\\036{"is": "up", "version": "0.0"}\\n\'; exec cat',
            2,
            "one has hipress 0.0 and this machine ",
        ),
        (
            'printf \'\\036{"is": "up", "version": "0.1.0"}\\n\'; exit 255',
            255,
            "the connection to one was lost (exit code 255); all ranks were ended",
        ),
    ],
    ids=["refused", "no-python", "no-hipress", "other", "version", "lost"],
)
def test_a_host_that_does_not_come_up(run, ssh, extra, code, says):
    done = run("-H", "one", "--ssh", ssh(extra), "true")
    assert done.returncode == code
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("hipress: " + says.format(python=sys.executable))


def test_one_host_that_does_not_come_up_ends_the_others(run, ssh, two, marker):
    done = run(
        *("--ssh", ssh("[ $HOST = two ] && sleep 1 && exit 255"), "--hosts-file", two),
        *("--env", f"M={marker}", "sh", "-c", SLEEP),
    )
    assert done.returncode == 255
    assert "ssh cannot connect to two; try it by hand" in done.stderr


def test_no_ssh_at_all(run):
    done = run("-H", "one", "--ssh", "no-such-ssh", "true")
    assert done.returncode == 127
    assert done.stderr == (
        "hipress: 'no-such-ssh' cannot be started: No such file or directory; name another with "
        "--ssh\n"
    )


def test_a_folder_and_a_network_card_that_a_host_has_not(run, ssh):
    done = run("-H", "one", "--ssh", ssh(), "--dir", "/no/such", "true")
    assert done.returncode == 2
    assert say(done.stderr) == [
        "hipress: one: folder '/no/such' cannot be entered there (No such file or directory); "
        "name one that all hosts have with --dir"
    ]
    done = run("-H", "one", "--ssh", ssh(), "--interface", "no0", "true")
    assert done.returncode == 2
    assert "hipress: one: there is no network card 'no0' there; --interface takes one of: " in (
        done.stderr
    )


@pytest.mark.alone
def test_a_start_that_hangs_is_explained(run, ssh, tmp_path, marker):
    hosts = tmp_path / "hosts.json"
    # 192.0.2.0/24 is for examples in books: nobody is there.
    hosts.write_text('[{"host": "one", "address": "192.0.2.1"}, "two", "three"]')
    silent = "[ $HOST = three ] && exec sleep 300"
    done = run(
        *("--ssh", ssh(silent), "--hosts-file", hosts, "--timeout", 7, "--port", 4321),
        *("--env", f"M={marker}", "sh", "-c", SLEEP),
    )
    assert done.returncode == 124
    (said,) = say(done.stderr)
    assert said.startswith("hipress: not all ranks have started after 7 s: ")
    assert "two cannot reach 192.0.2.1:4321 (" in said
    assert "): open that port, give another with --port, or put the right address of one" in said
    assert "three has not answered through ssh (try: " in said


def test_a_port_that_is_taken_gives_the_sentence(run, ssh, two):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = run("--ssh", ssh(), "--hosts-file", two, "--port", port, "true")
    assert done.returncode == 2
    assert say(done.stderr) == [
        f"hipress: one: port {port} cannot be used there (Address already in use); name another "
        f"with --port, or leave it out and a free one is found"
    ]


TRAP = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
    "print('up', flush=True); time.sleep(300)"
)
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(300)"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_lets_ranks_end_in_order(start, ssh, two, marker, number, code):
    program = start(
        *("--ssh", ssh(), "--hosts-file", two, "--env", f"M={marker}", "python", "-c", TRAP)
    )
    assert sorted(program.stdout.readline() for _ in range(2)) == ["[rank 0] up\n", "[rank 1] up\n"]
    os.killpg(program.pid, number)  # as a terminal does: to the whole group
    out, err = program.communicate(timeout=60)
    assert program.returncode == code
    assert sorted(out.splitlines()) == ["[rank 0] bye", "[rank 1] bye"]
    assert say(err) == []
    wait_until_gone(marker)


def ignore_signals():
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def test_signals_that_nohup_has_ignored_stay_so(start):
    program = start(
        *("--nproc", 1, "sh", "-c", "echo up; sleep 0.5; echo end"), preexec_fn=ignore_signals
    )
    assert program.stdout.readline() == "[rank 0] up\n"
    for number in (signal.SIGHUP, signal.SIGINT):
        program.send_signal(number)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (0, "[rank 0] end\n", "")


def test_ranks_that_do_not_listen_are_killed_after_a_grace(start, marker):
    program = start(
        *("--nproc", 2, "--env", f"M={marker}", "python", "-c", STUBBORN), constants={"GRACE_S": 1}
    )
    for _ in range(2):
        program.stdout.readline()
    program.terminate()
    assert program.wait(60) == 143
    wait_until_gone(marker)


DEAF = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
    "print('up', flush=True)\n"
    "while True: time.sleep(300)"
)


@pytest.mark.alone
def test_a_second_ctrl_c_kills(start, marker):
    program = start(
        *("--nproc", 2, "--env", f"M={marker}", "python", "-c", DEAF), constants={"GRACE_S": 60}
    )
    for _ in range(2):
        assert program.stdout.readline().endswith(" up\n")
    begin = time.monotonic()
    program.send_signal(signal.SIGINT)
    for _ in range(2):
        assert program.stdout.readline().endswith(" told\n")
    program.send_signal(signal.SIGINT)
    assert program.wait(60) == 130
    assert time.monotonic() - begin < 40  # the grace alone is 60 s
    wait_until_gone(marker)


def kill(marker, text):
    for pid, command in marked(marker).items():
        if text in command:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_until(is_so, seconds=30):
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_process_that_may_not_be_killed_is_named(run, ssh):
    init = Path("/proc/1/comm").read_text().strip()
    agent = "from hipress.launch import agent as a; a.signal_descendants = lambda _: [1]; a.main()"
    done = run("-H", "one", "--ssh", ssh(f"exec {sys.executable} -c '{agent}'"), "true")
    assert done.returncode == 0
    assert done.stderr == f"hipress: one: process 1 ({init}) is another user's: kill it there\n"


# Each rank leaves an orphan in a session of its own.
ORPHAN = "setsid sleep 300 & echo up; exec sleep 300"


@pytest.mark.parametrize("who", ["launcher", "agent", "torchrun"])
def test_after_sigkill_nothing_is_left(start, ssh, two, marker, who):
    program = start(
        *("--ssh", ssh(), "--hosts-file", two, "--env", f"M={marker}", "sh", "-c", ORPHAN),
        env={"M2": marker},
    )
    for _ in range(2):
        program.stdout.readline()
    if who == "launcher":
        program.kill()
    else:
        text = {"agent": "hipress.launch.agent", "torchrun": "torch.distributed.run"}
        kill(marker, text[who])
    assert program.wait(60) != 0
    if who == "agent":
        # Who is killed can end nobody: ranks die with their parents, orphans stay orphans.
        wait_until(lambda: all("sleep" in command for command in marked(marker).values()))
        kill(marker, "sleep 300")
    wait_until_gone(marker)


@full
def test_a_reader_that_leaves_ends_all(start, marker):
    program = start("--nproc", 1, "--env", f"M={marker}", "sh", "-c", "while echo x; do :; done")
    program.stdout.readline()
    program.stdout.close()
    assert program.wait(60) == 141
    wait_until_gone(marker)


MUCH = """
open("begun", "w").close()
for n in range(6_000):
    print(f"{n:0999}")
open("done", "w").close()
"""


def test_a_reader_that_stalls_stalls_the_ranks_and_loses_nothing(start, tmp_path):
    program = start("--nproc", 1, "python", "-c", MUCH)
    wait_until((tmp_path / "begun").exists)
    time.sleep(1)
    assert not (tmp_path / "done").exists()  # 6 MB, of which a bit over 2 MB are on their way
    out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, "")
    assert out.splitlines() == [f"[rank 0] {n:0999}" for n in range(6_000)]


@full
def test_a_reader_that_stalls_does_not_delay_the_end(start, marker):
    program = start("--nproc", 1, "--env", f"M={marker}", "yes", constants={"_KILL_S": 0.5})
    program.stdout.readline()
    time.sleep(0.5)
    begin = time.monotonic()
    program.terminate()
    assert program.wait(60) == 143
    assert time.monotonic() - begin < 30
    wait_until_gone(marker)


@full
def test_output_that_cannot_be_written(run, start, tmp_path):
    # To a full disk: told once, and files are kept.
    with open("/dev/full", "w") as full:
        done = run("--nproc", 1, "--output", "o", "sh", "-c", "echo a; echo b", stdout=full)
    assert done.returncode == 0
    assert done.stderr == "hipress: stdout cannot be written any more (No space left on device)\n"
    assert (tmp_path / "o/rank0.log").read_text() == "a\nb\n"
    # To a stream that was closed from the start.
    done = run("--nproc", 1, "sh", "-c", "echo a; echo b >&2; exit 4", preexec_fn=close_stderr)
    assert (done.returncode, done.stdout) == (4, "[rank 0] a\n")
    # In signs that the stream lacks.
    arrow = r"printf '\342\206\222\n'"
    done = run("--nproc", 1, "sh", "-c", arrow, env={"PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "[rank 0] \\u2192\n", "")


def close_stderr():
    os.close(2)


def test_a_folder_that_is_gone(run, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run("--nproc", 1, "true", cwd=gone, preexec_fn=gone.rmdir)
    assert done.returncode == 2
    assert done.stderr == (
        "hipress: the current folder does not exist any more (No such file or directory); go "
        "to another, or name one with --dir.\n"
    )


def test_a_launcher_that_falls_silent_ends_all(start, marker):
    constants = {"SILENCE_S": 1, "GRACE_S": 1}
    command = ("--nproc", 1, "--env", f"M={marker}", "sh", "-c", "echo up; exec sleep 300")
    program = start(*command, constants=constants)
    program.stdout.readline()
    os.kill(program.pid, signal.SIGSTOP)  # its connections stay open
    wait_until(lambda: not marked(marker).keys() - {program.pid})
    os.kill(program.pid, signal.SIGCONT)
    assert program.wait(60) != 0


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.alone
def test_after_ctrl_z_the_job_goes_on(start):
    # In this session: a group that is alone in its own cannot be stopped.
    options = {"start_new_session": False, "preexec_fn": os.setpgrp}
    program = start(
        *("--nproc", 1, "sh", "-c", "echo up; sleep 5; echo end"),
        constants={"SILENCE_S": 2},
        **options,
    )
    program.stdout.readline()
    os.killpg(program.pid, signal.SIGTSTP)
    wait_until(lambda: state(program.pid) == "T")
    time.sleep(3)
    os.killpg(program.pid, signal.SIGCONT)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (0, "[rank 0] end\n", "")
