"""Checkpoints of codec state: that of all ranks, by parameter name.

    version, world_size, hosts, step, scale, rates
    gradients   name: number of elements, codec, strategy
    ranks       rank, name: state of that rank's worker, one value for each element
    shared      name, role: state kept for means (the way back, the hops of a ring), of which each
                element lies on one rank
    mean        name: the sum of all of it over ranks, for a run with another number of ranks
    owed        name: what every rank adds to its next gradient besides; mostly zero
    owed_momentum   name: the same for what is exchanged in place of the gradient
    overrides       JSON: gradients whose codec was not accurate enough, and the milder one

Everything is stored by element, nothing by chunk or bucket, because the cutting of gradients may
change between runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.recipe import codes_local
from hipress.casync.engine.state_store import Key
from hipress.casync.graphs import strategies
from hipress.casync.graphs.graph import Kind, Verb
from hipress.codecs.base import WEIGHT, Codec, State
from hipress.errors import UsageError
from hipress.session.buckets import MOMENTUM, UNSENT, has_momentum
from hipress.session.milder import Override, as_text, from_text
from hipress.session.mode import Mode

if TYPE_CHECKING:
    from hipress.session.buckets import Gradient
    from hipress.session.session import Session

_log = logging.getLogger("hipress")

VERSION = 1
OWED_MOMENTUM = "owed_momentum"
OVERRIDES = "overrides"


def unsent(engine: Engine, gradient: Gradient) -> torch.Tensor:
    """Returns what this rank adds to its gradient so that the mean contains all unsent state."""
    device = gradient.spec.device
    total = torch.zeros(gradient.numel, device=device)
    held = engine.states.assemble(gradient.name, gradient.numel, device)
    for (kind, merged, key), value in held.items():
        if key in UNSENT and _is_own(engine, gradient, kind, merged, key):
            total.add_(value, alpha=_factor(engine, gradient, kind, merged))
    return total


def own_factor(engine: Engine, gradient: Gradient, key: Key) -> int:
    """Returns how often what this rank has not sent of a partition counts in `unsent`."""
    return _factor(engine, gradient, key.kind, key.merged)


def own_momentum(engine: Engine, gradient: Gradient) -> torch.Tensor | None:
    """Returns the average of past gradients that the codec of this rank keeps, if it does."""
    if not has_momentum(gradient.choice.codec):
        return None
    held = engine.states.assemble(gradient.name, gradient.numel, gradient.spec.device)
    found = [
        value for (kind, _, key), value in held.items() if kind is Kind.FRAME and key in MOMENTUM
    ]
    return found[0] if found else None


def give_momentum(engine: Engine, name: str, held: State) -> None:
    """Gives averages of past gradients to the codec that next works on a gradient."""
    for key, value in held.items():
        engine.states.preload(name, Kind.FRAME, 1, key, value)


def warn_of_lost_momentum(session: Session, keys: Iterable[str]) -> None:
    """Warns if a checkpoint holds averages of past gradients and this run is one of `auto`."""
    is_first = not session.is_open or session.engine.transport.rank == 0
    if session.auto is not None and set(keys) - set(UNSENT) and is_first:
        _log.warning(
            "the momentum in the checkpoint is dropped, because no codec of auto applies momentum: "
            "name the codec that the checkpoint was saved with, or set the optimizer's momentum."
        )


def save(session: Session) -> dict[str, Any]:
    """Returns the checkpoint, the same on all ranks; collective."""
    found: dict[str, Any] = {
        "version": VERSION,
        "world_size": 1,
        "hosts": "0",
        "step": session.step,
        "scale": session.scale,
        "rates": {},
        "gradients": {},
        "ranks": {},
        "shared": {},
        "mean": {},
        "owed": {name: owed.to("cpu", copy=True) for name, owed in session.owed.items()},
        OWED_MOMENTUM: {
            name: owed.to("cpu", copy=True) for name, owed in session.owed.momentum.items()
        },
        OVERRIDES: as_text(session.layout.overrides),
    }
    if session.idle:
        session.told = found
    if not session.is_open:
        return found if session.loaded is None else session.loaded
    engine = session.engine
    engine.wait_idle()
    engine.agree("state_dict", {"step": session.step, "gradients": list(session.gradients)})
    num_ranks = found["world_size"] = engine.transport.num_ranks
    found["hosts"] = _hosts(engine)
    for name, rate in session.adapter.learning_rates().items():
        # Also before the first step: DCP loads what a fresh run would save.
        found["rates"][name] = session.rates.get(name, rate)
    found["ranks"] = {str(rank): {} for rank in range(num_ranks)}
    for name, gradient in session.gradients.items():
        if not gradient.is_compressed:
            continue
        choice = gradient.choice
        found["gradients"][name] = {
            "numel": gradient.numel,
            "codec": choice.codec.name,
            "strategy": choice.strategy,
            "sends_momentum": gradient.sends_momentum,
        }
        workers, shared, mean = _gathered(session, engine, gradient)
        for rank, state in enumerate(workers):
            found["ranks"][str(rank)][name] = state
        found["shared"][name] = shared
        # Always there: DCP loads what a fresh run would save.
        found["owed"].setdefault(name, torch.zeros(gradient.numel))
        if gradient.sends_momentum:
            found[OWED_MOMENTUM].setdefault(name, torch.zeros(gradient.numel))
        found["mean"][name] = mean
    return found if session.auto is None else _without_plan(session, found)


def _without_plan(session: Session, state: dict[str, Any]) -> dict[str, Any]:
    """Makes a checkpoint of `auto` independent of the plan that happens to be in use.

    A resumed run begins uncompressed. So every rank owes what codecs hold: the mean of it, which is
    all that training sees; no codec of `auto` keeps anything else.
    """
    state["gradients"], state["ranks"], state["shared"] = {}, {}, {}
    for name, gradient in session.gradients.items():
        if session.rules.choice(gradient.spec).reason:
            continue  # no plan compresses it
        # Always present: DCP loads what a fresh run would save.
        owed = state["owed"]
        owed.setdefault(name, torch.zeros(gradient.numel))
        if session.adapter.offers_momentum(name):
            state[OWED_MOMENTUM].setdefault(name, torch.zeros(gradient.numel))
        if gradient.sends_momentum:
            owed = state[OWED_MOMENTUM]
        if (left := state["mean"].get(name, {}).get("residual")) is not None:
            owed[name] = owed[name] + left
    state["mean"] = {}
    return state


def load(session: Session, state: dict[str, Any]) -> None:
    """Loads a checkpoint, or raises on all ranks and changes nothing."""
    if session.idle:
        _load_idle(session, state)
        return
    if session.mode.current is Mode.DETACHED:
        _check(state)
        _log.warning("the residuals of the checkpoint are ignored: the exchange is detached.")
        return
    problem: Exception | None = None
    owed: dict[str, torch.Tensor] = {}
    momentum: dict[str, torch.Tensor] = {}
    overrides: dict[str, Override] = {}
    try:
        _check(state)
        for name, facts in state["gradients"].items() if session.gradients else ():
            _check_fit(session, state, name, facts)
        owed = _owed(session, state, "owed")
        momentum = _owed(session, state, OWED_MOMENTUM)
        overrides = from_text(state.get(OVERRIDES, "{}"))  # older checkpoints have none
    except UsageError as error:
        problem = error
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = UsageError(f"the checkpoint is damaged ({error!r}); load an older one.")
    if session.is_open:
        session.engine.wait_idle()
        told = session.engine.agree("load_state_dict", {}, share=problem and str(problem))
        for rank, other in enumerate(told):
            if other is not None and problem is None:
                problem = UsageError(f"rank {rank}: {other}")
    if problem is not None:
        raise problem
    if session.is_open:
        facts = {"step": state["step"], "world_size": state["world_size"]}
        session.engine.agree("load_state_dict", facts)
    averages = {**state["mean"], **state.get("momentum", {})}
    warn_of_lost_momentum(session, (key for mean in averages.values() for key in mean))
    session.step, session.scale = int(state["step"]), state["scale"]
    session.rates = {}
    session.owed.clear()
    session.owed.update(owed)
    session.owed.momentum = {}
    for name, one in momentum.items():
        owe_loaded_momentum(session, name, one)
    session.use_overrides(overrides)
    session.loaded = state
    if session.is_open:
        session.engine.states.clear()
    for gradient in session.gradients.values():
        restore(session, gradient)


def _load_idle(session: Session, state: dict[str, Any]) -> None:
    """Keeps the mean of what all ranks have not sent for the next gradients."""
    _check(state)
    if state is session.told and state["world_size"] != 1:
        # dcp.load fills in what `state_dict` has returned, in which there is no residual.
        raise UsageError(
            f"dcp.load with the session itself would lose the residuals of {state['world_size']} "
            f"ranks, because {session.idle}: save sync.shards() with dcp.save and load them with "
            "sync.load(folder, entry=...), or use sync.save and sync.load."
        )
    owed = _owed(session, state, "owed")
    momentum = _owed(session, state, OWED_MOMENTUM)
    averages: set[str] = set()
    for name, facts in state["gradients"].items():
        if not is_trained(session, name, facts["numel"]):
            continue
        mean = state["mean"][name]
        averages |= set(mean) - set(UNSENT)
        if (left := mean.get(UNSENT[0])) is not None and left.any():
            kept = momentum if facts.get("sends_momentum", False) else owed
            kept[name] = left + kept[name] if name in kept else left.clone()
    session.step, session.scale = int(state["step"]), float(state["scale"])
    owe_idle(session, owed, bool(momentum or averages), state.get(OVERRIDES, "{}"))


def owe_idle(session: Session, owed: State, drops_momentum: bool, overrides: str) -> None:
    """Lets a session that does nothing add what is owed to the next gradients.

    Args:
        session: The session.
        owed: What is added.
        drops_momentum: Whether the checkpoint holds momentum, which nothing exchanges here.
        overrides: Milder codecs, for a later checkpoint.
    """
    session.owed.clear()
    session.owed.update(owed)
    session.layout.overrides = from_text(overrides)
    session.adapter.pay_owed(session)
    if drops_momentum:
        _log.warning(
            "momentum of the checkpoint's codecs is dropped: %s, so nothing exchanges it.",
            session.idle,
        )


def restore(session: Session, gradient: Gradient) -> None:
    """Gives loaded state to a gradient that has just been registered."""
    state, engine, name = session.loaded, session.engine, gradient.name
    if state is None or name not in state["gradients"]:
        return
    facts = state["gradients"][name]
    _check_fit(session, state, name, facts)
    if name in state["rates"]:
        session.rates[name] = state["rates"][name]
    choice = gradient.choice
    same = (choice.codec.name, choice.strategy) == (facts["codec"], facts["strategy"])
    same = same and state["world_size"] == engine.transport.num_ranks
    same = same and facts.get("sends_momentum", False) == gradient.sends_momentum
    if strategies.get(choice.strategy).has_host_stages:
        same = same and state["hosts"] == _hosts(engine)
    if same:
        _restore_exactly(engine, gradient, state)
    else:
        is_momentum = bool(facts.get("sends_momentum", False))
        _share_out(session, engine, gradient, state["mean"][name], is_momentum)


def _restore_exactly(engine: Engine, gradient: Gradient, state: dict[str, Any]) -> None:
    """Gives every rank its own state back."""
    name = gradient.name
    own = state["ranks"][str(engine.transport.rank)][name]
    for key, held in own.items():
        engine.states.preload(name, Kind.FRAME, 1, key, held)
    for kind, merged in _roles(engine, gradient):
        for key, held in state["shared"][name].get(_role(kind, merged), {}).items():
            engine.states.preload(name, kind, merged, key, held)


def _share_out(
    session: Session,
    engine: Engine,
    gradient: Gradient,
    mean: dict[str, torch.Tensor],
    is_momentum: bool,
) -> None:
    """Gives every rank the mean, so that the mean over ranks is what it was."""
    name = gradient.name
    left = mean.get(UNSENT[0])
    if left is not None and left.any():
        (owe_loaded_momentum if is_momentum else owe)(session, name, left)
    give_momentum(engine, name, {key: mean[key] for key in mean if key not in UNSENT})


def owe(session: Session, name: str, left: torch.Tensor) -> None:
    """Keeps what was not sent of a gradient."""
    before = session.owed.get(name)
    session.owed[name] = left.clone() if before is None else left + before.to(left.device)


def owe_loaded_momentum(session: Session, name: str, left: torch.Tensor) -> None:
    """Keeps unsent momentum of a checkpoint; warns if nothing exchanges momentum any more."""
    known = session.gradients.get(name)
    may_send = session.auto is not None or known is None or known.sends_momentum
    if not (session.adapter.offers_momentum(name) and may_send):
        _log.warning(
            "the unsent momentum of %r is dropped: this run exchanges gradients; give attach the "
            "optimizer and the codec that the checkpoint was made with, e.g. hipress.torch.AdamW "
            "and onebit.", name,
        )  # fmt: skip
        return
    owe_momentum(session, name, left)


def owe_momentum(session: Session, name: str, left: torch.Tensor) -> None:
    """Keeps momentum that was not sent; the same on all ranks."""
    before = session.owed.momentum.get(name)
    session.owed.momentum[name] = left.clone() if before is None else left + before.to(left.device)


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


def _owed(session: Session, state: dict[str, Any], key: str) -> dict[str, torch.Tensor]:
    """Returns what is owed to gradients of this model; raises for another model's checkpoint."""
    found = {}
    for name, owed in state.get(key, {}).items():  # older checkpoints have no momentum
        if name in session.untrained and name in state["gradients"]:
            continue  # said already
        numel = owed.numel() if isinstance(owed, torch.Tensor) else None
        if (not session.numels or is_trained(session, name, numel)) and owed.any():
            found[name] = owed.clone()
    return found


