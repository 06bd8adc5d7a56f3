"""Programs whose states have other types and lengths than the gradient."""

from __future__ import annotations

from hipress.compll.build import parse_program

DECODE = """
void XDecode(uint8* c, float* g) { float a[g.size]; extract(c, a); g = a; }"""

STATES = {
    "codes of 8 bits and a scale per block": """
void XEncode(float* g, inout uint8* code, inout float scale[blocks(g.size, 16)], uint8* c) {
    per (16) {
        float* v = map(g, code, [&](float x, uint8 q) -> float { return x + (q - 128) * scale; });
        float top = reduce(map(v, abs), 0.0, max);
        float* a = map(v, [&](float x) -> float { return x > 0.5 * top ? top : 0.0; });
        float* left = map(v, a, [&](float x, float y) -> float { return x - y; });
        float next = reduce(map(left, abs), 0.0, max) / 127;
        uint8* kept = map(left, [&](float r) -> uint8 {
            return next > 0.0 ? floor(r / next + 128.5) : 128.0;
        });
    }
    code = kept;
    scale = next;
    c = concat(a);
}""",
    "a number that counts": """
void XEncode(float* g, inout int turn, inout float rate, inout float* m, uint8* c) {
    float was = rate;
    turn = turn + 1;
    rate = turn == 1 ? 1.0 : rate * 0.5 + m[1];
    m = map(g, m, [&](float x, float y) -> float { return turn % 2 == 1 ? x + was : y - x; });
    c = concat(m);
}""",
    "floats of 16 bits": """
void XEncode(float* g, inout float16* h, inout bfloat16* b, uint8* c) {
    float* a = map(g, h, b, [&](float x, float y, float z) -> float { return x + y - z; });
    h = map(a, [&](float x) -> float { return x * 0.3; });
    b = map(g, h, [&](float x, float y) -> float { return x * 0.7 + y; });
    c = concat(a);
}""",
    "a table": """
void XEncode(float* g, inout int seen[8], inout float* m, uint8* c) {
    int* bin = map(g, [&](float x) -> int { return max(0, min(7, floor(x) + 4)); });
    int* now = scatter(bin, map(g, [&](float x) -> int { return 1; }), 8);
    float* a = map(g, bin, [&](float x, int b) -> float { return seen[b] + x; });
    m = map(m, bin, [&](float x, int b) -> float { return x + seen[7 - b]; });
    seen = map(now, seen, [&](int x, int y) -> int { return x + y + m[3]; });
    c = concat(a);
}""",
    "rows and numbers of blocks": """
void XEncode(float* g, inout float best[blocks(g.size, 16) * 3],
             inout int rounds[blocks(g.size, 16)], inout uint8 last[blocks(g.size, 16)], uint8* c) {
    per (16) {
        float* a = map(g, [&](float x) -> float { return x + best[2] * last + rounds; });
        int* at = largest(map(a, abs), 3);
        float* found = map(best, range(3), [&](float y, int i) -> float { return a[at[i]] - y; });
        int more = rounds + last;
        uint8 odd = rounds % 3;
    }
    best = found;
    rounds = map(more, [&](int x) -> int { return x + 1; });
    last = odd;
    c = concat(a);
}""",
    "each made of the others": """
void XEncode(float* g, inout float* r, inout float half[blocks(g.size, 2)], inout int k,
             uint8* c) {
    float* a = map(g, r, [&](float x, float y) -> float { return x + y + half[1] + k; });
    half = map(half, range(half.size), [&](float h, int i) -> float { return h + r[2 * i] + k; });
    r = map(g, range(g.size), [&](float x, int i) -> float { return x + r[i + 1] + half[i / 2]; });
    k = k + r[0] + half[0];
    c = concat(a);
}""",
    "a table in blocks": """
void XEncode(float* g, inout float table[g.size / 2], inout float top[blocks(g.size / 2, 8)],
             inout uint8 last[blocks(g.size / 2, 8) * 3], inout float* m, uint8* c) {
    per (table, 8) {
        float most = reduce(map(table, abs), top, max);
        table = map(table, range(table.size), [&](float t, int i) -> float {
            return 0.5 * t + table[i + 1] - most + last[i] + g[2 * i];
        });
        uint8* least = map(last, range(3), [&](uint8 k, int i) -> int { return table[i] + k; });
        float next = 0.25 * most + table[0];
    }
    top = next;
    last = least;
    float* a = map(g, m, range(g.size), [&](float x, float y, int i) -> float {
        return x + y + table[i / 2] + top[i / 16];
    });
    per (16) { m = map(g, m, [&](float x, float y) -> float { return x - m[3] + top[0]; }); }
    c = concat(a);
}""",
    "states in blocks of two scopes": """
void XEncode(float* g, inout float* r, inout float* s, inout float u[blocks(g.size, 8)],
             inout float h[g.size / 2], inout int k[g.size / 2], uint8* c) {
    per (8) { r = map(g, r, [&](float x, float y) -> float { return x - 0.5 * y + r[1]; }); }
    per (16) { s = map(s, g, [&](float x, float y) -> float { return y + s[0] + r[2]; }); }
    per (u, 8) { u = map(u, [&](float x) -> float { return x + u[1] + r[0] + 1; }); }
    per (h, 8) { h = map(h, [&](float x) -> float { return x * 0.5 + h[7] + s[1]; }); }
    per (k, 24) { k = map(k, sort(h), [&](int x, float y) -> int { return x + k[1] + y; }); }
    float* a = map(g, range(g.size), [&](float x, int i) -> float {
        return x + r[i] + s[i] + u[i / 8] + h[i / 2] + k[i / 2];
    });
    c = concat(a);
}""",
    "what a filter took": """
void XEncode(float* g, inout uint8* age, inout float16* r, uint8* c) {
    float* v = map(g, r, [&](float x, float y) -> float { return x + y; });
    int* at = filter(range(g.size), [&](int i) -> uint1 { return abs(v[i]) > 1.5; }, g.size / 3);
    float* sent = gather(v, at);
    float* a = scatter(at, sent, g.size);
    r = map(v, a, [&](float x, float y) -> float { return x - y; });
    age = map(age, a, [&](uint8 n, float y) -> int { return y == 0.0 ? n + 1 : 0; });
    c = concat(a);
}""",
}


def shapes(text: str, n: int) -> list[tuple[str, int]]:
    """The storage and the number of elements of each state, in the order of the arguments."""
    bound = parse_program(text).bind({})
    kernel = bound.kernels()[0]
    assert [a.name for a in kernel.states] == [f"state{k}" for k in range(len(kernel.states))]
    return [
        (a.storage, m) for a, m in zip(kernel.states, bound.state_numels(kernel)(n), strict=True)
    ]
