"""From an expression to a codec: the table, options, wrappers, programs in files, refusals."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hipress
from hipress.codecs import Codec, codec, describe, names
from hipress.codecs.program import ProgramCodec
from hipress.errors import ProgramError, UsageError
from tests.codecs.cases import CASES, HEAD, Case, gaussian
from tests.codecs.generic import Feedback, Momentum
from tests.grid import thinned

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "compll" / "programs"
"""The program that HiPress published, one function per file."""
NAMES = ("none", "fp16", "bf16", "onebit", "minmax", "terngrad", "topk")


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about names, not kernels: nothing is compiled unless one asks for it."""
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")
    monkeypatch.setenv("HIPRESS_THREADS", "1")


def payload_of(c: Codec, x: torch.Tensor, **init: int) -> torch.Tensor:
    return c.encode(x, c.init(x, **init))


def refusal(expr: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        codec(expr, **options)
    return str(error.value)


# --- the table -----------------------------------------------------------------------------------


def test_names() -> None:
    found = names()
    assert set(NAMES) <= set(found) and len(set(found)) == len(found)
    found.clear()
    assert set(NAMES) <= set(names())


def test_public_names() -> None:
    assert hipress.codec is codec
    assert hipress.codecs.names is names
    assert isinstance(hipress.codec("none"), hipress.Codec)


@pytest.mark.parametrize("name", names())
def test_describe(name: str) -> None:
    found = describe(name)
    assert found.name == name
    assert found.summary and found.paper
    assert "Encode(" in found.program and "Decode(" in found.program
    if name in NAMES:
        assert found.feedback == (name in ("onebit", "topk"))
        assert found.feedback == ("residual" in codec(name).init(torch.empty(3)))


def test_describe_lists_options_with_their_defaults() -> None:
    assert describe("onebit").options["block"] == (
        "1024: elements that share a scale (a multiple of 8 from 64 to 65536)"
    )
    assert dict(describe("minmax").options) == {"bits": "2: bits of an element (1, 2, 4 or 8)"}
    assert set(describe("topk").options) == {"ratio", "exact", "sample", "workers"}
    assert not describe("none").options


@pytest.mark.parametrize(
    "name, same",
    [
        ("onebit", "onebit(block=1024)"),
        ("minmax", "minmax(bits=2)"),
        ("terngrad", "terngrad(clip=2.5)"),
        ("topk", "topk(ratio=0.01, exact=false, sample=0.01, workers=1)"),
    ],
)
def test_defaults(name: str, same: str) -> None:
    assert codec(name).codec_hash == codec(same).codec_hash


# --- expressions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.expr)
def test_name_makes_the_same_codec(case: Case) -> None:
    first = codec(case.expr)
    again = codec(first.name)
    x = gaussian(130)
    assert again.name == first.name and repr(first) == f"codec({first.name!r})"
    assert torch.equal(payload_of(again, x), payload_of(first, x))
    assert again.init(x).keys() == first.init(x).keys()


@pytest.mark.parametrize(
    "expr, same",
    [
        ("ef(onebit)", "onebit"),
        ("ef(ef(fp16))", "ef(fp16)"),
        ("ef(ef(ef(topk)))", "topk"),
        ("ef(onebit(ef=false))", "onebit"),
        ("fp16(ef=true)", "ef(fp16)"),
        ("ef(fp16(ef=true))", "ef(fp16)"),
        ("onebit(ef=true)", "onebit"),
        (" onebit ( block = 64 ) ", "onebit(block=64)"),
        ("momentum(ef(onebit))", "momentum(onebit, mu=0.9)"),
    ],
)
def test_two_ways_to_say_it(expr: str, same: str) -> None:
    a, b, x = codec(expr), codec(same), gaussian(5000)
    states = a.init(x, seed=3), b.init(x, seed=3)
    assert states[0].keys() == states[1].keys()
    for step in range(3):
        g = gaussian(5000, seed=step)
        assert torch.equal(a.encode(g, states[0]), b.encode(g, states[1]))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    "expr, state",
    [
        ("onebit", {"residual"}),
        ("onebit(ef=false)", set()),
        ("topk", {"residual", "seed", "stream", "step"}),
        ("topk(exact=true, ef=false)", set()),
        ("none", set()),
        ("minmax", {"seed", "stream", "step"}),
        ("momentum(onebit)", {"momentum", "residual"}),
        ("momentum(onebit(ef=false))", {"momentum"}),
    ],
)
def test_default_feedback(expr: str, state: set[str]) -> None:
    assert set(codec(expr).init(torch.empty(3))) == state


