"""Lightning, Accelerate and the Hugging Face Trainer: what HiPress ships for them.

Their examples train on two ranks and compare parameters as they go, so they end with an error if
replicas differ; `make test-all` resumes them on three ranks. Those of Lightning and Accelerate use
SGD; both train with `hipress.torch.AdamW` in `scripts/frameworks_adamw.py`.
"""

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress import accelerate
from hipress.errors import MissingDependencyError, UsageError
from hipress.session import Stats
from hipress.torch import frameworks
from tests.grid import full

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = Path(__file__).parent / "scripts"
LIGHTNING, ACCELERATE, TRANSFORMERS = (
    str(EXAMPLES / f"{name}_train.py") for name in ("lightning", "accelerate", "transformers")
)
LINE = re.compile(
    r"step (\d+): loss ([\d.]+); (\d+) gradients compressed, ([\d.]+) times fewer bytes"
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Example(NamedTuple):
    """An example that trains, writes a checkpoint, and trains on."""

    num_compressed: int
    first: tuple[str, ...]
    steps: int
    """After the first run, on two ranks."""
    later: tuple[str, ...]
    steps_later: int
    """After the second one, on three."""


def _digits(*arguments: str) -> tuple[str, ...]:
    return (ACCELERATE, "--epochs", "1", *arguments)


# An epoch of 1400 digits, 20 to a batch, has 35 steps on two ranks and 24 on three.
EXAMPLES_OF = {
    "lightning": Example(
        num_compressed=2,
        first=(LIGHTNING, "--ranks", "2", "--epochs", "1"),
        steps=35,
        later=(LIGHTNING, "--ranks", "3", "--epochs", "2", "--resume"),
        steps_later=59,
    ),
    "accelerate": Example(
        num_compressed=2,
        first=(*TORCHRUN, "2", *_digits()),
        steps=35,
        later=(*TORCHRUN, "3", *_digits("--resume")),
        steps_later=59,
    ),
    "transformers": Example(
        num_compressed=10,
        first=(*TORCHRUN, "2", TRANSFORMERS, "--steps", "20"),
        steps=20,
        later=(*TORCHRUN, "3", TRANSFORMERS, "--steps", "40", "--resume"),
        steps_later=40,
    ),
}


class Run(NamedTuple):
    folder: Path
    loss: float
    output: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The first run of an example, which both its tests look at."""
    known: dict[str, Run] = {}

    def run(name: str) -> Run:
        _needs(name)
        if name not in known:
            folder, example = tmp_path_factory.mktemp(name), EXAMPLES_OF[name]
            known[name] = _run(example, folder, example.first, example.steps)
        return known[name]

    return run


def test_lightning_compresses(trained: Callable[[str], Run]) -> None:
    """Catches: a callback that attaches nothing, or leaves nothing in checkpoint or log."""
    run = trained("lightning")
    saved = torch.load(run.folder / "last.ckpt", weights_only=False)
    _check_memory(saved["callbacks"]["Compress"], steps=35)
    (log,) = run.folder.rglob("metrics.csv")
    head, *lines = log.read_text().splitlines()
    columns = head.split(",")
    assert len(lines) == 3  # every tenth step
    for line in lines:
        values = dict(zip(columns, map(float, line.split(",")), strict=True))
        assert values["hipress/ratio"] > 15
        assert 0.005 < values["hipress/sent_mb_per_step"] < 0.01


def test_accelerate_compresses(trained: Callable[[str], Run]) -> None:
    """Catches: a session that `save_state` does not know of."""
    folder = trained("accelerate").folder
    _check_memory(torch.load(folder / "custom_checkpoint_0.pkl", weights_only=True), steps=35)


def test_transformers_compresses(trained: Callable[[str], Run]) -> None:
    """Catches: a callback that does not find the wrapper, or is not given the optimizer."""
    run = trained("transformers")
    assert (run.folder / "checkpoint-20" / "hipress" / ".metadata").exists()
    # In the first ten steps AdamW has gradients exchanged as int8, and then its momentum.
    first, second = (float(one) for one in re.findall(r"'hipress/ratio': '([\d.]+)'", run.output))
    assert 3 < first < 4.1 and second > 15
    assert "AdamW divides by the size of past gradients" not in run.output


@pytest.fixture(scope="module")
def with_adamw() -> list[dict[str, Any]]:
    """What ranks have seen that train with `hipress.torch.AdamW`: one start for both frameworks."""
    names = [name for name in ("accelerate", "lightning") if importlib.util.find_spec(name)]
    output = _output([*TORCHRUN, "2", str(SCRIPTS / "frameworks_adamw.py"), *names])
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_momentum_of_adamw_is_exchanged(with_adamw: list[dict[str, Any]], name: str) -> None:
    """Catches: an optimizer that `attach` is not given, or another one that makes the steps."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    ranks = [line for line in with_adamw if line["framework"] == name]
    assert len(ranks) == 2 and ranks[0]["bits"] == ranks[1]["bits"]
    is_refresh = [step in (0, 1, 6) for step in range(8)]
    for rank in ranks:
        weights = ["0.weight", "2.weight"]
        assert rank["momentum"] == [[] if refresh else weights for refresh in is_refresh]
        # A refresh sends int8, eight times as much as onebit; biases come on top of both.
        assert rank["sent"] == [max(rank["sent"]) if k else min(rank["sent"]) for k in is_refresh]
        assert max(rank["sent"]) > 4 * min(rank["sent"])
        assert rank["losses"][-1] < 0.75 * rank["losses"][2] and rank["losses"][2] < 0.85


@full
@pytest.mark.parametrize("name", EXAMPLES_OF)
def test_resumes_on_another_number_of_ranks(trained: Callable[[str], Run], name: str) -> None:
    """Catches: codec state that is not loaded; steps are counted by what was in the checkpoint."""
    before, example = trained(name), EXAMPLES_OF[name]
    later = _run(example, before.folder, example.later, example.steps_later)
    assert later.loss < 0.9 * before.loss
    assert "residuals start at zero" not in later.output


@full
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lightning", (LIGHTNING, "--ranks", "1", "--epochs", "1")),
        ("accelerate", _digits()),
        ("transformers", (TRANSFORMERS, "--steps", "20")),
    ],
)
def test_one_process_trains_and_says_that_nothing_is_compressed(
    name: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    _needs(name)
    output = _output([*arguments, "--folder", str(tmp_path)])
    assert output.count("one process, which has no other to send to: hipress does nothing") == 1
    assert "step 0: " in output and "; 0 gradients compressed, 1.0 times fewer bytes" in output


@full
def test_lightning_saves_after_fit_and_fits_again(tmp_path: Path) -> None:
    """Catches: an exchange that ends with fit, and a second fit that meets the first's hook."""
    _needs("lightning")
    output = _output([str(SCRIPTS / "lightning_twice.py"), str(tmp_path)])
    assert output.count("done") == 2  # ranks


def test_lightning_searches_for_a_learning_rate(tmp_path: Path) -> None:
    """Catches: residuals of a search, or of another model, in the gradients of this training."""
    _needs("lightning")
    output = _output([str(SCRIPTS / "lightning_search.py"), str(tmp_path)])
    found = re.findall(r"right: (\w+)", output)
    assert found == ["none", "start", "epoch", "other"], output


def _needs(package: str) -> None:
    # Not importorskip: that takes seconds, and their warnings are not ours.
    for name in (package, "sklearn"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def _run(example: Example, folder: Path, arguments: tuple[str, ...], steps: int) -> Run:
    output = _output([*arguments, "--folder", str(folder)])
    found = LINE.findall(output)
    assert len(found) == 1, output  # rank 0 alone reports
    made, loss, compressed, ratio = found[0]
    assert (int(made), int(compressed)) == (steps, example.num_compressed)
    assert float(ratio) > 5
    return Run(folder, float(loss), output)


def _output(arguments: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _check_memory(state: dict[str, Any], steps: int) -> None:
    """A checkpoint has what both ranks did not send of both layers, by name."""
    assert state["step"] == steps
    assert sorted(state["ranks"]) == ["0", "1"]
    for held in state["ranks"].values():
        assert len(held) == 2 and all(name.endswith("weight") for name in held)
        for memory in held.values():
            assert any(values.abs().max() > 0 for values in memory.values())
    first, second = state["ranks"].values()
    for name in first:
        assert any(not torch.equal(first[name][key], second[name][key]) for key in first[name])


# --- without the frameworks -----------------------------------------------------------------------


@pytest.mark.parametrize("package", ["lightning", "transformers"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [package, *(n for n in sys.modules if n.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"hipress.{package}", raising=False)
    monkeypatch.delitem(vars(hipress), package, raising=False)
    with pytest.raises(MissingDependencyError) as caught:
        getattr(hipress, package)
    assert str(caught.value) == (
        f"package {package!r} is needed here and is not installed; add it with: pip install "
        f"{package}"
    )


class Accelerator:
    """What `attach` uses of an Accelerator."""

    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler
        self.registered: list[Any] = []

    def register_for_checkpointing(self, *objects: Any) -> None:
        self.registered += objects


@pytest.fixture
def ddp():
    """A model in DDP, in a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(128, 128))
    dist.destroy_process_group()


def test_accelerate_gives_optimizer_and_scaler(ddp, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(torch.amp.GradScaler("cpu", init_scale=8.0))
    optimizer = torch.optim.AdamW(ddp.parameters())
    prepared = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups)
    with caplog.at_level(logging.WARNING, "hipress"):
        sync = hipress.accelerate.attach(accelerator, ddp, prepared, codec="onebit")
    assert "AdamW divides by the size of past gradients" in caplog.text
    assert sync.adapter.loss_scale() == 8
    assert accelerator.registered == [sync]


def test_options_win_over_what_is_found(ddp) -> None:
    given = torch.amp.GradScaler("cpu", init_scale=16.0)
    accelerator = Accelerator(torch.amp.GradScaler("cpu", init_scale=8.0))
    optimizer = torch.optim.SGD(ddp.parameters())
    sync = hipress.accelerate.attach(accelerator, ddp, optimizer, codec="onebit", scaler=given)
    assert sync.adapter.loss_scale() == 16


def test_accelerate_in_one_process(caplog: pytest.LogCaptureFixture) -> None:
    """The script goes on as it is: statistics, checkpoints."""
    accelerator, model = Accelerator(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with caplog.at_level(logging.INFO, "hipress"):
        sync = accelerate.attach(accelerator, model, optimizer, codec="onebit")
    assert caplog.messages == [
        "there is one process, which has no other to send to: hipress does nothing."
    ]
    assert not sync.enabled and sync.stats().num_compressed == 0
    assert accelerator.registered == [sync] and sync.model is model
    assert sync.state_dict()["step"] == 0


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """What a compressed run has left in a checkpoint: a folder, and a state."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(128, 128))
    sync = hipress.attach(model, "onebit")
    model(torch.randn(4, 128)).square().sum().backward()
    sync.save(tmp_path / "checkpoint-1" / "hipress")
    state = sync.state_dict()
    dist.destroy_process_group()
    return tmp_path, state


def test_one_process_goes_on_with_the_state_of_several(saved: tuple[Path, dict[str, Any]]) -> None:
    """Catches: a state that the session of one process does not know the parameters of."""
    model = nn.Linear(128, 128)
    optimizer = torch.optim.SGD(model.parameters())
    sync = accelerate.attach(Accelerator(), model, optimizer, codec="onebit")
    sync.load_state_dict(saved[1])
    assert sync.step == 1 and list(sync.owed) == ["weight"]


def _arguments(folder: Path) -> Any:
    """What the callback uses of TrainingArguments."""
    return SimpleNamespace(
        output_dir=folder, resume_from_checkpoint=None, process_index=0, save_only_model=False
    )


def _state(step: int, loss: float = 1.0) -> Any:
    """What it uses of a TrainerState."""
    log = [{"step": 1, "loss": loss}]
    return SimpleNamespace(global_step=step, is_hyper_param_search=False, log_history=log)


def test_transformers_on_one_process_reads_and_writes_the_state(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    """Catches: residuals that the callback drops without a word."""
    _needs("transformers")
    model = nn.Linear(128, 128)
    callback = hipress.transformers.CompressCallback(codec="onebit")
    optimizer, arguments = torch.optim.SGD(model.parameters()), _arguments(saved[0])
    mark = hipress.transformers._mark(_state(1))
    (saved[0] / "checkpoint-1" / "hipress.json").write_text(json.dumps(mark))
    for step in (1, 2):  # the second one reads what the first has written
        callback.on_train_begin(arguments, _state(step), None, model=model, optimizer=optimizer)
        assert callback.sync.step == 1 and list(callback.sync.owed) == ["weight"]
        callback.on_save(arguments, _state(2), None)
        callback._model = None


@pytest.fixture
def trained_once(ddp, tmp_path: Path) -> Any:
    """The callback after a step whose checkpoint is written; it begins `train` anew."""
    _needs("transformers")
    callback = hipress.transformers.CompressCallback(codec="onebit")
    optimizer, arguments = torch.optim.SGD(ddp.parameters()), _arguments(tmp_path)

    def begin(state: Any) -> Any:
        callback.on_train_begin(arguments, state, None, model=ddp, optimizer=optimizer)
        return callback.sync

    begin(_state(0))
    ddp(torch.randn(4, 128)).square().sum().backward()
    callback.on_save(arguments, _state(1), None)
    return begin


def _holds(sync: Any) -> bool:
    held = sync.state_dict()["ranks"]["0"]["weight"]
    return any(bool(values.any()) for values in held.values())


def test_transformers_trains_again_without_old_residuals(trained_once) -> None:
    """Catches: residuals of the last call of `train` beside a model that was loaded since."""
    sync = trained_once(_state(0))
    assert sync.step == 0 and not _holds(sync)


def test_transformers_trains_again_after_detach_without_a_warning(
    trained_once, ddp, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a warning of ignored residuals that nobody has saved."""
    sync = trained_once(_state(0))
    sync.detach()
    ddp(torch.randn(4, 128)).square().sum().backward()
    caplog.clear()
    assert trained_once(_state(0)) is sync
    assert not caplog.messages


def test_transformers_loads_the_state_of_its_own_run(
    trained_once, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: residuals that the callback drops, or loads without saying from where."""
    state = _state(1)
    state.log_history = json.loads(json.dumps(state.log_history, sort_keys=True))  # as it is read
    with caplog.at_level(logging.INFO, "hipress"):
        sync = trained_once(state)
    assert sync.step == 1 and _holds(sync)
    folder = str(tmp_path / "checkpoint-1" / "hipress")
    assert f"the state of the codec was loaded from {folder!r}." in caplog.messages


@pytest.mark.parametrize("change", ["loss", "step", "damaged", "no mark", "no state"])
def test_transformers_ignores_the_state_of_another_run(
    trained_once, change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a folder of an earlier run in `output_dir` that is taken for that of this one."""
    folder = tmp_path / "checkpoint-1"
    state = _state(1, loss=2.0 if change == "loss" else 1.0)
    if change == "step":
        shutil.move(folder, tmp_path / "checkpoint-7")
        folder, state = tmp_path / "checkpoint-7", _state(7)
    elif change == "damaged":
        (folder / "hipress.json").write_text("{")
    elif change == "no mark":
        (folder / "hipress.json").unlink()
    elif change == "no state":
        shutil.rmtree(folder / "hipress")
    sync = trained_once(state)
    assert sync.step == 0 and not _holds(sync)
    lost = (
        "codec state whose hipress.json is missing or damaged (an older version wrote it, or the "
        "save was cut off)"
    )
    known = {"no state": "no codec state", "no mark": lost, "damaged": lost}
    what = known.get(change, "the codec state of another run or step")
    assert (
        f"there is {what} in {str(folder / 'hipress')!r}, so residuals start at zero: if training "
        "was resumed from another folder, give CompressCallback(resume_from_checkpoint=...)."
    ) in caplog.messages


def test_a_model_that_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr(frameworks, "dist", job)
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError) as caught:
        accelerate.attach(Accelerator(), model, torch.optim.SGD(model.parameters()))
    assert str(caught.value) == (
        "the model that is trained is a Linear, and HiPress compresses what a "
        "DistributedDataParallel exchanges: give the model that accelerator.prepare() returned, "
        "and use neither FSDP nor DeepSpeed."
    )


def test_arguments_in_another_order() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError) as caught:
        accelerate.attach(model, torch.optim.SGD(model.parameters()), Accelerator())
    assert str(caught.value) == (
        "attach was given a Linear as its first argument; give the Accelerator, then the model and "
        "the optimizer that its prepare() returned."
    )


def test_figures_are_of_the_steps_since_the_last_ones() -> None:
    """Catches: a chart in which the first steps count for ever."""
    now = {"num_steps": 2, "sent_bytes": 4_000_000, "ratio": 2.0}
    rest: dict[str, Any] = dict.fromkeys(Stats.__dataclass_fields__, 0)
    sync: Any = SimpleNamespace(stats=lambda: Stats(**(rest | now)))
    figures = frameworks.Figures()
    assert figures.read(sync) == {"hipress/ratio": 2.0, "hipress/sent_mb_per_step": 2.0}
    assert figures.read(sync) == {}
    # 4 MB stood for 8 MB before; then 1 MB for 30 MB.
    now = {"num_steps": 12, "sent_bytes": 5_000_000, "ratio": 38 / 5}
    assert figures.read(sync) == {"hipress/ratio": 30.0, "hipress/sent_mb_per_step": 0.1}