def is_trained(session: Session, name: str, found: Any) -> bool:
    """Returns whether the model trains a gradient of the checkpoint with this size.

    Warns if it is no longer trained; raises if the model does not have it.
    """
    if name in session.untrained:
        _log.warning("the unsent state of %r is ignored: it is no longer trained.", name)
        return False
    if name not in session.numels:
        raise UsageError(
            f"the checkpoint holds unsent state of {name!r}, which this model does not have; "
            "load the checkpoint of this model."
        )
    numel = session.numels[name]
    if numel != found:
        raise UsageError(
            f"the checkpoint's {name!r} has {found} elements and this model's has {numel}; load "
            "the checkpoint of this model."
        )
    return True


def _check_fit(session: Session, state: dict[str, Any], name: str, facts: Any) -> None:
    """Raises for the checkpoint of another model."""
    if not is_trained(session, name, facts.get("numel") if isinstance(facts, dict) else facts):
        return
    tensors = [state["mean"].get(name), state["shared"].get(name)]
    num_ranks = session.engine.transport.num_ranks
    if num_ranks == state["world_size"]:  # of another number only the mean is needed
        tensors += [state["ranks"].get(str(r), {}).get(name) for r in range(num_ranks)]
    if not all(isinstance(one, dict) for one in tensors):
        raise UsageError(
            f"the checkpoint lacks the state of {name!r} of some rank; it is damaged: load an "
            "older one."
        )


