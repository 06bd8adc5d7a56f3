"""Scenarios in which the momentum of AdamW is exchanged, for ranks (see `tests/scenarios.py`)."""

import copy
import logging
import sys
from pathlib import Path

import torch

import hipress
import hipress.torch
from hipress.errors import HipressError

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main
from tests.torch.scripts.models import (
    backward,
    bits,
    left,
    loss_of,
    mean_of,
    mlp,
    pretend_hosts,
    train,
    warm_up,
    wrap,
)

SCHEDULE = {"refresh_warmup": 3, "refresh_every": 5}
BETA1 = 0.9


def setup(codec, strategy="ps", **options):
    module = mlp()
    ddp = wrap(module)
    optimizer = hipress.torch.AdamW(ddp.parameters(), lr=0.01, **SCHEDULE, **options)
    sync = hipress.attach(ddp, codec, strategy, optimizer=optimizer)
    return module, ddp, optimizer, sync


def unsent(sync, name):
    """The mean over ranks of what codecs hold and of what is owed."""
    state = sync.state_dict()
    return left(state, name).double() + state["owed_momentum"].get(name, 0.0)


def step_gaps(module, ddp, optimizer, sync, rank, step, *, keeps_unsent=False):
    """Takes a step; by gradient the largest part of what went in that did not come out.

    What goes in is what ranks send, in the mean, and what was unsent before; out comes `.grad`,
    and what is unsent after. keeps_unsent: A refresh leaves all that is unsent where it is.
    """
    names = sync.layout.senders
    before = {name: unsent(sync, name) for name in names}
    parameters = dict(module.named_parameters())
    momenta = {
        n: optimizer.state[parameters[n]].get("exp_avg", torch.zeros(())).clone() for n in names
    }
    again = mlp()
    again.load_state_dict(module.state_dict())
    gradients = plain_gradients(again, rank, step)
    backward(ddp, optimizer, rank, step)
    gaps = {}
    for name in names:
        parameter = parameters[name]
        sends = parameter in optimizer._holds_momentum
        gradient = gradients[name]
        sent = BETA1 * momenta[name] + (1 - BETA1) * gradient if sends else gradient
        after = unsent(sync, name)
        into = mean_of(sent.view(-1)) + before[name]
        out = parameter.grad.view(-1).double() + after
        bound = 1e-6 if sends else 0.03  # rounded to 8 bits
        assert sends or not keeps_unsent or torch.equal(before[name], after)
        gaps[name] = [float((into - out).abs().max() / into.abs().max()), bound, sends]
    optimizer.step()
    return gaps


def plain_gradients(model, rank, step):
    loss_of(model, rank, step).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def agree(rank, num_ranks, cases):
    """For each codec and strategy: bits of all parameters, what was lost in each step, bytes."""
    pretend_hosts(rank, 2)
    found = {}
    for case in cases:
        codec, strategy = case.split(" ")
        module, ddp, optimizer, sync = setup(codec, strategy)
        gaps, sent = [], []
        for step in range(10):
            before = sync.engine.stats.sent_bytes
            gaps.append(step_gaps(module, ddp, optimizer, sync, rank, step, keeps_unsent=True))
            sent.append(sync.engine.stats.sent_bytes - before)
        found[case] = {"bits": bits(module), "gaps": gaps, "sent": sent}
    return found


def first_half(rank, num_ranks, folder):
    module, ddp, optimizer, sync = setup("onebit")
    train(ddp, optimizer, rank, range(7))  # the next step is a refresh
    state = sync.state_dict()
    sync.save(Path(folder) / "shards")
    if rank == 0:
        saved = [module.state_dict(), optimizer.state_dict(), state]
        torch.save(saved, Path(folder) / "file")
    return {"left": min(float(unsent(sync, n).abs().max()) for n in sync.layout.senders)}


def other_state(rank, num_ranks):
    """What ranks say after only one of them has gone back to an older state of the optimizer."""
    _, ddp, optimizer, _ = setup("onebit")
    saved = optimizer.state_dict()
    for step in range(5):
        train(ddp, optimizer, rank, [step])
        if step == 3 - rank:
            saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    try:
        train(ddp, optimizer, rank, [5])
    except HipressError as error:
        return [type(error).__name__, str(error)]
    return None


def one_loads(rank, num_ranks, loads):
    """What ranks say after some of them alone have loaded the state of the optimizer."""
    _, ddp, optimizer, _ = setup("onebit")
    train(ddp, optimizer, rank, range(4))
    if rank in loads:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    try:
        train(ddp, optimizer, rank, [4])
    except HipressError as error:
        return [type(error).__name__, str(error)]
    return None


def warned(rank, num_ranks):
    """What each rank logs: of steps by another optimizer, and of options that were loaded."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("hipress")
    logger.addHandler(handler)
    _, ddp, _, _ = setup("onebit")
    other = torch.optim.SGD(ddp.parameters(), lr=0.01)
    train(ddp, other, rank, range(12))
    module = mlp()
    ddp = wrap(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    hipress.attach(ddp, "onebit", optimizer=optimizer)
    train(ddp, optimizer, rank, range(2))
    plain = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    optimizer.load_state_dict(plain.state_dict())
    train(ddp, optimizer, rank, [2])
    logger.removeHandler(handler)
    return "\n".join(records)


def second_half(rank, num_ranks, folder, shards):
    """Goes on with another number of ranks: what is unsent then, and what each step loses."""
    module, ddp, optimizer, sync = setup("onebit")
    weights, moments, state = torch.load(Path(folder) / "file", weights_only=True)
    module.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    if shards:
        sync.load(Path(folder) / "shards")
    else:
        sync.load_state_dict(state)
    changes = [
        float((unsent(sync, name) - left(state, name)).abs().max()) for name in sync.layout.senders
    ]
    gaps = [
        step_gaps(module, ddp, optimizer, sync, rank, step, keeps_unsent=True)
        for step in range(7, 11)
    ]
    return {"changes": changes, "gaps": gaps, "owed": len(sync.owed.momentum), "bits": bits(module)}


def detached(rank, num_ranks):
    """Detaches after some steps, on ranks of one host: bits of all parameters afterwards."""
    pretend_hosts(rank, num_ranks)
    module, ddp, optimizer, sync = setup("onebit", "hierarchical")
    train(ddp, optimizer, rank, range(6))
    sync.detach()
    train(ddp, optimizer, rank, range(6, 9))
    return bits(module)


if __name__ == "__main__":
    warm_up("onebit", "topk(ratio=0.05)", "int8(ef=false)")
    main(globals())
