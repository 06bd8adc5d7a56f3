"""The `cpu` backend: passes to Python source that numba compiles.

One function per pass, over a range of tiles, so that a pool of threads can share a pass; small
functions below it hold the inner loops. See `cpu_prelude` for what they call.

Names in generated code: I and F hold ints and floats that passes hand on (sizes, parameters,
results of reductions), W is scratch memory; t is a tile, a its first element, m its length.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hipress.compll import cpu_prelude
from hipress.compll.ir import (
    STORAGE_BITS,
    Array,
    Compact,
    Expr,
    Fold,
    Graph,
    Kernel,
    Loop,
    Pass,
    Scalars,
    Scan,
    Scatter,
    Select,
    Sorting,
    Store,
    walk,
)
from hipress.compll.render import (
    HOST_PRELUDE,
    Lines,
    Place,
    body_bytes_source,
    host_text,
    host_values,
    layout,
    loads,
    print_values,
)

TILE = 2048
"""Elements of a tile: three float tiles and one of codes fit a first-level cache of 32 KiB
(measured on minmax(bits=2): 15.4 ms for 25M elements, against 18.5 ms with tiles of 4096)."""

_DTYPES = {"f32": "f32", "f16": "u16", "bf16": "u16", "i64": "i64", "u16": "u16", "u32": "u32"}
_PACKED = ("u1", "u2", "u4")
_RANDOM = {"uniform": "f32", "bits32": "u32"}


def render(kernels: Iterable[Kernel], *, title: str) -> str:
    """The source of a module with one entry point per kernel."""
    kernels = list(kernels)
    bodies = [_KernelPrinter(k).source() for k in kernels]
    text = "\n\n".join(bodies)
    out = Lines()
    out(f'"""CPU kernels of {title}, made by HiPress CompLL: edit the program, not this file."""')
    out()
    out("import math")
    out()
    out("import numpy as np")
    out("from numba import njit")
    out()
    out("f32, f64, i32, i64 = np.float32, np.float64, np.int32, np.int64")
    out("u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64")
    out('_JIT = {"nogil": True, "cache": True, "error_model": "numpy"}')
    out()
    out()
    encode = next((k for k in kernels if k.name == "encode"), kernels[0])
    return (
        str(out)
        + _prelude(text)
        + HOST_PRELUDE
        + "\n\n"
        + body_bytes_source(encode)
        + "\n\n"
        + text
    )


def _prelude(text: str) -> str:
    """The helpers that `text` calls, each before its callers, compiled by numba."""
    functions = {
        name: inspect.getsource(f)
        for name, f in vars(cpu_prelude).items()
        if inspect.isfunction(f) and f.__module__ == cpu_prelude.__name__
    }
    needed: dict[str, None] = {}

    def need(source: str, myself: str = "") -> None:
        for name in re.findall(r"\b_[a-z0-9_]+(?=\()", source):
            if name in functions and name != myself and name not in needed:
                need(functions[name], name)
                needed[name] = None

    need(text)
    bare = (re.sub(r": Any\b| -> (Any|None)\b", "", functions[name]) for name in needed)
    return "".join(f"@njit(**_JIT)\n{source}\n\n" for source in bare)


@dataclass
class _Slots:
    """Which entry of I or F holds what."""

    ints: dict[object, int] = field(default_factory=dict)
    floats: dict[object, int] = field(default_factory=dict)

    def int(self, key: object) -> str:
        return f"I[{self.ints.setdefault(key, len(self.ints))}]"

    def float(self, key: object) -> str:
        return f"F[{self.floats.setdefault(key, len(self.floats))}]"

    def of(self, e: Expr, key: object | None = None) -> str:
        key = e if key is None else key
        return self.float(key) if e.type == "float" else self.int(key)


def _rep(e: Expr) -> str:
    """The machine type of a value."""
    if e.type == "int":
        return "i32" if e.narrow else "i64"
    return "f32" if e.type == "float" else "bool"


_FLOAT_OPS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_INT_OPS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}


def _spell(e: Expr, args: list[str]) -> str:
    """One operation as an expression; both sides always have the same machine type."""
    rep, reps = _rep(e), [_rep(a) for a in e.args]
    if e.op == "const":
        return str(e.attr) if e.type == "bool" else f"{rep}({e.attr!r})"
    if e.op in _COMPARE:
        if reps[0] != reps[1]:
            args = [f"i64({a})" for a in args]
        return f"({args[0]} {_COMPARE[e.op]} {args[1]})"
    if e.op == "not":
        return f"(not {args[0]})"
    if e.op in ("land", "lor"):
        return f"({args[0]} {'&' if e.op == 'land' else '|'} {args[1]})"
    if e.op == "select":
        yes, no = (
            a if r == rep else f"{rep}({a})" for a, r in zip(args[1:], reps[1:], strict=True)
        )
        return f"({yes} if {args[0]} else {no})"
    if e.op == "float":
        return f"f32({args[0]})"
    if e.op == "int":
        return f"i32({args[0]})" if e.args[0].type == "bool" else f"_to_int({args[0]})"
    if e.op == "uint":
        return _spell_uint(e, args[0])
    if e.type == "float":
        return _spell_float(e, args)
    if e.op == "finite":
        return f"_finite({args[0]})"
    return _spell_int(e, args)


def _spell_float(e: Expr, args: list[str]) -> str:
    if e.op in _FLOAT_OPS:
        return f"({args[0]} {_FLOAT_OPS[e.op]} {args[1]})"
    if e.op in ("exp2", "log2"):  # in double precision: the same bits on every backend
        return f"f32(np.{e.op}(f64({args[0]})))"
    simple = {
        "neg": "(-{})",
        "abs": "abs({})",
        "floor": "np.floor({})",
        "sqrt": "np.sqrt({})",
        "sign": "_sign_f({})",
        "min": "_min({}, {})",
        "max": "_max({}, {})",
        "round_f16": "_from_f16(_to_f16({}))",
        "round_bf16": "_from_bf16(_to_bf16({}))",
    }
    return simple[e.op].format(*args)


def _spell_int(e: Expr, args: list[str]) -> str:
    rep = _rep(e)
    wide = "i64" if "i64" in (rep, *(_rep(a) for a in e.args)) else "i32"
    args = [a if _rep(x) == wide else f"{wide}({a})" for a, x in zip(args, e.args, strict=True)]
    if e.op in _INT_OPS:
        return f"{rep}({args[0]} {_INT_OPS[e.op]} {args[1]})"
    if e.op in ("idiv", "imod") and e.args[0].lo >= 0 and e.args[1].lo > 0:
        return f"{rep}({args[0]} {'//' if e.op == 'idiv' else '%'} {args[1]})"
    if e.op in ("shl", "shr") and 0 <= e.args[1].lo and e.args[1].hi < int(wide[1:]) - 1:
        return f"{rep}({args[0]} {'<<' if e.op == 'shl' else '>>'} {args[1]})"
    simple = {
        "idiv": "_idiv({}, {})",
        "imod": "_imod({}, {})",
        "shl": "_shl({}, {})",
        "shr": "_shr({}, {})",
        "min": "_min({}, {})",
        "max": "_max({}, {})",
        "neg": "-{}",
        "inv": "~{}",
        "abs": "abs({})",
        "sign": "_sign_i({})",
    }
    return f"{rep}({simple[e.op].format(*args)})"


def _spell_uint(e: Expr, arg: str) -> str:
    top = 2**e.attr - 1
    if e.args[0].type == "float":
        return "_sat_f32(" + arg + ")" if e.attr == 32 else f"_sat_f({arg}, {top})"
    return f"{_rep(e)}(_sat_i({arg}, {top}))"


def _exact(fold: Fold) -> bool:
    """Whether the order of a reduction cannot matter, so that its loop may hold stores too."""
    return fold.block is None and (
        fold.kind == "or" or (fold.kind != "fold" and fold.type == "int")
    )


def _identity(fold: Fold) -> str:
    if fold.kind == "or":
        return "i32(0)"
    if fold.type == "float":
        start = {"sum": "f32(0)", "max": "_key(f32(-np.inf))", "min": "_key(f32(np.inf))"}
        return start.get(fold.kind, "f32(0)")
    ends = {"max": "i64(-9223372036854775808)", "min": "i64(9223372036854775807)"}
    return ends.get(fold.kind, "i64(0)")


class _KernelPrinter:
    """Prints one kernel: its passes, the function that runs them all, and its entry point."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name = kernel.name
        self.out = Lines()
        self.slots = _Slots()
        self.graph = Graph()
        for key in ("n", "seed0", "seed1", "stream", "step", "status"):
            self.slots.int(key)
        self.hosts: dict[Expr, str] = {}
        self.partials: list[tuple[Fold, int]] = []
        self.parallel: list[tuple[str, str, int, bool]] = []
        """Steps of the kernel: function, length slot, tile, whether threads may share it."""
        self._fresh = 0
        caller = kernel.input or kernel.output
        assert caller is not None
        self.memory = [caller.name, *(s.name for s in kernel.states)]

    @property
    def args(self) -> str:
        return ", ".join(["I", "F", "W", "body", *self.memory])

    def fresh(self) -> str:
        self._fresh += 1
        return f"v{self._fresh}"

    # Values of the whole kernel.

    def host(self, e: Expr) -> str:
        """The slot of a host value."""
        if e.op == "n":
            return self.slots.int("n")
        self.hosts.setdefault(e, self.slots.of(e))
        return self.hosts[e]

    def known(self, roots: list[Expr]) -> dict[Expr, str]:
        """Texts of values that come from outside a pass: host values, earlier results."""
        names: dict[Expr, str] = {}
        for e in host_values(roots):
            text = self.host(e)
            names[e] = f"i32({text})" if _rep(e) == "i32" else text
            if e.type == "bool":
                names[e] = f"({text} != 0)"
        for e in walk(roots):
            if e.op == "fold" and e.attr.block is None:
                text = self.slots.of(e, e.attr)
                names[e] = f"({text} != 0)" if e.type == "bool" else text
            elif e.op == "count":
                names[e] = self.slots.int(e.attr)
            elif e.op == "pick":
                names[e] = self.slots.of(e)
        return names

    # Memory.

    def view(self, array: Array, out: Lines) -> None:
        """Prints a name for an array inside the payload or the scratch memory."""
        if array.name in self.memory:
            return
        pool = "W" if array.name.startswith("temp") else "body"
        start, size = self.slots.int(("at", array.name)), self.slots.int(("bytes", array.name))
        text = f"{pool}[{start} : {start} + {size}]"
        dtype = _DTYPES.get(array.storage)
        out(f"{array.name} = {text}" + (f".view({dtype})" if dtype else ""))

    def source(self) -> str:
        bodies = Lines()
        for k, p in enumerate(self.kernel.passes):
            self.print_pass(k, p, bodies)
        self.print_requires(bodies)
        self.print_run(bodies)
        self.print_entry(bodies)
        return str(bodies).rstrip("\n") + "\n"

    # Passes.

    def print_pass(self, k: int, p: Pass, out: Lines) -> None:
        name = f"_{self.name}_p{k}"
        if isinstance(p, Loop):
            self._loop(name, p, out)
        elif isinstance(p, Compact):
            self._compact(name, p, out)
        elif isinstance(p, Scatter):
            self._scatter(name, p, out)
        elif isinstance(p, Scan):
            self._scan(name, p, out)
        elif isinstance(p, Select | Sorting):
            self._order(name, p, out)
        else:
            self._scalars(name, p, out)

    def _head(self, name: str, out: Lines, arrays: Iterable[Array]) -> None:
        out("@njit(**_JIT)")
        out(f"def {name}(lo, hi, {self.args}):")
        out.depth += 1
        for array in arrays:
            self.view(array, out)

    def _length(self, length: Expr, out: Lines, tile: int | None) -> None:
        known = self.known([length])
        print_values([length], out, _spell_with(self, known), known, self.fresh)
        out(f"length = {known[length]}")
        if tile is not None:
            out("if hi < 0:")
            out(f"    hi = (length + {tile - 1}) // {tile}")

    def _partial(self, fold: Fold, index: int) -> str:
        """The array of a reduction's results per tile."""
        self.partials.append((fold, index))
        return f"part{index}"

    def _open_loop(
        self,
        name: str,
        out: Lines,
        roots: list[Expr],
        arrays: list[Array],
        length: Expr,
        tile: int,
        folds: list[Fold],
    ) -> tuple[dict[Expr, str], dict[Fold, str]]:
        """Prints a pass up to its loop over tiles; gives the values known there."""
        self._head(name, out, dict.fromkeys([*loads([length]), *arrays]))
        self._length(length, out, tile)
        parts = {}
        for f in folds:
            parts[f] = self._partial(f, len(self.partials))
            start = self.slots.int(("at", parts[f]))
            kind = "f32" if f.type == "float" else "i64"
            size = self.slots.int(("bytes", parts[f]))
            out(f"{parts[f]} = W[{start} : {start} + {size}].view({kind})")
        if any(e.op in ("uniform", "bits32") for e in walk(roots)):
            out("rng = I[1:5]")
        known = self.known(roots)
        fixed = [e for e in walk(roots) if e.variance == 0 and not e.host and e.op != "param"]
        for e in _maximal(fixed, roots, 0):
            print_values([e], out, _spell_with(self, known), known, self.fresh)
            if not known[e].isidentifier() and e.op != "const":
                name_ = self.fresh()
                out(f"{name_} = {known[e]}")
                known[e] = name_
        for e in _maximal(list(known), roots, 0):
            if not known[e].isidentifier() and e.op != "const":
                name_ = self.fresh()
                out(f"{name_} = {known[e]}")
                known[e] = name_
        return known, parts

    def _loop(self, name: str, p: Loop, out: Lines) -> None:
        inner = _Inner(self, name, p.block or TILE)
        stores = [s for ph in p.phases for s in ph.stores]
        folds = [f for ph in p.phases for f in ph.folds]
        roots = [s.value for s in (*stores, *p.block_stores)]
        roots += [e for f in folds for e in _exprs(f)]
        arrays = loads(roots) + [s.array for s in (*stores, *p.block_stores)]
        head = Lines(depth=out.depth)
        global_folds = [f for f in folds if f.block is None]
        known, parts = self._open_loop(
            name, head, roots, list(dict.fromkeys(arrays)), p.length, inner.tile, global_folds
        )
        inner.buffers(roots, stores, head)
        inner.tiles(head, known, roots, stores)
        for j, phase in enumerate(p.phases):
            # A sum of floats has a loop of its own; other reductions ride with the stores.
            alone = [f for f in phase.folds if not phase.stores or not _exact(f)]
            if alone:
                results = inner.fold(f"{name}_f{j}", alone, head, known)
                for f, result in zip(alone, results, strict=True):
                    if f.block is None:
                        head(f"{parts[f]}[t] = {result}")
                    else:
                        inner.finish(f, result, head, known)
            if phase.stores:
                riding = [f for f in phase.folds if f not in alone]
                results = inner.store(f"{name}_s{j}", phase.stores, head, known, riding)
                for f, result in zip(riding, results, strict=True):
                    head(f"{parts[f]}[t] = {result}")
        for s in p.block_stores:
            print_values([s.value], head, _spell_with(self, known), known, self.fresh)
            head(f"{s.array.name}[t] = {_stored_text(s.array, known[s.value])}")
        out.text += inner.functions.text
        out.text += head.text
        out()
        out()
        self.parallel.append((name, self._slot_of_length(p.length), inner.tile, True))
        self._reduce(name, global_folds, parts, p.length, inner.tile, out)

    def _slot_of_length(self, length: Expr) -> str:
        return self.host(length) if length.host and length.op != "const" else ""

    def _reduce(
        self,
        name: str,
        folds: list[Fold],
        parts: dict[Fold, str],
        length: Expr,
        tile: int,
        out: Lines,
    ) -> None:
        """Prints the step that joins the results of all tiles, in order."""
        if not folds:
            return
        out("@njit(**_JIT)")
        out(f"def {name}_join(lo, hi, {self.args}):")
        out.depth += 1
        for array in loads([length]):
            self.view(array, out)
        self._length(length, out, tile)
        for f in folds:
            part = parts[f]
            start, size = self.slots.int(("at", part)), self.slots.int(("bytes", part))
            kind = "f32" if f.type == "float" else "i64"
            known = self.known([f.init])
            print_values([f.init], out, _spell_with(self, known), known, self.fresh)
            out(f"{part} = W[{start} : {start} + {size}].view({kind})")
            total = "acc"
            if f.kind == "sum":
                out(f"acc = {'f64' if f.type == 'float' else 'i64'}({known[f.init]})")
                out("for t in range(hi):")
                out(f"    acc += {part}[t]")
                total = "f32(acc)" if f.type == "float" else "acc"
            elif f.kind == "or":
                out("acc = i64(0)")
                out("for t in range(hi):")
                out(f"    acc |= {part}[t]")
            else:
                rep = "f32" if f.type == "float" else "i64"
                out(f"acc = {rep}({known[f.init]})")
                out("for t in range(hi):")
                out.depth += 1
                out(f"x0 = {part}[t]")
                out(f"acc = {self._combined(f, 'acc', 'x0', out)}")
                out.depth -= 1
            slot = self.slots.float(f) if f.type == "float" else self.slots.int(f)
            out(f"{slot} = {total}")
        out.depth -= 1
        out()
        out()
        self.parallel.append((f"{name}_join", "", tile, False))

    def _combined(self, f: Fold, a: str, b: str, out: Lines) -> str:
        """f(a, b) as text."""
        if f.kind == "sum":
            return f"{a} + {b}"
        if f.kind in ("max", "min"):
            return f"_{f.kind}({a}, {b})"
        assert f.combine is not None and f.carry is not None and f.item is not None
        known = self.known([f.combine])
        known |= {f.carry: a, f.item: b}
        print_values([f.combine], out, _spell_with(self, known), known, self.fresh)
        rep = "f32" if f.type == "float" else "i64"
        return f"{rep}({known[f.combine]})"

    def _compact(self, name: str, p: Compact, out: Lines) -> None:
        inner = _Inner(self, name, TILE)
        roots = [p.filter.keep, *(s.value for s in (*p.emits, *p.stores))]
        roots += [e for f in p.folds for e in _exprs(f)]
        arrays = list(dict.fromkeys([*loads(roots), *(s.array for s in (*p.emits, *p.stores))]))
        head = Lines(depth=out.depth)
        known, parts = self._open_loop(
            name, head, [*roots, p.filter.capacity], arrays, p.length, TILE, list(p.folds)
        )
        saved = inner.saves(p.stores, roots, head)
        inner.buffers(roots, p.stores, head)
        head(f"mask = np.empty({TILE}, u8)")
        head(f"capacity = {self._text(p.filter.capacity, known)}")
        count = self.slots.int(p.filter)
        head("count = i64(0)")
        inner.tiles(head, known, roots, p.stores)
        alone = [f for f in p.folds if not _exact(f)]
        riding = [f for f in p.folds if _exact(f)]
        if alone:
            results = inner.fold(f"{name}_f0", alone, head, known)
            for f, result in zip(alone, results, strict=True):
                head(f"{parts[f]}[t] = {result}")
        results = inner.scan_and_take(name, p, head, known, saved, riding)
        for f, result in zip(riding, results, strict=True):
            head(f"{parts[f]}[t] = {result}")
        head.depth -= 1
        head(f"{count} = count")
        for s in p.emits:
            head(f"{s.array.name}[count:] = 0")
        out.text += inner.functions.text
        out.text += head.text
        out()
        out()
        self.parallel.append((name, self._slot_of_length(p.length), TILE, False))
        self._reduce(name, list(p.folds), parts, p.length, TILE, out)

    def _text(self, e: Expr, known: dict[Expr, str]) -> str:
        if e not in known:
            sink = Lines()
            print_values([e], sink, _spell_with(self, known), known, self.fresh)
            assert not sink.text
        return known[e]

    def _simple_loop(
        self, name: str, roots: list[Expr], arrays: list[Array], length: Expr, out: Lines
    ) -> dict[Expr, str]:
        """A pass whose loop goes over all elements at once, for what does not vectorise."""
        known, _ = self._open_loop(name, out, roots, arrays, length, TILE, [])
        out("for i in range(length):")
        out.depth += 1
        for e in walk(roots):
            if e.op == "idx":
                known[e] = "i64(i)" if _rep(e) == "i64" else "i32(i)"
        return known

    def _scatter(self, name: str, p: Scatter, out: Lines) -> None:
        roots = [p.index, p.value]
        arrays = list(dict.fromkeys([*loads(roots), p.array]))
        head = Lines(depth=out.depth)
        known, _ = self._open_loop(name, head, roots, arrays, p.length, TILE, [])
        if p.clear:
            head(f"{p.array.name}[:] = 0")
        head(f"size = len({p.array.name})")
        head("for i in range(length):")
        head.depth += 1
        for e in walk(roots):
            if e.op == "idx":
                known[e] = "i64(i)" if _rep(e) == "i64" else "i32(i)"
        print_values(roots, head, _spell_with(self, known), known, self.fresh)
        head(f"k = i64({known[p.index]})")
        head("if k < 0 or k >= size:")
        head(f"    {self.slots.int('status')} = 1")
        head("    return")
        old = _loaded_text(p.array, f"{p.array.name}[k]")
        new = _stored_text(p.array, f"{old} + {known[p.value]}")
        head(f"{p.array.name}[k] = {new}")
        out.text += head.text
        out()
        out()
        self.parallel.append((name, "", TILE, False))

    def _scan(self, name: str, p: Scan, out: Lines) -> None:
        f = p.fold
        roots = _exprs(f)
        arrays = list(dict.fromkeys([*loads(roots), p.array]))
        head = Lines(depth=out.depth)
        known, _ = self._open_loop(name, head, roots, arrays, f.length, TILE, [])
        rep = "f32" if f.type == "float" else "i64"
        head(f"acc = {rep}({self._text(f.init, known)})")
        head("for i in range(length):")
        head.depth += 1
        for e in walk([f.body]):
            if e.op == "idx":
                known[e] = "i64(i)" if _rep(e) == "i64" else "i32(i)"
        print_values([f.body], head, _spell_with(self, known), known, self.fresh)
        head(f"x0 = {rep}({known[f.body]})")
        head(f"acc = {rep}({self._combined(f, 'acc', 'x0', head)})")
        head(f"{p.array.name}[i] = {_stored_text(p.array, 'acc')}")
        out.text += head.text
        out()
        out()
        self.parallel.append((name, "", TILE, False))

    def _order(self, name: str, p: Select | Sorting, out: Lines) -> None:
        sort = p.sort
        arrays = [sort.values] + ([sort.keys] if sort.keys is not None else [])
        self._head(name, out, arrays)
        values = sort.values.name
        if isinstance(p, Sorting):
            if sort.keys is not None:
                out(f'order = np.argsort({sort.keys.name}, kind="mergesort")')
                out(f"{values}[:] = {values}[order]")
            else:
                out(f"{values}.sort()")
        known = self.known(sort.ranks)
        for rank in sort.ranks:
            print_values([rank], out, _spell_with(self, known), known, self.fresh)
            key = next(e for e in self._picks() if e.attr is sort and e.args[0] is rank)
            find = "_at" if isinstance(p, Sorting) else "_select"
            if find == "_select" and sort.values.type == "int":
                find = "_select_i"
            out(f"if len({values}) > 0:")
            out(f"    {self.slots.of(key)} = {find}({values}, {known[rank]})")
        if not sort.ranks and not isinstance(p, Sorting):
            out("return")
        out.depth -= 1
        out()
        out()
        self.parallel.append((name, "", TILE, False))

    def _picks(self) -> list[Expr]:
        roots = [e for p in self.kernel.passes for e in pass_exprs(p)]
        return [e for e in walk(roots) if e.op == "pick"]

    def _scalars(self, name: str, p: Scalars, out: Lines) -> None:
        roots = [s.value for s in p.stores]
        arrays = list(dict.fromkeys([*loads(roots), *(s.array for s in p.stores)]))
        self._head(name, out, arrays)
        if any(e.op in ("uniform", "bits32") for e in walk(roots)):
            out("rng = I[1:5]")
        known = self.known(roots)
        print_values(roots, out, _spell_with(self, known), known, self.fresh)
        for s in p.stores:
            out(f"{s.array.name}[0] = {_stored_text(s.array, known[s.value])}")
        out.depth -= 1
        out()
        out()
        self.parallel.append((name, "", TILE, False))

    # The whole kernel.

    def print_requires(self, out: Lines) -> None:
        conds = [r.cond for r in self.kernel.requires]
        if not conds:
            return
        name = f"_{self.name}_requires"
        self._head(name, out, loads(conds))
        known = self.known(conds)
        for k, cond in enumerate(conds):
            print_values([cond], out, _spell_with(self, known), known, self.fresh)
            out(f"if not {known[cond]}:")
            out(f"    {self.slots.int('status')} = {k + 2}")
            out("    return")
        out.depth -= 1
        out()
        out()
        self.parallel.insert(0, (name, "", TILE, False))

    def print_run(self, out: Lines) -> None:
        out("@njit(**_JIT)")
        out(f"def _{self.name}_run({self.args}):")
        out.depth += 1
        if not self.parallel:
            out("return")
        for name, *_ in self.parallel:
            out(f"{name}(0, -1, {self.args})")
            if name.endswith("_requires"):
                out(f"if {self.slots.int('status')} != 0:")
                out("    return")
        out.depth -= 1
        out()
        out()
        rows = []
        for name, slot, tile, shared in self.parallel:
            index = slot[2:-1] if shared and slot.startswith("I[") else "-1"
            rows.append(f"    ({name}, {index}, {tile}),")
        out(f"_{self.name}_steps = (")
        for row in rows:
            out(row)
        out(")")
        out()
        out()

    def print_entry(self, out: Lines) -> None:
        k = self.kernel
        memory = k.input or k.output
        assert memory is not None
        states = ", ".join(s.name for s in k.states)
        takes = f"{memory.name}, states" if k.input is not None else memory.name
        out(f"def {self.name}(n, params, rng, body, {takes}, scratch, pool=None):")
        out.depth += 1
        if k.states:
            out(f"{states}{',' if len(k.states) == 1 else ''} = states")
        places = layout(k, out)
        out(f"I = np.zeros({_LATE_I}, i64)")
        out(f"F = np.zeros({_LATE_F}, f32)")
        out("seed, stream, step = rng")
        out("I[0:5] = n, seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, stream, step")
        self._fill(out, places)
        out("if pool is None:")
        out(f"    _{self.name}_run({self.args})")
        out("else:")
        out(f"    pool(_{self.name}_steps, ({self.args}), {self.slots.ints['status']})")
        if k.nonfinite is not None:
            out(f"return bool({self.slots.int(k.nonfinite)})")
        else:
            messages = ["an index in the payload is out of range", *(r.message for r in k.requires)]
            out(f"status = {self.slots.int('status')}")
            out(f"return {tuple(messages)!r}[status - 1] if status else None")
        out.depth -= 1
        late = (("NI", len(self.slots.ints)), ("NF", max(1, len(self.slots.floats))))
        for mark, count in late:
            out.text = [line.replace(f"<{mark}>", str(count)) for line in out.text]

    def _fill(self, out: Lines, places: list[Place]) -> None:
        """Prints the host's part: sizes, parameters, where sections and temps lie."""
        for place in places:
            if ("at", place.array.name) in self.slots.ints:
                out(f"{self.slots.int(('at', place.array.name))} = {place.offset}")
                out(f"{self.slots.int(('bytes', place.array.name))} = {place.num_bytes}")
        for e, slot in self.hosts.items():
            out(f"{slot} = {host_text(e, self.kernel.params)}")
        out("used = 0")
        for array in self.kernel.temps:
            if ("at", array.name) not in self.slots.ints:
                continue
            bits = STORAGE_BITS[array.storage]
            length = host_text(array.length, self.kernel.params)
            self._carve(out, array.name, f"({length} * {bits} + 7) // 8")
        for fold, index in self.partials:
            length, tile = self._tiles_of(fold)
            size = 4 if fold.type == "float" else 8
            self._carve(out, f"part{index}", f"(({length} + {tile - 1}) // {tile}) * {size}")
        out("W = scratch(used)")

    def _carve(self, out: Lines, name: str, num_bytes: str) -> None:
        out(f"{self.slots.int(('at', name))} = used")
        out(f"{self.slots.int(('bytes', name))} = {num_bytes}")
        out(f"used = _align(used + {num_bytes})")

    def _tiles_of(self, fold: Fold) -> tuple[str, int]:
        for p in self.kernel.passes:
            if isinstance(p, Loop) and any(fold in ph.folds for ph in p.phases):
                tile = p.block or TILE
                break
            if isinstance(p, Compact) and fold in p.folds:
                tile = TILE
                break
        else:
            raise AssertionError("a reduction without a pass")
        length = fold.length
        if not length.host:  # as many as a filter took: at most its capacity
            length = next(e.attr.capacity for e in walk([length]) if e.op == "count")
        return host_text(length, self.kernel.params), tile