def test_options_as_keywords() -> None:
    assert codec("onebit", ef=False).name == "onebit(ef=false)"
    assert codec("onebit", block=64).codec_hash == codec("onebit(block=64)").codec_hash
    assert codec("topk", ratio=0.5, exact=True).name == "topk(ratio=0.5, exact=true)"
    assert codec("topk(ratio=0.5)", exact=True).wire_bytes(100) == 80 + 16 + 208 + 208
    twice = codec("momentum(fp16)", mu=0.5, nesterov=False)
    assert twice.name == "momentum(fp16, mu=0.5, nesterov=false)"


def test_codecs_are_kept() -> None:
    assert codec("ef( fp16 )") is codec("ef(fp16)")


def test_momentum_of_momentum() -> None:
    # Refused, or each with a memory of its own; sharing one would be neither.
    try:
        c = codec("momentum(momentum(none, mu=0.5, nesterov=false), mu=0.5, nesterov=false)")
    except UsageError:
        return
    x = torch.ones(1)
    state, inner, outer, expected = c.init(x), 0.0, 0.0, []
    for _ in range(4):
        outer = 0.5 * outer + 1
        inner = 0.5 * inner + outer
        expected.append(inner)
    assert [c.decode(c.encode(x, state)).item() for _ in range(4)] == expected


# --- what is refused -----------------------------------------------------------------------------

THERE_ARE = (
    f"there are: {', '.join(names())}, wrapped by ef and momentum, or the path of a .pse program."
)


OWN_MEMORY = (
    "dgc keeps momentum and a residual itself, {} would do that a second time; write dgc alone "
    "(describe('dgc') lists its options)."
)


def takes(name: str) -> str:
    return ", ".join([*describe(name).options, "ef"]) + "."


