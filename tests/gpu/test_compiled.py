"""Generated kernels compile for a GPU where there is none, and read memory in wide loads."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hipress
from hipress.codecs import residual
from hipress.codecs.program import ProgramCodec
from hipress.compll.ir import Kernel
from hipress.compll.passes.derive import Variant
from tests.compll.block_programs import BODIES
from tests.compll.harness import bound
from tests.compll.length_programs import FILTERED, OTHERS, RANDOM_K, other
from tests.gpu.contract import EMPTY, OWN, UNEVEN, block_program, own
from tests.grid import thinned

ARCHITECTURE = 90
"""H100 and H200."""
WIDE = {"ef(onebit)": "encode_p0", "minmax(bits=2)": "encode_p1", "topk": "encode_p\\d_mark"}
"""Codecs and their main pass: one over blocks; a second one, with random numbers; a filter."""
CODECS = thinned(
    (*WIDE, *(c for c in hipress.codecs.names() if c not in ("onebit", "minmax", "topk"))),
    keep=(*WIDE, "int8"),
)


def missing() -> str:
    """Why kernels cannot be compiled here; empty if they can."""
    found = importlib.util.find_spec("triton")  # imported only where it is used
    if found is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set: functions are interpreted, not compiled"
    folders = found.submodule_search_locations or ()
    shipped = any((Path(f) / "backends" / "nvidia" / "bin" / "ptxas").exists() for f in folders)
    if not shipped and shutil.which("ptxas") is None:
        return "there is no ptxas, which compiles for NVIDIA GPUs"
    return ""


needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing() or "none")


def pointers(kernel: Kernel, arguments: list[str]) -> dict[str, str]:
    """Triton's types of a kernel's arguments, by name."""
    fixed = {"I": "i64", "F": "fp32", "Z": "u8", "W": "u8", "E": "i32", "H": "u8", "frame": "u8"}
    fixed |= {"rho": "fp32", "seed": "i64", "stream": "i64", "step": "i64", "T": "i32"}
    caller = kernel.input or kernel.output
    assert caller is not None
    gradient = {"f32": "fp32", "f16": "fp16", "bf16": "i16"}[caller.storage]
    others = {caller.name: gradient}
    return {a: f"*{fixed.get(a) or others.get(a, 'fp32')}" for a in arguments}


@cache
def compiled(expr: str, dtype: str = "f32") -> dict[str, Any]:
    """All kernels of a codec, compiled, by name."""
    codec = hipress.codec(expr)
    assert isinstance(codec, ProgramCodec)
    return kernels_of(codec, dtype)


def kernels_of(codec: ProgramCodec, dtype: str = "f32") -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    loaded = codec.bound.load("gpu", dtype=dtype, variant=codec.variant)
    found = {}
    for name in ("encode", "decode", "decode_add"):
        kernel = loaded.encode if name == "encode" else loaded.decode
        for function, warps, *_ in getattr(loaded.module, f"{name}_launches"):
            if warps == 0:  # torch's sort
                continue
            constants = {p.name: 0 for p in function.params if p.is_constexpr}
            arguments = [a for a in function.arg_names if a not in constants]
            signature = pointers(kernel, arguments) | dict.fromkeys(constants, "constexpr")
            # Memory of torch lies on multiples of 16 bytes; a launch finds that out by itself.
            places = [k for k, a in enumerate(function.arg_names) if a not in constants]
            aligned = {(k,): [["tt.divisibility", 16]] for k in places}
            source = ASTSource(function, signature, constants, aligned)
            found[function.__name__] = triton.compile(
                source,
                target=GPUTarget("cuda", ARCHITECTURE, 32),
                options={"num_warps": warps, "enable_fp_fusion": False},
            )
    return found


@needs_compiler
@pytest.mark.parametrize("expr", CODECS)
def test_every_kernel_compiles(expr: str) -> None:
    kernels = compiled(expr)
    assert {name.split("_")[1] for name in kernels} == {"encode", "decode"}
    for name, kernel in kernels.items():
        assert f".target sm_{ARCHITECTURE}" in kernel.asm["ptx"], name
        assert kernel.asm["cubin"][:4] == b"\x7fELF", name


@needs_compiler
@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_stored_residuals_compile(kind: str) -> None:
    kernels = kernels_of(residual.keeper(kind))
    assert all(kernel.asm["cubin"][:4] == b"\x7fELF" for kernel in kernels.values())


EXAMPLES = Path(__file__).parents[2] / "examples"


@needs_compiler
@pytest.mark.parametrize(
    "program",
    thinned(
        ["blocktopk.pse", "ef(blocktopk.pse)", "rotated.pse", "ef8.pse"],
        keep=["blocktopk.pse", "ef8.pse"],
    ),
)
def test_arrays_of_blocks_compile(program: str) -> None:
    """Sorting, gathering and scattering inside a tile, which the interpreter does another way."""
    kernels = compiled(re.sub(r"\w+\.pse", lambda name: str(EXAMPLES / name[0]), program))
    assert all(kernel.asm["cubin"][:4] == b"\x7fELF" for kernel in kernels.values())


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [RANDOM_K, FILTERED, *thinned(map(other, OTHERS), keep=[other("largest and back")])],
    ids=["RANDOM_K", "FILTERED", *OTHERS],
)
def test_blocks_of_other_lengths_compile(text: str) -> None:
    codec = ProgramCodec(bound(text), name="x", backend="gpu", variant=Variant(feedback=True))
    assert all(kernel.asm["cubin"][:4] == b"\x7fELF" for kernel in kernels_of(codec).values())


@needs_compiler
@pytest.mark.parametrize(
    "what", thinned(BODIES, keep=["a row longer than the block, with little room"])
)
def test_programs_of_blocks_compile(what: str) -> None:
    codec = ProgramCodec(bound(block_program(BODIES[what])), name="x", backend="gpu")
    assert all(kernel.asm["cubin"][:4] == b"\x7fELF" for kernel in kernels_of(codec).values())


@needs_compiler
@pytest.mark.parametrize("expr", WIDE)
def test_the_main_pass_reads_four_floats_at_once(expr: str) -> None:
    (name,) = [k for k in compiled(expr) if re.fullmatch(f"_{WIDE[expr]}", k)]
    ptx = compiled(expr)[name].asm["ptx"]
    assert wide_loads(ptx) > 0
    assert wide_loads(ptx.replace(".v4.", ".")) == 0  # so this can fail


@needs_compiler
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_random_pass_reads_eight_numbers_of_16_bits_at_once(dtype: str) -> None:
    kernel = compiled("minmax(bits=2)", dtype)["_encode_p1"]
    assert wide_loads(kernel.asm["ptx"]) > 0
    # Random numbers are made where they are used: only packed codes go through shared memory.
    moved = re.findall(r"ttg\.convert_layout .* : tensor<([\dx]+)x", kernel.asm["ttgir"])
    assert set(moved) <= {"1x256"}


@needs_compiler
@pytest.mark.parametrize("expr", CODECS)
def test_nothing_is_fused_and_nothing_spills(expr: str) -> None:
    # A fused multiply-add would make the GPU decode other bits than the CPU (promise 1).
    for name, kernel in compiled(expr).items():
        ptx = kernel.asm["ptx"]
        if "decode" in name:
            assert not re.search(r"\bfma\.rn\.f32", ptx), name
        assert not re.search(r"\.local\b", ptx), name


@needs_compiler
def test_16_bits_compile_too() -> None:
    kernels = compiled("ef(onebit)", "bf16")
    assert "v4" in kernels["_encode_p0"].asm["ptx"]


def shared_sums(ir: str) -> list[tuple[str, str]]:
    """The shape of each sum of floats, and how threads share its elements: that sets its bits."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.M))
    sums = re.findall(r"\}\) : \(tensor<([\dx]+xf32), (#\w+|#ttg[^)]*)>\) ->", ir)
    # What is put in any order before a sum is in the order of the threads.
    sums += re.findall(r"allow_reorder : tensor<([\dx]+xf32), (#\w+|#ttg.*?)> ->", ir)
    return [(shape, layouts.get(layout, layout)) for shape, layout in sums]


