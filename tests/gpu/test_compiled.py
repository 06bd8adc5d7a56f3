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
from hipress.codecs.program import ProgramCodec
from hipress.compll.ir import Kernel
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
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    codec = hipress.codec(expr)
    assert isinstance(codec, ProgramCodec)
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


EXAMPLES = Path(__file__).parents[2] / "examples"


@needs_compiler
@pytest.mark.parametrize(
    "program",
    thinned(["blocktopk.pse", "ef(blocktopk.pse)", "rotated.pse"], keep=["blocktopk.pse"]),
)
def test_arrays_of_blocks_compile(program: str) -> None:
    """Sorting, gathering and scattering inside a tile, which the interpreter does another way."""
    kernels = compiled(re.sub(r"\w+\.pse", lambda name: str(EXAMPLES / name[0]), program))
    assert all(kernel.asm["cubin"][:4] == b"\x7fELF" for kernel in kernels.values())


@needs_compiler
@pytest.mark.parametrize("expr", WIDE)
def test_the_main_pass_reads_four_floats_at_once(expr: str) -> None:
    (name,) = [k for k in compiled(expr) if re.fullmatch(f"_{WIDE[expr]}", k)]
    ptx = compiled(expr)[name].asm["ptx"]
    assert wide_loads(ptx) > 0
    assert wide_loads(ptx.replace(".v4.", ".")) == 0  # so this can fail


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


def wide_loads(ptx: str) -> int:
    """Loads of 16 bytes."""
    return len(re.findall(r"ld\.global[\w.:]*\.v4\.[bu]32", ptx))
