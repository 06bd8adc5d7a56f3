"""More values of CompLL expressions than the tables of docs/compll.md show."""

import pytest

from tests.docs.test_docs import check_row

PREFIX = {"number": "float r = {};", "array": "float* r = {};", "x": "{} float r = x;"}

VALUES = (
    ("array", "range(a.size)", "0, 1, 2, 3"),
    ("array", "sample(a, a.size)", "3, -1, 2, 0"),
    ("x", "uint8 x = -3;", "0"),
    ("x", "float x = 16777217;", "16777216"),
    ("x", "float16 x = a[0] + 0.0001;", "3"),
    ("x", "uint1 x = 2 > 1;", "1"),
    ("number", "7 / 2.0", "3.5"),
    ("number", "7 % 0", "0"),
    ("number", "7 % 3", "1"),
    ("number", "1 << 3", "8"),
    ("number", "-8 >> 1", "-4"),
    ("number", "6 & 3", "2"),
    ("number", "6 ^ 3", "5"),
    ("number", "6 | 3", "7"),
    ("number", "~0", "-1"),
    ("number", "!5", "0"),
    ("number", "1 + 2 * 3", "7"),
    ("number", "1 && 0 || 1", "1"),
    ("number", "0 ? 1 : 0 ? 2 : 3", "3"),
    ("number", "abs(-2)", "2"),
    ("number", "sign(-3.5)", "-1"),
    ("number", "sqrt(9)", "3"),
    ("number", "exp2(3)", "8"),
    ("number", "log2(8)", "3"),
    ("number", "exponent(8)", "3"),
    ("number", "exponent(a[3])", "-150"),
    ("number", "exponent(a[0] / a[3])", "128"),
    ("number", "min(3, 1, 2)", "1"),
    ("array", "map(a, [&](float x) -> float { return x * x; })", "9, 1, 4, 0"),
    ("array", "map(range(3), sqrt)", "0, 1, 1"),
    ("array", "scan(a, 1.0, max)", "3, 3, 3, 3"),
    ("array", "sort(a)", "-1, 0, 2, 3"),
    ("array", "sort(a, [&](float x) -> float { return -x; })", "3, 2, 0, -1"),
    ("array", "filter(a, [&](float x) -> uint1 { return x > 0.0; })", "3, 2"),
    ("number", "reduce(a, 1.0, [&](float x, float y) -> float { return x * y; })", "0"),
)


@pytest.mark.parametrize(("kind", "expression", "value"), VALUES)
def test_value(kind: str, expression: str, value: str) -> None:
    statement = PREFIX[kind].replace("{}", expression)
    check_row(statement, value, is_array=kind == "array")
