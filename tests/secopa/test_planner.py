"""The planner of SOSP'21: its published answers, and the same model from a profile."""

from collections import Counter

import pytest

from hipress.casync.graphs.partitions import Partitioner
from hipress.errors import UsageError
from hipress.plan import ANY, Decision, Plan
from hipress.profile import (
    CodecCosts,
    Curve,
    GradientProfile,
    Machine,
    ModelProfile,
    Network,
    Profile,
)
from hipress.secopa.sosp21.planner import (
    ExchangeCosts,
    costs_of,
    in_lines,
    plan,
    read_input,
    sosp21,
)
from tests.secopa import vgg19


def decision(numel, topology, costs):
    return plan([("w", numel)], topology, costs.num_nodes, costs).decision("w")


# --- the published constants ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "topology, ratio, smallest",
    [
        ("PS", 1 / 16, 683_947),
        ("PS", 1 / 32, 583_334),
        ("PS", 1 / 500, 512_735),
        ("RING", 1 / 16, 672_384),
        ("RING", 1 / 32, 650_333),
        ("RING", 1 / 500, 630_964),
    ],
)
def test_the_smallest_gradient_that_is_compressed(topology, ratio, smallest):
    """Catches: a wrong constant, count or comparison; each moves the threshold."""
    costs = sosp21(4, ratio)
    assert not decision(smallest - 1, topology, costs).is_compressed
    assert decision(smallest, topology, costs).is_compressed


def test_vgg19_by_ps():
    """Catches: another plan than the published one for the published sample."""
    given = vgg19.gradients()
    assert (len(given), sum(numel for _, numel in given)) == (38, 143_667_240)
    made = plan(given, "PS", 4, sosp21(4))
    found = Counter((d.numel, d.partitions) for d in made.gradients.values() if d.is_compressed)
    assert found == {
        (1_179_648, 2): 1,
        (2_359_296, 4): 7,
        (4_096_000, 4): 1,
        (16_777_216, 4): 1,
        (102_760_448, 4): 1,
    }
    assert {d.partitions for d in made.gradients.values() if not d.is_compressed} == {4}
    assert list(made.gradients) == [name for name, _ in given]


def test_vgg19_by_ring():
    """Catches: the ring judged as a parameter server."""
    made = plan(vgg19.gradients(), "ring", 4, sosp21(4))
    assert made.num_compressed == 11
    assert {d.partitions for d in made.gradients.values()} == {4}
    assert {d.strategy for d in made.gradients.values() if d.is_compressed} == {"ring"}


def test_what_is_left_alone_goes_as_such_gradients_go():
    """Catches: uncompressed gradients by a ring of ours, where the transport's own sum is quick."""
    made = plan([("large", 2**17), ("small", 2**17 - 1)], "RING", 4, sosp21(4))
    assert made.decision("large") == made.decision("large").model_copy(
        update={"codec": "none", "strategy": "allreduce"}
    )
    assert made.decision("small").strategy == "ps"


def test_the_text_of_vgg19s_plan():
    """Catches: fields in another order than the original writes."""
    lines = plan(vgg19.gradients(), "PS", 4, sosp21(4)).as_text().splitlines()
    assert lines[0] == "vgg0_conv0_weight,1728,n,4"
    assert lines[16] == "vgg0_conv8_weight,1179648,y,2"
    assert lines[-2:] == ["vgg0_dense2_weight,4096000,y,4", "vgg0_dense2_bias,1000,n,4"]


def test_the_floor_of_a_broadcast():
    """Catches: a floor that is left out: 16 nodes, below 9,923 float32, where it holds."""

    def broadcast_s(num_nodes, x):
        costs = sosp21(num_nodes)
        return costs.send_s("ps", x) - costs.gather.at(x)

    assert broadcast_s(16, 0) == pytest.approx(0.58353e-3)
    assert broadcast_s(16, 9922) == pytest.approx(0.58353e-3, rel=1e-9)
    assert broadcast_s(16, 9924) > 0.58353e-3
    assert broadcast_s(8, 3891) == pytest.approx(0.29666e-3)
    assert broadcast_s(4, 0) == pytest.approx(0.22156e-3)


def test_the_counts_of_the_parameter_server():
    """Catches: encodes and decodes that grow on past the nodes there are."""
    nothing = Curve(fixed=0.0, slope=0.0)
    parts = {"step": nothing, "gather": nothing, "broadcast": nothing, "size": nothing}
    costs = ExchangeCosts(
        num_nodes=4, codec=ANY, made_from="", **parts,
        encode=Curve(fixed=1.0, slope=0.0), decode=Curve(fixed=100.0, slope=0.0),
    )  # fmt: skip
    found = [costs.compressed_s("ps", 1000, k) for k in (1, 2, 3, 4)]
    assert found == [402.0, 503.0, 604.0, 604.0]
    assert costs.compressed_s("ring", 1000, 1) == 404.0


