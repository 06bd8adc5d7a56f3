"""The network of a lab, made by netlink: a bridge, one link per host, and the shaping of each.

    host i: eth0 --- port<i>: bridge       both ends send through a token bucket at the link's rate

eth0 also delays and loses, so a packet from host to host meets that once. The two ends are a veth
pair; where delay or loss is wanted and the kernel has no netem, they are taps with a process in
between (`Relay`). Everything is inside namespaces without a name: the kernel takes it apart when
the last process of the lab is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hipress.lab.cluster import receive, send
from hipress.lab.links import Counters, Link, burst_bytes, queue_bytes
from hipress.lab.namespaces import close_all_but, network_namespace_of
from hipress.processes.family import die_with_parent

_PREFIX_BITS = 24
_PORT_DISABLED, _PORT_FORWARDING = 0, 3
_AF_BRIDGE = 7
_RTM_SETLINK, _REQUEST_AND_ACK = 19, 0x5
_IFLA_PROTINFO, _IFLA_BRPORT_STATE, _NLA_NESTED = 12, 1, 0x8000
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _TSO4, _TSO6, _TSO_ECN = 1, 2, 4, 8
_HEADER_BYTES = 10
_MAX_PACKET_BYTES = _HEADER_BYTES + 14 + 65536
_TUN = "/dev/net/tun"
_IDLE_S = 60.0


def address(host: int) -> str:
    """Return the address of a host; host 0 has 10.77.0.1."""
    return f"10.77.0.{host + 1}"


class Network:
    """The bridge and the links; lives in the process that is in the bridge's namespace.

    Args:
        pids: One process in the network namespace of each host.
        links: The link of each host.
    """

    def __init__(self, pids: Sequence[int], links: Sequence[Link]) -> None:
        # Only the process that holds the network needs this package.
        from pyroute2 import IPRoute

        self._switch: Any = IPRoute()
        self._links = list(links)
        self._hosts: list[Any] = []
        self._host_indices: list[int] = []
        self._ports: list[int] = []
        _disable_ipv6()
        self._bridge = self._add_bridge()
        self._has_netem = _has_netem(self._switch, self._bridge)
        self._relays: dict[int, Relay] = {}
        for host, pid in enumerate(pids):
            self._ports.append(self._add_port(host, pid))
            with network_namespace_of(pid):
                self._hosts.append(IPRoute())
                _disable_ipv6()
            self._host_indices.append(self._set_up_host(host))
            self._shape(host)

    def set_link(self, host: int, link: Link) -> None:
        """Change a link while it is in use; packets that wait at its ends may be lost."""
        if (link.delay_us or link.loss) and not self._has_netem and host not in self._relays:
            raise OSError(
                "this kernel has no netem, so delay and loss cannot be added to a link that was "
                "made without; make the lab with a delay or a loss, which can then be changed"
            )
        self._links[host] = link
        self._shape(host)

    def cut(self, host: int) -> None:
        """Drop every packet from and to a host, in silence, as on a cable that is pulled."""
        # Not "link down": the host would see its carrier go and the kernel would answer for it.
        _set_port_state(self._ports[host], _PORT_DISABLED)

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        _set_port_state(self._ports[host], _PORT_FORWARDING)

    def counters(self, host: int) -> Counters:
        """Return what went through a host's eth0."""
        (link,) = self._hosts[host].get_links(self._host_indices[host])
        stats = link.get_attr("IFLA_STATS64")
        return Counters(
            sent_bytes=stats["tx_bytes"],
            received_bytes=stats["rx_bytes"],
            sent_packets=stats["tx_packets"],
            received_packets=stats["rx_packets"],
        )

    def close(self) -> None:
        """End the processes that delay and lose; the kernel does the rest."""
        for relay in self._relays.values():
            relay.close()

    def _add_bridge(self) -> int:
        self._switch.link("add", ifname="switch", kind="bridge", br_stp_state=0, br_forward_delay=0)
        index = _index(self._switch, "switch")
        self._switch.link("set", index=index, state="up")
        return index

    def _add_port(self, host: int, pid: int) -> int:
        name = f"port{host}"
        if (self._links[host].delay_us or self._links[host].loss) and not self._has_netem:
            self._relays[host] = Relay(pid, name)
        else:
            peer = {"ifname": "eth0", "net_ns_pid": pid}
            self._switch.link("add", ifname=name, kind="veth", peer=peer)
        index = _index(self._switch, name)
        self._switch.link("set", index=index, master=self._bridge, state="up")
        return index

    def _set_up_host(self, host: int) -> int:
        ip = self._hosts[host]
        index = _index(ip, "eth0")
        ip.link("set", index=_index(ip, "lo"), state="up")
        ip.addr("add", index=index, address=address(host), prefixlen=_PREFIX_BITS)
        ip.link("set", index=index, state="up")
        return index

    def _shape(self, host: int) -> None:
        link = self._links[host]
        rate_alone = Link(rate_bits=link.rate_bits)
        if host in self._relays:
            self._relays[host].set(link)
            link = rate_alone
        _shape(self._hosts[host], self._host_indices[host], link)
        _shape(self._switch, self._ports[host], rate_alone)


