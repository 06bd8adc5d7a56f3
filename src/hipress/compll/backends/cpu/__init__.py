"""The `cpu` backend: passes to Python source that numba compiles.

One function per pass, over a range of tiles, so that a pool of threads can share a pass; small
functions below it hold the inner loops. In walking order: `passes` (each kind of pass), `loops`
(what happens inside a tile), `kernel` (numbers and memory that passes share, single operations),
`prelude` (what generated code calls).

Names in generated code: I and F hold ints and floats that passes hand on (sizes, parameters,
results of reductions), W is scratch memory; t is a tile, a its first element, m its length.
"""

from __future__ import annotations

from collections.abc import Iterable

from hipress.compll.backends.cpu import prelude
from hipress.compll.backends.cpu.passes import Passes
from hipress.compll.backends.host import (
    Place,
    entry_args,
    entry_start,
    host_text,
    module_source,
    slot_text,
)
from hipress.compll.backends.render import Lines, copied, pass_method
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
# against 12 ms by bits). Elsewhere LLVM would call a library that does not exist.
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
    kernels = list(kernels)
    text = "\n\n".join(_kernel(k) for k in kernels)
    half = "_f16(" in text
    helpers = text + ("_to_f16_bits() _from_f16_bits()" if half else "")
    head = _HEAD.format(title=title, platform=_PLATFORM * half, more=_MORE * half)
    return module_source(
        kernels, head + copied(helpers, prelude, "@njit(**_JIT)\n") + _HALF * half, text
    )


def _kernel(kernel: Kernel) -> str:
    printer = Passes(kernel)
    printer.requires(f"_{kernel.name}_requires")
    for k, p in enumerate(kernel.passes):
        pass_method(printer, p)(f"_{kernel.name}_p{k}", p)
    _run(printer)
    _entry(printer)
    return str(printer.out)


def _run(printer: Passes) -> None:
    """Prints the function that runs all steps on one thread, and the list of them for more."""
    name, out, steps = printer.kernel.name, printer.out, printer.steps
    out("@njit(**_JIT)")
    out.open(f"def _{name}_run({printer.args}):")
    for step in steps:
        out(f"{step.name}(0, -1, {printer.args})")
        if step.name.endswith("_requires"):
            out(f"if {printer.slots.int('status')} != 0:")
            out("    return")
    if not steps:
        out("return")
    out.end()
    ranges = printer.slots.ints.get(("range", 0), -1)
    out(f"_{name}_steps = (")
    for step in steps:
        takes = f"{step.name}_gather" in {s.name for s in steps}
        out(f"    ({step.name}, {step.length_slot}, {step.tile}, {ranges if takes else -1}),")
    out(")")
    out.end()


def _entry(printer: Passes) -> None:
    """Prints the host's part of a kernel: sizes, parameters, memory, the call."""
    k, slots, args = printer.kernel, printer.slots, printer.args
    body = Lines(depth=1)
    places = entry_start(k, body)
    body("seed, stream, step = rng")
    sizes = Lines(depth=1)
    sizes("I[0:5] = n, seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, stream, step")
    _fill(printer, places, sizes)
    if ("range", 0) in slots.ints:
        body("ranges = 1 if pool is None else pool.num_threads")
    sizes("if pool is None:")
    sizes(f"    _{k.name}_run({args})")
    sizes("else:")
    sizes(f"    pool(_{k.name}_steps, ({args}), {slots.ints['status']})")
    if k.nonfinite is not None:
        sizes(f"if {slots.int('status')}:")
        sizes('    raise IndexError("an index of a scatter is out of range")')
        sizes(f"return bool({slots.int(k.nonfinite)})")
    else:
        messages = ("an index in the payload is out of range", *(r.message for r in k.requires))
        sizes(f"status = {slots.int('status')}")
        sizes(f"return {messages!r}[status - 1] if status else None")
    # Only now is it known how many numbers the steps hand on.
    body(f"I = np.zeros({len(slots.ints)}, i64)")
    body(f"F = np.zeros({max(1, len(slots.floats))}, f32)")
    printer.out(f"def {k.name}({entry_args(k)}, scratch, pool=None):")
    printer.out.text += body.text + sizes.text


def _fill(printer: Passes, places: list[Place], out: Lines) -> None:
    slots, kernel = printer.slots, printer.kernel
    params = kernel.params
    for place in places:
        name = place.array.name
        if ("at", name) in slots.ints:
            out(f"{slots.int(('at', name))} = {place.offset}")
            out(f"{slots.int(('bytes', name))} = {place.num_bytes}")
    for e, slot in printer.hosts.items():
        out(f"{slot} = {slot_text(e, params)}")
    out("used = 0")
    pieces = []
    for array in kernel.temps:
        if ("at", array.name) in slots.ints:
            size = STORAGE_BITS[array.storage] // 8
            pieces.append((array.name, f"max({host_text(array.length, params)}, 0) * {size}"))
    for record in printer.records:
        capacity = f"max({host_text(record.capacity, params)}, 0)"
        size = STORAGE_BITS[record.storage] // 8
        pieces.append((record.name, f"ranges * {capacity} * {size}"))
    for index, (fold, tile) in enumerate(printer.partials):
        length = host_text(kernel.limits.get(fold.length, fold.length), params)
        size = 4 if fold.type == "float" else 8
        pieces.append((f"part{index}", f"max({length} + {tile - 1}, 0) // {tile} * {size}"))
    for name, num_bytes in pieces:
        start, room = slots.int(("at", name)), slots.int(("bytes", name))
        out(f"{start} = used")
        out(f"{room} = {num_bytes}")
        out(f"used = _align(used + int({room}))")
    out("W = scratch(used)")
