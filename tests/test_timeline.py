"""Timelines: bytes and back, rows without crossings, clocks, and the check that finds mistakes."""

import copy
import dataclasses
import doctest
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipress import timeline
from hipress.errors import PeerError
from hipress.timeline import (
    BUCKETS,
    MODEL,
    QUEUES,
    Event,
    RankTrace,
    chrome_trace,
    overlap_s,
)
from tests import traces
from tests.traces import check_trace, summary


def event(queue, start_ns, end_ns, verb="task", **others):
    given = {"name": "w", "chunk": 0} | others
    return Event(verb=verb, queue=queue, start_ns=start_ns, end_ns=end_ns, **given)


def rank(number, *events, **others):
    return RankTrace(rank=number, host=f"host{number}", events=events, **others)


def of_kind(trace, phase, **wanted):
    """The events of a phase whose fields are as wanted."""
    return [
        one
        for one in trace["traceEvents"]
        if one["ph"] == phase and all(one.get(key) == value for key, value in wanted.items())
    ]


def row_names(trace, number=0):
    found = of_kind(trace, "M", name="thread_name", pid=number + 1)
    order = {
        one["tid"]: one["args"]["sort_index"]
        for one in of_kind(trace, "M", name="thread_sort_index", pid=number + 1)
    }
    assert len(order) == len(found)
    return [one["args"]["name"] for one in sorted(found, key=lambda one: order[one["tid"]])]


def test_examples_run():
    for module, least in ((timeline, 6), (traces, 4)):
        result = doctest.testmod(module)
        assert result.attempted >= least and result.failed == 0


# --- overlap --------------------------------------------------------------------------------------


def test_overlap_counts_each_moment_once():
    events = [
        event("compute", 0, 100),
        event("compute", 50, 150),
        event("recv", 80, 120),
        event("send", 90, 400),
        event("compute", 390, 500),
    ]
    assert overlap_s(events) == pytest.approx((70 + 10) / 1e9)


def test_the_model_is_no_part_of_the_exchange():
    assert overlap_s([event(MODEL, 0, 100), event("compute", 0, 100)]) == 0
    assert overlap_s([event(BUCKETS, 5, 5), event("compute", 0, 100)]) == 0
    assert overlap_s([]) == 0


# --- bytes and back -------------------------------------------------------------------------------

names = st.text(max_size=9)
events_of_any_kind = st.builds(
    Event,
    verb=names,
    name=names,
    chunk=st.integers(-1, 2**40),
    queue=st.sampled_from(QUEUES) | names,
    start_ns=st.integers(0, 2**63),
    end_ns=st.integers(0, 2**63),
    label=names,
    wire_bytes=st.none() | st.integers(0, 2**40),
    priority=st.none() | st.integers(-1, 2**20),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(events_of_any_kind, max_size=4), st.integers(-(2**63), 2**63))
def test_bytes_bring_all_back(events, offset_ns):
    one = RankTrace(
        rank=3, host="h", events=tuple(events), offset_ns=offset_ns, error_ns=7, device="cuda"
    )
    assert RankTrace.from_bytes(one.to_bytes()) == one


def test_every_field_travels_and_has_a_type_that_is_checked():
    names = [field.name for field in dataclasses.fields(Event)]
    assert len(GOOD["events"][0]) == len(names)
    assert GOOD.keys() == {field.name for field in dataclasses.fields(RankTrace)} | {"version"}
    for kind in (Event, RankTrace):
        assert {field.type for field in dataclasses.fields(kind)} <= timeline._TYPES.keys()


GOOD = json.loads(rank(0, event("recv", 1, 2)).to_bytes())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        b"[]",
        b"7",
        GOOD | {"version": 2},
        {key: value for key, value in GOOD.items() if key != "host"},
        GOOD | {"more": 1},
        GOOD | {"rank": "0"},
        GOOD | {"rank": True},
        GOOD | {"offset_ns": 1.5},
        GOOD | {"events": [GOOD["events"][0][:-1]]},
        GOOD | {"events": ["encoding"]},
        GOOD | {"events": 5},
        GOOD | {"events": [[7, *GOOD["events"][0][1:]]]},
    ],
)
def test_other_bytes_are_refused(data):
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(PeerError, match="timeline of a rank cannot be read .*same version"):
        RankTrace.from_bytes(data)


