"""The printers: a tree with places, passes that a person can read, and what they move."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hipress import codecs
from hipress.compll.build import parse_program
from hipress.compll.front.parse import parse
from hipress.compll.passes.cost import cost
from hipress.compll.passes.derive import PLAIN, Variant
from hipress.compll.tools.show import show_ast, show_passes

PROGRAMS = Path(__file__).parent / "programs"
SEED = PROGRAMS / "TernGradEncode.pse"
FEEDBACK = Variant(feedback=True)


def kernels(name: str, variant: Variant = PLAIN, dtype: str = "f32", **values):
    program = parse_program(codecs.describe(name).program, file=name)
    return program.bind(values).kernels(dtype=dtype, variant=variant)


def passes(text: str, variant: Variant = PLAIN) -> str:
    return show_passes(parse_program(text).bind({}).kernels(variant=variant))


def test_every_node_stands_on_its_own_line_at_its_place():
    text = SEED.read_text("utf-8")
    lines = show_ast(parse(text, file="seed.pse")).splitlines()
    assert lines[0] == "seed.pse"
    assert "  Function void TernGradEncode  1:1" in lines
    assert "    Arg uint8 bitwidth  1:57" in lines
    source = text.splitlines()
    for line in lines[1:]:
        found = re.fullmatch(r"( +)(\w+: )?(\w+)( .*)?  (\d+):(\d+)", line)
        assert found, line
        kind, row, column = found[3], int(found[5]), int(found[6])
        if kind in ("Name", "Call", "Number"):  # what starts with the word that is shown
            word = found[4].split()[0]
            assert source[row - 1][column - 1 :].startswith(word), line


def test_branches_and_widths_have_their_roles():
    shown = show_ast(parse(SEED.read_text("utf-8")))
    assert "cond: Binary >  3:13" in shown
    assert "yes: Return  4:13" in shown
    assert "no: Return  7:13" in shown
    assert "Declare uint<...>* Q  26:5\n      width: Name bitwidth  26:10" in shown


def test_a_long_sum_is_no_deep_recursion():
    total = " + ".join(["1.0"] * 200)
    source = parse(f"void XEncode(float* g, uint8* c) {{ float s = {total}; }}")
    assert show_ast(source).count("Number 1.0") == 200


def test_a_tree_of_params_comes_in_the_order_of_the_text():
    shown = show_ast(parse("void AEncode(float* g, uint8* c) {}\nparam P { float t = 1.5; }"))
    assert shown.index("Function") < shown.index("ParamBlock P  2:1")


@pytest.mark.parametrize(
    ("name", "variant", "dtype", "values", "expected"),
    [
        ("onebit", PLAIN, "f32", {}, (1, 4, 0.125)),
        ("onebit", FEEDBACK, "f32", {}, (1, 8, 4.125)),
        ("onebit", FEEDBACK, "bf16", {}, (1, 6, 4.125)),
        ("minmax", PLAIN, "f32", {"bitwidth": 2}, (2, 8, 0.25)),
        ("terngrad", PLAIN, "f32", {}, (2, 8, 0.25)),
        ("terngrad", Variant(feedback=True, momentum=True), "f32", {}, (2, 24, 8.25)),
        ("none", PLAIN, "f32", {}, (1, 4, 4)),
        ("topk", FEEDBACK, "f32", {}, (1, 8, 4)),
    ],
)
def test_cost_of_encode(name, variant, dtype, values, expected):
    found = cost(kernels(name, variant, dtype, **values)[0])
    assert (found.num_passes, found.read_bytes, found.written_bytes) == expected


def test_cost_of_decode():
    _, decode, decode_add = kernels("onebit")
    assert str(cost(decode)) == "1 pass over the gradient; reads 0.125, writes 4 bytes/element"
    assert cost(decode_add).read_bytes == 4.125
    _, decode, decode_add = kernels("topk")
    assert (cost(decode).num_passes, cost(decode).written_bytes) == (1, 4)  # it is zeroed
    assert cost(decode_add).num_passes == 0
    assert cost(decode_add).num_others == 1


def test_passes_over_arrays_of_other_lengths_are_counted():
    steps = "v = scan(map(v, abs), 0.0, max); " * 8
    program = parse_program(
        f"""
        void XEncode(float* g, uint8* c) {{
            float* v = map(range(g.size / 2), [&](int i) -> float {{ return g[i]; }});
            {steps}
            c = concat(v);
        }}
        void XDecode(uint8* c, float* g) {{
            float* v; extract(c, v);
            g = map(range(g.size), [&](int i) -> float {{ return v[i]; }});
        }}
        """
    )
    encode = program.bind({}).kernels()[0]
    assert (cost(encode).num_passes, cost(encode).num_others) == (1, 9)
    assert str(cost(encode)).startswith("1 pass over the gradient and 9 over arrays of other")


def test_onebit_with_feedback_reads_as_it_runs():
    shown = show_passes(kernels("onebit", FEEDBACK)[:1])
    assert shown == (
        "encode: 1 pass over the gradient; reads 8, writes 4.125 bytes/element\n"
        "    s0 = (n + 1023) / 1024\n"
        "    x         float[n]   the gradient, read (gradient)\n"
        "    residual  float[n]   state\n"
        "    section0  float[s0]  payload\n"
        "    section1  uint1[n]   payload\n"
        "    parameters: @rho\n"
        "    pass 1: loop over n, in blocks of 1024\n"
        "        phase 1\n"
        "            v1 = x[i] + @rho * residual[i]\n"
        "            f0 = sum over the block of abs(v1), from 0.0\n"
        "            f1 = any over n of !finite(v1), the frame's non-finite flag\n"
        "        phase 2\n"
        "            v2 = x[i] + @rho * residual[i]\n"
        "            v3 = v2 < 0.0\n"
        "            v4 = f0 / float(m)\n"
        "            v5 = v2 - (v3 ? -v4 : v4)\n"
        "            section1[i] = int(v3)\n"
        "            residual[i] = finite(v5) ? v5 : residual[i]\n"
        "        once a block\n"
        "            section0[b] = f0 / float(m)\n"
    )


def test_the_seed_program():
    both = SEED.read_text("utf-8") + (PROGRAMS / "TernGradDecode.pse").read_text("utf-8")
    shown = show_passes(parse_program(both).bind({"bitwidth": 2}).kernels())
    for line in (
        "f0 = min over n of x[i], from 99999.0",
        "f1 = max over n of x[i], from -99999.0",
        "section4[i] = uint2((x[i] - f0) / ((f1 - f0) / 3.0) + uniform#0(i))",
        "section1[0] = n % 4",
        "require section0[0] == 2, or: the payload was made with another 'bitwidth'",
        "out[i] = "
        "@alpha * (section2[0] + float(section4[i]) * ((section3[0] - section2[0]) / 3.0))",
        "random numbers: of seed, stream and step",
    ):
        assert f" {line}\n" in shown


def test_filters_sorts_scans_and_scatters():
    shown = show_passes(kernels("topk", FEEDBACK, exact=1))
    for line in (
        "s0 = int(min(float(n), workers * float(int(max(1.0, ratio * float(n))))))",
        "sorted0 = temp0 in ascending order, only [n - s0]",
        "temp1[i] = temp1[i - 1] + int(abs(x[i] + @rho * residual[i]) == sorted0[n - s0]), "
        "the first from 0",
        "filter0: keep i where v2 < v4 || v4 == v2 && temp1[i] <= s0 - f1, the first s0",
        "emit section1 <- i",
        "residual[i] = finite(v5) ? v5 : residual[i]",
        "section0[0] = count(filter0)",
        "pass 1: scatter over section0[0]",
        "out = 0",
        "out[section1[clamp(i)]] += @alpha * section2[clamp(i)]",
        "parameters: ratio, sample, workers, @alpha",
    ):
        assert f" {line}\n" in shown
    assert "bits32#0(i)" in show_passes(kernels("topk"))


def test_a_fold_of_its_own_and_brackets_only_where_needed():
    shown = passes(
        """
        void XEncode(float* g, uint8* c) {
            float s = reduce(g, 1.0, [&](float a, float b) -> float { return a + b - a * b / 2; });
            float* q = map(g, [&](float v) -> float { return -(v - (s - 1.0)) * (v + s) * 2.0; });
            float* t = sort(q);
            c = concat(t);
        }
        void XDecode(uint8* c, float* g) { float v[g.size]; extract(c, v); g = v; }
        """
    )
    joined = "(carry, item) -> carry + item - carry * item * 0.5"
    assert f"f0 = fold over n of x[i], from 1.0 by {joined}" in shown
    assert "-(x[i] - (f0 - 1.0)) * (x[i] + f0) * 2.0" in shown
    assert "sorted0 = temp0 in ascending order\n" in shown


@pytest.mark.parametrize("name", codecs.names())
def test_every_kernel_of_every_codec_can_be_shown(name):
    values = {"bitwidth": 4} if name == "minmax" else {}
    for variant in (PLAIN, FEEDBACK, Variant(feedback=True, momentum=True, nesterov=True)):
        made = kernels(name, variant, **values)
        shown = show_passes(made)
        assert [k.name for k in made] == re.findall(r"^(\w+):", shown, re.MULTILINE)
        for kernel in made:
            for array in (*kernel.states, *kernel.temps, *(s.array for s in kernel.sections)):
                assert re.search(rf"^    {array.name} ", shown, re.MULTILINE)
