"""torchrun for a job on one host, whose store listens on 127.0.0.1 alone.

The rendezvous that torch has for this listens on every network card, and unpickles what it finds in
its store. One host needs no rendezvous: this one only makes the store, a new one for each attempt,
so that ranks that start over find nothing of those before them.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from hipress.environment import LOOPBACK, bind_loopback

NAME = "hipress"
"""What torchrun knows this rendezvous by (`--rdzv-backend`)."""
_TIMEOUT_S = 600
"""Time limit of torchrun's requests to the store, the same as in its static rendezvous."""


class LoopbackRendezvous(RendezvousHandler):
    """The only host of a job."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the store of this process; they would bind one to every network card."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        from torch._C._distributed_c10d import TCPStore

        listener = bind_loopback()
        port = listener.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            1,
            True,
            timedelta(seconds=_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def main() -> None:
    """Run torchrun with this rendezvous among those it knows."""
    rendezvous_handler_registry.register(NAME, LoopbackRendezvous)
    torchrun()
