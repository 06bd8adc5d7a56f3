"""Real processes over gloo in the lab: agreement, bytes on the wire, lost ranks, steady memory.

Starting a rank takes seconds, so a job runs many scenarios (see `scripts/ranks.py`); tests look at
what each has told.
"""

import re
import signal
import time
from pathlib import Path

import pytest

import hipress
from hipress.casync.graphs import partitions
from hipress.casync.graphs.strategies import STRATEGIES
from hipress.lab import Lab
from tests import scenarios
from tests.grid import full, selected, thinned
from tests.scenarios import Told

pytestmark = pytest.mark.alone

SCRIPT = Path(__file__).parent / "scripts" / "ranks.py"
CODECS = ["none", "onebit", "topk(ratio=0.05)", "terngrad"]
GROUPS = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 2]]
WIRE = [("none", "ps"), ("int8", "ps"), ("fp16", "ring"), ("int8", "allreduce")]
KILL_S = 15
"""Until a killed rank must be named, with the default timeout: 10 s, and 5 for a machine that
stands still meanwhile."""
LOST_S = 15
"""HIPRESS_TIMEOUT where a rank is cut off or frozen: on a busy machine, twelve ranks need seconds
for their first exchange, though their kernels are loaded by then."""
VANISHED_S = 60
"""Until a host that vanished must be named, with the default timeout."""
LATE_S = 10
"""How much longer than the timeout an error may take."""
KILLED = [(strategy, codec, 2) for strategy, codec in zip(STRATEGIES, CODECS, strict=False)]
KILLED.append(("ps", "onebit", 0))  # who holds the store
NOT_EXCHANGING = [("agree", 2), ("agree", 0), ("outside", 2), ("outside", 0), ("first", 0)]
"""Where the others are as a rank is killed, and that rank."""


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if (why := scenarios.refusal()) is not None:
        pytest.skip(why)


def start(lab, told, *stages):
    return scenarios.start(lab, SCRIPT, told, *stages)


@pytest.fixture(scope="module")
def lab():
    with Lab(hosts=4, rate="1gbit") as made:
        yield made


@pytest.fixture(scope="module")
def told(lab, request):
    """What ranks tell: those that come to no harm, then those of which one is killed."""
    groups = selected(request, "test_a_future_of_the_sum", "group")
    killed = selected(request, "test_a_killed_rank_is_named_on_all_others", "case")
    others = selected(request, "test_a_rank_killed_outside_exchanges_is_named", "case")
    found = Told()
    stages = [
        [
            {"id": f"agree {group}", "do": "agree", "ranks": max(4 * (group == [0, 2]), len(group)),
             "groups": [group], "codecs": CODECS, "strategies": list(STRATEGIES)}
            for group in groups
        ],
        [
            {"id": "uneven", "do": "agree", "ranks": 2, "groups": [[0], [0, 1]],
             "codecs": ["none"], "strategies": ["ps"], "env": {"HIPRESS_TIMEOUT": "30"}},
            {"id": "mismatch", "do": "mismatch", "ranks": 4,
             "codecs": ["onebit", "onebit", "int8", "onebit"]},
            {"id": "messages", "do": "messages", "ranks": 2, "count": 100},
        ],
        [{"id": "wire", "do": "wire", "ranks": 4, "cases": WIRE, "numel": 4_000_000, "steps": 3}],
        [{"id": "pipelining", "do": "pipelining", "ranks": 2, "numel": 4_000_000, "tries": 20}],
        [{"id": "steady", "do": "steady", "ranks": 2, "steps": 1000, "warm": 200, "numel": 65_536}],
        [
            *({"id": f"{strategy} {victim}", "do": "forever", "ranks": 4, "strategy": strategy,
               "codec": codec, "victim": victim} for strategy, codec, victim in killed),
            *({"id": f"{where} {victim}", "do": "loses", "ranks": 3, "where": where,
               "victim": victim} for where, victim in others),
        ],
    ]  # fmt: skip
    start(lab, found, *stages).wait(1500)
    return found


# --- replicas -------------------------------------------------------------------------------------


some_groups = pytest.mark.parametrize(
    "group", thinned(GROUPS, keep=([0, 1, 2, 3], [0, 2])), ids=str
)


@some_groups
@pytest.mark.parametrize("codec", CODECS)
def test_replicas_agree_in_every_group(told, group, codec):
    results = told.results(f"agree {group}", group)
    for strategy in STRATEGIES:
        found = [result[f"{group} {codec} {strategy}"] for result in results]
        hashes = [hashes for hashes, _ in found]
        assert hashes == [hashes[0]] * len(group)
        if codec == "none":
            assert max(error for _, error in found) < 2e-6


