"""The whole way: a program file to functions that run, with a cache on disk.

Generated code lives in real files under the cache directory: numba keeps its compiled form beside
them, and a debugger can step through. A file is named by the hash of what it is made from, and
written under another name first, so that many ranks may build the same one at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from hipress import settings
from hipress.compll.backends.host import HOST_PRELUDE, body_bytes_source
from hipress.compll.front import ast, check
from hipress.compll.front.parse import fail, parse
from hipress.compll.front.scope import Param, ParamValue
from hipress.compll.ir import Kernel
from hipress.compll.passes import derive
from hipress.compll.passes.derive import PLAIN, Pair, Variant
from hipress.errors import BackendError, MissingDependencyError, UsageError

BACKENDS = {
    "reference": "hipress.compll.backends.reference",
    "cpu": "hipress.compll.backends.cpu",
    "gpu": "hipress.compll.backends.gpu",
}
"""Name of a backend to the module that renders it: `render(kernels, title=...) -> source`."""


MAX_FLOAT = 3.4028235e38
"""The largest float parameter: what binary32 holds."""
MAX_NAME = 100
"""Characters of a function's name: files are named by it, and file systems take 255."""


class Renderer(Protocol):
    """What a backend is: from passes to the source of a module (see `render`)."""

    def render(self, kernels: Sequence[Kernel], *, title: str) -> str:
        """The source of a module with one entry point per kernel."""


@dataclass(frozen=True)
class Program:
    """A checked pair of functions, and the parameters they take."""

    name: str
    """The stem of its functions: `TernGrad` of `TernGradEncode`."""
    pair: Pair
    params: tuple[Param, ...]
    text: str
    """All of its source, for hashing."""

    def bind(self, values: Mapping[str, Any]) -> Bound:
        """The program with its parameters set; unknown and missing ones are errors."""
        known = {p.name: p for p in self.params}
        for name in values:
            if name not in known:
                choices = ", ".join(known) or "none"
                raise UsageError(f"{self.name} has no parameter {name!r}; it takes: {choices}.")
        bound: dict[str, ParamValue] = {}
        for p in self.params:
            value = values.get(p.name, p.default)
            if value is None:
                raise UsageError(
                    f"{self.name} needs a value for {p.name!r} ({p.elem}); "
                    f"write e.g. '{self.name}({p.name}=2)'."
                )
            bound[p.name] = _checked(self.name, p, value)
        return Bound(self, tuple(bound.items()))


def _checked(program: str, p: Param, value: Any) -> ParamValue:
    if isinstance(value, bool):
        value = int(value)
    if p.elem.kind == "float":
        if not isinstance(value, int | float) or not abs(value) <= MAX_FLOAT:
            raise UsageError(
                f"{program}: {p.name}={value!r} must be a finite number, at most 3.4e38."
            )
        return float(value)
    if not isinstance(value, int):
        raise UsageError(f"{program}: {p.name}={value!r} must be an integer ({p.elem}).")
    low, high = (0, 2**p.elem.bits - 1) if p.elem.kind == "uint" else (-(2**62), 2**62)
    if not low <= value <= high:
        raise UsageError(f"{program}: {p.name}={value} does not fit {p.elem} ({low} to {high}).")
    return value


