"""Writes the tables of docs/codecs.md that follow from the code.

    python docs/generate.py            rewrites the page
    python docs/generate.py --check    exits with code 1 if the page is stale

A table stands between the comments `<!-- generated: NAME -->` and `<!-- end -->`.
tests/docs/test_codec_tables.py runs the same check.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import hipress
from hipress.codecs import table
from hipress.codecs.program import ProgramCodec
from hipress.compll.passes.cost import cost

PAGE = Path(__file__).parent / "codecs.md"
NUMEL = 1_000_000
RANDOM = ("seed", "stream", "step")
"""The state of codecs that draw random numbers."""

TRAFFIC = (
    "none", "fp16", "int8", "int4", "onebit", "onebit(ef=false)", "momentum(onebit)", "tbq",
    "terngrad", "dithering", "dgc", "topk", "topk(exact=true)", "blocktopk", "randomk",
)  # fmt: skip
"""The expressions of the table of memory traffic. bf16 moves as much as fp16, minmax as terngrad,
graddrop as topk."""


def generate(page: str) -> str:
    """Returns the page with every generated table made anew."""
    for name, make in TABLES.items():
        begin = f"<!-- generated: {name} -->\n"
        if page.count(begin) != 1:
            raise ValueError(f"{PAGE.name} must have the line {begin.strip()!r} exactly once.")
        pattern = re.escape(begin) + r".*?(?=<!-- end -->)"
        body = f"{begin}\n{make()}\n"
        page = re.sub(pattern, lambda _, body=body: body, page, flags=re.DOTALL)
    return page


def codecs() -> str:
    header = (
        "codec", "times smaller", "bytes", "error feedback", "state kept", "way back, 4 workers",
    )  # fmt: skip
    return _table(header, map(_codec_row, table.TABLE))


def options() -> str:
    rows = [
        (f"`{name}`", f"`{option.name}`", _text(option.default), option.rule, option.about)
        for name, module in table.TABLE.items()
        for option in importlib.import_module(module).SPEC.options
    ]
    return _table(("codec", "option", "default", "rule", "meaning"), rows)


def traffic() -> str:
    return _table(("codec", "encode"), map(_traffic_row, TRAFFIC))


TABLES = {"codecs": codecs, "options": options, "traffic": traffic}


def ratio_of(expression: str) -> str:
    """Returns how many times smaller than float32 a frame of a million elements is."""
    return f"{4 * NUMEL / hipress.codec(expression).wire_bytes(NUMEL):.1f}"


def feedback_of(expression: str) -> str:
    """Returns whether a codec has error feedback: by the wrapper, by itself, or not."""
    if hipress.codecs.describe(expression.partition("(")[0]).feedback:
        return "yes"
    return "its own" if "residual" in hipress.codec(expression).init(torch.empty(8)) else "no"


def _codec_row(name: str) -> tuple[str, ...]:
    codec = hipress.codec(name)
    kept = list(codec.init(torch.empty(8)))
    names = [f"`{key}`" for key in kept if key not in RANDOM]
    state = ", ".join([*names, *["random"] * ("seed" in kept)]) or "none"
    return (
        f"[`{name}`](#{name})",
        ratio_of(name),
        f"{codec.wire_bytes(NUMEL):,}",
        feedback_of(name),
        state,
        f"`{codec.aggregator(4).name}`",
    )


def _traffic_row(expression: str) -> tuple[str, ...]:
    codec = hipress.codec(expression)
    if not isinstance(codec, ProgramCodec):
        raise TypeError(f"{expression} has no program whose memory traffic could be counted.")
    encode, *_ = codec.bound.kernels(variant=codec.variant)
    found = cost(encode)
    limit = 8 / (found.read_bytes + found.written_bytes)
    return (f"`{expression}`", f"{found.read_bytes:g}+{found.written_bytes:g} ({limit:.2f})")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, f"|{'---|' * len(header)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    page = PAGE.read_text("utf-8")
    made = generate(page)
    if made == page:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE} is stale: run python docs/generate.py.", file=sys.stderr)
        return 1
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
