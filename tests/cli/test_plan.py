"""`hipress plan`: the original's files, plans of a whole step, and refusals."""

import json
import sys
from dataclasses import dataclass

import pytest

from hipress.casync.graphs.schedules import SCHEDULES, Schedule
from hipress.cli.main import main
from hipress.cli.plan import PlanReport, _warn
from hipress.errors import UsageError
from hipress.plan import ANY, Decision, Plan
from hipress.profile import Curve, GradientProfile, ModelProfile, Profile
from hipress.secopa.search import ScheduleTry
from tests.secopa import vgg19
from tests.secopa.test_planner import profile


def run(*argv):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *argv])
    return stopped.value.code


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(f"{name},{numel}" for name, numel in vgg19.gradients())
    (tmp_path / "input.txt").write_text(lines)  # without a last line end, as the sample
    profile().save("profile.json")
    return tmp_path


# --- as the original ------------------------------------------------------------------------------

PUBLISHED = ["--secopa-input", "input.txt"]
PRESET = [*PUBLISHED, "--preset", "sosp21"]


def compressed(path):
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert {len(row) for row in rows} == {4}
    return [(int(size), int(slices)) for _, size, answer, slices in rows if answer == "y"]


@pytest.mark.parametrize("topology, slices", [("PS", 2), ("ps", 2), ("RING", 4)])
def test_the_sample_of_the_original(folder, capsys, topology, slices):
    """Catches: another plan than the published one for VGG19 on four nodes."""
    out = folder / "SeCoPaPlan.txt"
    assert run(*PRESET, "--topology", topology, "--nnodes", "4", "-o", str(out)) == 0
    assert compressed(out) == [
        (1_179_648, slices), *[(2_359_296, 4)] * 7, (102_760_448, 4), (16_777_216, 4),
        (4_096_000, 4),
    ]  # fmt: skip
    assert len(out.read_text().splitlines()) == 38
    assert f"{out}: 11 of 38 gradients compressed; " in capsys.readouterr().out


def test_the_defaults_of_the_original(folder):
    """Catches: other defaults than PS on 16 nodes, into SeCoPaPlan.txt."""
    assert run(*PRESET) == 0
    by_default = (folder / "SeCoPaPlan.txt").read_text()
    assert (
        run(*PRESET, "--topology", "PS", "--nnodes", "16", "--ratio", "0.0625", "-o", "p.txt") == 0
    )
    assert (folder / "p.txt").read_text() == by_default
    assert "vgg0_dense2_weight,4096000,y,6\n" in by_default


def test_the_ratio_acts(folder):
    """Catches: a ratio that is ignored; 600,000 lies between the thresholds of 1/16 and 1/32."""
    (folder / "input.txt").write_text("w,600000")
    for ratio, answer in (("0.0625", "n"), ("0.03125", "y")):
        assert run(*PRESET, "--nnodes", "4", "--ratio", ratio) == 0
        assert (folder / "SeCoPaPlan.txt").read_text().split(",")[2] == answer


def test_a_preset_into_json(folder):
    """Catches: times that are lost, or a codec that nobody chose."""
    assert run(*PRESET, "--nnodes", "4", "--topology", "ring", "-o", "plan.json") == 0
    made = Plan.load("plan.json")
    first = made.decision("vgg0_dense0_weight")
    assert (first.codec, first.strategy, first.partitions) == (ANY, "ring", 4)
    assert 0 < first.compressed_s < first.plain_s
    assert made.takes_codec and not made.takes_strategy


def test_other_nodes_from_a_profile(folder, capsys):
    """Catches: six nodes, which the preset refuses, refused with a profile too."""
    given = [*PUBLISHED, "--topology", "RING", "--nnodes", "6", "--profile", "profile.json"]
    assert run(*given, "--codec", "onebit", "-o", "SeCoPaPlan.txt") == 0
    assert {slices for _, slices in compressed(folder / "SeCoPaPlan.txt")} == {6}
    # The only codec of a profile need not be named.
    assert run(*given, "-o", "one.txt") == 0
    assert (folder / "one.txt").read_text() == (folder / "SeCoPaPlan.txt").read_text()
    assert run(*given, "-o", "plan.json") == 0
    assert Plan.load("plan.json").decision("vgg0_dense0_weight").codec == "onebit"