@pytest.mark.parametrize(
    "expr, message",
    [
        ("ontbit", f"no codec 'ontbit' (did you mean 'onebit'?); {THERE_ARE}"),
        ("Onebit", f"no codec 'Onebit' (did you mean 'onebit'?); {THERE_ARE}"),
        ("ef(momentm(fp16))", f"no codec 'momentm' (did you mean 'momentum'?); {THERE_ARE}"),
        ("zzz", f"no codec 'zzz'; {THERE_ARE}"),
        ("onebit(block=63)", "onebit: block=63 must be a multiple of 8 from 64 to 65536."),
        ("onebit(block=68)", "onebit: block=68 must be a multiple of 8 from 64 to 65536."),
        ("onebit(block=65544)", "onebit: block=65544 must be a multiple of 8 from 64 to 65536."),
        ("onebit(block=64.0)", "onebit: block=64.0 must be a multiple of 8 from 64 to 65536."),
        ("onebit(block=big)", "onebit: block=big must be a multiple of 8 from 64 to 65536."),
        ("minmax(bits=3)", "minmax: bits=3 must be 1, 2, 4 or 8."),
        ("minmax(bits=true)", "minmax: bits=true must be 1, 2, 4 or 8."),
        ("minmax(bits=2.0)", "minmax: bits=2.0 must be 1, 2, 4 or 8."),
        ("terngrad(clip=-1)", "terngrad: clip=-1 must be 0 (off), or from 0.001 to 1e6."),
        ("terngrad(clip=nan)", "terngrad: clip=nan must be 0 (off), or from 0.001 to 1e6."),
        ("terngrad(clip=true)", "terngrad: clip=true must be 0 (off), or from 0.001 to 1e6."),
        ("topk(ratio=0)", "topk: ratio=0 must be above 0, at most 1."),
        ("topk(ratio=1.01)", "topk: ratio=1.01 must be above 0, at most 1."),
        ("topk(ratio=true)", "topk: ratio=true must be above 0, at most 1."),
        ("topk(sample=-0.5)", "topk: sample=-0.5 must be above 0, at most 1."),
        ("topk(exact=maybe)", "topk: exact=maybe must be true or false."),
        ("topk(exact=1.0)", "topk: exact=1.0 must be true or false."),
        ("terngrad(clip=1e-60)",
         "terngrad: clip=1e-60 must be 0 (off), or from 0.001 to 1e6."),
        ("tbq(tau=0)", "tbq: tau=0 must be from 1e-30 to 1e30."),
        ("tbq(tau=1e-60)", "tbq: tau=1e-60 must be from 1e-30 to 1e30."),
        ("tbq(tau=1e39)", "tbq: tau=1e+39 must be from 1e-30 to 1e30."),
        ("dgc(clip=1e-60)", "dgc: clip=1e-60 must be 0 (off), or from 1e-30 to 1e30."),
        ("dgc(weight_decay=1e7)",
         "dgc: weight_decay=10000000.0 must be 0 (off), or from 1e-30 to 1e6."),
        ("dgc(momentum=0.99999999)", "dgc: momentum=0.99999999 must be from 0 to 0.999999."),
        ("momentum(none, mu=0.99999999)",
         "momentum: mu=0.99999999 must be from 0 to 0.999999, e.g. 0.9."),
        ("ef(dgc)", OWN_MEMORY.format("ef")),
        ("momentum(dgc(warmup=400))", OWN_MEMORY.format("momentum")),
        ("momentum(ef(dgc))", OWN_MEMORY.format("ef")),
        ("dgc(ef=true)", OWN_MEMORY.format("ef=true")),
        ("onebit(ef=1)", "onebit: ef=1 must be true or false."),
        ("onebit(ef=no)", "onebit: ef=no must be true or false."),
        ("onebit(blok=64)",
         f"onebit has no option 'blok' (did you mean 'block'?); it takes: {takes('onebit')}"),
        ("topk(rato=0.1)",
         f"topk has no option 'rato' (did you mean 'ratio'?); it takes: {takes('topk')}"),
        ("topk(0.1)",
         "codec expression 'topk(0.1)' has '0.1' without a name (column 6); options are named: "
         "write e.g. 'topk(ratio=0.01)'."),
        ("ef(topk, ratio=0.1)",
         "ef has no option 'ratio', topk has: write it inside, e.g. 'ef(topk(ratio=...))'."),
        ("momentum(ef(topk), ratio=0.1)",
         "momentum has no option 'ratio', topk has: write it inside, e.g. "
         "'momentum(topk(ratio=...))'."),
        ("momentum(onebit, muu=0.1)",
         "momentum has no option 'muu' (did you mean 'mu'?); it takes: mu, nesterov."),
        ("none(bits=2)", "none has no option 'bits'; it takes: ef."),
        ("topk(k=5)", "topk has no option 'k'; it takes: " + takes("topk")),
        ("onebit(fp16)",
         "onebit takes no codec inside; wrappers are ef and momentum, e.g. 'ef(onebit)'."),
        ("ef", "ef takes one codec; write e.g. 'ef(onebit)'."),
        ("ef()", "ef takes one codec; write e.g. 'ef(onebit)'."),
        ("ef(onebit, fp16)", "ef takes one codec; write e.g. 'ef(onebit)'."),
        ("ef(onebit, mu=1)", "ef has no option 'mu'; it takes: decay, residual."),
        ("ef(onebit, decay=0)", "ef: decay=0.0 must be above 0, at most 1, e.g. 0.95."),
        ("ef(onebit, decay=1.5)", "ef: decay=1.5 must be above 0, at most 1, e.g. 0.95."),
        ("ef(onebit, decay=true)", "ef: decay=true must be above 0, at most 1, e.g. 0.95."),
        ("ef(ef(onebit, decay=0.5), decay=0.5)",
         "ef(onebit, decay=0.5) has a decay already; give the options of ef once."),
        ("momentum", "momentum takes one codec; write e.g. 'momentum(onebit)'."),
        ("momentum(none, fp16)", "momentum takes one codec; write e.g. 'momentum(onebit)'."),
        ("momentum(none, lr=1)", "momentum has no option 'lr'; it takes: mu, nesterov."),
        ("momentum(none, mu=1)", "momentum: mu=1.0 must be from 0 to 0.999999, e.g. 0.9."),
        ("momentum(none, mu=-0.1)", "momentum: mu=-0.1 must be from 0 to 0.999999, e.g. 0.9."),
        ("momentum(none, mu=x, nesterov=false)",
         "momentum: mu=x must be a number and nesterov=false true or false."),
        ("momentum(none, nesterov=1)",
         "momentum: mu=0.9 must be a number and nesterov=1 true or false."),
        ("ef(momentum(fp16, nesterov=false))",
         "ef(momentum(fp16, mu=0.9, nesterov=false)) would feed back what momentum made; write "
         "momentum(ef(...)) instead."),
    ],
)  # fmt: skip
def test_refusals(expr: str, message: str) -> None:
    assert refusal(expr) == message


