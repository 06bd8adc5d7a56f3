"""How the gradients of a bucket are put together, and what must not come out of one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress
import hipress.torch
from hipress.errors import PeerError
from hipress.session.adapter import GradientSpec
from hipress.session.buckets import Gradient, grouped
from hipress.session.mode import Mode
from hipress.session.selection import NONE, Choice
from hipress.session.session import Session, Settings
from hipress.torch.optim import flat


def gradient(name, codec, numel=8, rate_group=None):
    choice = Choice(codec=hipress.codec(codec) if codec else NONE, strategy="ps")
    spec = GradientSpec(name=name, numel=numel, dims=1, rate_group=rate_group)
    return Gradient(spec=spec, choice=choice, placements=())


def test_what_is_compressed_goes_first_and_spans_follow_the_bucket():
    """Catches: elements that are taken from another gradient's place."""
    members = [gradient("a", None, 3), gradient("b", "onebit", 5), gradient("c", None, 7)]
    groups = grouped(members)
    assert [(group.names, group.spans) for group in groups] == [
        (("b",), ((3, 8),)),
        (("a", "c"), ((0, 3), (8, 15))),
    ]


@pytest.mark.parametrize(("codec", "count"), [("momentum(ef(onebit))", 2), ("onebit", 1)])
def test_a_learning_rate_of_its_own_is_a_group_of_its_own(codec, count):
    """Catches: one parameter's change of rate applied to the residual of another."""
    rated = [gradient("a", codec, rate_group=0), gradient("b", codec, rate_group=1)]
    assert len(grouped(rated)) == count
    assert len(grouped([gradient("a", codec), gradient("b", codec)])) == 1


def test_flat_is_the_order_of_memory():
    """Catches: weights beside other elements' gradients in channels_last."""
    images = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert flat(images).tolist() == images.permute(0, 2, 3, 1).reshape(-1).tolist()


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x, both):
        return self.b(self.a(x)) if both else self.a(x)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:find_unused")
def test_an_overflow_is_not_owed_for_a_parameter_that_was_not_used(alone):
    """Catches: NaN from a neighbour in the frame that is added to every later gradient."""
    model = DDP(Halves(), find_unused_parameters=True)
    sync = hipress.attach(model, codec="onebit")
    x = torch.randn(4, 64)
    model(x, True).sum().backward()
    model.zero_grad()
    (model(x, False).sum() * torch.inf).backward()  # b is not used, and shares a's frame
    assert model.module.a.weight.grad.isnan().any()
    assert all(owed.isfinite().all() for owed in sync.owed.values())
    for _ in range(2):
        model.zero_grad()
        model(x, True).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_plan_says_which_start_first_and_travel_together():
    """Catches: an order or a number of a frame that is read and not followed."""
    found = []
    for name, text, bulk, order in (
        ("a", "onebit", 0, 1), ("b", "none", 0, 0), ("c", "onebit", 1, 1), ("d", "onebit", 0, 1),
    ):  # fmt: skip
        choice = Choice(codec=hipress.codec(text), strategy="ps", bulk=bulk, order=order)
        spec = GradientSpec(name=name, numel=16, dims=2)
        found.append(Gradient(spec=spec, choice=choice, placements=()))
    assert [group.names for group in grouped(found)] == [("b",), ("a", "d"), ("c",)]


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.line = nn.Embedding(100, 64, sparse=True), nn.Linear(64, 64)

    def forward(self, rows):
        return self.line(self.table(rows))


def test_a_sparse_bucket_of_a_bare_hook_is_left_to_torch(alone):
    """Catches: a sparse gradient that counts as compressed, is saved, and that no flush pays."""
    model = DDP(Sparse())
    state, hook = hipress.torch.comm_hook(codec="onebit")
    model.register_comm_hook(state, hook)
    model(torch.arange(4)).sum().backward()
    assert model.module.table.weight.grad.is_sparse
    assert (state.stats().num_gradients, state.stats().num_compressed) == (2, 1)
    state.detach()
    model.zero_grad()
    model(torch.arange(4)).sum().backward()
    assert state.mode.current is Mode.DETACHED


def test_a_lost_sparse_mean_keeps_its_error():
    """Catches: an error of torch's about sparse tensors in place of the name of the lost rank."""
    made = Session(None, Settings())
    buffer, error = torch.eye(3).to_sparse(), PeerError("rank 1 is gone", ranks=(1,))
    made._note_failure(buffer, error)
    assert made._failure is error and buffer.to_dense().isnan().any()
