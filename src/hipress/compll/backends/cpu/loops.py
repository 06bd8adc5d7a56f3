"""The inner loops of a pass over tiles, each a small function that vectorises.

What a loop needs from outside becomes an argument: slices of the tile, buffers, values that are
the same for the tile. Codes of less than a byte go through a buffer of bytes, random numbers are
drawn for the whole tile before the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hipress.compll import ir
from hipress.compll.backends.cpu.buffers import buffers, local_type
from hipress.compll.backends.cpu.kernel import KernelPrinter, loaded, maximal, stored
from hipress.compll.backends.render import Known, Lines, Spell, machine_type, wide_type
from hipress.compll.ir import Array, Expr, Fold, Store, loads, walk

_DRAWS = {"uniform": "f32", "bits32": "u32"}
"""Type of the buffer that random numbers of a tile are drawn into."""


def exact(fold: Fold) -> bool:
    """Whether the order of a reduction cannot matter, so that its loop may hold stores too."""
    return fold.block is None and (
        fold.kind == "or" or (fold.kind != "fold" and fold.type == "int")
    )


def _identity(fold: Fold) -> str:
    if fold.kind == "or":
        return "i32(0)"
    if fold.type == "float":
        start = {"max": "_key(f32(-np.inf))", "min": "_key(f32(np.inf))"}
        return start.get(fold.kind, "f32(0)")
    ends = {"max": "i64(-9223372036854775808)", "min": "i64(9223372036854775807)"}
    return ends.get(fold.kind, "i64(0)")


@dataclass
class Body(Lines):
    """The body of a loop's function, and the arguments that it turned out to need."""

    depth: int = 1
    args: dict[str, None] = field(default_factory=dict)

    def needs(self, *names: str) -> None:
        self.args.update(dict.fromkeys(names))

    @property
    def signature(self) -> str:
        return ", ".join(["m", "a", *self.args])