def test_ef_of_momentum_with_feedback_inside() -> None:
    # As strange as ef(momentum(fp16)), and as it is where the wrappers are not fused.
    assert refusal("ef(momentum(onebit))").endswith("write momentum(ef(...)) instead.")


@pytest.mark.parametrize("name", ["ef", "momentum"])
def test_describe_of_a_wrapper(name: str) -> None:
    with pytest.raises(UsageError) as error:
        describe(name)
    assert f"did you mean {name!r}" not in str(error.value)


def test_describe_of_nothing() -> None:
    with pytest.raises(UsageError, match="no codec 'onebt' .did you mean 'onebit'..; there are: "):
        describe("onebt")


def test_an_option_given_twice() -> None:
    assert refusal("onebit(block=64)", block=128) == (
        "codec expression 'onebit(block=64, block=128)' gives an option twice; give it once."
    )


@pytest.mark.parametrize("expr", [3, None, Path("my.pse"), b"onebit"])
def test_no_text(expr: Any) -> None:
    assert refusal(expr) == f"codec is {expr!r}; give an expression such as 'ef(onebit)'."


@pytest.mark.parametrize(
    "value, advice",
    [
        ("0.1", "write ratio=0.1 without quotes"),
        ("true", "write ratio=true without quotes"),
        (float("nan"), "a number must be finite"),
        (float("inf"), "a number must be finite"),
        ("a b", "write e.g. 'ratio=0.01'"),
        (None, "write e.g. 'ratio=0.01'"),
    ],
)
def test_keyword_and_what_to_write(value: Any, advice: str) -> None:
    assert refusal("topk", ratio=value) == (
        f"codec option 'ratio'={value!r} is not a word with a value (true, false, a number or a "
        f"word); {advice}."
    )


def test_keywords_of_numpy() -> None:
    assert codec("topk", ratio=np.float64(0.5), exact=np.bool_(True)).name == (
        "topk(ratio=0.5, exact=true)"
    )
    assert codec("onebit", block=np.int64(64)).name == "onebit(block=64)"


@pytest.mark.parametrize("name", ["my.pse", "topk(ratio=0.1)", "ef(onebit)"])
def test_describe_takes_a_name(name: str) -> None:
    with pytest.raises(UsageError) as error:
        describe(name)
    assert str(error.value) == (
        f"describe({name!r}): that is not the name of a codec, e.g. 'topk'; for a program in a "
        "file, and its options, use `hipress compll check FILE`."
    )


