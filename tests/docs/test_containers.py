"""Dockerfile, compose.yaml and docs/containers.md: linted, and held together.

No container is built: CI may not run any. What can be tried without one is tried: the image's ssh
settings and the keys of the page, in a real sshd.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.docs.test_flag_map import check_command, commands
from tests.scenarios import free_ports

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
COMPOSE = (ROOT / "compose.yaml").read_text("utf-8")
IGNORED = (ROOT / ".dockerignore").read_text("utf-8")
PAGE = (ROOT / "docs" / "containers.md").read_text("utf-8")
PORT = "22222"


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def arguments(text: str, word: str) -> list[str]:
    return [rest for found, rest in instructions(text) if found == word]


def services(text: str = COMPOSE) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(text)["services"]
    return found


def written(text: str, path: str) -> str:
    """What a RUN writes to a file by printf."""
    lines = rf"printf '%s\\n' ((?:(?!printf).)*) > {re.escape(path)} "
    (found,) = re.findall(lines, " ".join(text.split()))
    return "".join(f"{line}\n" for line in re.findall(r"'([^']*)'", found))


# --- linters -------------------------------------------------------------------------------------


def lint(text: str) -> list[str]:
    """What hadolint has to say, notes of style too."""
    tool = Path(sys.executable).parent / "hadolint"
    if not tool.exists():
        pytest.skip("hadolint is not installed (make setup installs it on Linux)")
    said = subprocess.run(
        [tool, "--no-color", "--failure-threshold", "style", "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stderr == ""
    return said.stdout.splitlines()


def test_the_dockerfile_is_clean() -> None:
    assert lint(DOCKERFILE) == []
    # What is let pass, each with a reason beside it.
    assert re.findall(r"ignore=(\S+)", DOCKERFILE) == ["DL3008", "DL3066"]


def test_the_linter_can_fail() -> None:
    assert any("DL3015" in line for line in lint(DOCKERFILE.replace("--no-install-recommends", "")))
    assert any("DL3009" in line for line in lint(DOCKERFILE.replace("rm -rf /var", "ls /var")))
    assert lint("FROM debian:12\nRUNS ls\n")


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", path],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_compose_follows_the_schema(tmp_path: Path) -> None:
    good = check_schema(ROOT / "compose.yaml")
    assert good.returncode == 0, good.stdout + good.stderr
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.replace("hostname:", "host_name:"), "utf-8")
    assert "host_name" in check_schema(wrong).stdout


# --- no secrets, no rights -----------------------------------------------------------------------


def secrets_in(text: str) -> list[str]:
    """What would put a secret into an image: a variable for one, or host keys left by a package."""
    found = [
        rest
        for word, rest in instructions(text)
        if word in ("ARG", "ENV") and re.search("password|passwd|secret|token|key", rest, re.I)
    ]
    for rest in arguments(text, "RUN"):
        # In the same layer: what a later one removes is still in the image.
        if "openssh-server" in rest and "rm -f /etc/ssh/ssh_host_*" not in rest:
            found.append("host keys of openssh-server")
        if "ssh-keygen" in rest:
            found.append("ssh-keygen")
    return found


def test_the_image_holds_no_secret() -> None:
    assert secrets_in(DOCKERFILE) == []
    assert secrets_in("FROM a\nARG PIP_TOKEN\n") == ["PIP_TOKEN"]
    without = DOCKERFILE.replace("rm -f /etc/ssh", "rm -f /etc/sssh")
    assert secrets_in(without) == ["host keys of openssh-server"]
    ignored = IGNORED.split("\n")
    assert {"keys", ".env", ".git", ".venv", "data", "runs"} <= set(ignored)


def test_the_build_finds_what_it_needs() -> None:
    (first, everything) = arguments(DOCKERFILE, "COPY")
    assert everything.endswith(". .")
    copied = set(first.split()[1:-1])
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.findall(r'^license-files = \["([^"]+)"', project, re.MULTILINE)
    build = (ROOT / "setup.py").read_text("utf-8")
    named += ["setup.py", *re.findall(r'Path\("([^"]+)"\)', build)]
    stamp = re.search(r"^\$\(STAMP\): (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert stamp is not None
    assert copied == {"Makefile", *named, *stamp[1].split()}
    assert "mkdir src && make setup" in arguments(DOCKERFILE, "RUN")
    for name in (*copied, "src", "tests", "docs", "examples", "benchmarks", "Dockerfile"):
        assert (ROOT / name).exists() and name not in IGNORED.split("\n")


def test_the_last_user_is_not_root_and_runs_sshd_on_our_settings() -> None:
    assert arguments(DOCKERFILE, "USER")[-1] == "hipress"
    assert arguments(DOCKERFILE, "EXPOSE") == [PORT]
    (command,) = arguments(DOCKERFILE, "CMD")
    assert json.loads(command) == ["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/ssh/sshd_node"]
    settings = written(DOCKERFILE, "/etc/ssh/sshd_node").splitlines()
    assert f"Port {PORT}" in settings and "PasswordAuthentication no" in settings
    (path,) = [line.partition("PATH=")[2] for line in settings if line.startswith("SetEnv")]
    (env,) = arguments(DOCKERFILE, "ENV")
    (folder,) = arguments(DOCKERFILE, "WORKDIR")
    assert path.split(":")[0] == f"{folder}/.venv/bin"
    assert env.startswith(f"PATH={folder}/.venv/bin:$PATH")


def test_nodes_are_alike_and_have_no_rights() -> None:
    nodes = services()
    assert list(nodes) == ["node1", "node2", "node3", "node4"]
    for name, node in nodes.items():
        assert node.pop("hostname") == name
        assert set(node) == {"build", "image", "init", "networks", "shm_size", "volumes"}
        assert node == next(iter(nodes.values()))
    volumes = [volume.split(":") for volume in nodes["node1"]["volumes"]]
    assert ["./keys", "/keys", "ro"] in volumes
    # As the page tells it, in its order.
    told = re.findall(r"^\| `(/\w+)`(, read-only)? \| `(\w+)`", PAGE, re.MULTILINE)
    assert volumes == [[f"./{host}", inside, *["ro"] * bool(ro)] for inside, ro, host in told]


def test_build_arguments_are_those_of_the_dockerfile() -> None:
    declared = dict(rest.split("=") for rest in arguments(DOCKERFILE, "ARG"))
    given = services()["node1"]["build"]["args"]
    assert given == {name: f"${{{name}:-{value}}}" for name, value in declared.items()}
    told = re.findall(r"^\| `([A-Z_]+)` \| `?([^`|]+?)`? \|", PAGE, re.MULTILINE)
    assert dict(told) == declared


# --- the page ------------------------------------------------------------------------------------


def hipress_commands(page: str) -> Iterator[list[str]]:
    """What the page's docker commands run, where that is a command of ours."""
    for words in commands(page):
        text = " ".join(words)
        found = re.search(r"(?:exec (?:-it )?\S+|run .*? hipress) (hipress .*)$", text)
        if words[0] == "docker" and found is not None:
            yield found[1].split()


