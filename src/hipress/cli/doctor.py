"""`hipress doctor`: what this machine has, what is missing, which backend will be used; and
what compression would give a job (in `doctor_job`).
"""

import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

import hipress
from hipress import settings
from hipress.bench import machine
from hipress.bench.machine import Facts
from hipress.cli.options import OWN, Batch, Data
from hipress.cli.simulate import MOST_NODES
from hipress.cli.ui import print_table, progress_bar, text
from hipress.errors import HipressError, install_command
from hipress.version import docs_url

EXTRAS: dict[str, tuple[str, ...]] = {
    "data": ("pillow", "scikit-learn"),
    "frameworks": ("accelerate", "lightning", "transformers"),
    "gpu": ("triton",),
    "lab": ("pyroute2",),
    "report": ("matplotlib", "plotly"),
}
"""The extras a user may add, and the packages they bring (a test compares pyproject.toml)."""

app = typer.Typer()


@app.command(epilog="Example: hipress doctor --model resnet50 --hosts 8 --rate 10gbit")
def doctor(
    model: Annotated[
        str | None,
        Option(help=f"A model ({docs_url('models')}), {OWN}: say what compression would give it."),
    ] = None,
    data: Data = None,
    hosts: Annotated[
        int | None, Option(min=1, max=MOST_NODES, help="Hosts of that job; 4 if not given.")
    ] = None,
    rate: Annotated[
        str | None, Option(help="Rate of each host's link; 1gbit if not given.")
    ] = None,
    codec: Annotated[
        str | None,
        Option(
            help="Codecs, separated by commas; int8, and the one recommended for --optimizer "
            "(onebit without it), if not given."
        ),
    ] = None,
    batch: Batch = None,
    optimizer: Annotated[
        str | None,
        Option(help="Optimizer of that job: sgd (without momentum), sgd-momentum, adam or adamw."),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object in place of the table.")
    ] = False,
) -> None:
    """Say what this machine has, what is missing, and which backend will be used and why.

    With --model: say what compression would give that job, how sure this is,
    and what limits it. The model's step and the codecs are timed here, for a
    few seconds; every host is taken to be a machine like this one.
    """
    from hipress.cli import doctor_job

    job = doctor_job.read_job(model, data, hosts, rate, codec, batch, optimizer)
    if job is not None:
        with progress_bar(1) as begin:
            found = doctor_job.examine_job(job, begin(f"timing {job.model}"))
        if as_json:
            print(json.dumps(doctor_job.as_json(found), indent=2))
        else:
            doctor_job.show(found)
        return
    report = examine()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        rows = [{"what": what, "found": found} for what, found in _rows(report)]
        print_table("hipress doctor", [text("what"), text("found")], rows)
    for problem in report["problems"]:
        print(f"hipress: cannot work here: {problem}", file=sys.stderr)
    if not report["ok"]:
        raise typer.Exit(1)


def examine() -> Facts:
    """Returns everything the doctor knows, as plain values ready for JSON."""
    from hipress.compll.build import folder_problem

    torch, devices = machine.torch_facts()
    numba = machine.import_facts("numba")
    triton = machine.package_version("triton")
    problems = []
    if torch["error"]:
        problems.append(
            f"torch cannot be imported ({torch['error']}); "
            f"install it with: {install_command('torch')}"
        )
    values, cache = _settings(problems)
    asked = values[settings.BACKEND.name]
    wanted = asked["text"].lower() if asked["valid"] else None
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1" and triton is not None
    cpu = cpu_backend(wanted, numba, interpreted=interpreted)
    cuda = cuda_backend(wanted, devices, triton)
    if asked["valid"]:
        # Where both are there, either is enough; HIPRESS_BACKEND may ask for one of them.
        choice = cuda if wanted == "gpu" and cpu["backend"] is None else cpu
        if choice["backend"] is None:
            problems.append(choice["why"])
    if {cpu["backend"], cuda["backend"]} & {"cpu", "gpu"} and cache:
        if not cache["writable"]:
            problems.append(
                f"the cache folder cannot be written ({cache['error']}); "
                f"set {settings.CACHE_DIR.name} to a folder that can"
            )
        elif unsafe := folder_problem(Path(cache["path"])):
            problems.append(unsafe.removesuffix("."))
    return {
        "ok": not problems,
        "problems": problems,
        "hipress": {"version": hipress.__version__},
        "python": {"version": platform.python_version(), "implementation": sys.implementation.name},
        "torch": torch,
        "numba": numba,
        "triton": {"version": triton},
        "cuda_devices": devices,
        "cores": machine.core_facts(),
        "memory": machine.memory_facts(),
        "cache": cache,
        "settings": values,
        "unknown_variables": [
            {"name": stray.name, "suggestion": stray.suggestion}
            for stray in settings.unknown_variables()
        ],
        "extras": _extras(),
        "lab": _lab(),
        "backends": {"cpu": cpu, "cuda": cuda},
    }


def cpu_backend(asked: str | None, numba: Facts, *, interpreted: bool = False) -> Facts:
    """Returns the backend that CPU tensors will get, or None for it, and why.

    `asked` is the value of HIPRESS_BACKEND, or None if it is not valid; with `interpreted` Triton
    runs kernels for a GPU on the CPU.
    """
    name = settings.BACKEND.name
    if asked is None:
        return _choice(None, f"{name} has no valid value")
    if asked == "reference":
        return _choice("reference", f"{name}=reference asks for it; it is slow")
    if asked == "gpu" and interpreted:
        return _choice("gpu", "TRITON_INTERPRET=1: kernels are interpreted, for tests")
    if asked == "gpu":
        return _choice(None, f"{name}=gpu is for CUDA tensors only; set it to auto to use both")
    if numba["error"]:
        return _choice(
            None,
            f"numba cannot be imported ({numba['error']}); install it with: "
            f"{install_command('numba')}, or set {name}=reference for the slow backend that does "
            "without",
        )
    reason = "is auto" if asked == "auto" else "asks for it"
    return _choice("cpu", f"{name} {reason}, and numba {numba['version']} works")