def test_describe_takes_text() -> None:
    with pytest.raises(
        UsageError, match="describe was given 3; give the name of a codec, e.g. 'topk'."
    ):
        describe(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, "a b", [1]])
def test_keyword_that_is_no_value(value: Any) -> None:
    assert refusal("onebit", block=value).startswith(f"codec option 'block'={value!r} is not a")


# --- programs in files ---------------------------------------------------------------------------

SCALED = """
void ScaledEncode(float* gradient, uint8* compressed) {{
    float16* half = map(gradient, [&](float g) -> float16 {{ return g * {factor}; }});
    compressed = concat(half);
}}

void ScaledDecode(uint8* compressed, float* gradient) {{
    float16* half;
    extract(compressed, half);
    gradient = map(half, [&](float16 h) -> float {{ return h; }});
}}
"""


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """The published program in one file with its other half."""
    halves = [(PROGRAMS / f"TernGrad{kind}.pse").read_text() for kind in ("Encode", "Decode")]
    path = tmp_path / "my.pse"
    path.write_text("\n".join(halves))
    return path


@pytest.mark.parametrize("backend", thinned(["reference", "cpu"], keep=("reference",)))
@pytest.mark.parametrize("half", ["Encode", "Decode"])
def test_published_program_unchanged(
    half: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", backend)
    c = codec(str(PROGRAMS / f"TernGrad{half}.pse"), bitwidth=2)
    built_in, x = codec("minmax(bits=2)"), gaussian(5000)
    payload = payload_of(c, x, seed=3)
    assert torch.equal(payload[HEAD:], payload_of(built_in, x, seed=3)[HEAD:])
    gap = (x.max() - x.min()) / 3
    assert (c.decode(payload) - x).abs().max() <= gap * (1 + 1e-5)
    assert c.codec_hash != built_in.codec_hash


def test_program_in_one_file(both: Path) -> None:
    c, x = codec(f"{both}(bitwidth=4)"), gaussian(1000)
    assert c.name == f"{both}(bitwidth=4)"
    assert c.wire_bytes(1000) == 80 + 16 + 512
    payload = payload_of(c, x, seed=3)
    assert torch.equal(payload[HEAD:], payload_of(codec("minmax(bits=4)"), x, seed=3)[HEAD:])
    by_keyword = codec(str(both), bitwidth=4)
    assert by_keyword.name == c.name and by_keyword.codec_hash == c.codec_hash


def test_program_by_relative_path(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(both.parent)
    assert codec("my.pse(bitwidth=4)").codec_hash == codec(str(both), bitwidth=4).codec_hash


@pytest.mark.parametrize("expr", ["ef({}(bitwidth=2))", "{}(bitwidth=2, ef=true)"])
def test_feedback_around_a_program(expr: str, both: Path) -> None:
    c, plain = codec(expr.format(both)), codec(str(both), bitwidth=2)
    oracle, n = Feedback(plain), 500
    states = c.init(torch.empty(n), seed=1), oracle.init(torch.empty(n), seed=1)
    for step in range(3):
        x = gaussian(n, seed=step)
        assert torch.equal(c.encode(x, states[0]), oracle.encode(x, states[1]))
    assert torch.equal(states[0]["residual"], states[1]["residual"])
    assert states[0]["residual"].any()


def test_momentum_around_a_program(both: Path) -> None:
    c = codec(f"momentum({both}(bitwidth=2), mu=0.5)")
    oracle = Momentum(codec(str(both), bitwidth=2), mu=0.5)
    states = [k.init(torch.empty(50), seed=1) for k in (c, oracle)]
    for step in range(3):
        x = gaussian(50, seed=step)
        assert torch.equal(c.encode(x, states[0]), oracle.encode(x, states[1]))


def test_an_edited_program_counts_at_once(tmp_path: Path) -> None:
    path, x = tmp_path / "scaled.pse", torch.tensor([1.0, -2.0, 0.5])
    path.write_text(SCALED.format(factor="2.0"))
    old = codec(str(path))
    assert codec(f"ef({path})").decode(payload_of(old, x)).tolist() == [2.0, -4.0, 1.0]
    path.write_text(SCALED.format(factor="3.0"))
    new = codec(str(path))
    assert new.decode(payload_of(new, x)).tolist() == [3.0, -6.0, 1.5]
    assert new.codec_hash != old.codec_hash
    # A codec that is in use keeps the program it was made from.
    assert old.decode(payload_of(old, x)).tolist() == [2.0, -4.0, 1.0]
    wrapped = codec(f"ef({path})")
    assert wrapped.decode(payload_of(wrapped, x)).tolist() == [3.0, -6.0, 1.5]


def test_missing_half(tmp_path: Path) -> None:
    for half, other in (("Encode", "Decode"), ("Decode", "Encode")):
        folder = tmp_path / half
        folder.mkdir()
        path = folder / f"TernGrad{half}.pse"
        shutil.copy(PROGRAMS / path.name, path)
        assert refusal(str(path), bitwidth=2) == (
            f"{path} holds only {half}; put {other} into the same file or into "
            f"TernGrad{other}.pse beside it."
        )
        path = path.rename(folder / "mine.pse")
        assert refusal(str(path), bitwidth=2) == (
            f"{path} holds only {half}; put {other} into the same file or into "
            f"X{other}.pse beside it."
        )


def test_halves_that_do_not_belong_together(tmp_path: Path) -> None:
    shutil.copy(PROGRAMS / "TernGradEncode.pse", tmp_path / "TernGradEncode.pse")
    text = (PROGRAMS / "TernGradDecode.pse").read_text()
    (tmp_path / "TernGradDecode.pse").write_text(text.replace("TernGradDecode", "OtherDecode"))
    assert refusal(str(tmp_path / "TernGradEncode.pse"), bitwidth=2) == (
        f"{tmp_path / 'TernGradDecode.pse'}: OtherDecode does not belong to TernGradEncode; "
        "call it TernGradDecode."
    )


def test_files_that_hold_no_program(tmp_path: Path) -> None:
    gone, empty, noise = (tmp_path / f"{name}.pse" for name in ("gone", "empty", "noise"))
    empty.write_text("// nothing\n")
    noise.write_bytes(b"\xff\xfe\x00")
    for text in (str(gone), f"ef({gone})"):
        assert refusal(text) == (
            f"cannot read the program {gone} (No such file or directory); give the path of a .pse "
            "file."
        )
    assert refusal(str(empty)) == (
        f"{empty} holds no function; write XEncode and XDecode (any name for X)."
    )
    assert refusal(str(noise)) == f"the program {noise} is not UTF-8 text; save it as UTF-8."


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"bits": 4}, "TernGrad has no parameter 'bits'; it takes: bitwidth."),
        ({"bitwidth": 300}, "TernGrad: bitwidth=300 does not fit uint8 (0 to 255)."),
        ({"bitwidth": -1}, "TernGrad: bitwidth=-1 does not fit uint8 (0 to 255)."),
        ({"bitwidth": 2.5}, "TernGrad: bitwidth=2.5 must be an integer (uint8)."),
        ({"bitwidth": "two"}, "TernGrad: bitwidth='two' must be an integer (uint8)."),
    ],
)
def test_parameter_that_does_not_fit(both: Path, options: dict[str, Any], problem: str) -> None:
    assert refusal(str(both), **options) == problem


