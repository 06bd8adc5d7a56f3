"""The inner loops of generated code are vector code: seen in the instructions, not in a clock."""

from __future__ import annotations

import platform
import re
from importlib import resources
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from llvmlite import binding

from hipress.compll.build import import_source, parse_program
from hipress.compll.passes.derive import ALPHA, MU, PLAIN, Variant
from tests.compll.harness import RNG, scratch
from tests.grid import thinned

FEEDBACK = Variant(feedback=True)
# The loops over the elements of a tile; what surrounds them runs once per tile.
LOOPS = r"_(s|f)\d+$"
# As `int4`, rounded at random: the numbers of a block are drawn inside `per`.
RANDOM_IN_BLOCKS = """
void FourEncode(float* gradient, uint8* compressed) {
    per (128) {
        float scale = reduce(map(gradient, abs), 0.0, max) / 7.0;
        uint4* code = map(gradient, [&](float g) -> uint4 {
            return scale > 0.0 ? floor(g / scale + 8.0 + random<float>(0, 1)) : 8.0;
        });
    }
    compressed = concat(scale, code);
}

void FourDecode(uint8* compressed, float* gradient) {
    float scale[blocks(gradient.size, 128)];
    uint4 code[gradient.size];
    extract(compressed, scale, code);
    per (128) {
        gradient = map(code, [&](uint4 c) -> float { return (c - 8) * scale; });
    }
}
"""
# Codec or program, integer parameters, wrappers; its inner loops by name, and how many there must
# be.
CODECS: dict[str, tuple[str, dict[str, Any], Variant, str, int]] = {
    "ef(onebit)": ("onebit", {}, FEEDBACK, LOOPS, 4),
    "minmax(bits=2)": ("minmax", {"bitwidth": 2}, PLAIN, LOOPS, 4),
    "terngrad": ("terngrad", {}, PLAIN, LOOPS, 4),
    # By itself too: in a program with blocks it is called, not inlined.
    "random numbers": ("terngrad", {}, PLAIN, r"_uniforms$", 1),
    # Philox that is called for each number makes it 4 times slower.
    "random numbers in blocks": (RANDOM_IN_BLOCKS, {}, PLAIN, r"_((s|f)\d+|uniforms)$", 5),
    # Sampling and scattering jump about in memory: no vector code there.
    "ef(topk)": ("topk", {}, FEEDBACK, r"_scan$", 1),
}
# Arithmetic, comparison or conversion on whole registers of 32 or 64 bytes; moves do not count.
PACKED = re.compile(r"^\s*v(?!mov|zero|perm|extract|insert|broadcast)\w+\s.*%[yz]mm", re.M)


def why_not() -> str:
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"reads x86 instructions; this is {platform.machine()}"
    return "" if binding.get_host_cpu_features().get("avx2") else "this CPU has no AVX2"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def compiled(name: str, folder: Any, patch: pytest.MonkeyPatch) -> ModuleType:
    """The codec's module, compiled here and now: numba shows no instructions of cached code."""
    codec, params, variant, _, _ = CODECS[name]
    patch.setenv("HIPRESS_CACHE_DIR", str(folder))
    text, label = codec, name.replace(" ", "_")
    if "(" not in codec:
        text = resources.files("hipress.codecs").joinpath(f"{codec}.pse").read_text("utf-8")
        label = codec
    bound = parse_program(text).bind(params)
    encode, decode, _ = bound.kernels(variant=variant)
    module = import_source(bound.source("cpu", variant=variant), f"vectorised_{label}")
    n = 10_000
    x = np.random.RandomState(0).standard_normal(n).astype(np.float32)
    body = np.zeros(bound.body_bytes()(n), np.uint8)
    states = [np.zeros(n, np.float32) for _ in encode.states]
    module.encode(n, bound.floats(encode, {MU: 0.9}), RNG, body, x, states, scratch)
    for kernel in (module.decode, module.decode_add):
        refusal = kernel(n, bound.floats(decode, {ALPHA: 1.0}), RNG, body, x, scratch)
        assert refusal is None
    return module


@pytest.mark.parametrize(
    "name",
    thinned(CODECS, keep=("ef(onebit)", "random numbers", "random numbers in blocks")),
)
def test_inner_loops_use_vector_instructions(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = compiled(name, tmp_path, monkeypatch)
    *_, pattern, num_loops = CODECS[name]
    loops = {
        k: f for k, f in vars(module).items() if not k.startswith("_host") and re.search(pattern, k)
    }
    assert len(loops) == num_loops, sorted(vars(module))
    for loop, function in loops.items():
        (code,) = function.inspect_asm().values()
        assert PACKED.search(code), f"{loop} of {name} has no packed instruction"


def test_scalar_code_would_be_noticed() -> None:
    scalar = "\tvaddss\t(%rax), %xmm0, %xmm0\n\tvmovups\t%ymm0, (%rdi)\n\tvzeroupper\n"
    assert not PACKED.search(scalar)
    assert PACKED.search("\tvaddps\t(%rax), %ymm1, %ymm2\n")