def cuda_backend(asked: str | None, devices: list[Facts], triton: str | None) -> Facts:
    """Returns the backend that CUDA tensors will get, or None for it, and why."""
    name = settings.BACKEND.name
    if asked is None:
        return _choice(None, f"{name} has no valid value")
    if not devices:
        rest = f"; set {name} to auto for CPU tensors" if asked == "gpu" else ""
        return _choice(None, f"torch sees no CUDA device{rest}")
    seen = f"torch sees {len(devices)} CUDA device(s)"
    if asked in ("reference", "cpu"):
        only = f"{name}={asked} is for CPU tensors only"
        return _choice(None, f"{only} ({seen}); set it to auto to use both")
    if triton is None:
        how = f"add it with: {install_command('triton')}"
        return _choice(None, f"{seen}, but Triton is not installed; {how}")
    reason = "is auto" if asked == "auto" else "asks for it"
    return _choice("gpu", f"{name} {reason}, {seen}, and Triton is {triton}")


def _choice(backend: str | None, why: str) -> Facts:
    return {"backend": backend, "why": why}


def _settings(problems: list[str]) -> tuple[Facts, Facts | None]:
    """Returns each setting as it stands and the state of the cache folder; adds bad values."""
    values: Facts = {}
    cache = None
    for setting in settings.SETTINGS:
        row = {"text": setting.text(), "valid": True, "meaning": setting.meaning}
        try:
            value = setting.read()
            if setting is settings.CACHE_DIR:
                cache = machine.folder_facts(value)
        except HipressError as error:
            problems.append(str(error))
            row["valid"] = False
        values[setting.name] = row
    return values, cache


def _extras() -> Facts:
    report: Facts = {}
    for extra, packages in EXTRAS.items():
        versions = {package: machine.package_version(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        install = install_command(*missing) if missing else None
        report[extra] = {"packages": versions, "install": install}
    return report


def _lab() -> Facts:
    facts = machine.lab_facts()
    if facts["pyroute2"] is None:
        verdict = "no: pyroute2 is missing"
    elif facts["root"] and facts["network_namespaces"]:
        verdict = "yes: as root"
    elif facts["user_namespaces"]:
        verdict = "yes: in a user namespace"
    else:
        verdict = "no: this process may not make network namespaces; run as root"
    return {**facts, "emulated_links": verdict}


def _rows(report: Facts) -> Iterator[tuple[str, str]]:
    python, torch, cores, memory = (report[k] for k in ("python", "torch", "cores", "memory"))
    yield "hipress", report["hipress"]["version"]
    yield "Python", f"{python['version']} ({python['implementation']})"
    yield "torch", _version(torch) + (f", {torch['build']} build" if torch["build"] else "")
    if torch["note"]:
        yield "torch says", torch["note"]
    yield "numba", _version(report["numba"])
    yield "triton", report["triton"]["version"] or "not installed"
    if not report["cuda_devices"]:
        yield "CUDA devices", "none"
    for index, gpu in enumerate(report["cuda_devices"]):
        size = f"{_gib(gpu['memory_bytes'])}, capability {gpu['capability']}"
        yield f"CUDA device {index}", f"{gpu['name']}, {size}"
    quota = cores["cgroup_quota"]
    limits = f"{cores['installed']} installed, affinity {cores['affinity']}, cgroup quota "
    yield "cores usable", f"{cores['usable']} ({limits}{'none' if quota is None else f'{quota:g}'})"
    limit = memory["cgroup_limit_bytes"]
    limits = f"{_gib(memory['total_bytes'])} installed, cgroup limit "
    limits += "none" if limit is None else _gib(limit)
    yield "memory usable", f"{_gib(memory['usable_bytes'])} ({limits})"
    if cache := report["cache"]:
        state = "can be written" if cache["writable"] else f"CANNOT be written ({cache['error']})"
        yield "cache folder", f"{cache['path']}, {state}"
    for name, row in report["settings"].items():
        valid = "" if row["valid"] else ", which is not valid"
        yield name, f"{row['text']}{valid} ({row['meaning']})"
    for stray in report["unknown_variables"]:
        hint = f"; did you mean {stray['suggestion']}?" if stray["suggestion"] else ""
        yield stray["name"], f"is set, but there is no such setting{hint}"
    for extra, row in report["extras"].items():
        versions = (f"{name} {version or 'missing'}" for name, version in row["packages"].items())
        command = f"; add with: {row['install']}" if row["install"] else ""
        yield f"extra {extra}", ", ".join(versions) + command
    lab = report["lab"]
    abilities = ("root", "network_namespaces", "user_namespaces")
    detail = ", ".join(f"{k.replace('_', ' ')} {'yes' if lab[k] else 'no'}" for k in abilities)
    yield "lab: emulated links", f"{lab['emulated_links']} ({detail})"
    for device, choice in report["backends"].items():
        backend = choice["backend"] or "no backend"
        yield f"{device.upper()} tensors", f"{backend}: {choice['why']}"


def _version(facts: Facts) -> str:
    return facts["version"] or f"cannot be imported: {facts['error']}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