# --- the picture ----------------------------------------------------------------------------------


def test_every_rank_is_a_process():
    trace = chrome_trace([rank(2, event("send", 0, 1)), rank(0), rank(1, event("send", 0, 1))])
    names = [one["args"]["name"] for one in of_kind(trace, "M", name="process_name")]
    assert names == ["rank 0 (host0)", "rank 1 (host1)", "rank 2 (host2)"]
    order = [one["args"]["sort_index"] for one in of_kind(trace, "M", name="process_sort_index")]
    assert order == [0, 1, 2]
    assert [one["pid"] for one in of_kind(trace, "X")] == [2, 3]
    assert check_trace(trace) == []


def test_rows_stand_in_a_fixed_order():
    queues = ["recv", "attic", "communicate", "compute", "send", BUCKETS, MODEL]
    trace = chrome_trace([rank(0, *(event(queue, 5, 9) for queue in queues))])
    assert row_names(trace) == [*QUEUES, "attic"]
    # For a Perfetto that orders rows by number.
    tids = [one["tid"] for one in of_kind(trace, "M", name="thread_name")]
    assert tids == sorted(tids)


def test_spans_that_overlap_go_to_further_rows():
    spans = [(0, 10), (5, 20), (8, 9), (10, 30), (20, 25), (26, 27)]
    trace = chrome_trace([rank(0, *(event("compute", *span) for span in reversed(spans)))])
    assert row_names(trace) == ["compute", "compute 2", "compute 3"]
    rows = {}
    for one in of_kind(trace, "X"):
        rows.setdefault(one["tid"], []).append(round(one["ts"] * 1000))
    assert list(rows.values()) == [[0, 10], [5, 20, 26], [8]]
    assert check_trace(trace) == []


@pytest.mark.parametrize("queue", timeline.DIRECTIONS)
def test_messages_of_one_direction_have_one_row(queue):
    """Catches: thirteen rows of receives, which are all asked for early; spans that cross."""
    spans = [(0, 10), (5, 20), (8, 9), (10, 30), (20, 25), (40, 41)]
    trace = chrome_trace([rank(0, *(event(queue, *span) for span in reversed(spans)))])
    assert row_names(trace) == [queue]
    drawn = [
        tuple(round(us * 1000) for us in (one["ts"], one["dur"], one["args"].get("waited_us", 0)))
        for one in of_kind(trace, "X")
    ]
    assert drawn == [(8, 1, 0), (9, 1, 9), (10, 10, 5), (20, 5, 0), (25, 5, 15), (40, 1, 0)]
    assert check_trace(trace) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["compute", "recv"]),
            st.integers(0, 40),
            st.integers(0, 15),
        ),
        max_size=30,
    ),
    st.integers(0, 2**52),
)
def test_any_events_can_be_drawn_and_none_is_lost(found, start_ns):
    ranks = [
        rank(
            number,
            *(event(q, start_ns + s, start_ns + s + d) for n, q, s, d in found if n == number),
            offset_ns=-number,
        )
        for number in range(3)
    ]
    trace = json.loads(json.dumps(chrome_trace(ranks)))
    assert check_trace(trace) == []
    drawn = [one for one in trace["traceEvents"] if one["ph"] != "M"]
    first = min((s - n for n, _, s, _ in found), default=0)
    # Cut to nanoseconds, as Perfetto does. What a message has waited belongs to its time.
    assert sorted(
        (
            one["pid"] - 1,
            int(one["ts"] * 1000) - (waited := int(one["args"].get("waited_us", 0) * 1000)),
            int(one.get("dur", 0) * 1000) + waited,
        )
        for one in drawn
    ) == sorted((n, s - n - first, d) for n, _, s, d in found)
    # No more rows than spans at one moment.
    for number in range(3):
        spans = [(s, s + d) for n, q, s, d in found if (n, q) == (number, "compute") and d]
        moments = [s + 0.5 for s in range(60)]
        most = max(sum(a < moment < b for a, b in spans) for moment in moments)
        rows = row_names(trace, number)
        if all(d for n, q, _, d in found if (n, q) == (number, "compute")):
            assert len([name for name in rows if name.startswith("compute")]) == most
        assert len([name for name in rows if name.startswith("recv")]) <= 1


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**51))
def test_perfetto_reads_the_nanosecond_that_was_meant(ns):
    text = json.dumps(timeline._us(ns))
    assert int(float(text) * 1000) == ns
    assert float(text) == pytest.approx(ns / 1000, rel=1e-15)


