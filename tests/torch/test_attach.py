"""`hipress.attach` under DDP, with real processes over gloo on 127.0.0.1.

Starting a rank takes seconds, so one job runs all scenarios (see `scripts/ddp.py`); tests look at
what each has told. The docstring of a test says what would make it fail.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import hipress
from hipress.cli.main import main
from hipress.plan import Plan
from hipress.profile import Profile
from tests import scenarios
from tests.grid import selected, thinned

SCRIPT = Path(__file__).parent / "scripts" / "ddp.py"
CODECS = [
    "none", "onebit", "int8", "topk(ratio=0.05)", "dgc(ratio=0.05)", "terngrad",
    "randomk(ratio=0.1)",
]  # fmt: skip
STRATEGIES = ["ps", "ring", "hierarchical", "allreduce"]
DETACHED = [
    ("onebit", "ps"), ("onebit", "ring"), ("onebit", "hierarchical"), ("int8", "hierarchical"),
    ("topk(ratio=0.05)", "allreduce"), ("randomk(ratio=0.1)", "ring"),
]  # fmt: skip
SCALED = ["onebit", "dgc(ratio=0.05)", "dgc(ratio=0.05, weight_decay=0.5)"]
RATES = [0.05, 0.05, 0.02, 0.02, 0.08]
TIMEOUT_S = 60
"""Far longer than it takes to notice a dead rank."""
EXEMPT = "one dimension (norm or bias)"

ROUNDING = 1e-6
"""Of sums of some gradients in float32, against their largest element; it was 1e-7."""


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    codecs = selected(request, "test_replicas_agree_bit_for_bit", "codec")
    detached = selected(request, "test_detach_loses_nothing", "case")
    folder = str(tmp_path_factory.mktemp("plans"))
    stages = [
        [
            {"id": "agree", "do": "agree", "ranks": 4, "codecs": codecs, "strategies": STRATEGIES,
             "steps": 4, "thorough": True},
            {"id": "reference", "do": "reference", "ranks": 3, "codec": "onebit",
             "rates": [0.05] * 5},
            {"id": "rates", "do": "reference", "ranks": 2, "codec": "momentum(ef(onebit))",
             "rates": RATES},
            {"id": "no rates", "do": "reference", "ranks": 2, "codec": "momentum(ef(onebit))",
             "rates": RATES, "follow": False},
            {"id": "micro", "do": "reference", "ranks": 2, "codec": "int8", "rates": [0.05] * 3,
             "micro": 3},
        ],
        [
            *({"id": f"unused {view} {to_none}", "do": "unused", "ranks": 2, "view": view,
               "to_none": to_none} for view in (True, False) for to_none in (True, False)),
            {"id": "unused hook", "do": "unused", "ranks": 2, "view": False, "to_none": False,
             "door": "hook"},
            {"id": "detach", "do": "detach", "ranks": 4, "cases": detached},
            *({"id": name, "do": name, "ranks": 2}
              for name in ("detach_unused", "amp", "amp_ledger", "clip", "static", "sparse")),
            {"id": "choices", "do": "choices", "ranks": 2, "folder": folder},
        ],
        [
            *({"id": name, "do": name, "ranks": 2}
              for name in ("kinds", "hook_pair", "disabled", "own_ddp", "decayed", "refused",
                           "different", "drifted", "unfrozen", "twice", "dropped")),
            *({"id": f"scaled {codec}", "do": "scaled", "ranks": 2, "codec": codec}
              for codec in SCALED),
            {"id": "warmup", "do": "warmup", "ranks": 2, "steps": 2},
            {"id": "compiled", "do": "compiled", "ranks": 2, "backend": "aot_eager"},
            {"id": "figures", "do": "figures", "ranks": 4},
            {"id": "several", "do": "several", "ranks": 3},
            {"id": "profiled", "do": "profiled", "ranks": 2, "folder": folder},
        ],
        [
            {"id": "dies", "do": "dies", "ranks": 3, "codec": "onebit", "strategy": "ps",
             "env": {"HIPRESS_TIMEOUT": str(TIMEOUT_S)}},
        ],
        [
            {"id": "absent", "do": "absent", "ranks": 2, "env": {"HIPRESS_TIMEOUT": "3"}},
        ],
    ]  # fmt: skip
    found = scenarios.play(SCRIPT, *stages)
    found.folder = Path(folder)
    return found


def one(values):
    """What all ranks have told alike."""
    assert all(value == values[0] for value in values), values
    return values[0]


def largest(gaps):
    return max(gaps.values())


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("codec", thinned(CODECS, keep=("none", "onebit", "topk(ratio=0.05)")))
def test_replicas_agree_bit_for_bit(told, codec, strategy):
    """Catches: a rank that decodes something else than the others, with any codec or strategy."""
    found = [result[f"{codec} {strategy}"] for result in told.results("agree", range(4))]
    one([rank["bits"] for rank in found])
    for rank in found:
        assert rank["rebuilt"] and rank["buckets"] > 1
        assert rank["hosts"] == [0, 0, 1, 1]
        assert rank["compressed"] == (0 if codec == "none" else 3)
        # Compressed or not, training goes the same way; with `none` it is the same to rounding.
        assert rank["distance"] < (1e-6 if codec == "none" else 0.05)
        assert codec == "none" or rank["distance"] > 1e-6


def test_processes_end_well(told):
    """Catches: threads of the engine that keep Python from ending, or abort it."""
    assert told.find("exit", id="agree") == [0] * 4


def test_state_survives_the_new_buckets(told):
    """Catches: residuals that are lost, or go to other gradients, when DDP makes new buckets."""
    for found in told.results("reference", range(3)):
        assert found["rebuilt"] and found["buckets"] > 1
        assert found["distances"] == dict.fromkeys(found["distances"], 0.0)
        assert found["bits"] == found["again"]


def test_momentum_follows_the_learning_rate(told):
    """Catches: a residual that is not corrected when the optimizer's rate changes."""
    for found in told.results("rates", range(2)):
        assert found["bits"] == found["again"]
    for found in told.results("no rates", range(2)):  # the test sees the difference
        assert found["bits"] != found["again"]