_LATE_I, _LATE_F = "<NI>", "<NF>"


def pass_exprs(p: Pass) -> list[Expr]:
    """Every value a pass computes, inside reductions too."""
    if isinstance(p, Loop):
        stores = [s for ph in p.phases for s in ph.stores] + list(p.block_stores)
        folds = [e for ph in p.phases for f in ph.folds for e in _exprs(f)]
        return [p.length, *folds, *(s.value for s in stores)]
    if isinstance(p, Compact):
        folds = [e for f in p.folds for e in _exprs(f)]
        return [p.filter.keep, p.filter.capacity, *folds, *(s.value for s in (*p.emits, *p.stores))]
    if isinstance(p, Scalars):
        return [s.value for s in p.stores]
    if isinstance(p, Scan):
        return _exprs(p.fold)
    if isinstance(p, Scatter):
        return [p.length, p.index, p.value]
    return [p.sort.value, p.sort.key, *p.sort.ranks]


def _exprs(f: Fold) -> list[Expr]:
    return [f.body, f.init, *([f.combine] if f.combine is not None else [])]


def _maximal(candidates: list[Expr], roots: list[Expr], variance: int) -> list[Expr]:
    """Those candidates that something more varying uses: worth a name before the loop."""
    wanted = {r for r in roots if r.variance <= variance}
    for e in walk(roots):
        if e.variance > variance:
            wanted.update(a for a in e.args if a.variance <= variance)
    return [e for e in candidates if e in wanted]


