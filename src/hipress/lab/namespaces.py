"""Namespaces of the kernel: the system calls that Python 3.11 has no names for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int, what: str) -> None:
    """Enter new namespaces; an `OSError` says which were refused."""
    _check(_libc.unshare(flags), what)


def enter_user_namespace() -> None:
    """Become root of a new user namespace, in which this user's files stay this user's."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER, "a user namespace")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise OSError(error.errno, error.strerror, "the user map of a user namespace") from None


@contextlib.contextmanager
def network_namespace_of(pid: int) -> Iterator[None]:
    """Be in the network namespace of a process for a while: a socket made there stays there."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(there, CLONE_NEWNET), "the way into a host's network namespace")
        yield
    finally:
        _check(_libc.setns(home, CLONE_NEWNET), "the way out of a host's network namespace")
        os.close(home)
        os.close(there)


def close_all_but(fds: set[int]) -> None:
    """Close what a fork has inherited: a copy left open hides from others that an end is gone."""
    first = 0
    for fd in sorted(fds):
        if first < fd:  # an empty range from 0 would close everything
            os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def set_up_host(name: str, hosts_file: str) -> None:
    """Give a host its name, its own /proc and its own /etc/hosts, as far as the system lets."""
    socket.sethostname(name)
    with contextlib.suppress(OSError):
        _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
        # Containers may hide parts of /proc and then refuse a fresh one; tools see more, no harm.
        with contextlib.suppress(OSError):
            _mount("proc", "/proc", "proc", 0)
        with tempfile.NamedTemporaryFile("w", prefix="hipress-hosts-") as file:
            file.write(hosts_file)
            file.flush()
            os.chmod(file.name, 0o644)
            # The mount keeps the file after its name is gone.
            _mount(file.name, "/etc/hosts", "", _MS_BIND)


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), None
    )
    _check(result, f"the mount of {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