def test_gradients_may_be_accumulated(told):
    """Catches: an exchange inside no_sync, a gradient that is sent twice, steps counted wrong."""
    for found in told.results("micro", range(2)):
        assert found["inside"] == 0
        assert found["steps"] == 3
        assert found["bits"] == found["again"]


def test_clipping_sees_the_mean(told):
    """Catches: clipping by each rank's own norm, which breaks replicas apart."""
    results = told.results("clip", range(2))
    for codec in ("none", "onebit"):
        found = one([result[codec] for result in results])
        assert found["norm"] == pytest.approx(found["own"], rel=1e-5)
        assert found["clipped"] == pytest.approx(0.01, rel=1e-4)
    exact = results[0]["none"]
    assert exact["norm"] == pytest.approx(exact["mean"], rel=1e-5)


# --- a loss scale ---------------------------------------------------------------------------------


def test_an_overflow_on_one_rank_is_skipped_by_all(told):
    """Catches: Inf that is lost in a codec, enters a residual, or is seen by one rank only."""
    results = told.results("amp", range(2))
    bits = one([result["bits"] for result in results])
    moves = [a != b for a, b in zip(bits, bits[1:], strict=False)]
    assert moves == [True, True, False, True, True, True]
    for found in results:
        assert found["scales"] == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
        assert all(found["finite"])


def test_residuals_follow_the_scale(told):
    """Catches: residuals in the units of a scale that is no longer there."""
    for found in told.results("amp", range(2)):
        assert all(found["factors"])
        assert found["largest"] > 1  # gradients times 1024


def test_nothing_is_lost_while_the_scale_changes(told):
    """Catches: residuals scaled the wrong way, twice, or in a step too late."""
    found = one(told.results("amp_ledger", range(2)))
    assert len(set(found["scales"])) > 2
    assert found["left"] > 1
    assert largest(found["gaps"]) < ROUNDING


@pytest.mark.parametrize("codec", SCALED)
def test_a_scale_makes_no_difference(told, codec):
    """Catches: what a codec does in absolute terms, such as a decay that is too weak."""
    alone, scaled = one(told.results(f"scaled {codec}", range(2)))
    assert alone == scaled  # the scale is a power of two, so not a bit is rounded otherwise


