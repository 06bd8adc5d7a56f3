"""Training jobs on real ranks: they learn, agree, stop and go on, and refuse together.

Starting a rank takes seconds, so one job runs all scenarios (see `scripts/jobs.py`).
"""

from pathlib import Path

import pytest

from tests import scenarios
from tests.grid import selected, thinned

SCRIPT = Path(__file__).parent / "scripts" / "jobs.py"
MOVED = {"4 to 3": 3, "4 to 1": 1}
NETS = "tests.train.scripts.nets"
PLAIN = {"model": f"{NETS}:plain"}
STEPPED = {**PLAIN, "codec": "onebit", "rate": 0.03, "rate_mode": "step", "decay_epochs": "2"}
RESUMED = {
    "onebit": {**PLAIN, "codec": "onebit", "rate_mode": "cosine"},
    "dgc": {**PLAIN, "codec": "dgc(ratio=0.01)", "momentum": 0.9},
    "adam": {
        **PLAIN,
        "codec": "ef(terngrad)",
        "optimizer": "adam",
        "strategy": "ring",
    },
    "fp16": {**PLAIN, "codec": "onebit", "amp": "fp16", "clip_norm": 1.0},
    "dropout": {"model": f"{NETS}:with_dropout", "codec": "int8"},
    "norm": {"model": f"{NETS}:with_norm", "codec": "uncompressed"},
}


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    resumed = selected(request, "test_a_run_that_dies_goes_on_bit_for_bit", "name")
    moved = selected(request, "test_another_number_of_ranks_goes_on_at_the_same_example", "name")
    folder = tmp_path_factory.mktemp("jobs")

    def one(id, do, ranks=2, **options):
        return {"id": id, "do": do, "ranks": ranks, **options}

    (folder / "0.txt").write_bytes(bytes(range(256)) * 40)
    (folder / "1.txt").write_bytes(bytes(range(256)) * 30)
    stages = [
        [
            one("plain", "trains", 4, codec="uncompressed", steps=40, rate=0.03),
            one("onebit", "trains", 4, codec="momentum(ef(onebit))", steps=40, rate=0.03),
        ],
        [
            one("accumulate", "trains", **PLAIN, codec="none", batch=8, accumulate=2, steps=6),
            one("at once", "trains", **PLAIN, codec="none", batch=16, steps=6),
            one("rates", "trains", **PLAIN, steps=8, rate=0.4, rate_mode="step", decay_epochs="0.1",
                warmup_epochs=0.05, log_every=2, eval_every=0.08),
            one("bf16", "trains", **PLAIN, codec="int8", amp="bf16", steps=20, rate=0.05),
            one("diverges", "refuses", rate=1e9, steps=40, log_every=5),
            one("plain momentum", "refuses", codec="dgc", plain_steps=3),
            one("short trace", "refuses", timeline="t.json", steps=7),
            one("other data", "refuses", data="text", paths=[str(folder / "{rank}.txt")],
                model="gpt", length=16, steps=2),
            one("poisoned", "refuses", **PLAIN, rate=1e30, steps=1,
                checkpoint=str(folder / "poisoned")),
            one("one rank", "refuses", only=1, data="text", paths=[__file__], model="gpt"),
            one("unknown", "refuses", model="vgg99"),
            one("too many", "refuses", batch=10_000),
        ],
        [
            one(f"{name} before", "trains", 4, checkpoint=str(folder / name), **STEPPED, steps=40)
            for name in moved
        ],
        [
            *(one(f"{name} after", "trains", MOVED[name], checkpoint=str(folder / name),
                  resume=True, epochs=2.4, **STEPPED) for name in moved),
            one("slow disk", "slow_disk", **PLAIN, steps=4, checkpoint_every=2,
                checkpoint=str(folder / "slow"), env={"HIPRESS_TIMEOUT": "15"}),
            one("full disk", "full_disk", **PLAIN, steps=4, checkpoint=str(folder / "full")),
            one("options", "changed_options", **PLAIN, codec="int8",
                checkpoint=str(folder / "options")),
        ],
        [
            one(f"resume {name}", "resumes", dies_at=10, checkpoint=str(folder / name), **options)
            for name, options in RESUMED.items() if name in resumed
        ],
    ]  # fmt: skip
    return scenarios.play(SCRIPT, *stages)