def test_both_times_are_explained(capsys):
    """Catches: a table without the times, or a gradient left alone without its reason."""
    assert run(*PRESET, "--nnodes", "4", "--explain") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    left = lines["vgg0_dense2_bias"]
    assert "would take as long or longer: 1.317 ms against 0.642 ms" in left
    assert left.split()[1:5] == ["1000", "none", "ps", "4"]
    assert lines["vgg0_dense0_weight"].split()[1:5] == ["102760448", "any", "ps", "4"]


def test_json_alone_is_on_stdout(capsys):
    """Catches: a line beside the document."""
    assert run(*PRESET, "--nnodes", "4", "--explain", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["command"], found["num_compressed"], len(found["rows"])) == ("plan", 11, 38)
    assert found["plan"] == "SeCoPaPlan.txt" and found["num_ranks"] == 4
    assert all(row["reason"] for row in found["rows"])


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ([], "there is nothing to plan from; give --profile profile.json (hipress profile makes"),
        (PUBLISHED, "--secopa-input needs curves, from one place: give --preset sosp21"),
        ([*PRESET, "--profile", "profile.json"], "needs curves, from one place"),
        ([*PRESET, "--nnodes", "6"], "measured on 4, 8 and 16 nodes, not on 6; give --nnodes 4"),
        ([*PRESET, "--topology", "TREE"], "topology 'TREE' is none of PS, RING; choose one."),
        (
            [*PRESET, "--ratio", "2"],
            "ratio is 2; the compressed size divided by the size must be above 0",
        ),
        ([*PRESET, "--codec", "onebit"], "--codec onebit acts on --profile"),
        ([*PUBLISHED, "--preset", "nsdi"], "preset 'nsdi' is none of sosp21; choose one."),
        ([*PRESET, "--codecs", "int8"], "--codecs int8 acts on a plan of the whole step"),
        ([*PRESET, "--nodes", "4"], "--nodes 4 acts on a plan of the whole step; leave it out"),
        (["--profile", "profile.json", "--topology", "PS"], "--topology PS acts on --secopa-input"),
        (
            [*PUBLISHED, "--profile", "profile.json", "--ratio", "0.1"],
            "--ratio 0.1 acts on --preset; the profile knows",
        ),
        (
            [*PUBLISHED, "--profile", "profile.json", "--codec", "int8"],
            "codec 'int8' is not in the profile, which has onebit",
        ),
        (
            [*PUBLISHED, "--profile", "profile.json", "--nnodes", "1"],
            "a plan for 1 node(s) has nobody to send to",
        ),
        (
            [*PRESET, "-o", "none/p.json"],
            "No such file or directory; give --output (-o) a file",
        ),
        (["--secopa-input", "no.txt", "--preset", "sosp21"], "input 'no.txt' cannot be read"),
    ],
)
def test_refusals_are_one_sentence(folder, argv, sentence, capsys):
    """Catches: an option that does nothing and is not refused; a traceback."""
    assert run(*argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("hipress: ") and sentence in said.err
    assert said.err.count("\n") == 1
    assert not (folder / "SeCoPaPlan.txt").exists() and not (folder / "plan.json").exists()


def test_a_codec_must_be_chosen_where_there_are_several(folder, capsys):
    """Catches: the first of several, taken silently."""
    found = profile()
    none, other = (found.codecs[0].model_copy(update={"codec": c}) for c in ("none", "int8"))
    found.model_copy(update={"codecs": (none, *found.codecs)}).save("one.json")
    assert run(*PUBLISHED, "--profile", "one.json") == 0
    found.model_copy(update={"codecs": (none, *found.codecs, other)}).save("two.json")
    assert run(*PUBLISHED, "--profile", "two.json") == 2
    assert "--codec is not given; the profile has onebit, int8: choose one." in (
        capsys.readouterr().err
    )


# --- a whole step ---------------------------------------------------------------------------------


@dataclass
class Found:
    """What a search answers."""

    plan: Plan
    step_s: float
    plain_step_s: float
    everything: dict[str, float]
    schedules: tuple[ScheduleTry, ...] = ()


def tried(name, is_compressed, step_s, slice_bytes=2**20):
    schedule = Schedule(name=name, slice_bytes=slice_bytes, credit_bytes=4 * slice_bytes)
    return ScheduleTry(schedule=schedule, is_compressed=is_compressed, step_s=step_s)


@pytest.fixture
def asked(monkeypatch):
    """Stand-ins for the search and the budget; returns what the search was asked."""
    seen = {}

    def search(given, **options):
        seen.update(options, profile=given)
        gradients = {
            "fc.weight": Decision(
                codec="onebit", strategy="ps", partitions=2, numel=10**6, compressed_s=0.02,
                plain_s=0.05, reason="30.0 ms less",
            ),
            "fc.bias": Decision(numel=10, compressed_s=0.021, plain_s=0.02),
        }  # fmt: skip
        return Found(
            plan=Plan(
                num_ranks=4, gradients=gradients, made_from="a stand-in", step_s=0.02,
                plain_step_s=0.05, schedule="overlap", slice_bytes=2**20, credit_bytes=2**22,
            ),
            step_s=0.02, plain_step_s=0.05, everything={"int8, ring": 0.03, "onebit, ps": 0.021},
            schedules=(
                tried("overlap", True, 0.018), tried("fifo", True, 0.019),
                tried("fifo", True, 0.0195, 2**18), tried("overlap", False, 0.04),
            ),
        )  # fmt: skip

    class Budget:
        @staticmethod
        def read(text):
            if text == "bad":
                raise UsageError("budget 'bad' is no budget.")
            return f"budget {text}"

    monkeypatch.setattr("hipress.secopa.search.search", search)
    monkeypatch.setattr("hipress.secopa.budget.Budget", Budget)
    gradients = tuple(
        GradientProfile(name=name, numel=numel, ready_s=ready_s)
        for name, numel, ready_s in (
            ("fc.weight", 10**6, 0.004), ("fc.bias", 10, 0.0041), ("conv.weight", 64, 0.009),
        )
    )  # fmt: skip
    model = ModelProfile(forward_s=0.005, backward_s=0.01, gradients=gradients)
    profile().model_copy(update={"model": model}).save("job.json")
    return seen


def test_what_the_search_is_asked(asked):
    """Catches: an option that does not reach the search."""
    assert run("--profile", "job.json") == 0
    assert asked["num_ranks"] is None and asked["codecs"] is None
    assert set(asked["strategies"]) == {"ps", "ring"}
    assert asked["budget"] == "budget None"
    assert asked["profile"].model.gradients[0].name == "fc.weight"
    assert run(
        "--profile", "job.json", "--nodes", "16", "--strategy", "ring,ps", "--codecs",
        "onebit,topk(ratio=0.01,exact=true)", "--budget", "error=0.1",
    ) == 0  # fmt: skip
    assert asked["num_ranks"] == 16 and list(asked["strategies"]) == ["ring", "ps"]
    assert list(asked["codecs"]) == ["onebit", "topk(ratio=0.01,exact=true)"]
    assert asked["budget"] == "budget error=0.1"


def test_the_plan_of_a_step(asked, capsys):
    """Catches: a plan without its predictions, or told without what it is measured against."""
    assert run("--profile", "job.json") == 0
    made = Plan.load("plan.json")
    assert (made.step_s, made.plain_step_s) == (0.02, 0.05)
    assert made.decision("fc.weight").codec == "onebit"
    assert capsys.readouterr().out == (
        "plan.json: 1 of 2 gradients compressed; predicted step 20.0 ms, nothing compressed "
        "50.0 ms, everything compressed 21.0 ms (onebit, ps)\n"
    )


def test_a_step_is_explained(asked, capsys):
    """Catches: a gradient that is missing from the table, or left alone without a reason."""
    assert run("--profile", "job.json", "--explain") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["fc.weight"].split()[1:] == (
        ["1000000", "4.0", "onebit", "ps", "2", "20.000", "50.000", "30.0", "ms", "less"]
    )
    assert "compressing it would not shorten the step" in lines["fc.bias"]
    assert "not in the plan" in lines["conv.weight"]
    assert "plan.json:" in lines


def test_schedules_are_explained_beside_ddp(asked, capsys):
    """Catches: a table of all tries, without DDP, or with the wrong sizes."""
    assert run("--profile", "job.json") == 0
    assert "fifo" not in capsys.readouterr().out
    assert run("--profile", "job.json", "--explain") == 0
    said = capsys.readouterr().out
    title = "Without DDP, by schedule; the best of 4 settings"
    table = [line.split() for line in said[said.index(title) :].splitlines()]
    assert [line for line in table if line and line[0] in ("DDP", "fifo", "overlap")] == [
        ["DDP", "as", "planned", "-", "-", "20.0"],
        ["DDP", "nothing", "compressed", "-", "-", "50.0"],
        ["overlap", "as", "planned", "1.05", "4.19", "18.0"],
        ["fifo", "as", "planned", "1.05", "4.19", "19.0"],
        ["overlap", "nothing", "compressed", "1.05", "4.19", "40.0"],
    ]
    assert "The plan names overlap, for loops without DDP" in said


def test_a_step_as_json(asked, capsys):
    """Catches: numbers that are in the table and not in the document."""
    assert run("--profile", "job.json", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["everything_step_s"] == {"int8, ring": 0.03, "onebit, ps": 0.021}
    assert (found["step_s"], found["plain_step_s"]) == (0.02, 0.05)
    assert [row["ready_s"] for row in found["rows"]] == [0.004, 0.0041, 0.009]
    assert (found["schedule"], found["slice_bytes"], found["credit_bytes"]) == (
        "overlap", 2**20, 2**22,
    )  # fmt: skip
    assert len(found["schedules"]) == 4 and found["schedules"][2] == {
        "schedule": "fifo", "compressed": True, "slice_bytes": 2**18, "credit_bytes": 2**20,
        "step_s": 0.0195,
    }  # fmt: skip


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--strategy", "rng"], "strategy 'rng' (did you mean 'ring'?) is none of ps, ring"),
        (["--budget", "bad"], "budget 'bad' is no budget."),
        (["--profile", "profile.json"], "profile 'profile.json' has no model"),
    ],
)
def test_refusals_of_a_step(asked, argv, sentence, capsys):
    """Catches: a search that starts with what cannot be."""
    assert run("--profile", "job.json", *argv) == 2
    assert sentence in capsys.readouterr().err
    assert asked == {}


