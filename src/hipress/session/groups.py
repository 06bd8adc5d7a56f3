"""Process groups and their engines: `hipress.init`, `hipress.allreduce`.

Each process group gets groups of our own over the same ranks, one for each kind of device, when it
is first used, so that our messages never meet those of others.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from hipress import settings
from hipress.casync.engine.engine import Engine, Options
from hipress.casync.engine.transport import GroupTransport, Sockets, connections, opened_sockets
from hipress.casync.ranks.agreement import Agreement
from hipress.casync.ranks.lost_store import first_line, in_the_store, lost_store
from hipress.codecs.base import Codec
from hipress.environment import LOOPBACK, RankEnvironment, bind_loopback, read_environment
from hipress.errors import PeerError, UsageError, public
from hipress.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("hipress")

LAST_TENSORS_S = 0.1
"""How long a process that ends waits for threads of torch that were in a collective."""
CONNECT_S = 60.0
"""How long ranks that have met may take to connect with each other."""
LOOK_S = 1.0
"""How often a rank that connects asks whether another could not."""
LOST_S = 5.0
"""How long the others are waited for after that, to name those that are gone."""
CONNECT = "connect with the other ranks"
UNCONNECTED = "unconnected"
"""Key in the store: which rank could not connect, and why."""

_engines: dict[tuple[int, torch.device], Engine] = {}
"""Engines by the id of the group and the device, until the group is gone. Groups are not kept
alive: the first of them owns the store, which a program that starts over must be free to open
again."""
_lock = threading.Lock()
_all: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines to close at exit: threads that outlive the interpreter abort the process."""