def test_parameter_left_out(both: Path) -> None:
    assert refusal(str(both)).startswith("TernGrad needs a value for 'bitwidth' (uint8); write ")


def test_parameter_that_the_program_refuses(both: Path) -> None:
    with pytest.raises(ProgramError) as error:
        codec(str(both), bitwidth=7)
    widths = "1, 2, 3, 4, 5, 6, 8, 12, 16, 32"
    message = f"{both}:26:10: a uint cannot have 7 bits; allowed: {widths}\n"
    assert message in str(error.value)


def test_wrong_program_shows_its_place(tmp_path: Path) -> None:
    path = tmp_path / "wrong.pse"
    path.write_text(SCALED.format(factor="factor"))
    with pytest.raises(ProgramError) as error:
        codec(str(path))
    first, source, caret = str(error.value).splitlines()
    assert first.startswith(f"{path}:3:")
    assert source.index("factor") == caret.index("^")


# --- examples in the docs ------------------------------------------------------------------------


def modules_with_examples() -> list[str]:
    src = ROOT / "src"
    files = [f for f in sorted(src.rglob("*.py")) if ">>>" in f.read_text("utf-8")]
    return [
        ".".join(f.relative_to(src).with_suffix("").parts).removesuffix(".__init__") for f in files
    ]


