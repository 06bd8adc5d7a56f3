"""Engines for torch's process groups, and `hipress.allreduce`.

Each process group gets groups of our own over the same ranks, one for each kind of device, when
it is first used: nothing we send can meet what others send.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from hipress import settings
from hipress.casync.engine.engine import Engine, Options
from hipress.casync.engine.transport import GroupTransport, Sockets, open_sockets
from hipress.casync.ranks.agreement import Agreement
from hipress.codecs.base import Codec
from hipress.errors import UsageError
from hipress.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_engines: dict[tuple[int, torch.device], tuple[weakref.ref[ProcessGroup], Engine]] = {}
"""By the group's id and the device. Groups are not kept alive: with the first of them goes the
store, which a program that starts over must be free to open again."""
_count: dict[tuple[int, ...], int] = {}
"""Engines made so far among some ranks: a prefix of the store for each."""
_lock = threading.Lock()
_all: weakref.WeakSet[Engine] = weakref.WeakSet()
"""To be closed at the end: threads that outlive Python abort the process."""


def allreduce(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    codec: str | Codec = "none",
    strategy: str = "ps",
    name: str | None = None,
    op: str = "mean",
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Replaces a tensor by its mean over all ranks, in place, the same bits everywhere.

    Call it on all ranks in the same order, as any collective of torch.distributed.

    Args:
        tensor: float32, bfloat16 or float16, on CPU or CUDA; or a list of them, of one dtype,
            which travel together. With codec `none` and strategy `allreduce` any dtype.
        codec: An expression such as `onebit` or `topk(ratio=0.01)`, or a codec.
        strategy: `ps`, `ring`, `hierarchical` or `allreduce`.
        name: Keys the codec's state, and so its error feedback: give each tensor its own and use
            it in every step. Without a name there is no error feedback and no momentum.
        op: `mean` or `sum`.
        async_op: Return a torch future at once; its value is the tensor.
        group: A process group of torch.distributed; all ranks if None.

    Returns:
        The tensor (or list), or a future of it.

    Raises:
        AgreementError: Ranks were given different things.
        PeerError: A rank is gone or late.

    Example:
        >>> import torch, torch.distributed as dist, hipress
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> gradient = torch.tensor([1.0, -2.0, 3.0])
        >>> hipress.allreduce(gradient, codec="none")
        tensor([ 1., -2.,  3.])
        >>> dist.destroy_process_group()
    """
    if op not in ("mean", "sum"):
        raise UsageError(f"op {op!r} is neither 'mean' nor 'sum'; choose one.")
    if not isinstance(codec, str | Codec):
        raise UsageError(f"codec is {codec!r}; give an expression such as 'onebit', or a codec.")
    if name is not None and not isinstance(name, str):
        raise UsageError(f"name is {name!r}; give one text, also for a list of tensors.")
    if not isinstance(tensor, torch.Tensor | list | tuple):
        raise UsageError(
            f"allreduce was given a {type(tensor).__name__}; it takes a torch.Tensor or a list of "
            "them (leave out parameters without a gradient)."
        )
    values = [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"allreduce was given a {type(value).__name__}; it takes torch.Tensors."
            )
    if not values:
        raise UsageError("allreduce was given an empty list; give at least one tensor.")
    engine = engine_of(group, values[0].device)
    handle = engine.allreduce(values, codec=codec, strategy=strategy, name=name, total=op == "sum")
    result = tensor if isinstance(tensor, torch.Tensor) else values
    if async_op:
        return handle.future(result)
    handle.wait()
    return result


def engine_of(
    group: ProcessGroup | None,
    device: torch.device,
    options: Options | None = None,
    seed: int = 0,
) -> Engine:
    """The engine of a process group for a kind of device; made at the first call, on all ranks.

    Args:
        group: Of torch.distributed; all ranks if None.
        device: Of the tensors to come.
        options: For an engine that is made now, and then apart from the others.
        seed: Of its codecs' random numbers.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() "
            "first, in a script that torchrun or hipress lab run starts."
        )
    chosen: Any = group or dist.group.WORLD
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if chosen == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this rank is not in the group that allreduce was given; leave it out.")
    with _lock:
        for old, (alive, engine) in list(_engines.items()):
            if alive() is None:  # destroyed
                engine.close()
                del _engines[old]
        key = (id(chosen), device)
        if options is None and key in _engines:
            return _engines[key][1]
        engine = _make(chosen, device, options, seed)
        if options is None:
            _engines[key] = (weakref.ref(chosen), engine)
        _all.add(engine)
        return engine


@atexit.register
def _close_all() -> None:
    for engine in list(_all):
        engine.close()


def _make(group: ProcessGroup, device: torch.device, options: Options | None, seed: int) -> Engine:
    import torch.distributed as dist

    ranks = tuple(dist.get_process_group_ranks(group))
    _count[ranks] = _count.get(ranks, 0) + 1
    timeout_s = settings.timeout_s()
    backend = _backend(group, device)
    # The one name of torch's that is not public: nothing public gives the store of a group.
    # A clone, because the store itself holds the server on rank 0.
    found: Any = dist.distributed_c10d._get_default_store()
    whole = found.clone()
    members = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    prefix = f"hipress/{members}/{_count[ranks]}"
    store = dist.distributed_c10d.PrefixStore(prefix, whole)
    timeout = timedelta(seconds=timeout_s)
    # Before anything that waits for all ranks without naming the one that is missing.
    joining = dist.distributed_c10d.PrefixStore("join", store)
    Agreement(joining, dist.get_rank(group), len(ranks), timeout_s).agree(
        "the first exchange", {"version of hipress": __version__, "backend": backend}
    )
    own: Any
    made: Sockets = {}
    if backend == "gloo":
        # Not by new_group, whose names for groups differ on ranks that are in different groups.
        joint = dist.distributed_c10d.PrefixStore("gloo", store)
        before = open_sockets()
        own = dist.ProcessGroupGloo(joint, dist.get_rank(group), len(ranks), timeout)
        made = {fd: inode for fd, inode in open_sockets().items() if before.get(fd) != inode}
    else:
        own = dist.new_group(
            list(ranks),
            backend=backend,
            timeout=timeout,
            use_local_synchronization=True,
            group_desc="hipress",
        )
    return Engine(
        GroupTransport(own, backend, made),
        store,
        device=device,
        options=options,
        timeout_s=timeout_s,
        seed=seed,
    )


def _backend(group: ProcessGroup, device: torch.device) -> str:
    """The backend that serves a kind of device in a group: gloo for CPU tensors always."""
    import torch.distributed as dist

    if device.type == "cpu":
        return "gloo"
    pairs = dict(
        pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair
    )
    return pairs.get(device.type, "gloo")
