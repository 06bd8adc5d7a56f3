"""`hipress doctor`: the report, its wording, and when it says that the package cannot work."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from hipress import settings
from hipress.bench import machine
from hipress.bench.profile import scaled
from hipress.cli import doctor, doctor_job
from hipress.cli.main import main
from hipress.cli.options import ClusterOptions
from hipress.errors import UsageError
from hipress.probe import codec_costs
from hipress.profile import Machine
from hipress.recommendations import SGD_MOMENTUM, recommended
from hipress.secopa.simulate import Simulator
from hipress.secopa.what_if import uniform, with_rate
from tests.secopa.made_up import codec, profile

WORKING = {"version": "1.2.3", "error": None}
BROKEN = {"version": None, "error": "No module named 'numba'"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """Start from no HIPRESS_* variable but a cache folder of our own."""
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.setenv("HIPRESS_CACHE_DIR", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("COLUMNS", "200")


def run(capsys, *args):
    """Run `hipress doctor`; return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *args])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_json_is_one_object_with_every_fact(capsys):
    code, out, err = run(capsys, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["ok"] is True
    assert report["problems"] == []
    assert set(report) == {
        "ok",
        "problems",
        "hipress",
        "python",
        "torch",
        "numba",
        "triton",
        "cuda_devices",
        "cores",
        "memory",
        "cache",
        "settings",
        "unknown_variables",
        "extras",
        "lab",
        "backends",
    }
    assert 1 <= report["cores"]["usable"] <= report["cores"]["installed"]
    assert 0 < report["memory"]["usable_bytes"] <= report["memory"]["total_bytes"]
    assert report["backends"]["cpu"]["backend"] == "cpu"
    assert report["backends"]["cuda"]["backend"] == ("gpu" if report["cuda_devices"] else None)


def test_the_table_says_which_backend_and_why(capsys):
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert re.search(r"CPU tensors +cpu: HIPRESS_BACKEND is auto, and numba \S+ works", out)
    assert re.search(r"CUDA tensors +(gpu: HIPRESS_BACKEND is auto|no backend: torch sees no)", out)
    for extra in doctor.EXTRAS:
        assert f"extra {extra}" in out


def test_a_missing_extra_shows_the_command(monkeypatch, capsys):
    monkeypatch.setattr(machine, "package_version", lambda name: None)
    _, out, _ = run(capsys)
    assert "pyroute2 missing; add with: pip install pyroute2" in out
    assert "add with: pip install pillow scikit-learn" in out
    assert "no: pyroute2 is missing" in out


def test_unknown_variables_are_shown_with_a_suggestion(monkeypatch, capsys):
    monkeypatch.setenv("HIPRESS_TREADS", "2")
    code, out, _ = run(capsys)
    assert code == 0
    assert "HIPRESS_TREADS" in out
    assert "is set, but there is no such setting; did you mean HIPRESS_THREADS?" in out


def test_a_bad_setting_is_reported_once(monkeypatch, capsys):
    monkeypatch.setenv("HIPRESS_BACKEND", "cpus")
    code, out, err = run(capsys, "--json")
    assert code == 1
    assert err == (
        "hipress: cannot work here: HIPRESS_BACKEND is 'cpus' (did you mean 'cpu'?); "
        "it must be one of auto, reference, cpu, gpu; "
        "correct it, or unset it to use the default, 'auto'.\n"
    )
    assert json.loads(out)["ok"] is False


def test_even_a_bad_log_level_is_a_finding(monkeypatch, capsys):
    monkeypatch.setenv("HIPRESS_LOG", "loud")
    code, out, err = run(capsys)
    assert code == 1
    assert "loud, which is not valid" in out
    assert "HIPRESS_LOG is 'loud'" in err


def test_a_cache_folder_that_can_not_be_written_is_a_problem(monkeypatch, capsys, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    monkeypatch.setenv("HIPRESS_CACHE_DIR", str(blocker / "kernels"))
    code, out, err = run(capsys)
    assert code == 1
    assert "CANNOT be written" in out
    assert err.startswith("hipress: cannot work here: the cache folder cannot be written (")
    assert err.endswith("; set HIPRESS_CACHE_DIR to a folder that can\n")


def test_the_reference_backend_needs_no_cache_folder(monkeypatch, capsys, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    monkeypatch.setenv("HIPRESS_CACHE_DIR", str(blocker / "kernels"))
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")
    assert run(capsys)[0] == 0


def test_without_torch_there_is_one_sentence(monkeypatch, capsys):
    broken = {**BROKEN, "error": "No module named 'torch'", "build": None, "note": None}
    monkeypatch.setattr(machine, "torch_facts", lambda: (broken, []))
    code, out, err = run(capsys)
    assert code == 1
    assert "cannot be imported: No module named 'torch'" in out
    assert err == (
        "hipress: cannot work here: torch cannot be imported (No module named 'torch'); "
        "install it with: pip install torch\n"
    )


@pytest.mark.parametrize(
    ("asked", "numba", "backend", "why"),
    [
        ("auto", WORKING, "cpu", "HIPRESS_BACKEND is auto, and numba 1.2.3 works"),
        ("cpu", WORKING, "cpu", "HIPRESS_BACKEND asks for it, and numba 1.2.3 works"),
        ("reference", BROKEN, "reference", "HIPRESS_BACKEND=reference asks for it; it is slow"),
        (
            "auto",
            BROKEN,
            None,
            "numba cannot be imported (No module named 'numba'); install it with: pip install "
            "numba, or set HIPRESS_BACKEND=reference for the slow backend that does without",
        ),
        (None, WORKING, None, "HIPRESS_BACKEND has no valid value"),
    ],
)
def test_cpu_backend(asked, numba, backend, why):
    assert doctor.cpu_backend(asked, numba) == {"backend": backend, "why": why}


ONE = [{"name": "a GPU", "capability": "9.0", "memory_bytes": 2**30}]


@pytest.mark.parametrize(
    ("asked", "devices", "triton", "backend", "why"),
    [
        ("auto", ONE, "3.6.0", "gpu",
         "HIPRESS_BACKEND is auto, torch sees 1 CUDA device(s), and Triton is 3.6.0"),
        ("gpu", ONE * 2, "3.6.0", "gpu",
         "HIPRESS_BACKEND asks for it, torch sees 2 CUDA device(s), and Triton is 3.6.0"),
        ("auto", [], "3.6.0", None, "torch sees no CUDA device"),
        ("gpu", [], "3.6.0", None,
         "torch sees no CUDA device; set HIPRESS_BACKEND to auto for CPU tensors"),
        ("auto", ONE, None, None, "torch sees 1 CUDA device(s), but Triton is not installed; add "
         "it with: pip install triton"),
        ("cpu", ONE, "3.6.0", None, "HIPRESS_BACKEND=cpu is for CPU tensors only (torch sees 1 "
         "CUDA device(s)); set it to auto to use both"),
        ("reference", ONE, None, None, "HIPRESS_BACKEND=reference is for CPU tensors only (torch "
         "sees 1 CUDA device(s)); set it to auto to use both"),
        (None, ONE, "3.6.0", None, "HIPRESS_BACKEND has no valid value"),
    ],
)  # fmt: skip
def test_cuda_backend(asked, devices, triton, backend, why):
    assert doctor.cuda_backend(asked, devices, triton) == {"backend": backend, "why": why}


def with_gpus(monkeypatch, devices, triton="3.6.0"):
    """A machine with these GPUs and this Triton."""
    facts = {**WORKING, "build": "cuda 13.0", "note": None}
    monkeypatch.setattr(machine, "torch_facts", lambda: (facts, devices))
    version = machine.package_version
    found = {"triton": triton}
    monkeypatch.setattr(machine, "package_version", lambda n: found.get(n) or version(n))
    if triton is None:
        monkeypatch.setattr(machine, "package_version", lambda n: None)


def test_a_gpu_and_triton_are_enough(monkeypatch, capsys):
    with_gpus(monkeypatch, ONE)
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert re.search(r"CPU tensors +cpu: HIPRESS_BACKEND is auto, and numba", out)
    assert re.search(r"CUDA tensors +gpu: HIPRESS_BACKEND is auto, torch sees 1 CUDA", out)


def test_a_gpu_without_triton_shows_the_command(monkeypatch, capsys):
    with_gpus(monkeypatch, ONE, None)
    code, out, _ = run(capsys)
    assert code == 0  # CPU tensors work
    assert "but Triton is not installed; add it with: pip install triton" in out


def test_who_asks_for_the_gpu_gets_it_or_hears_why_not(monkeypatch, capsys):
    monkeypatch.setenv("HIPRESS_BACKEND", "gpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with_gpus(monkeypatch, ONE)
    code, out, _ = run(capsys)
    assert code == 0
    assert "no backend: HIPRESS_BACKEND=gpu is for CUDA tensors only; set it to auto" in out
    with_gpus(monkeypatch, [])
    code, _, err = run(capsys)
    assert code == 1
    assert err == (
        "hipress: cannot work here: torch sees no CUDA device; set HIPRESS_BACKEND to auto for "
        "CPU tensors\n"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, out, err = run(capsys)
    assert (code, err) == (0, "") and "gpu: TRITON_INTERPRET=1: kernels are interpreted" in out


def test_import_facts_of_a_missing_package():
    facts = machine.import_facts("hipress_no_such_package")
    assert facts == {"version": None, "error": "No module named 'hipress_no_such_package'"}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(tmp_path):
    write(tmp_path / "proc", "0::/user/job\n")
    root = tmp_path / "cgroup"
    write(root / "user" / "cpu.max", "150000 100000\n")
    write(root / "user" / "job" / "cpu.max", "max 100000\n")
    write(root / "user" / "memory.max", "max\n")
    write(root / "user" / "job" / "memory.max", "4096\n")
    assert machine.cgroup_cores(tmp_path / "proc", root) == 1.5
    assert machine.cgroup_memory_bytes(tmp_path / "proc", root) == 4096


def test_cgroup_v1_has_a_tree_per_controller(tmp_path):
    write(tmp_path / "proc", "4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n")
    root = tmp_path / "cgroup"
    write(root / "cpu" / "box" / "cpu.cfs_quota_us", "50000\n")
    write(root / "cpu" / "box" / "cpu.cfs_period_us", "100000\n")
    write(root / "memory" / "box" / "memory.limit_in_bytes", "8192\n")
    write(root / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.cgroup_cores(tmp_path / "proc", root) == 0.5
    assert machine.cgroup_memory_bytes(tmp_path / "proc", root) == 8192


def test_no_cgroup_means_no_limit(tmp_path):
    assert machine.cgroup_cores(tmp_path / "proc", tmp_path) is None
    assert machine.cgroup_memory_bytes(tmp_path / "proc", tmp_path) is None


def test_half_a_core_still_counts_as_one(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_cores", lambda: 0.5)
    assert machine.core_facts()["usable"] == 1


def test_writing_is_tried_and_leaves_nothing(tmp_path):
    facts = machine.folder_facts(tmp_path / "a" / "b")
    assert facts == {"path": str(tmp_path / "a" / "b"), "writable": True, "error": None}
    assert list(tmp_path.iterdir()) == []


def test_extras_match_pyproject():
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    declared = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    for ours in ("dev", "dist", "docs"):  # for people who work on hipress
        declared.pop(ours)
    assert {extra: tuple(packages) for extra, packages in declared.items()} == doctor.EXTRAS


# --- a job ----------------------------------------------------------------------------------------


def made_up_job(rate_bits, *, backward_s=0.1, element_s=1e-10, numel=2**22):
    """A profile of four hosts, with costs chosen by hand."""
    codecs = [codec("none", 1.0, 1e-10), codec("onebit", 1 / 32, element_s)]
    made = profile(numels=(numel,) * 4, backward_s=backward_s, codecs=codecs)
    host = Machine(cores=2.0, num_ranks=1)
    return doctor_job.made_up(4, rate_bits, host, codecs, made.model)


def test_a_job_gets_a_paragraph_and_a_table(capsys, monkeypatch):
    """Catches: a job of which nothing is said, or of which the table lacks a choice."""
    known = [codec("none", 1.0, 1e-10), codec("onebit", 1 / 32, 1e-10)]
    monkeypatch.setattr(codec_costs, "measure", lambda *_, **__: known)
    code, out, err = run(capsys, "--model", "mlp", "--rate", "10mbit", "--codec", "onebit")
    assert (code, err.strip()) == (0, "")
    flat = " ".join(out.split())
    assert "mlp (batch 8, 0 MB of gradients) on 4 hosts like this one at 10mbit" in flat
    for text in ("What then limits the step is", "Compression pays", "Next: ", "plan", "ring"):
        assert text in flat


def test_a_job_as_json(capsys):
    """Catches: a document that lacks what the paragraph says."""
    code, out, _ = run(
        capsys, "--model", "mlp", "--hosts", "2", "--codec", "int8", "--batch", "2", "--json"
    )
    assert code == 0
    found = json.loads(out)
    assert (found["model"], found["hosts"], found["rate"], found["batch"]) == ("mlp", 2, "1gbit", 2)
    assert [row["codec"] for row in found["rows"]] == ["none", "int8", "int8", "plan"]
    assert found["pays"] in ("yes", "maybe", "no")
    assert found["error"] >= doctor_job.PREDICTION_ERROR
    assert found["limit"] in ("compute", "the wire", "codec work", "latency and messages")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--hosts", "4"], "--hosts 4 is for a job; name its model too"),
        (["--rate", "1gbit"], "--rate 1gbit is for a job"),
        (["--model", "resnet51"], "did you mean 'resnet50'?"),
        (["--model", "mlp", "--rate", "fast"], "rate 'fast' is not a number above 0 and a unit"),
        (["--model", "mlp", "--codec", "twobit"], "no codec 'twobit'"),
        (["--model", "mlp", "--codec", "none"], "--codec names nothing but none"),
    ],
)
def test_a_wrong_job_is_refused_in_one_sentence(argv, text, capsys):
    """Catches: a measurement of half a minute before a typing error is told."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


def test_compression_breaks_even_where_the_simulator_says():
    """Catches: a rate on the wrong side, or one that is not where both steps meet."""
    made = made_up_job(10**9)
    bits = doctor_job.break_even(made, 4, [("onebit", "ps")])
    saved = []
    for factor in (0.8, 1.25):
        simulator = Simulator(with_rate(made, round(bits * factor)), 4)
        decisions = uniform(simulator.profile, "onebit", "ps")
        saved.append(1 - simulator.step_s(decisions) / simulator.step_s(None))
    assert saved[0] > doctor_job.WORTH > saved[1]


def test_a_codec_that_never_pays_breaks_even_nowhere():
    """Catches: a rate for a codec that is slower than any wire."""
    made = made_up_job(10**9, element_s=1e-3)
    assert doctor_job.break_even(made, 4, [("onebit", "ps")]) is None


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"rate_bits": 10**9, "backward_s": 10.0}, "compute"),
        ({"rate_bits": 10**6, "backward_s": 0.01}, "the wire"),
        ({"rate_bits": 10**12, "backward_s": 0.01, "element_s": 1e-8}, "codec work"),
        (
            {"rate_bits": 10**12, "backward_s": 1e-5, "element_s": 0.0, "numel": 4096},
            "latency and messages",
        ),
    ],
)
def test_what_limits_a_step(options, limit):
    """Catches: a user who is told to buy another network where the model is slow."""
    assert doctor_job.limit(made_up_job(**options), 4, "onebit", "ps") == limit


@pytest.mark.parametrize(
    ("rate", "hosts", "command", "words"),
    [
        ("10gbit", 4, "--hosts 4 --rate 10gbit --codec", "measures it in a lab;"),
        ("100 Mbit/s", 4, "--hosts 4 --rate 100mbit --codec", "measures it in a lab;"),
        ("100gbit", 4, "--hosts 4 --rate none --codec", "since none can be to 100gbit;"),
        ("1gbit", 128, "--hosts 64 --rate 1gbit --codec", "in a lab of at most 64 hosts;"),
    ],
)
def test_what_to_run_next_is_a_command_that_works(rate, hosts, command, words):
    """Catches: a rate or a number of hosts that the lab refuses."""
    rows = [
        {"codec": "none", "strategy": "allreduce", "step_s": 2.0, "exposed_s": 1.0, "speedup": 1.0},
        {"codec": "int8", "strategy": "ps", "step_s": 1.0, "exposed_s": 0.1, "speedup": 2.0},
    ]
    job = doctor_job.PlannedJob(model="mlp", hosts=hosts, rate=rate, codecs=("int8",), batch=None)
    found = doctor_job.JobReport(
        job=job,
        profile=made_up_job(10**9),
        rows=rows,
        break_even_bits=None,
        limit="",
        timed_batch=8,
    )
    said = doctor_job.advice(found)
    assert command in said and words in said
    asked = {name: said.split(f"--{name} ")[1].split()[0] for name in ("hosts", "rate")}
    assert ClusterOptions(hosts=int(asked["hosts"]), rate=asked["rate"]).benchmarks()
    assert "nine of ten predictions of hipress bench prediction" in doctor_job.paragraph(found)
    assert "What then limits" in doctor_job.paragraph(found) and "--optimizer" not in said
    adam = replace(found, job=replace(job, optimizer="adamw"))
    assert " --optimizer adamw --codec 'int8'" in doctor_job.advice(adam)
    alone = replace(found, rows=rows[:1])
    assert "would not shorten that" in doctor_job.paragraph(alone)
    assert "What then limits" not in doctor_job.paragraph(alone)


def test_more_examples_are_more_work_but_for_the_optimizer():
    """Catches: ready times that stay where backward gets longer."""
    model = made_up_job(10**9).model.model_copy(update={"rest_s": 0.5, "forward_s": 0.2})
    twice = scaled(model, 2.0)
    assert (twice.forward_s, twice.backward_s, twice.rest_s) == (0.4, 0.2, 0.5)
    assert twice.gradients[-1].ready_s == pytest.approx(0.2)


@pytest.mark.parametrize(
    "optimizer, codec, said, unsaid",
    [
        (None, "int8", 'hipress.attach(model, codec="int8", strategy="ps")', "optimizer="),
        (None, "onebit", "--optimizer sgd, sgd-momentum, adam, adamw", "attach("),
        ("sgd", "onebit", 'codec="onebit", strategy="ps", optimizer=optimizer)', "momentum("),
        ("sgd", "onebit", "For SGD without momentum, write: sync", "in place of"),
        ("sgd-momentum", "onebit", "in place of onebit (CNN on digits", 'codec="onebit"'),
        ("sgd-momentum", "onebit", "momentum=0); sync", 'codec="onebit"'),
        ("sgd-momentum", "dgc", 'codec="dgc"', "in place of"),
        ("sgd-momentum", "topk(ratio=0.01)", 'codec="dgc(ratio=0.01)"', "onebit"),
        ("sgd-momentum", "ef(terngrad)", "in place of ef(terngrad): opt", "on gradients"),
        ("sgd", "momentum(ef(onebit))", "which adds momentum: sync", 'codec="momentum'),
        ("sgd-momentum", "terngrad", 'codec="terngrad"', "momentum=0"),
        ("adamw", "onebit", "optimizer = hipress.torch.AdamW(", "in place of"),
        ("adam", "topk", "optimizer = hipress.torch.Adam(", "loss"),
        ("adamw", "int8", 'codec="int8"', "hipress.torch"),
    ],
)
def test_the_advice_follows_the_optimizer(optimizer, codec, said, unsaid):
    """Catches: a codec recommended without the optimizer's part."""
    found = doctor_job.what_to_write(optimizer, codec, "ps")
    assert said in found and unsaid not in found


def test_the_codecs_of_a_job_follow_the_optimizer():
    """Catches: onebit simulated, and then recommended, for SGD with momentum."""

    def codecs(optimizer):
        return doctor_job.read_job("mlp", None, None, None, None, None, optimizer).codecs

    assert codecs(None) == codecs("sgd") == codecs("adamw") == ("int8", "onebit")
    assert codecs("sgd-momentum") == ("int8", recommended(SGD_MOMENTUM).codec)
    with pytest.raises(UsageError, match="'lion' is none of sgd, sgd-momentum, adam, adamw"):
        codecs("lion")