def alike(values):
    assert all(value == values[0] for value in values), values
    return values[0]


@pytest.mark.parametrize("id", ["plain", "onebit"])
def test_ranks_learn_and_agree(told, id):
    """Catches: ranks that drift apart, learn nothing, or tell different rows."""
    ranks = told.results(id, range(4))
    alike([rank["bits"] for rank in ranks])
    alike([rank["losses"] for rank in ranks])
    result = ranks[0]["result"]
    assert result["accuracy"] > 90 and result["loss"] < 0.5
    assert ranks[0]["steps"] == list(range(1, 41))
    assert list(ranks[0]["tests"]) == ["18", "36", "40"]  # two epochs, and the end
    facts = ranks[0]["facts"]
    assert facts["steps_per_epoch"] == 18 and facts["num_epochs"] == pytest.approx(40 / 18)
    assert facts["num_parameters"] == 1_147_466 and facts["num_gradients"] == 10


def test_bytes_of_both_are_told(told):
    """Catches: a codec that is not used, or bytes that are not counted."""
    plain, onebit = (told.results(id, [0])[0] for id in ("plain", "onebit"))
    assert plain["result"]["wire_bytes_per_step"] == 2 * 3 / 4 * 4 * 1_147_466
    assert plain["result"]["ratio"] == 1 and plain["facts"]["num_compressed"] == 0
    assert plain["result"]["memory_bytes"] == 0
    assert 20 < onebit["result"]["ratio"] < 31
    assert onebit["facts"]["num_compressed"] == 4
    assert onebit["facts"]["compressed_share"] > 0.99
    assert onebit["result"]["memory_bytes"] > 4 * 1_147_466


def test_speed_is_told_for_a_rank_and_in_all(told):
    result = told.results("onebit", [0])[0]["result"]
    assert result["units_per_s"] == pytest.approx(4 * result["units_per_s_per_rank"])
    assert result["units_per_s_per_rank"] == pytest.approx(16 * result["steps_per_s"])
    assert result["unit"] == "images" and result["seconds"] > 40 / result["steps_per_s"] * 0.5


def test_accumulated_micro_batches_are_one_batch(told):
    """Catches: gradients that are exchanged too early, or a loss that is not averaged."""
    parts, whole = (told.results(id, [0])[0] for id in ("accumulate", "at once"))
    assert parts["losses"].keys() == whole["losses"].keys()
    for step, loss in whole["losses"].items():
        assert parts["losses"][step] == pytest.approx(loss, rel=1e-4)
    assert parts["facts"]["batch"] == whole["facts"]["batch"] == 16


def test_rates_and_evaluations_come_when_they_should(told):
    found = told.results("rates", [0])[0]
    # 37 steps an epoch: the rise takes 1.85 steps, the drop comes at step 3.7.
    assert found["rates"] == {
        "2": pytest.approx(0.4),
        "4": pytest.approx(0.4),
        "6": pytest.approx(0.04),
        "8": pytest.approx(0.04),
        "3": pytest.approx(0.4),
    }
    assert list(found["tests"]) == ["3", "6", "8"]


def test_bf16_trains(told):
    found = told.results("bf16", [0])[0]
    assert found["losses"]["1"] > 2 and found["losses"]["20"] < 1