def _hosts(engine: Engine) -> str:
    """Returns the host of each rank as text."""
    return ",".join(map(str, engine.hosts))


def _role(kind: Kind, merged: int) -> str:
    """Returns the name of shared state, for any number of ranks where possible."""
    return kind.value if kind is Kind.BACK else f"{kind.value}-{merged}"


def _gathered(
    session: Session, engine: Engine, gradient: Gradient
) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the state of a gradient on all ranks: by worker, shared, and their mean."""
    numel, num_ranks = gradient.numel, engine.transport.num_ranks
    codec, device = gradient.choice.codec, gradient.spec.device
    held = engine.states.assemble(gradient.name, numel, device)
    blank = torch.zeros(numel, device=device)
    workers: list[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]
    shared: dict[str, dict[str, torch.Tensor]] = {}
    mean: dict[str, torch.Tensor] = {}
    for key in _memory(codec):
        own = held.get((Kind.FRAME, 1, key), blank)
        for rank, one in enumerate(_all_gather(session, own)):
            workers[rank][key] = one
            _add(mean, key, one, _factor(engine, gradient, Kind.FRAME, 1, rank) / num_ranks)
    for kind, merged in _roles(engine, gradient):
        for key in _memory(codec.aggregator(merged)):
            own = held.get((kind, merged, key), blank)
            if not _is_own(engine, gradient, kind, merged, key):
                own = blank
            one = _all_sum(session, own)
            shared.setdefault(_role(kind, merged), {})[key] = one
            if key in UNSENT:
                _add(mean, key, one, _factor(engine, gradient, kind, merged) / num_ranks)
    return workers, shared, mean


def _is_own(engine: Engine, gradient: Gradient, kind: Kind, merged: int, key: str) -> bool:
    """Returns whether this rank's copy counts: all ranks were given loaded shared state."""
    if kind is Kind.FRAME or engine.transport.rank == 0:
        return True
    return engine.states.preloaded(gradient.name, kind, merged, key) is None