@public
def allreduce(
    tensor: Any,
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
        tensor: A torch tensor on CPU or CUDA, or a NumPy array, of float32, bfloat16 or float16; or
            a list of them, of one dtype, which travel together. With codec `none` and strategy
            `allreduce`, tensors of any dtype are taken.
        codec: An expression such as `onebit` or `topk(ratio=0.01)`, or a codec.
        strategy: `ps`, `ring`, `hierarchical` or `allreduce`.
        name: Keys the codec's state, and so its error feedback: give each tensor a name of its own
            and use it in every step. Without a name there is no error feedback and no momentum.
        op: `mean` or `sum`.
        async_op: Returns a torch future at once; its value is what was given.
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
        raise UsageError(f"op is {op!r}; choose 'mean' or 'sum'.")
    if not isinstance(codec, str | Codec):
        raise UsageError(f"codec is {codec!r}; give an expression such as 'onebit', or a codec.")
    if name is not None and not isinstance(name, str):
        raise UsageError(f"name is {name!r}; give one text, also for a list of tensors.")
    given = list(tensor) if isinstance(tensor, list | tuple) else [tensor]
    if not given:
        raise UsageError("allreduce was given an empty list; give at least one tensor.")
    values = [as_tensor(value, name or "the tensor") for value in given]
    engine = engine_of(group, values[0].device)
    handle = engine.allreduce(values, codec=codec, strategy=strategy, name=name, total=op == "sum")
    result = given if isinstance(tensor, list | tuple) else tensor
    if async_op:
        return handle.future(result)
    handle.wait()
    return result


@public
def init(backend: str | None = None) -> None:
    """Makes the process group of torch.distributed, unless there is one.

    It reads rank, number of ranks and the address of rank 0 from the environment that torchrun,
    `hipress run`, `hipress lab run`, srun or mpirun have set; without any of them this process is
    the only rank.

    Args:
        backend: Backend of torch.distributed; if None, NCCL for CUDA tensors where there is a GPU
            for this rank, and gloo for the rest.

    Raises:
        UsageError: Some variables of a launcher are set and others are missing.

    Example:
        >>> import hipress
        >>> hipress.init()
        >>> torch.distributed.get_world_size()
        1
        >>> torch.distributed.destroy_process_group()
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    found = read_environment()
    if backend is None:
        has_gpu = torch.cuda.is_available() and found.local_rank < torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if has_gpu and dist.is_nccl_available() else "gloo"
    given_s = settings.timeout_s()
    make_group(backend, None if given_s is None else timedelta(seconds=given_s))


def has_other_ranks() -> bool:
    """Returns whether there are other ranks; joins them if a launcher has started them."""
    import torch.distributed as dist

    if not dist.is_available():
        return False
    if not dist.is_initialized():
        if read_environment().num_ranks == 1:
            return False
        init()
    return dist.get_world_size() > 1


def meet(what: str, problem: str | None = None) -> None:
    """Waits for all ranks, for as long as HIPRESS_TIMEOUT says; collective.

    torch's own collectives do not know of HIPRESS_TIMEOUT, and name no rank that is missing.

    Args:
        what: Names the call in errors.
        problem: Why this rank cannot go on.

    Raises:
        UsageError: A rank cannot go on.
        PeerError: A rank did not come in time.
    """
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    ranks, rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
    timeout_s = _timeout_s(group)
    with in_the_store(rank):
        store = _store(ranks, rank, timeout_s)
    told = Agreement(store, rank, len(ranks), timeout_s).agree(what, {}, share=problem)
    for other, one in enumerate(told):
        if one is not None:
            raise UsageError(one if problem is not None else f"rank {other}: {one}")


def make_group(backend: str, timeout: timedelta | None = None) -> None:
    """Makes torch's process group of all ranks that a launcher has started.

    Args:
        backend: Backend of torch.distributed.
        timeout: Timeout of the group; torch's default if None.
    """
    import torch.distributed as dist

    found = read_environment()
    store = _own_store() if found.launcher == "none" else loopback_store(found, timeout)
    if store is None and found.launcher == "torchrun":
        # torchrun may serve the store itself, which only torch's own reading knows.
        dist.init_process_group(backend, timeout=timeout)
        return
    where: dict[str, Any] = {"store": store}
    if store is None:
        where = {"init_method": f"tcp://{found.master_addr}:{found.master_port}"}
    dist.init_process_group(
        backend, rank=found.rank, world_size=found.num_ranks, timeout=timeout, **where
    )


def _own_store() -> Any:
    """Returns a store for a process that is the only rank."""
    from torch._C._distributed_c10d import HashStore

    return HashStore()


def loopback_store(found: RankEnvironment, timeout: timedelta | None = None) -> Any:
    """Returns the store of ranks that meet at 127.0.0.1, or None where torch makes the store.

    torch would bind it to every network card. Under torchrun it is torchrun that serves it.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.constants import default_pg_timeout

    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if found.master_addr != LOOPBACK or is_served:
        return None
    is_server = found.rank == 0
    try:
        listener = bind_loopback(found.master_port) if is_server else None
    except OSError as error:
        raise UsageError(
            f"MASTER_PORT {found.master_port} of {LOOPBACK} cannot be used ({error.strerror}); "
            "choose one that no other program listens on."
        ) from error
    return TCPStore(
        LOOPBACK,
        found.master_port,
        found.num_ranks,
        is_server,
        default_pg_timeout if timeout is None else timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def as_tensor(array: Any, name: str) -> torch.Tensor:
    """Returns a torch tensor that shares the memory of an array.

    Args:
        array: A torch tensor, a NumPy array, or anything with `__dlpack__`.
        name: For errors.

    Raises:
        UsageError: The array shares no memory with torch, or must not be written.
    """
    if isinstance(array, torch.Tensor):
        return array
    kind = type(array).__name__
    if type(array).__module__ == "numpy" and kind != "ndarray":
        raise UsageError(f"{name} is a NumPy scalar ({kind}); give an array with one element.")
    flags = getattr(array, "flags", None)
    if kind == "ndarray" and flags is not None and not flags.writeable:
        raise UsageError(f"{name} is a read-only NumPy array; give a copy, which can be written.")
    try:
        return (
            torch.from_numpy(array) if kind == "ndarray" else torch.utils.dlpack.from_dlpack(array)
        )
    except (TypeError, ValueError, AttributeError, RuntimeError, BufferError) as error:
        raise UsageError(
            f"{name} is a {kind} that torch cannot share memory with ({error}); give a torch "
            "tensor, a NumPy array, or an array with __dlpack__ (leave out parameters without a "
            "gradient)."
        ) from error


def engine_of(
    group: ProcessGroup | None,
    device: torch.device,
    options: Options | None = None,
    seed: int = 0,
) -> Engine:
    """Returns the engine of a process group for a kind of device; the first call is collective.

    Args:
        group: Process group of torch.distributed; all ranks if None.
        device: Device of the tensors.
        options: If given, a new engine with these options is made, which others do not share.
        seed: Seed of its codecs' random numbers.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised; call hipress.init() first, in a script that "
            "torchrun, hipress run or hipress lab run starts."
        )
    chosen: Any = group or dist.group.WORLD
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if chosen == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this rank is not in the group that allreduce was given; leave it out.")
    with _lock:
        key = (id(chosen), device)
        if options is None and key in _engines:
            return _engines[key]
        engine = _make(chosen, device, options, seed)
        if options is None:
            _engines[key] = engine
            weakref.finalize(chosen, _close, key)
        _all.add(engine)
        return engine


def _close(key: tuple[int, torch.device]) -> None:
    """Ends an engine whose process group is gone."""
    engine = _engines.pop(key, None)
    if engine is not None:
        engine.close()


@atexit.register
def _close_all() -> None:
    for engine in list(_all):
        try:
            engine.close()
        except Exception:  # the others must be closed too
            _log.exception("an engine could not be closed")
    if _all:
        # A thread of torch that has just finished a collective still frees its tensors, for which
        # it needs Python's lock; if Python shuts down first, the process is aborted.
        time.sleep(LAST_TENSORS_S)


def _make(group: ProcessGroup, device: torch.device, options: Options | None, seed: int) -> Engine:
    import torch.distributed as dist

    ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank(group)
    timeout_s = _timeout_s(group)
    backend = _backend(group, device)
    with in_the_store(rank):
        store = _store(ranks, rank, timeout_s)
    # Before anything that waits for all ranks without naming the one that is missing.
    joining = dist.distributed_c10d.PrefixStore("join", store)
    Agreement(joining, rank, len(ranks), timeout_s).agree(
        "the first exchange", {"version of hipress": __version__, "backend": backend}
    )
    own: Any
    timeout = timedelta(seconds=timeout_s)
    made: Sockets = {}
    try:
        if backend == "gloo":
            # Not by new_group, whose names for groups differ on ranks that are in different groups.
            # A connection of its own, because gloo waits in the store.
            joint = dist.distributed_c10d.PrefixStore("gloo", store.clone())
            with opened_sockets() as made:
                own = _connected(
                    lambda: dist.ProcessGroupGloo(joint, rank, len(ranks), timeout),
                    store,
                    rank,
                    len(ranks),
                    min(timeout_s, CONNECT_S),
                )
        else:
            own = dist.new_group(
                list(ranks),
                backend=backend,
                timeout=timeout,
                use_local_synchronization=True,
                group_desc="hipress",
            )
    except dist.DistNetworkError as error:
        raise lost_store(rank, error) from error
    except (TimeoutError, RuntimeError) as error:
        with suppress(RuntimeError):
            if not store.check([UNCONNECTED]):
                store.set(UNCONNECTED, f"rank {rank}: {first_line(error)}")
        if isinstance(error, RuntimeError) and not _is_unconnected(error):
            raise
        # Those that are still there name the others.
        lost = Agreement(dist.distributed_c10d.PrefixStore("lost", store), rank, len(ranks), LOST_S)
        lost.agree(CONNECT, {})
        raise PeerError(
            f"the ranks could not connect ({first_line(error)}), though all of them are alive; "
            "look at the network between their hosts."
        ) from error
    return Engine(
        GroupTransport(own, backend, made),
        store,
        device=device,
        options=options,
        timeout_s=timeout_s,
        seed=seed,
    )


def _connected(
    make: Callable[[], Any], store: Any, rank: int, num_ranks: int, limit_s: float
) -> Any:
    """Returns what `make` makes, which connects with the other ranks, once all of them have it.

    gloo waits for a rank that has died meanwhile for five times its timeout, and cannot be told to
    stop. So it works in a thread, which is left behind once another rank has failed to connect or
    the time is over.

    Raises:
        TimeoutError: It is not done in time, or another rank has failed.
        PeerError: This rank is connected and another did not say the same.
    """
    import torch.distributed as dist

    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # for the caller
            made.set_exception(error)

    def check() -> None:
        if store.check([UNCONNECTED]):
            raise TimeoutError(store.get(UNCONNECTED).decode())

    threading.Thread(target=run, name="hipress-connect", daemon=True).start()
    deadline = time.monotonic() + limit_s
    while True:
        left_s = deadline - time.monotonic()
        wait([made], max(min(left_s, LOOK_S), 0.0))
        if made.done():
            break
        if left_s <= 0:
            raise TimeoutError(f"not within {limit_s:g} s")
        check()
    found = made.result()
    # Longer than a rank tries to connect, so that those that cannot are heard.
    connected_store = dist.distributed_c10d.PrefixStore("connected", store)
    Agreement(connected_store, rank, num_ranks, limit_s + LOST_S, check).agree(CONNECT, {})
    return found


def _is_unconnected(error: RuntimeError) -> bool:
    """Returns whether gloo has failed to connect, or to find the address of another rank."""
    import torch.distributed as dist

    return isinstance(error, dist.DistStoreError) or "connectFullMesh" in str(error)


def _store(ranks: tuple[int, ...], rank: int, timeout_s: float) -> Any:
    """Returns a connection to the store, with a prefix of its own for each engine of some ranks."""
    import torch.distributed as dist

    found: Any = dist.distributed_c10d._get_default_store()  # nothing public gives it
    members = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    # Counted in the store, for each rank: processes that are started anew and others that stay
    # begin again together, with a new store. It fails at once if the holder of the store is gone,
    # to which a new connection would be tried for minutes.
    number = found.add(f"hipress/{members}/made/{rank}", 1)
    # A clone, because the store itself holds the server on rank 0.
    with opened_sockets() as made:
        whole = found.clone()
    connections(made, timeout_s=timeout_s)
    # gloo waits in the store for the addresses of ranks that were there a moment ago.
    whole.set_timeout(timedelta(seconds=min(timeout_s, CONNECT_S)))
    return dist.distributed_c10d.PrefixStore(f"hipress/{members}/{number}", whole)


def _timeout_s(group: ProcessGroup) -> float:
    """Returns how long a rank may be late: HIPRESS_TIMEOUT, or as long as torch waits for it."""
    from torch.distributed.distributed_c10d import default_pg_timeout

    given_s = settings.timeout_s()
    if given_s is not None:
        return given_s
    # Nothing public gives the timeout of a group. Backends of others may not tell theirs.
    found = [default_pg_timeout]
    with suppress(AttributeError, RuntimeError):
        found = [group._get_backend(kind).options._timeout for kind in group._device_types]
    return max(timeout.total_seconds() for timeout in found)


def _backend(group: ProcessGroup, device: torch.device) -> str:
    """The backend that serves a kind of device in a group: gloo for CPU tensors always."""
    import torch.distributed as dist

    if device.type == "cpu":
        return "gloo"
    pairs = dict(
        pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair
    )
    return pairs.get(device.type, "gloo")
