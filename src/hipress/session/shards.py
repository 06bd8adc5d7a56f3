"""Checkpoints of codec state in shards: every rank writes what it holds, and nothing is gathered.

The shards are tensors for torch.distributed.checkpoint (DCP), by key:

    facts                                           JSON: step, loss scale, codecs, hosts, ...
    owed/NAME, owed_momentum/NAME                   the same on all ranks, so one rank writes it
    rank3/KIND/MERGED/KEY/START:STOP/NAME           the memory of one partition on rank 3

A rank reads its own partitions if nothing has changed, and then continues bit for bit. With another
number of ranks, codec, strategy or cutting it reads those of all ranks, one after the other, and
adds them up to the mean (see `checkpoint`). DCP loads into tensors that the caller has, by their
names; a session cannot know these before it has read the facts, so `load` reads them itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.recipe import codes_local
from hipress.casync.engine.state_store import Key
from hipress.casync.graphs import strategies
from hipress.casync.graphs.graph import Kind, Verb
from hipress.codecs import residual
from hipress.codecs.base import RANDOM_KEYS, WEIGHT, State
from hipress.errors import HipressError, UsageError
from hipress.session import checkpoint
from hipress.session.buckets import UNSENT, Gradient
from hipress.session.checkpoint import OVERRIDES, OWED_MOMENTUM
from hipress.session.milder import as_text, from_text
from hipress.session.mode import Mode

if TYPE_CHECKING:
    from hipress.session.session import Session

_log = logging.getLogger("hipress")

VERSION = 1
SENDS_MOMENTUM = "sends_momentum"
FACTS = "facts"
METADATA = ".metadata"
"""The file that DCP writes last."""


class Shard(NamedTuple):
    """Names the memory of one partition of a gradient on one rank; the key of a tensor of DCP."""

    rank: int
    kind: Kind
    merged: int
    key: str
    start: int
    stop: int
    name: str

    def __str__(self) -> str:
        part = f"{self.start}:{self.stop}"
        return f"rank{self.rank}/{self.kind.value}/{self.merged}/{self.key}/{part}/{self.name}"

    @classmethod
    def read(cls, text: str) -> Shard:
        """Returns the shard that a key names."""
        rank, kind, merged, key, part, name = text.split("/", 5)
        start, _, stop = part.partition(":")
        number = int(rank.removeprefix("rank"))
        return cls(number, Kind(kind), int(merged), key, int(start), int(stop), name)


# --- writing --------------------------------------------------------------------------------------


def save(session: Session, folder: Path) -> None:
    """Writes the shards of all ranks into a folder; collective.

    They are written beside it and renamed, so the last checkpoint is there until this one is
    complete.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    found = shards(session)
    partial = folder.with_name(f"{folder.name}.partial")
    is_first = _rank(session) == 0

    def clear() -> None:
        if is_first:
            for path in (folder, _old(folder), partial):
                _refuse_foreign(path, folder)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        # One file for each tensor: DCP holds the copies of a file's tensors until it is written.
        writer = FileSystemWriter(partial, single_file_per_rank=False)
        try:
            alone = not dist.is_initialized()
            with warnings.catch_warnings():
                if alone:  # of which DCP warns
                    warnings.simplefilter("ignore")
                dcp_save(
                    found,
                    storage_writer=writer,
                    process_group=session.process_group,
                    no_dist=alone,
                )
        except CheckpointException as error:  # of any rank, raised on all of them
            rank, (reason, _) = next(iter(error.failures.items()))
            raise OSError(f"rank {rank}: {_line(reason)}") from error

    def look() -> None:
        if not (partial / METADATA).exists():
            raise OSError("it is not there on this rank's host; give a folder that all hosts see")

    def rename() -> None:
        if is_first:
            replace(partial, folder)

    text = (
        f"the checkpoint cannot be written to {str(folder)!r}: {{reason}}; mend that and save "
        "again: the previous checkpoint is intact."
    )
    _jointly(session, clear, text)
    try:
        for work in (write, look, rename):
            _jointly(session, work, text)
    except UsageError:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _refuse_foreign(path: Path, folder: Path) -> None:
    """Raises if anything would be deleted with a path that `save` to a folder has not written."""
    if not path.exists():
        return
    if not path.is_dir():
        raise OSError(f"{str(path)!r} is a file and would be replaced; give a folder of its own")
    for one in sorted(path.iterdir()):
        # NFS keeps what is deleted while it is open as .nfs...
        if one.suffix != ".distcp" and not one.name.startswith((METADATA, ".nfs")):
            raise OSError(
                f"{str(path)!r} holds {one.name!r}, which sync.save has not written and would "
                f"delete; give a folder of its own, such as {str(folder / 'sync')!r}"
            )
    if path == folder and (path / METADATA).exists():
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        for key in FileSystemReader(path).read_metadata().state_dict_metadata:
            if key != FACTS and not key.startswith(("rank", "owed")):
                raise OSError(
                    f"{str(path)!r} holds a checkpoint with {key!r}, which sync.save has not "
                    "written and would delete; give a folder of its own"
                )