@pytest.mark.parametrize("name", thinned(RESUMED, keep=("onebit", "fp16")))
def test_a_run_that_dies_goes_on_bit_for_bit(told, name):
    """Catches: anything that a checkpoint forgets: residuals, momentum, scale, order, dropout."""
    for rank in told.results(f"resume {name}", range(2)):
        whole, died, went_on = rank["whole"], rank["died"], rank["went_on"]
        assert died["first"] == 0 and died["steps"][-1] == 10
        assert went_on["first"] == 8 and went_on["steps"] == [9, 10, 11, 12]
        assert went_on["losses"] == {k: v for k, v in whole["losses"].items() if int(k) > 8}
        assert went_on["bits"] == whole["bits"] != died["bits"]


def test_a_loss_that_is_not_finite_ends_the_run(told):
    for kind, text in told.results("diverges", range(2)):
        assert kind == "TrainingError"
        assert "start again with a smaller --lr than 1e+09" in text


def test_what_one_rank_refuses_all_refuse_and_the_rank_is_named(told):
    """Catches: ranks that wait for good for one that has left."""
    found = alike(told.results("one rank", range(2)))
    assert found[0] == "JointError"
    assert found[1].startswith("rank 1: ") and "'not-there'" in found[1]


def test_what_all_refuse_is_said_as_it_is(told):
    assert alike(told.results("unknown", range(2)))[1].startswith("model 'vgg99'")
    kind, text = alike(told.results("too many", range(2)))
    assert kind == "JointError"
    assert text.startswith("2 rank(s) with --batch 10000 take 20000 examples in a step")


def test_options_that_do_harm_or_nothing_are_refused(told):
    text = alike(told.results("plain momentum", range(2)))[1]
    assert text.startswith("--plain-steps would train without momentum")
    text = alike(told.results("short trace", range(2)))[1]
    assert text.startswith("--timeline records steps 4 to 8 and the run has 7")


def test_ranks_with_other_data_do_not_train(told):
    """Catches: a file that is half copied to one host, and ranks that deal from other orders."""
    kind, text = alike(told.results("other data", range(2)))
    assert kind == "AgreementError" and "training examples" in text


def test_a_step_into_nowhere_is_no_result(told):
    """Catches: exit code 0 with a test loss that is not a number."""
    kind, text = alike(told.results("poisoned", range(2)))
    assert kind == "TrainingError" and " at step 1; start again with a smaller --lr" in text


@pytest.mark.parametrize("name", thinned(MOVED, keep=("4 to 3",)))
def test_another_number_of_ranks_goes_on_at_the_same_example(told, name):
    """Catches: epochs that are counted by steps of another size, and rates that jump back."""
    before, after = (told.results(f"{name} {part}", [0])[0] for part in ("before", "after"))
    # 1,200 examples: 4 ranks take 18 steps of 64 in an epoch, 3 take 25 of 48, 1 takes 75 of 16.
    per_epoch = {4: 18, 3: 25, 1: 75}[after["facts"]["num_ranks"]]
    assert before["steps"][-1] == 40 and after["first"] == 2 * per_epoch + 4 * 64 // (
        16 * after["facts"]["num_ranks"]
    )
    assert list(after["rates"].values()) == pytest.approx([0.003] * len(after["rates"]))


def test_a_long_write_is_waited_for(told):
    """Catches: ranks that give up while rank 0 writes a large checkpoint."""
    for rank in told.results("slow disk", range(2)):
        assert rank["steps"] == [1, 2, 3, 4]


def test_a_write_that_fails_ends_all_with_a_sentence(told):
    kind, text = alike(told.results("full disk", range(2)))
    assert kind == "JointError" and "the checkpoint cannot be written" in text


def test_this_jobs_options_hold_after_a_resume(told):
    """Catches: an optimizer whose options come back with its memory."""
    for rank in told.results("options", range(2)):
        assert rank == [0.5, 0.01, True]


def test_processes_end_well(told):
    exits = [line for line in told.lines if "exit" in line and line["exit"] != 0]
    assert not exits and told.finished.exit_code == 0
