"""What all backends share: printing values, the payload's layout, the module's frame.

A generated module offers three functions, whatever its backend:

    encode(n, params, rng, body, x, states, pool)  -> whether NaN or infinity was seen
    decode(n, params, rng, body, out, pool)        -> None, or why the body is refused
    decode_add(...)                                   (the same, added)

`params` are the float parameters in the kernel's order, `rng` is (seed, stream, step), `body` a
uint8 array of `body_bytes(n, params)` bytes. Sizes are computed there, on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hipress.compll.ir import STORAGE_BITS, Array, Expr, Kernel, walk

Spell = Callable[[Expr, list[str]], str]


@dataclass
class Lines:
    """Source text under construction."""

    text: list[str] = field(default_factory=list)
    depth: int = 0

    def __call__(self, line: str = "") -> None:
        self.text.append("    " * self.depth + line if line else "")

    def __str__(self) -> str:
        return "\n".join(self.text) + "\n"


def print_values(
    roots: Iterable[Expr],
    out: Lines,
    spell: Spell,
    known: dict[Expr, str],
    fresh: Callable[[], str],
) -> None:
    """Prints what `roots` need; afterwards `known` has a text for every root.

    A value used twice gets a name; one used once is written where it is used.
    """
    roots = list(roots)
    uses = Counter(roots)
    order = []
    for e in _needed(roots, known):
        order.append(e)
        uses.update(e.args)
    texts = known
    for e in order:
        text = spell(e, [texts[a] for a in e.args])
        if uses[e] > 1 and e.op not in ("const", "param"):
            name = fresh()
            out(f"{name} = {text}")
            text = name
        texts[e] = text


def _needed(roots: list[Expr], known: dict[Expr, str]) -> list[Expr]:
    """Values below `roots` that have no text yet, arguments first."""
    done: set[Expr] = set(known)
    order = []

    def visit(e: Expr) -> None:
        if e not in done:
            done.add(e)
            for a in e.args:
                visit(a)
            order.append(e)

    for root in roots:
        visit(root)
    return order


# How a host value reads in Python; sizes are ints of any length, the rest is double precision.
_HOST = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "({} / {} if {1} else math.nan)",
    "idiv": "_host_idiv({}, {})",
    "imod": "({0} - _host_idiv({0}, {1}) * {1})",
    "shl": "({} << {})",
    "shr": "({} >> {})",
    "and": "({} & {})",
    "or": "({} | {})",
    "xor": "({} ^ {})",
    "inv": "(~{})",
    "neg": "(-{})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "eq": "({} == {})",
    "ne": "({} != {})",
    "not": "(not {})",
    "land": "({} and {})",
    "lor": "({} or {})",
    "select": "({1} if {0} else {2})",
    "min": "min({}, {})",
    "max": "max({}, {})",
    "abs": "abs({})",
    "floor": "float(math.floor({}))",
    "sqrt": "math.sqrt(max({}, 0.0))",
    "exp2": "2.0 ** {}",
    "log2": "math.log2({})",
    "sign": "(({0} > 0) - ({0} < 0))",
    "float": "float({})",
    "int": "int({})",
    "round_f16": "float(np.float16({}))",
    "finite": "math.isfinite({})",
}

HOST_PRELUDE = """\
def _host_idiv(a, b):
    q = abs(a) // abs(b) if b else 0
    return q if (a < 0) == (b < 0) else -q


def _align(num_bytes):
    return (num_bytes + 15) // 16 * 16
"""


def host_text(e: Expr, params: tuple[str, ...]) -> str:
    """A host value as a Python expression of `n` and `params`."""
    if e.op == "n":
        return "n"
    if e.op == "const":
        return repr(e.attr)
    if e.op == "param":
        return f"params[{params.index(e.attr)}]"
    args = [host_text(a, params) for a in e.args]
    if e.op == "uint":
        return f"min(max(int({args[0]}), 0), {2**e.attr - 1})"
    return _HOST[e.op].format(*args)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a section lies: texts of its offset and length in bytes, in terms of `n`."""

    array: Array
    scalar: bool
    offset: str
    num_bytes: str


def layout(kernel: Kernel, out: Lines) -> list[Place]:
    """Prints the offsets of the payload's sections; the last line sets `end`.

    Scalars stand side by side, each on a multiple of its size; an array starts on a multiple of
    16 bytes; so does the end.
    """
    places = []
    fixed: int | None = 0  # bytes so far, while they are known without n
    for k, section in enumerate(kernel.sections):
        array = section.array
        bits = STORAGE_BITS[array.storage]
        if section.scalar:
            size = max(1, bits // 8)
            if fixed is not None:
                offset = (fixed + size - 1) // size * size
                fixed = offset + size
                places.append(Place(array, True, str(offset), str(size)))
                continue
            out(f"o{k} = (end + {size - 1}) // {size} * {size}")
            places.append(Place(array, True, f"o{k}", str(size)))
            out(f"end = o{k} + {size}")
            continue
        length = host_text(array.length, kernel.params)
        out(f"o{k} = {(fixed + 15) // 16 * 16}" if fixed is not None else f"o{k} = _align(end)")
        out(
            f"b{k} = ({length} * {bits} + 7) // 8" if bits < 8 else f"b{k} = {length} * {bits // 8}"
        )
        out(f"end = o{k} + b{k}")
        fixed = None
        places.append(Place(array, False, f"o{k}", f"b{k}"))
    out(f"end = {(fixed + 15) // 16 * 16}" if fixed is not None else "end = _align(end)")
    return places


def body_bytes_source(kernel: Kernel, name: str = "body_bytes") -> str:
    """A function from (n, params) to the bytes of a payload's body."""
    out = Lines()
    out(f"def {name}(n, params):")
    out.depth += 1
    layout(kernel, out)
    out("return end")
    return str(out)


def host_values(roots: Iterable[Expr]) -> list[Expr]:
    """The largest host values below `roots` that are not plain constants."""
    found: dict[Expr, None] = {}

    def visit(e: Expr, seen: set[Expr]) -> None:
        if e in seen:
            return
        seen.add(e)
        if e.host:
            if e.op != "const":
                found[e] = None
            return
        for a in e.args:
            visit(a, seen)

    seen: set[Expr] = set()
    for root in roots:
        visit(root, seen)
    return list(found)


def loads(roots: Iterable[Expr]) -> list[Array]:
    """The arrays that some values read, in order of first use."""
    found: dict[Array, None] = {}
    for e in walk(roots):
        if e.op in ("load", "load_clamped"):
            found[e.attr] = None
    return list(found)
