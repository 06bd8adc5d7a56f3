"""Ints wrap at 64 bits on every backend, in every operator; the oracle gives the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.compll.harness import bound, encode, run_oracle
from tests.grid import thinned

X = np.array(
    [0, 1, -1, 3, -3, 3.5e9, -3.5e9, 3037000500, 4e18, -4e18, 9e18, -9e18, 5e18, 123456789, 1e12],
    np.float32,
)
SMALLEST = "int least = (0 * k - 4611686018427387904) * 2;"
"""The smallest int, which no literal holds; `0 * k` keeps it from the host."""

NUMBERS = {
    "a square": "k * k > 0",
    "a double": "k + k < 0",
    "one more": "k + 1 > k",
    "less and less": "m - k - k - k",
    "a hash": "(k * 2654435761 + 12345) * 4611686018427387847 % 1000",
    "a product divided": "k * m / 7",
    "a sign": "-least + (-(k * m) > 0)",
    "a magnitude": "abs(least) % 1000 + abs(k * m) / 3",
    "the smallest divided": "k > 0 ? least / 3 : least / -1",
    "the smallest modulo": "k > 0 ? least % 3 : least % -1",
    "by the smallest": "k / least + m % least",
    "any division": "k * k / m",
    "any modulo": "k * 7 % (m * m * m)",
    "shifts": "((k << 3) / 8 == k) + (k * 3 << 5) % 97 + (k * 5 >> 3)",
    "a literal shifted": "(3000000000 << 61) + (1 << 62 << 1) + k",
    "a large literal": "whole(1e30) + whole(-5e18) + k",
    "converted": "(k * k > 0 ? k * k : 0 - k * k) * 0.5",
    "saturated": "sent(k * m)",
    "an extreme": "max(k * m, m * m) - min(k * k, k + m)",
}
SUMS = {
    "a sum": "reduce(h, 4000000000000000000, add)",
    "a product": "reduce(h, 1, [&](int a, int b) -> int { return a * b; })",
    "running sums": "scan(h, 3, add)[7]",
    "scattered": "scatter(map(range(g.size), [&](int i) -> int { return i % 2; }), h, 3)[1]",
}
DECODE = """void XDecode(uint8* c, float* g) {
    int* q;
    extract(c, q);
    g = map(q, [&](int a) -> float { return a; });
}
"""


def text(*numbers: str, totals: Sequence[str] = ()) -> str:
    """A program that sends an array for each number and each total, one after another."""
    sums = "".join(f"int t{i} = {total};\n" for i, total in enumerate(totals))
    sent = [*numbers, *(f"t{i}" for i in range(len(totals)))]
    arrays = "".join(
        f"""int* q{i} = map(g, [&](float x) -> int {{
        int k = x;
        int m = k * 2 + 1;
        {SMALLEST}
        return {number};
    }});
    """
        for i, number in enumerate(sent)
    )
    names = [f"q{i}" for i in range(len(sent))]
    return f"""void XEncode(float* g, uint8* c) {{
    lambda_func add = [&](int a, int b) -> int {{ return a + b; }}
    lambda_func sent = [&](int a) -> uint32 {{ return a; }}
    lambda_func whole = [&](int a) -> int {{ return a; }}
    int* h = map(g, [&](float x) -> int {{ int k = x; return k * 5 + 3; }});
    {sums}
    {arrays}
    c = concat({", ".join(names)});
}}
void XDecode(uint8* c, float* g) {{
    {"".join(f"int {name}[g.size]; " for name in names)}
    extract(c, {", ".join(names)});
    g = map(q0, [&](int a) -> float {{ return a; }});
}}
"""


PROGRAMS = {
    **{name: text(number) for name, number in NUMBERS.items()},
    **{name: text(totals=[total]) for name, total in SUMS.items()},
    "all of these": text(*NUMBERS.values(), totals=list(SUMS.values())),
    "a sum of each block": f"""void XEncode(float* g, uint8* c) {{
    per (8) {{
        int s = reduce(map(g, [&](float x) -> int {{ return x; }}), 1, [&](int a, int b) -> int {{
            return a + b; }});
        int* q = map(g, [&](float x) -> int {{ return s > 0; }});
    }}
    c = concat(q);
}}
{DECODE}""",
}


# What all of them hold is compiled once; each on its own tells which one is wrong.
@pytest.mark.parametrize("name", thinned(PROGRAMS, keep=("all of these", "a sum of each block")))
def test_ints_wrap_at_64_bits(name: str) -> None:
    program: Any = bound(PROGRAMS[name])
    with np.errstate(all="ignore"):
        want = run_oracle(PROGRAMS[name], {}, X).body.view(np.int64)
    for backend in ("reference", "cpu"):
        got = encode(program, backend, X)[1].view(np.int64)
        np.testing.assert_array_equal(got, want, err_msg=backend)
