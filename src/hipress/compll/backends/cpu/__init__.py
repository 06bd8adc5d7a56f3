"""The `cpu` backend: passes to Python source that numba compiles.

One function per pass, over a range of tiles, so that a pool of threads can share a pass; small
functions below it hold the inner loops. In walking order: `Passes` (each kind of pass), `loops`
(what happens inside a tile), `kernel` (numbers and memory that passes share, single operations),
`prelude` (what generated code calls).

Names in generated code: I and F hold ints and floats that passes hand on (sizes, parameters,
results of reductions), W is scratch memory; t is a tile, a its first element, m its length.
"""

from __future__ import annotations

from collections.abc import Iterable

from hipress.compll import ir
from hipress.compll.backends.cpu import filters, prelude, ranks
from hipress.compll.backends.cpu.kernel import MAX_RANGES, KernelPrinter, Record, Step, stored
from hipress.compll.backends.cpu.locals import print_kept, print_local
from hipress.compll.backends.cpu.loops import Loops, exact
from hipress.compll.backends.host import (
    Place,
    entry_args,
    entry_start,
    host_text,
    module_source,
    slot_text,
)
from hipress.compll.backends.render import Lines, copied, machine_type, pass_method, wide_type
from hipress.compll.ir import STORAGE_BITS, Array, Expr, Fold, Kernel, loads, walk

TILE = 2048
"""Elements of a tile: three float tiles and one of codes fit a first-level cache of 32 KiB
(measured on minmax(bits=2): 15.4 ms for 25M elements, against 18.5 ms with tiles of 4096)."""


