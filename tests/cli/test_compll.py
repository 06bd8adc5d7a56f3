"""`hipress compll` as a user meets it: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import pytest

import hipress
from hipress.cli.compll import NUMEL
from hipress.cli.main import main

PROGRAMS = Path(__file__).parent.parent / "compll" / "programs"
ENCODE, DECODE = PROGRAMS / "TernGradEncode.pse", PROGRAMS / "TernGradDecode.pse"
NOTE = "bitwidth has no default; using 2 (set it with --param bitwidth=...)"


@pytest.fixture
def run(capsys):
    """Return a function that runs `hipress compll` and returns exit code, stdout and stderr."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["compll", *map(str, args)])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return run


@pytest.fixture
def lone(tmp_path) -> Path:
    """The seed's encode function in a folder of its own."""
    return Path(shutil.copy(ENCODE, tmp_path))


def write(tmp_path: Path, text: str, name: str = "my.pse") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


# check


def test_check_says_what_was_checked(run):
    code, out, err = run("check", ENCODE)
    assert (code, err) == (0, "")
    first, *rows = out.splitlines()
    assert first == f"{ENCODE}: ok (TernGradEncode and TernGradDecode; bitwidth = 1, 2, 4, 8)"
    wire = hipress.codec(str(ENCODE), bitwidth=2).wire_bytes(NUMEL)
    assert [row.split()[0] for row in rows] == [
        "parameters",
        "encode",
        "encode,",
        "decode",
        "decode_add",
        "wire",
    ]
    assert "2 passes over the gradient; reads 8, writes 0.25 bytes/element" in rows[1]
    assert f"{wire:,} bytes for 1,000,000 elements, 16.0 times smaller" in rows[-1]


def test_check_with_a_value_tries_only_that(run):
    code, out, _ = run("check", DECODE, "--param", "bitwidth=8")
    assert code == 0 and out.startswith(f"{DECODE}: ok (TernGradEncode and TernGradDecode)\n")
    assert "uint8 bitwidth = 8" in out


@pytest.mark.parametrize("name", hipress.codecs.names())
def test_check_takes_the_name_of_a_codec(run, name):
    code, out, _ = run("check", name)
    assert code == 0 and out.startswith(f"{name}: ok (")


def test_check_shows_the_place_of_an_error(run, tmp_path):
    path = write(tmp_path, "void XEncode(float* g, uint8* c) {\n    c = concat(gg);\n}\n")
    code, out, err = run("check", path)
    assert (code, out) == (2, "")
    assert err.startswith(f"hipress: {path}:2:16: 'gg' is not defined")
    assert err.endswith("    c = concat(gg);\n               ^\n")


def test_check_tells_an_error_that_every_width_has(run, tmp_path):
    path = write(tmp_path, "void XEncode(float* g, uint8* c, uint8 w) { uint<w>* q = g; }")
    code, _, err = run("check", path)
    assert code == 2 and "never assigns 'c'" in err


def test_check_leaves_out_widths_that_do_not_fit(run, tmp_path):
    text = (
        "void XEncode(float* g, uint8* c, int block) { per (block) { float m = reduce(g, 0.0, max);"
        " } c = concat(m); }"
        "void XDecode(uint8* c, float* g, int block) { float m[blocks(g.size, block)];"
        " extract(c, m); per (block) { g = map(range(g.size), [&](int i) -> float { return m; }); }"
        " }"
    )
    code, out, err = run("check", write(tmp_path, text))
    assert code == 0, err
    assert "(XEncode and XDecode; block = 8)" in out


def test_check_of_a_lone_function(run, lone, tmp_path):
    code, out, _ = run("check", lone)
    assert code == 0 and out.startswith(f"{lone}: ok (TernGradEncode; bitwidth = 1, 2, 4, 8)\n")
    assert "wire" in out and "decode" not in out
    text = "void ADecode(uint8* c, float* g) { float v[g.size]; extract(c, v); g = v; }"
    code, out, _ = run("check", write(tmp_path, text, "ADecode.pse"))
    assert code == 0 and "ok (ADecode)" in out and "none without AEncode" in out


