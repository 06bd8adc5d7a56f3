"""Numbers with units as users write them: rates of links, delays and sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hipress.errors import UsageError

RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
"""Bits per second of each unit of a rate."""

_SIZE_UNITS = {"": 1, "b": 1}
_SIZE_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmg", 1)}
_SIZE_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmg", 1)}


def number_and_unit(text: str, units: Mapping[str, int]) -> float | None:
    """Returns a number times its unit; None if the text is not a number and one of the units.

    Example:
        >>> number_and_unit("2.5 Gbit", RATE_UNITS), number_and_unit("5min", {"ms": 1, "s": 1000})
        (2500000000.0, None)
    """
    # The limits on digits keep the number finite.
    number = r"(\d{1,18}\.?\d{0,18}|\.\d{1,18})(?:e\d{1,2})?"
    found = re.fullmatch(rf"({number})\s*([a-z%]*)", text.strip().lower())
    if found is None or found[3] not in units:
        return None
    return float(found[1]) * units[found[3]]


def parse_rate(text: str) -> int:
    """Returns the bits per second of a rate that a user wrote.

    Raises:
        UsageError: The text is not a rate.

    Example:
        >>> parse_rate("2.5gbit")
        2500000000
    """
    units = {unit: bits for unit, bits in RATE_UNITS.items() if unit != "bit"}
    bits = round(number_and_unit(re.sub(r"(?<=bit)(/s|ps)\s*$", "", text.lower()), units) or 0)
    if bits < 1:
        raise UsageError(
            f"rate {text!r} is not a number above 0 and a unit ({', '.join(units)}); write "
            "100mbit, 1gbit or 25gbit."
        )
    return bits


def rate_text(rate_bits: float) -> str:
    """Returns a rate as a user would write it.

    Example:
        >>> rate_text(2.5e9), rate_text(100e6)
        ('2.5gbit', '100mbit')
    """
    units = [unit for unit, bits in RATE_UNITS.items() if rate_bits >= bits]
    unit = max([*units, "kbit"], key=RATE_UNITS.__getitem__)
    return f"{rate_bits / RATE_UNITS[unit]:.3g}{unit}"


def parse_size(text: str) -> int:
    """Returns the bytes that a size such as 100MB, 4MiB or 25e6 means, at least one float32.

    Example:
        >>> parse_size("100MB"), parse_size("4MiB"), parse_size("25e6")
        (100000000, 4194304, 25000000)
    """
    num_bytes = int(number_and_unit(text, _SIZE_UNITS) or 0)
    if num_bytes < 4:
        raise UsageError(
            f"size {text!r} is not a number of bytes, at least 4; write e.g. 100MB (10^6), "
            "4MiB (2^20) or 25e6."
        )
    return num_bytes


def counted(number: int, noun: str) -> str:
    """Returns a number of things in words.

    Example:
        >>> counted(1, "rank"), counted(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