def test_commands_of_the_page_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(hipress_commands(PAGE))
    assert len(found) == 5
    for argv in found:
        check_command(argv, monkeypatch)
        if "--ssh-port" in argv:
            assert argv[argv.index("--ssh-port") + 1] == PORT
            assert argv[argv.index("-H") + 1] == ",".join(f"{name}:1" for name in services())


def test_the_page_says_what_is_not_tried() -> None:
    assert "linted, and not built in CI" in PAGE
    for right in ("NET_ADMIN", "SYS_ADMIN"):
        assert f"--cap-add {right}" in PAGE


# --- keys and sshd -------------------------------------------------------------------------------

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
NEEDED = {"sshd": SSHD, **{name: shutil.which(name) for name in ("ssh", "ssh-keygen", "unshare")}}


def key_recipe() -> str:
    """The commands of the page that make keys."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if "ssh-keygen" in block]
    return str(found)


def as_root(command: list[str]) -> list[str]:
    """Root's sshd wants a folder in /run that systemd would make: give it a /run of its own."""
    if os.geteuid() != 0:
        return command
    script = 'mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *command]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A running sshd with the image's settings: its port, and the client's settings."""
    absent = [name for name, path in NEEDED.items() if path is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed (apt-get install openssh-server)")
    subprocess.run(["sh", "-eu", "-c", key_recipe()], cwd=tmp_path, check=True, timeout=60)
    keys, (port,) = str(tmp_path / "keys"), free_ports(1)
    server, client = tmp_path / "sshd_node", tmp_path / "hipress.conf"
    text = written(DOCKERFILE, "/etc/ssh/sshd_node")
    server.write_text(text.replace("/keys", keys).replace(PORT, str(port)), "utf-8")
    text = written(DOCKERFILE, "/etc/ssh/ssh_config.d/hipress.conf")
    client.write_text(text.replace("/keys", keys), "utf-8")
    # StrictModes: a folder for temporary files may be written to by all; /keys may not.
    command = [str(SSHD), "-D", "-e", "-o", "StrictModes=no", "-f", str(server)]
    with (tmp_path / "sshd.log").open("w") as log:
        process = subprocess.Popen(as_root(command), stderr=log, stdout=log)
    try:
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            if "listening" in (tmp_path / "sshd.log").read_text():
                break
            time.sleep(0.05)
        said = (tmp_path / "sshd.log").read_text()
        if process.poll() is not None and os.geteuid() == 0 and "unshare" in said:
            pytest.skip(f"root may not have a /run of its own here: {said.strip()}")
        assert "listening" in said, said
        yield port, client
    finally:
        process.terminate()
        process.wait(timeout=20)


def log_in(port: int, client: Path, *options: str) -> subprocess.CompletedProcess[str]:
    user = getpass.getuser()
    target = [f"{user}@127.0.0.1", "echo in: $PATH"]
    command = ["ssh", "-F", str(client), "-o", "BatchMode=yes", *options, "-p", str(port), *target]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_node_lets_in_who_has_the_keys_and_nobody_else(
    node: tuple[int, Path], tmp_path: Path
) -> None:
    port, client = node
    inside = log_in(port, client)
    # A user's own start-up files may put more in front.
    assert "/hipress/.venv/bin:/usr/local/bin:" in inside.stdout, inside.stderr
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    text = client.read_text().replace(str(tmp_path / "keys" / "id_ed25519"), str(other))
    stranger = tmp_path / "stranger.conf"
    stranger.write_text(text, "utf-8")
    outside = log_in(port, stranger, "-o", "IdentitiesOnly=yes")
    assert outside.returncode == 255 and "Permission denied (publickey)" in outside.stderr
    known = tmp_path / "keys" / "known_hosts"
    known.write_text(f"* {other.with_suffix('.pub').read_text()}", "utf-8")
    imposter = log_in(port, client)
    assert imposter.returncode == 255 and "Host key verification failed" in imposter.stderr
