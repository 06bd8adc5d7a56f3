"""`hipress simulate`: tables, files, refusals, and how long large clusters take."""

import json
import time
from pathlib import Path

import pytest

from hipress.cli import sweep
from hipress.cli.main import main
from hipress.cli.sweep import Sweep
from hipress.plan import Decision, Plan
from hipress.recommendations import url
from hipress.secopa.search import search
from hipress.secopa.sosp21 import presets, scaling
from tests.secopa.made_up import codec, profile
from tests.traces import check_trace

RESULTS = Path(__file__).parents[2] / "benchmarks/results/scaling-published-2026-11-15.json"


def run(*argv):
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *argv])
    return stopped.value.code


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    made = profile(
        backward_s=0.05,
        latency_s=1e-4,
        codecs=[codec("onebit", 1 / 32, 1e-10), codec("topk(ratio=0.01)", 0.02, 1e-10)],
    )
    made.save("profile.json")
    return tmp_path


def rows(*argv):
    assert run("--profile", "profile.json", "--json", "rows.json", *argv) == 0
    return json.loads(Path("rows.json").read_text())["rows"]


def test_every_setting_begins_with_plain_all_reduce():
    """Catches: a speed-up over something else than plain all-reduce of the same setting."""
    found = rows("--nodes", "2,4", "--rate", "100mbit,1gbit", "--codec", "onebit")
    assert [(row["rate"], row["nodes"], row["codec"]) for row in found[::3]] == [
        ("100mbit", 2, "none"), ("100mbit", 4, "none"), ("1gbit", 2, "none"), ("1gbit", 4, "none"),
    ]  # fmt: skip
    for place in range(0, len(found), 3):
        plain, *others = found[place : place + 3]
        assert plain["speedup"] == 1.0
        assert [row["strategy"] for row in others] == ["ps", "ring"]
        for row in others:
            assert row["speedup"] == pytest.approx(plain["step_s"] / row["step_s"])
            assert row["bytes_per_rank"] < plain["bytes_per_rank"] / 16
            assert row["efficiency"] == pytest.approx(0.05 / row["step_s"])


def test_the_table_has_a_row_for_each(capsys):
    """Catches: a table that lacks what the JSON has."""
    assert run("--profile", "profile.json") == 0
    out = capsys.readouterr().out
    for text in ("nodes", "x", "exposed", "onebit", "topk(ratio=0.01)", "ring", "allreduce"):
        assert text in out


def test_the_best_of_each_setting_is_marked(capsys):
    """Catches: many rows without a word about which to take."""
    given = ("--nodes", "1,4", "--rate", "100mbit,1000gbit")
    found = rows(*given)
    for rate in ("100mbit", "1000gbit"):
        for nodes in (1, 4):
            of_setting = [row for row in found if (row["rate"], row["nodes"]) == (rate, nodes)]
            [best] = [row for row in of_setting if row["is_best"]]
            assert best["step_s"] == min(row["step_s"] for row in of_setting)
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("Best on ")]
    assert len(said) == 4
    assert (
        said[0]
        == "Best on 1 rank(s), rate 100mbit: plain all-reduce, so nothing would be compressed."
    )
    best = next(row for row in found if row["is_best"] and row["nodes"] == 4)
    assert said[1] == (
        f"Best on 4 rank(s), rate 100mbit: {best['codec']} with {best['strategy']}, "
        f"{best['speedup']:.2f} times as fast as plain all-reduce."
    )
    assert len([line for line in lines if line.rstrip().endswith(" best")]) == 4
    (caveat,) = (line for line in lines if line.startswith("Not every optimizer trains well with "))
    assert best["codec"] in caveat and url() in caveat


BOOMS = """
import torch
def boom(): raise ValueError("boom inside")
def data(batch): return torch.ones(batch, 2), torch.ones(batch)
"""


def test_an_error_of_the_users_model_is_not_blamed_on_the_preset(tmp_path, capsys):
    (tmp_path / "booms.py").write_text(BOOMS)
    named = ("--model", "booms:boom", "--data", "booms:data")
    assert run("--preset", "aws-v100", *named) == 2
    assert capsys.readouterr().err.startswith(
        "hipress: model 'booms:boom' failed: ValueError: boom inside (booms.py, line 3); correct"
    )