def test_equal_times_are_left_alone_and_few_slices_win():
    """Catches: `<=`, and the last of equally good numbers of partitions."""
    flat, nothing = Curve(fixed=1.0, slope=0.0), Curve(fixed=0.0, slope=0.0)
    costs = ExchangeCosts(
        num_nodes=4, codec=ANY, made_from="", size=flat, encode=nothing, decode=nothing,
        step=flat, gather=flat, broadcast=flat,
    )  # fmt: skip
    found = decision(1000, "ps", costs)
    assert (found.codec, found.partitions) == ("none", 1)
    assert found.compressed_s == found.plain_s == 2.0


def test_a_decision_has_both_times_and_a_reason():
    """Catches: a plan that cannot say why."""
    small, large = (decision(n, "PS", sosp21(4)) for n in (1000, 10**7))
    assert small.compressed_s > small.plain_s and large.compressed_s < large.plain_s
    # By hand, for four partitions of 2.5 million: gather, broadcast, encodes, decodes.
    x = 2_500_000
    sent = 0.4193 + 0.22156 + (2.7156e-6 + 2.7157e-6) * x / 16
    worked = 4 * (0.058938 + 1.4133e-8 * x) + 6 * (0.13956 + 6.2041e-9 * x / 16)
    assert large.compressed_s == pytest.approx((sent + worked) / 1e3)
    assert large.reason == (
        f"compressed, its exchange takes less: {large.compressed_s * 1e3:.3f} ms against "
        f"{large.plain_s * 1e3:.3f} ms"
    )
    assert small.reason.startswith("compressed, its exchange would take as long or longer: ")


@pytest.mark.parametrize("num_nodes", [1, 2, 6, 32])
def test_other_numbers_of_nodes(num_nodes):
    """Catches: curves of 16 nodes for 32."""
    with pytest.raises(UsageError) as refused:
        sosp21(num_nodes)
    assert str(refused.value) == (
        f"preset sosp21 was measured on 4, 8 and 16 nodes, not on {num_nodes}; give --nnodes 4, 8 "
        "or 16, or a profile of your own cluster with --profile profile.json."
    )


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5, float("nan")])
def test_ratios_that_cannot_be(ratio):
    """Catches: a plan from nonsense."""
    with pytest.raises(UsageError, match="must be above 0 and at most 1, e.g. 0.03125"):
        sosp21(4, ratio)


def test_another_topology():
    """Catches: a topology that is taken for another."""
    with pytest.raises(UsageError, match="topology 'tree' is none of PS, RING; choose one."):
        plan([("w", 1)], "tree", 4, sosp21(4))


# --- a profile ------------------------------------------------------------------------------------


def profile(device="cpu", cores=8.0, num_ranks=4, num_device_ranks=1):
    line = Curve(fixed=1e-3, slope=2e-9)
    return Profile(
        machine=Machine(
            device=device, cores=cores, num_ranks=num_ranks, num_device_ranks=num_device_ranks
        ),
        network=Network(
            hosts=(0, 1, 2, 3), latency_s=1e-4, bytes_per_s=1e8, message_work_s=1e-5,
            all_reduce=line,
        ),
        codecs=(
            CodecCosts(
                codec="onebit", encode=line, decode=Curve(fixed=2e-3, slope=1e-9), add=line,
                back=line, wire=Curve(fixed=80.0, slope=0.125), back_wire={4: line},
                chunk_numel=2**20, bulk=True, codes_local=False,
            ),
        ),
    )  # fmt: skip


def test_the_curves_of_a_profile():
    """Catches: bytes for float32, a fan-in of N, or frames without their header."""
    costs = costs_of(profile(), "onebit", 6)
    assert (costs.num_nodes, costs.codec) == (6, "onebit")
    assert costs.size.at(1000) == pytest.approx((80 + 125) / 4)
    assert costs.step.at(10**6) == pytest.approx(1e-4 + 1e-5 + 4e6 / 1e8)
    assert costs.gather.at(10**6) == pytest.approx(1e-4 + 5e-5 + 5 * 4e6 / 1e8)
    assert costs.broadcast == costs.gather
    assert costs.encode.at(10**6) == pytest.approx(3e-3)
    assert costs.decode.at(10**6) == pytest.approx(3e-3)


@pytest.mark.parametrize(
    "options, times",
    [
        ({"cores": 2.0}, 2),
        ({"cores": 4.0}, 1),
        ({"cores": 16.0}, 1),
        ({"device": "cuda", "cores": 1.0}, 1),
        ({"device": "cuda", "num_device_ranks": 4}, 4),
    ],
)
def test_ranks_that_share_cores_wait_for_each_other(options, times):
    """Catches: the work of one rank taken for the time of all."""
    assert costs_of(profile(**options), "onebit", 4).encode.at(10**6) == pytest.approx(3e-3 * times)


