"""Graphs as pure data: every strategy and every pass on the strict transport, counts, chunks."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipress.casync.graphs import lowering, partitions
from hipress.casync.graphs.graph import COMPUTING, Kind, Verb
from hipress.casync.graphs.strategies import STRATEGIES, Cluster, candidates, get
from hipress.errors import UsageError
from tests.casync import strict

LOWERINGS = {
    "default": {},
    "ordered": {"ordered": True},
    "staged": {"pipelined": False},
    "staged and ordered": {"pipelined": False, "ordered": True},
}
SIZES = range(1, 18)
CASES = [(name, False) for name in STRATEGIES] + [("ring", True)]
"""Strategy, and whether a rank's own gradient passes its codec first (only a ring asks)."""


def graphs_of(strategy, hosts, routes, *, codes_local=False, raw=False, **options):
    cluster = Cluster(hosts=tuple(hosts), codes_local=codes_local)
    built = [get(strategy).build(cluster, rank, routes) for rank in range(len(hosts))]
    return built if raw else [lowering.lower(graph, **options) for graph in built]


def check_mean(graphs):
    results = strict.play(graphs)
    num_ranks = len(graphs)
    chunks_seen = set(range(len(graphs[0].routes)))
    for result in results:
        assert set(result) == chunks_seen
        for chunk, value in result.items():
            shares = dict(value.weights)
            assert set(shares) == set(range(num_ranks))
            assert all(abs(share - 1 / num_ranks) < 1e-9 for share in shares.values())
            # One maker for all ranks: they hold the same bits, not only the same mean.
            assert value.made == results[0][chunk].made is not None


def pairs_of(num_ranks):
    """Hosts of two ranks each."""
    return [rank // 2 for rank in range(num_ranks)]


def chunk_counts(num_ranks):
    return (1, num_ranks, 2 * num_ranks + 1) if num_ranks <= 5 else (num_ranks + 1,)


def lowerings(num_ranks):
    """All of them for few ranks; for many, where graphs grow with N squared, they take turns."""
    chosen = list(LOWERINGS.values())
    return chosen if num_ranks <= 5 else [chosen[num_ranks % len(chosen)]]


# --- every graph is right -------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize(("strategy", "codes_local"), CASES)
def test_every_rank_gets_the_same_mean(strategy, codes_local, num_ranks):
    for count in chunk_counts(num_ranks):
        routes = [chunk % num_ranks for chunk in range(count)]
        hosts = pairs_of(num_ranks)
        if num_ranks <= 8:
            check_mean(graphs_of(strategy, hosts, routes, codes_local=codes_local, raw=True))
        for options in lowerings(num_ranks):
            check_mean(graphs_of(strategy, hosts, routes, codes_local=codes_local, **options))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_routes_need_not_go_round(strategy, num_ranks):
    # As the engine's own: several chunks in a row on one rank, ranks without any.
    routes = [0, 0, num_ranks - 1, 0, num_ranks // 2, num_ranks // 2, 0]
    for options in LOWERINGS.values():
        check_mean(graphs_of(strategy, pairs_of(num_ranks), routes, **options))


@pytest.mark.parametrize(
    "hosts",
    [
        (0,),
        (0, 0, 0),
        (0, 1, 2),
        (0, 0, 0, 1),
        (0, 1, 1, 1, 1),
        (0, 1, 0, 2, 1, 0),  # ranks of a host need not be neighbours
        (0, 0, 1, 1, 1, 2, 2, 2, 2, 2),
        (0,) * 8 + (1,) * 8 + (2,),
    ],
)
def test_hosts_of_any_size_count_as_much_as_they_have(hosts):
    num_ranks = len(hosts)
    for count in (1, num_ranks, 2 * num_ranks + 1):
        routes = [chunk % num_ranks for chunk in range(count)]
        check_mean(graphs_of("hierarchical", hosts, routes, raw=True))
        for options in LOWERINGS.values():
            check_mean(graphs_of("hierarchical", hosts, routes, **options))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 9, 16, 17])
