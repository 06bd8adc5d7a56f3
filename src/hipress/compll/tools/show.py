"""Readable printers: the tree of a program, and its passes as text.

Passes are written as a program would write them: infix, C's signs and precedences. Letters in
that text: n elements of the gradient; i the index of an element in the domain of its pass, j in
its block; b the number of the block, m its length; s0, s1, ... sizes; f0, f1, ... reductions;
v1, v2, ... values that are used more than once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hipress.compll import ir
from hipress.compll.backends.render import Lines, pass_method
from hipress.compll.front import ast
from hipress.compll.ir import Array, Expr, Fold, Kernel, Store, walk
from hipress.compll.passes.cost import cost, domain

# The tree.


def show_ast(source: ast.Source) -> str:
    """Returns the tree of a file, one node on each line, with the line and column it starts at.

    Example:
        >>> from hipress.compll.front.parse import parse
        >>> print(show_ast(parse("void XDecode(uint8* c, float* g) { extract(c, g); }", file="x")))
        x
          Function void XDecode  1:1
            Arg uint8* c  1:14
            Arg float* g  1:24
            Do  1:36
              value: Call extract  1:36
                Name c  1:44
                Name g  1:47
        <BLANKLINE>
    """
    lines = [source.file]
    # In the order of the text, and with a stack of our own: a long sum is a deep tree.
    roots = sorted((*source.params, *source.functions), key=lambda r: (r.pos.line, r.pos.column))
    todo: list[tuple[int, str, ast.Node]] = [(1, "", root) for root in reversed(roots)]
    while todo:
        depth, role, node = todo.pop()
        lines.append(f"{'  ' * depth}{role}{_label(node)}  {node.pos.line}:{node.pos.column}")
        todo += [(depth + 1, r, child) for r, child in reversed(list(_children(node)))]
    return "\n".join(lines) + "\n"


def _label(node: ast.Node) -> str:
    """Returns the class of a node and what it holds itself: its name, type, sign or number."""
    words = [type(node).__name__]
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        if isinstance(value, ast.TypeName):
            words.append(_type(value))
        elif f.name == "inout":
            words += ["inout"] if value else []
        elif isinstance(value, str | int | float):
            words.append(str(value))
    return " ".join(words)


def _type(type_: ast.TypeName) -> str:
    width = "" if type_.width is None else "<...>"
    return f"{type_.base}{width}{'*' if type_.array else ''}"


def _children(node: ast.Node) -> Iterator[tuple[str, ast.Node]]:
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        if isinstance(value, ast.TypeName):
            if value.width is not None:
                yield "width: ", value.width
        elif isinstance(value, ast.Node):
            yield f"{f.name}: ", value
        elif isinstance(value, tuple):
            # Only the branches of an `if` stand side by side and need telling apart.
            role = f"{f.name}: " if isinstance(node, ast.If) else ""
            yield from ((role, child) for child in value)


# The passes.


def show_passes(kernels: Sequence[Kernel]) -> str:
    """Returns the flat list of passes of each kernel: its memory, then what every pass does."""
    return "\n".join(_Printer(kernel).text() for kernel in kernels)


_LEVELS: tuple[dict[str, str], ...] = (
    *({"lor": "||"}, {"land": "&&"}, {"or": "|"}, {"xor": "^"}, {"and": "&"}),
    *({"eq": "==", "ne": "!="}, {"lt": "<", "le": "<="}, {"shl": "<<", "shr": ">>"}),
    *({"add": "+", "sub": "-"}, {"mul": "*", "div": "/", "idiv": "/", "imod": "%"}),
)
_BINARY = {op: (sign, k) for k, level in enumerate(_LEVELS, 2) for op, sign in level.items()}
_UNARY = {"neg": "-", "not": "!", "inv": "~"}
_LEAVES = {
    "n": "n",
    "idx": "i",
    "lidx": "j",
    "ridx": "k",
    "bnum": "b",
    "bstart": "start",
    "blen": "m",
}
_TERNARY, _PREFIX, _ATOM = 1, 12, 13
_TYPES = {"f32": "float", "f16": "float16", "bf16": "bfloat16", "i64": "int"}

_Text = tuple[str, int]
"""An expression and how tightly it binds: the precedence of its outermost sign."""


class _Printer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.out = Lines()
        self.folds: dict[Fold, str] = {}
        self.filters: dict[ir.Filter, str] = {}
        self.sorts: dict[int, str] = {}
        self.locals: dict[ir.Local, str] = {}
        self.num_values = 0
        self.sizes: dict[Expr, _Text] = {}

    def text(self) -> str:
        k, out = self.kernel, self.out
        out.open(f"{k.name}: {cost(k)}")
        self._sizes()
        self._memory()
        for require in k.requires:
            (cond,) = self._values([require.cond])
            out(f"require {cond}, or: {require.message}")
        for number, p in enumerate(k.passes, 1):
            out.open(f"pass {number}: {self._title(p)}")
            pass_method(self, p)(p)
            out.depth -= 1
        return str(out)

    def _sizes(self) -> None:
        """Prints names for the lengths that are more than n or a number: many lines use them."""
        k = self.kernel
        arrays = [s.array for s in k.sections] + list(k.temps)
        lengths = [a.length for a in arrays]
        lengths += [p.filter.capacity for p in k.passes if isinstance(p, ir.Compact)]
        lengths += [d for d in map(domain, k.passes) if d is not None]
        for length in lengths:
            if length.host and not _is_leaf(length) and length not in self.sizes:
                (text,) = self._values([length])
                self.sizes[length] = (f"s{len(self.sizes)}", _ATOM)
                self.out(f"{self.sizes[length][0]} = {text}")

    def _memory(self) -> None:
        k = self.kernel
        rows = [(a, "the gradient, read") for a in (k.input,) if a is not None]
        rows += [(a, "the gradient, written") for a in (k.output,) if a is not None]
        rows += [(a, "state") for a in k.states]
        rows += [(s.array, "payload, a scalar" if s.scalar else "payload") for s in k.sections]
        rows += [(a, "temporary") for a in k.temps]
        types = [self._declared(a) for a, _ in rows]
        names = max(len(a.name) for a, _ in rows)
        widths = max(len(t) for t in types)
        for (array, role), type_ in zip(rows, types, strict=True):
            label = f" ({array.label})" if array.label not in ("", array.name) else ""
            self.out(f"{array.name:{names}}  {type_:{widths}}  {role}{label}")
        if k.params:
            self.out(f"parameters: {', '.join(k.params)}")
        if k.random:
            self.out("random numbers: of seed, stream and step")

    def _declared(self, array: Array) -> str:
        type_ = _TYPES.get(array.storage) or f"uint{ir.STORAGE_BITS[array.storage]}"
        if array.length.op == "const" and array.length.attr == 1:
            return type_
        return f"{type_}[{self._values([array.length])[0]}]"

    def _title(self, p: ir.Pass) -> str:
        if isinstance(p, ir.Scalars):
            return "scalars of the payload"
        if isinstance(p, ir.Select | ir.Sorting):
            doing = "single ranks of" if isinstance(p, ir.Select) else "sort"
            return f"{doing} {p.sort.values.name}"
        length = domain(p)
        assert length is not None
        (shown,) = self._values([length])
        if isinstance(p, ir.Loop):
            blocks = "" if p.block is None else f", in blocks of {p.block}"
            return f"loop over {shown}{blocks}"
        return f"{type(p).__name__.lower()} over {shown}"

    def scalars(self, p: ir.Scalars) -> None:
        self._stores(p.stores, "0")

    def scatter(self, p: ir.Scatter) -> None:
        index, value = self._values([p.index, p.value])
        if p.clear:
            self.out(f"{p.array.name} = 0")
        self.out(f"{p.array.name}[{index}] += {value}")

    def loop(self, p: ir.Loop) -> None:
        for number, phase in enumerate(p.phases, 1):
            if len(p.phases) > 1:
                self.out.open(f"phase {number}")
            roots = _element_roots(phase.folds, phase.stores)
            self._elements(phase.folds, phase.stores, self._values(roots))
            for x in phase.locals:
                self._local(x)
            if len(p.phases) > 1:
                self.out.depth -= 1
        if p.block_stores:
            self.out.open("once a block")
            self._stores(p.block_stores, "b")
            self.out.depth -= 1
        if p.row_stores:
            self.out.open("for each place of a row")
            self._stores(p.row_stores, "i")
            self.out.depth -= 1

    def _local(self, x: ir.Local) -> None:
        over = "the block" if x.row is None else f"a row of {x.row.count}"
        roots = [x.body] if x.index is None else [x.body, x.index]
        body, *index = self._values(roots)
        where = f" at {index[0]}" if index else ""
        self.out(f"{self._name(x)} = {x.kind} over {over} of {body}{where}, room for {x.room}")

    def _name(self, x: ir.Local) -> str:
        return self.locals.setdefault(x, f"local{len(self.locals)}")

    def compact(self, p: ir.Compact) -> None:
        first = [p.filter.keep, p.filter.capacity, *(s.value for s in p.emits)]
        keep, capacity, *rest = self._values([*first, *_element_roots(p.folds, p.stores)])
        self.out(f"{self._filter(p.filter)}: keep i where {keep}, the first {capacity}")
        for store, value in zip(p.emits, rest, strict=False):
            self.out(f"emit {store.array.name} <- {value}")
        self._elements(p.folds, p.stores, rest[len(p.emits) :])

    def scan(self, p: ir.Scan) -> None:
        name = p.array.name
        body, init = self._values([p.fold.body, p.fold.init])
        joined = self._join(p.fold, f"{name}[i - 1]", body)
        self.out(f"{name}[i] = {joined}, the first from {init}")

    def order(self, p: ir.Select | ir.Sorting) -> None:
        name = self._sorted(p.sort)
        by = "" if p.sort.keys is None else f" by {p.sort.keys.name}"
        if isinstance(p, ir.Sorting):
            self.out(f"{name} = {p.sort.values.name} in ascending order{by}")
        else:
            ranks = ", ".join(f"[{rank}]" for rank in self._values(p.sort.ranks))
            self.out(f"{name} = {p.sort.values.name} in ascending order, only {ranks}")

    def _elements(
        self, folds: Sequence[Fold], stores: Sequence[Store], texts: Iterable[str]
    ) -> None:
        """Prints what is done for each element, given the texts of `_element_roots`."""
        left = iter(texts)
        for fold in folds:
            body, init = next(left), next(left)
            self._fold(fold, body, init)
        for store in stores:
            self.out(f"{store.array.name}[i] = {next(left)}")

    def _fold(self, fold: Fold, body: str, init: str) -> None:
        name = self.folds.setdefault(fold, f"f{len(self.folds)}")
        over = "the block"
        if fold.block is None:
            (over,) = self._values([fold.length])
        if fold is self.kernel.nonfinite:
            self.out(f"{name} = any over {over} of {body}, the frame's non-finite flag")
            return
        how = {"fold": "fold", "or": "any"}.get(fold.kind, fold.kind)
        combine = ""
        if fold.combine is not None:
            combine = f" by (carry, item) -> {self._join(fold, 'carry', 'item')}"
        self.out(f"{name} = {how} over {over} of {body}, from {init}{combine}")

    def _join(self, fold: Fold, carry: str, item: str) -> str:
        if fold.combine is None:
            sign = {"sum": f"{carry} + {item}", "or": f"{carry} || {item}"}
            return sign.get(fold.kind, f"{fold.kind}({carry}, {item})")
        known = {e: (t, _ATOM) for e, t in ((fold.carry, carry), (fold.item, item)) if e}
        return self._values([fold.combine], known)[0]

    def _stores(self, stores: Sequence[Store], index: str) -> None:
        for store, value in zip(stores, self._values([s.value for s in stores]), strict=True):
            self.out(f"{store.array.name}[{index}] = {value}")

    # Values.

    def _values(
        self, roots: Sequence[Expr], known: dict[Expr, _Text] | None = None
    ) -> tuple[str, ...]:
        """Returns the texts of `roots`; a value that is used twice is printed first, as a name."""
        texts = {**self.sizes, **(known or {})}
        order = list(walk(roots, set(texts)))
        uses = Counter(a for e in order for a in e.args) + Counter(set(roots))
        for e in order:
            text = self._spell(e, [texts[a] for a in e.args])
            if uses[e] > 1 and not _is_leaf(e):
                self.num_values += 1
                self.out(f"v{self.num_values} = {text[0]}")
                text = (f"v{self.num_values}", _ATOM)
            texts[e] = text
        return tuple(texts[root][0] for root in roots)

    def _spell(self, e: Expr, args: list[_Text]) -> _Text:
        if e.op in _BINARY:
            sign, binds = _BINARY[e.op]
            return f"{_in(args[0], binds)} {sign} {_in(args[1], binds + 1)}", binds
        if e.op in _UNARY:
            return f"{_UNARY[e.op]}{_in(args[0], _ATOM)}", _PREFIX
        if e.op == "select":
            cond, yes, no = (_in(a, _TERNARY + 1) for a in args)
            return f"{cond} ? {yes} : {no}", _TERNARY
        if e.op == "const":
            text = str(e.attr).lower() if e.type == "bool" else repr(e.attr)
            return text, _PREFIX if text.startswith("-") else _ATOM
        return self._atom(e, [text for text, _ in args]), _ATOM

    def _atom(self, e: Expr, args: list[str]) -> str:
        if e.op in _LEAVES:
            return _LEAVES[e.op]
        if e.op == "param":
            return str(e.attr).strip("<>")
        if e.op == "load":
            return f"{e.attr.name}[{args[0]}]"
        if e.op == "load_clamped":
            return f"{e.attr.name}[clamp({args[0]})]"
        if e.op in ("uniform", "bits32"):
            return f"{e.op}#{e.attr}({args[0]})"
        if e.op == "fold":
            return self.folds.setdefault(e.attr, f"f{len(self.folds)}")
        if e.op == "local":
            return f"{self._name(e.attr)}[{args[0]}]"
        if e.op in ("count", "taken"):
            return f"{e.op}({self._filter(e.attr)})"
        if e.op == "pick":
            return f"{self._sorted(e.attr)}[{args[0]}]"
        name = f"uint{e.attr}" if e.op == "uint" else e.op
        return f"{name}({', '.join(args)})"

    def _filter(self, found: ir.Filter) -> str:
        return self.filters.setdefault(found, f"filter{len(self.filters)}")

    def _sorted(self, sort: ir.Sort) -> str:
        return self.sorts.setdefault(id(sort), f"sorted{len(self.sorts)}")


def _in(text: _Text, binds: int) -> str:
    """Returns an operand, in brackets unless it binds at least this tightly."""
    return text[0] if text[1] >= binds else f"({text[0]})"


_PLAIN = frozenset({"const", "param", "fold", "count", "taken", *_LEAVES})


def _is_leaf(e: Expr) -> bool:
    """Whether a name would only hide a value: an index, a parameter, an element of an array."""
    of_one = e.op in ("load", "uniform", "bits32", "float")
    return e.op in _PLAIN or (of_one and e.args[0].op in _PLAIN)


def _element_roots(folds: Sequence[Fold], stores: Sequence[Store]) -> list[Expr]:
    """Returns what reductions and stores need for each element."""
    return [e for f in folds for e in (f.body, f.init)] + [s.value for s in stores]
