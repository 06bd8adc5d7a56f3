"""Models, data and sums that the scenarios of `hipress.attach` share."""

import copy
import hashlib
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress
from tests import kernels

CAP_MB = 0.05
"""Of a bucket: the model has several, and DDP puts them together anew after the first step."""


# --- models and data ------------------------------------------------------------------------------


def mlp(width=160):
    """Gradients of 10240, 25600 and 6400 elements, and small ones; the same on all ranks."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.LayerNorm(width),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 40),
    )


class Halves(nn.Module):
    """Parts that take part or do not; `never` does never."""

    def __init__(self, never=False):
        super().__init__()
        torch.manual_seed(7)
        self.a = nn.Linear(64, 64, bias=False)
        self.b = nn.Linear(64, 64, bias=False)
        if never:
            self.never = nn.Linear(64, 64)

    def forward(self, x, use=True):
        y = self.a(x)
        return self.b(y) if use else y


class Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(64, 80)
        setattr(self, name, nn.Linear(80, 64))

    def forward(self, x):
        return getattr(self, list(self._modules)[1])(self.first(x))


def wrap(module, **options):
    return DDP(module, **{"bucket_cap_mb": CAP_MB, **options})


def batch(rank, step, *shape):
    generator = torch.Generator().manual_seed(1009 * step + rank)
    return torch.randn(*(shape or (16, 64)), generator=generator)


def loss_of(model, rank, step):
    return (model(batch(rank, step)) - 1).pow(2).mean()


def digest(*values):
    found = hashlib.sha256()
    for value in values:
        found.update(flat(value).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def bits(module):
    return digest(*module.parameters())


def flat(value, like=None):
    """Elements in the order of memory, which is that of DDP's buckets."""
    value = value.detach()
    like = value if like is None else like
    apart = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype).copy_(value)
    return apart.as_strided((apart.numel(),), (1,))


def backward(ddp, optimizer, rank, step):
    optimizer.zero_grad()
    loss = loss_of(ddp, rank, step)
    loss.backward()
    return loss.item()


def train(ddp, optimizer, rank, steps):
    losses = []
    for step in steps:
        losses.append(backward(ddp, optimizer, rank, step))
        optimizer.step()
    return losses


def setup(codec, strategy="ps", *, lr=0.05, follow=False, **options):
    """A new model with its exchange; follow: which knows the optimizer."""
    module = mlp()
    ddp = wrap(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    if follow:
        options["optimizer"] = optimizer
    return module, ddp, optimizer, hipress.attach(ddp, codec, strategy, **options)


# --- what is looked at ---------------------------------------------------------------------------


def pretend_hosts(rank, per_host):
    """Engines that are made from now on see several hosts."""
    socket.gethostname = lambda: f"host{rank // per_host}"


def mean_of(value):
    """Over all ranks, in double precision."""
    value = value.detach().double()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def kinds_of_error(call):
    """What a call raised: kind, text, ranks."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), list(getattr(error, "ranks", []))]
    return ["nothing", "", []]


class Ledger:
    """Sums over steps, by parameter: what gradients were on average, and what was applied."""

    def __init__(self, module):
        self.module = module
        self.true = {n: torch.zeros(p.numel()).double() for n, p in module.named_parameters()}
        self.applied = {name: value.clone() for name, value in self.true.items()}

    def expect(self, make_loss):
        """Averages the gradients of a copy, without DDP."""
        twin = copy.deepcopy(self.module)
        make_loss(twin).backward()
        for name, p in twin.named_parameters():
            own = torch.zeros_like(p) if p.grad is None else p.grad
            self.true[name] += mean_of(flat(own, like=p))

    def note(self):
        for name, p in self.module.named_parameters():
            if p.grad is not None:
                self.applied[name] += flat(p.grad, like=p).double()

    def gaps(self, state=None, scale=1.0, carried=None):
        """For each parameter, how much of its sum is missing, against its largest element."""
        found = {}
        for name, true in self.true.items():
            wanted = true + (carried[name] if carried and name in carried else 0)
            missing = wanted - self.applied[name]
            if state is not None:
                missing = missing - left(state, name) / scale
            found[name] = float(missing.abs().max() / wanted.abs().max().clamp(min=1e-12))
        return found


def left(state, name):
    """What a checkpoint says will still be sent of a gradient."""
    found = torch.zeros(1).double()
    if "residual" in state["mean"].get(name, {}):
        found = found + state["mean"][name]["residual"].double()
    if name in state["owed"]:
        found = found + state["owed"][name].double()
    return found


def residuals(sync):
    return [state["residual"].clone() for _, state in sync.engine.states]


def same_state(a, b):
    """Whether two checkpoints hold the same, bit for bit."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a == b


def warm_up(*names):
    """Loads what codecs and optimizers run on: once, before all are forked, not a second each."""
    kernels.compile_once()
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)  # no backward, whose threads no fork survives
    torch.optim.SGD([parameter], lr=0.1).step()
    for name in names:
        codec = hipress.codec(name)
        for one in (codec, *(codec.aggregator(num_ranks) for num_ranks in (2, 3, 4))):
            value = torch.ones(5000)
            one.decode(one.encode(value, one.init(value)), out=value, add=True)
