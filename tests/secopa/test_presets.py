"""Published clusters: their constants, and what the simulator makes of published curves."""

import json
from pathlib import Path

import pytest

from hipress.errors import UsageError
from hipress.secopa.simulate import Simulator
from hipress.secopa.sosp21 import scaling
from hipress.secopa.sosp21.presets import (
    PRESETS,
    RESNET50_WORK,
    Layer,
    preset,
    profile,
    spread_work,
)

LAYERS = [
    Layer(name="fc.weight", numel=10**8, dims=2, work=1e12),
    Layer(name="conv.weight", numel=10**6, dims=4, work=3e12),
]
RESULTS = Path(__file__).parents[2] / "benchmarks/results/scaling-published-2026-11-15.json"


@pytest.mark.parametrize(
    "name, model, compute_s",
    [
        ("aws-v100", "vgg19", 32 * 128 / 26438),
        ("aws-v100", "resnet50", 32 * 128 / 41946),
        ("local-1080ti", "vgg19", 0.273),
        ("local-1080ti", "resnet50", 32 * 32 / 6221),
    ],
)
def test_compute_is_the_published_linear_throughput(name, model, compute_s):
    """Catches: a step without exchange that takes another time than was published."""
    made = profile(preset(name), model, LAYERS)
    assert Simulator(made, 1).step_s(None) == pytest.approx(compute_s, rel=2e-3)


def test_a_model_without_a_figure_computes_as_fast_as_resnet50():
    """Catches: compute of other models that does not follow their operations."""
    cluster = preset("aws-v100")
    assert cluster.compute_s("resnet50", 0.0) == pytest.approx(
        cluster.compute_s("other", 32 * RESNET50_WORK)
    )


def test_the_network_is_the_published_curve():
    """Catches: another rate than 4 bytes in 0.85 ns, or another latency."""
    network = profile(preset("aws-v100"), "vgg19", LAYERS).network
    assert network.bytes_per_s == pytest.approx(4.7056e9, rel=1e-4)
    assert network.latency_s == pytest.approx(0.20337e-3)
    assert network.bytes_per_s * 8 / network.rate_bits == pytest.approx(0.672, abs=1e-3)


def test_gpus_of_a_node_add_up_first():
    """Catches: gradients that the network gets before the node's GPUs have added them up."""
    cluster = preset("local-1080ti")
    model = profile(cluster, "vgg19", LAYERS).model
    first, second = model.gradients
    assert first.ready_s == pytest.approx(model.backward_s / 4 + 4e8 / 15.75e9)
    assert second.ready_s == pytest.approx(model.backward_s + 4e6 / 15.75e9)


def test_sums_of_sparse_frames_grow():
    """Catches: a DGC whose mean of N workers is as small as one worker's frame."""
    made = profile(preset("aws-v100"), "resnet50", LAYERS)
    dgc, onebit = made.codec("dgc(ratio=0.001)"), made.codec("onebit")
    assert dgc.wire.at(10**6) == pytest.approx(8000)
    assert dgc.back_bytes(10**6, 16) == pytest.approx(16 * 8000)
    assert dgc.back_bytes(10**6, 2048) == pytest.approx(4e6)
    assert onebit.back_bytes(10**6, 16) == onebit.wire.at(10**6) == pytest.approx(125_000)


def test_an_unknown_preset_is_named_with_the_choices():
    """Catches: a traceback, or a message without the names."""
    with pytest.raises(UsageError, match="preset 'v100' is none of aws-v100, local-1080ti"):
        preset("v100")


def test_work_of_shared_layers_is_cut_to_the_total():
    """Catches: a layer that two modules share, counted twice."""
    assert [layer.work for layer in spread_work(LAYERS, 2e12)] == [0.5e12, 1.5e12]


# --- published curves -----------------------------------------------------------------------------


def test_horovod_sends_what_became_ready_in_a_cycle():
    """Catches: fused messages over 64 MiB, or over several cycles."""
    layers = [Layer(name=f"g{k}", numel=2**22, dims=2, work=1.0) for k in range(40)]
    model = profile(preset("aws-v100"), "vgg19", layers).model
    groups = scaling.cycles(model)
    assert [name for group in groups for name in group] == [g.name for g in model.gradients]
    ready = {g.name: g.ready_s for g in model.gradients}
    assert max(map(len, groups)) * 2**24 <= scaling.FUSION_BYTES
    assert all(ready[group[-1]] - ready[group[0]] < scaling.CYCLE_S for group in groups)
    assert max(map(len, groups)) > 1


def test_figures_have_a_value_for_every_size():
    """Catches: a column that was left out, or a figure of an unknown cluster or codec."""
    for figure in scaling.FIGURES:
        columns = [figure.ring, figure.linear, *figure.hipress.values()]
        assert {len(column) for column in columns} == {len(scaling.NODES)}
        profile(PRESETS[figure.cluster], figure.model, LAYERS).codec(figure.codec)


def test_the_stored_comparison_is_within_its_bars():
    """Catches: a stored table of which the docs say more than it shows."""
    rows = json.loads(RESULTS.read_text())["rows"]
    median, worst = scaling.errors(rows)
    assert len(rows) == 24
    assert median <= 0.12
    assert worst <= 0.25
    for row in rows:
        assert row["simulated_step_s"] == pytest.approx(row["published_step_s"], rel=0.1)