class Loops:
    """Prints one pass over tiles: `out` is its function, `functions` are the loops it calls."""

    def __init__(
        self,
        printer: KernelPrinter,
        tile: int,
        roots: list[Expr],
        stores: Sequence[Store] = (),
        loop: ir.Loop | None = None,
    ) -> None:
        self.printer = printer
        self.tile = tile
        self.roots = roots
        """Every value the pass computes, for finding what is the same in a block."""
        self.out = Lines()
        self.before = 0
        """The line of `out` where the loop over tiles begins."""
        self.known: Known = {}
        self.functions = Lines()
        own = _aligned(roots)
        self.rows = {s.array: s.row.count for s in stores if s.row is not None}
        """Arrays with a row for each block: elements of a row."""
        if loop is not None and loop.block is not None:
            inner = [e for e in own if e.args[0].attr is not loop.length]
            self.rows |= {e.attr: ir.row_count(e.args[0].attr) for e in inner}
        # Codes of a row that starts inside a byte are read one by one.
        aligned = [a for a in loads(own) if not ir.splits_bytes(a, self.rows.get(a, 8))]
        self.slices = {a: f"{a.name}_t" for a in [*aligned, *(s.array for s in stores)]}
        self.locals = buffers(loop) if loop is not None else {}
        printer.block_arrays = self.locals
        self.ready: set[ir.Local] = set()
        over = [x.row.count for x in self.locals if x.row is not None]
        self.room = max([tile, *self.rows.values(), *(x.room for x in self.locals), *over])
        """Most elements of a tile or a row."""
        self.codes_in = {a: f"in_{a.name}" for a in aligned if a.storage in ir.PACKED}
        self.codes_out = {
            s.array: f"out_{s.array.name}" for s in stores if s.array.storage in ir.PACKED
        }
        drawn = [e for e in walk(roots) if e.op in ir.RANDOM and e.args[0].op == "idx"]
        self.draws = {e: f"{e.op}_{k}" for k, e in enumerate(drawn)}
        self.row_draws: dict[Expr, int] = {}
        if loop is not None and loop.block is not None:
            inner = [e for e in drawn if e.args[0].attr is not loop.length]
            self.row_draws = {e: ir.row_count(e.args[0].attr) for e in inner}
        for e, count in self.row_draws.items():
            if count % 4:  # a row starts inside a group of four: drawn one by one
                del self.draws[e]

    # Before and around the tiles.

    def open(self, name: str, arrays: Iterable[Array], length: Expr) -> None:
        """Prints the pass up to its loop, with what is the same for all elements."""
        printer, roots = self.printer, self.roots
        printer.head(name, self.out, [*loads([length]), *loads(roots), *arrays])
        printer.length(length, self.tile, self.out)
        if any(e.op in ir.RANDOM for e in walk(roots)):
            self.out("rng = I[1:5]")
        self.known = printer.known(roots)
        self._name(e for e in walk(roots) if e.variance == 0 and e.op not in ("const", "param"))

    def close(self) -> None:
        self.out.end()
        self.printer.out.text += self.functions.text + self.out.text

    def buffers(self) -> None:
        room = (self.room + 7) // 8 * 8
        for name, x in {name: x for x, name in self.locals.items()}.items():
            self.out(f"{name} = np.zeros({room}, {local_type(x)})")
        for name in (*self.codes_in.values(), *self.codes_out.values()):
            self.out(f"{name} = np.empty({room}, u8)")
        for e, name in self.draws.items():
            self.out(f"{name} = np.empty({room}, {_DRAWS[e.op]})")

    def buffer(self, kind: str) -> str:
        """Returns a new buffer with room for a tile or a row, made before the loop over tiles."""
        name = self.printer.fresh()
        self.out.text.insert(
            self.before, f"    {name} = np.empty({(self.room + 7) // 8 * 8}, {kind})"
        )
        self.before += 1
        return name

    def tiles(self) -> None:
        """Prints the loop over tiles, a tile's slices, and what is the same in a block."""
        out, known = self.out, self.known
        self.before = len(out.text)
        out.open("for t in range(lo, hi):")
        out(f"a = t * {self.tile}")
        out(f"m = min({self.tile}, length - a)")
        for array, name in self.slices.items():
            text = f"{array.name}[a : a + m]"
            if array in self.rows:
                size = self.rows[array]
                if array.storage in ir.PACKED:
                    size = size * ir.STORAGE_BITS[array.storage] // 8
                text = f"{array.name}[t * {size} : (t + 1) * {size}]"
            elif array.storage in ir.PACKED:
                per = 8 // ir.STORAGE_BITS[array.storage]
                shift = per.bit_length() - 1
                text = f"{array.name}[a >> {shift} : (a + m + {per - 1}) >> {shift}]"
            out(f"{name} = {text}")
        for array, codes in self.codes_in.items():
            num = str(self.rows.get(array) or "m")
            out(f"_unpack{ir.STORAGE_BITS[array.storage]}({self.slices[array]}, {codes}, {num})")
        for e, name in self.draws.items():
            keys = self.printer.print(e.args[1:], out, known)
            rng = f"_keyed({keys[0]})" if keys else "rng"
            m, a = "m", "a"
            if e in self.row_draws:
                m, a = str(self.row_draws[e]), f"t * {self.row_draws[e]}"
            out(f"_{e.op}s({name}, {m}, {a}, {e.attr}, {rng})")
        for e in walk(ir.with_blocks(self.roots)):
            block = {"bnum": "t", "bstart": "a", "blen": "m"}.get(e.op)
            if block is not None:
                known[e] = f"{machine_type(e)}({block})"
        self.name_block_values()

    def name_block_values(self) -> None:
        """Names values that are the same in the whole block, as far as they are ready."""
        ready = [
            e
            for e in walk(self.roots)
            if e.variance == 1 and not any(self._waits(x) for x in walk([e]))
        ]
        self._name(ready, variance=1)

    def _waits(self, e: Expr) -> bool:
        """Whether a value is of a reduction or an array of the block that is not there yet."""
        if e.op == "local":
            return e.attr not in self.ready
        return e.op == "fold" and e not in self.known

    def _name(self, candidates: Iterable[Expr], variance: int = 0) -> None:
        for e in maximal(candidates, self.roots, variance):
            [text] = self.printer.print([e], self.out, self.known)
            self.known[e] = self.printer.named(text, self.out)

    # Reductions.

    def fold(self, name: str, folds: list[Fold]) -> list[str]:
        """Prints one loop for some reductions; returns the names of their results."""
        body = self.start(folds)
        self.element(body, folds, [])
        # A sum may be taken in any order, so that it vectorises; nothing else is in this loop.
        loose = any(f.kind == "sum" and f.type == "float" for f in folds)
        return self.call(name, body, folds, loose=loose, row=folds[0].row)

    def finish(self, f: Fold, result: str) -> None:
        """Joins a block's own reduction with its start; later phases know it by name."""
        [init] = self.printer.print([f.init], self.out, self.known)
        text = self.joined(f, f"{wide_type(f.type)}({init})", result, self.out)
        if f.kind == "fold" and f.row is not None:  # of no element there is no result
            text = f"({text} if {self.bounds(f.row)[0]} > 0 else {wide_type(f.type)}({init}))"
        if f.kind == "sum" and f.init.op == "const" and f.init.attr == 0:
            text = result
        name = self.printer.named(text, self.out)
        for e in walk(ir.with_blocks(self.roots)):
            if e.op == "fold" and e.attr is f:
                self.known[e] = name
        self.name_block_values()

    @staticmethod
    def start(folds: Sequence[Fold], *args: str) -> Body:
        body = Body()
        body.needs(*args)
        for j, f in enumerate(folds):
            body(f"acc{j} = {_identity(f)}")
        body.open("for i in range(m):")
        return body

    def _accumulate(self, body: Body, acc: str, f: Fold, text: str) -> None:
        if f.kind == "sum":
            body(f"{acc} = {self.printer.combined(f, acc, text, body)}")
        elif f.kind == "or":
            body(f"{acc} |= i32({text})")
        elif f.kind in ("max", "min"):
            item = self.printer.fresh()
            body(f"{item} = {f'_key({text})' if f.type == 'float' else f'i64({text})'}")
            body(f"{acc} = {item} if {item} {'>' if f.kind == 'max' else '<'} {acc} else {acc}")
        else:
            item = self.printer.assign(f"{wide_type(f.type)}({text})", body)
            body(f"{acc} = {item} if i == 0 else {self.joined(f, acc, item, body)}")

    def joined(self, f: Fold, a: str, b: str, out: Lines) -> str:
        """Returns the text of f(a, b); the function of a program may use values of the block."""
        if f.kind != "fold":
            return self.printer.combined(f, a, b, out)
        assert f.combine is not None and f.carry is not None and f.item is not None
        more = {f.carry: a, f.item: b}
        if isinstance(out, Body):
            [text] = self.print(out, [f.combine], more=more)
        else:
            [text] = self.printer.print([f.combine], out, self.known | more)
        return f"{wide_type(f.type)}({text})"

    # Stores.

    def store(self, name: str, stores: Sequence[Store], folds: list[Fold]) -> list[str]:
        """Prints one loop that writes arrays (and reduces), and the packing after it."""
        body = self.start(folds)
        self.element(body, folds, stores)
        results = self.call(name, body, folds, row=stores[0].row)
        self.pack(stores)
        return results

    def pack(self, stores: Iterable[Store]) -> None:
        for s in stores:
            if s.array in self.codes_out:
                bits = ir.STORAGE_BITS[s.array.storage]
                num = str(self.rows.get(s.array) or "m")
                self.out(f"_pack{bits}({self.codes_out[s.array]}, {self.slices[s.array]}, {num})")

    def element(
        self,
        body: Body,
        folds: Sequence[Fold],
        stores: Sequence[Store],
        saved: dict[Array, str] | None = None,
        mask: Expr | None = None,
    ) -> None:
        """Prints what is done for one element: reductions, the filter's mark, stores."""
        roots = [*(f.body for f in folds), *([mask] if mask is not None else [])]
        texts = self.print(body, [*roots, *(s.value for s in stores)], saved)
        for j, f in enumerate(folds):
            self._accumulate(body, f"acc{j}", f, texts[j])
        if mask is not None:
            body(f"mask[i] = u8({texts[len(folds)]})")
        texts = texts[len(roots) :]
        if len(stores) > 1:  # all is read before anything is written
            texts = [self.printer.named(text, body) for text in texts]
        for s, text in zip(stores, texts, strict=True):
            target = self.codes_out.get(s.array) or self.slices[s.array]
            body.needs(target)
            body(f"{target}[i] = {stored(s.array, text)}")

    # Functions.

    def print(
        self,
        body: Body,
        roots: list[Expr],
        saved: dict[Array, str] | None = None,
        more: Known | None = None,
    ) -> list[str]:
        """Prints values inside a loop; names from outside become arguments."""
        inside = self._inside(body, roots) | (more or {})
        return self.printer.print(roots, body, inside, self._spell(body, saved or {}))

    def _inside(self, body: Body, roots: list[Expr]) -> Known:
        texts: Known = {}
        seen: set[Expr] = set()

        def visit(e: Expr) -> None:
            if e in seen:
                return
            seen.add(e)
            if e.op == "idx":
                texts[e] = "(a + i)"
            elif e.op in ("lidx", "ridx"):
                texts[e] = f"{machine_type(e)}(i)"
            elif e in self.known and e.variance < 2:
                text = texts[e] = self.known[e]
                if text.isidentifier() and text not in ("True", "False"):
                    body.needs(text)
                elif "I[" in text or "F[" in text:
                    body.needs("I", "F")
            else:
                for a in e.args:
                    visit(a)

        for root in roots:
            visit(root)
        return texts

    def _spell(self, body: Body, saved: dict[Array, str]) -> Spell:
        def spell(e: Expr, texts: list[str]) -> str:
            aligned = bool(e.args) and e.args[0].op == "idx"
            if e.op == "local":
                body.needs(self.locals[e.attr])
                own = e.args[0].op in ("lidx", "ridx")
                return f"{self.locals[e.attr]}[{'i' if own else texts[0]}]"
            if e.op == "load" and aligned and e.attr in self.slices:
                array: Array = e.attr
                if array in saved:
                    return loaded(array, saved[array])
                source = self.codes_in.get(array) or self.slices[array]
                body.needs(source)
                return loaded(array, f"{source}[i]")
            if e in self.draws:
                name = self.draws[e]
                body.needs(name)
                return f"{name}[i]" if e.op == "uniform" else f"i64({name}[i])"
            if e.is_load:
                body.needs(e.attr.name)
                if e.attr.storage in ir.PACKED:
                    body.needs("I")  # its length is there
            if e.op in ir.RANDOM and len(e.args) == 1:
                body.needs("rng")
            return self.printer.spell(e, texts)

        return spell

    def call(
        self,
        name: str,
        body: Body,
        folds: Sequence[Fold],
        *,
        loose: bool = False,
        row: ir.Row | None = None,
        whole: bool = False,
    ) -> list[str]:
        """Prints the function with its results, and the call; returns the results' names."""
        body.depth -= 1
        ends = [
            f"_unkey(acc{j})" if f.type == "float" and f.kind in ("max", "min") else f"acc{j}"
            for j, f in enumerate(folds)
        ]
        if ends:
            body(f"return {', '.join(ends)}")
        self.define(name, body, loose=loose)
        results = [self.printer.fresh() for _ in folds]
        target = f"{', '.join(results)} = " if results else ""
        m, a = self.bounds(row)
        if whole and row is not None:
            m = str(row.count)
        self.out(f"{target}{name}({', '.join([m, a, *body.args])})")
        return results

    def bounds(self, row: ir.Row | None) -> tuple[str, str]:
        """Returns the elements of a loop and the index of the first, in the whole array."""
        if row is None:
            return "m", "a"
        [length] = self.printer.print([row.length], self.out, self.known)
        return f"i64({length})", f"t * {row.count}"

    def define(self, name: str, body: Body, *, loose: bool = False) -> None:
        out = self.functions
        out('@njit(**_JIT, fastmath={"reassoc"})' if loose else "@njit(**_JIT)")
        out(f"def {name}({body.signature}):")
        out.text += body.text
        out.end()


def _aligned(roots: list[Expr]) -> list[Expr]:
    """Returns the loads of an element's own index, inside block reductions too."""
    return [e for e in walk(ir.with_blocks(roots)) if e.op == "load" and e.args[0].op == "idx"]