@pytest.mark.parametrize("topology", ["PS", "RING"])
@pytest.mark.parametrize("num_nodes", [2, 3, 6, 100])
def test_any_number_of_nodes_from_a_profile(topology, num_nodes):
    """Catches: a number of nodes that only the preset lacks."""
    costs = costs_of(profile(), "onebit", num_nodes)
    made = plan([("large", 10**8), ("small", 100)], topology, num_nodes, costs)
    assert made.decision("large").codec == "onebit"
    assert made.decision("small").codec == "none"
    assert made.num_ranks == num_nodes
    assert 1 <= made.decision("large").partitions <= num_nodes


def test_a_codec_that_was_not_measured():
    """Catches: a KeyError."""
    with pytest.raises(UsageError, match="codec 'int8' is not in the profile, which has onebit"):
        costs_of(profile(), "int8", 4)


def test_one_node():
    """Catches: a division by nobody."""
    with pytest.raises(UsageError, match=r"1 node\(s\) has nobody to send to; give --nnodes 2"):
        costs_of(profile(), "onebit", 1)


def test_slices_that_are_cut_by_size_are_counted():
    """Catches: lines with another number of partitions than the engine would cut."""
    gradients = tuple(
        GradientProfile(name=name, numel=numel, ready_s=0.0)
        for name, numel in (("a", 5 * 2**20), ("b", 5 * 2**20), ("c", 100), ("d", 7))
    )
    model = ModelProfile(forward_s=0.0, backward_s=0.0, gradients=gradients)
    found = profile().model_copy(update={"model": model})
    onebit = {"codec": "onebit"}
    made = Plan(
        gradients={
            "a": Decision(**onebit), "b": Decision(**onebit, partitions=3),
            "c": Decision(**onebit), "d": Decision(),
        }
    )  # fmt: skip
    lines = in_lines(made, found, 4)
    cut = len(Partitioner(4, bucket_numel=2**22).place(5 * 2**20, 2**20))
    assert cut > 3
    assert [d.partitions for d in lines.gradients.values()] == [cut, 3, 1, None]
    assert [d.numel for d in lines.gradients.values()] == [g.numel for g in gradients]
    # A smaller bucket has less for each rank.
    small = model.model_copy(update={"bucket_mb": 1.0})
    finer = in_lines(made, found.model_copy(update={"model": small}), 4)
    assert finer.decision("a").partitions > cut


def test_a_small_model_is_cut_for_every_rank_in_lines_too():
    """Catches: one partition in lines, where the engine gives every rank a part of the model."""
    gradients = (GradientProfile(name="a", numel=10**6, ready_s=0.0),)
    model = ModelProfile(forward_s=0.0, backward_s=0.0, gradients=gradients)
    found = profile().model_copy(update={"model": model})
    made = Plan(gradients={"a": Decision(codec="onebit")})
    assert in_lines(made, found, 4).decision("a").partitions == 4


# --- input.txt ------------------------------------------------------------------------------------


def test_the_input_is_read(tmp_path):
    """Catches: a last line that is lost without a line end; CRLF in a name."""
    path = tmp_path / "input.txt"
    path.write_bytes(b"a.weight,12\r\n\r\n b , 0 \nc,3")
    assert read_input(path) == [("a.weight", 12), ("b", 0), ("c", 3)]


@pytest.mark.parametrize(
    "content, where",
    [
        (b"a,1\nb\n", "line 2 is 'b'"),
        (b"a,b,1\n", "line 1 is 'a,b,1'"),
        (b"a,1.5\n", "line 1 is 'a,1.5'"),
        (b"a,-1\n", "line 1 is 'a,-1'"),
        (b"\n,4\n", "line 2 is ',4'"),
        (b"a,1\n\na,2\n", "line 3 names 'a' a second time"),
        (b"", "line 1 is not there: the file is empty"),
    ],
)
def test_lines_that_are_no_input(tmp_path, content, where):
    """Catches: a gradient that is dropped because its line was not understood."""
    path = tmp_path / "input.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_input(path)
    assert str(refused.value) == (
        f"input {str(path)!r}: {where}; write one line for each gradient, name,number_of_float32, "
        "e.g. fc.weight,4096000."
    )


def test_no_input(tmp_path):
    """Catches: a bare OSError or UnicodeDecodeError."""
    with pytest.raises(UsageError, match=r"cannot be read \(No such file or directory\)"):
        read_input(tmp_path / "input.txt")
    (tmp_path / "input.txt").write_bytes(b"\xff,1")
    with pytest.raises(UsageError, match=r"cannot be read \(it is no UTF-8 text\)"):
        read_input(tmp_path / "input.txt")