@pytest.fixture
def job():
    """A profile of a small model on a slow network, where compression pays for what is large."""
    found = profile(cores=4.0)
    cheap = Curve(fixed=2e-5, slope=1e-9)
    sizes = {"fc.weight": (4_000_000, 2), "conv.weight": (40_000, 2), "fc.bias": (1000, 1)}
    model = ModelProfile(
        forward_s=0.005,
        backward_s=0.01,
        gradients=tuple(
            GradientProfile(name=name, numel=numel, dims=dims, ready_s=0.004 + 0.001 * place)
            for place, (name, (numel, dims)) in enumerate(sizes.items())
        ),
    )
    onebit = found.codecs[0].model_copy(
        update={
            **dict.fromkeys(("encode", "decode", "add", "back"), cheap),
            "back_wire": {4: found.codecs[0].wire},
        }
    )
    whole = Curve(fixed=80.0, slope=4.0)
    none = onebit.model_copy(update={"codec": "none", "wire": whole, "back_wire": {4: whole}})
    network = found.network.model_copy(update={"all_reduce": Curve(fixed=1e-3, slope=1.5e-8)})
    changes = {"model": model, "codecs": (none, onebit), "network": network}
    found.model_copy(update=changes).save("job.json")


def test_a_plan_from_a_profile(job, capsys):
    """Catches: a search that is called otherwise than it is written."""
    assert run("--profile", "job.json", "--explain") == 0
    made = Plan.load("plan.json")
    assert made.decision("fc.weight").codec == "onebit"
    assert made.step_s < made.plain_step_s
    said = capsys.readouterr().out
    assert "one dimension (norm or bias)" in said
    assert "2 of 3 gradients compressed; " in said or "1 of 3 gradients compressed; " in said


