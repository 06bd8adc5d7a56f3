"""An importable package for a framework: kernels, plain functions, registered operators.

    NAME/body.py       the rendered cpu kernels: numpy and numba
    NAME/body_gpu.py   the rendered gpu kernels: Triton, imported when a CUDA tensor comes
    NAME/launch.py     what starts them
    NAME/wrapper.py    encode, decode, decode_add and wire_bytes on torch tensors
    NAME/__init__.py   the same as `torch.library` operators: import NAME, and they exist

The package stands alone: it imports no hipress, and what it sends is a frame that
`hipress.codec` of the same program reads.
"""

from __future__ import annotations

import keyword
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from hipress.compll.build import Bound, Half
from hipress.compll.ir import Kernel
from hipress.compll.passes.derive import ALPHA, MU, PLAIN, RHO, Variant
from hipress.compll.tools.emit_torch import (
    GPU_SUPPORT,
    OPERATOR,
    REGISTRATION,
    SUPPORT,
    WRAPPER_HEAD,
)
from hipress.errors import BackendError, UsageError

FRAMEWORKS = ("torch",)
"""The choices of `-f`."""

PARTS = {
    "body": ("body.py", "body_gpu.py", "launch.py"),
    "wrapper": ("wrapper.py",),
    "registration": ("__init__.py",),
}
"""Part of a package: its files; each needs those before it."""

MAX_ARGS = 64
"""Most arguments of an operator, a limit of torch."""

MARK = "made by HiPress CompLL"
"""The first line of every written file has this text; a file without it is not overwritten."""

_ORIGIN = "# Program: "


@dataclass(frozen=True, kw_only=True)
class Written:
    files: tuple[Path, ...]
    notes: tuple[str, ...]
    """What the package still lacks, in sentences."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A program to be written as a package."""

    bound: Bound
    """The program: its integers are fixed, its floats become defaults."""
    framework: str = "torch"
    """One of `FRAMEWORKS`."""
    variant: Variant = PLAIN
    """Wrappers that are fused into encode."""
    mu: float = 0.9
    """The default momentum factor, where `variant` has momentum."""
    required: tuple[str, ...] = ()
    """Float parameters that get no default."""

    def __post_init__(self) -> None:
        if self.framework not in FRAMEWORKS:
            choices = ", ".join(FRAMEWORKS)
            raise UsageError(f"framework {self.framework!r} is not known; choices: {choices}.")

    @property
    def name(self) -> str:
        return package_name(self.bound.program.name)

    @cached_property
    def _gpu(self) -> tuple[str, str]:
        """The text of the gpu kernels, and why there are none; one of the two is empty."""
        try:
            return self.bound.source("gpu", variant=self.variant), ""
        except BackendError as error:
            return "", str(error)

    @property
    def no_gpu(self) -> str:
        """Why the program has no gpu kernels; empty where it has some."""
        return self._gpu[1]

    @property
    def origin(self) -> str:
        """The last line of each file, by which another program of the same name is noticed."""
        program = self.bound.program
        return f"{_ORIGIN}{program.name} in {Path(program.pair.encode[0].file).name}"

    def texts(self, part: str) -> dict[str, str]:
        """Returns the files of one of `PARTS`, and their texts."""
        texts = [self.text(part)]
        if part == "body" and not self.no_gpu:
            texts += [self._gpu[0], _LAUNCH.format(mark=MARK) + _runtime()]
        texts = [f"{text.rstrip()}\n\n{self.origin}\n" for text in texts]
        return dict(zip(PARTS[part], texts, strict=False))

    def text(self, part: str) -> str:
        if part == "body":
            return self.bound.source("cpu", variant=self.variant)
        program = self.bound.program
        if isinstance(program, Half):
            raise UsageError(
                f"wrapper and registration need {program.missing} too; put it into the same file "
                "or beside it, or build the kernels alone with -b."
            )
        made = functions(self)
        most = max(len(f.args) for f in made)
        if most > MAX_ARGS:
            raise UsageError(
                f"an operator of {program.name} would take {most} arguments; torch allows "
                f"{MAX_ARGS}: build the kernels alone with -b."
            )
        return _wrapper(made, self) if part == "wrapper" else _registration(made, self)

    def write(self, directory: Path, parts: Collection[str] = tuple(PARTS)) -> Written:
        """Writes some parts below `directory`.

        Raises:
            UsageError: A file there was not made by this compiler, or cannot be written.
        """
        folder = directory / self.name
        last = max(list(PARTS).index(part) for part in parts)
        texts = {part: self.texts(part) for part in list(PARTS)[: last + 1]}
        asked = {folder / f: text for part in parts for f, text in texts[part].items()}
        for path in asked:
            _refuse_foreign(path, self.origin)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, text in asked.items():
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write to {folder} ({error.strerror}); choose another -o."
            ) from error
        notes = [_missing(folder, texts[part], part) for part in texts]
        if "body" in parts and self.no_gpu:
            notes.append(f"no kernels for a GPU: {self.no_gpu}")
        return Written(
            files=tuple(folder / f for part in texts if part in parts for f in texts[part]),
            notes=tuple(note for note in notes if note),
        )