# --- what models may hold -------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("view", [True, False])
def test_unused_parameters_lose_nothing(told, view, to_none):
    """Catches: what was sent of a parameter that no rank used, which DDP throws away."""
    found = one(told.results(f"unused {view} {to_none}", range(2)))
    assert largest(found["gaps"]) < ROUNDING
    # With views of the bucket that are not let go, DDP hands out what was sent.
    unused = [] if view and not to_none else ["b.weight"]
    assert found["owed"] == [[], [], unused, unused] * 2


def test_a_bare_hook_loses_nothing_of_unused_parameters(told):
    """Catches: a hook that takes zeros in .grad for the mean, since it cannot ask DDP."""
    found = one(told.results("unused hook", range(2)))
    assert largest(found["gaps"]) < ROUNDING
    assert [len(owed) for owed in found["owed"]] == [0, 0, 1, 1] * 2


def test_a_static_graph_loses_nothing(told):
    """Catches: steps that are not counted, or state lost when buckets are made after two steps."""
    found = one(told.results("static", range(2)))
    assert largest(found["gaps"]) < ROUNDING
    assert found["steps"] == 5
    assert found["buckets"] > 1


KINDS = ["frozen", "tied", "channels_last", "bfloat16", "float64", "mixed"]


@pytest.mark.parametrize("codec", ["none", "onebit"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_parameters_lose_nothing(told, kind, codec):
    """Catches: elements in another order than the parameter's, gradients of the wrong dtype."""
    found = one([result[f"{kind} {codec}"] for result in told.results("kinds", range(2))])
    # A bfloat16 has 8 bits: 3 steps lose up to 2^-9 of an element each.
    assert largest(found["gaps"]) < (0.02 if kind == "bfloat16" else ROUNDING)


def test_what_is_said_of_kinds_of_parameters(told):
    """Catches: a codec on what it does not take, and a reason that does not say so."""
    found = one(told.results("kinds", range(2)))
    assert "3.weight" not in found["frozen onebit"]["gradients"]
    assert found["tied onebit"]["gradients"] == ["middle.bias", "middle.weight", "table.weight"]
    assert found["tied onebit"]["skipped"] == {"middle.bias": EXEMPT}
    assert found["channels_last onebit"]["contiguous"] == [False, True, False, True]
    assert list(found["channels_last onebit"]["skipped"]) == ["2.bias", "0.bias"]
    assert set(found["float64 onebit"]["skipped"].values()) == {"codecs do not take float64"}
    assert found["mixed onebit"]["skipped"] == {
        "5.bias": "codecs do not take float64", "5.weight": "codecs do not take float64",
        "3.bias": EXEMPT, "2.bias": EXEMPT, "2.weight": EXEMPT, "0.bias": EXEMPT,
    }  # fmt: skip


def test_sparse_gradients_are_left_to_torch(told):
    """Catches: sparse gradients that are refused, made dense, or summed instead of averaged."""
    results = told.results("sparse", range(2))
    for codec in ("none", "onebit"):
        found = one([result[codec] for result in results])
        assert found["sparse"]
        assert (
            found["skipped"]["table.weight"] == "its gradient is sparse, which codecs do not take"
        )
        assert found["sent"] > 0
        assert max(found["distances"]) < (1e-6 if codec == "none" else 0.1)


# --- the life of an exchange ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    thinned(
        [pytest.param(case, id=" ".join(case)) for case in DETACHED],
        lambda cell: cell.values[0] in (DETACHED[0], DETACHED[3], DETACHED[5]),
    ),
)
def test_detach_loses_nothing(told, case):
    """Catches: residuals that detach forgets, counts N times, or leaves in place."""
    found = one([result[" ".join(case)] for result in told.results("detach", range(4))])
    assert largest(found["gaps"]) < ROUNDING
    assert min(found["errors"][:5]) > 1e-3  # there was something to lose
    assert max(found["errors"][5:]) < ROUNDING  # then it is plain
    assert found["state_bytes"] == 0


def test_detach_waits_for_parameters_that_are_not_used(told):
    """Catches: a residual that is sent in a step in which DDP throws it away."""
    assert largest(one(told.results("detach_unused", range(2)))) < ROUNDING