def replace(new: Path, folder: Path) -> None:
    """Puts a folder in the place of another; one of the two is always complete (see `found_in`)."""
    old = _old(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def found_in(folder: Path) -> Path:
    """Returns where the checkpoint of a folder is, also if `replace` was interrupted."""
    old = _old(folder)
    return old if old.exists() and not folder.exists() else folder


def _old(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old")


def shards(session: Session) -> dict[str, torch.Tensor]:
    """Returns what this rank writes: views of its codec state, by key; collective."""
    if not session.idle:
        session.engine.wait_idle()
    facts = _facts(session)
    text = json.dumps(facts, sort_keys=True).encode()
    found = {FACTS: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    found |= {f"owed/{name}": owed for name, owed in session.owed.items()}
    found |= {f"{OWED_MOMENTUM}/{name}": owed for name, owed in session.owed.momentum.items()}
    if session.idle:
        return found
    engine = session.engine
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    engine.agree("the checkpoint", {"step": session.step, "state": digest})
    rank = engine.transport.rank
    for gradient in filter(lambda one: one.is_compressed, session.gradients.values()):
        for key, state in _held(engine, gradient):
            for name, value in state.items():
                if name not in (*RANDOM_KEYS, WEIGHT):
                    part = Shard(rank, key.kind, key.merged, name, key.start, key.stop, key.name)
                    found[str(part)] = value.detach()
    return found


def _facts(session: Session) -> dict[str, Any]:
    """Returns what all ranks must know to read the shards."""
    hosts = session.engine.hosts if session.is_open else (0,)
    rates = session.adapter.learning_rates()
    return {
        "version": VERSION,
        "world_size": len(hosts),
        "hosts": list(hosts),
        "step": session.step,
        "scale": session.scale,
        "rates": {name: session.rates.get(name, rate) for name, rate in rates.items()},
        "gradients": {
            gradient.name: _described(gradient)
            for gradient in session.gradients.values()
            if gradient.is_compressed
        },
        "owed": {name: owed.numel() for name, owed in session.owed.items()},
        OWED_MOMENTUM: {name: owed.numel() for name, owed in session.owed.momentum.items()},
        OVERRIDES: as_text(session.layout.overrides),
    }


def _described(gradient: Gradient) -> dict[str, Any]:
    found: dict[str, Any] = {
        "numel": gradient.numel,
        "codec": gradient.choice.codec.name,
        "strategy": gradient.choice.strategy,
        "placements": [list(placement) for placement in gradient.placements],
    }
    return found | ({SENDS_MOMENTUM: True} if gradient.sends_momentum else {})


def _held(engine: Engine, gradient: Gradient) -> Iterator[tuple[Key, State]]:
    """Yields the memory of the partitions that this rank encodes, also what was only loaded yet."""
    stored = engine.states.partitions_of(gradient.name)
    for key in _keys(engine, gradient):
        loaded = engine.states.preloads(gradient.name, key.kind, key.merged)
        yield key, {n: v[key.start : key.stop] for n, v in loaded.items()} | stored.get(key, {})


def _keys(engine: Engine, gradient: Gradient) -> list[Key]:
    """Returns the partitions that this rank encodes, in each role."""
    name, placements = gradient.name, gradient.placements
    codec, hosts = gradient.choice.codec, engine.hosts
    cluster = strategies.Cluster(hosts=hosts, codes_local=codes_local(codec, len(hosts)))
    build = strategies.get(gradient.choice.strategy).build
    graph = build(cluster, engine.transport.rank, [placement.route for placement in placements])
    slots = [task.writes[0] for task in graph.tasks if task.verb is Verb.ENCODE]
    return [
        Key(name, placements[s.chunk].start, placements[s.chunk].stop, s.kind, s.merged)
        for s in slots
    ]


# --- reading --------------------------------------------------------------------------------------


@dataclass
class _Loaded:
    """What a rank has read, before anything is changed."""

    facts: dict[str, Any]
    parts: dict[Key, State] = field(default_factory=dict)
    """Memory of gradients for which nothing has changed."""
    owed: State = field(default_factory=dict)
    owed_momentum: State = field(default_factory=dict)
    momentum: dict[str, State] = field(default_factory=dict)
    """The mean over ranks, of gradients for which something has changed."""


def load(session: Session, folder: Path, entry: str) -> None:
    """Loads the shards of a folder, or raises and changes nothing; collective.

    Args:
        session: The session, after its first gradients were registered.
        folder: The folder of `save`, or of `dcp.save`.
        entry: The key of the shards in what `dcp.save` was given; empty for `save`.
    """
    if session.mode.current is Mode.DETACHED and not session.idle:
        _log.warning("the residuals of the checkpoint are ignored: the exchange is detached.")
        return
    if not session.idle:
        session.engine.wait_idle()
    found: list[_Loaded] = []
    _jointly(
        session,
        lambda: found.append(_read(session, _Reader(found_in(folder), entry))),
        f"the checkpoint in {str(folder)!r} cannot be read: {{reason}}; load another one.",
    )
    loaded = found[0]
    facts = loaded.facts
    if session.idle:
        session.step, session.scale = int(facts["step"]), float(facts["scale"])
        has_momentum = bool(loaded.owed_momentum or loaded.momentum)
        checkpoint.owe_idle(session, loaded.owed, has_momentum, facts.get(OVERRIDES, "{}"))
        return
    engine = session.engine
    engine.agree("loading", {"step": facts["step"], "world_size": facts["world_size"]})
    session.step, session.scale = int(facts["step"]), float(facts["scale"])
    session.rates = dict(facts["rates"])
    session.loaded = None
    session.owed.clear()
    session.owed.update(loaded.owed)
    session.owed.momentum = {}
    for name, left in loaded.owed_momentum.items():
        checkpoint.owe_loaded_momentum(session, name, left)
    session.use_overrides(from_text(facts.get(OVERRIDES, "{}")))
    engine.states.clear()
    for key, state in loaded.parts.items():
        engine.states.restore(key, state)
    keys = {key for held in loaded.momentum.values() for key in held}
    checkpoint.warn_of_lost_momentum(session, keys)
    for name, held in loaded.momentum.items() if session.auto is None else ():
        checkpoint.give_momentum(engine, name, held)


class _Reader:
    """Reads single tensors of a DCP checkpoint on this rank alone."""

    def __init__(self, folder: Path, entry: str) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._prefix = f"{entry}." if entry else ""
        if not (folder / METADATA).exists():
            raise UsageError(
                f"{str(folder)!r} holds no checkpoint; give the folder that sync.save or dcp.save "
                "was given, which all hosts must see."
            )
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        known = self._metadata.state_dict_metadata
        if f"{self._prefix}{FACTS}" not in known:
            raise UsageError(
                f"{str(folder)!r} holds no codec state under {entry!r}; give entry= the key of "
                "sync.shards() in what dcp.save was given, none for sync.save."
            )
        self.keys = [
            key.removeprefix(self._prefix) for key in known if key.startswith(self._prefix)
        ]

    def read(self, key: str) -> torch.Tensor:
        """Returns one tensor."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        key = f"{self._prefix}{key}"
        described: Any = self._metadata.state_dict_metadata[key]
        value = torch.empty(described.size, dtype=described.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({key: value}, self._metadata, is_coordinator=False)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return value


def _read(session: Session, reader: _Reader) -> _Loaded:
    facts = json.loads(bytes(reader.read(FACTS).numpy()))
    if facts["version"] > VERSION:
        raise UsageError(
            f"the checkpoint has version {facts['version']} and this hipress reads up to "
            f"{VERSION}; update hipress."
        )
    loaded = _Loaded(facts)
    overrides = from_text(facts.get(OVERRIDES, "{}")) if session.guard is not None else {}
    by_name: dict[str, list[Shard]] = {}
    for key in reader.keys:
        if key.startswith("rank"):
            by_name.setdefault((part := Shard.read(key)).name, []).append(part)
    for name, numel in facts["owed"].items():
        if checkpoint.is_trained(session, name, numel):
            loaded.owed[name] = reader.read(f"owed/{name}")
    for name, numel in facts.get(OWED_MOMENTUM, {}).items():
        if checkpoint.is_trained(session, name, numel):
            loaded.owed_momentum[name] = reader.read(f"{OWED_MOMENTUM}/{name}")
    for name, described in facts["gradients"].items():
        if not checkpoint.is_trained(session, name, described["numel"]):
            continue
        parts = by_name.get(name, [])
        if not session.idle and _is_same(
            session, session.layout.under(name, overrides.get(name)), facts, described
        ):
            loaded.parts |= _read_own(session.engine, parts, reader)
        else:
            _read_all(loaded, described, parts, reader)
    return loaded


def _is_same(
    session: Session, gradient: Gradient, facts: dict[str, Any], described: dict[str, Any]
) -> bool:
    """Returns whether each rank works on the partitions that it has saved, now and later on."""
    engine = session.engine
    same = session.auto is None and gradient.is_compressed and described == _described(gradient)
    same = same and facts["world_size"] == engine.transport.num_ranks
    has_host_stages = strategies.get(gradient.choice.strategy).has_host_stages
    return same and (not has_host_stages or facts["hosts"] == list(engine.hosts))


def _read_own(engine: Engine, parts: list[Shard], reader: _Reader) -> dict[Key, State]:
    """Returns the memory of this rank."""
    found: dict[Key, State] = {}
    for part in parts:
        if part.rank == engine.transport.rank:
            key = Key(part.name, part.start, part.stop, part.kind, part.merged)
            found.setdefault(key, {})[part.key] = reader.read(str(part))
    return found


def _read_all(
    loaded: _Loaded,
    described: dict[str, Any],
    parts: list[Shard],
    reader: _Reader,
) -> None:
    """Adds the mean of what all ranks held to what every rank owes; one partition at a time."""
    hosts, strategy = tuple(loaded.facts["hosts"]), described["strategy"]
    owed = loaded.owed_momentum if described.get(SENDS_MOMENTUM) else loaded.owed
    for part in parts:
        is_unsent = part.key in UNSENT
        if not is_unsent and part.kind is not Kind.FRAME:
            continue  # momentum belongs to workers
        factor = checkpoint.factor(strategy, hosts, part.kind, part.merged, part.rank)
        target = owed if is_unsent else loaded.momentum.setdefault(part.name, {})
        name = part.name if is_unsent else part.key
        if name not in target:
            target[name] = torch.zeros(described["numel"])
        value = residual.values(reader.read(str(part)), part.stop - part.start)
        target[name][part.start : part.stop].add_(value, alpha=factor / len(hosts))


# --- errors ---------------------------------------------------------------------------------------


def _jointly(session: Session, work: Callable[[], object], text: str) -> None:
    """Does something on all ranks; if one fails, all raise the same error.

    Args:
        session: Knows the ranks.
        work: What is done on this rank.
        text: The sentence of the error, with a place for the `reason`.
    """
    problem = None
    try:
        work()
    except HipressError as error:
        problem = str(error)
    except (
        OSError, RuntimeError, ValueError, KeyError, TypeError, AssertionError, EOFError,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        problem = text.replace("{reason}", _line(error))
    if session.idle:
        if dist.is_initialized():
            dist.barrier(group=session.process_group)
        if problem is not None:
            raise UsageError(problem)
        return
    with checkpoint.named(session):
        dist.barrier(group=session.process_group)  # may wait longer than an agreement
    told = session.engine.agree("the checkpoint", {}, share=problem)
    for rank, one in enumerate(told):
        if one is not None:
            raise UsageError(one if all(other == one for other in told) else f"rank {rank}: {one}")


def _rank(session: Session) -> int:
    return dist.get_rank(session.process_group) if dist.is_initialized() else 0


def _line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if "inline_container" in text:  # torch's, while it writes the rest of a file that was refused
        return "a file could not be written whole (is the disk full?)"
    return (text.splitlines() or [type(error).__name__])[0].rstrip(".")
