"""The `cpu` backend: passes to Python source that numba compiles.

One function per pass, over a range of tiles, so that a pool of threads can share a pass; small
functions below it hold the inner loops. In walking order: `passes` (each kind of pass), `loops`
(what happens inside a tile), `spell` (single operations), `prelude` (what generated code calls),
`shared` (what the passes of a kernel have in common).

Names in generated code: I and F hold ints and floats that passes hand on (sizes, parameters,
results of reductions), W is scratch memory; t is a tile, a its first element, m its length.
"""

from __future__ import annotations

from collections.abc import Iterable

from hipress.compll.backends.cpu import prelude
from hipress.compll.backends.cpu.passes import print_pass, print_requires
from hipress.compll.backends.cpu.shared import Shared
from hipress.compll.backends.render import (
    HOST_PRELUDE,
    Lines,
    Place,
    body_bytes_source,
    clear_gaps,
    copied,
    host_text,
    layout,
    slot_text,
)
from hipress.compll.ir import STORAGE_BITS, Kernel

_HEAD = '''\
"""CPU kernels of {title}, made by HiPress CompLL: edit the program, not this file."""

import math
{platform}
import numpy as np
{more}from numba import njit

f32, f64, i32, i64 = np.float32, np.float64, np.int32, np.int64
u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
_JIT = {{"nogil": True, "cache": True, "error_model": "numpy"}}


'''


_PLATFORM = "import platform\n"
_MORE = """from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic
"""

# numba knows no float16, LLVM does: one instruction where the CPU has it (4.9 ms for 25M floats,
# against 12 ms by bits), and a call into a library that is not there where it has not.
_HALF = """\
if binding.get_host_cpu_features().get("f16c") or platform.machine() == "aarch64":

    @intrinsic
    def _to_f16(typing, x):
        def narrow(context, builder, signature, args):
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

        return types.uint16(types.float32), narrow

    @intrinsic
    def _from_f16(typing, h):
        def widen(context, builder, signature, args):
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

        return types.float32(types.uint16), widen
else:
    _to_f16, _from_f16 = _to_f16_bits, _from_f16_bits


"""


def render(kernels: Iterable[Kernel], *, title: str) -> str:
    """The source of a module with one entry point per kernel."""
    kernels = list(kernels)
    text = "\n\n".join(_kernel(k) for k in kernels)
    half = "_f16(" in text
    helpers = text + ("_to_f16_bits() _from_f16_bits()" if half else "")
    return "".join(
        [
            _HEAD.format(
                title=title, platform=_PLATFORM if half else "", more=_MORE if half else ""
            ),
            copied(helpers, prelude, "@njit(**_JIT)\n"),
            _HALF if half else "",
            HOST_PRELUDE,
            "\n\n",
            body_bytes_source(kernels[0]),
            "\n\n",
            text,
        ]
    )


def _kernel(kernel: Kernel) -> str:
    shared, out = Shared(kernel), Lines()
    print_requires(shared, f"_{kernel.name}_requires", out)
    for k, p in enumerate(kernel.passes):
        print_pass(shared, f"_{kernel.name}_p{k}", p, out)
    _run(shared, out)
    _entry(shared, out)
    return str(out)


def _run(shared: Shared, out: Lines) -> None:
    """Prints the function that runs all steps on one thread, and the list of them for more."""
    name = shared.kernel.name
    out("@njit(**_JIT)")
    out(f"def _{name}_run({shared.args}):")
    out.depth += 1
    for step in shared.steps:
        out(f"{step.name}(0, -1, {shared.args})")
        if step.name.endswith("_requires"):
            out(f"if {shared.slots.int('status')} != 0:")
            out("    return")
    if not shared.steps:
        out("return")
    out.depth -= 1
    out()
    out()
    ranges = shared.slots.ints.get(("range", 0), -1)
    out(f"_{name}_steps = (")
    for step in shared.steps:
        takes = f"{step.name}_gather" in {s.name for s in shared.steps}
        out(f"    ({step.name}, {step.length_slot}, {step.tile}, {ranges if takes else -1}),")
    out(")")
    out()
    out()


def _entry(shared: Shared, out: Lines) -> None:
    """Prints the host's part of a kernel: sizes, parameters, memory, the call."""
    k = shared.kernel
    memory = k.input or k.output
    assert memory is not None
    takes = f"{memory.name}, states" if k.input is not None else memory.name
    body = Lines(depth=1)
    if k.states:
        body(f"{', '.join(s.name for s in k.states)}{',' * (len(k.states) == 1)} = states")
    places = layout(k, body)
    if k.input is not None:
        clear_gaps(places, body)
    body("seed, stream, step = rng")
    sizes = Lines(depth=1)
    sizes("I[0:5] = n, seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, stream, step")
    _fill(shared, places, sizes)
    args = shared.args
    if ("range", 0) in shared.slots.ints:
        body("ranges = 1 if pool is None else pool.num_threads")
    sizes("if pool is None:")
    sizes(f"    _{k.name}_run({args})")
    sizes("else:")
    sizes(f"    pool(_{k.name}_steps, ({args}), {shared.slots.ints['status']})")
    if k.nonfinite is not None:
        sizes(f"if {shared.slots.int('status')}:")
        sizes('    raise IndexError("an index of a scatter is out of range")')
        sizes(f"return bool({shared.slots.int(k.nonfinite)})")
    else:
        messages = ("an index in the payload is out of range", *(r.message for r in k.requires))
        sizes(f"status = {shared.slots.int('status')}")
        sizes(f"return {messages!r}[status - 1] if status else None")
    # Only now is it known how many numbers the steps hand on.
    body(f"I = np.zeros({len(shared.slots.ints)}, i64)")
    body(f"F = np.zeros({max(1, len(shared.slots.floats))}, f32)")
    out(f"def {k.name}(n, params, rng, body, {takes}, scratch, pool=None):")
    out.text += body.text + sizes.text


def _fill(shared: Shared, places: list[Place], out: Lines) -> None:
    slots, params = shared.slots, shared.kernel.params
    for place in places:
        name = place.array.name
        if ("at", name) in slots.ints:
            out(f"{slots.int(('at', name))} = {place.offset}")
            out(f"{slots.int(('bytes', name))} = {place.num_bytes}")
    for e, slot in shared.hosts.items():
        out(f"{slot} = {slot_text(e, params)}")
    out("used = 0")
    for array in shared.kernel.temps:
        if ("at", array.name) in slots.ints:
            size = STORAGE_BITS[array.storage] // 8
            length = f"max({host_text(array.length, params)}, 0)"
            _carve(shared, array.name, f"{length} * {size}", out)
    for record in shared.records:
        capacity = f"max({host_text(record.capacity, params)}, 0)"
        size = STORAGE_BITS[record.storage] // 8
        _carve(shared, record.name, f"ranges * {capacity} * {size}", out)
    for index, (fold, tile) in enumerate(shared.partials):
        length = host_text(shared.kernel.limits.get(fold.length, fold.length), params)
        size = 4 if fold.type == "float" else 8
        _carve(shared, f"part{index}", f"max({length} + {tile - 1}, 0) // {tile} * {size}", out)
    out("W = scratch(used)")


def _carve(shared: Shared, name: str, num_bytes: str, out: Lines) -> None:
    start, size = shared.slots.int(("at", name)), shared.slots.int(("bytes", name))
    out(f"{start} = used")
    out(f"{size} = {num_bytes}")
    out(f"used = _align(used + int({size}))")