def test_codec_none_says_why_there_is_one_row(capsys):
    """Catches: `--codec none --strategy ps` that shows another strategy without a word."""
    assert [row["strategy"] for row in rows("--codec", "none", "--strategy", "ps")] == ["allreduce"]
    assert "Codec none is simulated as DDP's all-reduce alone" in capsys.readouterr().err
    rows("--codec", "none,onebit", "--strategy", "ps")
    assert "Codec none" not in capsys.readouterr().err


def test_a_name_without_options_finds_the_only_one_with_some():
    """Catches: `--codec topk` refused where the profile has one topk."""
    found = rows("--codec", "topk,none", "--strategy", "ps")
    assert [row["codec"] for row in found] == ["none", "topk(ratio=0.01)"]


def test_plans_are_played_besides():
    """Catches: --plan or --auto without a row, or a plan that is worse than what it is made of."""
    Plan(gradients={"g0": Decision(codec="onebit", strategy="ring")}).save("mine.json")
    found = rows("--codec", "onebit", "--plan", "mine.json", "--auto")
    assert [row["codec"] for row in found] == ["none", "onebit", "onebit", "mine.json", "plan"]
    assert found[-1]["step_s"] <= min(row["step_s"] for row in found[:-1]) * 1.001
    assert found[0]["step_s"] > found[3]["step_s"] > found[1]["step_s"]


def test_schedules_are_simulated_with_every_choice(capsys):
    """Catches: a schedule that is not simulated, or in place of DDP."""
    sizes = {"slice_bytes": 2**18, "credit_bytes": 2**20}
    decisions = {"g0": Decision(codec="onebit")}
    Plan(gradients=decisions, schedule="overlap", **sizes).save("mine.json")
    # Without a forward pass it would not matter which means are first to come back.
    profile(backward_s=0.05, forward_s=0.1, latency_s=1e-4).save("profile.json")
    argv = ["--codec", "onebit", "--strategy", "ps", "--plan", "mine.json"]
    without = rows(*argv)
    assert {row["schedule"] for row in without} == {None}
    assert "schedule" not in capsys.readouterr().out
    found = rows(*argv, "--schedule", "overlap,fifo")
    assert [(row["codec"], row["strategy"], row["schedule"]) for row in found] == [
        ("none", "allreduce", None), ("none", "ps", "fifo"), ("none", "ps", "overlap"),
        ("onebit", "ps", None), ("onebit", "ps", "fifo"), ("onebit", "ps", "overlap"),
        ("mine.json", None, None), ("mine.json", None, "fifo"), ("mine.json", None, "overlap"),
    ]  # fmt: skip
    for before, after in zip(without, found[::3], strict=True):
        assert before["step_s"] == after["step_s"]
    assert len({row["step_s"] for row in found[-3:]}) == 3
    assert {row["slice_bytes"] for row in found[1:6] if row["schedule"]} == {2**19}
    assert (found[-1]["slice_bytes"], found[-1]["credit_bytes"]) == (2**18, 2**20)
    said = capsys.readouterr().out
    assert "schedule" in said and "overlap" in said


def test_a_schedule_is_named_where_it_is_best(capsys):
    found = rows("--codec", "none", "--schedule", "overlap", "--rate", "10gbit")
    assert [row["is_best"] for row in found] == [False, True]
    assert "none with ps and schedule overlap, 1." in capsys.readouterr().out


def test_a_timeline_of_a_schedule_shows_what_forward_waits_for(capsys):
    argv = ["--codec", "onebit", "--schedule", "overlap", "--timeline", "t.json"]
    assert run("--profile", "profile.json", *argv) == 0
    trace = json.loads(Path("t.json").read_text())
    assert check_trace(trace) == []
    assert "stall" in {event["name"] for event in trace["traceEvents"]}
    assert "t.json: none ps overlap on 4 ranks (the first of several" in capsys.readouterr().err