def test_bulk_groups(strategy, num_ranks):
    numels = [100] * 7 + [1_000_000, 10, 70_001, 5, 300_000]
    layout = partitions.cut(numels, num_ranks, chunk_numel=500_000)
    assert len(layout.routes) < len(layout.partitions)
    for options in lowerings(num_ranks):
        graphs = graphs_of(
            strategy, pairs_of(num_ranks), layout.partition_routes, groups=layout.groups, **options
        )
        assert all(graph.routes == layout.routes for graph in graphs)
        check_mean(graphs)


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("ordered", [False, True])
def test_without_a_codec_an_allreduce_is_the_transport_s_own(num_ranks, ordered):
    graphs = graphs_of("allreduce", [0] * num_ranks, range(5), plain=True, ordered=ordered)
    check_mean(graphs)
    for graph in graphs:
        assert [task.verb for task in graph.tasks] == [Verb.ALL_REDUCE] * 5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tasks_stand_behind_what_they_need_and_need_what_they_touch(strategy):
    for options in LOWERINGS.values():
        for graph in graphs_of(strategy, (0, 0, 1), range(7), **options):
            wrote, read = {}, {}
            for place, task in enumerate(graph.tasks):
                needed = {wrote[slot] for slot in (*task.reads, *task.writes) if slot in wrote}
                needed |= {k for slot in task.writes for k in read.get(slot, ())}
                assert needed <= set(task.needs)
                assert all(need < place for need in task.needs)
                for slot in task.reads:
                    read.setdefault(slot, set()).add(place)
                for slot in task.writes:
                    wrote[slot] = place
                    read[slot] = set()


def test_staged_tasks_need_the_whole_depth_before():
    for graph in graphs_of("ps", (0, 1, 2), range(6), pipelined=False):
        for place, task in enumerate(graph.tasks):
            behind = {k for k, other in enumerate(graph.tasks[:place]) if other.depth < task.depth}
            if task.verb is not Verb.RECV and behind:
                deepest = max(graph.tasks[k].depth for k in behind)
                last = {k for k in behind if graph.tasks[k].depth == deepest}
                assert last <= set(task.needs)


def test_fusing_leaves_one_merge_per_chunk_and_aggregator():
    for graph in graphs_of("ps", (0, 1, 2), range(3)):
        merges = [task for task in graph.tasks if task.verb is Verb.MERGE]
        assert [task.chunk for task in merges] == [graph.rank]
        assert [slot.kind for slot in merges[0].reads] == [Kind.FRAME] * 3
        assert [slot.rank for slot in merges[0].reads] == [0, 1, 2]  # in rank order
        assert merges[0].writes[0].kind is Kind.BACK


def test_an_unknown_strategy_is_refused_with_a_hint():
    with pytest.raises(UsageError, match="'rong' .did you mean 'ring'.*is none of ps, ring"):
        get("rong")


# --- the strict transport can fail ----------------------------------------------------------------


def broken(graph, tasks):
    """The graph with other tasks, and nothing said of what they need."""
    return replace(graph, tasks=tuple(replace(task, needs=()) for task in tasks))


def two_ranks():
    return graphs_of("ps", (0, 1), range(4))


def positions(graph, verb):
    return [place for place, task in enumerate(graph.tasks) if task.verb is verb]


def test_strict_sees_two_sends_in_another_order():
    graphs = two_ranks()
    tasks = list(graphs[0].tasks)
    a, b = [k for k in positions(graphs[0], Verb.SEND) if tasks[k].reads[0].kind is Kind.FRAME]
    # The later one's frame must be there, so the earlier goes back to its place.
    tasks[a : b + 1] = [*tasks[a + 1 : b + 1], tasks[a]]
    with pytest.raises(strict.Mismatch, match=r"rank 1 expects .* from rank 0, which sent"):
        strict.play([broken(graphs[0], tasks), graphs[1]])


