"""The ranks of a training job: their devices, and what they exchange besides gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, default_pg_timeout

from hipress import settings
from hipress.casync.ranks.agreement import Agreement
from hipress.casync.ranks.lost_store import in_the_store
from hipress.errors import MissingDependencyError, PeerError, UsageError
from hipress.session.replicas import digests

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

BEAT_S = 1.0
LOOK_S = 5.0
_DONE = b"done"


class JointError(UsageError):
    """A UsageError that all ranks raise together."""


def choose_device(
    device: str, backend: str, *, local_rank: int, num_local: int
) -> tuple[torch.device, str]:
    """Return the rank's device and the backend of torch.distributed.

    On auto the device is a GPU if there is one. NCCL needs a GPU for each rank; if ranks share one,
    auto selects gloo.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and num_gpus == 0:
        raise UsageError("--device cuda and torch sees no GPU here; give --device cpu.")
    on_gpu = device != "cpu" and num_gpus > 0
    shares = num_local > num_gpus
    if backend == "nccl" and (not on_gpu or shares):
        why = f"{num_local} ranks share {num_gpus} GPU(s)" if on_gpu else "the device is a CPU"
        raise UsageError(f"--backend nccl needs a GPU for each rank and {why}; give gloo.")
    if not on_gpu:
        return torch.device("cpu"), "gloo"
    where = torch.device("cuda", local_rank % num_gpus)
    return where, backend if backend != "auto" else "gloo" if shares else "nccl"


class Ranks:
    """All ranks of a job, which share a store."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store = PrefixStore("hipress/train", store)
        self._timeout_s = settings.timeout_s() or default_pg_timeout.total_seconds()
        self._agreement = Agreement(self._store, rank, num_ranks, self._timeout_s)
        self._num_waits = 0
        self._device = torch.device("cpu")

    @classmethod
    def of_group(cls) -> Ranks:
        store = dist.distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(), dist.get_world_size())

    def compute_on(self, device: torch.device) -> None:
        """Set the device of this rank, once there is a process group."""
        # NCCL needs tensors on the GPU; gloo takes those of a CPU without a copy.
        self._device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    # --- through the store ------------------------------------------------------------------------

    def jointly(self, what: str, work: Callable[[], T]) -> T:
        """Return the result of this rank's work, which must not wait for other ranks.

        If the work of any rank fails, all raise a JointError; it names the rank unless all failed
        alike.
        """
        refusal, found = None, []
        try:
            found.append(work())
        except (UsageError, MissingDependencyError) as error:
            refusal = str(error)
        refusals = self._agreement.agree(what, {}, share=refusal)
        for rank, text in enumerate(refusals):
            if text is not None:
                raise JointError(text if len(set(refusals)) == 1 else f"rank {rank}: {text}")
        return found[0]

    def compare(self, what: str, facts: dict[str, Any]) -> None:
        """Raise an AgreementError on all ranks if one has other facts than rank 0."""
        self._agreement.agree(what, facts)

    def by_first(self, work: Callable[[], None]) -> None:
        """Let rank 0 work alone; the others wait as long as it sends heartbeats.

        Raise a JointError if the work failed, and a PeerError if rank 0 is gone.
        """
        self._num_waits += 1
        done, beat = f"done/{self._num_waits}", f"beat/{self._num_waits}"
        if self.rank == 0:
            # A rank that is here has read the keys of the last call.
            with in_the_store(self.rank):
                for key in ("done", "beat"):
                    self._store.delete_key(f"{key}/{self._num_waits - 1}")
            outcome = _DONE
            with self._beating(beat):
                try:
                    work()
                except UsageError as error:
                    outcome = str(error).encode()
            with in_the_store(self.rank):
                self._store.set(done, outcome)  # type: ignore[arg-type]
        else:
            with in_the_store(self.rank):
                self._wait_for_first(done, beat)
                outcome = self._store.get(done)
        if outcome != _DONE:
            raise JointError(outcome.decode())

    @contextmanager
    def _beating(self, key: str) -> Iterator[None]:
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_S):
                self._store.add(key, 1)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _wait_for_first(self, done: str, beat: str) -> None:
        count, since_s = -1, time.monotonic()
        while True:
            try:
                self._store.wait([done], timedelta(seconds=min(LOOK_S, self._timeout_s)))
                return
            except dist.DistStoreError:
                seen = self._store.add(beat, 0)
            if seen != count:
                count, since_s = seen, time.monotonic()
            elif time.monotonic() - since_s > self._timeout_s:
                raise PeerError(
                    f"rank 0 has sent no heartbeat for {self._timeout_s:g} s and is gone or stuck; "
                    "look at its output, or raise HIPRESS_TIMEOUT.",
                    ranks=(0,),
                )

    # --- through the process group ----------------------------------------------------------------

    def total(self, values: Tensor) -> list[float]:
        """Return the sum of each value over all ranks."""
        values = values.detach().to(self._device, torch.float64)
        dist.all_reduce(values)
        found: list[float] = values.tolist()
        return found

    def gather(self, values: Tensor) -> list[list[int]]:
        """Return the integers of all ranks."""
        values = values.to(self._device)
        found = [torch.empty_like(values) for _ in range(self.num_ranks)]
        dist.all_gather(found, values)
        return [one.tolist() for one in found]

    def gather_digests(self, model: nn.Module) -> list[dict[str, str]]:
        """Return a digest of each parameter by name, for each rank."""
        mine = digests(model.named_parameters())
        values = torch.tensor([int(text, 16) - 2**63 for text in mine.values()])
        return [dict(zip(mine, map(str, one), strict=True)) for one in self.gather(values)]

    def have_same(self, model: nn.Module) -> bool:
        found = self.gather_digests(model)
        return all(one == found[0] for one in found)
