"""What all backends share: printing values, the payload's layout, the module's frame.

A generated module offers three functions, whatever its backend:

    encode(n, params, rng, body, x, states, scratch, pool)  -> whether NaN or infinity was seen
    decode(n, params, rng, body, out, scratch, pool)        -> None, or why the body is refused
    decode_add(...)                                            (the same, added)

`params` are the float parameters in the kernel's order, `rng` is (seed, stream, step), `body` a
uint8 array of `body_bytes(n, params)` bytes. Sizes are computed there, on the host. `scratch`
gives memory of some bytes, `pool` runs steps on several threads (None: on one).
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from types import ModuleType

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
    often: Container[Expr] = (),
) -> None:
    """Prints what `roots` need; afterwards `known` has a text for every root.

    A value used twice (or, by other roots, `often`) gets a name; one used once is written where
    it is used.
    """
    roots = list(roots)
    uses = Counter(roots)
    order = []
    for e in walk(roots, set(known)):
        order.append(e)
        uses.update(e.args)
    texts = known
    for e in order:
        text = spell(e, [texts[a] for a in e.args])
        if (uses[e] > 1 or e in often) and e.op not in ("const", "param"):
            name = fresh()
            out(f"{name} = {text}")
            text = name
        texts[e] = text


# How a host value reads in Python; sizes are ints of any length, the rest is double precision.
_HOST = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "_host_div({}, {})",
    "idiv": "_host_idiv({}, {})",
    "imod": "_host_imod({}, {})",
    "shl": "_host_shl({}, {})",
    "shr": "_host_shr({}, {})",
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
    "floor": "_host_floor({})",
    "sqrt": "_host_sqrt({})",
    "exponent": "_host_exponent({})",
    "exp2": "_host_exp2({})",
    "log2": "_host_log2({})",
    "sign": "(({0} > 0) - ({0} < 0))",
    "float": "_host_float({})",
    "int": "_host_int({})",
    "finite": "math.isfinite({})",
    "round_f16": "_host_f16({})",
    "round_bf16": "_host_bf16({})",
}

HOST_PRELUDE = """\
def _host_idiv(a, b):
    q = abs(a) // abs(b) if b else 0
    return q if (a < 0) == (b < 0) else -q


def _host_imod(a, b):
    return a - _host_idiv(a, b) * b if b else 0


def _host_shl(a, b):
    return a << b if 0 <= b < 63 else 0


def _host_shr(a, b):
    return a >> (b if 0 <= b < 63 else 63)


def _host_sqrt(a):
    return math.sqrt(a) if a >= 0 else math.nan


def _host_div(a, b):
    if b:
        return a / b
    return math.copysign(math.inf, a) * math.copysign(1.0, b) if a else math.nan


def _host_floor(a):
    return float(math.floor(a)) if math.isfinite(a) else a


def _host_exp2(a):
    return math.inf if a >= 1024 else 2.0**a


def _host_log2(a):
    return math.log2(a) if a > 0 else (math.nan if a else -math.inf)


def _host_f16(a):
    return float(np.float16(a))


def _host_bf16(a):
    bits = int(np.float32(a).view(np.uint32))
    return float(np.uint32((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).view(np.float32))


def _host_exponent(a):
    if not math.isfinite(a):
        return 128
    return min(max(math.frexp(abs(a))[1] - 1, -150), 128) if a else -150


def _host_float(a):
    return float(a) if abs(a) < 2**1023 else (math.inf if a > 0 else -math.inf)


def _host_wrap(a):
    return (a + 2**63) % 2**64 - 2**63


def _host_int(a):
    return int(max(min(a, 9.0e18), -9.0e18)) if a == a else 0


def _align(num_bytes):
    return (num_bytes + 15) // 16 * 16
"""


def copied(text: str, helpers: ModuleType, decorator: str = "") -> str:
    """Copies the functions of `helpers` that `text` calls, each before its callers."""
    functions = {
        name: inspect.getsource(f)
        for name, f in vars(helpers).items()
        if inspect.isfunction(f) and f.__module__ == helpers.__name__
    }
    needed: dict[str, None] = {}

    def need(source: str, myself: str = "") -> None:
        for name in re.findall(r"\b_[a-z0-9_]+(?=\()", source):
            if name in functions and name != myself and name not in needed:
                need(functions[name], name)
                needed[name] = None

    need(text)
    bare = (re.sub(r": Any\b| -> (Any|None)\b", "", functions[name]) for name in needed)
    return "".join(f"{decorator}{source}\n\n" for source in bare)


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
        return f"min(max(_host_int({args[0]}), 0), {2**e.attr - 1})"
    if e.op == "float" and not _is_large(e.args[0]):
        return f"float({args[0]})"
    return _HOST[e.op].format(*args)


def slot_text(e: Expr, params: tuple[str, ...]) -> str:
    """A host value as a kernel takes it, where an int has 64 bits and wraps."""
    text = host_text(e, params)
    return f"_host_wrap({text})" if _is_large(e) else text


def _is_large(e: Expr) -> bool:
    """Whether an int of the host may need more than 64 bits: its range is not known."""
    unknown = e.lo == -(2**63) or e.hi == 2**63 - 1
    return e.type == "int" and unknown and e.op not in ("int", "const")


def clear_gaps(places: list[Place], out: Lines) -> None:
    """Prints what zeroes the bytes between sections, so that equal payloads are equal bytes."""
    ends = [*(p.offset for p in places[1:]), "end"]
    for place, nxt in zip(places, ends, strict=True):
        if place.scalar and nxt.isdigit():
            if int(place.offset) + int(place.num_bytes) == int(nxt):
                continue
        out(f"body[{place.offset} + {place.num_bytes} : {nxt}] = 0")


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
        length = f"max({host_text(array.length, kernel.params)}, 0)"
        if array.length.op == "n":
            length = "n"
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
