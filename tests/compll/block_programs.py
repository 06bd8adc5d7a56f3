"""Bodies of encode functions that make `float* a` of `float* g`, with operators inside `per`."""

from __future__ import annotations

ADD = "[&](float x, float y) -> float { return x + y; }"
SUM = "[&](int x, int y) -> int { return x + y; }"
BODIES = {
    "the largest, put back": """
        per (16) {
            int* at = largest(map(g, abs), 3);
            float* v = gather(g, at);
        }
        per (16) { a = scatter(at, v, g.size); }""",
    "the largest of all": """
        per (8) { a = scatter(largest(g, 9), gather(g, largest(g, 9)), g.size); }""",
    "the largest ints": """
        per (24) {
            uint8* code = map(g, [&](float x) -> uint8 { return 3 + 2 * x; });
            a = scatter(largest(code, 5), gather(g, largest(code, 5)), g.size);
        }""",
    "sorted": "per (16) { a = sort(g); }",
    "sorted by a key": "per (24) { a = sort(g, abs); }",
    "an element of a sorted block": """
        per (16) {
            float m = sort(g)[g.size / 2];
            a = map(g, [&](float x) -> float { return x - m; });
        }""",
    "filtered": """
        per (16) {
            float* f = filter(g, [&](float x) -> uint1 { return x > 0.25; });
            int count = f.size;
            float total = reduce(f, 100.0, max);
            a = map(range(g.size), [&](int i) -> float { return i < count ? f[i] : total; });
        }""",
    "filtered with little room": """
        per (16) {
            int* f = filter(range(g.size), [&](int i) -> uint1 { return g[i] > 0.0; }, 3);
            float* twice = map(f, [&](int i) -> float { return 2 * g[i]; });
            a = scatter(f, twice, g.size);
        }
        a = map(a, range(a.size), [&](float v, int i) -> float { return v + twice[i]; });""",
    "none passes": """
        per (16) {
            float* f = filter(g, [&](float x) -> uint1 { return x > 1000.0; }, 4);
            int s = reduce(map(f, [&](float x) -> int { return 7; }), 5,
                           [&](int x, int y) -> int { return x * y; });
            a = map(g, [&](float x) -> float { return x + f[2] + f.size + s; });
        }""",
    "filtered twice": """
        per (16) {
            float* f = filter(g, [&](float x) -> uint1 { return x > 0.0; });
            float* h = filter(f, [&](float x) -> uint1 { return x < 1.0; }, 5);
            int two = first(h, 2).size;
            a = map(range(g.size), [&](int i) -> float { return h[i] + two; });
        }""",
    "scanned": f"per (16) {{ a = scan(g, 1.0, {ADD}); }}",
    "scanned ints and largest": f"""
        per (24) {{
            int* s = scan(map(g, [&](float x) -> int {{ return x > 0.0; }}), 0, {SUM});
            float* m = scan(g, -1.0, max);
            a = map(s, m, [&](int k, float x) -> float {{ return k + x; }});
        }}""",
    "places that meet": """
        per (16) {
            a = scatter(map(range(g.size), [&](int i) -> int { return i / 3; }), g, g.size);
        }""",
    "rows of codes": """
        per (16) {
            uint4* code = map(range(6), [&](int i) -> uint4 { return 4 + 4 * g[2 * i]; });
            uint1* odd = map(range(24), [&](int i) -> uint1 { return g[i % 16] > 0.0; });
            uint2* few = map(range(3), [&](int i) -> uint2 { return g[i]; });
        }
        uint2* kept = store(few);
        per (16) {
            float s = reduce(map(few, kept, [&](uint2 x, uint2 y) -> float { return x + y; }), 0.0,
                             max);
            a = map(range(g.size), [&](int i) -> float {
                return code[i / 3] + odd[i] + few[i] + s;
            });
        }""",
    "rows of an outer array": """
        per (16) { float* r = map(range(5), [&](int i) -> float { return g[2 * i]; }); }
        float* kept = store(r);
        per (16) {
            float top = reduce(kept, -9.0, max);
            int count = reduce(map(kept, [&](float x) -> int { return 3; }), 2,
                               [&](int x, int y) -> int { return x + y; });
            float* alike = map(range(3), [&](int i) -> float { return top; });
            float* twice = map(kept, [&](float x) -> float { return x + x; });
            float* drawn = map(kept, [&](float x) -> float { return random<int>(0, 8); });
        }
        a = map(range(g.size), [&](int i) -> float {
            return count[i / 16] + alike[i] + twice[i] + drawn[i] + top[i / 16];
        });""",
    "the first few": """
        per (16) {
            float* low = first(sort(g), 3);
            float* up = first(filter(g, [&](float x) -> uint1 { return x > 0.0; }), 4);
            float* all = first(g, 99);
            float* none = first(g, -5);
            int k = none.size + reduce(none, 7.0, max);
        }
        a = map(range(g.size), [&](int i) -> float {
            return low[i] + 64 * up[i] + 4096 * all[i] + k[i / 16];
        });""",
    "stored and repeated": """
        per (16) {
            float* x = map(range(16), [&](int i) -> float { return i < g.size ? g[i] : 0.0; });
            repeat (s, 4) {
                x = store(x);
                x = map(range(16), [&](int i) -> float {
                    return x[i ^ (1 << s)] + (i >> s & 1 ? -x[i] : x[i]);
                });
            }
            x = store(x);
            a = map(range(g.size), [&](int i) -> float { return x[i]; });
        }""",
    "partners of partners": """
        per (16) {
            float* x = store(map(range(16), [&](int i) -> float { return g[i]; }));
            float* y = store(map(range(16), [&](int i) -> float {
                return x[i ^ 8] + 2 * x[(i ^ 8) ^ 4];
            }));
            float* z = store(map(range(16), [&](int i) -> float {
                return y[i ^ 2] + 2 * y[(i & 7) ^ 2] + 4 * y[i];
            }));
            a = map(range(g.size), [&](int i) -> float { return z[i]; });
        }""",
    "bisection": """
        per (32) {
            float low = 0.0;
            float high = reduce(map(g, abs), 0.0, max);
            repeat (turn, 8) {
                float middle = (low + high) / 2;
                int above = reduce(map(g, [&](float x) -> int { return abs(x) >= middle; }), 0,
                                   [&](int x, int y) -> int { return x + y; });
                low = above >= 4 ? middle : low;
                high = above >= 4 ? high : middle;
            }
            a = map(g, [&](float x) -> float { return abs(x) >= low ? x : 0.0; });
        }""",
    "stored whole": """
        float* s = store(map(g, [&](float x) -> float { return 2 * x; }));
        a = map(range(g.size), [&](int i) -> float { return s[i + 1] + s[i - 1] + s[i]; });""",
    "repeated outside": """
        float* x = g;
        repeat (turn, 3) {
            x = store(map(range(g.size), [&](int i) -> float { return x[i] + x[i + 1 + turn]; }));
        }
        a = x;""",
    "random numbers in rows": """
        per (16) {
            float* u = map(range(12), [&](int i) -> float { return random<int>(0, 8); });
            float* w = map(range(5), [&](int i) -> float { return random<int>(0, 8); });
            repeat (turn, 2) {
                u = store(map(u, [&](float x) -> float { return x + random<int>(0, 4); }));
            }
            a = map(range(g.size), [&](int i) -> float { return u[i] + w[i] + g[i]; });
        }""",
    "blocks of two sizes": """
        per (16) { int* at = largest(g, 2); }
        per (8) { float* h = sort(g); }
        a = map(range(g.size), [&](int i) -> float { return at[i / 8] + h[i]; });""",
    "a row as long as a block": """
        per (16) { float* r = map(range(16), [&](int i) -> float { return g[15 - i]; }); }
        a = map(range(g.size), [&](int i) -> float { return r[i]; });
        per (16) {
            a = map(g, range(g.size), [&](float x, int i) -> float { return x + r[i]; });
        }""",
    "a fixed filter, read by the block": """
        float* t = map(range(6), [&](int i) -> float { return g[i]; });
        per (16) {
            int* odd = filter(range(8), [&](int i) -> uint1 { return i % 2; });
            float* v = gather(g, odd);
            float first = g[0];
            float* w = map(filter(t, [&](float x) -> uint1 { return x > 0.0; }, 5),
                           [&](float x) -> float { return x + first; });
            float m = reduce(v, 0.0, max);
            a = map(range(g.size), [&](int i) -> float { return v[i] + w[i] + m + w.size; });
        }
        a = map(a, range(a.size), [&](float x, int i) -> float { return x + odd[i] + v[i]; });""",
    "an outer filter, read by the block": """
        int* t = filter(range(g.size), [&](int i) -> uint1 { return g[i] > 0.0; }, 6);
        int* all = filter(range(g.size), [&](int i) -> uint1 { return g[i] > 0.5; });
        per (16) {
            float first = g[0];
            float* v = gather(g, t);
            float* w = map(t, [&](int i) -> float { return i + first; });
            float* u = gather(g, all);
            float m = reduce(w, 0.0, max);
            a = map(range(g.size), [&](int i) -> float { return v[i] + w[i] + m + u[i]; });
        }""",
    "fixed arrays, folded from a block's number": f"""
        per (16) {{
            float start = g[0];
            float* t = map(range(5), [&](int i) -> float {{ return i; }});
            float m = reduce(t, start, {ADD});
            float* s = scan(t, start, {ADD});
            a = map(range(g.size), [&](int i) -> float {{ return m + s[i]; }});
        }}""",
    "fixed values, added to a block": """
        per (16) {
            float* t = map(range(3), [&](int i) -> float { return i + 1; });
            a = scatter(map(range(3), [&](int i) -> int { return i / 8; }), t, g.size);
        }""",
    "the first of a fixed array": f"""
        float* t = map(range(6), [&](int i) -> float {{ return g[i]; }});
        per (16) {{
            int k = reduce(map(g, [&](float x) -> int {{ return x > 1.0; }}), 0, {SUM});
            float* f = first(t, k);
            float m = reduce(f, -9.0, max) + first(t, 9).size;
            a = map(range(g.size), [&](int i) -> float {{ return f[i] + m; }});
        }}""",
    "a row longer than the block, with little room": """
        per (64) {
            float* r = map(range(72), [&](int i) -> float { return g[i % 8] + i; });
            float* f = filter(r, [&](float x) -> uint1 { return x > 3.0; }, 3);
            float* two = first(f, 2);
            a = map(range(g.size), [&](int i) -> float { return f[i]; });
        }
        a = map(a, range(a.size), [&](float x, int i) -> float { return x + two[i]; });""",
    "the largest of a fixed array": """
        per (16) { int* at = largest(map(range(8), [&](int i) -> int { return i % 3; }), 3); }
        a = map(range(g.size), [&](int i) -> float { return at[i]; });""",
    "fixed arrays that leave": f"""
        float* t = store(map(range(6), [&](int i) -> float {{ return g[i]; }}));
        int* some = filter(range(g.size), [&](int i) -> uint1 {{ return g[i] > 0.0; }}, 6);
        per (16) {{
            float* same = t;
            float* ordered = sort(t);
            int* kept = store(range(8));
            int* sums = scan(range(6), 1, {SUM});
            float* spread = scatter(range(3), first(t, 3), 4);
            int* taken = some;
        }}
        a = map(range(g.size), [&](int i) -> float {{
            return same[i] + ordered[i] + kept[i] + sums[i] + spread[i] + taken[i];
        }});""",
    "elements of empty arrays": """
        float* t = map(range(g.size / 8), [&](int i) -> float { return i + 1; });
        float* none = filter(g, [&](float x) -> uint1 { return x > 1000.0; });
        float* u = map(none, [&](float x) -> float { return x + none.size + 1; });
        per (16) {
            a = map(range(g.size), [&](int i) -> float { return t[i] + u[i] + none[i] + g[i]; });
        }""",
    "bits of floats": """
        a = map(g, [&](float x) -> float {
            return from_bits(bits(x) & 4294901760) + (bits(x) >> 23 & 255) + from_bits(1 << 30);
        });""",
    "bits through map": "a = map(map(g, bits), from_bits);",
}  # fmt: skip


