"""Builds the distributions in dist/ and tries the wheel as a user would: `make dist`.

The wheel is made from the source distribution, so that one has what it needs. It is installed in
an empty environment in a temporary folder, where nothing of the clone can be imported, and used
there: `hipress doctor`, a training of an own script on two ranks, and `hipress demo`, before and
after the command that it names for what it lacks.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
SCRIPT = Path(__file__).with_name("train.py")
TIMEOUT_S = 300.0
BESIDES_SOURCE = {
    *("LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
    *("pyproject.toml", "setup.cfg", "setup.py"),
}
"""What the source distribution has beside src/."""


def main() -> None:
    started = time.monotonic()
    shutil.rmtree(DIST, ignore_errors=True)
    call([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)])
    [source], [wheel] = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    call([sys.executable, "-m", "twine", "check", "--strict", str(source), str(wheel)])
    check_contents(source, wheel)
    check_description(wheel)
    with tempfile.TemporaryDirectory(prefix="hipress-dist-") as folder:
        try_wheel(wheel, Path(folder))
    print(f"{source.name} and {wheel.name} work ({time.monotonic() - started:.0f} s)")


def call(
    command: list[str], expect: int = 0, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> str:
    """Runs a command and returns what it printed; any other exit code ends this program."""
    print(f"$ {shlex.join(command)}", flush=True)
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != expect:
        sys.exit(f"{done.stdout}\nexit code {done.returncode} where {expect} was expected")
    return done.stdout


def check_contents(source: Path, wheel: Path) -> None:
    """Compares the files in both distributions with the package."""
    files = (path for path in (ROOT / "src" / "hipress").rglob("*") if path.is_file())
    package = {
        str(path.relative_to(ROOT / "src")) for path in files if "__pycache__" not in path.parts
    }
    with tarfile.open(source) as archive:
        inside = [found.name.partition("/")[2] for found in archive if found.isfile()]
    made = {name for name in inside if ".egg-info/" not in name}
    compare(source, made, {f"src/{name}" for name in package} | BESIDES_SOURCE)
    with zipfile.ZipFile(wheel) as archive:
        made = {name for name in archive.namelist() if ".dist-info/" not in name}
    compare(wheel, made, package)


def compare(archive: Path, names: set[str], expected: set[str]) -> None:
    if names != expected:
        more, less = sorted(names - expected), sorted(expected - names)
        sys.exit(f"{archive.name} has {more} too much and lacks {less}")


def check_description(wheel: Path) -> None:
    """Renders the long description as PyPI does; twine does not look at Markdown."""
    from readme_renderer import markdown

    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        text = archive.read(metadata).decode("utf-8").partition("\n\n")[2]
    page = markdown.render(text)
    if page is None or "<table>" not in page or "<img" not in page:
        sys.exit("the long description cannot be rendered")
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    if relative := [link for link in links if not re.match("https://|#", link)]:
        sys.exit(f"links of the long description lead nowhere on PyPI: {relative}")


def try_wheel(wheel: Path, folder: Path) -> None:
    """Installs the wheel in an environment in a folder, and uses it there."""
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / "bin"
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    env |= {
        "HIPRESS_CACHE_DIR": str(folder / "cache"),
        "PATH": f"{programs}{os.pathsep}{env['PATH']}",
        "PIP_CONSTRAINT": str(CONSTRAINTS),
        "VIRTUAL_ENV": str(folder / "env"),
    }

    def use(*words: str, expect: int = 0) -> str:
        # Here `hipress`, `pip` and `python` are those of the environment.
        return call([str(programs / words[0]), *words[1:]], expect, folder, env)

    use("pip", "install", "--quiet", "--no-compile", str(wheel))
    shutil.copy(SCRIPT, folder)
    use("hipress", "doctor")
    said = use("hipress", "run", "--nproc", "2", "--", "python", SCRIPT.name)
    places = re.findall(r"trained: .* times fewer bytes; (\S+)", said)
    if len(places) != 2 or not all(Path(place).is_relative_to(folder) for place in places):
        sys.exit(f"{said}\nthe script did not train with the wheel on both ranks")
    said = use("hipress", "demo", expect=2)
    [hint] = re.findall("run `(pip install [^`]*)` first", said)
    use(*shlex.split(hint), "--quiet", "--no-compile")
    use("hipress", "demo", "--hosts", "2", "--steps", "10")


if __name__ == "__main__":
    main()