class Passes(KernelPrinter):
    """Prints the functions of each pass and adds them to the kernel's steps."""

    def loop(self, name: str, p: ir.Loop) -> None:
        stores = [*(s for phase in p.phases for s in phase.stores), *p.row_stores]
        loops = Loops(self, p.block or TILE, ir.pass_exprs(p), stores, p)
        folds = [f for f in ir.pass_folds(p) if f.block is None]
        loops.open(name, [s.array for s in ir.pass_stores(p)], p.length)
        parts = self._partials(loops, folds)
        loops.buffers()
        loops.tiles()
        for j, phase in enumerate(p.phases):
            # A sum of floats has a loop of its own; other reductions share that of the stores.
            alone = [f for f in phase.folds if not (phase.stores and exact(f))]
            shared = [f for f in phase.folds if f not in alone]
            kept = [x for x in phase.locals if x.kind == "keep" and x.row is None]
            if kept:  # one loop reads the block's elements for the first time
                beside = [f for f in alone if exact(f)]
                results = print_kept(loops, f"{name}_k{j}", kept, beside)
                _keep(loops, parts, beside, results)
                alone = [f for f in alone if f not in beside]
            for k, row in enumerate(dict.fromkeys(f.row for f in alone)):
                of_row = [f for f in alone if f.row == row]
                results = loops.fold(f"{name}_f{j}{f'_r{k}' if row else ''}", of_row)
                for f, result in zip(of_row, results, strict=True):
                    if f.block is None:
                        loops.out(f"{parts[f]}[t] = {result}")
                    else:
                        loops.finish(f, result)
            for k, x in enumerate(x for x in phase.locals if x not in kept):
                print_local(loops, f"{name}_a{j}_{k}", x)
            if phase.stores:
                results = loops.store(f"{name}_s{j}", phase.stores, shared)
                _keep(loops, parts, shared, results)
        for s in p.block_stores:
            [text] = self.print([s.value], loops.out, loops.known)
            loops.out(f"{s.array.name}[t] = {stored(s.array, text)}")
        for k, row in enumerate(dict.fromkeys(s.row for s in p.row_stores)):
            loops.store(f"{name}_r{k}", [s for s in p.row_stores if s.row == row], [])
        loops.close()
        self._step(name, loops.tile, p.length)
        self._join(name, folds, parts, p.length, loops.tile)

    def _step(self, name: str, tile: int, length: Expr | None = None) -> None:
        """Adds a step; threads share it where the host knows its `length`."""
        slot = -1
        if length is not None and length.host and length.op != "const":
            slot = int(self.host(length)[2:-1])
        self.steps.append(Step(name, tile, slot))

    def _partials(self, loops: Loops, folds: list[Fold]) -> dict[Fold, str]:
        parts = {f: self.partial(f, loops.tile) for f in folds}
        for f, part in parts.items():
            self.carve(part, "W", wide_type(f.type), loops.out)
        return parts

    def _join(
        self, name: str, folds: list[Fold], parts: dict[Fold, str], length: Expr, tile: int
    ) -> None:
        """Prints the step that joins the results of all tiles, in order."""
        if not folds:
            return
        out = self.out
        self.head(f"{name}_join", out, loads([length, *(f.init for f in folds)]))
        self.length(length, tile, out)
        for f in folds:
            [init] = self.print([f.init], out, self.known([f.init]))
            self.carve(parts[f], "W", wide_type(f.type), out)
            # Thousands of partial sums: in double precision they add no error of their own.
            double = f.kind == "sum" and f.type == "float"
            out(f"acc = {'f64' if double else wide_type(f.type)}({init})")
            out.open("for t in range(hi):")
            if f.kind == "or":
                out(f"acc |= {parts[f]}[t]")
            else:
                out(f"part = {parts[f]}[t]")
                out(f"acc = {self.combined(f, 'acc', 'part', out)}")
            out.depth -= 1
            out(f"{self.slots.of(f.type, f)} = {'f32(acc)' if double else 'acc'}")
        out.end()
        self._step(f"{name}_join", tile)

    def compact(self, name: str, p: ir.Compact) -> None:
        """A filter pass; a range of tiles after the first collects into scratch memory.

        The step after it moves what the ranges took to its place, in order. What then finds no
        room is put back: the same elements are taken whatever the number of threads.
        """
        loops = Loops(self, TILE, ir.pass_exprs(p), p.stores)
        folds, out = list(p.folds), loops.out
        loops.open(name, [s.array for s in ir.pass_stores(p)], p.length)
        parts = self._partials(loops, folds)
        saved = filters.saves(loops, p)
        records = self._records(p, saved)
        loops.buffers()
        out(f"mask = np.empty({TILE}, u8)")
        out(f"capacity = i64({self.print([p.filter.capacity], out, loops.known)[0]})")
        out(f"part = _range_of(lo, {self.ranges()})")
        for s in p.emits:
            self.carve(records[s.array.name].name, "W", s.array.storage, out)
            out(f"to_{s.array.name} = {s.array.name}")
        for key in ("index", *saved.values()):
            self.carve(records[key].name, "W", records[key].storage, out)
            out(f"to_{key} = {records[key].name}[part * capacity : (part + 1) * capacity]")
        if p.emits:
            out("if part > 0:")
        for s in p.emits:
            record = records[s.array.name].name
            out(f"    to_{s.array.name} = {record}[part * capacity : (part + 1) * capacity]")
        out("count = i64(0)")
        loops.tiles()
        alone = [f for f in folds if not exact(f)]
        shared = [f for f in folds if exact(f)]
        if alone:
            _keep(loops, parts, alone, loops.fold(f"{name}_f0", alone))
        _keep(loops, parts, shared, filters.mark(loops, f"{name}_scan", p, shared, saved))
        filters.take(loops, f"{name}_take", p, saved)
        out.depth -= 1
        out(f"{self.ranges()}[part + {MAX_RANGES}] = count")
        loops.close()
        self._step(name, TILE, p.length if filters.can_share(loops, p) else None)
        self._gather(name, p, saved, records)
        self._join(name, folds, parts, p.length, TILE)

    def _records(self, p: ir.Compact, saved: dict[Array, str]) -> dict[str, Record]:
        """Scratch memory of a filter pass: what each range took, from where, and old values."""
        capacity = self.kernel.limits.get(p.filter.capacity, p.filter.capacity)
        records = {s.array.name: self.record(s.array.storage, capacity) for s in p.emits}
        records["index"] = self.record("i64", capacity)
        return records | {old: self.record(a.storage, capacity) for a, old in saved.items()}

    def _gather(
        self, name: str, p: ir.Compact, saved: dict[Array, str], records: dict[str, Record]
    ) -> None:
        loops = Loops(self, TILE, ir.pass_exprs(p), p.stores)
        out = loops.out
        loops.open(f"{name}_gather", [s.array for s in ir.pass_stores(p)], p.length)
        for record in records.values():
            self.carve(record.name, "W", record.storage, out)
        out(f"capacity = i64({self.print([p.filter.capacity], out, loops.known)[0]})")
        ranges = self.ranges()
        out(f"count = {ranges}[{MAX_RANGES}]")
        if filters.can_share(loops, p):
            out.open(f"for part in range(1, {MAX_RANGES}):")
            out(f"taken = {ranges}[part + {MAX_RANGES}]")
            out("if taken == 0:")
            out("    continue")
            out("first = min(taken, capacity - count)")
            out("start = part * capacity")
            for s in p.emits:
                source = records[s.array.name].name
                part = f"{s.array.name}[count : count + first]"
                out(f"_copy({part}, {source}[start : start + first])")
            for key in ("index", *saved.values()):
                out(f"to_{key} = {records[key].name}[start : start + taken]")
            if p.stores:
                filters.put_back(loops, f"{name}_back", p, saved)
            out("count += first")
            out.depth -= 1
        out(f"{self.slots.int(p.filter)} = count")
        for s in p.emits:
            out(f"_clear({s.array.name}[count:])")
        loops.close()
        self._step(f"{name}_gather", TILE)

    def scatter(self, name: str, p: ir.Scatter) -> None:
        loops = Loops(self, TILE, p.exprs)
        out = loops.out
        loops.open(name, [p.array], p.length)
        loops.buffers()
        # Every index is checked before anything is written: a refused payload changes nothing.
        before = dict(loops.known)
        loops.tiles()
        loops.known = before
        filters.check(loops, f"{name}_check", p)
        out(f"if {self.slots.int('status')} != 0:")
        out("    return")
        out.depth -= 1
        if p.clear:
            out(f"_clear({p.array.name})")
        loops.tiles()
        filters.scatter(loops, f"{name}_add", p)
        loops.close()
        self._step(name, TILE)

    def scan(self, name: str, p: ir.Scan) -> None:
        f = p.fold
        loops = Loops(self, TILE, f.exprs)
        loops.open(name, [p.array], f.length)
        out, known = loops.out, loops.known
        out(f"acc = {wide_type(f.type)}({self.print([f.init], out, known)[0]})")
        out.open("for i in range(length):")  # one by one: it does not vectorise
        known |= {e: f"{machine_type(e)}(i)" for e in walk([f.body]) if e.op == "idx"}
        out(f"item = {wide_type(f.type)}({self.print([f.body], out, known)[0]})")
        out(f"acc = {wide_type(f.type)}({self.combined(f, 'acc', 'item', out)})")
        out(f"{p.array.name}[i] = {stored(p.array, 'acc')}")
        out.depth -= 1
        out(f"_clear({p.array.name}[max(length, 0) :])")  # room that a shorter array leaves
        loops.close()
        self._step(name, TILE)

    def order(self, name: str, p: ir.Select | ir.Sorting) -> None:
        sort, out = p.sort, self.out
        values = sort.values.name
        keys = [sort.keys] if sort.keys is not None else []
        self.head(name, out, [sort.values, *keys, *loads(sort.ranks)])
        out(f"if len({values}) == 0:")
        out("    return")
        find = "_at"
        if isinstance(p, ir.Select):
            find = "_select" if sort.values.type == "float" else "_select_i"
        elif sort.keys is not None:
            out(f'order = np.argsort({sort.keys.name}, kind="mergesort")')
            out(f"_copy({values}, {values}[order])")
        else:
            out(f"{values}.sort()")
        known = self.known(sort.ranks)
        for e in self.picks(sort):
            [rank] = self.print([e.args[0]], out, known)
            out(f"{self.slots.of(e.type, e)} = {find}({values}, {rank})")
        out.end()
        self._step(name, TILE)

    def scalars(self, name: str, p: ir.Scalars) -> None:
        out, roots = self.out, [s.value for s in p.stores]
        self.head(name, out, [*loads(roots), *(s.array for s in p.stores)])
        if any(e.op in ir.RANDOM for e in walk(roots)):
            out("rng = I[1:5]")
        texts = self.print(roots, out, self.known(roots))
        for s, text in zip(p.stores, texts, strict=True):
            out(f"{s.array.name}[0] = {stored(s.array, text)}")
        out.end()
        self._step(name, TILE)

    def requires(self, name: str) -> None:
        """Prints the check of what a payload must fulfil, as the kernel's first step."""
        out, conds = self.out, [r.cond for r in self.kernel.requires]
        if not conds:
            return
        self.head(name, out, loads(conds))
        known = self.known(conds)
        for k, cond in enumerate(conds):
            out(f"if not {self.print([cond], out, known)[0]}:")
            out(f"    {self.slots.int('status')} = {k + 2}")
            out("    return")
        out.end()
        self._step(name, TILE)


