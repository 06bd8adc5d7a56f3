"""The process that holds a lab together: it makes the namespaces, the hosts and the network.

    lab's process --- this one (bridge; its own user namespace unless root)
                        +-- per host: a process that only waits --- the host's init (agent.py)

A host's init has to be born into its PID namespace, so each has a parent that made the namespaces.
Death travels down: this process ends when the lab's process is gone, the kernel then kills the
waiting ones (PDEATHSIG), then the inits, and with each init its whole host.

No thread is ever started here: forks are safe, and PDEATHSIG goes by the thread that forked.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from hipress.lab.agent import Agent
from hipress.lab.cluster import Message, receive, send
from hipress.lab.links import Link
from hipress.lab.namespaces import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUTS,
    close_all_but,
    enter_user_namespace,
    set_up_host,
    unshare,
)
from hipress.processes.family import adopt_orphans, die_with_parent
from hipress.processes.pipes import run_loop

if TYPE_CHECKING:
    from hipress.lab.network import Network

_PARENT_CHECK_S = 0.5
_LAST_WAIT_S = 3


def main() -> NoReturn:
    """Serve the lab's process on the socket whose descriptor is the one argument."""
    parent = os.getppid()
    control = socket.socket(fileno=int(sys.argv[1]))
    received = receive(control)
    if received is None:
        sys.exit(0)
    wanted = received[0]
    network = None
    try:
        if wanted["shaped"]:
            network, agents = _build([Link(**link) for link in wanted["links"]])
        else:
            agents = [_start_loopback_host() for _ in wanted["links"]]
    except Exception as error:  # told to the user by the lab's process, which knows what to advise
        send(control, {"refused": _describe(error)})
        sys.exit(1)
    send(control, {"ready": True}, [agent.fileno() for agent in agents])
    for agent in agents:
        agent.close()  # from here on the lab's process has the only other end
    _serve(control, network, parent)


def _serve(control: socket.socket, network: Network | None, parent: int) -> NoReturn:
    while True:
        # The socket alone does not tell: children that the lab's process forked hold it open too.
        ready, _, _ = select.select([control], [], [], _PARENT_CHECK_S)
        if os.getppid() != parent:
            _wait_for_hosts(network)
        if not ready:
            continue
        received = receive(control)
        if received is None:
            _wait_for_hosts(network)
        assert network is not None, "a lab without shaping sent a message about links"
        try:
            answer = _obey(network, received[0])
        except Exception as error:
            answer = {"refused": _describe(error)}
        send(control, answer)


def _wait_for_hosts(network: Network | None) -> NoReturn:
    """Leave when the last host is gone, so that whoever waits for this process waits for all."""
    signal.alarm(_LAST_WAIT_S)  # ends this process, and the kernel then ends the hosts
    if network is not None:
        network.close()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            sys.exit(0)


def _obey(network: Network, message: Message) -> Message:
    what, host = message["do"], message["host"]
    if what == "link":
        network.set_link(host, Link(**message["link"]))
    elif what == "counters":
        return {"counters": vars(network.counters(host))}
    else:
        assert what in ("cut", "heal"), what
        getattr(network, what)(host)
    return {"done": True}


def _build(links: list[Link]) -> tuple[Network, list[socket.socket]]:
    if os.geteuid() != 0:
        enter_user_namespace()
    unshare(CLONE_NEWNET, "a network namespace")
    # Before the forks: hosts then share its memory instead of each importing it.
    from hipress.lab.network import Network, address

    # torch asks for the names of addresses that its sockets see in their IPv6 form.
    names = [
        f"{form}{address(host)} host{host}"
        for host in range(len(links))
        for form in ("", "::ffff:")
    ]
    hosts_file = "\n".join(["127.0.0.1 localhost", *names, ""])
    pids, agents = [], []
    for host in range(len(links)):
        pid, agent = _start_host(f"host{host}", hosts_file)
        pids.append(pid)
        agents.append(agent)
    try:
        return Network(pids, links), agents
    except OSError:
        raise
    except Exception as error:  # pyroute2's NetlinkError: a number and a text
        raise OSError(0, _describe(error), "its network") from error


def _start_host(name: str, hosts_file: str) -> tuple[int, socket.socket]:
    """Fork the two processes of a host; return the first and the socket to the second."""
    ours, theirs = socket.socketpair()

    def make_namespaces() -> None:
        try:
            unshare(CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWNS, "a host's namespaces")
        except OSError as error:
            send(theirs, {"refused": _describe(error)})
            return
        init = _fork(be_init, theirs)
        theirs.close()
        os.waitpid(init, 0)

    def be_init() -> None:
        set_up_host(name, hosts_file)
        send(theirs, {"ready": True})
        run_loop(Agent(theirs, is_init=True).serve())

    pid = _fork(make_namespaces, theirs)
    theirs.close()
    received = receive(ours)
    if received is None or "refused" in received[0]:
        raise OSError(received[0]["refused"] if received else f"{name}, which ended at its start")
    return pid, ours


def _start_loopback_host() -> socket.socket:
    ours, theirs = socket.socketpair()

    def be_init() -> None:
        adopt_orphans()
        die_with_parent(signal.SIGTERM)  # it has descendants to kill first, where PID 1 has none
        run_loop(Agent(theirs, is_init=False).serve())

    _fork(be_init, theirs)
    theirs.close()
    return ours


def _fork(body: Callable[[], None], sock: socket.socket) -> int:
    """Run a function in a child that dies with this process and keeps one socket of it."""
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            close_all_but({0, 1, 2, sock.fileno()})
            body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never back into the parent's code
    return pid


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} ({error.strerror})"
    detail: Any = error.args[-1] if error.args else ""
    return str(detail) or type(error).__name__


if __name__ == "__main__":
    # Ctrl-C is the lab's to handle, in order; this process follows it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
