"""Delay and loss where the kernel has no netem: a process that carries packets between two taps.

    host i: eth0 (tap) --- this process: waits, loses --- port<i> (tap): bridge

Packets are taken with their offload header, so a TCP stream passes in pieces of up to 64 KB and
one process carries 1 gbit both ways with a fraction of a core.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import socket
import struct
import time
from collections import deque
from typing import NoReturn

from hipress.lab import wire
from hipress.lab.links import Link
from hipress.lab.system import close_all_but, network_namespace_of
from hipress.processes import die_with_parent

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _TSO4, _TSO6, _TSO_ECN = 1, 2, 4, 8
_HEADER_BYTES = 10
_MOST_BYTES = _HEADER_BYTES + 14 + 65536
_TUN = "/dev/net/tun"
_IDLE_S = 60.0


class Relay:
    """The delay and the loss of one host, done by a process of its own.

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
        wire.send(self._control, {"delay_us": link.delay_us, "loss": link.loss})

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
            received = wire.receive(control)
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
        return os.read(tap, _MOST_BYTES)
    except OSError:  # the other end is down for a moment: nothing to carry
        return b""


def _write(tap: int, packet: bytes) -> None:
    try:
        os.write(tap, packet)
    except OSError:  # as above: a packet that can not be delivered is lost
        pass
