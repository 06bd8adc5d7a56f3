"""Facts about this machine and process, beside measurements and for `hipress doctor`."""

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hipress.version import __version__

Facts = dict[str, Any]

_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# cgroup v1 writes "no limit" as the largest multiple of the page size; v2 writes "max".
_NO_LIMIT_BYTES = 1 << 60


def machine_facts() -> dict[str, str | int]:
    """Returns what a reader needs to judge a timing: processor, GPU, versions, date in UTC."""
    import torch

    from hipress.probe.cache import processor

    facts: dict[str, str | int] = {
        "cpu": processor(torch.device("cpu")),
        "cores": core_facts()["affinity"],
        "python": platform.python_version(),
    }
    for package in ("torch", "numba"):
        facts[package] = package_version(package) or "not installed"
    facts["hipress"] = __version__
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    facts["date_utc"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return facts


def package_version(name: str) -> str | None:
    """Returns the version of an installed package without importing it, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_facts(name: str) -> Facts:
    """Imports a package and returns its version, or why it cannot be imported."""
    try:
        # Not only ImportError: a numba that does not fit its numpy fails in other ways.
        return {"version": str(importlib.import_module(name).__version__), "error": None}
    except Exception as error:
        return {"version": None, "error": _first_line(error)}


def torch_facts() -> tuple[Facts, list[Facts]]:
    """Returns what torch is built for and the CUDA devices that it can use."""
    facts = import_facts("torch")
    if facts["error"]:
        return {**facts, "build": None, "note": None}, []
    import torch

    build = "cpu"
    if torch.version.cuda:
        build = f"cuda {torch.version.cuda}"
    elif torch.version.hip:
        build = f"rocm {torch.version.hip}"
    # A driver that is too old shows only as a warning here, and is worth a line.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    note = _first_line(caught[0].message) if caught else None
    devices = [
        {
            "name": device.name,
            "capability": f"{device.major}.{device.minor}",
            "memory_bytes": device.total_memory,
        }
        for device in properties
    ]
    return {**facts, "build": build, "note": note}, devices


def core_facts() -> Facts:
    """Returns how many cores there are, and how many of them this process may use."""
    installed = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else installed
    quota = cgroup_cores()
    usable = affinity if quota is None else max(1, min(affinity, int(quota)))
    return {"installed": installed, "affinity": affinity, "cgroup_quota": quota, "usable": usable}


def memory_facts() -> Facts:
    """Returns the memory of the machine and the cgroup's limit on this process, in bytes."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_memory_bytes()
    return {
        "total_bytes": total,
        "cgroup_limit_bytes": limit,
        "usable_bytes": total if limit is None else min(total, limit),
    }


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Returns the memory that a process can still get, or None where the system does not say."""
    words = _read_words(meminfo)
    if "MemAvailable:" not in words:
        return None
    free = int(words[words.index("MemAvailable:") + 1]) * 1024
    return min(free, cgroup_memory_bytes() or free)


def cgroup_cores(proc: Path = _PROC_CGROUP, root: Path = _CGROUP_ROOT) -> float | None:
    """Returns the CPU quota of this process's cgroups in cores, or None where there is none."""
    quotas = []
    for folder in _cgroup_folders("cpu", proc, root):
        if (v2 := _read_words(folder / "cpu.max")) and v2[0] != "max":
            quotas.append(int(v2[0]) / int(v2[1]))
        quota, period = (_read_words(folder / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
        if quota and period and int(quota[0]) > 0:
            quotas.append(int(quota[0]) / int(period[0]))
    return min(quotas, default=None)


def cgroup_memory_bytes(proc: Path = _PROC_CGROUP, root: Path = _CGROUP_ROOT) -> int | None:
    """Returns the memory limit of this process's cgroups, or None where there is none."""
    limits = []
    for folder in _cgroup_folders("memory", proc, root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (words := _read_words(folder / name)) and words[0] != "max":
                limits.append(int(words[0]))
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def folder_facts(path: Path) -> Facts:
    """Returns whether files can be written in a folder, or in the one it would be made in."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        # A real file, gone when closed: permission bits do not show read-only mounts.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return {"path": str(path), "writable": False, "error": f"{nearest}: {error.strerror}"}
    return {"path": str(path), "writable": True, "error": None}


def lab_facts() -> Facts:
    """Returns what this process may do for an emulated cluster."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    return {
        "root": root,
        "network_namespaces": _can_unshare(_CLONE_NEWNET),
        "user_namespaces": _can_unshare(_CLONE_NEWUSER | _CLONE_NEWNET),
        "pyroute2": package_version("pyroute2"),
    }


_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_UNSHARE = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(int(sys.argv[1])) != 0)"


def _can_unshare(flags: int) -> bool:
    """Tries to enter new namespaces in a child, since each system has its own way to forbid it."""
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _UNSHARE, str(flags)],
            capture_output=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return child.returncode == 0


def _cgroup_folders(controller: str, proc: Path, root: Path) -> list[Path]:
    """Returns this process's cgroup folders for a controller, v2 and v1, each with its parents."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        # "0::/path" is the v2 tree, "4:memory:/path" a v1 tree of its own.
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        leaf = base / path.lstrip("/")
        folders += [folder for folder in (leaf, *leaf.parents) if folder.is_relative_to(base)]
    return folders


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _first_line(value: object) -> str:
    return (str(value).strip().splitlines() or [type(value).__name__])[0]
