"""Values that the host computes before a kernel: large ints, tiny floats, NaN, large sizes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hipress
from hipress.compll.backends.cpu import prelude as cpu_prelude
from hipress.compll.build import import_source
from hipress.errors import UsageError
from tests.compll.harness import bound, run
from tests.grid import thinned

PROGRAM = """
void XEncode(float* g, uint8* c, int k, float t) {{
    {body}
    c = concat(s);
}}
void XDecode(uint8* c, float* g, int k, float t) {{
    float s;
    extract(c, s);
    g = map(range(g.size), [&](int i) -> float {{ return s; }});
}}
"""
LARGE = 2**62
IN_KERNEL = (
    f"float s = reduce(map(range(g.size), [&](int i) -> int {{ return i + b; }}), -{LARGE}, max);"
)
"""Takes b into a kernel and finds the largest of -2^62, b, b + 1, ..."""


def computed(backend: str, body: str, k: int = 1, t: float = 1.0) -> float:
    program = bound(PROGRAM.format(body=body), {"k": k, "t": t})
    with np.errstate(all="ignore"):
        return float(run(program, backend, np.ones(5, np.float32), add=False).decoded[0])


def wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(
    ("backend", "k"),
    thinned(
        itertools.product(["reference", "cpu"], [LARGE, -LARGE, LARGE - 12345, 3]),
        lambda cell: cell[0] == "reference" or cell[1] == LARGE,
    ),
)
def test_ints_larger_than_a_kernel_takes_wrap_there(backend: str, k: int) -> None:
    body = f"int b = g.size * k; {IN_KERNEL}"
    expected = max(-LARGE, *(wrapped(i + 5 * k) for i in range(5)))
    assert computed(backend, body, k) == np.float32(expected)


@pytest.mark.parametrize("backend", thinned(["reference", "cpu"], keep=("reference",)))
@pytest.mark.parametrize("k, expected", [(LARGE, np.inf), (-LARGE, -np.inf), (2, 5.0 * 2**19)])
def test_ints_larger_than_a_float(backend: str, k: int, expected: float) -> None:
    body = f"int b = g.size{' * k' * 19}; float s = b;"
    assert computed(backend, body, k) == expected


@pytest.mark.parametrize("backend", thinned(["reference", "cpu"], keep=("reference",)))
@pytest.mark.parametrize(
    "value, expected",
    [
        ("exponent(t)", -130),
        ("exponent(t * t)", -150),
        ("exponent(t * 0.0)", -150),
        ("exponent(1.0 / t / t)", 128),
        ("exponent(0.0 / (t - t))", 128),
        ("exp2((t - t) / (t - t))", np.nan),
        ("exp2(1.0 / (t - t))", np.inf),
        ("exp2(-1.0 / (t - t))", 0.0),
        ("exp2(1.0 / t)", np.inf),
    ],
)
def test_floats_at_the_ends(backend: str, value: str, expected: float) -> None:
    found = computed(backend, f"float s = {value};", t=2.0**-130)
    assert found == expected or (np.isnan(found) and np.isnan(expected))


@pytest.mark.parametrize("t", [1e39, -1e300, float("inf"), float("nan"), 10**400, "x"])
def test_a_float_parameter_that_a_kernel_cannot_hold(t: Any) -> None:
    with pytest.raises(UsageError) as error:
        bound(PROGRAM.format(body="float s = t;"), {"k": 1, "t": t})
    assert str(error.value) == f"X: t={t!r} must be a finite number, at most 3.4e38."


def test_a_size_that_no_frame_has(tmp_path: Path) -> None:
    path = tmp_path / "large.pse"
    path.write_text(
        """
void XEncode(float* g, uint8* c, int k) {
    float* v = map(range(g.size * k), [&](int i) -> float { return i; });
    c = concat(v);
}
void XDecode(uint8* c, float* g, int k) {
    float v[g.size * k];
    extract(c, v);
    g = map(range(g.size), [&](int i) -> float { return v[i]; });
}
"""
    )
    c = hipress.codec(str(path), k=LARGE)
    with pytest.raises(UsageError) as error:
        c.wire_bytes(5)
    size = 80 + 4 * 5 * LARGE
    assert str(error.value) == (
        f"{c.name} would make {size:,} bytes of 5 elements, more than a frame can have "
        f"({2**48:,}): a size in its program is too large."
    )


# --- files in the cache --------------------------------------------------------------------------


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_generated_files_follow_the_umask(
    umask: int, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPRESS_CACHE_DIR", str(tmp_path / "cache"))
    before = os.umask(umask)
    try:
        module = import_source(f"VALUE = {umask}\n", "umask")
    finally:
        os.umask(before)
    assert module.VALUE == umask and module.__file__ is not None
    assert Path(module.__file__).stat().st_mode & 0o777 == mode
    left = [path.name for path in (tmp_path / "cache" / "kernels").iterdir() if path.is_file()]
    assert left == [Path(module.__file__).name]


def test_the_longest_name_works() -> None:
    name = "X" * 94
    text = PROGRAM.format(body="float s = t;").replace("XEncode", f"{name}Encode")
    program = bound(text.replace("XDecode", f"{name}Decode"), {"k": 1, "t": 3.0})
    for backend in ("reference", "cpu"):
        assert run(program, backend, np.ones(5, np.float32), add=False).decoded[0] == 3.0


def test_float16_without_an_instruction_of_the_processor() -> None:
    """Catches: rounding that differs from machines with the instruction."""
    rng = np.random.default_rng(0)
    bits = np.concatenate([rng.integers(0, 2**32, 999), rng.integers(0x33000000, 0x47900000, 999)])
    values = bits.astype(np.uint32).view(np.float32)
    edges = [0.0, -0.0, 65504, 65519.996, 65520, 2**-24, 2**-25, 1 + 2**-11, 1 + 3 * 2**-11, np.inf]
    values = np.concatenate([values[~np.isnan(values)], np.array(edges, np.float32)])
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float16)
        made = [cpu_prelude._to_f16_bits(value) for value in values]
        back = [cpu_prelude._from_f16_bits(code) for code in made]
    assert np.array_equal(np.array(made, np.uint16), wanted.view(np.uint16))
    assert np.array_equal(np.array(back), wanted.astype(np.float32))
