"""What a link is: rate, delay and loss, from the text a user writes to numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hipress.errors import UsageError
from hipress.units import RATE_UNITS, number_and_unit

_DELAY_UNITS = {"us": 1, "ms": 10**3, "s": 10**6}
_MIN_RATE, _MAX_RATE = 10**4, 32 * 10**9
"""The kernel's token bucket counts bytes per second in 32 bits, which ends at 34 gbit."""
_MAX_DELAY_US = 10 * 10**6


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between a host and the switch."""

    rate_bits: int | None = None
    """Bits per second, each way; None: not shaped."""
    delay_us: int = 0
    """Microseconds from the host to the switch; the way back is not delayed."""
    loss: float = 0.0
    """Part of the packets from the host to the switch that is lost."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What went through a host's eth0 since the lab began, headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    """Packets as the host handed them to the link: one may hold up to 64 KB of a TCP stream."""
    received_packets: int


def parse_link_rate(text: str | None) -> int | None:
    """Return the bits per second to which a link is shaped, such as "1gbit"; None for "none"."""
    if text is None or text == "none":
        return None
    rate = number_and_unit(text, RATE_UNITS)
    if rate is None:
        raise UsageError(
            f"rate {text!r} is not a number and a unit; write 1gbit, 250mbit, 64kbit, or none."
        )
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise UsageError(f"rate {text!r} cannot be shaped; write one from 10kbit to 32gbit.")
    return round(rate)


def parse_delay(text: str | None) -> int:
    """Return the microseconds of a delay such as "5ms"; 0 for "none"."""
    if text is None or text in ("none", "0"):
        return 0
    delay = number_and_unit(text, _DELAY_UNITS)
    if delay is None:
        raise UsageError(
            f"delay {text!r} is not a number and a unit; write 5ms, 0.5ms, 100us, 1s, or none."
        )
    if delay > _MAX_DELAY_US:
        raise UsageError(f"delay {text!r} is too long; write 10s or less.")
    return round(delay)


def parse_loss(text: str | None) -> float:
    """Return the fraction that a loss such as "0.1%" stands for; 0 for "none"."""
    if text is None or text in ("none", "0"):
        return 0.0
    percent = number_and_unit(text, {"%": 1})
    if percent is None:
        raise UsageError(f"loss {text!r} is not a percentage; write 0.1%, 2%, or none.")
    if percent > 100:
        raise UsageError(f"loss {text!r} is too high; write 100% or less.")
    return percent / 100


def parse_links(
    hosts: int, rate: str | Sequence[str | None] | None, delay: str | None, loss: str | None
) -> list[Link]:
    """Return the link of each host; there is one rate for all, or one for each."""
    rates = [rate] * hosts if rate is None or isinstance(rate, str) else list(rate)
    if len(rates) != hosts:
        raise UsageError(f"there are {len(rates)} rates for {hosts} hosts; give one, or one each.")
    delay_us, part = parse_delay(delay), parse_loss(loss)
    return [Link(rate_bits=parse_link_rate(each), delay_us=delay_us, loss=part) for each in rates]


def burst_bytes(rate_bits: int) -> int:
    """Bytes that may leave at once: two of the 64 KB packets of a TCP stream, or 4 ms."""
    # A timer that comes late by a jiffy (up to 4 ms) must not cost rate.
    return max(128 * 1024, rate_bits // 8 * 4 // 1000)


def queue_bytes(rate_bits: int) -> int:
    """Bytes that may wait at a shaped end: 50 ms, and never less than 1 MB."""
    return max(10**6, rate_bits // 8 // 20)