def test_strict_sees_a_dropped_recv():
    graphs = two_ranks()
    tasks = list(graphs[0].tasks)
    del tasks[positions(graphs[0], Verb.RECV)[0]]
    with pytest.raises(strict.Mismatch):
        strict.play([broken(graphs[0], tasks), graphs[1]])
    # The last one of all is missed by who reads it.
    tasks = list(graphs[0].tasks)
    del tasks[positions(graphs[0], Verb.RECV)[-1]]
    with pytest.raises(strict.Mismatch, match="which nobody wrote"):
        strict.play([broken(graphs[0], tasks), graphs[1]])


def test_strict_sees_a_wrong_peer():
    graphs = graphs_of("ps", (0, 1, 2), range(3))
    tasks = list(graphs[0].tasks)
    place = positions(graphs[0], Verb.SEND)[0]
    tasks[place] = replace(tasks[place], to=(3 - tasks[place].to[0],))
    with pytest.raises(strict.Mismatch):
        strict.play([broken(graphs[0], tasks), *graphs[1:]])


def test_strict_sees_a_task_before_its_need():
    graphs = two_ranks()
    place = positions(graphs[0], Verb.SEND)[0]
    task = graphs[0].tasks[place]
    late = replace(task, needs=(len(graphs[0].tasks) - 1,))
    tasks = [*graphs[0].tasks[:place], late, *graphs[0].tasks[place + 1 :]]
    with pytest.raises(strict.Mismatch, match="stands before what it needs"):
        strict.play([replace(graphs[0], tasks=tuple(tasks)), graphs[1]])
    with pytest.raises(strict.Mismatch, match="reads .* which nobody wrote"):
        strict.play([broken(graphs[0], [task, *graphs[0].tasks]), graphs[1]])


def test_strict_sees_a_message_that_is_never_received():
    graphs = two_ranks()
    again = graphs[0].tasks[positions(graphs[0], Verb.SEND)[-1]]
    with pytest.raises(strict.Mismatch, match="sent and never received: 0 -> 1"):
        strict.play([broken(graphs[0], [*graphs[0].tasks, again]), graphs[1]])


def test_strict_sees_a_standstill():
    graphs = two_ranks()
    for k, graph in enumerate(graphs):
        first = graph.tasks[positions(graph, Verb.RECV)[0]]
        graphs[k] = broken(graph, [first, *(t for t in graph.tasks if t != first)])
    with pytest.raises(strict.Mismatch, match="standstill: rank 0 waits for rank 1.*; rank 1 "):
        strict.play(graphs)


def test_strict_sees_all_reduces_in_another_order():
    graphs = graphs_of("allreduce", (0, 1), range(2), plain=True)
    with pytest.raises(strict.Mismatch, match="rank 1 reduces .*chunk=1.*, rank 0 .*chunk=0"):
        strict.play([graphs[0], broken(graphs[1], graphs[1].tasks[::-1])])


def test_the_check_of_the_mean_can_fail():
    # A merge that forgets a rank, and a rank that decodes what it did not send.
    graphs = graphs_of("ps", (0, 1, 2), [0])
    place = positions(graphs[0], Verb.MERGE)[0]
    merge = graphs[0].tasks[place]
    lame = replace(merge, weights=(0.5, 0.5, 0.0))
    tasks = [*graphs[0].tasks[:place], lame, *graphs[0].tasks[place + 1 :]]
    with pytest.raises(AssertionError):
        check_mean([replace(graphs[0], tasks=tuple(tasks)), *graphs[1:]])
    decode = graphs[0].tasks[-1]
    assert decode.verb is Verb.DECODE
    home = replace(decode, verb=Verb.MERGE, reads=merge.reads, weights=merge.weights)
    with pytest.raises(AssertionError):
        check_mean([replace(graphs[0], tasks=(*graphs[0].tasks[:-1], home)), *graphs[1:]])