@some_groups
def test_a_future_of_the_sum(told, group):
    for result in told.results(f"agree {group}", group):
        is_same, error = result[f"{group} sum"]
        assert is_same and error < 5e-6


def test_a_rank_outside_the_group_is_told(told):
    (found,) = told.results("agree [0, 2]", [1])
    assert "not in the group" in found["[0, 2]"]


def test_ranks_may_be_in_different_numbers_of_groups(told):
    results = told.results("uneven", range(2))
    hashes = [result["[0, 1] none ps"][0] for result in results]
    assert hashes[0] == hashes[1]


def test_all_of_it_ends_well(told):
    for id, count in (("agree [0, 1, 2, 3]", 4), ("messages", 2), ("wire", 4), ("steady", 2)):
        assert told.find("exit", id=id) == [0] * count


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(len(WIRE)), ids=[" ".join(case) for case in WIRE])
def test_counted_bytes_are_those_of_the_interface(told, case):
    for found in (result[case] for result in told.results("wire", range(4))):
        assert tuple(found["case"]) == WIRE[case]
        for counted, there in zip(found["engine"], found["interface"], strict=True):
            assert counted >= 15e6
            assert abs(there - counted) < 0.05 * there


def test_bulk_sends_one_message_for_a_hundred(told):
    results = told.results("messages", range(2))
    together, apart = [sum(m for m, _ in pair) for pair in zip(*results, strict=True)]
    assert (together, apart) == (2, 200)
    assert len({found for result in results for _, found in result}) == 1


# --- steady steps ---------------------------------------------------------------------------------


def test_steady_steps_are_quiet(told):
    for first, warm, last in told.results("steady", range(2)):
        assert last["resident"] - warm["resident"] < 2e6
        assert last["tensors"] == warm["tensors"]
        assert last["made"] == warm["made"]
        assert last["recipes"] == first["recipes"] == 1
        assert last["exchanges"] == first["exchanges"] == 1
        assert last["threads"] == warm["threads"]
        assert first["made"]  # what is counted can be seen


def test_chunks_overlap_unless_pipelining_is_off(told):
    for (overlapping, num_chunks), (apart, _) in told.results("pipelining", range(2)):
        assert num_chunks > 4
        assert overlapping > 0
        assert apart == 0


# --- ranks that differ ----------------------------------------------------------------------------


def test_ranks_that_differ_are_named_on_all_ranks(told):
    for rank in range(4):
        kind, text, ranks, _ = told.error("mismatch", rank)
        assert (kind, ranks) == ("AgreementError", [2])
        assert "codec ('onebit' on ranks 0, 1, 3, 'int8' on rank 2)" in text
        assert told.find("exit", id="mismatch", rank=rank) == [1]


# --- lost ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    thinned(
        [pytest.param(case, id=str(case)) for case in KILLED],
        lambda cell: cell.values[0] in (KILLED[1], KILLED[-1]),
    ),
)
def test_a_killed_rank_is_named_on_all_others(told, case):
    strategy, _, victim = case
    id = f"{strategy} {victim}"
    (died,) = told.find("died", id=id)
    assert told.find("exit", id=id, rank=victim) == [-signal.SIGKILL]
    for rank in set(range(4)) - {victim}:
        kind, text, ranks, at = told.error(id, rank)
        assert (kind, ranks) == ("PeerError", [victim]), text
        assert re.search(rf"\brank {victim}\b", text)
        assert at - died < KILL_S
        assert told.find("exit", id=id, rank=rank) == [1]


@pytest.mark.parametrize(
    "case",
    thinned(
        [pytest.param(case, id=str(case)) for case in NOT_EXCHANGING],
        lambda cell: cell.values[0] in (NOT_EXCHANGING[0], NOT_EXCHANGING[1]),
    ),
)
def test_a_rank_killed_outside_exchanges_is_named(told, case):
    """Catches: a wait as long as torch's timeout, or torch's bare error of a store that is gone."""
    where, victim = case
    id = f"{where} {victim}"
    (died,) = told.find("died", id=id)
    for rank in set(range(3)) - {victim}:
        kind, text, ranks, at = told.error(id, rank)
        assert (kind, ranks) == ("PeerError", [victim]), text
        assert at - died < KILL_S