def test_warmup_is_exact(told):
    """Catches: compression that starts too early or too late, and a first residual from nowhere."""
    found = one(told.results("warmup", range(2)))
    assert max(found["errors"][:2]) < ROUNDING
    assert min(found["errors"][2:]) > 0.1
    assert found["kept"] == [False, False, True, True, True]
    assert largest(found["gaps"]) < ROUNDING


def test_a_bare_hook_trains_and_goes_on(told):
    """Catches: a bare hook that compresses nothing, or whose checkpoint is of other gradients."""
    results = told.results("hook_pair", range(2))
    one([result["bits"] for result in results])
    for found in results:
        assert found["losses"][0] == found["losses"][1]
        assert found["bits"][0] == found["bits"][1]
        assert found["steps"] == [8, 8]
        assert found["names"] == [f"gradient{k}" for k in range(8)]
        assert set(found["skipped"].values()) == {EXEMPT} and len(found["skipped"]) == 5
        assert found["ratio"] > 10 and found["residual"] > 0
        assert found["early"][0] == "UsageError" and "run one step first" in found["early"][1]


def test_a_dropped_model_ends_its_engine(told):
    """Catches: threads and buffers of models that are gone, as `auto` times them or a bare hook."""
    for found in told.results("dropped", range(2)):
        assert found == [[0, 0]] * 5


def test_compiled_models(told):
    """Catches: names that torch.compile has changed, gradients that are not found by parameter."""
    results = told.results("compiled", range(2))
    for how in ("not", "inside", "around"):
        for more in ("", " momentum"):
            found = one([result[how + more] for result in results])
            assert found["names"][:2] == ["5.bias", "5.weight"] and len(found["names"]) == 8
            assert found["kept"] == ["0.weight", "3.weight", "5.weight"]
            assert found["steps"] == 3
            # aot_eager computes as eager does
            assert found["bits"] == results[0]["not" + more]["bits"]


@pytest.mark.parametrize("how", ["not", "inside", "around"])
def test_compiled_models_train_with_adamw(told, how):
    """Catches: momentum that is not exchanged, or of which a compiled model learns otherwise."""
    results = told.results("compiled", range(2))
    one([result[f"{how} adamw"]["bits"] for result in results])
    for result in results:
        found = result[f"{how} adamw"]
        weights = ["0.weight", "3.weight", "5.weight"]
        is_refresh = [step in (0, 1, 6) for step in range(8)]
        assert found["momentum"] == [[] if refresh else weights for refresh in is_refresh]
        # A refresh sends int8, eight times as much as onebit; biases come on top of both.
        assert found["sent"] == [
            max(found["sent"]) if k else min(found["sent"]) for k in is_refresh
        ]
        assert max(found["sent"]) > 4 * min(found["sent"])
        assert found["losses"][-1] < 0.75 * found["losses"][2]
        # aot_eager computes as eager does
        assert found["bits"] == result["not adamw"]["bits"]


def test_enabled_false_is_plain_ddp(told):
    """Catches: a hook that is registered all the same, figures or checkpoints that then fail."""
    for found in told.results("disabled", range(2)):
        assert found["bits"][0] == found["bits"][1]
        assert found["hooks"] == 0
        assert found["stats"] == [0, 0, 1.0, 0]
        assert {"version", "gradients", "step"} <= set(found["state"])
        assert found["timeline"][0] == "nothing"
        assert found["idle"] == [
            None, ["facts"], "hipress does nothing: enabled=False was given."
        ]  # fmt: skip


def test_a_module_is_put_in_ddp(told):
    """Catches: ranks that train apart, each with its own module, or a model that is dropped."""
    for found in told.results("own_ddp", range(2)):
        for explicit, own, kind, same in found.values():
            assert explicit == own and kind == "DistributedDataParallel" and same


LAUNCHED = """
import torch, hipress
sync = hipress.attach(torch.nn.Linear(128, 64), "onebit")
sync.model(torch.ones(2, 128)).sum().backward()
print(type(sync.model).__name__, torch.distributed.get_world_size(), sync.step)
torch.distributed.destroy_process_group()
"""