def _keep(loops: Loops, parts: dict[Fold, str], folds: list[Fold], results: list[str]) -> None:
    for f, result in zip(folds, results, strict=True):
        loops.out(f"{parts[f]}[t] = {result}")


# Modules.

_HEAD = '''\
"""CPU kernels of {title}, made by HiPress CompLL: edit the program, not this file."""

import math
{platform}
import numpy as np
{more}from numba import njit, types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

f32, f64, i32, i64 = np.float32, np.float64, np.int32, np.int64
u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
_INNER = {{"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}}
_JIT = {{"nogil": True, "cache": True, "error_model": "numpy", "no_cfunc_wrapper": True}}


@intrinsic
def _view(typing, array, dtype):
    made = types.Array(dtype.dtype, 1, "C", readonly=not array.mutable)

    def view(context, builder, signature, args):
        old = make_array(array)(context, builder, args[0])
        new = make_array(made)(context, builder)
        size = context.get_constant(types.intp, made.dtype.bitwidth // 8)
        length = builder.udiv(builder.mul(old.nitems, old.itemsize), size)
        populate_array(
            new, data=builder.bitcast(old.data, new.data.type), shape=[length], strides=[size],
            itemsize=size, meminfo=old.meminfo, parent=old.parent,
        )
        return impl_ret_borrowed(context, builder, made, new._getvalue())

    return made(array, dtype), view


'''
# Functions that only kernels call have no entry for Python and no file in the cache, and memory is
# viewed as elements of another type without numba's own code for that, which checks what a kernel
# knows: kernels compile in half the time.


_PLATFORM = "import platform\n"
_MORE = "from llvmlite import binding, ir\n"

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
    called = copied(helpers, prelude, ranks, decorator="@njit(**_INNER)\n")
    # Too long for LLVM to inline by itself in some programs, whose draws were 4 times slower.
    called = called.replace(")\ndef _philox(", ", forceinline=True)\ndef _philox(")
    return module_source(kernels, head + called + _HALF * half, text)


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
        messages = (
            "an index in the payload is out of range or out of order",
            *(r.message for r in k.requires),
        )
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
