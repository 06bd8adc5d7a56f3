"""Programs with `per` over arrays of other lengths than the gradient's.

`OTHERS` are bodies of encode functions that make `float* a` of `float* g`; `m` is a quarter of the
gradient's length, and blocks have 8 elements, so that `LENGTHS` gives `m` each side of a block.
"""

from __future__ import annotations

from tests.compll.block_programs import ADD, SUM, program

LENGTHS = (1, 4, 28, 32, 37, 110, 4099)
"""Lengths of a gradient whose quarter is 0, 1, 7, 8, 9, 27 and 1024 elements."""

QUARTER = """
        int m = g.size / 4;
        float* v = map(range(m), [&](int i) -> float { return g[3 * i] - g[i]; });"""
"""An array of another length."""

OTHERS = {
    "a number and codes": QUARTER + """
        per (v, 8) {
            float top = reduce(map(v, abs), 0.0, max);
            uint4* code = map(v, [&](float x) -> uint4 { return top > 0.0 ? 8 + 7 * x / top : 0; });
            int count = v.size;
        }
        a = map(range(g.size), [&](int i) -> float {
            return code[i] + top[i / 32] + 100 * count[i / 32] + v[i / 4];
        });""",
    "largest and back": QUARTER + """
        per (v, 8) {
            int* at = largest(map(v, abs), 3);
            float* most = gather(v, at);
        }
        per (v, 8) { float* w = scatter(at, most, v.size); }
        a = map(range(g.size), [&](int i) -> float { return w[i] + at[i / 3] + most[i / 5]; });""",
    "sorted, scanned and filtered": QUARTER + f"""
        per (v, 24) {{
            float* s = sort(v);
            int* k = scan(map(v, [&](float x) -> int {{ return x > 0.0; }}), 0, {SUM});
            float* f = filter(v, [&](float x) -> uint1 {{ return x > 0.25; }}, 5);
            float* two = first(f, 2);
            float total = reduce(f, 3.0, max);
            int kept = f.size;
            float middle = s[v.size / 2];
        }}
        a = map(range(g.size), [&](int i) -> float {{
            return s[i] + k[i] + f[i] + two[i] + total[i / 24] + kept[i / 24] + middle[i / 24];
        }});""",
    "stored, repeated and drawn": QUARTER + """
        per (v, 16) {
            float* x = map(range(16), [&](int i) -> float { return v[i]; });
            repeat (s, 4) {
                x = store(x);
                x = map(range(16), [&](int i) -> float {
                    return x[i ^ (1 << s)] + (i >> s & 1 ? -x[i] : x[i]);
                });
            }
            float* drawn = map(v, [&](float y) -> float { return y + random<int>(0, 8); });
            float* rows = map(x, [&](float y) -> float { return y + random<int>(0, 8); });
            float* six = map(range(6), [&](int i) -> float {
                return drawn[i] + random<int>(0, 4);
            });
        }
        a = map(range(g.size), [&](int i) -> float { return drawn[i] + rows[i] + six[i]; });""",
    "blocks of the gradient and of another array, of one size": QUARTER + f"""
        per (8) {{
            float sum = reduce(map(g, abs), 0.0, {ADD});
            float* near = map(g, [&](float x) -> float {{ return x - sum; }});
        }}
        per (v, 8) {{
            float high = reduce(v, -100.0, max);
            float* far = map(v, [&](float x) -> float {{ return x - high + near[3]; }});
        }}
        a = map(near, range(g.size), [&](float x, int i) -> float {{
            return x + far[i / 4] + high[i / 32] + sum[i / 8];
        }});""",
    "blocks of the gradient and of another array, of two sizes": QUARTER + """
        per (16) { float low = reduce(g, 100.0, min); int* at = largest(g, 2); }
        per (v, 8) {
            float high = reduce(v, -100.0, max);
            float* twice = map(v, [&](float x) -> float { return 2 * x + low[1] + at[3]; });
        }
        per (16) {
            a = map(g, range(g.size), [&](float x, int i) -> float {
                return x + low + twice[i] + high[1] + at[1];
            });
        }""",
    "one array in blocks of two sizes": QUARTER + """
        per (v, 8) { float* h = map(v, [&](float x) -> float { return x + v[7]; }); }
        float* double = map(h, [&](float x) -> float { return 2 * x; });
        per (v, 24) {
            float top = reduce(double, -100.0, max);
            float* w = map(double, v, [&](float x, float y) -> float { return x + y - h[5]; });
        }
        a = map(range(g.size), [&](int i) -> float { return h[i] + w[i] + top[i / 96]; });""",
    "the gradient in blocks of two sizes": """
        per (8) { float* h = map(g, [&](float x) -> float { return x + g[7]; }); }
        float* double = map(h, [&](float x) -> float { return 2 * x; });
        per (24) {
            float top = reduce(double, -100.0, max);
            a = map(double, sort(double), [&](float x, float y) -> float { return x + y - top; });
        }""",
    "rows and numbers of other blocks": QUARTER + """
        per (v, 8) {
            float* row = map(range(3), [&](int i) -> float { return v[i + 2]; });
            uint4* code = map(range(6), [&](int i) -> uint4 { return 4 + 4 * v[2 * i]; });
            uint2* few = map(range(3), [&](int i) -> uint2 { return v[i]; });
            float top = reduce(v, -9.0, max);
        }
        float* moved = map(top, [&](float t) -> float { return t + 1; });
        float* three = map(row, [&](float t) -> float { return t - 1; });
        per (v, 8) {
            float s = reduce(map(row, three, max), -9.0, max) + moved;
            float* w = map(v, range(v.size), [&](float x, int i) -> float {
                return x + row[i] + code[i] + few[i] + top;
            });
        }
        a = map(range(g.size), [&](int i) -> float { return s[i / 32] + w[i / 4]; });""",
    "blocks of numbers and of rows": """
        per (8) {
            float top = reduce(g, -100.0, max);
            int* at = largest(g, 3);
        }
        per (top, 8) { float best = reduce(top, -100.0, max); float* order = sort(top); }
        per (at, 16) {
            int sum = reduce(at, 0, [&](int x, int y) -> int { return x + y; });
            float* b = map(at, [&](int i) -> float { return i + top[0] + g[i]; });
        }
        a = map(range(g.size), [&](int i) -> float {
            return best[i / 64] + order[i / 8] + sum[i / 48] + b[i / 3];
        });""",
    "a fixed length": """
        float* v = map(range(20), [&](int i) -> float { return g[2 * i]; });
        per (v, 8) {
            float top = reduce(v, -100.0, max);
            float* w = map(v, [&](float x) -> float { return top - x; });
            int* at = largest(v, 2);
        }
        float* u = map(w, [&](float x) -> float { return x + 1; });
        per (16) {
            float all = reduce(u, -100.0, max);
            a = map(g, [&](float x) -> float { return x + all + w[9] + at[5]; });
        }""",
    "the same numbers everywhere": QUARTER + """
        lambda_func seven = [&](int i) -> float { return 7.0; }
        per (v, 8) { float one = 1.0; float* row = map(range(2), seven); }
        per (16) { float two = 1.0; float* wide = map(range(5), seven); }
        a = map(range(g.size), [&](int i) -> float {
            return one[i] + two[i] + row[i] + 3 * wide[i] + one.size + row.size + wide.size;
        });""",
    "a whole reduction inside": QUARTER + f"""
        per (v, 8) {{
            float all = reduce(map(g, abs), 0.0, max);
            float part = reduce(map(v, [&](float x) -> float {{ return x * all; }}), 0.0, {ADD});
            float* w = map(v, [&](float x) -> float {{ return x + g[1] + g.size; }});
        }}
        a = map(range(g.size), [&](int i) -> float {{ return w[i / 4] + part[i / 32]; }});""",
    "an array that is assigned": QUARTER + """
        float w[m];
        per (w, 8) {
            float top = reduce(v, -9.0, max);
            w = map(v, [&](float x) -> float { return x * top + w.size; });
            v = map(w, sort(v), [&](float x, float y) -> float { return x - y; });
        }
        a = map(range(g.size), [&](int i) -> float { return w[i] + v[i / 4]; });""",
    "a filtered array": QUARTER + f"""
        int* at = filter(range(m), [&](int i) -> uint1 {{ return v[i] > -1.0; }}, m / 2 + 1);
        float* f = gather(v, at);
        per (f, 8) {{
            float top = reduce(map(f, abs), 0.5, max);
            float* w = map(f, at, [&](float x, int i) -> float {{ return top * x + i + f[1]; }});
            float* s = sort(f);
            float* run = scan(f, 1.0, {ADD});
            int* two = largest(f, 2);
            float* high = filter(f, [&](float x) -> uint1 {{ return x > 0.0; }}, 3);
            float* drawn = map(f, [&](float x) -> float {{ return x + random<int>(0, 8); }});
            float* back = map(range(f.size), [&](int i) -> float {{ return f[f.size - 1 - i]; }});
            int count = f.size;
        }}
        uint4* code = map(w, s, [&](float x, float y) -> uint4 {{ return 5 + x - y; }});
        per (w, 24) {{
            float low = reduce(w, 100.0, min);
            w = map(w, [&](float x) -> float {{ return x - low; }});
            float* back = map(w, [&](float x) -> float {{ return x + low; }});
        }}
        float* d = scatter(at, w, m);
        float total = reduce(code, 0.0, {ADD}) + w.size;
        a = map(range(g.size), [&](int i) -> float {{
            return d[i / 4] + top[i / 64] + two[i / 8] + high[i / 8] + count[i / 64] + total
                + (i < w.size ? run[i] + drawn[i] + back[i] : 0);
        }});""",
    "gathered, then reduced and sorted": QUARTER + f"""
        per (gather(g, map(range(m), [&](int i) -> int {{ return 2 * i; }})), 8) {{
            float* w = map(v, [&](float x) -> float {{ return x + v.size; }});
        }}
        float total = reduce(w, 0.0, {ADD});
        float* s = sort(w);
        float* d = scan(w, 0.0, {ADD});
        int* f = filter(range(m), [&](int i) -> uint1 {{ return w[i] > 6.0; }});
        a = map(range(g.size), [&](int i) -> float {{
            return total + s[i] + d[i / 2] + (i < f.size ? f[i] : -1);
        }});""",
}  # fmt: skip