def test_ranks_of_a_launcher_are_joined():
    """Catches: ranks of torchrun that each take themselves for the only process."""
    command = ["-m", "hipress", "run", "--nproc", "2", "--", sys.executable, "-c", LAUNCHED]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, check=True
    )
    lines = [f"[rank {rank}] DistributedDataParallel 2 1" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == lines
    line, unchecked = [line for line in done.stderr.splitlines() if "hipress: " in line]
    assert line.startswith("[rank 0] hipress: 1 of 2 gradients (99.2 % of the elements) are comp")
    assert "which could not be checked" in unchecked


@pytest.mark.parametrize(("name", "codec"), [("p", "onebit"), ("auto", "int8")])
def test_a_running_job_is_profiled(told, name, codec, tmp_path):
    """Catches: a profile of another model, without its network, or that `plan` cannot read."""
    results = told.results("profiled", range(2))
    one([result["bits"] for result in results])
    found = Profile.load(told.folder / f"{name}.json")
    assert found.network.num_ranks == 2 and found.network.bytes_per_s > 1e5
    assert [costs.codec for costs in found.codecs] == ["none", codec]
    assert "a running job of 2 ranks, hipress" in found.made
    model = found.model
    assert model.name == "Sequential" and model.num_elements == 42_920
    assert model.gradients[0].name.startswith("5.") and model.gradients[-1].name.startswith("0.")
    assert model.backward_s >= model.gradients[-1].ready_s > model.gradients[0].ready_s > 0
    assert model.forward_s > 0 and model.rest_s > 0
    assert {name for bucket in model.buckets for name in bucket} == {
        g.name for g in model.gradients
    }
    plan = tmp_path / "plan.json"
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--profile", str(told.folder / f"{name}.json"), "-o", str(plan)])
    assert ended.value.code == 0
    assert set(Plan.load(plan).gradients) == {gradient.name for gradient in model.gradients}


def test_a_profile_that_cannot_be_made_is_refused_on_all_ranks(told):
    """Catches: ranks that measure while rank 0 cannot write, or that wait for each other."""
    found = told.results("profiled", range(2))
    assert not any(result["early"] for result in found)
    refused = one([result["refused"] for result in found])
    assert [kind for kind, _, _ in refused] == ["UsageError"] * 5
    said = [text for _, text, _ in refused]
    assert said[0].endswith("not does not exist; make it, or give another path.")
    assert said[1] == "steps is 3; give a whole number from 4 on: the first 2 do not count."
    assert said[2].startswith("no codec 'onebitt'")
    assert said[3] == "codecs is 'int8'; give a list of them, e.g. ['int8', 'onebit']."
    assert said[4].endswith("p.json already; wait until it is written.")


def test_several_models_at_once(told):
    """Catches: models that share what they should not: state, groups, steps; ranks outside."""
    results = told.results("several", range(3))
    joint = one([result["joint"] for result in results])
    assert joint[0] != joint[1]
    assert all(result["steps"] == [4, 4] for result in results)
    bits, num_ranks, steps = one([results[0]["group"], results[2]["group"]])
    assert (num_ranks, steps) == (2, 5) and bits not in joint


def test_a_codec_sees_the_weights(told):
    """Catches: weights of an earlier step, of another gradient, or none at all."""
    assert one(told.results("decayed", range(2))) == [[True, True, True]] * 4


# --- what is compressed ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def choices(told):
    results = told.results("choices", range(2))
    return {name: one([result[name] for result in results]) for name in results[0]}


def test_the_default_is_int8_for_what_is_large(choices):
    """Catches: exempt gradients that are compressed, or a state for them."""
    found = choices["default"]
    assert found["kept"] == ["0.weight", "3.weight", "5.weight"]
    assert {name for name, codec in found["codecs"].items() if codec == "int8"} == set(
        found["kept"]
    )
    assert found["skipped"] == dict.fromkeys(
        ["5.bias", "3.bias", "2.bias", "2.weight", "0.bias"], EXEMPT
    )


def test_exclude_and_include_and_size(choices):
    """Catches: options that are read and not followed."""
    assert choices["exclude"]["kept"] == ["0.weight"]
    assert choices["exclude"]["skipped"]["3.weight"] == "excluded by '3'"
    assert choices["exclude"]["skipped"]["3.bias"] == "excluded by '3'"
    assert choices["exclude"]["skipped"]["5.weight"] == "excluded by '*5.w*'"
    assert choices["include"]["kept"] == ["0.weight", "3.bias", "3.weight", "5.weight"]
    assert choices["min_size"]["kept"] == ["3.weight"]
    assert choices["min_size"]["skipped"]["0.weight"] == "10240 elements, fewer than min_size=20000"
    assert len(choices["all"]["kept"]) == 8 and choices["all"]["skipped"] == {}


def test_a_plan_decides(choices):
    """Catches: a plan that is not followed, or followed for what it does not name."""
    found = choices["plan"]
    assert found["kept"] == ["3.weight", "5.bias"]
    assert (found["codecs"]["3.weight"], found["codecs"]["5.bias"]) == ("onebit", "int8")
    assert set(found["skipped"].values()) == {"not in the plan"}
    found = choices["file"]
    assert (found["codecs"]["3.weight"], found["strategies"]["3.weight"]) == ("int8", "ring")
    assert found["kept"] == ["3.weight"]
    assert found["skipped"]["0.weight"] == "the first layer stays"
    assert found["skipped"]["5.weight"] == "not in the plan"


def test_a_plan_decides_on_slices(choices):
    """Catches: a number of partitions that is read and not followed."""
    assert choices["file"]["partitions"]["3.weight"] == 2


def test_what_codec_none_leaves_alone_has_a_reason(told):
    """Catches: gradients that are left alone without a word."""
    found = told.results("kinds", range(1))[0]["frozen none"]
    assert all(found["skipped"].values())


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["onebit", "int8", "topk(ratio=0.05)"])
def test_bytes_are_those_that_the_codec_promises(told, codec):
    """Catches: bytes that are not counted, or counted as if nothing were compressed."""
    results = [result[codec] for result in told.results("figures", range(4))]
    made, numels = hipress.codec(codec), results[0]["numels"]
    back = made.aggregator(4)
    for found in results:
        assert found["gradient"] == 4 * 4 * sum(numels)
        assert found["steps"] == 4 and found["messages"] > 0 and found["buffer"] > 0
        assert min(found["verbs"].values()) >= 0 and found["verbs"]["encode"] > 0
    assert sum(r["sent"] for r in results) == sum(r["received"] for r in results)
    # Of all ranks together, since each owns other gradients: 3 frames there and 3 back.
    exempt = sum(numels) - sum(results[0]["compressed"])
    promised = 3 * 2 * 4 * exempt + 3 * sum(
        made.wire_bytes(numel) + back.wire_bytes(numel) for numel in results[0]["compressed"]
    )
    sent = sum(found["sent"] for found in results) / 4
    assert promised <= sent < 1.2 * promised
    # A plain all-reduce sends 2 (N - 1) / N of the gradients from each rank.
    ratio = sum(found["ratio"] * found["sent"] for found in results) / (4 * sent)
    assert ratio == pytest.approx(4 * 2 * 3 / 4 * 4 * sum(numels) / sent)
    assert ratio > {"onebit": 15, "int8": 3.5, "topk(ratio=0.05)": 3}[codec]


