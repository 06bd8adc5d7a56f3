"""docs/coming-from.md: every flag of the older systems is named, and every command of ours runs.

Commands in ```sh blocks are given to our commands, up to the point where the work would begin. In
tables, what stands in the column "here" must be options, models and codecs that we have.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hipress import codecs, settings
from hipress.casync.graphs import strategies
from hipress.cli import train
from hipress.cli.main import COMMANDS, load
from hipress.errors import UsageError
from hipress.train import data
from hipress.train.config import PLAIN, TrainConfig
from hipress.train.models import MODELS

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text("utf-8")

SEEDS = {
    "HiPress on MXNet": "--numprocess --servers --model --topo --comp-alg --comp-threshold "
    "--comprplan --horovodrun --interface --bulk --numexamples --strongscaling",
    "HiPress's container": "docker nvidia-docker -itd --name --net=host -v --privileged=true "
    "Host Port HostName User 22222",
    "SeCoPa": "--input --output --topology --nnodes",
    "HiPress on TensorFlow": "-np -H --model --batch_size --variable_update --comp_alg --threshold "
    "--num_batches",
    "HiPress on PyTorch": "--batch-size --epochs --num-iterations --model --algorithm --threshold "
    "--partition-threshold --base-lr --batches-per-allreduce --fp16-allreduce",
    "CompLL": "-b -w -r -f",
    "HiPress, installed": "HOROVOD_WITH_TENSORFLOW HOROVOD_WITH_MXNET HOROVOD_WITH_PYTORCH "
    "PATH_TENSORFLOW PATH_TF_IN_PYTHON USE_OPENCV USE_BLAS USE_CUDA USE_CUDNN USE_DIST_KVSTORE "
    "USE_CPP_PACKAGE USE_CUDA_PATH NVCCFLAGS",
    "the UGATIT baseline": "--dataset --dataset_dir --light --batch_size DISTRIBUTED_FRAMEWORK",
    "BytePS's variables": "DMLC_NUM_WORKER DMLC_ROLE DMLC_NUM_SERVER DMLC_PS_ROOT_URI "
    "DMLC_PS_ROOT_PORT DMLC_INTERFACE DMLC_ENABLE_RDMA DMLC_WORKER_ID BYTEPS_ENABLE_IPC "
    "BYTEPS_RDMA_RX_DEPTH NVIDIA_VISIBLE_DEVICES BYTEPS_LOG_LEVEL OMP_NUM_THREADS OMP_WAIT_POLICY "
    "BYTEPS_THREADPOOL_SIZE BYTEPS_PARTITION_BYTES BYTEPS_MIN_COMPRESS_BYTES BYTEPS_NUMA_ON "
    "BYTEPS_ENABLE_MIXED_MODE BYTEPS_PCIE_SWITCH_SIZE BYTEPS_REDUCE_ROOTS",
    "BytePS's launchers": "bpslaunch pssh -i -l -H nohup",
    "BytePS on CIFAR": "--model --mode --batch-size --num-gpus --num-epochs -j --warmup-epochs "
    "--warmup-lr --lr --logging-file --compressor --onebit-scaling --ef --compress-momentum --k "
    "--normalize --fp16-pushpull",
    "BytePS on ImageNet": "--rec-train --rec-train-idx --rec-val --rec-val-idx --use-rec --lr-mode "
    "--lr-decay-epoch",
    "P3": "--search_dirs --type=cluster --config_file=hosts.json --target=grid5000 "
    "--cmd_key=resnet --cmd_key=inception-v3 --cmd_key=vgg --cmd_key=sockeye --env.BATCH_SIZE "
    "--env.OUTPUT_FILE MXNET_KVSTORE_SLICE_THRESHOLD MXNET_KVSTORE_BIGARRAY_BOUND run_exp.sh -m -b "
    "-h",
}
"""What the commands and scripts of their manuals contain, and the main flags beside these."""


# --- what they have ------------------------------------------------------------------------------


def named_there(page: str) -> set[str]:
    """The words of code in the first column of the tables: what the page maps."""
    cells = " ".join(there for there, *_ in rows(page))
    code = " ".join(re.findall(r"`([^`]+)`", cells))
    # `--k 0.001` names --k; `--cmd_key=vgg` names itself and --cmd_key.
    words = set(code.split())
    return words | {word.partition("=")[0] for word in words}


def rows(page: str) -> list[tuple[str, ...]]:
    """The rows of the tables of flags: there, here, notes."""
    head = r"\| there \| here \| notes \|\n\|[-| ]+\|\n"
    found = []
    for body in re.findall(head + r"((?:\|.*\|\n)+)", page):
        found += [tuple(c.strip() for c in line.split("|")[1:-1]) for line in body.splitlines()]
    return found


def missing(page: str, words: str) -> list[str]:
    return sorted(set(words.split()) - named_there(page))


@pytest.mark.parametrize("system", SEEDS)
def test_every_flag_of_theirs_is_named(system: str) -> None:
    assert missing(PAGE, SEEDS[system]) == []


def test_rows_have_three_cells_and_say_what_ours_is() -> None:
    assert len(rows(PAGE)) >= 100 and len(named_there(PAGE)) >= 320
    for row in rows(PAGE):
        assert len(row) == 3, row
        assert (
            row[1] in ("not needed", "not there yet", "the same file")
            or "`" in row[1]
            or ("](containers.md)" in row[1])
        ), row


# --- what we have --------------------------------------------------------------------------------


def commands(page: str) -> list[list[str]]:
    """The commands of the ```sh blocks, as a shell splits them."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


@functools.cache
def ours(name: str) -> Any:
    """A command of ours; making one takes a while."""
    return load(name)


def check_command(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> TrainConfig | None:
    """Refuse a command that would not begin to work; return what it says about training."""
    program, name, *rest = argv
    assert program == "hipress", argv
    if name == "train":
        return trained(rest, monkeypatch)
    command = ours(name)
    if hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    values = command.make_context(name, rest).params
    inner = values.get("command")
    return None if inner is None else check_command(list(inner), monkeypatch)


def trained(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The checked config of a `hipress train`; what it names exists."""
    kept: list[TrainConfig] = []
    monkeypatch.setattr(train, "_run", lambda config, *_: kept.append(config))
    ours("train").main(argv, standalone_mode=False)
    (config,) = kept
    config.check()
    config.schedule(config.epochs or 1.0, steps_per_epoch=100)
    check_model(config.model)
    check_data(config.data, len(config.paths or ()))
    check_codec(config.codec)
    if config.strategy is not None:
        strategies.check(config.strategy)
    return config


def check_model(name: str) -> None:
    assert name in MODELS or ":" in name, f"no model {name!r}"


def check_data(name: str, num_paths: int) -> None:
    assert name in data.NAMES, f"no data {name!r}"
    places = re.findall(r"\b[A-Z]{3,}\b", data.usage(name))
    assert num_paths == len(places), f"{num_paths} paths for {data.usage(name)}"


@functools.cache
def check_codec(expression: str | None) -> None:
    if expression not in (None, PLAIN):
        codecs.codec(expression)


COMMANDS_OF_PAGE = commands(PAGE)


@pytest.mark.parametrize("number", range(len(COMMANDS_OF_PAGE)))
def test_commands_are_ours(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_command(COMMANDS_OF_PAGE[number], monkeypatch)


@functools.cache
def options_of(name: str) -> set[str]:
    command = ours(name)
    members = command.commands.values() if hasattr(command, "commands") else [command]
    return {option for member in members for param in member.params for option in param.opts}


def check_here(cell: str) -> None:
    """What a cell of the column "here" names must be ours."""
    for code in re.findall(r"`([^`]+)`", cell):
        words = shlex.split(code)
        if words[0] == "make":
            continue
        if words[0].startswith("HIPRESS_"):
            assert words[0] in {setting.name for setting in settings.SETTINGS}, cell
            continue
        name = words[1] if words[0] == "hipress" else "train"
        assert name in COMMANDS, cell
        strange = {word for word in words if re.match(r"--?[A-Za-z]", word)} - options_of(name)
        assert not strange, f"{name} has no {strange}: {cell}"
        for option, value in zip(words, words[1:], strict=False):
            if option == "--codec":
                check_codec(value)
            if option == "--model":
                check_model(value)


def test_the_column_here_is_ours() -> None:
    for _, here, _ in rows(PAGE):
        check_here(here)


def two_columns(page: str, head: str) -> Iterator[str]:
    """The code in the second column of the table whose header starts so."""
    body = page.partition(head)[2].partition("\n\n")[0]
    for line in body.splitlines()[2:]:
        yield from re.findall(r"`([^`]+)`", line.split("|")[2])


def test_models_and_algorithms_are_ours() -> None:
    models = list(two_columns(PAGE, "| model there | model here |"))
    expressions = list(two_columns(PAGE, "| algorithm there | expression here |"))
    assert len(models) >= 13 and len(expressions) >= 14
    for name in models:
        check_model(name)
    for expression in expressions:
        check_codec(expression)


# --- numbers -------------------------------------------------------------------------------------


def test_numbers_follow_from_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are where a translation goes wrong: each is computed from the number of theirs."""
    [byteps] = [check_command(argv, monkeypatch) for argv in COMMANDS_OF_PAGE]
    assert byteps is not None and byteps.min_size == 1_024_000 // 4
    assert byteps.rate == pytest.approx(0.1 * 8)
    here = {there: ours for there, ours, _ in rows(PAGE)}
    assert here["`--numexamples 51200`"] == f"`--steps {3 * 51_200 // (4 * 16)}`"
    assert here["`BYTEPS_MIN_COMPRESS_BYTES=1024000`"] == f"`--min-size {1_024_000 // 4}`"
    assert here["`--num_batches`, `--num_warmup_batches`"] == "`--steps 110`"


def test_checks_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    head = "| there | here | notes |\n| --- | --- | --- |\n"
    page = head + "| `--k 2` | `--codec onebit` | |\n"
    assert missing(page, "--k --j") == ["--j"]
    assert missing("`--k`", "--k") == ["--k"]  # said somewhere, but not mapped
    good = "hipress run --nproc 2 -- hipress train --model cnn --codec onebit --lr 0.5".split()
    config = check_command(good, monkeypatch)
    assert config is not None and (config.codec, config.rate) == ("onebit", 0.5)
    for old, new in (
        ("--nproc", "--np"),
        ("--lr", "--rate"),
        ("cnn", "cmm"),
        ("onebit", "onebyte"),
    ):
        bad = [new if word == old else word for word in good]
        with pytest.raises(Exception, match=new):
            check_command(bad, monkeypatch)
    with pytest.raises(UsageError, match="--plan"):
        check_command([*good, "--plan", "plan.json"], monkeypatch)
    check_here("`--batch 16`, `HIPRESS_LOG`, `hipress compll build -b`")
    for cell in ("`--batch-size 16`", "`HIPRESS_LOUD`", "`hipress compll build -x`", "`--codec 3`"):
        with pytest.raises((AssertionError, UsageError)):
            check_here(cell)
