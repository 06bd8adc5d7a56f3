"""Rates, delays and losses as a user writes them."""

import pytest

from hipress.errors import UsageError
from hipress.lab.links import (
    Link,
    burst_bytes,
    parse_delay,
    parse_link_rate,
    parse_links,
    parse_loss,
    queue_bytes,
)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 10**9),
        ("2.5gbit", 2_500_000_000),
        ("100mbit", 10**8),
        ("100 Mbit", 10**8),
        ("64kbit", 64_000),
        ("1000000bit", 10**6),
        ("32gbit", 32 * 10**9),
        ("none", None),
        (None, None),
    ],
)
def test_rate(text, bits):
    assert parse_link_rate(text) == bits


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("5ms", 5000),
        ("0.5ms", 500),
        ("100us", 100),
        ("1s", 10**6),
        ("0", 0),
        ("none", 0),
        (None, 0),
    ],
)
def test_delay(text, microseconds):
    assert parse_delay(text) == microseconds


@pytest.mark.parametrize(
    ("text", "part"), [("0.1%", 0.001), ("100%", 1.0), ("0", 0.0), ("none", 0.0), (None, 0.0)]
)
def test_loss(text, part):
    assert parse_loss(text) == pytest.approx(part)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_link_rate, "1gb", "rate '1gb' is not a number and a unit; write 1gbit"),
        (parse_link_rate, "fast", "rate 'fast' is not a number and a unit"),
        (parse_link_rate, "-1gbit", "is not a number and a unit"),
        (parse_link_rate, "", "rate '' is not a number"),
        (
            parse_link_rate,
            "0gbit",
            "rate '0gbit' cannot be shaped; write one from 10kbit to 32gbit",
        ),
        (parse_link_rate, "100gbit", "cannot be shaped"),
        (parse_delay, "5", "delay '5' is not a number and a unit; write 5ms"),
        (parse_delay, "1min", "is not a number and a unit"),
        (parse_delay, "60s", "delay '60s' is too long; write 10s or less."),
        (parse_loss, "0.1", "loss '0.1' is not a percentage; write 0.1%"),
        (parse_loss, "101%", "loss '101%' is too high; write 100% or less."),
    ],
)
def test_what_is_refused(parse, text, says):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert says in str(caught.value)


def test_one_rate_for_all_or_one_for_each():
    same = parse_links(2, "1gbit", "5ms", "1%")
    assert same == [Link(rate_bits=10**9, delay_us=5000, loss=0.01)] * 2
    each = parse_links(3, ["1gbit", "none", "100mbit"], None, None)
    assert [link.rate_bits for link in each] == [10**9, None, 10**8]
    with pytest.raises(UsageError, match="2 rates for 3 hosts"):
        parse_links(3, ["1gbit", "1gbit"], None, None)


def test_a_bucket_holds_large_packets_and_a_late_timer():
    assert burst_bytes(10**7) == 128 * 1024  # two packets of 64 KB
    assert burst_bytes(10**10) == 5 * 10**6  # 4 ms
    assert queue_bytes(10**7) == 10**6
    assert queue_bytes(10**10) == 62_500_000  # 50 ms