# --- counts ---------------------------------------------------------------------------------------


def messages(graphs):
    """(from, to, slot) of every message; sent and received are the same."""
    sent = [
        (graph.rank, to, slot)
        for graph in graphs
        for task in graph.tasks
        for slot, to in zip(task.reads, task.to, strict=False)
    ]
    received = [(of, graph.rank) for graph in graphs for task in graph.tasks for of in task.of]
    assert Counter((a, b) for a, b, _ in sent) == Counter(received)
    return sent


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("options", LOWERINGS.values(), ids=LOWERINGS)
def test_ps_sends_one_frame_per_worker_and_chunk_each_way(num_ranks, options):
    routes = [chunk % num_ranks for chunk in range(2 * num_ranks + 1)]
    sent = Counter(
        (a, b, slot.kind, slot.chunk)
        for a, b, slot in messages(graphs_of("ps", [0] * num_ranks, routes, **options))
    )
    expected = Counter()
    for chunk, home in enumerate(routes):
        for worker in set(range(num_ranks)) - {home}:
            expected[worker, home, Kind.FRAME, chunk] += 1
            expected[home, worker, Kind.BACK, chunk] += 1
    assert sent == expected
    for rank in range(num_ranks):
        got = sum(n for (_, b, kind, _), n in sent.items() if (b, kind) == (rank, Kind.FRAME))
        assert got == (num_ranks - 1) * routes.count(rank)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("codes_local", [False, True])
def test_a_ring_goes_round_twice_but_for_two_hops(num_ranks, codes_local):
    count = num_ranks + 2
    routes = [chunk % num_ranks for chunk in range(count)]
    sent = messages(graphs_of("ring", [0] * num_ranks, routes, codes_local=codes_local))
    assert all(b == (a + 1) % num_ranks for a, b, _ in sent)
    per_chunk = Counter(slot.chunk for *_, slot in sent)
    assert per_chunk == Counter(dict.fromkeys(range(count), 2 * (num_ranks - 1)) if sent else {})
    backs = Counter(slot.chunk for *_, slot in sent if slot.kind is Kind.BACK)
    assert all(n == num_ranks - 1 for n in backs.values())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_a_compressed_allreduce_sends_each_frame_to_all(num_ranks):
    sent = messages(graphs_of("allreduce", [0] * num_ranks, range(3)))
    pairs = Counter((a, b) for a, b, _ in sent)
    every = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    assert pairs == Counter(dict.fromkeys(every, 3))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_bulk_makes_one_message_of_many(strategy, num_ranks):
    hosts = pairs_of(num_ranks)
    alone = messages(graphs_of(strategy, hosts, [0]))
    apart = messages(graphs_of(strategy, hosts, [0] * 10))
    together = messages(graphs_of(strategy, hosts, [0] * 10, groups=[0] * 10))
    assert len(together) == len(alone) > 0
    assert len(apart) == 10 * len(alone)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_ps_is_an_all_to_all_and_an_all_gather(num_ranks):
    for graph in graphs_of("ps", [0] * num_ranks, range(num_ranks), ordered=True):
        calls = [task for task in graph.tasks if task.verb not in COMPUTING]
        others = tuple(rank for rank in range(num_ranks) if rank != graph.rank)
        assert [task.verb for task in calls] == [Verb.EXCHANGE] * 2
        for task, kind in zip(calls, (Kind.FRAME, Kind.BACK), strict=True):
            assert task.to == task.of == others
            assert {slot.kind for slot in (*task.reads, *task.writes)} == {kind}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_all_ranks_make_as_many_calls_where_routes_go_round(strategy, num_ranks):
    for waves in (1, 2, 3):
        routes = [chunk % num_ranks for chunk in range(waves * num_ranks)]
        graphs = graphs_of(strategy, pairs_of(num_ranks), routes, ordered=True)
        calls = [sum(task.verb is Verb.EXCHANGE for task in graph.tasks) for graph in graphs]
        if strategy != "hierarchical":  # there hosts of one rank have nothing to say at home
            assert len(set(calls)) == 1
        if num_ranks == 1:
            assert calls == [0]
        elif strategy == "ps":
            # Waves are two depths apart, and no send of one meets a depth of another's.
            assert calls[0] == 2 * waves
        elif strategy == "allreduce":
            assert calls[0] == waves
        elif strategy == "ring" and waves == 1:
            assert calls[0] == 2 * (num_ranks - 1)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 0, 2, 1, 0), (0, 0, 0)])
