"""Emitted packages: they stand alone, equal `hipress.codec` byte for byte, and can be compiled."""

from __future__ import annotations

import ast
import importlib
import inspect
import keyword
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import hipress
from hipress.codecs import frame
from hipress.compll.build import parse_program, read_any, read_program
from hipress.compll.passes.derive import Variant
from hipress.compll.tools.emit import MARK, MAX_ARGS, Package, package_name
from hipress.errors import ProgramError, UsageError
from tests.grid import full, thinned

SEED = Path(__file__).parent / "programs" / "TernGradEncode.pse"
SIZES = (0, 1, 7, 1001)


def write(folder: Path, path: Path, values: dict[str, int | float], **options) -> Package:
    package = Package(bound=read_program(path).bind(values), **options)
    assert package.write(folder).notes == ()
    return package


def import_from(folder: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the seed's program with error feedback was written."""
    folder = tmp_path_factory.mktemp("emitted")
    write(folder, SEED, {"bitwidth": 2}, variant=Variant(feedback=True))
    return folder


@pytest.fixture(scope="module")
def terngrad(folder) -> ModuleType:
    return import_from(folder, "terngrad")


@pytest.fixture(scope="module")
def codec() -> hipress.Codec:
    return hipress.codec(str(SEED), bitwidth=2, ef=True)


def gradient(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


# The same bytes as hipress.codec.


@pytest.mark.parametrize(
    "dtype", thinned([torch.float32, torch.float16, torch.bfloat16], (torch.float32,))
)
@pytest.mark.parametrize("numel", SIZES)
def test_frames_and_residuals_equal_those_of_the_codec(terngrad, codec, numel, dtype):
    x = gradient(numel, dtype)
    state = codec.init(x, seed=2**40 + 5, stream=3)
    residual = torch.zeros(numel)
    for step in range(3):
        expected = codec.encode(x, state)
        payload = terngrad.encode(x, residual, step=step, seed=2**40 + 5, stream=3)
        assert torch.equal(payload, expected)
        assert torch.equal(residual, state["residual"])
        assert payload.numel() == terngrad.wire_bytes(numel)
    decoded = codec.decode(payload, alpha=0.25)
    assert torch.equal(terngrad.decode(payload, numel, alpha=0.25), decoded)
    total, expected = torch.ones(numel), torch.ones(numel)
    terngrad.decode_add(payload, total, alpha=-1.5)
    codec.decode(payload, out=expected, add=True, alpha=-1.5)
    assert torch.equal(total, expected)


def test_the_plain_functions_are_the_same(terngrad):
    x = gradient(100).reshape(4, 25).t()  # any shape and strides
    from_op, from_function = torch.zeros(100), torch.zeros(100)
    payload = terngrad.encode(x, from_op, step=1)
    assert torch.equal(payload, terngrad._wrapper.encode(x, from_function, step=1))
    assert torch.equal(from_op, from_function) and from_op.any()


def test_a_nan_reaches_the_other_side_and_no_residual(terngrad, codec):
    x, residual = gradient(100), torch.zeros(100)
    x[3] = float("inf")
    payload = terngrad.encode(x, residual, step=0)
    assert residual.isfinite().all()
    assert terngrad.decode(payload, 100).isnan().all() and codec.decode(payload).isnan().all()


# Under torch.compile.


def exchange(x, residual, step):
    payload = torch.ops.hipress.terngrad_encode(x, residual, step=step, stream=1)
    total = torch.ones(x.numel())
    torch.ops.hipress.terngrad_decode_add(payload, total, alpha=0.5)
    return torch.ops.hipress.terngrad_decode(payload, x.numel()), total


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_operators_compile_as_one_graph(terngrad, backend):
    torch._dynamo.reset()
    compiled = torch.compile(exchange, fullgraph=True, backend=backend)
    residual, held = torch.zeros(1001), torch.zeros(1001)
    for step in range(3):
        expected = exchange(gradient(1001), residual, step)
        found = compiled(gradient(1001), held, step)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert torch.equal(held, residual) and held.any()
    for numel in (8, 77, 4096):  # other sizes, now as a symbol
        residual, held = torch.zeros(numel), torch.zeros(numel)
        expected = exchange(gradient(numel), residual, 9)
        assert torch.equal(compiled(gradient(numel), held, 9)[0], expected[0])
        assert torch.equal(held, residual)


def test_the_functions_of_the_package_compile_too(terngrad):
    def both(x, residual):
        return terngrad.decode(terngrad.encode(x, residual, step=4), x.numel())

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(gradient(50), torch.zeros(50)), both(gradient(50), torch.zeros(50)))


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch's own, from its checker
def test_opcheck(terngrad):
    ops = torch.ops.hipress
    payload = terngrad.encode(gradient(100), torch.zeros(100), step=0)
    for op, args, options in (
        (ops.terngrad_encode, (gradient(100), torch.zeros(100)), {"step": 3, "seed": 1}),
        (ops.terngrad_decode, (payload, 100), {"alpha": 2.0}),
        (ops.terngrad_decode_add, (payload, torch.ones(100)), {}),
    ):
        found = torch.library.opcheck(op.default, args, options)
        assert set(found.values()) == {"SUCCESS"}


def run_fresh(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@full
def test_in_a_fresh_process_the_import_alone_makes_the_operators(folder):
    code = """
import sys, torch, terngrad
ops = torch.ops.hipress
names = [n for n in ("encode", "decode", "decode_add") if hasattr(ops, "terngrad_" + n)]
x, residual = torch.arange(10.0), torch.zeros(10)
payload = ops.terngrad_encode(x, residual, step=0)
decoded = ops.terngrad_decode(payload, 10)
assert torch.equal(decoded + residual, x), (decoded, residual)
print(*names, "hipress" in sys.modules)
"""
    assert run_fresh(code, folder) == "encode decode decode_add False\n"


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@full
def test_inductor(folder):
    code = """
import torch, terngrad
def both(x, residual):
    return terngrad.decode(terngrad.encode(x, residual, step=4), x.numel())
x, residual, held = torch.arange(50.0), torch.zeros(50), torch.zeros(50)
compiled = torch.compile(both, fullgraph=True)
print(torch.equal(compiled(x, held), both(x, residual)), torch.equal(held, residual))
"""
    assert run_fresh(code, folder) == "True True\n"


# What is refused.


def test_the_header_is_that_of_a_frame(terngrad, codec):
    payload = terngrad.encode(gradient(100), torch.zeros(100), step=7).numpy()
    header, body = frame.read_single(payload, codec.codec_hash)
    assert (header.step, header.flags, body.numel) == (7, 0, 100)
    assert terngrad._wrapper._HEAD.size == frame.frame_bytes([0])


def test_every_changed_byte_of_the_header_is_refused(terngrad):
    payload = terngrad.encode(gradient(100), torch.zeros(100), step=0)
    free = {*range(8, 16)}  # the step, which is the sender's own
    for place in set(range(80)) - free:
        damaged = payload.clone()
        damaged[place] ^= 0x80
        with pytest.raises(ValueError, match="the payload has"):
            terngrad.decode(damaged, 100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, p, x: t.decode(p[:-16], 100), "that of 100 elements has"),
        (lambda t, p, x: t.decode(p, 164), "that of 164 elements has"),
        (lambda t, p, x: t.decode(p, 101), "number of elements 100 where"),
        (lambda t, p, x: t.decode(p, -1), "numel is -1"),
        (lambda t, p, x: t.decode(p.view(2, -1), 100), "2 dimensions"),
        (lambda t, p, x: t.decode(p.to(torch.int16), 100), "payload is torch.int16"),
        (lambda t, p, x: t.decode_add(p, torch.zeros(200)[::2]), "not contiguous"),
        (lambda t, p, x: t.decode_add(p, torch.zeros(100).double()), "out is torch.float64"),
        (lambda t, p, x: t.encode(x.double(), torch.zeros(100), step=0), "x is torch.float64"),
        (lambda t, p, x: t.encode(x, torch.zeros(99), step=0), "residual has 99 elements"),
        (lambda t, p, x: t.encode(x, torch.zeros(200)[::2], step=0), "residual has 100 elements"),
        (lambda t, p, x: t.encode(x, torch.zeros(100).half(), step=0), "residual is torch.float16"),
        (
            lambda t, p, x: t._wrapper.encode(x.to("meta"), torch.zeros(100), step=0),
            "x is on meta; these kernels run on the CPU and on CUDA devices: use .cpu()",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(terngrad, call, message):
    payload = terngrad.encode(gradient(100), torch.zeros(100), step=0)
    with pytest.raises(ValueError, match=message):
        call(terngrad, payload, gradient(100))


def test_a_body_that_the_program_refuses(terngrad, codec):
    payload = terngrad.encode(gradient(100), torch.zeros(100), step=0)
    payload[80] = 4  # another bitwidth
    with pytest.raises(ValueError, match="the payload was made with another 'bitwidth'"):
        terngrad.decode(payload, 100)


def test_an_unaligned_payload_is_read_all_the_same(terngrad):
    payload = terngrad.encode(gradient(100), torch.zeros(100), step=0)
    room = torch.zeros(payload.numel() + 1, dtype=torch.uint8)
    room[1:] = payload
    assert torch.equal(terngrad.decode(room[1:], 100), terngrad.decode(payload, 100))


# Names and texts that come from whoever wrote the program.

NAMES = (
    "def lambda import None True async match type self keyset mode op kernel ctx x out alpha mu "
    "step seed stream payload numel torch np body encode decode float_ _ __ __debug__ __name__ "
    "_encode _body _torch _wrapper p_x p_def print tuple residual momentum Ellipsis args kwargs"
).split()
HOSTILE = '\n// """ \'\'\' \\ {braces} %s \x0c \u2028 \U0001f600 "); import os; os.abort() #\n'


def names_program() -> str:
    fields = "".join(f"    float {name} = {k}.5;\n" for k, name in enumerate(NAMES))
    total = " + ".join(f"p.{name}" for name in NAMES)
    return f"""{HOSTILE}param P {{
{fields}}}
void ClassEncode(float* gradient, uint8* compressed, P p, float global, inout float* class,
                 inout float* self, inout float* x) {{
    float s = {total} + global;
    float* q = map(gradient, self, [&](float g, float h) -> float {{ return g * s + h; }});
    self = map(self, [&](float h) -> float {{ return h + 1.0; }});
    class = map(class, [&](float h) -> float {{ return h + 2.0; }});
    x = map(x, class, [&](float h, float c) -> float {{ return h + c; }});
    compressed = concat(q);
}}
void ClassDecode(uint8* compressed, float* gradient, P p, float global) {{
    float q[gradient.size];
    extract(compressed, q);
    gradient = q;
}}
"""


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> tuple[Path, ModuleType]:
    """A program whose names are as awkward as the grammar allows, and its package."""
    folder = tmp_path_factory.mktemp("named")
    path = folder / "class.pse"
    path.write_text(names_program(), encoding="utf-8")
    write(
        folder, path, {"global": 0.5}, variant=Variant(momentum=True), mu=0.5, required=("global",)
    )
    return path, import_from(folder, "class_codec")


def test_awkward_names_become_arguments(named):
    _, package = named
    options = inspect.signature(package.encode).parameters
    assert list(options)[:5] == ["x", "p_class", "p_self", "p_p_p_x", "p_momentum"]
    assert {"p_def", "mode", "p___debug__", "p__body", "mu"} <= set(options)
    for name in options:
        assert name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
    assert options["p_global"].default is inspect.Parameter.empty  # it has no default
    assert options["mu"].default == 0.5 and options["mode"].default == NAMES.index("mode") + 0.5
    assert "`p_def` is the program's `def`." in package.encode.__doc__


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
@full
def test_awkward_names_work(named, backend):
    path, package = named
    options = {"p_global": 7.0, "self": 11.0, "mode": 12.0, "p_def": 13.0, "mu": 0.25}
    values = {"global": 7.0, "self": 11.0, "mode": 12.0, "def": 13.0}

    def encode(x, states):
        return package.encode(x, *states, **options)

    torch._dynamo.reset()
    run = encode if backend == "none" else torch.compile(encode, fullgraph=True, backend=backend)
    inner = ", ".join(f"{name}={value}" for name, value in values.items())
    codec = hipress.codec(f"momentum('{path}'({inner}), mu=0.25, nesterov=false)")
    x, states = gradient(100), [torch.zeros(100) for _ in range(4)]
    state = codec.init(x)
    for _ in range(2):
        assert torch.equal(run(x, states), codec.encode(x, state))
    assert torch.equal(states[1], state["self"]) and torch.equal(states[3], state["momentum"])
    floats = {name: value for name, value in options.items() if name != "mu"}
    payload = codec.encode(x, state)
    assert torch.equal(package.decode(payload, 100, **floats), codec.decode(payload))
    with pytest.raises(ValueError, match="codec hash"):
        package.decode(payload, 100, **{**floats, "mode": 12.5})


def test_the_text_of_a_program_is_data(named):
    path, package = named
    assert package._wrapper.PROGRAM == path.read_text("utf-8")
    folder = Path(package.__file__).parent
    for file in folder.glob("*.py"):
        text = file.read_text("utf-8")
        assert text.isascii() and not any(
            isinstance(node, ast.Attribute) and node.attr == "abort"
            for node in ast.walk(ast.parse(text))
        )


@pytest.mark.parametrize(
    "name", ['a"', "a'b", "a;b", "a\nb", "a b", "1a", "a-b", "a.b", "a()", "\u00e4", "a\\", "a=1,b"]
)
def test_the_grammar_keeps_other_names_out(name):
    for text in (
        f"void XEncode(float* g, uint8* c, float {name}) {{ c = concat(g); }}",
        f"void {name}Encode(float* g, uint8* c) {{ c = concat(g); }}",
        f"param P {{ float {name} = 1.0; }}\nvoid XEncode(float* g, uint8* c) {{ c = concat(g); }}",
    ):
        with pytest.raises(ProgramError):
            parse_program(text + "void XDecode(uint8* c, float* g) { extract(c, g); }")


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("TernGrad", "terngrad"),
        ("Program", "program"),
        ("None", "none"),
        ("Class", "class_codec"),
        ("TORCH", "torch_codec"),
        ("numpy", "numpy_codec"),
        ("Json", "json_codec"),
        ("__main__", "codec__main__"),
    ],
)
def test_package_names_hide_nothing(program, name):
    assert package_name(program) == name
    assert not keyword.iskeyword(name) and name not in sys.stdlib_module_names


# Parts and files.


def test_more_arguments_than_torch_takes_is_an_error():
    fields = "".join(f"float f{k} = 0.5; " for k in range(MAX_ARGS))
    text = f"param P {{ {fields} }}\n" + (
        "void XEncode(float* g, uint8* c, P p) { c = concat(g); }"
        "void XDecode(uint8* c, float* g, P p) { float v[g.size]; extract(c, v); g = v; }"
    )
    package = Package(bound=parse_program(text).bind({}))
    assert "def encode(" in package.text("body")
    with pytest.raises(UsageError, match="would take 67 arguments; torch allows 64"):
        package.text("registration")


def test_an_unknown_framework_lists_the_choices():
    with pytest.raises(UsageError, match="framework 'mxnet' is not known; choices: torch"):
        Package(bound=read_program(SEED).bind({"bitwidth": 2}), framework="mxnet")


def test_missing_and_foreign_parts_are_told(tmp_path):
    package = Package(bound=read_program(SEED).bind({"bitwidth": 2}))
    written = package.write(tmp_path, ["wrapper"])
    assert [p.name for p in written.files] == ["wrapper.py"]
    assert [n.split("; ")[0][-16:] for n in written.notes] == ["is not there yet"]
    other = Package(bound=read_program(SEED).bind({"bitwidth": 4}))
    assert other.write(tmp_path, ["body"]).notes == ()
    notes = package.write(tmp_path, ["registration"]).notes
    assert len(notes) == 1 and "body.py is of another build; write it with" in notes[0]
    assert package.write(tmp_path, ["body"]).notes == ()
    (tmp_path / "terngrad" / "launch.py").unlink()
    notes = package.write(tmp_path, ["registration"]).notes
    assert len(notes) == 1 and "launch.py is not there yet; write it with" in notes[0]


def test_the_body_is_for_cpu_and_gpu(tmp_path):
    package = Package(bound=read_program(SEED).bind({"bitwidth": 2}))
    written = package.write(tmp_path, ["body"])
    assert [p.name for p in written.files] == ["body.py", "body_gpu.py", "launch.py"]
    assert written.notes == ()
    cpu, gpu, launch = (p.read_text("utf-8") for p in written.files)
    assert "@njit" in cpu and "@triton.jit" in gpu and "class Kernels:" in launch
    for text in (cpu, gpu, launch):
        assert MARK in text.partition("\n")[0] and not re.search(r"(import|from) hipress", text)
    (tmp_path / "terngrad" / "launch.py").write_text("KEEP = 1\n")
    with pytest.raises(UsageError, match="launch.py exists and was not made by HiPress CompLL"):
        package.write(tmp_path, ["body"])


def test_a_program_that_no_gpu_runs_has_a_body_for_the_cpu(tmp_path):
    text = (
        "void XEncode(float* g, uint8* c) { per (262144) { float m = reduce(g, 0.0, max); }"
        " c = concat(m); }"
        "void XDecode(uint8* c, float* g) { float m[blocks(g.size, 262144)]; extract(c, m);"
        " per (262144) { g = map(range(g.size), [&](int i) -> float { return m; }); } }"
    )
    package = Package(bound=parse_program(text).bind({}))
    written = package.write(tmp_path)
    assert [p.name for p in written.files] == ["body.py", "wrapper.py", "__init__.py"]
    (note,) = written.notes
    assert note.startswith("no kernels for a GPU: a block of 262144 elements does not fit")
    assert "_HAS_GPU = False\n" in package.text("wrapper")


def test_a_file_of_someone_else_is_kept(tmp_path):
    theirs = tmp_path / "terngrad" / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("KEEP = 1\n")
    package = Package(bound=read_program(SEED).bind({"bitwidth": 2}))
    with pytest.raises(UsageError, match="exists and was not made by HiPress CompLL"):
        package.write(tmp_path)
    assert theirs.read_text() == "KEEP = 1\n" and len(list(theirs.parent.iterdir())) == 1


def test_another_program_of_the_same_name_is_not_overwritten(tmp_path):
    folder, text = tmp_path / "ops", SEED.read_text("utf-8")
    Package(bound=read_program(SEED).bind({"bitwidth": 2})).write(folder)
    before = {path: path.read_text("utf-8") for path in (folder / "terngrad").glob("*.py")}
    other = "void TERNGRADEncode(float* g, uint8* c) { c = concat(g); }\n" + (
        "void TERNGRADDecode(uint8* c, float* g) { float* v; extract(c, v); g = v; }\n"
    )
    (tmp_path / "mine.pse").write_text(other)
    (tmp_path / SEED.name).write_text(text.replace("// ", "//  "))
    (tmp_path / SEED.name.replace("Encode", "Decode")).write_text(
        SEED.with_name(SEED.name.replace("Encode", "Decode")).read_text("utf-8")
    )
    mine = Package(bound=read_program(tmp_path / "mine.pse").bind({}))
    message = (
        r"was built of the program TernGrad in TernGradEncode.pse, and this is TERNGRAD in "
        r"mine.pse; rename its functions, delete the folder .*terngrad or choose another -o"
    )
    with pytest.raises(UsageError, match=message):
        mine.write(folder)
    assert all(path.read_text("utf-8") == text for path, text in before.items())
    changed = Package(bound=read_program(tmp_path / SEED.name).bind({"bitwidth": 4}))
    assert changed.write(folder).notes == ()  # the same program, edited


def test_a_lone_encode_function_has_a_body(tmp_path):
    lone = tmp_path / SEED.name
    lone.write_text(SEED.read_text("utf-8"), encoding="utf-8")
    package = Package(bound=read_any(lone).bind({"bitwidth": 2}))
    package.write(tmp_path, ["body"])
    with pytest.raises(UsageError, match="wrapper and registration need TernGradDecode too"):
        package.write(tmp_path)
    alone = tmp_path / "terngrad" / "body.py"
    assert "def encode(" in alone.read_text() and "def decode(" not in alone.read_text()
    # Without compiling it again: the same kernel as in the whole program, interpreted.
    whole = Package(bound=read_any(SEED).bind({"bitwidth": 2})).text("body")
    start = whole.index("def encode(")
    assert whole[start : whole.index("\n@njit", start)].strip() in alone.read_text()


def test_what_a_half_cannot_do(tmp_path):
    lone = tmp_path / SEED.name
    lone.write_text(SEED.read_text("utf-8"), encoding="utf-8")
    with pytest.raises(UsageError, match="error feedback needs TernGradDecode too"):
        read_any(lone).bind({"bitwidth": 2}).kernels(variant=Variant(feedback=True))
    decode = tmp_path / "ADecode.pse"
    decode.write_text("void ADecode(uint8* c, float* g) { float v[g.size]; extract(c, v); g = v; }")
    bound = read_any(decode).bind({})
    bound.check()
    with pytest.raises(UsageError, match="ADecode alone gives no kernel.*AEncode"):
        bound.kernels()


@full
def test_scratch_memory_is_kept_for_the_next_call(terngrad):
    residual = torch.zeros(300_000)
    terngrad.encode(gradient(300_000), residual, step=0)
    held = terngrad._wrapper._local.scratch
    terngrad.encode(gradient(100), torch.zeros(100), step=0)
    assert terngrad._wrapper._local.scratch is held and held.dtype == np.uint8
