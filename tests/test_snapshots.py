"""Snapshots of ranks: who may write and read them, and what a rank that has ended leaves behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hipress import snapshots
from hipress.errors import UsageError
from hipress.snapshots import Event, Snapshot, Split, Writer, read


def split(**changes):
    values = {"step_s": 0.1, "compute_s": 0.06, "wait_s": 0.04, "encode_s": 0.01, "wire_s": 0.05,
              "decode_s": 0.02, "num_steps": 10, "sent_bytes": 1e6, "ratio": 30.0}  # fmt: skip
    return Split(**(values | changes))


def snapshot(**changes):
    values = {
        "job": "abcd", "program": "train.py", "rank": 0, "num_ranks": 2, "host": "here",
        "pid": 1, "time": 1e9, "step": 40, "mode": "compressed", "plan": "onebit (ps)",
        "setup_steps": 1, "setup_s": 0.5, "split": split().model_dump(),
        "events": [(1e9, 7, "plan", "onebit is faster")],
    }  # fmt: skip
    return values | changes


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "hipress"


def test_what_is_written_is_read_until_it_is_closed(folder):
    """Catches: a field that is lost on the way, a file that stays, a shorter text after a longer
    one that leaves the end of it, a folder that others can read."""
    first, second = Writer(folder, "abcd", 0), Writer(folder, "abcd", 1)
    second.write(snapshot(rank=1))
    first.write(snapshot(plan="x" * 400))
    first.write(snapshot(step=41))
    one, other = read(folder)
    assert one.model_dump(exclude={"age_s"}) == Snapshot(**snapshot(step=41)).model_dump(
        exclude={"age_s"}
    )
    assert one.events == (Event(1e9, 7, "plan", "onebit is faster"),) and one.age_s < 60
    assert other.rank == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    first.close()
    first.close()
    assert [one.rank for one in read(folder)] == [1]
    second.close()
    assert list(folder.iterdir()) == []


ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "exits at once": "os._exit(0)",
    # As the workers of a DataLoader, which outlive a rank that is killed for some seconds.
    "leaves a worker": "os.fork() or time.sleep(60); os._exit(0)",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_has_ended_is_not_shown(folder, end):
    """Catches: a job that is shown for ever after it was killed, and files that pile up."""
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from hipress.snapshots import Writer\n"
        f"writer = Writer(Path({str(folder)!r}), 'abcd', 0)\n"
        f"writer.write({snapshot()!r})\n"
        "print('written', flush=True)\n"
        "sys.stdin.readline()\n"
        f"{ENDS[end]}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "written\n"
        assert [one.rank for one in read(folder)] == [0]
        process.stdin.write("\n")
        process.stdin.close()
        process.wait(20)
        until = time.monotonic() + 10  # a worker lets go of the lock when it first runs
        while read(folder) and time.monotonic() < until:
            time.sleep(0.01)
        assert read(folder) == []
        assert list(folder.iterdir()) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL) if end == "leaves a worker" else None
        process.stdout.close()


def test_a_forked_process_removes_nothing(folder):
    """Catches: a worker whose end takes the rank from the view."""
    writer = Writer(folder, "abcd", 0)
    writer.write(snapshot())
    pid = os.fork()
    if pid == 0:
        writer.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert [one.rank for one in read(folder)] == [0]
    writer.close()


def wrong(kind, folder):
    """Makes a folder that must not be used; returns what is said of it."""
    if kind == "a link":
        (folder.parent / "other").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "other")
        return "is not a folder"
    folder.mkdir(mode=0o700)
    if kind == "mode":
        folder.chmod(0o770)
        return "can be written by others (mode 770)"
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, -1)
    return "belongs to user 12345"


@pytest.mark.parametrize("kind", ["mode", "a link", "owner"])
def test_a_folder_of_others_is_refused(folder, kind):
    """Catches: numbers of somebody else in the view, and files written where others say."""
    said = wrong(kind, folder)
    with pytest.raises(PermissionError) as caught:
        Writer(folder, "abcd", 0)
    assert said in str(caught.value)
    with pytest.raises(UsageError) as refused:
        read(folder)
    assert said in str(refused.value)
    assert str(refused.value).endswith("may be anybody's; remove it, and start the job again.")
    assert list(folder.iterdir()) == []


def test_a_folder_that_does_not_exist_is_empty(folder):
    assert read(folder) == []


def test_a_reader_never_sees_parts_of_two_snapshots(folder):
    """Catches: a rank with the step of one second and the times of another."""
    writer = Writer(folder, "abcd", 0)
    done = threading.Event()

    def write():
        step = 0
        while not done.is_set():
            step += 1
            writer.write(snapshot(step=step, setup_steps=step, program="p" * (step % 300)))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        end = time.monotonic() + 0.5
        seen = [one for _ in iter(lambda: time.monotonic() < end, False) for one in read(folder)]
    finally:
        done.set()
        thread.join()
    assert len(seen) > 20
    assert all(one.step == one.setup_steps for one in seen)
    assert all(len(one.program) == one.step % 300 for one in seen)
    # Half of one and half of the next, as long as the reader looks.
    fd = os.open(folder / "abcd-0.json", os.O_WRONLY)
    os.pwrite(fd, b"0", 0)
    os.close(fd)
    assert read(folder) == []
    writer.close()


def test_the_folder_follows_the_system(tmp_path):
    """Catches: `hipress top` that looks elsewhere than ranks write."""
    assert snapshots.folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "hipress"
    gone = str(tmp_path / "gone")
    for environ in ({}, {"XDG_RUNTIME_DIR": gone}, {"XDG_RUNTIME_DIR": "relative"}):
        assert snapshots.folder(environ).name == f"hipress-{os.geteuid()}"


@pytest.mark.parametrize("kind", ["mode", "a link", "owner"])
def test_a_runtime_folder_of_others_is_not_used(folder, kind):
    """Catches: root, after `sudo -E`, who writes where another user can put links."""
    wrong(kind, folder)
    found = snapshots.folder({"XDG_RUNTIME_DIR": str(folder)})
    assert found.name == f"hipress-{os.geteuid()}"


def test_a_link_in_the_place_of_the_folder_removes_nothing(folder, tmp_path, monkeypatch):
    """Catches: a look at the folder, and then files that are removed where a link points."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("old.json", "kept.json", "abcd-1.json"):
        (elsewhere / name).touch()
    is_locked = snapshots._is_locked

    def swapped(fd):
        if not folder.is_symlink():
            folder.rename(tmp_path / "moved")
            folder.symlink_to(elsewhere)
        return is_locked(fd)

    writer = Writer(folder, "abcd", 1)
    (folder / "old.json").touch()
    monkeypatch.setattr(snapshots, "_is_locked", swapped)
    read(folder)
    writer.close()
    assert {one.name for one in elsewhere.iterdir()} == {"old.json", "kept.json", "abcd-1.json"}
    assert not (tmp_path / "moved/old.json").exists()


def test_root_of_an_emulated_host_is_the_user_outside(monkeypatch):
    """Catches: ranks of a lab without root that write to root's folder."""
    texts = {"0 1000 1\n": 1000, "0 0 4294967295\n": 0, "0 1000 1\n1 2000 5\n": 0, "": 0}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for text, user in texts.items():
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert snapshots._user() == user


def test_the_slowest_rank_is_the_one_that_computes_longest():
    """Catches: the rank that waits longest, and one that is named for noise."""
    splits = [split(compute_s=0.06), None, split(compute_s=0.09), split(compute_s=0.061)]
    assert snapshots.slowest(splits) == 2
    assert snapshots.slowest([splits[0], splits[3]]) is None
    assert snapshots.slowest([splits[2]]) is None
    assert snapshots.slowest([]) is None
