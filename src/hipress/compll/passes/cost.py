"""A kernel in, its cost out: passes over the gradient and bytes moved for each element."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hipress.compll import ir
from hipress.compll.ir import Array, Expr, Kernel, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a kernel moves for each element of the gradient."""

    num_passes: int
    """Passes over all elements of the gradient."""
    num_others: int
    """Passes over arrays of other lengths, which may be as long or short."""
    read_bytes: float
    """Bytes read from arrays as long as the gradient, once for each pass that reads them."""
    written_bytes: float

    def __str__(self) -> str:
        passes = f"{self.num_passes} pass{'' if self.num_passes == 1 else 'es'} over the gradient"
        if self.num_others:
            passes += f" and {self.num_others} over arrays of other lengths"
        return f"{passes}; reads {self.read_bytes:g}, writes {self.written_bytes:g} bytes/element"


def cost(kernel: Kernel) -> Cost:
    """Counts passes and bytes; a sort counts as one pass, though it moves more."""
    moved = [_moved(p) for p in kernel.passes]
    clears = [p for p in kernel.passes if isinstance(p, ir.Scatter) and p.clear]
    lengths = [domain(p) for p in kernel.passes] + [p.array.length for p in clears]
    lengths = [length for length in lengths if length is not None]
    num_passes = sum(map(_is_n, lengths))
    return Cost(
        num_passes=num_passes,
        num_others=len(lengths) - num_passes,
        read_bytes=sum(_element_bytes(reads) for reads, _ in moved),
        written_bytes=sum(_element_bytes(writes) for _, writes in moved),
    )


def domain(p: ir.Pass) -> Expr | None:
    if isinstance(p, ir.Select | ir.Sorting):
        return p.sort.length
    if isinstance(p, ir.Scan):
        return p.fold.length
    return None if isinstance(p, ir.Scalars) else p.length


def _moved(p: ir.Pass) -> tuple[set[Array], set[Array]]:
    """Returns arrays that a pass reads and writes from end to end."""
    if isinstance(p, ir.Select | ir.Sorting):
        arrays = {p.sort.values, *([p.sort.keys] if p.sort.keys is not None else [])}
        return arrays, arrays if isinstance(p, ir.Sorting) else set()
    reads = {
        e.attr
        for e in walk(ir.pass_exprs(p))
        if e.is_load and e.args[0].op == "idx" and _is_n(domain(p))
    }
    if isinstance(p, ir.Scan):
        return reads, {p.array}
    if isinstance(p, ir.Scatter):
        return reads, {p.array} if p.clear else set()
    return reads, {s.array for s in ir.pass_stores(p)}


def _is_n(length: Expr | None) -> bool:
    return length is not None and length.op == "n"


def _element_bytes(arrays: Iterable[Array]) -> float:
    return sum(ir.STORAGE_BITS[a.storage] / 8 for a in arrays if _is_n(a.length))