def program(body: str) -> str:
    return (
        "void XEncode(float* g, uint8* c) {\n    float a[g.size];\n"
        f"{body}\n    c = concat(a);\n}}\n"
        "void XDecode(uint8* c, float* g) { float a[g.size]; extract(c, a); g = a; }\n"
    )


def packed(bits: int) -> str:
    """A program that sends codes of some bits: of all elements, of blocks, of rows, one alone."""
    return f"""
void XEncode(float* g, uint8* c) {{
    uint{bits} alone = 3 + g[0];
    uint<{bits}>* code = map(g, [&](float x) -> uint{bits} {{ return 2 * x + 7; }});
    per (16) {{
        uint{bits} most = reduce(map(g, abs), 0.0, max);
        uint{bits}* some = map(largest(g, 3), [&](int i) -> uint{bits} {{ return i; }});
    }}
    uint{bits}* few = filter(code, [&](uint{bits} k) -> uint1 {{ return k > 6; }}, 20);
    c = concat(alone, code, most, some, few);
}}
void XDecode(uint8* c, float* g) {{
    uint{bits} alone; uint{bits}* code; uint{bits}* most; uint{bits}* some; uint{bits}* few;
    extract(c, alone, code, most, some, few);
    per (16) {{
        g = map(code, range(code.size), [&](uint{bits} k, int i) -> float {{
            return k + 8 * most + some[i] + few[i] + alone + code[i + 1];
        }});
    }}
}}
"""


def of_a_filter(bits: int) -> str:
    """A program that sends codes that are made of a filtered array and of its size."""
    return f"""
void XEncode(float* g, uint8* c) {{
    float* f = filter(g, [&](float x) -> uint1 {{ return x > 0.5; }}, 20);
    int count = f.size;
    uint<{bits}>* code = map(f, [&](float x) -> uint<{bits}> {{ return 2 * x + count; }});
    uint<{bits}>* more = map(code, [&](uint<{bits}> k) -> uint<{bits}> {{ return k + 1; }});
    uint<{bits}>* two = first(more, 2);
    c = concat(count, code, two);
}}
void XDecode(uint8* c, float* g) {{
    int count; uint<{bits}>* code; uint<{bits}>* two;
    extract(c, count, code, two);
    g = map(range(g.size), [&](int i) -> float {{ return code[i] + 8 * two[i] + count; }});
}}
"""
