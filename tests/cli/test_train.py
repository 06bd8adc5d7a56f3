"""`hipress train` as one rank: the lines, the log, the result, a resume, and refusals."""

import json
import sys
from pathlib import Path

import pytest

from hipress.cli import train
from hipress.cli.main import main
from hipress.train.config import TrainConfig
from hipress.train.result import Facts, Result
from tests.scenarios import no_launcher

QUICK = ["--model", "tests.train.scripts.nets:plain", "--batch", "32", "--device", "cpu"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher's variables, and none left behind."""
    no_launcher(monkeypatch)


def run(*argv):
    with pytest.raises(SystemExit) as stopped:
        main(["train", *QUICK, *argv])
    return stopped.value.code


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_log_and_result(tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "out.json"
    assert run("--steps", "12", "--log", str(log), "--log-every", "4", "--json", str(out)) == 0
    said = capsys.readouterr()
    assert "51,978 parameters) on digits (1,200 examples), 1 rank x 32 a step, cpu" in said.err
    assert "one rank: gradients are not exchanged; steps 0 to 12" in said.err
    assert "step 4/12 epoch 0.11 loss " in said.err and " lr 0.01 " in said.err
    assert "step 12: on the test data accuracy " in said.err
    assert said.out.startswith("12 steps in ") and "accuracy " in said.out
    kinds = [row["kind"] for row in rows(log)]
    assert kinds == ["start", "step", "step", "step", "test", "end"]
    steps = [row for row in rows(log) if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [4, 8, 12]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert 0 < steps[0]["time_s"] < steps[1]["time_s"]
    (row,) = json.loads(out.read_text())["rows"]
    assert row["num_steps"] == 12 and row["model"] == QUICK[1] and row["unit"] == "images"
    assert row["accuracy"] == rows(log)[-1]["accuracy"] == rows(log)[-2]["accuracy"]


def test_json_alone_is_on_stdout(capsys):
    assert run("--steps", "2", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["command"] == "train"


def test_a_run_goes_on_and_its_log_too(tmp_path, capsys, caplog):
    log, folder = tmp_path / "log.jsonl", tmp_path / "saved"
    ways = ["--log", str(log), "--checkpoint", str(folder), "--resume", "--log-every", "3"]
    assert run("--steps", "6", *ways) == 0
    assert f"no checkpoint in {folder} yet: starting from the beginning" in caplog.text
    capsys.readouterr()
    assert run("--steps", "9", *ways) == 0
    assert "steps 6 to 9" in capsys.readouterr().err
    assert "resuming from step 6 of 9" in caplog.text
    found = [row["step"] for row in rows(log) if row["kind"] == "step"]
    assert found == [3, 6, 9]
    # At its end there is nothing left to do but to look, also where it is past that.
    for steps in ("9", "5"):
        assert run("--steps", steps, *ways) == 0
        assert "0 steps in" in capsys.readouterr().out
        assert f"resuming from step 9 of {steps}: nothing is left; raise --epochs" in caplog.text


def test_a_checkpoint_is_not_lost_by_forgetting_to_resume(tmp_path, capsys):
    assert run("--steps", "2", "--checkpoint", str(tmp_path)) == 0
    saved = (tmp_path / "checkpoint.pt").read_bytes()
    assert run("--steps", "2", "--checkpoint", str(tmp_path)) == 2
    assert "holds a checkpoint, which this run would overwrite; give --resume" in (
        capsys.readouterr().err
    )
    assert (tmp_path / "checkpoint.pt").read_bytes() == saved


def test_without_evaluations(tmp_path):
    log = tmp_path / "log.jsonl"
    assert run("--steps", "2", "--no-eval", "--log", str(log)) == 0
    assert [row["kind"] for row in rows(log)] == ["start", "step", "end"]
    assert rows(log)[-1]["accuracy"] is None


@pytest.mark.parametrize(
    "options, num_ranks, codec",
    [
        ({}, 1, "uncompressed"),
        ({"order": "overlap"}, 2, "momentum(ef(onebit), mu=0.9, nesterov=false)"),
        ({"order": "overlap", "optimizer": "adamw"}, 2, "onebit"),
        ({"strategy": "ring"}, 1, "momentum(ef(onebit), mu=0.9, nesterov=false)"),
        ({}, 2, "momentum(ef(onebit), mu=0.9, nesterov=false)"),
        ({"nesterov": True, "momentum": 0.8}, 2, "momentum(ef(onebit), mu=0.8, nesterov=true)"),
        ({"momentum": 0.0}, 2, "onebit"),
        ({"plain_steps": 5}, 2, "int8"),
        ({"optimizer": "adam"}, 2, "onebit"),
        ({"codec": "topk"}, 2, "topk"),
        ({"plan": Path("p.json")}, 2, None),
    ],
)
def test_the_codec_follows_the_optimizer_where_none_is_given(options, num_ranks, codec):
    assert TrainConfig(**options).with_default_codec(num_ranks).codec == codec


def test_onebit_in_front_of_momentum_is_told(caplog):
    assert run("--steps", "2", "--codec", "onebit", "--no-eval") == 0
    assert "the momentum of SGD overshoots on it" in caplog.text
    caplog.clear()
    assert run("--steps", "2", "--codec", "onebit", "--momentum", "0", "--no-eval") == 0
    assert "overshoots" not in caplog.text


def test_a_text_plan_with_a_codec(tmp_path, capsys):
    """Catches: a SeCoPaPlan.txt that is refused beside a codec, or one that is not followed."""
    plan, result = tmp_path / "SeCoPaPlan.txt", tmp_path / "result.json"
    plan.write_text("1.weight,y,2\n")
    given = ["--steps", "2", "--no-eval", "--plan", str(plan)]
    assert run(*given, "--codec", "topk", "--strategy", "ring", "--json", str(result)) == 0
    (found,) = json.loads(result.read_text())["rows"]
    assert (found["codec"], found["strategy"], found["num_compressed"]) == ("topk", "ring", 1)
    assert run(*given, "--codec", "uncompressed") == 2
    assert "so --plan has nothing to act on" in capsys.readouterr().err
    missing = ["--steps", "2", "--plan", str(tmp_path / "none.txt"), "--codec", "topk"]
    assert run(*missing) == 2
    assert "none.txt' cannot be read" in capsys.readouterr().err
    plan.write_text('{"gradients": {}}')
    assert run(*given, "--codec", "topk") == 2
    assert "--plan decides codec and strategy" in capsys.readouterr().err


def test_a_model_of_the_users_own_that_fails_is_told_with_what_it_was_given(capsys):
    """Catches: a page of traceback for a layer of the wrong size."""
    assert run("--steps", "2", "--model", "tests.train.scripts.nets:wrong_size") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        "wrong_size failed on its first batch of digits, of shapes (32, 3, 8, 8), (32,): RuntimeE"
        in said
    )


@pytest.mark.parametrize(
    "model, steps, text",
    [
        ("Unused", "3", "parameter 'unused.weight' of tests.train.scripts.nets:Unused got no grad"),
        ("FailsLater", "3", "FailsLater failed on the batch of step 3 of digits, of shapes (32,"),
        ("FailsLater", "2", "FailsLater failed on a batch of the test data of digits, of shape"),
    ],
)
def test_a_model_of_the_users_own_that_fails_later(model, steps, text, capsys):
    """Catches: a traceback of DDP, or of the model, after the first batch."""
    assert run("--steps", steps, "--model", f"tests.train.scripts.nets:{model}") == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("hipress: ") and text in said[-1]


def test_nothing_is_said_of_what_was_not_given(capsys):
    """Catches: "enabled=False was given" in a run that names no codec."""
    assert run("--steps", "2") == 0
    assert "hipress: " not in capsys.readouterr().err


def test_one_rank_whose_gradients_are_all_exempt(capsys):
    assert run("--steps", "2", "--codec", "onebit", "--min-size", "1000000") == 0
    said = capsys.readouterr().err
    assert "hipress: " not in said
    assert "one rank: gradients are not exchanged, and onebit is applied to none, as all " in said


def test_adam_has_its_momentum_exchanged(caplog):
    """Catches: torch's Adam, with which such a codec learns little."""
    assert run("--steps", "2", "--optimizer", "adam", "--codec", "dgc(ratio=0.01)") == 0
    assert "WARNING" not in caplog.text


def test_momentum_is_not_applied_twice(caplog):
    """Catches: the optimizer's momentum on top of the codec's."""
    assert run("--steps", "2", "--codec", "momentum(ef(onebit))") == 0
    assert "counts twice" not in caplog.text


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--codec", "onebitt"], "did you mean 'onebit'?"),
        (["--strategy", "rong"], "rong"),
        (["--data", "digitz"], "digits"),
        (["--data", "fashion-mnist", "not-there"], "not-there"),
        (["--data", "digits", "extra"], "digits"),
        (["--model", "resnet"], "resnet18"),
        (["--model", "gpt"], "text"),
        (["--data", "synthetic", "--loaders", "2", "--model", "cnn"], "has nothing to load"),
        (["--model", "no.such:thing"], "no.such"),
        (["--model", "tests/mine.py:net"], "names a file; name its module, as tests.mine:net."),
        (["--plan", "none.json"], "none.json"),
        (["--lr-decay-epochs", "a,b"], "'a,b' is not a list of numbers; give e.g. 50,80."),
        (["--exclude", "nothing.*"], "matches no parameter"),
        (["--batch", "5000"], "give --batch 1200 or less"),
        (["--device", "cuda"], "torch sees no GPU here; give --device cpu."),
        (["--backend", "nccl"], "--backend nccl needs a GPU for each rank"),
        (["--log", "-", "--json", "-"], "both want stdout"),
        (
            ["--log", "/dev/null/x"],
            "Not a directory; give --log a file in a folder that exists",
        ),
        (["--timeline", "no/x"], "--timeline: folder /"),
        (
            ["--schedule", "overlap", "--codec", "uncompressed"],
            "leaves gradients to DDP, so --schedule has nothing to act on; leave it out, or give "
            "--codec none",
        ),
        (["--schedule", "fifo", "--codec", "auto"], "decides about the schedule too"),
        (["--schedule", "auto", "--codec", "onebit"], "goes with --codec auto, or with none"),
        (["--schedule", "auto", "--codec", "none", "--slice", "1MiB"], "decides about --slice"),
        (["--schedule", "prio"], "schedule 'prio'"),
        (["--schedule", "fifo", "--strategy", "allreduce"], "give ps, ring or hierarchical"),
        (["--schedule", "fifo", "--slice", "1kB"], "--slice is 1000 bytes; give 16384 at least"),
        (["--schedule", "fifo", "--credit", "many"], "size 'many' is not a number of bytes"),
        (["--slice", "1MiB"], "--slice has an effect only with --schedule; leave it out."),
        (["--credit", "4MiB"], "--credit has an effect only with --schedule; leave it out."),
    ],
)
def test_refusals_are_one_sentence(argv, sentence, capsys):
    assert run("--steps", "1", *argv) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hipress: ")]
    assert len(said) == 1 and sentence in said[0], said


def facts(**changes):
    given = dict(
        model="cnn", num_parameters=1000, data="digits", num_train=10, num_test=5, codec="onebit",
        strategy="ps", num_compressed=1, num_gradients=2, compressed_share=0.9, num_ranks=4,
        device="cpu", backend="gloo", batch=2, first_step=0, num_steps=10, num_epochs=2.0,
        steps_per_epoch=5, unit="tokens",
    )  # fmt: skip
    return Facts(**given | changes)


def test_what_is_said_of_each_kind_of_exchange():
    assert "4 ranks x 2 a step" in train.introduction(facts())
    assert "onebit by ps for 1 of 2 gradients (90.0 %" in train.introduction(facts())
    plain = train.introduction(facts(codec="uncompressed", strategy=None))
    assert "gradients go as DDP sends them" in plain
    plan = train.introduction(facts(codec="plan", strategy=None))
    assert "plan for 1 of 2 gradients" in plan
    ordered = train.introduction(facts(schedule="overlap"))
    assert "of the elements), schedule overlap; steps 0 to 10" in ordered
    alone = train.introduction(facts(num_ranks=1))
    assert "one rank: gradients are not exchanged, but onebit is applied" in alone


def test_what_is_said_where_nothing_is_right_or_wrong():
    row = {"kind": "test", "step": 3, "accuracy": None, "test_loss": None}
    assert train.line(row, facts()) == "step 3: on the test data nothing to score"
    result = Result(
        num_steps=1, seconds=2.0, steps_per_s=0.5, units_per_s=4000.0, units_per_s_per_rank=1000.0,
        unit="tokens", wire_bytes_per_step=2e6, ratio=3.0, loss=1.5, test_loss=None, accuracy=None,
        memory_bytes=10**6,
    )  # fmt: skip
    assert train.summary(facts(), result).splitlines() == [
        "1 steps in 2.0 s with all around them; steps alone: 0.50 steps/s, 4,000 tokens/s in all, "
        "1,000 per rank",
        "2.000 MB sent a step by each rank, 3.0 x less than plain; 1.0 MB of memory for it",
        "training loss 1.5000",
    ]


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with train.train_view(None) as shown:
        shown.on_start(facts())
        shown.on_step(4)
        row = {"kind": "step", "step": 4, "loss": 0.5, "units_per_s_per_rank": 300.0}
        shown.on_row(row)
        shown.on_row({"kind": "test", "step": 5, "accuracy": 50.0, "test_loss": 1.0})
        (task,) = shown._progress.tasks
        assert (task.completed, task.total) == (4, 10)
        assert task.fields["status"] == "loss 0.5000  1,200 tokens/s"
    assert "accuracy 50.00 %" in capsys.readouterr().err


def test_every_option_reaches_the_config(monkeypatch):
    """Catches: an option that is parsed and forgotten."""
    seen = []
    monkeypatch.setattr(train, "_run", lambda config, log, output: seen.append(config))
    options = {
        "--model": "vgg16", "--data": "synthetic", "--batch": 3, "--side": 40, "--length": 9,
        "--tokens": "words", "--loaders": 2, "--codec": "int8", "--strategy": "ring",
        "--min-size": 7, "--exclude": "a", "--include": "b", "--plain-steps": 5, "--steps": 11,
        "--optimizer": "adamw", "--lr": 0.5, "--momentum": 0.8, "--weight-decay": 0.1,
        "--lr-mode": "step", "--lr-decay": 0.2, "--lr-decay-epochs": "1,2", "--warmup-epochs": 0.5,
        "--warmup-lr": 0.01, "--clip-norm": 2.0, "--accumulate": 4, "--amp": "bf16", "--seed": 6,
        "--checkpoint": "c", "--checkpoint-every": 8, "--log-every": 12, "--eval-every": 3.0,
        "--check-every": 13, "--timeline": "t.json", "--device": "cpu", "--backend": "gloo",
        "--schedule": "overlap", "--slice": "1MiB", "--credit": "2MiB",
    }  # fmt: skip
    argv = [word for pair in options.items() for word in map(str, pair)]
    with pytest.raises(SystemExit):
        main(["train", *argv, "--resume", "--no-eval", "p", "q"])
    (config,) = seen
    found = vars(config)
    renamed = {"lr": "rate", "lr_mode": "rate_mode", "lr_decay": "rate_decay",
               "lr_decay_epochs": "decay_epochs", "warmup_lr": "warmup_rate",
               "schedule": "order"}  # fmt: skip
    for option, value in options.items():
        name = option[2:].replace("-", "_")
        got = found[renamed.get(name, name)]
        want = {"--exclude": ["a"], "--include": ["b"]}.get(option, value)
        assert (str(got) if option in ("--checkpoint", "--timeline") else got) == want, option
    assert config.resume and config.no_eval and [str(path) for path in config.paths] == ["p", "q"]
