"""Writes the tables that follow from the code, and the recommendations that follow from results.

    python docs/generate.py            rewrites pages and src/hipress/recommendations.json
    python docs/generate.py --check    exits with code 1 if any of them is stale

A table stands between the comments `<!-- generated: NAME -->` and `<!-- end -->`.
tests/docs/test_codec_tables.py and test_recommendations.py run the same check.
"""

from __future__ import annotations

import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hipress
from hipress import recommendations
from hipress.codecs import table
from hipress.codecs.program import ProgramCodec
from hipress.compll.passes.cost import cost
from hipress.recommendations import ADAM, SGD, SGD_MOMENTUM, UNKNOWN
from hipress.train.workloads import LARGER

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NUMEL = 1_000_000
RANDOM = ("seed", "stream", "step")
"""The state of codecs that draw random numbers."""

TRAFFIC = (
    "none", "fp16", "int8", "int4", "onebit", "onebit(ef=false)", "momentum(onebit)", "tbq",
    "terngrad", "dithering", "dgc", "topk", "topk(exact=true)", "blocktopk", "randomk",
)  # fmt: skip
"""The expressions of the table of memory traffic. bf16 moves as much as fp16, minmax as terngrad,
graddrop as topk."""


Tables = Mapping[str, Callable[[], str]]


def generate(page: str, tables: Tables) -> str:
    """Returns the page with every generated table made anew."""
    for name, make in tables.items():
        begin = f"<!-- generated: {name} -->\n"
        if page.count(begin) != 1:
            raise ValueError(f"the page must have the line {begin.strip()!r} exactly once.")
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


# --- which codec for which optimizer --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where a result is: the newest of the files, and what its row was trained with."""

    files: str
    model: str
    data: str
    optimizer: str
    sent: str
    instead: str | None = None
    """What was sent as recommended; for a warning only."""

    @property
    def codec(self) -> str:
        """The codec that was run."""
        return self.sent.rpartition(" of ")[0]

    def row(self, results: Path) -> dict[str, Any]:
        """Returns the figures, and whether they are within the criterion of the benchmark."""
        paths = sorted(results.glob(self.files))
        if not paths:
            raise ValueError(f"no file of results is called {self.files}.")
        path = paths[-1]
        found = list((_runs if path.suffix == ".jsonl" else _rows)(path))
        own, plain = self._find(found, self.sent, path), self._find(found, "uncompressed", path)
        seeds = sorted(own["scores"])
        is_loss = self.model == "gpt"
        pairs = [(own["scores"][seed], plain["scores"][seed]) for seed in seeds]
        worse = statistics.fmean(100 * (a / b - 1) if is_loss else b - a for a, b in pairs)
        later = own["later_ratio"]
        good = None if self.instead is None else self._find(found, self.instead, path)
        return {
            "within": worse <= 1.0,
            "codec": self.codec,
            "model": NAMES[self.model],
            "data": NAMES[self.data],
            "optimizer": NAMES[self.optimizer],
            "metric": "loss" if is_loss else "accuracy",
            "score": _score(own, seeds),
            "uncompressed": _score(plain, seeds),
            "recommended": None if good is None else _score(good, seeds),
            "ratio": round(own["ratio"], 2),
            "later_ratio": None if later is None else round(later, 2),
            "num_seeds": len(seeds),
            "source": path.name,
        }

    def _find(self, rows: list[dict[str, Any]], sent: str, path: Path) -> dict[str, Any]:
        key = (self.model, self.data, self.optimizer, sent)
        found = [row for row in rows if row["key"] == key]
        if len(found) != 1:
            raise ValueError(f"{path.name} has {len(found)} rows of {key}.")
        return found[0]


def _score(row: dict[str, Any], seeds: list[int]) -> float:
    """Returns the mean over some seeds; of all, from scores with more digits if they are there."""
    if row["mean"] is not None and sorted(row["scores"]) == seeds:
        return round(row["mean"], 4)
    return round(statistics.fmean(row["scores"][seed] for seed in seeds), 4)


NAMES = {
    "mlp": "perceptron",
    "cnn": "CNN",
    "resnet": "ResNet",
    "gpt": "GPT",
    "digits": "digits",
    "fashion-mnist": "Fashion-MNIST",
    "tiny-shakespeare": "tiny-shakespeare",
    "plain-sgd": "SGD",
    "sgd": "SGD with momentum 0.9",
    "adamw": "AdamW",
}
_MLP = {"model": "mlp", "data": "fashion-mnist"}
_CNN = {"model": "cnn", "data": "digits", "optimizer": "sgd"}
_GPT = {"model": "gpt", "data": "tiny-shakespeare", "optimizer": "adamw"}
_RESNET = {"model": "resnet", "data": "fashion-mnist"}
_TABLE = "convergence-2???-??-??.json"
_IN_CODEC = "momentum(onebit, mu=0.9, nesterov=false) of gradients"
_RUNS = "convergence-runs-h200-*.jsonl"