def _shape(ip: Any, index: int, link: Link) -> None:
    """Give one end of a link its token bucket, with delay and loss in front of it."""
    present = _qdiscs(ip, index)
    uses_netem = bool(link.delay_us or link.loss)
    if present and (uses_netem or link.rate_bits is None or "netem" in present):
        ip.tc("del", index=index, root=True)
    parent = {}
    if link.rate_bits is not None:
        # "replace" changes a bucket that is there and keeps what waits in it.
        ip.tc(
            "replace",
            "tbf",
            index,
            handle="1:",
            rate=link.rate_bits // 8,
            burst=burst_bytes(link.rate_bits),
            limit=queue_bytes(link.rate_bits),
        )
        parent = {"parent": "1:1"}
    if uses_netem:
        ip.tc(
            "add",
            "netem",
            index,
            handle="2:",
            delay=link.delay_us,
            loss=link.loss * 100,
            limit=_netem_packets(link),
            **parent,
        )


def _qdiscs(ip: Any, index: int) -> set[str]:
    """Return the kinds of shaping at an end that were put there by hand."""
    found = (qdisc for qdisc in ip.get_qdiscs(index=index) if qdisc["handle"])
    return {qdisc.get_attr("TCA_KIND") for qdisc in found} & {"tbf", "netem"}


def _has_netem(ip: Any, index: int) -> bool:
    """Try it: a kernel that cannot load the module answers as one that never had it."""
    try:
        ip.tc("add", "netem", index, handle="2:", delay=0)
    except OSError:
        return False
    except Exception as error:
        # pyroute2's NetlinkError is no OSError but has a code like one.
        if getattr(error, "code", None) != errno.ENOENT:
            raise
        return False
    ip.tc("del", index=index, root=True)
    return True


def _netem_packets(link: Link) -> int:
    """Packets that netem may hold, as if all were of 1500 bytes: the delay and the queue."""
    rate_bits = link.rate_bits or 40 * 10**9
    in_flight = rate_bits // 8 * link.delay_us // 10**6
    return max(1000, (in_flight + queue_bytes(rate_bits)) // 1500)


def _set_port_state(port: int, state: int) -> None:
    """Set the state of a port of the bridge."""
    # By hand: pyroute2 takes the word "state" for the link's and sets that down.
    value = struct.pack("=HHB3x", 5, _IFLA_BRPORT_STATE, state)
    nest = struct.pack("=HH", 4 + len(value), _IFLA_PROTINFO | _NLA_NESTED) + value
    body = struct.pack("=BxHiII", _AF_BRIDGE, 0, port, 0, 0) + nest
    head = struct.pack("=IHHII", 16 + len(body), _RTM_SETLINK, _REQUEST_AND_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(5)
        sock.sendto(head + body, (0, 0))
        (code,) = struct.unpack_from("=i", sock.recv(4096), 16)
    if code:
        raise OSError(-code, os.strerror(-code))


def _index(ip: Any, name: str) -> int:
    return int(ip.link_lookup(ifname=name)[0])


def _disable_ipv6() -> None:
    """Switch IPv6 off here: its own packets would blur the counters."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


class Relay:
    """Delay and loss of one host where the kernel has no netem: a process between two taps.

        host i: eth0 (tap) --- this process: waits, loses --- port<i> (tap): bridge

    Packets are taken with their offload header, so a TCP stream passes in segments of up to 64 KB,
    and one process carries 1 gbit both ways with a fraction of a core.

    Args:
        pid: A process in the host's network namespace.
        port: Name of the end at the bridge; the end in the host is eth0.
    """

    def __init__(self, pid: int, port: str) -> None:
        with network_namespace_of(pid):
            host_tap = _open_tap("eth0")
        port_tap = _open_tap(port)
        self._control, theirs = socket.socketpair()
        if os.fork() == 0:
            die_with_parent()
            close_all_but({0, 1, 2, host_tap, port_tap, theirs.fileno()})
            _carry(theirs, host_tap, port_tap)
        for fd in (host_tap, port_tap):
            os.close(fd)
        theirs.close()

    def set(self, link: Link) -> None:
        """Change delay and loss; packets on their way keep the delay they have."""
        send(self._control, {"delay_us": link.delay_us, "loss": link.loss})

    def close(self) -> None:
        """End the process, and with it both taps."""
        self._control.close()


def _open_tap(name: str) -> int:
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    try:
        tap = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(tap, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER_BYTES))
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUMS | _TSO4 | _TSO6 | _TSO_ECN)
    except OSError as error:
        why = f"{_TUN}, which delay and loss need on a kernel without netem"
        raise OSError(error.errno, error.strerror, why) from None
    return tap


def _carry(control: socket.socket, host_tap: int, port_tap: int) -> NoReturn:
    delay_s, loss = 0.0, 0.0
    ends = [control.fileno(), host_tap, port_tap]
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        left = waiting[0][0] - time.monotonic() if waiting else _IDLE_S
        # Not epoll, which counts in whole milliseconds.
        ready, _, _ = select.select(ends, [], [], max(left, 0.0))
        if control.fileno() in ready:
            received = receive(control)
            if received is None:
                os._exit(0)
            delay_s, loss = received[0]["delay_us"] / 1e6, received[0]["loss"]
        if port_tap in ready and (packet := _read(port_tap)):
            _write(host_tap, packet)
        if host_tap in ready and (packet := _read(host_tap)):
            if not loss or random.random() >= loss:
                waiting.append((time.monotonic() + delay_s, packet))
        # In order, whatever the delays: a wire does not let packets overtake.
        while waiting and waiting[0][0] <= time.monotonic():
            _write(port_tap, waiting.popleft()[1])


def _read(tap: int) -> bytes:
    try:
        return os.read(tap, _MAX_PACKET_BYTES)
    except OSError:  # the other end is down for a moment: nothing to carry
        return b""


def _write(tap: int, packet: bytes) -> None:
    try:
        os.write(tap, packet)
    except OSError:  # as above: a packet that cannot be delivered is lost
        pass