# show


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("ast", "  Function void TernGradEncode  1:1\n"),
        ("passes", "pass 1: loop over n\n"),
        ("reference", '"""Reference kernels of TernGrad(bitwidth=2), f32'),
        ("cpu", "@njit(**_JIT)\n"),
        ("gpu", "@triton.jit\n"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_show(run, lone, stage, expected, alone):
    code, out, err = run("show", lone if alone else ENCODE, "--stage", stage)
    assert code == 0 and expected in out
    assert err == ("" if stage == "ast" else f"note: {NOTE}\n")
    if stage in ("reference", "cpu", "gpu"):
        ast.parse(out)
        name = "decode_sizes" if stage == "gpu" else "decode"
        assert (f"def {name}(" in out) == (not alone)


def test_show_takes_wrappers_parameters_and_dtypes(run):
    code, out, err = run("show", "onebit", "--ef", "--momentum", "0.9", "--dtype", "bf16")
    assert (code, err) == (0, "")
    assert out.startswith("OneBit(block=1024, means=1), bf16, feedback, momentum, nesterov\n")
    assert "\n\nencode: 1 pass" in out
    assert "x         bfloat16[n]" in out and "@mu * momentum[i]" in out
    code, out, _ = run("show", "onebit", "--param", "block=64")
    assert code == 0 and "in blocks of 64" in out


def test_show_gpu_needs_no_triton(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    code, out, err = run("show", "topk", "--stage", "gpu", "--ef", "--dtype", "f16")
    assert (code, err) == (0, "")
    assert out.startswith('"""GPU kernels of TopK(') and ", f16, feedback, made by HiPress" in out


def test_show_ast_needs_no_correct_program(run, tmp_path):
    path = write(tmp_path, "void XEncode(float* g, uint8* c) { c = concat(gg); }")
    code, out, _ = run("show", path, "--stage", "ast")
    assert code == 0 and "Name gg  1:47" in out


# build


def test_build_writes_a_package(run, tmp_path):
    code, out, err = run("build", ENCODE, "-o", tmp_path, "--ef")
    assert (code, err) == (0, f"note: {NOTE}\n")
    names = ("body.py", "body_gpu.py", "launch.py", "wrapper.py", "__init__.py")
    files = [tmp_path / "terngrad" / name for name in names]
    assert out.splitlines()[:5] == [f"wrote {file}" for file in files]
    assert out.splitlines()[5].startswith("import terngrad, with ")
    for file in files:
        assert "made by HiPress CompLL" in file.read_text().splitlines()[0]
        ast.parse(file.read_text())
    assert "feedback" in files[0].read_text().splitlines()[0]
    imports = {
        name.split(".")[0]
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import)
        for name in (alias.name for alias in node.names)
    }
    ours = {"functools", "hashlib", "importlib", "math", "os", "struct", "threading", "zlib"}
    assert imports == {*ours, "numpy", "torch", "triton"}


def test_the_original_commands(run, tmp_path):
    for file in (ENCODE, DECODE):
        code, out, _ = run("build", file, "-b", "-o", tmp_path)
        names = ("body.py", "body_gpu.py", "launch.py")
        lines = [f"wrote {tmp_path / 'terngrad' / name}" for name in names]
        assert code == 0 and out.splitlines() == lines
    code, _, err = run("build", ENCODE, "-w", "-r", "-f", "torch", "-o", tmp_path)
    assert (code, err) == (0, f"note: {NOTE}\n")
    assert len(list((tmp_path / "terngrad").iterdir())) == 5


def test_build_of_single_parts_says_what_is_missing(run, tmp_path):
    code, _, err = run("build", "onebit", "-w", "-o", tmp_path)
    body = tmp_path / "onebit" / "body.py"
    assert code == 0
    assert err == f"note: {body} is not there yet; write it with hipress compll build -b.\n"
    assert [file.name for file in body.parent.iterdir()] == ["wrapper.py"]


def test_build_of_a_lone_function(run, lone, tmp_path):
    code, out, _ = run("build", lone, "-b", "-o", tmp_path)
    assert code == 0 and (tmp_path / "terngrad" / "body.py").exists()
    code, out, err = run("build", lone, "-o", tmp_path)
    assert (code, out) == (2, "") and "need TernGradDecode too" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["build", ENCODE, "-f", "mxnet"], "framework 'mxnet' is not known; choices: torch."),
        (["build", ENCODE, "--param", "bitwidth"], "--param 'bitwidth' is not NAME=VALUE"),
        (["build", ENCODE, "--param", "bitwidth=x"], "--param 'bitwidth=x' is not NAME=VALUE"),
        (
            ["build", ENCODE, "--param", "bitwidth=7"],
            "a uint cannot have 7 bits; allowed: 1, 2, 3, 4, 5, 6, 8",
        ),
        (["build", ENCODE, "--param", "bitwidth=999"], "bitwidth=999 does not fit uint8"),
        (["build", ENCODE, "--param", "bits=2"], "has no parameter 'bits'; it takes: bitwidth"),
        (["show", "topk", "--param", "ratio=1e999"], "ratio=inf must be a finite number"),
        (["show", "onebit", "--momentum", "1.0"], "--momentum 1.0 must be from 0 to 0.999999"),
        (
            ["show", "onebti"],
            "no program 'onebti' (did you mean 'onebit'?); give the path of a .pse",
        ),
        (
            ["check", "topk(ratio=0.1)"],
            "'topk(ratio=0.1)' is a codec expression; give the program "
            "alone, topk, and its parameters as --param NAME=VALUE (show and build also take --ef "
            "and --momentum).",
        ),
        (["show", "momentum(ef(onebit))", "--stage", "ast"], "give the program alone, onebit, "),
        (["build", "my.pse(bits=2)"], "give the program alone, my.pse, and its parameters as "),
        (["check", "nowhere.pse"], "cannot read the program nowhere.pse"),
        (["check", PROGRAMS], "cannot read the program"),
        (["build", "onebit", "-o", ENCODE], "cannot write to"),
    ],
)
def test_refusals_are_one_sentence(run, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert lines[0].startswith("hipress: ") and message in lines[0]
    assert "Traceback" not in err and not list(tmp_path.iterdir())


def test_a_parameter_given_twice(run):
    code, _, err = run("show", "onebit", "--param", "block=8", "--param", "block=16")
    assert code == 2 and "--param block is given twice" in err


def test_a_folder_with_the_name_of_a_codec_does_not_hide_it(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("build", "onebit")[0] == 0  # writes the folder onebit
    assert run("check", "onebit")[0] == 0
