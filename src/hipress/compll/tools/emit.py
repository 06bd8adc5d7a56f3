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
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from hipress.compll.build import Bound
from hipress.compll.ir import Kernel
from hipress.compll.passes.derive import ALPHA, MU, PLAIN, RHO, Variant
from hipress.compll.tools.emit_functions import (
    Function,
    call_args,
    functions,
    signature,
    tuple_text,
)
from hipress.compll.tools.emit_torch import (
    GPU_SUPPORT,
    OPERATOR,
    REGISTRATION,
    SUPPORT,
    WRAPPER_HEAD,
)
from hipress.compll.tools.half import Lone
from hipress.errors import BackendError, UsageError

FRAMEWORKS = ("torch",)
"""What `-f` takes."""

PARTS = {
    "body": ("body.py", "body_gpu.py", "launch.py"),
    "wrapper": ("wrapper.py",),
    "registration": ("__init__.py",),
}
"""Part of a package: its files; each needs those before it."""

MAX_ARGS = 64
"""Most arguments of an operator, a limit of torch."""

MARK = "made by HiPress CompLL"
"""Stands in the first line of every file we write; a file without it is not overwritten."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What `Package.write` did."""

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
        """What it is imported as."""
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

    def texts(self, part: str) -> dict[str, str]:
        """The files of one of `PARTS`, and their texts."""
        if part != "body":
            return {PARTS[part][0]: self.text(part)}
        texts = [self.text(part)]
        if not self.no_gpu:
            texts += [self._gpu[0], _LAUNCH.format(mark=MARK) + _runtime()]
        return dict(zip(PARTS[part], texts, strict=False))

    def text(self, part: str) -> str:
        """The text of the first file of one of `PARTS`."""
        if part == "body":
            return self.bound.source("cpu", variant=self.variant)
        program = self.bound.program
        if isinstance(program, Lone):
            raise UsageError(
                f"wrapper and registration need {program.missing} too; put it into the same file "
                "or beside it, or build the kernels alone with -b."
            )
        made = functions(self.bound, self.variant, self.mu, self.required)
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
            UsageError: A file there is not ours to overwrite, or cannot be written.
        """
        folder = directory / self.name
        last = max(list(PARTS).index(part) for part in parts)
        texts = {part: self.texts(part) for part in list(PARTS)[: last + 1]}
        asked = {folder / f: text for part in parts for f, text in texts[part].items()}
        for path in asked:
            _refuse_foreign(path)
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
    """The name of the package, and of its operators, for a program.

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


def _refuse_foreign(path: Path) -> None:
    try:
        first = path.read_text("utf-8").partition("\n")[0] if path.exists() else MARK
    except (OSError, UnicodeDecodeError):
        first = ""
    if MARK not in first:
        raise UsageError(f"{path} exists and was not {MARK}; move it or choose another -o.")


def _missing(folder: Path, texts: dict[str, str], part: str) -> str:
    """What is wrong with the files of a part, if anything: one sentence."""
    for name, text in texts.items():
        path = folder / name
        try:
            found = path.read_text("utf-8") if path.exists() else None
        except (OSError, UnicodeDecodeError):
            found = ""
        if found != text:
            state = "is not there yet" if found is None else "is of another build"
            return f"{path} {state}; write it with hipress compll build -{part[0]}."
    return ""


# Files.

_LAUNCH = "# {mark}: edit the program, not this file.\n"


def _runtime() -> str:
    """What starts gpu kernels: it imports nothing of ours, so it is copied as it is."""
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
        text += f"\n\ndef {f.name}(\n{signature(f.args)}) -> {f.returns}:\n"
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
                op_args=signature(f.args, op=True),
                fake_args=signature(f.args, op=True, typed=False),
                args=signature(f.args),
                to_wrapper=call_args(f.args, op=False),
                to_op=call_args(f.args, op=True),
                fake=f.fake,
                about=_docstring(f.about),
            )
    return text


def _docstring(about: str) -> str:
    return f"{about}\n    " if "\n" in about else about


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True) or [""]


def _order(bound: Bound, kernel: Kernel) -> str:
    """Where in (floats, then ours) each parameter of a kernel stands."""
    runtime = [p.name for p in bound.program.params if p.runtime]
    ours = [name for name in (ALPHA, MU, RHO) if name in kernel.params]
    return tuple_text(str([*runtime, *ours].index(name)) for name in kernel.params)
