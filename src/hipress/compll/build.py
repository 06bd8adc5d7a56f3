"""A program file in, functions that run out, with a cache on disk.

Generated code lives in real files under the cache directory: numba keeps its compiled form beside
them, and a debugger can step through. A file is named by the hash of what it is made from, and
written under another name first, so that many ranks may build the same one at once.

Source that is run never comes from the cache: a file with other content is written anew. numba's
files are pickles that are loaded from there, so a folder that other users can write is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from hipress import settings
from hipress.compll.backends.host import HOST_PRELUDE, body_bytes_source, host_text
from hipress.compll.front import ast, check
from hipress.compll.front.draft import Draft
from hipress.compll.front.graph import Graph
from hipress.compll.front.parse import fail, parse
from hipress.compll.front.signature import Param, ParamValue, signature
from hipress.compll.ir import Kernel
from hipress.compll.passes import derive
from hipress.compll.passes.derive import PLAIN, Pair, Variant
from hipress.errors import BackendError, MissingDependencyError, UsageError

BACKENDS = {b: f"hipress.compll.backends.{b}" for b in ("reference", "cpu", "gpu")}
"""Name of a backend to the module that renders it: `render(kernels, title=...) -> source`."""


MAX_FLOAT = 3.4028235e38
"""The largest float parameter: what binary32 holds."""
MAX_NAME = 100
"""Characters of a function's name: files are named by it, and file systems take 255."""


class Renderer(Protocol):
    """The interface of a backend: kernels in, the source of a module out."""

    def render(self, kernels: Sequence[Kernel], *, title: str) -> str:
        """Returns the source of a module with one entry point per kernel."""


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
        """Returns the program with its parameters set; unknown and missing ones are errors."""
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
        """Returns float parameters in the order that `kernel` takes them."""
        added = {derive.ALPHA: 1.0, derive.RHO: 1.0, derive.DECAY: 1.0}
        values = {**added, **dict(self.values), **extra}
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
        """Returns one line that says what a module holds."""
        numbers = ", ".join(f"{k}={v}" for k, v in self.static.items())
        names = ("feedback", "momentum", "nesterov", "decays")
        wrappers = [name for name in names if getattr(variant, name)]
        return ", ".join([f"{self.program.name}({numbers})", dtype, *wrappers])

    def source(self, backend: str, *, dtype: str = "f32", variant: Variant = PLAIN) -> str:
        """Returns the module that `backend` makes of this program."""
        kernels = self.kernels(dtype=dtype, variant=variant)
        return renderer(backend).render(kernels, title=self.title(dtype, variant))

    def load(self, backend: str, *, dtype: str = "f32", variant: Variant = PLAIN) -> Loaded:
        """Returns the module, rendered, written to the cache and imported."""
        static = tuple(sorted(self.static.items()))
        key = (self.program.text, self.program.name, static, backend, dtype, variant)
        if key not in _loaded:
            kernels = self.kernels(dtype=dtype, variant=variant)
            module = self._module(backend, kernels, self.title(dtype, variant))
            _loaded[key] = Loaded(module, kernels[0], kernels[1])
        return _loaded[key]

    def load_merge(self, worker: Bound, count: int, *, variant: Variant = PLAIN) -> Merge | None:
        """Returns GPU kernels that average frames of `worker` and encode the mean.

        Returns None where that cannot be one kernel: decode and add the frames, then encode.
        """
        values, theirs = dict(self.values), dict(worker.values)
        # A kernel knows a float parameter by its name only.
        floats = {p.name for p in (*self.program.params, *worker.program.params) if p.runtime}
        if any(values[name] != theirs[name] for name in floats & values.keys() & theirs.keys()):
            return None
        # Not by the float parameters, which may change in every step and make the same kernel.
        parts = [(bound.program.text, tuple(bound.static.items())) for bound in (self, worker)]
        key = (*parts, count, variant)
        if key not in _merges:
            frames = derive.Frames(worker.program.pair, worker.static, count)
            kernel = derive.merge_kernel(frames, self.program.pair, self.static, variant=variant)
            _merges[key] = None
            if kernel is not None:
                title = f"{count} frames of {worker.program.name}, averaged and encoded by "
                module = self._module("gpu", (kernel,), title + self.program.name, "merge_gpu")
                _merges[key] = Merge(module, kernel)
        return _merges[key]

    def _module(
        self, backend: str, kernels: Sequence[Kernel], title: str, suffix: str = ""
    ) -> ModuleType:
        if backend == "gpu" and importlib.util.find_spec("triton") is None:
            raise MissingDependencyError("triton", "gpu")
        source = renderer(backend).render(kernels, title=title)
        return import_source(source, f"{self.program.name.lower()}_{suffix or backend}")

    def body_bytes(self) -> Callable[[int], int]:
        """Returns a function from the number of elements to the bytes of a payload's body."""
        kernel = derive.encode_kernel(self.program.pair, self.static)
        count = _host_function("body_bytes", body_bytes_source(kernel))
        params = self.floats(kernel, {})
        return lambda n: int(count(n, params))

    def state_numels(self, kernel: Kernel) -> Callable[[int], list[int]]:
        """Returns a function from the number of elements to those of each state of a kernel."""
        texts = [f"max({host_text(array.length, kernel.params)}, 0)" for array in kernel.states]
        source = f"def numels(n, params):\n    return [{', '.join(texts)}]\n"
        count, params = _host_function("numels", source), self.floats(kernel, {derive.MU: 0.0})
        return lambda n: list(count(n, params))


