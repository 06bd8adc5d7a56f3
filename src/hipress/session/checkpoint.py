"""What the codecs remember, as a checkpoint: all ranks' of it, by parameter name.

    version, world_size, hosts, step, scale, rates
    gradients   name: number of elements, codec, strategy
    ranks       rank, name: what that rank's worker remembers, one value for each element
    shared      name, role: what is remembered of means (the way back, a ring's hops), of which
                each element lies on one rank
    mean        name: what all of it comes to, for a run with another number of ranks
    owed        name: what every rank adds to its next gradient besides; mostly zero

All is by element, nothing by chunk or bucket: how gradients are cut may change between runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.recipe import codes_local
from hipress.casync.graphs import strategies
from hipress.casync.graphs.graph import Kind, Verb
from hipress.codecs.base import WEIGHT, Codec
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.session.buckets import Gradient
    from hipress.torch.sync import Sync

_log = logging.getLogger("hipress")

VERSION = 1
UNSENT = ("residual", "added_residual")
"""What was not sent yet, and must be; the rest is an average of the past."""


def unsent(engine: Engine, gradient: Gradient) -> torch.Tensor:
    """What this rank must add to its gradient so that the mean over ranks has all of it."""
    parameter = gradient.parameter
    total = torch.zeros(parameter.numel(), device=parameter.device)
    held = engine.states.assemble(gradient.name, parameter.numel(), parameter.device)
    for (kind, merged, key), value in held.items():
        if key in UNSENT and _is_own(engine, gradient, kind, merged, key):
            total.add_(value, alpha=_factor(engine, gradient, kind, merged))
    return total


def save(sync: Sync) -> dict[str, Any]:
    """The checkpoint, the same on all ranks; collective."""
    found: dict[str, Any] = {
        "version": VERSION,
        "world_size": 1,
        "hosts": "0",
        "step": sync.step,
        "scale": sync.scale,
        "rates": {},
        "gradients": {},
        "ranks": {},
        "shared": {},
        "mean": {},
        "owed": {name: owed.to("cpu", copy=True) for name, owed in sync.owed.items()},
    }
    if sync._engine is None:
        return found if sync.loaded is None else sync.loaded
    engine = sync._engine
    engine.wait_idle()
    engine.agree("state_dict", {"step": sync.step, "gradients": list(sync.gradients)})
    num_ranks = found["world_size"] = engine.transport.num_ranks
    found["hosts"] = _hosts(engine)
    optimizer = sync.settings.optimizer
    for group in optimizer.param_groups if optimizer is not None else ():
        known = {id(g.parameter): name for name, g in sync.gradients.items()}
        for name in (known[id(p)] for p in group["params"] if id(p) in known):
            # Also before the first step: DCP loads what a fresh run would save.
            found["rates"][name] = sync.rates.get(name, float(group["lr"]))
    found["ranks"] = {str(rank): {} for rank in range(num_ranks)}
    for name, gradient in sync.gradients.items():
        if not gradient.is_compressed:
            continue
        choice = gradient.choice
        found["gradients"][name] = {
            "numel": gradient.parameter.numel(),
            "codec": choice.codec.name,
            "strategy": choice.strategy,
        }
        workers, shared, mean = _gathered(sync, engine, gradient)
        for rank, state in enumerate(workers):
            found["ranks"][str(rank)][name] = state
        found["shared"][name] = shared
        # Always there: DCP loads what a fresh run would save.
        found["owed"].setdefault(name, torch.zeros(gradient.parameter.numel()))
        found["mean"][name] = mean
    return found


def load(sync: Sync, state: dict[str, Any]) -> None:
    """Takes a checkpoint over, or raises and leaves everything as it was."""
    _check(state)
    if not sync.enabled or sync._detached:
        _log.warning(
            "what the checkpoint's residuals hold is left out: the exchange is %s.",
            "detached" if sync.enabled else "not enabled",
        )
        return
    for name, facts in state["gradients"].items() if sync.gradients else ():
        _check_fit(sync, state, name, facts)
    owed = _owed(sync, state)
    if sync._engine is not None:
        sync._engine.wait_idle()
        sync._engine.agree(
            "load_state_dict", {"step": state["step"], "world_size": state["world_size"]}
        )
    sync.step, sync.scale = int(state["step"]), state["scale"]
    sync.rates = {}
    sync.owed = owed
    sync.loaded = state
    if sync._engine is not None:
        sync._engine.states.clear()
    for gradient in sync.gradients.values():
        restore(sync, gradient)


def restore(sync: Sync, gradient: Gradient) -> None:
    """Hands what was loaded to a gradient, once that is known."""
    state, engine, name = sync.loaded, sync.engine, gradient.name
    if state is None or name not in state["gradients"]:
        return
    facts = state["gradients"][name]
    _check_fit(sync, state, name, facts)
    if name in state["rates"]:
        sync.rates[name] = state["rates"][name]
    choice = gradient.choice
    same = (choice.codec.name, choice.strategy) == (facts["codec"], facts["strategy"])
    same = same and state["world_size"] == engine.transport.num_ranks
    if strategies.get(choice.strategy).has_host_stages:
        same = same and state["hosts"] == _hosts(engine)
    if same:
        _restore_exactly(engine, gradient, state)
    else:
        _share_out(sync, engine, gradient, state["mean"][name])


def _restore_exactly(engine: Engine, gradient: Gradient, state: dict[str, Any]) -> None:
    """Every rank gets its own back."""
    name = gradient.name
    own = state["ranks"][str(engine.transport.rank)][name]
    for key, held in own.items():
        engine.states.preload(name, Kind.FRAME, 1, key, held)
    for kind, merged in _roles(engine, gradient):
        for key, held in state["shared"][name].get(_role(kind, merged), {}).items():
            engine.states.preload(name, kind, merged, key, held)


def _share_out(
    sync: Sync, engine: Engine, gradient: Gradient, mean: dict[str, torch.Tensor]
) -> None:
    """Every rank gets the mean of all, so that the mean over ranks is what it was."""
    name = gradient.name
    if (left := mean.get(UNSENT[0])) is not None:
        before = sync.owed.get(name)
        sync.owed[name] = left.clone() if before is None else left + before.to(left.device)
    for key, held in mean.items():
        if key not in UNSENT:
            engine.states.preload(name, Kind.FRAME, 1, key, held)


def _check(state: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {
        "version": int, "world_size": int, "hosts": str, "step": int, "scale": float, "rates": dict,
        "gradients": dict, "ranks": dict, "shared": dict, "mean": dict, "owed": dict,
    }  # fmt: skip
    given = state if isinstance(state, dict) else {}
    version = given.get("version")
    newer = type(version) is int and version > VERSION
    for key, kind in kinds.items():
        if not newer and (key not in given or not isinstance(given[key], kind)):
            raise UsageError(
                "load_state_dict was given something else than what sync.state_dict() returned: "
                f"{key!r} is {given.get(key)!r}; load the entry of your checkpoint that holds it."
            )
    if state["version"] > VERSION:
        raise UsageError(
            f"the checkpoint has version {state['version']} and this hipress reads up to "
            f"{VERSION}; update hipress."
        )


def _owed(sync: Sync, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What gradients of this model are owed; refuses the checkpoint of another model."""
    found = {}
    for name, owed in state["owed"].items():
        if name in sync.others and name in state["gradients"]:
            continue  # said already
        numel = owed.numel() if isinstance(owed, torch.Tensor) else None
        if (not sync.gradients or _is_trained(sync, name, numel)) and owed.any():
            found[name] = owed.clone()
    return found