def test_clocks_are_aligned_and_their_errors_told():
    there = event("recv", 1_000_500, 1_002_000)
    trace = chrome_trace(
        [rank(0, event("send", 10_000, 10_700)), rank(1, there, offset_ns=-990_000, error_ns=250)]
    )
    (sent,), (received,) = of_kind(trace, "X", pid=1), of_kind(trace, "X", pid=2)
    assert (sent["ts"], sent["dur"]) == pytest.approx((0, 0.7))
    assert (received["ts"], received["dur"]) == pytest.approx((0.5, 1.5))
    assert trace["otherData"]["clocks"] == [
        {"rank": 0, "offset_us": 0.0, "error_us": 0.0},
        {"rank": 1, "offset_us": -990.0, "error_us": 0.25},
    ]
    assert trace["displayTimeUnit"] == "ms"


def test_a_gpu_is_noted():
    note = "on a GPU the model's rows show when work was started"
    assert note not in chrome_trace([rank(0)])["otherData"]["notes"]
    assert note in chrome_trace([rank(0), rank(1, device="cuda")])["otherData"]["notes"]


def test_what_is_told_of_an_event():
    trace = chrome_trace(
        [
            rank(
                0,
                event("compute", 0, 5, "encode", name="w1", chunk=3, label="a.weight[0:8]"),
                event("send", 5, 9, "send", name="w1", chunk=3, wire_bytes=0, priority=0),
                event(MODEL, 0, 9, "backward", chunk=7, name=""),
                event(BUCKETS, 4, 4, "ready", name="bucket 2", chunk=2, label="a.weight, a.bias"),
            )
        ]
    )
    (encode,), (send,) = of_kind(trace, "X", name="encode"), of_kind(trace, "X", name="send")
    assert encode["cat"] == "encode"
    assert encode["args"] == {"gradient": "a.weight[0:8]", "chunk": 3, "synchronisation": "w1"}
    assert send["args"] == {"chunk": 3, "synchronisation": "w1", "bytes": 0, "priority": 0}
    (backward,) = of_kind(trace, "X", name="backward")
    assert backward["args"] == {"step": 7}
    (ready,) = of_kind(trace, "i")
    assert (ready["name"], ready["cat"]) == ("bucket 2 ready", "ready")
    assert ready["args"] == {"gradient": "a.weight, a.bias"} and "dur" not in ready


def test_a_summary_of_each_rank():
    trace = chrome_trace(
        [
            rank(
                0,
                event(MODEL, 0, 1000, "forward"),
                event(MODEL, 1000, 3000, "backward"),
                event(BUCKETS, 2000, 2000, "ready"),
                event("compute", 2000, 2600, "encode"),
                event("compute", 2550, 2650, "merge"),  # on a row of its own
                event("send", 500, 600, "send"),
                event("recv", 2100, 4000, "recv"),
                event("recv", 2200, 3000, "recv"),
                event("compute", 4000, 4100, "decode"),
            ),
            rank(1, event("send", 10**9, 2 * 10**9, "send"), offset_ns=5),
            rank(2),
        ]
    )
    first, second, third = summary(json.loads(json.dumps(trace)))
    assert [first.rank, second.rank, third.rank] == [0, 1, 2]
    expected = {"forward": 1000, "backward": 2000, "encode": 600, "recv": 2700, "decode": 100}
    expected |= {"merge": 100, "send": 100}
    assert first.verb_s == pytest.approx({verb: ns / 1e9 for verb, ns in expected.items()})
    assert first.overlap_s == pytest.approx(550 / 1e9)
    assert first.hidden_s == pytest.approx(1000 / 1e9)
    assert second.verb_s == {"send": 1.0} and second.overlap_s == second.hidden_s == 0
    assert third.verb_s == {}