def test_only_owners_talk_between_hosts(hosts):
    num_ranks, num_hosts = len(hosts), len(set(hosts))
    routes = list(range(2 * num_ranks))
    sent = messages(graphs_of("hierarchical", hosts, routes))
    members = {h: [r for r, host in enumerate(hosts) if host == h] for h in hosts}
    between = Counter()
    for a, b, slot in sent:
        owners = [group[routes[slot.chunk] % len(group)] for group in members.values()]
        if hosts[a] == hosts[b]:
            assert slot.kind is Kind.GRADIENT  # plain inside a host
            assert (a in owners) != (b in owners)
        else:
            assert slot.kind in (Kind.FRAME, Kind.BACK)  # compressed between hosts
            assert a in owners and b in owners
            between[slot.chunk] += 1
    assert between == Counter(
        dict.fromkeys(range(len(routes)), 2 * (num_hosts - 1)) if between else {}
    )
    assert bool(between) == (num_hosts > 1)
    assert len(sent) - sum(between.values()) == len(routes) * 2 * (num_ranks - num_hosts)


def test_owners_and_aggregators_are_spread():
    hosts = (0, 0, 1, 1)
    sent = messages(graphs_of("hierarchical", hosts, range(8)))
    frames = Counter(b for a, b, slot in sent if slot.kind is Kind.FRAME)
    assert frames == {0: 2, 1: 2, 2: 2, 3: 2}


# --- chunks ---------------------------------------------------------------------------------------


def check_layout(
    numels, num_routes, *, chunk_numel=partitions.CHUNK_NUMEL, bulk=True, pipelined=True
):
    layout = partitions.cut(
        numels, num_routes, chunk_numel=chunk_numel, bulk=bulk, pipelined=pipelined
    )
    runs = {tensor: [] for tensor in range(len(numels))}
    for part in layout.partitions:
        assert part.start % partitions.GRAIN == 0
        assert part.numel > 0
        runs[part.tensor].append((part.start, part.stop))
    for tensor, numel in enumerate(numels):
        # One behind the other from the first element to the last: each exactly once.
        edges = [0] + [stop for _, stop in runs[tensor]]
        assert [start for start, _ in runs[tensor]] == edges[:-1]
        assert edges[-1] == numel
        if not pipelined:
            assert len(runs[tensor]) <= num_routes
    assert list(dict.fromkeys(layout.groups)) == list(range(len(layout.routes)))
    assert all(0 <= route < num_routes for route in layout.routes)
    loads = [0] * num_routes
    sizes = []
    for group, route in enumerate(layout.routes):
        members = layout.members[group]
        sizes.append(sum(part.numel for part in members))
        loads[route] += sizes[-1]
        if len(members) > 1:
            assert bulk
            assert all(part.numel == numels[part.tensor] for part in members)
            assert not pipelined or sizes[-1] <= chunk_numel
    # What a route carries more than another is at most one group.
    assert max(loads) - min(loads) <= max(sizes, default=0)
    routes = [layout.routes[group] for group in layout.groups]
    assert list(layout.partition_routes) == routes
    return layout, loads