def _host_function(name: str, source: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    source = "import math\nimport numpy as np\n" + HOST_PRELUDE + source
    exec(compile(source, f"<{name}>", "exec"), scope)  # our own text, from checked values
    return scope[name]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Loaded:
    """A module that runs, and the kernels it was made from."""

    module: ModuleType
    encode: Kernel
    decode: Kernel


@dataclass(frozen=True)
class Merge:
    module: ModuleType
    kernel: Kernel


_loaded: dict[tuple[Any, ...], Loaded] = {}
_merges: dict[tuple[Any, ...], Merge | None] = {}


def renderer(backend: str) -> Renderer:
    if backend not in BACKENDS:
        raise BackendError(f"unknown backend {backend!r}; choices: {', '.join(BACKENDS)}.")
    module: Any = importlib.import_module(BACKENDS[backend])
    return module  # type: ignore[no-any-return]


def import_source(source: str, stem: str) -> ModuleType:
    """Writes generated source to the cache and imports it.

    Raises:
        BackendError: The folder cannot be written, or other users can write it.
    """
    content = source.encode()
    name = f"{stem}_{hashlib.sha256(content).hexdigest()[:16]}"
    folder = settings.cache_dir() / "kernels"
    path = folder / f"{name}.py"
    try:
        # The last by us too: numba would make it with the mode that the umask leaves.
        for one in (folder.parent, folder, folder / "__pycache__"):
            make_folder(one)
        if problem := folder_problem(folder.parent):
            raise BackendError(problem)
        if not path.exists() or path.read_bytes() != content:
            # Not mkstemp, whose file other users cannot read, whatever the umask is.
            temporary = folder / f"{name}.{secrets.token_hex(8)}.tmp"
            with open(temporary, "xb") as file:
                file.write(content)
            os.replace(temporary, path)
    except OSError as error:
        raise BackendError(
            f"cannot write kernels to {folder} ({error.strerror}); "
            "set HIPRESS_CACHE_DIR to a folder that can be written."
        ) from error
    spec = importlib.util.spec_from_file_location(f"hipress_kernels.{name}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # numba looks a cached function's module up by name
    # Not by the loader, which would run a .pyc of the folder, or a file that has changed since.
    exec(compile(content, str(path), "exec"), module.__dict__)
    return module


def make_folder(folder: Path) -> None:
    """Makes a folder of the cache, for this user alone, if there is none."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def folder_problem(cache: Path) -> str:
    """Returns why kernels in a cache folder must not be run; empty if they may.

    Another user who can write there could put machine code of their own beside kernels. Symbolic
    links are followed: what they lead to counts. Root may own a cache that others only read.
    """
    if not hasattr(os, "geteuid"):
        return ""
    kernels = cache / "kernels"
    for folder in (cache, kernels, kernels / "__pycache__"):
        try:
            found = folder.stat()
        except FileNotFoundError:
            continue
        # In a folder such as /tmp nobody can replace what belongs to others.
        is_shared_safely = folder is cache and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (os.geteuid(), 0):
            why = f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
        elif found.st_mode & 0o022 and not is_shared_safely:
            why = f"can be written by other users (mode {stat.S_IMODE(found.st_mode):o})"
        else:
            continue
        return (
            f"the cache folder {folder} {why}, so the kernels in it may be anybody's and are not "
            f"run; delete {kernels} and make the folder writable by you alone (chmod go-w), or set "
            "HIPRESS_CACHE_DIR to a folder of your own."
        )
    return ""


# Programs from files.


def read_program(path: str | Path) -> Program:
    """Reads the program in a file; the other half may be in a file beside it.

    Raises:
        ProgramError: The text is no program.
        UsageError: There is no such file, or it holds half of a program only.
    """
    source = read_source(path)
    functions = {kind: (source, function) for kind, function in _functions(source).items()}
    if not functions:
        raise UsageError(f"{path} holds no function; write XEncode and XDecode (any name for X).")
    if len(functions) == 1:
        [have] = functions
        want, beside = _OTHER[have], _beside(Path(path), have)
        if beside is None:
            name = Path(path).name.replace(have, want)
            raise UsageError(
                f"{path} holds only {have}; put {want} into the same file or into "
                f"{name if name != Path(path).name else 'X' + want + '.pse'} beside it."
            )
        other = read_source(beside)
        functions[want] = (other, _function(other, want))
    return make_program(functions["Encode"], functions["Decode"])


def read_source(path: str | Path) -> ast.Source:
    """Returns the tree of a program file; its meaning is not checked yet."""
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read the program {path} ({error.strerror}); give the path of a .pse file."
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the program {path} is not UTF-8 text; save it as UTF-8.") from error
    return parse(text, file=str(path))


def parse_program(text: str, *, file: str = "<program>") -> Program:
    """Returns a program from text that holds both functions."""
    source = parse(text, file=file)
    encode, decode = (_function(source, kind) for kind in _OTHER)
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
        for p in signature(source, function).params:
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


_OTHER = {"Encode": "Decode", "Decode": "Encode"}


def _functions(source: ast.Source) -> dict[str, ast.Function]:
    found: dict[str, ast.Function] = {}
    for function in source.functions:
        kind = next((k for k in _OTHER if function.name.endswith(k)), None)
        message = ""
        if kind is None:
            message = f"the name {function.name!r} must end in Encode or Decode"
        elif len(function.name) > MAX_NAME:
            message = f"the name has {len(function.name)} characters; at most {MAX_NAME}"
        elif kind in found:
            message = f"this is a second function ending in {kind}; a file holds one program"
        if kind is None or message:
            fail(source.file, source.text, function.pos, message)
        found[kind] = function
    return found


def _function(source: ast.Source, kind: str) -> ast.Function:
    function = _functions(source).get(kind)
    if function is None:
        raise UsageError(f"{source.file} holds no function whose name ends in {kind}; add one.")
    return function


def _beside(path: Path, have: str) -> Path | None:
    """Returns the file that holds the other half of a program, if there is one."""
    beside = path.with_name(path.name.replace(have, _OTHER[have]))
    return beside if beside.name != path.name and beside.exists() else None


# One function of a program without its other half.


def read_any(path: str | Path) -> Program:
    """Reads the program in a file, or what there is of it (see `Half`)."""
    source = read_source(path)
    functions = _functions(source)
    if len(functions) != 1 or _beside(Path(path), *functions):
        return read_program(path)
    [(have, function)] = functions.items()
    params = signature(source, function).params
    # The pair holds the one function twice; `BoundHalf` never uses the one that is missing.
    pair = Pair((source, function), (source, function))
    return Half(function.name.removesuffix(have) or "Program", pair, params, source.text)


@dataclass(frozen=True)
class Half(Program):
    """A program of which only one function is there.

    An encode function alone can be checked, shown and compiled. A decode function alone can be
    checked where it declares the sizes of what it extracts; its kernels need the layout of the
    payload, which the encode function defines.
    """

    @property
    def function(self) -> ast.Function:
        return self.pair.encode[1]

    @property
    def missing(self) -> str:
        is_encode = self.function.name.endswith("Encode")
        return self.function.name[:-6] + ("Decode" if is_encode else "Encode")

    def bind(self, values: Mapping[str, Any]) -> BoundHalf:
        bound = super().bind(values)
        return BoundHalf(self, bound.values)


@dataclass(frozen=True)
class BoundHalf(Bound):
    """Half of a program with its parameters, which makes one kernel at most."""

    program: Half

    def kernels(self, *, dtype: str = "f32", variant: Variant = PLAIN) -> tuple[Kernel, ...]:
        half = self.program
        if half.missing.endswith("Encode"):
            self.check()
            raise UsageError(
                f"{half.function.name} alone gives no kernel: the layout of the payload comes from "
                f"{half.missing}; put that into the same file or beside it."
            )
        if variant.feedback:
            raise UsageError(
                f"error feedback needs {half.missing} too; put it into the same file or beside it."
            )
        return (derive.encode_kernel(half.pair, self.static, dtype=dtype, variant=variant),)

    def check(self) -> None:
        source, function = self.program.pair.encode
        if self.program.missing.endswith("Decode"):
            derive.encode_kernel(self.program.pair, self.static)
        else:
            check.evaluate(source, function, Draft(Graph()), params=self.static)