def test_a_plan_from_a_profile_as_lines(asked, folder, monkeypatch):
    """Catches: lines that cannot be written, since the search leaves slices to the engine."""
    made = Plan(num_ranks=4, gradients={"fc.weight": Decision(codec="onebit")})
    answer = Found(plan=made, step_s=1.0, plain_step_s=2.0, everything={})
    module = sys.modules["hipress.secopa.search"]
    monkeypatch.setattr(module, "search", lambda given, **options: answer)
    assert run("--profile", "job.json", "-o", "SeCoPaPlan.txt") == 0
    # The model does not fill a bucket, so that each of four ranks gets a slice.
    assert (folder / "SeCoPaPlan.txt").read_text() == "fc.weight,1000000,y,4\n"


def test_a_choice_that_is_none(job, folder, capsys):
    """Catches: a plan that does without what was asked for."""
    assert run("--profile", "job.json", "--codecs", "onebit", "--budget", "careful") == 2
    assert "'onebit' is not in budget 'careful'" in capsys.readouterr().err
    assert not (folder / "plan.json").exists()


def test_none_plans_a_schedule_only(job, folder):
    """Catches: a codec, or no plan at all, for users who refuse lossy codecs."""
    assert run("--profile", "job.json", "--codecs", "none", "-o", "plan.json") == 0
    made = Plan.load("plan.json")
    assert made.num_compressed == 0
    assert made.schedule in SCHEDULES
    assert made.gradients["fc.weight"].reason == "none was asked for"


