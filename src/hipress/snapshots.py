"""Snapshots of running jobs: each rank writes one to a private folder; `hipress top` reads them.

A rank holds a lock on its file as long as it lives. The kernel releases the lock when a process
ends, however it ends. A process id would not do: it is used again, and means nothing outside the
process namespace of an emulated host or a container.

A file is written in place, by one system call: to replace it takes some file systems milliseconds.
The number of the snapshot stands before and after it, so a reader sees that it has got parts of
two, and reads again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from hipress.errors import UsageError

MAX_BYTES = 2**18
"""Most bytes of a file; a snapshot has 0.5 to 3 kB."""
MAX_READS = 5
MAX_TEXT = 500
MAX_EVENTS = 20
"""Number of events in a snapshot."""


class Event(NamedTuple):
    """Something that a job has decided."""

    time: float
    """Seconds since 1970."""
    step: int
    kind: str
    """`plan` or `guard`."""
    text: str


class Split(BaseModel):
    """Where the time of a step goes, in seconds: the mean over some steps of one rank.

    `step_s` is `compute_s` + `wait_s`. The exchange overlaps with both; it takes `encode_s` +
    `wire_s` + `decode_s`.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    num_steps: int = Field(ge=1)
    step_s: float = Field(ge=0)
    """Seconds from the end of one exchange to the end of the next."""
    compute_s: float = Field(ge=0)
    """The step without `wait_s`: forward, backward, optimizer, data."""
    encode_s: float = Field(ge=0)
    """Time of the exchange in which gradients are encoded."""
    wire_s: float = Field(ge=0)
    """Time of the exchange in which no codec works: messages are under way, or awaited."""
    decode_s: float = Field(ge=0)
    """Time of the exchange in which frames are decoded and merged."""
    wait_s: float = Field(ge=0)
    """Seconds from the last gradient of a step to the end of its exchange, when training waits."""
    sent_bytes: float = Field(ge=0)
    """Bytes that the rank has sent in a step."""
    ratio: float = Field(ge=0)
    """Bytes that a plain all-reduce of float32 would have sent, over `sent_bytes`."""


class Snapshot(BaseModel):
    """What one rank says about itself."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    job: str = Field(max_length=MAX_TEXT)
    """The same on all ranks of a job; other jobs, and other models of one, have another."""
    program: str = Field(max_length=MAX_TEXT)
    rank: int = Field(ge=0)
    num_ranks: int = Field(ge=1)
    host: str = Field(max_length=MAX_TEXT)
    pid: int
    time: float
    """When the snapshot was made, in seconds since 1970."""
    age_s: float = 0.0
    """How old it was when it was read, by the clock of the machine where it was made."""
    step: int = Field(ge=0)
    """Number of finished steps."""
    mode: str = Field(max_length=MAX_TEXT)
    plan: str = Field(max_length=MAX_TEXT)
    """What is compressed with what, in words."""
    setup_steps: int = Field(ge=0)
    """Steps that `split` leaves out, in which exchanges were set up or `auto` measured."""
    setup_s: float = Field(ge=0)
    split: Split | None
    """The split of the steps since the snapshot before; None if all of them were left out."""
    events: tuple[Event, ...] = Field(max_length=MAX_EVENTS)
    """The last events, the oldest first."""


def slowest(splits: Sequence[Split | None]) -> int | None:
    """Returns which rank computes longest, so that the others wait for it; None if none stands out.

    A rank stands out if it computes longer than the median rank by 5 % of a step.
    """
    known = sorted((split.compute_s, rank) for rank, split in enumerate(splits) if split)
    if len(known) < 2:
        return None
    median_s, (most_s, rank) = known[(len(known) - 1) // 2][0], known[-1]
    found = splits[rank]
    return rank if found is not None and most_s - median_s > 0.05 * found.step_s else None


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder of this user's snapshots, which need not exist."""
    environ = os.environ if environ is None else environ
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):  # after `su` or `sudo -E` it may be another user's
        with suppress(OSError), _opened(Path(runtime)):
            return Path(runtime) / "hipress"
    return Path(tempfile.gettempdir()) / f"hipress-{_user()}"


