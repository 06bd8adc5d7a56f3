"""Reductions whose result would depend on the order are refused; legal ones are not."""

from __future__ import annotations

import pytest

from hipress.errors import ProgramError
from tests.compll.harness import bound


def program(kind: str, array: str, start: str, body: str) -> str:
    return f"""void XEncode(float* g, uint8* c, float tau) {{
    int* whole = map(g, [&](float x) -> int {{ return 10.0 * x; }});
    uint8* code = map(g, [&](float x) -> uint8 {{ return abs(x); }});
    float top = reduce(map(g, abs), 0.0, max);
    {kind} r = reduce({array}, {start}, [&]({kind} a, {kind} b) -> {kind} {{ {body} }});
    float s = r;
    c = concat(s, g);
}}
void XDecode(uint8* c, float* g, float tau) {{ float s; float* v; extract(c, s, v); g = v; }}
"""


def check(kind: str, array: str, start: str, body: str) -> None:
    bound(program(kind, array, start, body), {"tau": 0.5}).kernels()


LEGAL = [
    ("int", "range(g.size)", "-1", "return a < 0 ? b : min(a, b);"),
    (
        "float",
        "map(g, [&](float x) -> float { return top - abs(x); })",
        "0.0",
        "return min(a + b, 1.0);",
    ),
    (
        "int",
        "scan(code, 0, [&](int a, int b) -> int { return a + b; })",
        "0",
        "return min(a + b, 1000);",
    ),
    ("int", "range(g.size)", "0", "return g[a] > g[b] || g[a] == g[b] && a < b ? a : b;"),
    ("float", "g", "0.0", "return abs(a) > abs(b) || abs(a) == abs(b) && a > b ? a : b;"),
    ("int", "whole", "0", "return b + a;"),
    ("int", "whole", "1", "return a * b;"),
    ("int", "whole", "0", "return a | b;"),
    ("int", "whole", "-1", "return a & b;"),
    ("int", "whole", "0", "return a ^ b;"),
    ("int", "whole", "0", "return ~(a ^ b);"),
    ("int", "whole", "0", "return a + b + 3;"),
    ("int", "code", "0", "return min(a + b, 300);"),
    ("int", "code", "1", "return (a * b) % 257;"),
    ("int", "map(g, [&](float x) -> int { return x > 0.0; })", "0", "return (a + b) % 7;"),
    ("uint8", "code", "0", "return a + b;"),
    ("uint8", "code", "0", "return a > b ? a : b;"),
    ("uint1", "map(g, [&](float x) -> uint1 { return x > 0.0; })", "0", "return a != b;"),
    ("float", "g", "1.0", "return a * b;"),
    ("float", "g", "0.0", "return sqrt(a * a + b * b);"),
    ("float", "g", "0.0", "return a + b - a * b;"),
    ("float", "g", "-100.0", "return log2(exp2(a) + exp2(b));"),
    ("float", "g", "0.0", "return max(abs(a), abs(b));"),
    ("float", "map(g, abs)", "0.0", "return min(a + b, top);"),
    ("float", "map(g, sign)", "1.0", "return a == 0.0 ? b : b == 0.0 ? a : a * b;"),
    ("float", "map(g, floor)", "0.0", "return floor(a + b + 0.5);"),
    ("float16", "map(g, [&](float x) -> float16 { return x; })", "0.0", "return a + b;"),
    ("bfloat16", "map(g, [&](float x) -> bfloat16 { return x; })", "0.0", "return a + b;"),
]
ORDERED = [
    ("int", "whole", "0", "return a;"),
    ("int", "whole", "0", "return b;"),
    ("int", "whole", "0", "return a == 0 ? b : a;"),
    ("int", "whole", "0", "return abs(a) < abs(b) ? b : a;"),
    ("int", "range(g.size)", "0", "return g[a] >= g[b] ? a : b;"),
    ("int", "range(g.size)", "0", "return abs(g[b]) > abs(g[a]) ? b : a;"),
    ("int", "range(g.size)", "0", "return (a >> 3) > (b >> 3) ? a : b;"),
    ("float", "g", "0.0", "return abs(a) > abs(b) ? a : b;"),
    ("float", "g", "0.0", "return a > tau ? a : b;"),
    ("float", "g", "0.0", "return b;"),
]
"""Associative, but the result depends on the order: the first, the last, ties."""
ILLEGAL = [
    ("int", "range(g.size)", "0", "return a / 64 == b / 64 ? min(a, b) : b;"),
    ("float", "g", "0.0", "return 0.995 * (a + b);"),
    ("float", "g", "0.0", "return a + 0.995 * b;"),
    ("int", "whole", "0", "return a - b;"),
    ("int", "whole", "0", "return b - a;"),
    ("int", "whole", "0", "return a * 31 + b;"),
    ("int", "whole", "0", "return a + b * b;"),
    ("int", "whole", "0", "return (a + b) / 2;"),
    ("int", "whole", "0", "return a + (b > 0);"),
    ("int", "whole", "0", "return (a << 1) ^ b;"),
    ("uint8", "code", "0", "return a > b ? a - b : b - a;"),
    ("float", "g", "0.0", "return a - b;"),
    ("float", "g", "1.0", "return a / b;"),
    ("float", "g", "0.0", "return (a + b) * 0.5;"),
    ("float", "g", "0.0", "return a + b * b;"),
    ("float", "g", "0.0", "return a + abs(b);"),
    ("float", "g", "0.0", "return tau * a + b;"),
    ("float", "g", "0.0", "return a * b - b / 2.0;"),
    ("float", "g", "0.0", "return a + (b > tau);"),
]


@pytest.mark.parametrize("case", LEGAL, ids=lambda c: f"{c[0]}: {c[3]}")
def test_associative_functions_are_taken(case: tuple[str, str, str, str]) -> None:
    check(*case)


@pytest.mark.parametrize("case", ILLEGAL, ids=lambda c: f"{c[0]}: {c[3]}")
def test_others_are_refused_with_a_counter_example(case: tuple[str, str, str, str]) -> None:
    with pytest.raises(ProgramError, match=r"must be associative.*; f\(f\(.* is .*, but f\(.* is "):
        check(*case)


@pytest.mark.parametrize("case", ORDERED, ids=lambda c: f"{c[0]}: {c[3]}")
def test_functions_that_depend_on_the_order_are_refused(case: tuple[str, str, str, str]) -> None:
    """Catches: a GPU, which joins elements out of order, with another result than a CPU."""
    with pytest.raises(ProgramError, match=r"must be commutative.*; f\(.* is .*, but f\(.* is "):
        check(*case)


def test_the_error_shows_small_numbers_and_the_place_always_the_same() -> None:
    messages = set()
    for _ in range(2):
        with pytest.raises(ProgramError) as error:
            check("int", "whole", "0", "return a - b;")
        messages.add(str(error.value))
        assert (error.value.line, error.value.column) == (5, 30)
    [message] = messages
    assert "f(f(4, 0), 1) is 3, but f(4, f(0, 1)) is 5" in message


def test_a_scan_goes_from_left_to_right_so_any_function_may_join() -> None:
    text = program("int", "whole", "0", "return a - b;").replace("r = reduce(", "r = scan(")
    text = text.replace("float s = r;", "float s = r[3];").replace("int r", "int* r")
    bound(text, {"tau": 0.5}).kernels()
