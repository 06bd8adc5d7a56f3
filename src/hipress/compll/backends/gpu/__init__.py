"""The `gpu` backend: passes to Triton source.

A pass becomes one kernel (a few where results have to be joined or ranked), a tile of elements one
program of it. In walking order: `passes` (each kind of pass), `filters` (the few elements that a
filter takes), `tiles` (what happens inside a tile), `kernel` (numbers and memory that passes
share, single operations), `prelude` (what generated code calls), `runtime` (what starts it).

A generated module offers, for each kernel: `encode_sizes`, from the number of elements to the
numbers of a row and the programs of each launch, and `encode_launches`, the kernels in order.
Names in generated code: I and F are the row of numbers, Z and W scratch memory (Z starts from
zero), E the error word, H the frame's header; t is a tile, g a gradient of many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hipress.compll.backends.gpu import prelude
from hipress.compll.backends.gpu.filters import correct_scatters
from hipress.compll.backends.gpu.kernel import BODY
from hipress.compll.backends.gpu.passes import Passes
from hipress.compll.backends.host import Place, host_text, layout, module_source
from hipress.compll.backends.render import Lines, copied
from hipress.compll.ir import Kernel

_HEAD = '''\
"""GPU kernels of {title}, made by HiPress CompLL: edit the program, not this file."""

import math

import numpy as np
import triton
import triton.language as tl


'''


def render(kernels: Iterable[Kernel], *, title: str) -> str:
    kernels = list(kernels)
    text = "\n\n".join(_kernel(k) for k in kernels)
    scans = " ".join(
        f"{name}()" for name in ("_scan_sum", "_scan_max", "_scan_min") if name in text
    )
    head = _HEAD.format(title=title) + copied(text + scans, prelude, decorator="@triton.jit\n")
    return module_source(kernels, head, text)


def _kernel(kernel: Kernel) -> str:
    printer, sizes = Passes(kernel), Lines(depth=1)
    places = layout(kernel, sizes)
    if kernel.output is None:
        _start(printer, places)
    else:
        printer.check()
    for k, p in enumerate(correct_scatters(printer)):
        printer.print_pass(f"_{kernel.name}_p{k}", p)
    if kernel.output is None and kernel.random:
        printer.head(f"_{kernel.name}_count")
        printer.out("if pid == 0:")
        printer.out("    tl.store(step, tl.load(step) + 1)")
        printer.launch(f"_{kernel.name}_count", "1")
    functions = [f"{source.rstrip()}\n\n" for _, source in printer.functions.values()]
    text = "\n".join([*functions, *printer.out.text])
    text = text.replace("@NI@", str(len(printer.ints)))
    text = text.replace("@NF@", str(max(1, len(printer.floats))))
    return text + "\n" + _frame_places(printer) + _sizes(printer, places, sizes)


def _frame_places(printer: Passes) -> str:
    """Returns a function for the places of sections in the frames that a merging kernel reads."""
    frames = printer.kernel.frames
    if not frames:
        return ""
    out = Lines()
    out.open("def _frame_places(n, params):")
    places = layout(replace(printer.kernel, sections=frames[0]), out)
    out(f"return ({', '.join(place.offset for place in places)},)")
    for sections in frames:
        for j, section in enumerate(sections):
            printer.values[("at", section.array.name)] = f"_frame_places(n, params)[{j}]"
    return str(out) + "\n\n"


def _start(printer: Passes, places: list[Place]) -> None:
    """Prints the first kernel of encode: the frame's header, zeros between the sections."""
    name, out = f"_{printer.kernel.name}_start", printer.out
    printer.head(name)
    out(f"body = frame + tl.load(I + {BODY})")
    ends = [*(p.offset for p in places[1:]), "end"]
    for k, (place, after) in enumerate(zip(places, ends, strict=True)):
        start = printer.size(("gap", k), f"{place.offset} + {place.num_bytes}")
        out(f"_clear_gap(body, {start}, {printer.size(('gap end', k), after)})")
    if not printer.kernel.frames:  # what is found wrong in a frame is kept in the same memory
        first = printer.size("cleared", "cleared")
        out(f"_clear(Z, {first}, {printer.size('cleared end', 'cleared_end')})")
    for k in range(len(printer.kernel.frames)):
        out(f"if _same_header(frame{k}, G) == 0:")
        out("    tl.store(E, 2)")
        # No state must learn from a frame of something else.
        out(f"    tl.store({printer.result(('wrong', k), 'bool')}, 1)")
    step = "tl.load(step)" if printer.kernel.random else "_i64(0)"
    out("if pid == 0:")
    out(f"    _write_header(frame, H, {printer.size('header', 'header_words')}, {step})")
    printer.launch(name, "1")


def _sizes(printer: Passes, places: list[Place], sizes: Lines) -> str:
    """Returns the host's part of a kernel: a row of numbers and the programs of each launch."""
    kernel = printer.kernel
    for place in places:
        printer.values[("at", place.array.name)] = place.offset
    for name, grid in printer.grids.items():
        sizes(f"{name} = {grid}")
    if printer.results:
        printer.zeroed.append(("results", str(8 * len(printer.results))))
    # The first kernel of encode clears what has a fixed size; anything else is left to torch.
    fixed = all(set(num_bytes) <= set("0123456789 *") for _, num_bytes in printer.zeroed)
    clears = fixed and kernel.output is None and not kernel.frames
    if "cleared" in printer.ints:
        sizes("cleared = cleared_end = zeroed")
    for pieces, used in ((printer.scratch, "used"), (printer.zeroed, "zeroed")):
        for name, num_bytes in pieces:
            sizes(f"at_{name} = {used}")
            sizes(f"{used} = _align({used} + {num_bytes})")
            printer.values[("at", name)] = f"at_{name}"
    if clears:
        sizes("cleared_end = zeroed")
    printer.values |= dict(printer.sizes)
    first: dict[object, str] = {"n": "n", "body": "place", "at": "at", "results": "at_results"}
    if not printer.results:
        first["results"] = "0"
    printer.values |= first
    ints = [printer.values.get(key, "0") for key in printer.ints]
    floats = [host_text(e, kernel.params) for e in printer.floats] or ["0.0"]
    sizes(f"ints = ({', '.join(ints)},)")
    sizes(f"floats = ({', '.join(floats)},)")
    sizes(f"grids = ({', '.join(launch.grid for launch in printer.launches)},)")
    lengths = (launch.length for launch in printer.launches)
    sizes(f"lengths = ({', '.join(lengths)},)")
    sizes("return ints, floats, used, zeroed, grids, lengths")
    out = Lines()
    out(f"def {kernel.name}_sizes(n, params, place, at, header_words, used, zeroed):")
    out.text += sizes.text
    out()
    out()
    launches = ", ".join(f"({x.name}, {x.warps}, {x.span})" for x in printer.launches)
    out(f"{kernel.name}_launches = ({launches},)")
    out(f"{kernel.name}_clears = {clears}")
    messages = (
        "an index is out of range or out of order",
        "its header is not that of such a frame",
    )
    out(f"{kernel.name}_refusals = {(*messages, *(r.message for r in kernel.requires))!r}")
    return str(out)