def _add(mean: dict[str, torch.Tensor], key: str, value: torch.Tensor, share: float) -> None:
    key = UNSENT[0] if key in UNSENT else key
    mean[key] = torch.add(mean[key], value, alpha=share) if key in mean else value * share


def _memory(codec: Codec) -> list[str]:
    """Returns the names of saved state; parameters that a codec only reads are not saved."""
    return [key for key in codec.state_names if key != WEIGHT]


def _roles(engine: Engine, gradient: Gradient) -> list[tuple[Kind, int]]:
    """Returns what any rank encodes besides a worker's own gradient."""
    hosts = engine.hosts
    cluster = strategies.Cluster(
        hosts=hosts, codes_local=codes_local(gradient.choice.codec, len(hosts))
    )
    found = set()
    for rank in range(len(hosts)):
        graph = strategies.get(gradient.choice.strategy).build(cluster, rank, range(len(hosts)))
        for task in graph.tasks:
            if task.verb is Verb.ENCODE and task.writes[0].kind is not Kind.FRAME:
                found.add((task.writes[0].kind, task.writes[0].merged))
    return sorted(found)


def _factor(
    engine: Engine, gradient: Gradient, kind: Kind, merged: int, rank: int | None = None
) -> int:
    """Returns the factor of what a rank (this one if None) holds now."""
    rank = engine.transport.rank if rank is None else rank
    return factor(gradient.choice.strategy, engine.hosts, kind, merged, rank)