EVIDENCE = {
    SGD: [
        Evidence(
            files="convergence-plain-sgd-*.json",
            **_MLP,
            optimizer="plain-sgd",
            sent="onebit of gradients",
        )
    ],
    SGD_MOMENTUM: [
        Evidence(files="convergence-resnet-*.json", **_RESNET, optimizer="sgd", sent=_IN_CODEC),
        Evidence(files="convergence-cnn-digits-*.json", **_CNN, sent=_IN_CODEC),
    ],
    ADAM: [
        Evidence(files="convergence-gpt-*.json", **_GPT, sent="onebit of momentum"),
        Evidence(
            files="convergence-resnet-*.json",
            **_RESNET,
            optimizer="adamw",
            sent="onebit of momentum",
        ),
    ],
    UNKNOWN: [
        Evidence(files="convergence-gpt-*.json", **_GPT, sent="int8 of gradients"),
        Evidence(files=_TABLE, **_MLP, optimizer="sgd", sent="int8 of gradients"),
        Evidence(
            files="convergence-plain-sgd-*.json",
            **_MLP,
            optimizer="plain-sgd",
            sent="int8 of gradients",
        ),
    ],
}
"""What supports each recommendation; the first is the main one."""
WARNED = {
    SGD_MOMENTUM: Evidence(
        files="convergence-cnn-digits-*.json",
        **_CNN,
        sent="onebit of gradients",
        instead=_IN_CODEC,
    ),
    ADAM: Evidence(files=_RUNS, **_GPT, sent="onebit of gradients", instead="onebit of momentum"),
}
"""What supports each warning."""


def figures(results: Path = RESULTS) -> str:
    """Returns recommendations.json, made from the results of the convergence benchmark.

    Raises:
        ValueError: A result is missing, or no longer supports what is recommended or warned of.
    """
    good: dict[str, list[dict[str, Any]]] = {}
    for kind, found in EVIDENCE.items():
        codec = recommendations.recommended(kind).codec
        good[kind] = [one.row(results) | {"codec": codec} for one in found]
        for one in found:
            if hipress.codec(one.codec).name != hipress.codec(codec).name:
                raise ValueError(f"{one.codec} was run and {codec} is recommended for {kind}.")
    bad = {kind: one.row(results) for kind, one in WARNED.items()}
    for row, expected in [(r, True) for rows in good.values() for r in rows] + [
        (row, False) for row in bad.values()
    ]:
        if row.pop("within") is not expected:
            raise ValueError(
                f"{row['source']}: {row['codec']} on {row['model']} is "
                f"{'not ' if expected else ''}within 1 point or 1 % of uncompressed; change what "
                "hipress.recommendations says."
            )
    return json.dumps({"recommended": good, "warned": bad}, indent=1) + "\n"


def all_recommendations() -> str:
    return _recommendations(most=None)


def warned_pairs() -> str:
    found = json.loads(figures())["warned"]
    rows = []
    for kind, title in ((SGD_MOMENTUM, "SGD with momentum"), (ADAM, "torch's Adam or AdamW")):
        bad = recommendations.Measured(**found[kind])
        rows.append((f"{title}, `{bad.codec}`", bad.result, bad.task))
    return _table(("do not pair", "reached", "with"), rows)


def main_recommendations() -> str:
    return _recommendations(most=2)


def _recommendations(most: int | None) -> str:
    found = json.loads(figures())["recommended"]
    rows = []
    for kind, one in recommendations.RECOMMENDED.items():
        measured = [recommendations.Measured(**row) for row in found[kind]][:most]
        cells = [
            [f"`{line}`" for line in one.lines()],
            [m.fewer_bytes for m in measured],
            [m.result for m in measured],
            [m.task for m in measured],
        ]
        rows.append((one.title, *("<br>".join(cell) for cell in cells)))
    return _table(("optimizer", "write", "times fewer bytes", "reached", "with"), rows)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file of results."""
    for row in json.loads(path.read_text("utf-8"))["rows"]:
        is_plain = row["codec"] == "uncompressed"
        sent = "uncompressed" if is_plain else row.get("sent", f"{row['codec']} of gradients")
        later = row.get("ratio_out_later")
        yield {
            "key": (row.get("model", "mlp"), row["data"], row.get("optimizer", "sgd"), sent),
            "scores": dict(enumerate(row.get("losses") or row["accuracies"])),
            "mean": row.get("loss", row.get("accuracy")),
            "ratio": row["ratio_out"],
            "later_ratio": None if later == row["ratio_out"] else later,
        }


def _runs(path: Path) -> Iterator[dict[str, Any]]:
    """Yields rows of the runs in a file, those of the usual number of steps."""
    kept: dict[tuple[str, ...], dict[int, Any]] = {}
    for line in path.read_text("utf-8").splitlines():
        one = json.loads(line)
        key, run = json.loads(one["key"]), one["run"]
        task = key["task"]
        if task["num_steps"] == LARGER[task["model"], task["optimizer"]].num_steps:
            row = (task["model"], task["data"], task["optimizer"], key["form"])
            kept.setdefault(row, {})[key["seed"]] = run
    for row, runs in kept.items():
        first = next(iter(runs.values()))
        plain = next(iter(kept[(*row[:3], "uncompressed")].values()))
        later = plain["bytes_out"] / first["bytes_out_later"]
        ratio = plain["bytes_out"] / first["bytes_out"]
        yield {
            "key": row,
            "scores": {seed: run["scores"][-1] for seed, run in runs.items()},
            "mean": None,
            "ratio": ratio,
            "later_ratio": None if later == ratio else later,
        }


CODECS: Tables = {"codecs": codecs, "options": options, "traffic": traffic}
PAGES: dict[str, Tables] = {
    "docs/codecs.md": CODECS,
    "docs/pytorch.md": {"recommendations": all_recommendations, "warned": warned_pairs},
    "README.md": {"recommendations": main_recommendations},
}
"""The tables of each page."""


# --- one row of a table ---------------------------------------------------------------------------


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


def made() -> dict[Path, str]:
    """Returns every file that this program writes, as it should be."""
    pages = {ROOT / name: tables for name, tables in PAGES.items()}
    found = {path: generate(path.read_text("utf-8"), tables) for path, tables in pages.items()}
    return {**found, recommendations.FIGURES: figures()}


def main() -> int:
    stale = {
        path: text
        for path, text in made().items()
        if not path.exists() or path.read_text("utf-8") != text
    }
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is stale: run python docs/generate.py.", file=sys.stderr)
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