RANDOM_K = """
param P { int block = 64; int part = 8; }
void XEncode(float* g, uint8* c, P p) {
    int m = g.size / p.part;
    int key = random<int>(0, 1000000);
    float* v = gather(g, sample(range(g.size), m, key));
    per (v, p.block) {
        float top = reduce(map(v, abs), 0.0, max);
        uint4* code = map(v, [&](float x) -> uint4 {
            return top > 0.0 ? floor(8 + 7 * x / top + random<float>(0, 1)) : 8;
        });
    }
    c = concat(key, top, code);
}
void XDecode(uint8* c, float* g, P p) {
    int m = g.size / p.part;
    int key;
    float* top;
    uint4 code[m];
    extract(c, key, top, code);
    per (code, p.block) {
        float* v = map(code, [&](uint4 k) -> float { return (k - 8) * top / 7; });
    }
    g = scatter(sample(range(g.size), m, key), v, g.size);
}
"""
"""Some elements, drawn at random, in 4 bits with a scale for each block of them."""


FILTERED = """
param P { int block = 16; int first_only = 0; }
void XEncode(float* g, uint8* c, P p) {
    int room = g.size / 2 + 1;
    uint32* at = filter(range(g.size), [&](int i) -> uint1 { return abs(g[i]) > 1.5; }, room);
    float* v = gather(g, at);
    per (v, p.block) {
        float top = reduce(map(v, abs), 0.0, max);
        uint4* code = map(v, [&](float x) -> uint4 { return floor(8.5 + 7 * x / top); });
    }
    uint32 count = at.size;
    c = concat(count, at, top, code);
}
void XDecode(uint8* c, float* g, P p) {
    uint32 count;
    uint32* at;
    float* top;
    uint4 code[g.size / 2 + 1];
    extract(c, count, at, top, code);
    if (p.first_only) {
        uint4* used = first(code, count);
        per (used, p.block) {
            float* w = map(used, [&](uint4 k) -> float { return (k - 8) * top / 7; });
        }
        g = scatter(first(at, count), w, g.size);
    } else {
        per (code, p.block) {
            float* v = map(code, [&](uint4 k) -> float { return (k - 8) * top / 7; });
        }
        g = scatter(first(at, count), first(v, count), g.size);
    }
}
"""
"""Large elements in 4 bits with a scale for each block of them; decode cuts all codes, or some."""


def other(what: str) -> str:
    return program(OTHERS[what])