SUMMED = ("onebit", "onebit(block=72)", "momentum(ef(onebit))", "terngrad", "dithering(norm=l2)")


@needs_compiler
@pytest.mark.parametrize("expr", thinned(SUMMED, keep=("onebit", "momentum(ef(onebit))")))
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bits_are_summed_in_the_order_of_32(expr: str, dtype: str) -> None:
    found = 0
    for name, kernel in compiled(expr, dtype).items():
        sums = shared_sums(kernel.asm["ttgir"])
        assert sums == shared_sums(compiled(expr)[name].asm["ttgir"]), name
        found += len(sums)
    assert found


def halves_apart(ir: str) -> list[str]:
    """Reductions of several tensors, one of them of elements in an order of its own.

    Triton lets a reshape reorder elements if only a reduction follows. Each tensor has an order of
    its own then, so pairs of a mask and a value come apart; the interpreter never reorders.
    """
    free = set(re.findall(r"(%\w+) = tt\.reshape %\w+ allow_reorder", ir))
    reduced = re.findall(r'"tt\.reduce"\(([^)]*)\)', ir)
    return [given for given in reduced if "," in given and free & set(given.split(", "))]


@needs_compiler
@pytest.mark.parametrize("what", OWN)
def test_what_is_there_stays_with_its_value(what: str) -> None:
    pairs = 0
    for name, kernel in kernels_of(own(OWN[what], "gpu")).items():
        for stage in ("ttir", "ttgir"):
            assert not halves_apart(kernel.asm[stage]), name
            pairs += len(re.findall(r'"tt\.reduce"\(%\w+, ', kernel.asm[stage]))
    assert pairs or "function" not in what


@needs_compiler
def test_elements_of_empty_arrays_compile() -> None:
    for what in EMPTY:
        assert kernels_of(own(EMPTY[what], "gpu"))
    assert kernels_of(ProgramCodec(bound(UNEVEN, {}), name="x", backend="gpu"))


def test_halves_apart_are_found() -> None:
    free = "%{} = tt.reshape %{} allow_reorder : tensor<1x4096xi32> -> tensor<4096xi32>"
    joined = '%9:2 = "tt.reduce"({}) <{{axis = 0 : i32}}> ({{'
    lines = [free.format(3, 1), free.format(4, 2)]
    assert halves_apart("\n".join([*lines, joined.format("%3, %4")])) == ["%3, %4"]
    assert not halves_apart("\n".join([*lines, joined.format("%3")]))
    assert not halves_apart(joined.format("%3, %4"))


def wide_loads(ptx: str) -> int:
    """Loads of 16 bytes."""
    return len(re.findall(r"ld\.global[\w.:]*\.v4\.[bu]32", ptx))