def package_name(program: str) -> str:
    """Returns the name of the package, and of its operators, for a program.

    Example:
        >>> package_name("TernGrad"), package_name("Class"), package_name("Torch")
        ('terngrad', 'class_codec', 'torch_codec')
    """
    name = program.lower()
    if name.startswith("_"):
        return f"codec{name}"
    # A folder called torch on the path would hide torch itself.
    others = ("hipress", "numba", "numpy", "torch", *sys.stdlib_module_names)
    return f"{name}_codec" if keyword.iskeyword(name) or name in others else name


def _text_of(path: Path) -> str | None:
    """Returns the text of a file: None where there is none, empty where it cannot be read."""
    try:
        return path.read_text("utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError):
        return ""


def _refuse_foreign(path: Path, origin: str) -> None:
    found = _text_of(path)
    if found is not None and MARK not in found.partition("\n")[0]:
        raise UsageError(f"{path} exists and was not {MARK}; move it or choose another -o.")
    last = (found or "").rstrip().rpartition("\n")[2]
    if last.startswith(_ORIGIN) and last != origin:
        raise UsageError(
            f"{path} was built of the program {last.removeprefix(_ORIGIN)}, and this is "
            f"{origin.removeprefix(_ORIGIN)}; rename its functions, delete the folder "
            f"{path.parent} or choose another -o."
        )


def _missing(folder: Path, texts: dict[str, str], part: str) -> str:
    """Returns one sentence about a file of a part that is missing or outdated, if any."""
    for name, text in texts.items():
        path = folder / name
        found = _text_of(path)
        if found != text:
            state = "is not there yet" if found is None else "is of another build"
            return f"{path} {state}; write it with hipress compll build -{part[0]}."
    return ""


# The functions of a package: their names, their arguments and what they call.
#
# Names in a program are chosen by its author. Those of parameters and states become names of
# arguments, each through `_Names`; the bodies of functions that take them use nothing but
# arguments and names with a leading underscore, which no argument has.

_OURS = ("x", "payload", "numel", "out", "alpha", "mu", "lr_ratio", "step", "seed", "stream")


def _accepted(name: str, taken: set[str]) -> str:
    """Returns a name of the program as the name of an argument that Python accepts."""
    while name.startswith("_") or name in taken or keyword.iskeyword(name):
        name = f"p_{name}"
    taken.add(name)
    return name


_TENSOR = "_torch.Tensor"
_STATE, _PARAM = "state_", "param_"


@dataclass(frozen=True)
class Arg:
    """An argument of an emitted function."""

    name: str
    type: str = _TENSOR
    default: str = ""
    keyword: bool = True
    prefix: str = ""
    """What an operator puts before the name. Its arguments travel through torch by name, beside
    those of torch's own functions, so a program's `mode` or `match` would break torch.compile."""

    @property
    def op_name(self) -> str:
        return self.prefix + self.name


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function of the wrapper and, unless `fake` is empty, an operator."""

    name: str
    args: tuple[Arg, ...]
    returns: str = _TENSOR
    about: str
    body: str
    fake: str = ""
    """The line that gives torch.compile the shape of the result, by the operator's names."""

    @property
    def mutates(self) -> tuple[str, ...]:
        """The operator's arguments that it writes to."""
        return tuple(a.op_name for a in self.args if a.prefix == _STATE or a.name == "out")

    def signature(self, *, op: bool = False, typed: bool = True) -> str:
        """Returns the arguments, each on its own line; keyword-only ones after a star."""
        texts: dict[bool, list[str]] = {False: [], True: []}
        for a in self.args:
            text = (a.op_name if op else a.name) + (f": {a.type}" if typed else "")
            equals = " = " if typed else "="
            texts[a.keyword].append(f"{text}{equals}{a.default}" if a.default else text)
        lines = [*texts[False], *(["*", *texts[True]] if texts[True] else [])]
        return "".join(f"    {line},\n" for line in lines)

    def call_args(self, *, op: bool) -> str:
        """Returns the arguments of a call of the operator, or (without `op`) of the function."""
        pairs = [(a, *((a.op_name, a.name) if op else (a.name, a.op_name))) for a in self.args]
        return ", ".join(f"{to}={given}" if a.keyword else given for a, to, given in pairs)


def functions(package: Package) -> tuple[Function, ...]:
    """Returns encode, decode, decode_add and wire_bytes of a program."""
    bound, variant = package.bound, package.variant
    kernel = bound.kernels(variant=variant)[0]
    taken, values = set(_OURS), dict(bound.values)
    options = {p.name: _accepted(p.name, taken) for p in bound.program.params if p.runtime}
    defaults = {k: "" if k in package.required else repr(float(values[k])) for k in options}
    params = tuple(Arg(options[k], "float", defaults[k], prefix=_PARAM) for k in options)
    for array in kernel.states:
        if array.length.op != "n" or array.storage != "f32":
            raise UsageError(
                f"state {array.label!r} is not one float for each element; a built package keeps "
                f"no other: write inout float* {array.label}, or use hipress.codec."
            )
    labels = [_accepted(array.label, taken) for array in kernel.states]
    states = tuple(Arg(label, keyword=False, prefix=_STATE) for label in labels)
    rng = (Arg("step", "int"), Arg("seed", "int", "0"), Arg("stream", "int", "0"))
    added = (Arg("mu", "float", repr(float(package.mu))),) * variant.momentum
    added += (Arg("lr_ratio", "float", "1.0"),) * variant.feedback
    x, payload, out = (Arg(name, keyword=False) for name in ("x", "payload", "out"))
    numel, alpha = Arg("numel", "int", keyword=False), Arg("alpha", "float", "1.0")
    floats = tuple_text(options.values())
    held = tuple_text(f'("{label}", {label})' for label in labels)
    drawn = "(seed, stream, step)" if kernel.random else "(0, 0, 0)"
    extra = tuple_text(a.name for a in added)
    fixed = _about_params(options, bound.static)
    return (
        Function(
            name="encode",
            args=(x, *states, *(rng if kernel.random else ()), *params, *added),
            about="The frame of `x` (float32, float16 or bfloat16, on CPU or GPU, any shape)."
            + _about_states(labels)
            + (_ABOUT_RANDOM if kernel.random else "")
            + fixed,
            body=f"return _encode(x, {held}, {drawn}, {floats}, {extra})",
            fake=f"return _wrapper._empty_frame(x, {tuple_text(a.op_name for a in params)})",
        ),
        Function(
            name="decode",
            args=(payload, numel, alpha, *params),
            about="`alpha` times the `numel` elements of a frame, as a 1-D float32 tensor." + fixed,
            body=f"return _decode(payload, numel, alpha, {floats})",
            fake="return _wrapper._empty_gradient(payload, numel)",
        ),
        Function(
            name="decode_add",
            args=(payload, out, alpha, *params),
            returns="None",
            about="Adds `alpha` times what a frame holds to `out` (float32, contiguous)." + fixed,
            body=f'_decode_into("decode_add", payload, out, alpha, {floats})',
            fake="return None",
        ),
        Function(
            name="wire_bytes",
            args=(numel, *params),
            returns="int",
            about="Bytes of the frame of a tensor with `numel` elements." + fixed,
            body=f"return _wire_bytes(numel, {floats})",
        ),
    )


_ABOUT_RANDOM = """

    Random numbers follow from `seed`, `stream` and `step`: count `step` up at every call, and let
    ranks that must draw different numbers differ in `stream`."""


def _about_states(states: list[str]) -> str:
    if not states:
        return ""
    names = ", ".join(f"`{state}`" for state in states)
    verb = "is" if len(states) == 1 else "are"
    return f"""

    {names} {verb} updated in place: float32, contiguous, as many elements as `x`; zeros at
    first."""


def _about_params(options: Mapping[str, str], static: Mapping[str, int | float]) -> str:
    lines = [f"    `{new}` is the program's `{old}`." for old, new in options.items() if new != old]
    lines += [
        f"    `{name}` was fixed at {value} when this was built." for name, value in static.items()
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def tuple_text(items: Iterable[str]) -> str:
    texts = list(items)
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


# Files.

_LAUNCH = "# {mark}: edit the program, not this file.\n"


def _runtime() -> str:
    """Returns the text of `runtime`, which imports nothing of hipress and is copied as it is."""
    return resources.files("hipress.compll.backends.gpu").joinpath("runtime.py").read_text("utf-8")


def _wrapper(made: tuple[Function, ...], package: Package) -> str:
    bound = package.bound
    encode, decode, _ = bound.kernels(variant=package.variant)
    values = {p.name: bound.static.get(p.name) for p in bound.program.params}
    text = WRAPPER_HEAD.format(
        title=bound.title("f32", package.variant),
        mark=MARK,
        # Line by line, in ASCII: it can be read, and no character of it is code.
        program="\n".join(f"    {ascii(line)}" for line in _lines(bound.program.text)),
        values=tuple_text(f'("{name}", {value})' for name, value in values.items()),
        encode_order=_order(bound, encode),
        decode_order=_order(bound, decode),
        gpu=not package.no_gpu,
        ratio=package.variant.feedback,
    )
    for f in made:
        text += f"\n\ndef {f.name}(\n{f.signature()}) -> {f.returns}:\n"
        text += f'    """{_docstring(f.about)}"""\n    {f.body}\n'
    return text + SUPPORT + GPU_SUPPORT


def _registration(made: tuple[Function, ...], package: Package) -> str:
    title, name = package.bound.title("f32", package.variant), package.name
    text = REGISTRATION.format(title=title, mark=MARK, name=name)
    for f in made:
        if f.fake:
            text += OPERATOR.format(
                op=f"{name}_{f.name}",
                name=f.name,
                returns=f.returns,
                mutates=tuple_text(f'"{state}"' for state in f.mutates),
                op_args=f.signature(op=True),
                fake_args=f.signature(op=True, typed=False),
                args=f.signature(),
                to_wrapper=f.call_args(op=False),
                to_op=f.call_args(op=True),
                fake=f.fake,
                about=_docstring(f.about),
            )
    return text


def _docstring(about: str) -> str:
    return f"{about}\n    " if "\n" in about else about


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True) or [""]


def _order(bound: Bound, kernel: Kernel) -> str:
    """Returns the index of each parameter of a kernel in (program's floats, added ones)."""
    runtime = [p.name for p in bound.program.params if p.runtime]
    added = [name for name in (ALPHA, MU, RHO) if name in kernel.params]
    return tuple_text(str([*runtime, *added].index(name)) for name in kernel.params)