def test_a_text_plan_is_played_with_the_codec_beside_it(capsys):
    """Catches: a plan that leaves the codec open and cannot be played, or with another codec."""
    Path("SeCoPaPlan.txt").write_text("g0,y,4\ng1,n,4\n")
    given = ("--plan", "SeCoPaPlan.txt", "--strategy", "ring")
    with_topk = rows(*given, "--codec", "topk")[-1]
    by_default = rows(*given)[-1]
    said = capsys.readouterr().err
    for name in ("topk(ratio=0.01)", "onebit"):  # without int8, the first of the profile
        assert f"SeCoPaPlan.txt: simulated with {name} and ring, which it leaves open\n" in said
    assert with_topk["codec"] == by_default["codec"] == "SeCoPaPlan.txt"
    assert with_topk["bytes_per_rank"] != by_default["bytes_per_rank"]


def test_a_plan_for_other_ranks_is_told(capsys):
    """Catches: partitions for 8 ranks that are simulated on others without a word."""
    Plan(num_ranks=4, gradients={"g0": Decision(codec="onebit")}).save("mine.json")
    rows("--plan", "mine.json", "--nodes", "2,4,8")
    assert "mine.json: made for 4 ranks and simulated on 2, 8\n" in capsys.readouterr().err
    rows("--plan", "mine.json")
    assert "made for" not in capsys.readouterr().err


@pytest.mark.parametrize("argv, codecs", [([], None), (["--codec", "onebit"], ("onebit",))])
def test_the_budget_decides_what_auto_may_use_unless_codecs_are_named(argv, codecs, monkeypatch):
    """Catches: a plan with a codec of the profile that its user would never choose."""
    seen = []

    def noted(*given, **options):
        seen.append(options["codecs"])
        return search(*given, **options)

    monkeypatch.setattr(sweep, "search", noted)
    rows("--auto", *argv)
    assert seen == [codecs]


def test_a_rate_stands_for_links_that_were_not_measured():
    """Catches: a profile of one rank that is of no use."""
    profile(num_ranks=1, bytes_per_s=1e12).save("profile.json")
    found = rows("--nodes", "4", "--rate", "1gbit", "--codec", "onebit")
    assert found[0]["step_s"] > 2 * found[1]["step_s"] > 0


def test_own_machines_are_faster_than_a_shared_one():
    """Catches: --own-machines that changes nothing."""
    profile(num_local_ranks=4, cores=1.0, backward_s=0.5).save("profile.json")
    shared = rows("--codec", "onebit")[0]["step_s"]
    assert rows("--codec", "onebit", "--own-machines")[0]["step_s"] < shared / 2


def test_a_timeline_of_the_first_setting(capsys):
    """Catches: a file that Perfetto would not draw, or silence about which setting it shows."""
    assert run("--profile", "profile.json", "--codec", "onebit", "--timeline", "t.json") == 0
    trace = json.loads(Path("t.json").read_text())
    assert check_trace(trace) == []
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2, 3, 4}
    assert "t.json: onebit ps on 4 ranks (the first of several settings)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "varied",
    [["--nodes", "2,4"], ["--rate", "1gbit,10gbit"], ["--nodes", "2,4", "--schedule", "fifo"]],
)
def test_a_plot_is_a_png(varied):
    """Catches: a plot that fails for one kind of sweep."""
    pytest.importorskip("matplotlib")
    assert run("--profile", "profile.json", "--plot", "p.png", *varied) == 0
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


PROFILE, PRESET = ["--profile", "profile.json"], ["--preset", "aws-v100", "--model", "mlp"]


