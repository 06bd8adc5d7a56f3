"""What the host computes for a kernel: sizes, parameters, the layout of a payload.

Takes values that depend on sizes and parameters only, and kernels; returns Python text. Such text
needs `HOST_PRELUDE` before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hipress.compll.backends.render import INFIX, Lines
from hipress.compll.ir import INT_MAX, INT_MIN, STORAGE_BITS, Array, Expr, Kernel

# How a host value reads in Python; sizes are ints of any length, the rest is double precision.
_HOST = {
    **INFIX,
    **{op: f"_host_{op}({{}}, {{}})" for op in ("div", "idiv", "imod", "shl", "shr")},
    **{op: f"_host_{op}({{}})" for op in ("floor", "sqrt", "exponent", "exp2", "log2")},
    "float": "_host_float({})",
    "bits": "int(np.float32({}).view(np.uint32))",
    "from_bits": "float(np.uint32({} & 0xFFFFFFFF).view(np.float32))",
    "int": "_host_int({})",
    "round_f16": "_host_f16({})",
    "round_bf16": "_host_bf16({})",
    "not": "(not {})",
    "land": "({} and {})",
    "lor": "({} or {})",
    "select": "({1} if {0} else {2})",
    "min": "min({}, {})",
    "max": "max({}, {})",
    "abs": "abs({})",
    "sign": "(({0} > 0) - ({0} < 0))",
    "finite": "math.isfinite({})",
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


def host_text(e: Expr, params: tuple[str, ...]) -> str:
    """Returns a host value as a Python expression of `n` and `params`."""
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
    """Returns a host value as a kernel takes it, where an int has 64 bits and wraps."""
    text = host_text(e, params)
    return f"_host_wrap({text})" if _is_large(e) else text


def _is_large(e: Expr) -> bool:
    """Whether an int of the host may need more than 64 bits: its range is not known."""
    unknown = e.lo == INT_MIN or e.hi == INT_MAX
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
    out = Lines()
    out.open(f"def {name}(n, params):")
    layout(kernel, out)
    out("return end")
    return str(out)


def entry_start(kernel: Kernel, out: Lines) -> list[Place]:
    """Prints how an entry point starts: its states, the layout, zeros between the sections."""
    if kernel.states:
        names = ", ".join(s.name for s in kernel.states)
        out(f"{names}{',' * (len(kernel.states) == 1)} = states")
    places = layout(kernel, out)
    if kernel.input is not None:
        clear_gaps(places, out)
    return places


def entry_args(kernel: Kernel) -> str:
    memory = kernel.input or kernel.output
    assert memory is not None
    return f"n, params, rng, body, {memory.name}{', states' * (kernel.input is not None)}"


def module_source(kernels: Sequence[Kernel], head: str, text: str) -> str:
    """Returns the source of a module: its head, the host's functions, then its kernels."""
    return f"{head}{HOST_PRELUDE}\n\n{body_bytes_source(kernels[0])}\n\n{text}"