def _stored_text(array: Array, text: str) -> str:
    casts = {"f32": "f32", "f16": "_to_f16", "bf16": "_to_bf16", "i64": "i64"}
    cast = casts.get(array.storage) or ("u8" if array.storage in _PACKED else array.storage)
    return f"{cast}({text})"


def _loaded_text(array: Array, text: str) -> str:
    if array.storage in ("f16", "bf16"):
        return f"_from_{array.storage}({text})"
    if array.storage in ("u1", "u2", "u4", "u8", "u16"):
        return f"i32({text})"
    return f"i64({text})" if array.storage == "u32" else text


def _spell_with(printer: _KernelPrinter, known: dict[Expr, str]):  # type: ignore[no-untyped-def]
    """`_spell`, and the leaves that need memory or random numbers."""

    def spell(e: Expr, args: list[str]) -> str:
        if e.op in ("load", "load_clamped"):
            array = e.attr
            if array.storage in _PACKED and e.op == "load" and e.args[0].op == "const":
                return f"i32({array.name}[0])"
            if array.storage in _PACKED:
                bits = STORAGE_BITS[array.storage]
                length = host_text_slot(printer, array.length)
                return f"_at_packed({array.name}, {args[0]}, {length}, {bits})"
            if e.op == "load":
                return _loaded_text(array, f"{array.name}[{args[0]}]")
            return _loaded_text(array, f"_at({array.name}, {args[0]})")
        if e.op == "uniform":
            return f"_uniform({args[0]}, {e.attr}, rng)"
        if e.op == "bits32":
            return f"_bits32({args[0]}, {e.attr}, rng)"
        return _spell(e, args)

    return spell


