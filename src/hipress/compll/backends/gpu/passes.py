"""Each kind of pass as one or a few kernels."""

from __future__ import annotations

from hipress.compll import ir
from hipress.compll.backends.gpu.filters import (
    Corrected,
    clear_rest,
    count_marks,
    left_in_states,
    print_corrections,
    print_marked,
)
from hipress.compll.backends.gpu.kernel import (
    TYPES,
    KernelPrinter,
    Launch,
    Running,
    cast,
    identity,
    loaded,
    stored,
)
from hipress.compll.backends.gpu.locals import print_local
from hipress.compll.backends.gpu.tiles import Tile
from hipress.compll.backends.render import pass_method, wide_type
from hipress.compll.ir import Array, Expr, Fold, Store, loads, walk
from hipress.errors import BackendError

MAX_PARTS = 2048
"""Most programs of a pass that only reduces, each over many tiles: one part of the result each."""

SELECT_PROGRAMS = 1024
"""Most programs that count digits."""

LARGEST_KEY = 0x7F7FFFFF
"""The key of the largest finite float; that of the smallest is its complement."""


class Passes(KernelPrinter):
    """Prints the kernels of each pass and adds them to the launches."""

    def print_pass(self, name: str, p: ir.Pass | Corrected) -> None:
        if isinstance(p, Corrected):
            self.loop(name, p.loop)
            print_corrections(self, f"{name}_correct", p)
        else:
            pass_method(self, p)(name, p)

    def loop(self, name: str, p: ir.Loop) -> None:
        folds = ir.pass_folds(p)
        if p.block is None and not ir.pass_stores(p) and all(f.kind != "fold" for f in folds):
            self._reduction(name, p)
        else:
            self._elements(name, p)

    def _elements(self, name: str, p: ir.Loop) -> None:
        stores = [*(s for phase in p.phases for s in phase.stores), *p.row_stores]
        exprs = ir.pass_exprs(p)
        exprs += [e for a in loads(exprs) if a in self.running for e in self.running[a].fold.exprs]
        tile = Tile(self, p.length, p.block, exprs, stores, sums=bool(ir.pass_folds(p)))
        tile.open(f"{name}_tile", [s.array for s in ir.pass_stores(p)])
        for phase in p.phases:
            tile.block_folds([f for f in phase.folds if f.block is not None])
            whole = [f for f in phase.folds if f.block is None]
            for f, body in zip(whole, tile.bodies(whole), strict=True):
                self._keep_part(name, tile, f, body)
            for x in phase.locals:
                print_local(tile, x)
            tile.store(phase.stores)
        tile.store(p.row_stores)
        tile.block_store(p.block_stores)
        tile.close(name)
        self._join(name, [f for f in ir.pass_folds(p) if f.block is None], tile.grid, tile)

    def _keep_part(self, name: str, tile: Tile, f: Fold, body: str) -> None:
        """Prints what a program's part of a reduction over the whole domain leaves in memory."""
        out, flag = self.out, self.kernel.nonfinite
        if f.kind != "or":
            out(f"tl.store({self._part(name, f)} + t, {tile.reduced(f, body)})")
            return
        # One element is enough: the program that finds it sets the flag.
        if f is flag:
            out(f"_flag(frame + 6, {body})")
        exprs = [e for p in self.kernel.passes for e in ir.pass_exprs(p)]
        if f is not flag or any(e.op == "fold" and e.attr is f for e in walk(exprs)):
            out(f"_flag({self.result(f, 'bool')}, {body})")

    def _part(self, name: str, f: Fold) -> str:
        piece = self.parts.setdefault(f, f"{name}_part{len(self.parts)}")
        size = 4 if f.type == "float" else 8
        return self.pointer(piece, f"grid{name} * {size}", TYPES[wide_type(f.type)])

    def _reduction(self, name: str, p: ir.Loop) -> None:
        """A pass that only reduces: each program goes over many tiles and keeps its sums apart."""
        every, out = ir.pass_folds(p), self.out
        folds = [f for f in every if not self._told_by(f, every)]
        tile = Tile(self, p.length, None, ir.pass_exprs(p))
        tile.open(f"{name}_tile", [])
        out(f"return ({', '.join(tile.bodies(folds))},)")
        out.end()
        num_tiles = tile.grid
        self.head(name)
        known = self.known([p.length])
        self.views(loads([p.length]))
        out(f"length = {self.domain(p.length, known)}")
        each = self.size(("each", name), f"max(-(-({num_tiles}) // {MAX_PARTS}), 1)")
        out(f"each = {each}")
        for j, f in enumerate(folds):
            keys = f.kind == "or" or (f.type == "float" and f.kind != "sum")
            kind = "tl.int32" if keys else TYPES[wide_type(f.type)]
            out(f"acc{j} = tl.full({tile.shape}, {identity(f)}, {kind})")
        out(f"full = tl.minimum((t + 1) * each, length // {tile.span})")
        out("for k in range(t * each, full):")
        self._accumulate(name, folds, "k", "False")
        out(f"if (full * {tile.span} < length) & (full < (t + 1) * each) & (full >= t * each):")
        self._accumulate(name, folds, "full", "True")
        for j, f in enumerate(folds):
            self._keep_part(name, tile, f, f"acc{j}")
        for f in every:
            if extremes := self._told_by(f, every):
                beyond = [f"(acc{folds.index(e)} {bound})" for e, bound in extremes.items()]
                self._keep_part(name, tile, f, f"({' | '.join(beyond)}).to(tl.int32)")
        grid = f"-(-({num_tiles}) // max(-(-({num_tiles}) // {MAX_PARTS}), 1))"
        self.launch(name, grid, tile.warps)
        self._join(name, folds, grid)

    def _told_by(self, flag: Fold, folds: list[Fold]) -> dict[Fold, str]:
        """Returns extremes that a NaN or an infinity would change, and how; none if it might not.

        Keys order NaN beyond the infinities, by its sign.
        """
        bad = flag.body
        if flag.kind != "or" or bad.op != "not" or bad.args[0].op != "finite":
            return {}
        [value] = bad.args[0].args
        found = {f: (f.kind, f.body) for f in folds if f.type == "float"}
        for f, (kind, body) in found.items():
            if kind == "max" and body.op == "abs" and body.args[0] is value:
                return {f: f"> {LARGEST_KEY}"}
        bounds = {"max": f"> {LARGEST_KEY}", "min": f"< {~LARGEST_KEY}"}
        told = {
            f: bounds[kind] for f, (kind, body) in found.items() if body is value and kind in bounds
        }
        return told if {f.kind for f in told} == set(bounds) else {}

    def _accumulate(self, name: str, folds: list[Fold], t: str, tail: str) -> None:
        bodies = [self.fresh() for _ in folds]
        self.out.depth += 1
        self.out(f"{', '.join(bodies)}, = {name}_tile({t}, {self.args}, {tail})")
        for j, (f, body) in enumerate(zip(folds, bodies, strict=True)):
            forms = {"sum": "{} + {}", "min": "tl.minimum({}, {})"}
            self.out(f"acc{j} = {forms.get(f.kind, 'tl.maximum({}, {})').format(f'acc{j}', body)}")
        self.out.depth -= 1

    def _join(self, name: str, folds: list[Fold], grid: str, tile: Tile | None = None) -> None:
        """Prints the kernel that joins the parts of reductions, in order; `tile`: one part each."""
        folds = [f for f in folds if f.kind != "or"]
        if not folds:
            return
        out = self.out
        self.grids[f"grid{name}"] = grid
        count = self.size(("parts", name), f"grid{name}")
        self.head(f"{name}_join")
        self.views(loads([f.init for f in folds]))
        if tile is not None and not tile.length.host:
            self.views(loads([tile.length]))
            length = self.domain(tile.length, self.known([tile.length]))
            count = f"({length} + {tile.span - 1}) // {tile.span}"
        out(f"count = {count}")
        out("lanes = tl.arange(0, 1024)")
        for f in folds:
            [init] = self.print([f.init], out, self.known([f.init]))
            out(f"parts = {self._part(name, f)}")
            out(f"total = {cast(f'({init})', wide_type(f.type))}")
            if f.kind == "fold":
                out("for at in range(0, count):")
                out("    part = tl.load(parts + at)")
                out(f"    total = {self.combined(f, 'total', 'part', out)}")
            else:
                self._join_lanes(f)
            out(f"tl.store({self.result(f, f.type)}, total)")
        self.launch(f"{name}_join", "1")

    def _join_lanes(self, f: Fold) -> None:
        # Thousands of partial sums: in double precision they add no error of their own.
        out, kind = self.out, TYPES[wide_type(f.type)]
        double = f.kind == "sum" and f.type == "float"
        keys = f.kind != "sum" and f.type == "float"
        lane = "tl.float64" if double else ("tl.int32" if keys else kind)
        out(f"acc = tl.full([1024], {identity(f)}, {lane})")
        out.open("for at in range(0, count, 1024):")
        out("live = at + lanes < count")
        out("part = tl.load(parts + at + lanes, mask=live)")
        part = "_key(part)" if keys else ("part.to(tl.float64)" if double else "part")
        out(f"part = tl.where(live, {part}, {identity(f)})")
        out(f"acc = {'acc + part' if f.kind == 'sum' else f'tl.{f.kind}imum(acc, part)'}")
        out.depth -= 1
        if f.kind == "sum":
            whole = "total.to(tl.float64)" if double else "total"
            out(f"total = ({whole} + tl.sum(acc)).to({kind})")
        else:
            text = f"tl.{f.kind}(acc)"
            text = f"_unkey({text})" if keys else text
            out(f"total = {self.combined(f, 'total', text, out)}")

    def compact(self, name: str, p: ir.Compact) -> None:
        """A filter: mark the elements, count the marks, then go to the few that are marked.

        Where the values of a marked element can be had from what an unmarked one leaves in its
        state, the marking pass writes that, and nothing is read twice. Otherwise the states are
        written by a pass of their own, when it is known which elements were taken.
        """
        g = self.graph
        mask = Array(f"temp{name}_mask", "u1", p.length)
        left = left_in_states(self, p)
        marks = p.filter.keep
        for value in left or ():  # an element that a state does not take stays where it is
            marks = g.logic("land", marks, g.unary("finite", value))
        stores = [Store(mask, marks)]
        if left is not None:
            stores += self.stores_if(p, False)
        self._elements(f"{name}_mark", ir.Loop(p.length, None, (ir.Phase(p.folds, tuple(stores)),)))
        count_marks(self, name, p, mask)
        if p.emits or left is not None:
            print_marked(self, name, p, mask, left)
        if left is None and p.stores:
            is_marked = g.binary("ne", g.load(mask, g.idx(p.length)), g.const(0))
            asked = {e: is_marked for e in walk([s.value for s in p.stores]) if e.op == "taken"}
            final = tuple(Store(s.array, g.substitute(s.value, asked)) for s in p.stores)
            self._elements(f"{name}_store", ir.Loop(p.length, None, (ir.Phase((), final),)))
        clear_rest(self, f"{name}_rest", p)

    def scatter(self, name: str, p: ir.Scatter) -> None:
        out, array = self.out, p.array
        size = self.length_text(array.length)
        decodes = array is self.kernel.output
        if p.clear:
            self._clear(f"{name}_clear", array, size, decodes)
        elif decodes:
            self._spoil(f"{name}_spoil", array, size)
        tile = Tile(self, p.length, None, p.exprs, elements=1024)
        tile.open(f"{name}_tile", [array])
        index, value, *bad = tile.print(p.exprs)
        out(f"at = {cast(tile.whole(index, p.index), 'i64')}")
        out(f"value = {tile.whole(value, p.value)}")
        out(f"there = (at >= 0) & (at < {self.size(('size', name), size)})")
        if p.bad is not None:
            # Two that are equal would be added side by side, and one of them lost.
            out(f"there = there & ({tile.whole(bad[0], p.bad)} == 0)")
        out("if TAIL:")
        out("    there = there | (live == 0)")
        out("if _any(there == 0) != 0:")
        out("    tl.store(E, 1)")
        out("if TAIL:")
        out("    there = there & live")
        if decodes:
            out("there = there & (tl.load(frame + 6) == 0)")
        # An atomic addition of floats takes tiny numbers for zero: only where indices may meet.
        if not p.distinct and array.storage in ("f32", "i64"):
            text = stored(array, "value")
            out(f'tl.atomic_add({array.name} + at, {text}, mask=there, sem="relaxed")')
        else:
            old = loaded(array, f"tl.load({array.name} + at, mask=there)")
            new = stored(array, f"({old} + value)")
            out(f"tl.store({array.name} + at, {new}, mask=there)")
        tile.close(name)

    def _clear(self, name: str, array: Array, size: str, decodes: bool) -> None:
        """Zeroes an array; what a frame with a bad number decodes to is NaN."""
        out, span = self.out, 4096
        tile = Tile(self, array.length, None, [], elements=span)
        out("@triton.jit")
        out.open(f"def {name}_tile(t, {self.args}, TAIL: tl.constexpr):")
        self.views([array])
        out(f"length = {self.size(('size', name), size)}")
        out(f"offs = tl.arange(0, {span})[None, :]")
        out("live = None")
        out("if TAIL:")
        out(f"    live = t * {span} + offs < length")
        kind = "tl.float32" if array.type == "float" else "tl.int64"
        out(f"value = tl.zeros([1, {span}], {kind})")
        if decodes:
            out('value = tl.where(tl.load(frame + 6) != 0, float("nan"), value)')
        out(f"tl.store({array.name} + t * {span} + offs, {stored(array, 'value')}, mask=live)")
        tile.close(name)

    def _spoil(self, name: str, array: Array, size: str) -> None:
        """Adding a frame with a bad number gives NaN everywhere, not only where it has values."""
        out, programs = self.out, f"min(-(-{size} // 4096), {MAX_PARTS})"
        self.head(name)
        out.open("if tl.load(frame + 6) != 0:")
        out('value = tl.full((), float("nan"), tl.float32)')
        length = self.size(("size", name), size)
        count = self.size(("programs", name), programs)
        out(f"_spoil({array.name}, {length}, t, {count}, {stored(array, 'value')})")
        self.launch(name, programs)

    def scan(self, name: str, p: ir.Scan) -> None:
        f, out = p.fold, self.out
        if f.kind == "sum" and f.type == "int":
            self._scan_ints(name, p)
            return
        if f.kind == "fold":
            raise BackendError(
                "a scan with a function of its own goes from left to right and does not run on a "
                "GPU; use the cpu backend for this program."
            )
        # One program, tile after tile: right for floats too, and slow.
        tile = Tile(self, f.length, None, f.exprs, elements=1024)
        tile.open(f"{name}_tile", [p.array], ", acc")
        item = tile.whole(tile.print([f.body])[0], f.body)
        out(f"item = {cast(item, wide_type(f.type))}")
        out(f"found = tl.associative_scan(item, 1, _scan_{f.kind})")
        out(f"found = {self.combined(f, 'acc', 'found', out)}")
        tile.write(p.array, "found")
        out(f"last = tl.where(offs == {tile.span - 1}, found, 0)")
        out("return tl.sum(last).to(found.dtype)")
        out.end()
        self.head(name)
        known = self.known([f.length, f.init])
        self.views([*loads([f.length, f.init]), p.array])
        out(f"length = {self.domain(f.length, known)}")
        [init] = self.print([f.init], out, known)
        out(f"acc = {cast(f'({init})', wide_type(f.type))}")
        out(f"full = length // {tile.span}")
        out("for k in range(t, full):")
        out(f"    acc = {name}_tile(k, {self.args}, acc, False)")
        out(f"if full * {tile.span} < length:")
        out(f"    {name}_tile(full, {self.args}, acc, True)")
        self.launch(name, "1")

    def _scan_ints(self, name: str, p: ir.Scan) -> None:
        """Sums of ints up to each element: sums of tiles, sums of the tiles before, then all."""
        f, out = p.fold, self.out
        tile = Tile(self, f.length, None, f.exprs)
        num_tiles = tile.grid
        parts = self.pointer(f"{name}_parts", f"({num_tiles}) * 8", "tl.int64", zeroed=True)
        tile.open(f"{name}_sums_tile", [])
        [item] = tile.bodies([f])
        out(f"tl.store({parts} + t, tl.sum({item}))")
        tile.close(f"{name}_sums")
        self.head(f"{name}_before")
        out(f"_sums_before({parts}, {self.size(('parts', name), num_tiles)})")
        self.launch(f"{name}_before", "1")
        if self._only_filters_read(p.array) and self._stays(p):
            self.running[p.array] = Running(f, parts, tile.span)
            return
        tile.open(f"{name}_tile", [p.array])
        [item] = tile.bodies([f])
        init = cast(f"({tile.print([f.init])[0]})", "i64")
        out(f"found = {init} + tl.load({parts} + t) + tl.cumsum({item}, axis=1)")
        tile.write(p.array, "found")
        tile.close(name)

    def _stays(self, p: ir.Scan) -> bool:
        """Whether what a scan is over stays as it is until its last reader has run."""
        passes = self.kernel.passes
        readers = [k for k, q in enumerate(passes) if p.array in loads(ir.pass_exprs(q))]
        between = passes[passes.index(p) + 1 : max(readers, default=0)]
        written = {s.array for q in between for s in ir.pass_stores(q)}
        written |= {q.array for q in between if isinstance(q, ir.Scan | ir.Scatter)}
        return not written & set(loads(p.fold.exprs))

    def _only_filters_read(self, array: Array) -> bool:
        """Whether an array is only used to decide which elements pass, each at its own place."""

        def reads(exprs: list[Expr]) -> list[Expr]:
            return [e for e in walk(ir.with_blocks(exprs)) if e.is_load and e.attr is array]

        for p in self.kernel.passes:
            if isinstance(p, ir.Compact) and p.length is array.length:
                rest = [e for f in p.folds for e in f.exprs] + [p.filter.capacity]
                rest += [s.value for s in (*p.emits, *p.stores)]
                here = [e for e in reads([p.filter.keep]) if e.args[0].op == "idx"]
                if reads(rest) or len(here) != len(reads([p.filter.keep])):
                    return False
            elif reads(ir.pass_exprs(p)):
                return False
        return array in self.kernel.temps

    def order(self, name: str, p: ir.Select | ir.Sorting) -> None:
        sort, out = p.sort, self.out
        picks = self.picks(sort)
        if isinstance(p, ir.Select) and sort.values.type == "float":
            for j, e in enumerate(picks):
                self._select(f"{name}_k{j}", e)
            return
        self._sort(sort.values, sort.keys)
        if not picks:
            return
        self.head(f"{name}_pick")
        self.views([sort.values, *loads(sort.ranks)])
        known = self.known([e.args[0] for e in picks])
        for e in picks:
            [rank] = self.print([e.args[0]], out, known)
            last = self.last(sort.values)
            at = f"_max(_min(({rank}).to(tl.int64), {last}), _i64(0))"
            there = f"mask=_unless_empty({last}, None), other=0"
            value = loaded(sort.values, f"tl.load({sort.values.name} + {at}, {there})")
            out(f"tl.store({self.result(e, e.type)}, {cast(f'({value})', wide_type(e.type))})")
        self.launch(f"{name}_pick", "1")

    def _sort(self, values: Array, keys: Array | None) -> None:
        """Adds a launch that torch runs: its name holds the places of length and arrays."""
        arrays = [a for a in (values, keys) if a is not None]
        for array in arrays:
            self.view(array)
        self.size(("sorted", values.name), self.length_text(values.length))
        places = [f"{self.ints[('at', a.name)]}, {a.storage!r}" for a in arrays]
        name = f"({self.ints[('sorted', values.name)]}, {', '.join(places)})"
        self.launches.append(Launch(name, "1", 0))

    def _select(self, name: str, e: Expr) -> None:
        """The element of one rank: four kernels that count digits, one that reads the result."""
        values: Array = e.attr.values
        out, size = self.out, self.length_text(values.length)
        counts = self.pointer(f"{name}_counts", "4 * 256 * 4", "tl.int32", zeroed=True)
        found = self.pointer(f"{name}_found", "64", "tl.int64", zeroed=True)
        grid = f"max(min(-(-{size} // 2048), {SELECT_PROGRAMS}), 1)"
        for level in range(4):
            self.head(f"{name}_l{level}")
            self.views([values, *loads(e.args)])
            [rank] = self.print([e.args[0]], out, self.known(e.args))
            length = self.size(("size", name), size)
            programs = self.size(("programs", name), grid)
            out(f"rank = {cast(f'({rank})', 'i64')}")
            given = f"{values.name}, {length}, rank, {counts}, {found}, t, {programs}, {level}"
            out(f"_select_count({given})")
            self.launch(f"{name}_l{level}", grid, 8)
        self.head(f"{name}_value")
        value = f"_select_value({counts}, {found}, {self.size(('size', name), size)})"
        out(f"tl.store({self.result(e, e.type)}, {value})")
        self.launch(f"{name}_value", "1", 8)

    def scalars(self, name: str, p: ir.Scalars) -> None:
        roots = [s.value for s in p.stores]
        self.head(name)
        self.views([*loads(roots), *(s.array for s in p.stores)])
        self.draws(roots)
        texts = self.print(roots, self.out, self.known(roots))
        for s, text in zip(p.stores, texts, strict=True):
            packed = s.array.storage in ir.PACKED
            value = f"({text}).to(tl.uint8)" if packed else stored(s.array, f"({text})")
            self.out(f"tl.store({s.array.name}, {value})")
        self.launch(name, "1")

    def check(self) -> None:
        """Prints the function that looks at a frame's header and what its payload must fulfil."""
        out, conds = self.out, [r.cond for r in self.kernel.requires]
        out("@triton.jit")
        out.open(f"def _{self.kernel.name}_check(t, {self.args}):")
        out("if _same_header(frame, H) == 0:")
        out("    tl.store(E, 2)")
        self.views(loads(conds))
        known = self.known(conds)
        for k, cond in enumerate(conds):
            [text] = self.print([cond], out, known)
            out(f"if {text} == 0:")
            out(f"    tl.store(E, {k + 3})")
        out.end()
