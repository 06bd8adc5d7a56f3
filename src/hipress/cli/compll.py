"""`hipress compll`: compile, show and check a compression program."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from hipress.errors import HipressError, ProgramError, UsageError, did_you_mean

if TYPE_CHECKING:
    from hipress.compll.build import Bound, Program
    from hipress.compll.front.ast import Source
    from hipress.compll.front.signature import Param
    from hipress.compll.passes.derive import Variant

app = typer.Typer(no_args_is_help=True)

WIDTHS = (1, 2, 4, 8)
"""What `check` tries for an integer parameter that has no value."""
WIDTH = 2
"""What `show` and `build` use for it."""
SHARE = 0.5
"""The value of a float parameter that has none, where the size of a frame depends on it."""
NUMEL = 1_000_000
"""Elements of the gradient whose frame size `check` prints."""

_File = Annotated[
    str, Argument(metavar="FILE", help="A .pse program, or the name of a built-in codec.")
]
_Params = Annotated[
    list[str] | None,
    Option("--param", metavar="NAME=VALUE", help="Set a parameter; may be given often."),
]
_Ef = Annotated[bool, Option("--ef", help="Fuse error feedback into encode.")]
_Momentum = Annotated[
    float | None, Option(metavar="MU", help="Fuse momentum into encode, e.g. 0.9.")
]


@app.callback(epilog="Example: hipress compll check my.pse")
def compll() -> None:
    """Compile, show and check a compression program."""


@app.command(epilog="Example: hipress compll build TernGradEncode.pse -o ops --param bitwidth=4")
def build(
    file: _File,
    body: Annotated[bool, Option("-b", help="Write the bodies: kernels for CPU and GPU.")] = False,
    wrapper: Annotated[bool, Option("-w", help="Write the wrapper: functions on tensors.")] = False,
    registration: Annotated[
        bool, Option("-r", help="Write the registration: operators for torch.compile.")
    ] = False,
    framework: Annotated[str, Option("-f", help="The framework: torch.")] = "torch",
    output: Annotated[Path, Option("-o", help="Folder to write the package into.")] = Path(),
    param: _Params = None,
    ef: _Ef = False,
    momentum: _Momentum = None,
) -> None:
    """Write a program as an importable package: body, wrapper and registration.

    Without -b, -w and -r all three are written. Import the package, and
    torch.ops.hipress has the operators; nothing is rebuilt. Integer
    parameters are fixed by the build, float ones become arguments.
    """
    from hipress.compll.tools.emit import PARTS, Package

    asked = dict(zip(PARTS, (body, wrapper, registration), strict=True))
    parts = [part for part, wanted in asked.items() if wanted] or list(PARTS)
    given = _values(param)
    program = _program(file)
    package = Package(
        bound=program.bind(_filled(program, given)),
        framework=framework,
        variant=_variant(ef, momentum),
        mu=0.9 if momentum is None else momentum,
        required=tuple(p.name for p in _unset(program, given) if p.runtime),
    )
    written = package.write(output, parts)
    for path in written.files:
        print(f"wrote {path}")
    for note in written.notes:
        print(f"note: {note}", file=sys.stderr)
    if "registration" in parts:
        print(f"import {package.name}, with {output} on the path: encode, decode, decode_add")


@app.command(epilog="Example: hipress compll show onebit --stage passes --ef")
def show(
    file: _File,
    stage: Annotated[
        Literal["ast", "passes", "reference", "cpu", "gpu"],
        Option(help="The tree, the list of passes, or what a backend makes of them."),
    ] = "passes",
    param: _Params = None,
    ef: _Ef = False,
    momentum: _Momentum = None,
    dtype: Annotated[
        Literal["f32", "f16", "bf16"], Option(help="Storage of the gradient.")
    ] = "f32",
) -> None:
    """Print a program at one stage of its way to kernels."""
    from hipress.compll.tools.show import show_ast, show_passes

    if stage == "ast":
        print(show_ast(_source(file)), end="")
        return
    program = _program(file)
    bound = program.bind(_filled(program, _values(param)))
    variant = _variant(ef, momentum)
    kernels = bound.kernels(dtype=dtype, variant=variant)
    if stage == "passes":
        print(f"{bound.title(dtype, variant)}\n")
        print(show_passes(kernels), end="")
    else:
        print(bound.source(stage, dtype=dtype, variant=variant), end="")


@app.command(epilog="Example: hipress compll check my.pse --param bitwidth=4")
def check(file: _File, param: _Params = None) -> None:
    """Check a program, and say what it takes, what it moves and what it sends.

    An integer parameter without a value is tried with 1, 2, 4 and 8.
    """
    program = _program(file)
    bound, tried = _checked(program, _values(param))
    names = " and ".join(_functions(program))
    print(f"{file}: ok ({names}{tried})")
    for label, text in _report(bound):
        print(f"  {label:12} {text}")


# Programs and their parameters.


def _program(file: str) -> Program:
    """Returns the program in a file, whole or one function of it, or that of a built-in codec."""
    from hipress.compll.build import parse_program, read_any

    _refuse_expression(file)
    if _is_file(file):
        return read_any(file)
    return parse_program(_built_in(file), file=f"{file}.pse")


def _source(file: str) -> Source:
    from hipress.compll.build import read_source
    from hipress.compll.front.parse import parse

    _refuse_expression(file)
    return read_source(file) if _is_file(file) else parse(_built_in(file), file=f"{file}.pse")


def _is_file(file: str) -> bool:
    """Returns whether the user means a file: it exists, or its name looks like one."""
    return Path(file).is_file() or not re.fullmatch(r"\w+", file)


def _refuse_expression(file: str) -> None:
    """Refuses a codec expression: its options are those of a codec, not of a program."""
    from hipress.codecs.expression import parse

    if Path(file).exists() or "(" not in file:
        return
    try:
        call = parse(file)
    except UsageError:
        return
    while call.args:
        call = call.args[0]
    raise UsageError(
        f"{file!r} is a codec expression; give the program alone, {call.name}, and its parameters "
        "as --param NAME=VALUE (show and build also take --ef and --momentum)."
    )


def _built_in(name: str) -> str:
    from hipress import codecs

    if name not in codecs.names():
        raise UsageError(
            f"no program {name!r}{did_you_mean(name, codecs.names())}; give the path of a .pse "
            f"file or the name of a built-in codec: {', '.join(codecs.names())}."
        )
    return codecs.describe(name).program


def _functions(program: Program) -> list[str]:
    pair = (program.pair.encode, program.pair.decode)
    return list(dict.fromkeys(function.name for _, function in pair))


def _values(items: Sequence[str] | None) -> dict[str, int | float]:
    """Returns parameters from the command line.

    >>> _values(["bitwidth=4", "tau=1e-3", "exact=true"])
    {'bitwidth': 4, 'tau': 0.001, 'exact': 1}
    """
    values: dict[str, int | float] = {}
    for item in items or ():
        name, equals, text = (piece.strip() for piece in item.partition("="))
        value = _number(text)
        if not name or not equals or value is None:
            raise UsageError(
                f"--param {item!r} is not NAME=VALUE with a number; write e.g. bitwidth=4."
            )
        if name in values:
            raise UsageError(f"--param {name} is given twice; give it once.")
        values[name] = value
    return values


def _number(text: str) -> int | float | None:
    words = {"true": 1, "false": 0}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"[+-]?[0-9]{1,19}", text):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text):
        return float(text)
    return None


def _unset(program: Program, given: dict[str, int | float]) -> list[Param]:
    return [p for p in program.params if p.default is None and p.name not in given]


def _filled(program: Program, given: dict[str, int | float]) -> dict[str, int | float]:
    """Returns the values given, and a default for each that is missing, with a note on stderr."""
    values = dict(given)
    for p in _unset(program, given):
        values[p.name] = SHARE if p.runtime else WIDTH
        if not p.runtime:  # kernels are the same for every float
            print(
                f"note: {p.name} has no default; using {WIDTH} (set it with --param {p.name}=...)",
                file=sys.stderr,
            )
    return values


def _variant(ef: bool, momentum: float | None) -> Variant:
    from hipress.codecs.spec import FRACTION_RULE, fraction
    from hipress.compll.passes.derive import Variant

    if momentum is not None and not fraction(momentum):
        raise UsageError(f"--momentum {momentum} must be {FRACTION_RULE}; write e.g. 0.9.")
    wanted = momentum is not None
    return Variant(feedback=ef, momentum=wanted, nesterov=wanted)  # as in momentum(...)


# What `check` finds.


def _checked(program: Program, given: dict[str, int | float]) -> tuple[Bound, str]:
    """Makes every kernel of a program, once for each width if one is missing.

    Returns the program with values, and those that were tried, for the first line.
    """
    unset = _unset(program, given)
    floats = {p.name: SHARE for p in unset if p.runtime}
    widths = [p.name for p in unset if not p.runtime]
    if not widths:
        bound = program.bind({**given, **floats})
        _try(bound)
        return bound, ""
    good: dict[int, Bound] = {}
    errors: dict[int, HipressError] = {}
    for width in WIDTHS:
        try:
            bound = program.bind({**given, **floats, **dict.fromkeys(widths, width)})
            _try(bound)
            good[width] = bound
        except (ProgramError, UsageError) as error:
            errors[width] = error
    if not good:
        raise errors[WIDTH]
    tried = f"; {', '.join(widths)} = {', '.join(map(str, good))}"
    return good.get(WIDTH) or next(iter(good.values())), tried


def _try(bound: Bound) -> None:
    from hipress.compll.build import BoundHalf

    if isinstance(bound, BoundHalf):
        bound.check()
    else:
        bound.kernels()


def _report(bound: Bound) -> list[tuple[str, str]]:
    """Returns labels and texts: parameters, what each kernel moves, the size of a frame."""
    from hipress.codecs.frame import frame_bytes
    from hipress.compll.build import BoundHalf
    from hipress.compll.passes.cost import cost
    from hipress.compll.passes.derive import Variant

    values = dict(bound.values)
    params = [f"{p.elem} {p.name} = {values[p.name]}" for p in bound.program.params]
    rows = [("parameters", ", ".join(params) or "none")]
    lone = bound.program if isinstance(bound, BoundHalf) else None
    if lone is not None and lone.missing.endswith("Encode"):
        return [*rows, ("kernels", f"none without {lone.missing}")]
    rows += [(kernel.name, str(cost(kernel))) for kernel in bound.kernels()]
    if lone is None:
        fed_back = bound.kernels(variant=Variant(feedback=True))[0]
        rows.insert(2, ("encode, ef", str(cost(fed_back))))
    num_bytes = frame_bytes([bound.body_bytes()(NUMEL)])
    ratio = f"{4 * NUMEL / num_bytes:.1f} times smaller than float32"
    return [*rows, ("wire", f"{num_bytes:,} bytes for {NUMEL:,} elements, {ratio}")]
