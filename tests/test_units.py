"""Rates and sizes as users write them."""

import pytest

from hipress.errors import UsageError
from hipress.units import parse_rate, parse_size, rate_text


@pytest.mark.parametrize(
    "text, bits",
    [("1gbit", 10**9), ("2.5Gbit", 25 * 10**8), ("100 mbit/s", 10**8), ("64kbps", None)],
)
def test_rates_as_users_write_them(text, bits):
    """Catches: a unit that is misread by a factor."""
    if bits is None:
        with pytest.raises(UsageError, match="is not a number above 0 and a unit"):
            parse_rate(text)
    else:
        assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "0gbit", "fast", "-1gbit", "1"])
def test_bad_rates_are_refused(text):
    """Catches: a division by zero later."""
    with pytest.raises(UsageError, match="write 100mbit, 1gbit or 25gbit"):
        parse_rate(text)


def test_rates_are_shown_as_they_are_read():
    """Catches: a table whose rates are no input."""
    for text in ("100mbit", "2.5gbit", "1tbit", "64kbit"):
        assert rate_text(parse_rate(text)) == text


@pytest.mark.parametrize("text", ["", "many", "0", "3", "4XB", "-1MB", "1e999MB", "nan"])
def test_bad_size_names_the_value_and_the_choices(text: str) -> None:
    with pytest.raises(UsageError, match="write e.g. 100MB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("100MB", 10**8),
        ("100 mb", 10**8),
        ("4MiB", 4 * 2**20),
        ("25e6", 25_000_000),
        ("1.5GB", 1_500_000_000),
        ("64KiB", 65536),
        ("4", 4),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