class _Finder(doctest.DocTestFinder):
    def _from_module(self, module: Any, object: Any) -> bool:
        """Returns whether a function is of the module, also one that a decorator has wrapped."""
        return super()._from_module(module, inspect.unwrap(object))  # type: ignore[misc]


@pytest.mark.parametrize(
    "name", thinned(modules_with_examples(), lambda name: name != "hipress.probe.codec_costs")
)
def test_examples(name: str) -> None:
    found = _Finder(exclude_empty=True).find(importlib.import_module(name))
    runner = doctest.DocTestRunner()
    for example in found:
        runner.run(example)
    assert runner.tries > 0 and runner.failures == 0


def test_there_are_examples() -> None:
    assert {"hipress.codecs.base", "hipress.codecs.table"} <= set(modules_with_examples())


# --- arguments that are of no use ----------------------------------------------------------------


@pytest.mark.parametrize(
    "call, why",
    [
        (lambda c, x, p: c.init(1000), r"init was given 1000; it takes a tensor .* c.init\(torch"),
        (lambda c, x, p: c.init([x]), "init was given a list; it takes a tensor"),
        (lambda c, x, p: c.init(x, seed="a"), "seed is 'a'; it must be a whole number."),
        (lambda c, x, p: c.init(x, seed=1.5), "seed is 1.5; it must be a whole number."),
        (lambda c, x, p: c.init(x, stream=None), "stream is None; it must be a whole number."),
        (lambda c, x, p: c.init(x, seed=2**63), r"between -2\^63 and 2\^63 - 1."),
        (lambda c, x, p: c.decode(p, alpha="x"), "alpha is 'x'; it must be one number"),
        (lambda c, x, p: c.decode(p, alpha=x), "alpha is a tensor of several; it must be one"),
        (lambda c, x, p: c.wire_bytes(x), "the number of elements is a tensor; it must be a whole"),
        (lambda c, x, p: c.wire_bytes(1.5), "the number of elements is 1.5; it must be a whole"),
        (lambda c, x, p: c.wire_bytes("5"), "the number of elements is '5'; it must be a whole"),
    ],
)
def test_an_argument_of_another_kind_is_refused(call: Any, why: str) -> None:
    c, x = codec("terngrad"), gaussian(100)
    with pytest.raises(UsageError, match=why):
        call(c, x, payload_of(c, x))


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    c, x = codec("terngrad"), gaussian(100)
    assert c.wire_bytes(np.int64(100)) == c.wire_bytes(100)  # type: ignore[arg-type]
    assert c.init(x, seed=np.int32(-3))["seed"] == -3  # type: ignore[arg-type]
    half = c.decode(payload_of(c, x), alpha=0.5)
    for alpha in (np.float32(0.5), torch.tensor(0.5)):
        assert torch.equal(c.decode(payload_of(c, x), alpha=alpha), half)  # type: ignore[arg-type]


