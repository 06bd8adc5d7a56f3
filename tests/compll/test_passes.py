"""How few passes a program becomes, and in what order: structure, not speed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from typing import Any

import numpy as np
import pytest

from hipress.compll.build import parse_program
from hipress.compll.ir import (
    Array,
    Compact,
    Expr,
    Fold,
    Kernel,
    Loop,
    Pass,
    Scalars,
    Scan,
    Scatter,
    Select,
    Sorting,
    walk,
)
from hipress.compll.passes.derive import PLAIN, Variant
from tests.compll.harness import bound, run, run_oracle

FEEDBACK = Variant(feedback=True)
MOMENTUM = Variant(feedback=True, momentum=True)
NESTEROV = Variant(feedback=True, momentum=True, nesterov=True)


def kernels(codec: str, variant: Variant = PLAIN, **params: Any) -> tuple[Kernel, ...]:
    """encode, decode and decode_add of a built-in codec."""
    text = resources.files("hipress.codecs").joinpath(f"{codec}.pse").read_text("utf-8")
    return parse_program(text, file=codec).bind(params).kernels(variant=variant)


def encoder(body: str, args: str = "", variant: Variant = PLAIN) -> Kernel:
    """The encode kernel of a program that sends `v`."""
    decode = "void XDecode(uint8* c, float* g) { float* v; extract(c, v); g = v; }"
    return bound(f"void XEncode(float* g, uint8* c{args}) {{ {body} }} {decode}").kernels(
        variant=variant
    )[0]


def kinds(kernel: Kernel) -> list[str]:
    return [type(p).__name__ for p in kernel.passes]


def over_gradient(kernel: Kernel) -> list[Pass]:
    """The passes that go over all elements of the gradient."""
    return [p for p in kernel.passes if domain(p) is not None and domain(p).op == "n"]


def domain(p: Pass) -> Any:
    if isinstance(p, Select | Sorting):
        return p.sort.length
    if isinstance(p, Scan):
        return p.fold.length
    return None if isinstance(p, Scalars) else p.length


def folds(p: Pass) -> list[Fold]:
    if isinstance(p, Loop):
        return [f for phase in p.phases for f in phase.folds]
    return list(p.folds) if isinstance(p, Compact) else []


def stored(p: Pass) -> set[str]:
    """Names of the arrays that a pass writes."""
    if isinstance(p, Loop):
        stores = [s for phase in p.phases for s in phase.stores] + list(p.block_stores)
        return {s.array.name for s in stores}
    if isinstance(p, Compact):
        return {s.array.name for s in (*p.emits, *p.stores)}
    if isinstance(p, Scalars):
        return {s.array.name for s in p.stores}
    return {p.array.name} if isinstance(p, Scan | Scatter) else {p.sort.values.name}


def read(p: Pass) -> set[str]:
    """Names of the arrays that a pass reads, inside reductions too."""
    roots: list[Expr] = []
    if isinstance(p, Loop):
        roots += [s.value for phase in p.phases for s in phase.stores]
        roots += [s.value for s in p.block_stores]
    elif isinstance(p, Compact):
        roots += [p.filter.keep, *(s.value for s in (*p.emits, *p.stores))]
    elif isinstance(p, Scalars):
        roots += [s.value for s in p.stores]
    elif isinstance(p, Scatter):
        roots += [p.index, p.value]
    roots += [f.body for f in folds(p)]
    return {a.name for a in loaded(roots)}


def loaded(roots: Iterable[Expr]) -> list[Array]:
    return [e.attr for e in walk(roots) if e.op in ("load", "load_clamped")]


# Reductions.


def test_two_reductions_over_one_array_are_one_pass() -> None:
    kernel = encoder(
        "float a = reduce(g, 0.0, max); float b = reduce(g, 0.0, min);"
        "float s = reduce(map(g, abs), 0.0, [&](float x, float y) -> float { return x + y; });"
        "float* v = map(g, [&](float x) -> float { return x / (a - b + s); }); c = concat(v);"
    )
    assert kinds(kernel) == ["Loop", "Loop"]
    assert len(folds(kernel.passes[0])) == 4  # the three, and the look-out for NaN
    assert folds(kernel.passes[1]) == []


def test_equal_reductions_are_made_once() -> None:
    kernel = encoder(
        "float a = reduce(map(g, abs), 0.0, max);"
        "lambda_func size = [&](float x) -> float { return abs(x); }"
        "lambda_func larger = [&](float x, float y) -> float { if (x > y) { return x; }"
        " return y; }"
        "float b = reduce(map(g, size), 0.0, larger);"
        "float* v = map(g, [&](float x) -> float { return x / (a + b); }); c = concat(v);"
    )
    assert [f.kind for f in folds(kernel.passes[0])] == ["max", "or"]


def test_a_reduction_that_needs_another_waits_for_it() -> None:
    kernel = encoder(
        "float a = reduce(map(g, abs), 0.0, max);"
        "float b = reduce(map(g, [&](float x) -> float { return x / a; }), 0.0, max);"
        "float* v = map(g, [&](float x) -> float { return x / b; }); c = concat(v);"
    )
    assert kinds(kernel) == ["Loop", "Loop", "Loop"]


def test_a_chain_of_maps_is_one_pass_without_memory() -> None:
    kernel = encoder(
        "float* a = map(g, [&](float x) -> float { return x * 2.0; });"
        "float* b = map(a, g, [&](float x, float y) -> float { return x + y; });"
        "float* v = map(range(g.size), [&](int i) -> float { return b[i] * a[i]; });"
        "c = concat(v);"
    )
    assert kinds(kernel) == ["Loop"] and kernel.temps == ()


# The built-in codecs.


@pytest.mark.parametrize(
    ("variant", "reads"),
    [
        (PLAIN, {"x"}),
        (FEEDBACK, {"x", "residual"}),
        (MOMENTUM, {"x", "residual", "momentum"}),
        (NESTEROV, {"x", "residual", "momentum"}),
    ],
)
def test_a_block_scoped_quantiser_reads_the_gradient_once(variant, reads) -> None:
    """Scale, signs and residual: the block is in cache when the second phase needs it."""
    encode, decode, add = kernels("onebit", variant)
    assert kinds(encode) == ["Loop"]
    (loop,) = encode.passes
    assert isinstance(loop, Loop) and loop.block == 1024 and len(loop.phases) == 2
    assert read(loop) == reads
    assert stored(loop) == {"section0", "section1", *(reads - {"x"})}
    assert encode.temps == ()
    assert kinds(decode) == kinds(add) == ["Loop"]


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16"])
def test_a_cast_is_one_pass(codec: str) -> None:
    for kernel in kernels(codec):
        assert kinds(kernel) == ["Loop"] and kernel.temps == ()


@pytest.mark.parametrize(("codec", "params"), [("minmax", {"bitwidth": 2}), ("terngrad", {})])
def test_a_whole_gradient_quantiser_is_two_passes(codec: str, params: dict[str, Any]) -> None:
    for variant in (PLAIN, FEEDBACK, MOMENTUM, NESTEROV):
        encode, decode, add = kernels(codec, variant, **params)
        assert kinds(encode) == ["Loop", "Loop", "Scalars"]
        assert encode.temps == ()
        assert kinds(decode) == kinds(add) == ["Loop"]


@pytest.mark.parametrize("variant", [PLAIN, FEEDBACK, MOMENTUM, NESTEROV])
def test_topk_goes_over_the_gradient_once(variant: Variant) -> None:
    """A sample, its threshold, and one pass that filters, sends and keeps the residual."""
    encode, decode, add = kernels("topk", variant)
    assert kinds(encode) == ["Loop", "Select", "Compact", "Scalars"]
    (compact,) = over_gradient(encode)
    assert isinstance(compact, Compact)
    states = {s.name for s in encode.states}
    assert stored(compact) == {"section1", "section2", *states}
    assert kinds(decode) == kinds(add) == ["Scatter"]


def test_decode_add_of_a_sparse_payload_touches_only_what_was_sent() -> None:
    _, decode, add = kernels("topk")
    (clearing,), (adding,) = decode.passes, add.passes
    assert isinstance(clearing, Scatter) and clearing.clear
    assert isinstance(adding, Scatter) and not adding.clear and domain(adding).op != "n"


# States.

DGC = """
param Dgc { float mu = 0.5; int k = 4; }
void DgcEncode(float* g, uint8* c, inout float* u, inout float* v, Dgc p) {
    float* moved = map(u, g, [&](float a, float b) -> float { return p.mu * a + b; });
    float* total = map(v, moved, [&](float a, float b) -> float { return a + b; });
    float limit = sort(map(total, abs))[g.size - p.k];
    uint32* ix = filter(range(g.size), [&](int i) -> uint1 { return abs(total[i]) >= limit; }, p.k);
    float* sent = gather(total, ix);
    float* taken = scatter(ix, map(ix, [&](int i) -> float { return 1.0; }), g.size);
    lambda_func left = [&](float a, float t) -> float { return t > 0.0 ? 0.0 : a; }
    u = map(moved, taken, left);
    v = map(total, taken, left);
    uint32 count = ix.size;
    c = concat(count, ix, sent);
}
void DgcDecode(uint8* c, float* g, Dgc p) {
    uint32 count; uint32* ix; float* sent;
    extract(c, count, ix, sent);
    g = scatter(first(ix, count), first(sent, count), g.size);
}
"""


def test_states_are_written_in_the_pass_that_takes() -> None:
    """Momentum and residual of DGC are masked where an element is sent: the same pass does it."""
    encode = bound(DGC).kernels()[0]
    compact = encode.passes[-2]
    assert isinstance(compact, Compact)
    assert stored(compact) == {"section1", "section2", "state0", "state1"}
    for p in encode.passes[:-2]:
        assert not stored(p) & {"state0", "state1"}


def test_old_states_last_until_the_last_pass_that_reads_them() -> None:
    """A sample of the state is read in the first pass; the new state comes after all others."""
    text = """