def lose(lab, how, undo, host, strategies, *, timeout_s=LOST_S, limit_s=LOST_S + LATE_S):
    """What ranks tell when a host is lost, and when that was.

    Args:
        timeout_s: HIPRESS_TIMEOUT; None leaves the default.
        limit_s: How long to wait for errors.
    """
    told = Told()
    env = {} if timeout_s is None else {"HIPRESS_TIMEOUT": str(timeout_s)}
    played = [
        {"id": strategy, "do": "forever", "ranks": 4, "strategy": strategy, "codec": "onebit",
         "env": env}
        for strategy in strategies
    ]  # fmt: skip
    job = start(lab, told, played)
    try:
        told.wait_for("ready", 4 * len(played), 300)
        time.sleep(0.5)
        lost = time.monotonic()
        how(host)
        deadline = lost + limit_s
        wanted = (4 if how == lab.cut else 3) * len(played)
        while len(told.find("error")) < wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        return told, lost
    finally:
        undo(host)
        job.kill()


LOST = ("ps", "ring", "allreduce")


@pytest.fixture(scope="module")
def frozen(lab):
    return lose(lab, lab.pause, lab.resume, 2, LOST)


@pytest.fixture(scope="module")
def cut_off(lab):
    return lose(lab, lab.cut, lab.heal, 2, LOST)


@pytest.mark.parametrize("strategy", LOST)
@pytest.mark.parametrize("how", thinned(["frozen", "cut_off"], keep=("frozen",)))
def test_a_lost_rank_is_named_on_all_that_are_left(how, strategy, request):
    told, since = request.getfixturevalue(how)
    for rank in (0, 1, 3):
        kind, text, ranks, at = told.error(strategy, rank)
        assert (kind, ranks) == ("PeerError", [2]), text
        assert "rank 2" in text
        assert at - since < LOST_S + LATE_S


@full
def test_a_host_that_vanishes_is_named_with_the_default_timeout(lab):
    """Catches: a wait as long as torch's timeout, or a quarter of an hour of retransmissions."""
    told, since = lose(lab, lab.cut, lab.heal, 2, ["ps"], timeout_s=None, limit_s=VANISHED_S)
    for rank in range(4):
        kind, text, ranks, at = told.error("ps", rank)
        assert kind == "PeerError" and (ranks == [2] or rank == 2), text
        assert at - since < VANISHED_S


@full
def test_a_host_that_freezes_for_a_while_is_waited_for(lab):
    """Catches: a process that is stopped and goes on, as of a suspended job, taken for dead."""
    told, _ = lose(lab, lab.pause, lab.resume, 2, ["ps"], timeout_s=None, limit_s=VANISHED_S)
    assert told.find("error") == []


@full
def test_a_rank_that_is_cut_off_itself_does_not_hang(cut_off):
    told, since = cut_off
    for strategy in LOST:
        kind, _, _, at = told.error(strategy, 2)
        assert kind == "PeerError"
        assert at - since < LOST_S + LATE_S


@full
def test_a_frozen_holder_of_the_store_is_named(lab):
    told, since = lose(lab, lab.pause, lab.resume, 0, ["ps"])
    for rank in (1, 2, 3):
        kind, text, ranks, at = told.error("ps", rank)
        assert (kind, ranks) == ("PeerError", [0]), text
        assert at - since < LOST_S + LATE_S


# --- hosts of several ranks -----------------------------------------------------------------------

BETWEEN = [("none", "ps"), ("none", "hierarchical"), ("int8", "ps"), ("int8", "hierarchical")]


@pytest.fixture(scope="module")
def two_by_two():
    told = Told()
    with Lab(hosts=2, rate="1gbit", ranks_per_host=2) as lab:
        before = [lab.counters(host).sent_bytes for host in range(2)]
        start(
            lab,
            told,
            [{"id": "wire", "do": "wire", "ranks": 4, "cases": BETWEEN, "numel": 2_000_000,
              "steps": 4}],
        ).wait(200)  # fmt: skip
        total = [lab.counters(host).sent_bytes - before[host] for host in range(2)]
    return told, total


@full
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_between_hosts_one_frame_each_way(two_by_two, codec):
    results = two_by_two[0].results("wire", range(4))
    numel, steps = 2_000_000, 4
    made = hipress.codec(codec)
    layout = partitions.cut([numel], 4)
    frames = sum(
        made.wire_bytes(part.numel) + made.aggregator(2).wire_bytes(part.numel)
        for part in layout.partitions
    )
    counted = {}
    for result in results[::2]:  # one rank of each host: they share its interface
        for one in result:
            case = tuple(one["case"])
            counted[case] = counted.get(case, 0) + one["interface"][0]
    hierarchical, ps = counted[codec, "hierarchical"], counted[codec, "ps"]
    assert abs(hierarchical - steps * frames) < 0.06 * steps * frames
    assert hierarchical < 0.6 * ps


@full
def test_the_switch_saw_it_too(two_by_two):
    told, total = two_by_two
    for host, seen in enumerate(total):
        inside = sum(one["interface"][0] for one in told.results("wire", range(4))[2 * host])
        assert inside < seen < 1.5 * inside  # warm-up steps and start-up besides
