"""The recipes of docs/launch.md and examples/launch: what can be read without a cluster is read."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hipress.cli import run as cli
from hipress.launch.hosts import Host, read_hosts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/launch.md").read_text("utf-8")


def recipe(name):
    path = ROOT / "examples" / "launch" / name
    if path.exists():
        return path.read_text("utf-8")
    (text,) = re.findall(rf"^```text {re.escape(name)}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return text


def test_the_script_runs_alone(tmp_path):
    # Not in this process: it would be a rank from then on.
    clean = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "-c", recipe("train.py")], env=clean, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "0 1 0 1\n"), done.stderr


def test_the_hosts_file(tmp_path):
    path = tmp_path / "hosts.json"
    path.write_text(recipe("hosts.json"))
    assert len(json.loads(path.read_text())) == 3
    assert read_hosts(path)[2] == Host(
        name="node3", slots=2, ssh_port=22222, user="me", address="10.0.0.3"
    )


@pytest.mark.parametrize("name", ["train.sbatch", "torchrun.sbatch"])
def test_batch_scripts_are_shell(name, tmp_path):
    path = tmp_path / name
    path.write_text(recipe(name))
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_text().startswith("#!/bin/bash\n#SBATCH ")


def test_the_batch_script_starts_one_torchrun_per_node(tmp_path):
    """With stand-ins for Slurm: what torchrun is told on node 2 of 4."""
    programs = {
        "scontrol": "echo n7; echo n8",
        "srun": '[ "$1" = --kill-on-bad-exit=1 ] && shift; SLURM_NODEID=2 exec "$@"',
        "torchrun": 'echo "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", recipe("torchrun.sbatch")],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_JOB_ID": "31234",
            "SLURM_NNODES": "4",
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout == (
        "--nnodes 4 --node-rank 2 --nproc-per-node 8 --master-addr n7 --master-port 21234 "
        "train.py --epochs 10\n"
    ), done.stderr


def test_the_kubernetes_job():
    yaml = pytest.importorskip("yaml", reason="pyyaml is not here to read the recipe")
    service, job = yaml.safe_load_all(recipe("train.yaml"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (script,) = container["args"]
    words = script.split()
    told = dict(zip(words[2::2], words[3::2], strict=False))
    assert words[:2] == ["exec", "torchrun"]
    assert spec["completionMode"] == "Indexed"
    assert int(told["--nnodes"]) == spec["completions"] == spec["parallelism"]
    assert int(told["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    # The name of pod 0: the job's, its number, and the service by which it is found.
    assert told["--master-addr"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert int(told["--master-port"]) == container["ports"][0]["containerPort"]
    assert told["--node-rank"] == '"$JOB_COMPLETION_INDEX"'


def test_every_option_is_in_the_table():
    source = Path(cli.__file__).read_text("utf-8")
    body = source[source.index("def run(") : source.index(") -> None:")]
    options = {f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): ", body, re.M)}
    options = options - {"--command", "--directory", "--hosts"} | {"--dir", "-H"}
    table = PAGE[PAGE.index("| option |") : PAGE.index("## Hosts")]
    assert options == set(re.findall(r"`(--?[\w-]+)", table))
