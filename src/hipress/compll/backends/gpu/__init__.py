"""The `gpu` backend: passes to Triton source.

A pass becomes one kernel (a few where results have to be joined or ranked), a tile of elements one
program of it. In walking order: `passes` (each kind of pass), `tiles` (what happens inside a
tile), `spell` (single operations), `prelude` (what generated code calls), `shared` (what the
passes of a kernel have in common), `runtime` (what starts them).

A generated module offers, for each kernel: `encode_sizes`, from the number of elements to the
numbers of a row and the programs of each launch, and `encode_launches`, the kernels in order.
Names in generated code: I and F are the row of numbers, Z and W scratch memory (Z starts from
zero), E the error word, H the frame's header; t is a tile, g a gradient of many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hipress.compll.backends.gpu import prelude
from hipress.compll.backends.gpu.passes import print_check, print_pass
from hipress.compll.backends.gpu.points import Corrected, correct_scatters, print_corrections
from hipress.compll.backends.gpu.shared import BODY, Launch, Shared
from hipress.compll.backends.render import (
    HOST_PRELUDE,
    Lines,
    Place,
    body_bytes_source,
    copied,
    host_text,
    layout,
)
from hipress.compll.ir import Kernel

_HEAD = '''\
"""GPU kernels of {title}, made by HiPress CompLL: edit the program, not this file."""

import math

import numpy as np
import triton
import triton.language as tl


'''


def render(kernels: Iterable[Kernel], *, title: str) -> str:
    """The source of a module with the kernels and their sizes."""
    kernels = list(kernels)
    text = "\n\n".join(_kernel(k) for k in kernels)
    scans = " ".join(
        f"{name}()" for name in ("_scan_sum", "_scan_max", "_scan_min") if name in text
    )
    return "".join(
        [
            _HEAD.format(title=title),
            copied(text + scans, prelude, "@triton.jit\n"),
            HOST_PRELUDE,
            "\n\n",
            body_bytes_source(kernels[0]),
            "\n\n",
            text,
        ]
    )


def _kernel(kernel: Kernel) -> str:
    shared, passes = Shared(kernel), Lines()
    sizes = Lines(depth=1)
    places = layout(kernel, sizes)
    if kernel.output is None:
        _start(shared, places, passes)
    else:
        print_check(shared, passes)
    for k, p in enumerate(correct_scatters(shared, kernel.passes)):
        name = f"_{kernel.name}_p{k}"
        if isinstance(p, Corrected):
            print_pass(shared, name, p.loop, passes)
            print_corrections(shared, f"{name}_correct", p, passes)
        else:
            print_pass(shared, name, p, passes)
    out = Lines()
    for _, source in shared.functions.values():
        out.text += source.rstrip("\n").split("\n") + ["", ""]
    text = "\n".join(out.text + passes.text)
    text = text.replace("@NI@", str(len(shared.ints))).replace(
        "@NF@", str(max(1, len(shared.floats)))
    )
    return text + "\n" + _frame_places(shared) + _sizes(shared, places, sizes)


def _frame_places(shared: Shared) -> str:
    """Where the sections of a frame lie that is read by a merging kernel."""
    frames = shared.kernel.frames
    if not frames:
        return ""
    out = Lines()
    out("def _frame_places(n, params):")
    out.depth += 1
    places = layout(replace(shared.kernel, sections=frames[0]), out)
    out(f"return ({', '.join(place.offset for place in places)},)")
    for sections in frames:
        for j, section in enumerate(sections):
            shared.values[("at", section.array.name)] = f"_frame_places(n, params)[{j}]"
    return str(out) + "\n\n"


def _start(shared: Shared, places: list[Place], out: Lines) -> None:
    """Prints the first kernel of encode: the frame's header, zeros between the sections."""
    name = f"_{shared.kernel.name}_start"
    shared.head(name, out)
    out(f"body = frame + tl.load(I + {BODY})")
    ends = [*(p.offset for p in places[1:]), "end"]
    for k, (place, after) in enumerate(zip(places, ends, strict=True)):
        start = shared.size(("gap", k), f"{place.offset} + {place.num_bytes}")
        out(f"_clear_gap(body, {start}, {shared.size(('gap end', k), after)})")
    for k in range(len(shared.kernel.frames)):
        out(f"if _same_header(frame{k}, G) == 0:")
        out("    tl.store(E, 2)")
        # No state must learn from a frame of something else.
        out(f"    tl.store({shared.result(('wrong', k), 'bool')}, 1)")
    step = "tl.load(step)" if shared.kernel.random else "_i64(0)"
    out("if pid == 0:")
    out(f"    _write_header(frame, H, {shared.size('header', 'header_words')}, {step})")
    out.depth = 0
    out()
    out()
    shared.launches.append(Launch(name, "1"))


def _sizes(shared: Shared, places: list[Place], sizes: Lines) -> str:
    """The host's part of a kernel: a row of numbers and the programs of each launch."""
    kernel = shared.kernel
    for place in places:
        shared.values[("at", place.array.name)] = place.offset
    for name, grid in shared.grids.items():
        sizes(f"{name} = {grid}")
    if shared.results:
        shared.zeroed.append(("results", str(8 * len(shared.results))))
    for pieces, used in ((shared.scratch, "used"), (shared.zeroed, "zeroed")):
        for name, num_bytes in pieces:
            sizes(f"at_{name} = {used}")
            sizes(f"{used} = _align({used} + {num_bytes})")
            shared.values[("at", name)] = f"at_{name}"
    shared.values |= dict(shared.sizes)
    first: dict[object, str] = {"n": "n", "body": "place", "at": "at", "results": "at_results"}
    if not shared.results:
        first["results"] = "0"
    shared.values |= first
    ints = [shared.values.get(key, "0") for key in shared.ints]
    floats = [host_text(e, kernel.params) for e in shared.floats] or ["0.0"]
    sizes(f"ints = ({', '.join(ints)},)")
    sizes(f"floats = ({', '.join(floats)},)")
    sizes(f"grids = ({', '.join(launch.grid for launch in shared.launches)},)")
    lengths = (launch.length for launch in shared.launches)
    sizes(f"lengths = ({', '.join(lengths)},)")
    sizes("return ints, floats, used, zeroed, grids, lengths")
    out = Lines()
    out(f"def {kernel.name}_sizes(n, params, place, at, header_words, used, zeroed):")
    out.text += sizes.text
    out()
    out()
    launches = ", ".join(f"({x.name}, {x.warps}, {x.span})" for x in shared.launches)
    out(f"{kernel.name}_launches = ({launches},)")
    messages = ("an index is out of range", "its header is not that of such a frame")
    out(f"{kernel.name}_refusals = {(*messages, *(r.message for r in kernel.requires))!r}")
    return str(out)