def host_text_slot(printer: _KernelPrinter, length: Expr) -> str:
    """The slot (or literal) that holds a host length."""
    return str(length.attr) if length.op == "const" else printer.host(length)


class _Inner:
    """The inner loops of one pass over tiles, and the buffers they share."""

    def __init__(self, printer: _KernelPrinter, name: str, tile: int) -> None:
        self.printer = printer
        self.name = name
        self.tile = tile
        self.functions = Lines()
        self.slices: dict[Array, str] = {}
        self.codes_in: dict[Array, str] = {}
        self.codes_out: dict[Array, str] = {}
        self.draws: dict[tuple[str, int], str] = {}

    def buffers(self, roots: list[Expr], stores: Iterable[Store], out: Lines) -> None:
        """Prints the scratch buffers: codes before packing or after unpacking, random floats."""
        room = (self.tile + 7) // 8 * 8
        for array in loads(_aligned(roots)):
            if array.storage in _PACKED:
                self.codes_in[array] = f"in_{array.name}"
                out(f"in_{array.name} = np.empty({room}, u8)")
        for s in stores:
            if s.array.storage in _PACKED:
                self.codes_out[s.array] = f"out_{s.array.name}"
                out(f"out_{s.array.name} = np.empty({room}, u8)")
        for e in walk(roots):
            if e.op in _RANDOM and e.args[0].op == "idx" and (e.op, e.attr) not in self.draws:
                name = f"{e.op}{e.attr}"
                self.draws[e.op, e.attr] = name
                out(f"{name} = np.empty({room}, {_RANDOM[e.op]})")

    def saves(self, stores: Iterable[Store], roots: list[Expr], out: Lines) -> dict[Array, str]:
        """Buffers for old values of arrays that a filter pass overwrites before it knows."""
        read = set(loads(roots))
        saved = {s.array: f"old_{s.array.name}" for s in stores if s.array in read}
        for name in saved.values():
            out(f"{name} = np.empty({self.tile}, f32)")
        return saved

    def tiles(
        self, out: Lines, known: dict[Expr, str], roots: list[Expr], stores: Iterable[Store]
    ) -> None:
        """Prints the loop over tiles, the slices of a tile, and what is the same for a block."""
        out("for t in range(lo, hi):")
        out.depth += 1
        out(f"a = t * {self.tile}")
        out(f"m = min({self.tile}, length - a)")
        arrays = [*loads(_aligned(roots)), *(s.array for s in stores)]
        for array in dict.fromkeys(arrays):
            bits = STORAGE_BITS[array.storage]
            if array.storage in _PACKED:
                per = 8 // bits
                shift = per.bit_length() - 1
                text = f"{array.name}[a >> {shift} : (a + m + {per - 1}) >> {shift}]"
            else:
                text = f"{array.name}[a : a + m]"
            self.slices[array] = f"{array.name}_t"
            out(f"{array.name}_t = {text}")
        for array, codes in self.codes_in.items():
            bits = STORAGE_BITS[array.storage]
            out(f"_unpack{bits}({self.slices[array]}, {codes}, m)")
        for (op, site), name in self.draws.items():
            out(f"_{op}s({name}, m, a, {site}, rng)")
        for e in walk(roots):
            block = {"bnum": "t", "bstart": "a", "blen": "m"}.get(e.op)
            if block is not None:
                known[e] = f"{_rep(e)}({block})"
        self._block_values(out, known, roots)

    def _block_values(self, out: Lines, known: dict[Expr, str], roots: list[Expr]) -> None:
        """Names for values that are the same in the whole block and ready by now."""
        ready = [
            e
            for e in walk(roots)
            if e.variance == 1 and not any(x.op == "fold" and x not in known for x in walk([e]))
        ]
        for e in _maximal(ready, roots, 1):
            print_values([e], out, _spell_with(self.printer, known), known, self.printer.fresh)
            if not known[e].isidentifier():
                name = self.printer.fresh()
                out(f"{name} = {known[e]}")
                known[e] = name
        self._roots = roots

    def finish(self, f: Fold, result: str, out: Lines, known: dict[Expr, str]) -> None:
        """The block's own reduction joined with its start; later phases know it by name."""
        printer = self.printer
        print_values([f.init], out, _spell_with(printer, known), known, printer.fresh)
        init = known[f.init]
        rep = "f32" if f.type == "float" else "i64"
        text = printer._combined(f, f"{rep}({init})", result, out)
        if f.kind == "sum" and f.init.op == "const" and f.init.attr == 0:
            text = result
        name = printer.fresh()
        out(f"{name} = {text}")
        for e in walk(self._roots):
            if e.op == "fold" and e.attr is f:
                known[e] = name
        for e in _deep_folds(self._roots):
            if e.attr is f:
                known[e] = name
        self._block_values(out, known, self._roots)

    def fold(
        self, name: str, folds: Iterable[Fold], out: Lines, known: dict[Expr, str]
    ) -> list[str]:
        """Prints one loop for some reductions; gives the names of their results."""
        folds = list(folds)
        body = Lines(depth=1)
        args: dict[str, str] = {}
        names = self._start(folds, body)
        body("for i in range(m):")
        body.depth += 1
        inside = self._inside([f.body for f in folds], known, args)
        spell = self._spell(inside, args)
        print_values([f.body for f in folds], body, spell, inside, self.printer.fresh)
        for acc, f in zip(names, folds, strict=True):
            self._accumulate(acc, f, inside[f.body], body, known, args)
        body.depth -= 1
        # A sum may be taken in any order, so that it vectorises; nothing else is in this loop.
        loose = any(f.kind == "sum" and f.type == "float" for f in folds)
        return self._call(name, args, body, folds, out, loose=loose)

    @staticmethod
    def _start(folds: list[Fold], body: Lines) -> list[str]:
        names = [f"acc{j}" for j in range(len(folds))]
        for acc, f in zip(names, folds, strict=True):
            body(f"{acc} = {_identity(f)}")
        return names

    def _call(
        self,
        name: str,
        args: dict[str, str],
        body: Lines,
        folds: list[Fold],
        out: Lines,
        *,
        loose: bool = False,
    ) -> list[str]:
        """Prints the function with its results, and the call; gives the results' names."""
        ends = [
            f"_unkey(acc{j})" if f.type == "float" and f.kind in ("max", "min") else f"acc{j}"
            for j, f in enumerate(folds)
        ]
        if ends:
            body(f"return {', '.join(ends)}")
        self._define(name, args, body, loose=loose)
        results = [self.printer.fresh() for _ in folds]
        target = f"{', '.join(results)} = " if results else ""
        out(f"{target}{name}({', '.join(['m', 'a', *args.values()])})")
        return results

    def _accumulate(
        self,
        acc: str,
        f: Fold,
        text: str,
        body: Lines,
        known: dict[Expr, str],
        args: dict[str, str],
    ) -> None:
        if f.kind == "sum":
            body(f"{acc} += {text}")
        elif f.kind == "or":
            body(f"{acc} |= i32({text})")
        elif f.kind in ("max", "min"):
            item = self.printer.fresh()
            body(f"{item} = {f'_key({text})' if f.type == 'float' else f'i64({text})'}")
            body(f"{acc} = {item} if {item} {'>' if f.kind == 'max' else '<'} {acc} else {acc}")
        else:
            assert f.combine is not None and f.carry is not None and f.item is not None
            rep = "f32" if f.type == "float" else "i64"
            item = self.printer.fresh()
            body(f"{item} = {rep}({text})")
            inside = self._inside([f.combine], known, args)
            inside |= {f.carry: acc, f.item: item}
            spell = self._spell(inside, args)
            print_values([f.combine], body, spell, inside, self.printer.fresh)
            body(f"{acc} = {item} if i == 0 else {rep}({inside[f.combine]})")

    def store(
        self,
        name: str,
        stores: Iterable[Store],
        out: Lines,
        known: dict[Expr, str],
        folds: list[Fold],
    ) -> list[str]:
        """Prints one loop that writes some arrays, and the packing after it."""
        stores = list(stores)
        body = Lines(depth=1)
        args: dict[str, str] = {}
        self._start(folds, body)
        body("for i in range(m):")
        body.depth += 1
        self._write(stores, body, known, args, {}, folds)
        body.depth -= 1
        results = self._call(name, args, body, folds, out)
        self._pack(stores, out)
        return results

    def _pack(self, stores: Iterable[Store], out: Lines) -> None:
        for s in stores:
            if s.array in self.codes_out:
                bits = STORAGE_BITS[s.array.storage]
                out(f"_pack{bits}({self.codes_out[s.array]}, {self.slices[s.array]}, m)")

    def _write(
        self,
        stores: list[Store],
        body: Lines,
        known: dict[Expr, str],
        args: dict[str, str],
        saved: dict[Array, str],
        folds: Iterable[Fold] = (),
        mask: Expr | None = None,
    ) -> None:
        """Prints the values of one element and where they go: folds, a mask, arrays."""
        folds = list(folds)
        roots = [*(f.body for f in folds), *([mask] if mask is not None else [])]
        roots += [s.value for s in stores]
        inside = self._inside(roots, known, args)
        spell = self._spell(inside, args, saved)
        print_values(roots, body, spell, inside, self.printer.fresh)
        for j, f in enumerate(folds):
            self._accumulate(f"acc{j}", f, inside[f.body], body, known, args)
        if mask is not None:
            body(f"mask[i] = u8({inside[mask]})")
        texts = [inside[s.value] for s in stores]
        if len(stores) > 1:  # all is read before anything is written
            names = []
            for text in texts:
                names.append(text if text.isidentifier() else self.printer.fresh())
                if names[-1] != text:
                    body(f"{names[-1]} = {text}")
            texts = names
        for s, text in zip(stores, texts, strict=True):
            target = self.codes_out.get(s.array) or self.slices[s.array]
            args.setdefault(target, target)
            body(f"{target}[i] = {_stored_text(s.array, text)}")

    def scan_and_take(
        self,
        name: str,
        p: Compact,
        out: Lines,
        known: dict[Expr, str],
        saved: dict[Array, str],
        folds: list[Fold],
    ) -> list[str]:
        """A vector loop that marks elements and assumes none is taken; then the few that are."""
        graph = self.printer.graph
        taken = [e for e in walk([s.value for s in p.stores]) if e.op == "taken"]
        yes = {e: graph.const(True) for e in taken}
        no = {e: graph.const(False) for e in taken}
        body = Lines(depth=1)
        args: dict[str, str] = {"mask": "mask"}
        self._start(folds, body)
        body("for i in range(m):")
        body.depth += 1
        for array, old in saved.items():
            args.setdefault(old, old)
            args.setdefault(self.slices[array], self.slices[array])
            body(f"{old}[i] = {_loaded_text(array, f'{self.slices[array]}[i]')}")
        untaken = [Store(s.array, graph.substitute(s.value, no)) for s in p.stores]
        self._write(untaken, body, known, args, {}, folds, p.filter.keep)
        body.depth -= 1
        results = self._call(f"{name}_scan", args, body, folds, out)
        self._take(name, p, out, known, saved, yes)
        return results

    def _take(
        self,
        name: str,
        p: Compact,
        out: Lines,
        known: dict[Expr, str],
        saved: dict[Array, str],
        yes: dict[Expr, Expr],
    ) -> None:
        graph = self.printer.graph
        body = Lines(depth=1)
        args = {"mask": "mask", "count": "count", "capacity": "capacity"}
        for s in p.emits:
            args[s.array.name] = s.array.name
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
        spell = self._spell(inside, args, saved)
        print_values(emitted, body, spell, inside, self.printer.fresh)
        for s in p.emits:
            body(f"{s.array.name}[count] = {_stored_text(s.array, inside[s.value])}")
        stores = [Store(s.array, graph.substitute(s.value, yes)) for s in p.stores]
        if stores:
            self._write(stores, body, known, args, saved)
        body("count += 1")
        body.depth -= 2
        body("return count")
        self._define(f"{name}_take", args, body)
        out(f"count = {name}_take({', '.join(['m', 'a', *args.values()])})")
        self._pack(p.stores, out)

    # Inside a loop.

    def _inside(
        self, roots: list[Expr], known: dict[Expr, str], args: dict[str, str]
    ) -> dict[Expr, str]:
        """Texts of what a loop gets from outside; each becomes an argument of its function."""
        names: dict[Expr, str] = {}

        def visit(e: Expr) -> None:
            if e in names:
                return
            if e.op == "idx":
                names[e] = "(a + i)"
            elif e.op == "lidx":
                names[e] = f"{_rep(e)}(i)"
            elif e in known and e.variance < 2:
                text = known[e]
                if text.isidentifier():
                    args.setdefault(text, text)
                names[e] = text
            else:
                for a in e.args:
                    visit(a)

        for root in roots:
            visit(root)
        return names

    def _spell(self, inside: dict[Expr, str], args: dict[str, str], saved=None):  # type: ignore[no-untyped-def]
        saved = saved or {}
        outer = _spell_with(self.printer, inside)

        def spell(e: Expr, texts: list[str]) -> str:
            if e.op == "load" and e.args[0].op == "idx":
                array = e.attr
                if array in saved:
                    args.setdefault(saved[array], saved[array])
                    return f"{saved[array]}[i]"
                source = self.codes_in.get(array) or self.slices[array]
                args.setdefault(source, source)
                return _loaded_text(array, f"{source}[i]")
            if e.op in _RANDOM and e.args[0].op == "idx":
                name = self.draws[e.op, e.attr]
                args.setdefault(name, name)
                return f"{name}[i]" if e.op == "uniform" else f"i64({name}[i])"
            if e.op in ("load", "load_clamped"):
                args.setdefault(e.attr.name, e.attr.name)
                if e.attr.storage in _PACKED:
                    args.setdefault("I", "I")
            if e.op in ("uniform", "bits32"):
                args.setdefault("rng", "rng")
            return outer(e, texts)

        return spell

    def _define(self, name: str, args: dict[str, str], body: Lines, *, loose: bool = False) -> None:
        out = self.functions
        out('@njit(**_JIT, fastmath={"reassoc"})' if loose else "@njit(**_JIT)")
        out(f"def {name}({', '.join(['m', 'a', *args])}):")
        out.text += body.text
        out()
        out()


def _aligned(roots: list[Expr]) -> list[Expr]:
    return [e for e in walk(roots) if e.op == "load" and e.args[0].op == "idx"]


def _deep_folds(roots: Iterable[Expr]) -> list[Expr]:
    found: list[Expr] = []
    todo = list(roots)
    while todo:
        for e in walk([todo.pop()]):
            if e.op == "fold" and e not in found:
                found.append(e)
                todo += _exprs(e.attr)
    return found