# --- to another process --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expr",
    [
        *names(),
        "onebit(ef=false)",
        "ef(topk(ratio=0.05))",
        "momentum(onebit, mu=0.5)",
        "dgc(warmup=8)",
    ],
)
def test_a_codec_can_be_pickled(expr: str) -> None:
    c, x = codec(expr), gaussian(300)
    for whole in (c, c.aggregator(3), c.phase(0)):
        again = pickle.loads(pickle.dumps(whole))
        assert (again.name, again.codec_hash) == (whole.name, whole.codec_hash)
        assert torch.equal(payload_of(again, x, seed=3), payload_of(whole, x, seed=3))
    assert [at for at, _ in pickle.loads(pickle.dumps(c)).phases] == [at for at, _ in c.phases]


def test_a_pickled_codec_keeps_its_backend_and_generic_wrappers() -> None:
    c = codec("onebit")
    assert isinstance(c, ProgramCodec)
    assert pickle.loads(pickle.dumps(c.on_backend("cpu"))).backend == "cpu"
    assert pickle.loads(pickle.dumps(c)).backend == "reference"
    assert pickle.loads(pickle.dumps(Momentum(Feedback(codec("int8")), mu=0.5))).mu == 0.5


def test_a_pickled_program_needs_its_file(tmp_path: Path) -> None:
    for path in PROGRAMS.glob("TernGrad*.pse"):
        shutil.copy(path, tmp_path)
    file = tmp_path / "TernGradEncode.pse"
    data = pickle.dumps(codec(str(file), bitwidth=2, ef=True))
    assert "residual" in pickle.loads(data).init(torch.empty(3))
    file.write_text(file.read_text() + "\n// changed")
    with pytest.raises(UsageError, match="is not the one it was when the codec was pickled"):
        pickle.loads(data)
    file.unlink()
    with pytest.raises(UsageError, match="TernGradEncode.pse"):
        pickle.loads(data)


# --- what an optimizer with momentum of its own needs to know -------------------------------------


def test_which_codecs_keep_the_sizes_of_elements() -> None:
    """By measurement too: after one decode without feedback no element is off by a tenth."""
    x = gaussian(1000)
    large = x.abs() > 0.5
    for name in NAMES + ("int8", "tbq", "dithering", "dgc", "graddrop", "randomk"):
        made = codec(name)
        decoded = made.decode(payload_of(made, x))
        is_near = bool(((decoded - x).abs() < 0.1 * x.abs())[large].all())
        assert made.keeps_sizes == is_near == (name in ("none", "fp16", "bf16", "int8")), name


@pytest.mark.parametrize(
    ("expression", "keeps"),
    [("ef(int8)", True), ("int8(ef=false)", True), ("momentum(int8)", False), ("ef(topk)", False)],
)
def test_wrappers_and_sizes(expression: str, keeps: bool) -> None:
    """Momentum has sizes of its own."""
    assert codec(expression).keeps_sizes is keeps


def test_a_program_in_a_file_keeps_no_sizes_that_we_know_of() -> None:
    assert not codec(str(ROOT / "examples" / "blocktopk.pse")).keeps_sizes


@pytest.mark.parametrize(
    ("expression", "stripped"),
    [
        ("onebit", "onebit"),
        ("momentum(ef(onebit), mu=0.8)", "onebit"),
        ("momentum(onebit(ef=false))", "onebit(ef=false)"),
        ("momentum(ef(terngrad))", "ef(terngrad)"),
        ("dgc(ratio=0.02, warmup=9, clip=1.0)", "topk(ratio=0.02, sample=0.01)"),
        ("int8", "int8"),
    ],
)
def test_a_codec_for_momentum_has_none_of_its_own(expression: str, stripped: str) -> None:
    made = codec(expression).for_momentum()
    assert made.name == stripped
    assert not {"momentum", "velocity"} & set(made.state_names)
    assert made.for_momentum() is made


def test_for_momentum_stays_on_its_backend() -> None:
    made = codec("dgc")
    assert isinstance(made, ProgramCodec)
    assert made.on_backend("cpu").for_momentum().backend == "cpu"  # type: ignore[attr-defined]
