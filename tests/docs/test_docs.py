"""What README.md and docs/ say is run: programs, Python, commands with their output, tables.

    ```c [FILE]       a program, whole or one of two functions with the same stem on the page
    ```python         run, all blocks of a page in order, in one namespace; where the next words are
                      "It prints `...`", that is what it must print
    ```console        `$ hipress ...` and what it prints; a line of three dots stands for any lines
    ```text [FILE]    not looked at
    ```sh             not looked at
    ```diff           not looked at here; test_tutorial.py makes the changes

A block with a FILE is saved under that name in the folder where the page is run. Tables whose
header is `expression | number`, `expression | array` or `statement | x` are computed. The tables of
docs/codecs.md are checked by test_codec_tables.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import runpy
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hipress
from hipress.cli.main import main
from hipress.cli.options import split_expressions
from hipress.codecs import table
from hipress.codecs.program import ProgramCodec
from hipress.compll import build
from hipress.compll.front import ast
from hipress.compll.front.operators import OPERATORS
from hipress.compll.front.parse import parse
from hipress.errors import HipressError, ProgramError
from tests.grid import thinned
from tests.lab.conftest import refusal

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
LANGUAGES = {"c", "console", "diff", "python", "sh", "text"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    file: str
    text: str
    prints: str | None = None
    """What the page says that it prints, if anything."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    fences = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for fence in fences:
        language, _, file = fence[1].strip().partition(" ")
        line = text.count("\n", 0, fence.start()) + 2
        claim = re.match(r"\s*It prints `([^`]*)`", text[fence.end() :])
        prints = None if claim is None else claim[1]
        found.append(Block(page, line, language, file.strip(), fence[2], prints))
    return found


every_page = pytest.mark.parametrize("page", PAGES)
# These pages train on several ranks, or compile kernels that no other test needs.
LONG = ("docs/pytorch.md", "docs/casync.md")
quick_page = pytest.mark.parametrize(
    "page", thinned(PAGES, lambda page: page not in LONG and not page.startswith("docs/codecs/"))
)


# --- the pages themselves ------------------------------------------------------------------------


def bad_fences(page: str, text: str) -> list[str]:
    """Blocks that say no known language, and so would not be looked at by mistake."""
    found = [
        f"{b.place}: {b.language!r}" for b in blocks(page, text) if b.language not in LANGUAGES
    ]
    if len(re.findall(r"^```", text, re.MULTILINE)) != 2 * len(blocks(page, text)):
        found.append(f"{page}: a fence is not closed")
    return found


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def bad_links(text: str, folder: Path) -> list[str]:
    """Relative links that lead nowhere: to a file, or to a heading of a page."""
    found = []
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        target, _, anchor = link.partition("#")
        if target.startswith("http"):
            continue
        if target and not (folder / target).exists():
            found.append(link)
        elif anchor and (not target or target.endswith(".md")):
            page = (folder / target).read_text("utf-8") if target else text
            if anchor not in anchors(page):
                found.append(link)
    return found


