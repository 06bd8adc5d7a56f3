"""What the ranks of a training job tell each other besides gradients."""

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
from torch.distributed.distributed_c10d import PrefixStore

from hipress import settings
from hipress.casync.ranks.agreement import Agreement
from hipress.errors import MissingDependencyError, PeerError, UsageError
from hipress.session.replicas import digests

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

BEAT_S = 1.0
"""How often rank 0 shows that it is still at work."""
LOOK_S = 5.0
"""How often the others look."""
_DONE = b"done"


class JointError(UsageError):
    """A refusal that all ranks raise alike."""


class Ranks:
    """All ranks of a job.

    Args:
        store: Shared by all of them.
        rank: This one.
        num_ranks: How many there are.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store = PrefixStore("hipress/train", store)
        self._timeout_s = settings.timeout_s()
        self._agreement = Agreement(self._store, rank, num_ranks, self._timeout_s)
        self._num_waits = 0
        self._device = torch.device("cpu")

    @classmethod
    def of_group(cls) -> Ranks:
        """Those of the default process group."""
        store = dist.distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(), dist.get_world_size())

    def compute_on(self, device: torch.device) -> None:
        """Say where this rank computes, once there is a process group."""
        # What NCCL carries must be on the GPU; gloo takes a CPU's without a copy.
        self._device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    # --- through the store ------------------------------------------------------------------------

    def jointly(self, what: str, work: Callable[[], T]) -> T:
        """What this rank's work gives; where any rank's refuses, all raise.

        Args:
            what: Names the occasion in errors.
            work: Of this rank alone: it must not wait for others.

        Raises:
            JointError: A rank refuses; where not all do alike, it is named.
        """
        refusal, found = None, []
        try:
            found.append(work())
        except (UsageError, MissingDependencyError) as error:
            refusal = str(error)
        told = self._agreement.agree(what, {}, share=refusal)
        for rank, text in enumerate(told):
            if text is not None:
                raise JointError(text if len(set(told)) == 1 else f"rank {rank}: {text}")
        return found[0]

    def compare(self, what: str, facts: dict[str, Any]) -> None:
        """Raise an AgreementError on all ranks where one has other facts than rank 0."""
        self._agreement.agree(what, facts)

    def by_first(self, work: Callable[[], None]) -> None:
        """Let rank 0 work alone, however long it takes; the others wait as long as it lives.

        Raises:
            JointError: It failed.
            PeerError: Rank 0 is gone.
        """
        self._num_waits += 1
        done, beat = f"done/{self._num_waits}", f"beat/{self._num_waits}"
        if self.rank == 0:
            # Whoever is here has read what was told the last time.
            for key in ("done", "beat"):
                self._store.delete_key(f"{key}/{self._num_waits - 1}")
            told = _DONE
            with self._beating(beat):
                try:
                    work()
                except UsageError as error:
                    told = str(error).encode()
            self._store.set(done, told)  # type: ignore[arg-type]
        else:
            self._wait_for_first(done, beat)
            told = self._store.get(done)
        if told != _DONE:
            raise JointError(told.decode())

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
                    f"rank 0 wrote nothing for {self._timeout_s:g} s and does not say that it "
                    "lives: gone or stuck; look at its output, or raise HIPRESS_TIMEOUT.",
                    ranks=(0,),
                )

    # --- through the process group ----------------------------------------------------------------

    def total(self, values: Tensor) -> list[float]:
        """The sum over all ranks, each."""
        values = values.detach().to(self._device, torch.float64)
        dist.all_reduce(values)
        found: list[float] = values.tolist()
        return found

    def gather(self, values: Tensor) -> list[list[int]]:
        """Whole numbers of all ranks."""
        values = values.to(self._device)
        found = [torch.empty_like(values) for _ in range(self.num_ranks)]
        dist.all_gather(found, values)
        return [one.tolist() for one in found]

    def gather_digests(self, model: nn.Module) -> list[dict[str, str]]:
        """By name of parameter, for each rank a number that stands for its bits."""
        mine = digests(model.named_parameters())
        values = torch.tensor([int(text, 16) - 2**63 for text in mine.values()])
        return [dict(zip(mine, map(str, one), strict=True)) for one in self.gather(values)]

    def have_same(self, model: nn.Module) -> bool:
        """Whether all hold the same parameters."""
        found = self.gather_digests(model)
        return all(one == found[0] for one in found)
