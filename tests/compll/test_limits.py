"""Any program compiles in time or is refused in a sentence, however often it doubles its work."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hipress.compll.build import parse_program
from hipress.compll.passes.derive import PLAIN, Variant
from hipress.compll.tools.show import show_passes
from hipress.errors import ProgramError
from tests.compll.harness import bound, run

SENT = "void XDecode(uint8* c, float* g) { float* v; extract(c, v); g = v; }\n"
WRAPPED = Variant(feedback=True, momentum=True, nesterov=True)
LIMIT_S = 30


def encoder(body: str, decode: str = SENT, args: str = "") -> str:
    return f"void XEncode(float* g, uint8* c{args}) {{ {body} }}\n{decode}"


def of_lambda(steps: str, start: str = "", result: str = "x") -> str:
    code = f"{start} {steps * 28} return {result};"
    return encoder(f"float* v = map(g, [&](float x) -> float {{ {code} }}); c = concat(v);")


def of_arrays(step: str, start: str = "float* v = g;") -> str:
    return encoder(f"{start} {step * 28} c = concat(v);")


def block_top_k(k: int) -> str:
    """The k largest of each block of 64 by hand: a maximum and its place, k times over."""
    left = [" && ".join(["1", *(f"i != i{j}" for j in range(m))]) for m in range(k)]
    rounds = "".join(
        f"float m{m} = reduce(map(range(g.size), [&](int i) -> float {{ return {left[m]} ?"
        f" abs(g[i]) : 0.0; }}), 0.0, max); int i{m} = reduce(map(range(g.size), [&](int i) -> int"
        f" {{ return {left[m]} && abs(g[i]) == m{m} ? i : 999; }}), 999, min);"
        f" float v{m} = g[i{m}]; uint8 j{m} = i{m};\n"
        for m in range(k)
    )
    names = ", ".join(f"v{m}, j{m}" for m in range(k))
    rooms = " ".join(f"float v{m}[b]; uint8 j{m}[b];" for m in range(k))
    found = " ".join(f"if (i == j{m}) {{ return v{m}; }}" for m in range(k))
    return encoder(
        f"per (64) {{ {rounds} }} c = concat({names});",
        f"void XDecode(uint8* c, float* g) {{ int b = blocks(g.size, 64); {rooms}"
        f" extract(c, {names}); per (64) {{ g = map(range(g.size), [&](int i) -> float {{ {found}"
        " return 0.0; }); } }\n",
    )


PROGRAMS = {
    "floats": of_lambda("x = x + x * 0.5;"),
    "ints": of_lambda("k = k + k * 3;", "int k = x;", "k"),
    "branches": of_lambda("if (x > 1.0) { x = x * 0.5; } else { x = x + x; }"),
    "magnitudes": of_lambda("x = max(x, x * 0.5);", "x = abs(x);", "floor(x)"),
    "sizes": of_lambda("s = (s + s / 3) % 1000;", "int s = g.size;", "x * s"),
    "numbers of a block": encoder(
        f"per (64) {{ float s = 0.0; {'s = s + reduce(map(g, abs), s, max);' * 28}"
        " float* v = map(g, [&](float x) -> float { return x - s; }); } c = concat(v);"
    ),
    "a built-in function of arrays": of_arrays("v = map(v, v, max);"),
    "a lambda of arrays": of_arrays(
        "v = map(v, v, f);",
        "lambda_func f = [&](float a, float b) -> float { return a + b * 0.5; } float* v = g;",
    ),
    "arrays in blocks": encoder(
        f"per (64) {{ float* v = g; {'v = map(v, v, max);' * 28} }} c = concat(v);"
    ),
    "a filtered array": encoder(
        "float* v = filter(g, [&](float x) -> uint1 { return x > 0.0; });"
        f" {'v = map(v, v, max);' * 28} float s = reduce(v, 0.0, max); c = concat(s);",
        "void XDecode(uint8* c, float* g) { float s; extract(c, s);"
        " g = map(range(g.size), [&](int i) -> float { return s; }); }\n",
    ),
    "indices": encoder(
        f"int* k = range(g.size); {'k = gather(k, k);' * 28}"
        " float* v = gather(g, k); c = concat(v);"
    ),
    "neighbours": of_arrays(
        "v = map(range(g.size), [&](int i) -> float { return v[i] + v[i + 1]; });"
    ),
    "reductions": encoder(
        f"float s = 1.0; {'s = reduce(map(g, abs), s, max) + s;' * 28}"
        " float* v = map(g, [&](float x) -> float { return x - s; }); c = concat(v);"
    ),
    "a state": encoder(f"{'r = map(r, r, max);' * 28} c = concat(g);", args=", inout float* r"),
    "decode": encoder(
        "c = concat(g);",
        "void XDecode(uint8* c, float* g) { float* v; extract(c, v);"
        f" {'v = map(v, v, max);' * 28} g = v; }}\n",
    ),
    "the largest of a block": block_top_k(16),
}
REFUSED = {
    "sizes": "50 operations one after another, or 1000",
    "neighbours": "more than 100,000 expressions and statements",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_doublings_do_not_explode(name: str) -> None:
    started = time.process_time()
    for variant in (PLAIN, WRAPPED):
        program = bound(PROGRAMS[name])
        if name in REFUSED:
            with pytest.raises(ProgramError, match=REFUSED[name]):
                program.kernels(variant=variant)
        else:
            show_passes(program.kernels(variant=variant))
            for backend in ("reference", "cpu", "gpu"):
                program.source(backend, variant=variant)
    assert time.process_time() - started < LIMIT_S


@pytest.mark.parametrize("name", ["floats", "the largest of a block"])
def test_doublings_mean_the_same(name: str) -> None:
    x = np.random.RandomState(5).standard_normal(1000).astype(np.float32)
    program = bound(PROGRAMS[name] if name == "floats" else block_top_k(3))
    got, want = (run(program, backend, x, add=False) for backend in ("cpu", "reference"))
    assert got.body.tobytes() == want.body.tobytes()
    np.testing.assert_array_equal(got.decoded, want.decoded)
    if name != "floats":
        blocks = np.abs(np.pad(x, (0, 24))).reshape(16, 64)
        assert (np.count_nonzero(got.decoded) == 3 * 16) and (
            np.abs(got.decoded).sum() == pytest.approx(np.sort(blocks)[:, -3:].sum())
        )


@pytest.mark.parametrize(
    ("step", "start"),
    [
        ("x = exp2(x * 0.1);", ""),
        ("x = log2(abs(x) + 1.0);", ""),
        ("h = h * 0.9 + 0.1; bfloat16 {k} = h; h = {k};", "float16 h = x;"),
        ("k = k * 3 + 1; uint8 {k} = k; k = {k};", "int k = x;"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_long_chain_is_valid_source(backend: str, step: str, start: str) -> None:
    steps = "".join(step.replace("{k}", f"y{k}") for k in range(24))
    result = {"h": "h", "k": "k"}.get(start.split(" ")[1] if start else "", "x")
    text = encoder(
        f"float* v = map(g, [&](float x) -> float {{ {start} {steps} return {result}; }});"
        " c = concat(v);"
    )
    compile(bound(text).source(backend, variant=WRAPPED), "<module>", "exec")


def test_a_chain_that_only_a_wrapper_makes_too_long_is_refused_in_a_sentence() -> None:
    chain = encoder(
        f"float* v = map(g, [&](float x) -> float {{ {'x = x * 0.5 + 1.0;' * 74} return x; }});"
        " c = concat(v);"
    )
    bound(chain).kernels()
    with pytest.raises(ProgramError, match="more than 150 operations one after another"):
        bound(chain).kernels(variant=WRAPPED)


LARGE = {
    "reductions one after another": (
        "float s = 1.0;"
        + "s = reduce(map(g, [&](float x) -> float { return x * s; }), 0.0, max);" * 70
        + "float* v = map(g, [&](float x) -> float { return x - s; }); c = concat(v);",
        "loops over arrays compute .* values; at most 40 loops, 100 reductions and 4,000 values",
    ),
    "reductions side by side": (
        "per (64) { float s = 0.0; repeat (i, 13) { float z = 0.0; repeat (j, 10) { z = z + reduce("
        "map(g, [&](float x) -> float { return x * (i * 10 + j); }), 0.0, max); } s = max(s, z); }"
        " float* v = map(g, [&](float x) -> float { return x - s; }); } c = concat(v);",
        "131 reductions and .* values; at most 40 loops, 100 reductions",
    ),
    "arrays of a block side by side": (
        "per (64) { float* v = g; repeat (i, 60) { float* x = store(map(g, [&](float y) -> float {"
        " return y * i; })); v = map(range(g.size), [&](int k) -> float { return v[k] + x[k + 1];"
        " }); } } c = concat(v);",
        "62 loops over arrays compute .* at most 40 loops",
    ),
    "turns of turns": (
        "repeat (i, 64) { repeat (j, 64) { repeat (k, 64) { repeat (m, 64) { } } } }"
        " c = concat(g);",
        "the program is too large: more than 100,000 expressions and statements",
    ),
    "statements without expressions": (
        f"repeat (i, 64) {{ repeat (j, 64) {{ {' '.join(f'float y{k};' for k in range(40))} }} }}"
        " c = concat(g);",
        "the program is too large: more than 100,000 expressions and statements",
    ),
    "a sum of thousands": (
        "float* v = map(g, [&](float x) -> float { float s = 0.0;"
        + "".join(f"float t{k} = {'+'.join(f'x*{k}.{m}' for m in range(60))};" for k in range(70))
        + "return "
        + "+".join(f"t{k}" for k in range(70))
        + "; }); c = concat(v);",
        "at most 40 loops, 100 reductions and 4,000 values are compiled",
    ),
    "a lambda that calls itself": (
        "lambda_func f = [&](float x) -> float { return x > 1.0 ? f(x * 0.5) : x; }"
        " float* v = map(g, f); c = concat(v);",
        "'f' calls itself; a lambda cannot, use reduce or scan",
    ),
    "lambdas that call each other": (
        "lambda_func f = [&](float x) -> float { return h(x); }"
        " lambda_func h = [&](float x) -> float { return f(x); }"
        " float* v = map(g, f); c = concat(v);",
        "'h' calls itself",
    ),
    "an empty payload": ("c = concat();", r"concat\(\) sends nothing; give it a number or an"),
    "a literal of 5,000 digits": (
        f"int k = {'7' * 5000}; c = concat(k, g);",
        r"7{40}\.\.\. is too large: a float ends at 3.4e38, an int at 2\*\*62",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_large_or_empty_is_told(name: str) -> None:
    body, message = LARGE[name]
    started = time.process_time()
    with pytest.raises(ProgramError, match=message):
        bound(encoder(body)).kernels()
    assert time.process_time() - started < LIMIT_S


def test_decode_must_read_something() -> None:
    text = encoder("c = concat(g);", "void XDecode(uint8* c, float* g) { extract(c); g = g; }")
    with pytest.raises(ProgramError, match="extract reads nothing; name what follows 'c'"):
        bound(text).kernels()


def test_zeros_before_a_literal_and_many_arguments_are_allowed() -> None:
    parse_program(encoder(f"int k = {'0' * 5000}7; c = concat(k, g);", SENT))
    many = ", ".join(["x"] * 120)
    text = encoder(
        f"float* v = map(g, [&](float x) -> float {{ return max({many}); }}); c = concat(v);"
    )
    bound(text).kernels()