def swallowed_items(text: str) -> list[str]:
    """Lines in which an item of a list continues the item before it, so that no list shows it."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    pattern = r"[^|\n] - \*\*|[.:;)] -$|[.)] - [A-Z`*\[]"
    return [line for line in prose.splitlines() if re.search(pattern, line)]


@every_page
def test_lists(page: str) -> None:
    assert swallowed_items(PAGES[page]) == []


@every_page
def test_fences(page: str) -> None:
    assert bad_fences(page, PAGES[page]) == []


@every_page
def test_links(page: str) -> None:
    assert bad_links(PAGES[page], (ROOT / page).parent) == []


@every_page
def test_text(page: str) -> None:
    assert PAGES[page].isascii()
    assert not re.search(r"(?<![\w~$./])/(home|root|work|tmp|usr)\b", PAGES[page])


def test_checks_of_pages_can_fail() -> None:
    assert bad_fences("p", "```rust\nx\n```\n") == ["p:2: 'rust'"]
    assert bad_fences("p", "a\n```c\nx\n") == ["p: a fence is not closed"]
    assert bad_links("[a](nowhere.md) [b](#there)\n# Here\n", ROOT) == ["nowhere.md", "#there"]
    assert bad_links("[a](README.md#nowhere)", ROOT) == ["README.md#nowhere"]
    assert bad_links("[a](README.md) [b](#so-it-is)\n# So it is!\n", ROOT) == []
    for line in ("- A. - **B.** C", "- A: -", "- A. - B", "- A (b) - `c`"):
        assert swallowed_items(f"{line}\n") == [line]
    assert swallowed_items("- **A:** 2 - 3\n- B\n\n```text\n(8, 1) - A. - B\n```\n") == []


# --- programs ------------------------------------------------------------------------------------


def programs(page: str, text: str) -> Iterator[tuple[str, build.Program]]:
    """The programs of a page; a block with one function needs the other in a block of its own."""
    halves: dict[str, tuple[Block, ast.Source, ast.Function]] = {}
    for block in (b for b in blocks(page, text) if b.language == "c"):
        source = parse(block.text, file=block.place)
        if len(source.functions) == 2:
            yield block.place, build.parse_program(block.text, file=block.place)
            continue
        (function,) = source.functions
        assert function.name not in halves, f"{block.place}: {function.name} is there twice"
        halves[function.name] = (block, source, function)
    for name, (block, *encode) in halves.items():
        mate = re.sub("Encode$|Decode$", lambda m: _OTHER[m[0]], name)
        assert mate in halves, f"{block.place}: {name} has no {mate} on this page"
        if name.endswith("Encode"):
            yield block.place, build.make_program((encode[0], encode[1]), halves[mate][1:])


_OTHER = {"Encode": "Decode", "Decode": "Encode"}


def run_program(program: build.Program) -> None:
    """Both backends render it; the reference encodes, decodes, and feeds back."""
    bound = program.bind({p.name: 2 for p in program.params if p.default is None})
    for backend in build.BACKENDS:
        compile(bound.source(backend), f"<{backend}>", "exec")
    codec = ProgramCodec(bound, name=program.name, backend="reference")
    x = torch.linspace(-1, 1, 1000)
    payload = codec.encode(x, codec.init(x))
    assert payload.numel() == codec.wire_bytes(1000)
    assert codec.decode(payload).isfinite().all()
    fed_back = table.feedback(codec)
    state = fed_back.init(x)
    decoded = fed_back.decode(fed_back.encode(x, state))
    torch.testing.assert_close(decoded + state["residual"], x)


@every_page
def test_programs(page: str) -> None:
    for place, program in programs(page, PAGES[page]):
        try:
            run_program(program)
        except HipressError as error:
            pytest.fail(f"{place}: {error}")


ENCODE = "void XEncode(float* g, uint8* c) { c = concat(g); }\n"


def test_check_of_programs_can_fail() -> None:
    with pytest.raises(AssertionError, match="XEncode has no XDecode"):
        list(programs("p", f"```c\n{ENCODE}```\n"))
    with pytest.raises(ProgramError, match="p:2:1:6"):
        list(programs("p", "```c\nvoid {\n```\n"))
    wrong = ENCODE + "void XDecode(uint8* c, float* g) { uint8* y; extract(c, y); g = y; }\n"
    ((_, program),) = programs("p", f"```c\n{wrong}```\n")
    with pytest.raises(ProgramError, match="reads uint8"):
        run_program(program)


# --- Python and commands -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_files(page: str, text: str) -> None:
    for block in blocks(page, text):
        if block.file:
            Path(block.file).write_text(block.text, "utf-8")


def run_python(page: str, text: str) -> dict[str, Any]:
    """The names that the Python blocks of a page leave behind."""
    save_files(page, text)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in (b for b in blocks(page, text) if b.language == "python"):
        code = "\n" * (block.line - 1) + block.text  # so that a traceback shows the page's line
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(code, str(ROOT / page), "exec"), names)
        if block.prints is not None:
            assert said.getvalue().strip() == block.prints, f"{block.place} prints something else"
    return names


def run_console(page: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_files(page, text)
    for block in (b for b in blocks(page, text) if b.language == "console"):
        for session in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, expected = session.partition("\n")
            program, *argv = shlex.split(command)
            assert program == "hipress", f"{block.place}: {program} is not ours to run"
            with pytest.raises(SystemExit):
                main(argv)
            out, err = capsys.readouterr()
            pattern = re.escape(expected).replace(re.escape("...\n"), r"(.*\n)*?")
            # A page shows what a terminal does: a warning may come first or last.
            if not any(re.fullmatch(pattern, said) for said in (out + err, err + out)):
                pytest.fail(f"{block.place}: `{command}` says\n{out}{err}", pytrace=False)


def need_what_it_needs(page: str) -> None:
    """Skip a page whose examples this system cannot run."""
    if page == "docs/lab.md" and (why := refusal()) is not None:
        pytest.skip(why)


@quick_page
def test_python(page: str, folder: Path) -> None:
    need_what_it_needs(page)
    run_python(page, PAGES[page])


@quick_page
def test_console(page: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    need_what_it_needs(page)
    run_console(page, PAGES[page], capfd)  # also what other processes and threads write


def test_checks_of_runs_can_fail(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python("p", "```python\nprint(2)\n```\n\nIt prints `2`: so it is.\n")
    with pytest.raises(AssertionError, match="p:2 prints something else"):
        run_python("p", "```python\nprint(2)\n```\n\nIt prints `3`.\n")
    with pytest.raises(AssertionError):
        run_python("p", "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    version = f"hipress {hipress.__version__}"
    run_console("p", f"```console\n$ hipress --version\n{version}\n```\n", capsys)
    run_console("p", "```console\n$ hipress --version\n...\n```\n", capsys)
    with pytest.raises(pytest.fail.Exception, match="says"):
        run_console("p", "```console\n$ hipress --version\nhipress 0\n```\n", capsys)


# --- tables --------------------------------------------------------------------------------------


def rows(text: str, *header: str) -> list[tuple[str, ...]]:
    """The cells of all tables with this header."""
    head = r"\| " + r" \| ".join(map(re.escape, header)) + r" \|\n\|[-| ]+\|\n"
    found = []
    for body in re.findall(head + r"((?:\|.*\|\n)+)", text):
        for line in body.splitlines():
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            found.append(tuple(c.strip().strip("`").replace("\\|", "|") for c in cells))
    return found


GRADIENT = [3.0, -1.0, 2.0, 0.0]
PROGRAM = """
void TEncode(float* a, uint8* c) {{
    lambda_func add = [&](float x, float y) -> float {{ return x + y; }};
    {statement}
    c = concat(r);
}}
void TDecode(uint8* c, float* a) {{
    {type} r;
    extract(c, r);
    a = map(range(a.size), [&](int i) -> float {{ return {element}; }});
}}
"""


def computed(statement: str, *, is_array: bool) -> list[float]:
    """What the program that holds `statement` sends as r."""
    type_, element = ("float*", "r[i]") if is_array else ("float", "r")
    text = PROGRAM.format(statement=statement, type=type_, element=element)
    codec = ProgramCodec(build.parse_program(text).bind({}), name="t", backend="reference")
    x = torch.tensor(GRADIENT)
    body = codec.encode(x, codec.init(x))[80:]
    return body.numpy().view(np.float32).tolist()


def check_row(statement: str, value: str, *, is_array: bool) -> None:
    expected = [float(number) for number in value.split(",")]
    found = computed(statement, is_array=is_array)
    padding = [0.0] * (len(found) - len(expected))
    assert found == expected + padding, f"{statement} gives {found}"


@every_page
def test_tables_of_values(page: str) -> None:
    for expression, value in rows(PAGES[page], "expression", "number"):
        check_row(f"float r = {expression};", value, is_array=False)
    for expression, value in rows(PAGES[page], "expression", "array"):
        check_row(f"float* r = {expression};", value, is_array=True)
    for statement, value in rows(PAGES[page], "statement", "x"):
        check_row(f"{statement} float r = x;", value, is_array=False)


def test_check_of_values_can_fail() -> None:
    table_text = "| expression | number |\n| --- | --- |\n| `1 \\|\\| 0` | 1 |\n| `7 / 2` | 3.5 |\n"
    good, bad = rows(table_text, "expression", "number")
    assert good == ("1 || 0", "1")
    check_row(f"float r = {good[0]};", good[1], is_array=False)
    with pytest.raises(AssertionError, match="gives"):
        check_row(f"float r = {bad[0]};", bad[1], is_array=False)


def undescribed(text: str, names: list[str]) -> list[str]:
    """Operators that no heading of the manual names."""
    headings = " ".join(re.findall(r"^### (.*)$", text, re.MULTILINE))
    return [name for name in names if name not in re.findall(r"\w+", headings)]


def test_the_manual_describes_every_operator() -> None:
    assert undescribed(PAGES["docs/compll.md"], list(OPERATORS)) == []
    assert undescribed("### map, range\n", ["map", "range", "sort"]) == ["sort"]


def test_the_command_of_the_speed_page_lists_its_rows() -> None:
    page = PAGES["docs/speed.md"]
    command = next(b.text for b in blocks("", page) if b.language == "sh").replace("\\\n", "")
    words = shlex.split(command)
    listed = split_expressions(words[words.index("--codecs") + 1])
    table_rows = page.partition("| codec | encode, x memcpy |")[2].partition("\n\n")[0]
    assert listed == re.findall(r"^\| `([^`]+)`", table_rows, re.MULTILINE)


# --- the worked example --------------------------------------------------------------------------


def test_the_worked_example_is_a_built_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program and the line of the table of the page, and the `SPEC` of the example it names."""
    page = "docs/adding-a-codec.md"
    save_files(page, PAGES[page])
    [example] = re.findall(r"\(\.\./(examples/[\w/-]+/__init__\.py)\)", PAGES[page])
    spec = runpy.run_path(str(ROOT / example))["SPEC"]
    ((name, module),) = re.findall(r'^\s+"(\w+)": "([\w.]+)",$', PAGES[page], re.MULTILINE)
    assert module == f"hipress.codecs.{name}"
    assert spec.program == f"{name}.pse"
    planted = types.ModuleType(module)
    planted.SPEC = dataclasses.replace(  # type: ignore[attr-defined]
        spec, program=str(folder / spec.program), package="hipress.codecs"
    )
    monkeypatch.setitem(sys.modules, module, planted)
    monkeypatch.setitem(table.TABLE, name, module)
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")
    assert hipress.codecs.describe(name).program == (folder / spec.program).read_text("utf-8")
    x = torch.linspace(-1, 1, 1000)
    for expression in (name, f"ef({name})", f"momentum({name})"):
        codec = hipress.codec(expression)
        assert codec.decode(codec.encode(x, codec.init(x))).shape == x.shape
