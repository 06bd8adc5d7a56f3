"""The `reference` backend: passes to plain NumPy, the meaning of the language.

Each pass is written out as whole-array expressions; a pass over blocks as a Python loop over
them. Nothing is fused, packed or tiled, so there is little to get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from hipress.compll import ir
from hipress.compll.backends.host import (
    entry_args,
    entry_start,
    host_text,
    module_source,
    slot_text,
)
from hipress.compll.backends.reference import prelude
from hipress.compll.backends.render import INFIX, Lines, Printer, copied, pass_method
from hipress.compll.ir import Array, Expr, Fold, Kernel, Store, walk

_OPS = {
    **INFIX,
    **{op: f"_{op}({{}}, {{}})" for op in ("idiv", "imod", "shl", "shr")},
    **{op: f"np.{op}({{}})" for op in ("abs", "floor", "sqrt", "sign")},
    "div": "({} / {})",
    "not": "np.logical_not({})",
    "land": "np.logical_and({}, {})",
    "lor": "np.logical_or({}, {})",
    "select": "np.where({}, {}, {})",
    "min": "np.minimum({}, {})",
    "max": "np.maximum({}, {})",
    "exp2": "np.asarray(np.exp2(np.asarray({}, f64)), f32)",
    "log2": "np.asarray(np.log2(np.asarray({}, f64)), f32)",
    "exponent": "_exponent({})",
    "bits": "_bits({})",
    "from_bits": "_from_bits({})",
    "power": "np.asarray(np.exp2(np.asarray({}, f64)), f32)",
    "float": "np.asarray({}, f32)",
    "sent": "f32({})",
    "round_f16": "_round_f16({})",
    "round_bf16": "_round_bf16({})",
    "finite": "np.isfinite({})",
}


def render(kernels: Iterable[Kernel], *, title: str) -> str:
    kernels = list(kernels)
    text = "\n\n".join(_KernelPrinter(k).source() for k in kernels)
    head = (
        f'"""Reference kernels of {title}, made by HiPress CompLL."""\n\n'
        "import math\n\nimport numpy as np\n\n"
        "f32, f64, i64 = np.float32, np.float64, np.int64\n\n\n"
    )
    return module_source(kernels, head + copied(text, prelude), text)


def _dtype(array: Array) -> str:
    return "f32" if array.type == "float" else "i64"


class _KernelPrinter(Printer):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.out = Lines()
        self.known: dict[Expr, str] = {}
        self.folds: dict[Fold, str] = {}
        self.block: int | None = None
        self.row: ir.Row | None = None
        """The row that values are printed for, if not the block's elements."""
        self.locals: dict[ir.Local, str] = {}

    def source(self) -> str:
        k, out = self.kernel, self.out
        out.open(f"def {k.name}({entry_args(k)}, scratch=None, pool=None):")
        for place in entry_start(k, out):
            dtype = {"f32": "f32", "i64": "i64", "u32": "np.uint32"}.get(place.array.storage)
            if place.array.storage in ("u16", "f16", "bf16"):
                dtype = "np.uint16"
            view = f".view({dtype})" if dtype else ""
            start, size = place.offset, place.num_bytes
            out(f"{place.array.name} = body[{start} : {start} + {size}]{view}")
        out.open('with np.errstate(all="ignore"):')
        for r in k.requires:
            out(f"if not {self.value(r.cond)}:")
            out(f"    return {r.message!r}")
        for j, p in enumerate(k.passes):
            out(f"# Pass {j}: {type(p).__name__.lower()}.")
            self._pass(p)
        out.depth -= 1
        flag = k.nonfinite
        out("return None" if flag is None else f"return bool({self.folds[flag]})")
        return str(out)

    # Values.

    def value(self, e: Expr) -> str:
        return self.values([e])[0]

    def values(self, roots: Iterable[Expr]) -> list[str]:
        return self.print(roots, self.out, self.known)

    def spell(self, e: Expr, args: list[str]) -> str:
        if e.host:
            text = slot_text(e, self.kernel.params)
            return text if e.type == "bool" else f"{'f32' if e.type == 'float' else 'i64'}({text})"
        if e.is_load:
            return self._load(e, args[0])
        if e.op == "idx":
            start, end = self._part()
            return f"np.arange({start}, {end})" if self.block else f"np.arange({self._len(e.attr)})"
        if e.op == "ridx":
            return f"np.arange({e.attr[1]})"
        if e.op == "local":
            return f"_at({self.locals[e.attr]}, {args[0]})"
        if e.op == "lidx":
            return "np.arange(m)"
        if e.op in ("bnum", "bstart", "blen"):
            return {"bnum": "i64(t)", "bstart": "i64(a)", "blen": "i64(m)"}[e.op]
        if e.op in ir.RANDOM:
            rng = "rng" if len(args) == 1 else f"(int({args[1]}), 0, 0)"
            return f"_{e.op}({args[0]}, {e.attr}, {rng})"
        if e.op == "fold":
            return self.folds[e.attr]
        if e.op == "int":
            if e.args[0].type == "bool":
                return f"np.asarray({args[0]}, i64)"
            return f"_to_int({args[0]})"
        if e.op == "uint":
            return f"_uint({args[0]}, {2**e.attr - 1})"
        return _OPS[e.op].format(*args)

    def _load(self, e: Expr, index: str) -> str:
        array: Array = e.attr
        whole = array.name
        if array.storage != "f32":
            whole = f"_load({array.name}, {array.storage!r}, {self._len(array.length)})"
        if e.args[0].op == "idx" and e.op == "load":
            start, end = self._part()
            return f"{whole}[{start} : {end}]" if self.block else whole
        return f"{whole}[{index}]" if e.op == "load" else f"_at({whole}, {index})"

    def _part(self) -> tuple[str, str]:
        """Returns where the block's part of an array starts and ends."""
        if self.row is None:
            return "a", "a + m"
        return f"t * {self.row.count}", f"(t + 1) * {self.row.count}"

    def _len(self, length: Expr) -> str:
        return self.value(length) if not length.host else self._size(length)

    def _size(self, length: Expr) -> str:
        """Returns the text of a length that the host knows, at least 0."""
        text = host_text(length, self.kernel.params)
        return text if length.lo >= 0 else f"max({text}, 0)"

    # Passes.

    def _pass(self, p: ir.Pass) -> None:
        before = set(self.known)
        pass_method(self, p)(p)
        # Texts of elements name this pass's variables; what is the same everywhere may stay.
        self.known = {
            e: t for e, t in self.known.items() if e in before or e.op in ("count", "pick")
        }

    def scalars(self, p: ir.Scalars) -> None:
        for s, text in zip(p.stores, self.values(s.value for s in p.stores), strict=True):
            whole = f"np.full(1, {text}, {_dtype(s.array)})"
            self.out(f"_save({s.array.name}, {s.array.storage!r}, {whole})")

    def _alloc(self, array: Array) -> None:
        if array.name.startswith("temp"):
            names = {"f32": "f32", "i64": "i64", "u8": "np.uint8", "u16": "np.uint16"}
            dtype = names.get(array.storage, "np.uint32")
            length = self._size(array.length)
            self.out(f"{array.name} = np.zeros({length}, {dtype})")

    def _store(self, stores: Iterable[Store], length: str) -> None:
        stores = list(stores)
        texts = self.values([s.value for s in stores])
        names = []
        for text in texts:  # all is read before anything is written
            names.append(self.fresh())
            self.out(f"{names[-1]} = _whole({text}, {length}).copy()")
        for s, name in zip(stores, names, strict=True):
            self._alloc(s.array)
            # Memory of a filtered array may have more room.
            part = f"[: len({name})]" if s.array in self.kernel.temps else ""
            self.out(f"_save({s.array.name}{part}, {s.array.storage!r}, {name})")

    def _fold(self, f: Fold, length: str, body: str = "") -> None:
        init = self.value(f.init)
        body = body or self.value(f.body)
        name = self.fresh()
        self.folds[f] = name
        if f.kind == "or":
            self.out(f"{name} = np.any({body}) if {length} else False")
        elif f.kind == "fold":
            self.out(f"{name} = {init}")
            self.out.open(f"for item in _whole({body}, {length}):")
            self._combine(f, name)
            self.out.depth -= 1
        else:
            self.out(f"{name} = _fold_{f.kind}(_whole({body}, {length}), {init})")

    def _combine(self, f: Fold, acc: str) -> None:
        """Prints one step of a reduction by a function that the program gives."""
        assert f.combine is not None and f.carry is not None and f.item is not None
        inner = {**self.known, f.carry: acc, f.item: "item"}
        self.out(f"{acc} = {self.print([f.combine], self.out, inner)[0]}")

    def loop(self, p: ir.Loop) -> None:
        if p.block is not None:
            self._blocks(p)
            return
        length = self._len(p.length)
        for phase in p.phases:
            for f in phase.folds:
                self._fold(f, length)
            if phase.stores:
                self._store(phase.stores, length)

    def _blocks(self, p: ir.Loop) -> None:
        out = self.out
        stores = [s for ph in p.phases for s in ph.stores]
        codes = {}
        length = self._len(p.length)
        for s in (*stores, *p.block_stores):
            self._alloc(s.array)
            codes[s.array] = self.fresh()
            size = f"-(-{length} // {p.block})" if s in p.block_stores else length
            out(f"{codes[s.array]} = np.zeros({size}, {_dtype(s.array)})")
        totals = [f for ph in p.phases for f in ph.folds if f.block is None]
        parts = {f: self.fresh() for f in totals}
        for name in parts.values():
            out(f"{name} = []")
        outside = dict(self.known)
        for s in p.row_stores:
            self._alloc(s.array)
            codes[s.array] = self.fresh()
            out(f"{codes[s.array]} = np.zeros({self._size(s.array.length)}, {_dtype(s.array)})")
        out.open(f"for t in range(-(-{length} // {p.block})):")
        out(f"a = t * {p.block}")
        out(f"m = min({p.block}, {length} - a)")
        self.block = p.block
        for phase in p.phases:
            for f in phase.folds:
                if f.block is None:
                    out(f"{parts[f]}.append(_whole({self.value(f.body)}, m))")
                else:
                    self._row(f.row, partial(self._block_fold, f))
            for x in phase.locals:
                self._row(x.row, partial(self._local, x))
            for s in phase.stores:
                out(f"{codes[s.array]}[a : a + m] = {self.value(s.value)}")
        for s in p.block_stores:
            out(f"{codes[s.array]}[t] = {self.value(s.value)}")
        for s in p.row_stores:
            self._row(s.row, partial(self._row_store, s, codes[s.array]))
        out.depth -= 1
        self.block = None
        self.known = outside
        for s in (*stores, *p.block_stores, *p.row_stores):
            out(f"_save({s.array.name}, {s.array.storage!r}, {codes[s.array]})")
        for f, part in parts.items():
            whole = self.fresh()
            empty = {"float": "f32", "int": "i64", "bool": "bool"}[f.type]
            out(f"{whole} = np.concatenate([np.zeros(0, {empty}), *{part}])")
            self._fold(f, f"len({whole})", whole)

    def _row(self, row: ir.Row | None, act: Callable[[str], None]) -> None:
        """Prints something over a row, or over the block's elements."""
        size = "m" if row is None else f"int({self.value(row.length)})"
        self.row = row
        act(size)
        self.row = None

    def _block_fold(self, f: Fold, size: str) -> None:
        body = "" if f.row is None else f"_whole({self.value(f.body)}, {f.row.count})[:{size}]"
        self._fold(f, size, body)

    def _row_store(self, s: Store, target: str, size: str) -> None:
        start, _ = self._part()
        text = f"_whole({self.value(s.value)}, {s.row.count})[:{size}]"  # type: ignore[union-attr]
        self.out(f"{target}[{start} : {start} + {size}] = {text}")

    def _local(self, x: ir.Local, size: str) -> None:
        """Prints an array of the block; places that are not used are 0."""
        out, room = self.out, x.room
        all_ = "m" if x.row is None else str(x.row.count)
        body = f"_whole({self.value(x.body)}, {all_})"
        name = self.locals[x] = self.fresh()
        if x.kind == "keep":
            out(f"{name} = {body}.copy()")
        elif x.kind == "scan":
            assert x.fold is not None
            acc = self.fresh()
            out(f"{acc}, {name} = {self.value(x.fold.init)}, {body}.copy()")
            out.open(f"for k in range({size}):")
            out(f"item = {name}[k]")
            self._combine_any(x.fold, acc)
            out(f"{name}[k] = {acc}")
            out.depth -= 1
        elif x.kind == "scatter":
            assert x.index is not None and x.size is not None
            index = f"_whole({self.value(x.index)}, {all_})[:{size}]"
            where = self.assign(index, out)
            length = self.value(x.size)
            self._check_index(where, length)
            kind = "f32" if x.type == "float" else "i64"
            out(f"{name} = np.zeros({length}, {kind})")
            out(f"np.add.at({name}, {where}, {body}[:{size}])")
        else:
            how = {"filter": "np.flatnonzero({})", "sort": 'np.argsort({}, kind="stable")'}
            text = how.get(x.kind, f"_largest({{}}, {room})").format(f"{body}[:{size}]")
            out(f"{name} = _padded({text}[:{room}], {room})")

    def compact(self, p: ir.Compact) -> None:
        out = self.out
        length = self._len(p.length)
        for f in p.folds:
            self._fold(f, length)
        keep = self.value(p.filter.keep)
        hits = self.fresh()
        capacity = self._size(p.filter.capacity)
        out(f"{hits} = np.flatnonzero(_whole({keep}, {length}))[:{capacity}]")
        taken = self.fresh()
        out(f"{taken} = np.zeros({length}, bool)")
        out(f"{taken}[{hits}] = True")
        emits = self.values([s.value for s in p.emits])
        picked = []
        for s, text in zip(p.emits, emits, strict=True):
            picked.append(self.fresh())
            out(f"{picked[-1]} = np.zeros({capacity}, {_dtype(s.array)})")
            out(f"{picked[-1]}[: len({hits})] = _whole({text}, {length})[{hits}]")
        for e in walk([s.value for s in p.stores]):
            if e.op == "taken":
                self.known[e] = taken
        if p.stores:
            self._store(p.stores, length)
        for s, name in zip(p.emits, picked, strict=True):
            self._alloc(s.array)
            out(f"_save({s.array.name}, {s.array.storage!r}, {name})")
        count = self.fresh()
        out(f"{count} = i64(len({hits}))")
        for other in self.kernel.passes:
            for e in walk(ir.pass_exprs(other)):
                if e.op == "count" and e.attr is p.filter:
                    self.known[e] = count

    def order(self, p: ir.Select | ir.Sorting) -> None:
        sort, out = p.sort, self.out
        values = sort.values.name
        if sort.keys is not None:
            out(f'{values}[:] = {values}[np.argsort({sort.keys.name}, kind="stable")]')
        else:
            out(f'{values}.sort(kind="stable")')
        for rank in sort.ranks:
            at = self.value(rank)
            name = self.fresh()
            loaded = f"_load({values}, {sort.values.storage!r}, len({values}))"
            out(f"{name} = _at({loaded}, {at})")
            self.known.update({e: name for e in self.picks(sort) if e.args[0] is rank})

    def scan(self, p: ir.Scan) -> None:
        f, out = p.fold, self.out
        assert f.kind != "or"
        length = self._len(f.length)
        body, init = self.values([f.body, f.init])
        acc, rows = self.fresh(), self.fresh()
        self._alloc(p.array)
        out(f"{acc}, {rows} = {init}, []")
        out.open(f"for item in _whole({body}, {length}):")
        self._combine_any(f, acc)
        out(f"{rows}.append({acc})")
        out.depth -= 1
        kind = "f32" if f.type == "float" else "i64"
        target = f"{p.array.name}[: len({rows})]"
        out(f"_save({target}, {p.array.storage!r}, np.array({rows}, {kind}))")

    def _combine_any(self, f: Fold, acc: str) -> None:
        text = {"sum": f"{acc} + item", "max": f"max({acc}, item)", "min": f"min({acc}, item)"}
        if f.kind == "fold":
            self._combine(f, acc)
        else:
            self.out(f"{acc} = {text[f.kind]}")

    def _check_index(self, where: str, size: str, *bad: str) -> None:
        out = self.out
        wrong = " | ".join([f"({where} < 0)", f"({where} >= {size})", *bad])
        out(f"if np.any({wrong}):")
        if self.kernel.input is None:
            out('    return "an index in the payload is out of range or out of order"')
        else:
            out('    raise IndexError("an index of a scatter is out of range")')

    def scatter(self, p: ir.Scatter) -> None:
        out = self.out
        length = self._len(p.length)
        index, value, *bad = self.values(p.exprs)
        size = self._size(p.array.length)
        where = self.fresh()
        out(f"{where} = _whole({index}, {length})")
        self._check_index(where, size, *bad)
        total = self.fresh()
        self._alloc(p.array)
        if p.clear:
            out(f"{total} = np.zeros({size}, {_dtype(p.array)})")
        else:
            out(f"{total} = _load({p.array.name}, {p.array.storage!r}, {size}).copy()")
        out(f"np.add.at({total}, {where}, _whole({value}, {length}))")
        out(f"_save({p.array.name}, {p.array.storage!r}, {total})")