NUMELS = st.lists(
    st.one_of(st.integers(0, 5000), st.integers(0, 300_000), st.integers(0, 30_000_000)),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    NUMELS,
    st.integers(1, 17),
    st.sampled_from([1, 4096, 100_000, 2**18, partitions.CHUNK_NUMEL]),
    st.booleans(),
    st.booleans(),
)
def test_every_element_is_in_one_slice(numels, num_routes, chunk_numel, bulk, pipelined):
    check_layout(numels, num_routes, chunk_numel=chunk_numel, bulk=bulk, pipelined=pipelined)


def test_small_gradients_travel_together():
    layout, _ = check_layout([100] * 50, 4)
    assert set(layout.groups) == {0}
    layout, _ = check_layout([100] * 50, 4, bulk=False)
    assert layout.groups == tuple(range(50))
    # A large one between them does not part them; a full group is followed by another.
    layout, _ = check_layout([100, 9_000_000, 200], 3)
    assert layout.groups[0] == layout.groups[-1]
    layout, _ = check_layout([40_000] * 10, 2, chunk_numel=100_000)
    assert [layout.groups.count(group) for group in range(5)] == [2] * 5


def test_empty_gradients_are_left_out():
    assert partitions.cut([], 3).partitions == partitions.cut([0, 0], 3).partitions == ()
    layout, _ = check_layout([0, 5, 0, 7, 0], 2)
    assert [part.tensor for part in layout.partitions] == [1, 3]


@pytest.mark.parametrize("num_routes", [2, 3, 4, 8])
@pytest.mark.parametrize("bulk", [False, True])
def test_a_skewed_list_is_dealt_evenly(num_routes, bulk):
    # VGG-16: one layer holds three quarters of all.
    numels = [
        64 * 27,
        64,
        64 * 576,
        64,
        512 * 4608,
        512,
        25088 * 4096,
        4096,
        4096**2,
        4096,
        4096000,
    ]
    _, loads = check_layout(numels, num_routes, bulk=bulk)
    # The largest go first, so a route is ahead of another by one chunk at most.
    assert max(loads) - min(loads) <= partitions.CHUNK_NUMEL


def test_one_large_gradient_occupies_every_route():
    for num_routes in range(1, 9):
        _, loads = check_layout([num_routes * partitions.LEAST_NUMEL], num_routes)
        assert min(loads) > 0
        _, loads = check_layout([100_000_000], num_routes)
        assert max(loads) < 1.01 * min(loads)


def test_pipelining_off_is_off_without_tags_too():
    cluster = Cluster(hosts=(0, 1))
    graph = get("ps").build(cluster, 0, list(range(6)))
    on, off = (lowering.lower(graph, ordered=True, pipelined=p) for p in (True, False))
    assert on != off
    verbs = [task.verb for task in off.tasks]
    last = max(k for k, verb in enumerate(verbs) if verb is Verb.ENCODE)
    assert last < min(k for k, verb in enumerate(verbs) if verb is Verb.EXCHANGE)


def test_what_a_strategy_says_of_itself():
    """Catches: a table line under another name, a field that no longer fits the graphs."""
    assert all(get(name).name == name for name in STRATEGIES)
    hosts = (0, 0, 1)
    for name, strategy in STRATEGIES.items():
        raw = graphs_of(name, hosts, [0, 1], raw=True)
        moves_raw = any(
            s.kind is Kind.GRADIENT for g in raw for t in g.tasks if t.to for s in t.reads
        )
        assert strategy.has_host_stages == moves_raw
        assert [strategy.num_gradients(hosts, rank) for rank in range(3)] == (
            [2, 2, 1] if moves_raw else [1, 1, 1]
        )
        assert strategy.sums_in_transport("none") == (name == "allreduce")
        assert not strategy.sums_in_transport("onebit")
    assert candidates() == candidates((0, 1)) == ("ps", "ring")
    assert candidates(hosts) == ("ps", "ring", "hierarchical")