@pytest.mark.parametrize("given", [["--profile", "job.json", "--nodes"], [*PRESET, "--nnodes"]])
def test_there_is_a_most_of_nodes(job, given, capsys):
    """Catches: a typing error that takes all memory."""
    assert run(*given, "65537") == 2
    assert "65536" in capsys.readouterr().err


def test_a_profile_of_one_rank_has_no_links(job, capsys):
    """Catches: a plan for four ranks on links that were never measured."""
    found = Profile.load("job.json")
    network = found.network.model_copy(update={"hosts": (0,)})
    found.model_copy(update={"network": network}).save("one.json")
    assert run("--profile", "one.json", "--nodes", "4") == 2
    assert "this profile is of one rank, so that nothing is known of links between 4" in (
        capsys.readouterr().err
    )
    assert run(*PUBLISHED, "--profile", "one.json", "--nnodes", "4") == 2
    assert run("--profile", "one.json") == 0


def test_a_budget_that_allows_nothing(job, capsys):
    """Catches: a budget that is read and not kept."""
    assert run("--profile", "job.json", "--budget", "careful", "--explain") == 0
    assert Plan.load("plan.json").num_compressed == 0
    assert "the budget allows no codec that was measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    "codecs, said",
    [
        (("int8", "int4", "none", "bf16"), ""),
        (("int8", "onebit", "topk"), "It uses onebit, topk, with which not every optimizer"),
    ],
)
def test_a_codec_that_depends_on_the_optimizer_is_told(codecs, said, capsys):
    """Catches: a plan with onebit that is silent about the optimizer, or int4 that is not."""
    gradients = {f"w{number}": Decision(codec=name) for number, name in enumerate(codecs)}
    _warn(PlanReport(plan=Plan(num_ranks=4, gradients=gradients), times=""))
    err = capsys.readouterr().err
    assert said in err and bool(said) == bool(err)
    assert not said or "plan=..., optimizer=optimizer) checks yours" in err