def factor(strategy: str, hosts: tuple[int, ...], kind: Kind, merged: int, rank: int) -> int:
    """Returns how many ranks' gradients are in what a rank encodes."""
    if kind is Kind.BACK:
        return len(hosts)
    if kind is Kind.PARTIAL:
        return merged
    return strategies.get(strategy).num_gradients(hosts, rank)


def _all_gather(session: Session, own: torch.Tensor) -> list[torch.Tensor]:
    """Returns what each rank holds; one after the other, which needs no memory besides."""
    group, transport = session.process_group, session.engine.transport
    found = []
    for rank in range(transport.num_ranks):
        one = own.clone() if rank == transport.rank else torch.empty_like(own)
        with named(session):
            dist.broadcast(one, rank if group is None else dist.get_global_rank(group, rank), group)
        found.append(one.cpu())
    return found


def _all_sum(session: Session, own: torch.Tensor) -> torch.Tensor:
    """Returns the exact sum over ranks of values that are zero on all ranks but one."""
    total = own.clone()
    with named(session):
        dist.all_reduce(total.view(torch.int32), group=session.process_group)
    return total.cpu()


@contextmanager
def named(session: Session) -> Iterator[None]:
    """Turns an error of torch into one that names the lost rank."""
    try:
        yield
    except RuntimeError as error:
        raise session.engine.explain(error) from error
