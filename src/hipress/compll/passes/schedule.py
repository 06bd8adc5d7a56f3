"""A draft of a kernel in, the fewest passes over memory out.

Every write and reduction gets a *level*: one more than what it waits for. Work of one level over
one domain shares a pass; an output waits for the latest pass over its domain if that saves one.
Inside a pass over blocks, what waits for a block's own reduction is a later phase of the same
pass: the block is still in cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hipress.compll import ir
from hipress.compll.front.draft import Draft, Write
from hipress.compll.front.graph import TooDeep
from hipress.compll.ir import Array, Expr, Fold, Store, walk

MAX_LOOPS = 40
MAX_FOLDS = 100
MAX_VALUES = 4000
"""What numba compiles in 30 s on one core; built-in codecs have up to 4 loops and 120 values."""


class NotFusable(Exception):
    """The states cannot be written by the passes that encode; use the generic path."""


def schedule(draft: Draft, nonfinite: Fold | None, states: Iterable[Array]) -> tuple[ir.Pass, ...]:
    """Returns the passes of a kernel in order; raises `NotFusable` if states do not fit in.

    `nonfinite` joins any pass. `states` are arrays that are read and written: their old values
    must last until all is read.
    """
    passes = _Scheduler(draft, set(states)).run(nonfinite)
    num_loops = sum(_num_loops(p) for p in passes)
    num_folds = sum(len(ir.pass_folds(p)) for p in passes)
    num_values = sum(1 for p in passes for _ in walk(ir.with_blocks(ir.pass_exprs(p))))
    if num_loops > MAX_LOOPS or num_folds > MAX_FOLDS or num_values > MAX_VALUES:
        raise TooDeep(
            f"{num_loops} loops over arrays compute {num_folds} reductions and {num_values} "
            f"values; at most {MAX_LOOPS} loops, {MAX_FOLDS} reductions and {MAX_VALUES:,} "
            "values are compiled, which takes half a minute; send parts that need fewer"
        )
    return passes


def _num_loops(p: ir.Pass) -> int:
    """Returns the loops of a pass: one for each array of a block, one for the rest of a phase."""
    if not isinstance(p, ir.Loop):
        return 1
    return len(p.locals) + sum(1 for phase in p.phases if phase.folds or phase.stores)


def block_of(exprs: Iterable[Expr]) -> ir.Blocks | None:
    found = ir.blocks_of(exprs)
    assert len(found) <= 1, "blocks of two scopes in one value"
    return next(iter(found), None)


@dataclass(eq=False)
class _Open:
    level: int
    length: Expr
    block: ir.Blocks | None = None
    filter: ir.Filter | None = None
    folds: list[Fold] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    block_stores: list[Store] = field(default_factory=list)
    row_stores: list[Store] = field(default_factory=list)
    emits: list[Store] = field(default_factory=list)

    def stores_of(self, write: Write) -> list[Store]:
        lists = {"block": self.block_stores, "row": self.row_stores}
        return lists.get(write.each, self.stores)

    def exprs(self) -> list[Expr]:
        out = [e for f in self.folds for e in f.exprs]
        writes = (*self.stores, *self.block_stores, *self.row_stores, *self.emits)
        out += [s.value for s in writes]
        return out + ([self.filter.keep] if self.filter is not None else [])


class _Scheduler:
    def __init__(self, draft: Draft, states: set[Array]) -> None:
        _drop_unread(draft)
        self.draft = draft
        self.states = states
        self.open: list[_Open] = []
        self.fixed: list[tuple[int, list[Expr], ir.Pass]] = []
        """Passes of their own: level, what they read, the pass."""
        self._levels: dict[object, int] = {}
        self.written_by: dict[Array | None, object] = {
            **{write.array: write for write in draft.writes},
            **{array: found for found, array, _ in draft.emits},
            **{array: s for s in draft.sorts for array in (s.values, s.keys)},
            **{scan.array: scan.fold for scan in draft.scans},
            **{scatter.array: scatter for scatter in draft.scatters},
        }

    def run(self, nonfinite: Fold | None) -> tuple[ir.Pass, ...]:
        draft = self.draft
        folds = self._global_folds()
        for fold in folds:
            self._place_fold(fold, exact=True)
        for found in self._filters():
            emits = [Store(array, value) for f, array, value in draft.emits if f is found]
            self.open.append(_Open(self._level(found), found.length, filter=found, emits=emits))
        for write in draft.writes:
            if not write.final:
                self._place(write, exact=True)
        self._own_passes()
        early = [w for w in draft.writes if w.each == "scalar" and self._reads_state([w.value])]
        for write in early:  # before a state is overwritten
            store = Store(write.array, write.value)
            self.fixed.append((self._level(write), [write.value], ir.Scalars((store,))))
        for write in sorted(self._outputs(), key=lambda w: -self._level(w)):
            self._place(write, exact=False)
        self._place_states()
        if nonfinite is not None and nonfinite not in folds:
            self._place_fold(nonfinite, exact=False)
        passes = [(p.level, i, self._close(p)) for i, p in enumerate(self.open)]
        passes += [(level, len(self.open) + i, p) for i, (level, _, p) in enumerate(self.fixed)]
        scalars = tuple(
            Store(w.array, w.value)
            for w in draft.writes
            if w.each == "scalar" and not self._reads_state([w.value])
        )
        ordered: list[ir.Pass] = [p for _, _, p in sorted(passes, key=lambda x: x[:2])]
        return (*ordered, *([ir.Scalars(scalars)] if scalars else []))

    # What there is to do.

    def _global_folds(self) -> list[Fold]:
        found = [e.attr for e in ir.walk_all(self.draft.exprs()) if e.op == "fold"]
        return sorted((f for f in dict.fromkeys(found) if f.block is None), key=self._level)

    def _filters(self) -> list[ir.Filter]:
        emits = [f for f, _, _ in self.draft.emits]
        asked = (e for e in ir.walk_all(self.draft.exprs()) if e.op in ("count", "taken"))
        return list(dict.fromkeys([*emits, *(e.attr for e in asked)]))

    def _outputs(self) -> list[Write]:
        finals = [w for w in self.draft.writes if w.final and w.each != "scalar"]
        return [w for w in finals if w.array not in self.states]

    # Levels.

    def _level(self, job: object) -> int:
        if job not in self._levels:
            self._levels[job] = self._find_level(job)
        return self._levels[job]

    def _find_level(self, job: object) -> int:
        if isinstance(job, Fold):
            return self._wait([*job.exprs, job.length])
        if isinstance(job, ir.Filter):
            emits = [value for f, _, value in self.draft.emits if f is job]
            return self._wait([job.keep, job.length, *emits], within=job)
        if isinstance(job, ir.Sort):
            return self._wait([job.value, job.key, *job.ranks]) + 1  # first its input is written
        if isinstance(job, Write):
            return self._wait([job.value, job.length])
        assert isinstance(job, ir.Scatter)
        return self._wait([job.length, job.index, job.value])

    def _wait(self, exprs: Iterable[Expr], within: ir.Filter | None = None) -> int:
        level = 0
        for e in walk(ir.with_blocks(exprs)):
            if e.op in ("pick", "count") or (e.op == "fold" and e.attr.block is None):
                level = max(level, self._level(e.attr) + 1)
            elif e.op == "taken" and e.attr is not within:
                level = max(level, self._level(e.attr))
            elif e.is_load and e.attr in self.written_by and e.attr not in self.states:
                level = max(level, self._level(self.written_by[e.attr]) + 1)
            elif e.op == "idx":
                level = max(level, self._wait([e.attr]))
        return level

    # Placing.

    def _place_fold(self, fold: Fold, *, exact: bool) -> None:
        """Puts a reduction into a pass at its level or, unless `exact`, into any later one."""
        level, block = self._level(fold), block_of(fold.exprs)
        for p in sorted(self.open, key=lambda p: p.level):
            fits = p.level == level if exact else p.level >= level
            if fits and self._joins(p, fold.length, block):
                p.folds.append(fold)
                p.block = p.block or block
                return
        self.open.append(_Open(level, fold.length, block, folds=[fold]))

    @staticmethod
    def _joins(p: _Open, length: Expr, block: ir.Blocks | None) -> bool:
        if p.length is not length:
            return False
        if p.filter is not None:
            return block is None
        return block is None or p.block is None or p.block == block

    def _place(self, write: Write, *, exact: bool) -> None:
        """Puts a write into a pass at its level or, unless `exact`, into any later one."""
        level = self._level(write)
        block = write.block or block_of([write.value])
        taken = self._asks_taken([write.value])
        for p in sorted(self.open, key=lambda p: p.level):
            fits = p.level == level if exact else p.level >= level
            if fits and self._joins(p, write.length, block) and self._knows(p, taken):
                break
        else:
            if taken:
                raise NotFusable("a value depends on what a filter took, but waits for more")
            p = _Open(level, write.length, block)
            self.open.append(p)
        p.block = p.block or block
        p.stores_of(write).append(Store(write.array, write.value, write.row))

    @staticmethod
    def _asks_taken(exprs: Iterable[Expr]) -> set[ir.Filter]:
        return {e.attr for e in walk(ir.with_blocks(exprs)) if e.op == "taken"}

    @staticmethod
    def _knows(p: _Open, taken: set[ir.Filter]) -> bool:
        return all(p.filter is f for f in taken)

    def _own_passes(self) -> None:
        d = self.draft
        for sort in d.sorts:
            if not (sort.whole or sort.ranks):
                continue
            level = self._level(sort)
            self._place(Write(sort.values, sort.value, sort.length, False), exact=True)
            if sort.keys is not None:
                self._place(Write(sort.keys, sort.key, sort.length, False), exact=True)
            reads = [sort.value, sort.key]
            whole = sort.whole or sort.keys is not None
            self.fixed.append((level, reads, ir.Sorting(sort) if whole else ir.Select(sort)))
        for scan in d.scans:
            self.fixed.append((self._level(scan.fold), scan.fold.exprs, scan))
        for p in d.scatters:
            self.fixed.append((self._level(p), [p.index, p.value], p))

    def _place_states(self) -> None:
        """States over one domain are written in one pass, the last that reads any of them."""
        writes = [w for w in self.draft.writes if w.array in self.states]
        for length in sorted(dict.fromkeys(w.length for w in writes), key=lambda e: e.op != "n"):
            self._place_together([w for w in writes if w.length is length])

    def _place_together(self, writes: list[Write]) -> None:
        states, level = {w.array for w in writes}, max(self._level(w) for w in writes)
        for p in self.open:
            if self._reads_state(p.exprs(), states):
                level = max(level, p.level)
        for fixed_level, exprs, _ in self.fixed:
            if self._reads_state(exprs, states):
                level = max(level, fixed_level + 1)
        block = block_of(w.value for w in writes)
        taken = self._asks_taken(w.value for w in writes)
        length = writes[0].length
        fits = [
            p
            for p in self.open
            if p.level >= level
            and self._joins(p, length, block)
            and self._knows(p, taken)
            and not self._reads_state(p.exprs(), states, aside=True)
            and not any(
                q is not p and q.level == p.level and self._reads_state(q.exprs(), states)
                for q in self.open
            )
        ]
        if fits:
            p = min(fits, key=lambda p: p.level)
        else:
            if taken:
                raise NotFusable("a state depends on what a filter took, but is still read later")
            p = _Open(level + 1, length, block)
            self.open.append(p)
        p.block = p.block or block
        for w in writes:
            p.stores_of(w).append(Store(w.array, w.value, w.row))

    def _reads_state(
        self, exprs: Iterable[Expr], of: set[Array] | None = None, *, aside: bool = False
    ) -> bool:
        """Whether a state is read (with `aside`: at another index than the element's own)."""
        states = self.states if of is None else of
        reads = [e for e in walk(ir.with_blocks(exprs)) if e.is_load and e.attr in states]
        return any(not aside or not ir.is_own(e) for e in reads)

    # Closing.

    def _close(self, p: _Open) -> ir.Pass:
        if p.filter is not None:
            return ir.Compact(p.filter, tuple(p.emits), tuple(p.stores), tuple(p.folds))
        inner: dict[Fold | ir.Local, int] = {}

        def depth(exprs: Iterable[Expr]) -> int:
            found = 0
            for e in walk(exprs):
                if e.op == "local" or (e.op == "fold" and e.attr.block is not None):
                    if e.attr not in inner:
                        inner[e.attr] = depth(e.attr.exprs)
                    found = max(found, inner[e.attr] + 1)
            return found

        last = depth([s.value for s in (*p.stores, *p.block_stores, *p.row_stores)])
        for fold in p.folds:
            inner[fold] = depth(fold.exprs)
        last = max([last, *inner.values()])
        phases = [
            ir.Phase(
                tuple(f for f, k in inner.items() if k == level and isinstance(f, Fold)),
                tuple(p.stores) if level == last else (),
                tuple(x for x, k in inner.items() if k == level and isinstance(x, ir.Local)),
            )
            for level in range(last + 1)
        ]
        kept = tuple(ph for ph in phases if ph.folds or ph.stores or ph.locals)
        size = None if p.block is None else p.block.size
        return ir.Loop(p.length, size, kept, tuple(p.block_stores), tuple(p.row_stores))


def _drop_unread(draft: Draft) -> None:
    """Removes memory between passes that nothing reads after all."""
    while True:
        read: set[Array] = set()
        for e in ir.walk_all(draft.exprs()):
            if e.is_load:
                read.add(e.attr)
            elif e.op == "pick":
                read.add(e.attr.values)
        idle = set(draft.temps) - read
        targets: tuple[list[Any], ...] = (draft.writes, draft.scans, draft.scatters)
        before = sum(map(len, (*targets, draft.emits)))
        for target in targets:
            target[:] = [x for x in target if x.array not in idle]
        draft.emits[:] = [x for x in draft.emits if x[1] not in idle]
        if sum(map(len, (*targets, draft.emits))) == before:
            return


def validate(passes: Iterable[ir.Pass], given: Iterable[Array]) -> None:
    """Asserts that memory is written before it is read."""
    ready = set(given)
    for p in passes:
        for e in walk(ir.with_blocks(ir.pass_exprs(p))):
            if e.is_load:
                assert e.attr in ready, f"{e.attr.name} is read before it is written"
        ready.update(s.array for s in ir.pass_stores(p))
        if isinstance(p, ir.Scan | ir.Scatter):
            ready.add(p.array)