def _is_trained(sync: Sync, name: str, found: Any) -> bool:
    """Whether the model trains what a checkpoint names, with so many elements; warns where it does
    not any more, refuses what it does not have."""
    if name in sync.others:
        _log.warning("what was not sent of %r is left out: it is not trained any more.", name)
        return False
    if name not in sync.gradients:
        raise UsageError(
            f"the checkpoint holds what was not sent of {name!r}, which this model does not have; "
            "load the checkpoint of this model."
        )
    numel = sync.gradients[name].parameter.numel()
    if numel != found:
        raise UsageError(
            f"the checkpoint's {name!r} has {found} elements and this model's has {numel}; load "
            "the checkpoint of this model."
        )
    return True


def _check_fit(sync: Sync, state: dict[str, Any], name: str, facts: Any) -> None:
    """Refuses the checkpoint of another model."""
    if not _is_trained(sync, name, facts.get("numel") if isinstance(facts, dict) else facts):
        return
    tensors = [state["mean"].get(name), state["shared"].get(name)]
    num_ranks = sync.engine.transport.num_ranks
    if num_ranks == state["world_size"]:  # of another number only the mean is needed
        tensors += [state["ranks"].get(str(r), {}).get(name) for r in range(num_ranks)]
    if not all(isinstance(one, dict) for one in tensors):
        raise UsageError(
            f"the checkpoint lacks what some rank kept of {name!r}; it is damaged: load an older "
            "one."
        )


