"""The inner loops of a pass over tiles, each a small function that vectorises.

What a loop needs from outside becomes an argument: slices of the tile, buffers, values that are
the same for the tile. Codes of less than a byte go through a buffer of bytes, random numbers are
drawn for the whole tile before the loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from hipress.compll.backends.cpu.shared import Known, Shared, maximal
from hipress.compll.backends.cpu.spell import PACKED, RANDOM, loaded, rep, stored, wide
from hipress.compll.backends.render import Lines, Spell, print_values
from hipress.compll.ir import (
    STORAGE_BITS,
    Array,
    Compact,
    Expr,
    Fold,
    Scatter,
    Store,
    loads,
    walk,
    with_blocks,
)


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


class Loops:
    """Prints the loops of one pass."""

    def __init__(self, shared: Shared, tile: int, roots: list[Expr], stores: list[Store]) -> None:
        self.shared = shared
        self.tile = tile
        self.roots = roots
        """Every value the pass computes, for finding what is the same in a block."""
        self.stores = stores
        self.functions = Lines()
        """The functions, to be printed before the pass that calls them."""
        self.slices = {
            array: f"{array.name}_t"
            for array in [*loads(_aligned(roots)), *(s.array for s in stores)]
        }
        self.codes_in = {a: f"in_{a.name}" for a in loads(_aligned(roots)) if a.storage in PACKED}
        self.codes_out = {
            s.array: f"out_{s.array.name}" for s in stores if s.array.storage in PACKED
        }
        drawn = [e for e in walk(roots) if e.op in RANDOM and e.args[0].op == "idx"]
        self.draws = {e: f"{e.op}_{k}" for k, e in enumerate(drawn)}

    # Before and around the tiles.

    def buffers(self, out: Lines) -> None:
        """Prints the scratch buffers that all tiles share."""
        room = (self.tile + 7) // 8 * 8
        for name in (*self.codes_in.values(), *self.codes_out.values()):
            out(f"{name} = np.empty({room}, u8)")
        for e, name in self.draws.items():
            out(f"{name} = np.empty({room}, {RANDOM[e.op]})")

    def tiles(self, out: Lines, known: Known) -> None:
        """Prints the loop over tiles, a tile's slices, and what is the same in a block."""
        out("for t in range(lo, hi):")
        out.depth += 1
        out(f"a = t * {self.tile}")
        out(f"m = min({self.tile}, length - a)")
        for array, name in self.slices.items():
            text = f"{array.name}[a : a + m]"
            if array.storage in PACKED:
                per = 8 // STORAGE_BITS[array.storage]
                shift = per.bit_length() - 1
                text = f"{array.name}[a >> {shift} : (a + m + {per - 1}) >> {shift}]"
            out(f"{name} = {text}")
        for array, codes in self.codes_in.items():
            out(f"_unpack{STORAGE_BITS[array.storage]}({self.slices[array]}, {codes}, m)")
        for e, name in self.draws.items():
            rng = "rng" if len(e.args) == 1 else f"_keyed({known[e.args[1]]})"
            out(f"_{e.op}s({name}, m, a, {e.attr}, {rng})")
        for e in walk(with_blocks(self.roots)):
            block = {"bnum": "t", "bstart": "a", "blen": "m"}.get(e.op)
            if block is not None:
                known[e] = f"{rep(e)}({block})"
        self._block_values(out, known)

    def _block_values(self, out: Lines, known: Known) -> None:
        """Names values that are the same in the whole block, as far as they are ready."""
        ready = [
            e
            for e in walk(self.roots)
            if e.variance == 1 and not any(x.op == "fold" and x not in known for x in walk([e]))
        ]
        for e in maximal(ready, self.roots, 1):
            self.shared.print([e], out, known)
            known[e] = self.shared.named(known[e], out)

    # Reductions.

    def fold(self, name: str, folds: list[Fold], out: Lines, known: Known) -> list[str]:
        """Prints one loop for some reductions; gives the names of their results."""
        body = Lines(depth=1)
        args: dict[str, None] = {}
        self._start(folds, body)
        self._element(folds, [], body, known, args)
        # A sum may be taken in any order, so that it vectorises; nothing else is in this loop.
        loose = any(f.kind == "sum" and f.type == "float" for f in folds)
        return self._call(name, args, body, folds, out, loose=loose)

    def finish(self, f: Fold, result: str, out: Lines, known: Known) -> None:
        """The block's own reduction joined with its start; later phases know it by name."""
        init = self.shared.print([f.init], out, known)[0]
        text = self.shared.combined(f, f"{wide(f.type)}({init})", result, out)
        if f.kind == "sum" and f.init.op == "const" and f.init.attr == 0:
            text = result
        name = self.shared.named(text, out)
        for e in walk(with_blocks(self.roots)):
            if e.op == "fold" and e.attr is f:
                known[e] = name
        self._block_values(out, known)

    @staticmethod
    def _start(folds: list[Fold], body: Lines) -> None:
        for j, f in enumerate(folds):
            body(f"acc{j} = {_identity(f)}")
        body("for i in range(m):")
        body.depth += 1

    def _accumulate(
        self, acc: str, f: Fold, text: str, body: Lines, known: Known, args: dict[str, None]
    ) -> None:
        if f.kind == "sum":
            body(f"{acc} += {text}")
        elif f.kind == "or":
            body(f"{acc} |= i32({text})")
        elif f.kind in ("max", "min"):
            item = self.shared.fresh()
            body(f"{item} = {f'_key({text})' if f.type == 'float' else f'i64({text})'}")
            body(f"{acc} = {item} if {item} {'>' if f.kind == 'max' else '<'} {acc} else {acc}")
        else:
            assert f.combine is not None and f.carry is not None and f.item is not None
            item = self.shared.fresh()
            body(f"{item} = {wide(f.type)}({text})")
            inside = self._inside([f.combine], known, args) | {f.carry: acc, f.item: item}
            print_values([f.combine], body, self._spell(args, {}), inside, self.shared.fresh)
            body(f"{acc} = {item} if i == 0 else {wide(f.type)}({inside[f.combine]})")

    # Stores.

    def store(
        self, name: str, stores: list[Store], folds: list[Fold], out: Lines, known: Known
    ) -> list[str]:
        """Prints one loop that writes arrays (and reduces), and the packing after it."""
        body = Lines(depth=1)
        args: dict[str, None] = {}
        self._start(folds, body)
        self._element(folds, stores, body, known, args)
        results = self._call(name, args, body, folds, out)
        self._pack(stores, out)
        return results

    def _pack(self, stores: Iterable[Store], out: Lines) -> None:
        for s in stores:
            if s.array in self.codes_out:
                bits = STORAGE_BITS[s.array.storage]
                out(f"_pack{bits}({self.codes_out[s.array]}, {self.slices[s.array]}, m)")

    def _element(
        self,
        folds: list[Fold],
        stores: list[Store],
        body: Lines,
        known: Known,
        args: dict[str, None],
        saved: dict[Array, str] | None = None,
        mask: Expr | None = None,
    ) -> None:
        """Prints what is done for one element: reductions, the filter's mark, stores."""
        roots = [*(f.body for f in folds), *([mask] if mask is not None else [])]
        roots += [s.value for s in stores]
        inside = self._inside(roots, known, args)
        print_values(roots, body, self._spell(args, saved or {}), inside, self.shared.fresh)
        for j, f in enumerate(folds):
            self._accumulate(f"acc{j}", f, inside[f.body], body, known, args)
        if mask is not None:
            body(f"mask[i] = u8({inside[mask]})")
        texts = [inside[s.value] for s in stores]
        if len(stores) > 1:  # all is read before anything is written
            texts = [self.shared.named(text, body) for text in texts]
        for s, text in zip(stores, texts, strict=True):
            target = self.codes_out.get(s.array) or self.slices[s.array]
            args[target] = None
            body(f"{target}[i] = {stored(s.array, text)}")

    # Filters.

    def saves(self, p: Compact, out: Lines) -> dict[Array, str]:
        """Buffers for old values of arrays that a filter pass overwrites before it knows."""
        read = set(loads(self.roots))
        saved = {s.array: f"old_{s.array.name}" for s in p.stores if s.array in read}
        for name in saved.values():
            out(f"{name} = np.empty({self.tile}, f32)")
        return saved

    def can_share(self, p: Compact) -> bool:
        """Whether threads may share a filter pass: what one took in vain can be put back."""
        random = any(e.op in RANDOM for e in walk([s.value for s in p.stores]))
        return not (random or self.codes_out)

    def scan(
        self,
        name: str,
        p: Compact,
        folds: list[Fold],
        saved: dict[Array, str],
        out: Lines,
        known: Known,
    ) -> list[str]:
        """A vector loop that marks elements and, for now, takes none."""
        body = Lines(depth=1)
        args: dict[str, None] = {"mask": None}
        self._start(folds, body)
        for array, old in saved.items():
            args.update({old: None, self.slices[array]: None})
            body(f"{old}[i] = {loaded(array, f'{self.slices[array]}[i]')}")
        self._element(folds, self._told(p, False), body, known, args, mask=p.filter.keep)
        return self._call(name, args, body, folds, out)

    def take(
        self, name: str, p: Compact, saved: dict[Array, str], out: Lines, known: Known
    ) -> None:
        """The few marked elements, one by one, in order, while there is room."""
        body = Lines(depth=1)
        args = dict.fromkeys(
            ["mask", "count", "capacity", *(f"to_{s.array.name}" for s in p.emits)]
        )
        args |= dict.fromkeys(["to_index", *(f"to_{old}" for old in saved.values())])
        body("num_words = (m + 7) >> 3")
        body("for i in range(m, num_words * 8):")
        body("    mask[i] = u8(0)")
        body("words = mask[: num_words * 8].view(u64)")
        body("for w in range(num_words):")
        body.depth += 1
        body("word = words[w]")
        body("while word != u64(0) and count < capacity:")
        body.depth += 1
        body("i = w * 8 + _first_byte(word)")
        body("word &= word - u64(1)")
        emitted = [s.value for s in p.emits]
        inside = self._inside(emitted, known, args)
        olds = {array: f"{old}[i]" for array, old in saved.items()}
        print_values(emitted, body, self._spell(args, olds), inside, self.shared.fresh)
        for s in p.emits:
            body(f"to_{s.array.name}[count] = {stored(s.array, inside[s.value])}")
        body("to_index[count] = a + i")
        for old in saved.values():
            body(f"to_{old}[count] = {old}[i]")
            args[old] = None
        if p.stores:
            self._element([], self._told(p, True), body, known, args, olds)
        body("count += 1")
        body.depth -= 2
        body("return count")
        self._define(name, args, body)
        out(f"count = {name}({', '.join(['m', 'a', *args])})")
        self._pack(p.stores, out)

    def put_back(
        self, name: str, p: Compact, saved: dict[Array, str], out: Lines, known: Known
    ) -> None:
        """The elements that a later range took and that there is no room for: as if never taken."""
        body = Lines(depth=1)
        args = dict.fromkeys(["first", "to_index", *(f"to_{old}" for old in saved.values())])
        body("for j in range(first, m):")
        body.depth += 1
        body("i = to_index[j]")
        records = {array: f"to_{old}[j]" for array, old in saved.items()}
        self._element([], self._told(p, False), body, known, args, records)
        self._define(name, args, body)
        bound = {self.slices[array]: array.name for array in self.slices}
        out(f"{name}({', '.join(['taken', '0', *(bound.get(a, a) for a in args)])})")

    def _told(self, p: Compact, taken: bool) -> list[Store]:
        """The stores of a filter pass for elements that are known to be taken, or not."""
        graph = self.shared.graph
        asked = [e for e in walk([s.value for s in p.stores]) if e.op == "taken"]
        told = {e: graph.const(taken) for e in asked}
        return [Store(s.array, graph.substitute(s.value, told)) for s in p.stores]

    # Scatters.

    def check(self, name: str, p: Scatter, out: Lines, known: Known) -> None:
        """Looks for an index out of range."""
        body, target = Lines(depth=1), p.array.name
        args: dict[str, None] = {"I": None, target: None}
        body(f"size = len({target})")
        self._start([], body)
        inside = self._inside([p.index], known, args)
        print_values([p.index], body, self._spell(args, {}), inside, self.shared.fresh)
        body(f"k = i64({inside[p.index]})")
        body("if k < 0 or k >= size:")
        body(f"    {self.shared.slots.int('status')} = 1")
        self._call(name, args, body, [], out)

    def scatter(self, name: str, p: Scatter, out: Lines, known: Known) -> None:
        """Adds each value at its index."""
        body, target = Lines(depth=1), p.array.name
        args: dict[str, None] = {target: None}
        self._start([], body)
        roots = [p.index, p.value]
        inside = self._inside(roots, known, args)
        print_values(roots, body, self._spell(args, {}), inside, self.shared.fresh)
        body(f"k = i64({inside[p.index]})")
        old = loaded(p.array, f"{target}[k]")
        body(f"{target}[k] = {stored(p.array, f'{old} + {inside[p.value]}')}")
        self._call(name, args, body, [], out)

    # Functions.

    def _inside(self, roots: list[Expr], known: Known, args: dict[str, None]) -> Known:
        """Texts of what a loop gets from outside; each name becomes an argument."""
        texts: Known = {}

        def visit(e: Expr) -> None:
            if e in texts:
                return
            if e.op == "idx":
                texts[e] = "(a + i)"
            elif e.op == "lidx":
                texts[e] = f"{rep(e)}(i)"
            elif e in known and e.variance < 2:
                texts[e] = known[e]
                if known[e].isidentifier() and known[e] not in ("True", "False"):
                    args[known[e]] = None
                elif "I[" in known[e] or "F[" in known[e]:
                    args.update({"I": None, "F": None})
            else:
                for a in e.args:
                    visit(a)

        for root in roots:
            visit(root)
        return texts

    def _spell(self, args: dict[str, None], saved: dict[Array, str]) -> Spell:
        def spell(e: Expr, texts: list[str]) -> str:
            aligned = bool(e.args) and e.args[0].op == "idx"
            if e.op == "load" and aligned:
                array: Array = e.attr
                if array in saved:
                    return saved[array]
                source = self.codes_in.get(array) or self.slices[array]
                args[source] = None
                return loaded(array, f"{source}[i]")
            if e.op in RANDOM and aligned:
                name = self.draws[e]
                args[name] = None
                return f"{name}[i]" if e.op == "uniform" else f"i64({name}[i])"
            if e.is_load:
                args[e.attr.name] = None
                if e.attr.storage in PACKED:
                    args["I"] = None  # its length is there
            if e.op in RANDOM and len(e.args) == 1:
                args["rng"] = None
            return self.shared.spell(e, texts)

        return spell

    def _call(
        self,
        name: str,
        args: dict[str, None],
        body: Lines,
        folds: list[Fold],
        out: Lines,
        *,
        loose: bool = False,
    ) -> list[str]:
        """Prints the function with its results, and the call; gives the results' names."""
        body.depth -= 1
        ends = [
            f"_unkey(acc{j})" if f.type == "float" and f.kind in ("max", "min") else f"acc{j}"
            for j, f in enumerate(folds)
        ]
        if ends:
            body(f"return {', '.join(ends)}")
        self._define(name, args, body, loose=loose)
        results = [self.shared.fresh() for _ in folds]
        target = f"{', '.join(results)} = " if results else ""
        out(f"{target}{name}({', '.join(['m', 'a', *args])})")
        return results

    def _define(
        self, name: str, args: dict[str, None], body: Lines, *, loose: bool = False
    ) -> None:
        out = self.functions
        out('@njit(**_JIT, fastmath={"reassoc"})' if loose else "@njit(**_JIT)")
        out(f"def {name}({', '.join(['m', 'a', *args])}):")
        out.text += body.text
        out()
        out()


def _aligned(roots: list[Expr]) -> list[Expr]:
    """The loads of an element's own index, inside block reductions too."""
    found = walk(with_blocks(roots))
    return [e for e in found if e.op == "load" and e.args[0].op == "idx"]
