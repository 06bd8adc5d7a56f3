"""More values and programs of CompLL than docs/compll.md shows."""

import pytest

from hipress.compll import build
from tests.docs.test_docs import check_row, run_program

PREFIX = {"number": "float r = {};", "array": "float* r = {};", "x": "{} float r = x;"}

VALUES = (
    ("number", "5 & 3 == 3", "1"),
    ("array", "filter(range(a.size), [&](int i) -> uint1 { return a[i] < 1.0; })", "1, 3"),
    ("number", "a[1]", "-1"),
    ("number", "a[-5]", "3"),
    ("number", "7 / 0", "0"),
    ("number", "2 + 3 << 1", "10"),
    ("number", "3 > 2 > 1", "0"),
    ("number", "exponent(-0.75)", "-1"),
    ("number", "bits(1.0) >> 23", "127"),
    ("number", "from_bits(bits(2.5))", "2.5"),
    ("number", "max(2, 2.5)", "2.5"),
    ("number", "reduce(a, 0.0, add)", "4"),
    ("array", "map(a, abs)", "3, 1, 2, 0"),
    ("array", "sort(a, abs)", "0, -1, 2, 3"),
    ("array", "first(sort(a), 2)", "-1, 0"),
    ("x", "int x = -3.9;", "-3"),
    ("x", "uint8 x = 300;", "255"),
    ("x", "bfloat16 x = a[0] + 0.01;", "3.015625"),
    ("number", "1 << 70", "0"),
    ("number", "-7 / 2", "-3"),
    ("number", "floor(-2.5)", "-3"),
    (
        "array",
        "map(a, range(a.size), [&](float x, int i) -> float { return x + 10 * i; })",
        "3, 9, 22, 30",
    ),
    ("x", "uint2 x = 2.9;", "2"),
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


MASK = """
void MaskEncode(float* gradient, uint8* compressed) {
    uint32 key = random<int>(0, 1 << 30);
    uint32* index = sample(range(gradient.size), max(1, gradient.size / 4), key);
    compressed = concat(key, gather(gradient, index));
}

void MaskDecode(uint8* compressed, float* gradient) {
    uint32 key;
    float* value;
    extract(compressed, key, value);
    uint32* index = sample(range(gradient.size), max(1, gradient.size / 4), key);
    gradient = scatter(index, value, gradient.size);
}
"""

BLOCKED = """
param Blocked {
    int block = 256;
}

void BlockedEncode(float* gradient, uint8* compressed, Blocked p) {
    per (p.block) {
        float top = reduce(map(gradient, abs), 0.0, max);
        uint4* code = map(gradient, [&](float g) -> uint4 { return floor(g / top * 7.0 + 7.5); });
    }
    compressed = concat(top, code);     // top: float*, one per block; code: as long as the gradient
}

void BlockedDecode(uint8* compressed, float* gradient, Blocked p) {
    float top[blocks(gradient.size, p.block)];
    uint4 code[gradient.size];
    extract(compressed, top, code);
    per (p.block) {
        gradient = map(code, [&](uint4 c) -> float { return (c - 7) / 7.0 * top; });
    }
}
"""

DRIFT = """
void DriftEncode(float* gradient, uint8* compressed, inout float* average) {
    average = map(gradient, average, [&](float g, float old) -> float {
        return 0.75 * old + 0.25 * g;
    });
    bfloat16* sent = average;
    compressed = concat(sent);
}

void DriftDecode(uint8* compressed, float* gradient) {
    bfloat16* sent;
    extract(compressed, sent);
    gradient = sent;
}
"""


@pytest.mark.parametrize("text", [MASK, BLOCKED, DRIFT])
def test_program(text: str) -> None:
    run_program(build.parse_program(text))