def _user() -> int:
    """Returns the number of this user, also for one who is root of an emulated host."""
    user = os.geteuid()
    with suppress(OSError, ValueError):
        inside, outside, count = map(int, Path("/proc/self/uid_map").read_text().split())
        if count == 1 and inside == user:  # a namespace for one user, such as the lab's
            return outside
    return user


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yields a descriptor of a folder that only this user can write.

    It stays that folder if somebody puts a link to another one in its place.

    Raises:
        FileNotFoundError: There is no such folder.
        PermissionError: It must not be used.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise PermissionError(0, f"{path} is not a folder") from None
        raise PermissionError(0, f"the folder {path} cannot be used ({error.strerror})") from None
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise PermissionError(0, f"the folder {path} belongs to user {found.st_uid}")
        if found.st_mode & 0o022:
            mode = stat.S_IMODE(found.st_mode)
            raise PermissionError(0, f"the folder {path} can be written by others (mode {mode:o})")
        yield fd
    finally:
        os.close(fd)


class Writer:
    """Writes the snapshots of one rank.

    Args:
        path: The folder; it is made if it does not exist.
        job: See `Snapshot`.
        rank: See `Snapshot`.

    Raises:
        OSError: The folder cannot be used.
    """

    def __init__(self, path: Path, job: str, rank: int) -> None:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        self._folder, self._name = path, f"{job}-{rank}.json"
        self._process = os.getpid()
        self._number = 0
        self._num_bytes = 0
        with _opened(path) as folder:
            _read_folder(folder)  # removes what killed processes have left
            # It gets its name when it is locked: to a reader it would seem to be left by a dead
            # rank.
            hidden = f".{job}-{rank}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(hidden, flags, 0o600, dir_fd=folder)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(hidden, self._name, src_dir_fd=folder, dst_dir_fd=folder)
        _locks.add(self._fd)

    def write(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the snapshot."""
        self._number += 1
        text = json.dumps(snapshot, separators=(",", ":"))
        data = f"{self._number}\n{text}\n{self._number}\n".encode().ljust(self._num_bytes)
        self._num_bytes = len(data)
        os.pwrite(self._fd, data, 0)

    def close(self) -> None:
        """Removes the file; in a forked process it does nothing."""
        if self._fd < 0 or os.getpid() != self._process:
            return
        with suppress(OSError), _opened(self._folder) as folder:
            os.unlink(self._name, dir_fd=folder)
        _locks.discard(self._fd)
        os.close(self._fd)
        self._fd = -1


_locks: set[int] = set()
"""Files that this process has locked."""


def _close_locks() -> None:
    """Lets the lock of a rank end with it, although processes that it forked live on."""
    for fd in _locks:
        with suppress(OSError):
            os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks)


def read(path: Path) -> list[Snapshot]:
    """Returns the snapshots in a folder, by job and rank; removes those of ranks that have ended.

    Raises:
        UsageError: The folder must not be used.
    """
    try:
        with _opened(path) as folder:
            return _read_folder(folder)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise UsageError(
            f"{error.strerror}, so what is in it may be anybody's; remove it, and start the job "
            "again."
        ) from None


def _read_folder(folder: int) -> list[Snapshot]:
    found = []
    for name in os.listdir(folder):
        if name.endswith(".json"):
            with suppress(OSError, ValueError):  # it may end now, or be of another version
                if (one := _read_file(name, folder)) is not None:
                    found.append(one)
    return sorted(found, key=lambda one: (one.job, one.rank))


def _read_file(name: str, folder: int) -> Snapshot | None:
    """Returns the snapshot in a file; None if its rank has ended, or has written nothing yet."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    try:
        if not _is_locked(fd):
            os.unlink(name, dir_fd=folder)
            return None
        for _ in range(MAX_READS):
            age_s = max(0.0, time.time() - os.fstat(fd).st_mtime)
            first, _, rest = os.pread(fd, MAX_BYTES, 0).decode().strip().partition("\n")
            text, _, last = rest.rpartition("\n")
            if first == last and text:
                return Snapshot.model_validate_json(text).model_copy(update={"age_s": age_s})
            time.sleep(0.001)
        return None
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
