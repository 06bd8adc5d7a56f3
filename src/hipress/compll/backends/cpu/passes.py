"""Each kind of pass as functions over a range of tiles."""

from __future__ import annotations

from hipress.compll import ir
from hipress.compll.backends.cpu.kernel import MAX_RANGES, KernelPrinter, Record, Step, stored
from hipress.compll.backends.cpu.loops import Loops, exact
from hipress.compll.backends.render import machine_type, wide_type
from hipress.compll.ir import Array, Expr, Fold, loads, walk

TILE = 2048
"""Elements of a tile: three float tiles and one of codes fit a first-level cache of 32 KiB
(measured on minmax(bits=2): 15.4 ms for 25M elements, against 18.5 ms with tiles of 4096)."""


class Passes(KernelPrinter):
    """Prints the functions of each pass and adds them to the kernel's steps."""

    def loop(self, name: str, p: ir.Loop) -> None:
        stores = [s for phase in p.phases for s in phase.stores]
        loops = Loops(self, p.block or TILE, ir.pass_exprs(p), stores)
        folds = [f for f in ir.pass_folds(p) if f.block is None]
        loops.open(name, [s.array for s in ir.pass_stores(p)], p.length)
        parts = self._partials(loops, folds)
        loops.buffers()
        loops.tiles()
        for j, phase in enumerate(p.phases):
            # A sum of floats has a loop of its own; other reductions share that of the stores.
            alone = [f for f in phase.folds if not (phase.stores and exact(f))]
            shared = [f for f in phase.folds if f not in alone]
            if alone:
                results = loops.fold(f"{name}_f{j}", alone)
                for f, result in zip(alone, results, strict=True):
                    if f.block is None:
                        loops.out(f"{parts[f]}[t] = {result}")
                    else:
                        loops.finish(f, result)
            if phase.stores:
                results = loops.store(f"{name}_s{j}", phase.stores, shared)
                _keep(loops, parts, shared, results)
        for s in p.block_stores:
            [text] = self.print([s.value], loops.out, loops.known)
            loops.out(f"{s.array.name}[t] = {stored(s.array, text)}")
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
            total = "acc"
            # Thousands of partial sums: in double precision they add no error of their own.
            double = f.kind == "sum" and f.type == "float"
            out(f"acc = {'f64' if double else wide_type(f.type)}({init})")
            out.open("for t in range(hi):")
            if f.kind == "or":
                out(f"acc |= {parts[f]}[t]")
            elif f.kind == "sum":
                out(f"acc += {parts[f]}[t]")
                total = "f32(acc)" if double else "acc"
            else:
                out(f"part = {parts[f]}[t]")
                out(f"acc = {self.combined(f, 'acc', 'part', out)}")
            out.depth -= 1
            out(f"{self.slots.of(f.type, f)} = {total}")
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
        saved = loops.saves(p)
        records = self._records(p, saved)
        loops.buffers()
        out(f"mask = np.empty({TILE}, u8)")
        out(f"capacity = i64({self.print([p.filter.capacity], out, loops.known)[0]})")
        out(f"part = _range_of(lo, {self.ranges()})")
        for s in p.emits:
            self.view_record(records[s.array.name], out)
            out(f"to_{s.array.name} = {s.array.name}")
        for key in ("index", *saved.values()):
            self.view_record(records[key], out)
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
        _keep(loops, parts, shared, loops.mark(f"{name}_scan", p, shared, saved))
        loops.take(f"{name}_take", p, saved)
        out.depth -= 1
        out(f"{self.ranges()}[part + {MAX_RANGES}] = count")
        loops.close()
        self._step(name, TILE, p.length if loops.can_share(p) else None)
        self._gather(name, p, saved, records)
        self._join(name, folds, parts, p.length, TILE)

    def _records(self, p: ir.Compact, saved: dict[Array, str]) -> dict[str, Record]:
        """Scratch memory of a filter pass: what each range took, from where, and old values."""
        capacity = self.kernel.limits.get(p.filter.capacity, p.filter.capacity)
        records = {s.array.name: self.record(s.array.storage, capacity) for s in p.emits}
        records["index"] = self.record("i64", capacity)
        return records | {old: self.record("f32", capacity) for old in saved.values()}

    def _gather(
        self, name: str, p: ir.Compact, saved: dict[Array, str], records: dict[str, Record]
    ) -> None:
        loops = Loops(self, TILE, ir.pass_exprs(p), p.stores)
        out = loops.out
        loops.open(f"{name}_gather", [s.array for s in ir.pass_stores(p)], p.length)
        for record in records.values():
            self.view_record(record, out)
        out(f"capacity = i64({self.print([p.filter.capacity], out, loops.known)[0]})")
        ranges = self.ranges()
        out(f"count = {ranges}[{MAX_RANGES}]")
        if loops.can_share(p):
            out.open(f"for part in range(1, {MAX_RANGES}):")
            out(f"taken = {ranges}[part + {MAX_RANGES}]")
            out("if taken == 0:")
            out("    continue")
            out("first = min(taken, capacity - count)")
            out("start = part * capacity")
            for s in p.emits:
                source = records[s.array.name].name
                out(f"{s.array.name}[count : count + first] = {source}[start : start + first]")
            for key in ("index", *saved.values()):
                out(f"to_{key} = {records[key].name}[start : start + taken]")
            if p.stores:
                loops.put_back(f"{name}_back", p, saved)
            out("count += first")
            out.depth -= 1
        out(f"{self.slots.int(p.filter)} = count")
        for s in p.emits:
            out(f"{s.array.name}[count:] = 0")
        loops.close()
        self._step(f"{name}_gather", TILE)

    def scatter(self, name: str, p: ir.Scatter) -> None:
        loops = Loops(self, TILE, [p.index, p.value])
        out = loops.out
        loops.open(name, [p.array], p.length)
        loops.buffers()
        # Every index is checked before anything is written: a refused payload changes nothing.
        before = dict(loops.known)
        loops.tiles()
        loops.known = before
        loops.check(f"{name}_check", p)
        out(f"if {self.slots.int('status')} != 0:")
        out("    return")
        out.depth -= 1
        if p.clear:
            out(f"{p.array.name}[:] = 0")
        loops.tiles()
        loops.scatter(f"{name}_add", p)
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
        out(f"{p.array.name}[max(length, 0) :] = 0")  # room that a shorter array leaves
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
            out(f"{values}[:] = {values}[order]")
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
