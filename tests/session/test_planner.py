"""What `auto` plans for: gradients that no codec takes are left out, all others are planned."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress
from hipress.secopa.search import shortlist
from hipress.session.adapter import GradientSpec
from hipress.session.planner import EXEMPT, Planner
from hipress.session.timing import GradientTimer
from tests.secopa.made_up import codec, profile


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Mixed(nn.Module):
    """A table with sparse gradients, layers of float32, and a last one of float64."""

    def __init__(self, sparse=True, double=True):
        super().__init__()
        self.table = nn.Embedding(300, 64, sparse=sparse)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 128)
        self.last = nn.Linear(128, 8, dtype=torch.float64 if double else None)

    def forward(self, index):
        x = self.second(self.first(self.table(index)))
        return self.last(x.to(self.last.weight.dtype))


LEFT = {
    "table.weight": "its gradient is sparse, which codecs do not take",
    "last.weight": "codecs do not take float64",
    "last.bias": "codecs do not take float64",
}


@pytest.mark.parametrize(
    ("sparse", "double"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_what_no_codec_takes_is_left_alone_and_the_rest_is_planned(alone, sparse, double):
    """Catches: a sparse table or a layer of float64 for which nothing at all is compressed."""
    model = DDP(Mixed(sparse, double))
    sync = hipress.attach(model)
    planner = Planner(("int8",))
    assert planner.begin(sync) == ""
    for _ in range(4):
        model(torch.arange(8)).sum().backward()
    found = planner._model_of(sync)
    assert found.element_bytes == 4
    layers = {"first.weight", "second.weight"}
    for left, name in ((not double, "last.weight"), (not sparse, "table.weight")):
        layers |= {name} if left else set()
    names = {gradient.name for gradient in found.gradients}
    assert names == layers | {name.replace("weight", "bias") for name in layers} - {"table.bias"}
    assert {name for bucket in found.buckets for name in bucket} == names
    # A network so slow that everything pays.
    costs = (codec("none", 1.0), codec("int8", 0.25))
    slow = profile(bytes_per_s=1e6, codecs=costs).model_copy(update={"model": found})
    best = shortlist(slow, codecs=("int8",), reasons=planner._reasons)[0].plan
    compressed = {name for name, made in best.gradients.items() if made.is_compressed}
    large = {name for name in layers if sync.gradients[name].numel >= 1024}
    assert compressed and compressed <= large
    reasons = {name: sync.rules.choice_under(best, sync.gradients[name].spec).reason
               for name in sync.gradients if name not in names}  # fmt: skip
    assert reasons == {name: LEFT[name] for name in LEFT if name not in names}


@pytest.mark.parametrize("exclude", [(), ("first", "second")])
def test_there_is_nothing_to_plan_where_no_gradient_may_be_compressed(alone, exclude):
    """Catches: a job that stops for seconds to measure what it cannot use."""
    model = DDP(Mixed() if exclude else nn.Linear(64, 64, dtype=torch.float64))
    sync = hipress.attach(model, exclude=exclude)
    assert Planner(("int8",)).begin(sync) == EXEMPT


def test_moments_of_other_gradients_only_tell_when_backward_ends():
    """Catches: a gradient that is timed and was not asked for."""
    timer = GradientTimer([GradientSpec(name="w", numel=2, dims=1)])
    for _ in range(3):
        timer.forward_begin()
        timer.forward_end()
        for name in ("w", "table"):
            timer.gradient_ready(name)
        timer.end_step()
    assert [gradient.name for gradient in timer.profile().gradients] == ["w"]
