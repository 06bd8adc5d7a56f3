"""Programs that the compiler once got wrong, each as small as it goes.

The oracle gives the answer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hipress.compll.passes.derive import PLAIN, Variant
from hipress.errors import ProgramError
from tests.compll.harness import bound, decode, encode, run, run_oracle
from tests.compll.oracle import Refused
from tests.grid import thinned

X = np.array([0.5, -1.5, 2.5, -3.5, 0.25, 7, -8, 3, 1.25, 0.75, 9, -0.5], np.float32)
ADD = "[&](float a, float b) -> float { return a + b; }"
SENT = "void XDecode(uint8* c, float* g) { float* v; extract(c, v); g = v; }"
LARGEST = """void XDecode(uint8* c, float* g) {
    uint32 k; float* v;
    extract(c, k, v);
    float s = reduce(first(v, k), 0.0, max);
    g = map(range(g.size), [&](int i) -> float { return s; });
}"""
TAKE = """uint32* ix = filter(range(g.size), [&](int i) -> uint1 { return g[i] > 1.0; }, 4);
    float* v = gather(g, ix);
    uint32 k = ix.size;
    """
BACK = TAKE + "float* d = scatter(ix, v, g.size);\n    "
BLOCKED = """per (8) {
        float s = reduce(g, 0.0, max);
        float* a = map(g, [&](float x) -> float { return x / s; });
    }
    """


@dataclass(frozen=True)
class Case:
    """A program by the body of its encode function."""

    name: str
    body: str
    decode: str = SENT
    args: str = ""
    feedback: bool = False
    states: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    backends: tuple[str, ...] = ("reference",)
    open: str = ""
    """What is wrong with it still."""

    @property
    def text(self) -> str:
        head = f"void XEncode(float* g, uint8* c{self.args})"
        return f"{head} {{\n    {self.body}\n}}\n{self.decode}\n"


BOTH = ("reference", "cpu")
CODES = """void XDecode(uint8* c, float* g) {
    uint4* q;
    extract(c, q);
    g = map(q, [&](uint4 x) -> float { return x; });
}"""
READ = """void XDecode(uint8* c, float* g) {
    float* v; extract(c, v);
    g = map(range(g.size), [&](int i) -> float { return v[i]; });
}"""
CASES = [
    # A lambda sees a name's value at the time of the call, not the last one it gets.
    Case(
        "a number changed after a map that used it",
        "float s = 1.0; float* a = map(g, [&](float x) -> float { return x * s; });"
        " s = 2.0; c = concat(a);",
    ),
    Case(
        "an array changed after a lambda that read it",
        "float* b = g; float* a = map(range(g.size), [&](int i) -> float { return b[i]; });"
        " b = map(b, [&](float x) -> float { return x * 2.0; }); c = concat(a);",
    ),
    Case(
        "an array made from itself by index",
        "float* b = g; b = map(range(g.size), [&](int i) -> float { return b[i] * 2.0; });"
        " c = concat(b);",
    ),
    Case(
        "a state read by index before it is written",
        "float* a = map(range(g.size), [&](int i) -> float { return u[g.size - 1 - i] + g[i]; });"
        " u = a; c = concat(a);",
        args=", inout float* u",
        states=1,
    ),
    # Old values of a state last until all is read, by single numbers too.
    Case(
        "one element of a state, sent beside its new values",
        f"float f = u[0]; u = map(u, g, {ADD}); float* v = map(u, [&](float x) -> float"
        " { return x; }); c = concat(f, v);",
        "void XDecode(uint8* c, float* g) { float f; float* v; extract(c, f, v); g = v; }",
        args=", inout float* u",
        states=1,
    ),
    Case(
        "one element of the gradient under error feedback",
        "float f = g[1]; uint8* q = map(g, [&](float a) -> uint8 { return a; }); c = concat(f, q);",
        "void XDecode(uint8* c, float* g) { float f; uint8* q; extract(c, f, q);"
        " g = map(q, [&](uint8 x) -> float { return x; }); }",
        feedback=True,
    ),
    # A state's new value that reads a state at another index must not find what was just written.
    Case(
        "a state shifted by one",
        "u = map(range(g.size), [&](int i) -> float { return u[i - 1]; }); c = concat(g);",
        args=", inout float* u",
        states=1,
        backends=("cpu",),
    ),
    Case(
        "a state gathered from itself",
        "u = gather(u, map(range(g.size), [&](int i) -> int { return g.size - 1 - i; }));"
        " c = concat(g);",
        args=", inout float* u",
        states=1,
        backends=("cpu",),
    ),
    Case(
        "a state from another, which is written too",
        "v = map(range(g.size), [&](int i) -> float { return u[g.size - 1 - i]; }); u = g;"
        " c = concat(g);",
        args=", inout float* u, inout float* v",
        states=2,
        backends=("cpu",),
    ),
    Case(
        "decode that reads a neighbour under error feedback",
        "c = concat(g);",
        "void XDecode(uint8* c, float* g) { float* v; extract(c, v);"
        " g = map(range(g.size), [&](int i) -> float { return v[i - 1]; }); }",
        feedback=True,
        backends=("cpu",),
    ),
    # What a filter took, used beyond the pass that took it.
    Case(
        "kept values scaled by their own maximum",
        TAKE + "float s = reduce(v, 0.0, max); float* q = map(v, [&](float x) -> float"
        " { return x / s; }); c = concat(k, q);",
        LARGEST,
    ),
    Case(
        "kept values that ask how many they are",
        TAKE + "float* q = map(v, [&](float x) -> float { return x / k; }); c = concat(k, q);",
        LARGEST,
    ),
    Case(
        "a sum of what was scattered back",
        BACK + f"float s = reduce(d, 0.0, {ADD}); float* a = map(g, [&](float x) -> float"
        " { return x + s; }); c = concat(a);",
    ),
    Case(
        "a block's sum of what was scattered back",
        BACK + f"per (8) {{ float s = reduce(d, 0.0, {ADD}); float* a = map(g, [&](float x) ->"
        " float { return x + s; }); } c = concat(a);",
    ),
    Case(
        "what was scattered back, used after a reduction",
        BACK + f"float s = reduce(v, 0.0, {ADD}); float* a = map(d, [&](float x) -> float"
        " { return x / s; }); c = concat(a);",
    ),
    Case(
        "two filters, both scattered back",
        BACK + "uint32* jx = filter(range(g.size), [&](int i) -> uint1 { return g[i] < -1.0; }, 4);"
        f" float* e = scatter(jx, gather(g, jx), g.size); float* a = map(d, e, {ADD});"
        " c = concat(a);",
    ),
    Case(
        "a running sum of what was scattered back",
        BACK + f"float* a = scan(d, 0.0, {ADD}); c = concat(a);",
    ),
    Case(
        "a filter of what was scattered back",
        BACK + "uint32* jx = filter(range(g.size), [&](int i) -> uint1 { return d[i] > 3.0; }, 4);"
        " float* e = scatter(jx, gather(g, jx), g.size); c = concat(e);",
    ),
    # What a per scope made, used by an operator that goes over the whole array.
    Case(
        "a filter of what a per scope made",
        BLOCKED + "float* v = filter(a, [&](float x) -> uint1 { return x > 0.5; }, 4);"
        " uint32 k = v.size; c = concat(k, v);",
        LARGEST,
    ),
    Case(
        "a running sum of what a per scope made",
        BLOCKED + f"float* b = scan(a, 0.0, {ADD}); c = concat(b);",
    ),
    Case(
        "a scatter of what a per scope made",
        BLOCKED + "float* b = scatter(range(g.size), a, g.size); c = concat(b);",
    ),
    Case(
        "a whole-gradient reduction of what a per scope made",
        "per (8) { float m = reduce(g, 0.0, max); uint8* q = map(g, [&](float a) -> uint8"
        " { return a + m; }); } int t = reduce(q, 0, [&](int a, int b) -> int { return a | b; });"
        " float* a = map(g, [&](float x) -> float { return x + t; }); c = concat(a);",
    ),
    Case(
        "what two per scopes made, of different blocks, in one map",
        BLOCKED + "per (16) { float t = reduce(g, 0.0, max); float* b = map(g, [&](float x) ->"
        f" float {{ return x / t; }}); }} float* d = map(a, b, {ADD}); c = concat(d);",
    ),
    Case(
        "what a per scope made, in a per scope of larger blocks",
        BLOCKED + "per (16) { float t = reduce(g, 0.0, max); float* b = map(g, a, [&](float x,"
        " float y) -> float { return x / t + y; }); } c = concat(b);",
    ),
    Case(
        "an index past the end of a block",
        "per (8) { float* a = map(range(g.size), [&](int i) -> float { return g[i + 1]; }); }"
        " c = concat(a);",
    ),
    Case(
        "an index past the end of a computed array",
        "int* r = range(g.size); float* a = map(range(g.size), [&](int i) -> float"
        " { return r[i + 1]; }); c = concat(a);",
    ),
    # Numbers made of literals and parameters alone.
    Case(
        "a float16 literal",
        "float16 h = 0.1; float* a = map(g, [&](float x) -> float { return x * h; });"
        " c = concat(a);",
    ),
    Case(
        "a bfloat16 literal",
        "bfloat16 h = 0.1; float* a = map(g, [&](float x) -> float { return x * h; });"
        " c = concat(a);",
    ),
    Case(
        "a remainder by zero",
        "int k = 10 % 0; float* a = map(g, [&](float x) -> float { return x + k; });"
        " c = concat(a);",
    ),
    Case(
        "a division of floats by zero",
        "float k = 1.0 / 0.0; float* a = map(g, [&](float x) -> float { return min(x, k); });"
        " c = concat(a);",
    ),
    Case(
        "a shift by more bits than there are",
        "int k = 1 << 70; float* a = map(g, [&](float x) -> float { return x + k; });"
        " c = concat(a);",
    ),
    Case(
        "a parameter divided",
        "float s = t / 2.0; float* a = map(g, [&](float x) -> float { return x * s; });"
        " c = concat(a);",
        "void XDecode(uint8* c, float* g, float t) { float* v; extract(c, v); g = v; }",
        args=", float t",
        params={"t": 3.0},
    ),
    Case(
        "a constant choice between an int and a float",
        "float k = (1 ? 3 : 2.5) / 2; float* a = map(g, [&](float x) -> float { return x + k; });"
        " c = concat(a);",
    ),
    Case(
        "a number sent and used by decode under error feedback",
        "float s = t * 0.1; uint8* q = map(g, [&](float a) -> uint8 { return a; });"
        " c = concat(s, q);",
        "void XDecode(uint8* c, float* g, float t) { float s; uint8* q; extract(c, s, q);"
        " g = map(q, [&](uint8 x) -> float { return x * log2(s + 1.0); }); }",
        args=", float t",
        params={"t": 0.7},
        feedback=True,
    ),
    Case(
        "an int that passes through a float",
        "uint32* q = map(range(g.size), [&](int i) -> uint32 { float f = i + 16777216;"
        " return f; }); c = concat(q);",
        "void XDecode(uint8* c, float* g) { uint32* q; extract(c, q);"
        " g = map(q, [&](uint32 x) -> float { return x - 16777216; }); }",
    ),
    # Packed codes where elements are written one at a time.
    Case(
        "codes of kept values",
        TAKE + "uint1* n = map(v, [&](float x) -> uint1 { return x < 2.0; });"
        " c = concat(k, ix, n);",
        "void XDecode(uint8* c, float* g) { uint32 k; uint32* ix; uint1* n; extract(c, k, ix, n);"
        " g = scatter(first(ix, k), map(first(n, k), [&](uint1 x) -> float"
        " { return x ? -1.0 : 1.0; }), g.size); }",
        backends=BOTH,
    ),
    Case(
        "codes of a running sum, sorted, and scattered",
        "uint4* n = scan(map(g, [&](float x) -> uint4 { return x > 0.0; }), 0,"
        " [&](uint4 a, uint4 b) -> uint4 { return a + b; });"
        " uint4* s = sort(map(g, [&](float x) -> uint4 { return x; }));"
        " uint4* t = scatter(range(g.size), s, g.size);"
        " uint4* q = map(n, t, [&](uint4 a, uint4 b) -> uint4 { return a ^ b; }); c = concat(q);",
        CODES,
        backends=BOTH,
    ),
    Case(
        "a code for each block",
        "per (8) { uint4 e = reduce(map(g, abs), 0.0, max); } c = concat(e, g);",
        "void XDecode(uint8* c, float* g) { uint4 e[blocks(g.size, 8)]; float* v;"
        " extract(c, e, v); per (8) { g = map(v, [&](float x) -> float { return x + e; }); } }",
        backends=BOTH,
    ),
    Case(
        "16-bit floats sorted",
        "float16* s = sort(map(g, [&](float x) -> float16 { return x; }));"
        " float* a = map(s, [&](float16 x) -> float { return x; }); c = concat(a);",
        backends=BOTH,
    ),
    Case(
        "codes that add up to more than they hold",
        "uint8* s = scatter(map(range(g.size), [&](int i) -> int { return i / 5; }),"
        " map(g, [&](float a) -> uint8 { return 100; }), g.size);"
        " float* a = map(s, [&](uint8 x) -> float { return x; }); c = concat(a);",
        backends=BOTH,
    ),
    Case(
        "an index past the last kept value",
        "float* p = filter(g, [&](float x) -> uint1 { return x > 1.0; }, 9); float s = p[7];"
        " float* a = map(g, [&](float x) -> float { return x + s; }); c = concat(a);",
    ),
    Case(
        "how many pass a filter, and nothing else",
        "uint32 k = filter(g, [&](float x) -> uint1 { return x > 0.5; }, 3).size;"
        " float* v = map(g, [&](float x) -> float { return x + k; }); c = concat(v);",
        backends=BOTH,
    ),
    Case(
        "random numbers beside a filter",
        TAKE + "float* q = map(g, [&](float x) -> float { return random<float>(0, 1); });"
        " c = concat(k, ix, q);",
        "void XDecode(uint8* c, float* g) { uint32 k; uint32* ix; float* q;"
        " extract(c, k, ix, q); g = q; }",
        backends=BOTH,
    ),
    Case(
        "16-bit numbers",
        "float16 h = g[1]; bfloat16 b = g[2]; c = concat(h, b, g);",
        "void XDecode(uint8* c, float* g) { float16 h; bfloat16 b; float* v; extract(c, h, b, v);"
        " g = map(v, [&](float x) -> float { return x + h + b; }); }",
        backends=BOTH,
    ),
    Case(
        "the first few, of a number that the host knows",
        "float* v = first(g, min(g.size, 2)); c = concat(v);",
        "void XDecode(uint8* c, float* g) { float* v; extract(c, v);"
        " g = map(range(g.size), [&](int i) -> float { return v[i]; }); }",
    ),
    Case(
        "a reduction of what decode was sent",
        TAKE + "c = concat(k, v);",
        LARGEST,
        backends=BOTH,
    ),
    Case(
        "a residual of its own that sends signs and one scale",
        TAKE + "float m = reduce(map(ix, [&](uint32 i) -> float { return abs(g[i]) + r[i]; }), 0.0,"
        " max); float* d = scatter(ix, map(ix, [&](uint32 i) -> float { return g[i] < 0.0 ? -m : m;"
        " }), g.size); r = map(g, d, [&](float a, float b) -> float { return a - b; });"
        " uint1* s = map(ix, [&](uint32 i) -> uint1 { return g[i] < 0.0; });"
        " c = concat(k, m, ix, s);",
        "void XDecode(uint8* c, float* g) { uint32 k; float m; uint32* ix; uint1* s;"
        " extract(c, k, m, ix, s); g = scatter(first(ix, k), map(first(s, k), [&](uint1 n) -> float"
        " { return n ? -m : m; }), g.size); }",
        args=", inout float* r",
        states=1,
        backends=BOTH,
    ),
    Case(
        "a state made of the index in a block, beside a sort, with feedback",
        "per (8) { r = map(r, range(g.size), [&](float a, int i) -> float { return a * i; }); }"
        " float* q = sort(g); c = concat(q);",
        args=", inout float* r",
        states=1,
        feedback=True,
        backends=BOTH,
    ),
    Case(
        "states made in blocks of two sizes",
        "per (8) { r = map(r, range(g.size), [&](float a, int i) -> float { return a * i; }); }"
        " per (16) { s = map(s, range(g.size), [&](float a, int i) -> float { return a + i; }); }"
        " c = concat(g);",
        args=", inout float* r, inout float* s",
        states=2,
        backends=BOTH,
    ),
    *(
        Case(
            f"random numbers with the key {key}",
            f"int key = {key}; float* a = map(g, [&](float x) -> float {{ return x +"
            " random<float>(0, 1, key) + random<int>(0, 9, key); }); float* b = map(sample(g, 4,"
            " key), abs); per (8) { float* d = map(g, [&](float x) -> float {"
            " return random<float>(0, 1, key); }); } c = concat(a, b, d);",
            "void XDecode(uint8* c, float* g, int seed) { float* a; float* b; float* d;"
            " extract(c, a, b, d); g = a; }",
            args=", int seed",
            params={"seed": 12345678901},
            backends=BOTH,
        )
        for key in ("7", "-7", "seed", "g.size", "seed * seed", "reduce(range(4), 3, max)")
    ),
    Case(
        "a running sum of kept values",
        TAKE + f"float* w = scan(v, 0.0, {ADD}); float s = w[1]; float* a = map(g, [&](float x)"
        " -> float { return x + s; }); c = concat(a);",
        backends=BOTH,
    ),
    Case(
        "the size of a running sum of kept values",
        TAKE + f"float* w = scan(v, 1.0, {ADD}); float* none = scan(filter(g, [&](float x) -> uint1"
        f" {{ return x > 99.0; }}), 1.0, {ADD}); float* a = map(range(g.size), [&](int i) -> float"
        " { return w[i] + w.size + none[i] + none.size; }); c = concat(a);",
        backends=BOTH,
    ),
    # Places that are made of the sorted array itself are read from it, not found by counting.
    *(
        Case(
            f"a sorted array read at {name}",
            "int* s = sort(map(g, [&](float x) -> int { return abs(x); }));"
            f" {before} int k = s[{place}]; float* a = map(g, [&](float x) -> float"
            " { return x + k; }); c = concat(a);",
            backends=BOTH,
        )
        for name, before, place in (
            ("its own element", "", "s[3] + s[g.size / 2]"),
            ("a running maximum of it", "int* m = scan(s, 0, max);", "m[2]"),
        )
    ),
    # A filter waits for what its condition reads, also where nobody asks for its size.
    *(
        Case(
            f"a filter by {name}, sent without its size",
            f"{before} float* v = gather(g, filter(range(g.size), [&](int i) -> uint1 {{"
            f" return {cond} < g[i]; }}, 8)); c = concat(v);",
            READ,
            backends=BOTH,
        )
        for name, before, cond in (
            ("running sums", f"float* s = scan(g, 0.0, {ADD});", "s[i]"),
            ("a maximum", "float s = reduce(g, 0.0, max);", "s / 4"),
            (
                "a filter",
                "float* s = filter(g, [&](float x) -> uint1 { return x > 1.0; });",
                "s[1]",
            ),
            ("a count", "int s = filter(g, [&](float x) -> uint1 { return x > 1.0; }).size;", "s"),
            (
                "sums of places",
                "int* at = map(range(g.size), [&](int i) -> int { return i / 2; });"
                " float* s = scatter(at, g, g.size);",
                "s[i]",
            ),
            ("a block's maximum", "per (8) { float s = reduce(g, 0.0, max); }", "s[i / 8] / 2"),
            ("a stored array", "float* s = store(map(g, abs));", "s[i + 1]"),
        )
    ),
    *(
        Case(
            f"two filters of one condition{' under error feedback' * feedback}",
            "uint32* ix = filter(range(g.size), [&](int i) -> uint1 { return g[i] > 1.0; }, 4);"
            " float* v = filter(g, [&](float x) -> uint1 { return x > 1.0; }, 4);"
            " c = concat(ix.size, ix, v);",
            "void XDecode(uint8* c, float* g) { int k; uint32* ix; float* v;"
            " extract(c, k, ix, v); g = scatter(first(ix, k), first(v, k), g.size); }",
            feedback=feedback,
            backends=BOTH,
        )
        for feedback in (False, True)
    ),
]


def cases() -> list[Any]:
    return [
        pytest.param(
            case,
            backend,
            id=f"{case.name}-{backend}",
            marks=[pytest.mark.xfail(strict=True, reason=case.open)] if case.open else [],
        )
        for case in CASES
        for backend in case.backends
    ]


# Every fourth one that is compiled: random programs try the same operators on `cpu`.
COMPILED = [case.name for case in CASES if "cpu" in case.backends]


@pytest.mark.parametrize(
    ("case", "backend"),
    thinned(cases(), lambda p: p.values[1] != "cpu" or p.values[0].name in COMPILED[::4]),
)
def test_means_what_the_oracle_means(case: Case, backend: str) -> None:
    states = [np.linspace(-1, 2, len(X), dtype=np.float32) for _ in range(case.states)]
    states += [np.full(len(X), 0.375, np.float32)] if case.feedback else []
    variant = Variant(feedback=True) if case.feedback else PLAIN
    got = run(bound(case.text, case.params), backend, X, states, variant=variant, add=False)
    want = run_oracle(case.text, case.params, X, states, variant=variant)
    np.testing.assert_allclose(got.decoded, want.decoded, rtol=1e-6)
    assert got.body.tobytes() == want.body.tobytes()
    for a, b in zip(got.states, want.states, strict=True):
        np.testing.assert_array_equal(a, b)


REFUSED = {
    "random numbers in a reduction's lambda": (
        "float s = reduce(g, 0.0, [&](float a, float b) -> float { return max(a, b) + 0.0 *"
        " random<float>(0, 1); }); float* v = map(g, [&](float x) -> float { return x + s; });"
        " c = concat(v);",
        SENT,
    ),
    "a reduction whose arguments have two types": (
        "int k = reduce(g, 0, [&](int a, float b) -> int { return a + (b > 0.4); });"
        " float* v = map(g, [&](float x) -> float { return x + k; }); c = concat(v);",
        SENT,
    ),
    "a reduction inside a reduction's lambda": (
        "float k = reduce(g, 0.0, [&](float a, float b) -> float { return a + reduce(map(g,"
        " [&](float z) -> float { return z * b; }), 0.0, max); });"
        " float* v = map(g, [&](float x) -> float { return x + k; }); c = concat(v);",
        SENT,
    ),
    "random in a decode function": (
        "uint8* q = map(g, [&](float a) -> uint8 { return a; }); c = concat(q);",
        "void XDecode(uint8* c, float* g) { uint8* q; extract(c, q);"
        " g = map(q, [&](uint8 x) -> float { return x + random<float>(0, 1); }); }",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_before_any_code_is_made(name: str) -> None:
    body, decoder = REFUSED[name]
    text = f"void XEncode(float* g, uint8* c) {{ {body} }}\n{decoder}\n"
    with pytest.raises(ProgramError):
        bound(text).kernels(variant=Variant(feedback=True))


@pytest.mark.parametrize("backend", BOTH)
def test_an_index_out_of_range_in_encode_is_an_error(backend: str) -> None:
    body = (
        "float* s = scatter(map(range(g.size), [&](int i) -> int { return i * 2; }), g, g.size);"
        " c = concat(s);"
    )
    program = bound(f"void XEncode(float* g, uint8* c) {{ {body} }}\n{SENT}\n")
    with pytest.raises(IndexError, match="an index of a scatter is out of range"):
        encode(program, backend, X)


@pytest.mark.parametrize("backend", BOTH)
def test_an_index_out_of_range_in_a_payload_is_refused(backend: str) -> None:
    case = next(c for c in CASES if c.name == "codes of kept values")
    program = bound(case.text)
    _, body, _ = encode(program, backend, X)
    body[16:20] = 255
    with pytest.raises(Refused, match="an index in the payload is out of range"):
        decode(program, backend, body, len(X))


ELSEWHERE = {
    "zeros behind the places": "g = scatter(ix, v, g.size);",
    "as many as there is room": "g = scatter(first(ix, 8), first(v, 8), g.size);",
    "backwards": """int* back = map(range(ix.size), [&](int i) -> int { return ix[7 - i]; });
        g = scatter(back, v, g.size);""",
    "each twice": """int* twice = map(range(ix.size), [&](int i) -> int { return ix[i / 2]; });
        g = scatter(twice, v, g.size);""",
}


@pytest.mark.parametrize(
    ("how", "backend"),
    thinned(
        itertools.product(ELSEWHERE, BOTH),
        lambda cell: cell[1] != "cpu" or cell[0] in ("backwards", "each twice"),
    ),
)
def test_places_may_be_read_in_any_order(how: str, backend: str) -> None:
    """Catches: a frame that is as it was sent, and is refused because its places do not ascend."""
    text = f"""void XEncode(float* g, uint8* c) {{
        uint32* ix = filter(range(g.size), [&](int i) -> uint1 {{ return g[i] > 2.0; }}, 8);
        float* v = gather(g, ix);
        c = concat(ix, v);
    }}
    void XDecode(uint8* c, float* g) {{
        uint32 ix[8]; float v[8]; extract(c, ix, v); {ELSEWHERE[how]}
    }}"""
    x = np.zeros(50, np.float32)
    x[[3, 7, 40]] = 3.0, 5.0, 4.0
    want = run_oracle(text, {}, x).decoded
    np.testing.assert_array_equal(run(bound(text), backend, x, add=False).decoded, want)


FILTERED = {
    "as a gradient": ("g.size", "g = v;"),
    "its size": (
        "8",
        """float s = v.size;
        g = map(range(g.size), [&](int i) -> float { return v[i] + s; });""",
    ),
    "zeros put back": ("8", "g = scatter(ix, v, g.size);"),
    "as many as were taken": ("8", "g = scatter(first(ix, k), first(v, k), g.size);"),
    "zeros that are none any more": (
        "8",
        """float* w = map(v, [&](float x) -> float { return x + 1.0; });
        g = scatter(ix, w, g.size);""",
    ),
    "changed, then as many as were taken": (
        "8",
        """float* w = map(v, [&](float x) -> float { return x + 1.0; });
        g = scatter(first(ix, k), first(w, k), g.size);""",
    ),
    "a sum": (
        "8",
        """float s = reduce(map(v, [&](float x) -> float { return x + 1.0; }), 0.0,
                         [&](float a, float b) -> float { return a + b; });
        g = map(range(g.size), [&](int i) -> float { return s; });""",
    ),
    "beside another array": (
        "8",
        """float* w = map(v, range(8), [&](float x, int i) -> float { return x + i; });
        g = scatter(ix, w, g.size);""",
    ),
    "drawn for": (
        "8",
        """float* w = map(first(v, k), [&](float x) -> float {
            return x + random<int>(0, 8, 5) / 8.0; });
        g = scatter(first(ix, k), w, g.size);""",
    ),
}


@pytest.mark.parametrize(
    ("how", "backend"),
    thinned(
        [(how, backend) for how in FILTERED for backend in BOTH],
        keep=lambda cell: cell[1] == "reference" or cell[0] == "its size",
    ),
)
def test_error_feedback_decodes_what_is_received(how: str, backend: str) -> None:
    """Catches: a residual of what the filter took, where decode sees all the room it was given."""
    room, decoded = FILTERED[how]
    text = f"""void XEncode(float* g, uint8* c) {{
        uint32* ix = filter(range(g.size), [&](int i) -> uint1 {{ return g[i] > 1.0; }}, {room});
        float* v = gather(g, ix);
        c = concat(ix.size, ix, v);
    }}
    void XDecode(uint8* c, float* g) {{
        int k; uint32* ix; float* v; extract(c, k, ix, v); {decoded}
    }}"""
    made, variant = bound(text), Variant(feedback=True)
    for n in (5, 16, 40):
        x = (np.random.default_rng(n).integers(-24, 25, n) / 8).astype(np.float32)
        held = [np.zeros(n, np.float32)]
        right = run_oracle(text, {}, x, held, variant=variant)
        found = run(made, backend, x, held, variant=variant, add=False)
        assert found.body.tobytes() == right.body.tobytes()
        np.testing.assert_array_equal(found.decoded, right.decoded)
        np.testing.assert_array_equal(found.states[0], right.states[0])


HOSTILE_COUNT = """void XEncode(float* g, uint8* c) {
    int k = reduce(map(g, [&](float x) -> int { return x; }), 0, [&](int a, int b) -> int {
        return a + b; });
    float* s = scan(first(g, k), 0.0, [&](float a, float b) -> float { return a + b; });
    float* q = map(range(g.size), [&](int i) -> float { return s[i]; });
    c = concat(q);
}
"""
FAR = """void XEncode(float* g, uint8* c) {
    float* t = map(range(4), [&](int i) -> float { return i; });
    c = concat(t);
}
void XDecode(uint8* c, float* g) {
    float t[4];
    extract(c, t);
    g = map(range(g.size), [&](int i) -> float { return t[3000]; });
}
"""


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(("value", "last"), [(2.0, 200.0), (20000.0, 2e6), (-5.0, 0.0)])
def test_a_count_that_encode_made_stays_inside_the_array(
    value: float, last: float, backend: str
) -> None:
    x = np.full(100, value, np.float32)
    program = bound(HOSTILE_COUNT + SENT)
    _, body, _ = encode(program, backend, x)
    assert decode(program, backend, body, len(x))[-1] == last


@pytest.mark.parametrize("backend", BOTH)
def test_a_literal_index_past_the_end_is_clamped(backend: str) -> None:
    program = bound(FAR)
    _, body, _ = encode(program, backend, X)
    assert set(decode(program, backend, body, len(X)).tolist()) == {3.0}