@pytest.mark.parametrize(
    "argv, text",
    [
        ([], "give either --profile, a file of hipress profile, or --preset, one of aws-v100"),
        ([*PROFILE, "--preset", "aws-v100"], "give either --profile"),
        (["--preset", "dgx"], "preset 'dgx' is none of aws-v100, local-1080ti"),
        (["--preset", "aws-v100", "--model", "vgg91"], "did you mean 'vgg19'?"),
        ([*PROFILE, "--model", "vgg19"], "--model vgg19 acts on --preset"),
        ([*PROFILE, "--codec", "int8"], "--codec 'int8' is none of none, onebit, topk(ratio=0.01)"),
        ([*PRESET, "--codec", "powersgd"], "is none of none, fp16, int8"),
        ([*PROFILE, "--nodes", "0"], "--nodes '0' is not a whole number from 1 to 65536"),
        ([*PROFILE, "--nodes", "2,x"], "--nodes 'x' is not a whole number"),
        ([*PROFILE, "--rate", "fast"], "rate 'fast' is not a number above 0 and a unit"),
        ([*PROFILE, "--strategy", "rnig"], "did you mean 'ring'?"),
        (["--profile", "nothing.json"], "profile 'nothing.json' cannot be read"),
        (["--published", "--nodes", "4"], "--nodes 4 does not go with --published"),
        (["--published", "--strategy", "ps"], "--strategy ps does not go with --published"),
        ([*PROFILE, "--schedule", "fifo,prio"], "schedule 'prio'"),
        (["--published", "--schedule", "fifo"], "--schedule fifo does not go with --published"),
        (["--published", "--auto"], "--auto does not go with --published"),
        (["--published", "--own-machines"], "--own-machines does not go with --published"),
        (
            [*PROFILE, "--plan", "typo.json"],
            "the plan speaks of 'g00' (did you mean 'g0'?), which this model does not have; make a",
        ),
        ([*PROFILE, "--plan", "int8.json"], "codec 'int8' is not in the profile, which has none"),
        (
            ["--profile", "one.json", "--nodes", "4"],
            "this profile is of one rank, so that nothing is known of links between 4; give --rate",
        ),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_sentence(argv, text, capsys):
    """Catches: a traceback, or a message without the choices."""
    profile(num_ranks=1).save("one.json")
    Plan(gradients={"g00": Decision(codec="onebit")}).save("typo.json")
    Plan(gradients={"g0": Decision(codec="int8")}).save("int8.json")
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
    assert err.endswith(".\n")


def test_layers_of_a_model_in_the_order_of_backward():
    """Catches: gradients in the order of forward, or work that does not add up."""
    layers, batch = sweep.layers("mlp")
    assert batch == 8
    assert [layer.name for layer in layers] == [
        "4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight",
    ]  # fmt: skip
    weights = sum(layer.numel for layer in layers if layer.dims == 2)
    assert sum(layer.work for layer in layers) == pytest.approx(3 * 2 * 8 * weights)


def test_published_curves_are_as_stored(monkeypatch, capsys):
    """Catches: a simulator that has changed without the stored comparison, or a worse one."""
    stored = {_key(row): row for row in json.loads(RESULTS.read_text())["rows"]}
    monkeypatch.setattr(scaling, "NODES", (1, 2, 4))
    assert run("--published", "--json", "-") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)["rows"]
    assert len(found) == 12
    for row in found:
        expected = stored[_key(row)]["simulated_speedup"]
        assert row["simulated_speedup"] == pytest.approx(expected, rel=0.05)
    assert "error of the speed-up: median" in captured.err


def _key(row):
    return (row["cluster"], row["model"], row["strategy"], row["nodes"])


def test_128_nodes_of_bert_base_in_5_seconds():
    """Catches: a simulation whose time grows with the number of ranks."""
    layers, batch = sweep.layers("bert-base")
    made = presets.profile(presets.preset("aws-v100"), "bert-base", layers, batch)
    start = time.process_time()
    found = Sweep(profile=made, num_ranks=128, codecs=("onebit",)).rows()
    assert time.process_time() - start < 5
    assert [row["strategy"] for row in found] == ["allreduce", "ps", "ring"]


def test_1024_nodes_work():
    """Catches: graphs of 1,024 ranks that are too large to play."""
    layers = [presets.Layer(name=f"g{k}", numel=10**7, dims=2, work=1e12) for k in range(4)]
    made = presets.profile(presets.preset("aws-v100"), "resnet50", layers)
    found = Sweep(profile=made, num_ranks=1024, codecs=("onebit",)).rows()
    assert len(found) == 3
    assert all(row["step_s"] > found[0]["step_s"] * 0.01 for row in found)