def test_memory_is_one_residual_and_a_share_of_the_way_back(told):
    """Catches: residuals that are kept twice, e.g. for the old buckets and the new."""
    results = [result["onebit"] for result in told.results("figures", range(4))]
    compressed = sum(results[0]["compressed"])
    for found in results:
        extra = found["state"] - 4 * compressed
        assert 0 <= extra <= 4 * (compressed / 4 + max(found["compressed"]))
    assert sum(found["state"] for found in results) == 4 * 4 * compressed + 4 * compressed
    assert [r["none"]["state"] for r in told.results("figures", range(4))] == [0] * 4


def test_figures_are_logged_on_rank_0(told):
    """Catches: a line from every rank, no line, or one in every step; scalars that are missing."""
    results = [result["onebit"] for result in told.results("figures", range(4))]
    assert [found["lines"] for found in results[1:]] == [[]] * 3
    assert [found["scalars"] for found in results[1:]] == [[]] * 3
    first, unchecked, *steps = results[0]["lines"]
    assert unchecked[0] == "WARNING"
    assert unchecked[1].startswith("onebit depends on the optimizer, which could not be checked")
    level, text = first
    start, _, rest = text.partition(": ")
    assert (level, start) == (
        "INFO", "3 of 8 gradients (98.4 % of the elements) are compressed with onebit"
    )  # fmt: skip
    told_ratio, _, rest = rest.partition(" ")
    assert rest == "times fewer bytes than float32; no optimizer was given to check."
    # What the ranks have sent in the end, within the rounding of the text and headers of frames.
    sent = sum(found["sent"] for found in results)
    ratio = sum(found["ratio"] * found["sent"] for found in results) / sent
    assert float(told_ratio) == pytest.approx(ratio, rel=0.05)
    assert [level for level, _ in steps] == ["INFO", "INFO"]
    assert steps[0][1].startswith("step 2: ") and steps[1][1].startswith("step 4: ")
    end = "times fewer bytes than float32; "
    assert f"{end}no step was timed, because kernels were compiled; memory" in steps[0][1]
    assert f"{end}time per step: decode " in steps[1][1]
    scalars = {(tag, step): value for tag, value, step in results[0]["scalars"]}
    assert {step for _, step in scalars} == {2, 4}
    # Two steps each: what a line says is of the steps since the last one.
    halves = [scalars["hipress/sent_bytes_per_step", step] for step in (2, 4)]
    assert 2 * sum(halves) == results[0]["sent"]
    ratios = [scalars["hipress/ratio", step] for step in (2, 4)]
    plain = sum(2 * half * ratio for half, ratio in zip(halves, ratios, strict=True))
    assert plain == pytest.approx(results[0]["ratio"] * results[0]["sent"])
    assert ("hipress/seconds_per_step/encode", 2) not in scalars  # kernels were compiled
    assert scalars["hipress/memory_bytes", 4] >= results[0]["state"]
    assert scalars["hipress/seconds_per_step/encode", 4] > 0