@dataclass(frozen=True)
class Bound:
    """A program with a value for every parameter: what kernels are made from."""

    program: Program
    values: tuple[tuple[str, ParamValue], ...]

    @cached_property
    def static(self) -> dict[str, ParamValue]:
        """Integer parameters: known when kernels are made."""
        runtime = {p.name for p in self.program.params if p.runtime}
        return {name: value for name, value in self.values if name not in runtime}

    def floats(self, kernel: Kernel, extra: Mapping[str, float]) -> tuple[float, ...]:
        """Float parameters in the order that `kernel` takes them."""
        values = {derive.ALPHA: 1.0, derive.RHO: 1.0, **dict(self.values), **extra}
        return tuple(float(values[name]) for name in kernel.params)

    def kernels(self, *, dtype: str = "f32", variant: Variant = PLAIN) -> tuple[Kernel, ...]:
        """encode, decode and decode_add for tensors of one dtype."""
        pair, static = self.program.pair, self.static
        return (
            derive.encode_kernel(pair, static, dtype=dtype, variant=variant),
            derive.decode_kernel(pair, static, dtype=dtype, add=False),
            derive.decode_kernel(pair, static, dtype=dtype, add=True),
        )

    def title(self, dtype: str, variant: Variant) -> str:
        """One line that says what a module holds."""
        numbers = ", ".join(f"{k}={v}" for k, v in self.static.items())
        wrappers = [w for w in ("feedback", "momentum", "nesterov") if getattr(variant, w)]
        return ", ".join([f"{self.program.name}({numbers})", dtype, *wrappers])

    def source(self, backend: str, *, dtype: str = "f32", variant: Variant = PLAIN) -> str:
        """The module that `backend` makes of this program."""
        kernels = self.kernels(dtype=dtype, variant=variant)
        return renderer(backend).render(kernels, title=self.title(dtype, variant))

    def load(self, backend: str, *, dtype: str = "f32", variant: Variant = PLAIN) -> Loaded:
        """The module, rendered, written to the cache and imported."""
        return _load(self, backend, dtype, variant)

    def load_merge(self, worker: Bound, count: int, *, variant: Variant = PLAIN) -> Merge | None:
        """Kernels for a GPU that average frames of `worker` and encode the mean with this program.

        None where that can not be one kernel: decode and add the frames, then encode.
        """
        values, theirs = dict(self.values), dict(worker.values)
        # A kernel knows a float parameter by its name only.
        floats = {p.name for p in (*self.program.params, *worker.program.params) if p.runtime}
        if any(values[name] != theirs[name] for name in floats & values.keys() & theirs.keys()):
            return None
        key = (self.program.text, self.values, worker.program.text, worker.values, count, variant)
        if key not in _merges:
            frames = derive.Frames(worker.program.pair, worker.static, count)
            kernel = derive.merge_kernel(frames, self.program.pair, self.static, variant=variant)
            if kernel is None:
                _merges[key] = None
            else:
                _need_triton()
                title = f"{count} frames of {worker.program.name}, averaged and encoded by "
                source = renderer("gpu").render((kernel,), title=title + self.program.name)
                module = import_source(source, f"{self.program.name.lower()}_merge_gpu")
                _merges[key] = Merge(module, kernel)
        return _merges[key]

    def body_bytes(self) -> Callable[[int], int]:
        """A function from the number of elements to the bytes of a payload's body."""
        kernel = derive.encode_kernel(self.program.pair, self.static)
        scope: dict[str, Any] = {}
        source = "import math\nimport numpy as np\n" + HOST_PRELUDE + body_bytes_source(kernel)
        exec(compile(source, "<body_bytes>", "exec"), scope)  # our own text, from checked values
        count, params = scope["body_bytes"], self.floats(kernel, {})
        return lambda n: int(count(n, params))


@dataclass(frozen=True)
class Loaded:
    """A module that runs, and the kernels it was made from."""

    module: ModuleType
    encode: Kernel
    decode: Kernel


@dataclass(frozen=True)
class Merge:
    """A module with a kernel that merges frames."""

    module: ModuleType
    kernel: Kernel


_merges: dict[tuple[Any, ...], Merge | None] = {}


def renderer(backend: str) -> Renderer:
    """The backend of this name."""
    if backend not in BACKENDS:
        raise BackendError(f"no backend {backend!r}; choices: {', '.join(BACKENDS)}.")
    module: Any = importlib.import_module(BACKENDS[backend])
    return module  # type: ignore[no-any-return]


_loaded: dict[tuple[Any, ...], Loaded] = {}


def _load(bound: Bound, backend: str, dtype: str, variant: Variant) -> Loaded:
    static = tuple(sorted(bound.static.items()))
    key = (bound.program.text, bound.program.name, static, backend, dtype, variant)
    if key not in _loaded:
        if backend == "gpu":
            _need_triton()
        kernels = bound.kernels(dtype=dtype, variant=variant)
        source = renderer(backend).render(kernels, title=bound.title(dtype, variant))
        module = import_source(source, f"{bound.program.name.lower()}_{backend}")
        _loaded[key] = Loaded(module, kernels[0], kernels[1])
    return _loaded[key]


def _need_triton() -> None:
    """Says in one sentence what generated GPU code would stumble on."""
    if importlib.util.find_spec("triton") is None:
        raise MissingDependencyError("triton", "gpu")