# --- the check can fail ---------------------------------------------------------------------------

PLAIN = chrome_trace([rank(0, event("recv", 0, 5000), event("compute", 500, 1500)), rank(1)])
RECV = next(k for k, one in enumerate(PLAIN["traceEvents"]) if one.get("cat") == "task")


def test_the_plain_trace_is_well():
    assert check_trace(PLAIN) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ts": None}, "no ts"),
        ({"dur": None}, "no dur"),
        ({"pid": None, "tid": None}, "no pid and no tid"),
        ({"name": None}, "no name"),
        ({"name": ""}, "name is no text"),
        ({"name": 5}, "name is no text"),
        ({"ph": None}, "ph is None"),
        ({"ph": "Z"}, "ph is 'Z'"),
        ({"ts": math.nan}, "ts is nan, no finite number"),
        ({"dur": math.inf}, "dur is inf, no finite number"),
        ({"ts": "5"}, "ts is '5', no finite number"),
        ({"dur": True}, "dur is True, no finite number"),
        ({"dur": -1.0}, "dur is negative"),
        ({"ts": -0.5}, "ts is negative"),
        ({"args": []}, "args is no object"),
        ({"tid": 0}, "tid is 0"),
        ({"tid": "a"}, "tid is 'a'"),
        ({"tid": 99}, "thread 99 has no name"),
        ({"pid": 2}, "is in processes 1 and 2"),
        ({"pid": 77}, "process 77 has no name"),
        ({"args": {"x": math.nan}}, "it is no JSON"),
        ({"args": {"x": {1, 2}}}, "it is no JSON"),
    ],
)
def test_a_spoilt_event_is_found(changes, complaint):
    trace = copy.deepcopy(PLAIN)
    spoilt = trace["traceEvents"][RECV]
    for key, value in changes.items():
        if value is None:
            del spoilt[key]
        else:
            spoilt[key] = value
    found = check_trace(trace)
    assert found and complaint in found[0], found


def spans(*times):
    """A trace with spans on one row; times in nanoseconds."""
    trace = copy.deepcopy(PLAIN)
    one = trace["traceEvents"].pop(RECV)
    for start, end in times:
        trace["traceEvents"].append(one | {"ts": start / 1000, "dur": (end - start) / 1000})
    return check_trace(trace)


@pytest.mark.parametrize(
    "times",
    [
        [(0, 10), (10, 20)],
        [(10, 20), (0, 10)],
        [(0, 50), (10, 20), (20, 50), (30, 40)],
        [(10, 20), (0, 50)],
        [(0, 10), (0, 50)],
        [(0, 10), (0, 10)],
        [(0, 10), (5, 5)],
    ],
)
def test_spans_may_nest_and_come_in_any_order(times):
    assert spans(*times) == []


@pytest.mark.parametrize("times", [[(0, 10), (9, 20)], [(9, 20), (0, 10)], [(0, 50), (10, 60)]])
def test_spans_that_cross_are_found(times):
    (text,) = spans(*times)
    assert "begins within 'task' and ends after it" in text


@pytest.mark.parametrize("trace", [{}, {"traceEvents": {}}])
def test_a_trace_without_events_is_found(trace):
    assert check_trace(trace) == ["traceEvents is missing or no list"]
    assert check_trace({"traceEvents": ["x"]}) == ["event 0 ('x'): no object"]
