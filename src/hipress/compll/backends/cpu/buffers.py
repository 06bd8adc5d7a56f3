"""Assigns a buffer to each array of a block; there are few, so that they stay in the L1 cache."""

from __future__ import annotations

from hipress.compll import ir
from hipress.compll.ir import Expr, Local, walk


def local_type(x: Local) -> str:
    """Returns the machine type of an array of the block."""
    if x.type == "float":
        return "f32"
    if x.kind in ("filter", "sort", "largest"):
        return "i32"
    return "i32" if x.kind == "keep" and x.body.narrow else "i64"


def buffers(loop: ir.Loop) -> dict[Local, str]:
    """Returns the name of the buffer of each array; one that is not read any more is used again."""
    last: dict[Local, int] = {}
    for j, phase in enumerate(loop.phases):
        exprs = [e for made in (phase.folds, phase.locals) for x in made for e in x.exprs]
        exprs += [s.value for s in phase.stores]
        last |= {e.attr: j for e in walk(exprs) if e.op == "local"}
    final = [s.value for s in (*loop.block_stores, *loop.row_stores)]
    final += [s.row.length for s in loop.row_stores if s.row is not None]
    last |= {e.attr: len(loop.phases) for e in walk(final) if e.op == "local"}
    names: dict[Local, str] = {}
    used: dict[str, tuple[str, int]] = {}
    """The type of each buffer, and the last phase that reads it."""
    for j, phase in enumerate(loop.phases):
        for x in phase.locals:
            sources = {e.attr for e in walk(x.exprs) if e.op == "local"}
            # Pairs are read before they are written, so they may stay where they are.
            others = [e for f in phase.folds for e in f.exprs]
            others += [e for y in phase.locals if y is not x for e in y.exprs]
            others += [s.value for s in phase.stores]
            mine = {names[s] for s in sources} if pair_step(x) and len(sources) == 1 else set()
            mine -= {names[e.attr] for e in walk(others) if e.op == "local"}
            kind = local_type(x)
            free = [
                name
                for name, (type_, until) in used.items()
                if type_ == kind and (until < j or (until == j and name in mine))
            ]
            names[x] = min(free, key=lambda name: name not in mine) if free else f"local{len(used)}"
            used[names[x]] = (kind, last.get(x, j))
    return names


def pair_step(x: ir.Local) -> int:
    """Returns h where elements i and i ^ h are made of each other, for a loop over pairs; else 0.

    A loop over pairs reads memory in order, so it vectorises.
    """
    if x.kind != "keep" or x.row is None:
        return 0
    at = {e.args[0] for e in walk([x.body]) if e.op == "local"}
    partners = [e for e in at if e.op != "ridx"]
    if not all(e.op == "xor" and is_own(*e.args) for e in partners):
        return 0
    steps = {e.args[1].attr for e in partners}
    if len(steps) != 1:
        return 0
    [step] = steps
    return step if step > 0 and step & (step - 1) == 0 and x.row.count % (2 * step) == 0 else 0


def is_own(index: Expr, other: Expr) -> bool:
    return index.op == "ridx" and other.op == "const"