void XEncode(float* g, uint8* c, inout float* u) {
    float* total = map(u, g, [&](float a, float b) -> float { return a + b; });
    float limit = sort(sample(map(total, abs), 8))[6];
    uint2* q = map(total, [&](float x) -> uint2 { return x > limit ? 2 : (x < -limit ? 0 : 1); });
    u = map(total, q, [&](float x, uint2 k) -> float { return x - (k - 1) * limit; });
    c = concat(limit, q);
}
void XDecode(uint8* c, float* g) {
    float limit; uint2* q;
    extract(c, limit, q);
    g = map(q, [&](uint2 k) -> float { return (k - 1) * limit; });
}
"""
    encode = bound(text).kernels()[0]
    writing = [k for k, p in enumerate(encode.passes) if "state0" in stored(p)]
    reading = [k for k, p in enumerate(encode.passes) if "state0" in read(p)]
    assert len(writing) == 1 and writing[0] == max(reading)
    x = np.random.RandomState(0).standard_normal(300).astype(np.float32)
    u = np.linspace(-2, 2, 300, dtype=np.float32)
    want = run_oracle(text, {}, x, [u])
    for backend in ("reference", "cpu"):
        got = run(bound(text), backend, x, [u], add=False)
        np.testing.assert_array_equal(got.states[0], want.states[0])
        np.testing.assert_array_equal(got.decoded, want.decoded)


def test_a_state_read_at_another_index_is_written_in_a_later_pass() -> None:
    """Reversing a state in place would read what was just written."""
    kernel = encoder(
        "float* t = map(range(g.size), [&](int i) -> float { return g[i] + g[g.size - 1 - i]; });"
        "float* w = u; float* v = map(range(g.size), [&](int i) -> float"
        " { return w[g.size - 1 - i] + t[i]; });"
        "u = map(v, [&](float x) -> float { return x; }); c = concat(v);",
        ", inout float* u",
    )
    writing = [k for k, p in enumerate(kernel.passes) if "state0" in stored(p)]
    aside = [
        k for k, p in enumerate(kernel.passes) if "state0" in read(p) and "state0" not in stored(p)
    ]
    assert aside and writing and max(aside) < min(writing)


def test_an_untouched_state_is_not_written() -> None:
    body = "float* v = map(g, u, [&](float x, float y) -> float { return x - y; }); c = concat(v);"
    kernel = encoder(body, ", inout float* u")
    assert all("state0" not in stored(p) for p in kernel.passes)