def _hosts(engine: Engine) -> str:
    """The host of each rank, as text."""
    return ",".join(map(str, engine.hosts))


def _role(kind: Kind, merged: int) -> str:
    """The name of what is shared, the same for any number of ranks where that can be."""
    return kind.value if kind is Kind.BACK else f"{kind.value}-{merged}"


def _gathered(
    sync: Sync, engine: Engine, gradient: Gradient
) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any], dict[str, torch.Tensor]]:
    """What all ranks remember of a gradient: by worker, shared, and what it comes to."""
    numel, num_ranks = gradient.parameter.numel(), engine.transport.num_ranks
    codec, device = gradient.choice.codec, gradient.parameter.device
    held = engine.states.assemble(gradient.name, numel, device)
    blank = torch.zeros(numel, device=device)
    workers: list[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]
    shared: dict[str, dict[str, torch.Tensor]] = {}
    mean: dict[str, torch.Tensor] = {}
    for key in _memory(codec):
        own = held.get((Kind.FRAME, 1, key), blank)
        for rank, one in enumerate(_all_gather(sync, own)):
            workers[rank][key] = one
            _add(mean, key, one, _factor(engine, gradient, Kind.FRAME, 1, rank) / num_ranks)
    for kind, merged in _roles(engine, gradient):
        for key in _memory(codec.aggregator(merged)):
            own = held.get((kind, merged, key), blank)
            if not _is_own(engine, gradient, kind, merged, key):
                own = blank
            one = _all_sum(sync, own)
            shared.setdefault(_role(kind, merged), {})[key] = one
            if key in UNSENT:
                _add(mean, key, one, _factor(engine, gradient, kind, merged) / num_ranks)
    return workers, shared, mean


def _is_own(engine: Engine, gradient: Gradient, kind: Kind, merged: int, key: str) -> bool:
    """Whether this rank counts for what is remembered: all ranks were offered what is shared."""
    if kind is Kind.FRAME or engine.transport.rank == 0:
        return True
    return engine.states.preloaded(gradient.name, kind, merged, key) is None


def _add(mean: dict[str, torch.Tensor], key: str, value: torch.Tensor, share: float) -> None:
    key = UNSENT[0] if key in UNSENT else key
    mean[key] = torch.add(mean[key], value, alpha=share) if key in mean else value * share


def _memory(codec: Codec) -> list[str]:
    """What a codec remembers of each element; parameters that it only looks at are not saved."""
    return [name for name in codec.state_names if name != WEIGHT]


def _roles(engine: Engine, gradient: Gradient) -> list[tuple[Kind, int]]:
    """What is encoded besides a worker's own gradient, on any rank."""
    hosts = engine.hosts
    cluster = strategies.Cluster(
        hosts=hosts, codes_local=codes_local(gradient.choice.codec, len(hosts))
    )
    found = set()
    for rank in range(len(hosts)):
        graph = strategies.build(gradient.choice.strategy, cluster, rank, range(len(hosts)))
        for task in graph.tasks:
            if task.verb is Verb.ENCODE and task.writes[0].kind is not Kind.FRAME:
                found.add((task.writes[0].kind, task.writes[0].merged))
    return sorted(found)


def _factor(
    engine: Engine, gradient: Gradient, kind: Kind, merged: int, rank: int | None = None
) -> int:
    """How many ranks' gradients are in what a rank (this one if None) encodes."""
    if kind is Kind.BACK:
        return len(engine.hosts)
    if kind is Kind.PARTIAL:
        return merged
    strategy = strategies.get(gradient.choice.strategy)
    return strategy.num_gradients(engine.hosts, engine.transport.rank if rank is None else rank)


def _all_gather(sync: Sync, own: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(own) for _ in range(sync.engine.transport.num_ranks)]
    with _named(sync):
        dist.all_gather(found, own, group=sync.process_group)
    return [one.cpu() for one in found]


def _all_sum(sync: Sync, own: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of values of which one rank holds each, to the last bit."""
    total = own.clone()
    with _named(sync):
        dist.all_reduce(total.view(torch.int32), group=sync.process_group)
    return total.cpu()


@contextmanager
def _named(sync: Sync) -> Iterator[None]:
    """An error of torch's in here becomes one that names the rank which is gone."""
    try:
        yield
    except RuntimeError as error:
        raise sync.engine.explain(error) from error
