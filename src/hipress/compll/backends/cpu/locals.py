"""Arrays that a block has for itself, each made by a loop of its own."""

from __future__ import annotations

from collections.abc import Sequence

from hipress.compll import ir
from hipress.compll.backends.cpu.buffers import is_own, local_type, pair_step
from hipress.compll.backends.cpu.loops import Body, Loops
from hipress.compll.backends.render import Known, wide_type
from hipress.compll.ir import Expr, walk


def print_local(loops: Loops, name: str, x: ir.Local) -> None:
    """Prints the loop that makes an array, and what follows it; unused places are 0."""
    target = loops.locals[x]
    if x.kind == "scan":
        _scan(loops, name, x, target)
    elif x.kind == "scatter":
        _scatter(loops, name, x, target)
    elif x.kind == "keep":
        if step := pair_step(x):
            _keep_pairs(loops, name, x, target, step)
        else:
            _write(loops, name, x, target, f"{local_type(x)}({{}})", whole=True)
    else:
        is_float = x.body.type == "float"
        if x.kind == "largest" and (kept := _magnitudes(loops, x)):
            _print_largest(loops, x, target, f"_view({kept}, i32)", "i32(0x7FFFFFFF)", "i32")
            loops.ready.add(x)
            loops.name_block_values()
            return
        kind = "u8" if x.kind == "filter" else ("i32" if is_float else "i64")
        of = loops.buffer(kind)
        # Zeros of both signs are equal.
        form = "_key({} + f32(0))" if is_float else f"{kind}({{}})"
        _write(loops, name, x, of, form)
        m = loops.bounds(x.row)[0]
        if x.kind == "filter":
            loops.out(f"_places({of}, {m}, {target}, {x.room})")
        elif x.kind == "sort":
            loops.out(f"_order({of}, {m}, {target})")
        else:
            _print_largest(loops, x, target, of, f"{kind}(-1)", kind)
    loops.ready.add(x)
    loops.name_block_values()


def _magnitudes(loops: Loops, x: ir.Local) -> str:
    """Returns the array that is kept already and whose magnitudes are ordered; empty if none is.

    The bits of a magnitude are those of the float without the sign: no keys need be written.
    """
    of = x.body.args[0] if x.body.op == "abs" and x.body.type == "float" else None
    for y in loops.ready:
        if y.kind == "keep" and y.body is of and y.row == x.row:
            return loops.locals[y]
    return ""


def _print_largest(loops: Loops, x: ir.Local, target: str, raw: str, mask: str, kind: str) -> None:
    more = ", ".join(map(loops.buffer, ("i64", "u8", "i32", "i32", kind)))
    m = loops.bounds(x.row)[0]
    loops.out(f"_largest({raw}, {mask}, {m}, {target}, {x.room}, {more})")


def print_kept(
    loops: Loops, name: str, kept: Sequence[ir.Local], folds: Sequence[ir.Fold]
) -> list[str]:
    """Prints one loop for arrays of the block's elements and some reductions over them."""
    body = loops.start(folds)
    loops.element(body, folds, [])
    for x in kept:
        target = loops.locals[x]
        body.needs(target)
        body(f"{target}[i] = {local_type(x)}({loops.print(body, [x.body])[0]})")
    results = loops.call(name, body, folds)
    loops.ready.update(kept)
    loops.name_block_values()
    return results


def _write(
    loops: Loops, name: str, x: ir.Local, into: str, form: str, *, whole: bool = False
) -> None:
    body = loops.start([], into)
    body(f"{into}[i] = {form.format(*loops.print(body, [x.body]))}")
    loops.call(name, body, [], row=x.row, whole=whole)


def _keep_pairs(loops: Loops, name: str, x: ir.Local, target: str, step: int) -> None:
    """Elements i and i + step side by side; both are read before one is written.

    From 8 on, slices of `step` elements: a loop over computed indices would be unrolled instead of
    vectorised (0.70 against 2.15 ms for 4 million elements and a step of 16).
    """
    body, texts = Body(), []
    body.needs(target)
    body.open(f"for b in range(0, m, {2 * step}):")
    if step >= 8:
        body.needs(f"step_{step}")
        loops.out(f"step_{step} = min(I[0] + {step}, {step})")
        for source in sorted({target, *(loops.locals[e.attr] for e in _reads(x))}):
            body.needs(source)
            body(f"low_{source} = {source}[b : b + {step}]")
            body(f"high_{source} = {source}[b + {step} : b + {2 * step}]")
    body.open(f"for j in range({f'step_{step}' if step >= 8 else step}):")
    for half in (0, 1):
        body(f"i = b + j{f' + {step}' * half}")
        known = _in_pair(loops, x, step, half)
        [text] = loops.print(body, [x.body], more=known)
        texts.append(loops.printer.assign(f"{local_type(x)}({text})", body))
    low, high = f"{target}[b + j]", f"{target}[i]"
    if step >= 8:
        low, high = f"low_{target}[j]", f"high_{target}[j]"
    body(f"{low} = {texts[0]}")
    body(f"{high} = {texts[1]}")
    body.depth = 2
    loops.call(name, body, [], row=x.row, whole=True)


def _reads(x: ir.Local) -> list[Expr]:
    return [e for e in walk([x.body]) if e.op == "local"]


def _in_pair(loops: Loops, x: ir.Local, step: int, half: int) -> Known:
    """Returns what the element's half of a pair tells: its partner, and its bit of the index."""
    known: Known = {}
    for e in walk([x.body]):
        if e.op == "xor" and is_own(*e.args) and e.args[1].attr == step:
            known[e] = f"(i {'-' if half else '+'} {step})"
        elif e.op == "and" and is_own(*e.args) and e.args[1].attr == step:
            known[e] = f"i32({step * half})"
        elif e.op == "and" and e.args[1].op == "const" and e.args[1].attr == 1:
            shift = e.args[0]
            if shift.op == "shr" and is_own(*shift.args) and 1 << shift.args[1].attr == step:
                known[e] = f"i32({half})"
    for e in _reads(x) if step >= 8 else ():
        is_high = (e.args[0].op == "xor") != bool(half)
        known[e] = f"{'high' if is_high else 'low'}_{loops.locals[e.attr]}[j]"
    return known


def _scan(loops: Loops, name: str, x: ir.Local, target: str) -> None:
    f, body = x.fold, Body()
    assert f is not None
    body.needs(target, "I", "F")
    body(f"acc = {wide_type(f.type)}({loops.print(body, [f.init])[0]})")
    body.open("for i in range(m):")  # one by one: it does not vectorise
    body(f"item = {wide_type(f.type)}({loops.print(body, [f.body])[0]})")
    body(f"acc = {wide_type(f.type)}({loops.joined(f, 'acc', 'item', body)})")
    body(f"{target}[i] = acc")
    loops.call(name, body, [], row=x.row)


def _scatter(loops: Loops, name: str, x: ir.Local, target: str) -> None:
    assert x.index is not None and x.size is not None
    [size] = loops.printer.print([x.size], loops.out, loops.known)
    loops.out(f"_clear({target}[:{size}])")
    body = loops.start([], target, "I")
    index, value, length = loops.print(body, [x.index, x.body, x.size])
    body(f"k = i64({index})")
    body.open(f"if k < 0 or k >= {length}:")
    body(f"{loops.printer.slots.int('status')} = 1")
    body("continue")
    body.depth -= 1
    body(f"{target}[k] = {local_type(x)}({target}[k] + {value})")
    loops.call(name, body, [], row=x.row)
