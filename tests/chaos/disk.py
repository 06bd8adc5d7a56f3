"""Small disks that can be filled, in mounts that end with the process that made them.

This module is imported before torch, which starts threads: only a process with one thread may
enter a user namespace.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 0x40000, 2
_libc = ctypes.CDLL(None, use_errno=True)


def own_mounts() -> None:
    """Gives this process and its children mounts of their own, which no other process sees."""
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        _check(_libc.unshare(_CLONE_NEWUSER), "a user namespace")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    _check(_libc.unshare(_CLONE_NEWNS), "a mount namespace")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")


def mount(folder: Path, size: str) -> None:
    """Makes a folder a disk of its own, in memory."""
    folder.mkdir(exist_ok=True)
    _mount("chaos", str(folder), "tmpfs", 0, f"size={size}")


def unmount_all(folder: Path) -> None:
    """Undoes `mount` for all folders below one, also while files are open."""
    with open("/proc/self/mounts") as lines:
        mounts = [Path(line.split()[1]) for line in lines]
    for mount in mounts:
        if folder in mount.parents:
            _check(_libc.umount2(str(mount).encode(), _MNT_DETACH), f"the end of mount {mount}")


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    words = (text.encode() or None for text in (source, target, kind))
    _check(
        _libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None),
        f"the mount of {target}",
    )


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