def import_source(source: str, stem: str) -> ModuleType:
    """Writes generated source to the cache and imports it."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = f"{stem}_{digest}"
    folder = settings.cache_dir() / "kernels"
    path = folder / f"{name}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            # Not mkstemp, which lets nobody else read the file whatever the umask says.
            temporary = folder / f"{name}.{secrets.token_hex(8)}.tmp"
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(source)
            os.replace(temporary, path)
    except OSError as error:
        raise BackendError(
            f"cannot write kernels to {folder} ({error.strerror}); "
            "set HIPRESS_CACHE_DIR to a folder that can be written."
        ) from error
    spec = importlib.util.spec_from_file_location(f"hipress_kernels.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # numba looks a cached function's module up by name
    spec.loader.exec_module(module)
    return module


# Programs from files.


def read_program(path: str | Path) -> Program:
    """Reads the program in a file; where it holds one function, the other is looked for beside it.

    Raises:
        ProgramError: The text is no program.
        UsageError: There is no such file, or only half of a program.
    """
    source = _read(Path(path))
    encode, decode = _functions(source)
    if encode is None and decode is None:
        raise UsageError(f"{path}: no function; write XEncode and XDecode (any name for X).")
    sources = {"Encode": source, "Decode": source}
    if encode is None or decode is None:
        have, want = ("Encode", "Decode") if encode is not None else ("Decode", "Encode")
        other = _sibling(Path(path), have, want)
        sources[want] = other
        found = _functions(other)[0 if want == "Encode" else 1]
        if encode is None:
            encode = found
        else:
            decode = found
        if found is None:
            raise UsageError(f"{other.file}: no function whose name ends in {want}.")
    assert encode is not None and decode is not None
    return make_program((sources["Encode"], encode), (sources["Decode"], decode))


def read_source(path: str | Path) -> ast.Source:
    """The tree of a program file; its meaning is not checked yet."""
    return _read(Path(path))


def lone_function(path: str | Path) -> tuple[ast.Source, ast.Function] | None:
    """The function of a file that holds one, where the other is neither in it nor beside it."""
    path = Path(path)
    source = _read(path)
    encode, decode = _functions(source)
    have, want = ("Encode", "Decode") if encode is not None else ("Decode", "Encode")
    found = encode or decode
    if found is None or (encode and decode) or _beside(path, have, want):
        return None
    return source, found


def parse_program(text: str, *, file: str = "<program>") -> Program:
    """A program from text that holds both functions."""
    source = parse(text, file=file)
    encode, decode = _functions(source)
    if encode is None or decode is None:
        missing = "Encode" if encode is None else "Decode"
        raise UsageError(f"{file}: no function whose name ends in {missing}.")
    return make_program((source, encode), (source, decode))


def make_program(
    encode: tuple[ast.Source, ast.Function], decode: tuple[ast.Source, ast.Function]
) -> Program:
    """Joins two functions; their parameters must agree."""
    stem = encode[1].name.removesuffix("Encode")
    if decode[1].name != f"{stem}Decode":
        raise UsageError(
            f"{decode[0].file}: {decode[1].name} does not belong to {encode[1].name}; "
            f"call it {stem}Decode."
        )
    params: dict[str, Param] = {}
    for source, function in (encode, decode):
        for p in check.signature(source, function).params:
            if p.name in params and params[p.name].elem != p.elem:
                raise UsageError(
                    f"{source.file}: {function.name} declares {p.name!r} as {p.elem}, the other "
                    f"function as {params[p.name].elem}; use one type."
                )
            old = params.get(p.name)
            if old is None or old.default is None:
                params[p.name] = p
    text = encode[0].text if encode[0] is decode[0] else encode[0].text + "\0" + decode[0].text
    return Program(stem or "Program", Pair(encode, decode), tuple(params.values()), text)


def _read(path: Path) -> ast.Source:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the program {path} ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the program {path} is not UTF-8 text.") from error
    return parse(text, file=str(path))


def _functions(source: ast.Source) -> tuple[ast.Function | None, ast.Function | None]:
    found: dict[str, ast.Function] = {}
    for function in source.functions:
        kind = next((k for k in ("Encode", "Decode") if function.name.endswith(k)), None)
        if kind is None:
            message = f"the name {function.name!r} must end in Encode or Decode"
            fail(source.file, source.text, function.pos, message)
        if len(function.name) > MAX_NAME:
            message = f"the name has {len(function.name)} characters; at most {MAX_NAME}"
            fail(source.file, source.text, function.pos, message)
        if kind in found:
            message = f"a second function ending in {kind}; a file holds one program"
            fail(source.file, source.text, function.pos, message)
        found[kind] = function
    return found.get("Encode"), found.get("Decode")


def _sibling(path: Path, have: str, want: str) -> ast.Source:
    beside = _beside(path, have, want)
    if beside is None:
        name = path.name.replace(have, want)
        raise UsageError(
            f"{path} holds only {have}; put {want} into the same file or into "
            f"{name if name != path.name else 'X' + want + '.pse'} beside it."
        )
    return _read(beside)


def _beside(path: Path, have: str, want: str) -> Path | None:
    """The file that holds the other half of a program, if there is one."""
    beside = path.with_name(path.name.replace(have, want))
    return beside if beside.name != path.name and beside.exists() else None