def test_printed_figures_are_five_lines(told):
    """Catches: a dump of every gradient, and times of steps in which kernels were compiled."""
    found = told.results("figures", range(1))[0]["onebit"]
    assert found["timed"] == 2  # of 4: DDP makes its buckets anew after the first
    lines = found["printed"].splitlines()
    assert len(lines) == 5
    assert lines[0] == (
        f"4 steps: {found['sent'] / 1e6:.3f} MB sent, {found['received'] / 1e6:.3f} MB received, "
        f"{found['messages']} messages"
    )
    sent = found["sent"] / 4e6
    assert lines[1] == (
        f"{sent:.3f} MB sent per step: this rank sent {found['ratio']:.1f} times fewer bytes than "
        "float32"
    )
    assert lines[2].startswith("time per step: decode ") and " ms, encode " in lines[2]
    encode_ms = 1e3 * found["verbs"]["encode"] / 2
    assert f"encode {encode_ms:.1f} ms" in lines[2]
    assert lines[3].startswith("memory: 0.") and lines[3].endswith(" MB of buffers")
    assert lines[4] == f"3 of 8 gradients are compressed; not compressed: 5 ({EXEMPT})"


# --- errors ---------------------------------------------------------------------------------------

REFUSED = {
    "frozen": "the model has no parameter that is trained; there is nothing to attach.",
    "parallel": "which is or holds a DataParallel; DataParallel is not supported: give the module",
    "text": "attach was given a str; give a torch.nn.Module, in DDP or not.",
    "codec": "did you mean 'onebit'?",
    "kind": "codec is 3; give an expression such as 'onebit', or a codec.",
    "strategy": "strategy 'rng' (did you mean 'ring'?) is none of ps, ring, hierarchical, allred",
    "exclude": "exclude pattern '3.wieght' matches no parameter (did you mean '3.weight'?); the",
    "include": "include pattern 'head.*' matches no parameter; the first are: 0.weight, 0.bias",
    "plan": "'head.weight' (did you mean '5.weight'?), which this model does not have; make",
    "both": "attach was given a plan and a codec; the plan decides both: give one.",
    "warmup": "warmup_steps is -1; give a number of steps, 0 for none.",
    "optimizer": "optimizer is a int; give a torch optimizer.",
    "scaler": "scaler is a int; give a torch.amp.GradScaler.",
    "writer": "writer is a int; give a SummaryWriter.",
    "twice": "already, by an earlier attach or by others, and DDP takes one, once: wrap the module",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_how(told, case):
    """Catches: an error of another kind, or without the value and the next step."""
    kind, text, _ = one([result[case] for result in told.results("refused", range(2))])
    assert kind == "UsageError"
    assert REFUSED[case] in text
    assert "\n" not in text


def test_a_second_backward_on_top_of_the_means(told):
    """Catches: momentum of momentum without a word, on some ranks only, or with a hang."""
    found = one(told.results("twice", range(2)))
    for codec in ("momentum(ef(onebit))", "dgc(ratio=0.05)"):
        (kind, text, _), steps = found[codec]
        assert (kind, steps) == ("UsageError", 2)
        assert "were added to the means of step 2, of which" in text
    assert found["onebit"] == [["nothing", "", []], 3]


def test_a_refused_second_attach_leaves_the_first_alone(told):
    """Catches: a model that no longer trains, or cannot be wrapped anew."""
    for what, steps in (("after", 3), ("rewrapped", 2)):
        assert one([result[what] for result in told.results("refused", range(2))])[1] == steps


DIFFERENT = {
    "codec": "ranks differ in codecs, at place 1 ('onebit' on rank 0, 'int8' on rank 1)",
    "strategy": "ranks differ in strategies, at place 1 ('ps' on rank 0, 'ring' on rank 1)",
    "warmup": "ranks differ in warmup_steps (0 on rank 0, 2 on rank 1)",
    "model": "differ in parameters, at place 0 ('second.bias' on rank 0, 'third.bias' on rank 1)",
    "plan": "ranks differ in epoch of the plan (0 on rank 0, 1 on rank 1)",
    "exclude": "ranks differ in codecs, at place 3 ('onebit' on rank 0, 'none' on rank 1)",
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_differ_are_told_in_what(told, case):
    """Catches: ranks that hang, or train apart, since one was given something else."""
    kind, text, ranks = one([result[case] for result in told.results("different", range(2))])
    assert (kind, ranks) == ("AgreementError", [1])
    assert DIFFERENT[case] in text


def test_a_parameter_that_drifts_is_named(told):
    """Catches: a replica check that never comes, comes late, or names nothing."""
    before, (kind, text, ranks) = one(told.results("drifted", range(2)))
    assert before[0] == "nothing"  # checked every second step
    assert (kind, ranks) == ("AgreementError", [1])
    assert "3.weight" in text and "on rank 1" in text and "0.weight" not in text


def test_a_parameter_that_ddp_does_not_know_is_found(told):
    """Catches: a check of DDP's parameters alone, which misses one that was unfrozen later."""
    results = told.results("unfrozen", range(2))
    assert results[0][1] != results[1][1]
    steps, _, (kind, text, ranks) = results[0]
    assert (steps, kind, ranks) == (1, "AgreementError", [1])
    assert "3.bias" in text


def test_the_check_calls_parameters_as_all_else_does(told):
    """Catches: a name that neither stats nor plans nor checkpoints know."""
    _, (_, text, _) = told.results("drifted", range(1))[0]
    assert "parameter '3.weight' differs on rank 1 from rank 0;" in text


def test_a_rank_that_does_not_attach_is_named_in_time(told):
    """Catches: a DDP that is made before all ranks are there, which torch awaits for minutes."""
    kind, text, *_ = told.results("absent", range(1))[0]
    assert kind == "PeerError" and "rank 1" in text and "3 s" in text


def test_a_dead_rank_ends_backward_with_our_error(told):
    """Catches: a hang, and an error whose kind is lost on its way through DDP."""
    (died,) = told.find("died", id="dies")
    assert told.find("exit", id="dies", rank=2) == [3]
    for rank in (0, 1):
        kind, text, ranks, at = told.error("dies", rank)
        assert (kind, ranks) == ("PeerError", [2]), text
        assert "rank 2" in text
        assert at - died < 40
        (trace,) = told.find("trace", id="dies", rank=rank)
        assert "loss.backward()" in trace or "in backward" in trace
